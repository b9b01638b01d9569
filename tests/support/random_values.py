"""Random tensors, arrays and Python values, of types that a checkpoint stores and of types that it must refuse.

`Source` draws what a value is from one generator and its bits from another, so two states can have one structure and
different values.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import math
import pathlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.complex128, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
)  # fmt: skip
REFUSED_DTYPES = (torch.bits8, torch.bits1x8)
SHAPES = ((), (1,), (3,), (0,), (2, 0, 3), (4, 3), (2, 3, 2, 2), (70, 2), (1, 1))
KEYS = (
    "a", "b", "a.b", "a.b#2", "a#2", "b@00001", "@00000", "@00001#2", "$tensor", "$", "__metadata__", "", ".", "[0]",
    "a[0]", "ä→ü", "module", "weight", "net", "net.weight", "net.weight@00000", "\ud800", "line\nbreak", "x" * 300,
)  # fmt: skip
FLOATS = (0.0, -0.0, 1.5, math.inf, -math.inf, math.nan, -math.nan, 5e-324, 0.1)
INTS = (0, 1, -1, 2**63, -(2**64), 10**40, 10**5000)
NUMPY_DTYPES = (
    "<f8", ">f8", "<f4", "<f2", "<i8", ">i4", "<u2", "|u1", "|b1", "<c8", "<c16", "<U3", "|S4", "<M8[ns]", "<m8[25s]",
)  # fmt: skip


class Stateful:
    """An object whose state is any value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = value


class Source:
    """Draws values. `structure` decides their types, shapes and keys, `content` their bits."""

    def __init__(self, structure: int, content: int) -> None:
        self.structure = random.Random(structure)
        self.content = random.Random(content)

    def chance(self, probability: float) -> bool:
        return self.structure.random() < probability

    def bytes_of(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A contiguous tensor of any bits."""
        count = math.prod(shape)
        if dtype is torch.bool:
            return torch.tensor([self.content.random() < 0.5 for _ in range(count)], dtype=dtype).reshape(shape)
        raw = self.content.randbytes(max(count, 1) * dtype.itemsize)
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype)[:count].reshape(shape)

    def tensor(self, *, refused: float = 0.03) -> torch.Tensor:
        if self.chance(refused):
            return self.refused_tensor()
        tensor = self.bytes_of(self.structure.choice(DTYPES), self.structure.choice(SHAPES))
        form = self.structure.randrange(9)
        if form == 0 and tensor.dim() > 1:
            return tensor.transpose(0, 1)
        if form == 1 and tensor.dim() == 4:
            return tensor.to(memory_format=torch.channels_last) if tensor.dtype in (torch.float32,) else tensor
        if form == 2 and tensor.dim():
            return tensor[::2]
        if form == 3 and tensor.dim():
            return tensor[1:]
        if form == 4 and tensor.dtype is torch.complex64:
            return tensor.conj() if self.chance(0.5) else tensor.conj().imag
        if form == 5 and tensor.dtype.is_floating_point:
            return torch.nn.Parameter(tensor, requires_grad=self.chance(0.5))
        if form == 6 and tensor.dtype.is_floating_point:
            return tensor.requires_grad_()
        return tensor

    def refused_tensor(self) -> torch.Tensor:
        plain = torch.ones(2, 3)
        freed = torch.ones(4)
        freed.untyped_storage().resize_(0)
        return self.structure.choice(
            [
                plain[:1].expand(4, 3),
                plain.as_strided((3, 3), (1, 1)),
                plain.to_sparse(),
                plain.to_sparse_csr(),
                torch.quantize_per_tensor(plain, 0.1, 0, torch.qint8),
                torch.empty(2, device="meta"),
                torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
                freed,
                self.bytes_of(self.structure.choice(REFUSED_DTYPES), (2,)),
            ]
        )

    def array(self) -> Any:
        dtype = np.dtype(self.structure.choice(NUMPY_DTYPES))
        shape = self.structure.choice(SHAPES)
        count = max(1, math.prod(shape))
        if dtype.kind in "US":
            texts = [self.content.choice(["", "a", "ä" if dtype.kind == "U" else "b", "a b"]) for _ in range(count)]
            array = np.array(texts, dtype=dtype)
        elif dtype.kind == "b":
            array = np.array([self.content.randrange(2) for _ in range(count)]).astype(dtype)
        else:
            array = np.frombuffer(self.content.randbytes(count * dtype.itemsize), dtype=dtype).copy()
        array = array[: math.prod(shape)].reshape(shape)
        form = self.structure.randrange(6)
        if form == 0:
            return array.T
        if form == 1 and array.ndim:
            return array[::-1]
        if form == 2 and array.size:
            return array.reshape(-1)[0]  # a scalar
        return array

    def refused_value(self) -> Any:
        values: list[Callable[[], Any]] = [
            object, lambda: range(4), lambda: range(3), lambda: ..., lambda: int, lambda: torch.nn.Linear,
            lambda: memoryview(b"ab"), lambda: np.ma.masked_array([1, 2], [0, 1]), lambda: np.array([object()]),
            lambda: np.zeros(2, "i4,f4"), lambda: np.longdouble(1), lambda: slice(2), lambda: np.void(b"abc"),
            lambda: datetime.datetime(2020, 1, 1, fold=1), lambda: pathlib.PurePosixPath("a"), lambda: slice(1),
            lambda: collections.defaultdict(lambda: 1), lambda: slice(3), lambda: len,
            lambda: collections.UserDict(a=1), lambda: torch.max(torch.ones(2), 0), lambda: "a\0b", lambda: slice(0),
        ]  # fmt: skip
        return self.structure.choice(values)()

    def scalar(self) -> Any:
        content = self.content
        values: list[Callable[[], Any]] = [
            lambda: None,
            lambda: content.random() < 0.5,
            lambda: content.choice(INTS[:-1]),
            lambda: content.choice(FLOATS),
            lambda: content.choice(FLOATS),
            lambda: complex(content.choice(FLOATS), content.choice(FLOATS)),
            lambda: content.choice(["", "text", "ä→ü", "$tensor", "nan"]),
            lambda: content.randbytes(content.randrange(5)),
            lambda: bytearray(content.randbytes(content.randrange(5))),
            lambda: datetime.date(2020, 1, content.randrange(1, 29)),
            lambda: datetime.datetime(2020, 1, 2, 3, 4, 5, content.randrange(1000000)),
            lambda: datetime.datetime(2020, 1, 2, tzinfo=datetime.UTC),
            lambda: datetime.timedelta(content.randrange(-5, 5), 7, 8),
            lambda: decimal.Decimal(content.choice(["0.10", "-0", "NaN", "sNaN12", "1E+7", "Infinity"])),
            lambda: pathlib.Path(content.choice(["", "/a", "b/../c"])),
            lambda: content.choice([torch.float32, torch.quint8]),
            lambda: torch.device(content.choice(["cpu", "cuda:1", "meta"])),
            lambda: torch.Size([content.randrange(5)]),
            lambda: np.str_(content.choice(["", "a", "ä"])),
            lambda: np.bytes_(content.choice([b"", b"a", b"bc"])),
            lambda: np.float32(content.choice(FLOATS[:-3])),
            lambda: np.int64(content.randrange(9)),
            lambda: np.bool_(content.random() < 0.5),
            lambda: np.datetime64("NaT"),
            lambda: random.Random(content.randrange(1000)),
            lambda: np.random.default_rng(content.randrange(1000)),
        ]
        return self.structure.choice(values)()

    def key(self) -> str:
        return self.structure.choice(KEYS)

    def value(self, depth: int = 0, *, refused: float = 0.02) -> Any:
        """A value of any type, nested to a depth of at most 3."""
        if self.chance(refused):
            return self.refused_value()
        kind = self.structure.randrange(15 if depth < 3 else 6)
        count = self.structure.randrange(4)
        if kind < 2:
            return self.tensor(refused=refused)
        if kind == 2:
            return self.array()
        if kind < 6:
            return self.scalar() if not self.chance(refused) else INTS[-1]
        if kind < 9:
            return {self.key(): self.value(depth + 1, refused=refused) for _ in range(count)}
        if kind == 9:
            keys = [1, True, 2.5, None, (1, "a"), b"k", np.int64(7), torch.float16, "text", math.nan]
            return {self.structure.choice(keys): self.value(depth + 1, refused=refused) for _ in range(count)}
        if kind == 10:
            return {self.structure.choice([1, "a", b"b", (2,), None, 2.5]) for _ in range(count)}
        items = [self.value(depth + 1, refused=refused) for _ in range(count)]
        if kind == 11:
            return self.structure.choice([tuple, list])(items)
        if kind == 12:
            return collections.deque(items, self.structure.choice([None, 3, 9]))
        named = dict(zip("abc", items, strict=False))
        if kind == 13:
            return collections.OrderedDict(named)
        return self.structure.choice([collections.defaultdict(list, named), collections.Counter(aab=2), items])
