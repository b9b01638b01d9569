"""What PyTorch tests of DCP with its file storage in one process, with TierdWriter and TierdReader in its place.

`tests/client/frameworks/upstream.py` lists PyTorch's tests and the tests here that take their place.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import tierd_client
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tierd_client import Client
from tierd_client.frameworks.dcp import TierdReader, TierdWriter
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from tests.support.daemon import Daemon
from tests.support.state import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon


@pytest.fixture
def client(daemon: Daemon, request: pytest.FixtureRequest) -> Iterator[Client]:
    with tierd_client.connect(request.node.originalname, socket=daemon.socket) as client:
        client.restore(tierd_client.DictState({}), resume="scratch", force=True)
        yield client


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 1))
        self.embedding = nn.EmbeddingBag(5, 10)


class Stateful:
    """An object with state that DCP asks for and gives back."""

    def __init__(self, **state: Any) -> None:
        self.state = state
        self.is_loaded = False

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state, self.is_loaded = state, True


def test_tensors_of_a_module_are_read_without_torch_distributed(client: Client) -> None:
    saved, loaded = Module().state_dict(), Module().state_dict()
    dcp.save(saved, storage_writer=TierdWriter(client, 1), no_dist=True)
    dcp.load(loaded, storage_reader=TierdReader(client), no_dist=True)
    assert_same(dict(loaded), dict(saved))


def test_tensors_and_the_bytes_of_a_stateful_are_read(client: Client) -> None:
    saved: dict[str, Any] = {**Module().state_dict(), "blob": Stateful(blob=b"some blob for a test")}
    loaded: dict[str, Any] = {**Module().state_dict(), "blob": Stateful(blob=b"")}
    dcp.save(saved, storage_writer=TierdWriter(client, 1))
    dcp.load(loaded, storage_reader=TierdReader(client))
    assert_same(loaded.pop("blob").state, saved.pop("blob").state)
    assert_same(loaded, saved)


def test_statefuls_are_loaded_in_place_and_dicts_are_replaced(client: Client) -> None:
    stateful = Stateful()
    state: dict[str, Any] = {"stateful": stateful, "plain": {"replicated": torch.rand(10, 10), "bytes": [1, 2, 3, 4]}}
    dcp.save(state, storage_writer=TierdWriter(client, 1))
    expected = state["plain"]
    state["plain"] = {"replicated": torch.zeros(10, 10), "bytes": [0]}
    dcp.load(state, storage_reader=TierdReader(client))
    assert state["stateful"] is stateful
    assert stateful.is_loaded
    assert_same(state["plain"], expected)


def test_empty_state_is_saved_and_loaded(client: Client) -> None:
    dcp.save({}, storage_writer=TierdWriter(client, 1))
    dcp.load({}, storage_reader=TierdReader(client))


def test_missing_key_is_refused_unless_the_planner_allows_it(client: Client) -> None:
    dcp.save({"module": nn.Linear(2, 2)}, storage_writer=TierdWriter(client, 1))
    module = nn.Linear(2, 2)
    module.extra = nn.Parameter(torch.randn(2, 2))
    partial = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load({"module": module}, storage_reader=TierdReader(client), planner=partial)
    with pytest.raises(CheckpointException, match="Missing key in checkpoint"):
        dcp.load({"module": module}, storage_reader=TierdReader(client))


def test_tensor_of_another_size_is_refused(client: Client) -> None:
    dcp.save({"module": nn.Linear(2, 2)}, storage_writer=TierdWriter(client, 1))
    with pytest.raises(CheckpointException, match="Size mismatch"):
        dcp.load({"module": nn.Linear(3, 2)}, storage_reader=TierdReader(client))


def test_metadata_has_the_version_of_dcp(client: Client) -> None:
    dcp.save({"module": nn.Linear(2, 2)}, storage_writer=TierdWriter(client, 1))
    planner = DefaultLoadPlanner()
    dcp.load({"module": nn.Linear(2, 2)}, storage_reader=TierdReader(client), planner=planner)
    assert planner.metadata is not None
    assert planner.metadata.version == CURRENT_DCP_VERSION


def test_storage_meta_names_the_checkpoint_the_save_and_the_load(client: Client) -> None:
    writer, reader = TierdWriter(client), TierdReader(client)
    dcp.save({"a": torch.zeros(4, 4)}, storage_writer=writer, checkpoint_id="3")
    meta = reader.read_metadata().storage_meta
    assert meta is not None
    assert (meta.checkpoint_id, meta.save_id, meta.load_id) == ("3", writer.save_id, reader.load_id)
    assert writer.save_id == f"000000000003-g{client.generation:04d}"


def test_second_save_of_a_step_is_refused(client: Client) -> None:
    dcp.save({"random": torch.ones(10)}, storage_writer=TierdWriter(client, 1))
    with pytest.raises(CheckpointException, match="step 1 was taken before"):
        dcp.save({"random": torch.zeros(10)}, storage_writer=TierdWriter(client, 1))
    loaded = {"random": torch.zeros(10)}
    dcp.load(loaded, storage_reader=TierdReader(client))
    assert loaded["random"].sum() == 10


def test_state_dicts_of_model_and_optimizer_are_loaded_in_place(client: Client) -> None:
    def build(lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Module()
        return model, torch.optim.Adam(model.parameters(), lr=lr)

    model, optimizer = build(0.1)
    saved = {
        "model": dcp_state.get_model_state_dict(model),
        "optimizer": dcp_state.get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(saved, storage_writer=TierdWriter(client, 1))
    model, optimizer = build(0.2)
    own_model = dcp_state.get_model_state_dict(model)
    own_optimizer = dcp_state.get_optimizer_state_dict(model, optimizer)
    loaded: dict[str, Any] = {"model": own_model, "optimizer": own_optimizer}
    dcp.load(loaded, storage_reader=TierdReader(client))
    assert loaded["model"] is own_model
    assert loaded["optimizer"] is own_optimizer
    dcp_state.set_state_dict(model, optimizer, model_state_dict=own_model, optim_state_dict=own_optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert_same(dict(dcp_state.get_model_state_dict(model)), dict(saved["model"]))


@pytest.mark.usefixtures("one_rank")
def test_keys_alone_load_a_part_of_the_checkpoint(client: Client) -> None:
    model = Module()
    saved = {"model": dict(model.state_dict()), "optimizer": {"state": {"moment": torch.ones(3)}, "lr": 0.1}}
    dcp.save(saved, storage_writer=TierdWriter(client, 1))
    assert_same(_load_state_dict_from_keys("model", storage_reader=TierdReader(client))["model"], saved["model"])
    part = _load_state_dict_from_keys("optimizer.state", storage_reader=TierdReader(client))
    assert_same(part, {"optimizer": {"state": {"moment": torch.ones(3)}}})


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("is_staging_async", [False, True])
def test_async_save_in_a_thread_with_a_stager_of_its_own(client: Client, is_staging_async: bool) -> None:
    state: dict[str, Any] = {"weight": torch.rand(100), "progress": Stateful(step=3, losses=[0.5, 0.25])}
    expected = state["weight"].clone()
    stager = DefaultStager(StagingOptions(False, False, is_staging_async, False))
    answer: Any = dcp.async_save(state, storage_writer=TierdWriter(client, 1), async_stager=stager)
    if is_staging_async:
        answer.staging_completion.result(60)
        answer = answer.upload_completion
    state["weight"].zero_()
    answer.result(60)
    stager.close()
    loaded: dict[str, Any] = {"weight": torch.zeros(100), "progress": Stateful(step=0, losses=[])}
    dcp.load(loaded, storage_reader=TierdReader(client))
    assert torch.equal(loaded["weight"], expected)
    assert loaded["progress"].state == {"step": 3, "losses": [0.5, 0.25]}


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch's reader
@pytest.mark.usefixtures("one_rank")
def test_torch_save_checkpoint_is_loaded_by_dcp_and_saved_to_tierd(client: Client, tmp_path: Any) -> None:
    from torch.distributed.checkpoint.format_utils import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner

    saved = {"model": dict(Module().state_dict())}
    torch.save(saved, tmp_path / "model.pt")
    read = {"model": dict(Module().state_dict())}
    dcp.load(
        read,
        planner=DynamicMetaLoadPlanner(),
        storage_reader=BroadcastingTorchSaveReader(),
        checkpoint_id=os.fspath(tmp_path / "model.pt"),
    )
    dcp.save(read, storage_writer=TierdWriter(client, 1))
    loaded = {"model": dict(Module().state_dict())}
    dcp.load(loaded, storage_reader=TierdReader(client))
    assert_same(loaded, saved)


class Failing:
    """Raises ValueError at one of the storage's calls. The rest is tierd's."""

    failing = ""

    def __getattribute__(self, name: str) -> Any:
        if name == object.__getattribute__(self, "failing"):
            raise ValueError(f"{name} fails")
        return super().__getattribute__(name)


class FailingWriter(Failing, TierdWriter):
    pass


class FailingReader(Failing, TierdReader):
    pass


@pytest.mark.parametrize(
    "stage", ["set_up_storage_writer", "prepare_local_plan", "prepare_global_plan", "write_data", "finish"]
)
def test_failure_at_a_stage_of_a_save_is_raised_and_the_next_save_succeeds(client: Client, stage: str) -> None:
    writer = FailingWriter(client, 1)
    writer.failing = stage
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"replicated": torch.ones(10), "bytes": [1, 2]}, storage_writer=writer)
    assert {rank: type(failure[0]) for rank, failure in caught.value.failures.items()} == {0: ValueError}
    dcp.save({"replicated": torch.ones(10), "bytes": [1, 2]}, storage_writer=TierdWriter(client, 2))


@pytest.mark.parametrize(
    "stage",
    [
        "set_up_storage_reader",
        *(
            pytest.param(stage, marks=pytest.mark.long)
            for stage in ("read_metadata", "prepare_local_plan", "prepare_global_plan")
        ),
        "read_data",
    ],
)
def test_failure_at_a_stage_of_a_load_is_raised_and_the_next_load_succeeds(client: Client, stage: str) -> None:
    dcp.save({"replicated": torch.ones(10), "bytes": [1, 2]}, storage_writer=TierdWriter(client, 1))
    loaded = {"replicated": torch.zeros(10), "bytes": [0]}
    reader = FailingReader(client)
    reader.failing = stage
    with pytest.raises(CheckpointException) as caught:
        dcp.load(loaded, storage_reader=reader)
    assert list(caught.value.failures) == [0]
    dcp.load(loaded, storage_reader=TierdReader(client))
    assert_same(loaded, {"replicated": torch.ones(10), "bytes": [1, 2]})
