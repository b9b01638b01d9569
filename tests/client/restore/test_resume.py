"""Where a training starts for each value of `resume`: it never silently starts at step 0."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tierd_client
import torch
from tierd_client import (
    BadConfig,
    Corrupt,
    Found,
    Mismatch,
    NewerFormat,
    NotFound,
    TargetNotEmpty,
    TierUnreachable,
    TrainingState,
    Unhealthy,
    Unsupported,
)
from tierd_client.restore.resume import ResumePolicy, parse_resume

from tests.support.daemon import Daemon
from tests.support.trainer import Trainer, Training, refusals, together
from tests.support.waiting import DEADLINE_S, wait_until


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Shared by the tests that do not damage it: each has its own run."""
    with Daemon(tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    return "".join(char if char.isalnum() else "-" for char in request.node.name)[:100]


@pytest.fixture(autouse=True)
def _no_policy_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIERD_RESUME", raising=False)


class Start:
    """One start of a training whose state is one number, the step of its last snapshot."""

    def __init__(self, client: tierd_client.Client) -> None:
        self.client = client
        self.model = torch.nn.Linear(1, 1)
        self.state = TrainingState(model=self.model)

    def take(self, *steps: int) -> None:
        for step in steps:
            torch.nn.init.constant_(self.model.weight, step)
            self.client.snapshot(step, self.state).wait_persisted(DEADLINE_S)

    def restore(self, **which: Any) -> Found | None:
        torch.nn.init.constant_(self.model.weight, -1)
        found = self.client.restore(self.state, **which)
        assert self.model.weight.item() == (found.step if found else -1)
        return found


@contextmanager
def started(daemon: Daemon, run: str) -> Generator[Start]:
    client = tierd_client.connect(run, socket=daemon.socket)
    try:
        yield Start(client)
    finally:
        client.close()


def rows(daemon: Daemon, run: str) -> list[tuple[int, int]]:
    """(step, generation), newest first."""
    return [(row["step"], row["generation"]) for row in daemon.get(f"/api/v1/checkpoints?run={run}")]


def parent(daemon: Daemon, run: str, name: str) -> Any:
    return daemon.get(f"/api/v1/checkpoints/{run}/{name}")["manifest"]["parent"]


# ── values of resume ──


@pytest.mark.parametrize(
    ("resume", "policy"),
    [
        ("auto", ResumePolicy(mode="auto")),
        ("scratch", ResumePolicy(mode="scratch")),
        ("require", ResumePolicy(mode="require")),
        (0, ResumePolicy(mode="require", step=0)),
        (18000, ResumePolicy(mode="require", step=18000)),
        ("18000", ResumePolicy(mode="require", step=18000)),
        ("/a/b", ResumePolicy(mode="require", path="/a/b")),
        (Path("500"), ResumePolicy(mode="require", path=f"{os.getcwd()}/500")),
        ("./500", ResumePolicy(mode="require", path=f"{os.getcwd()}/500")),
        (".", ResumePolicy(mode="require", path=os.getcwd())),
    ],
)
def test_resume_accepts_a_mode_a_step_or_a_path_as_argument_or_in_the_environment(
    resume: Any, policy: ResumePolicy
) -> None:
    assert parse_resume(resume, {"TIERD_RESUME": "scratch"}) == policy
    if not isinstance(resume, Path):
        assert parse_resume(None, {"TIERD_RESUME": str(resume)}) == policy


def test_resume_defaults_to_auto() -> None:
    assert parse_resume(None, {}) == parse_resume(None, {"TIERD_RESUME": ""}) == ResumePolicy(mode="auto")


@pytest.mark.parametrize("resume", ["latest", "", "Auto", "-1", "1.5", "²", -1, True, 1.5, b"/a", ["auto"]])
def test_other_values_of_resume_are_refused_and_the_choices_are_listed(resume: Any) -> None:
    with pytest.raises(BadConfig, match='"auto", "scratch", "require", a step, or the path'):
        parse_resume(resume, {})


@pytest.mark.parametrize("resume", ["/checkpoints/\udcff", Path("/checkpoints/\udcff")])
def test_path_that_is_not_utf_8_is_refused(resume: Any) -> None:
    with pytest.raises(BadConfig, match=r"'/checkpoints/\\udcff': the path is not UTF-8"):
        parse_resume(resume, {})


# ── auto, require ──


def test_auto_starts_fresh_without_checkpoints_and_require_refuses(daemon: Daemon, run: str) -> None:
    with started(daemon, run) as first:
        with pytest.raises(NotFound):
            first.restore(resume="require")
        assert first.restore(resume="auto") is None
        assert first.restore() is None
        first.take(1, 2)
    with started(daemon, run) as second:
        assert second.restore(resume="require").step == 2  # type: ignore[union-attr]


def test_argument_overrides_the_policy_in_the_environment(
    daemon: Daemon, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERD_RESUME", "require")
    with started(daemon, run) as first:
        with pytest.raises(NotFound):
            first.restore()
        assert first.restore(resume="auto") is None
        first.take(1, 2)
        monkeypatch.setenv("TIERD_RESUME", "1")
        assert first.restore().step == 1  # type: ignore[union-attr]
        monkeypatch.setenv("TIERD_RESUME", "newest")
        with pytest.raises(BadConfig, match=r"\$TIERD_RESUME='newest'"):
            first.restore()


def test_missing_step_is_not_found_instead_of_a_fresh_start(daemon: Daemon, run: str) -> None:
    with started(daemon, run) as first:
        first.take(1)
        with pytest.raises(NotFound, match="step 7"):
            first.restore(resume=7)


def test_newest_checkpoint_of_a_later_tierd_is_refused_until_a_step_is_named(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        with started(daemon, "run") as first:
            first.take(1, 2)
        daemon.kill()
        manifest = daemon.folder(2) / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"format_version": 1', '"format_version": 2'))
        shutil.rmtree(daemon.cold)
        daemon.start()
        with started(daemon, "run") as second:
            for resume in ("auto", "require"):
                with pytest.raises(NewerFormat, match="000000000002-g0001"):
                    second.restore(resume=resume)
            with pytest.raises(TargetNotEmpty, match="step 2 of generation 1"):
                second.restore(resume="scratch")
            assert second.restore(resume=1).step == 1  # type: ignore[union-attr]


# ── scratch ──


def test_scratch_refuses_existing_checkpoints_and_with_force_leaves_them_restorable(daemon: Daemon, run: str) -> None:
    with started(daemon, run) as first:
        assert first.restore(resume="scratch") is None
        first.take(1, 2)
        with pytest.raises(TargetNotEmpty, match="the newest is step 2 of generation 1"):
            first.restore(resume="scratch")
    with started(daemon, run) as second:
        with pytest.raises(TargetNotEmpty, match=f"start {run} from scratch: .*step 2 of generation 1") as caught:
            second.restore(resume="scratch")
        assert "force=True" in caught.value.hint
        assert second.restore(resume="scratch", force=True) is None
        second.take(1)
        newest = rows(daemon, run)[0]
        assert newest[0] == 1
        assert parent(daemon, run, f"000000000001-g{newest[1]:04d}") is None
        assert second.restore(resume=2).step == 2  # type: ignore[union-attr]


def test_scratch_refuses_checkpoints_in_a_cold_tier_and_fetches_nothing(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        with started(daemon, "run") as first:
            first.take(5)
            wait_until(lambda: daemon.steps("cold") == [5], "the copy")
        daemon.kill()
        shutil.rmtree(daemon.hot)
        daemon.start()
        with started(daemon, "run") as second:
            with pytest.raises(TargetNotEmpty, match="step 5 of generation 1"):
                second.restore(resume="scratch")
            assert daemon.steps("hot") == []
            assert second.restore().tier == "cold"  # type: ignore[union-attr]


def test_scratch_refuses_when_a_tier_cannot_be_listed(tmp_path: Path) -> None:
    """The daemon knows that the run was started before, but cannot list the cold tier."""
    limits = "cold_list_interval_s = 0.1\n"
    with Daemon(tmp_path, more=limits) as daemon, started(daemon, "run"):
        with started(daemon, "other") as other:
            other.take(1)
            wait_until(lambda: daemon.steps("cold") == [1], "the copy")
        daemon.cold.rename(tmp_path / "unmounted")
        wait_until(lambda: "tier_unreachable" in str(daemon.status()["halted"]), "the tier to be missed")
        with started(daemon, "run") as second:
            for resume in ("auto", "require"):
                with pytest.raises(TierUnreachable):
                    second.restore(resume=resume)
            with pytest.raises(TierUnreachable, match=r"from scratch: these could not be listed.*cold") as caught:
                second.restore(resume="scratch")
            assert "force=True" in caught.value.hint
            assert second.restore(resume="scratch", force=True) is None


def test_new_run_starts_with_an_unreachable_tier_only_with_scratch_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints that the unreachable tier turns out to hold belong to an older timeline."""
    limits = "cold_list_interval_s = 0.1\n"
    with Daemon(tmp_path / "first", more=limits) as daemon, started(daemon, "run") as start:
        start.take(7)
        wait_until(lambda: daemon.steps("cold") == [7], "the copy")
        left = daemon.cold
    with Daemon(tmp_path / "second", more=limits) as daemon:
        with started(daemon, "other") as other:
            other.take(1)
            wait_until(lambda: "cold" in str(daemon.get("/api/v1/checkpoints?run=other")), "the copy")
        daemon.cold.rename(tmp_path / "unmounted")
        wait_until(lambda: "tier_unreachable" in str(daemon.status()["halted"]), "the tier to be missed")
        with pytest.raises(TierUnreachable, match="nothing is known of it here") as caught, started(daemon, "run"):
            pass
        assert "TIERD_RESUME=scratch" in caught.value.hint
        monkeypatch.setenv("TIERD_RESUME", "scratch")
        with started(daemon, "run") as start:
            assert start.restore() is None
            start.take(3)
        monkeypatch.delenv("TIERD_RESUME")
        shutil.copytree(left, tmp_path / "unmounted", dirs_exist_ok=True)
        (tmp_path / "unmounted").rename(daemon.cold)
        wait_until(lambda: [step for step, _ in rows(daemon, "run")] == [3, 7], "the old timeline to be seen")
        with started(daemon, "run") as start:
            found = start.restore()
            assert found is not None
            assert found.step == 3


@pytest.mark.parametrize("which", [{"tier": "hot"}, {"generation": 1}, {"milestone": "best"}])
@pytest.mark.parametrize("resume", ["scratch", "/nowhere"])
def test_scratch_and_a_path_refuse_arguments_that_select_a_checkpoint_of_the_run(
    daemon: Daemon, run: str, resume: str, which: dict[str, Any]
) -> None:
    with started(daemon, run) as first, pytest.raises(BadConfig, match="select a checkpoint of the run"):
        first.restore(resume=resume, **which)


# ── a path ──


def copied(daemon: Daemon, run: str, step: int, to: Path) -> Path:
    done = daemon.tierd("restore", "--run", run, "--step", step, "--to", to)
    assert done.returncode == 0, done.stderr
    return to


def test_resume_from_a_restored_directory_of_another_run_starts_a_fork(
    daemon: Daemon, run: str, tmp_path: Path
) -> None:
    with started(daemon, run) as first:
        first.take(3, 4)
    folder = copied(daemon, run, 3, tmp_path / "three")
    with started(daemon, f"{run}-fork") as fork:
        found = fork.restore(resume=folder)
        assert (found.step, found.generation, found.tier) == (3, 1, str(folder))  # type: ignore[union-attr]
        fork.take(4)
    assert parent(daemon, f"{run}-fork", "000000000004-g0001") == {"run": run, "step": 3, "generation": 1}


def test_resume_accepts_a_checkpoints_folder_in_a_tier(
    daemon: Daemon, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(daemon, run) as first:
        first.take(3)
        monkeypatch.chdir(daemon.folder(3, run=run))
        assert first.restore(resume=".").step == 3  # type: ignore[union-attr]
        assert first.client.generation == 2


def test_directory_marked_unhealthy_is_refused_unless_allowed(daemon: Daemon, run: str, tmp_path: Path) -> None:
    with started(daemon, run) as first:
        first.take(3)
        folder = copied(daemon, run, 3, tmp_path / "three")
        (folder / "unhealthy.json").write_text('{"healthy": false}')
        with pytest.raises(Unhealthy, match="three"):
            first.restore(resume=folder)
        assert first.restore(resume=folder, allow_unhealthy=True).step == 3  # type: ignore[union-attr]


def test_directory_without_a_checkpoint_is_not_found(daemon: Daemon, run: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with started(daemon, run) as first:
        for path in (tmp_path, tmp_path / "absent", tmp_path / "file"):
            with pytest.raises(NotFound, match=r"manifest\.json"):
                first.restore(resume=path)


def test_an_adopted_checkpoint_is_refused_and_the_command_that_restores_it_is_named(
    daemon: Daemon, run: str, tmp_path: Path
) -> None:
    (tmp_path / "checkpoint-500").mkdir()
    (tmp_path / "checkpoint-500/model.bin").write_bytes(b"of another program")
    assert daemon.tierd("adopt", tmp_path / "checkpoint-500", "--run", run, "--step", "500").returncode == 0
    wait_until(lambda: daemon.steps("hot", run) == [500], "the adopted checkpoint")
    with started(daemon, run) as trainer:
        for resume in ("auto", daemon.folder(500, run=run)):
            with pytest.raises(Unsupported, match="adopted") as caught:
                trainer.restore(resume=resume)
            assert f"tierd restore --run {run} --step 500" in caught.value.hint


def test_damage_in_a_directory_is_corrupt_naming_the_file(daemon: Daemon, run: str, tmp_path: Path) -> None:
    with started(daemon, run) as first:
        first.take(3)
        folder = copied(daemon, run, 3, tmp_path / "three")
        (shard,) = folder.glob("*.safetensors")
        raw = bytearray(shard.read_bytes())
        raw[-1] ^= 1
        shard.write_bytes(raw)
        with pytest.raises(Corrupt, match=r"three.*crc64nvme") as caught:
            first.restore(resume=folder)
        assert "half changed" in caught.value.hint
        shard.unlink()
        os.mkfifo(shard)
        with pytest.raises(Corrupt, match="0 bytes, expected"):
            first.restore(resume=folder)
        shard.unlink()
        with pytest.raises(Corrupt, match=rf"open {shard.name} in .*three"):
            first.restore(resume=folder)
        before = len(os.listdir("/proc/self/fd"))
        with contextlib.suppress(Corrupt):
            first.restore(resume=folder)
        assert len(os.listdir("/proc/self/fd")) == before


# ── all ranks ──


@contextmanager
def two_ranks(daemon: Daemon, run: str) -> Generator[list[Trainer]]:
    with Trainer() as first, Trainer(seed=2) as second:
        for rank, trainer in enumerate((first, second)):
            trainer.begin("join", rank, 2, str(daemon.root / f"rendezvous-{first.pid}"))
        for trainer in (first, second):
            trainer.end()
        together([first, second], "connect", daemon.socket, run)
        yield [first, second]


def test_policy_of_rank_0_applies_to_all_ranks(daemon: Daemon, run: str) -> None:
    with two_ranks(daemon, run) as trainers:
        for _ in range(2):
            together(trainers, "train", 1)
            together(trainers, "durable")
        trainers[0].apply(_set_policy, "1")
        trainers[1].apply(_set_policy, "scratch")
        assert [found.step for found in together(trainers, "restore")] == [1, 1]
        trainers[0].apply(_set_policy, "nonsense")
        assert [type(error) for error in refusals(trainers, "restore")] == [BadConfig, BadConfig]


def test_path_that_one_rank_cannot_read_or_sees_differently_fails_on_all_ranks(
    daemon: Daemon, run: str, tmp_path: Path
) -> None:
    with two_ranks(daemon, run) as trainers:
        for _ in range(2):
            together(trainers, "train", 1)
            together(trainers, "durable")
        first, second = copied(daemon, run, 1, tmp_path / "first"), copied(daemon, run, 2, tmp_path / "second")
        assert [found.step for found in together(trainers, "restore", resume=first)] == [1, 1]
        assert [found.step for found in together(trainers, "restore", resume=second)] == [2, 2]

        trainers[0].apply(_change_directory, str(first))
        trainers[1].apply(_change_directory, str(second))
        errors = refusals(trainers, "restore", resume="/proc/self/cwd")
        assert [type(error) for error in errors] == [Mismatch, Mismatch]
        assert "another checkpoint here than on rank 0" in str(errors[0])
        trainers[1].apply(_change_directory, str(tmp_path))
        assert [type(error) for error in refusals(trainers, "restore", resume="/proc/self/cwd")] == [NotFound] * 2


# ── functions that run in a trainer ──


def _set_policy(training: Training, policy: str) -> None:
    os.environ["TIERD_RESUME"] = policy


def _change_directory(training: Training, path: str) -> None:
    os.chdir(path)
