"""State that comes from a file of another format, as the shards and the manifest of a checkpoint of kind snapshot.

One shard per rank, as tierd's client writes them: that of rank 0 has all tensors whole, the others have the values of
their rank only. A restore reads tensors from any shard. The commit is left to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tierd
from tierd.catalog.catalog import Catalog
from tierd.errors import BadRequest
from tierd.format import checksum, layout, shard
from tierd.format.ids import CheckpointId, Rank, Run
from tierd.format.manifest import FORMAT_VERSION, SNAPSHOT, FileEntry, Manifest, architecture_hash
from tierd.format.whole import AssembledFile, WholeTensor, as_shard
from tierd.tiers.chunks import differences, measure
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.store import Progress
from tierd.transfer.adoption import next_id
from tierd.transfer.assembled import ReadPieceAsync, source_of

IMPORTED = "imported_from"  # in the manifest's versions: the format


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedState:
    """`trees`: the state tree of each rank. `read` fills a buffer from the files that the tensors name.
    `check_unchanged` raises Transient if the source was written since it was opened."""

    format: str
    step: int
    created_at: str
    trees: Sequence[Any]
    tensors: Sequence[WholeTensor]
    read: ReadPieceAsync
    check_unchanged: Callable[[], None]
    architecture_hash: str = ""
    metrics: Mapping[str, float | str]
    versions: Mapping[str, str]

    def shards(self, checkpoint: CheckpointId) -> dict[str, AssembledFile]:
        """The tensors by name. Raises Unsupported for what a shard cannot hold."""
        world_size = len(self.trees)
        files: dict[str, AssembledFile] = {}
        for rank, tree in enumerate(self.trees):
            metadata = {
                "format_version": shard.FORMAT_VERSION,
                "run": checkpoint.run,
                "step": checkpoint.step,
                "generation": checkpoint.generation,
                "rank": rank,
                "world_size": world_size,
                "state": tree,
            }
            name = layout.shard_name(Rank(rank), world_size)
            files[name] = as_shard([] if rank else self.tensors, metadata)
        return files

    async def write(
        self,
        checkpoint: CheckpointId,
        shards: Mapping[str, AssembledFile],
        store: DirectoryStore,
        *,
        algorithm: str = "",
        progress: Progress | None = None,
    ) -> list[FileEntry]:
        """Puts the shards. `algorithm`: of the digests. Raises as `read` and as `Store.put`."""
        return [
            await store.put(
                layout.file_key(checkpoint, name),
                source_of(file, self.read),
                size_bytes=file.size_bytes,
                chunk_bytes=checksum.CHUNK_BYTES,
                progress=progress,
                algorithm=algorithm,
            )
            for name, file in shards.items()
        ]

    async def difference(
        self, manifest: Manifest, shards: Mapping[str, AssembledFile], *, progress: Progress | None = None
    ) -> str:
        """Why the committed checkpoint does not have exactly these shards; empty if it has. Reads all of the source."""
        committed = {entry.name: entry for entry in manifest.files}
        if committed.keys() != shards.keys():
            return f"its files are {', '.join(sorted(committed)[:3])}"
        for name, file in shards.items():
            expect = committed[name]
            if expect.size_bytes != file.size_bytes:
                return f"{name} has {expect.size_bytes} bytes, the import would have {file.size_bytes}"
            source = source_of(file, self.read)
            entry = await measure(source, name, file.size_bytes, expect.chunk_bytes, progress=progress)
            if found := differences(expect, entry):
                return f"{name} has other bytes: {found[0]}"
        return ""

    def manifest(self, checkpoint: CheckpointId, files: list[FileEntry], *, sequence: int) -> Manifest:
        """What commits the shards that were written."""
        return Manifest(
            format_version=FORMAT_VERSION,
            run=checkpoint.run,
            step=checkpoint.step,
            generation=checkpoint.generation,
            sequence=sequence,
            parent=None,
            world_size=len(self.trees),
            created_at=self.created_at,
            kind=SNAPSHOT,
            metrics=dict(self.metrics),
            architecture_hash=self.architecture_hash,
            versions={**self.versions, "tierd": tierd.__version__, IMPORTED: self.format},
            files=files,
        )


def architecture_of(tensors: Iterable[WholeTensor]) -> str:
    return architecture_hash(
        (tensor.name, tensor.parts[0].entry.torch_dtype or tensor.dtype, tensor.shape) for tensor in tensors
    )


def imported_id(
    catalog: Catalog, run: Run, step: int, generation: int | None, *, generation_max: int | None = None
) -> CheckpointId:
    """The id of an imported checkpoint: in the newest generation of its run, 1 for the first.

    Raises BadRequest where the run has checkpoints of another program, and as `next_id`."""
    what = f"import step {step} into {run}"
    if adopted := next((entry.id for entry in catalog.entries(run) if entry.manifest.is_adopted), None):
        raise BadRequest(f"{what}: another program writes that run, such as {adopted}", hint="choose another run name")
    return next_id(catalog, run, step, generation, what=what, generation_max=generation_max)
