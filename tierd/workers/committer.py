"""Commits checkpoints over several nodes in one cold tier: when all node files are there, it writes the manifest.

Any node may commit, because the manifest is computed from the node files alone. The daemon of rank 0 looks often. The
others list the node files seldom, at random times, in case that daemon is gone. They read them only when none is
missing: otherwise each node would read all node files. A listing ends before the shards, of which there may be many
thousands, unless the daemon has had no trainer since its start and does not know the nodes. If a node or the committer
dies at any instant, the commit is delayed and nothing is lost. What lost nodes have sent is committed by the daemon of
rank 0 of the next start.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import msgspec

from tierd.catalog.listing import files_of, newest_claim
from tierd.context import DaemonContext
from tierd.errors import Corrupt, NotFound, Stale, TierdError, Transient
from tierd.failpoints import failpoint
from tierd.format import layout, wire
from tierd.format.audit import EventKind
from tierd.format.health import Diagnosis
from tierd.format.ids import CheckpointId, Rank, Run
from tierd.format.manifest import Head, Manifest
from tierd.format.node_file import NodeFile, assemble, milestones, missing_ranks, verdict
from tierd.tiers.tier import Tier

HOME_S = 5.0  # the least time between two listings of a checkpoint's node files by the daemon of rank 0
PATIENCE = 0.1  # of the time since its first listing: the time between two listings, if that is more than HOME_S
LOOK_MIN_S, LOOK_MAX_S = 2.0, 60.0  # how often the others look for the manifest
LIST_MIN_S, LIST_MAX_S = 30.0, 600.0  # and for the node files
YIELD_MIN_S, YIELD_MAX_S = 10.0, 60.0  # how long another daemon waits for the one of rank 0 when all of them are there
_HINT = "nothing is overwritten: do two jobs write one run? docs/RUNBOOK.md#unreadable-manifest"
LISTING_VALID_S = 60.0  # between the listing of a folder and the manifest: then it may have been deleted


@dataclass(slots=True)
class _Wait:
    """A checkpoint that is not committed. Times by the monotonic clock: when to look for the manifest, when to list
    the node files, and when to commit. `node_files`: those that were read, by name; `unreadable`: why others were
    not. `missing`: the ranks whose parts the last listing has not shown."""

    started_s: float
    look_at_s: float
    list_at_s: float
    look_s: float = LOOK_MIN_S
    list_s: float = LIST_MIN_S
    commit_at_s: float | None = None
    node_files: dict[str, NodeFile] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)


class Committer:
    name = "replicate"
    interval_s = 1.0
    is_urgent = False

    def __init__(self, context: DaemonContext, cold: Tier, *, rng: random.Random | None = None) -> None:
        self._context = context
        self._catalog = context.catalog
        self._cold = cold
        self._random = rng or random.Random()
        self._waits: dict[CheckpointId, _Wait] = {}
        self._look_again_s: dict[CheckpointId, float] = {}  # of those without a part of this node

    async def run_once(self) -> bool:
        """Look once for each checkpoint that is due, newest first. False when one can not be committed."""
        parts = {part.id: part for part in self._catalog.sent_parts(self._cold.name)}
        self._waits = {checkpoint: wait for checkpoint, wait in self._waits.items() if checkpoint in parts}
        is_well = True
        for part in sorted(parts.values(), key=lambda part: part.id.recency, reverse=True):
            now_s, is_home = self._context.monotonic_s(), self._context.is_home(part.id.run)
            wait = self._waits.get(part.id)
            if wait is None:
                first_s = 0.0 if is_home else self._random.uniform(LIST_MIN_S, 2 * LIST_MIN_S)
                wait = self._waits[part.id] = _Wait(now_s, look_at_s=now_s, list_at_s=now_s + first_s)
            try:
                await self._look(part, wait, is_home=is_home)
            except Transient:
                raise
            except TierdError as error:
                is_well = False
                self._catalog.part_gone(self._cold.name, part.id)
                self._context.incidents.record(self.name, error, part.id)
        self._catalog.awaited[self._cold.name] = self._awaited()
        return await self._commit_for_lost_nodes() and is_well

    def _awaited(self) -> dict[Run, tuple[CheckpointId, list[int]]]:
        """As of Catalog; without what has not been listed here yet."""
        found: dict[Run, tuple[CheckpointId, list[int]]] = {}
        for checkpoint in sorted(self._waits, key=lambda each: each.recency):
            if missing := self._waits[checkpoint].missing:
                found.setdefault(checkpoint.run, (checkpoint, missing))
        return found

    async def _commit_for_lost_nodes(self) -> bool:
        """The daemon of rank 0 looks also at each checkpoint of which it has sent no part: all nodes that have sent
        theirs may be gone, or a partner may still send the part of a lost one. False when one can not be committed."""
        context, is_well = self._context, True
        now_s, knowledge = context.monotonic_s(), self._catalog.tiers[self._cold.name]
        uncommitted = knowledge.partial.keys() - knowledge.gone
        self._look_again_s = {each: at_s for each, at_s in self._look_again_s.items() if each in uncommitted}
        due = [checkpoint for checkpoint in uncommitted if self._look_again_s.get(checkpoint, now_s) <= now_s]
        for checkpoint in sorted(due, key=lambda each: each.recency, reverse=True):
            run = checkpoint.run
            is_running = run in context.memory.runs() or run in context.watched_nodes
            if not is_running or not context.is_home(run):
                continue
            # On one node it has no node files.
            is_alone = context.memory.node(run) is None and checkpoint.generation == context.memory.generation(run)
            if is_alone or self._catalog.is_part_sent(self._cold.name, checkpoint):
                continue
            listed_s = context.monotonic_s()
            names = await self._names(checkpoint)
            node_files: dict[str, NodeFile] = {}
            try:
                if not names & {layout.GONE, layout.MANIFEST}:
                    await self._read(checkpoint, names, node_files, unreadable={})
                is_complete = bool(node_files) and not missing_ranks(node_files.values())
                if is_complete and not await self._commit(list(node_files.values()), listed_s):
                    continue
            except Transient:
                raise
            except TierdError as error:
                is_well = False
                context.incidents.record(self.name, error, checkpoint)
            self._look_again_s[checkpoint] = now_s + LIST_MAX_S
        return is_well

    async def _look(self, part: NodeFile, wait: _Wait, *, is_home: bool) -> None:
        now_s, jitter = self._context.monotonic_s(), self._random.uniform(0.5, 1.0)
        if is_home:  # a listing shows the manifest too
            if now_s >= min(wait.list_at_s, wait.look_at_s):
                pause_s = min(max(HOME_S, PATIENCE * (now_s - wait.started_s)), LIST_MAX_S)
                wait.list_at_s = wait.look_at_s = now_s + pause_s
                await self._list(part, wait, is_home=True)
            return
        if now_s >= wait.look_at_s:
            wait.look_s = min(LOOK_MAX_S, 2 * wait.look_s)
            wait.look_at_s = now_s + jitter * wait.look_s
            if await self._find(part, wait):
                return
        if now_s >= min(wait.list_at_s, wait.commit_at_s or wait.list_at_s):
            wait.list_s = min(LIST_MAX_S, 2 * wait.list_s)
            wait.list_at_s = now_s + jitter * wait.list_s
            await self._list(part, wait, is_home=False)

    async def _find(self, part: NodeFile, wait: _Wait) -> bool:
        """Whether the checkpoint is committed. Raises Corrupt when the manifest is of another checkpoint."""
        try:
            manifest = await self._cold.manifest(part.id)
        except NotFound:
            return False
        except Transient:
            raise
        except TierdError as error:
            self._cannot_read(part.id, wait.unreadable, layout.MANIFEST, error)
            return False
        self._check(part, manifest)
        self._committed(manifest)
        return True

    def _cannot_read(self, checkpoint: CheckpointId, unreadable: dict[str, str], name: str, error: TierdError) -> None:
        """What cannot be read, or is not signed, counts for nothing. It is reported once; the wait goes on, because a
        person may put it right."""
        if unreadable.get(name) != error.message:
            unreadable[name] = error.message
            self._context.incidents.record(self.name, error, checkpoint)

    def _check(self, part: NodeFile, manifest: Manifest) -> None:
        if why := part.contradiction(manifest):
            raise Corrupt(
                f"commit {part.id} in {self._cold.name}: the manifest there does not have the part of this node: {why}",
                hint="do two jobs write one run? Nothing was overwritten; docs/RUNBOOK.md#unreadable-manifest",
            )

    async def _list(self, part: NodeFile, wait: _Wait, *, is_home: bool) -> None:
        listed_s = self._context.monotonic_s()
        lowest = [] if is_home else self._lowest_ranks(part)
        names = await self._names(part.id, has_shards=not (is_home or lowest))
        if layout.GONE in names or part.name not in names:
            self._catalog.part_gone(self._cold.name, part.id)
            return
        if layout.MANIFEST in names:
            await self._find(part, wait)
            return
        if not is_home:
            wait.missing = _without_node_file(part, names, lowest) if lowest else _without_shard(part, names)
            commit_at_s, wait.commit_at_s = wait.commit_at_s, None
            if wait.missing:
                return
            if commit_at_s is None:
                wait.commit_at_s = self._context.monotonic_s() + self._random.uniform(YIELD_MIN_S, YIELD_MAX_S)
                return
        await self._read(part.id, names, wait.node_files, wait.unreadable, part=part)
        wait.missing = missing_ranks(wait.node_files.values()) if wait.node_files else list(range(part.world_size))
        if not wait.missing:
            await self._commit(list(wait.node_files.values()), listed_s, part)

    def _lowest_ranks(self, part: NodeFile) -> list[int]:
        """The lowest rank of each node; none if no trainer of this generation has joined since the daemon's start."""
        if part.is_adopted:
            return list(range(part.world_size))
        memory, run = self._context.memory, part.id.run
        node = memory.node(run) if memory.generation(run) == part.generation else None
        return [] if node is None else node.lowest

    async def _names(self, checkpoint: CheckpointId, *, has_shards: bool = False) -> set[str]:
        return set(await files_of(self._cold, checkpoint, until="" if has_shards else layout.NODE_FILES_END))

    async def _read(
        self,
        checkpoint: CheckpointId,
        names: set[str],
        node_files: dict[str, NodeFile],
        unreadable: dict[str, str],
        *,
        part: NodeFile | None = None,
    ) -> None:
        """Adds the node files among `names` that are not in `node_files` yet, or to `unreadable` why they cannot be
        used: for example, they are of another start than this node's `part`."""
        new = [name for name in layout.node_files(names) if name not in node_files]
        decoded = await self._cold.decode_many([layout.file_key(checkpoint, name) for name in new])
        for name, node_file in zip(new, decoded, strict=True):
            if isinstance(node_file, Transient):
                raise node_file
            if isinstance(node_file, TierdError):
                if not isinstance(node_file, NotFound):
                    self._cannot_read(checkpoint, unreadable, name, node_file)
                continue
            assert isinstance(node_file, NodeFile)
            if part is not None and node_file.head_digest != part.head_digest:
                why = f"commit {checkpoint} in {self._cold.name}: {name} is not part of the checkpoint of this node"
                self._cannot_read(
                    checkpoint, unreadable, name, Corrupt(f"{why}: {_difference(node_file, part)}", hint=_HINT)
                )
                continue
            node_files[name] = node_file

    async def _commit(self, node_files: list[NodeFile], listed_s: float, part: NodeFile | None = None) -> bool:
        """`part`: of this node, if it has one. False if the listing is too old to write the manifest, and if the
        checkpoint has a tombstone once the manifest is written: it was being deleted meanwhile."""
        manifest = self._context.signed(assemble(node_files))
        if part is not None:
            self._check(part, manifest)
        if self._context.is_home(manifest.id.run):
            await self._fence_if_replaced(manifest.id.run)
        if self._context.monotonic_s() - listed_s > LISTING_VALID_S:
            return False
        is_healthy = verdict(node_files)
        diagnosis = None if is_healthy is None else Diagnosis(healthy=is_healthy)
        failpoint("cold.assemble")
        try:
            await self._cold.commit(manifest, milestones=milestones(node_files), diagnosis=diagnosis)
        except Corrupt:
            # Another node may have signed the same manifest with another key.
            committed = await self._cold.manifest(manifest.id)
            if _unsigned(committed) != _unsigned(manifest):
                raise
            manifest = committed
        if layout.GONE in await self._names(manifest.id):  # it was being deleted meanwhile, and counts for nothing
            self._catalog.part_gone(self._cold.name, manifest.id)
            return False
        self._context.audit.record(EventKind.COMMITTED, checkpoint=manifest.id, tier=self._cold.name)
        self._committed(manifest, milestones(node_files), is_healthy=is_healthy)
        return True

    async def _fence_if_replaced(self, run: Run) -> None:
        """If another start of the run, on other nodes, has claimed a newer generation, the trainers here are told to
        end. What they have sealed is still committed."""
        context = self._context
        generation = context.memory.generation(run)
        if not generation:  # no trainer since the daemon's start
            return
        newest = await newest_claim(context.catalog, self._cold, run, above=generation)
        if newest > generation and context.fence(run, generation, by=newest):
            context.incidents.record(self.name, Stale.by(newest, f"train {run}", generation))

    def _committed(self, manifest: Manifest, names: list[str] | None = None, *, is_healthy: bool | None = None) -> None:
        context, checkpoint, tier = self._context, manifest.id, self._cold.name
        failpoint("cold.assembled")
        self._catalog.add(manifest, tier, names or ())
        if is_healthy is not None:
            self._catalog.diagnosed(checkpoint, tier, is_healthy=is_healthy)
        message = wire.Replicated(step=checkpoint.step, generation=checkpoint.generation, tier=tier)
        context.notify.send(checkpoint.run, message)
        context.notify.replicated()


def _difference(part: NodeFile, other: NodeFile) -> str:
    if part.claim != other.claim:
        return "two starts of the run hold this generation"
    return "they differ in " + ", ".join(
        name for name in Head.__struct_fields__ if getattr(part, name) != getattr(other, name)
    )


def _without_node_file(part: NodeFile, names: Collection[str], lowest: Sequence[int]) -> list[int]:
    """The ranks of the nodes whose node file is missing. Of another node only the lowest rank is known: others count
    as of the node whose lowest rank is next below."""
    missing = {rank for rank in lowest if layout.node_file_name(rank, part.world_size) not in names}
    others = sorted({*range(part.world_size)} - {*part.ranks})
    return [rank for rank in others if lowest[bisect_right(lowest, rank) - 1] in missing]


def _without_shard(part: NodeFile, names: Collection[str]) -> list[int]:
    ranks = range(part.world_size)
    return [rank for rank in ranks if layout.shard_name(Rank(rank), part.world_size) not in names]


def _unsigned(manifest: Manifest) -> Manifest:
    return msgspec.structs.replace(manifest, signature=msgspec.UNSET)
