"""The world of the scenario "several nodes": one job over several daemons, each with its hot tier, and one cold tier.

Besides what world.py models: a daemon that dies at a request or sleeps for minutes, a node that is cut off from the
bucket, listings that show an earlier time, a node that comes back empty or whose place a spare takes, and snapshots
that are unhealthy on one node. A restart may place the ranks elsewhere; two starts may train at the same time, each
with its own home.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.support.simulation.checker import COLD, Checker, Policy
from tests.support.simulation.copies_checker import PEERS, CopiesChecker, copies_of
from tests.support.simulation.copying_trainers import CopyingTrainers
from tests.support.simulation.daemon import EPOCH, SimulatedDaemon
from tests.support.simulation.loop import OWNER, SimulatedLoop
from tests.support.simulation.network import SimulatedNetwork
from tests.support.simulation.node_trainers import NAN, NodeTrainers
from tests.support.simulation.nodes_checker import NodesChecker, NodesPlace, PartsPlace
from tests.support.simulation.schedule import COPIES, SEVERAL_NODES, Event, Schedule
from tests.support.simulation.world import PREFIX, SETTLE_S, Outcome, World
from tests.support.simulation.world import simulate as simulate_in
from tierd.catalog.decisions import pending
from tierd.format.health import Diagnosis
from tierd.workers.committer import Committer

GRACE_S = 900.0  # in place of a day: how long leftovers in cold stay, and how often a node that is not home lists cold
COMMITTER_INTERVAL_S = 5.0
IDLE_COMMITTER_S = 60.0  # where every job is on one node, and it has nothing to do
RESTART_S = 15.0  # after the death of a node its job starts again
LAST_RESTORE_S = 1500.0  # longer than a part is awaited


class NodesWorld(World):
    _examines = True
    _trainers_type: type[NodeTrainers] = NodeTrainers

    def __init__(self, schedule: Schedule, root: Path, loop: SimulatedLoop) -> None:
        self._context = contextvars.copy_context()
        self._disturbances = 0  # that are going on
        self._deaths: dict[str, int] = {}  # by node: the daemon dies at this request from now
        self._poisoned: set[str] = set()
        self._jobs_over_nodes: list[NodeTrainers] = []
        super().__init__(schedule, root, loop)
        self.bucket.now = lambda: EPOCH + timedelta(seconds=loop.time())

    def _make_checker(self, policy: Policy) -> Checker:
        honours_conditions = not self._schedule.ignores_conditions
        return NodesChecker(policy, honours_conditions=honours_conditions, on_violation=self._end)

    def _add_places(self) -> None:
        self.checker.add_place(COLD, NodesPlace(self.bucket.objects, PREFIX))
        for node in self._schedule.nodes:
            self.checker.add_place(node, PartsPlace(self._root / node / "hot"))

    # ── events ──

    def _apply(self, event: Event) -> None:
        target, argument = event.target, event.argument
        match event.action:
            case "start job" | "restart job":
                self._restart(float(argument))
            case "take over job":
                self._start_over_nodes(float(argument))
            case "kill at request":
                self._deaths[target] = int(argument)
            case "kill node" | "lose disk":
                self._kill_node(target, float(argument), loses_disk=event.action == "lose disk")
            case "cut off":
                self.bucket.cut_off.add(target)
                self._disturb(float(argument), lambda: self.bucket.cut_off.discard(target))
            case "sleep":
                self._daemons[target].process.sleeps_until_s = self._loop.time() + float(argument)
                self._disturb(float(argument), lambda: None)
            case "stale listings":
                self.bucket.stale_s = 5.0 + float(argument) % 20.0
                self._disturb(float(argument), self._mend_listings)
            case "unhealthy":
                self._poisoned.add(target)
            case "disk fills" | "disk is taken":
                self._capacity[target] = self._files_in_hot(target) if event.action == "disk fills" else 0
                self._disturb(float(argument), lambda: self._capacity.pop(target, None))
            case _:
                super()._apply(event)

    def _disturb(self, for_s: float, end: Any) -> None:
        """A fault that lasts so long: it excuses what happens meanwhile."""
        self._disturbances += 1

        def over() -> None:
            self._disturbances -= 1
            end()

        self._loop.call_later(for_s, over)

    def _mend_listings(self) -> None:
        self.bucket.stale_s = 0.0

    def _faults(self) -> float:
        return float("nan") if self._disturbances else super()._faults()

    def _restart(self, choice: float) -> None:
        for job in self._jobs_over_nodes:
            job.kill()
        self._start_over_nodes(choice)

    def _start_over_nodes(self, choice: float) -> None:
        job = self._schedule.jobs[0]
        former = self._jobs_over_nodes[-1].placement if self._jobs_over_nodes else []
        placement = former if former and choice < 0.5 else place(choice, self._schedule.nodes, job.nodes)
        assert isinstance(self.checker, NodesChecker)
        trainers = self._trainers_type(
            job,
            placement,
            f"{job.name}.{len(self._jobs_over_nodes) + 1}",
            self.checker,
            self._daemons.get,
            self._faults,
            lambda *words: self._note(" ".join(map(str, words))),
            self._poisoned,
        )
        self._jobs_over_nodes.append(trainers)
        self._note(f"{trainers.name} on {' '.join(placement)}")
        trainers.start()

    def _kill_node(self, node: str, for_s: float, *, loses_disk: bool) -> None:
        """All trainers of the node's jobs die too, and start again a while later."""
        hit = [job for job in self._jobs_over_nodes if job.process.is_alive and node in job.placement]
        for job in hit:
            job.kill()
        self._kill_daemon(node, for_s)
        if loses_disk:
            # Under another name, so that calls of the killed daemon reach no new file.
            with suppress(FileNotFoundError):
                os.rename(self._root / node / "hot", self._root / node / f"lost-{len(self.trace)}")
            self.checker.lose_place(node)
        if hit:
            choice = for_s % 1.0  # below a half: it waits for the node, else a spare may take its place
            wait_s = for_s + RESTART_S if choice < 0.5 else RESTART_S
            self._loop.call_later(wait_s, self._restart_unless_done, choice)

    def _restart_unless_done(self, choice: float) -> None:
        if not self._is_calm and not any(job.process.is_alive for job in self._jobs_over_nodes):
            self._restart(choice)

    # ── the end ──

    async def _settle(self) -> None:
        self._is_calm = True
        self._mend_bucket()
        self._mend_listings()
        self.bucket.cut_off.clear()
        self._deaths.clear()
        self._capacity.clear()
        for node, daemon in self._daemons.items():
            daemon.process.sleeps_until_s = 0.0
            if not daemon.process.is_alive:
                self._start_daemon(node)
        await asyncio.sleep(200.0)
        for job in self._jobs_over_nodes:
            job.kill()
        await asyncio.sleep(SETTLE_S)
        self._check()
        assert isinstance(self.checker, NodesChecker)
        self.checker.check_whole(self._daemons)
        if self.checker.violation is None:
            await self._restore_at_the_end()
        # Two looks at the leftovers, each after a listing: the first gives them a tombstone.
        await asyncio.sleep(2 * (GRACE_S + SETTLE_S))
        self._check()
        self.checker.check_settled(self._daemons)
        for node, daemon in self._daemons.items():
            catalog, config = daemon._context.catalog, daemon._context.config
            if left := pending(catalog, config, COLD):
                self.checker.violate("something is pending", f"{left} on {node} after a long quiet time")

    async def _restore_at_the_end(self) -> None:
        """On other nodes, as far as there are some, and with no fault any more. They train on for a while."""
        self._start_over_nodes(0.9)
        trainers = self._jobs_over_nodes[-1]
        for _ in range(int(LAST_RESTORE_S)):
            await asyncio.sleep(1.0)
            if trainers.has_restored:
                await asyncio.sleep(5 * trainers.job.interval_s)
                trainers.is_paused = True
                return
        self.checker.violate("no restore at the end", f"within {LAST_RESTORE_S} s")

    # ── hooks of the loop and of the bucket ──

    def _after_job(self, name: str, function: str) -> None:
        super()._after_job(name, function)
        owner = OWNER.get()
        if name != "tierd-s3" or owner is None or owner.name not in self._deaths:
            return
        self._deaths[owner.name] -= 1
        if self._deaths[owner.name] <= 0:
            del self._deaths[owner.name]
            self._note(f"the daemon of {owner.name} dies at {function}")
            self._context.copy().run(self._kill_daemon, owner.name, 5.0 + self._loop.random.uniform(0.0, 60.0))

    def _listed(self, node: str, prefix: str, keys: list[str]) -> None:
        owner = OWNER.get()
        if owner is not None:  # its result arrives when the daemon is awake
            self._loop.result_at_s = max(self._loop.result_at_s, owner.sleeps_until_s)
        super()._listed(node, prefix, keys)

    def _losses(self, daemon: SimulatedDaemon) -> list[str]:
        # A listing that shows an earlier time lacks what was committed since.
        has_shown_too_little = any(event.action == "stale listings" for event in self._schedule.events)
        return [] if has_shown_too_little else super()._losses(daemon)

    def _check(self) -> None:
        super()._check()
        for job in self._jobs_over_nodes:
            if job.task.done() and not job.task.cancelled() and job.task.exception():
                raise RuntimeError("a bug in the simulated trainers") from job.task.exception()


class CopiesWorld(NodesWorld):
    """Nodes keep copies of each other's parts."""

    _has_peers = True
    _trainers_type = CopyingTrainers

    def __init__(self, schedule: Schedule, root: Path, loop: SimulatedLoop) -> None:
        super().__init__(schedule, root, loop)
        self.network = SimulatedNetwork(random.Random(schedule.seed + 4), self._daemons.get)
        loop.connect = self.network.create_connection

    @contextmanager
    def patched(self) -> Iterator[None]:
        with (
            patch("tierd.tiers.peer_store.aiohttp", self.network.aiohttp),
            patch("tierd.api.peer_parts.web", self.network.web),
        ):
            yield

    def _make_checker(self, policy: Policy) -> Checker:
        honours_conditions = not self._schedule.ignores_conditions
        return CopiesChecker(policy, honours_conditions=honours_conditions, on_violation=self._end)

    def _add_places(self) -> None:
        super()._add_places()
        for node in self._schedule.nodes:
            self.checker.places[copies_of(node)] = PartsPlace(self._root / node / "hot" / PEERS)

    def _apply(self, event: Event) -> None:
        target, argument = event.target, event.argument
        if event.action == "cut link":
            link = tuple(target.split(">"))
            self.network.cut.add((link[0], link[1]))
            self._disturb(float(argument), self._mend_network)
        elif event.action == "slow links":
            self.network.slow.add(target)
            self._disturb(float(argument), self._mend_network)
        elif event.action == "links break":
            self.network.break_rate = 0.3
            self._disturb(float(argument), self._mend_network)
        else:
            super()._apply(event)

    def _mend_network(self) -> None:
        self.network.mend()

    def _faults(self) -> float:
        return super()._faults() + self.network.faults

    def _kill_daemon(self, node: str, for_s: float) -> None:
        super()._kill_daemon(node, for_s)
        assert isinstance(self.checker, CopiesChecker)
        self.checker.daemon_died(node)
        self.network.changed()

    async def _settle(self) -> None:
        self.network.mend()
        await super()._settle()


def place(choice: float, nodes: Sequence[str], count: int) -> list[str]:
    """The node of each rank, two on each of `count` nodes: one after the other, in turns, or in no order."""
    rng = random.Random(choice)
    chosen = list(nodes[:count]) if rng.random() < 0.4 else rng.sample(list(nodes), count)
    in_order = [node for node in chosen for _ in range(2)]
    how = rng.random()
    if how < 0.6:
        return in_order
    return chosen * 2 if how < 0.8 else rng.sample(in_order, len(in_order))


@contextmanager
def _simulated(loop_random: random.Random) -> Iterator[None]:
    """The examination, which would start a process, a shorter grace for leftovers, and committers that look less often
    than each second, which would take most of the time."""

    async def examine(checkpoint: object, files: Sequence[tuple[int, int]]) -> Diagnosis:
        # Before the wait: the program has descriptors of its own.
        is_healthy = not any(os.pread(descriptor, len(NAN), 0) == NAN for descriptor, _ in files)
        await asyncio.sleep(loop_random.choice([0.1, 1.0, 10.0, 80.0]) * loop_random.random())
        return Diagnosis(healthy=is_healthy)

    with (
        patch("tierd.health.examiner.examine_files", examine),
        patch("tierd.workers.open_copy.examine_files", examine),
        patch("tierd.workers.leftovers.GRACE_S", GRACE_S),
        patch("tierd.workers.lister.WHOLE_S", GRACE_S),
        patch.object(Committer, "interval_s", COMMITTER_INTERVAL_S),
    ):
        yield


def simulate(schedule: Schedule) -> Outcome:
    """Run a schedule of any scenario to its end or to its first violation."""
    if schedule.scenario not in (SEVERAL_NODES, COPIES):
        with patch.object(Committer, "interval_s", IDLE_COMMITTER_S):
            return simulate_in(schedule)
    with _simulated(random.Random(schedule.seed + 3)):
        return simulate_in(schedule, NodesWorld if schedule.scenario == SEVERAL_NODES else CopiesWorld)
