"""Copies a folder or file of another program into a directory tier: all files of a checkpoint but the manifest.

A file shares its blocks with the source (FICLONE) where the file system can do that; otherwise its bytes are copied. It
is never a hard link, because later writes of the program must not change the checkpoint. The bytes are opaque. A source
that changes while it is read is refused. The caller commits.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path

import msgspec

import tierd
from tierd.catalog.catalog import Catalog
from tierd.errors import BadRequest, TierUnreachable
from tierd.format import adopted, checksum, layout
from tierd.format.adopted import AdoptedTree
from tierd.format.announced import Announced
from tierd.format.ids import CheckpointId, Run, checkpoint_id
from tierd.format.manifest import ADOPTED, FORMAT_VERSION, FileEntry, Head, Manifest
from tierd.format.node_file import NodeFile
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.pool import ThreadPool, for_each
from tierd.tiers.readable_tier import ReadableTier
from tierd.tiers.store import Progress, Source
from tierd.transfer.source_tree import OpenEntry, SourceEntry, SourceTree, changed, first_difference, scan

FILES_IN_FLIGHT = 4
THREADS = 4


@dataclass(slots=True)
class Adoption(abc.ABC):
    """One attempt to copy a tree. `files`: the stored files, in the manifest's order. `cloned_bytes`: the bytes of them
    that share blocks with the source. `node`: the number of this node, if several adopt one checkpoint together."""

    tree: SourceTree
    node: int | None = field(default=None, kw_only=True)
    files: list[FileEntry] = field(default_factory=list[FileEntry])
    cloned_bytes: int = 0

    async def copy(
        self,
        checkpoint: CheckpointId,
        store: DirectoryStore,
        *,
        algorithm: str = "",
        progress: Progress | None = None,
    ) -> None:
        """Raises what `scan` and `Store.put` raise, and Transient when the source has changed since it was listed."""
        stored_tree, tree_file = self.tree.stored(self.node), adopted.tree_file(self.node)
        names = {entry.path: entry.stored_as for entry in stored_tree.files}
        entries: dict[str, FileEntry] = {}

        async def put(source: SourceEntry) -> None:
            name = names[source.path]
            key = layout.file_key(checkpoint, name)
            entries[name] = await self.put_file(source, key, store, algorithm=algorithm, progress=progress)

        await for_each(FILES_IN_FLIGHT, self.tree.files, put)
        await self.check_unchanged()
        raw = stored_tree.encode()
        entries[tree_file] = await store.put(
            layout.file_key(checkpoint, tree_file),
            memoryview(raw),
            size_bytes=len(raw),
            chunk_bytes=checksum.CHUNK_BYTES,
            algorithm=algorithm,
        )
        self.files = [entries[name] for name in (tree_file, *names.values())]

    @abc.abstractmethod
    async def can_clone_into(self, folder: int) -> bool:
        """Whether files in an open folder can share blocks with those of the source."""

    @abc.abstractmethod
    async def put_file(
        self, source: SourceEntry, key: str, store: DirectoryStore, *, algorithm: str, progress: Progress | None
    ) -> FileEntry:
        """Store one file of the tree."""

    @abc.abstractmethod
    async def check_unchanged(self) -> None:
        """Raises Transient when the source has changed since it was listed, NotFound when it is gone."""

    def manifest(self, checkpoint: CheckpointId, *, sequence: int) -> Manifest:
        """The manifest of the files that `copy` has stored. Its `created_at` is the time of the newest source file."""
        head = new_head(checkpoint, self.tree, sequence=sequence)
        return Manifest(**msgspec.structs.asdict(head), files=self.files)

    def part(self, announced: Announced) -> NodeFile:
        """The node file of the files that `copy` has stored, as the part of `node`."""
        assert self.node is not None
        return NodeFile(
            **msgspec.structs.asdict(announced), files=self.files, ranks=[self.node], is_healthy=None, milestone=""
        )


@dataclass(slots=True)
class FolderAdoption(Adoption):
    """The adoption of a folder or file. `pool`: for calls to the source's file system, each with a deadline."""

    pool: ThreadPool = field(kw_only=True)

    async def can_clone_into(self, folder: int) -> bool:
        return await self.pool.query(self.tree.can_clone_into, folder)

    async def put_file(
        self, source: SourceEntry, key: str, store: DirectoryStore, *, algorithm: str, progress: Progress | None
    ) -> FileEntry:
        async with self._opened(source) as file:
            entry = await store.put(
                key,
                Source(partial(self.pool.run, file.read)),
                size_bytes=source.size_bytes,
                chunk_bytes=checksum.CHUNK_BYTES,
                progress=progress,
                algorithm=algorithm,
                clone=file.clone,
            )
            await self.pool.run(file.check_unchanged)
            self.cloned_bytes += source.size_bytes if file.is_cloned else 0
        return entry

    async def check_unchanged(self) -> None:
        await self.pool.query(self.tree.check_unchanged)

    @asynccontextmanager
    async def _opened(self, entry: SourceEntry) -> AsyncGenerator[OpenEntry]:
        file = await self.pool.query(OpenEntry, self.tree, entry, discard=OpenEntry.close)
        try:
            yield file
        finally:
            file.close()


def new_head(checkpoint: CheckpointId, tree: SourceTree, *, sequence: int, world_size: int = 1) -> Head:
    """The head of an adopted checkpoint. `tree`: the source, on node 0 if there are several nodes. `world_size`: how
    many nodes adopt the checkpoint together."""
    return Head(
        format_version=FORMAT_VERSION,
        run=checkpoint.run,
        step=checkpoint.step,
        generation=checkpoint.generation,
        sequence=sequence,
        parent=None,
        world_size=world_size,
        created_at=tree.created_at,
        kind=ADOPTED,
        metrics={},
        architecture_hash="",
        versions={"tierd": tierd.__version__},
    )


def adopted_id(
    catalog: Catalog,
    run: Run,
    step: int | None,
    generation: int | None = None,
    *,
    generation_max: int | None = None,
    is_lenient: bool = False,
) -> CheckpointId:
    """The id under which a checkpoint of another program is adopted: in the newest generation of its run, or in
    generation 1 of a new run. `step` None: only make the checks. `generation_max`: the highest generation that may be
    named. `is_lenient`: allow some checkpoints of the run to be unreadable, as for a snapshot.

    Raises BadRequest for a generation that the tiers would count as foreign, and if tierd's client writes the run: the
    retention would then count the checkpoints of two writers together. Raises TierUnreachable if a tier may hold
    checkpoints of the run that are not known.
    """
    what = f"adopt into {run}" if step is None else f"adopt step {step} into {run}"
    entries = catalog.entries(run)
    if snapshot := next((entry.id for entry in entries if not entry.manifest.is_adopted), None):
        raise BadRequest(
            f"{what}: tierd's client writes that run, such as {snapshot}",
            hint="choose another run name",
        )
    return next_id(catalog, run, step, generation, what=what, generation_max=generation_max, is_lenient=is_lenient)


def check_one_node(catalog: Catalog, run: Run) -> None:
    """Raises BadRequest if several nodes adopt into the run: one folder would count as a whole checkpoint of it."""
    if part := next((entry for entry in catalog.entries(run) if entry.manifest.world_size > 1), None):
        raise BadRequest(
            f"adopt into {run}: its checkpoints are of several nodes, such as {part.id} of {part.manifest.world_size}, "
            "and this would be one without the files of the others",
            hint="choose another run name",
        )


def next_id(
    catalog: Catalog,
    run: Run,
    step: int | None,
    generation: int | None,
    *,
    what: str,
    generation_max: int | None = None,
    is_lenient: bool = False,
) -> CheckpointId:
    """As `adopted_id`, also if tierd's client writes the run. `what`: the action, for messages."""
    entries = catalog.entries(run)
    if generation is not None and generation_max is not None and generation > generation_max:
        raise BadRequest(f"{what}: generation {generation} is not between 1 and {generation_max}")
    unreadable = {checkpoint: why for (_, checkpoint), why in catalog.unreadable().items() if checkpoint.run == run}
    unknown = [] if entries and is_lenient else list(unreadable.values())
    unknown += [] if entries else list(catalog.unlisted().values())
    if unknown:
        raise TierUnreachable(
            f"{what}: the checkpoints of the run are not all known: {unknown[0]}",
            hint="its next generation and sequence depend on them; docs/RUNBOOK.md#tier-unreachable",
        )
    return checkpoint_id(run, step or 0, generation or (entries[0].id.generation if entries else 1))


async def scan_settled(path: Path, pool: ThreadPool, now: Callable[[], datetime]) -> SourceTree:
    """The tree at `path`, listed long enough after the last write that a later write would change a time. Waits at most
    2 s. Raises what `scan` raises, and Transient if something was written meanwhile."""
    tree = await pool.query(scan, path)
    if wait_s := tree.unsettled_s(now().timestamp()):
        await asyncio.sleep(wait_s)
        later = await pool.query(scan, path)
        if difference := first_difference(tree, later):
            raise changed(path, difference)
    return tree


async def read_tree(tier: ReadableTier, manifest: Manifest, node: int | None = None) -> AdoptedTree:
    """The tree of an adopted checkpoint in a tier. `node`: which node's tree, if several nodes adopted the checkpoint
    together. Raises Corrupt, NotFound, NewerFormat or TierUnreachable."""
    name = adopted.tree_file(node)
    size_bytes = next((entry.size_bytes for entry in manifest.files if entry.name == name), 0)
    raw = await tier.store.get_bytes(
        layout.file_key(manifest.id, name), size_max=min(size_bytes, adopted.TREE_BYTES_MAX)
    )
    return await asyncio.to_thread(adopted.decode_tree, raw, manifest, where=tier.name, node=node)


def is_same_tree(stored: AdoptedTree, manifest: Manifest, tree: SourceTree) -> bool:
    """Whether a checkpoint, or a node's part of it, was adopted from this tree, judged by sizes, modes and times."""
    sizes = {entry.name: entry.size_bytes for entry in manifest.files}
    same_sizes = [sizes.get(entry.stored_as) for entry in stored.files] == [entry.size_bytes for entry in tree.files]
    return same_sizes and _without_names(stored) == _without_names(tree.stored())


def _without_names(tree: AdoptedTree) -> AdoptedTree:
    """The tree without its own name and the names of its files in a tier."""
    entries = [msgspec.structs.replace(entry, stored_as="") for entry in tree.entries]
    return msgspec.structs.replace(tree, name="", entries=entries)


def was_saved_again(stored: AdoptedTree, tree: SourceTree, marker: str) -> bool:
    """Whether a program has saved the whole checkpoint again since it was adopted, and not only changed a file in it:
    the `marker`, which it writes last, is new. Without a marker, every file must be new."""
    before = {entry.path: entry.modified_ns for entry in stored.files}
    now = {entry.path: entry.modified_ns for entry in tree.files}
    if marker:
        return marker in now and before.get(marker) != now[marker]
    return all(before.get(path) != modified_ns for path, modified_ns in now.items())
