"""Every state that a loss of power may leave of a recorded log, and the recovery from each with the real code.

A recovery is recorded too, and every state that a loss of power during it may leave is recovered from in turn, until no
new state appears. Equal states are recovered from once.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from tests.support.power_loss.file_calls import FileCalls, Mark, Operation, Sync, Tree, read_tree, watching
from tests.support.power_loss.promises import (
    COLD,
    HOT,
    SHARD_BYTES,
    Contents,
    Expected,
    Id,
    Policy,
    broken_promises,
    contents_of,
    newest,
    shard_of,
)
from tests.support.power_loss.scenarios import RUN, Daemon, run_simulated
from tests.support.power_loss.volatile_disk import VolatileDisk
from tierd.descriptors import close_all
from tierd.errors import TierdError
from tierd.format.ids import CheckpointId

Key = frozenset[tuple[str, bytes | None]]


@dataclass(frozen=True)
class Recovery:
    """`after`: the tree. `during`: what a loss of power during the recovery may leave. `problems`: with the recovery
    itself, whatever was expected."""

    after: Tree
    contents: Contents
    listed: frozenset[tuple[str, Id]]
    during: list[Tree]
    problems: list[str]


@dataclass(frozen=True)
class Continuation:
    """What the daemon did after a recovery: copies, evictions, a restore."""

    contents: Contents
    after: Tree
    restored: Id | None
    problems: list[str]


@dataclass
class Explorer:
    """`states`: the different states that were recovered from. `violations`: of promises, the first ones. `every`: of
    the states that operations make possible, every so many, and of those of the log the first of each operation."""

    root: Path
    calls: FileCalls
    policy: Policy
    every: int = 1
    states: set[Key] = field(default_factory=set[Key])
    visits: int = 0
    losses: int = 0
    violations: list[str] = field(default_factory=list[str])
    _recoveries: dict[Key, Recovery] = field(default_factory=dict[Key, Recovery])
    _continuations: dict[Key, Continuation] = field(default_factory=dict[Key, Continuation])
    _visited: set[tuple[Key, Expected]] = field(default_factory=set[tuple[Key, Expected]])
    _present: Tree = field(default_factory=dict[str, bytes | None])
    _counted: int = 0

    def explore(
        self,
        log: list[Operation],
        base: dict[int, dict[str, int] | bytes],
        *,
        first: int = 0,
        stops: bool = False,
    ) -> None:
        """Loses the power after each operation of the log from number `first` on. `stops`: at the first violation."""
        disk = VolatileDisk(base)
        expected = _add_durable(Expected(), disk)
        for number, operation in enumerate(log):
            disk.apply(operation)
            before = expected
            if isinstance(operation, Sync):
                expected = _add_durable(expected, disk)
            elif isinstance(operation, Mark):
                expected = self._told(operation, expected, f"operation {number}")
            if number < first:
                continue
            self.losses += 1
            # After an operation from which nothing new is certain, only what it makes possible is new.
            states = disk.states(operation if expected is before and number > first else None)
            for tree in self._chosen(states, has_first=True):
                self._check(tree, expected, f"operation {number}, {operation!s:.200}")
                if len(self.violations) > (0 if stops else 20):
                    return

    def _chosen(self, states: Iterator[Tree], *, has_first: bool) -> Iterator[Tree]:
        """`has_first`: the first one always. Of what is not synced yet, it has as little as possible beside the newest
        operation."""
        for index, tree in enumerate(states):
            self._counted += 1
            if self._counted % self.every == 0 or (has_first and index == 0):
                yield tree

    def _told(self, mark: Mark, expected: Expected, where: str) -> Expected:
        """`durable` means: before a trainer is told, the checkpoint is whole on the disk."""
        match mark.kind, mark.subject:
            case "told", (tier, checkpoint):
                tiers = {of for of, durable in expected.durable if durable == checkpoint}
                if not (tier in tiers if tier else tiers):
                    self.violations.append(
                        f"{where}: durable: a trainer was told of {checkpoint}, which is not on disk"
                    )
            case "claimed", claim:
                return replace(expected, claims=expected.claims | {claim})
            case "damaged", replicas:
                return replace(expected, damaged=expected.damaged | replicas, durable=expected.durable - replicas)
            case "killed", _:
                return expected
            case "milestone", milestone:
                return replace(expected, milestones=expected.milestones | {milestone})
            case _:
                raise ValueError(mark)
        return expected

    def _check(self, tree: Tree, expected: Expected, where: str) -> None:
        pending = [tree]
        while pending:
            tree = pending.pop()
            key = frozenset(tree.items())
            self.visits += 1
            if (key, expected) in self._visited:
                continue
            self._visited.add((key, expected))
            self.states.add(key)
            before = contents_of(tree)
            recovery = self._recoveries.get(key)
            if recovery is None:
                recovery = self._recoveries[key] = self._recover(tree, before)
            after_key = frozenset(recovery.after.items())
            continuation = self._continuations.get(after_key)
            if continuation is None:
                continuation = self._continuations[after_key] = self._continue(recovery.after)
            problems = [f"left: {each}" for each in broken_promises(before, tree, expected, self.policy)]
            problems += recovery.problems + continuation.problems
            problems += [
                f"recovered: {each}"
                for each in broken_promises(recovery.contents, recovery.after, expected, self.policy)
            ]
            whole = {replica for replica in recovery.contents.whole if replica[0] in (HOT, COLD)}
            if difference := recovery.listed - expected.damaged ^ whole - expected.damaged:
                problems.append(f"recovered: the listing and the disk differ in {sorted(difference)}")
            if lost := before.whole - recovery.contents.whole:
                problems.append(f"recovered: the recovery deleted {sorted(lost)}")
            known = replace(expected, durable=expected.durable | recovery.contents.whole)
            problems += [
                f"continued: {each}"
                for each in broken_promises(continuation.contents, continuation.after, known, self.policy)
            ]
            least = newest(expected.durable, RUN)
            if least is not None and (continuation.restored is None or continuation.restored < least):
                problems.append(f"restored {continuation.restored}, but {least} was durable")
            if problems:
                self.violations.append(f"power lost after {where}: {'; '.join(problems)}; left {_shown(tree)}")
                return
            pending += recovery.during

    # ── with the real code ──

    def _recover(self, tree: Tree, before: Contents) -> Recovery:
        self._materialize(tree)
        self.calls.restart(tree)
        problems: list[str] = []
        listed = run_simulated(self._start(problems))
        during: dict[Key, Tree] = {}
        disk = VolatileDisk(self.calls.base)
        for operation in self.calls.log:
            disk.apply(operation)
            for state in self._chosen(disk.states(operation), has_first=False):
                during[frozenset(state.items())] = state
        during.pop(frozenset(tree.items()), None)
        after = self._present = disk.newest()
        contents = contents_of(after)
        if partial := [path for path in after if path.endswith(".partial") and path.startswith((HOT, COLD))]:
            problems.append(f"recovery left {partial}")
        if folders := _without_manifest(after):
            problems.append(f"recovery left {folders} without a manifest")
        return Recovery(after, contents, frozenset(listed), list(during.values()), problems)

    async def _start(self, problems: list[str]) -> list[tuple[str, Id]]:
        """A daemon starts. Returns what it lists."""
        async with Daemon(self.root, self.calls, self.policy) as daemon:
            await daemon.start()
            for name in daemon.cold:
                await daemon.cold[name].store.remove_unfinished(lambda key: True, grace_s=0.0)
            problems += [f"not listed: {tier.error}" for tier in daemon.catalog.tiers.values() if not tier.is_known]
            return [(tier, _id(entry.id)) for entry in daemon.catalog.entries() for tier in entry.tiers]

    def _continue(self, tree: Tree) -> Continuation:
        self._materialize(tree)
        self.calls.restart(tree)
        problems: list[str] = []
        restored = run_simulated(self._work(problems))
        after = self._present = read_tree(str(self.root))
        return Continuation(contents_of(after), after, restored, problems)

    async def _work(self, problems: list[str]) -> Id | None:
        async with Daemon(self.root, self.calls, self.policy) as daemon:
            await daemon.start()
            changes = [operation for operation in self.calls.log if not isinstance(operation, (Sync, Mark))]
            if changes:
                problems.append(f"a second recovery changed {changes}")
            await daemon.settle()
            if incidents := [each.message for each in daemon.incidents.recent()]:
                problems.append(f"incidents after the recovery: {incidents[:3]}")
            return await _restore(daemon)

    def _materialize(self, tree: Tree) -> None:
        """Makes the scratch folder be this tree; writes only what differs."""
        present = self._present
        for path in sorted((path for path in present if path not in tree or tree[path] != present[path]), reverse=True):
            full = self.root / path
            if present[path] is None:
                full.rmdir()
            else:
                full.unlink()
        for path in sorted(path for path in tree if path not in present or tree[path] != present[path]):
            content = tree[path]
            if content is None:
                (self.root / path).mkdir()
            else:
                (self.root / path).write_bytes(content)
        self._present = dict(tree)


def problems_after_recovery(root: Path, policy: Policy, expected: Expected) -> list[str]:
    """A real folder after a loss of power: what is wrong with what it left, and after the recovery from it."""
    with watching(root) as calls:
        left = read_tree(str(root))
        problems = broken_promises(contents_of(left), left, expected, policy)
        restored = run_simulated(_recover_and_restore(partial(Daemon, root, calls, policy)))
        recovered = read_tree(str(root))
        problems += broken_promises(contents_of(recovered), recovered, expected, policy)
    least = newest(expected.durable, RUN)
    if least is not None and (restored is None or restored < least):
        problems.append(f"restored {restored}, but {least} was durable")
    return problems


async def _recover_and_restore(start: Callable[[], Daemon]) -> Id | None:
    async with start() as daemon:  # its clock is that of the running event loop
        await daemon.start()
        return await _restore(daemon)


async def _restore(daemon: Daemon) -> Id | None:
    """The newest checkpoint whose bytes are those of the snapshot. As a trainer does, it excludes a damaged replica."""
    exclude: list[str] = []
    while True:
        try:
            found = await daemon.find(exclude=exclude)
        except TierdError:
            return None
        checkpoint = _id(found.manifest.id)
        contents = [os.pread(fd, 2 * SHARD_BYTES, 0) for fd in found.descriptors]
        close_all(found.descriptors)
        if contents == [shard_of(checkpoint, rank) for rank in range(len(contents))]:
            return checkpoint
        exclude.append(f"{checkpoint.name}@{found.tier}")


def _add_durable(expected: Expected, disk: VolatileDisk) -> Expected:
    tree = disk.durable()
    whole = contents_of(tree).whole
    if whole <= expected.durable:
        return expected
    return replace(expected, durable=expected.durable | whole)


def _without_manifest(tree: Tree) -> list[str]:
    """Folders of checkpoints in hot without a manifest that still have a file."""
    folders = {path.rpartition("/")[0] for path in tree if path.startswith("hot/") and path.count("/") == 3}
    return sorted(folder for folder in folders if f"{folder}/manifest.json" not in tree)


def _id(checkpoint: CheckpointId) -> Id:
    return Id(checkpoint.run, checkpoint.generation, checkpoint.step)


def _shown(tree: Tree) -> str:
    return ", ".join(f"{path} ({len(content)})" for path, content in sorted(tree.items()) if content is not None)


@contextmanager
def explorer_at(root: Path, policy: Policy, *, every: int = 1) -> Iterator[Explorer]:
    """`root`: a new folder in memory."""
    root.mkdir(parents=True)
    try:
        with watching(root) as calls:
            yield Explorer(root, calls, policy, every)
    finally:
        shutil.rmtree(root, ignore_errors=True)
