"""The whole state is captured, staged and restored into fresh objects; training then continues identically."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from tierd_client.state.training_state import TrainingState, architecture_of
from torch.distributed.fsdp import FullyShardedDataParallel

from tests.support.state import Files, Loader, Training, assert_same, restore, small_net, stage
from tierd.errors import BadConfig, Mismatch, TierdError
from tierd.format.shard import parse_header


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    opened = Files(tmp_path)
    yield opened
    opened.close()


@pytest.mark.parametrize("place", ["on_disk", "in_memory"])
def test_restored_training_has_identical_losses(files: Files, place: str) -> None:
    first = Training.fresh()
    first.train(5)
    raw = stage(first.state())
    expected = first.train(5)

    second = Training.fresh(seed=99)
    restore(second.state(), [getattr(files, place)(raw)])
    assert second.train(5) == expected
    assert_same(second.model.state_dict(), first.model.state_dict())
    assert_same(second.ema.state_dict(), first.ema.state_dict())
    assert_same(second.optimizer.state_dict(), first.optimizer.state_dict())
    assert_same(second.scheduler.state_dict(), first.scheduler.state_dict())
    assert second.extra == first.extra == {"seen": 160}


def test_restore_into_a_used_state_is_in_place(files: Files) -> None:
    training = Training.fresh()
    training.train(5)
    raw = stage(training.state())
    expected = training.train(3)
    weights = [parameter.data_ptr() for parameter in training.model.parameters()]
    moments = [state["exp_avg"].data_ptr() for state in training.optimizer.state.values()]
    restore(training.state(), [files.on_disk(raw)])
    assert training.train(3) == expected
    assert [parameter.data_ptr() for parameter in training.model.parameters()] == weights
    assert [state["exp_avg"].data_ptr() for state in training.optimizer.state.values()] == moments


@pytest.mark.parametrize("argument", ["scheduler", "scaler", "dataloader", "ema"])
def test_object_without_state_dict_is_refused_by_the_constructor(argument: str) -> None:
    with pytest.raises(BadConfig, match=argument):
        TrainingState(model=small_net(), **{argument: object()})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": [small_net()]}, "model=.*list is no torch.nn.Module"),
        ({"model": small_net(), "optimizer": {"a": 1}}, "optimizer=.*str is no torch.optim.Optimizer"),
        ({"model": small_net(), "optimizer": Loader()}, "optimizer=.*Loader is no torch.optim.Optimizer"),
    ],
)
def test_argument_of_another_type_is_refused_by_the_constructor(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        TrainingState(**arguments)


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch is going to remove it
def test_fully_sharded_data_parallel_of_the_first_kind_is_refused(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = FullyShardedDataParallel(small_net(), device_id=torch.device("cpu"))
        with pytest.raises(BadConfig, match="FullyShardedDataParallel keeps parts as plain tensors") as caught:
            TrainingState(model=model)
        assert "fully_shard" in caught.value.hint
    finally:
        torch.distributed.destroy_process_group()


class Raising(Loader):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("a key that a new version of the loader expects")


def test_object_that_refuses_its_state_is_named_and_the_state_is_called_half_restored(files: Files) -> None:
    raw = stage(TrainingState(model=small_net(), dataloader=Loader()))
    with pytest.raises(TierdError, match=r"restore dataloader: its load_state_dict raised KeyError") as caught:
        restore(TrainingState(model=small_net(), dataloader=Raising()), [files.on_disk(raw)])
    assert "half restored" in caught.value.hint


def test_refused_argument_comes_with_a_hint() -> None:
    model = small_net()
    schedulers = [torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters()), 1)]
    with pytest.raises(BadConfig, match=r"list has no state_dict.*schedulers into extra"):
        TrainingState(model=model, scheduler=schedulers)  # type: ignore[arg-type]
    with pytest.raises(BadConfig, match="ResumableLoader and DocumentLoader"):
        TrainingState(model=model, dataloader=torch.utils.data.DataLoader([1]))  # type: ignore[arg-type]


def test_tensor_names_of_per_rank_state_contain_the_rank(files: Files) -> None:
    def build(rank: int) -> TrainingState:
        loader = Loader()
        loader.state = {"position": torch.tensor([rank])}
        return TrainingState(model=small_net(), dataloader=loader, extra={"own": torch.tensor([rank * 10.0])})

    raws = [stage(build(rank), rank=rank, world_size=2) for rank in range(2)]
    shard = parse_header(memoryview(raws[1]), len(raws[1]), where="rank 1")
    assert {"dataloader.position@00001", "extra.own@00001", "model.0.weight"} <= set(shard.tensors)
    opened = [files.on_disk(raw, f"rank-{rank:05d}-of-00002.safetensors") for rank, raw in enumerate(raws)]
    for rank in range(2):
        loader, extra = Loader(), {"own": torch.tensor([-1.0])}
        tensor = extra["own"]
        restore(TrainingState(model=small_net(), dataloader=loader, extra=extra), opened, rank=rank)
        assert loader.state["position"].item() == rank
        assert extra["own"] is tensor
        assert tensor.item() == rank * 10.0


def test_dtype_that_safetensors_lacks_is_stored_so_that_safetensors_opens_the_shard(tmp_path: Path) -> None:
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.tensor([1 + 2j], dtype=torch.complex128))})
    model.register_buffer("scale", torch.tensor([2.0]).to(torch.float8_e8m0fnu))
    path = tmp_path / "shard.safetensors"
    path.write_bytes(stage(TrainingState(model=model, rng=False)))
    with safetensors.safe_open(path, "pt") as shard:
        assert shard.get_tensor("model.w").tolist() == [[1.0, 2.0]]
        assert shard.get_tensor("model.scale").dtype is torch.uint8
        described = json.loads(shard.metadata()["tierd"])["torch_dtypes"]
    assert described == {"model.w": "complex128", "model.scale": "float8_e8m0fnu"}


def test_bytes_of_one_dtype_are_not_restored_into_another(files: Files) -> None:
    def state_of(dtype: torch.dtype) -> TrainingState:
        model = small_net()
        model.register_buffer("scale", torch.ones(2).to(dtype))
        return TrainingState(model=model, rng=False)

    raw = stage(state_of(torch.float8_e8m0fnu))
    for dtype in (torch.uint8, torch.float8_e5m2):
        with pytest.raises(Mismatch, match=r"model\.scale: checkpoint U8 \[2\] of float8_e8m0fnu, model "):
            restore(state_of(dtype), [files.on_disk(raw)])


def test_architecture_hash_depends_only_on_the_model() -> None:
    def hash_of(model: torch.nn.Module, **state: Any) -> str:
        return architecture_of(TrainingState(model=model, **state).capture(0, 1))

    assert hash_of(small_net()) == hash_of(small_net(), extra={"step": 3})
    assert hash_of(small_net()) != hash_of(small_net().bfloat16())
    assert hash_of(small_net()) != hash_of(torch.nn.Linear(3, 5))


def test_all_tensors_but_buffers_are_compared_between_ranks() -> None:
    """Plain tensors of equal size may be different parts of one tensor: only their bytes show that."""
    training = Training.fresh()
    training.train(1)
    training.extra["t"] = torch.zeros(3)
    held = {tensor.key: tensor for tensor in training.state().capture(1, 2).held_tensors()}
    compared = {key for key, tensor in held.items() if tensor.sample is not None}
    buffers = {key for key, tensor in held.items() if tensor.is_buffer}
    assert {"model.1.running_mean", "ema.1.running_var", "ema.n_averaged"} <= buffers
    assert compared == held.keys() - buffers
    assert {"model.0.weight", "optimizer.state.0.weight.exp_avg", "ema.0.weight", "extra.t@00001"} <= compared
