"""`tierd import` of files of torch.save: the same bits come back, and code in a file is never run."""

from __future__ import annotations

import io
import os
import random
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tierd_client
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from tierd_client import DictState, TrainingState
from tierd_client.state.training_state import architecture_of

from tests.support.cli import House, assert_import_refused, make_house
from tests.support.daemon import Daemon
from tests.support.small_disk import small_disk
from tests.support.state import Training, assert_same
from tierd.cli import import_


@pytest.fixture
def house(tmp_path: Path, forked_python: None) -> House:
    return make_house(tmp_path)


class Payload:
    """Its pickle makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mknod, (str(self.path),)


def saved(path: Path, value: object, **options: Any) -> Path:
    torch.save(value, path, **options)
    return path


def training_file(path: Path, training: Training) -> dict[str, Any]:
    """As a training loop writes it."""
    checkpoint = {
        "model": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "scheduler": training.scheduler.state_dict(),
        "rng": {"python": random.getstate(), "torch": torch.get_rng_state()},
        "step": 5,
        "best": float("inf"),
        "large": 1 << 90,
        "names": ("a", "b"),
    }
    saved(path, checkpoint)
    return checkpoint


def strange_tensors() -> dict[str, torch.Tensor]:
    whole = torch.arange(24.0).reshape(4, 6)
    tied = torch.randn(5)
    return {
        "transposed": whole.t(),
        "slice": whole[1:3, ::2],
        "tied": tied,
        "tied again": tied,
        "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
        "complex128": torch.randn(2, 2, dtype=torch.complex128),
        "float8": torch.arange(200, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "scale": torch.arange(4, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "nan": torch.tensor([0x7F800001, 0x7FC00005], dtype=torch.int32).view(torch.float32),
        "empty": torch.empty(0, 7),
        "scalar": torch.tensor(3),
        "wide": torch.tensor([1 << 63], dtype=torch.uint64),
    }


def exported(house: House, run: str = "new") -> Any:
    target = house.root / f"{run}.pt"
    assert house.tierd("export", "--run", run, "--format", "torch", "--to", target).exit_code == 0
    return torch.load(target, weights_only=True)


def test_a_training_restores_the_bits_of_its_file_and_export_gives_them_back(tmp_path: Path) -> None:
    """With new Pythons for torch, as a user has them."""
    training = Training.fresh()
    training.train(5)
    checkpoint = training_file(tmp_path / "step5.pt", training)
    with Daemon(tmp_path / "house") as daemon:
        imported = daemon.json("import", tmp_path / "step5.pt", "--run", "new", "--step", "5")
        assert (imported["format"], imported["step"], imported["is_new"]) == ("torch", 5, True)
        assert daemon.tierd("verify", "--run", "new", "--deep").returncode == 0
        values: dict[str, Any] = {}
        with tierd_client.connect("new", socket=daemon.socket) as client:
            found = client.restore(DictState(values))
        assert found is not None
        assert found.step == 5
        assert_same(values, checkpoint)
        assert type(values["optimizer"]["param_groups"][0]["betas"]) is tuple
        assert daemon.tierd("export", "--format", "torch", "--to", tmp_path / "back.pt").returncode == 0
        assert_same(torch.load(tmp_path / "back.pt", weights_only=True), checkpoint)

    fresh = Training.fresh(seed=4)
    fresh.model.load_state_dict(values["model"])
    fresh.optimizer.load_state_dict(values["optimizer"])
    fresh.scheduler.load_state_dict(values["scheduler"])
    torch.set_rng_state(values["rng"]["torch"])
    losses = fresh.train(3)
    torch.set_rng_state(checkpoint["rng"]["torch"])
    assert training.train(3) == losses


@pytest.mark.usefixtures("forked_python")
def test_the_entry_that_model_names_is_restored_into_a_module(tmp_path: Path) -> None:
    training = Training.fresh()
    training.train(2)
    ddp = OrderedDict((f"module.{name}", value) for name, value in training.model.state_dict().items())
    saved(tmp_path / "step.pt", {"net": ddp, "epoch": 7})
    fresh, extra = Training.fresh(seed=5), {"epoch": 0}
    with Daemon(tmp_path / "house") as daemon:
        daemon.json("import", tmp_path / "step.pt", "--run", "new", "--step", "2", "--model", "net")
        state = TrainingState(model=fresh.model, extra=extra)
        with tierd_client.connect("new", socket=daemon.socket) as client:
            assert client.restore(state) is not None
        manifest = daemon.json("show", "new", "2")["manifest"]
        assert manifest["architecture_hash"] == architecture_of(state.capture(0, 1))
    assert_same(fresh.model.state_dict(), training.model.state_dict())
    assert extra == {"epoch": 7}


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_state_dict_is_a_model_whatever_strides_and_dtypes_it_has(house: House, *, is_zip: bool) -> None:
    tensors = strange_tensors()
    if not is_zip:  # the format of torch before 1.6 has no such dtypes
        tensors = {name: each for name, each in tensors.items() if name not in ("float8", "scale", "wide")}
    path = saved(house.root / "model.bin", tensors, _use_new_zipfile_serialization=is_zip)
    house.json("import", path, "--run", "new", "--step", "3")
    assert_same(exported(house)["model"], {name: each.resolve_conj() for name, each in tensors.items()})
    back = house.root / "back"
    assert house.tierd("export", "--format", "safetensors", "--prefix", "model.", "--to", back).exit_code == 0
    assert torch.equal(load_file(back / "model.safetensors")["transposed"], tensors["transposed"])


def test_keys_with_dots_come_back_as_they_were(house: House) -> None:
    values = {"a.b": torch.ones(2), "a": {"b": torch.zeros(3)}, "extra.lr": 0.1, "extra": {"lr": 0.2}}
    house.json("import", saved(house.root / "step.pt", values), "--run", "new", "--step", "3")
    back = exported(house)
    assert list(back) == list(values)
    for key, value in values.items():
        assert_same(back[key], value)


def test_importing_again_does_nothing_and_other_bytes_under_the_step_are_refused(house: House) -> None:
    path = saved(house.root / "step.pt", {"weight": torch.ones(3), "epoch": 1})
    more = ("--run", "new", "--step", "3")
    assert "DictState restores it; --model KEY" in house.tierd("import", path, *more, "--dry-run").stderr
    assert house.json("import", path, *more, "--dry-run")["is_dry_run"]
    assert not (house.hot / "new").exists()
    assert house.json("import", path, *more)["is_new"]
    assert house.json("import", path, *more)["is_new"] is False
    saved(path, {"weight": torch.zeros(3), "epoch": 1})
    assert house.tierd("import", path, *more).exit_code == 15
    assert house.json("import", path, *more, "--generation", "2")["sequence"] == 2


@pytest.mark.parametrize("is_zip", [True, False])
def test_code_in_a_file_is_named_and_never_run(house: House, *, is_zip: bool) -> None:
    made = house.root / "made"
    value = {"weight": torch.ones(3), "hook": Payload(made)}
    path = saved(house.root / "step.pt", value, _use_new_zipfile_serialization=is_zip)
    assert_import_refused(
        house, path, 2, "its pickle names posix.mknod, and torch.load(weights_only=True) refuses that"
    )
    assert not made.exists()
    torch.load(path, weights_only=False)
    assert made.exists(), "the file would have run its code"


@pytest.mark.parametrize("value", [torch.nn.Linear(2, 2), {"args": Path("x")}, {"rng": np.random.get_state()}])
def test_objects_of_classes_are_refused_by_name(house: House, value: object) -> None:
    stderr = assert_import_refused(house, saved(house.root / "step.pt", value), 2, "its pickle names ")
    assert any(name in stderr for name in ("torch.nn.modules.linear.Linear", "pathlib.", "numpy."))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([torch.ones(2)], "it holds a list, and no dict"),
        ({}, "it holds an empty dict"),
        ({1: torch.ones(2)}, "its key 1 is no string"),
        ({0: torch.ones(2)}, "its key 0 is no string"),
        ({"a": {"b": torch.eye(3).to_sparse()}}, "a.b"),
        ({"a": torch.empty(4, dtype=torch.bits8)}, "safetensors has no dtype for torch.bits8"),
        ({"a": torch.ones(1).expand(5), "b": 1}, "a: several elements share one memory location"),
        ({"a": torch.empty(2, device="meta")}, "a meta tensor has no bytes"),
    ],
)
def test_what_a_snapshot_refuses_is_refused_by_name(house: House, value: object, message: str) -> None:
    assert_import_refused(house, saved(house.root / "step.pt", value), 2, message)


def test_a_key_that_is_no_model_is_refused(house: House) -> None:
    path = saved(house.root / "step.pt", {"model": {"weight": torch.ones(3)}, "epoch": 1})
    assert_import_refused(house, path, 10, "it has no key 'net'", "--model", "net")
    assert_import_refused(house, path, 2, "its entry 'epoch' is no state dict of a model", "--model", "epoch")
    assert_import_refused(house, path, 10, "there is none", "--model", "model", "--like", "run/5")
    result = house.tierd("import", path, "--run", "new")
    assert (result.exit_code, "does not say its step" in result.stderr) == (2, True), result.output


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_torn_file_is_refused(house: House, *, is_zip: bool) -> None:
    path = saved(house.root / "step.pt", {"weight": torch.ones(3000)}, _use_new_zipfile_serialization=is_zip)
    raw = path.read_bytes()
    for length in (0, 3, len(raw) // 2, len(raw) - 1):
        path.write_bytes(raw[:length])
        result = house.tierd("import", path, "--run", "new", "--step", "3")
        assert result.exit_code in ((12,) if is_zip else (2, 12)), (length, result.output)
        assert len(result.stderr.splitlines()) <= 2
        assert not (house.hot / "new").exists()


def test_a_flipped_bit_in_a_tensor_is_refused(house: House) -> None:
    """torch itself would load the other value."""
    path = saved(house.root / "step.pt", {"weight": torch.ones(3000)})
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    assert not torch.equal(torch.load(path, weights_only=True)["weight"], torch.ones(3000))
    assert_import_refused(house, path, 12, "data/0 does not have its checksum")


def packed_again(path: Path, compression: int, *, cut: bool = False) -> Path:
    """The same archive by another program; `cut`: the first storage lacks its end."""
    with zipfile.ZipFile(path) as archive:
        entries = {info: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for info, content in entries.items():
            archive.writestr(info.filename, content[:40] if cut and info.filename.endswith("data/0") else content)
    return path


def test_storages_that_are_compressed_or_cut_in_an_archive_are_refused(house: House) -> None:
    """torch maps the file: it would take the compressed bytes, or what follows, for values."""
    value = {"weight": torch.arange(100.0), "bias": torch.ones(3)}
    path = saved(house.root / "step.pt", value)
    assert_import_refused(house, packed_again(path, zipfile.ZIP_DEFLATED), 2, "its entries are compressed")
    assert_import_refused(
        house, packed_again(saved(path, value), zipfile.ZIP_STORED, cut=True), 12, "weight: its storage"
    )
    house.json("import", packed_again(saved(path, value), zipfile.ZIP_STORED), "--run", "new", "--step", "3")
    assert_same(exported(house)["model"], value)


def test_an_archive_with_two_entries_of_one_name_is_refused(house: House) -> None:
    path = saved(house.root / "step.pt", {"weight": torch.ones(2)})
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr(next(name for name in archive.namelist() if name.endswith("data/0")), bytes(8))
    assert_import_refused(house, path, 12, "two entries of the archive have one name")


def test_an_archive_of_another_program_is_refused(house: House) -> None:
    with zipfile.ZipFile(house.root / "other.pt", "w") as archive:
        archive.writestr("notes.txt", "hello")
    assert_import_refused(house, house.root / "other.pt", 12, "torch cannot read it")
    buffer = io.BytesIO()
    torch.save({"weight": torch.ones(3)}, buffer, pickle_protocol=4)
    (house.root / "step.pt").write_bytes(buffer.getvalue())
    assert_import_refused(house, house.root / "step.pt", 2, "Unsupported operand")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_of_torch_distributed_checkpoint_is_refused_with_what_to_do(house: House) -> None:
    folder = house.root / "step-3"
    dcp.save({"weight": torch.ones(3)}, checkpoint_id=folder, no_dist=True)
    assert "dcp_to_torch FOLDER FILE.pt" in assert_import_refused(house, folder, 2, "torch.distributed.checkpoint")


@pytest.mark.usefixtures("forked_python")
def test_without_room_nothing_is_left(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_mib=12) as disk:
        house = make_house(disk)
        path = saved(tmp_path / "step.pt", {"weight": torch.ones(2 << 20)})
        assert_import_refused(house, path, 16, "bytes are needed")
        assert not list(disk.rglob("*.partial"))


def test_a_file_that_is_written_meanwhile_is_refused(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(house.root / "step.pt", {"weight": torch.ones(3)})
    verify_files = import_.verify_files

    async def verify_late(*arguments: object, **options: object) -> object:
        os.utime(path, ns=(1, 1))
        return await verify_files(*arguments, **options)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(import_, "verify_files", verify_late)
    assert_import_refused(house, path, 1, "it was written meanwhile")
