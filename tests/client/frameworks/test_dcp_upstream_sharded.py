"""What PyTorch tests of DCP with its file storage on several ranks, with TierdWriter and TierdReader in its place.

`tests/client/frameworks/upstream.py` lists PyTorch's tests and the tests here that take their place. Each case runs on
all ranks at once.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tierd_client.frameworks.dcp import TierdReader, TierdWriter
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, zeros
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.support.daemon import Daemon
from tests.support.dcp_ranks import connected, differences, load, save
from tests.support.trainer import Training

Call = Callable[..., list[Any]]

ONE_D = ([Shard(0)], [Replicate()])
TWO_D = tuple([first, second] for first in (Replicate(), Shard(0)) for second in (Replicate(), Shard(0)))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def two(daemon: Daemon) -> Iterator[Call]:
    with connected(daemon, 2) as call:
        yield call


@pytest.fixture(scope="module")
def four(daemon: Daemon) -> Iterator[Call]:
    with connected(daemon, 4) as call:
        yield call


# ── ShardedTensor: test_file_system_checkpoint_cpu.py ──


def chunked(dim: int, *ranks: int) -> Any:
    return ChunkShardingSpec(dim=dim, placements=[f"rank:{rank}/cpu" for rank in ranks])  # pyright: ignore[reportArgumentType]


def placed(*parts: tuple[list[int], list[int], int]) -> Any:
    """A spec of parts: (offsets, sizes, rank)."""
    return EnumerableShardingSpec([ShardMetadata(offsets, sizes, f"rank:{rank}/cpu") for offsets, sizes, rank in parts])


WHOLE_PARTS = (chunked(0, 0, 1), placed(([0, 0], [8, 20], 1), ([8, 0], [2, 20], 0)))
"""Specs with one part on each rank."""

SEVERAL_PARTS = (
    chunked(0, 0, 1, 1, 0),
    placed(*(([begin, 0], [size, 20], rank) for begin, size, rank in ((0, 2, 0), (2, 1, 1), (3, 3, 0), (6, 4, 1)))),
)
"""Specs with several parts on a rank."""


def gathered(tensor: Any) -> torch.Tensor | None:
    """The whole tensor, on rank 0."""
    whole = torch.zeros(tensor.shape) if dist.get_rank() == 0 else None
    tensor.gather(out=whole)
    return whole


def reshard(training: Training, saved_spec: Any, loaded_spec: Any) -> None:
    saved = {"tensor": sharded_tensor.rand(saved_spec, 10, 20)}
    save(training, saved)
    loaded = {"tensor": sharded_tensor.zeros(loaded_spec, 10, 20)}
    load(training, loaded)
    expected, actual = gathered(saved["tensor"]), gathered(loaded["tensor"])
    assert expected is None or (actual is not None and torch.equal(expected, actual) and expected.any())


def test_sharded_tensors_are_read_in_the_same_parts(two: Call) -> None:
    two(reshard, WHOLE_PARTS[0], WHOLE_PARTS[0])


@pytest.mark.long
@pytest.mark.parametrize("saved_spec", WHOLE_PARTS)
def test_sharded_tensors_are_read_in_other_parts(two: Call, saved_spec: Any) -> None:
    for loaded_spec in (*WHOLE_PARTS, *SEVERAL_PARTS):
        two(reshard, saved_spec, loaded_spec)


def test_sharded_tensor_of_rows_is_read_as_columns(two: Call) -> None:
    two(reshard, chunked(0, 0, 1), chunked(1, 0, 1))


def save_is_refused(training: Training, spec: Any) -> str:
    try:
        save(training, {"tensor": sharded_tensor.rand(spec, 10, 20)})
    except CheckpointException as error:
        return str([cause for cause, *_ in error.failures.values()])
    return ""


@pytest.mark.parametrize("spec", SEVERAL_PARTS)
def test_sharded_tensor_with_several_parts_on_a_rank_is_refused(two: Call, spec: Any) -> None:
    for text in two(save_is_refused, spec):
        assert "Unsupported('capture tensor: this rank holds several parts of it" in text


def bytes_and_lists(training: Training) -> None:
    save(training, {"list": [1], "text": "string"})
    loaded = {"list": [2], "text": "other"}
    load(training, loaded)
    assert loaded == {"list": [1], "text": "string"}


def test_objects_are_read_on_all_ranks(two: Call) -> None:
    two(bytes_and_lists)


def exchange_kinds(training: Training, spec: Any, loaded_spec: Any) -> None:
    saved: dict[str, Any] = {"sharded": sharded_tensor.rand(spec, 32), "whole": torch.rand(32)}
    dist.broadcast(saved["whole"], 0)
    save(training, saved)
    loaded: dict[str, Any] = {"sharded": torch.zeros(32), "whole": sharded_tensor.zeros(loaded_spec, 32)}
    load(training, loaded)
    expected, actual = gathered(saved["sharded"]), gathered(loaded["whole"])
    if expected is not None and actual is not None:
        assert torch.equal(loaded["sharded"], expected)
        assert torch.equal(actual, saved["whole"])


@pytest.mark.long
def test_sharded_tensor_is_read_as_a_whole_one_and_the_reverse(two: Call) -> None:
    specs = (chunked(0, 0, 1), placed(([0], [8], 1), ([8], [24], 0)))
    for spec, loaded_spec in itertools.product(specs, (*specs, chunked(0, 0, 1, 1, 0))):
        two(exchange_kinds, spec, loaded_spec)


# ── failures: test_checkpoint.py ──


def failing(base: Any, training: Training, stage: str, rank: int, step: int) -> Any:
    """A writer or reader that raises ValueError at `stage` on `rank`."""

    class Storage(base):
        def __getattribute__(self, name: str) -> Any:
            if name == stage and dist.get_rank() == rank:
                raise ValueError(f"{stage} fails")
            return super().__getattribute__(name)

    return Storage(training.client, step=step)


def fail_and_save(training: Training, stage: str, rank: int) -> None:
    training.step += 1
    writer = failing(TierdWriter, training, stage, rank, training.step)
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"replicated": torch.ones(10), "bytes": [1, 2]}, storage_writer=writer)
    assert type(caught.value.failures[rank][0]) is ValueError
    save(training, {"replicated": torch.ones(10), "bytes": [1, 2]})


@pytest.mark.parametrize(
    ("stage", "rank"),
    [("set_up_storage_writer", 0), ("prepare_local_plan", 0), ("prepare_global_plan", 0), ("finish", 0)],
)
def test_failure_of_one_rank_in_a_save_is_raised_on_all(two: Call, stage: str, rank: int) -> None:
    two(fail_and_save, stage, rank)


def save_an_object_of_one_rank(training: Training) -> str:
    """DCP has only one rank write an object, so only that one finds that it has no safe form."""
    with pytest.raises(CheckpointException) as caught:
        save(training, {"hook": print, "tensor": torch.ones(3)})
    save(training, {"tensor": torch.ones(3)})
    return str([failure[0] for failure in caught.value.failures.values()])


def test_object_that_one_rank_cannot_write_is_refused_on_all(two: Call) -> None:
    for text in two(save_an_object_of_one_rank):
        assert "Unsupported(" in text
        assert "encode hook" in text


def fail_and_load(training: Training, stage: str, rank: int) -> None:
    save(training, {"replicated": torch.ones(10), "bytes": [1, 2]})
    loaded = {"replicated": torch.zeros(10), "bytes": [0]}
    reader = failing(TierdReader, training, stage, rank, training.step)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(loaded, storage_reader=reader)
    assert type(caught.value.failures[rank][0]) is ValueError
    load(training, loaded)
    assert loaded["bytes"] == [1, 2]
    assert loaded["replicated"].sum() == 10


@pytest.mark.parametrize(
    ("stage", "rank"), [("set_up_storage_reader", 0), ("prepare_global_plan", 0), ("prepare_local_plan", 1)]
)
def test_failure_of_one_rank_in_a_load_is_raised_on_all(two: Call, stage: str, rank: int) -> None:
    two(fail_and_load, stage, rank)


# ── DTensor: test_dtensor_checkpoint.py, test_dtensor_resharding.py ──


def dtensors_and_extra_state(training: Training) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def state(factor: int) -> dict[str, Any]:
        return {
            "sharded": distribute_tensor(factor * torch.arange(0.0, 4.0), mesh, [Shard(0)]),
            "replicated": distribute_tensor(factor * torch.arange(4.0, 8.0), mesh, [Replicate()]),
            "_extra_state": {"number": factor, "tensor": torch.full((1,), float(factor))},
        }

    saved, loaded = state(1), state(10)
    save(training, saved)
    load(training, loaded)
    assert loaded["_extra_state"] == {"number": 1, "tensor": torch.ones(1)}
    del loaded["_extra_state"], saved["_extra_state"]
    assert differences(loaded, saved) == []


def test_dtensors_and_extra_state_are_read(four: Call) -> None:
    four(dtensors_and_extra_state)


def mesh_for(placements: list[Any]) -> Any:
    shape = (dist.get_world_size(),) if len(placements) == 1 else (2, dist.get_world_size() // 2)
    return init_device_mesh("cpu", shape)


def change_placement(training: Training, saved: list[Any], rows: int, loads: list[list[Any]]) -> None:
    whole = torch.arange(4.0 * rows).view(rows, 4)
    save(training, {"tensor": distribute_tensor(whole, mesh_for(saved), saved)})
    for placements in loads:
        loaded: dict[str, Any] = {"tensor": zeros(rows, 4, device_mesh=mesh_for(placements), placements=placements)}
        load(training, loaded)
        assert torch.equal(loaded["tensor"].full_tensor(), whole), (saved, placements)


@pytest.mark.long
@pytest.mark.parametrize("rows", [4, 3, 7])
def test_dtensor_is_read_with_another_placement_or_mesh(four: Call, rows: int) -> None:
    """With 3 rows on 4 ranks one part is empty, with 7 the last is smaller."""
    for saved in ONE_D:
        four(change_placement, saved, rows, [*ONE_D, *TWO_D])
    for saved in TWO_D:
        four(change_placement, saved, rows, [*TWO_D, *ONE_D])


# ── models: test_fsdp_model_state.py, test_fsdp_optim_state.py, test_hsdp_checkpoint.py, test_tp_checkpoint.py ──


class Net(nn.Module):
    def __init__(self, *sizes: int, device: str = "cpu") -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(*pair, device=device) for pair in itertools.pairwise(sizes)))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            batch = layer(batch).relu()
        return batch


EVEN, UNEVEN = (5, 8, 4, 12), (5, 10, 15, 30, 5)


def fsdp(model: nn.Module, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True, **options)
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, width: int) -> None:
    model(torch.rand(4, width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def every_second_rank() -> Any:
    """A group of the ranks with the same parity."""
    world_size = dist.get_world_size()
    groups = [dist.new_group(list(range(parity, world_size, 2))) for parity in (0, 1)]
    return groups[dist.get_rank() % 2]


def fsdp_model(training: Training, is_resharded: bool) -> None:
    model = fsdp(nn.Linear(8, 8))
    other = fsdp(nn.Linear(8, 8), process_group=every_second_rank() if is_resharded else None)
    save(training, {"model": model.state_dict()})
    loaded = {"model": other.state_dict()}
    load(training, loaded)
    other.load_state_dict(loaded["model"])
    with FullyShardedDataParallel.summon_full_params(model), FullyShardedDataParallel.summon_full_params(other):
        assert torch.equal(model.weight, other.weight)
        assert torch.equal(model.bias, other.bias)


def test_fsdp_model_is_read_by_the_same_ranks(two: Call) -> None:
    two(fsdp_model, False)


@pytest.mark.long
def test_fsdp_model_is_read_with_another_sharding(four: Call) -> None:
    four(fsdp_model, True)


def fsdp_optimizer(training: Training, has_planner: bool) -> None:
    def build() -> tuple[Any, torch.optim.Optimizer]:
        model = fsdp(Net(8, 4, 8, 12))
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    model, optimizer = build()
    step(model, optimizer, 8)
    saved = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    save(training, {"model": model.state_dict(), "optim": saved})
    model, optimizer = build()
    loaded = {"model": model.state_dict()}
    load(training, loaded)
    model.load_state_dict(loaded["model"])
    state = load_sharded_optimizer_state_dict(
        model_state_dict=loaded["model"],
        optimizer_key="optim",
        storage_reader=TierdReader(training.client, step=training.step),
        planner=dcp.DefaultLoadPlanner() if has_planner else None,
    )
    optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state["optim"]))
    after = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    assert saved["state"].keys() == after["state"].keys()
    for name, values in saved["state"].items():
        assert differences(dict(values), dict(after["state"][name])) == []


@pytest.mark.long
@pytest.mark.parametrize("has_planner", [True, False])
def test_sharded_state_of_an_fsdp_optimizer_is_read(two: Call, has_planner: bool) -> None:
    two(fsdp_optimizer, has_planner)


def hsdp(sizes: tuple[int, ...]) -> Any:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    return fsdp(Net(*sizes), sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)


def hsdp_model(training: Training, sizes: tuple[int, ...]) -> None:
    model = hsdp(sizes)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    expected = copy.deepcopy(model.state_dict())
    save(training, {"model": model.state_dict()})
    step(model, optimizer, 5)
    loaded = {"model": model.state_dict()}
    assert differences(loaded["model"], expected)
    load(training, loaded)
    model.load_state_dict(loaded["model"])
    assert differences(model.state_dict(), expected) == []


@pytest.mark.long
@pytest.mark.parametrize("sizes", [EVEN, UNEVEN])
def test_hsdp_model_is_read(four: Call, sizes: tuple[int, ...]) -> None:
    four(hsdp_model, sizes)


def hsdp_to_fsdp(training: Training, sizes: tuple[int, ...]) -> None:
    saved = hsdp(sizes).state_dict()
    save(training, {"model": saved})
    model = fsdp(Net(*sizes), device_mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    loaded = {"model": model.state_dict()}
    load(training, loaded)
    model.load_state_dict(loaded["model"])
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.full_tensor(), saved[name].full_tensor()), name


@pytest.mark.long
@pytest.mark.parametrize("sizes", [EVEN, UNEVEN])
def test_hsdp_model_is_read_by_fsdp(four: Call, sizes: tuple[int, ...]) -> None:
    four(hsdp_to_fsdp, sizes)


def tensor_parallel(sizes: tuple[int, ...], *, device: str = "cpu") -> Any:
    plan = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
    return parallelize_module(Net(*sizes, device=device), init_device_mesh("cpu", (dist.get_world_size(),)), plan)


def tp_model(training: Training) -> None:
    model = tensor_parallel((10, 16, 10))
    expected = copy.deepcopy(model.state_dict())
    save(training, model.state_dict())
    step(model, torch.optim.SGD(model.parameters(), lr=0.25), 10)
    loaded = model.state_dict()
    assert differences(loaded, expected)
    load(training, loaded)
    assert differences(loaded, expected) == []


def test_tensor_parallel_model_is_read(two: Call) -> None:
    two(tp_model)


def tp_model_on_meta(training: Training) -> None:
    expected = tensor_parallel((5, 10, 15, 1)).state_dict()
    save(training, expected)
    model = tensor_parallel((5, 10, 15, 1), device="meta")
    loaded = model.state_dict()
    load(training, loaded)
    model.load_state_dict(loaded, assign=True)
    assert differences(model.state_dict(), expected) == []


@pytest.mark.long
def test_tensor_parallel_model_is_read_into_meta_tensors(two: Call) -> None:
    two(tp_model_on_meta)


def fsdp_to_tp(training: Training) -> None:
    model = fsdp(Net(10, 16, 10), device_mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    saved = model.state_dict()
    save(training, saved)
    other = tensor_parallel((10, 16, 10))
    loaded = other.state_dict()
    load(training, loaded)
    other.load_state_dict(loaded)
    for name, tensor in other.state_dict().items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        assert torch.equal(whole, saved[name].full_tensor()), name


def test_fsdp_model_is_read_by_a_tensor_parallel_one(two: Call) -> None:
    two(fsdp_to_tp)


# ── end to end: e2e/test_e2e_save_and_load.py, e2e/test_fine_tuning.py ──


class App:
    """Model and optimizer as one Stateful, by DCP's own state dicts."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = dcp_state.get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        dcp_state.set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )


class Progress:
    def __init__(self) -> None:
        self.state: dict[str, Any] = {"step": torch.tensor(0), "losses": []}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


MODELS: dict[str, Callable[[], Any]] = {
    "fsdp": lambda: fsdp(Net(*EVEN), device_mesh=init_device_mesh("cpu", (dist.get_world_size(),))),
    "hsdp": lambda: hsdp(EVEN),
    "ddp": lambda: DistributedDataParallel(Net(*EVEN)),
}


def train_and_continue(training: Training, kind: str) -> None:
    torch.manual_seed(1)
    app, progress = App(MODELS[kind]()), Progress()
    for number in (1, 2):
        torch.manual_seed(number)
        step(app.model, app.optimizer, 5)
        progress.state = {"step": torch.tensor(number), "losses": [*progress.state["losses"], number / 3]}
    save(training, {"app": app, "progress": progress})
    torch.manual_seed(2)
    other, loaded = App(MODELS[kind]()), Progress()
    load(training, {"app": other, "progress": loaded})
    assert loaded.state["step"] == 2
    assert loaded.state["losses"] == [1 / 3, 2 / 3]
    for each in (app, other):
        torch.manual_seed(3)
        step(each.model, each.optimizer, 5)
    expected, actual = app.state_dict(), other.state_dict()
    assert differences(actual["model"], expected["model"]) == []
    for name, values in expected["optimizer"]["state"].items():
        assert differences(dict(actual["optimizer"]["state"][name]), dict(values)) == []


@pytest.mark.parametrize("kind", ["fsdp", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("hsdp", "ddp"))])
def test_training_continues_equal_after_a_load(four: Call, kind: str) -> None:
    four(train_and_continue, kind)


def load_the_model_alone(training: Training) -> None:
    app = App(MODELS["fsdp"]())
    step(app.model, app.optimizer, 5)
    save(training, app.state_dict())
    model = MODELS["fsdp"]()
    loaded = {"model": dcp_state.get_model_state_dict(model)}
    load(training, loaded)
    assert differences(loaded["model"], app.state_dict()["model"]) == []


@pytest.mark.long
def test_model_alone_is_read_from_a_checkpoint_with_optimizer(four: Call) -> None:
    four(load_the_model_alone)


class Collective:
    """A Stateful whose load waits for all ranks: they must load the same one at the same time."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        dist.all_reduce(torch.ones(self.count))


def keys_in_another_order(training: Training) -> None:
    state = {"A": Collective(2), "B": Collective(3)}
    if dist.get_rank():
        state = dict(reversed(state.items()))
    save(training, state)
    load(training, state)


def test_keys_may_have_another_order_on_each_rank(four: Call) -> None:
    four(keys_in_another_order)


class FineTuned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pretrained = Net(*EVEN)
        self.pretrained.requires_grad_(False)
        self.head = Net(12, 6)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.head(self.pretrained(batch))


def fine_tune(training: Training) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    expected = dcp_state.get_model_state_dict(fsdp(Net(*EVEN), device_mesh=mesh))
    save(training, {"model": expected})
    model = fsdp(FineTuned(), device_mesh=mesh)
    everything = dcp_state.get_model_state_dict(model)
    frozen = {name.partition("pretrained.")[2]: everything[name] for name in everything if "pretrained." in name}
    load(training, {"model": frozen})
    assert differences(frozen, expected) == [], "the pretrained part"
    step(model, torch.optim.Adam((value for value in model.parameters() if value.requires_grad), lr=0.1), 5)
    saved = {name: tensor for name, tensor in dcp_state.get_model_state_dict(model).items() if "head." in name}
    save(training, {"model": saved})
    loaded = {"model": {name: torch.zeros_like(tensor) for name, tensor in saved.items()}}
    load(training, loaded)
    assert differences(loaded["model"], saved) == [], "the trained part"
    assert any(tensor.full_tensor().any() for tensor in saved.values())


@pytest.mark.long
def test_fine_tuned_part_is_saved_and_read_alone(four: Call) -> None:
    four(fine_tune)
