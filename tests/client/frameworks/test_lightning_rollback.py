"""A rollback within `fit`: manual optimization, the files of a ModelCheckpoint, an epoch's metrics."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import Daemon
from tests.support.forks import Forks
from tests.support.guarded_lightning import ROWS

BACK = {"action": "rollback"}


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    with Forks("guarded_lightning", tmp_path_factory.mktemp("forks")) as forks:
        yield forks


@pytest.mark.long
def test_manual_optimization_goes_back(forks: Forks, tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        done = forks.run("manual", socket=daemon.socket, bad=[7], guard=BACK, epochs=1, manual=True)
    assert done.result["is_finite"]
    steps = [line["step"] for line in done.lines[0] if "row" in line]
    assert steps[:10] == [*range(1, 9), 7, 8]


def test_model_checkpoints_keep_their_list_of_files(forks: Forks, tmp_path: Path) -> None:
    """Lightning saves after each step and keeps the best two; no file is of the bad step."""
    with Daemon(tmp_path) as daemon:
        files = tmp_path / "files"
        done = forks.run("files", socket=daemon.socket, bad=[7], guard=BACK, epochs=1, files=str(files))
        assert done.result["is_finite"]
        assert len(list(files.iterdir())) == 2
        again = forks.run("files", socket=daemon.socket, guard=BACK, epochs=2, files=str(files))
        assert again.result["is_finite"]


@pytest.mark.long
def test_a_rollback_over_the_end_of_an_epoch_begins_its_metrics_anew(forks: Forks, tmp_path: Path) -> None:
    """The bad row is the first of the second epoch: step 17, back at 15, which is of the first."""
    with Daemon(tmp_path) as daemon:
        done = forks.run("over", socket=daemon.socket, bad=[], bad_steps=[ROWS + 1], guard=BACK)
    assert done.result["is_finite"]
    lines = done.lines[0]
    assert [line["step"] for line in lines if "row" in line][ROWS : ROWS + 3] == [17, 16, 17]
    losses = [line["loss"] for line in lines if "row" in line][-ROWS + 1 :]
    (mean,) = [line["mean"] for line in lines if line.get("epoch") == 1]
    (by_hand,) = [line["by_hand"] for line in lines if line.get("epoch") == 1]
    assert math.isclose(mean, sum(losses) / len(losses), rel_tol=1e-5)
    assert math.isclose(by_hand, mean, rel_tol=1e-5)
