"""A checkpoint as one state for torch: sections, optimizers by parameter name, DCP's nested dicts, plain values."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tierd_client import DictState, TrainingState
from tierd_client.export import main, plain, whole_state
from tierd_client.frameworks.dcp import capture_plan
from tierd_client.slots.slot import Slot
from tierd_client.snapshot.staging import Stager
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from tests.support.state import Training, assert_same, commit, metadata, shard_of, stage, stage_into
from tierd.errors import BadRequest, Corrupt, NotFound


def test_state_has_the_sections_of_the_training_and_the_optimizer_by_parameter_names(tmp_path: Path) -> None:
    training = Training.fresh()
    training.train(3)
    state = whole_state(commit(tmp_path, [stage(training.state())]))

    assert_same(state["model"], dict(training.model.state_dict()))
    expected = get_optimizer_state_dict(training.model, training.optimizer)
    assert_same(state["optimizer"]["state"], expected["state"])
    fresh = Training.fresh(seed=3)
    fresh.model.load_state_dict(state["model"])
    set_optimizer_state_dict(fresh.model, fresh.optimizer, state["optimizer"])
    assert_same(fresh.optimizer.state_dict(), training.optimizer.state_dict())
    ema = {name.removeprefix("module."): value for name, value in training.ema.state_dict().items()}
    assert_same(state["ema"], ema)
    assert state["scheduler"]["last_epoch"] == 3
    assert state["extra"] == {"seen": 48}


def test_value_that_differs_by_rank_is_a_list_by_rank(tmp_path: Path) -> None:
    def build(rank: int) -> DictState:
        return DictState({"model": {"w": torch.ones(2)}, "mine": torch.tensor([rank])}, per_rank=["mine"])

    raws = [
        stage(build(rank), rank=rank, world_size=2, owned=owned) for rank, owned in enumerate([None, {"mine@00001"}])
    ]
    state = whole_state(commit(tmp_path, raws))
    assert_same(state, {"model": {"w": torch.ones(2)}, "mine": [torch.tensor([0]), torch.tensor([1])]})


def test_dict_that_dcp_saved_is_nested_again(tmp_path: Path) -> None:
    given = {
        "model": {"a.b": torch.ones(2), "c": torch.tensor(1.0)},
        "list": [torch.zeros(1), {"deep": torch.ones(1)}],
        "betas": (0.9, torch.tensor(0.99)),
        "array": np.arange(3),
        "step": 7,
    }
    planner = DefaultSavePlanner()
    planner.set_up_planner(given, is_coordinator=True)
    plans, _ = planner.create_global_plan([planner.create_local_plan()])
    captured = capture_plan(planner.finish_plan(plans[0]), planner)
    slot, stager = Slot.create(1 << 20), Stager()
    state = whole_state(commit(tmp_path, [stage_into(slot, stager, captured, metadata(captured.tree))]))
    slot.close()
    assert_same(state, {**given, "array": torch.arange(3)})


@pytest.mark.parametrize("order", [["net", "net.x", "net.ema"], ["net.ema", "net.x", "net"]])
def test_sections_of_extra_whose_names_begin_alike_have_their_own_tensors(tmp_path: Path, order: list[str]) -> None:
    values = {
        "net": torch.nn.Linear(2, 1),
        "net.x": [torch.full((4,), 7.0), np.arange(3)],
        "net.ema": torch.nn.Linear(3, 1, bias=False),
    }
    state = TrainingState(model=torch.nn.Linear(1, 1), extra={key: values[key] for key in order}, rng=False)
    exported = whole_state(commit(tmp_path, [stage(state)]))["extra"]
    assert_same(exported["net"], dict(values["net"].state_dict()))  # type: ignore[attr-defined]
    assert_same(exported["net.ema"], dict(values["net.ema"].state_dict()))  # type: ignore[attr-defined]
    assert_same(exported["net.x"], [torch.full((4,), 7.0), torch.arange(3)])


def test_tensor_that_two_ranks_share_is_whole_in_the_values_of_both(tmp_path: Path) -> None:
    """A DTensor has no rank in its name, also in sections that differ by rank."""
    table = torch.arange(8.0).view(4, 2)
    raws: list[bytes] = []
    for rank in range(2):
        suffix = f"@{rank:05d}"
        tree = {
            "extra.m": {"kind": "module", "suffix": suffix, "value": {}},
            "extra.v": {"kind": "value", "suffix": suffix, "value": [{"$tensor": "extra.v[0]"}]},
        }
        half = table[2 * rank : 2 * rank + 2]
        own = (f"extra.m.own{suffix}", torch.full((1,), float(rank)), (0,))
        parts = [("extra.m.e", half, (2 * rank, 0)), ("extra.v[0]", half, (2 * rank, 0)), own]
        raws.append(shard_of(parts, tree, rank=rank))
    exported = whole_state(commit(tmp_path, raws))["extra"]
    assert_same(exported["m"], [{"e": table, "own": torch.tensor([float(rank)])} for rank in range(2)])
    assert_same(exported["v"], [[table], [table]])


def _pipeline_stage(rank: int, lr: float = 0.1) -> TrainingState:
    """One layer of a model of two, and its optimizer after a step."""
    model = torch.nn.ModuleDict({f"stage{rank}": torch.nn.Linear(2, 2)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model[f"stage{rank}"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return TrainingState(model=model, optimizer=optimizer, rng=False)


def test_stages_of_a_pipeline_become_one_model_and_one_optimizer(tmp_path: Path) -> None:
    stages = [_pipeline_stage(rank) for rank in range(2)]
    raws = [stage(state, rank=rank, world_size=2) for rank, state in enumerate(stages)]
    exported = whole_state(commit(tmp_path, raws))
    parts = [whole_state(commit(tmp_path / f"{rank}", [stage(state)])) for rank, state in enumerate(stages)]
    assert_same(exported["model"], parts[0]["model"] | parts[1]["model"])
    assert_same(exported["optimizer"]["state"], parts[0]["optimizer"]["state"] | parts[1]["optimizer"]["state"])
    names = [name for part in parts for name in part["optimizer"]["param_groups"][0]["params"]]
    assert len(names) == 4
    assert exported["optimizer"]["param_groups"][0]["params"] == names


def test_export_of_optimizers_whose_options_differ_by_rank_is_refused(tmp_path: Path) -> None:
    raws = [stage(_pipeline_stage(rank, lr=0.1 + rank), rank=rank, world_size=2) for rank in range(2)]
    with pytest.raises(BadRequest, match="export optimizer: its ranks hold different options of parameter groups"):
        whole_state(commit(tmp_path, raws))


def test_prefix_gives_a_flat_dict(tmp_path: Path) -> None:
    folder = commit(tmp_path, [stage(DictState({"model": {"a": torch.ones(1)}, "other": torch.ones(2)}))])
    assert_same(whole_state(folder, "model."), {"a": torch.ones(1)})
    with pytest.raises(NotFound, match=r"begins with 'net\.'"):
        whole_state(folder, "net.")


def test_damaged_shard_raises_corrupt(tmp_path: Path) -> None:
    folder = commit(tmp_path, [stage(DictState({"a": torch.ones(1000)}))])
    shard = next(folder.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x00")
    with pytest.raises(Corrupt, match="crc64nvme"):
        whole_state(folder)


def test_every_supported_value_is_loaded_by_torch_with_weights_only(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "numbers": [1, 2.5, float("inf"), True, None, 1 + 2j],
        "words": {"é": b"\x00", "s": {1, 2}, "f": frozenset([3])},
        "tuple": (1, (2, "x")),
        "ordered": OrderedDict([("b", 1), ("a", 2)]),
        "int keys": {0: "a", 1: "b"},
        "torch": [torch.bfloat16, torch.device("cpu"), torch.Size([1, 2])],
        "numpy": [np.float32(1.5), np.int64(3), np.arange(3, dtype=np.float64), np.array(["a", "b"])],
        "time": np.datetime64("2026-01-02"),
    }
    target = tmp_path / "checkpoint.pt"
    main(["torch", str(commit(tmp_path, [stage(DictState(values))])), str(target)])
    loaded = torch.load(target, weights_only=True)
    assert_same(loaded, plain(values))
    assert loaded["numpy"][:2] == [1.5, 3]
    assert loaded["numpy"][2].dtype == torch.float64
    assert loaded["numpy"][3] == ["a", "b"]
    assert loaded["ordered"] == values["ordered"]
    assert loaded["time"] == "2026-01-02"


def test_unknown_format_is_refused(tmp_path: Path) -> None:
    folder = commit(tmp_path, [stage(TrainingState(model=torch.nn.Linear(1, 1)))])
    with pytest.raises(BadRequest, match="torch or dcp"):
        main(["onnx", str(folder), str(tmp_path / "out")])
