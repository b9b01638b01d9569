"""Answers a trainer's Find: opens the files of a checkpoint in memory, in hot, or fetched from a cold tier into hot.

lifecycle/selection decides which checkpoint and which replica. A replica that cannot be read is recorded, and the next
one is tried.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace

from tierd.catalog.decisions import lost, pending
from tierd.catalog.entry import NOT_LISTED_YET, Entry
from tierd.catalog.listing import refresh_run
from tierd.catalog.selectable import selectable_replicas
from tierd.context import DaemonContext
from tierd.descriptors import open_all, reopen_read_only
from tierd.errors import (
    BadRequest,
    Corrupt,
    Lost,
    NotFound,
    TierdError,
    TierUnreachable,
    Transient,
    Unsupported,
    unhealthy,
)
from tierd.format.bitmap import unpack_indexes
from tierd.format.ids import AUTO, MEMORY, CheckpointId, Generation, Run, Step, checkpoint_id, parse_name
from tierd.format.manifest import Manifest
from tierd.format.node_file import NodeFile, as_part
from tierd.format.wire import DESCRIPTORS_MAX, Find
from tierd.lifecycle.selection import CheckpointQuery, Selected, select_each
from tierd.memory.snapshot_set import SnapshotSet
from tierd.tiers.tier import Tier
from tierd.workers.fetcher import Fetcher, OnProgress
from tierd.workers.hot_space import MakeRoom, no_room
from tierd.workers.peer_fetcher import PeerFetcher

PASSED_OVER_MAX, PASSED_OVER_CHARS = 8, 1000  # bounds of the wire message that carries them
log = logging.getLogger("tierd")

PART_AWAITED_S = 900.0  # since its snapshot: other nodes may still copy their parts of the checkpoint
MEMORY_ATTEMPTS_MAX = 3  # snapshots that a find reads in memory and that a newer one replaces meanwhile
LISTING_TIMEOUT_S = 20.0  # how long an answer waits for a listing of the run in the cold tiers
FAILING_TIMEOUT_S = 5.0  # the same of a tier whose last listing failed

Judge = Callable[[CheckpointId], Awaitable[bool | None]]
"""Examines whether a checkpoint is healthy; None when there is no answer in time."""


@dataclass(frozen=True, slots=True)
class OpenCheckpoint:
    """An open checkpoint. `descriptors`: of its files in the manifest's order; the caller closes them. `is_part`: the
    files hold only their headers and the chunks that were asked for."""

    tier: str
    manifest: Manifest
    descriptors: list[int]
    passed_over: list[str] = field(default_factory=list[str])
    is_part: bool = False


class Restorer:
    def __init__(self, context: DaemonContext, judge: Judge, make_room: MakeRoom = no_room) -> None:
        self._context = context
        self._memory = context.memory
        self._catalog = context.catalog
        self._hot = context.hot
        self._cold = context.cold
        self.fetcher = Fetcher(context, make_room)
        self.peer_fetcher = PeerFetcher(context, self.fetcher)
        self._judge = judge

    async def find(self, run: Run, find: Find, on_progress: OnProgress) -> OpenCheckpoint:
        """Open the checkpoint that `find` describes. Raises as `select` does, BadRequest for an unknown tier, and Lost
        when all checkpoints of the run have disappeared."""
        if find.tier not in (AUTO, MEMORY, self._hot.name, *self._cold):
            raise BadRequest(f"find a checkpoint of {run}: there is no tier {find.tier!r}")
        needs_listing = self._needs_listing(run, find)
        unlisted = await self.list_run(run) if needs_listing else self._catalog.unlisted()
        query = CheckpointQuery(
            run=run,
            step=find.step,
            milestone=find.milestone,
            generation=find.generation,
            tier=find.tier,
            allow_unhealthy=find.allow_unhealthy,
            allow_older=True,
        )
        failed = _excluded(run, find)
        health: dict[CheckpointId, bool | None] = {}
        selections: Iterator[Selected] = iter(())
        selected_from: object = None
        while True:
            # What memory released meanwhile is in hot.
            # A part of a run over several nodes is not restored from here.
            in_memory = {snapshot_set.id for snapshot_set in self._memory.complete(run) if snapshot_set.node is None}
            state = (self._catalog.changes, in_memory, len(health))
            if state != selected_from:
                selected_from = state
                inventory = selectable_replicas(
                    self._catalog, run, in_memory=in_memory, health=health, unlisted=unlisted
                )
                if not inventory.candidates:  # then the refusal names the runs that exist
                    inventory = selectable_replicas(self._catalog, unlisted=unlisted)
                selections = select_each(query, inventory, failed)
            try:
                selected = next(selections)
            except TierdError as error:
                if isinstance(error, NotFound) and not query.is_named and find.tier == AUTO:
                    self._check_lost(run)
                    self._check_parts(run)
                # Keep what was fetched if the same fetch may succeed later. A rank that names chunks asks again.
                is_final = failed and not any(isinstance(error, Transient) for error in failed.values())
                if is_final and not find.chunks:
                    await self.fetcher.sweep(run)
                raise
            checkpoint, tier = selected.candidate.id, selected.tier
            _check_kind(self._catalog.get(checkpoint))
            if selected.candidate.is_healthy is None and not find.allow_unhealthy and checkpoint not in health:
                # Examine it first: a trainer that stopped on a NaN must not get that NaN back.
                health[checkpoint] = await self._judge(checkpoint)
                continue
            try:
                is_hot_bad = (checkpoint, self._hot.name) in failed
                opened = await self._open(checkpoint, tier, find, on_progress, is_hot_bad=is_hot_bad)
            except TierdError as error:
                if isinstance(error, NotFound) and tier == self._hot.name:
                    # It may be being deleted. A fetch that began now would keep files that are deleted next.
                    async with self._context.lock(checkpoint):
                        pass
                failed[checkpoint, tier] = self._record_failure(checkpoint, tier, error)
                replaced = [name for _, name in failed if name == MEMORY]
                if tier == MEMORY and isinstance(error, Transient) and len(replaced) >= MEMORY_ATTEMPTS_MAX:
                    raise  # a trainer that snapshots faster than memory is read would keep this loop busy
                continue
            await self.fetcher.sweep(run)
            reasons = list(selected.passed_over)
            if needs_listing:
                newer = "a newer one may be there"
                reasons += [f"{name} could not be listed ({why}): {newer}" for name, why in unlisted.items()]
            return replace(opened, passed_over=[reason[:PASSED_OVER_CHARS] for reason in reasons[:PASSED_OVER_MAX]])

    async def find_part(self, run: Run, find: Find) -> OpenCheckpoint:
        """Open this node's part of a checkpoint over several nodes, or all of one that a start on this node alone has
        saved: in memory, else in hot. Its `manifest` is the node file. Raises NotFound when it is in neither, Unhealthy
        when it was not asked for one that is."""
        if find.step is None or find.generation is None:
            raise BadRequest(f"find this node's part of a checkpoint of {run}: it has no step or no generation")
        checkpoint = checkpoint_id(run, find.step, find.generation)
        if not find.allow_unhealthy and await self._judge(checkpoint) is False:
            raise unhealthy(checkpoint, "the part of this node")
        error: TierdError = NotFound(f"open this node's part of {checkpoint}: it is neither in memory nor in hot")
        for tier in (MEMORY, self._hot.name):
            if find.tier not in (AUTO, tier) or (checkpoint, tier) in _excluded(run, find):
                continue
            try:
                return await self._open_part(checkpoint, tier)
            except TierdError as reason:
                if not isinstance(reason, NotFound):
                    error = self._record_failure(checkpoint, tier, reason)
        raise error

    async def _open_part(self, checkpoint: CheckpointId, tier: str) -> OpenCheckpoint:
        if tier == MEMORY:
            if self._memory.find(checkpoint) is None:
                raise NotFound(f"open this node's part of {checkpoint}: memory has none")
            opened = await self._open_memory(checkpoint)
            return replace(opened, manifest=as_part(opened.manifest))
        entry = self._catalog.get(checkpoint)
        if entry is None or tier not in entry.tiers:
            raise NotFound(f"open this node's part of {checkpoint}: hot has none")
        held = entry.held(tier)
        _check_count(checkpoint, len(held.files))
        return OpenCheckpoint(tier, as_part(held), await self.fetcher.open_hot(held))

    def _check_lost(self, run: Run) -> None:
        """Raises Lost when checkpoints of the run have disappeared: it must not start fresh because none is left."""
        context = self._context
        gone = {c for tier in context.tiers for c in lost(self._catalog, context.config, tier) if c.run == run}
        if gone:
            newest = max(gone, key=lambda checkpoint: checkpoint.recency)
            raise Lost(
                f"restore {run}: no tier has a checkpoint of it; {newest} has disappeared",
                hint="docs/RUNBOOK.md#checkpoints-lost; TIERD_RESUME=scratch in the trainer's environment begins anew",
            )

    def _check_parts(self, run: Run) -> None:
        """Raises TierUnreachable while a part that is here may become a whole checkpoint: this node has not copied it
        yet, or it is so new that another node may be copying. A part that misses others for good holds up no run."""
        context = self._context
        parts = [entry for entry in self._catalog.entries(run) if entry.part is not None and not entry.is_whole]
        in_memory = [
            snapshot_set.id
            for snapshot_set in self._memory.complete(run)
            if snapshot_set.node is not None and snapshot_set.is_pending
        ]
        to_copy = {checkpoint for name in self._cold for checkpoint in pending(self._catalog, context.config, name)}
        now = context.now()
        to_be_copied_here = in_memory + [entry.id for entry in parts if entry.id in to_copy]
        new_parts = [
            entry.id
            for entry in parts
            if (created := entry.manifest.created) and (now - created).total_seconds() < PART_AWAITED_S
        ]
        if awaited := to_be_copied_here + new_parts:
            when = (
                "when this node has copied its part of the checkpoint: `tierd status` lists what waits for each tier"
                if to_be_copied_here
                else "later: if the other nodes have not copied their parts of this checkpoint "
                f"{PART_AWAITED_S / 60:.0f} minutes after its snapshot, a start no longer waits for it"
            )
            raise TierUnreachable(
                f"restore {run}: no cold tier has {awaited[0]} whole yet; this node has its part",
                hint=f'start again {when}; restore(state, resume="scratch", force=True) begins anew now',
            )
        if parts:
            text = "restore %s: %s is passed over: it never became whole, the other nodes' parts are missing"
            log.warning(text, run, parts[0].id)

    def _record_failure(self, checkpoint: CheckpointId, tier: str, error: TierdError) -> TierdError:
        entry = self._catalog.get(checkpoint)
        if isinstance(error, NotFound) and entry and tier in entry.tiers:
            knowledge = self._catalog.tiers[tier]
            if knowledge.is_known:
                # The manifest is there and a file is not: that is damage, and no reason to start fresh.
                error = Corrupt(error.message, hint="docs/RUNBOOK.md#corrupt-chunk")
            else:
                error = TierUnreachable(f"{error.message}; {knowledge.error}")
            self._context.notify.relist(tier)  # if the whole checkpoint is gone, its loss is reported
        if isinstance(error, Corrupt):
            self._context.metrics.verify_failures_total.labels(tier=tier).inc()
        self._context.incidents.record("restore", error, checkpoint)
        return error

    def _needs_listing(self, run: Run, find: Find) -> bool:
        """Whether a daemon on another node may have put a better answer into a cold tier. Not when rank 0 has chosen:
        the other ranks then name the replica."""
        if find.tier in (MEMORY, self._hot.name):
            return False
        if find.step is None or find.generation is None:
            return True
        entry = self._catalog.get(CheckpointId(run=run, step=Step(find.step), generation=Generation(find.generation)))
        return entry is None or find.tier not in entry.tiers

    async def list_run(self, run: Run) -> dict[str, str]:
        """List the run in every cold tier: the newest checkpoint may be only there, from another node.

        Returns for each tier that could not be listed the reason.
        """
        unlisted = {name: why for name, why in self._catalog.unlisted().items() if name not in self._cold}

        async def list_in(tier: Tier) -> None:
            knowledge = self._catalog.tiers[tier.name]
            is_failing = not knowledge.is_known and knowledge.error != NOT_LISTED_YET
            timeout_s = FAILING_TIMEOUT_S if is_failing else LISTING_TIMEOUT_S
            try:
                async with asyncio.timeout(timeout_s):
                    await refresh_run(self._catalog, tier, run, self._context.identities)
            except TimeoutError:
                unlisted[tier.name] = f"no answer to a listing of {run} within {timeout_s:.0f} s"
            except TierdError as error:
                unlisted[tier.name] = error.message
            except Exception as error:  # broad: whatever the cause, the other tiers can still answer
                self._context.incidents.record("restore", error)
                unlisted[tier.name] = f"{type(error).__name__}: {error}"

        await asyncio.gather(*map(list_in, self._cold.values()))
        return unlisted

    def newest(self, run: Run) -> CheckpointId | None:
        """The newest checkpoint of a run in any tier, whether it can be read or not."""
        newest = self._catalog.newest_entry(run)
        found = [newest.id] if newest is not None else []
        found += [snapshot_set.id for snapshot_set in self._memory.complete(run)]
        found += [checkpoint for _, checkpoint in self._catalog.unreadable() if checkpoint.run == run]
        return max(found, key=lambda checkpoint: checkpoint.recency, default=None)

    async def _open(
        self, checkpoint: CheckpointId, tier: str, find: Find, on_progress: OnProgress, *, is_hot_bad: bool
    ) -> OpenCheckpoint:
        if tier == MEMORY:
            return await self._open_memory(checkpoint)
        entry = self._catalog.get(checkpoint)
        if entry is None or tier not in entry.tiers:
            raise NotFound(f"open {checkpoint} in {tier}: it has just been deleted")
        manifest = entry.manifest
        _check_count(checkpoint, len(manifest.files))
        if tier == self._hot.name:
            return OpenCheckpoint(tier, manifest, await self.fetcher.open_hot(manifest))
        chunks = None if find.chunks is None else [unpack_indexes(packed) for packed in find.chunks]
        descriptors, is_part = await self.fetcher.bring(
            entry, self._cold[tier], chunks, on_progress, is_hot_bad=is_hot_bad
        )
        return OpenCheckpoint(tier, manifest, descriptors, is_part=is_part)

    async def _open_memory(self, checkpoint: CheckpointId) -> OpenCheckpoint:
        snapshot_set = self._memory.find(checkpoint)
        if snapshot_set is None:
            raise NotFound(f"open {checkpoint} in memory: a newer snapshot has just replaced it")
        _check_count(checkpoint, len(snapshot_set.ranks))
        manifest = snapshot_set.manifest
        if manifest is None or isinstance(manifest, NodeFile) != (snapshot_set.node is not None):
            manifest = await self._provisional(snapshot_set)
        descriptors = [snapshot.slot.fd for _, snapshot in sorted(snapshot_set.snapshots.items())]
        try:
            # A reader that could write would change the snapshot of the rank that has it mapped.
            return OpenCheckpoint(MEMORY, manifest, open_all(map(reopen_read_only, descriptors)))
        except OSError as error:
            raise TierUnreachable(f"open {checkpoint} in memory: {error.strerror}") from error

    async def _provisional(self, snapshot_set: SnapshotSet) -> Manifest:
        """The manifest of a set that is not persisted yet: a restore from memory is checked against it. Over several
        nodes the node file."""
        await self._memory.compute_checksums(snapshot_set)
        if snapshot_set.node is not None:
            return snapshot_set.make_node_file()
        return snapshot_set.make_manifest(sequence=self._catalog.sequence_max(snapshot_set.id.run) + 1)


def _excluded(run: Run, find: Find) -> dict[tuple[CheckpointId, str], TierdError | None]:
    """The replicas that a rank found damaged, written as `<checkpoint name>@<tier>`."""
    failed: dict[tuple[CheckpointId, str], TierdError | None] = {}
    for excluded in find.exclude:
        name, _, tier = excluded.partition("@")
        if checkpoint := parse_name(run, name):
            failed[checkpoint, tier] = None
    return failed


def _check_kind(entry: Entry | None) -> None:
    if entry is not None and entry.manifest.is_adopted:
        checkpoint = entry.id
        raise Unsupported(
            f"restore {checkpoint} into a trainer: it is adopted: another program wrote it, and tierd does not read it",
            hint=f"`tierd restore --run {checkpoint.run} --step {checkpoint.step} --generation {checkpoint.generation} "
            "--to DIR` gives its folder back, from which that program resumes",
        )


def _check_count(checkpoint: CheckpointId, files: int) -> None:
    if files >= DESCRIPTORS_MAX:
        raise Unsupported(
            f"open {checkpoint}: {files} files, a message carries {DESCRIPTORS_MAX - 1} at most",
            hint="`tierd restore` writes it to a directory",
        )
