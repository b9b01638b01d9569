"""A training of a framework with NaN in its data: it halts, or goes back and ends finite. What ended it is recorded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import Daemon
from tests.support.forks import Done, Forks
from tests.support.waiting import wait_until

ROWS, EPOCHS = 16, 2
BACK = {"action": "rollback"}


FRAMEWORKS = ("guarded_lightning", "guarded_hf")
EDGES_SHORT = (("guarded_lightning", 0), ("guarded_hf", 3))


def soon(kept: str) -> pytest.MarkDecorator:
    """With one framework in `make test`, and with the other one in `make test-long`."""
    values = [pytest.param(name, marks=() if name == kept else pytest.mark.long) for name in FRAMEWORKS]
    return pytest.mark.parametrize("forks", values, indirect=True, scope="module")


@pytest.fixture(scope="module", params=FRAMEWORKS)
def forks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    with Forks(request.param, tmp_path_factory.mktemp("forks")) as forks:
        yield forks


class Case:
    def __init__(self, forks: Forks, daemon: Daemon, root: Path) -> None:
        self.forks, self.daemon, self.root = forks, daemon, root

    def run(self, *, ranks: int = 1, alone: bool = False, **options: Any) -> Done:
        options |= {"output": str(self.root / "output"), "socket": None if alone else self.daemon.socket}
        return self.forks.run(f"{self.root.name}-{'alone' if alone else 'run'}", ranks=ranks, **options)

    def rows(self) -> dict[tuple[int, int], Any]:
        return {(row["step"], row["generation"]): row for row in self.daemon.get("/api/v1/checkpoints?run=guarded")}


@pytest.fixture
def case(forks: Forks, tmp_path: Path) -> Iterator[Case]:
    with Daemon(tmp_path) as daemon:
        yield Case(forks, daemon, tmp_path)


def losses(done: Done, rank: int = 0) -> list[tuple[int, int, float]]:
    return [(line["step"], line["row"], line["loss"]) for line in done.lines[rank] if "row" in line]


def state_of(daemon: Daemon) -> tuple[str, str]:
    (run,) = daemon.status()["runs"]
    return run["state"], run["reason"]


@soon("guarded_hf")
@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        ("ValueError", "failed", "ValueError: as the test wants it"),
        ("KeyboardInterrupt", "halted", "interrupted at once"),
        pytest.param("SystemExit", "failed", "SystemExit: as the test wants it", marks=pytest.mark.long),
    ],
)
def test_a_training_that_raises_is_not_recorded_as_finished(case: Case, error: str, state: str, reason: str) -> None:
    done = case.run(raises=[5, error])
    assert done.codes == [1]
    wait_until(lambda: state_of(case.daemon) == (state, reason), f"{state_of(case.daemon)} to be {state}")


def test_nan_goes_back_and_the_run_ends_finite(case: Case) -> None:
    """Row 7 of the first epoch and of the second: two rollbacks."""
    undisturbed = case.run(alone=True)
    done = case.run(bad=[7], guard=BACK)
    assert done.result["is_finite"]
    curve = losses(done)
    assert curve[:7] == losses(undisturbed)[:7], "the curve up to the rollback"
    # Steps 1 to 8, of which the last is bad; back at 6 with the row after it. Then 16 + 8 rows, of which row 7 is bad.
    steps = [step for step, _, _ in curve]
    assert steps[:10] == [*range(1, 9), 7, 8]
    assert [row for _, row, _ in curve] == [*range(ROWS)] * EPOCHS, "no batch is trained on twice"
    bad = [(step, row) for step, row, loss in curve if not math.isfinite(loss)]
    assert [row for _, row in bad] == [7, 7]
    assert done.result["end"] == 2 * ROWS - sum(step - 1 - step // 3 * 3 + 1 + (step % 3 == 0) * 3 for step, _ in bad)
    evidence = case.rows()[8, 1]
    assert (evidence["milestone"], evidence["healthy"]) == ("bad-loss-8-g1", False)
    for line in done.lines[0]:
        assert all(math.isfinite(line[name]) for name in ("mean", "by_hand", "validated", "value") if name in line)


@pytest.mark.parametrize(
    ("forks", "bad"),
    [
        pytest.param(name, bad, marks=() if (name, bad) in EDGES_SHORT else pytest.mark.long)
        for name in FRAMEWORKS
        for bad in (0, 2, 3, ROWS - 1)
    ],
    indirect=["forks"],
    scope="module",
)
def test_nan_at_the_edges(case: Case, bad: int) -> None:
    """At the first step, at the step of a snapshot and after it, and at the last one, with a fixed number of steps."""
    done = case.run(bad=[bad], guard=BACK, epochs=1)
    if bad < 3:
        assert done.codes == [17], "there is no snapshot to go back to"
        wait_until(lambda: state_of(case.daemon)[0] == "halted", "the outcome")
        assert "no healthy checkpoint to go back to" in state_of(case.daemon)[1]
        return
    assert done.result["is_finite"]
    steps = [step for step, _, _ in losses(done)]
    assert steps == ([1, 2, 3, 4, *range(4, ROWS)] if bad == 3 else [*range(1, ROWS + 1)])
    assert done.result["end"] == 15


@soon("guarded_hf")
def test_a_bad_step_that_is_the_last_one_is_made_up_for(case: Case) -> None:
    """With max_steps there are batches left: training goes on to that number."""
    done = case.run(bad=[9], guard=BACK, max_steps=10)
    assert done.result["is_finite"]
    assert [step for step, _, _ in losses(done)] == [*range(1, 11), 10]
    assert done.result["end"] == 10


@soon("guarded_lightning")
def test_halt_is_the_default(case: Case) -> None:
    done = case.run(bad=[7], guard={})
    assert done.codes == [17]
    wait_until(lambda: state_of(case.daemon) == ("halted", "the loss of step 8 is not finite"), "the outcome")
    again = case.run(guard={})
    assert losses(again)[0][:2] == (7, 6), "the evidence is not what a restart takes"
    assert again.result["is_finite"]


@soon("guarded_hf")
def test_rollbacks_are_bounded(case: Case) -> None:
    done = case.run(bad=[7, 8, 9], guard=BACK)
    assert done.codes == [17]
    wait_until(lambda: "after 2 rollbacks, the most" in state_of(case.daemon)[1], "the outcome")
    assert [step for step, _, _ in losses(done)] == [*range(1, 9), 7, 7]


@soon("guarded_hf")
def test_nan_while_gradients_are_accumulated(case: Case) -> None:
    """Two batches to a step; the first of the two is bad. Snapshots every 3 steps: at 3 and 6."""
    done = case.run(bad=[8], guard=BACK, accumulate=2)
    assert done.result["is_finite"]
    steps = [step for step, _, _ in losses(done)]
    assert steps[:12] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 4, 4]
    assert case.rows()[5, 1]["milestone"] == "bad-loss-5-g1"


@pytest.mark.long
@soon("guarded_lightning")
def test_nan_on_one_rank_takes_both_back(case: Case) -> None:
    """Rank 1 has the odd rows."""
    undisturbed = case.run(ranks=2, alone=True)
    done = case.run(ranks=2, bad=[9], guard=BACK)
    assert done.codes == [0, 0], done.stderr
    for rank in range(2):
        curve = losses(done, rank)
        assert curve[:4] == losses(undisturbed, rank)[:4]
        assert [step for step, _, _ in curve][:7] == [1, 2, 3, 4, 5, 4, 5], curve
        assert done.lines[rank][-1]["is_finite"]
    assert done.lines[0][-1]["end"] == done.lines[1][-1]["end"]


@soon("guarded_hf")
@pytest.mark.long
def test_a_training_that_went_back_and_was_stopped_continues(case: Case) -> None:
    """The position in the data after a rollback is that of the next snapshots."""
    whole = case.run(bad=[7], guard=BACK, epochs=1)
    assert whole.result["end"] == 14
    more = case.run(bad=[], guard=BACK, epochs=2)
    assert [row for _, row, _ in losses(more)] == [*range(ROWS)]
    assert losses(more)[0][0] == 15
