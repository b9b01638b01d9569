"""Finds a checkpoint for a trainer and opens its files: memory, else hot, else cold, fetched into hot first.

Newest first, replica by replica; one that is damaged or out of reach is recorded and the next one tried. An
absent checkpoint and one that cannot be seen are different answers: only the first lets a trainer start fresh.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tierd.catalog import MEMORY, Catalog
from tierd.errors import (
    BadRequest,
    Corrupt,
    NewerFormat,
    NotFound,
    TierdError,
    TierUnreachable,
    Transient,
    Unhealthy,
    Unsupported,
)
from tierd.format import layout
from tierd.format.ids import CheckpointId, Run
from tierd.format.manifest import Manifest
from tierd.format.wire import DESCRIPTORS_MAX, Find, unpack_indexes
from tierd.incidents import Incidents
from tierd.memory.slot import snapshot_entry
from tierd.memory.tier import MemoryTier, SnapshotSet
from tierd.metrics import Metrics
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.tier import Tier
from tierd.workers.fetcher import Fetcher, OnProgress
from tierd.workers.persister import manifest_of

AUTO = "auto"
PASSED_OVER_MAX, PASSED_OVER_CHARS = 8, 1000  # they travel in one message
FIRST_LOOK_TIMEOUT_S = 30.0  # how long a first listing of the cold tiers may hold up an answer

Judge = Callable[[CheckpointId], Awaitable[bool | None]]
"""Whether a checkpoint is healthy; None when nobody could say so in time."""


@dataclass(frozen=True, slots=True)
class Handover:
    """An open checkpoint: descriptors of its files in the manifest's order, which the taker closes. `is_part`: only the
    headers of the files are there, and the chunks that were asked for."""

    tier: str
    manifest: Manifest
    descriptors: list[int]
    passed_over: list[str] = field(default_factory=list[str])
    is_part: bool = False


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
        judge: Judge,
    ) -> None:
        self._memory = memory
        self._catalog = catalog
        self._hot = hot
        self._cold = cold
        self._fetcher = Fetcher(catalog, hot, hot_store, metrics=metrics, incidents=incidents)
        self._first_looks = first_looks
        self._metrics = metrics
        self._incidents = incidents
        self._judge = judge

    async def find(self, run: Run, find: Find, on_progress: OnProgress) -> Handover:
        """The newest replica that `find` describes. Raises NotFound only when every tier has been seen, and Unhealthy
        rather than hand over numbers that are none, unless they are asked for."""
        if find.tier in (AUTO, *self._cold):
            await self.wait_first_looks()
        elif find.tier not in (MEMORY, self._hot.name):
            raise BadRequest(f"find a checkpoint of {run}: there is no tier {find.tier!r}")
        bad = set(find.exclude)
        failed: TierdError | None = None
        may_pass = False
        passed_over: list[str] = []
        for checkpoint, tier in self._candidates(run, find):
            if f"{checkpoint.name}@{tier}" in bad:
                failed = failed or Corrupt(
                    f"restore {checkpoint}: every replica in reach has been found damaged",
                    hint="`tierd verify` reads them all; docs/RUNBOOK.md#corrupt-chunk",
                )
                continue
            if not find.allow_unhealthy and await self._is_unhealthy(checkpoint):
                failed = failed or Unhealthy(
                    f"restore {checkpoint}: it holds numbers that are not finite",
                    hint="`tierd show` says where; restore an older step, or with allow_unhealthy",
                )
                if find.step is not None or find.milestone is not None:
                    break  # this one was meant, and no other will do
                if (why := str(failed)) not in passed_over:
                    passed_over.append(why)
                continue
            unreadable = await self._unreadable(run, find, since=checkpoint)
            try:
                is_hot_bad = f"{checkpoint.name}@{self._hot.name}" in bad
                found = await self._open(checkpoint, tier, find, on_progress, is_hot_bad=is_hot_bad)
                await self._fetcher.sweep(run)
                passed_over += unreadable
                return replace(found, passed_over=[why[:PASSED_OVER_CHARS] for why in passed_over[:PASSED_OVER_MAX]])
            except TierdError as error:
                entry = self._catalog.get(checkpoint)
                if isinstance(error, NotFound) and entry and tier in entry.tiers:
                    # Its manifest is there: this is damage, no reason to start fresh.
                    error = Corrupt(error.message, hint="docs/RUNBOOK.md#corrupt-chunk")
                failed = error
                may_pass = may_pass or isinstance(error, Transient)
                passed_over.append(str(error))
                bad.add(f"{checkpoint.name}@{tier}")
                if isinstance(error, Corrupt):
                    self._metrics.verify_failures_total.labels(tier=tier).inc()
                self._incidents.record("restore", error, checkpoint)
        if failed is not None and not may_pass and not find.chunks:  # who knows its chunks asks again, elsewhere
            await self._fetcher.sweep(run)
        unreadable = await self._unreadable(run, find)
        if failed is not None:
            raise failed
        if unreadable:
            raise Corrupt(
                f"find a checkpoint of {run}: there are some, and none can be read: {unreadable[0]}",
                hint="docs/RUNBOOK.md#unreadable-manifest",
            )
        wanted = f"step {find.step}" if find.step is not None else find.milestone or "any step"
        unseen = self.unseen(find.tier)
        if unseen:
            raise TierUnreachable(
                f"find a checkpoint of {run} ({wanted}): none in reach, and these could not be listed: "
                + "; ".join(unseen),
                hint="bring the tier back, or take it out of the config to start fresh on purpose",
            )
        raise NotFound(
            f"find a checkpoint of {run} ({wanted}) in tier {find.tier}: there is none",
            hint="`tierd ls` shows what there is",
        )

    async def _is_unhealthy(self, checkpoint: CheckpointId) -> bool:
        """What nobody has looked at yet is looked at first: a trainer that died of its NaN must not get it back."""
        entry = self._catalog.get(checkpoint)
        if entry is not None and entry.healthy is not None:
            return not entry.healthy
        return await self._judge(checkpoint) is False

    async def wait_first_looks(self) -> None:
        """Until each cold tier was listed once or could not be: the newest checkpoint may be only there."""
        try:
            async with asyncio.timeout(FIRST_LOOK_TIMEOUT_S):
                for look in self._first_looks:
                    await look.wait()
        except TimeoutError:
            pass  # the catalog says which are unknown

    async def _unreadable(self, run: Run, find: Find, *, since: CheckpointId | None = None) -> list[str]:
        """Why checkpoints that may be what is wanted, newer than `since`, could not be used: no manifest to be read.

        Raises NewerFormat where a later tierd has written one: that is no damage, and to lose the work in it by
        going back to an older tierd is for a person to decide.
        """
        if find.milestone is not None:
            return []
        found: list[str] = []
        for (name, one), why in self._catalog.unreadable().items():
            is_wanted = find.step in (None, one.step) and find.generation in (None, one.generation)
            is_newer = since is None or one.recency > since.recency
            if one.run == run and find.tier in (AUTO, name) and is_wanted and is_newer:
                found.append(why)
                with contextlib.suppress(Corrupt, NotFound, Transient):
                    await self._read_again(one, name)
        return found

    async def _read_again(self, checkpoint: CheckpointId, tier: str) -> None:
        try:
            await (self._hot if tier == self._hot.name else self._cold[tier]).manifest(checkpoint)
        except NewerFormat as error:
            raise NewerFormat(
                error.message, hint="upgrade tierd, or go back on purpose: resume=<an older step>"
            ) from error

    async def restored(self, run: Run) -> None:
        """All ranks of the run have read what they asked for."""
        await self._fetcher.restored(run)

    def newest(self, run: Run) -> CheckpointId | None:
        """The newest checkpoint of a run in any tier, whether it can be read or not."""
        found = [entry.id for entry in self._catalog.entries(run)]
        found += [one.id for one in self._memory.complete(run)]
        found += [one for _, one in self._catalog.unreadable() if one.run == run]
        return max(found, key=lambda one: one.recency, default=None)

    def unseen(self, wanted: str = AUTO) -> list[str]:
        """The tiers that might have what is wanted and could not be listed, with the reason."""
        return [
            f"{name} ({known.error})"
            for name, known in self._catalog.tiers.items()
            if not known.is_known and wanted in (AUTO, name)
        ]

    def _candidates(self, run: Run, find: Find) -> Iterator[tuple[CheckpointId, str]]:
        """(checkpoint, tier), newest checkpoint first, nearest tier first."""
        in_memory = {one.id for one in self._memory.complete(run)}
        listed = {entry.id: entry for entry in self._catalog.entries(run)}
        for checkpoint in sorted(in_memory | listed.keys(), key=lambda one: one.recency, reverse=True):
            entry = listed.get(checkpoint)
            if find.step is not None and checkpoint.step != find.step:
                continue
            if find.generation is not None and checkpoint.generation != find.generation:
                continue
            if find.milestone is not None and (entry is None or find.milestone not in entry.all_milestones):
                continue
            if checkpoint in in_memory and find.tier in (AUTO, MEMORY):
                yield checkpoint, MEMORY
                entry = self._catalog.get(checkpoint)  # what memory let go of meanwhile is in hot
            for tier in (self._hot.name, *self._cold):
                if entry is not None and tier in entry.tiers and find.tier in (AUTO, tier):
                    yield checkpoint, tier

    async def _open(
        self, checkpoint: CheckpointId, tier: str, find: Find, on_progress: OnProgress, *, is_hot_bad: bool
    ) -> Handover:
        if tier == MEMORY:
            return await self._open_memory(checkpoint)
        entry = self._catalog.get(checkpoint)
        if entry is None or tier not in entry.tiers:
            raise NotFound(f"open {checkpoint} in {tier}: it has just been deleted")
        manifest = entry.manifest
        _check_count(checkpoint, len(manifest.files))
        if tier == self._hot.name:
            return Handover(tier, manifest, self._fetcher.open_hot(manifest))
        chunks = None if find.chunks is None else [unpack_indexes(packed) for packed in find.chunks]
        descriptors, is_part = await self._fetcher.bring(
            entry, self._cold[tier], chunks, on_progress, is_hot_bad=is_hot_bad
        )
        return Handover(tier, manifest, descriptors, is_part=is_part)

    async def _open_memory(self, checkpoint: CheckpointId) -> Handover:
        found = self._memory.find(checkpoint)
        if found is None:
            raise NotFound(f"open {checkpoint} in memory: a newer snapshot has just replaced it")
        _check_count(checkpoint, found.world_size)
        manifest = found.manifest or await self._provisional(found)
        return Handover(MEMORY, manifest, duplicates([one.slot.fd for _, one in sorted(found.snapshots.items())]))

    async def _provisional(self, found: SnapshotSet) -> Manifest:
        """The manifest of a set that is not persisted yet: what a restore from memory is checked against."""
        loop = asyncio.get_running_loop()
        for rank, snapshot in sorted(found.snapshots.items()):
            if snapshot.entry is None:
                name = layout.shard_name(rank, found.world_size)
                # A view of its own outlives the slot, should that be closed meanwhile.
                entry = await loop.run_in_executor(None, snapshot_entry, snapshot.view, name)
                if self._memory.find(found.id) is not found:
                    # What was read may be another snapshot's bytes by now, checksums and all.
                    raise Transient(f"open {found.id} in memory: a newer snapshot took its place while it was read")
                snapshot.entry = entry
        entries = [one.entry for _, one in sorted(found.snapshots.items()) if one.entry is not None]
        return manifest_of(found, entries, sequence=self._catalog.sequence_max(found.id.run) + 1)


def _check_count(checkpoint: CheckpointId, files: int) -> None:
    if files >= DESCRIPTORS_MAX:
        raise Unsupported(
            f"open {checkpoint}: {files} files, a message carries {DESCRIPTORS_MAX - 1} at most",
            hint="`tierd restore` writes it to a directory",
        )


def duplicates(descriptors: Sequence[int]) -> list[int]:
    """Descriptors of the taker's own: all of them, or none and the error."""
    with contextlib.ExitStack() as opened:
        found: list[int] = []
        for descriptor in descriptors:
            found.append(os.dup(descriptor))
            opened.callback(os.close, found[-1])
        opened.pop_all()
    return found


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
