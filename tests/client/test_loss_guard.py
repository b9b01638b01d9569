"""A bad loss: the run stops or goes back, on all ranks; what it saves as evidence is never restored by itself."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tierd_client
import torch
from tierd_client import BadConfig, Halted, LossGuard, ResumableLoader, ResumableSampler, TrainingState

from tests.support.daemon import Daemon
from tests.support.trainer import Training, joined, together
from tests.support.waiting import DEADLINE_S, wait_until

STEPS, BATCHES = 20, 64


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    return re.sub(r"\W+", "-", request.node.name)[:100]


class Loop:
    """A training whose data set has bad batches. `losses`: (step, loss) of each batch that was trained on."""

    def __init__(self, daemon: Daemon, run: str, bad: dict[int, float]) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.loader = ResumableLoader(range(BATCHES), ResumableSampler(BATCHES, batch_size=1, shuffle=False))
        self.state = TrainingState(model=self.model, optimizer=self.optimizer, dataloader=self.loader)
        self.client = tierd_client.connect(run, socket=daemon.socket, every_steps=5)
        self.losses: list[tuple[int, float]] = []
        self.batches: list[int] = []
        self._bad = bad

    def train(self, **options: Any) -> None:
        guard = LossGuard(self.client, self.state, **options)
        with self.client:
            found = self.client.restore(self.state)
            step, batches = found.step if found else 0, iter(self.loader)
            while step < STEPS:
                step += 1
                loss = self.step(int(next(batches)))
                self.losses.append((step, loss))
                back = guard.check(step, loss)
                if back is not None:
                    step = back
                elif self.client.due(step):
                    self.client.snapshot(step, self.state, metrics={"loss": loss}).wait_persisted(DEADLINE_S)

    def step(self, batch: int) -> float:
        self.batches.append(batch)
        loss = self.model(torch.full((4,), 1.0)).square().mean() * self._bad.get(batch, 1.0)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def rows(daemon: Daemon, run: str) -> dict[tuple[int, int], Any]:
    return {(row["step"], row["generation"]): row for row in daemon.get(f"/api/v1/checkpoints?run={run}")}


def test_nan_goes_back_to_the_last_checkpoint_and_skips_the_bad_batch(daemon: Daemon, run: str) -> None:
    undisturbed = Loop(daemon, f"{run}-0", {})
    undisturbed.train()
    loop = Loop(daemon, run, {12: math.nan})
    loop.train(action="rollback")

    assert [step for step, _ in loop.losses] == [*range(1, 14), *range(11, 21)]
    assert loop.losses[:12] == undisturbed.losses[:12]
    assert loop.batches == list(range(23)), "each batch once, the bad one too"
    assert all(math.isfinite(loss) for _, loss in loop.losses[13:])
    # The state of step 10 went on with other batches, which are all alike here.
    assert [loss for _, loss in loop.losses[13:]] == [loss for _, loss in undisturbed.losses[10:]]
    evidence = rows(daemon, run)[13, 1]
    assert (evidence["milestone"], evidence["healthy"]) == ("bad-loss-13-g1", False)
    assert rows(daemon, run)[20, 2]["healthy"] is not False


def test_a_spike_leaves_evidence_that_no_restart_takes(daemon: Daemon, run: str) -> None:
    """All its numbers are finite, and it is the newest checkpoint."""
    loop = Loop(daemon, run, {12: 1e6})
    with pytest.raises(Halted, match="17"):
        loop.train(spike=3.0)
    assert len(loop.losses) == 13
    wait_until(lambda: rows(daemon, run).get((13, 1), {}).get("tiers", [])[-1:] == ["cold"], "the evidence in cold")
    assert daemon.get(f"/api/v1/checkpoints/{run}/000000000013-g0001")["manifest"]["metrics"]["tierd.unhealthy"] == 1
    again = Loop(daemon, run, {})
    again.train(spike=3.0)
    assert again.losses[0][0] == 11
    assert again.batches[0] == 10


def test_too_many_rollbacks_halt(daemon: Daemon, run: str) -> None:
    loop = Loop(daemon, run, dict.fromkeys(range(12, BATCHES), math.nan))
    with pytest.raises(Halted) as halted:
        loop.train(action="rollback", max_rollbacks=2)
    assert "the loss of step 11 is not finite, after 2 rollbacks" in halted.value.reason
    assert [step for step, _ in loop.losses] == [*range(1, 14), 11, 11]


def test_nothing_to_go_back_to_halts(daemon: Daemon, run: str) -> None:
    loop = Loop(daemon, run, {2: math.nan})
    with pytest.raises(Halted) as halted:
        loop.train(action="rollback")
    assert "there is no healthy checkpoint to go back to" in halted.value.reason


def _guarded(training: Training, losses: list[float]) -> int | None:
    loss = torch.tensor(losses[training.extra["rank"]])
    back = LossGuard(training.client, training.state, action="rollback").check(training.step, loss)
    training.step = back or training.step
    return back


def test_a_bad_loss_on_one_rank_takes_all_ranks_back(daemon: Daemon, run: str, tmp_path: Path) -> None:
    with joined(tmp_path, 2) as trainers:
        together(trainers, "connect", daemon.socket, run)
        together(trainers, "train", 2)
        together(trainers, "durable")
        weights = together(trainers, "weights")
        together(trainers, "train", 1)
        assert together(trainers, "apply", _guarded, [0.5, 0.5]) == [None, None]
        assert together(trainers, "apply", _guarded, [0.5, math.inf]) == [2, 2]
        assert together(trainers, "weights") == weights
        assert together(trainers, "generation") == [2, 2]


@pytest.mark.parametrize(
    "options",
    [{"action": "stop"}, {"spike": 1.0}, {"spike": math.nan}, {"spike": -1}, {"window": 3}, {"max_rollbacks": -1}],
)
def test_options_out_of_range_are_refused(daemon: Daemon, run: str, options: dict[str, Any]) -> None:
    with pytest.raises(BadConfig, match="LossGuard"):
        LossGuard(None, TrainingState(model=torch.nn.Linear(1, 1)), **options)  # type: ignore[arg-type]
