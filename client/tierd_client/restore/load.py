"""Reads shards into live tensors, chunk by chunk, each checked against the manifest's CRC64NVME on the way.

A memory snapshot is mapped, a file is read; files and chunks that hold nothing wanted are not touched. A block
is copied as soon as it was read, while it is in the CPU's cache, so a destination may hold wrong bytes when
Corrupt is raised: nothing counts as restored before `load` returns.
"""

from __future__ import annotations

import bisect
import ctypes
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, chain

import torch

from tierd.errors import Corrupt
from tierd.format import checksum
from tierd.format.manifest import FileEntry
from tierd.format.shard import Shard, TensorEntry, header_length, parse_header
from tierd_client.snapshot.copying import has_plain_bytes
from tierd_client.snapshot.slot import is_sealed, map_to_read
from tierd_client.state.tensors import CapturedTensor, as_bytes, overlap

WORKERS = 4
BLOCK_BYTES = 2 << 20  # the CPU's caches hold it from checksum to copy; of smaller ones, Python's share is felt

Take = Callable[[int, torch.Tensor], None]
"""(offset in the file, block of bytes as uint8) → nothing. The block is the taker's for the call only."""

Bring = Callable[[Sequence[Sequence[int]]], None]
"""Chunks, by number, of each of the files → nothing. They can be read when it returns."""


class SourceFile:
    """One file of a checkpoint: an open descriptor, which stays the caller's, and its entry in the manifest.

    `name` is what messages call it. Raises Corrupt when the file is shorter than its entry says.
    """

    def __init__(self, name: str, fd: int, entry: FileEntry) -> None:
        self.name = name
        self.entry = entry
        self._fd = fd
        found_bytes = os.fstat(fd).st_size
        if found_bytes < entry.size_bytes:
            raise Corrupt(f"read {name}: {found_bytes} bytes, expected {entry.size_bytes}", hint=_HINT)
        self._mapping = map_to_read(fd, entry.size_bytes) if is_sealed(fd) and entry.size_bytes else None
        self._verified: set[int] = set()  # chunks of a mapping: its bytes need no second look
        self._shard: Shard | None = None
        self._lock = threading.Lock()

    def shard(self) -> Shard:
        """The parsed header, from verified bytes. Raises Corrupt when it or its chunk is damaged."""
        with self._lock:
            if self._shard is None:
                self._shard = self._read_shard()
            return self._shard

    def _read_shard(self) -> Shard:
        header = bytearray()

        def keep(offset: int, block: torch.Tensor) -> None:
            if offset == 0:
                header[:] = bytes(header_length(bytes(_bytes(block)[:8]), self.entry.size_bytes, where=self.name))
            wanted = min(block.numel(), len(header) - offset)
            if wanted > 0:
                header[offset : offset + wanted] = _bytes(block)[:wanted]

        scratch = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
        for index in range(len(self.entry.chunks)):
            self.read_chunk(index, scratch, keep)
            if len(header) <= (index + 1) * self.entry.chunk_bytes:
                break
        return parse_header(memoryview(header), self.entry.size_bytes, where=self.name)

    def read_chunk(self, index: int, scratch: torch.Tensor, take: Take) -> None:
        """Gives the chunk to `take`, block by block. Raises Corrupt when, at its end, the checksum is another."""
        begin = index * self.entry.chunk_bytes
        end = min(begin + self.entry.chunk_bytes, self.entry.size_bytes)
        is_verified = index in self._verified
        found = 0
        for offset in range(begin, end, BLOCK_BYTES):
            block = self._read_block(offset, min(BLOCK_BYTES, end - offset), scratch)
            if not is_verified:
                found = checksum.crc64nvme(_bytes(block), found)
            take(offset, block)
        expected = self.entry.chunks[index]
        if not is_verified and checksum.encode(found) != expected:
            raise Corrupt(
                f"read chunk {index} of {self.name}: crc64nvme {checksum.encode(found)}, expected {expected}",
                hint=_HINT,
            )
        if self._mapping is not None:
            self._verified.add(index)

    def _read_block(self, offset: int, length: int, scratch: torch.Tensor) -> torch.Tensor:
        if self._mapping is not None:
            return self._mapping[offset : offset + length]
        block = scratch[:length]
        view = _bytes(block)
        done = 0
        while done < length:
            count = os.preadv(self._fd, [view[done:]], offset + done)
            if count == 0:
                raise Corrupt(
                    f"read {self.name}: it ends at byte {offset + done} of {self.entry.size_bytes}", hint=_HINT
                )
            done += count
        return block


_HINT = "the restore goes on from another replica; see docs/RUNBOOK.md#corrupt-chunk"


def read_headers(files: Sequence[SourceFile]) -> dict[str, Shard]:
    """Every file's parsed header by the file's name, its first chunk verified. Raises Corrupt, NewerFormat."""
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="tierd-restore") as pool:
        shards = list(pool.map(SourceFile.shard, files))
    return {file.name: shard for file, shard in zip(files, shards, strict=True)}


def index_tensors(shards: Mapping[str, Shard]) -> dict[str, list[TensorEntry]]:
    """All shards' tensors by name: what `TrainingState.plan_restore` fits the state to."""
    found: dict[str, list[TensorEntry]] = {}
    for shard in shards.values():
        for name, entry in shard.tensors.items():
            found.setdefault(name, []).append(entry)
    return found


def load(
    files: Sequence[SourceFile],
    wanted: Mapping[str, CapturedTensor],
    *,
    bring: Bring | None = None,
    workers: int = WORKERS,
) -> int:
    """Reads every wanted tensor, from whichever files hold it or parts of it. Returns how many bytes were read.

    A stored tensor may be wanted several times, in parts: it is the name in the CapturedTensor that counts.
    `bring`: told first which chunks of each file will be read. Raises Corrupt, naming file and chunk; then the
    destinations hold a mixture.
    """
    by_name: dict[str, list[CapturedTensor]] = {}
    for one in wanted.values():
        by_name.setdefault(one.name, []).append(one)
    for device in {one.tensor.device for one in wanted.values() if one.tensor.is_cuda}:
        torch.cuda.synchronize(device)  # streams of the training may not be done with that memory; ours do not wait
    of_files = [_jobs(file, by_name) for file in files]
    if bring is not None:
        bring([[job.index for job in jobs] for jobs in of_files])
    failed = threading.Event()
    scratch = threading.local()

    def run(job: _Job) -> int:
        if failed.is_set():
            return 0
        try:
            buffer = getattr(scratch, "buffer", None)
            if buffer is None:
                buffer = scratch.buffer = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
            job.file.read_chunk(job.index, buffer, job.take)
        except BaseException:
            failed.set()
            raise
        return job.length

    with ThreadPoolExecutor(workers, thread_name_prefix="tierd-restore") as pool:
        return sum(pool.map(run, chain.from_iterable(of_files)))


@dataclass(frozen=True, slots=True)
class _Job:
    """One chunk of one file, and the tensors that have bytes in it, by offset. `reaches`: the end of all up to each."""

    file: SourceFile
    index: int
    length: int
    sinks: Sequence[_Sink]
    reaches: Sequence[int]

    def take(self, offset: int, block: torch.Tensor) -> None:
        """Copies what lies in the file's bytes from `offset` on to wherever it belongs."""
        end = offset + block.numel()
        for sink in self.sinks[bisect.bisect_right(self.reaches, offset) :]:
            if sink.begin >= end:
                break
            low, high = max(offset, sink.begin), min(end, sink.end)
            if low < high:
                sink.write(low - sink.begin, block, low - offset, high - low)


def _jobs(file: SourceFile, wanted: Mapping[str, Sequence[CapturedTensor]]) -> list[_Job]:
    entries = [entry for entry in file.shard().tensors.values() if entry.size_bytes]
    places = [(entry, one) for entry in entries for one in wanted.get(entry.name, ())]
    sinks = [sink for entry, one in places if (sink := _sink(entry, one)) is not None]
    sinks.sort(key=lambda sink: sink.begin)
    jobs: list[_Job] = []
    first = 0
    for index, (offset, length) in enumerate(checksum.chunk_ranges(file.entry.size_bytes, file.entry.chunk_bytes)):
        while first < len(sinks) and sinks[first].end <= offset:
            first += 1
        last = first
        while last < len(sinks) and sinks[last].begin < offset + length:
            last += 1
        if first < last:
            mine = sinks[first:last]
            jobs.append(_Job(file, index, length, mine, list(accumulate((sink.end for sink in mine), max))))
    return jobs


class _Sink:
    """Where the bytes `[begin, end)` of a file go: straight into a contiguous destination."""

    def __init__(self, begin: int, end: int, destination: torch.Tensor) -> None:
        self.begin = begin
        self.end = end
        self._destination = destination
        self._address = destination.data_ptr() if destination.is_cpu else 0

    def write(self, at: int, block: torch.Tensor, begin: int, length: int) -> None:
        if self._address:
            # Not Tensor.copy_: that would start torch's threads from within ours. This too lets go of the GIL.
            ctypes.memmove(self._address + at, block.data_ptr() + begin, length)
        else:
            as_bytes(self._destination)[at : at + length].copy_(block[begin : begin + length])


class _Detour(_Sink):
    """A destination in other strides than the file's: gathered first, put there when whole.

    `strides`: of the destination's elements in the file, in elements.
    """

    def __init__(self, begin: int, end: int, destination: torch.Tensor, strides: Sequence[int]) -> None:
        self.begin = begin
        self.end = end
        self._destination = destination
        self._strides = strides
        self._flat: torch.Tensor | None = None
        self._missing_bytes = end - begin
        self._lock = threading.Lock()

    def write(self, at: int, block: torch.Tensor, begin: int, length: int) -> None:
        with self._lock:
            if self._flat is None:
                self._flat = torch.empty(self.end - self.begin, dtype=torch.uint8)
            flat = self._flat
        ctypes.memmove(flat.data_ptr() + at, block.data_ptr() + begin, length)
        with self._lock:
            self._missing_bytes -= length
            if self._missing_bytes:
                return
            self._flat = None
        found = flat.view(self._destination.dtype).as_strided(self._destination.shape, self._strides)
        self._destination.copy_(found)


def _sink(entry: TensorEntry, wanted: CapturedTensor) -> _Sink | None:
    """For what a stored part and a wanted one share; from its first byte in the file to its last, no more is read."""
    if (wanted.saved_offsets, wanted.shape) == (entry.saved_offsets, entry.shape) and has_plain_bytes(wanted.tensor):
        return _Sink(entry.offset, entry.offset + wanted.size_bytes, wanted.tensor)
    shared = overlap(wanted.saved_offsets, wanted.shape, entry.saved_offsets, entry.shape)
    if shared is None:
        return None
    strides = [math.prod(entry.shape[axis + 1 :]) for axis in range(len(entry.shape))]
    ranges = list(zip(shared, entry.saved_offsets, strides, strict=True))
    first = sum((low - at) * stride for (low, _), at, stride in ranges)
    last = sum((high - 1 - at) * stride for (_, high), at, stride in ranges)
    itemsize = wanted.tensor.element_size()
    begin, end = entry.offset + first * itemsize, entry.offset + (last + 1) * itemsize
    into = wanted.tensor[
        tuple(slice(low - at, high - at) for (low, high), at in zip(shared, wanted.saved_offsets, strict=True))
    ]
    if end - begin == into.numel() * itemsize and has_plain_bytes(into):
        return _Sink(begin, end, into)
    return _Detour(begin, end, into, strides)


def _bytes(block: torch.Tensor) -> memoryview:
    return block.numpy().data
