"""A run that begins at a checkpoint of another run, whole or in part, and after that goes on with its own."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import tierd_client
import torch
import torch.distributed as dist
from tierd_client import BadConfig, NotFound, TargetNotEmpty, TierUnreachable, TrainingState
from tierd_client.restore import replica
from tierd_client.restore.resume import ResumePolicy, parse_resume
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support.daemon import Daemon
from tests.support.state import assert_same, commit, stage
from tests.support.trainer import Trainer, Training, joined, together
from tests.support.waiting import DEADLINE_S, wait_until


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """With the run `pretrain`: steps 1 to 3, of one rank."""
    with Daemon(tmp_path_factory.mktemp("daemon")) as daemon:
        with Trainer() as trainer:
            trainer.connect(daemon.socket, "pretrain")
            for _ in range(3):
                trainer.train(1)
                trainer.durable()
        yield daemon


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    return "".join(char if char.isalnum() else "-" for char in request.node.name)[:100]


@pytest.fixture(autouse=True)
def _no_policy_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIERD_RESUME", raising=False)


@pytest.mark.parametrize(
    ("resume", "policy"),
    [
        ("run:gpt-124m", ResumePolicy(mode="require", run="gpt-124m")),
        ("run:gpt@0", ResumePolicy(mode="require", run="gpt", step=0)),
        ("run:gpt@milestone:fork-b.2", ResumePolicy(mode="require", run="gpt", milestone="fork-b.2")),
        ("run:v1.2_x@18000", ResumePolicy(mode="require", run="v1.2_x", step=18000)),
    ],
)
def test_resume_accepts_another_run_with_or_without_a_step(resume: str, policy: ResumePolicy) -> None:
    assert parse_resume(resume, {}) == parse_resume(None, {"TIERD_RESUME": resume}) == policy


@pytest.mark.parametrize(
    "resume",
    [
        "run:",
        "run:@5",
        "run:a@",
        "run:a@latest",
        "run:a@-1",
        "run:a@5@6",
        "run:.hidden",
        "run:a b",
        "run:a@milestone:",
        "run:a@5@milestone:b",
    ],
)
def test_malformed_name_of_another_run_is_refused_and_the_form_is_shown(resume: str) -> None:
    with pytest.raises(BadConfig, match="run:NAME@STEP"):
        parse_resume(resume, {})


def test_run_begins_at_the_newest_or_a_named_step_of_another_and_records_its_parent(daemon: Daemon, run: str) -> None:
    for resume, step in (("run:pretrain", 3), ("run:pretrain@2", 2)):
        with Trainer(seed=2) as trainer:
            name = f"{run}-{step}"
            trainer.connect(daemon.socket, name)
            found = trainer.restore(resume=resume)
            assert (found.run, found.step, found.generation) == ("pretrain", step, 1)
            assert trainer.generation() == 1
            trainer.train(1)
            trainer.durable()
        (row,) = daemon.get(f"/api/v1/checkpoints?run={name}")
        manifest = daemon.get(f"/api/v1/checkpoints/{name}/{row['step']:012d}-g0001")["manifest"]
        assert manifest["parent"] == {"run": "pretrain", "step": step, "generation": 1}


def test_restore_of_another_run_is_whole_unless_a_part_is_asked_for(daemon: Daemon, run: str) -> None:
    with Trainer() as first, Trainer(seed=2) as second:
        first.connect(daemon.socket, f"{run}-first")
        second.connect(daemon.socket, f"{run}-second")
        for trainer in (first, second):
            trainer.restore(resume="run:pretrain@3")
        assert first.digest() == second.digest()
        assert first.train(2) == second.train(2)


def test_unknown_run_or_step_is_not_found_naming_what_exists(daemon: Daemon, run: str) -> None:
    with Trainer() as trainer:
        trainer.connect(daemon.socket, run)
        with pytest.raises(NotFound, match="any step of run pretrian") as caught:
            trainer.restore(resume="run:pretrian")
        assert "pretrain" in caught.value.hint
        with pytest.raises(NotFound, match="step 9 of run pretrain") as caught:
            trainer.restore(resume="run:pretrain@9")
        assert "3 (generation 1), 2 (generation 1)" in caught.value.hint
        with pytest.raises(NotFound, match="milestone best of run pretrain"):
            trainer.restore(resume="run:pretrain", milestone="best")
        with pytest.raises(BadConfig, match="it is this run"):
            trainer.restore(resume=f"run:{run}")


def head_of(classes: int) -> nn.ModuleDict:
    return nn.ModuleDict({"body": nn.Linear(4, 8), "head": nn.Linear(8, classes)})


def begin(training: Training, classes: int, run: str, resume: str, socket: str) -> tuple[Any, Any]:
    """The command of a fine-tuning: the same at each start. Returns what was found and the digest of the optimizer."""
    torch.manual_seed(classes)
    training.model = head_of(classes)
    training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-2)
    training.state = TrainingState(model=training.model, optimizer=training.optimizer, extra=training.extra)
    training.connect(socket, run)
    found = training.restore(resume=resume, only=["model"], strict=False)
    training.step = found.step if found and found.run == run else 0
    return found, [int(state["step"]) for state in training.optimizer.state.values()]


def weights(training: Training) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in training.model.state_dict().items()}


def fit(training: Training, steps: int) -> list[float]:
    losses: list[float] = []
    for _ in range(steps):
        body, head = training.model.children()
        loss = head(body(torch.randn(4, 4))).square().mean()
        training.optimizer.zero_grad()
        loss.backward()
        training.optimizer.step()
        training.step += 1
        losses.append(loss.item())
    return losses


def _save_pretrained(training: Training, socket: str, run: str) -> dict[str, torch.Tensor]:
    """One checkpoint of a model with ten classes."""
    training.model = head_of(10)
    training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-2)
    training.state = TrainingState(model=training.model, optimizer=training.optimizer)
    training.connect(socket, run)
    fit(training, 2)
    training.durable()
    return weights(training)


def test_killed_fine_tuning_goes_on_with_its_own_checkpoints_by_the_same_command(daemon: Daemon, run: str) -> None:
    """The filter applies to the other run only: after the kill, optimizer and generators continue exactly."""
    with Trainer() as source:
        saved = source.apply(_save_pretrained, daemon.socket, f"{run}-base")
    command = (3, run, f"run:{run}-base", daemon.socket)
    with Trainer() as undisturbed:
        undisturbed.apply(begin, 3, f"{run}-undisturbed", f"run:{run}-base", daemon.socket)
        expected = undisturbed.apply(fit, 6)
    with Trainer() as first:
        found, moments = first.apply(begin, *command)
        assert (found.run, found.step, moments) == (f"{run}-base", 2, [])
        assert found.report.mismatched.keys() == {"model.head.weight", "model.head.bias"}
        assert torch.equal(first.apply(weights)["body.weight"], saved["body.weight"])
        losses = first.apply(fit, 4)
        first.snapshot()
        first.apply(fit, 1)
        first.kill()
    with Trainer(seed=2) as second:
        found, moments = second.apply(begin, *command)
        assert (found.run, found.step, found.tier, moments) == (run, 4, "memory", [4] * 4)
        assert not found.report.mismatched
        assert losses + second.apply(fit, 2) == expected


def _restore_slowly(training: Training, folder: Path, run: str) -> tuple[str, int]:
    """Waits between the headers and the tensors, once, until the test has made the file `go`."""
    real = replica.read_headers

    def read_headers(files: Any) -> Any:
        headers = real(files)
        if not (folder / "begun").exists():
            (folder / "begun").touch()
            wait_until((folder / "go").exists, "the other run's snapshots")
        return headers

    replica.read_headers = read_headers  # this process ends with the test
    found = training.restore(resume=f"run:{run}")
    assert found is not None
    return found.tier, found.step


def test_memory_that_the_other_run_writes_into_meanwhile_is_not_restored(
    daemon: Daemon, run: str, tmp_path: Path
) -> None:
    """Its trainers train on, and use the slot again that is being read. The header says step 1, the tensors step 5."""
    with Trainer() as base, Trainer(seed=2) as fork:
        base.connect(daemon.socket, f"{run}-base")
        base.train(1)
        base.durable()
        fork.connect(daemon.socket, run)
        fork.begin("apply", _restore_slowly, tmp_path, f"{run}-base")
        wait_until((tmp_path / "begun").exists, "the headers")
        for _ in range(4):
            base.train(1)
            base.durable()
        (tmp_path / "go").touch()
        assert fork.end() == ("memory", 5)
        assert fork.digest() == base.digest()
        assert "corrupt" not in {failure["kind"] for failure in daemon.status()["failures"]}, "nothing is damaged"


def test_killed_before_its_first_snapshot_it_begins_at_the_other_run_again(daemon: Daemon, run: str) -> None:
    for _ in range(2):
        with Trainer(seed=2) as trainer:
            trainer.connect(daemon.socket, run)
            assert trainer.restore(resume="run:pretrain").run == "pretrain"
            trainer.train(1)
            trainer.kill()


def test_arguments_that_select_a_checkpoint_belong_to_the_other_run(daemon: Daemon, run: str) -> None:
    wait_until(lambda: "cold" in daemon.get("/api/v1/checkpoints?run=pretrain")[0]["tiers"], "the copy")
    with Trainer(seed=2) as trainer:
        trainer.connect(daemon.socket, run)
        for tier in ("hot", "cold"):
            found = trainer.restore(resume="run:pretrain", tier=tier)
            assert (found.run, found.step, found.tier) == ("pretrain", 3, tier)
        trainer.train(1)
        trainer.durable()
        assert trainer.restore(resume="run:pretrain", tier="cold", generation=1).run == run


def test_run_begins_at_another_runs_snapshot_in_memory_and_at_one_in_the_cold_tier_alone(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        with Trainer() as source, Trainer(seed=2) as trainer:
            source.connect(daemon.socket, "source")
            source.train(1)
            source.durable()
            digest = source.digest()
            wait_until(lambda: daemon.steps("cold") == [1], "the copy")
            trainer.connect(daemon.socket, "first")
            assert trainer.restore(resume="run:source").tier == "memory"
            assert trainer.digest() == digest
        daemon.kill()
        shutil.rmtree(daemon.hot / "source")
        daemon.start()
        with Trainer(seed=3) as trainer:
            trainer.connect(daemon.socket, "second")
            assert trainer.restore(resume="run:source").tier == "cold"
            assert trainer.digest() == digest


def test_damage_in_another_runs_replica_is_reported_and_the_next_one_is_read(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon, Trainer() as source, Trainer(seed=2) as trainer:
        source.connect(daemon.socket, "source")
        source.train(1)
        source.durable()
        digest = source.digest()
        wait_until(lambda: daemon.steps("cold") == [1], "the copy")
        source.close()
        daemon.kill()
        (shard,) = daemon.hot.glob("source/*/*.safetensors")
        raw = bytearray(shard.read_bytes())
        raw[-1] ^= 1
        shard.write_bytes(raw)
        daemon.start()
        trainer.connect(daemon.socket, "second")
        found = trainer.restore(resume="run:source")
        assert (found.run, found.tier) == ("source", "cold")
        assert trainer.digest() == digest
        wait_until(lambda: daemon.metric('tierd_verify_failures_total{tier="hot"}') == 1, "the report")
        trainer.train(1)
        trainer.durable()


def test_only_the_chunks_of_what_is_asked_for_are_fetched_and_no_partial_file_stays(tmp_path: Path) -> None:
    source, model = (nn.ModuleDict({"body": nn.Linear(64, 64), "head": nn.Linear(64, 4096)}) for _ in range(2))
    raw = stage(TrainingState(model=source, rng=False))
    commit(tmp_path / "cold", [raw], run="source", chunk_bytes=4096)
    with Daemon(tmp_path) as daemon:
        client = tierd_client.connect("run", socket=daemon.socket)
        found = client.restore(TrainingState(model=model), resume="run:source", only=["model.body"])
        assert found is not None
        assert found.tier == "cold"
        assert_same(model["body"].state_dict(), source["body"].state_dict())
        assert 0 < daemon.metric('tierd_bytes_total{direction="read",tier="cold"}') < len(raw) / 8
        wait_until(lambda: not [*daemon.hot.rglob("*.partial")], "the partial files to be deleted")
        client.close()


def test_own_checkpoints_that_may_exist_are_not_replaced_by_another_runs(tmp_path: Path) -> None:
    with Daemon(tmp_path, more="cold_list_interval_s = 0.1\n") as daemon:
        with Trainer() as source:
            source.connect(daemon.socket, "source")
            source.train(1)
            source.durable()
            wait_until(lambda: daemon.steps("cold") == [1], "the copy")
        with Trainer() as trainer:
            trainer.connect(daemon.socket, "run")
            daemon.cold.rename(tmp_path / "unmounted")
            wait_until(lambda: "tier_unreachable" in str(daemon.status()["halted"]), "the tier to be missed")
            with pytest.raises(TierUnreachable):
                trainer.restore(resume="run:source")


# ── several ranks ──


def _distribute(training: Training, own: int) -> None:
    training.extra["own"] = own


@pytest.mark.parametrize(
    ("saved", "then"), [(2, 1), *(pytest.param(*each, marks=pytest.mark.long) for each in ((1, 2), (2, 2)))]
)
def test_part_of_another_run_is_restored_on_another_number_of_ranks(
    daemon: Daemon, tmp_path: Path, saved: int, then: int
) -> None:
    base, run = f"base-{saved}-{then}", f"tune-{saved}-{then}"
    with joined(tmp_path, saved) as trainers:
        together(trainers, "connect", daemon.socket, base)
        together(trainers, "train", 2)
        for rank, trainer in enumerate(trainers):
            trainer.apply(_distribute, rank)
        together(trainers, "durable")
        expected = trainers[0].apply(weights)
    bare = {name.removeprefix("module."): tensor for name, tensor in expected.items()}
    with joined(tmp_path, then, seed=5) as trainers:
        together(trainers, "connect", daemon.socket, run)
        founds = together(trainers, "restore", resume=f"run:{base}", only=["model", "optimizer"])
        assert [(found.run, found.step) for found in founds] == [(base, 2)] * then
        for trainer, found in zip(trainers, founds, strict=True):
            assert "rng" in found.report.not_asked
            assert "optimizer.state.0.weight" in found.report.loaded
            for name, tensor in trainer.apply(weights).items():
                assert torch.equal(tensor, bare[name.removeprefix("module.")]), name
        together(trainers, "train", 1)
        together(trainers, "durable")
    with joined(tmp_path, then, seed=6) as trainers:
        together(trainers, "connect", daemon.socket, run)
        founds = together(trainers, "restore", resume=f"run:{base}", only=["model", "optimizer"])
        assert [(found.run, found.step) for found in founds] == [(run, 3)] * then
        assert all("rng" in found.report.loaded for found in founds)


def _shard(training: Training, rank: int, world_size: int, rendezvous: str, dtype: torch.dtype, seed: int) -> None:
    """Makes this process a rank of an FSDP2 training in this dtype."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    torch.manual_seed(seed)
    training.model = nn.Sequential(nn.Linear(16, 6), nn.Linear(6, 16)).to(dtype)
    fully_shard(training.model, mesh=init_device_mesh("cpu", (world_size,)))
    training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-2)
    training.state = TrainingState(model=training.model, optimizer=training.optimizer)


def _step(training: Training) -> None:
    weight = next(training.model.parameters())
    training.model(torch.randn(4, 16, dtype=weight.dtype)).square().mean().backward()
    training.optimizer.step()
    training.step += 1


def _gathered(training: Training) -> dict[str, torch.Tensor]:
    moments = {
        f"{name}.exp_avg": training.optimizer.state[parameter]["exp_avg"]
        for name, parameter in training.model.named_parameters()
    }
    tensors: dict[str, Any] = {**dict(training.model.named_parameters()), **moments}
    return {name: tensor.full_tensor().detach().clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize(("saved", "then"), [pytest.param(2, 1, marks=pytest.mark.long), (1, 2)])
def test_sharded_tensors_are_cast_on_another_number_of_ranks(
    daemon: Daemon, tmp_path: Path, saved: int, then: int
) -> None:
    base = f"sharded-{saved}"
    gathered: list[dict[str, torch.Tensor]] = []
    for world_size, dtype, run in ((saved, torch.float32, base), (then, torch.bfloat16, f"{base}-cast")):
        with ExitStack() as stack:
            trainers = [stack.enter_context(Trainer()) for _ in range(world_size)]
            for rank, trainer in enumerate(trainers):
                trainer.begin("apply", _shard, rank, world_size, str(tmp_path / run), dtype, world_size)
            for trainer in trainers:
                trainer.end()
            together(trainers, "connect", daemon.socket, run)
            if run == base:
                together(trainers, "apply", _step)
            else:
                founds = together(trainers, "restore", resume=f"run:{base}", only=["model", "optimizer"], cast=True)
                assert [found.report.cast["model.0.weight"] for found in founds] == ["F32 -> BF16"] * then
            gathered.append(together(trainers, "apply", _gathered)[0])
            together(trainers, "apply", _step)
            together(trainers, "durable")
            if run == base:
                gathered[0] = together(trainers, "apply", _gathered)[0]
    assert_same(gathered[1], {name: tensor.to(torch.bfloat16) for name, tensor in gathered[0].items()})


# ── a part of the own run ──


def test_part_of_the_own_run_is_restored_and_the_next_snapshot_is_whole(daemon: Daemon, run: str) -> None:
    with Trainer() as first:
        first.connect(daemon.socket, run)
        first.train(2)
        first.durable()
    with Trainer(seed=2) as second:
        second.connect(daemon.socket, run)
        with pytest.raises(BadConfig, match="only: 'modle' matches nothing"):
            second.restore(only=["modle"])
        second.train(1)
        with pytest.raises(TargetNotEmpty, match=r"restore\(\) was not called"):
            second.snapshot()
        found = second.restore(only=["model"])
        assert (found.run, found.step, len(found.report.loaded)) == (run, 2, 4)
        second.train(1)
        second.durable()
        digest = second.digest()
    with Trainer(seed=3) as third:
        third.connect(daemon.socket, run)
        assert third.restore().step == 3
        assert third.digest() == digest


# ── the summary ──


def test_summary_is_logged_once_and_a_typing_error_changes_nothing(
    daemon: Daemon, run: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = tierd_client.connect(run, socket=daemon.socket)
    try:
        training = Training(seed=4)
        before = training.digest()
        with pytest.raises(BadConfig, match="only: 'modle' matches nothing"):
            client.restore(training.state, resume="run:pretrain", only=["modle"], strict=False)
        with pytest.raises(BadConfig, match="restore with only="):
            client.restore(training.state, resume="run:pretrain", only=[3])  # pyright: ignore[reportArgumentType]
        assert training.digest() == before
        with caplog.at_level(logging.INFO, logger="tierd_client"):
            found = client.restore(training.state, resume="run:pretrain", only=["model"])
        assert found is not None
        messages = [record.message for record in caplog.records if "entries loaded" in record.message]
        assert messages == [f"tierd: restored pretrain/000000000003-g0001 from {found.tier}: {found.report}"]
        assert str(found.report).startswith("4 entries loaded (")
        client.snapshot(1, training.state).wait_persisted(DEADLINE_S)
    finally:
        client.close()
