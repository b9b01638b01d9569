"""`tierd export`: assembles a checkpoint's shards into whole tensors, in a format of other tools.

`safetensors` and `flat` are written here, through a small buffer. `torch` and `dcp` are torch's own formats: torch
writes them, in a process that holds the whole state. Every chunk is verified; PATH appears whole or not at all.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import os
import re
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tierd.cli import options
from tierd.cli.console import duration, print_note, print_report, progress_bar, size
from tierd.cli.options import parse_query, settings_of
from tierd.cli.restore import resolve_target, restore_to
from tierd.descriptors import close_all, open_all, read_all
from tierd.errors import UNDECODABLE, BadConfig, Corrupt, NotFound, TierdError
from tierd.format import checksum, flat_file
from tierd.format.ids import AUTO
from tierd.format.manifest import Manifest
from tierd.format.shard import Shard, read_header
from tierd.format.text import listed
from tierd.format.whole import AssembledFile, WholeFile, WholeTensor, split, whole_tensors
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.store import Source
from tierd.transfer.assembled import fill_from
from tierd.transfer.atomic_output import AtomicOutput, make_durable

_SIZE = re.compile(r"([0-9]+)\s*(B|KB|MB|GB|TB)?", re.IGNORECASE)
_FOLDER = "made"  # the folder or file to publish, inside the atomic output


class ExportFormat(StrEnum):
    safetensors = "safetensors"
    torch = "torch"
    dcp = "dcp"
    flat = "flat"


_ONE_FILE = {ExportFormat.torch: "checkpoint.pt", ExportFormat.flat: "checkpoint.bin"}


async def export(
    context: typer.Context,
    to: Annotated[
        Path,
        typer.Option("--to", metavar="PATH", help="A new or empty directory; for torch and flat, a new file."),
    ],
    format: Annotated[ExportFormat, typer.Option("--format", help="What to write. torch and dcp need torch.")],
    prefix: Annotated[
        str,
        typer.Option(
            "--prefix",
            metavar="TEXT",
            help="Only tensors with this prefix, which is removed: 'model.' gives a plain state dict.",
        ),
    ] = "",
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", metavar="SIZE", help="Split safetensors files at this size: 500MB, 5GB.")
    ] = "5GB",
    names: Annotated[
        Path | None,
        typer.Option("--names", metavar="FILE", help="For flat: JSON with the parameters' names in the file's order."),
    ] = None,
    tier: options.SourceTier = AUTO,
    run: options.RunName = None,
    step: options.StepName = "latest",
    generation: options.GenerationNumber = None,
    place: options.From = None,
    allow_unhealthy: options.AllowUnhealthy = False,
    json: options.Json = False,
) -> int:
    """Assemble a checkpoint's shards into one state, for other tools."""
    target = resolve_target(to, tier, place)
    if format in _ONE_FILE and target.is_dir():
        name = _ONE_FILE[format]
        raise BadConfig(f"export into {target}: {format.value} is one file", hint=f"--to {target / name}")
    if format is ExportFormat.flat and prefix:
        raise BadConfig("export as flat: --prefix selects tensors by their names, and a flat file has none")
    ordered = [] if names is None else _read_names(names)
    size_max = _size_bytes(max_shard_size)

    async def convert(folder: Path, manifest: Manifest, output: AtomicOutput) -> Path:
        shards = {entry.name: _read_shard(folder / entry.name) for entry in manifest.files}
        tensors = whole_tensors(shards, prefix)
        if prefix and not tensors:
            prefixes = sorted({name.partition(".")[0] + "." for shard in shards.values() for name in shard.tensors})
            raise NotFound(
                f"export {manifest.id}: no tensor's name begins with {prefix!r}",
                hint=f"they begin with {', '.join(prefixes[:20])}",
            )
        if format is ExportFormat.safetensors:
            metadata = {"format": "pt", "run": manifest.run, "step": str(manifest.step)}
            metadata["generation"] = str(manifest.generation)
            files = [WholeFile(part, metadata) for part in split(tensors, size_max)]
            await _write_safetensors(files, folder, list(shards), output)
        elif format is ExportFormat.flat:
            file = _flat_file(shards, tensors, ordered, manifest)
            await _write_flat(file, folder, list(shards), output)
        else:
            await _write_with_torch(format, folder, output, prefix)
        return output.folder / _FOLDER

    if format in (ExportFormat.torch, ExportFormat.dcp):
        check_torch(
            f"export as {format.value}",
            hint="pip install 'tierd[client]', or use --format safetensors, which needs no torch",
        )
    query = parse_query(run, step, generation, tier=place or tier, allow_unhealthy=allow_unhealthy)
    exported = await restore_to(target, settings_of(context), query, place, convert=convert)
    text = (
        f"exported {exported.run} step {exported.step} (generation {exported.generation}) from {exported.tier} "
        f"to {exported.to} as {format.value}: {size(exported.size_bytes)} in {duration(exported.seconds)}, verified"
    )
    print_report(msgspec.to_builtins(exported) | {"format": format.value}, as_json=json, text=text)
    return 0


def _read_names(path: Path) -> list[str]:
    """The names of parameters in a JSON file, in order."""
    try:
        names = msgspec.json.decode(path.read_bytes(), type=list[str])
    except (OSError, *UNDECODABLE) as error:
        hint = 'a list as ["weight", "bias"], in the order of the file'
        raise BadConfig(f"read the names of parameters in {path}: {error}", hint=hint) from error
    if not names or len(names) != len(set(names)):
        raise BadConfig(f"read the names of parameters in {path}: empty, or a name twice")
    return names


def _size_bytes(text: str) -> int:
    """Decimal units, as in Hugging Face's libraries."""
    match = _SIZE.fullmatch(text.strip())
    size_bytes = int(match[1]) * 1000 ** ("B", "KB", "MB", "GB", "TB").index((match[2] or "B").upper()) if match else 0
    if size_bytes < 1:
        raise BadConfig(f"--max-shard-size {text!r} is not a size", hint="as in 500MB or 5GB")
    return size_bytes


# ── safetensors ──


async def _write_safetensors(
    files: Sequence[WholeFile], folder: Path, shards: Sequence[str], output: AtomicOutput
) -> None:
    """Named as Hugging Face names them: one file, or several and an index."""
    names = ["model.safetensors"]
    if len(files) > 1:
        names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    descriptors = open_all(os.open(folder / shard, os.O_RDONLY) for shard in shards)
    store = DirectoryStore(output.folder, access=output.access, url=f"file://{output.partial}")
    opened = dict(zip(shards, descriptors, strict=True))
    try:
        with progress_bar("assembling", sum(file.size_bytes for file in files)) as progress:
            for name, file in zip(names, files, strict=True):
                await store.put(
                    f"{_FOLDER}/{name}",
                    _assembled(file, opened),
                    size_bytes=file.size_bytes,
                    chunk_bytes=checksum.CHUNK_BYTES,
                    progress=progress,
                )
        if len(files) > 1:
            weight_map = {tensor.name: name for name, file in zip(names, files, strict=True) for tensor in file.tensors}
            total_bytes = sum(tensor.size_bytes for file in files for tensor in file.tensors)
            index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
            encoded = msgspec.json.format(msgspec.json.encode(index), indent=2)
            await store.put_bytes(f"{_FOLDER}/model.safetensors.index.json", encoded)
    finally:
        close_all(descriptors)
        await store.close()


def _read_shard(path: Path) -> Shard:
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        return read_header(functools.partial(os.pread, file.fileno()), size_bytes, where=path.name)


def _assembled(file: AssembledFile, opened: Mapping[str, int]) -> Source:
    """A whole file as a source for the store: assembled from the open shards while it is written."""

    def read(shard: str, offset: int, buffer: memoryview) -> None:
        if missing := read_all(opened[shard], offset, buffer):
            end = offset + len(buffer) - missing
            raise Corrupt(f"assemble a whole file: {shard} ends early, at byte {end}")

    return Source(functools.partial(asyncio.to_thread, fill_from(file, read)))


# ── the flat file ──


def _flat_file(
    shards: Mapping[str, Shard], tensors: Sequence[WholeTensor], names: Sequence[str], manifest: Manifest
) -> AssembledFile:
    """Raises Unsupported for what a flat file cannot hold. Reports what it leaves out."""
    where = str(manifest.id)
    trees = [shard.tierd.get("state", {}) for shard in shards.values()]
    by_name = {tensor.name: tensor for tensor in tensors}
    shapes = {name: tensor.shape for name, tensor in by_name.items()}
    parameters = flat_file.parameters_of(trees[0], shapes, names, where=where)
    file = flat_file.assemble(by_name, parameters, manifest.step, where=where)
    held = {tensor.name for tensor in file.tensors} | {parameter.step for parameter in parameters}
    if left_out := sorted(by_name.keys() - held):
        print_note(f"tierd: not in the flat file: {listed(left_out)}")
    return file


async def _write_flat(file: AssembledFile, folder: Path, shards: Sequence[str], output: AtomicOutput) -> None:
    descriptors = open_all(os.open(folder / shard, os.O_RDONLY) for shard in shards)
    store = DirectoryStore(output.folder, access=output.access, url=f"file://{output.partial}")
    try:
        with progress_bar("assembling", file.size_bytes) as progress:
            await store.put(
                _FOLDER,
                _assembled(file, dict(zip(shards, descriptors, strict=True))),
                size_bytes=file.size_bytes,
                chunk_bytes=checksum.CHUNK_BYTES,
                progress=progress,
            )
    finally:
        close_all(descriptors)
        await store.close()


# ── torch's own formats ──


def check_torch(doing: str, *, hint: str) -> None:
    """For verbs that start a process which imports torch. Raises BadConfig if it is not installed."""
    missing = [name for name in ("torch", "tierd_client") if importlib.util.find_spec(name) is None]
    if missing:
        raise BadConfig(f"{doing}: {' and '.join(missing)} cannot be imported here", hint=hint)


async def _write_with_torch(format: ExportFormat, folder: Path, output: AtomicOutput, prefix: str) -> None:
    made = output.folder / _FOLDER
    # -P: do not import a module named torch from the current directory.
    command = [sys.executable, "-P", "-m", "tierd_client.export", format.value, str(folder), str(made), prefix]
    child = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        pass_fds=[output.descriptor],  # `made` names the folder by it
        umask=output.access.umask,
    )
    try:
        _, stderr = await child.communicate()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode != 0:
        lines = stderr.decode(errors="replace").strip().splitlines() or [f"it ended with {child.returncode}"]
        raise TierdError(f"export as {format.value}: torch's process: {lines[-1]}", hint="is there enough memory?")
    await asyncio.to_thread(make_durable, made, output.access)
