"""`tierd import` of safetensors files: the training restores their bits, or one clear refusal and nothing in hot."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tierd_client
import torch
from safetensors.torch import load_file, save_file
from tierd_client import TrainingState
from tierd_client.state.training_state import architecture_of

from tests.support.cli import House, assert_import_refused, make_house
from tests.support.daemon import Daemon
from tests.support.state import assert_same
from tierd.cli import import_


@pytest.fixture
def house(tmp_path: Path) -> House:
    return make_house(tmp_path)


def every_dtype() -> dict[str, torch.Tensor]:
    """Also an empty tensor, a scalar, and NaN with a payload."""
    torch.manual_seed(1)
    raw = torch.randint(0, 256, (4, 24), dtype=torch.uint8)
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
    integers = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32)
    tensors = {f"each.{dtype}": raw.view(dtype).clone() for dtype in (*floats, *integers)}
    return tensors | {"flag": torch.tensor([True, False]), "scalar": torch.tensor(2.5), "empty": torch.empty(0, 3)}


def folder_of(house: House, run: str = "new") -> Path:
    return next(path for path in (house.hot / run).iterdir() if path.is_dir())


def write(path: Path, table: Mapping[str, Any], content: bytes = b"") -> Path:
    """A file with this header."""
    body = json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(body)) + body + content)
    return path


def test_export_gives_back_the_tensors_of_a_file_of_every_dtype(house: House) -> None:
    save_file(every_dtype(), house.root / "model.safetensors", metadata={"format": "pt"})
    imported = house.json("import", house.root / "model.safetensors", "--run", "new", "--step", "3")
    assert (imported["format"], imported["step"], imported["is_new"]) == ("safetensors", 3, True)
    assert house.json("show", "new", "3")["manifest"]["versions"]["imported_from"] == "safetensors"
    assert house.tierd("verify", "--run", "new", "--deep").exit_code == 0
    back = house.root / "back"
    assert house.tierd("export", "--format", "safetensors", "--prefix", "model.", "--to", back).exit_code == 0
    assert_same(load_file(back / "model.safetensors"), every_dtype())
    again = house.json("import", back, "--run", "again", "--step", "3")
    assert again["size_bytes"] == imported["size_bytes"]


def test_a_model_restores_the_bits_of_a_file(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with Daemon(tmp_path / "house") as daemon:
        daemon.json("import", tmp_path / "model.safetensors", "--run", "new", "--step", "3")
        torch.manual_seed(8)
        fresh = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
        state = TrainingState(model=fresh)
        with tierd_client.connect("new", socket=daemon.socket) as client:
            found = client.restore(state)
        assert found is not None
        assert found.step == 3
        assert_same(fresh.state_dict(), model.state_dict())
        tuned = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
        with tierd_client.connect("tuned", socket=daemon.socket) as client:
            given = TrainingState(model=tuned, optimizer=torch.optim.AdamW(tuned.parameters()))
            assert client.restore(given, resume="run:new@3", only=["model"]) is not None
        assert_same(tuned.state_dict(), model.state_dict())
        manifest = daemon.json("show", "new", "3")["manifest"]
        assert manifest["architecture_hash"] == architecture_of(state.capture(0, 1))


def test_a_folder_with_an_index_is_one_model(house: House) -> None:
    folder = house.root / "model"
    folder.mkdir()
    tensors = every_dtype()
    parts = {"a.safetensors": dict(list(tensors.items())[:5]), "b.safetensors": dict(list(tensors.items())[5:])}
    for name, part in parts.items():
        save_file(part, folder / name)
    save_file({"scalar": torch.zeros(9)}, folder / "consolidated.safetensors")  # the index does not name it
    index = {"metadata": {}, "weight_map": {tensor: name for name, part in parts.items() for tensor in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    house.json("import", folder, "--run", "new", "--step", "3")
    back = house.root / "back"
    assert house.tierd("export", "--format", "safetensors", "--prefix", "model.", "--to", back).exit_code == 0
    assert_same(load_file(back / "model.safetensors"), tensors)

    (folder / "b.safetensors").rename(folder / "c.safetensors")
    assert house.tierd("import", folder, "--run", "other", "--step", "3").exit_code == 10
    index["weight_map"]["flag"] = "../b.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert house.tierd("import", folder, "--run", "other", "--step", "3").exit_code == 12
    for damaged in (b"{", b'{"weight_map": {"\xff": "a.safetensors"}}', b'{"nested": ' + b"[" * 100_000):
        (folder / "model.safetensors.index.json").write_bytes(damaged)
        assert house.tierd("import", folder, "--run", "other", "--step", "3").exit_code == 12
    (folder / "model.safetensors.index.json").unlink()
    result = house.tierd("import", folder, "--run", "other", "--step", "3")
    assert (result.exit_code, "scalar is in two of its files" in result.stderr) == (2, True), result.output
    assert not (house.hot / "other").exists()


def test_a_file_from_beyond_the_calendar_is_imported(house: House) -> None:
    path = house.root / "model.safetensors"
    save_file({"weight": torch.ones(2)}, path)
    os.utime(path, (1e12, 1e12))  # some file systems keep it
    assert house.json("import", path, "--run", "new", "--step", "3")["is_new"]


def test_a_tensor_without_a_name_is_not_lost(house: House) -> None:
    tensors = {"": torch.ones(2), "bias": torch.zeros(2)}
    save_file(tensors, house.root / "model.safetensors")
    house.json("import", house.root / "model.safetensors", "--run", "new", "--step", "3")
    assert house.tierd("export", "--format", "safetensors", "--to", house.root / "back").exit_code == 0
    assert_same(
        load_file(house.root / "back/model.safetensors"), {f"model.{name}": each for name, each in tensors.items()}
    )


def test_importing_again_does_nothing_and_other_bytes_under_the_step_are_refused(house: House) -> None:
    path = house.root / "model.safetensors"
    save_file({"weight": torch.ones(3)}, path)
    more = ("--run", "new", "--step", "3")
    assert house.json("import", path, *more, "--dry-run")["is_dry_run"]
    assert not (house.hot / "new").exists()
    assert house.json("import", path, *more)["is_new"]
    assert house.json("import", path, *more)["is_new"] is False
    save_file({"weight": torch.zeros(3)}, path)
    assert house.tierd("import", path, *more).exit_code == 15
    assert house.json("import", path, *more, "--generation", "2")["sequence"] == 2


def test_a_file_that_is_missing_torn_or_of_another_format_is_refused(house: House) -> None:
    path = house.root / "model.safetensors"
    save_file({"weight": torch.ones(3)}, path)
    result = house.tierd("import", path, "--run", "new")
    assert (result.exit_code, "does not say its step" in result.stderr) == (2, True), result.output
    raw = path.read_bytes()
    for torn in (raw[:-1], raw[:20], raw[:5], b"", raw + b"\0"):
        path.write_bytes(torn)
        assert_import_refused(house, path, 12, "read ")
    assert_import_refused(house, house.root / "absent.safetensors", 10, "No such file")
    assert_import_refused(house, house.root / ("x" * 300), 10, "File name too long")
    os.mkfifo(house.root / "pipe")
    assert_import_refused(house, house.root / "pipe", 2, "not a regular file")
    (house.root / "notes.txt").write_text("hello, world")
    assert_import_refused(house, house.root / "notes.txt", 2, "it is neither ")
    (house.root / "empty").mkdir()
    assert_import_refused(house, house.root / "empty", 2, "it has no ")


def test_what_tierd_does_not_store_is_refused_by_name(house: House) -> None:
    entry = {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}
    path = write(house.root / "model.safetensors", {"body.weight": entry}, b"\0")
    assert_import_refused(house, path, 2, "body.weight has the dtype F4, which tierd does not store")
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    sharding = {"DCP_SHARDING_INFO": json.dumps({"weight": {"saved_offsets": [0]}})}
    path = write(house.root / "model.safetensors", {"__metadata__": sharding, "weight": entry}, bytes(4))
    assert_import_refused(house, path, 2, "it has parts of tensors")
    path = write(house.root / "model.safetensors", {"__metadata__": {"format": "pt"}})
    assert_import_refused(house, path, 2, "it has no tensor")


@pytest.mark.parametrize(
    "table",
    [
        [],
        {"weight": 5},
        {"weight": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
        {"weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"weight": {"dtype": "F32", "shape": [1 << 62], "data_offsets": [0, 4]}},
        {"weight": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}},
        {"weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "__metadata__": 5},
    ],
)
def test_a_header_that_breaks_the_format_is_refused(house: House, table: Any) -> None:
    assert_import_refused(house, write(house.root / "model.safetensors", table, bytes(4)), 12, "read the header of")


def test_a_shard_of_tierd_is_refused(house: House) -> None:
    save_file({"weight": torch.ones(3)}, house.root / "model.safetensors")
    house.json("import", house.root / "model.safetensors", "--run", "run", "--step", "3")
    assert_import_refused(
        house, next(folder_of(house, "run").glob("*.safetensors")), 2, "a shard of a checkpoint of tierd"
    )


def test_a_file_that_is_written_meanwhile_is_refused(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    path = house.root / "model.safetensors"
    save_file({"weight": torch.ones(3)}, path)
    verify_files = import_.verify_files

    async def verify_late(*arguments: object, **options: object) -> object:
        save_file({"weight": torch.zeros(3)}, house.root / "other")
        (house.root / "other").rename(path)
        return await verify_files(*arguments, **options)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(import_, "verify_files", verify_late)
    assert_import_refused(house, path, 1, "it was written meanwhile")
