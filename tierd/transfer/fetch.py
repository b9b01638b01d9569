"""A checkpoint on its way into a directory: what verifies there stays, each replica in turn gives what is missing.

Nothing is believed but checksums: what an earlier attempt left is read and compared, chunk by chunk, and a chunk that
differs, or that one replica cannot give, comes from the next. No file has its own name before all of them are whole;
to commit is left to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tierd.errors import BadRequest, Corrupt, NotFound, TierdError
from tierd.format import checksum, layout
from tierd.format.manifest import FileEntry, Manifest
from tierd.format.shard import header_length
from tierd.tiers.chunks import ChunkSums, difference
from tierd.tiers.direct_io import round_up
from tierd.tiers.directory import PIECE_BYTES, DirectoryStore
from tierd.tiers.pool import each
from tierd.tiers.store import Progress, Source
from tierd.tiers.tier import Tier
from tierd.transfer.partial_file import PartialFile, arriving_name

READINGS = 2  # of a chunk in one replica: it may have been altered on its way, which a second reading tells


def arriving_keys(manifest: Manifest, files: Collection[str] | None = None) -> set[str]:
    """The paths below a store that a fetch of this checkpoint, or of these files of it, may go on with."""
    entries = [entry for entry in manifest.files if files is None or entry.name in files]
    names = {name for entry in entries for name in (entry.name, arriving_name(entry))}
    return {layout.file_key(manifest.id, name) for name in names}


class Fetch:
    """Files of `manifest` into `store`. `wanted`: these chunks of these files only; else all of all.

    `begin()`, `take()` from replicas until `missing_bytes` is 0, then `finish()`; killed or given up at any point, the
    next Fetch goes on. After `want()` it begins again, and only with what is new. Two at once for one checkpoint and
    store are for the caller to prevent.
    """

    def __init__(
        self,
        manifest: Manifest,
        store: DirectoryStore,
        *,
        wanted: Mapping[str, Collection[int]] | None = None,
    ) -> None:
        self.manifest = manifest
        self.store = store
        self._files: list[_File] = []
        for entry in manifest.files:
            if wanted is None or entry.name in wanted:
                self._files.append(
                    _File(
                        entry=entry,
                        arriving=PartialFile(store, self._key(entry.name), entry),
                        wanted=bytearray(len(entry.chunks)),
                        missing=bytearray(len(entry.chunks)),
                        sums=ChunkSums(entry.size_bytes, entry.chunk_bytes),
                    )
                )
        self.wanted_bytes = self.missing_bytes = 0
        self.want(wanted)

    @property
    def is_whole(self) -> bool:
        """Whether it is to bring all of the checkpoint."""
        return self.wanted_bytes == self.manifest.size_bytes

    def want(self, more: Mapping[str, Collection[int]] | None) -> None:
        """These chunks of its files too; None: all of them."""
        for one in self._files:
            count = len(one.entry.chunks)
            for index in range(count) if more is None else more.get(one.entry.name, ()):
                if index < count and not one.wanted[index]:
                    one.wanted[index] = one.missing[index] = 1
                    self.wanted_bytes += one.chunk_length(index)
                    self.missing_bytes += one.chunk_length(index)

    async def begin(self, progress: Progress | None = None) -> None:
        """Takes stock of what lies there, and makes room for what does not. `progress`: told of all that it reads."""
        sizes = {stored.key: stored.size_bytes for stored in await self.store.list(self._key(""))}

        async def prepare(one: _File) -> None:
            has_right_size = sizes.get(self._key(one.entry.name)) == one.entry.size_bytes
            one.is_in_place = has_right_size and not await self.store.pool.run(one.arriving.exists)
            if not one.is_in_place:
                await make(one)

        async def make(one: _File) -> None:
            if not await self.store.pool.run(one.arriving.begin, is_whole=all(one.wanted)):
                self.missing_bytes += one.forget()  # what had come may have been swept away
                one.is_blank = True

        await each(self.store.pieces_in_flight, self._files, prepare)
        known = [one for one in self._files if one.is_in_place or not one.is_blank]
        await self._read(known, self._source, is_own=True, writes=False, seen=progress)
        if hurt := [one for one in self._files if one.is_in_place and any(one.missing)]:
            # Damaged under its own name: a new file is made, of what is good in it and of what the replicas give.
            in_place = [self._source(one) for one in hurt]
            for one in hurt:
                self.missing_bytes += one.forget()
                await make(one)
            sources = dict(zip([one.entry.name for one in hurt], in_place, strict=True))
            await self._read(hurt, lambda one: sources[one.entry.name], is_own=True)

    async def take(self, tier: Tier, progress: Progress | None = None) -> TierdError | None:
        """What this replica can give of what is missing. Returns why that is not all; None when nothing is missing.

        `progress`: told of every chunk that is here and verified. Raises what goes wrong in the directory itself.
        """
        found = _Found()
        try:
            for _ in range(READINGS):
                found = await self._read(
                    self._files,
                    lambda one: tier.source(self.manifest.id, one.entry),
                    verified=progress,
                )
                if not found.differing:
                    break
            return found.problem(f"{self.manifest.id} in {tier.name}")
        except _Gone as gone:
            return gone.error

    async def finish(self) -> None:
        """Every file durable, then every file under its own name. Only for whole files of which nothing is missing."""
        if any(any(one.missing) or not all(one.wanted) for one in self._files):
            raise BadRequest(f"finish the fetch of {self.manifest.id}: some of it has not come")
        new = [one.arriving for one in self._files if not one.is_in_place]
        await each(self.store.pieces_in_flight, new, lambda one: self.store.pool.run(one.make_durable))
        await each(self.store.pieces_in_flight, new, lambda one: self.store.pool.run(one.publish))

    def source(self, name: str) -> Source:
        """The bytes of a file as they are here; those of its wanted chunks, once nothing is missing, are verified."""
        return self._source(self._file(name))

    def open_fd(self, name: str) -> int:
        """The same as a read-only descriptor, of the file's full size, for a trainer. The caller closes it."""
        one = self._file(name)
        return self.store.open_fd(self._key(name)) if one.is_in_place else one.arriving.open_fd()

    async def header_bytes(self, name: str) -> int:
        """How long the header of a shard is, as its first chunk says, which must be here. Raises Corrupt."""
        entry = self._file(name).entry
        first = bytearray(min(8, entry.size_bytes))
        await self.source(name).fill(0, memoryview(first))
        return header_length(bytes(first), entry.size_bytes, where=f"{self.manifest.id}/{name}")

    def _file(self, name: str) -> _File:
        return next(one for one in self._files if one.entry.name == name)

    def _source(self, one: _File) -> Source:
        if one.is_in_place:
            return Tier("", self.store).source(self.manifest.id, one.entry)
        return _Arrived(self.store, one.arriving)

    def _key(self, name: str) -> str:
        return layout.checkpoint_prefix(self.manifest.id) + name

    async def _read(
        self,
        files: Sequence[_File],
        source_of: Callable[[_File], Source],
        *,
        is_own: bool = False,
        writes: bool = True,
        seen: Progress | None = None,
        verified: Progress | None = None,
    ) -> _Found:
        """All missing chunks of `files`, once, from wherever it is said. Those that verify are missing no longer.

        `is_own`: from this directory, where nothing that cannot be read is worth more than to be fetched.
        """
        found = _Found()
        for one in files:
            one.sums = ChunkSums(one.entry.size_bytes, one.entry.chunk_bytes)

        def keep(one: _File, offset: int, buffer: memoryview, length: int) -> None:
            one.sums.add(offset, buffer[:length])
            if writes:
                one.arriving.write(offset, buffer, length)

        async def bring(piece: tuple[_File, int, int]) -> None:
            one, offset, length = piece
            if one.entry.name in found.lost:
                return
            async with self.store.buffers.lend(min(PIECE_BYTES, round_up(one.entry.size_bytes))) as buffer:
                try:
                    await source_of(one).fill(offset, buffer[:length])
                except TierdError as error:
                    if not is_own and not isinstance(error, (Corrupt, NotFound, BadRequest)):
                        raise _Gone(error) from error
                    found.lost[one.entry.name] = error
                    return
                await self.store.pool.run(keep, one, offset, buffer, length)
            for index in range(offset // one.entry.chunk_bytes, -(-(offset + length) // one.entry.chunk_bytes)):
                got = one.sums.take(index)
                if got == one.entry.chunks[index]:
                    one.missing[index] = 0
                    self.missing_bytes -= one.chunk_length(index)
                    if verified is not None:
                        verified(one.chunk_length(index))
                elif got is not None:
                    found.differing += 1
                    found.first = found.first or f"{one.entry.name}: {difference(one.entry, index, got)}"
            if seen is not None:
                seen(length)

        await each(self.store.pieces_in_flight, ((one, *at) for one in files for at in one.pieces()), bring)
        return found


@dataclass(slots=True)
class _File:
    """`missing`: 1 for each chunk that is wanted and has not been verified here. `is_blank`: it was made for this
    fetch, so there is nothing to be found in it."""

    entry: FileEntry
    arriving: PartialFile
    wanted: bytearray
    missing: bytearray
    sums: ChunkSums
    is_in_place: bool = False
    is_blank: bool = False

    def chunk_length(self, index: int) -> int:
        return min(self.entry.chunk_bytes, self.entry.size_bytes - index * self.entry.chunk_bytes)

    def missing_bytes(self) -> int:
        return sum(self.chunk_length(index) for index, flag in enumerate(self.missing) if flag)

    def forget(self) -> int:
        """All that is wanted is missing again. Returns how many bytes more that is."""
        before = self.missing_bytes()
        self.missing[:] = self.wanted
        self.is_in_place = False
        return self.missing_bytes() - before

    def pieces(self) -> Iterator[tuple[int, int]]:
        """(offset, length) of what is missing: within one chunk, or a number of whole ones; at most PIECE_BYTES."""
        at_once = max(1, PIECE_BYTES // self.entry.chunk_bytes)
        index = self.missing.find(1)
        while index >= 0:
            end = index + 1
            while end < min(index + at_once, len(self.missing)) and self.missing[end]:
                end += 1
            begin = index * self.entry.chunk_bytes
            for offset, length in checksum.chunk_ranges(sum(map(self.chunk_length, range(index, end))), PIECE_BYTES):
                yield begin + offset, length
            index = self.missing.find(1, end)


@dataclass(slots=True)
class _Found:
    """What one reading met with. `lost`: files that could not be read on, by name. `differing`: how many chunks."""

    lost: dict[str, TierdError] = field(default_factory=dict[str, TierdError])
    differing: int = 0
    first: str = ""

    def problem(self, where: str) -> TierdError | None:
        if not self.lost and not self.differing:
            return None
        told = next(iter(self.lost.values())).message if self.lost else f"read {where}: {self.first}"
        more = [f"{len(self.lost)} files"] * (len(self.lost) > 1) + [f"{self.differing} chunks"] * (self.differing > 1)
        told += f" ({' and '.join(more)} in all)" if more else ""
        return Corrupt(told, hint="another replica may have it; docs/RUNBOOK.md#corrupt-chunk")


class _Gone(Exception):
    """A replica that gives nothing more now."""

    def __init__(self, error: TierdError) -> None:
        super().__init__(error)
        self.error = error


class _Arrived:
    """A file that is arriving, as far as it has."""

    def __init__(self, store: DirectoryStore, file: PartialFile) -> None:
        self._store = store
        self._file = file

    async def fill(self, offset: int, buffer: memoryview) -> None:
        if not await self._store.pool.run(self._file.read, offset, buffer):
            raise Corrupt(f"read a file that is arriving in {self._store.url}: it ends before byte {offset}")
