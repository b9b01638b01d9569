"""Reads a history of checkpoints of another program from a bucket: each object below a prefix is a file of one of them.

A bucket keeps no modes and no empty folders, and its times are those of the uploads. Objects are streamed into the hot
tier, without a temporary file.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tierd.errors import Unsupported
from tierd.format import adopted, checksum
from tierd.format.manifest import FileEntry
from tierd.lifecycle.watched import Listed, Preset
from tierd.s3.foreign_objects import ForeignObjects
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.store import Progress, Source, StoredObject
from tierd.transfer.adoption import Adoption
from tierd.transfer.source_tree import SourceEntry, SourceTree, changed
from tierd.transfer.watched_folder import BESIDE_BYTES_MAX, listed

_FILE_MODE, _FOLDER_MODE = 0o644, 0o755  # of what is restored


class BucketHistory:
    """A history below a prefix. `names` lists the objects, once."""

    def __init__(self, objects: ForeignObjects) -> None:
        self.name, self.links = objects.url, list[str]()
        self._objects = objects
        self._by_path: dict[str, StoredObject] = {}
        self._by_name: dict[str, list[StoredObject]] = {}

    async def names(self) -> Mapping[str, bool]:
        self._by_path, self._by_name = {stored.key: stored for stored in await self._objects.list()}, {}
        for path, stored in self._by_path.items():
            self._by_name.setdefault(path.partition("/")[0], []).append(stored)
        return {path.partition("/")[0]: "/" in path for path in self._by_path}

    async def tree(self, name: str) -> SourceTree | None:
        return _tree(self._objects.url, name, self._by_name.get(name, []))

    async def listed(self, tree: SourceTree, preset: Preset, *, unchanged_s: float) -> Listed:
        loop = asyncio.get_running_loop()

        def read(entry: SourceEntry, offset: int, length: int) -> bytes:
            content = bytearray(length)
            reading = self._objects.read(self._object(tree, entry), offset, memoryview(content))
            asyncio.run_coroutine_threadsafe(reading, loop).result()
            return bytes(content)

        return await asyncio.to_thread(listed, tree, preset, unchanged_s=unchanged_s, read=read)

    def _object(self, tree: SourceTree, entry: SourceEntry) -> StoredObject:
        return self._by_path[entry.path if tree.is_file else f"{tree.name}/{entry.path}"]

    async def beside(self, name: str) -> tuple[bytes, float]:
        found = self._by_path.get(name)
        if found is None or found.size_bytes > BESIDE_BYTES_MAX:
            return b"", 0.0
        content = bytearray(found.size_bytes)
        await self._objects.read(found, 0, memoryview(content))
        return bytes(content), found.written_at_s

    def adoption(self, tree: SourceTree) -> Adoption:
        return _ObjectsAdoption(
            tree,
            objects=self._objects,
            by_path={file.path: self._object(tree, file) for file in tree.files},
        )


@dataclass(slots=True)
class _ObjectsAdoption(Adoption):
    """The adoption of objects. `by_path`: the object of each file of the tree."""

    objects: ForeignObjects = field(kw_only=True)
    by_path: dict[str, StoredObject] = field(kw_only=True)

    async def can_clone_into(self, folder: int) -> bool:
        return False

    async def put_file(
        self, source: SourceEntry, key: str, store: DirectoryStore, *, algorithm: str, progress: Progress | None
    ) -> FileEntry:
        found = self.by_path[source.path]

        async def fill(offset: int, buffer: memoryview) -> None:
            await self.objects.read(found, offset, buffer)

        return await store.put(
            key,
            Source(fill),
            size_bytes=source.size_bytes,
            chunk_bytes=checksum.CHUNK_BYTES,
            progress=progress,
            algorithm=algorithm,
        )

    async def check_unchanged(self) -> None:
        name = self.tree.name
        listing = await self.objects.list(name if self.tree.is_file else f"{name}/")
        now = {listed for listed in listing if not self.tree.is_file or listed.key == name}
        if now != set(self.by_path.values()):
            raise changed(self.tree.where, "an object was written or deleted")


def _tree(url: str, name: str, objects: list[StoredObject]) -> SourceTree | None:
    """The objects of one name as a folder of files, or as one file, with default modes. A path cannot be both an object
    and a folder. None if there is no object."""
    is_file = [stored.key for stored in objects] == [name]
    paths = {stored.key if is_file else stored.key.removeprefix(f"{name}/"): stored for stored in objects}
    if not paths:
        return None
    if problem := next(((path, why) for path in paths if (why := adopted.path_problem(path))), None):
        raise Unsupported(f"adopt {url}/{name}: the path of {ascii(problem[0])[1:-1]} {problem[1]}", hint="rename it")
    folders = {str(above) for path in paths for above in PurePosixPath(path).parents} - {"."}
    if both := sorted(folders & paths.keys()) or ([name] if not is_file and name in paths else []):
        raise Unsupported(f"adopt {url}/{name}: {both[0]} is an object, and a folder of others", hint="rename one")
    if untimed := [path for path, stored in paths.items() if not math.isfinite(stored.written_at_s)]:
        raise Unsupported(f"adopt {url}/{name}: the server does not say when {untimed[0]} was written")
    entries = [
        SourceEntry(
            path=path,
            kind="file",
            mode=_FILE_MODE,
            device=0,
            inode=0,
            size_bytes=stored.size_bytes,
            modified_ns=int(stored.written_at_s) * 1_000_000_000,
        )
        for path, stored in paths.items()
    ]
    entries += [SourceEntry(path=path, kind="folder", mode=_FOLDER_MODE, device=0, inode=0) for path in folders]
    if len(entries) > adopted.ENTRIES_MAX:
        raise Unsupported(f"adopt {url}/{name}: it has more than {adopted.ENTRIES_MAX} entries")
    return SourceTree(
        root=Path(url) if is_file else Path(url) / name,
        name=name,
        is_file=is_file,
        mode=0 if is_file else _FOLDER_MODE,
        entries=tuple(sorted(entries, key=lambda entry: entry.path.split("/"))),
        url=f"{url}/{name}",
    )
