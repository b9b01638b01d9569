"""A part of a checkpoint: one rank's shard as it is, or chosen tensors out of every shard.

Only the chunks are read that hold what is wanted, and a shard's header first: a checksum is of a whole chunk. What is
written holds no manifest, so nothing takes it for a checkpoint.
"""

from __future__ import annotations

import bisect
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
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
from tierd.format.shard import Shard, TensorEntry, TensorSpec, parse_header, plan_layout
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.store import Source
from tierd.transfer.atomic_output import AtomicOutput
from tierd.transfer.fetch import Fetch

_CHOSEN = "chosen"  # the folder that is published, below the atomic_output


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """`only`: globs of the tensors' names; none: all of a shard. `rank`: whose shard; None: all."""

    only: tuple[str, ...]
    rank: int | None

    def files(self, manifest: Manifest) -> list[str]:
        """The shards that are looked into. Raises NotFound when the rank has none."""
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

    def fits(self, name: str) -> bool:
        return any(fnmatchcase(name, glob) for glob in self.only)


async def bring_part(
    part: Part, manifest: Manifest, files: Sequence[str], replicas: Replicas, store: DirectoryStore, land: AtomicOutput
) -> tuple[int, Path]:
    """(bytes of all chunks that were wanted, the folder to publish)."""
    entries = {entry.name: entry for entry in manifest.files if entry.name in files}
    doing = f"step {manifest.step}"
    if not part.only:
        land.check_room(sum(entry.size_bytes for entry in entries.values()))
        fetch = Fetch(manifest, store, wanted={name: range(len(entry.chunks)) for name, entry in entries.items()})
        await replicas.complete(fetch, land, doing)
        await fetch.finish()
        return fetch.wanted_bytes, land.partial / manifest.run / manifest.id.name

    chunks: dict[str, set[int]] = {name: {0} for name in files}
    chosen: dict[str, _Chosen] = {}
    others: set[str] = set()
    async for name, shard in _shards(manifest, entries, chunks, replicas, store, land):
        one = _Chosen(shard, part)
        if one.tensors:
            chosen[name] = one
        others |= {tensor.partition(".")[0] + ".*" for tensor in shard.tensors}
    if not chosen:
        raise NotFound(
            f"restore {' and '.join(part.only)} of {manifest.id}: no tensor has such a name",
            hint=f"as in {', '.join(repr(one) for one in sorted(others)[:20])}",
        )
    for name, one in chosen.items():
        chunks[name] |= {index for tensor in one.tensors for index in _chunks(entries[name], tensor)}
    wanted = {name: chunks[name] for name in chosen}
    fetch = Fetch(manifest, store, wanted=wanted)
    land.check_room(fetch.wanted_bytes + sum(one.layout.size_bytes for one in chosen.values()))
    await replicas.complete(fetch, land, doing)
    with progress_bar("writing", sum(one.layout.size_bytes for one in chosen.values())) as progress:
        for name, one in chosen.items():
            one.source = fetch.source(name)
            await store.put(
                f"{_CHOSEN}/{name}",
                one,
                size_bytes=one.layout.size_bytes,
                chunk_bytes=checksum.CHUNK_BYTES,
                progress=progress,
            )
    everything = Fetch(manifest, store, wanted=chunks)
    return everything.wanted_bytes, land.partial / _CHOSEN


async def _shards(
    manifest: Manifest,
    entries: Mapping[str, FileEntry],
    chunks: dict[str, set[int]],
    replicas: Replicas,
    store: DirectoryStore,
    land: AtomicOutput,
) -> AsyncGenerator[tuple[str, Shard], Any]:
    """(file, its header), one after the other: of many shards all at once would be a lot to hold. The first chunk says
    how long a header is; `chunks` gets those that it takes."""
    fetch = Fetch(manifest, store, wanted=chunks)
    await replicas.complete(fetch, land, f"headers of step {manifest.step}")
    lengths: dict[str, int] = {}
    for name, entry in entries.items():
        lengths[name] = await fetch.header_bytes(name)
        chunks[name] = set(range(-(-lengths[name] // entry.chunk_bytes)))
    if any(len(some) > 1 for some in chunks.values()):
        fetch = Fetch(manifest, store, wanted=chunks)
        await replicas.complete(fetch, land, f"headers of step {manifest.step}")
    for name, entry in entries.items():
        header = bytearray(lengths[name])
        await fetch.source(name).fill(0, memoryview(header))
        yield name, parse_header(bytes(header), entry.size_bytes, where=f"{manifest.id}/{name}")


def _chunks(entry: FileEntry, tensor: TensorEntry) -> Iterable[int]:
    return range(tensor.offset // entry.chunk_bytes, -(-(tensor.offset + tensor.size_bytes) // entry.chunk_bytes))


class _Chosen:
    """A shard of the chosen tensors alone, as the store asks for it: each keeps its place in the global tensor."""

    source: Source

    def __init__(self, shard: Shard, part: Part) -> None:
        self.tensors = [one for name, one in shard.tensors.items() if part.fits(name)]
        specs = [
            TensorSpec(name=one.name, dtype=one.dtype, shape=one.shape, saved_offsets=one.saved_offsets)
            for one in self.tensors
        ]
        # The state tree says where all tensors belong, of which most are not here.
        about = shard.tierd | {"state": {}}
        self.layout = plan_layout(specs, about)
        self._header = self.layout.encode_header(about)
        self._there = {one.name: one.offset for one in self.tensors}
        self._ends = [one.offset + one.size_bytes for one in self.layout.tensors]

    async def fill(self, offset: int, buffer: memoryview) -> None:
        head = self._header[offset : offset + len(buffer)]
        buffer[: len(head)] = head
        done = len(head)
        for tensor in self.layout.tensors[bisect.bisect_right(self._ends, offset + done) :]:
            if done == len(buffer):
                return
            skipped = offset + done - tensor.offset
            length = min(tensor.size_bytes - skipped, len(buffer) - done)
            if length:
                await self.source.fill(self._there[tensor.name] + skipped, buffer[done : done + length])
                done += length
