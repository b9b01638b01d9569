"""Plans safetensors files of whole tensors from the parts in a checkpoint's shards. Reads no tensor data.

A file is one header and its tensors without holes. For any range of a file, `pieces` gives the bytes of the shards
that belong there, so a file of any size can be written through a small buffer.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tierd.errors import Corrupt
from tierd.format.boxes import Box, cover_problem, spanned_shape
from tierd.format.shard import DTYPE_BYTES, Shard, TensorEntry, TensorSpec, plan_layout

HEADER_ALIGN_BYTES = 8  # as the safetensors library writes it


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a tensor, and the name of the shard that contains it."""

    shard: str
    entry: TensorEntry


@dataclass(frozen=True, slots=True)
class WholeTensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Piece:
    """`length` bytes at `offset` of a shard; they belong at `at` of the file."""

    at: int
    shard: str
    offset: int
    length: int


def whole_tensors(shards: Mapping[str, Shard], prefix: str = "") -> list[WholeTensor]:
    """The tensors whose names begin with `prefix`, which is removed. Raises Corrupt when a part of one is missing."""
    parts: dict[str, dict[Box, Part]] = {}  # several ranks may have stored the same part
    for shard_name, shard in shards.items():
        for name, entry in shard.tensors.items():
            if name.startswith(prefix) and (name != prefix or not prefix):
                parts.setdefault(name, {}).setdefault((entry.saved_offsets, entry.shape), Part(shard_name, entry))
    return [_whole(name.removeprefix(prefix), list(parts[name].values())) for name in sorted(parts)]


def _whole(name: str, parts: Sequence[Part]) -> WholeTensor:
    entries = [part.entry for part in parts]
    if len({(entry.dtype, len(entry.shape)) for entry in entries}) != 1:
        raise Corrupt(f"assemble {name}: its parts differ in dtype or in the number of dimensions")
    boxes = [(entry.saved_offsets, entry.shape) for entry in entries]
    shape = spanned_shape(boxes)
    if problem := cover_problem(boxes, shape):
        raise Corrupt(f"assemble {name}: the shards {problem}")
    return WholeTensor(name, entries[0].dtype, shape, tuple(parts))


class AssembledFile:
    """A file that consists of a header and tensors without holes, in the given order."""

    def __init__(self, header: bytes, tensors: Sequence[WholeTensor]) -> None:
        self.header, self.tensors = header, list(tensors)
        ends = itertools.accumulate((tensor.size_bytes for tensor in self.tensors), initial=len(header))
        self._ends = list(ends)[1:]
        self.size_bytes = self._ends[-1] if self._ends else len(header)

    def pieces(self, begin: int, end: int) -> Iterator[Piece]:
        """The pieces of the file's bytes `[begin, end)`, without the header."""
        for index in range(bisect.bisect_right(self._ends, begin), len(self.tensors)):
            tensor = self.tensors[index]
            at = self._ends[index] - tensor.size_bytes
            if at >= end:
                return
            for part in tensor.parts:
                yield from _pieces(tensor, part, at, begin, end)


class WholeFile(AssembledFile):
    """One safetensors file of whole tensors, by descending element size, so that each is aligned."""

    def __init__(self, tensors: Sequence[WholeTensor], metadata: Mapping[str, str]) -> None:
        ordered = sorted(tensors, key=lambda tensor: (-DTYPE_BYTES[tensor.dtype], tensor.name))
        table: dict[str, object] = {"__metadata__": dict(metadata)}
        offsets = list(itertools.accumulate((tensor.size_bytes for tensor in ordered), initial=0))
        for tensor, span in zip(ordered, itertools.pairwise(offsets), strict=True):
            table[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": span}
        body = json.dumps(table, separators=(",", ":")).encode()
        body = body.ljust(-(-len(body) // HEADER_ALIGN_BYTES) * HEADER_ALIGN_BYTES)
        super().__init__(struct.pack("<Q", len(body)) + body, ordered)


def as_shard(tensors: Sequence[WholeTensor], tierd: dict[str, Any]) -> AssembledFile:
    """The same tensors as one shard of a checkpoint. `tierd`: its metadata. Raises Unsupported as `plan_layout`."""
    specs = [
        TensorSpec(
            name=tensor.name,
            dtype=tensor.dtype,
            shape=tensor.shape,
            saved_offsets=(0,) * len(tensor.shape),
            torch_dtype=tensor.parts[0].entry.torch_dtype,
        )
        for tensor in tensors
    ]
    layout = plan_layout(specs, tierd)
    by_name = {tensor.name: tensor for tensor in tensors}
    return AssembledFile(layout.encode_header(tierd), [by_name[entry.name] for entry in layout.tensors])


def whole_in(
    file: str, name: str, dtype: str, shape: tuple[int, ...], offset: int, torch_dtype: str = ""
) -> WholeTensor:
    """A tensor that lies whole at `offset` of a file, in C order."""
    saved_offsets = (0,) * len(shape)
    entry = TensorEntry(
        name=name, dtype=dtype, shape=shape, saved_offsets=saved_offsets, torch_dtype=torch_dtype, offset=offset
    )
    return WholeTensor(name, dtype, shape, (Part(file, entry),))


def _pieces(tensor: WholeTensor, part: Part, at: int, begin: int, end: int) -> Iterator[Piece]:
    """The pieces of one part. The tensor begins at `at` of the file."""
    entry, item_bytes = part.entry, DTYPE_BYTES[tensor.dtype]
    if not entry.size_bytes:
        return
    strides = [item_bytes * math.prod(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape))]
    # From the last axis that the part does not cover, its elements are contiguous in the whole tensor too: one run.
    cut = max((axis for axis, size in enumerate(entry.shape) if size != tensor.shape[axis]), default=0)
    run_bytes = item_bytes * math.prod(entry.shape[cut:])
    first = at + sum(offset * stride for offset, stride in zip(entry.saved_offsets, strides, strict=True))

    def begin_of(run: int) -> int:
        position = first
        for axis in reversed(range(cut)):
            run, index = divmod(run, entry.shape[axis])
            position += index * strides[axis]
        return position

    runs = range(entry.size_bytes // run_bytes)
    for run in runs[bisect.bisect_left(runs, begin, key=lambda run: begin_of(run) + run_bytes - 1) :]:
        position = begin_of(run)
        if position >= end:
            return
        low, high = max(position, begin), min(position + run_bytes, end)
        yield Piece(low, part.shard, entry.offset + run * run_bytes + low - position, high - low)


def split(tensors: Sequence[WholeTensor], size_max: int) -> list[list[WholeTensor]]:
    """Split tensors, in order, into files of at most `size_max` bytes. A tensor that is larger gets its own file."""
    files: list[list[WholeTensor]] = [[]]
    room = size_max
    for tensor in tensors:
        if tensor.size_bytes > room and files[-1]:
            files.append([])
            room = size_max
        files[-1].append(tensor)
        room -= tensor.size_bytes
    return files
