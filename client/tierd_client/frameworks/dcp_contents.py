"""What a checkpoint that DCP saved holds: its tree in each shard, and the Metadata that DCP's planners read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tierd.errors import Corrupt
from tierd.format.boxes import cover_problem, spanned_shape
from tierd.format.ids import CheckpointId, Generation, Run, Step
from tierd_client.restore.load import read_headers
from tierd_client.restore.replica import Replica
from tierd_client.state.encoding import Json
from tierd_client.state.restore_plan import Available
from tierd_client.state.stored_entries import tensor_names
from tierd_client.state.tensors import DTYPES

KIND = "dcp"
OBJECT = "#object"
"""Suffix of tensors inside an object: DCP plans only the tensors that are entries of the state dict."""


class DcpTree(msgspec.Struct):
    """What one rank stores besides tensors. `paths`: for each DCP name the keys in the nested state dict."""

    objects: dict[str, Json]
    paths: dict[str, list[str | int]]


@dataclass(frozen=True, slots=True)
class DcpContents:
    """What a checkpoint holds, from the headers of all its shards."""

    id: CheckpointId
    tensors: Available
    objects: dict[str, Json] = field(default_factory=dict[str, Json])
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict[str, tuple[str | int, ...]])

    def metadata(self, load_id: str) -> Metadata:
        """As DCP's Metadata. A TrainingState's checkpoint appears as its tensors only."""
        entries: dict[str, Any] = {name: BytesStorageMetadata() for name in self.objects}
        inside = {name for value in self.objects.values() for name in tensor_names(value)}
        for name, stored in self.tensors.items():
            if name in inside:
                continue
            parts = dict.fromkeys((part.saved_offsets, part.shape) for part in stored)
            entries[name] = TensorStorageMetadata(
                properties=TensorProperties(dtype=DTYPES[stored[0].dtype]),
                size=torch.Size(spanned_shape(parts)),
                chunks=[ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape)) for offsets, shape in parts],
            )
        meta = StorageMeta(f"{self.id.step}", save_id=name_of(self.id.step, self.id.generation), load_id=load_id)
        return Metadata(entries, planner_data=self.paths, storage_meta=meta, version=CURRENT_DCP_VERSION)


def contents_of(replica: Replica) -> DcpContents:
    """What a replica holds. Raises Corrupt when a header is damaged or malformed."""
    shards, tensors = read_headers(replica.files())
    contents = DcpContents(replica.manifest.id, tensors)
    for name, stored in tensors.items():
        boxes = [(part.saved_offsets, part.shape) for part in stored]
        if len({(part.dtype, len(part.shape)) for part in stored}) != 1:
            raise Corrupt(f"read {name} of {contents.id} in {replica.tier}: its parts differ in dtype or dimensions")
        if problem := cover_problem(boxes, spanned_shape(boxes)):
            raise Corrupt(f"read {name} of {contents.id} in {replica.tier}: the shards {problem}")
    for name, shard in shards.items():
        section = shard.tierd.get("state", {}).get(KIND)
        if section is None:
            continue
        try:
            tree = msgspec.convert(section["value"], DcpTree)
        except (msgspec.ValidationError, TypeError, KeyError) as error:
            raise Corrupt(f"read the state tree of {contents.id}/{name} in {replica.tier}: {error}") from error
        contents.objects.update(tree.objects)
        contents.paths.update({name: tuple(path) for name, path in tree.paths.items()})
    return contents


def name_of(step: int, generation: int) -> str:
    """As `tierd ls` names a checkpoint."""
    return CheckpointId(Run(""), Step(step), Generation(generation)).name
