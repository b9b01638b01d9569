"""Reads shards into live tensors, chunk by chunk, and verifies each chunk against the manifest's CRC64NVME.

A sealed memory snapshot is mapped, a file is read. Only chunks that hold requested tensors are read. Each block is
copied while it is in the CPU's cache, before its chunk is verified: the destinations may hold wrong bytes when Corrupt
is raised. Nothing counts as restored before `ReadPlan.run` returns.
"""

from __future__ import annotations

import bisect
import ctypes
import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import torch

from tierd.descriptors import read_all
from tierd.errors import Corrupt, NotFound
from tierd.format import checksum
from tierd.format.manifest import FileEntry
from tierd.format.shard import Shard, TensorEntry, header_length, parse_header
from tierd_client.slots.slot import is_sealed, map_to_read
from tierd_client.snapshot.copying import has_plain_bytes
from tierd_client.state.tensors import CapturedTensor, as_bytes, contiguous_strides, overlap

THREADS = 4  # that read files: while some wait for the disk, others compute checksums
BLOCK_BYTES = 2 << 20  # fits in the CPU's caches between checksum and copy; smaller blocks add Python overhead

_HINT = "another replica may be intact; see docs/RUNBOOK.md#corrupt-chunk"


class FileBlock(NamedTuple):
    """Bytes of a file from `offset` on, and their address in memory. Valid until the next block is read."""

    offset: int
    content: memoryview
    address: int


class SourceFile:
    """One file of a checkpoint: an open descriptor, which the caller closes, and its entry in the manifest.

    `name` is used in messages. `may_change`: it is memory that another process may write into; each read is verified
    then, and what was verified is what is used. Raises Corrupt when the file is shorter than its entry says.
    """

    def __init__(self, name: str, fd: int, entry: FileEntry, *, may_change: bool = False) -> None:
        self.name = name
        self.entry = entry
        self._fd = fd
        size_bytes = os.fstat(fd).st_size
        if size_bytes < entry.size_bytes:
            raise Corrupt(f"read {name}: {size_bytes} bytes, expected {entry.size_bytes}", hint=_HINT)
        is_mapped = not may_change and is_sealed(fd) and entry.size_bytes
        self._mapping = map_to_read(fd, entry.size_bytes) if is_mapped else None
        self._verified: set[int] = set()  # chunks of the mapping, whose bytes cannot change
        self._shard: Shard | None = None

    @property
    def is_here(self) -> bool:
        """Whether its content can be read, not only its header."""
        return True

    @property
    def is_mapped(self) -> bool:
        """Whether it is memory that is mapped: reading it takes no system call."""
        return self._mapping is not None

    def shard(self) -> Shard:
        """The parsed header, from verified bytes. Raises Corrupt when it or its chunk is damaged, or NewerFormat."""
        if self._shard is None:
            self._shard = parse_header(memoryview(self.header()), self.entry.size_bytes, where=self.name)
        return self._shard

    def header(self) -> bytearray:
        """The bytes of the header, verified. Raises Corrupt when its chunk is damaged."""
        header = bytearray()
        header_bytes = 0
        scratch = torch.empty(BLOCK_BYTES, dtype=torch.uint8, device="cpu")
        for index in range(len(self.entry.chunks)):
            for offset, content, _ in self.read_chunk(index, scratch):
                if offset == 0:
                    header_bytes = header_length(bytes(content[:8]), self.entry.size_bytes, where=self.name)
                header += content[: max(0, header_bytes - offset)]
            if len(header) == header_bytes:
                break
        return header

    def read_chunk(self, index: int, scratch: torch.Tensor) -> Iterator[FileBlock]:
        """Yields the blocks of a chunk.

        Raises Corrupt after the last block when the chunk's checksum is wrong. `scratch`: BLOCK_BYTES of uint8.
        """
        begin = index * self.entry.chunk_bytes
        end = min(begin + self.entry.chunk_bytes, self.entry.size_bytes)
        is_verified = index in self._verified
        crc = 0
        for block in self.read_unverified(begin, end, scratch):
            if not is_verified:
                crc = checksum.crc64nvme(block.content, crc)
            yield block
        expected = self.entry.chunks[index]
        if not is_verified and checksum.encode(crc) != expected:
            raise Corrupt(
                f"read chunk {index} of {self.name}: crc64nvme {checksum.encode(crc)}, expected {expected}", hint=_HINT
            )
        if self._mapping is not None:
            self._verified.add(index)

    def read_unverified(self, begin: int, end: int, scratch: torch.Tensor) -> Iterator[FileBlock]:
        """Yields the bytes `[begin, end)` as `read_chunk` does, without a check. Raises Corrupt at the file's end."""
        memory = scratch if self._mapping is None else self._mapping
        # Slicing a memoryview is more than ten times as fast as slicing a tensor.
        view, address = memory.numpy().data, memory.data_ptr()
        for offset in range(begin, end, BLOCK_BYTES):
            length = min(BLOCK_BYTES, end - offset)
            if self._mapping is not None:
                yield FileBlock(offset, view[offset : offset + length], address + offset)
                continue
            content = view[:length]
            if missing := read_all(self._fd, offset, content):
                ends_at = offset + length - missing
                raise Corrupt(f"read {self.name}: it ends at byte {ends_at} of {self.entry.size_bytes}", hint=_HINT)
            yield FileBlock(offset, content, address)


class FileElsewhere(SourceFile):
    """A file that another node has. `header`: its verified header, from there. Nothing else can be read before
    `receive`."""

    def __init__(self, name: str, entry: FileEntry, header: bytes) -> None:
        self.name = name
        self.entry = entry
        self._fd = -1
        self._mapping = None
        self._verified = set()
        self._header = header
        self._shard = None

    @property
    def is_here(self) -> bool:
        return False

    def receive(self, fd: int) -> None:
        """The daemon has fetched chunks of it into this file, which the caller closes."""
        self._fd = fd

    def header(self) -> bytearray:
        return bytearray(self._header)

    def read_unverified(self, begin: int, end: int, scratch: torch.Tensor) -> Iterator[FileBlock]:
        if self._fd < 0:
            raise NotFound(f"read {self.name}: only another node has it")
        return super().read_unverified(begin, end, scratch)


def read_headers(files: Sequence[SourceFile]) -> tuple[dict[str, Shard], dict[str, list[TensorEntry]]]:
    """(the parsed header of each file by the file's name in the manifest, the tensors of all files by name). The latter
    are the `available` of a `StoredState`. From verified bytes. Raises Corrupt or NewerFormat."""
    with ThreadPoolExecutor(THREADS, thread_name_prefix="tierd-restore") as pool:
        shards = list(pool.map(SourceFile.shard, files))
    tensors: dict[str, list[TensorEntry]] = defaultdict(list)
    for shard in shards:
        for name, entry in shard.tensors.items():
            tensors[name].append(entry)
    return {file.entry.name: shard for file, shard in zip(files, shards, strict=True)}, dict(tensors)


class ReadPlan:
    """Which chunks of which files hold the requested tensors, and where their bytes go.

    Several requests may name the same stored tensor, for different parts of it. A requested tensor is read from all
    files that hold parts of it. A part that several files hold is read from one of them, which is here if one is.
    """

    def __init__(self, files: Sequence[SourceFile], requested: Iterable[CapturedTensor]) -> None:
        by_name: dict[str, list[CapturedTensor]] = defaultdict(list)
        for tensor in requested:
            by_name[tensor.name].append(tensor)
        self._devices = {
            tensor.tensor.device for tensors in by_name.values() for tensor in tensors if tensor.tensor.is_cuda
        }
        planned: set[_StoredPart] = set()
        in_order = sorted(range(len(files)), key=lambda index: not files[index].is_here)
        reads = {index: _plan_file(files[index], by_name, planned) for index in in_order}
        self._reads = [reads[index] for index in range(len(files))]
        # Threads that read mapped memory wait for no disk. More of them than cores wait for the GIL after each copy.
        is_mapped = all(read.file.is_mapped for read in chain.from_iterable(self._reads))
        self._threads = min(THREADS, len(os.sched_getaffinity(0))) if is_mapped else THREADS

    @property
    def chunks(self) -> list[list[int]]:
        """The indexes of the chunks that `run` reads, for each file."""
        return [[read.index for read in reads] for reads in self._reads]

    def run(self, *, is_verified: bool = True) -> int:
        """Fills the requested tensors. Returns the number of bytes in their chunks.

        Raises Corrupt, naming file and chunk; then the destinations hold a mixture of old, new and damaged bytes.
        Without `is_verified` only the tensors' own bytes are read, not whole chunks, and no checksum is compared.
        """
        for device in self._devices:
            torch.cuda.synchronize(device)  # kernels of the training may still use that memory; our copies do not wait
        failed = threading.Event()
        scratch = threading.local()

        def run(read: _ChunkRead) -> int:
            if failed.is_set():
                return 0
            try:
                if not hasattr(scratch, "buffer"):
                    scratch.buffer = torch.empty(BLOCK_BYTES, dtype=torch.uint8, device="cpu")
                for block in read.blocks(scratch.buffer, is_verified=is_verified):
                    read.copy(block)
            except BaseException:
                failed.set()
                raise
            return read.length

        with ThreadPoolExecutor(self._threads, thread_name_prefix="tierd-restore") as pool:
            return sum(pool.map(run, chain.from_iterable(self._reads)))


@dataclass(frozen=True, slots=True)
class _ChunkRead:
    """One chunk to read. `sinks`, sorted by `begin`, include all that have bytes in it, and maybe some that end before
    it. `max_ends`: for each, the largest end up to there."""

    file: SourceFile
    index: int
    length: int
    sinks: Sequence[_Sink]
    max_ends: Sequence[int]

    def blocks(self, scratch: torch.Tensor, *, is_verified: bool) -> Iterator[FileBlock]:
        """Verified: all blocks of the chunk. Otherwise only the bytes that the sinks need."""
        if is_verified:
            return self.file.read_chunk(self.index, scratch)
        return self._unverified_blocks(scratch)

    def _unverified_blocks(self, scratch: torch.Tensor) -> Iterator[FileBlock]:
        begin = self.index * self.file.entry.chunk_bytes
        end = begin + self.length
        for sink in self.sinks:  # by their begin; what several need is read once
            last = min(end, sink.end)
            yield from self.file.read_unverified(max(begin, sink.begin), last, scratch)
            begin = max(begin, last)

    def copy(self, block: FileBlock) -> None:
        """Copies the bytes of a block into the sinks."""
        offset, end = block.offset, block.offset + len(block.content)
        for sink in self.sinks[bisect.bisect_right(self.max_ends, offset) :]:
            if sink.begin >= end:
                break
            # Not min() and max(): there are thousands of sinks, and all threads wait for the GIL.
            low = sink.begin if sink.begin > offset else offset
            high = sink.end if sink.end < end else end
            if low < high:
                sink.write(low, high, block)


_StoredPart = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A name, the offsets of the part, and its shape."""


def _plan_file(
    file: SourceFile, requested: Mapping[str, Sequence[CapturedTensor]], planned: set[_StoredPart]
) -> list[_ChunkRead]:
    """`planned`: the parts that another file supplies; those of this file are added."""
    stored = file.shard().tensors
    sinks: list[_Sink] = []
    for name, tensors in requested.items():
        entry = stored.get(name)
        if entry is None or not entry.size_bytes or (part := (name, entry.saved_offsets, entry.shape)) in planned:
            continue
        planned.add(part)
        sinks += [sink for tensor in tensors if (sink := _sink(entry, tensor)) is not None]
    sinks.sort(key=lambda sink: sink.begin)
    reads: list[_ChunkRead] = []
    first = 0
    for index, (offset, length) in enumerate(checksum.chunk_ranges(file.entry.size_bytes, file.entry.chunk_bytes)):
        while first < len(sinks) and sinks[first].end <= offset:
            first += 1
        last = first
        while last < len(sinks) and sinks[last].begin < offset + length:
            last += 1
        if first < last:
            in_chunk = sinks[first:last]
            reads.append(_ChunkRead(file, index, length, in_chunk, list(accumulate((s.end for s in in_chunk), max))))
    return reads


class _Sink:
    """The destination of the bytes `[begin, end)` of a file: a contiguous tensor."""

    def __init__(self, begin: int, end: int, destination: torch.Tensor) -> None:
        self.begin = begin
        self.end = end
        self._destination = destination
        self._address = destination.data_ptr() if destination.is_cpu else 0

    def write(self, low: int, high: int, block: FileBlock) -> None:
        """Writes the bytes `[low, high)` of the file, which are in the block."""
        if self._address:
            # Tensor.copy_ would start torch's threads from within ours. memmove releases the GIL too.
            ctypes.memmove(self._address + low - self.begin, block.address + low - block.offset, high - low)
        else:
            content = torch.frombuffer(block.content[low - block.offset : high - block.offset], dtype=torch.uint8)
            as_bytes(self._destination)[low - self.begin : high - self.begin].copy_(content)


class _StridedSink(_Sink):
    """A destination whose strides differ from the file's. The bytes are buffered, and copied when all have arrived.

    `strides`: those of the destination's elements in the file, in elements.
    """

    def __init__(self, begin: int, end: int, destination: torch.Tensor, strides: Sequence[int]) -> None:
        super().__init__(begin, end, destination)
        self._strides = strides
        self._buffer: torch.Tensor | None = None
        self._missing_bytes = end - begin
        self._lock = threading.Lock()

    def write(self, low: int, high: int, block: FileBlock) -> None:
        with self._lock:
            if self._buffer is None:
                self._buffer = torch.empty(self.end - self.begin, dtype=torch.uint8, device="cpu")
            buffer = self._buffer
        ctypes.memmove(buffer.data_ptr() + low - self.begin, block.address + low - block.offset, high - low)
        with self._lock:
            self._missing_bytes -= high - low
            if self._missing_bytes:
                return
            self._buffer = None
        content = buffer.view(self._destination.dtype).as_strided(self._destination.shape, self._strides)
        self._destination.copy_(content)


def _sink(entry: TensorEntry, requested: CapturedTensor) -> _Sink | None:
    """A sink for the elements that a stored part and a requested one share, from the first to the last in the file."""
    if (requested.saved_offsets, requested.shape) == (entry.saved_offsets, entry.shape) and has_plain_bytes(
        requested.tensor
    ):
        return _Sink(entry.offset, entry.offset + requested.tensor.nbytes, requested.tensor)
    shared = overlap(requested.saved_offsets, requested.shape, entry.saved_offsets, entry.shape)
    if shared is None:
        return None
    strides = contiguous_strides(entry.shape)
    axes = list(zip(shared, entry.saved_offsets, strides, strict=True))
    first = sum((low - offset) * stride for (low, _), offset, stride in axes)
    last = sum((high - 1 - offset) * stride for (_, high), offset, stride in axes)
    itemsize = requested.tensor.element_size()
    begin, end = entry.offset + first * itemsize, entry.offset + (last + 1) * itemsize
    box = tuple(slice(low - at, high - at) for (low, high), at in zip(shared, requested.saved_offsets, strict=True))
    destination = requested.tensor[box]
    if end - begin == destination.numel() * itemsize and has_plain_bytes(destination):
        return _Sink(begin, end, destination)
    return _StridedSink(begin, end, destination, strides)
