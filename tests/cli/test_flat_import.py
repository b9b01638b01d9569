"""`tierd import` of a flat file: the training restores its bits, or one clear refusal and nothing in hot."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tierd_client
import torch
from safetensors.torch import load_file
from tierd_client import DictState

from tests.support.cli import House, flip_a_bit, make_checkpoint, make_house
from tests.support.daemon import Daemon
from tests.support.state import Training, assert_same, commit, of_bfloat16, stage
from tests.support.trainer import Trainer
from tierd.cli import import_
from tierd.format.flat_file import HEADER
from tierd.format.shard import read_header
from tierd.tiers.directory import DirectoryStore


@pytest.fixture
def house(tmp_path: Path) -> House:
    return make_house(tmp_path)


def exported(house: House, *, steps: int = 5) -> tuple[Training, Path]:
    """A training with a checkpoint of step 5 in hot, and its flat file."""
    training = Training.fresh()
    training.train(steps)
    commit(house.hot, [stage(training.state())])
    path = house.root / "step.bin"
    assert house.tierd("export", "--format", "flat", "--to", path).exit_code == 0
    return training, path


def edited(path: Path, *, step: int | None = None, count: int | None = None, factor: float = 1.0) -> Path:
    """Another flat file: with another header, and all arrays times a factor."""
    raw = path.read_bytes()
    old_step, old_count = HEADER.unpack_from(raw)
    arrays = np.frombuffer(raw, "<f4", offset=HEADER.size) * np.float32(factor)
    header = struct.pack("<ii", old_step if step is None else step, old_count if count is None else count)
    path.write_bytes(header + arrays.tobytes())
    return path


def assert_refused(house: House, path: Path, code: int, message: str, *more: str) -> None:
    result = house.tierd("import", path, "--run", "new", "--like", "run/5", *more)
    assert result.exit_code == code, result.output
    assert message in result.stderr
    assert not (house.hot / "new").exists()


def test_a_training_restores_the_bits_of_a_flat_file_and_goes_on_as_before(tmp_path: Path) -> None:
    with Daemon(tmp_path / "house") as daemon:
        torch.manual_seed(3)
        first = Training.fresh()
        first.train(4)
        with tierd_client.connect("run", socket=daemon.socket) as client:
            client.snapshot(4, first.state()).wait_persisted(timeout_s=60)
        assert daemon.tierd("export", "--format", "flat", "--to", tmp_path / "step.bin").returncode == 0
        more = ("--run", "new", "--like", "run/4")
        imported = daemon.json("import", tmp_path / "step.bin", *more)
        assert (imported["step"], imported["generation"], imported["sequence"]) == (4, 1, 1)
        assert (imported["format"], imported["is_new"]) == ("flat", True)
        assert daemon.tierd("verify", "--run", "new", "--deep").returncode == 0

        losses = first.train(3)
        second = Training.fresh(seed=9)
        with tierd_client.connect("new", socket=daemon.socket) as client:
            assert client.generation == 2
            found = client.restore(second.state())
            assert found is not None
            assert (found.step, found.tier) == (4, "hot")
            assert second.train(3) == losses
            client.snapshot(7, second.state()).wait_persisted(timeout_s=60)
        assert_same(second.model.state_dict(), first.model.state_dict())
        assert_same(second.optimizer.state_dict(), first.optimizer.state_dict())
        assert daemon.json("show", "new", "4")["manifest"]["kind"] == "snapshot"


def test_weights_m_v_and_the_step_come_from_the_file_and_the_rest_from_the_checkpoint(house: House) -> None:
    training, path = exported(house)
    edited(path, step=8, factor=2.0)
    result = house.tierd("import", path, "--run", "run", "--like", "latest")
    assert result.exit_code == 0, result.output
    assert "from run/000000000005-g0001, not from the file: " in result.stderr
    assert "ema" in result.stderr

    again = house.root / "again.bin"
    assert house.tierd("export", "--format", "flat", "--step", "8", "--to", again).exit_code == 0
    assert again.read_bytes() == path.read_bytes()
    assert house.tierd("restore", "--step", "8", "--to", house.root / "back").exit_code == 0
    shard, before = load_file(next((house.root / "back").glob("*.safetensors"))), training.model.state_dict()
    assert torch.equal(shard["model.0.weight"], 2 * before["0.weight"])
    assert torch.equal(shard["model.1.running_mean"], before["1.running_mean"])
    assert shard["optimizer.state.0.weight.step"].item() == 8, "Adam's bias correction goes on from the file's step"


def test_a_checkpoint_of_two_ranks_gives_names_and_shapes_too(house: House) -> None:
    training = Training.fresh()
    training.train(2)
    raws = [stage(training.state(), rank=rank, world_size=2) for rank in range(2)]
    commit(house.hot, raws)
    path = house.root / "step.bin"
    assert house.tierd("export", "--format", "flat", "--to", path).exit_code == 0
    assert house.json("import", path, "--run", "new", "--like", "run/5")["size_bytes"] > 0
    folder = next((house.hot / "new").iterdir())
    for rank in range(2):
        raw = (folder / f"rank-{rank:05d}-of-00002.safetensors").read_bytes()
        shard = read_header(lambda length, at, raw=raw: raw[at : at + length], len(raw), where="shard")
        assert (shard.tierd["rank"], shard.tierd["run"], shard.tierd["world_size"]) == (rank, "new", 2)
        assert bool(shard.tensors) == (rank == 0)
    again = house.root / "again.bin"
    assert house.tierd("export", "--run", "new", "--format", "flat", "--to", again).exit_code == 0
    assert again.read_bytes() == path.read_bytes()


def test_importing_again_does_nothing_and_other_bytes_under_the_step_are_refused(house: House) -> None:
    _, path = exported(house)
    more = ("--run", "new", "--like", "run/5")
    assert house.json("import", path, *more, "--dry-run")["is_dry_run"]
    assert not (house.hot / "new").exists()
    assert house.json("import", path, *more)["is_new"]
    assert house.json("import", path, *more)["is_new"] is False
    assert house.tierd("import", edited(path, factor=3.0), *more).exit_code == 15
    assert house.json("import", path, *more, "--generation", "2")["sequence"] == 2


def test_a_file_that_is_not_whole_is_refused(house: House) -> None:
    _, path = exported(house)
    raw = path.read_bytes()
    path.write_bytes(raw[:-4])
    assert_refused(house, path, 12, "its header says")
    path.write_bytes(raw + b"\0")
    assert_refused(house, path, 12, "its header says")
    path.write_bytes(raw[:5])
    assert_refused(house, path, 12, "less than the header")
    assert_refused(house, house.root / "absent.bin", 10, "No such file")
    os.mkfifo(house.root / "pipe")
    assert_refused(house, house.root / "pipe", 2, "not a regular file")


def test_2_to_the_31_parameters_and_another_number_of_them_are_refused(house: House) -> None:
    _, path = exported(house)
    _, count = HEADER.unpack_from(path.read_bytes())
    arrays = path.read_bytes()[HEADER.size :]
    path.write_bytes(struct.pack("<iI", 5, 1 << 31) + arrays)
    assert_refused(house, path, 12, "a flat file has at most 2147483647")
    path.write_bytes(HEADER.pack(5, count - 1) + arrays[:-12])
    assert_refused(house, path, 2, f"it has {count - 1} parameters, and the checkpoint that --like names has {count}")
    path.write_bytes(HEADER.pack(5, count) + arrays)
    assert_refused(house, path, 2, "it is of step 5", "--step", "6")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            lambda: stage(of_bfloat16()),
            "model.weight is BF16 in the checkpoint that --like names; a flat file holds float32 only",
        ),
        (lambda: stage(DictState({"model": {"weight": torch.ones(3)}})), "it has no optimizer"),
    ],
)
def test_a_checkpoint_that_cannot_be_the_pattern_is_refused_by_name(
    house: House, template: Callable[[], bytes], message: str
) -> None:
    commit(house.hot, [template()])
    path = house.root / "step.bin"
    path.write_bytes(HEADER.pack(5, 8) + bytes(96))
    assert_refused(house, path, 2, message)


def test_adams_count_that_does_not_follow_from_the_step_is_refused(house: House) -> None:
    _, path = exported(house, steps=3)  # of step 5, as a training that accumulates gradients
    edited(path, step=8)
    assert_refused(house, path, 2, "its optimizer has counted 3 steps of 0.weight")
    edited(path, step=5)
    assert house.tierd("import", path, "--run", "new", "--like", "run/5").exit_code == 0


def test_a_damaged_checkpoint_is_no_pattern_and_a_run_of_another_program_no_target(house: House) -> None:
    _, path = exported(house)
    make_checkpoint(house.cold, run="hf", step=100, kind="adopted")
    result = house.tierd("import", path, "--run", "hf", "--like", "run/5")
    assert result.exit_code == 2
    assert "another program writes that run" in result.stderr
    flip_a_bit(next((house.hot / "run").rglob("*.safetensors")))
    assert_refused(house, path, 12, "crc64nvme")
    assert not list(house.root.rglob("*.partial"))


def test_a_run_whose_training_runs_is_refused(tmp_path: Path) -> None:
    with Daemon(tmp_path / "house") as daemon, Trainer() as trainer:
        trainer.connect(daemon.socket)
        trainer.train(2)
        trainer.durable()
        assert daemon.tierd("export", "--format", "flat", "--to", tmp_path / "step.bin").returncode == 0
        done = daemon.tierd("import", tmp_path / "step.bin", "--run", "run", "--like", "latest")
    assert done.returncode == 2, done.stderr
    assert "its training runs, 1 ranks are attached" in done.stderr


def test_what_does_not_read_back_is_not_committed(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a disk that writes other bytes."""
    _, path = exported(house)
    put = DirectoryStore.put

    async def put_and_damage(self: DirectoryStore, key: str, *arguments: object, **options: object) -> object:
        entry = await put(self, key, *arguments, **options)  # pyright: ignore[reportArgumentType]
        flip_a_bit(self.root / key)
        return entry

    monkeypatch.setattr(DirectoryStore, "put", put_and_damage)
    assert_refused(house, path, 12, "what was written does not read back")


def test_a_file_that_is_written_meanwhile_is_refused(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    _, path = exported(house)
    verify_files = import_.verify_files

    async def verify_late(*arguments: object, **options: object) -> object:
        os.utime(path, ns=(1, 1))
        return await verify_files(*arguments, **options)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(import_, "verify_files", verify_late)
    assert_refused(house, path, 1, "it was written meanwhile")
