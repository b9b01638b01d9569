"""What a machine does before its power is lost: real workers on real files, one daemon after the other.

The loop is simulated, so a seed decides in which order the calls of workers that run at once are made. A daemon that is
killed makes no call any more, and the next one finds what the former one has written, durable or not.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.support import rooms as rooms_module
from tests.support.config import make_config
from tests.support.power_loss.file_calls import CHANGES, Call, FileCalls, Operation, read_tree, watching
from tests.support.power_loss.promises import COLD, HOT, Id, Policy, shard_of
from tests.support.power_loss.volatile_disk import VolatileDisk
from tests.support.rooms import Rooms
from tests.support.simulation.loop import SimulatedLoop
from tierd.catalog.listing import refresh
from tierd.cli.options import Settings
from tierd.cli.restore import restore_to
from tierd.config.sections import ColdPolicy, Config, LifecycleConfig, TierPolicy
from tierd.descriptors import close_all
from tierd.errors import TierdError
from tierd.format import wire
from tierd.format.claim import Claim
from tierd.format.ids import CheckpointId, Generation, Run, checkpoint_id
from tierd.lifecycle.selection import CheckpointQuery
from tierd.metrics import Metrics
from tierd.tiers.lock import Lock
from tierd.transfer.repair import repair_replica
from tierd.transfer.verify import verify_replica
from tierd.workers.reaper import Reaper
from tierd.workers.recovery import recover
from tierd.workers.restorer import OpenCheckpoint, Restorer

RUN = "run42"
TWO_TIERS = Policy(hot_last=1, cold_last=2)
HOT_ALONE = Policy(hot_last=1, cold_last=0)
NOW_S = 1.8e9  # Unix time of recoveries
GENERATION = 1
PASSES_MAX = 10
STEPS = (10, 20, 30, 40)


@cache
def _metrics() -> Metrics:
    return Metrics(tiers=[HOT, COLD])


def config_at(root: Path, policy: Policy) -> Config:
    lifecycle = LifecycleConfig(
        hot=TierPolicy(keep_last=policy.hot_last), cold=ColdPolicy(keep_last=max(1, policy.cold_last), keep_every=0)
    )
    return make_config(root, cold=(COLD,) if policy.cold_last else (), lifecycle=lifecycle)


class Daemon(Rooms, AbstractAsyncContextManager["Daemon"]):
    """The rooms of a daemon. What trainers are told becomes a mark in the log. `has_lock`: it locks its hot directory;
    the lock's file is never synced, which doubles the number of states."""

    def __init__(self, root: Path, calls: FileCalls, policy: Policy, *, has_lock: bool = False) -> None:
        config = config_at(root, policy)
        self._calls = calls
        self._lock = Lock(config.hot_path) if has_lock else None
        with patch.object(rooms_module, "Metrics", lambda tiers: _metrics()):
            super().__init__(config, monotonic_s=lambda: asyncio.get_running_loop().time())
        self.restorer = Restorer(self.context, _judge_nothing)
        self.workers = [self.persister(), *map(self.replicator, self.cold), Reaper(self.context)]

    async def start(self) -> None:
        await recover(self.catalog, self.hot, self.hot_store, now_s=NOW_S)
        for tier in self.cold.values():
            await refresh(self.catalog, tier)

    def send(self, run: Run, message: wire.ToClient) -> None:
        super().send(run, message)
        if isinstance(message, (wire.Persisted, wire.Replicated)):
            tier = message.tier if isinstance(message, wire.Replicated) else ""
            self._calls.mark("told", (tier, Id(run, message.generation, message.step)))

    async def claim(self, generation: int = GENERATION) -> None:
        """What a trainer's start does: the generation is claimed in every tier."""
        for tier in self.tiers.values():
            await tier.claim_generation(Run(RUN), Generation(generation), Claim())
        self._calls.mark("claimed", (RUN, generation))

    def snapshot(self, step: int, *, ranks: int = 2, **fields: Any) -> None:
        checkpoint = Id(RUN, GENERATION, step)
        self.seal(step, [shard_of(checkpoint, rank) for rank in range(ranks)], generation=GENERATION, **fields)

    async def work(self) -> None:
        """One pass of each worker, all at once. Errors are recorded, as the daemon does."""

        async def run(worker: Any) -> None:
            try:
                await worker.run_once()
            except TierdError as error:
                self.incidents.record(worker.name, error)

        await asyncio.gather(*map(run, self.workers))

    async def settle(self) -> None:
        """Passes until nothing changes; at most PASSES_MAX, for failures may change the catalog each time."""
        before = None
        for _ in range(PASSES_MAX):
            if before == (before := (self.catalog.changes, len(self.memory.pending()))):
                return
            await self.work()

    async def find(self, **fields: Any) -> OpenCheckpoint:
        query: dict[str, Any] = {"request": 1, "step": None, "generation": None, "milestone": None}
        query |= {"tier": "auto", "exclude": []}
        return await self.restorer.find(Run(RUN), wire.Find(**query | fields), lambda done, whole: None)

    async def __aexit__(self, *error: object) -> None:
        await self.close()
        if self._lock is not None:
            self._lock.release()


async def _judge_nothing(checkpoint: CheckpointId) -> bool | None:
    return None


def run_simulated(main: Awaitable[Any], seed: int = 0) -> Any:
    """The result of a coroutine on a loop whose jobs take a random time."""
    loop = SimulatedLoop(seed)
    loop.latency_s = lambda name: (loop.random.uniform(0.0001, 0.02), loop.random.uniform(0.0, 0.002))
    result = loop.run_until_complete(main)
    assert not loop.errors, loop.errors
    return result


@dataclass(frozen=True)
class Machine:
    """`root`: its disk. It runs one daemon at a time."""

    root: Path
    calls: FileCalls
    policy: Policy = TWO_TIERS

    def daemon(self, *, has_lock: bool = False) -> Daemon:
        return Daemon(self.root, self.calls, self.policy, has_lock=has_lock)


@contextmanager
def machine_at(root: Path, policy: Policy = TWO_TIERS) -> Iterator[Machine]:
    """A machine with an empty disk. Names of files that are being written are the same in each run."""
    numbers = iter(range(1, 1 << 30))
    root.mkdir(parents=True)
    try:
        with watching(root) as calls, patch("secrets.token_hex", lambda size: f"{next(numbers):0{2 * size}x}"):
            yield Machine(root, calls, policy)
    finally:
        shutil.rmtree(root, ignore_errors=True)


@dataclass(frozen=True)
class Recording:
    log: list[Operation]
    base: dict[int, dict[str, int] | bytes]


Scenario = Callable[[Machine], Awaitable[None]]


def record(scenario: Scenario, root: Path, policy: Policy = TWO_TIERS, *, seed: int = 0) -> Recording:
    """Runs a scenario on a new machine."""
    with machine_at(root, policy) as machine:
        run_simulated(scenario(machine), seed)
        recording = Recording(list(machine.calls.log), machine.calls.base)
        disk = VolatileDisk(recording.base)
        for operation in recording.log:
            disk.apply(operation)
        left = read_tree(str(root))
        assert disk.newest() == left, "the log lacks an operation"
    return recording


def changes_of(scenario: Scenario, root: Path, policy: Policy = TWO_TIERS) -> list[tuple[str, str]]:
    """(name, path) of each change that a scenario makes, in order."""
    changes: list[tuple[str, str]] = []

    def note(call: Call) -> int:
        if call.name in CHANGES:
            changes.append((call.name, call.path))
        return 0

    with machine_at(root, policy) as machine:
        machine.calls.fails = note
        run_simulated(scenario(machine))
    return changes


# ── scenarios ──


async def first_start(machine: Machine) -> None:
    """The first daemon on a new disk: it makes the hot directory and one checkpoint, and no cold tier yet."""
    async with machine.daemon(has_lock=True) as daemon:
        await daemon.start()
        daemon.snapshot(10, milestone="best")
        await daemon.persister().run_once()


async def four_ranks(machine: Machine) -> None:
    """Four shards are written at once."""
    async with machine.daemon() as daemon:
        await daemon.start()
        daemon.snapshot(10, ranks=4)
        await daemon.settle()


async def life(machine: Machine) -> None:
    """Checkpoints are committed, copied, evicted from hot, and expired from cold."""
    async with machine.daemon() as daemon:
        await daemon.start()
        await daemon.claim()
        for step in STEPS:
            daemon.snapshot(step, milestone="best" if step == STEPS[0] else None)
            await daemon.work()
        await daemon.settle()


async def one_more(machine: Machine) -> None:
    """A life goes on: one checkpoint is committed and copied, and older ones are evicted and expired."""
    await life(machine)
    machine.calls.restart()
    async with machine.daemon() as daemon:
        await daemon.start()
        daemon.snapshot(STEPS[-1] + 10)
        await daemon.settle()


def killed(at: int, scenario: Scenario = life) -> Scenario:
    """A daemon is killed before its change number `at`. The next one recovers, gets the last snapshot again from the
    trainer, and goes on."""

    async def run(machine: Machine) -> None:
        calls, watcher = machine.calls, machine.calls.fails

        def fails(call: Call) -> int:
            if call.number >= at:
                calls.kill()
            return watcher(call) if watcher is not None and not calls.is_dead else 0

        calls.fails = fails
        try:
            await scenario(machine)
        except TierdError:
            pass  # it was killed outside of a worker
        calls.fails = watcher
        calls.revive()
        calls.close_all()
        calls.mark("killed", at)
        async with machine.daemon() as daemon:
            await daemon.start()
            await daemon.settle()
            for step in (STEPS[-1], STEPS[-1] + 10):
                daemon.snapshot(step, resent=step == STEPS[-1])
                await daemon.work()
            await daemon.settle()

    return run


async def fetch(machine: Machine) -> None:
    """The hot disk is lost. A trainer restores, and the newest checkpoint of cold becomes a hot replica again."""
    await life(machine)
    shutil.rmtree(machine.root / HOT)
    machine.calls.restart()
    async with machine.daemon() as daemon:
        await daemon.start()
        close_all((await daemon.find()).descriptors)


async def repair(machine: Machine) -> None:
    """A hot shard and a cold manifest are found damaged and repaired from the other tier."""
    await life(machine)
    checkpoint = Id(RUN, GENERATION, STEPS[-1])
    for tier, file in ((HOT, "rank-00001-of-00002.safetensors"), (COLD, "manifest.json")):
        path = machine.root / tier / checkpoint.folder / file
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0x80
        path.write_bytes(content)
    machine.calls.restart()
    machine.calls.mark("damaged", frozenset({(HOT, checkpoint), (COLD, checkpoint)}))
    async with machine.daemon() as daemon:
        for tier, other in ((daemon.hot, daemon.cold[COLD]), (daemon.cold[COLD], daemon.hot)):
            damage = await verify_replica(tier, checkpoint_id(RUN, checkpoint.step, GENERATION))
            assert damage is not None
            assert damage.problems
            repair = await repair_replica(tier, checkpoint_id(RUN, checkpoint.step, GENERATION), damage, [other])
            assert repair.repaired
            machine.calls.mark("told", (tier.name, checkpoint))


async def mark(machine: Machine) -> None:
    """`tierd milestone` marks a committed checkpoint, and the mark is copied to cold."""
    await life(machine)
    machine.calls.restart()
    async with machine.daemon() as daemon:
        await daemon.start()
        step = STEPS[-1]
        await daemon.hot.mark_milestone(checkpoint_id(RUN, step, GENERATION), "chosen", "now")
        machine.calls.mark("milestone", (HOT, Id(RUN, GENERATION, step), "chosen"))
        await refresh(daemon.catalog, daemon.hot)
        await daemon.settle()


async def restore(machine: Machine) -> None:
    """`tierd restore --to` makes a directory, and its parent."""
    await life(machine)
    checkpoint = Id(RUN, GENERATION, STEPS[-1])
    machine.calls.restart()
    query = CheckpointQuery(run=Run(RUN))
    await restore_to(machine.root / "out" / checkpoint.folder, Settings(None), query, str(machine.root / COLD))
    machine.calls.mark("told", ("out", checkpoint))
