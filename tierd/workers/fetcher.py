"""What comes from cold tiers into hot because trainers ask for it: a whole checkpoint, or what this node's ranks need.

Each chunk is fetched once, whichever rank asks first. What is whole is committed, and is a hot replica. A part never
is: its files have no names of their own, and go when the run has been restored. What was broken off is gone on with.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tierd.catalog import Catalog, Entry
from tierd.errors import BadRequest, Corrupt, Full, NotFound, TierdError
from tierd.format import layout
from tierd.format.ids import CheckpointId, Run
from tierd.format.manifest import Manifest
from tierd.incidents import Incidents
from tierd.metrics import Metrics
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.tier import Tier
from tierd.transfer.fetch import Fetch

NEARLY_ALL = 0.9  # of a checkpoint's bytes: the rest is little more to fetch, and makes it a hot replica

OnProgress = Callable[[int, int], None]
"""(bytes done, bytes in all) of a fetch from a cold tier."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A fetch that has brought all that was asked for so far, from the cold tier with these bytes of a manifest."""

    fetch: Fetch
    tier: str
    raw: bytes


class Fetcher:
    def __init__(
        self, catalog: Catalog, hot: Tier, hot_store: DirectoryStore, *, metrics: Metrics, incidents: Incidents
    ) -> None:
        self._catalog = catalog
        self._hot = hot
        self._hot_store = hot_store
        self._metrics = metrics
        self._incidents = incidents
        # Ranks ask for the same checkpoint at once: each chunk is fetched once.
        self._locks: weakref.WeakValueDictionary[CheckpointId, asyncio.Lock] = weakref.WeakValueDictionary()
        self._parts: dict[Run, _Part] = {}  # the last of each run
        self._sweeping = asyncio.Lock()  # no fetch begins meanwhile
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
        """(descriptors of the files, whether that is only a part). `chunks`: what is needed of each file; None: all."""
        manifest = entry.manifest
        async with self._locks.setdefault(manifest.id, asyncio.Lock()):
            if not is_hot_bad and self._hot.name in entry.tiers:
                return self.open_hot(manifest), False  # another rank has just had it fetched
            part = await self._take_up(manifest, cold)
            fetch = part.fetch
            # A hot replica that is damaged is mended as a whole.
            if chunks is None or self._hot.name in entry.tiers:
                fetch.want(None)
            else:
                fetch.want({file.name: some for file, some in zip(manifest.files, chunks, strict=False)})
            await self._fetch(fetch, cold, on_progress)
            if not fetch.is_whole:
                await self._fetch_headers(fetch, cold, on_progress)
            if not fetch.is_whole:
                self._parts[manifest.id.run] = part
                return _open_all(manifest, fetch.open_fd), True
            await self._commit(part, entry.all_milestones)
            return self.open_hot(manifest), False

    def open_hot(self, manifest: Manifest) -> list[int]:
        """Descriptors of the files of a hot replica."""
        return _open_all(manifest, lambda name: self._hot_store.open_fd(layout.file_key(manifest.id, name)))

    async def restored(self, run: Run) -> None:
        """No rank of the run needs more of what it has restored."""
        if self._parts.pop(run, None) is not None:
            await self.sweep(run)

    async def sweep(self, run: Run) -> None:
        """Removes what fetches of the run left that nobody will go on with."""
        if run in self._swept:
            return
        async with self._sweeping:
            active = {layout.checkpoint_prefix(one) for one, lock in self._locks.items() if lock.locked()}
            active |= {layout.checkpoint_prefix(one.fetch.manifest.id) for one in self._parts.values()}

            def is_given_up(path: str, touched_s: float) -> bool:
                return not any(path.startswith(one) for one in active)

            with contextlib.suppress(TierdError):  # it is tried again; what was asked for does not depend on it
                await self._hot_store.sweep_partials(run, is_given_up=is_given_up)
                if not active:
                    self._swept.add(run)

    async def _take_up(self, manifest: Manifest, cold: Tier) -> _Part:
        """The part that is here, to be gone on with, or one with nothing but the headers' first chunks to be fetched.

        Another tier is no going on: a chunk that verified here may have been found damaged since."""
        held = self._parts.pop(manifest.id.run, None)
        if held is not None and held.tier == cold.name and held.fetch.manifest == manifest:
            return held
        raw = await cold.manifest_bytes(manifest)
        await self._check_replaceable(manifest)
        return _Part(Fetch(manifest, self._hot_store, wanted={one.name: {0} for one in manifest.files}), cold.name, raw)

    async def _fetch_headers(self, fetch: Fetch, cold: Tier, on_progress: OnProgress) -> None:
        """The rest of headers that are longer than a chunk."""
        lengths = {one.name: await fetch.header_bytes(one.name) for one in fetch.manifest.files}
        fetch.want({one.name: range(-(-lengths[one.name] // one.chunk_bytes)) for one in fetch.manifest.files})
        if fetch.missing_bytes:
            await self._fetch(fetch, cold, on_progress)

    async def _fetch(self, fetch: Fetch, cold: Tier, on_progress: OnProgress) -> None:
        """All that is wanted is here and verified. What came stays for the next attempt, from whichever tier."""
        manifest = fetch.manifest
        if fetch.wanted_bytes >= NEARLY_ALL * manifest.size_bytes:
            fetch.want(None)

        def count(size_bytes: int) -> None:
            on_progress(fetch.wanted_bytes - fetch.missing_bytes, fetch.wanted_bytes)

        count(0)
        self._swept.discard(manifest.id.run)
        try:
            async with self._sweeping:
                await fetch.begin()
        except Full:
            with contextlib.suppress(TierdError):  # what went wrong first is what must be told
                folder = f"{manifest.id.run}/{manifest.id.name}"
                await self._hot_store.sweep_partials(folder, is_given_up=lambda path, touched_s: True)
            raise
        missing_bytes = fetch.missing_bytes
        try:
            problem = await fetch.take(cold, count)
        finally:
            given_bytes = missing_bytes - fetch.missing_bytes
            self._metrics.bytes_total.labels(tier=cold.name, direction="read").inc(given_bytes)
        if problem is not None:
            raise problem

    async def _commit(self, part: _Part, milestones: frozenset[str]) -> None:
        """A cold checkpoint becomes a hot one: same bytes, same commit."""
        manifest = part.fetch.manifest
        await part.fetch.finish()
        for milestone in milestones:
            await self._hot.mark_milestone(manifest.id, milestone, manifest.created_at)
        try:
            await self._hot.commit(manifest, raw=part.raw)
        except Corrupt as error:
            # An unreadable manifest lies there. The files are good all the same, and that is what is asked for.
            self._incidents.record("restore", error, manifest.id)
        else:
            self._catalog.add(manifest, self._hot.name, milestones)

    async def _check_replaceable(self, manifest: Manifest) -> None:
        """Raises BadRequest when hot holds another checkpoint under this name. A damaged one may be replaced."""
        with contextlib.suppress(NotFound, Corrupt):
            if await self._hot.manifest(manifest.id) != manifest:
                raise BadRequest(
                    f"fetch {manifest.id} into hot: another checkpoint is committed there under this name",
                    hint="do two jobs write one run into one place? Nothing was overwritten",
                )


def _open_all(manifest: Manifest, open_fd: Callable[[str], int]) -> list[int]:
    """Descriptors in the manifest's order: all of them, or none and the error."""
    with contextlib.ExitStack() as opened:
        descriptors: list[int] = []
        for file in manifest.files:
            descriptors.append(open_fd(file.name))
            opened.callback(os.close, descriptors[-1])
        opened.pop_all()
    return descriptors
