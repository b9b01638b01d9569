"""A training with Accelerate that is killed resumes bit for bit as an undisturbed one."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import Daemon
from tests.support.forks import Done, Forks


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    with Forks("accelerate_training", tmp_path_factory.mktemp("accelerate")) as forks:
        yield forks


@pytest.fixture(scope="module")
def alone(forks: Forks) -> Done:
    """A training without tierd."""
    return forks.run("alone", socket=None)


@pytest.mark.parametrize(
    ("resumed", "batches"), [(3, 6), *(pytest.param(step, 0, marks=pytest.mark.long) for step in (7, 14))]
)
def test_accelerate_training_killed_within_or_between_epochs_resumes_identically(
    forks: Forks, alone: Done, tmp_path: Path, resumed: int, batches: int
) -> None:
    """7 steps an epoch of 14 batches, two to a step. The order of the data and the masks in it are random."""
    with Daemon(tmp_path) as daemon:
        command = {"socket": daemon.socket, "every": resumed}
        killed = forks.run(f"run-{resumed}", **command, kill_step=resumed + 2)
        assert killed.codes == [-signal.SIGKILL]
        again = forks.run(
            f"run-{resumed}", **command, seed=2
        )  # the restore replaces everything that depends on the seed
    assert again.lines[0][0] == {"resumed": resumed, "batches": batches}  # Accelerate's count begins with each epoch
    assert again.steps(resumed + 1) == alone.steps(resumed + 1)
    assert len(again.steps(resumed + 1)[0]) >= 2 * (28 - resumed)
    assert again.result == alone.result


def test_accelerate_training_on_two_ranks_resumes_in_the_middle_of_an_epoch(forks: Forks, tmp_path: Path) -> None:
    """DDP over gloo; each rank has its own batches."""
    alone = forks.run("alone-ranks", ranks=2, socket=None, epochs=6)
    with Daemon(tmp_path) as daemon:
        command = {"socket": daemon.socket, "every": 5, "epochs": 6}
        killed = forks.run("ranks", ranks=2, **command, kill_step=7)
        assert -signal.SIGKILL in killed.codes
        again = forks.run("ranks", ranks=2, **command)
    assert again.resumed == 5
    assert again.steps(6) == alone.steps(6)
    assert again.lines[0][-1] != again.lines[1][-1]  # the ranks read different data


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"stateful": False}, "a prepared loader does not keep its position"),
        ({"seedable": False}, "a prepared loader shuffles in an order that cannot be reproduced"),
        ({"names": ["registered_0"]}, "registered_0 is taken"),
        ({"every_batch": True}, "batches are being accumulated, and are not stored"),
        ({"data": "stream", "dispatch": None}, "a DataLoaderDispatcher does not keep its position exactly"),
        ({"data": "stream", "workers": 1}, "workers read Stream, a stream without a state"),
    ],
)
def test_accelerate_setup_that_cannot_resume_exactly_is_refused(
    forks: Forks, tmp_path: Path, wrong: dict[str, object], message: str
) -> None:
    with Daemon(tmp_path) as daemon:
        refused = forks.run(f"refused-{len(list(forks.root.iterdir()))}", socket=daemon.socket, every=1, **wrong)
    assert refused.codes == [1]
    assert message in refused.stderr
