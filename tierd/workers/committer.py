"""Commits checkpoints over several nodes in one cold tier: when all node files are there, it writes the manifest.

Any node may commit, because the manifest follows from the node files. The daemon of rank 0 looks often. The others
look seldom, each after a random time, in case that daemon is gone. So a node that dies, and the committer itself at any
instant, delay a commit and lose nothing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec

from tierd.context import DaemonContext
from tierd.errors import Corrupt, NotFound, TierdError, Transient
from tierd.failpoints import failpoint
from tierd.format import layout, wire
from tierd.format.audit import Action
from tierd.format.health import Diagnosis
from tierd.format.ids import CheckpointId
from tierd.format.manifest import Manifest
from tierd.format.node_file import NodeFile, assemble, milestones, missing_ranks, verdict
from tierd.tiers.tier import Tier

HOME_S = 5.0  # how often the daemon of rank 0 lists the node files of a checkpoint; less often the longer it waits
PATIENCE = 0.1  # that, as a share of the time since the part was sent
LOOK_MIN_S, LOOK_MAX_S = 2.0, 60.0  # how often the others look for the manifest
LIST_MIN_S, LIST_MAX_S = 30.0, 600.0  # and for the node files
YIELD_MIN_S, YIELD_MAX_S = 10.0, 60.0  # how long another daemon waits for the one of rank 0 when all of them are there
LISTING_VALID_S = 60.0  # between the listing of a folder and the manifest: then it may have been deleted


@dataclass(slots=True)
class _Wait:
    """A checkpoint that is not committed. Times by the monotonic clock: when to look for the manifest, when to list
    the node files, and when to commit. `node_files`: those that were read, by name; `unreadable`: why others were
    not."""

    began_s: float

    look_at_s: float
    list_at_s: float
    look_s: float = LOOK_MIN_S
    list_s: float = LIST_MIN_S
    commit_at_s: float | None = None
    node_files: dict[str, NodeFile] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)


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
        return is_well

    async def _look(self, part: NodeFile, wait: _Wait, *, is_home: bool) -> None:
        now_s, jitter = self._context.monotonic_s(), self._random.uniform(0.5, 1.0)
        if is_home:  # a listing shows the manifest too
            if now_s >= min(wait.list_at_s, wait.look_at_s):
                pause_s = min(max(HOME_S, PATIENCE * (now_s - wait.began_s)), LIST_MAX_S)
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
            self._cannot_read(part, wait, layout.MANIFEST, error)
            return False
        self._check(part, manifest)
        self._committed(manifest)
        return True

    def _cannot_read(self, part: NodeFile, wait: _Wait, name: str, error: TierdError) -> None:
        """What cannot be read, or is not signed, counts for nothing. It is reported once; the wait goes on, because a
        person may put it right."""
        if wait.unreadable.get(name) != error.message:
            wait.unreadable[name] = error.message
            self._context.incidents.record(self.name, error, part.id)

    def _check(self, part: NodeFile, manifest: Manifest) -> None:
        if why := part.contradiction(manifest):
            raise Corrupt(
                f"commit {part.id} in {self._cold.name}: the manifest there does not have the part of this node: {why}",
                hint="do two jobs write one run? Nothing was overwritten; docs/RUNBOOK.md#unreadable-manifest",
            )

    async def _list(self, part: NodeFile, wait: _Wait, *, is_home: bool) -> None:
        listed_s = self._context.monotonic_s()
        objects = await self._cold.store.list(layout.checkpoint_prefix(part.id))
        names = {stored.key.rpartition("/")[2] for stored in objects}
        if layout.GONE in names or part.name not in names:
            self._catalog.part_gone(self._cold.name, part.id)
            return
        if layout.MANIFEST in names:
            await self._find(part, wait)
            return
        new = [name for name in layout.node_files(names) if name not in wait.node_files]
        decoded = await self._cold.decode_many([layout.file_key(part.id, name) for name in new])
        for name, node_file in zip(new, decoded, strict=True):
            if isinstance(node_file, Transient):
                raise node_file
            if isinstance(node_file, TierdError):
                if not isinstance(node_file, NotFound):
                    self._cannot_read(part, wait, name, node_file)
                continue
            assert isinstance(node_file, NodeFile)
            wait.node_files[name] = node_file
        if missing_ranks(wait.node_files.values()):
            return
        now_s = self._context.monotonic_s()
        if not is_home and wait.commit_at_s is None:
            wait.commit_at_s = now_s + self._random.uniform(YIELD_MIN_S, YIELD_MAX_S)
        elif now_s - listed_s <= LISTING_VALID_S:  # else again, from a new listing
            await self._commit(part, list(wait.node_files.values()))

    async def _commit(self, part: NodeFile, node_files: list[NodeFile]) -> None:
        manifest = self._context.signed(assemble(node_files))
        self._check(part, manifest)
        is_healthy = verdict(node_files)
        diagnosis = None if is_healthy is None else Diagnosis(healthy=is_healthy)
        failpoint("cold.assemble")
        try:
            await self._cold.commit(manifest, milestones=milestones(node_files), diagnosis=diagnosis)
        except Corrupt:
            # Another node may have signed the same manifest with another key.
            committed = await self._cold.manifest(part.id)
            if _unsigned(committed) != _unsigned(manifest):
                raise
            manifest = committed
        failpoint("cold.assembled")
        self._context.audit.record(Action.COMMITTED, checkpoint=part.id, tier=self._cold.name)
        self._committed(manifest, milestones(node_files), is_healthy=is_healthy)

    def _committed(self, manifest: Manifest, names: list[str] | None = None, *, is_healthy: bool | None = None) -> None:
        context, checkpoint, tier = self._context, manifest.id, self._cold.name
        self._catalog.add(manifest, tier, names or ())
        if is_healthy is not None:
            self._catalog.diagnosed(checkpoint, tier, is_healthy=is_healthy)
        message = wire.Replicated(step=checkpoint.step, generation=checkpoint.generation, tier=tier)
        context.notify.send(checkpoint.run, message)
        context.notify.replicated()


def _unsigned(manifest: Manifest) -> Manifest:
    return msgspec.structs.replace(manifest, signature=msgspec.UNSET)
