"""One fault of the disk at one call of real workers, until it is over: what the trainer is told, and what is left.

A fault is an error of a call, once or of all calls like it for two snapshots, or a job of a directory that hangs. The
operations are recorded, so a loss of power after each of them is checked as well.
"""

from __future__ import annotations

import asyncio
import errno
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.support.power_loss.file_calls import Call, FileCalls, Mark, Operation, Sync, read_tree
from tests.support.power_loss.promises import COLD, HOT, Expected, Id, broken_promises, contents_of, newest
from tests.support.power_loss.scenarios import (
    GENERATION,
    RUN,
    STEPS,
    TWO_TIERS,
    Daemon,
    Machine,
    life,
    machine_at,
)
from tests.support.power_loss.volatile_disk import VolatileDisk
from tests.support.simulation.loop import SimulatedLoop
from tierd.catalog.listing import refresh
from tierd.descriptors import close_all
from tierd.errors import TierdError
from tierd.format import wire
from tierd.format.ids import checkpoint_id
from tierd.transfer.repair import repair_replica
from tierd.transfer.verify import verify_replica

SPACE_CALLS = {"create", "mkdir", "link", "fallocate", "pwrite", "ftruncate", "fsync", "rename"}
CHANGE_CALLS = SPACE_CALLS | {"fsync folder", "unlink", "rmdir"}
READ_CALLS = {"open", "preadv", "read", "scandir"}
CALLS_OF = {
    errno.ENOSPC: SPACE_CALLS,
    errno.EDQUOT: SPACE_CALLS,
    errno.EROFS: CHANGE_CALLS - {"fsync", "fsync folder", "pwrite", "ftruncate", "fallocate"},
    errno.EIO: CHANGE_CALLS | READ_CALLS,
}
"""Which calls fail with an error. On a file system that has become read-only, a descriptor that is open for writing
returns EIO."""
KINDS = {errno.ENOSPC: "full", errno.EDQUOT: "full", errno.EROFS: "tier_unreachable", errno.EIO: "tier_unreachable"}
LASTS_STEPS = 2  # snapshots
STEPS_S = 60.0  # between two snapshots
STALL_S_MAX = 600.0
JOBS = "tierd-directory"  # the executor of a directory's calls


@dataclass(frozen=True)
class Moment:
    """A call by what it does and to what, and which of these calls it is, from 0."""

    name: str
    tier: str
    file: str
    count: int = 0

    def __str__(self) -> str:
        return f"{self.name} {self.tier}/{self.file} {self.count}"


@dataclass(frozen=True)
class Fault:
    """`code`: the error; 0: the calls of a directory from number `moment.count` on take `stall_s`. `is_lasting`: also
    every later call of the same name in that tier fails, for a while."""

    moment: Moment
    code: int
    is_lasting: bool = False
    stall_s: float = 0.0

    def __str__(self) -> str:
        kind = errno.errorcode[self.code] if self.code else f"stall {self.stall_s:.0f} s"
        return f"{kind} {'for a while' if self.is_lasting else 'once'} {self.moment}"


@dataclass
class Outcome:
    """`has_hit`: whether the call came. `problems`: broken promises."""

    has_hit: bool
    problems: list[str]


@dataclass
class Injector:
    """Decides which calls fail. `seen`: how many calls there were of each moment's name, tier and file."""

    fault: Fault | None
    seen: dict[Moment, int] = field(default_factory=dict[Moment, int])
    order: list[Moment] = field(default_factory=list[Moment])
    steps_left: int = LASTS_STEPS
    has_hit: bool = False
    is_over: bool = False

    def fails(self, call: Call) -> int:
        if self.is_over:
            return 0
        where = moment_of(call)
        count = self.seen[where] = self.seen.get(where, -1) + 1
        here = replace(where, count=count)
        self.order.append(here)
        fault = self.fault
        if fault is None or not fault.code:
            return 0
        is_again = (
            self.has_hit and fault.is_lasting and (here.name, here.tier) == (fault.moment.name, fault.moment.tier)
        )
        if here == fault.moment or is_again:
            self.has_hit = True
            return fault.code
        return 0

    def step_ended(self) -> None:
        if self.has_hit:
            self.steps_left -= 1
            self.is_over |= self.steps_left <= 0 or not (self.fault and self.fault.is_lasting)


def moment_of(call: Call) -> Moment:
    """Of one step: a fault at another step would hit the same line of the code."""
    tier, _, path = call.path.partition("/")
    folder, _, name = path.rpartition("/")
    for ending in ("rank", "manifest", "milestone", "generation", "healthy"):
        if name.startswith(ending):
            return Moment(call.name, tier, f"{ending}{'.partial' if name.endswith('.partial') else ''}")
    return Moment(call.name, tier, "checkpoint" if folder.count("/") == 0 and name[:1].isdigit() else "folder")


# ── what a trainer and a daemon do meanwhile ──

Activity = Callable[[Machine, Injector], Awaitable[list[str]]]


async def train(machine: Machine, injector: Injector) -> list[str]:
    """A training that snapshots through the fault, and two snapshots after it."""
    problems: list[str] = []
    daemon = await _started(machine, injector)
    async with daemon:
        await _retried(daemon.claim, injector)
        step = 0
        while step < STEPS[-1] or (injector.has_hit and not injector.is_over):
            step += 10
            before = len(daemon.sent)
            daemon.snapshot(step, milestone="best" if step == 10 else None)
            await daemon.work()
            problems += _told(daemon, step, daemon.sent[before:], injector.fault)
            injector.step_ended()
            await asyncio.sleep(STEPS_S)
        injector.is_over = True
        await asyncio.sleep(STALL_S_MAX)
        for _ in range(2):
            step += 10
            daemon.snapshot(step)
            await _quiet(daemon)
        persisted = [message.step for message in daemon.sent if isinstance(message, wire.Persisted)]
        if persisted[-1:] != [step]:
            problems.append(f"after the fault, the last of {persisted} is not the newest snapshot {step}")
        if daemon.memory.pending():
            problems.append("a snapshot is still pending")
        failures = len(daemon.incidents.recent())
        await daemon.work()
        if len(daemon.incidents.recent()) > failures:
            problems.append("a worker still fails after the fault")
        if any(isinstance(message, wire.Failed) for message in daemon.sent) and not daemon.incidents.recent():
            problems.append("no incident was recorded")
        whole = contents_of(read_tree(str(machine.root))).whole
        expected = {(HOT, step), (COLD, step), (COLD, step - 10), (COLD, 10)}
        # A newer snapshot may have replaced the milestone before it could be written.
        required = expected if 10 in persisted else expected - {(COLD, 10)}
        if missing := required - {(tier, checkpoint.step) for tier, checkpoint in whole}:
            problems.append(f"after the fault, {sorted(missing)} are missing")
        if extra := {(tier, each.step) for tier, each in whole} - expected:
            problems.append(f"after the fault, {sorted(extra)} were not deleted")
    return problems


async def fetch(machine: Machine, injector: Injector) -> list[str]:
    """A restore from cold into a new hot directory, tried until hot has it. During the fault it may be into memory."""
    problems: list[str] = []
    async with await _started(machine, injector) as daemon:
        for _ in range(10):
            try:
                found = await daemon.find()
            except TierdError:
                injector.step_ended()
                await asyncio.sleep(STALL_S_MAX)
                await refresh(daemon.catalog, daemon.cold[COLD])
                continue
            close_all(found.descriptors)
            if daemon.catalog.newest(found.manifest.id.run, HOT) == found.manifest:
                machine.calls.mark("told", (HOT, Id(RUN, GENERATION, found.manifest.step)))
                break
            await daemon.restorer.fetcher.restored(found.manifest.id.run)  # it was fetched into memory
            injector.step_ended()
        else:
            problems.append("the restore never succeeded")
    return problems


async def repair(machine: Machine, injector: Injector) -> list[str]:
    """The repair of a hot shard, tried until it succeeds. After an error, a later verification may read the repaired
    shard although its name is not on the disk: then nobody was promised that it stays."""
    checkpoint = checkpoint_id(RUN, STEPS[-1], GENERATION)
    is_durable = True
    async with await _started(machine, injector) as daemon:
        for _ in range(10):
            try:
                damage = await verify_replica(daemon.hot, checkpoint)
                if damage is None or not damage.problems:
                    break
                repair = await repair_replica(daemon.hot, checkpoint, damage, [daemon.cold[COLD]])
                is_durable = not repair.refused
            except TierdError:
                is_durable = False
            injector.step_ended()
            await asyncio.sleep(STALL_S_MAX)
        else:
            return ["the repair never succeeded"]
        if is_durable:
            machine.calls.mark("told", (HOT, Id(RUN, GENERATION, STEPS[-1])))
    return []


async def _started(machine: Machine, injector: Injector) -> Daemon:
    """A daemon that its supervisor starts until it does."""
    while True:
        daemon = machine.daemon()
        try:
            await daemon.start()
            return daemon
        except TierdError:
            injector.step_ended()
            await daemon.close()
            await asyncio.sleep(STALL_S_MAX)


async def _retried(act: Callable[[], Awaitable[object]], injector: Injector) -> None:
    while True:
        try:
            await act()
            return
        except TierdError:
            injector.step_ended()
            await asyncio.sleep(STALL_S_MAX)


async def _quiet(daemon: Daemon) -> None:
    """What the daemon does within a few intervals: it lists each tier, and its workers pass until nothing changes."""
    for _ in range(3):
        for tier in daemon.tiers.values():
            await refresh(daemon.catalog, tier)
        await daemon.settle()


def _told(daemon: Daemon, step: int, messages: list[wire.ToClient], fault: Fault | None) -> list[str]:
    """The trainer hears of each snapshot: that it is durable, or why it is not yet."""
    own = [each for each in messages if isinstance(each, (wire.Persisted, wire.Failed)) and each.step == step]
    if not own:
        return [f"the trainer was told nothing of step {step}"]
    failures = [each for each in own if isinstance(each, wire.Failed)]
    problems: list[str] = []
    for failure in failures:
        kinds = {KINDS[fault.code]} if fault is not None and fault.code else {"tier_unreachable"}
        if failure.is_final or failure.kind not in kinds:
            problems.append(f"the trainer was told of step {step}: {failure.kind}: {failure.message}")
    return problems


# ── one run ──


def run_with(
    fault: Fault | None, activity: Activity, root: Path, *, prepare: Callable[[Machine], Awaitable[None]] | None = None
) -> tuple[Outcome, Injector]:
    """Runs an activity on a new machine while the fault happens. `prepare`: what the machine did before."""
    injector = Injector(fault)
    with machine_at(root) as machine:
        loop = SimulatedLoop(0)
        if prepare is not None:
            loop.run_until_complete(prepare(machine))
        machine.calls.fails = injector.fails
        loop = SimulatedLoop(0)
        jobs = iter(range(1 << 30))

        def latency_s(name: str) -> tuple[float, float]:
            if (
                fault is not None
                and fault.stall_s
                and not injector.is_over
                and name == JOBS
                and next(jobs) == fault.moment.count
            ):
                injector.has_hit = True
                is_before = fault.moment.name == "before"
                return (fault.stall_s, 0.001) if is_before else (0.001, fault.stall_s)
            return loop.random.uniform(0.0001, 0.02), loop.random.uniform(0.0, 0.002)

        loop.latency_s = latency_s
        problems: list[str] = loop.run_until_complete(activity(machine, injector))
        injector.is_over = True
        loop.run_until_complete(_restart(machine))
        problems += [str(error) for error in loop.errors]
        tree = read_tree(str(root))
        problems += [f"a partial file is left: {path}" for path in tree if path.endswith(".partial")]
        problems += _replayed(machine.calls, is_full=fault is not None and KINDS.get(fault.code) == "full")
    return Outcome(injector.has_hit, problems), injector


async def _restart(machine: Machine) -> None:
    """The next daemon removes partial files that could not be removed during the fault."""
    async with machine.daemon() as daemon:
        await daemon.start()
        for tier in daemon.cold.values():
            await tier.store.remove_unfinished(lambda key: True, grace_s=0.0)


def _replayed(calls: FileCalls, *, is_full: bool) -> list[str]:
    """The promises after each operation: of what is on the disk in any case. `is_full`: the hot disk was full, and hot
    evicts what cold holds."""
    disk = VolatileDisk(calls.base)
    expected = Expected(durable=contents_of(disk.durable()).whole)
    damaged = frozenset(contents_of(disk.durable()).broken)
    expected = replace(expected, damaged=damaged)
    problems: list[str] = []
    for number, operation in enumerate(calls.log):
        disk.apply(operation)
        if is_full:
            whole = contents_of(disk.durable()).whole
            evicted = {(tier, each) for tier, each in expected.durable - whole if tier == HOT and (COLD, each) in whole}
            expected = replace(expected, durable=expected.durable - evicted)
        problems += _after(operation, disk, expected)
        if isinstance(operation, (Sync, Mark)):
            whole = contents_of(disk.durable()).whole
            expected = replace(expected, durable=expected.durable | whole)
            if isinstance(operation, Mark) and operation.kind == "told":
                tier, checkpoint = operation.subject
                tiers = {where for where, durable in whole if durable == checkpoint}
                if not (tier in tiers if tier else tiers):
                    problems.append(f"a trainer was told of {checkpoint.folder}, which is not on the disk")
            elif isinstance(operation, Mark) and operation.kind == "claimed":
                expected = replace(expected, claims=expected.claims | {operation.subject})
        if problems:
            return [f"operation {number}, {operation!s:.100}: {problem}" for problem in problems]
    return []


def _after(operation: Operation, disk: VolatileDisk, expected: Expected) -> list[str]:
    if isinstance(operation, (Sync, Mark)):
        return []
    tree = disk.durable()
    return broken_promises(contents_of(tree), tree, expected, TWO_TIERS)


async def with_cold_alone(machine: Machine) -> None:
    """The machine had a life, and lost its hot disk."""
    await life(machine)
    shutil.rmtree(machine.root / HOT)
    machine.calls.restart()


async def with_damage(machine: Machine) -> None:
    """A hot shard of the newest checkpoint is damaged."""
    await life(machine)
    checkpoint = newest(contents_of(read_tree(str(machine.root))).whole, RUN)
    assert checkpoint is not None
    path = machine.root / HOT / checkpoint.folder / "rank-00001-of-00002.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x80
    path.write_bytes(content)
    machine.calls.restart()
