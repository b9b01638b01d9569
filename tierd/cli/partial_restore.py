"""Restores a part of a checkpoint: one rank's shard as it is, or some tensors out of every shard.

Only the chunks with those bytes are read, after the headers, since a checksum covers a whole chunk. The result has no
manifest, so nothing takes it for a checkpoint.
"""

from __future__ import annotations

import bisect
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tierd.cli.console import progress_bar
from tierd.cli.replicas import Replicas
from tierd.errors import NotFound
from tierd.format import checksum, layout
from tierd.format.ids import Rank
from tierd.format.manifest import FileEntry, Manifest
from tierd.format.shard import Shard, parse_header, plan_layout
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.store import Source
from tierd.transfer.atomic_output import AtomicOutput
from tierd.transfer.fetch import Fetch

_FOLDER = "chosen"  # the folder to publish, inside the atomic output


@dataclass(frozen=True, slots=True, kw_only=True)
class Subset:
    """`only`: globs of tensor names; empty: whole shards. `rank`: the rank whose shard to restore; None: all."""

    only: tuple[str, ...]
    rank: int | None

    def files(self, manifest: Manifest) -> list[str]:
        """The shards to read. Raises NotFound when there is no such rank."""
        names = [entry.name for entry in manifest.files]
        if self.rank is None:
            return names
        name = layout.shard_name(Rank(self.rank), manifest.world_size)
        if name not in names:
            raise NotFound(
                f"restore rank {self.rank} of {manifest.id}: it has no {name}",
                hint=f"its files are {', '.join(names[:4])}{', …' if len(names) > 4 else ''}",
            )
        return [name]

    def includes(self, tensor: str) -> bool:
        return any(fnmatchcase(tensor, glob) for glob in self.only)


async def fetch_subset(
    subset: Subset,
    manifest: Manifest,
    files: Sequence[str],
    replicas: Replicas,
    store: DirectoryStore,
    output: AtomicOutput,
) -> tuple[int, Path]:
    """(bytes of all chunks that were needed, the folder to publish)."""
    entries = {entry.name: entry for entry in manifest.files if entry.name in files}
    was_begun = output.is_begun
    title = f"step {manifest.step}"
    if not subset.only:
        output.check_room(sum(entry.size_bytes for entry in entries.values()))
        fetch = Fetch(manifest, store, wanted={name: range(len(entry.chunks)) for name, entry in entries.items()})
        await replicas.complete(fetch, output, title)
        await fetch.finish()
        return fetch.wanted_bytes, output.folder / manifest.run / manifest.id.name

    chunks: dict[str, set[int]] = {name: {0} for name in files}
    written: dict[str, _SubsetFile] = {}
    prefixes: set[str] = set()
    async for name, shard in _shards(manifest, entries, chunks, replicas, store, output):
        file = _SubsetFile(shard, subset)
        if file.tensors:
            written[name] = file
        prefixes |= {tensor.partition(".")[0] + ".*" for tensor in shard.tensors}
    if not written:
        output.is_worth_keeping = was_begun  # the headers alone are worth nothing
        raise NotFound(
            f"restore {' and '.join(subset.only)} of {manifest.id}: no tensor has such a name",
            hint=f"as in {', '.join(map(repr, sorted(prefixes)[:20]))}",
        )
    for name, file in written.items():
        chunk_bytes = entries[name].chunk_bytes
        for tensor in file.tensors:
            end = tensor.offset + tensor.size_bytes
            chunks[name].update(range(tensor.offset // chunk_bytes, -(-end // chunk_bytes)))
    fetch = Fetch(manifest, store, wanted={name: chunks[name] for name in written})
    size_bytes = sum(file.layout.size_bytes for file in written.values())
    output.check_room(fetch.wanted_bytes + size_bytes)
    await replicas.complete(fetch, output, title)
    with progress_bar("writing", size_bytes) as progress:
        for name, file in written.items():
            file.source = fetch.source(name)
            await store.put(
                f"{_FOLDER}/{name}",
                Source(file.fill),
                size_bytes=file.layout.size_bytes,
                chunk_bytes=checksum.CHUNK_BYTES,
                progress=progress,
            )
    with_headers = Fetch(manifest, store, wanted=chunks)
    return with_headers.wanted_bytes, output.folder / _FOLDER


async def _shards(
    manifest: Manifest,
    entries: Mapping[str, FileEntry],
    chunks: dict[str, set[int]],
    replicas: Replicas,
    store: DirectoryStore,
    output: AtomicOutput,
) -> AsyncGenerator[tuple[str, Shard], Any]:
    """(file, its header), one at a time to bound the memory. A shard's first chunk says how long its header is; the
    header's chunks are added to `chunks`."""
    title = f"headers of step {manifest.step}"
    fetch = Fetch(manifest, store, wanted=chunks)
    await replicas.complete(fetch, output, title)
    lengths: dict[str, int] = {}
    for name, entry in entries.items():
        lengths[name] = await fetch.header_bytes(name)
        chunks[name] = set(range(-(-lengths[name] // entry.chunk_bytes)))
    if any(len(indexes) > 1 for indexes in chunks.values()):
        fetch = Fetch(manifest, store, wanted=chunks)
        await replicas.complete(fetch, output, title)
    for name, entry in entries.items():
        header = bytearray(lengths[name])
        await fetch.source(name).fill(0, memoryview(header))
        yield name, parse_header(bytes(header), entry.size_bytes, where=f"{manifest.id}/{name}")


class _SubsetFile:
    """The bytes of a shard with some of its tensors. Each tensor keeps its offsets in the global one."""

    source: Source

    def __init__(self, shard: Shard, subset: Subset) -> None:
        self.tensors = [tensor for name, tensor in shard.tensors.items() if subset.includes(name)]
        # The state tree refers to all tensors, and most of them are not here.
        metadata = shard.tierd | {"state": {}}
        self.layout = plan_layout(self.tensors, metadata)
        self._header = self.layout.encode_header(metadata)
        self._source_offsets = {tensor.name: tensor.offset for tensor in self.tensors}
        self._ends = [tensor.offset + tensor.size_bytes for tensor in self.layout.tensors]

    async def fill(self, offset: int, buffer: memoryview) -> None:
        header = self._header[offset : offset + len(buffer)]
        buffer[: len(header)] = header
        done = len(header)
        for tensor in self.layout.tensors[bisect.bisect_right(self._ends, offset + done) :]:
            if done == len(buffer):
                return
            skipped = offset + done - tensor.offset
            length = min(tensor.size_bytes - skipped, len(buffer) - done)
            if length:
                await self.source.fill(self._source_offsets[tensor.name] + skipped, buffer[done : done + length])
                done += length
