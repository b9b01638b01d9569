"""torch.distributed.checkpoint over tierd: `dcp.save`, `async_save` and `load` with one argument more.

writer = TierdWriter(client)
dcp.save(state_dict, storage_writer=writer, checkpoint_id=f"step-{step}")
reader = TierdReader(client)
if reader.find() is not None:
    dcp.load(state_dict, storage_reader=reader)

DCP plans: who writes what, and who reads what into which other sharding. Tensors keep DCP's names, so torch's own
HuggingFaceStorageReader reads the same files. Objects are written as tagged JSON, never pickled. All ranks of the
client save and load together.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import PurePath
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
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

from tierd.errors import BadConfig, Corrupt, Mismatch, NotFound, Unsupported
from tierd.format.ids import CheckpointId
from tierd_client.client import Client, Found
from tierd_client.restore.load import index_tensors, read_headers
from tierd_client.restore.replica import Replica, RestoreRequest
from tierd_client.snapshot.handle import Shot
from tierd_client.state.encoding import Collector, Json
from tierd_client.state.restore_plan import Available, RestorePlan
from tierd_client.state.tensors import DTYPES, CapturedTensor, capture_tensor, describe
from tierd_client.state.training_state import Captured

KIND = "dcp"
OBJECT = "#object"
"""Ends the names of tensors that belong to an object: DCP plans only those that stand by themselves."""


class DcpTree(msgspec.Struct):
    """What one rank's shard says beside its tensors. `paths`: from DCP's name to the keys in the nested dict."""

    objects: dict[str, Json]
    paths: dict[str, list[str | int]]


@dataclass(frozen=True, slots=True)
class _Planned:
    """What DCP's plan has this rank write."""

    captured: Captured

    def capture(self, rank: int, world_size: int) -> Captured:
        return self.captured


class TierdWriter(StorageWriter):
    """For `dcp.save(…, storage_writer=)`: a snapshot of `step`, or of the number that `checkpoint_id` ends with.

    All ranks make theirs at the same point. `save` returns when the snapshot is in the memory tier, which is when
    training may go on: `async_save` gains nothing, and works. `wait_persisted`: only when it is durable. `shot` is the
    last snapshot, on every rank.
    """

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
        client.allow_thread()  # async_save will call us from a thread of its own

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._step = step_of(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._step is None:
            raise BadConfig("dcp.save to tierd: of which step?", hint="TierdWriter(client, step), or checkpoint_id=")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        _check_ranks("dcp.save to", self._client, len(plans))
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        assert self._step is not None
        planned = _Planned(capture_plan(plan, planner))
        self.shot = self._client.snapshot(self._step, planned, metrics=self._metrics, milestone=self._milestone)
        written: Future[list[WriteResult]] = Future()
        written.set_result([WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0. `metadata` is not kept: the headers of the shards say the same."""
        if self._wait_persisted and self.shot is not None:
            self.shot.wait_persisted()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # never chosen by the looks of a path


def capture_plan(plan: SavePlan, planner: SavePlanner) -> Captured:
    """What DCP plans for this rank to write, nothing copied. Raises Unsupported, naming what has no safe form."""
    into = Collector()
    into.suffix = OBJECT
    tensors: dict[str, CapturedTensor] = {}
    objects: dict[str, Json] = {}
    for item in plan.items:
        name = item.index.fqn
        if item.type == WriteItemType.BYTE_IO:
            objects[name] = into.encode(_object(item, planner), name)
        elif name in tensors:
            raise Unsupported(
                f"capture {name}: this rank holds several parts of it",
                hint="strided sharding and ShardedTensor with several local shards have no place in one shard file",
            )
        else:
            tensors[name] = _captured(item, planner)
    paths: Mapping[str, Any] = plan.planner_data or {}
    tree = DcpTree(objects, {name: list(paths[name]) for name in (*tensors, *objects) if name in paths})
    sections = {KIND: {"kind": KIND, "suffix": "", "value": msgspec.to_builtins(tree)}}
    return Captured([*tensors.values(), *into.tensors], sections)


def _captured(item: WriteItem, planner: SavePlanner) -> CapturedTensor:
    local = planner.resolve_data(item)
    if not isinstance(local, torch.Tensor) or item.tensor_data is None:
        raise Unsupported(f"capture {item.index.fqn}: the planner gives a {type(local).__qualname__} for a tensor")
    chunk = item.tensor_data.chunk
    part = capture_tensor(item.index.fqn, local)
    return msgspec.structs.replace(part, saved_offsets=tuple(chunk.offsets), global_shape=tuple(item.tensor_data.size))


def _object(item: WriteItem, planner: SavePlanner) -> object:
    """The object itself: what `resolve_data` gives is pickled."""
    if not isinstance(planner, DefaultSavePlanner):
        raise Unsupported(
            f"capture {item.index.fqn}: a {type(planner).__qualname__} gives objects only pickled",
            hint="derive the planner from DefaultSavePlanner, or keep tensors only in the state dict",
        )
    return planner.lookup_object(item.index)


@dataclass(frozen=True, slots=True)
class Contents:
    """What a checkpoint holds, from the headers of all its shards."""

    id: CheckpointId
    tensors: Available
    objects: dict[str, Json] = field(default_factory=dict[str, Json])
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict[str, tuple[str | int, ...]])

    def metadata(self) -> Metadata:
        """As DCP wants it. A TrainingState's checkpoint is given by its tensors."""
        entries: dict[str, Any] = {name: BytesStorageMetadata() for name in self.objects}
        for name, stored in self.tensors.items():
            if name.endswith(OBJECT):
                continue
            chunks = {part.saved_offsets: part.shape for part in stored}
            ends = [tuple(map(sum, zip(at, shape, strict=True))) for at, shape in chunks.items()]
            entries[name] = TensorStorageMetadata(
                properties=TensorProperties(dtype=DTYPES[stored[0].dtype]),
                size=torch.Size([max(along) for along in zip(*ends, strict=True)]),
                chunks=[ChunkStorageMetadata(torch.Size(at), torch.Size(shape)) for at, shape in chunks.items()],
            )
        return Metadata(state_dict_metadata=entries, planner_data=self.paths)


def contents_of(replica: Replica) -> Contents:
    """Raises Corrupt when a header is damaged, or says what we would not write."""
    shards = read_headers(replica.files())
    found = Contents(replica.manifest.id, index_tensors(shards))
    for name, shard in shards.items():
        section = shard.tierd.get("state", {}).get(KIND)
        if section is None:
            continue
        try:
            tree = msgspec.convert(section["value"], DcpTree)
        except (msgspec.ValidationError, TypeError, KeyError) as error:
            raise Corrupt(f"read the state tree of {name}: {error}") from error
        found.objects.update(tree.objects)
        found.paths.update({name: tuple(path) for name, path in tree.paths.items()})
    return found


class TierdReader(StorageReader):
    """For `dcp.load(…, storage_reader=)`: the newest checkpoint, or the one asked for, from the nearest tier.

    `step` may come as the number that `checkpoint_id` ends with. Every byte that is read is verified; a damaged
    replica is reported, and another one of the same checkpoint read. `found` says what was loaded.
    """

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
        self._wanted = RestoreRequest(step=step, generation=generation, milestone=milestone, tier=tier)
        self._contents: Contents | None = None

    def find(self) -> int | None:
        """All ranks: the step of the checkpoint that `dcp.load` will load. None: there is none, start fresh.

        Raises as `Client.restore` does. What raises inside of `dcp.load` comes wrapped in its CheckpointException.
        """
        try:
            self.read_metadata()
        except NotFound:
            if not self._wanted.is_any:
                raise
            return None
        assert self._contents is not None
        return self._contents.id.step

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._wanted = replace(self._wanted, step=step_of(checkpoint_id))

    def read_metadata(self) -> Metadata:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Without the base's **kwargs, which would have DCP come to each rank alone after an error."""

        def take(replica: Replica) -> None:
            self._contents = contents_of(replica)

        self._contents = None
        self._client.inspect(self._wanted, take)
        assert self._contents is not None
        return self._contents.metadata()

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        return

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        _check_ranks("dcp.load from", self._client, len(plans))
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        contents = self._contents
        assert contents is not None
        # The plan was made from this checkpoint: any replica of it will do, and no other checkpoint.
        exactly = RestoreRequest(
            step=contents.id.step, generation=contents.id.generation, tier=self._wanted.tier, allow_unhealthy=True
        )
        self.found = self._client.read(exactly, lambda replica: _read(replica, contents, plan, planner))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


def _read(replica: Replica, contents: Contents, plan: LoadPlan, planner: LoadPlanner) -> None:
    """Carries out DCP's plan: the wanted regions of tensors into the planner's, the objects into its state dict."""
    files = replica.files()
    into = RestorePlan(index_tensors(read_headers(files)), _accelerator())
    for number, item in enumerate(plan.items):
        if item.type == LoadItemType.BYTE_IO:
            value = into.decode(contents.objects[item.storage_index.fqn])
            into.on_finish(_setter(planner, item.dest_index.fqn, value))
        else:
            _plan_region(into, f"{number}", item, planner)
    into.check()
    replica.read(files, into.destinations.values())
    into.finish()


def _plan_region(into: RestorePlan, key: str, item: ReadItem, planner: LoadPlanner) -> None:
    name, chunk = item.storage_index.fqn, item.storage_index.offset
    target = planner.resolve_tensor(item)
    stored = DTYPES[into.available[name][0].dtype]
    if chunk is None or target.shape != item.lengths:
        here = describe(str(target.dtype), target.shape)
        raise Mismatch(f"load {name}: the planner has {here} for a region of {list(item.lengths)}")
    destination = target.detach()
    if destination.dtype != stored:
        destination = torch.empty(tuple(item.lengths), dtype=stored)
        into.on_finish(partial(_convert, destination, target.detach()))
    begin = tuple(map(sum, zip(chunk, item.storage_offsets, strict=True)))
    part = capture_tensor(name, destination)
    into.destinations[key] = msgspec.structs.replace(part, saved_offsets=begin)
    into.on_finish(partial(planner.commit_tensor, item, target))


def _convert(found: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(found)


def _setter(planner: LoadPlanner, name: str, value: object) -> Callable[[], None]:
    """What DefaultLoadPlanner.load_bytes does, but for unpickling."""
    if not isinstance(planner, DefaultLoadPlanner) or type(planner).load_bytes is not DefaultLoadPlanner.load_bytes:
        raise Unsupported(
            f"load {name}: a {type(planner).__qualname__} takes objects only pickled",
            hint="derive the planner from DefaultLoadPlanner and leave its load_bytes as it is",
        )
    if planner.flatten_state_dict:
        return partial(set_element, planner.original_state_dict, planner.mappings[name], value)
    return partial(planner.state_dict.__setitem__, name, value)


def step_of(checkpoint_id: str | os.PathLike[str]) -> int:
    """The number that the last part of a path ends with: 1000 of `outputs/checkpoint/step-1000`."""
    found = re.search(r"[0-9]+$", PurePath(checkpoint_id).name)
    if found is None:
        raise BadConfig(f"checkpoint_id={os.fspath(checkpoint_id)!r} ends with no number", hint="which step is it?")
    return int(found[0])


def _check_ranks(what: str, client: Client, count: int) -> None:
    if count != client.world_size:
        raise Unsupported(
            f"{what} tierd: {count} ranks take part of the {client.world_size} that are connected",
            hint="all ranks of the client save and load together: no process_group= of some of them, no no_dist=True",
        )


def _accelerator() -> torch.device:
    """Where an object's tensor goes that lived on an accelerator."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
