"""`tierd export`: writes whole verified tensors for other tools, or nothing, with the right exit code."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from tierd_client import DictState

from tests.support.cli import House, flip_a_bit, make_house
from tests.support.state import Training, assert_same, commit, shard_of, stage

STATE = {"model": {"weight": torch.arange(12.0).view(3, 4), "bias": torch.ones(4, dtype=torch.bfloat16)}, "step": 5}


@pytest.fixture
def house(tmp_path: Path, forked_python: None) -> House:
    return make_house(tmp_path)


def nothing_at(target: Path) -> bool:
    return not target.exists() and not target.with_name(target.name + ".partial").exists()


def sharded(folder: Path) -> torch.Tensor:
    """Commit a checkpoint of two ranks with a table split by columns. Returns the whole table."""
    table = torch.randn(300, 64)
    halves = [("model.table", table[:, :24], (0, 0)), ("model.table", table[:, 24:], (0, 24))]
    commit(folder, [shard_of([half], rank=rank) for rank, half in enumerate(halves)])
    return table


def test_shards_become_one_file_of_whole_tensors(house: House) -> None:
    table = sharded(house.hot)
    result = house.tierd("export", "--format", "safetensors", "--to", house.root / "out")

    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("exported run step 5 (generation 1) from hot")
    assert [one.name for one in (house.root / "out").iterdir()] == ["model.safetensors"]
    assert torch.equal(load_file(house.root / "out" / "model.safetensors")["model.table"], table)
    with safe_open(str(house.root / "out" / "model.safetensors"), "pt") as file:
        assert file.metadata() == {"format": "pt", "run": "run", "step": "5", "generation": "1"}
    assert [one.name for one in house.root.iterdir() if one.name.endswith(".partial")] == []


def test_export_without_the_prefix_loads_as_a_plain_state_dict(house: House) -> None:
    training = Training.fresh()
    training.train(2)
    commit(house.cold, [stage(training.state())])

    facts = house.json("export", "--format", "safetensors", "--prefix", "model.", "--to", house.root / "out")

    assert (facts["tier"], facts["format"], facts["is_verified"]) == ("cold", "safetensors", True)
    fresh = Training.fresh(seed=9)
    fresh.model.load_state_dict(load_file(house.root / "out" / "model.safetensors"))
    assert_same(fresh.model.state_dict(), training.model.state_dict())


def test_a_file_at_the_target_is_refused_with_a_hint_that_fits_a_file_too(house: House) -> None:
    commit(house.hot, [stage(DictState({"a": torch.ones(3)}))])
    (house.root / "out.bin").write_bytes(b"old")
    refused = house.tierd("export", "--format", "torch", "--to", house.root / "out.bin")
    assert refused.exit_code == 15
    assert "name a path where nothing is" in refused.stderr


def test_large_export_is_split_with_an_index_in_hugging_face_format(house: House) -> None:
    tensors = {f"layer.{index}": torch.full((50,), float(index)) for index in range(5)}
    commit(house.hot, [shard_of([(name, one, (0,)) for name, one in tensors.items()])])
    out = house.root / "out"

    assert house.tierd("export", "--format", "safetensors", "--max-shard-size", "500B", "--to", out).exit_code == 0

    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 1000}
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{part}-of-00003.safetensors" for part in (1, 2, 3)]
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(out / file)[name], tensors[name])


def test_torch_export_is_one_file_that_loads_with_weights_only(house: House) -> None:
    commit(house.hot, [stage(DictState(STATE))])
    target = house.root / "checkpoint.pt"
    assert house.tierd("export", "--format", "torch", "--to", target).exit_code == 0
    assert_same(torch.load(target, weights_only=True), STATE)
    assert target.stat().st_mode & 0o077 == 0, "other users can read it"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_dcp_writes_what_torchs_own_reader_loads(house: House) -> None:
    commit(house.hot, [stage(DictState(STATE))])
    target = house.root / "dcp"
    assert house.tierd("export", "--format", "dcp", "--to", target).exit_code == 0
    found: dict[str, Any] = {"model": {"weight": torch.zeros(3, 4), "bias": torch.zeros(4).bfloat16()}, "step": 0}
    dcp.load(found, checkpoint_id=str(target))
    assert_same(found, STATE)


def test_export_reports_damage_and_reads_the_next_tier(house: House) -> None:
    table = sharded(house.hot)
    shard = sorted((house.hot / "run").rglob("*.safetensors"))[1]
    copied = house.cold / shard.parent.relative_to(house.hot)
    copied.mkdir(parents=True)
    for one in shard.parent.iterdir():
        (copied / one.name).write_bytes(one.read_bytes())
    flip_a_bit(shard)

    facts = house.json("export", "--format", "safetensors", "--to", house.root / "out")

    assert facts["tier"] == "cold"
    assert "hot" in facts["passed_over"]
    assert torch.equal(load_file(house.root / "out" / "model.safetensors")["model.table"], table)


@pytest.mark.parametrize("format", ["safetensors", "torch"])
def test_export_of_a_checkpoint_damaged_in_every_tier_is_exit_12_and_writes_nothing(house: House, format: str) -> None:
    sharded(house.hot)
    flip_a_bit(sorted((house.hot / "run").rglob("*.safetensors"))[0])
    assert house.tierd("export", "--format", format, "--to", house.root / "out").exit_code == 12
    assert not (house.root / "out").exists()


def test_export_of_an_incomplete_tensor_is_exit_12_and_names_it(house: House) -> None:
    commit(house.hot, [shard_of([("model.table", torch.ones(2, 3), (1, 0))])])
    result = house.tierd("export", "--format", "dcp", "--to", house.root / "out")
    assert result.exit_code == 12
    assert "model.table: the shards contain 6 of its 9 elements" in result.stderr
    assert nothing_at(house.root / "out")


def test_export_with_an_unknown_prefix_is_exit_10_and_lists_prefixes(house: House) -> None:
    commit(house.hot, [stage(DictState(STATE))])
    result = house.tierd("export", "--format", "torch", "--prefix", "net.", "--to", house.root / "out")
    assert result.exit_code == 10
    assert "they begin with model." in result.stderr
    assert nothing_at(house.root / "out")


def test_export_with_wrong_arguments_is_exit_2_and_into_a_full_target_exit_15(house: House, tmp_path: Path) -> None:
    commit(house.hot, [stage(DictState(STATE))])

    def export(*more: str | Path) -> int:
        return house.tierd("export", *more).exit_code

    assert export("--format", "pickle", "--to", tmp_path / "out") == 2
    assert export("--format", "safetensors", "--max-shard-size", "huge", "--to", tmp_path / "out") == 2
    assert export("--format", "safetensors", "--to", house.hot / "run" / "export") == 2
    (tmp_path / "empty").mkdir()
    assert export("--format", "torch", "--to", tmp_path / "empty") == 2
    assert export("--format", "safetensors", "--to", tmp_path) == 15
    assert export("--format", "safetensors", "--step", "6", "--to", tmp_path / "out") == 10
    assert nothing_at(tmp_path / "out")


def test_export_to_a_torch_format_without_torch_is_refused_before_reading(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(house.hot, [stage(DictState(STATE))])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = house.tierd("export", "--format", "torch", "--to", house.root / "out")
    assert result.exit_code == 2
    assert "torch and tierd_client cannot be imported" in result.stderr
    assert "--format safetensors" in result.stderr


MEASURED = """
import sys
from tierd.cli.app import make_app
try:
    make_app()(sys.argv[1:])
finally:
    peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM:"))
    print(int(peak.split()[1]) >> 10, "MiB", "torch" in sys.modules, file=sys.stderr)
"""


def test_safetensors_export_needs_neither_torch_nor_memory_for_the_state(tmp_path: Path) -> None:
    house = make_house(tmp_path)
    commit(house.hot, [shard_of([(f"w{index}", torch.zeros(32 << 20, dtype=torch.uint8), (0,))]) for index in range(8)])
    command = ["--config", str(house.config), "export", "--format", "safetensors", "--to", str(house.root / "out")]
    done = subprocess.run([sys.executable, "-c", MEASURED, *command], capture_output=True, text=True, check=True)
    peak, _, has_torch = done.stderr.split()
    assert has_torch == "False"
    assert int(peak) < 256, "MB: mostly the interpreter and 96 MiB of buffers"
    assert (house.root / "out" / "model.safetensors").stat().st_size > 8 * (32 << 20)
