"""Opens a flat file for `tierd import`: weights, m, v and the step come from it, all else from a checkpoint.

A flat file names nothing. The checkpoint of `--like` has the names, the shapes, and what the file lacks: buffers, the
scheduler, generators. It is read from its tiers, verified.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

from tierd.cli.console import print_note
from tierd.cli.import_format import TORCH_BEGINNINGS
from tierd.cli.import_template import open_template
from tierd.cli.opened_tiers import OpenedTiers
from tierd.config.sections import Config
from tierd.errors import BadConfig, Corrupt, Unsupported
from tierd.format import flat_file
from tierd.format.flat_file import Parameter
from tierd.format.text import listed
from tierd.format.whole import WholeTensor, whole_in
from tierd.lifecycle.selection import CheckpointQuery
from tierd.transfer.foreign_file import ForeignFile
from tierd.transfer.imported import ImportedState
from tierd.transfer.verified_reader import VerifiedReader

FORMAT = "flat"
EXACT_MAX = 1 << 24  # a float32 counts no further without a gap
_FLAT, _STEP = "", "/step"  # no names of shards
_FLOAT = struct.Struct("<f")


@asynccontextmanager
async def open_flat(
    path: Path, like: CheckpointQuery, tiers: OpenedTiers, config: Config
) -> AsyncGenerator[ImportedState, Any]:
    """The state in a flat file. The caller reads it within the block. Raises NotFound, Corrupt or Unsupported."""
    async with AsyncExitStack() as stack:
        file = stack.enter_context(closing(ForeignFile(path)))
        step, count = _parse_header(file, path)
        opened = await stack.enter_async_context(open_template(path, like, tiers, config))
        template, reader, trees, tensors = opened.manifest, opened.reader, opened.trees, opened.tensors
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        parameters = flat_file.parameters_of(trees[0], shapes, where=str(template.id))
        from_file = flat_file.tensors_in(_FLAT, count, parameters, tensors, where=str(path))
        if step != template.step:
            await _check_counts(parameters, tensors, reader, template.step, step, where=str(path))
            from_file += [whole_in(_STEP, parameter.step, "F32", (), 0) for parameter in parameters]
        replaced = {tensor.name: tensor for tensor in from_file}
        _report_taken(tensors.keys() - replaced.keys(), trees, str(template.id))
        lock = asyncio.Lock()

        async def read(name: str, offset: int, buffer: memoryview) -> None:
            if name == _FLAT:
                await asyncio.to_thread(file.fill, offset, buffer)
            elif name == _STEP:
                buffer[:] = _FLOAT.pack(step)[offset : offset + len(buffer)]
            else:
                async with lock:
                    await reader.fill(name, offset, buffer)

        yield ImportedState(
            format=FORMAT,
            step=step,
            created_at=file.created_at,
            trees=trees,
            tensors=list((tensors | replaced).values()),
            read=read,
            check_unchanged=file.check_unchanged,
            architecture_hash=template.architecture_hash,
            metrics={},
            versions={"like": str(template.id)},
        )


def _parse_header(file: ForeignFile, path: Path) -> tuple[int, int]:
    """(step, number of parameters). Raises Corrupt, and BadConfig for a file of torch.save."""
    head = file.read(flat_file.HEADER.size, 0)
    try:
        return flat_file.parse_header(head, file.size_bytes, where=str(path))
    except Corrupt as error:
        if not head.startswith(TORCH_BEGINNINGS):
            raise
        raise BadConfig(
            f"import {path}: it begins as a file of torch.save, and --like alone is for a flat file",
            hint="--model KEY too: the key of the model's state dict in it",
        ) from error


async def _check_counts(
    parameters: Sequence[Parameter],
    tensors: Mapping[str, WholeTensor],
    reader: VerifiedReader,
    template_step: int,
    step: int,
    *,
    where: str,
) -> None:
    """Raises Unsupported unless Adam's own count of steps follows from the step: each is a float32 that is the step of
    the template."""
    why = ""
    if step > EXACT_MAX:
        why = f"step {step} is no exact float32"
    for parameter in parameters if not why else ():
        tensor = tensors.get(parameter.step)
        if tensor is None or (tensor.dtype, tensor.shape) != ("F32", ()):
            why = f"its optimizer does not count the steps of {parameter.name} as a float32"
            break
        raw = bytearray(_FLOAT.size)
        await reader.fill(tensor.parts[0].shard, tensor.parts[0].entry.offset, memoryview(raw))
        if (counted := _FLOAT.unpack(raw)[0]) != template_step:
            why = f"its optimizer has counted {counted:g} steps of {parameter.name}"
            break
    if why:
        raise Unsupported(
            f"import {where} of step {step} like a checkpoint of step {template_step}: {why}, so Adam's count at step "
            f"{step} is not known",
            hint="--like names a checkpoint of the same step",
        )


def _report_taken(names: set[str], trees: Sequence[Any], template: str) -> None:
    """Says what the flat file lacks and the template gave."""
    tensors = [listed(sorted(names))] if names else []
    sections = sorted(name for name in trees[0] if name not in ("model", "optimizer"))
    if taken := [*sections, *tensors]:
        print_note(f"tierd: from {template}, not from the file: {'; '.join(taken)}")
