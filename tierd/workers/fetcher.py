"""Fetches from cold tiers into hot what trainers ask for: a whole checkpoint, or the chunks that the ranks here need.

Each chunk is fetched once, whichever rank asks first. A whole checkpoint is committed, as a hot replica. A part never
is: its files have temporary names and are deleted once the run is restored. An interrupted fetch is continued.

Where hot does not take the files, they are fetched into memory: the trainer would otherwise get an older checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tierd.catalog.entry import Entry
from tierd.catalog.listing import check_sizes
from tierd.cgroup import available_bytes
from tierd.context import DaemonContext
from tierd.errors import BadRequest, Corrupt, Foreign, Full, NotFound, TierdError, TierUnreachable
from tierd.failpoints import failpoint
from tierd.format import layout
from tierd.format.ids import CheckpointId, Run
from tierd.format.manifest import Manifest
from tierd.tiers.tier import Tier
from tierd.transfer.fetch import Fetch
from tierd.workers.hot_space import HotSpace, MakeRoom, no_room
from tierd.workers.recovery import clear_uncommitted

log = logging.getLogger("tierd")

IN_MEMORY_SHARE_MAX = 0.5  # of the memory that is available; training allocates its slots next
IN_MEMORY_KEPT_S = 900.0  # after the last request of a rank; a trainer that was killed may ask again
# After a fetch into memory has failed: its error refers to it in cycles, and the memory must not wait for Python's own
# collections.
COLLECTED_AFTER_S = 1.0
NEARLY_ALL = 0.9  # of a checkpoint's bytes: then fetch the rest too, which makes it a hot replica

OnProgress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) during a fetch from a cold tier."""


@dataclass(frozen=True, slots=True)
class _PartialFetch:
    """A fetch that has brought all chunks asked for so far. `tier`: where from; `raw`: its manifest's bytes there.
    `timer`: of a fetch into memory, releases it."""

    fetch: Fetch
    tier: str
    raw: bytes
    timer: asyncio.TimerHandle | None = None


@dataclass(frozen=True, slots=True)
class PeerFetches:
    """What is being fetched of a checkpoint from other nodes: by file name, with a lock for each."""

    checkpoint: CheckpointId
    fetches: dict[str, Fetch] = field(default_factory=dict[str, Fetch])
    locks: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))


class Fetcher:
    """`from_peers`: of each run that is being restored from other nodes; its files are kept until it is restored.
    `in_memory`: the fetches into memory, of all runs."""

    def __init__(self, context: DaemonContext, make_room: MakeRoom = no_room) -> None:
        self._context = context
        self._space = HotSpace(context.hot, make_room)
        self._hot = context.hot
        self._hot_store = context.hot_store
        # Ranks ask for the same checkpoint at once, and each chunk is fetched once.
        self._locks: weakref.WeakValueDictionary[CheckpointId, asyncio.Lock] = weakref.WeakValueDictionary()
        self._parts: dict[Run, _PartialFetch] = {}  # the last of each run
        self.from_peers: dict[Run, PeerFetches] = {}
        self.in_memory: weakref.WeakSet[Fetch] = weakref.WeakSet()
        self._sweeping = asyncio.Lock()  # while it is held, no fetch begins
        self._swept: set[Run] = set()

    async def bring(
        self,
        entry: Entry,
        cold: Tier,
        chunks: Sequence[Sequence[int]] | None,
        on_progress: OnProgress,
        *,
        is_hot_bad: bool,
    ) -> tuple[list[int], bool]:
        """(descriptors of the files, whether they are only a part). `chunks`: those needed of each file; None: all."""
        manifest = entry.manifest
        async with self._locks.setdefault(manifest.id, asyncio.Lock()):
            is_in_hot = entry.is_whole_in(self._hot.name)
            if not is_hot_bad and is_in_hot:
                return await self.open_hot(manifest), False  # fetched for another rank just now
            part = await self._continue(manifest, cold)
            fetch = part.fetch
            # A damaged hot replica is replaced as a whole.
            if chunks is None or is_in_hot:
                fetch.want(None)
            else:
                fetch.want({file.name: indexes for file, indexes in zip(manifest.files, chunks, strict=False)})
            try:
                return await self._bring(entry, part, cold, on_progress)
            except TierdError:
                if self.in_memory:
                    asyncio.get_running_loop().call_later(COLLECTED_AFTER_S, gc.collect)
                raise

    async def _bring(
        self, entry: Entry, part: _PartialFetch, cold: Tier, on_progress: OnProgress
    ) -> tuple[list[int], bool]:
        """As `bring`, of what `part` wants."""
        while True:
            part = await self._fetch_wanted(part, cold, on_progress)
            fetch = part.fetch
            # Hot keeps this node's part, not both.
            if not fetch.is_whole or fetch.is_in_memory or entry.is_part_in(self._hot.name):
                self._keep(part)
                return await fetch.open_files(), not fetch.is_whole
            try:
                async with self._context.lock(entry.id):
                    if await fetch.has_files_in_place():
                        await self._commit(part, entry.all_milestones)
                        return await self.open_hot(entry.manifest), False
                # Files that were here have been deleted meanwhile.
            except (Full, TierUnreachable) as error:
                await self._clear(entry.id)
                error.__traceback__ = None  # it refers to `part`, and may live on in a cycle
                part = replace(part, fetch=await self._into_memory(fetch, error))

    async def _clear(self, checkpoint: CheckpointId) -> None:
        """Delete files that have their final names, and that no manifest refers to."""
        async with self._context.lock(checkpoint):
            if self._context.memory.find(checkpoint) is None:  # else the persister may be writing the same files
                with contextlib.suppress(TierdError):  # the next start of the daemon deletes them
                    await clear_uncommitted(self._hot, checkpoint)

    async def open_hot(self, manifest: Manifest) -> list[int]:
        """Descriptors of the files of a hot replica."""
        return await self._hot_store.open_files(layout.file_key(manifest.id, file.name) for file in manifest.files)

    async def restored(self, run: Run) -> None:
        """All ranks of the run have read what they asked for: delete the part."""
        was_in_part = self._take_kept(run) is not None
        if self.from_peers.pop(run, None) is not None or was_in_part:
            await self.sweep(run)

    async def sweep(self, run: Run) -> None:
        """Delete what fetches of the run left behind and nobody will continue."""
        if run in self._swept:
            return
        async with self._sweeping:
            active = {layout.checkpoint_prefix(checkpoint) for checkpoint, lock in self._locks.items() if lock.locked()}
            active |= {layout.checkpoint_prefix(part.fetch.manifest.id) for part in self._parts.values()}
            active |= {layout.checkpoint_prefix(fetches.checkpoint) for fetches in self.from_peers.values()}
            with contextlib.suppress(TierdError):  # it is tried again, and the restore does not depend on it
                prefixes = tuple(active)
                await self._hot_store.sweep_partials(run, is_given_up=lambda path, _: not path.startswith(prefixes))
                if not active:
                    self._swept.add(run)

    async def _continue(self, manifest: Manifest, cold: Tier) -> _PartialFetch:
        """The part that was fetched before, or a new one that wants only the first chunk of each header.

        A part from another tier is not continued: the trainer may have found one of its chunks damaged."""
        part = self._take_kept(manifest.id.run)
        if part is not None and part.tier == cold.name and part.fetch.manifest == manifest:
            return part
        raw = await cold.manifest_bytes(manifest)
        await check_sizes(manifest, cold)
        fetch = Fetch(manifest, self._hot_store, wanted={file.name: {0} for file in manifest.files})
        try:
            await self._check_replaceable(manifest)
        except TierUnreachable as error:
            fetch = await self._into_memory(fetch, error)
        return _PartialFetch(fetch, cold.name, raw)

    def _keep(self, part: _PartialFetch) -> None:
        """Keep the fetch until the run is restored. The memory is released even if nobody asks again."""
        run = part.fetch.manifest.id.run
        if part.fetch.is_in_memory:
            timer = asyncio.get_running_loop().call_later(IN_MEMORY_KEPT_S, self._parts.pop, run, None)
            part = replace(part, timer=timer)
        self._parts[run] = part

    def _take_kept(self, run: Run) -> _PartialFetch | None:
        part = self._parts.pop(run, None)
        if part is not None and part.timer is not None:
            part.timer.cancel()
        return part

    async def _fetch_wanted(self, part: _PartialFetch, cold: Tier, on_progress: OnProgress) -> _PartialFetch:
        """Fetch all that is wanted, and all headers. Returns the part: one in memory if hot has refused its files."""
        while True:
            try:
                await self._fetch(part.fetch, cold, on_progress)
                if not part.fetch.is_whole:
                    await self._fetch_headers(part.fetch, cold, on_progress)
                return part
            except _HotRefusedError as refused:
                part = replace(part, fetch=await self._into_memory(part.fetch, refused.error))

    async def _into_memory(self, fetch: Fetch, error: TierdError) -> Fetch:
        """A fetch of the same chunks into memory. Raises `error`, for which hot refused them, if there is too little
        memory, and if it is the error of a fetch into memory."""
        if fetch.is_in_memory or await self._lacks_memory(fetch.wanted_bytes):
            raise error
        log.warning("fetch %s into memory, because hot does not take it: %s", fetch.manifest.id, error.message)
        await self._remove_partials(fetch.manifest.id)
        into_memory = fetch.into_memory()
        self.in_memory.add(into_memory)
        return into_memory

    async def _lacks_memory(self, need_bytes: int, *, of: Fetch | None = None) -> bool:
        """Whether the share of the available memory is too small for `need_bytes`, beside what the fetches into memory
        other than `of` still need."""
        available = await asyncio.to_thread(available_bytes)
        promised_bytes = sum(each.missing_bytes for each in self.in_memory if each is not of)
        return promised_bytes + need_bytes > IN_MEMORY_SHARE_MAX * available

    async def _fetch_headers(self, fetch: Fetch, cold: Tier, on_progress: OnProgress) -> None:
        """Fetch the rest of headers that are longer than a chunk."""
        files = fetch.manifest.files
        fetch.want({file.name: range(-(-await fetch.header_bytes(file.name) // file.chunk_bytes)) for file in files})
        if fetch.missing_bytes:
            await self._fetch(fetch, cold, on_progress)

    async def begin(self, fetch: Fetch, *, room_bytes_max: int | None = None) -> None:
        """Makes room in hot, of `room_bytes_max` at most, and files for what is missing."""
        if fetch.is_in_memory:
            if await self._lacks_memory(fetch.missing_bytes, of=fetch):
                raise Full(
                    f"fetch {fetch.manifest.id} into memory: half of the available memory does not take "
                    f"{fetch.missing_bytes} bytes",
                    hint="free space in hot; docs/RUNBOOK.md#disk-full",
                )
            await fetch.begin()
            return
        missing_space_bytes = await self._space.missing_bytes(fetch.missing_bytes)
        if room_bytes_max is not None:
            missing_space_bytes = min(missing_space_bytes, room_bytes_max)
        if missing_space_bytes:
            await self._space.free(missing_space_bytes)
        self._swept.discard(fetch.manifest.id.run)
        try:
            async with self._sweeping:
                await fetch.begin()
        except Full:
            await self._remove_partials(fetch.manifest.id)
            raise

    async def _fetch(self, fetch: Fetch, cold: Tier, on_progress: OnProgress) -> None:
        """Fetch and verify all that is wanted. On failure, what arrived stays for the next attempt, from any tier.

        Raises _HotRefusedError when hot cannot take it, else the error of the cold tier."""
        manifest = fetch.manifest
        if fetch.wanted_bytes >= NEARLY_ALL * manifest.size_bytes:
            fetch.want(None)

        def count(size_bytes: int) -> None:
            on_progress(fetch.wanted_bytes - fetch.missing_bytes, fetch.wanted_bytes)

        count(0)
        try:
            await self.begin(fetch)
            missing_bytes = fetch.missing_bytes
            try:
                problem = await fetch.take(cold, count)
            finally:
                given_bytes = missing_bytes - fetch.missing_bytes
                self._context.metrics.bytes_total.labels(tier=cold.name, direction="read").inc(given_bytes)
        except (Full, TierUnreachable) as error:
            raise _HotRefusedError(error) from error
        if problem is not None:
            if fetch.missing_bytes == fetch.wanted_bytes:  # the space of files without one valid chunk
                await self._remove_partials(manifest.id)
            raise problem

    async def _remove_partials(self, checkpoint: CheckpointId) -> None:
        """Give back the space of a fetch that failed. The error of the fetch is the one to report."""
        with contextlib.suppress(TierdError):
            folder = f"{checkpoint.run}/{checkpoint.name}"
            await self._hot_store.sweep_partials(folder, is_given_up=lambda path, touched_s: True)

    async def _commit(self, part: _PartialFetch, milestones: frozenset[str]) -> None:
        """Commit the fetched checkpoint in hot, with the same manifest bytes. The caller holds its lock, so that no
        deletion takes the files."""
        manifest = part.fetch.manifest
        await part.fetch.finish()
        failpoint("fetch.commit")
        try:
            await self._hot.commit(manifest, raw=part.raw, milestones=milestones)
        except (Corrupt, Foreign) as error:
            # The manifest there is unreadable. The files are good all the same, and the trainer needs only them.
            self._context.incidents.record("restore", error, manifest.id)
        else:
            self._context.catalog.add(manifest, self._hot.name, milestones)

    async def _check_replaceable(self, manifest: Manifest) -> None:
        """Raises BadRequest if hot holds another checkpoint under this name. A damaged one may be replaced."""
        with contextlib.suppress(NotFound, Corrupt):
            if await self._hot.manifest(manifest.id) != manifest:
                raise BadRequest(
                    f"fetch {manifest.id} into hot: another checkpoint is committed there under this name",
                    hint="do two jobs write one run into one place? Nothing was overwritten",
                )


class _HotRefusedError(Exception):
    def __init__(self, error: TierdError) -> None:
        super().__init__(error)
        self.error = error
