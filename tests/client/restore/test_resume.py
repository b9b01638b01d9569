"""Where a training begins: what `resume` says, and that nothing ever begins from step 0 in silence."""

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
)
from tierd_client.restore.resume import Policy, parse

from tests.support.daemon import Daemon
from tests.support.trainer import Trainer, Training, refusals, together
from tests.support.waiting import DEADLINE_S, wait_until


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One for all tests that do it no harm: each takes a run of its own."""
    with Daemon(tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    return "".join(one if one.isalnum() else "-" for one in request.node.name)[:100]


@pytest.fixture(autouse=True)
def _no_policy_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIERD_RESUME", raising=False)


class Start:
    """One start of a training whose state is a number."""

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


# ── what it says ──


@pytest.mark.parametrize(
    ("resume", "policy"),
    [
        ("auto", Policy(word="auto")),
        ("scratch", Policy(word="scratch")),
        ("require", Policy(word="require")),
        (0, Policy(word="require", step=0)),
        (18000, Policy(word="require", step=18000)),
        ("18000", Policy(word="require", step=18000)),
        ("/a/b", Policy(word="require", path="/a/b")),
        (Path("500"), Policy(word="require", path=f"{os.getcwd()}/500")),
        ("./500", Policy(word="require", path=f"{os.getcwd()}/500")),
        (".", Policy(word="require", path=os.getcwd())),
    ],
)
def test_word_step_or_path_as_argument_or_in_the_environment(resume: Any, policy: Policy) -> None:
    assert parse(resume, {"TIERD_RESUME": "scratch"}) == policy
    if not isinstance(resume, Path):
        assert parse(None, {"TIERD_RESUME": str(resume)}) == policy


def test_nothing_said_is_auto() -> None:
    assert parse(None, {}) == parse(None, {"TIERD_RESUME": ""}) == Policy(word="auto")


@pytest.mark.parametrize("resume", ["latest", "", "Auto", "-1", "1.5", "²", -1, True, 1.5, b"/a", ["auto"]])
def test_anything_else_is_bad_and_the_choices_are_listed(resume: Any) -> None:
    with pytest.raises(BadConfig, match='"auto", "scratch", "require", a step, or the path'):
        parse(resume, {})


# ── auto, require ──


def test_auto_starts_fresh_where_there_is_nothing_and_require_refuses(daemon: Daemon, run: str) -> None:
    with started(daemon, run) as first:
        with pytest.raises(NotFound):
            first.restore(resume="require")
        assert first.restore(resume="auto") is None
        assert first.restore() is None
        first.take(1, 2)
    with started(daemon, run) as second:
        assert second.restore(resume="require").step == 2  # type: ignore[union-attr]


def test_launcher_sets_the_policy_and_an_argument_overrules_it(
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


def test_step_that_is_not_there_is_never_a_fresh_start(daemon: Daemon, run: str) -> None:
    with started(daemon, run) as first:
        first.take(1)
        with pytest.raises(NotFound, match="step 7"):
            first.restore(resume=7)


def test_newest_of_a_later_tierd_is_refused_until_a_step_is_named(tmp_path: Path) -> None:
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


def test_scratch_refuses_where_checkpoints_are_and_forced_it_leaves_them_restorable(daemon: Daemon, run: str) -> None:
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


def test_scratch_refuses_what_is_only_in_a_cold_tier_and_fetches_nothing(tmp_path: Path) -> None:
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


def test_scratch_refuses_where_a_tier_cannot_be_listed(tmp_path: Path) -> None:
    """Nothing is known of the run but that it was started before: what it left in cold, nobody can say now."""
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


def test_a_new_run_begins_while_a_tier_is_away_only_where_the_environment_says_scratch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what the run turns out to have there is the older timeline."""
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
def test_what_chooses_among_checkpoints_of_the_run_goes_with_neither_scratch_nor_a_path(
    daemon: Daemon, run: str, resume: str, which: dict[str, Any]
) -> None:
    with started(daemon, run) as first, pytest.raises(BadConfig, match="choose among the checkpoints of the run"):
        first.restore(resume=resume, **which)


# ── a path ──


def copied(daemon: Daemon, run: str, step: int, to: Path) -> Path:
    done = daemon.tierd("restore", "--run", run, "--step", step, "--to", to)
    assert done.returncode == 0, done.stderr
    return to


def test_restored_directory_of_another_run_begins_a_fork_of_it(daemon: Daemon, run: str, tmp_path: Path) -> None:
    with started(daemon, run) as first:
        first.take(3, 4)
    folder = copied(daemon, run, 3, tmp_path / "three")
    with started(daemon, f"{run}-fork") as fork:
        found = fork.restore(resume=folder)
        assert (found.step, found.generation, found.tier) == (3, 1, str(folder))  # type: ignore[union-attr]
        fork.take(4)
    assert parent(daemon, f"{run}-fork", "000000000004-g0001") == {"run": run, "step": 3, "generation": 1}


def test_folder_of_a_tier_is_a_path_too(daemon: Daemon, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with started(daemon, run) as first:
        first.take(3)
        monkeypatch.chdir(daemon.folder(3, run=run))
        assert first.restore(resume=".").step == 3  # type: ignore[union-attr]
        assert first.client.generation == 2


def test_directory_that_holds_nan_is_refused_unless_it_is_meant(daemon: Daemon, run: str, tmp_path: Path) -> None:
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


def test_rank_0_says_where_all_begin(daemon: Daemon, run: str) -> None:
    with two_ranks(daemon, run) as trainers:
        for _ in range(2):
            together(trainers, "train", 1)
            together(trainers, "durable")
        trainers[0].apply(_say, "1")
        trainers[1].apply(_say, "scratch")
        assert [one.step for one in together(trainers, "restore")] == [1, 1]
        trainers[0].apply(_say, "nonsense")
        assert [type(error) for error in refusals(trainers, "restore")] == [BadConfig, BadConfig]


def test_path_that_one_rank_cannot_read_or_sees_otherwise_is_an_error_of_all(
    daemon: Daemon, run: str, tmp_path: Path
) -> None:
    with two_ranks(daemon, run) as trainers:
        for _ in range(2):
            together(trainers, "train", 1)
            together(trainers, "durable")
        one, two = copied(daemon, run, 1, tmp_path / "one"), copied(daemon, run, 2, tmp_path / "two")
        assert [found.step for found in together(trainers, "restore", resume=one)] == [1, 1]
        assert [found.step for found in together(trainers, "restore", resume=two)] == [2, 2]

        trainers[0].apply(_go_to, str(one))
        trainers[1].apply(_go_to, str(two))
        found = refusals(trainers, "restore", resume="/proc/self/cwd")
        assert [type(error) for error in found] == [Mismatch, Mismatch]
        assert "another checkpoint than rank 0" in str(found[0])
        trainers[1].apply(_go_to, str(tmp_path))
        assert [type(error) for error in refusals(trainers, "restore", resume="/proc/self/cwd")] == [NotFound] * 2


# ── what runs in a trainer ──


def _say(training: Training, policy: str) -> None:
    os.environ["TIERD_RESUME"] = policy


def _go_to(training: Training, path: str) -> None:
    os.chdir(path)
