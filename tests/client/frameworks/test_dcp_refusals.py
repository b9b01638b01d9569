"""What DCP over tierd cannot store is refused by name, and every other name and object is read back."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import tierd_client
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tierd_client import Client, Unsupported
from tierd_client.frameworks.dcp import TierdReader, TierdWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.daemon import Daemon
from tests.support.processes import context
from tests.support.state import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon


@pytest.fixture
def client(daemon: Daemon, request: pytest.FixtureRequest) -> Iterator[Client]:
    with tierd_client.connect(request.node.name, socket=daemon.socket) as client:
        yield client


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def causes(error: BaseException) -> str:
    """The errors of the ranks in DCP's CheckpointException."""
    failures: dict[int, Any] = getattr(error, "failures", {})
    return "; ".join(f"{type(cause).__name__}: {cause}" for cause, *_ in failures.values())


def test_tensors_whose_names_end_like_those_inside_objects_are_loaded(client: Client) -> None:
    saved = {"weight#object": torch.ones(2), "nested": {"#object": torch.ones(3)}, "step": 7}
    dcp.save(saved, storage_writer=TierdWriter(client, 1))
    loaded = {"weight#object": torch.zeros(2), "nested": {"#object": torch.zeros(3)}, "step": 0}
    dcp.load(loaded, storage_reader=TierdReader(client))
    assert_same(loaded, saved)


def test_tensor_with_the_name_of_one_inside_an_object_is_refused(client: Client) -> None:
    planner = DefaultSavePlanner(flatten_state_dict=False)
    state = {"app": {"weight": torch.ones(2)}, "app.weight#object": torch.zeros(5)}
    with pytest.raises(BaseException, match="dcp") as caught:
        dcp.save(state, storage_writer=TierdWriter(client, 1), planner=planner)
    assert "Unsupported: capture app.weight#object: a tensor inside the object app" in causes(caught.value)


@pytest.mark.usefixtures("one_rank")
def test_dtensor_inside_an_object_is_refused(client: Client) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    state = {"app": {"weight": distribute_tensor(torch.ones(4), mesh, [Shard(0)])}}
    planner = DefaultSavePlanner(flatten_state_dict=False)
    with pytest.raises(BaseException, match="CheckpointException") as caught:
        dcp.save(state, storage_writer=TierdWriter(client, 1), planner=planner)
    assert "Unsupported: capture app.weight: a DTensor inside an object" in causes(caught.value)
    dcp.save(state, storage_writer=TierdWriter(client, 1))


def test_metadata_of_a_save_and_of_a_load_have_storage_meta(client: Client) -> None:
    saved = dcp.save({"a": torch.ones(1)}, storage_writer=TierdWriter(client), checkpoint_id="out/step-3")
    assert saved.storage_meta is not None
    assert (saved.storage_meta.checkpoint_id, bool(saved.storage_meta.save_id)) == ("3", True)
    read = TierdReader(client).read_metadata()
    assert read.storage_meta is not None
    assert (read.storage_meta.checkpoint_id, bool(read.storage_meta.load_id)) == ("3", True)


def test_writer_and_reader_are_not_pickled_for_another_process(client: Client) -> None:
    for storage in (TierdWriter(client, 1), TierdReader(client)):
        with pytest.raises(Unsupported, match=r"tierd from another process: only the trainer's process"):
            pickle.dumps(storage)


def save_in_process(socket: str, results: Any) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    client = tierd_client.connect("process", socket=socket)
    saving: Any = dcp.async_save(
        {"a": torch.ones(1)},
        storage_writer=TierdWriter(client, 1),
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    results.put(repr(saving.exception(120)))
    client.close()


@pytest.mark.long
def test_async_save_by_a_process_ends_with_unsupported(daemon: Daemon) -> None:
    results = context.Queue()
    trainer = context.Process(target=save_in_process, args=(daemon.socket, results))
    trainer.start()
    try:
        assert "Unsupported" in results.get(timeout=180)
    finally:
        trainer.kill()
        trainer.join()
