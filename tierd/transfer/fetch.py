"""Fetches a checkpoint into a directory from several replicas: each gives the chunks that are still missing.

Only checksums decide. Files of an earlier attempt are read and compared chunk by chunk; a chunk that differs, or that
one replica cannot give, comes from the next. No file gets its final name before all of them are whole. The commit is
left to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from tierd.descriptors import close_all, open_all
from tierd.errors import BadRequest, Corrupt, NotFound, TierdError
from tierd.format import checksum, layout
from tierd.format.manifest import FileEntry, Manifest
from tierd.format.shard import header_length, round_up
from tierd.tiers.chunks import ChunkSums, difference
from tierd.tiers.directory import PIECE_BYTES, DirectoryStore
from tierd.tiers.pool import for_each
from tierd.tiers.readable_tier import ReadableTier
from tierd.tiers.store import Progress, Source
from tierd.transfer.memory_file import MemoryFile
from tierd.transfer.partial_file import PartialFile, partial_name

READS = 2  # of a chunk that differs: a second read shows whether it was altered on its way


def partial_keys(manifest: Manifest, files: Collection[str] | None = None) -> set[str]:
    """The paths below a store that a fetch of these files, by default all, can continue."""
    entries = [entry for entry in manifest.files if files is None or entry.name in files]
    names = {name for entry in entries for name in (entry.name, partial_name(entry))}
    return {layout.file_key(manifest.id, name) for name in names}


class Fetch:
    """Files of `manifest` into `store`. `wanted`: chunk numbers by file name; None: all of all files.

    `reserves`: disk space is reserved for what is wanted as a whole; not where its size is only claimed. `in_memory`:
    the files are in memory and not in the directory, and the fetch cannot be finished.

    Call `begin()`, then `take()` for each replica until `missing_bytes` is 0, then `finish()`. After `want()`, start
    again with `begin()`. An interrupted fetch is continued by a new Fetch. The caller must not run two at once for one
    checkpoint and store.
    """

    def __init__(
        self,
        manifest: Manifest,
        store: DirectoryStore,
        *,
        wanted: Mapping[str, Collection[int]] | None = None,
        reserves: bool = True,
        in_memory: bool = False,
    ) -> None:
        self.manifest = manifest
        self.store = store
        self.is_in_memory = in_memory
        self._reserves = reserves
        make_file = MemoryFile if in_memory else PartialFile
        self._files = {
            entry.name: _File(
                entry=entry,
                partial=make_file(store, layout.file_key(manifest.id, entry.name), entry),
                wanted=bytearray(len(entry.chunks)),
                missing=bytearray(len(entry.chunks)),
                sums=_sums(entry),
            )
            for entry in manifest.files
            if wanted is None or entry.name in wanted
        }
        self.wanted_bytes = self.missing_bytes = 0
        self.want(wanted)

    @property
    def is_whole(self) -> bool:
        """Whether all of the checkpoint is wanted."""
        return self.wanted_bytes == self.manifest.size_bytes

    @property
    def taken_bytes(self) -> int:
        """The bytes that the store has for this fetch while it is not complete."""
        return self.wanted_bytes - (0 if self._reserves else self.missing_bytes)

    def unverified(self, name: str, chunks: Iterable[int]) -> list[int]:
        """The chunks among these that are not known to be here."""
        file = self._files[name]
        count = len(file.entry.chunks)
        return [index for index in chunks if index < count and (file.missing[index] or not file.wanted[index])]

    def want(self, more: Mapping[str, Collection[int]] | None) -> None:
        """Adds chunks of the files of this fetch; None: all chunks."""
        for file in self._files.values():
            count = len(file.entry.chunks)
            for index in range(count) if more is None else more.get(file.entry.name, ()):
                if index < count and not file.wanted[index]:
                    file.wanted[index] = file.missing[index] = 1
                    self.wanted_bytes += file.chunk_length(index)
                    self.missing_bytes += file.chunk_length(index)

    async def begin(self, progress: Progress | None = None) -> None:
        """Verifies what the directory has already, and makes files for the rest. `progress`: of what is read."""
        sizes = {} if self.is_in_memory else await self._stored_sizes()

        async def prepare(file: _File) -> None:
            has_size = sizes.get(file.partial.key) == file.entry.size_bytes
            file.is_in_place = has_size and not await self.store.pool.query(file.partial.exists)
            if not file.is_in_place and not await self.store.pool.run(
                file.partial.begin, self._reserves and all(file.wanted)
            ):
                self.missing_bytes += file.forget()  # an earlier file may have been removed
                file.is_blank = True

        await for_each(self.store.pieces_in_flight, self._files.values(), prepare)
        existing = [file for file in self._files.values() if file.is_in_place or not file.is_blank]
        await self._read(existing, self._source, is_own=True, writes=False, read_progress=progress)
        if damaged := [file for file in existing if file.is_in_place and any(file.missing)]:
            # Damaged under its final name: a new file takes the good chunks of it, and the others from replicas.
            sources = {file.entry.name: self._source(file) for file in damaged}
            for file in damaged:
                self.missing_bytes += file.forget()
                del sizes[file.partial.key]
                await prepare(file)
            await self._read(damaged, lambda file: sources[file.entry.name], is_own=True)

    def into_memory(self) -> Fetch:
        """A fetch of the same chunks, of which none has arrived."""
        wanted = {name: [i for i, flag in enumerate(file.wanted) if flag] for name, file in self._files.items()}
        return Fetch(self.manifest, self.store, wanted=wanted, in_memory=True)

    async def _stored_sizes(self) -> dict[str, int]:
        self.store.pool.check_settled()
        folder = layout.checkpoint_prefix(self.manifest.id)
        return {stored.key: stored.size_bytes for stored in await self.store.list(folder)}

    async def take(self, tier: ReadableTier, progress: Progress | None = None) -> TierdError | None:
        """Reads the missing chunks from a replica. Returns why some are still missing; None when none is.

        `progress`: of the chunks that are verified here. Raises errors of the directory, also while an earlier write
        that got no answer may still change a file.
        """
        if not self.is_in_memory:
            self.store.pool.check_settled()
        result = _ReadResult()
        try:
            for _ in range(READS):
                result = await self._read(
                    list(self._files.values()),
                    lambda file: tier.store.source(file.partial.key),
                    verified_progress=progress,
                )
                if not result.differing:
                    break
        except _ReadFailed as unavailable:
            return unavailable.error
        if not result.failed and not result.differing:
            return None
        failure = next(iter(result.failed.values()), None)
        message = failure.message if failure else f"read {self.manifest.id} in {tier.name}: {result.first}"
        counts = [f"{len(result.failed)} files"] * (len(result.failed) > 1)
        counts += [f"{result.differing} chunks"] * (result.differing > 1)
        message += f" ({' and '.join(counts)} in all)" if counts else ""
        return Corrupt(message, hint="another replica may have it; docs/RUNBOOK.md#corrupt-chunk")

    async def has_files_in_place(self) -> bool:
        """Whether the files that had their final names in `begin()` still do. If not, start again with `begin()`."""
        stored = {each.key for each in await self.store.list(layout.checkpoint_prefix(self.manifest.id))}
        return all(file.partial.key in stored for file in self._files.values() if file.is_in_place)

    async def finish(self) -> None:
        """Makes every file durable, then gives each its final name. Raises BadRequest unless all files are whole, and
        in the directory."""
        if self.is_in_memory:
            raise BadRequest(f"finish the fetch of {self.manifest.id}: it is in memory")
        if any(any(file.missing) or not all(file.wanted) for file in self._files.values()):
            raise BadRequest(f"finish the fetch of {self.manifest.id}: chunks are missing")
        new = [
            file.partial
            for file in self._files.values()
            if isinstance(file.partial, PartialFile) and not file.is_in_place
        ]
        run, limit = self.store.pool.run, self.store.pieces_in_flight
        await for_each(limit, new, lambda file: run(file.make_durable, timeout_s=file.sync_timeout_s))
        await for_each(limit, new, lambda file: run(file.publish))

    def source(self, name: str) -> Source:
        """A file as it is here. Its wanted chunks are verified once `missing_bytes` is 0."""
        return self._source(self._files[name])

    async def open_files(self) -> list[int]:
        """As `source`, but read-only descriptors of the full size, of all files in the manifest's order. The caller
        closes them."""

        def open_file(entry: FileEntry) -> int:
            file = self._files[entry.name]
            return self.store.open_blocking(file.partial.key) if file.is_in_place else file.partial.open_fd()

        return await self.store.pool.query(lambda: open_all(map(open_file, self.manifest.files)), discard=close_all)

    async def header_bytes(self, name: str) -> int:
        """The length of a shard's header, read from its first chunk, which must be here. Raises Corrupt."""
        entry = self._files[name].entry
        first = bytearray(min(8, entry.size_bytes))
        await self.source(name).fill(0, memoryview(first))
        return header_length(bytes(first), entry.size_bytes, where=f"{self.manifest.id}/{name}")

    def _source(self, file: _File) -> Source:
        return self.store.source(file.partial.key) if file.is_in_place else file.partial.source

    async def _read(
        self,
        files: Sequence[_File],
        source_of: Callable[[_File], Source],
        *,
        is_own: bool = False,
        writes: bool = True,
        read_progress: Progress | None = None,
        verified_progress: Progress | None = None,
    ) -> _ReadResult:
        """Reads all missing chunks of `files` once; those that verify are no longer missing.

        `is_own`: the source is this directory, where every error only means that the file must be fetched. `writes`:
        the chunks are written to the partial files.
        """
        result = _ReadResult()
        for file in files:
            file.sums = _sums(file.entry)

        async def read(piece: tuple[_File, int, int]) -> None:
            file, offset, length = piece
            entry = file.entry
            if entry.name in result.failed:
                return
            try:
                async with self.store.buffers.borrow(min(PIECE_BYTES, round_up(entry.size_bytes))) as buffer:
                    try:
                        await source_of(file).fill(offset, buffer[:length])
                    except TierdError as error:  # ends the borrowing by an error: the read may have been left behind
                        raise _ReadFailed(error) from error
                    # `file.sums` is looked up now: a call that is left behind must not add to the sums of a later read.
                    act = partial(_write_and_sum, file.partial) if writes else _sum
                    await self.store.pool.run(act, file.sums, offset, buffer, length)
            except _ReadFailed as failed:
                if not is_own and not isinstance(failed.error, (Corrupt, NotFound, BadRequest)):
                    raise
                result.failed[entry.name] = failed.error
                return
            for index in range(offset // entry.chunk_bytes, -(-(offset + length) // entry.chunk_bytes)):
                found = file.sums.pop_chunk(index)
                if found is None:
                    continue
                if not (problem := difference(entry, index, found)):
                    file.missing[index] = 0
                    self.missing_bytes -= file.chunk_length(index)
                    if verified_progress is not None:
                        verified_progress(file.chunk_length(index))
                else:
                    result.differing += 1
                    result.first = result.first or f"{entry.name}: {problem}"
            if read_progress is not None:
                read_progress(length)

        pieces = ((file, *piece) for file in files for piece in file.missing_pieces())
        await for_each(self.store.pieces_in_flight, pieces, read)
        return result


def _sum(sums: ChunkSums, offset: int, buffer: memoryview, length: int) -> None:
    sums.add(offset, buffer[:length])


def _write_and_sum(
    file: PartialFile | MemoryFile, sums: ChunkSums, offset: int, buffer: memoryview, length: int
) -> None:
    file.write(offset, buffer, length)
    _sum(sums, offset, buffer, length)


def _sums(entry: FileEntry) -> ChunkSums:
    """Of a file that is compared with its entry. Where the entry has digests, no CRC is needed as well."""
    return ChunkSums(entry.size_bytes, entry.chunk_bytes, entry.algorithm, has_crc=not entry.algorithm)


@dataclass(slots=True)
class _File:
    """`wanted`, `missing`: one flag for each chunk; missing chunks are wanted and not verified here. `is_blank`: this
    fetch made the partial file, so it has nothing to verify."""

    entry: FileEntry
    partial: PartialFile | MemoryFile
    wanted: bytearray
    missing: bytearray
    sums: ChunkSums
    is_in_place: bool = False
    is_blank: bool = False

    def chunk_length(self, index: int) -> int:
        return min(self.entry.chunk_bytes, self.entry.size_bytes - index * self.entry.chunk_bytes)

    def forget(self) -> int:
        """All wanted chunks are missing again. Returns by how many bytes more are missing."""
        verified = [index for index, flag in enumerate(self.wanted) if flag and not self.missing[index]]
        self.missing[:] = self.wanted
        self.is_in_place = False
        return sum(map(self.chunk_length, verified))

    def missing_pieces(self) -> Iterator[tuple[int, int]]:
        """(offset, length) of each: within one chunk, or several whole chunks; at most PIECE_BYTES."""
        count_max = max(1, PIECE_BYTES // self.entry.chunk_bytes)
        index = self.missing.find(1)
        while index >= 0:
            end = index + 1
            while end < min(index + count_max, len(self.missing)) and self.missing[end]:
                end += 1
            begin = index * self.entry.chunk_bytes
            for offset, length in checksum.chunk_ranges(sum(map(self.chunk_length, range(index, end))), PIECE_BYTES):
                yield begin + offset, length
            index = self.missing.find(1, end)


@dataclass(slots=True)
class _ReadResult:
    """`failed`: errors by file name. `differing`: the number of chunks with another checksum; `first`: one of them."""

    failed: dict[str, TierdError] = field(default_factory=dict[str, TierdError])
    differing: int = 0
    first: str = ""


class _ReadFailed(Exception):
    def __init__(self, error: TierdError) -> None:
        super().__init__(error)
        self.error = error
