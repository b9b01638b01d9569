"""Values in `extra` or in a DictState"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import pathlib
import random
import uuid
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch

from tests.client.exactness.row import EXACT, Row
from tests.support.contents import Objects


class Point(NamedTuple):
    x: Any


@dataclasses.dataclass
class Record:
    x: Any


class NamedPoint(Point):
    def __init__(self, x: int) -> None:
        self.name = "a"


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: int
    y: Any = None


@dataclasses.dataclass
class RecordDict(dict[str, int]):
    x: int


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Own:
    """Stored with encode= and decode=. Keeps a sum of its content, so that it must be made from the stored tensors."""

    def __init__(self, content: Any) -> None:
        self.content = content
        self.sum = float(content.sum()) if isinstance(content, torch.Tensor) else 0.0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return 1

    def __repr__(self) -> str:
        return f"Own({self.content!r}, {self.sum})"


def encode_point(value: Any) -> tuple[str, Any] | None:
    if isinstance(value, Own) and value.content is None:
        raise ValueError("not now")
    if isinstance(value, Colour):
        return "colour", value.name
    return ("own", value.content) if isinstance(value, Own) else None


def decode_point(name: str, content: Any) -> Any:
    return Colour[content] if name == "colour" else Own(content)


BITS: list[Any] = [
    np.random.PCG64,
    np.random.PCG64DXSM,
    np.random.MT19937,
    np.random.Philox,
    np.random.SFC64,
]


def drawn(bits: Any) -> np.random.Generator:
    generator = np.random.Generator(bits([1, 2**70]))
    generator.integers(9, dtype="u4")
    generator.spawn(2)
    return generator.spawn(1)[0] if bits is np.random.PCG64 else generator


class Seeds(np.random.SeedSequence):
    pass


def own_seeds() -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(Seeds(1)))


def drawn_random() -> random.Random:
    generator = random.Random(1)
    generator.gauss()
    return generator


def drawn_state() -> np.random.RandomState:
    generator = np.random.RandomState(1)
    generator.normal()
    return generator


def drawn_torch() -> torch.Generator:
    generator = torch.Generator().manual_seed(1)
    torch.randn(3, generator=generator)
    return generator


def cached() -> Any:
    record: Any = Record(1)
    record.cache = 2
    return record


def incomplete() -> Any:
    record = Record(1)
    del record.x
    return record


def doubled() -> list[Any]:
    value: list[Any] = []
    for _ in range(60):
        value = [value, value]
    return value


class Words(list[str]):
    pass


class Tagged(torch.Tensor):
    pass


def freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def nested_in_itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def of(dtype: torch.dtype, size_bytes: int = 16) -> torch.Tensor:
    return torch.arange(size_bytes, dtype=torch.uint8).view(dtype)


def newer_dtype(name: str) -> torch.dtype:
    if not hasattr(torch, name):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    return getattr(torch, name)


ROWS = [
    Row("`None`", EXACT, lambda: None),
    Row("`bool`", EXACT, lambda: [True, False]),
    Row("`int` of any size", EXACT, lambda: [0, -1, 2**63, -(2**70), 10**5000]),
    Row("`float` with infinities, -0.0 and subnormals", EXACT, lambda: [0.1, -0.0, float("-inf"), 5e-324]),
    Row("`float` NaN with its sign", EXACT, lambda: [float("nan"), -float("nan")]),
    Row("`complex`", EXACT, lambda: [1 + 2j, complex(float("nan"), -0.0)]),
    Row("`str` with any characters", EXACT, lambda: ["", "ä→ü", "a\0b", "\n", "\ud800"]),
    Row("`bytes`", EXACT, lambda: b"\0\xff"),
    Row("`bytearray`", EXACT, lambda: bytearray(b"\0\xff")),
    Row("`list`, nested", EXACT, lambda: [1, [2.0, ["x"]], []]),
    Row("`tuple`", EXACT, lambda: (1, (2,), ())),
    Row("`set` and `frozenset`", EXACT, lambda: [{1, "a", (2,)}, frozenset({3})]),
    Row("`dict` with keys of any of these types", EXACT, lambda: {1: "a", (2, "b"): {None: 3}, False: 4, b"c": 5}),
    Row("`dict` with keys that look like tags", EXACT, lambda: {"$tensor": "x", "": {"$": torch.ones(2)}}),
    Row("`dict` with keys that make the same path", EXACT, lambda: {"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}}),
    Row(
        "`dict` with the key `a#2`",
        EXACT,
        lambda: {"a.b": torch.ones(1), "a": {"b": torch.zeros(1), "b#2": of(torch.int8)}},
    ),
    Row("`dict` with keys that end like a rank", EXACT, lambda: {"a@00000": torch.ones(1), "a": torch.zeros(1)}),
    Row("`dict` with the key `__metadata__`", EXACT, lambda: {"__metadata__": torch.ones(2)}),
    Row("`OrderedDict`", EXACT, lambda: collections.OrderedDict(b=1, a=2)),
    Row("`Counter`", EXACT, lambda: collections.Counter("aab")),
    Row(
        "`defaultdict` of `int`, `float`, `list`, `dict`, `set` or None",
        EXACT,
        lambda: collections.defaultdict(list, a=[1]),
    ),
    Row(
        "`defaultdict` with another factory",
        "collections.defaultdict has no safe form",
        lambda: collections.defaultdict(lambda: 1),
    ),
    Row("`deque` with its maxlen", EXACT, lambda: collections.deque([1, torch.ones(2)], 3)),
    Row("`ChainMap`", "collections.ChainMap has no safe form", collections.ChainMap),
    Row(
        "`date`, `time` and `datetime`",
        EXACT,
        lambda: [datetime.date(2020, 2, 29), datetime.time(1, 2), datetime.datetime(2020, 1, 1, 1, 1, 1, 7)],
    ),
    Row(
        "`datetime` in UTC or with an offset",
        EXACT,
        lambda: datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=2))),
    ),
    Row(
        "`datetime` with a named zone",
        "datetime.datetime has no safe form",
        lambda: datetime.datetime(2020, 1, 1, tzinfo=ZoneInfo("UTC")),
    ),
    Row("`datetime` with fold", "datetime.datetime has no safe form", lambda: datetime.datetime(2020, 1, 1, fold=1)),
    Row("`timedelta`", EXACT, lambda: datetime.timedelta(-1, 2, 3)),
    Row("`Decimal`", EXACT, lambda: [decimal.Decimal("0.10"), decimal.Decimal("sNaN12"), decimal.Decimal("-0")]),
    Row("`Fraction`", "fractions.Fraction has no safe form", lambda: fractions.Fraction(1, 3)),
    Row("`Path`", EXACT, lambda: pathlib.Path("a/../b")),
    Row("`PurePosixPath`", "pathlib.PurePosixPath has no safe form", lambda: pathlib.PurePosixPath("a")),
    Row("`UUID`", "uuid.UUID has no safe form", lambda: uuid.UUID(int=1)),
    Row("`Enum`, where the live value is of its class", EXACT, lambda: Colour.RED, fresh=lambda: Colour.BLUE),
    Row(
        "`IntEnum`, `Flag` and a combination of flags",
        EXACT,
        lambda: [Level.LOW, Access.READ, Access.READ | Access.WRITE],
        fresh=lambda: [Level.HIGH, Access.WRITE, Access.WRITE],
    ),
    Row(
        "`Enum` as a key or in a set", "a restore takes the class of a Colour from the live value", lambda: {Colour.RED}
    ),
    Row(
        "`namedtuple` with tensors, where the live value is of its class",
        EXACT,
        lambda: {"at": [Point(torch.ones(2)), Point((1, 2))]},
        fresh=lambda: {"at": [Point(torch.zeros(2)), Point(3)]},
    ),
    Row(
        "`namedtuple` with attributes of its own",
        "NamedPoint has no safe form",
        lambda: NamedPoint(1),
    ),
    Row(
        "dataclass, nested, with tensors, where the live value is of its class",
        EXACT,
        lambda: Record(Record([Colour.RED, torch.ones(2)])),
        fresh=lambda: Record(Record([Colour.BLUE, torch.zeros(2)])),
    ),
    Row("frozen dataclass with slots", EXACT, lambda: Frozen(1, Point(2)), fresh=lambda: Frozen(3, Point(4))),
    Row("dataclass with an attribute that is no field", "this Record has cache beside its fields", cached),
    Row("dataclass without the value of a field", "has no value of its field x", incomplete),
    Row("dataclass that is a `dict`", "RecordDict has no safe form", lambda: RecordDict(1)),
    Row(
        "own class with `encode=` and `decode=`, with tensors",
        EXACT,
        lambda: [Own(torch.ones(2)), {Colour.RED: Own(Own(1))}],
    ),
    Row("own class for which `encode=` returns None", "object has no safe form", object),
    Row("own class for which `encode=` raises", "encode= raised ValueError: not now", lambda: Own(None)),
    Row("subclass of `list`", "Words has no safe form", Words),
    Row("`range` and `slice`", "builtins.range has no safe form", lambda: range(3)),
    Row("`memoryview`", "builtins.memoryview has no safe form", lambda: memoryview(b"a")),
    Row("function", "builtins.function has no safe form", lambda: lambda: 1),
    Row("`functools.partial`", "functools.partial has no safe form", lambda: functools.partial(int)),
    Row("class", "builtins.type has no safe form", lambda: torch.nn.Linear),
    Row("object without state_dict", "builtins.object has no safe form", object),
    Row("iterator", "builtins.list_iterator has no safe form", lambda: iter([1])),
    Row("list that contains itself", "nested deeper than 64", nested_in_itself),
    Row("list that contains a list twice, 60 levels deep", "would repeat more than 500000 values", doubled),
    Row("`random.Random`", EXACT, drawn_random, fresh=random.Random),
    Row("subclass of `random.Random`", "random.SystemRandom has no safe form", random.SystemRandom),
    Row(
        "`numpy.random.Generator` of any bit generator, with what it has spawned",
        EXACT,
        lambda: [drawn(kind) for kind in BITS],
        fresh=lambda: [np.random.Generator(kind(3)) for kind in BITS],
    ),
    Row("`numpy.random.Generator` with seeds of a class of its own", "of PCG64 and Seeds", own_seeds),
    Row("`numpy.random.RandomState`", EXACT, drawn_state, fresh=lambda: np.random.RandomState(5)),
    Row("`torch.Generator`", EXACT, drawn_torch, fresh=torch.Generator),
    Row("generators where the live state has none", EXACT, lambda: [drawn_torch(), drawn_random(), drawn_state()]),
    Row("array of floats", EXACT, lambda: np.array([[1.5, np.nan], [np.inf, -0.0]])),
    Row("array of float16", EXACT, lambda: np.array([1.5], "f2")),
    Row(
        "array or scalar of longdouble",
        "has another form on other processors",
        lambda: np.array([1, 2], np.longdouble) / 3,
    ),
    Row(
        "array of integers, signed or not",
        EXACT,
        lambda: [np.arange(3, dtype=kind) for kind in ("i1", "i2", "i8", "u2", "u4", "u8")],
    ),
    Row("array of bool", EXACT, lambda: np.array([True, False])),
    Row("array of complex64 or complex128", EXACT, lambda: [np.array([1 + 2j], "c8"), np.array([1 + 2j], "c16")]),
    Row("array of the other byte order", EXACT, lambda: np.arange(3, dtype=">i4")),
    Row("array of text or bytes", EXACT, lambda: [np.array(["ä", "bc"]), np.array([b"a", b"bc"])]),
    Row(
        "array of dates or durations",
        EXACT,
        lambda: [np.array(["2020-01-01", "NaT"], "M8[D]"), np.array([3], "m8[25s]")],
    ),
    Row(
        "array with strides, empty, or of no dimension",
        EXACT,
        lambda: [np.arange(6).reshape(2, 3).T, np.arange(4)[::-2], np.zeros((0, 3)), np.array(1)],
    ),
    Row("array of objects", "numpy dtype object has no safe form", lambda: np.array([None])),
    Row("array of records", "has no safe form", lambda: np.zeros(2, "i4,f4")),
    Row("array of numpy's StringDType", "has no safe form", lambda: np.array(["a"], np.dtypes.StringDType())),
    Row("masked array", "a MaskedArray would be restored as a plain array", lambda: np.ma.masked_array([1, 2], [0, 1])),
    Row("`numpy.recarray`", "a recarray would be restored as a plain array", lambda: np.rec.array([(1, 2)])),
    Row(
        "numpy scalars",
        EXACT,
        lambda: [np.float32("nan"), np.int64(1), np.bool_(True), np.datetime64("NaT"), np.complex64(1j)],
    ),
    Row(
        "`numpy.str_` and `numpy.bytes_`, empty too",
        EXACT,
        lambda: [np.str_(""), np.str_("a\0"), np.bytes_(b""), np.bytes_(b"a\0")],
    ),
    Row("`numpy.void`", "has no safe form", lambda: np.void(b"ab")),
    Row("`numpy.dtype`", "has no safe form", lambda: np.dtype("f4")),
    Row(
        "tensor of float64, float32, float16 or bfloat16",
        EXACT,
        lambda: [of(torch.float64), of(torch.float32), of(torch.float16), of(torch.bfloat16)],
    ),
    Row("tensor of float8_e4m3fn or float8_e5m2", EXACT, lambda: [of(torch.float8_e4m3fn), of(torch.float8_e5m2)]),
    Row(
        "tensor of signed integers", EXACT, lambda: [of(torch.int8), of(torch.int16), of(torch.int32), of(torch.int64)]
    ),
    Row(
        "tensor of unsigned integers",
        EXACT,
        lambda: [of(torch.uint8), of(torch.uint16), of(torch.uint32), of(torch.uint64)],
    ),
    Row("tensor of bool", EXACT, lambda: torch.tensor([True, False])),
    Row("tensor of complex64", EXACT, lambda: of(torch.complex64)),
    Row("tensor of complex128 or complex32", EXACT, lambda: [of(torch.complex128), of(torch.complex32)]),
    Row(
        "tensor of complex128 with strides, empty or of no dimension",
        EXACT,
        lambda: [of(torch.complex128, 96).reshape(2, 3).t(), of(torch.complex128)[:0], of(torch.complex128)[0]],
    ),
    Row("conjugated view of complex128", "a conjugated view of torch.complex128", lambda: of(torch.complex128).conj()),
    Row(
        "tensor of float8_e4m3fnuz or float8_e5m2fnuz",
        EXACT,
        lambda: [of(torch.float8_e4m3fnuz), of(torch.float8_e5m2fnuz)],
    ),
    Row("tensor of float8_e8m0fnu (scales of MX formats)", EXACT, lambda: of(newer_dtype("float8_e8m0fnu"))),
    Row("tensor of float4_e2m1fn_x2 (two in a byte)", EXACT, lambda: of(newer_dtype("float4_e2m1fn_x2"))),
    Row("tensor of bits8", "safetensors has no dtype for torch.bits8", lambda: of(torch.bits8)),
    Row("tensor of no dimension, or empty", EXACT, lambda: [torch.tensor(3.0), torch.ones(2, 0, 3)]),
    Row(
        "tensor with strides: transposed, sliced, channels_last",
        EXACT,
        lambda: [
            torch.rand(3, 4).t(),
            torch.rand(9)[::2],
            torch.rand(1, 2, 3, 3).to(memory_format=torch.channels_last),
        ],
    ),
    Row("conjugated or negated view", EXACT, lambda: [of(torch.complex64).conj(), of(torch.complex64).conj().imag]),
    Row("tensor made in inference mode", EXACT, torch.inference_mode()(lambda: torch.rand(2, 3).t())),
    Row("tensor that requires a gradient", EXACT, lambda: torch.ones(2, requires_grad=True)),
    Row(
        "`nn.Parameter`, trained or frozen",
        EXACT,
        lambda: [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2), requires_grad=False)],
    ),
    Row("one tensor under several keys", EXACT, lambda: [torch.ones(2)] * 2),
    Row("expanded tensor", "several elements share one memory location", lambda: torch.ones(1, 3).expand(4, 3)),
    Row(
        "tensor with overlapping strides",
        "several elements share one memory location",
        lambda: torch.ones(6).as_strided((3, 3), (1, 1)),
    ),
    Row("sparse COO tensor", "of layout torch.sparse_coo", lambda: torch.eye(2).to_sparse()),
    Row("sparse CSR tensor", "of layout torch.sparse_csr", lambda: torch.eye(2).to_sparse_csr()),
    Row("MKL-DNN tensor", "of layout torch._mkldnn", lambda: torch.eye(2).to_mkldnn()),
    Row("quantized tensor", "dtype torch.qint8", lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)),
    Row("nested tensor", "keep their dense parts", lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
    Row(
        "jagged nested tensor",
        "a NestedTensor would be restored as a plain tensor",
        lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
    ),
    Row("meta tensor", "a meta tensor has no bytes", lambda: torch.empty(2, device="meta")),
    Row("tensor whose memory was freed", "the memory of this tensor was freed", freed),
    Row(
        "subclass of `torch.Tensor`",
        "a Tagged would be restored as a plain tensor",
        lambda: torch.ones(2).as_subclass(Tagged),
    ),
    Row("`torch.Size`", EXACT, lambda: torch.Size([2, 3])),
    Row("`torch.dtype`", EXACT, lambda: [torch.bfloat16, torch.quint8]),
    Row("`torch.device`", EXACT, lambda: [torch.device("cuda:1"), torch.device("cpu")]),
    Row("`torch.memory_format`", "torch.memory_format has no safe form", lambda: torch.channels_last),
    Row(
        "named result of torch, such as that of `torch.max`",
        "torch.return_types.max has no safe form",
        lambda: torch.ones(2).max(0),
    ),
]


def build(row: Row, seed: int, rank: int) -> Objects:
    torch.default_generator.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    fresh = row.fresh or (lambda: "another")
    hooks = {"encode": encode_point, "decode": decode_point} if row.name.startswith("own class") else {}
    return Objects(model=model, extra={"value": row.make() if seed == 0 else fresh()}, options=hooks)
