"""Runs one schedule: nodes with real daemons, simulated trainers, one cold tier that all share, and the checker.

Modelled deaths: of a trainer, of a daemon (its memory is lost, its trainers send their snapshots again), of a node
(both) and of a node with its disk. A killed process stops between two steps of the loop; what it has written stays.
Modelled faults: requests that fail before or after their effect, a bucket that cannot be reached, system calls on files
that fail, a shard that disappears from cold.

A job may also be taken over by a second trainer while the first one still lives.

Not modelled: power loss (files that were not fsynced stay; tests/support/power_loss has a model), multipart uploads, a
drain, a partial file of a killed daemon that loses its lock (so it is not swept).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from tests.support.simulation.bucket import SimulatedBucket
from tests.support.simulation.checker import COLD, BucketPlace, Checker, FolderPlace, Id, Policy, Violation, folder_of
from tests.support.simulation.daemon import (
    COLD_KEEP_EVERY,
    COLD_KEEP_LAST,
    HOT_KEEP_LAST,
    SimulatedDaemon,
    make_config,
)
from tests.support.simulation.disk import failing_calls
from tests.support.simulation.loop import OWNER, SimulatedLoop
from tests.support.simulation.schedule import Event, Schedule
from tests.support.simulation.trainer import SimulatedTrainer
from tierd.errors import TierdError

PREFIX = "tier/"
SETTLE_S = 700.0  # one listing of a cold tier at the default interval, and what follows from it
READ_ONLY = {"walk", "_get", "read_blocking", "open_file", "begin"}  # jobs of a directory after which nothing differs
DISK_ERROR_RATE = 0.1  # of system calls


@dataclass
class Outcome:
    """`trace`: what happened, with times; equal for equal schedules. `steps`: callbacks that ran."""

    violation: Violation | None
    trace: list[str] = field(repr=False)
    steps: int
    simulated_s: float


class World:
    _examines = False
    _has_peers = False

    def __init__(self, schedule: Schedule, root: Path, loop: SimulatedLoop) -> None:
        self._schedule = schedule
        self._root = root
        self._loop = loop
        self._jobs = {job.name: job for job in schedule.jobs}
        self._daemons: dict[str, SimulatedDaemon] = {}
        self._trainers: dict[str, SimulatedTrainer] = {}  # the newest of each job
        self._all_trainers: list[SimulatedTrainer] = []
        self._disk_errs_until_s: dict[str, float] = {}
        self._disk_faults = 0
        self._capacity: dict[str, int] = {}  # by node: how many files of checkpoints fit
        self._is_disk_failing = False
        self._is_calm = False
        self._has_lost_shards = False
        self.trace: list[str] = []
        self.bucket = SimulatedBucket(
            random.Random(schedule.seed + 1),
            page_keys=schedule.page_keys,
            ignores_conditions=schedule.ignores_conditions,
        )
        self.checker = self._make_checker(Policy(HOT_KEEP_LAST, COLD_KEEP_LAST, COLD_KEEP_EVERY))
        self._has_folder = schedule.scenario == "shared folder"
        self._add_places()
        self.bucket.on_change = self._object_changed
        self.bucket.on_listed = self._listed
        loop.latency_s = self._latency_s
        loop.before_job = self._before_job
        loop.after_job = self._after_job

    def patched(self) -> AbstractContextManager[None]:
        """What is replaced besides, for the time of the simulation."""
        return nullcontext()

    def _make_checker(self, policy: Policy) -> Checker:
        honours_conditions = not self._schedule.ignores_conditions
        return Checker(
            policy,
            honours_conditions=honours_conditions,
            has_one_writer=self._schedule.scenario == "full disk",
            is_slow=self._schedule.is_slow,
            on_violation=self._end,
        )

    def _add_places(self) -> None:
        is_bucket = not self._has_folder
        cold = BucketPlace(self.bucket.objects, PREFIX) if is_bucket else FolderPlace(self._root / COLD)
        self.checker.add_place(COLD, cold)
        for node in self._schedule.nodes:
            self.checker.add_place(node, FolderPlace(self._root / node / "hot"))

    async def run(self) -> None:
        for node in self._schedule.nodes:
            self._start_daemon(node)
        for event in self._schedule.events:
            await asyncio.sleep(event.after_s)
            self._note(str(event))
            self._apply(event)
            self._check()
        await self._settle()

    async def _settle(self) -> None:
        """Every fault ends and training stops; after a while, all copies and deletions must be done."""
        self._is_calm = True
        self._mend_bucket()
        for node, daemon in self._daemons.items():
            if not daemon.process.is_alive:
                self._start_daemon(node)
        await asyncio.sleep(100.0)
        for trainer in self._all_trainers:
            trainer.kill()
        await asyncio.sleep(SETTLE_S)
        self._check()
        # Two writers of one run leave replicas that conflict, which halts deletion until a person decides. A lost shard
        # halts it until the next round of the scrub.
        if self._schedule.scenario != "shared run" and not self._has_lost_shards:
            self.checker.check_settled(self._daemons)

    # ── events ──

    def _apply(self, event: Event) -> None:
        loop, target, argument = self._loop, event.target, event.argument
        match event.action:
            case "start job" | "restart job" | "take over job":
                former = self._trainers.get(target)
                if former is not None and event.action == "restart job":
                    former.kill()
                self._start_trainer(target, str(argument) or (former.node if former else self._schedule.nodes[0]))
            case "kill daemon":
                self._kill_daemon(target, float(argument))
            case "kill node" | "lose disk":
                for trainer in self._all_trainers:
                    if trainer.node == target:
                        trainer.kill()
                self._kill_daemon(target, float(argument))
                if event.action == "lose disk":
                    # Under another name, so that calls of the killed daemon reach no new file.
                    with suppress(FileNotFoundError):
                        os.rename(self._root / target / "hot", self._root / target / f"lost-{len(self.trace)}")
                    self.checker.lose_place(target)
            case "bucket fails":
                self.bucket.is_down = True
                loop.call_later(float(argument), self._mend_bucket)
            case "bucket errs":
                self.bucket.error_rate, self.bucket.lost_rate = 0.2, 0.1
                loop.call_later(float(argument), self._mend_bucket)
            case "disk errs":
                self._disk_errs_until_s[target] = loop.time() + float(argument)
            case "disk fills" | "disk is taken":
                self._fill_disk(target, float(argument), has_room_for=0 if event.action == "disk is taken" else None)
            case "mark":
                self._mark(float(argument))
            case "lose shard":
                self._lose_shard(float(argument))
            case _:
                pass

    def _fill_disk(self, node: str, for_s: float, *, has_room_for: int | None) -> None:
        """For this time, hot has space for so many files of checkpoints; None: for as many as it holds now."""
        self._capacity[node] = self._files_in_hot(node) if has_room_for is None else has_room_for
        before = {
            trainer: (self.checker.newest_acknowledged(trainer.job.run), trainer.step)
            for trainer in self._trainers.values()
            if trainer.node == node
        }

        def empty() -> None:
            del self._capacity[node]
            for trainer, (newest, step) in before.items():
                # A slow bucket takes as long for one copy as the disk is full.
                is_undisturbed = not self._schedule.is_slow and newest is not None and not self._is_calm
                is_same = is_undisturbed and self._trainers[trainer.job.name] is trainer
                sealed = (trainer.step - step) // trainer.job.every_steps if is_same else 0
                self.checker.check_advanced(trainer.job.run, node, newest, sealed)

        self._loop.call_later(for_s, empty)

    def _files_in_hot(self, node: str) -> int:
        return sum(path.name.startswith("rank-") for path in (self._root / node / "hot").glob("*/*/*"))

    def is_full(self, path: str) -> bool:
        """Whether there is no space for this file, which exists already, without content."""
        owner = OWNER.get()
        capacity = self._capacity.get(owner.name) if owner is not None else None
        if owner is None or capacity is None or not path.startswith(str(self._root / owner.name / "hot")):
            return False
        return self._files_in_hot(owner.name) > capacity

    def had_no_space(self) -> None:
        owner = OWNER.get()
        if owner is not None:
            self.checker.full_at_s[owner.name] = self._loop.time()

    def _mend_bucket(self) -> None:
        self.bucket.is_down = False
        self.bucket.error_rate = self.bucket.lost_rate = 0.0

    def _lose_shard(self, choice: float) -> None:
        """Delete one shard of a committed checkpoint from the bucket, as a person or a bug outside tierd would. In half
        of the cases it is the one that a hot tier evicts next."""
        committed = sorted(self.checker.committed[COLD])
        if self._has_folder or not committed:
            return
        in_hot = [each for each in committed if any(each in self.checker.committed[node] for node in self._daemons)]
        checkpoint = in_hot[0] if in_hot and choice < 0.5 else committed[int(choice * len(committed))]
        key = f"{folder_of(checkpoint)}/{min(self.checker.committed[COLD][checkpoint].files)}"
        self._has_lost_shards = True
        self.checker.damaged[key] = self._loop.time()
        self.bucket.lose(PREFIX + key)
        self._note(f"lost {key}")

    def _mark(self, choice: float) -> None:
        """Make an old checkpoint in the bucket a milestone, as `tierd milestone` on another machine does."""
        if committed := [] if self._has_folder else sorted(self.checker.committed[COLD]):
            checkpoint = committed[int(choice * choice * len(committed))]
            self.bucket.write(f"{PREFIX}{folder_of(checkpoint)}/milestone-kept.json", b"{}")

    # ── processes ──

    def _start_daemon(self, node: str) -> None:
        daemon = self._daemons.get(node)
        if daemon is not None and daemon.process.is_alive:
            return
        cold_url = f"file://{self._root / COLD}" if self._has_folder else f"s3://simulated/{PREFIX}"
        interval_s = self._schedule.cold_list_interval_s
        config = make_config(
            self._root,
            node,
            cold_url,
            cold_list_interval_s=interval_s,
            examines=self._examines,
            has_peers=self._has_peers,
        )
        self._daemons[node] = SimulatedDaemon(config, None if self._has_folder else self.bucket)
        self._daemons[node].start()
        self._note(f"daemon of {node} starts")

    def _kill_daemon(self, node: str, for_s: float) -> None:
        self._daemons[node].kill()
        self.checker.observe_bytes(node, self._loop.time())
        self._loop.call_later(for_s, self._start_daemon, node)

    def _start_trainer(self, job: str, node: str) -> None:
        trainer = self._trainers[job] = SimulatedTrainer(
            self._jobs[job],
            node,
            f"{job}.{len(self._all_trainers) + 1}",
            self.checker,
            lambda: self._daemons.get(node),
            self._faults,
            lambda *words: self._note(" ".join(map(str, words))),
        )
        self._all_trainers.append(trainer)
        trainer.start()

    def _faults(self) -> float:
        """How many faults were injected; not equal to itself while the bucket is unreachable."""
        return float("nan") if self.bucket.is_down else self.bucket.faults + self._disk_faults

    # ── hooks of the loop and of the bucket ──

    def _latency_s(self, name: str) -> tuple[float, float]:
        rng = self._loop.random
        if name != "tierd-s3":
            return rng.uniform(0.0001, 0.02), rng.uniform(0.0, 0.002)
        is_slow = self._schedule.is_slow and not self._is_calm
        until_run_s = rng.uniform(5.0, 90.0) if is_slow and rng.random() < 0.1 else rng.uniform(0.01, 0.3)
        until_result_s = rng.uniform(5.0, 90.0) if is_slow and rng.random() < 0.1 else rng.uniform(0.01, 0.1)
        return until_run_s, until_result_s

    def _before_job(self, name: str) -> None:
        owner = OWNER.get()
        if name == "tierd-directory" and owner is not None and not self._is_calm:
            self._is_disk_failing = self._disk_errs_until_s.get(owner.name, 0.0) > self._loop.time()

    def disk_fails(self) -> bool:
        """Whether a system call on a file fails now."""
        if not self._is_disk_failing or self._loop.random.random() > DISK_ERROR_RATE:
            return False
        self._disk_faults += 1
        return True

    def _after_job(self, name: str, function: str) -> None:
        self._is_disk_failing = False
        owner = OWNER.get()
        if self.checker.damaged and owner is not None:
            self._note_what_is_known(owner.name)
        if name == "tierd-directory" and owner is not None and function not in READ_ONLY:
            self.checker.observe(owner.name, self._loop.time())
            if self._has_folder:
                self.checker.observe(COLD, self._loop.time())

    def _note_what_is_known(self, node: str) -> None:
        """Which replicas the node's daemon itself reports as unreadable in cold."""
        for tier, checkpoint in self._daemons[node].unreadable() if node in self._daemons else ():
            if tier == COLD:
                known = Id(checkpoint.run, checkpoint.generation, checkpoint.step)
                self.checker.reported_damaged(node, known, self._loop.time())

    def _object_changed(self, key: str, before: bytes | None, content: bytes | None) -> None:
        self._note(f"{'delete' if content is None else 'put'} {key}")
        owner = OWNER.get()
        node = owner.name if owner is not None else ""
        self.checker.object_changed(key.removeprefix(PREFIX), content, self._loop.time(), node)

    def _listed(self, node: str, prefix: str, keys: list[str]) -> None:
        relative = [key.removeprefix(PREFIX) for key in keys]
        self.checker.looked(node, prefix.removeprefix(PREFIX), relative, self._loop.result_at_s)

    # ── checks ──

    def _check(self) -> None:
        for place in self.checker.committed:
            self.checker.observe_bytes(place, self._loop.time())
        for daemon in list(self._daemons.values()):
            for bug in daemon.bugs():
                self.checker.violate("an unexpected exception in a daemon", bug)
            for loss in self._losses(daemon):
                self.checker.reported_lost(loss)
            if daemon.crash is not None and not isinstance(daemon.crash, TierdError):
                self.checker.violate("a daemon ended by an unexpected exception", repr(daemon.crash))
            elif daemon.crash is not None:
                self._start_daemon(daemon.process.name)  # as its supervisor does
        for error in self._loop.errors:
            self.checker.violate("an exception that nobody handled", str(error))
        for trainer in self._all_trainers:
            if trainer.task.done() and not trainer.task.cancelled() and trainer.task.exception():
                raise RuntimeError("a bug in the simulated trainer") from trainer.task.exception()

    def _losses(self, daemon: SimulatedDaemon) -> list[str]:
        return daemon.losses()

    def _end(self) -> None:
        self._note(str(self.checker.violation))
        self._loop.is_stopped = True

    def _note(self, text: str) -> None:
        self.trace.append(f"{self._loop.time():9.3f} {text}")


def simulate(schedule: Schedule, make_world: type[World] = World) -> Outcome:
    """Run a schedule to its end or to its first violation."""
    with isolated(schedule.seed) as root:
        return _simulate(schedule, make_world, root)


def _simulate(schedule: Schedule, make_world: type[World], root: Path) -> Outcome:
    """In a function of its own: `isolated` closes descriptors, and no object that has one may outlive it."""
    loop = SimulatedLoop(schedule.seed)
    world = make_world(schedule, root, loop)
    try:
        full = {"is_full": world.is_full, "on_no_space": world.had_no_space}
        with failing_calls(world.disk_fails, **full), world.patched():
            loop.run_until_complete(world.run())
        return Outcome(world.checker.violation, world.trace, loop.steps, loop.time())
    finally:
        loop.is_stopped = False
        world._is_calm = True
        loop.after_job = lambda name, function: None
        world.bucket.on_change = lambda key, before, now: None
        loop.unwind()


@contextmanager
def isolated(seed: int) -> Iterator[Path]:
    """A folder in memory, a seeded `random`, no log, no garbage collection, whose time would differ. Afterwards every
    descriptor that was left open is closed: no object that has one may be referenced then, for it would later close a
    number that another test uses (an mmap closes its duplicate when it is freed)."""
    memory = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(prefix="simulation-", dir=memory if memory.is_dir() else None))
    state, descriptors = random.getstate(), set(os.listdir("/proc/self/fd"))
    random.seed(seed)
    tokens = random.Random(seed + 2)
    former_level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        with patch("secrets.token_hex", lambda size: f"{tokens.getrandbits(8 * size):0{2 * size}x}"):
            yield root
    finally:
        logging.disable(former_level)
        random.setstate(state)
        gc.collect()  # before the descriptors are closed: an object must not close a number that has a new owner
        if was_collecting:
            gc.enable()
        for descriptor in set(os.listdir("/proc/self/fd")) - descriptors:
            with suppress(OSError):
                os.close(int(descriptor))
        shutil.rmtree(root, ignore_errors=True)
