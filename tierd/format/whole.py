"""Whole tensors out of the parts that ranks hold, as plain safetensors files: what lies where. Reads nothing.

A file is planned as one header and its tensors back to back; `pieces` says for any range of a file which bytes of
which shard belong there, so that files of any size are written through a small buffer.
"""

from __future__ import annotations

import bisect
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tierd.errors import Corrupt
from tierd.format.shard import DTYPE_BYTES, Shard, TensorEntry

HEADER_ALIGN_BYTES = 8  # as the safetensors library writes it


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a tensor, and the name of the shard that holds it."""

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
    """`length` bytes of a shard from `offset` on, that belong at `at` of the file."""

    at: int
    shard: str
    offset: int
    length: int


def whole_tensors(shards: Mapping[str, Shard], prefix: str = "") -> list[WholeTensor]:
    """Every tensor whose name begins with `prefix`, without it, by name. Raises Corrupt when one is not all there."""
    parts: dict[str, dict[tuple[int, ...], Part]] = {}
    for shard_name, shard in shards.items():
        for name, entry in shard.tensors.items():
            if name.startswith(prefix) and name != prefix:
                parts.setdefault(name, {}).setdefault(entry.saved_offsets, Part(shard_name, entry))
    return [_whole(name.removeprefix(prefix), list(parts[name].values())) for name in sorted(parts)]


def _whole(name: str, parts: Sequence[Part]) -> WholeTensor:
    entries = [part.entry for part in parts]
    if len({(entry.dtype, len(entry.shape)) for entry in entries}) != 1:
        raise Corrupt(f"put {name} together: its parts disagree about dtype or dimensions")
    ends = [[at + size for at, size in zip(one.saved_offsets, one.shape, strict=True)] for one in entries]
    shape = tuple(max(along) for along in zip(*ends, strict=True))
    held = sum(math.prod(entry.shape) for entry in entries)
    # As the parts begin at different places, as many elements as there should be are all of them.
    if held != math.prod(shape):
        raise Corrupt(f"put {name} together: the shards hold {held} of its {math.prod(shape)} elements")
    return WholeTensor(name, entries[0].dtype, shape, tuple(parts))


class WholeFile:
    """One safetensors file of whole tensors, largest elements first, so that each is aligned."""

    def __init__(self, tensors: Sequence[WholeTensor], metadata: Mapping[str, str]) -> None:
        self.tensors = sorted(tensors, key=lambda one: (-DTYPE_BYTES[one.dtype], one.name))
        table: dict[str, object] = {"__metadata__": dict(metadata)}
        ends: list[int] = []
        end = 0
        for one in self.tensors:
            begin, end = end, end + one.size_bytes
            table[one.name] = {"dtype": one.dtype, "shape": list(one.shape), "data_offsets": [begin, end]}
            ends.append(end)
        body = json.dumps(table, separators=(",", ":")).encode()
        body = body.ljust(-(-len(body) // HEADER_ALIGN_BYTES) * HEADER_ALIGN_BYTES)
        self.header = struct.pack("<Q", len(body)) + body
        self.size_bytes = len(self.header) + end
        self._ends = [len(self.header) + end for end in ends]

    def pieces(self, begin: int, end: int) -> Iterator[Piece]:
        """What the file's bytes `[begin, end)` are made of, behind the header."""
        for index in range(bisect.bisect_right(self._ends, begin), len(self.tensors)):
            tensor = self.tensors[index]
            at = self._ends[index] - tensor.size_bytes
            if at >= end:
                return
            for part in tensor.parts:
                yield from _pieces(tensor, part, at, begin, end)


def _pieces(tensor: WholeTensor, part: Part, at: int, begin: int, end: int) -> Iterator[Piece]:
    """Those of one part, of a tensor that begins at `at` of the file."""
    entry, item_bytes = part.entry, DTYPE_BYTES[tensor.dtype]
    if not entry.size_bytes:
        return
    strides = [item_bytes * math.prod(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape))]
    # Elements follow each other in the part as in the whole from the last axis of which it holds but a section.
    cut = max((axis for axis, size in enumerate(entry.shape) if size != tensor.shape[axis]), default=0)
    run_bytes = item_bytes * math.prod(entry.shape[cut:])
    first = at + sum(offset * stride for offset, stride in zip(entry.saved_offsets, strides, strict=True))

    def begin_of(run: int) -> int:
        place = first
        for axis in reversed(range(cut)):
            run, index = divmod(run, entry.shape[axis])
            place += index * strides[axis]
        return place

    runs = range(entry.size_bytes // run_bytes)
    for run in runs[bisect.bisect_left(runs, begin, key=lambda run: begin_of(run) + run_bytes - 1) :]:
        place = begin_of(run)
        if place >= end:
            return
        low, high = max(place, begin), min(place + run_bytes, end)
        yield Piece(low, part.shard, entry.offset + run * run_bytes + low - place, high - low)


def split(tensors: Sequence[WholeTensor], size_max: int) -> list[list[WholeTensor]]:
    """In their order, into files of at most `size_max` bytes of tensors, but for a tensor that is larger by itself."""
    files: list[list[WholeTensor]] = [[]]
    room = size_max
    for one in tensors:
        if one.size_bytes > room and files[-1]:
            files.append([])
            room = size_max
        files[-1].append(one)
        room -= one.size_bytes
    return files
