"""The ranks agree on the step at which a request takes effect, whichever rank requests, whatever dies meanwhile."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from tierd_client import Transient
from tierd_client.ranks import Ranks
from tierd_client.stopping import agreement as module
from tierd_client.stopping.agreement import Agreement, RequestKind

from tests.support.daemon import Daemon
from tests.support.trainer import Trainer, Training, joined, together
from tests.support.waiting import wait_until
from tierd.format import wire

FOREVER = 1_000_000


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Shared by all tests: the ranks of each are a new generation of one run."""
    with Daemon(tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon


@contextmanager
def ranks(daemon: Daemon, world_size: int, **options: Any) -> Generator[list[Trainer]]:
    """Connected ranks of one run, inside `with client:`."""
    with joined(daemon.root, world_size) as trainers:
        together(trainers, "connect", daemon.socket, every_steps=0, **options)
        together(trainers, "enter")
        yield trainers


# ── a single rank ──


def refuse(message: wire.ToDaemon) -> None:
    pytest.fail(f"a single rank sent {message}")


def test_requests_of_a_single_rank_take_effect_at_once_and_once() -> None:
    agreement = Agreement(Ranks(0, 1), refuse)
    agreement.start(lambda: None)
    assert agreement.take_requests() == frozenset()
    agreement.request(RequestKind.SNAPSHOT)
    agreement.request(RequestKind.SIGNAL)
    assert agreement.take_requests() == {RequestKind.SNAPSHOT, RequestKind.SIGNAL}
    assert agreement.take_requests() == frozenset()
    agreement.on_attach()
    agreement.close()


# ── several ranks; functions with a leading underscore run in a trainer ──


def _loop(training: Training, seed: int, slowest_s: float, every: int = 1) -> tuple[list[int], int | None]:
    """(the steps that were due, the step of the stop), at a random speed."""
    chance, due = random.Random(seed), list[int]()
    with training.client as client:
        for step in range(every, FOREVER, every):
            time.sleep(chance.uniform(0, slowest_s))
            training.step = step
            if client.due(step):
                due.append(step)
            if client.stopping:
                return due, step
    return due, None


def _loop_until_due(training: Training, seed: int, count: int) -> list[int]:
    """The first so many steps that were due."""
    chance, due = random.Random(seed), list[int]()
    for step in range(1, FOREVER):
        time.sleep(chance.uniform(0, 0.004))
        if training.client.due(step):
            due.append(step)
        if len(due) == count:
            break
    return due


def _loop_with_snapshots(training: Training) -> list[int]:
    """A loop that never calls due()."""
    taken: list[int] = []
    with training.client as client:
        for step in range(5, FOREVER, 5):
            client.snapshot(step, training.state)
            taken.append(step)
            if client.stopping:
                return taken
    return taken


def _loop_that_reads_stopping_first(training: Training) -> tuple[int, int]:
    """(the step of the last snapshot, the step of the stop)."""
    last = 0
    with training.client as client:
        for step in range(1, FOREVER):
            time.sleep(0.002)
            if client.stopping or client.due(step):
                client.snapshot(step, training.state)
                last = step
            if client.stopping:
                return last, step
    return last, FOREVER


def _collectives(training: Training, steps: int) -> list[str]:
    """The names of the collectives that are called during so many steps."""
    called: list[str] = []

    def counted(name: str) -> Any:
        real = getattr(dist, name)
        return lambda *arguments, **options: (called.append(name), real(*arguments, **options))[1]

    names = ["all_reduce", "broadcast", "all_gather", "barrier", "send", "recv"]
    former = {name: getattr(dist, name) for name in names}
    for name in names:
        setattr(dist, name, counted(name))
    try:
        for step in range(training.step + 1, training.step + 1 + steps):
            assert not training.client.due(step)
            assert not training.client.stopping
            training.step = step
    finally:
        for name in names:
            setattr(dist, name, former[name])
    return called


def _call_to_round(training: Training, number: int) -> None:
    """As if the daemon had called this rank, and no other."""
    training.client._requests.on_message(wire.Convened(meeting=number))


def _due(training: Training, step: int) -> tuple[bool, bool]:
    return training.client.due(step), training.client.stopping


def _after_first_exchange(act: Callable[[], object]) -> None:
    """In this process: `act` between the two exchanges of a round."""
    maximum = Ranks.background_maximum

    def once(ranks: Ranks, values: list[int], is_over: Any) -> list[int]:
        values = maximum(ranks, values, is_over)
        act()
        return values

    Ranks.background_maximum = once


def _die_in_a_round(training: Training) -> None:
    _after_first_exchange(lambda: signal.raise_signal(signal.SIGKILL))


def _hang_in_a_round(training: Training) -> None:
    _after_first_exchange(lambda: time.sleep(FOREVER))


def stop_together(trainers: list[Trainer], first_step: int) -> None:
    """Let the ranks step one by one, each waiting for the others, until they stop: all at the same step."""
    for step in range(first_step, FOREVER):
        stopping = [is_stopping for _, is_stopping in together(trainers, "apply", _due, step)]
        assert stopping in ([False] * len(trainers), [True] * len(trainers))
        if stopping[0]:
            return


def test_step_without_requests_costs_no_collective(daemon: Daemon) -> None:
    with ranks(daemon, 2, every_s=3600.0) as trainers:
        together(trainers, "train", 1)
        assert together(trainers, "apply", _due, 1) == [(False, False)] * 2
        assert together(trainers, "apply", _collectives, 2000) == [[], []]


@pytest.mark.parametrize(("world_size", "every"), [(2, 1), (4, 1), (2, 7)])
def test_stop_request_on_one_rank_stops_all_ranks_at_the_same_step(daemon: Daemon, world_size: int, every: int) -> None:
    with ranks(daemon, world_size) as trainers:
        for rank, trainer in enumerate(trainers):
            trainer.begin("apply", _loop, rank, 0.002 * (1 + rank), every)
        trainers[-1].signal(signal.SIGTERM)
        results = [trainer.end() for trainer in trainers]
    stops = {step for _, step in results}
    assert len(stops) == 1
    assert stops.pop() % every == 0


def test_loop_that_only_takes_snapshots_stops_at_the_same_snapshot_on_all_ranks(daemon: Daemon) -> None:
    with ranks(daemon, 2) as trainers:
        together(trainers, "train", 1)
        for trainer in trainers:
            trainer.begin("apply", _loop_with_snapshots)
        wait_until(lambda: daemon.newest("hot") >= 10, "some snapshots")
        trainers[1].signal(signal.SIGTERM)
        first, second = [trainer.end() for trainer in trainers]
        assert first == second
        assert daemon.newest("hot") == first[-1]


@pytest.mark.parametrize("world_size", [1, 2])
def test_loop_that_reads_stopping_before_due_leaves_with_a_snapshot(daemon: Daemon, world_size: int) -> None:
    with ranks(daemon, world_size, run=f"of-{world_size}") as trainers:
        together(trainers, "train", 1)
        for trainer in trainers:
            trainer.begin("apply", _loop_that_reads_stopping_first)
        time.sleep(0.1)  # the moment is any
        trainers[-1].signal(signal.SIGTERM)
        results = [trainer.end() for trainer in trainers]
    assert results == [(results[0][1],) * 2] * world_size


def test_stop_request_before_the_first_step_stops_all_ranks_at_the_same_step(daemon: Daemon) -> None:
    with ranks(daemon, 2) as trainers:
        trainers[1].signal(signal.SIGTERM)
        assert together(trainers, "is_stopping") == [False, False]
        stop_together(trainers, 1)


def test_snapshots_by_time_are_due_at_the_same_steps_on_all_ranks(daemon: Daemon) -> None:
    with ranks(daemon, 2, every_s=0.1) as trainers:
        for rank, trainer in enumerate(trainers):
            trainer.begin("apply", _loop_until_due, rank, 3)
        due, other = [trainer.end() for trainer in trainers]
        assert due == other


@pytest.mark.long
def test_ranks_of_different_speeds_agree_on_many_requests_while_the_daemon_is_killed(
    daemon: Daemon,
) -> None:
    chance = random.Random(5)
    with ranks(daemon, 4) as trainers:
        for rank, trainer in enumerate(trainers):
            trainer.begin("apply", _loop, rank, [0.003, 0.005, 0.004, 0.006][rank])
        for moment in range(24):
            for trainer in chance.sample(trainers, chance.choice([1, 1, 2, 4])):
                trainer.signal(signal.SIGUSR1)
            time.sleep(chance.uniform(0, 0.08))  # the moment is what is random
            if moment in (8, 16):
                daemon.kill()
                chance.choice(trainers).signal(signal.SIGUSR1)
                daemon.start()
        chance.choice(trainers).signal(signal.SIGTERM)
        results = [trainer.end() for trainer in trainers]
    assert all(result == results[0] for result in results), results
    due, stopped = results[0]
    assert due, "requests that are close together, or made while there is no daemon, take effect as one"
    assert stopped is not None


def test_rank_that_was_never_called_to_a_round_delays_no_training(daemon: Daemon) -> None:
    """As when the daemon dies while it calls the ranks: the thread of the called rank waits, not its training."""
    with ranks(daemon, 2) as trainers:
        daemon.signal(signal.SIGSTOP)
        trainers[0].signal(signal.SIGTERM)
        trainers[0].apply(_call_to_round, 0)
        for trainer in trainers:
            for step in range(1, 50):
                assert trainer.apply(_due, step) == (False, False)
        daemon.signal(signal.SIGCONT)
        stop_together(trainers, 50)


def test_request_waits_for_a_hung_daemon_and_training_does_not(daemon: Daemon) -> None:
    with ranks(daemon, 2) as trainers:
        daemon.signal(signal.SIGSTOP)
        trainers[0].signal(signal.SIGTERM)
        for step in range(1, 30):
            assert together(trainers, "apply", _due, step) == [(False, False)] * 2
        daemon.signal(signal.SIGCONT)
        stop_together(trainers, 30)


def test_rank_that_dies_in_a_round_delays_no_other(daemon: Daemon) -> None:
    with ranks(daemon, 3) as trainers:
        trainers[2].apply(_die_in_a_round)
        trainers[0].signal(signal.SIGTERM)
        trainers[2].wait_exit()
        for step in range(1, 20):
            assert together(trainers[:2], "apply", _due, step) == [(False, False)] * 2


def _due_until_it_raises(training: Training) -> None:
    for step in range(1, 1000):
        training.client.due(step)
        time.sleep(0.01)


def _wait_briefly(training: Training) -> None:
    module.ROUND_TIMEOUT_S = 0.2


def test_rank_that_hangs_in_a_round_raises_transient_on_the_others(daemon: Daemon) -> None:
    with ranks(daemon, 2) as trainers:
        trainers[0].apply(_wait_briefly)
        trainers[1].apply(_hang_in_a_round)
        trainers[0].signal(signal.SIGTERM)
        with pytest.raises(Transient, match=r"agree with the other ranks at step \d+: no answer"):
            trainers[0].apply(_due_until_it_raises)


def test_close_during_a_round_is_not_an_error(daemon: Daemon) -> None:
    with ranks(daemon, 2) as trainers:
        together(trainers, "apply", _due, 1)
        trainers[0].apply(_call_to_round, 0)
        together(trainers, "close")
        assert [trainer.leave() for trainer in trainers] == [0, 0]
