"""Finds a checkpoint for a trainer and opens its files: memory, else hot, else cold, fetched into hot first.

Newest first, replica by replica; one that is damaged or out of reach is recorded and the next one tried. An
absent checkpoint and one that cannot be seen are different answers: only the first lets a trainer start fresh.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tierd.catalog import MEMORY, Catalog
from tierd.errors import Corrupt, NotFound, TierdError, TierUnreachable, Unsupported
from tierd.format import layout
from tierd.format.ids import CheckpointId, Run
from tierd.format.manifest import Manifest
from tierd.format.wire import DESCRIPTORS_MAX, Find
from tierd.incidents import Incidents
from tierd.memory import MemoryTier, SnapshotSet
from tierd.metrics import Metrics
from tierd.slots import snapshot_entry
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.tier import Tier, copy_checkpoint
from tierd.workers.persister import manifest_of

AUTO = "auto"
FIRST_LOOK_TIMEOUT_S = 30.0  # how long a first listing of the cold tiers may hold up an answer

OnProgress = Callable[[int, int], None]
"""(bytes done, bytes in all) of a fetch from a cold tier."""


@dataclass(frozen=True, slots=True)
class Handover:
    """An open checkpoint: descriptors of its files in the manifest's order, which the taker closes."""

    tier: str
    manifest: Manifest
    descriptors: list[int]


class Restorer:
    def __init__(
        self,
        memory: MemoryTier,
        catalog: Catalog,
        hot: Tier,
        hot_store: DirectoryStore,
        cold: Mapping[str, Tier],
        first_looks: Sequence[asyncio.Event],
        *,
        metrics: Metrics,
        incidents: Incidents,
    ) -> None:
        self._memory = memory
        self._catalog = catalog
        self._hot = hot
        self._hot_store = hot_store
        self._cold = cold
        self._first_looks = first_looks
        self._metrics = metrics
        self._incidents = incidents
        self._fetching = asyncio.Lock()  # ranks ask for the same checkpoint at once: it is fetched once

    async def find(self, run: Run, find: Find, on_progress: OnProgress) -> Handover:
        """The newest replica that `find` describes. Raises NotFound only when every tier has been seen."""
        await self.wait_first_looks()
        failed: TierdError | None = None
        for checkpoint, tier in self._candidates(run, find):
            if f"{checkpoint.name}@{tier}" in find.exclude:
                failed = failed or Corrupt(
                    f"restore {checkpoint}: every replica in reach has been found damaged",
                    hint="`tierd verify` reads them all; docs/RUNBOOK.md#corrupt-chunk",
                )
                continue
            try:
                return await self._open(checkpoint, tier, on_progress)
            except TierdError as error:
                failed = error
                if isinstance(error, Corrupt):
                    self._metrics.verify_failures_total.labels(tier=tier).inc()
                self._incidents.record("restore", error, checkpoint)
        if failed is not None:
            raise failed
        wanted = f"step {find.step}" if find.step is not None else find.milestone or "any step"
        unseen = [f"{name} ({known.error})" for name, known in self._catalog.tiers.items() if not known.is_known]
        if unseen and find.tier in (AUTO, *(name for name in self._cold)):
            raise TierUnreachable(
                f"find a checkpoint of {run} ({wanted}): none in reach, and these could not be listed: "
                + "; ".join(unseen),
                hint="bring the tier back, or take it out of the config to start fresh on purpose",
            )
        raise NotFound(
            f"find a checkpoint of {run} ({wanted}) in tier {find.tier}: there is none",
            hint="`tierd ls` shows what there is",
        )

    async def wait_first_looks(self) -> None:
        """Until each cold tier was listed once or could not be: the newest checkpoint may be only there."""
        try:
            async with asyncio.timeout(FIRST_LOOK_TIMEOUT_S):
                await asyncio.gather(*(look.wait() for look in self._first_looks))
        except TimeoutError:
            pass  # the catalog says which are unknown

    def _candidates(self, run: Run, find: Find) -> Iterator[tuple[CheckpointId, str]]:
        """(checkpoint, tier), newest checkpoint first, nearest tier first."""
        in_memory = {one.id for one in self._memory.whole(run)}
        listed = {entry.manifest.id: entry for entry in self._catalog.entries(run)}
        for checkpoint in sorted(in_memory | listed.keys(), key=lambda one: one.recency, reverse=True):
            entry = listed.get(checkpoint)
            if find.step is not None and checkpoint.step != find.step:
                continue
            if find.generation is not None and checkpoint.generation != find.generation:
                continue
            if find.milestone is not None and (entry is None or find.milestone not in entry.all_milestones):
                continue
            if find.step is None and entry is not None and entry.healthy is False:
                continue
            if checkpoint in in_memory and find.tier in (AUTO, MEMORY):
                yield checkpoint, MEMORY
            for tier in (self._hot.name, *self._cold):
                if entry is not None and tier in entry.tiers and find.tier in (AUTO, tier):
                    yield checkpoint, tier

    async def _open(self, checkpoint: CheckpointId, tier: str, on_progress: OnProgress) -> Handover:
        if tier == MEMORY:
            return await self._open_memory(checkpoint)
        manifest = self._catalog.manifest(checkpoint)
        if manifest is None:
            raise NotFound(f"open {checkpoint} in {tier}: it has just been deleted")
        if len(manifest.files) >= DESCRIPTORS_MAX:
            raise Unsupported(
                f"open {checkpoint}: {len(manifest.files)} files, a message carries {DESCRIPTORS_MAX - 1} at most",
                hint="`tierd restore` writes it to a directory",
            )
        if tier != self._hot.name:
            async with self._fetching:
                await self._fetch(manifest, self._cold[tier], on_progress)
        with contextlib.ExitStack() as opened:
            descriptors: list[int] = []
            for entry in manifest.files:
                descriptor = self._hot_store.open_fd(layout.file_key(checkpoint, entry.name))
                opened.callback(os.close, descriptor)
                descriptors.append(descriptor)
            opened.pop_all()
        return Handover(tier, manifest, descriptors)

    async def _fetch(self, manifest: Manifest, cold: Tier, on_progress: OnProgress) -> None:
        """A cold checkpoint becomes a hot one: same bytes, same commit."""
        entry = self._catalog.get(manifest.id)
        if entry is None or self._hot.name in entry.tiers:
            return
        done = 0

        def count(size_bytes: int) -> None:
            nonlocal done
            done += size_bytes
            on_progress(done, manifest.size_bytes)

        on_progress(0, manifest.size_bytes)
        await copy_checkpoint(manifest, cold, self._hot, milestones=entry.all_milestones, progress=count)
        self._metrics.bytes_total.labels(tier=cold.name, direction="read").inc(manifest.size_bytes)
        self._catalog.add(manifest, self._hot.name, entry.all_milestones)

    async def _open_memory(self, checkpoint: CheckpointId) -> Handover:
        found = next((one for one in self._memory.whole(checkpoint.run) if one.id == checkpoint), None)
        if found is None:
            raise NotFound(f"open {checkpoint} in memory: a newer snapshot has just replaced it")
        manifest = found.manifest or await self._provisional(found)
        return Handover(MEMORY, manifest, [os.dup(one.slot.fd) for _, one in sorted(found.snapshots.items())])

    async def _provisional(self, found: SnapshotSet) -> Manifest:
        """The manifest of a set that is not persisted yet: what a restore from memory is checked against."""
        loop = asyncio.get_running_loop()
        for rank, snapshot in found.snapshots.items():
            if snapshot.entry is None:
                name = layout.shard_name(rank, found.world_size)
                snapshot.entry = await loop.run_in_executor(
                    None, snapshot_entry, snapshot.slot.view, name, snapshot.sealed.size_bytes
                )
        entries = [one.entry for _, one in sorted(found.snapshots.items()) if one.entry is not None]
        return manifest_of(found, entries, sequence=self._catalog.sequence_max(found.id.run) + 1)


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
