"""Replays after a restore: exact ones are found exact, and what the state lacks or is not deterministic is named."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import tierd_client
import torch
from tierd_client import (
    BadConfig,
    BadRequest,
    NotFound,
    Replay,
    ResumableLoader,
    ResumableSampler,
    TrainingState,
    replay_check,
)

from tests.support.daemon import Daemon
from tests.support.trainer import Training, joined, together
from tests.support.waiting import DEADLINE_S

BATCHES = 64


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    return re.sub(r"\W+", "-", request.node.name)[:100]


class Loop:
    """`lacks`: what its steps use beside the state."""

    def __init__(self, lacks: str = "") -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.loader = ResumableLoader(range(BATCHES), ResumableSampler(BATCHES, batch_size=1, shuffle=True))
        self.state = TrainingState(model=self.model, optimizer=self.optimizer, dataloader=self.loader)
        self._lacks = lacks
        self._steps = 0
        self._buffer = torch.zeros(4)

    def train(self) -> Iterator[float]:
        for batch in self.loader:
            self._steps += 1
            loss = self.model(torch.full((4,), float(batch))).square().mean()
            if self._lacks == "counter":
                loss = loss * (1 + 0.01 * self._steps)
            if self._lacks == "operation":
                noise = torch.tensor([float(os.urandom(1)[0])])
                loss = loss + self._buffer.put_(torch.tensor([0]), noise).sum()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            yield loss.item()


def replay(daemon: Daemon, run: str, loop: Loop, **options: int) -> Replay:
    with tierd_client.connect(run, socket=daemon.socket) as client:
        client.restore(loop.state)
        steps = loop.train()
        for _ in range(5):
            next(steps)
        client.snapshot(5, loop.state).wait_persisted(DEADLINE_S)
        return replay_check(client, loop.state, loop.train, **options)


def test_a_state_that_holds_everything_is_replayed_bit_for_bit(daemon: Daemon, run: str) -> None:
    """Also the mask of dropout, and the order of the data."""
    loop = Loop()
    found = replay(daemon, run, loop, steps=4)
    assert (found.is_exact, found.step, found.differs_at, found.entries) == (True, 5, None, []), str(found)
    assert found.losses[0] == found.losses[1]
    assert "steps 6 to 9 are the same, bit for bit" in str(found)
    assert loop.loader.sampler.state_dict() == replayed_position(daemon, run), "restored at the end"


def replayed_position(daemon: Daemon, run: str) -> object:
    loop = Loop()
    with tierd_client.connect(run, socket=daemon.socket) as client:
        client.restore(loop.state)
    return loop.loader.sampler.state_dict()


def test_a_counter_beside_the_state_is_found(daemon: Daemon, run: str) -> None:
    found = replay(daemon, run, Loop("counter"))
    assert (found.is_exact, found.differs_at, found.operations) == (False, 6, [])
    assert found.losses[0] != found.losses[1]
    assert any(name.startswith("optimizer") for name in found.entries)
    assert "the steps use something that is not in the state" in str(found)


def test_an_operation_that_is_not_deterministic_is_named(daemon: Daemon, run: str) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    found = replay(daemon, run, Loop("operation"))
    assert (found.is_exact, found.operations) == (False, ["put_"]), str(found)
    assert str(found).endswith("Not deterministic here: put_")
    assert torch.are_deterministic_algorithms_enabled() == before


def test_bad_arguments_and_an_absent_checkpoint_are_refused(daemon: Daemon, run: str) -> None:
    loop = Loop()
    with tierd_client.connect(run, socket=daemon.socket) as client:
        for steps in (0, -1, 2.5, float("nan"), "3", None, True):
            with pytest.raises(BadConfig, match="expected a whole number, 1 or more"):
                replay_check(client, loop.state, loop.train, steps=steps)  # type: ignore[arg-type]
        with pytest.raises(NotFound):
            replay_check(client, loop.state, loop.train)
        client.snapshot(1, loop.state).wait_persisted(DEADLINE_S)
        with pytest.raises(BadConfig, match="ended after 64 of 1000 steps"):
            replay_check(client, loop.state, loop.train, steps=1000)


def _replay(training: Training, lacking_rank: int) -> tuple[bool, int | None, str]:
    seen = [0.0]

    def train() -> Iterator[float]:
        while True:
            training.train(1)
            seen[0] += 1.0
            yield seen[0] if training.client.rank == lacking_rank else 0.0

    found = replay_check(training.client, training.state, train, steps=2)
    return found.is_exact, found.differs_at, str(found)


def test_steps_that_take_snapshots_or_yield_no_number_are_refused(daemon: Daemon, run: str) -> None:
    """A snapshot of a replay would be the newest checkpoint of the run."""
    loop = Loop()
    with tierd_client.connect(run, socket=daemon.socket) as client:
        client.restore(loop.state)
        client.snapshot(1, loop.state).wait_persisted(DEADLINE_S)

        def snapshots() -> Iterator[float]:
            for loss in loop.train():
                client.snapshot(2, loop.state, metrics={"loss": loss})
                yield loss

        with pytest.raises(BadRequest, match="takes a snapshot of step 2"):
            replay_check(client, loop.state, snapshots)
        with pytest.raises(BadRequest, match="yielded a Tensor that is not a single number"):
            replay_check(client, loop.state, lambda: iter([torch.ones(2)]), steps=1)  # type: ignore[list-item]
        assert [row["step"] for row in daemon.get(f"/api/v1/checkpoints?run={run}")] == [1]
        client.snapshot(2, loop.state).wait_persisted(DEADLINE_S)


def test_all_ranks_learn_that_one_differs(daemon: Daemon, run: str, tmp_path: Path) -> None:
    with joined(tmp_path, 2) as trainers:
        together(trainers, "connect", daemon.socket, run)
        together(trainers, "enter")
        together(trainers, "train", 2)
        together(trainers, "durable")
        exact, other = together(trainers, "apply", _replay, 1)
        assert exact[:2] == (False, None)
        assert exact[2].endswith("are the same on this rank, and differ on another one")
        assert other[:2] == (False, 3)
