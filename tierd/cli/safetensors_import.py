"""Opens safetensors files for `tierd import`: a file, or the folder of a model, whose tensors become the model.

tierd reads them itself, without torch. A folder is as Hugging Face writes it: one file, or several and an index.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from tierd.errors import UNDECODABLE, BadConfig, Corrupt, NotFound, Unsupported
from tierd.format.plain_safetensors import read_plain_header
from tierd.format.shard import Shard
from tierd.format.whole import whole_tensors
from tierd.transfer.foreign_file import ForeignFile
from tierd.transfer.imported import ImportedState, architecture_of

FORMAT = "safetensors"
SUFFIX = ".safetensors"
INDEX = ".safetensors.index.json"
MODEL = "model"
_INDEX_BYTES_MAX = 100_000_000


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


@asynccontextmanager
async def open_safetensors(path: Path, step: int) -> AsyncGenerator[ImportedState, Any]:
    """The tensors of a file or folder as the section `model`. The caller reads them within the block. Raises NotFound,
    Corrupt, Unsupported or BadConfig."""
    async with AsyncExitStack() as stack:
        files, index = _open_files(path, stack)
        shards = {name: read_plain_header(file.read, file.size_bytes, where=name) for name, file in files.items()}
        _check_names(path, index, shards)
        tensors = [replace(tensor, name=f"{MODEL}.{tensor.name}") for tensor in whole_tensors(shards)]
        if not tensors:
            raise Unsupported(f"import {path}: it has no tensor")

        async def read(name: str, offset: int, buffer: memoryview) -> None:
            await asyncio.to_thread(files[name].fill, offset, buffer)

        def check_unchanged() -> None:
            for file in files.values():
                file.check_unchanged()

        yield ImportedState(
            format=FORMAT,
            step=step,
            created_at=max(file.created_at for file in files.values()),
            trees=[{MODEL: {"kind": "module", "suffix": "", "value": {}}}],
            tensors=tensors,
            read=read,
            check_unchanged=check_unchanged,
            architecture_hash=architecture_of(tensors),
            metrics={},
            versions={},
        )


def _open_files(path: Path, stack: AsyncExitStack) -> tuple[dict[str, ForeignFile], dict[str, str]]:
    """The files by name, and of a folder with an index the file of each tensor."""
    if not path.is_dir():
        return {path.name: stack.enter_context(closing(ForeignFile(path)))}, {}
    index = _read_index(path)
    names = set(index.values()) or {each.name for each in path.iterdir() if each.name.endswith(SUFFIX)}
    return {name: stack.enter_context(closing(ForeignFile(path / name))) for name in sorted(names)}, index


def _read_index(folder: Path) -> dict[str, str]:
    """The file of each tensor, by its name; empty if there is no index."""
    found = [path for path in folder.iterdir() if path.name.endswith(INDEX)]
    if len(found) > 1:
        raise BadConfig(f"import {folder}: it has {len(found)} indexes", hint="import the files of one model at a time")
    if not found:
        return {}
    with closing(ForeignFile(found[0])) as file:
        raw = file.read(_INDEX_BYTES_MAX, 0)
    try:
        index = msgspec.json.decode(raw, type=_Index).weight_map
    except UNDECODABLE as error:
        raise Corrupt(f"read {found[0]}: {error}", hint="was it copied whole?") from error
    for name in index.values():
        if name != Path(name).name or not name.endswith(SUFFIX):
            raise Corrupt(f"read {found[0]}: it names {name[:100]!r}, which is not a file of its folder")
    for name in index.values():
        if not (folder / name).is_file():
            raise NotFound(f"import {folder}: {found[0].name} names {name}, which is not there")
    return index


def _check_names(path: Path, index: dict[str, str], shards: dict[str, Shard]) -> None:
    """Raises Corrupt where a file lacks a tensor of the index, and Unsupported where two files have one tensor."""
    for name, file in index.items():
        if name not in shards[file].tensors:
            raise Corrupt(f"import {path}: {file} has no {name}, which the index says", hint="was it copied whole?")
    counts = Counter(name for shard in shards.values() for name in shard.tensors)
    if twice := next((name for name, count in counts.items() if count > 1), None):
        raise Unsupported(
            f"import {path}: {twice} is in two of its files",
            hint="import one file: its folder has those of several models, or no index",
        )
