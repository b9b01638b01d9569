"""DCP over tierd saves and loads what stock DCP does, without pickle, on any number of ranks."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tierd_client
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tierd_client import Client, DictState, NotFound, TargetNotEmpty
from tierd_client.frameworks.dcp import TierdReader, TierdWriter, step_of
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.fsdp import fully_shard

from tests.support.daemon import Daemon
from tests.support.state import assert_same
from tests.support.trainer import Trainer, Training, together
from tierd.errors import BadConfig

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("daemon"), more="[lifecycle.hot]\nkeep_last = 20\n") as daemon:
        yield daemon


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    """Each test has its own run."""
    return request.node.name


@pytest.fixture
def client(daemon: Daemon, run: str) -> Iterator[Client]:
    with tierd_client.connect(run, socket=daemon.socket) as client:
        yield client


@pytest.fixture
def without_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.save and torch.load raise."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("pickle")

    monkeypatch.setattr(torch, "save", refuse)
    monkeypatch.setattr(torch, "load", refuse)


def example() -> dict[str, Any]:
    return {
        "model": {"weight": torch.arange(12.0).view(3, 4), "half": torch.ones(3, dtype=torch.bfloat16)},
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 5),
        "strided": torch.arange(6.0).view(2, 3).t(),
        "list": [torch.tensor([1.0]), {"deep": torch.tensor([2.0])}],
        "step": 3,
        "betas": (0.9, 0.99),
        "nothing": None,
        "raw": b"\x00\xff",
        "array": np.arange(5, dtype=np.int16),
        "words": ["a", "b"],
    }


def blank(value: Any) -> Any:
    """The same structure with other content: `dcp.load` needs tensors where tensors are stored."""
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    if isinstance(value, list):
        return [blank(item) for item in value]
    return torch.full_like(value, 9) if isinstance(value, torch.Tensor) else "something else"


@pytest.mark.usefixtures("without_pickle")
def test_saved_state_is_loaded_in_place_and_objects_are_never_pickled(client: Client) -> None:
    saved = example()
    writer = TierdWriter(client, step=5, metrics={"loss": 0.5}, wait_persisted=True)
    dcp.save(saved, storage_writer=writer)
    assert writer.shot is not None
    assert writer.shot.is_persisted

    loaded = blank(saved)
    weight = loaded["model"]["weight"]
    reader = TierdReader(client)
    assert reader.find() == 5
    dcp.load(loaded, storage_reader=reader)

    assert loaded["model"]["weight"] is weight
    assert loaded["array"].dtype == np.int16
    assert loaded.pop("array").tolist() == saved.pop("array").tolist()
    assert_same(loaded, saved)
    assert reader.found is not None
    assert (reader.found.step, reader.found.metrics) == (5, {"loss": 0.5})


def test_stock_torch_reader_reads_the_same_files(client: Client, daemon: Daemon, run: str) -> None:
    writer = TierdWriter(client, wait_persisted=True)
    dcp.save(example(), storage_writer=writer, checkpoint_id="outputs/step-12")

    names = ("model.weight", "model.half", "scalar", "empty", "strided")
    flat = {"model.weight": torch.zeros(3, 4), "model.half": torch.zeros(3, dtype=torch.bfloat16)}
    flat |= {"scalar": torch.tensor(0), "empty": torch.empty(0, 5), "strided": torch.zeros(3, 2)}
    folder = daemon.folder(12, run=run)
    dcp.load(flat, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
    saved = example() | {f"model.{key}": value for key, value in example()["model"].items()}
    assert_same(flat, {name: saved[name].contiguous() for name in names})


def test_async_save_saves_the_state_at_the_time_of_the_call(client: Client) -> None:
    state = {"weight": torch.ones(1000)}
    saving: Any = dcp.async_save(state, storage_writer=TierdWriter(client, step=1))
    state["weight"].zero_()
    saving.result(60)
    dcp.load(state, storage_reader=TierdReader(client))
    assert state["weight"].sum() == 1000


def test_async_save_of_torch_2_6_is_refused(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """That torch hands over CPU tensors themselves, not copies, so a checkpoint would hold later values."""
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.6.0"))
    saving: Any = dcp.async_save({"weight": torch.ones(10)}, storage_writer=TierdWriter(client, step=1))
    with pytest.raises(dcp.api.CheckpointException, match=r"async_save to tierd with torch 2\.6\.0"):
        saving.result(60)
    dcp.save({"weight": torch.ones(10)}, storage_writer=TierdWriter(client, step=1))


def test_part_of_a_checkpoint_is_loaded_and_converted_to_another_dtype(client: Client) -> None:
    dcp.save(example(), storage_writer=TierdWriter(client, step=1))
    part = {"model": {"weight": torch.zeros(3, 4, dtype=torch.bfloat16)}}
    dcp.load(part, storage_reader=TierdReader(client, step=1))
    assert torch.equal(part["model"]["weight"], example()["model"]["weight"].bfloat16())


def test_checkpoint_of_a_training_state_is_loaded_by_its_names(client: Client) -> None:
    model = nn.Linear(3, 2)
    client.snapshot(1, tierd_client.TrainingState(model=model))
    loaded = {"model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}}
    dcp.load(loaded, storage_reader=TierdReader(client))
    assert_same(loaded["model"], dict(model.state_dict()))


def test_loading_an_older_step_starts_a_generation_with_that_parent(client: Client, daemon: Daemon, run: str) -> None:
    for step in (1, 2):
        dcp.save({"a": torch.tensor(step)}, storage_writer=TierdWriter(client, step, wait_persisted=True))
    loaded = {"a": torch.tensor(0)}
    dcp.load(loaded, storage_reader=TierdReader(client), checkpoint_id="1")
    assert loaded["a"].item() == 1
    dcp.save(loaded, storage_writer=TierdWriter(client, 2, wait_persisted=True))
    shown = daemon.json("show", run, "2")["manifest"]
    assert (shown["generation"], shown["parent"]["step"], shown["parent"]["generation"]) == (2, 1, 1)


def test_find_returns_none_without_a_checkpoint(client: Client) -> None:
    assert TierdReader(client).find() is None
    with pytest.raises(NotFound):
        TierdReader(client, step=3).find()
    with pytest.raises(BaseException, match="there is none"):
        dcp.load({"a": torch.zeros(1)}, storage_reader=TierdReader(client))


def test_the_environment_selects_the_checkpoint(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator sets TIERD_RESUME without a change to the script."""
    monkeypatch.setenv("TIERD_RESUME", "require")
    with pytest.raises(NotFound):
        TierdReader(client).find()
    for step in (1, 2):
        writer = TierdWriter(client, step)
        dcp.save({"w": torch.full((2,), float(step))}, storage_writer=writer)
        assert writer.shot is not None
        writer.shot.wait_persisted(timeout_s=60)  # else the second one may take its place
    assert TierdReader(client).find() == 2
    monkeypatch.setenv("TIERD_RESUME", "1")
    reader = TierdReader(client)
    assert reader.find() == 1
    state = {"w": torch.zeros(2)}
    dcp.load(state, storage_reader=reader)
    assert state["w"].tolist() == [1.0, 1.0]
    monkeypatch.setenv("TIERD_RESUME", "scratch")
    with pytest.raises(TargetNotEmpty):
        TierdReader(client).find()
    monkeypatch.setenv("TIERD_RESUME", "run:another")
    with pytest.raises(BadConfig, match="run:another: this reader takes those of its own run"):
        TierdReader(client).find()


@pytest.mark.long
def test_damaged_replica_is_replaced_by_another_of_the_same_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Daemon(tmp_path) as daemon:
        with tierd_client.connect("run", socket=daemon.socket) as client:
            writer = TierdWriter(client, step=1)
            dcp.save({"weight": torch.ones(18 << 20)}, storage_writer=writer)  # two chunks: the header is sound
            assert writer.shot is not None
            writer.shot.wait_replicated(timeout_s=60)
        daemon.kill()
        shard = next(daemon.folder(1).glob("*.safetensors"))
        with shard.open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"\x00")
        daemon.start()
        with tierd_client.connect("run", socket=daemon.socket) as client:
            loaded, reader = {"weight": torch.zeros(18 << 20)}, TierdReader(client)
            dcp.load(loaded, storage_reader=reader)
    assert loaded["weight"].min() == 1
    assert reader.found is not None
    assert reader.found.tier == "cold"
    assert "trying the next replica" in caplog.text


def raised(error: BaseException) -> str:
    """The errors of the ranks in DCP's CheckpointException."""
    failures: dict[int, Any] = getattr(error, "failures", {})
    return "; ".join(f"{type(cause).__name__}: {cause}" for cause, *_ in failures.values())


def test_object_without_a_safe_form_in_dcp_is_refused_by_its_name(client: Client) -> None:
    with pytest.raises(BaseException, match="dcp") as caught:
        dcp.save({"a": {"hook": print}}, storage_writer=TierdWriter(client, 1))
    assert "Unsupported: encode a.hook" in raised(caught.value) + str(caught.value)


class Foreign(SavePlanner):
    """Delegates to a DefaultSavePlanner, but is not one."""

    def __init__(self) -> None:
        self.inner = DefaultSavePlanner()

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.inner.set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> Any:
        return self.inner.create_local_plan()

    def create_global_plan(self, all_plans: Any) -> Any:
        return self.inner.create_global_plan(all_plans)

    def finish_plan(self, new_plan: Any) -> Any:
        return self.inner.finish_plan(new_plan)

    def resolve_data(self, write_item: Any) -> Any:
        return self.inner.resolve_data(write_item)


class Opaque(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise AssertionError("not called")


def test_planners_that_require_pickle_are_refused_by_name(client: Client) -> None:
    with pytest.raises(BaseException, match=r".*") as caught:
        dcp.save({"a": 1}, storage_writer=TierdWriter(client, 1), planner=Foreign())
    assert "a Foreign gives objects only pickled" in raised(caught.value)
    dcp.save({"a": 1}, storage_writer=TierdWriter(client, 1))
    with pytest.raises(BaseException, match=r".*") as caught:
        dcp.load({"a": 0}, storage_reader=TierdReader(client), planner=Opaque())
    assert "a Opaque takes objects only pickled" in raised(caught.value)


def test_step_is_the_number_at_the_end_of_a_checkpoint_id() -> None:
    assert [step_of(checkpoint_id) for checkpoint_id in ("7", "out/step-1000", Path("a/step_20"))] == [7, 1000, 20]
    with pytest.raises(BadConfig, match="ends with no number"):
        step_of("outputs/latest")


# ── several ranks ──


class App:
    """As in torchtitan: model and optimizer as one Stateful, by DCP's own state dicts."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = dcp_state.get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        dcp_state.set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )


def begin(training: Training, rank: int, world_size: int, rendezvous: str, socket: str) -> None:
    """Makes this process one rank of an FSDP2 training."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    torch.manual_seed(training.extra["seed"])
    model = nn.Sequential(nn.Linear(10, 13), nn.GELU(), nn.Linear(13, 10))
    mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    training.model = fully_shard(model, mesh=mesh)
    training.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    training.extra["app"] = App(training.model, training.optimizer)
    training.client = tierd_client.connect("sharded", socket=socket)


def step_on(training: Training, steps: int) -> list[float]:
    losses: list[float] = []
    for _ in range(steps):
        training.step += 1
        batch = torch.randn(4, 10, generator=torch.Generator().manual_seed(100 * training.step + dist.get_rank()))
        loss = training.model(batch).square().mean()
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def start_anew(training: Training) -> None:
    """The run has checkpoints of other tests."""
    training.client.restore(DictState({}), resume="scratch", force=True)


def save(training: Training) -> None:
    writer = TierdWriter(training.client, training.step, wait_persisted=True)
    dcp.save({"app": training.extra["app"], "train": {"step": training.step}}, storage_writer=writer)


def save_beside(training: Training) -> list[float]:
    """Saves in DCP's thread while the training thread calls due() and trains. Returns the losses."""
    writer = TierdWriter(training.client, training.step)
    saving: Any = dcp.async_save(
        {"app": training.extra["app"], "train": {"step": training.step}},
        storage_writer=writer,
        process_group=dist.new_group(backend="gloo"),
    )
    assert not any(training.client.due(step) for step in range(1, 51))
    losses = step_on(training, 2)
    saving.result(60)
    return losses


def resume(training: Training, step: int | None = None) -> int:
    reader = TierdReader(training.client, step=step)
    reader.find()
    state: dict[str, Any] = {"app": training.extra["app"], "train": {"step": 0}}
    dcp.load(state, storage_reader=reader)
    training.step = state["train"]["step"]
    return training.step


def whole(training: Training) -> dict[str, torch.Tensor]:
    """Every tensor of the app, gathered."""
    options = dcp_state.StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    model, optimizer = dcp_state.get_state_dict(training.model, training.optimizer, options=options)
    return {name: value for name, value in {**model, **optimizer}.items() if isinstance(value, torch.Tensor)}


@contextmanager
def sharded(daemon: Daemon, world_size: int, seed: int) -> Generator[list[Trainer]]:
    with ExitStack() as stack:
        ranks = [stack.enter_context(Trainer(extra={"seed": seed})) for _ in range(world_size)]
        rendezvous = daemon.root / f"rendezvous-{ranks[0].pid}"
        for rank, trainer in enumerate(ranks):
            trainer.begin("apply", begin, rank, world_size, str(rendezvous), daemon.socket)
        for trainer in ranks:
            trainer.end()
        yield ranks
        for trainer in ranks:
            trainer.kill()


def test_fsdp_training_killed_and_resumed_is_identical_to_an_undisturbed_one(daemon: Daemon) -> None:
    with sharded(daemon, 2, seed=1) as first:
        together(first, "apply", step_on, 3)
        together(first, "apply", save)
        expected = together(first, "apply", step_on, 4)
        assert expected[0] != expected[1]

    with sharded(daemon, 2, seed=2) as second:
        assert together(second, "apply", resume) == [3, 3]
        assert together(second, "apply", step_on, 4) == expected
        # Step 7 is saved by one thread while the training thread exchanges with the other ranks too.
        expected = together(second, "apply", save_beside)
        assert together(second, "apply", resume, 7) == [7, 7]
        assert together(second, "apply", step_on, 2) == expected


@pytest.mark.long
def test_dcp_loads_the_same_state_on_another_number_of_ranks(daemon: Daemon) -> None:
    with sharded(daemon, 4, seed=3) as four:
        together(four, "apply", start_anew)
        together(four, "apply", step_on, 2)
        together(four, "apply", save)
        expected = four[0].begin("apply", whole) or together(four[1:], "apply", whole)[0]
        four[0].end()
    assert len({name for name in expected if "exp_avg" in name}) == 8

    with sharded(daemon, 2, seed=4) as two:
        assert together(two, "apply", resume) == [2, 2]
        loaded = together(two, "apply", whole)
    assert_same(loaded[0], expected)
    assert_same(loaded[1], expected)


def save_own_part(training: Training) -> None:
    """As with pipeline stages: each rank has tensors of the model that the other one lacks."""
    rank = dist.get_rank()
    state = {"model": {f"stage{rank}": torch.full((3,), float(rank))}}
    dcp.save(state, storage_writer=TierdWriter(training.client, 9, wait_persisted=True))


def load_own_part(training: Training) -> list[float]:
    rank = dist.get_rank()
    state = {"model": {f"stage{rank}": torch.zeros(3)}}
    dcp.load(state, storage_reader=TierdReader(training.client, step=9))
    return state["model"][f"stage{rank}"].tolist()


def test_ranks_that_save_different_tensors_of_the_model_load_their_own(daemon: Daemon) -> None:
    with sharded(daemon, 2, seed=6) as ranks:
        together(ranks, "apply", start_anew)
        together(ranks, "apply", save_own_part)
        assert together(ranks, "apply", load_own_part) == [[0.0] * 3, [1.0] * 3]
