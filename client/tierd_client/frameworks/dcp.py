"""torch.distributed.checkpoint over tierd: `dcp.save`, `async_save` and `load` with one more argument.

writer = TierdWriter(client)
dcp.save(state_dict, storage_writer=writer, checkpoint_id=f"step-{step}")
reader = TierdReader(client)
if reader.find() is not None:
    dcp.load(state_dict, storage_reader=reader)

DCP plans which rank writes which part of a tensor, and which parts each rank reads for another sharding. Tensors keep
DCP's names, so torch's HuggingFaceStorageReader reads the same files. Objects are written as tagged JSON, never
pickled. All ranks of the client save and load together.
"""

from __future__ import annotations

import os
import re
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePath
from typing import Any, ClassVar, NoReturn

import msgspec
import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    Metadata,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from tierd.errors import BadConfig, BadRequest, Mismatch, Unsupported
from tierd_client.client import Client, Found
from tierd_client.frameworks.dcp_contents import KIND, OBJECT, DcpContents, DcpTree, contents_of, name_of
from tierd_client.restore.load import read_headers
from tierd_client.restore.replica import Replica, RestoreRequest
from tierd_client.snapshot.handle import Shot
from tierd_client.state.encoding import Collector, Json
from tierd_client.state.restore_plan import RestorePlan
from tierd_client.state.tensors import DTYPES, CapturedTensor, capture_tensor, describe
from tierd_client.state.training_state import Captured


class _OnAllRanks:
    """What the writer and the reader share: DCP's plans stay as they are, and all ranks of the client take part."""

    _client: Client
    _action: ClassVar[str]

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        if len(plans) != self._client.world_size:
            raise Unsupported(
                f"{self._action} tierd: only {len(plans)} of the {self._client.world_size} connected ranks take part",
                hint="all ranks of the client save and load together: do not pass no_dist=True or a smaller "
                "process_group=",
            )
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # DCP must not select a class of ours by a path

    def __reduce__(self) -> NoReturn:
        raise Unsupported(
            f"{self._action} tierd from another process: only the trainer's process is connected to the daemon",
            hint="with async_save, leave async_checkpointer_type as it is (THREAD); dcp.save returns as early",
        )


class TierdWriter(_OnAllRanks, StorageWriter):
    """For `dcp.save(…, storage_writer=)`: a snapshot of `step`, or of the number that `checkpoint_id` ends with.

    All ranks construct theirs at the same point. `save` returns when the snapshot is in the memory tier and training
    may go on, so `async_save` saves no time. It needs torch 2.7: with 2.6 it raises Unsupported. With `wait_persisted`,
    `save` returns when the snapshot is durable.
    `metrics`, `milestone`: as in Client.snapshot. `shot` is the handle of the last snapshot, on every rank.

    `dcp.save` raises its CheckpointException around BadConfig when there is no step, Unsupported for an object that has
    no safe form, a planner that only pickles, or a subset of the ranks, and the errors of Client.snapshot. The future
    of `dcp.async_save` with AsyncCheckpointerType.PROCESS raises Unsupported.
    """

    _action = "dcp.save to"

    def __init__(
        self,
        client: Client,
        step: int | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        milestone: str | None = None,
        wait_persisted: bool = False,
    ) -> None:
        self.shot: Shot | None = None
        self._client = client
        self._step = step
        self._metrics = metrics
        self._milestone = milestone
        self._wait_persisted = wait_persisted
        self.save_id: str | None = None
        self._thread = threading.get_ident()
        client.allow_thread()  # async_save writes from another thread

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._step = step_of(checkpoint_id)

    def storage_meta(self) -> StorageMeta:
        """For the planner, and in the Metadata that `dcp.save` returns. `checkpoint_id` is the step, as a string."""
        return StorageMeta(checkpoint_id=f"{self._step}", save_id=self.save_id)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        _check_names([item for plan in plans for item in plan.items])
        return super().prepare_global_plan(plans)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._step is None:
            raise BadConfig("dcp.save to tierd: no step is given", hint="TierdWriter(client, step), or checkpoint_id=")
        if self._step == self._client.last_step:
            raise BadRequest(
                f"dcp.save to tierd: step {self._step} was taken before", hint="a checkpoint is not overwritten"
            )
        self.save_id = name_of(self._step, self._client.generation)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        assert self._step is not None
        if threading.get_ident() != self._thread and torch.__version__ < "2.7":
            # This torch does not copy CPU tensors before async_save returns: training may have changed them by now.
            raise Unsupported(
                f"dcp.async_save to tierd with torch {torch.__version__}",
                hint="call dcp.save, which returns as early, or use torch 2.7 or later",
            )
        state = PlannedState(plan, planner)
        self.shot = self._client.snapshot(self._step, state, metrics=self._metrics, milestone=self._milestone)
        written: Future[list[WriteResult]] = Future()
        written.set_result([WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Called on rank 0. `metadata` is not stored: the headers of the shards have the same content."""
        metadata.storage_meta = self.storage_meta()
        if self._wait_persisted and self.shot is not None:
            self.shot.wait_persisted()


@dataclass(frozen=True, slots=True)
class PlannedState:
    """What DCP plans for this rank to write. The client captures it, so that an error of one rank is raised on all."""

    plan: SavePlan
    planner: SavePlanner

    def capture(self, rank: int, world_size: int) -> Captured:
        return capture_plan(self.plan, self.planner)


def capture_plan(plan: SavePlan, planner: SavePlanner) -> Captured:
    """What DCP plans for this rank to write, without a copy. Raises Unsupported, naming what has no safe form."""
    into = Collector()
    into.suffix = OBJECT
    tensors: dict[str, CapturedTensor] = {}
    objects: dict[str, Json] = {}
    for item in plan.items:
        name = item.index.fqn
        if item.type == WriteItemType.BYTE_IO:
            objects[name] = _encode(item, planner, into)
        elif name in tensors:
            raise Unsupported(
                f"capture {name}: this rank holds several parts of it",
                hint="a shard file cannot store strided sharding or a ShardedTensor with several local shards",
            )
        else:
            tensors[name] = _capture_item(item, planner)
    paths: Mapping[str, Any] = plan.planner_data or {}
    tree = DcpTree(objects, {name: list(paths[name]) for name in (*tensors, *objects) if name in paths})
    sections = {KIND: {"kind": KIND, "suffix": "", "value": msgspec.to_builtins(tree)}}
    return Captured([*tensors.values(), *into.tensors], sections)


def _capture_item(item: WriteItem, planner: SavePlanner) -> CapturedTensor:
    local = planner.resolve_data(item)
    if not isinstance(local, torch.Tensor) or item.tensor_data is None:
        raise Unsupported(f"capture {item.index.fqn}: the planner gives a {type(local).__qualname__} for a tensor")
    chunk = item.tensor_data.chunk
    part = capture_tensor(item.index.fqn, local)
    if part.torch_dtype:
        raise Unsupported(f"save {part.name}: safetensors has no dtype for {local.dtype}", hint="use TrainingState")
    return msgspec.structs.replace(part, saved_offsets=tuple(chunk.offsets), global_shape=tuple(item.tensor_data.size))


def _check_names(items: list[WriteItem]) -> None:
    """Raises Unsupported when a tensor has the name under which a tensor inside an object may be stored."""
    objects = {item.index.fqn for item in items if item.type == WriteItemType.BYTE_IO}
    for item in items:
        path, is_marked, _ = item.index.fqn.rpartition(OBJECT)
        if is_marked and item.index.fqn not in objects:
            owner = next((name for name in objects if path == name or path.startswith((f"{name}.", f"{name}["))), None)
            if owner is not None:
                raise Unsupported(
                    f"capture {item.index.fqn}: a tensor inside the object {owner} would have the same name",
                    hint=f"give the tensor a name that does not end in {OBJECT}",
                )


def _encode(item: WriteItem, planner: SavePlanner, into: Collector) -> Json:
    """An object as JSON. It is looked up, because `resolve_data` would return it pickled."""
    if not isinstance(planner, DefaultSavePlanner):
        raise Unsupported(
            f"capture {item.index.fqn}: a {type(planner).__qualname__} gives objects only pickled",
            hint="derive the planner from DefaultSavePlanner, or keep only tensors in the state dict",
        )
    first = len(into.tensors)
    encoded = into.encode(planner.lookup_object(item.index), item.index.fqn)
    for tensor in into.tensors[first:]:
        if tensor.is_distributed:  # DCP has one rank write each object, and that rank holds one part
            raise Unsupported(
                f"capture {tensor.name}: a DTensor inside an object",
                hint="leave the planner's flatten_state_dict as it is (True), or give the tensor a key of its own",
            )
    return encoded


class TierdReader(_OnAllRanks, StorageReader):
    """For `dcp.load(…, storage_reader=)`: the newest checkpoint, or the requested one, from the nearest tier.

    `step` may also be given as the number that `checkpoint_id` ends with. Every byte that is read is verified. A
    damaged replica is reported, and another one of the same checkpoint is read. `found` describes the loaded one.

    `dcp.load` raises its CheckpointException around Mismatch when a tensor does not fit, Unsupported for a planner that
    only pickles or a subset of the ranks, and the errors of Client.restore.
    """

    _action = "dcp.load from"

    def __init__(
        self,
        client: Client,
        *,
        step: int | None = None,
        generation: int | None = None,
        milestone: str | None = None,
        tier: str = "auto",
    ) -> None:
        self.found: Found | None = None
        self._client = client
        self._request = RestoreRequest(step=step, generation=generation, milestone=milestone, tier=tier)
        self._contents: DcpContents | None = None
        self.load_id = str(uuid.uuid4())

    def find(self) -> int | None:
        """On all ranks: the step of the checkpoint that `dcp.load` will load, or None to start fresh. $TIERD_RESUME
        selects it, unless this reader was given one.

        Raises as `Client.restore` does.
        """
        if not self._request.is_any:
            self.read_metadata()
        elif not self._client.inspect_by_policy(self._read_contents):
            return None
        assert self._contents is not None
        self._request = replace(self._request, step=self._contents.id.step)
        return self._contents.id.step

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._request = replace(self._request, step=step_of(checkpoint_id))

    def read_metadata(self) -> Metadata:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Lacks the base's **kwargs: with them DCP would call it again on single ranks after an error."""
        self._contents = None
        self._client.inspect(self._request, self._read_contents)
        assert self._contents is not None
        return self._contents.metadata(self.load_id)

    def _read_contents(self, replica: Replica) -> None:
        self._contents = contents_of(replica)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        return

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        contents = self._contents
        assert contents is not None
        # The plan was made for this checkpoint: any replica of it will do.
        request = RestoreRequest.exactly(contents.id, self._request.tier)
        self.found = self._client.read(request, lambda replica: _read(replica, contents, plan, planner))
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _read(replica: Replica, contents: DcpContents, plan: LoadPlan, planner: LoadPlanner) -> None:
    """Executes DCP's plan: reads regions of tensors into the planner's tensors, and objects into its state dict."""
    files = replica.files()
    _, tensors = read_headers(files)
    restore = RestorePlan(tensors, _accelerator())
    for item in plan.items:
        if item.type == LoadItemType.BYTE_IO:
            value = restore.decode(contents.objects[item.storage_index.fqn])
            restore.on_finish(item.dest_index.fqn, _setter(planner, item.dest_index.fqn, value))
        else:
            _plan_region(restore, item, planner)
    restore.check()
    restore.run(partial(replica.read, files))


def _plan_region(restore: RestorePlan, item: ReadItem, planner: LoadPlanner) -> None:
    name, offsets = item.storage_index.fqn, item.storage_index.offset
    target = planner.resolve_tensor(item)
    stored_dtype = DTYPES[restore.available[name][0].dtype]
    if viewed := restore.available[name][0].torch_dtype:
        raise Unsupported(f"load {name}: safetensors has no dtype for {viewed}", hint="restore it with TrainingState")
    if offsets is None or target.shape != item.lengths:
        actual = describe(str(target.dtype), target.shape)
        raise Mismatch(f"load {name}: the planner has {actual} for a region of {list(item.lengths)}")
    destination = target.detach()
    if destination.dtype != stored_dtype:
        destination = torch.empty(tuple(item.lengths), dtype=stored_dtype)
        restore.on_finish(name, partial(target.detach().copy_, destination))
    region = capture_tensor(name, destination)
    begin = tuple(map(sum, zip(offsets, item.storage_offsets, strict=True)))
    restore.add_destination(msgspec.structs.replace(region, saved_offsets=begin))
    restore.on_finish(name, partial(planner.commit_tensor, item, target))


def _setter(planner: LoadPlanner, name: str, value: object) -> Callable[[], None]:
    """Does what DefaultLoadPlanner.load_bytes does, without unpickling."""
    if not isinstance(planner, DefaultLoadPlanner) or type(planner).load_bytes is not DefaultLoadPlanner.load_bytes:
        raise Unsupported(
            f"load {name}: a {type(planner).__qualname__} takes objects only pickled",
            hint="derive the planner from DefaultLoadPlanner and leave its load_bytes as it is",
        )
    if planner.flatten_state_dict:
        return partial(set_element, planner.original_state_dict, planner.mappings[name], value)
    return partial(planner.state_dict.__setitem__, name, value)


def step_of(checkpoint_id: str | os.PathLike[str]) -> int:
    """The number at the end of a path: 1000 for `outputs/checkpoint/step-1000`. Raises BadConfig without one."""
    number = re.search(r"[0-9]+$", PurePath(checkpoint_id).name)
    if number is None:
        raise BadConfig(f"checkpoint_id={os.fspath(checkpoint_id)!r} ends with no number", hint="end it with the step")
    return int(number[0])


def _accelerator() -> torch.device:
    """The device for tensors inside objects that were saved from an accelerator."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
