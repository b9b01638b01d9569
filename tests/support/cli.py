"""For tests of the CLI: a config with a hot and a cold directory, real checkpoints, and calls of the commands."""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from typer.testing import CliRunner, Result

from tests.support.processes import Command
from tests.support.store_contract import BytesSource
from tierd.cli.app import called, make_app
from tierd.format import checksum, layout
from tierd.format.ids import CheckpointId, Rank, checkpoint_id
from tierd.format.manifest import FileEntry, Head, Manifest, file_entry
from tierd.format.node_file import NodeFile
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.tier import Tier

CHUNK_BYTES = 8192


@dataclass(frozen=True)
class House:
    """A folder with a config, a hot directory and a cold directory."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "tierd.toml"

    @property
    def hot(self) -> Path:
        return self.root / "hot"

    @property
    def cold(self) -> Path:
        return self.root / "cold"

    def tierd(self, *arguments: str | Path) -> Result:
        """Runs a command in this process."""
        words = ["--config", str(self.config), *map(str, arguments)]
        return CliRunner().invoke(make_app(called(words)), words)

    def json(self, *arguments: str | Path) -> Any:
        """The decoded output of a command with --json, which must succeed and print nothing else to stdout."""
        result = self.tierd(*arguments, "--json")
        assert result.exit_code == 0, result.output
        return msgspec.json.decode(result.stdout)

    def start(self, *arguments: str | Path) -> Command:
        """Runs a command as a process of its own."""
        return Command(["--config", str(self.config), *map(str, arguments)])


def make_house(root: Path, *, more: str = "") -> House:
    """`more` is appended to the config, and may add cold tiers."""
    house = House(root)
    house.config.write_text(
        f"""
        [daemon]
        socket = "tierd.sock"
        listen = "127.0.0.1:0"
        [hot]
        path = "hot"
        [[cold]]
        name = "cold"
        url = "file://cold"
        {more}
        """
    )
    house.hot.mkdir(mode=0o700)
    house.cold.mkdir(mode=0o700)
    return house


def content(checkpoint: CheckpointId, rank: int, size_bytes: int) -> bytes:
    return random.Random(f"{checkpoint}/{rank}").randbytes(size_bytes)


def make_checkpoint(
    *roots: Path,
    run: str = "run42",
    step: int = 100,
    generation: int = 1,
    sequence: int = 1,
    world_size: int = 2,
    size_bytes: int = 20_000,
    milestones: tuple[str, ...] = (),
    created_at: str = "2025-01-01T00:00:00.000+00:00",
    **fields: Any,
) -> Manifest:
    """Commits the same checkpoint to each of the tiers at `roots`, with tierd's own code. `fields`: others of its
    manifest."""
    checkpoint = checkpoint_id(run, step, generation)
    shards = {
        layout.shard_name(rank, world_size): content(checkpoint, rank, size_bytes)  # pyright: ignore[reportArgumentType]
        for rank in range(world_size)
    }
    manifest = make_manifest(
        checkpoint, [_entry(name, shard) for name, shard in shards.items()], sequence=sequence, created_at=created_at
    )
    manifest = msgspec.structs.replace(manifest, **fields)

    async def write(root: Path) -> None:
        store = DirectoryStore(root)
        tier = Tier("written", store)
        for name, shard in shards.items():
            key = layout.file_key(checkpoint, name)
            await store.put(key, BytesSource(shard), size_bytes=len(shard), chunk_bytes=CHUNK_BYTES)
        await tier.commit(manifest)
        for name in milestones:
            await tier.mark_milestone(checkpoint, name, created_at)
        await store.close()

    for root in roots:
        asyncio.run(write(root))
    return manifest


def make_part(
    root: Path,
    ranks: list[int],
    *,
    world_size: int = 4,
    step: int = 100,
    sequence: int = 1,
    size_bytes: int = 20_000,
    claim: str = "0" * 32,
) -> NodeFile:
    """One node's part of a checkpoint over several nodes, in the tier at `root`."""
    checkpoint = checkpoint_id("run42", step, 1)
    shards = {layout.shard_name(Rank(rank), world_size): content(checkpoint, rank, size_bytes) for rank in ranks}
    manifest = make_manifest(checkpoint, [_entry(name, shard) for name, shard in shards.items()], sequence=sequence)
    fields = {name: getattr(manifest, name) for name in Head.__struct_fields__} | {"world_size": world_size}
    part = NodeFile(**fields, files=manifest.files, claim=claim, ranks=ranks, is_healthy=None, milestone="")

    async def write() -> None:
        store = DirectoryStore(root)
        for name, shard in shards.items():
            key = layout.file_key(checkpoint, name)
            await store.put(key, BytesSource(shard), size_bytes=len(shard), chunk_bytes=CHUNK_BYTES)
        await store.put_bytes(part.key, part.encode())
        await store.close()

    asyncio.run(write())
    return part


def make_manifest(
    checkpoint: CheckpointId,
    files: list[FileEntry],
    *,
    sequence: int = 1,
    created_at: str = "2025-01-01T00:00:00.000+00:00",
) -> Manifest:
    return Manifest(
        format_version=1,
        run=checkpoint.run,
        step=checkpoint.step,
        generation=checkpoint.generation,
        sequence=sequence,
        parent=None,
        world_size=len(files),
        created_at=created_at,
        kind="snapshot",
        metrics={"loss": 2.5},
        architecture_hash="0123abcd",
        versions={"tierd": "0.1.0"},
        files=files,
    )


def make_zeros(root: Path, *, step: int, size_bytes: int, chunk_bytes: int = checksum.CHUNK_BYTES) -> Manifest:
    """A large checkpoint at no cost: one sparse file with correct checksums."""
    checkpoint = checkpoint_id("run42", step, 1)
    lengths = [length for _, length in checksum.chunk_ranges(size_bytes, chunk_bytes)]
    of_length = {length: checksum.crc64nvme(bytes(length)) if length < 1 << 30 else 0 for length in set(lengths)}
    name = layout.shard_name(0, 1)  # pyright: ignore[reportArgumentType]
    manifest = make_manifest(
        checkpoint, [file_entry(name, size_bytes, chunk_bytes, [of_length[one] for one in lengths])]
    )
    folder = root / checkpoint.run / checkpoint.name
    folder.mkdir(parents=True)
    with open(folder / name, "wb") as file:
        os.truncate(file.fileno(), size_bytes)
    (folder / layout.MANIFEST).write_bytes(manifest.encode())
    return manifest


def folder_of(root: Path, manifest: Manifest) -> Path:
    return root / manifest.run / manifest.id.name


def flip_a_bit(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def assert_same_files(there: Path, here: Path) -> None:
    names = sorted(one.name for one in there.iterdir())
    assert sorted(one.name for one in here.iterdir()) == names
    for name in names:
        assert (here / name).read_bytes() == (there / name).read_bytes(), name


def _entry(name: str, shard: bytes) -> FileEntry:
    chunks = [
        checksum.crc64nvme(shard[offset : offset + length])
        for offset, length in checksum.chunk_ranges(len(shard), CHUNK_BYTES)
    ]
    return file_entry(name, len(shard), CHUNK_BYTES, chunks)


def assert_import_refused(house: House, path: Path, code: int, message: str, *more: str) -> str:
    """`tierd import` as step 3 of the run `new`. Returns what it printed on stderr."""
    result = house.tierd("import", path, "--run", "new", "--step", "3", *more)
    assert result.exit_code == code, result.output
    assert message in result.stderr
    assert len(result.stderr.splitlines()) <= 2, "one line, and a hint"
    assert not (house.hot / "new").exists()
    return result.stderr
