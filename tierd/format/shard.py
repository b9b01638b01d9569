"""One rank's file: a valid safetensors file whose payload begins at a multiple of 4096.

    u64 little-endian header length | JSON header, padded with spaces | tensors without holes

Tensors are sorted by descending element size, then by name, so each is aligned to its element size. The header area
is planned once with slack, so payload offsets do not change from snapshot to snapshot while the metadata does.
Format: https://github.com/huggingface/safetensors#format. The parser checks every field.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from tierd.errors import Corrupt, NewerFormat, Unsupported

FORMAT_VERSION = 1
ALIGN_BYTES = 4096  # a page; O_DIRECT needs this alignment
HEADER_BYTES_MAX = 100_000_000  # the safetensors library refuses longer headers
NDIM_MAX = 64
INT64_MAX = (1 << 63) - 1  # the product of 64 sizes without a bound takes a second for 2.5 MB of header
_LENGTH = struct.Struct("<Q")
_INT = frozenset({int})  # a bool is an int for isinstance


def round_up(size_bytes: int) -> int:
    """The next multiple of ALIGN_BYTES."""
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


DTYPE_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
}  # fmt: skip
"""The safetensors dtypes that tierd writes and reads, and their element size in bytes."""


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The local part of a tensor: its shape, and its offsets in the global tensor (in elements, one per dimension).

    `torch_dtype` names torch's dtype where safetensors has none for it: `dtype` and `shape` then describe how the
    elements are stored, as in FORMAT.md.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    saved_offsets: tuple[int, ...]
    torch_dtype: str = ""

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class TensorEntry(TensorSpec, frozen=True, kw_only=True, gc=False):
    """A tensor in a shard: its bytes are `[offset, offset + size_bytes)` of the file, C-contiguous, little-endian."""

    offset: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The positions of everything in a shard. `header_bytes` includes the 8 bytes of the length."""

    tensors: tuple[TensorEntry, ...]
    header_bytes: int
    size_bytes: int
    _torch_dtypes: dict[str, str]
    _before: bytes  # the header's JSON up to the value of `tierd`
    _after: bytes  # and behind it

    def encode_header(self, tierd: dict[str, Any]) -> bytes:
        """The first `header_bytes` bytes of the file. Raises HeaderOverflow when the metadata does not fit."""
        tierd = _with_dtypes(tierd, self._torch_dtypes)
        body = b"%b%b%b" % (self._before, json.dumps(_dump(tierd)).encode(), self._after)
        room = self.header_bytes - _LENGTH.size
        if len(body) > room:
            raise HeaderOverflow(len(body))
        return _LENGTH.pack(room) + body.ljust(room, b" ")


class HeaderOverflow(Exception):
    """The header needs `needed_bytes` and no longer fits its area: plan a new layout."""

    def __init__(self, needed_bytes: int) -> None:
        super().__init__(needed_bytes)
        self.needed_bytes = needed_bytes


@dataclass(frozen=True, slots=True)
class Shard:
    """A parsed header: the tensors by name, and the `tierd` metadata."""

    tensors: dict[str, TensorEntry]
    header_bytes: int
    tierd: dict[str, Any]


def plan_layout(tensors: Iterable[TensorSpec], tierd: dict[str, Any]) -> Layout:
    """Lay out tensors, with a header area for `tierd` twice and 4096 bytes more.

    Raises Unsupported for a dtype that safetensors does not have, or when the header would exceed 100 MB.
    """
    tensors = list(tensors)
    if len({spec.name for spec in tensors}) != len(tensors):
        counts = Counter(spec.name for spec in tensors)
        raise Unsupported(f"lay out two tensors named {counts.most_common(1)[0][0]}", hint="rename one of them")
    for spec in tensors:
        if spec.name == "__metadata__":
            raise Unsupported('lay out a tensor named "__metadata__": safetensors reserves it', hint="rename its key")
        if spec.dtype not in DTYPE_BYTES:
            raise Unsupported(f"lay out {spec.name}: safetensors has no dtype {spec.dtype}")
    ordered = sorted(tensors, key=lambda spec: (-DTYPE_BYTES[spec.dtype], spec.name))
    sharding = json.dumps(_dump({spec.name: {"saved_offsets": list(spec.saved_offsets)} for spec in ordered}))
    offsets = list(itertools.accumulate((spec.size_bytes for spec in ordered), initial=0))
    rows = {
        spec.name: {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [begin, end]}
        for spec, (begin, end) in zip(ordered, itertools.pairwise(offsets), strict=True)
    }
    table = "," + _dump(rows)[1:-1] if rows else ""
    fixed = len(table) + len(sharding)
    torch_dtypes = {spec.name: spec.torch_dtype for spec in ordered if spec.torch_dtype}
    changing = len(json.dumps(_dump(_with_dtypes(tierd, torch_dtypes))))
    header_bytes = round_up(_LENGTH.size + fixed + 2 * changing + ALIGN_BYTES)
    if header_bytes > HEADER_BYTES_MAX:
        raise Unsupported(
            f"lay out a shard: its header would take {header_bytes} bytes of at most {HEADER_BYTES_MAX}",
            hint="store large lists of the dataloader's state or of extra in a tensor or an array",
        )
    entries = tuple(
        TensorEntry(
            name=spec.name,
            dtype=spec.dtype,
            shape=spec.shape,
            saved_offsets=spec.saved_offsets,
            torch_dtype=spec.torch_dtype,
            offset=header_bytes + begin,
        )
        for spec, begin in zip(ordered, offsets, strict=False)
    )
    before, after = f'{{"__metadata__":{{"DCP_SHARDING_INFO":{sharding},"tierd":', f"}}{table}}}"
    size_bytes = header_bytes + offsets[-1]
    return Layout(entries, header_bytes, size_bytes, torch_dtypes, before.encode(), after.encode())


def _with_dtypes(tierd: dict[str, Any], torch_dtypes: dict[str, str]) -> dict[str, Any]:
    return {**tierd, "torch_dtypes": torch_dtypes} if torch_dtypes else tierd


_dump = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def header_length(first_bytes: bytes, file_bytes: int, *, where: str) -> int:
    """The size of the header area in bytes, from the first 8 bytes of a file of `file_bytes`. Raises Corrupt."""
    if len(first_bytes) < _LENGTH.size:
        raise Corrupt(f"read {where}: {len(first_bytes)} bytes, too short for a shard")
    (length,) = _LENGTH.unpack_from(first_bytes)
    if length > HEADER_BYTES_MAX or _LENGTH.size + length > file_bytes:
        raise Corrupt(f"read {where}: a header of {length} bytes in a file of {file_bytes} bytes")
    return _LENGTH.size + length


def parse_header(header: bytes | memoryview, file_bytes: int, *, where: str) -> Shard:
    """Parse the header of a shard. `header`: the first bytes of its file, at least the header area.

    Raises Corrupt for any violation of the format, NewerFormat for a later format version.
    """
    end = header_length(bytes(header[: _LENGTH.size]), file_bytes, where=where)
    try:
        table = json.loads(bytes(header[_LENGTH.size : end]), object_pairs_hook=no_duplicates)
        return _parse(table, end, file_bytes, where)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Corrupt(f"read the header of {where}: {error!r}") from error


def read_header(read: Callable[[int, int], bytes], file_bytes: int, *, where: str) -> Shard:
    """As `parse_header`, of a file that can be read anywhere. `read`: returns (length, offset), as os.pread does."""
    return parse_header(read(header_length(read(_LENGTH.size, 0), file_bytes, where=where), 0), file_bytes, where=where)


def _parse(table: Any, header_bytes: int, file_bytes: int, where: str) -> Shard:
    metadata = table.pop("__metadata__")
    tierd = json.loads(metadata["tierd"], object_pairs_hook=no_duplicates)
    if tierd["format_version"] > FORMAT_VERSION:
        raise NewerFormat(
            f"read {where}: shard format version {tierd['format_version']}, this tierd reads up to {FORMAT_VERSION}",
            hint="upgrade tierd",
        )
    if tierd["format_version"] < 1:
        raise ValueError(f"format version {tierd['format_version']}")
    sharding = json.loads(metadata["DCP_SHARDING_INFO"], object_pairs_hook=no_duplicates)
    torch_dtypes = tierd.get("torch_dtypes", {})
    tensors = parse_entries(
        table, header_bytes, file_bytes, {name: sharding[name]["saved_offsets"] for name in table}, torch_dtypes
    )
    return Shard(tensors, header_bytes, tierd)


def parse_entries(
    table: dict[str, Any],
    header_bytes: int,
    file_bytes: int,
    saved_offsets: Mapping[str, Any],
    torch_dtypes: Mapping[str, Any],
) -> dict[str, TensorEntry]:
    """The tensors that a header names, without its metadata. `saved_offsets`: of each of them, by name. Raises
    ValueError, KeyError or TypeError for any violation of safetensors' format."""
    tensors: dict[str, TensorEntry] = {}
    expected = 0
    for name, raw in sorted(table.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = raw["data_offsets"]
        shape = tuple(raw["shape"])
        offsets = tuple(saved_offsets[name])
        numbers = (begin, end, *shape, *offsets)
        if (
            len(shape) > NDIM_MAX
            or not _INT.issuperset(map(type, numbers))
            or not 0 <= min(numbers) <= max(numbers) <= INT64_MAX
        ):
            raise ValueError(f"{name}: sizes and offsets must be integers of 0 to 2**63 - 1, not {str(numbers)[:200]}")
        if len(offsets) != len(shape):
            raise ValueError(f"{name}: {len(offsets)} saved offsets for {len(shape)} dimensions")
        if begin != expected or end - begin != math.prod(shape) * DTYPE_BYTES[raw["dtype"]]:
            raise ValueError(f"{name}: bytes {begin}..{end} leave a hole, overlap, or do not fit {raw}")
        if type(torch_dtype := torch_dtypes.get(name, "")) is not str:
            raise ValueError(f"{name}: torch dtype {torch_dtype!r}")
        tensors[name] = TensorEntry(
            name=name,
            dtype=raw["dtype"],
            shape=shape,
            saved_offsets=offsets,
            torch_dtype=torch_dtype,
            offset=header_bytes + begin,
        )
        expected = end
    if header_bytes + expected != file_bytes:
        raise ValueError(f"the tensors end at byte {header_bytes + expected} of {file_bytes}")
    return tensors


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ValueError if a key of a JSON object appears twice."""
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key appears twice")
    return table
