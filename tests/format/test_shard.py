"""The shard format: golden bytes, other readers, and forged bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierd.errors import Corrupt, NewerFormat, TierdError, Unsupported
from tierd.format import shard
from tierd.format.shard import HeaderOverflow, TensorSpec, parse_header, plan_layout

GOLDEN = Path(__file__).parents[1] / "golden" / "golden" / "000000000005-g0003"
GOLDEN_SHARD = GOLDEN / "rank-00000-of-00001.safetensors"

METADATA = {
    "format_version": 1,
    "run": "golden",
    "step": 5,
    "generation": 3,
    "rank": 0,
    "world_size": 1,
    "state": {"note": {"$tuple": [1, None, {"$float": "nan"}]}, "text": "é"},
}
TENSORS = {
    "model.body.weight": torch.tensor([[0, 1, 2], [-3.5, 4, 5]]),
    "model.brain": torch.tensor([1.0, -2.0, float("nan")], dtype=torch.bfloat16),
    "model.count": torch.tensor([-1, 2**40]),
    "model.empty": torch.empty(0, 4, dtype=torch.float16),
    "model.mask": torch.tensor([True, False, True]),
    "model.scale": torch.tensor(0.25),
}


def spec(name: str, dtype: str, *shape: int, at: tuple[int, ...] | None = None) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape, saved_offsets=at or (0,) * len(shape))


GOLDEN_SPECS = [
    spec("model.body.weight", "F32", 2, 3),
    spec("model.brain", "BF16", 3),
    spec("model.count", "I64", 2),
    spec("model.empty", "F16", 0, 4),
    spec("model.mask", "BOOL", 3),
    spec("model.scale", "F32"),
]


# ── golden ──


def test_an_encoded_header_equals_the_golden_bytes() -> None:
    raw = GOLDEN_SHARD.read_bytes()
    layout = plan_layout(GOLDEN_SPECS, METADATA)
    assert layout.encode_header(METADATA) == raw[: layout.header_bytes]
    assert layout.size_bytes == len(raw)


def test_the_golden_shard_is_parsed() -> None:
    raw = GOLDEN_SHARD.read_bytes()
    parsed = parse_header(raw, len(raw), where="golden")
    assert parsed.tierd == METADATA
    assert parsed.header_bytes == 8192
    assert list(parsed.tensors) == [
        "model.count", "model.body.weight", "model.scale", "model.brain", "model.empty", "model.mask",
    ]  # fmt: skip
    for name, entry in parsed.tensors.items():
        assert raw[entry.offset : entry.offset + entry.size_bytes] == _bytes(TENSORS[name])
        assert entry.shape == tuple(TENSORS[name].shape)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_the_safetensors_library_reads_the_golden_shard() -> None:
    from safetensors.torch import load_file

    parsed = load_file(GOLDEN_SHARD)
    assert parsed.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert parsed[name].dtype == tensor.dtype
        assert _bytes(parsed[name]) == _bytes(tensor)


@pytest.mark.filterwarnings("ignore")  # torch warns that there is no process group
def test_pytorch_without_tierd_loads_the_golden_checkpoint() -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    into = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    dcp.load(into, storage_reader=HuggingFaceStorageReader(str(GOLDEN)), no_dist=True)
    for name, tensor in TENSORS.items():
        assert _bytes(into[name]) == _bytes(tensor)


# ── the layout ──


dtypes = st.sampled_from(sorted(shard.DTYPE_BYTES))
specs = st.lists(
    st.builds(
        lambda name, dtype, box: TensorSpec(
            name=name, dtype=dtype, shape=tuple(size for size, _ in box), saved_offsets=tuple(at for _, at in box)
        ),
        st.text(max_size=8).filter(lambda name: name != "__metadata__"),
        dtypes,
        st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=3),
    ),
    max_size=8,
    unique_by=lambda tensor: tensor.name,
)


@settings(deadline=None)
@given(specs, st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=9), max_size=3))
def test_every_layout_is_parsed_back_and_is_aligned_and_without_holes(
    tensors: list[TensorSpec], state: dict[str, Any]
) -> None:
    tierd = {"format_version": 1, "state": state}
    layout = plan_layout(tensors, tierd)
    header = layout.encode_header(tierd)
    assert len(header) == layout.header_bytes
    assert layout.header_bytes % 4096 == 0
    parsed = parse_header(header, layout.size_bytes, where="a test")
    assert parsed.tierd == tierd
    assert list(parsed.tensors.values()) == list(layout.tensors)
    end = layout.header_bytes
    for entry in layout.tensors:
        assert entry.offset == end
        assert entry.offset % shard.DTYPE_BYTES[entry.dtype] == 0
        end += entry.size_bytes
    assert end == layout.size_bytes
    assert {(tensor.name, tensor.dtype, tensor.shape, tensor.saved_offsets) for tensor in tensors} == {
        (entry.name, entry.dtype, entry.shape, entry.saved_offsets) for entry in layout.tensors
    }


def test_offsets_do_not_change_while_the_metadata_fits_and_then_a_new_layout_is_needed() -> None:
    def tierd(digits: int) -> dict[str, Any]:
        return {"format_version": 1, "state": "9" * digits}

    layout = plan_layout(GOLDEN_SPECS, tierd(100))
    assert len(layout.encode_header(tierd(4000))) == layout.header_bytes
    with pytest.raises(HeaderOverflow) as overflow:
        layout.encode_header(tierd(20_000))
    assert overflow.value.needed_bytes > layout.header_bytes
    assert len(plan_layout(GOLDEN_SPECS, tierd(20_000)).encode_header(tierd(20_000))) > 20_000


def test_a_dtype_without_a_safetensors_name_is_refused_with_the_tensors_name() -> None:
    with pytest.raises(Unsupported, match=r"extra\.wide"):
        plan_layout([spec("extra.wide", "C128", 1)], {})


def test_a_header_that_other_readers_would_refuse_is_refused() -> None:
    with pytest.raises(Unsupported, match="header would take"):
        plan_layout([], {"state": "x" * 60_000_000})


# ── forged bytes ──


def _forged(change: Callable[[dict[str, Any]], object], payload: int = 4) -> bytes:
    """A shard of one F32 tensor `x`, with a changed header."""
    table: dict[str, Any] = {
        "__metadata__": {
            "DCP_SHARDING_INFO": json.dumps({"x": {"saved_offsets": [0]}}),
            "tierd": json.dumps({"format_version": 1}),
        },
        "x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
    }
    change(table)
    body = json.dumps(table).encode()
    return struct.pack("<Q", len(body)) + body + bytes(payload)


def _parse(raw: bytes) -> shard.Shard:
    return parse_header(raw, len(raw), where="forged")


def test_the_unchanged_template_of_the_forgeries_is_valid() -> None:
    assert _parse(_forged(lambda table: None)).tensors["x"].size_bytes == 4


FORGERIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "negative size": lambda t: t["x"].update(shape=[-1], data_offsets=[0, -4]),
    "size too large for the file": lambda t: t["x"].update(shape=[2], data_offsets=[0, 8]),
    "shape does not fit": lambda t: t["x"].update(shape=[3]),
    "huge shape": lambda t: t["x"].update(shape=[1 << 62, 1 << 62]),
    "hole": lambda t: t["x"].update(data_offsets=[1, 5]),
    "bytes left over": lambda t: t["x"].update(shape=[0], data_offsets=[0, 0]),
    "overlap": lambda t: t.update(y=t["x"]),
    "unknown dtype": lambda t: t["x"].update(dtype="F4"),
    "boolean for a number": lambda t: t["x"].update(shape=[True]),
    "float for a number": lambda t: t["x"].update(shape=[1.0]),
    "text for a number": lambda t: t["x"].update(data_offsets="04"),
    "65 dimensions": lambda t: t["x"].update(shape=[1] * 65),
    "no metadata": lambda t: t.pop("__metadata__"),
    "metadata without tierd": lambda t: t.update(__metadata__={"format": "pt"}),
    "tensor is a number": lambda t: t.update(x=3),
    "offsets missing": lambda t: t["__metadata__"].update(DCP_SHARDING_INFO="{}"),
    "offsets of another rank": lambda t: t["__metadata__"].update(DCP_SHARDING_INFO='{"x": {"saved_offsets": [0, 0]}}'),
    "negative offset": lambda t: t["__metadata__"].update(DCP_SHARDING_INFO='{"x": {"saved_offsets": [-1]}}'),
    "metadata is not JSON": lambda t: t["__metadata__"].update(tierd="{"),
    "metadata is a list": lambda t: t["__metadata__"].update(tierd="[]"),
    "version is text": lambda t: t["__metadata__"].update(tierd='{"format_version": "1"}'),
    "deep": lambda t: t["__metadata__"].update(
        tierd='{"format_version": 1, "s": ' + "[" * 100_000 + "]" * 100_000 + "}"
    ),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_header_is_corrupt(name: str) -> None:
    with pytest.raises(Corrupt, match="forged"):
        _parse(_forged(FORGERIES[name]))


@pytest.mark.parametrize("shape", [[0, 1 << 63], [10**4000] * 64])
def test_a_size_beyond_int64_is_refused_before_it_is_multiplied(shape: list[int]) -> None:
    def change(table: dict[str, Any]) -> None:
        sharding = {"x": {"saved_offsets": [0] * len(shape)}}
        table["__metadata__"].update(DCP_SHARDING_INFO=json.dumps(sharding))
        table["x"].update(shape=shape, data_offsets=[0, 0])

    with pytest.raises(Corrupt, match=r"x: sizes and offsets must be integers of 0 to 2\*\*63 - 1"):
        _parse(_forged(change, payload=0))


def test_a_key_that_appears_twice_is_corrupt() -> None:
    body = _forged(lambda table: None)[8:-4].replace(b'"x": {"dtype"', b'"x": {}, "x": {"dtype"')
    with pytest.raises(Corrupt, match="twice"):
        _parse(struct.pack("<Q", len(body)) + body + bytes(4))


def test_a_later_version_of_a_shard_is_refused() -> None:
    forged = _forged(lambda t: t["__metadata__"].update(tierd='{"format_version": 2}'))
    with pytest.raises(NewerFormat, match="version 2"):
        _parse(forged)


@pytest.mark.parametrize("raw", [b"", b"\0" * 7, b"\0" * 8, b"\xff" * 64, struct.pack("<Q", 100) + b"{}"])
def test_a_file_that_is_shorter_than_its_header_is_corrupt(raw: bytes) -> None:
    with pytest.raises(Corrupt):
        _parse(raw)


def test_a_header_that_is_too_long_is_refused_before_it_is_read() -> None:
    with pytest.raises(Corrupt, match="header of"):
        shard.header_length(struct.pack("<Q", 1 << 40), 1 << 50, where="forged")


@settings(deadline=None)
@given(st.data())
def test_flipped_header_bytes_give_a_shard_or_a_tierd_error(data: st.DataObject) -> None:
    raw = bytearray(GOLDEN_SHARD.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, 1400))] = data.draw(st.integers(0, 255))
    try:
        parsed = _parse(bytes(raw))
    except TierdError:
        return
    assert all(0 <= entry.offset <= entry.offset + entry.size_bytes <= len(raw) for entry in parsed.tensors.values())
