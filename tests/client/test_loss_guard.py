"""A bad loss: the run stops or goes back, on all ranks; what it saves as evidence is never restored by itself."""

from __future__ import annotations

import math
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tierd_client
import torch
from tierd_client import (
    BadConfig,
    BadRequest,
    DictState,
    Halted,
    LossGuard,
    ResumableLoader,
    ResumableSampler,
    TrainingState,
)

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
        self.stop_at = 0
        self.spoils = -1  # the batch whose gradient is NaN, with a finite loss
        self._bad = bad

    def train(self, *, resume: int | None = None, **options: Any) -> None:
        guard = LossGuard(self.client, self.state, **options)
        with self.client:
            found = self.client.restore(self.state, resume=resume)
            step, batches = found.step if found else 0, iter(self.loader)
            while step < STEPS:
                step += 1
                if step == self.stop_at:
                    signal.raise_signal(signal.SIGTERM)
                loss = self.step(int(next(batches)))
                self.losses.append((step, loss))
                back = guard.check(step, loss)
                if back is not None:
                    step = back
                    continue
                if self.client.due(step) or self.client.stopping:
                    self.client.snapshot(step, self.state, metrics={"loss": loss}).wait_persisted(DEADLINE_S)
                if self.client.stopping:
                    break

    def step(self, batch: int) -> float:
        self.batches.append(batch)
        loss = self.model(torch.full((4,), 1.0)).square().mean() * self._bad.get(batch, 1.0)
        self.optimizer.zero_grad()
        loss.backward()
        if batch == self.spoils:
            for parameter in self.model.parameters():
                parameter.grad = parameter.grad * math.nan  # type: ignore[operator]
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
    [
        *({"action": "stop"}, {"spike": 1.0}, {"spike": math.nan}, {"spike": -1}, {"spike": "3"}, {"window": 3}),
        *({"window": 20.5}, {"max_rollbacks": -1}, {"max_rollbacks": 1.5}, {"max_rollbacks": None}),
    ],
)
def test_options_out_of_range_are_refused(daemon: Daemon, run: str, options: dict[str, Any]) -> None:
    with pytest.raises(BadConfig, match="LossRule"):
        LossGuard(None, TrainingState(model=torch.nn.Linear(1, 1)), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("keep", [["rgn"], "datalaoder", ["model", "lr_scheduler.epoch"]])
def test_what_a_rollback_cannot_keep_is_refused_at_the_first_check(daemon: Daemon, run: str, keep: Any) -> None:
    """Not when the rollback is needed."""
    loop = Loop(daemon, run, {})
    with pytest.raises(BadConfig, match="is in no section of the state") as refused:
        loop.train(action="rollback", keep=keep)
    assert "its sections are dataloader, model, optimizer, rng" in refused.value.hint
    assert len(loop.losses) == 1


@pytest.mark.parametrize("keep", ["dataloader", ["dataloader", "rng"]])
def test_what_a_rollback_keeps_may_be_named(daemon: Daemon, run: str, keep: Any) -> None:
    loop = Loop(daemon, run, {12: math.nan})
    loop.train(action="rollback", keep=keep)
    assert loop.batches == list(range(23)), "each batch once, the bad one too"


def test_a_rollback_stays_in_the_timeline_that_was_chosen(daemon: Daemon, run: str) -> None:
    """After a start from step 15 of a run that has come to step 20, a bad loss goes back to step 15, not to 20."""
    Loop(daemon, run, {}).train()
    again = Loop(daemon, run, {16: math.nan})
    again.train(action="rollback", resume=15)
    assert [step for step, _ in again.losses][:4] == [16, 17, 16, 17]
    assert again.losses[-1][0] == STEPS
    assert all(math.isfinite(loss) for _, loss in again.losses[2:])


def test_a_rollback_goes_back_further_where_the_start_was_deleted(daemon: Daemon, run: str) -> None:
    """Step 20 is of the timeline that was left: it goes back to step 10."""
    Loop(daemon, run, {}).train()
    again = Loop(daemon, run, {16: math.nan})
    train = again.step

    def step(batch: int) -> float:
        for tier in (daemon.hot, daemon.cold):
            shutil.rmtree(tier / run / "000000000015-g0001", ignore_errors=True)
        return train(batch)

    again.step = step  # type: ignore[method-assign]
    again.train(action="rollback", resume=15)
    assert [step for step, _ in again.losses] == [16, 17, *range(11, STEPS + 1)]
    assert all(math.isfinite(loss) for _, loss in again.losses[2:])


def test_weights_that_were_spoiled_after_a_good_loss_are_passed_over_although_they_are_not_examined(
    daemon: Daemon, run: str
) -> None:
    """The snapshot of step 10 has them, and nothing has examined it."""
    loop = Loop(daemon, run, {})
    loop.spoils = 9
    loop.train(action="rollback", max_rollbacks=1)
    assert [step for step, _ in loop.losses] == [*range(1, 12), *range(6, STEPS + 1)]
    assert all(math.isfinite(loss) for _, loss in loop.losses[11:])
    assert daemon.metric('tierd_verify_failures_total{tier="hot"}') == 0, "its bytes are what was saved"


def test_a_dict_state_with_nan_that_nobody_has_examined_is_passed_over(daemon: Daemon, run: str) -> None:
    """The guard and the daemon examine the same tensors, also under names that no TrainingState has."""
    values: dict[str, Any] = {"net": {"weight": torch.ones(4)}, "best": torch.tensor(math.inf)}
    state = DictState(values)
    with tierd_client.connect(run, socket=daemon.socket) as client:
        guard = LossGuard(client, state, action="rollback")
        client.restore(state)
        guard.check(1, 1.0)
        client.snapshot(1, state).wait_persisted(DEADLINE_S)
        values["net"]["weight"][0] = math.nan
        guard.check(2, 1.0)
        client.snapshot(2, state).wait_persisted(DEADLINE_S)
        assert guard.check(3, math.nan) == 1
    assert torch.equal(values["net"]["weight"], torch.ones(4))


def test_a_bad_first_and_last_step(daemon: Daemon, run: str) -> None:
    first = Loop(daemon, f"{run}-first", {0: math.nan})
    with pytest.raises(Halted) as halted:
        first.train(action="rollback")
    assert "there is no healthy checkpoint to go back to" in halted.value.reason
    last = Loop(daemon, f"{run}-last", {STEPS - 1: math.nan})
    last.train(action="rollback")
    assert [step for step, _ in last.losses] == [*range(1, STEPS + 1), *range(16, STEPS + 1)]


def test_a_snapshot_before_the_check_is_refused(daemon: Daemon, run: str) -> None:
    loop = Loop(daemon, run, {})
    with loop.client:
        loop.client.restore(loop.state)
        loss = loop.step(0)
        loop.client.snapshot(1, loop.state)
        with pytest.raises(BadRequest, match="a snapshot of step 1 was taken before"):
            LossGuard(loop.client, loop.state).check(1, loss)


def _checked(training: Training, losses: list[Any]) -> str:
    try:
        LossGuard(training.client, training.state).check(training.step, losses[training.extra["rank"]])
    except BadRequest as error:
        return str(error)
    return ""


def test_a_loss_that_is_no_number_on_one_rank_is_an_error_on_all(daemon: Daemon, run: str, tmp_path: Path) -> None:
    with joined(tmp_path, 2) as trainers:
        together(trainers, "connect", daemon.socket, run)
        together(trainers, "train", 1)
        for no_number in (torch.ones(2), 10**400):
            here, there = together(trainers, "apply", _checked, [no_number, 0.5])
            assert "on this rank it is not a single number" in here
            assert "on another rank it is not a single number" in there


def test_a_stop_during_a_rollback_ends_as_stopped(daemon: Daemon, run: str) -> None:
    loop = Loop(daemon, run, {12: math.nan})
    loop.stop_at = 13
    loop.train(action="rollback")
    assert [step for step, _ in loop.losses][-2:] == [13, 11], "one step after the rollback, then the stop"
    wait_until(lambda: rows(daemon, run).get((11, 2)), "the last snapshot")


def test_gradients_that_overflow_are_no_bad_loss(daemon: Daemon, run: str) -> None:
    """A GradScaler begins with a scale that is too high: it skips steps, and the losses are finite."""
    loop = Loop(daemon, run, {})
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
    state = TrainingState(model=loop.model, optimizer=loop.optimizer, scaler=scaler)
    guard = LossGuard(loop.client, state, action="rollback", spike=3.0)
    skipped = 0
    with loop.client:
        for step in range(1, 16):
            loss = 100 * loop.model(torch.full((4,), 1.0)).square().mean()
            loop.optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(loop.optimizer)
            before = scaler.get_scale()
            scaler.update()
            skipped += scaler.get_scale() < before
            assert guard.check(step, loss) is None
    assert skipped > 1
