"""A Hugging Face Trainer that is killed, stopped and started again ends bit for bit as an undisturbed one."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import Daemon
from tests.support.forks import Forks
from tests.support.trainer import Trainer

EVERY_3 = {"every_steps": 3}


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    with Forks("hf_training", tmp_path_factory.mktemp("hf")) as forks:
        yield forks


def test_hugging_face_training_killed_and_stopped_in_epochs_resumes_identically(forks: Forks, tmp_path: Path) -> None:
    """10 steps an epoch of 20 batches, two to a step; logs every 3 steps, evaluations every 4."""
    output = tmp_path / "output"
    settings = {"output": str(output), "args": {"num_train_epochs": 2}}
    alone = forks.run("alone", socket=None, **settings)
    with Daemon(tmp_path) as daemon:
        command = {"socket": daemon.socket, "connect": EVERY_3, **settings}
        killed = forks.run("run", **command, signals=[(7, "SIGKILL", 0)])
        assert killed.codes == [-signal.SIGKILL]
        assert killed.resumed == 0
        stopped = forks.run("run", **command, signals=[(13, "SIGTERM", 0)])
        assert stopped.resumed == 6
        assert stopped.result["stopped"]
        again = forks.run("run", **command, seed=2)  # other initial weights: all are restored
        assert daemon.newest("hot") == 20
    assert again.resumed == 14
    assert killed.steps(1, 7) == alone.steps(1, 7)
    assert stopped.steps(7, 13) == alone.steps(7, 13)
    assert again.steps(15) == alone.steps(15)
    assert len([line for line in again.steps(15)[0] if "loss" in line]) == 2 * 6
    assert again.result == alone.result
    assert again.result["evaluations"] == 5
    assert again.result["notes"] == {"steps": 20}
    assert list(output.glob("*")) == []


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"args": {"max_steps": 12}}, id="max_steps", marks=pytest.mark.long),
        pytest.param({"args": {"learning_rate": 0.0}, "patience": 3}, id="early stopping", marks=pytest.mark.long),
        pytest.param(
            {"args": {"num_train_epochs": 2, "load_best_model_at_end": True, **dict.fromkeys(
                ("eval_strategy", "save_strategy", "logging_strategy"), "epoch")}},
            id="best model after the last epoch",
            marks=pytest.mark.long,
        ),
    ],
)  # fmt: skip
def test_finished_training_stays_finished(forks: Forks, tmp_path: Path, settings: dict[str, Any]) -> None:
    """The loss that train() returns covers all steps, also those before a kill."""
    name = tmp_path.name
    alone = forks.run(f"alone-{name}", socket=None, output=str(tmp_path / "alone"), **settings)
    with Daemon(tmp_path) as daemon:
        command = {"socket": daemon.socket, "output": str(tmp_path / "run"), "connect": EVERY_3, **settings}
        forks.run(name, **command, signals=[(8, "SIGKILL", 0)])
        runs = [forks.run(name, **command) for _ in range(3)]
        assert daemon.newest("hot") == alone.result["end"]
    for run in runs:
        assert run.result == alone.result
    for again in runs[1:]:
        assert again.resumed == alone.result["end"]
        assert not [line for line in again.lines[0] if "loss" in line]


@pytest.mark.long
def test_finished_training_continues_when_its_last_step_is_raised(forks: Forks, tmp_path: Path) -> None:
    settings = {"output": str(tmp_path / "output")}
    with Daemon(tmp_path) as daemon:
        forks.run("raised", socket=daemon.socket, args={"max_steps": 13}, **settings)
        again = forks.run("raised", socket=daemon.socket, args={"max_steps": 16}, **settings)
    assert again.resumed == 13
    assert again.result["end"] == 16
    assert [line["step"] for line in again.lines[0] if "loss" in line] == [14, 14, 15, 15, 16, 16]


@pytest.mark.long
def test_a_run_moves_from_trainers_own_checkpoint_and_goes_on_with_its_own(forks: Forks, tmp_path: Path) -> None:
    own = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 6}
    forks.run("moved", socket=None, output=str(tmp_path / "before"), args=own)
    settings = {"first": str(tmp_path / "before/checkpoint-6"), "args": {"num_train_epochs": 2}}
    alone = forks.run("moved", socket=None, output=str(tmp_path / "alone"), **settings)  # as Trainer resumes
    with Daemon(tmp_path) as daemon:
        command = {"socket": daemon.socket, "output": str(tmp_path / "run"), "connect": EVERY_3}
        command |= settings
        killed = forks.run("moved", **command, seed=2, signals=[(13, "SIGKILL", 0)])
        again = forks.run("moved", **command, seed=3)
    assert (killed.resumed, again.resumed) == (6, 12)
    assert killed.steps(7, 13) == alone.steps(7, 13)
    assert again.steps(13) == alone.steps(13)
    assert (again.result["weights"], again.result["optimizer"]) == (alone.result["weights"], alone.result["optimizer"])


@pytest.mark.long
def test_two_ranks_resume_with_trainers_own_checkpoints_enabled(forks: Forks, tmp_path: Path) -> None:
    """DDP over gloo. Trainer also saves its own checkpoints, and loads the best model at the end."""
    own: dict[str, Any] = {
        "num_train_epochs": 2,
        "save_strategy": "steps",
        "save_steps": 4,
        "load_best_model_at_end": True,
        "ddp_backend": "gloo",
    }
    settings = {"args": own, "samples": 150}
    alone = forks.run("alone-2", ranks=2, socket=None, output=str(tmp_path / "alone"), **settings)
    with Daemon(tmp_path) as daemon:
        command = {"socket": daemon.socket, "output": str(tmp_path / "run"), "connect": EVERY_3, **settings}
        killed = forks.run("run-2", ranks=2, **command, signals=[(7, "SIGKILL", 0)])
        assert -signal.SIGKILL in killed.codes
        again = forks.run("run-2", ranks=2, **command)
        assert daemon.newest("hot") == 20
        fewer = forks.run("run-2", **{**command, "args": {**own, "ddp_backend": None}})
    assert again.resumed == 6
    assert again.steps(7) == alone.steps(7)
    assert again.result["best"] == alone.result["best"]
    assert (tmp_path / "run/checkpoint-20/optimizer.pt").exists()
    assert fewer.codes == [1]
    assert "it differs between the 2 ranks that saved the checkpoint" in fewer.stderr


@pytest.mark.long
def test_iterable_dataset_is_read_again_up_to_its_position(forks: Forks, tmp_path: Path) -> None:
    settings = {"output": str(tmp_path / "output"), "streams": True, "samples": 250, "args": {"max_steps": 12}}
    alone = forks.run("alone-stream", socket=None, **settings)
    with Daemon(tmp_path) as daemon:
        forks.run("stream", socket=daemon.socket, connect=EVERY_3, **settings, signals=[(7, "SIGKILL", 0)])
        again = forks.run("stream", socket=daemon.socket, connect=EVERY_3, **settings)
    assert again.resumed == 6
    assert again.steps(7) == alone.steps(7)


@pytest.mark.long
def test_hugging_face_training_continues_while_the_daemon_hangs(forks: Forks, tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        done = forks.run(
            "hung",
            socket=daemon.socket,
            output=str(tmp_path / "output"),
            connect={"every_steps": 1, "when_busy": "skip"},
            args={"num_train_epochs": 2},
            signals=[(5, "SIGSTOP", daemon.pid), (12, "SIGCONT", daemon.pid)],
        )
        assert daemon.newest("hot") == 20
    assert done.result["end"] == 20
    assert "tierd: no snapshot of step 11 of hf" in done.stderr


def test_train_without_a_resume_point_is_refused(forks: Forks, tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        command = {"socket": daemon.socket, "output": str(tmp_path / "output"), "connect": EVERY_3}
        refused = forks.run("forgetful", **command, asks=False)
        assert refused.codes == [1]
        assert "callback.resume_point was not called" in refused.stderr
        forks.run("deaf", **command, signals=[(7, "SIGKILL", 0)])
        ignored = forks.run("deaf", **command, listens=False)
    assert ignored.codes == [1]
    assert "from step 0: its resume point is step 6" in ignored.stderr


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"ignore_data_skip": True}, "with ignore_data_skip: it would read the data of the epoch from the start"),
        ({"dataloader_num_workers": 2, "dataloader_in_order": False}, "the order of its batches depends on"),
    ],
)
def test_trainer_that_cannot_be_resumed_exactly_is_refused(
    forks: Forks, tmp_path: Path, setting: dict[str, Any], message: str
) -> None:
    refused = forks.run(f"refused-{tmp_path.name}", socket="unused", output=str(tmp_path / "output"), args=setting)
    assert refused.codes == [1]
    assert message in refused.stderr


def test_another_number_of_workers_is_refused_when_batches_draw_numbers(forks: Forks, tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        command = {"socket": daemon.socket, "output": str(tmp_path / "output"), "connect": EVERY_3}
        forks.run("workers", **command, signals=[(7, "SIGKILL", 0)])
        refused = forks.run("workers", **command, args={"dataloader_num_workers": 1})
    assert refused.codes == [1]
    assert "resume with 1 workers of the loader: it had 0" in refused.stderr


def test_run_of_another_framework_is_refused_by_the_callback(forks: Forks, tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon, Trainer() as other:
        other.connect(daemon.socket, "hf")
        other.train(1)
        other.durable()
        refused = forks.run("foreign", socket=daemon.socket, output=str(tmp_path / "output"))
    assert refused.codes == [1]
    assert "resume a Trainer: the checkpoint was not taken from one" in refused.stderr


@pytest.mark.long
def test_hugging_face_training_begins_at_another_run_whole_and_goes_on_with_its_own(
    forks: Forks, tmp_path: Path
) -> None:
    with Daemon(tmp_path) as daemon:
        command = {"socket": daemon.socket, "output": str(tmp_path / "output"), "connect": EVERY_3}
        source = forks.run("source", **command, signals=[(13, "SIGTERM", 0)])
        command |= {"own_run": "fork", "which": {"resume": "run:hf@9"}}
        killed = forks.run("fork", **command, seed=2, signals=[(13, "SIGKILL", 0)])
        assert killed.resumed == 9
        assert killed.steps(10, 13) == source.steps(10, 13)
        again = forks.run("fork", **command, seed=3, signals=[(13, "SIGTERM", 0)])
        assert again.resumed == 12
        assert again.steps(13, 13) == source.steps(13, 13)
        refused = forks.run("part", **command | {"own_run": "part", "which": {"resume": "run:hf", "only": ["model"]}})
    assert refused.codes == [1]
    assert "resume a Trainer with only, rename, strict, cast or keep" in refused.stderr
