"""Ranks agree on the step at which a wish comes true: the same on all, whoever wishes, whatever dies meanwhile."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from tierd_client import Transient
from tierd_client.ranks import Ranks
from tierd_client.stopping import agreement as module
from tierd_client.stopping.agreement import Agreement, Wish

from tests.support.daemon import Daemon
from tests.support.trainer import Trainer, Training, joined, together
from tests.support.waiting import wait_until

FOREVER = 1_000_000


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One for all tests, who leave it as it was: the ranks of each are a new generation of one run."""
    with Daemon(tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon


@contextmanager
def ranks(daemon: Daemon, world_size: int, **options: Any) -> Generator[list[Trainer]]:
    """Connected ranks of one run, inside `with client:`."""
    with joined(daemon.root, world_size) as trainers:
        together(trainers, "connect", daemon.socket, every_steps=0, **options)
        together(trainers, "enter")
        yield trainers


# ── a rank by itself ──


def test_a_rank_by_itself_has_what_it_wishes_for_at_once_and_once() -> None:
    alone = Agreement(Ranks(0, 1))
    alone.start(lambda meeting: pytest.fail("there is nobody to call"), lambda: None)
    assert alone.at(1) == frozenset()
    alone.wish(Wish.SNAPSHOT)
    alone.wish(Wish.SIGNAL)
    assert alone.at(1) == {Wish.SNAPSHOT, Wish.SIGNAL}
    assert alone.at(2) == frozenset()
    alone.on_attach()
    alone.close()


# ── several ranks; what follows the underscore runs in a trainer ──


def _loop(training: Training, seed: int, slowest_s: float, every: int = 1) -> tuple[list[int], int | None]:
    """(the steps that were due, the step that it stopped at), at a speed of its own: nothing keeps the ranks together
    but what they agree on."""
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
    """It never asks whether one is due: snapshots are its points."""
    taken: list[int] = []
    with training.client as client:
        for step in range(5, FOREVER, 5):
            client.snapshot(step, training.state)
            taken.append(step)
            if client.stopping:
                return taken
    return taken


def _collectives(training: Training, steps: int) -> list[str]:
    """What is exchanged during so many steps."""
    seen: list[str] = []

    def counted(name: str) -> Any:
        real = getattr(dist, name)
        return lambda *arguments, **options: (seen.append(name), real(*arguments, **options))[1]

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
    return seen


def _hear(training: Training, meeting: int) -> None:
    training.client._stops._agreement.hear(meeting)


def _due(training: Training, step: int) -> tuple[bool, bool]:
    return training.client.due(step), training.client.stopping


def _is_agreed(training: Training) -> bool:
    return bool(training.client._stops._agreement._agreed)


def _promise_and_vanish(training: Training) -> None:
    """Die as soon as all have come to the meeting: after the first exchange, before the second."""
    own = training.client._stops._agreement._ranks
    meet = own.maximum_apart

    def once(values: list[int], is_over: Any) -> list[int]:
        found = meet(values, is_over)
        signal.raise_signal(signal.SIGKILL)
        return found

    own.maximum_apart = once


def test_with_nothing_wished_for_a_step_costs_no_exchange(daemon: Daemon) -> None:
    with ranks(daemon, 2, every_s=3600.0) as trainers:
        together(trainers, "train", 1)
        assert together(trainers, "apply", _due, 1) == [(False, False)] * 2
        assert together(trainers, "apply", _collectives, 2000) == [[], []]


@pytest.mark.parametrize(("world_size", "every"), [(2, 1), (4, 1), (2, 7)])
def test_a_stop_that_one_rank_is_asked_for_is_all_ranks_at_the_same_step(
    daemon: Daemon, world_size: int, every: int
) -> None:
    with ranks(daemon, world_size) as trainers:
        for rank, trainer in enumerate(trainers):
            trainer.begin("apply", _loop, rank, 0.002 * (1 + rank), every)
        trainers[-1].signal(signal.SIGTERM)
        found = [trainer.end() for trainer in trainers]
    stops = {step for _, step in found}
    assert len(stops) == 1
    assert stops.pop() % every == 0


def test_a_loop_that_only_takes_snapshots_stops_at_the_same_one_on_all_ranks(daemon: Daemon) -> None:
    with ranks(daemon, 2) as trainers:
        together(trainers, "train", 1)
        for trainer in trainers:
            trainer.begin("apply", _loop_with_snapshots)
        wait_until(lambda: daemon.newest("hot") >= 10, "some snapshots")
        trainers[1].signal(signal.SIGTERM)
        found = [trainer.end() for trainer in trainers]
        assert found[0] == found[1]
        assert daemon.newest("hot") == found[0][-1]


def test_a_wish_before_the_first_step_comes_true_there(daemon: Daemon) -> None:
    with ranks(daemon, 2) as trainers:
        trainers[1].signal(signal.SIGTERM)
        wait_until(lambda: all(together(trainers, "apply", _is_agreed)), "the ranks to agree")
        assert together(trainers, "is_stopping") == [False, False]
        assert together(trainers, "apply", _due, 1) == [(False, True)] * 2


def test_by_time_the_clock_of_rank_0_makes_the_same_steps_due_on_all(daemon: Daemon) -> None:
    with ranks(daemon, 2, every_s=0.1) as trainers:
        for rank, trainer in enumerate(trainers):
            trainer.begin("apply", _loop_until_due, rank, 3)
        due, other = [trainer.end() for trainer in trainers]
        assert due == other


def test_many_wishes_on_ranks_of_different_speeds_with_the_daemon_killed_between_never_part_them(
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
        found = [trainer.end() for trainer in trainers]
    assert all(one == found[0] for one in found), found
    due, stopped = found[0]
    assert due, "wishes that come close together, or while there is no daemon, come true as one"
    assert stopped is not None


def test_a_rank_that_nobody_called_holds_up_no_other(daemon: Daemon) -> None:
    """As when the daemon dies in the middle of calling them: the first waits for the other beside its training."""
    with ranks(daemon, 2) as trainers:
        daemon.signal(signal.SIGSTOP)
        trainers[0].signal(signal.SIGTERM)
        trainers[0].apply(_hear, 0)
        for trainer in trainers:
            for step in range(1, 50):
                assert trainer.apply(_due, step) == (False, False)
        daemon.signal(signal.SIGCONT)
        wait_until(lambda: all(together(trainers, "apply", _is_agreed)), "the ranks to agree")
        assert together(trainers, "apply", _due, 50) == [(False, True)] * 2


def test_while_the_daemon_hangs_a_wish_waits_and_training_does_not(daemon: Daemon) -> None:
    with ranks(daemon, 2) as trainers:
        daemon.signal(signal.SIGSTOP)
        trainers[0].signal(signal.SIGTERM)
        for step in range(1, 30):
            assert together(trainers, "apply", _due, step) == [(False, False)] * 2
        daemon.signal(signal.SIGCONT)
        wait_until(lambda: all(together(trainers, "apply", _is_agreed)), "the ranks to agree")
        assert together(trainers, "apply", _due, 30) == [(False, True)] * 2


def test_a_rank_that_dies_in_the_middle_of_a_meeting_holds_up_no_other(daemon: Daemon) -> None:
    with ranks(daemon, 3) as trainers:
        trainers[2].apply(_promise_and_vanish)
        trainers[0].signal(signal.SIGTERM)
        trainers[2].wait_exit()
        for step in range(1, 20):
            assert together(trainers[:2], "apply", _due, step) == [(False, False)] * 2


def _stop_after_the_promise(training: Training) -> None:
    own = training.client._stops._agreement._ranks
    meet = own.maximum_apart

    def once(values: list[int], is_over: Any) -> list[int]:
        found = meet(values, is_over)
        time.sleep(FOREVER)
        return found

    own.maximum_apart = once


def _due_until_it_raises(training: Training) -> None:
    for step in range(1, 1000):
        training.client.due(step)
        time.sleep(0.01)


def _wait_briefly(training: Training) -> None:
    module.PROMISE_TIMEOUT_S = 0.2


def test_a_rank_that_hangs_in_the_middle_of_a_meeting_is_a_typed_error_of_the_others(daemon: Daemon) -> None:
    with ranks(daemon, 2) as trainers:
        trainers[0].apply(_wait_briefly)
        trainers[1].apply(_stop_after_the_promise)
        trainers[0].signal(signal.SIGTERM)
        with pytest.raises(Transient, match=r"agree with the other ranks at step \d+: no answer"):
            trainers[0].apply(_due_until_it_raises)


def test_a_loop_that_ends_while_the_ranks_meet_is_no_error(daemon: Daemon) -> None:
    with ranks(daemon, 2) as trainers:
        together(trainers, "apply", _due, 1)
        trainers[0].apply(_hear, 0)
        together(trainers, "close")
        assert [trainer.leave() for trainer in trainers] == [0, 0]
