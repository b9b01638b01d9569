"""Opens the checkpoint of `tierd import --like`: it gives the names of parameters to a file that does not have them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tierd.catalog.selectable import selectable_replicas
from tierd.cli.console import print_note
from tierd.cli.opened_tiers import OpenedTiers
from tierd.cli.replicas import Replicas
from tierd.config.sections import Config
from tierd.errors import Corrupt, Unsupported
from tierd.format.import_messages import Like, LikeGroup
from tierd.format.manifest import Manifest
from tierd.format.whole import WholeTensor, whole_tensors
from tierd.lifecycle.selection import CheckpointQuery
from tierd.transfer.verified_reader import VerifiedReader

_COMPARED = ("model", "optimizer", "ema")


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """`trees`: the state tree of each rank. `tensors`: the whole tensors, by name."""

    manifest: Manifest
    reader: VerifiedReader
    trees: list[Any]
    tensors: dict[str, WholeTensor]


@asynccontextmanager
async def open_template(
    path: Path, like: CheckpointQuery, tiers: OpenedTiers, config: Config
) -> AsyncGenerator[Template, Any]:
    """`path`: the imported file. Read the template within the block. Raises NotFound, Corrupt or Unsupported."""
    async with Replicas(like, selectable_replicas(tiers.catalog), tiers.by_name, config) as replicas:
        await replicas.nearest()
        manifest = replicas.manifest
        if manifest.is_adopted:
            raise Unsupported(
                f"import {path} like {manifest.id}: another program wrote that, and tierd does not read its files",
                hint="--like names a checkpoint that tierd's client wrote",
            )
        reader = VerifiedReader(manifest, replicas.nearest)
        shards = {entry.name: await reader.shard(entry.name) for entry in manifest.files}
        by_rank = sorted(shards.values(), key=lambda shard: shard.tierd.get("rank", 0))
        yield Template(
            manifest=manifest,
            reader=reader,
            trees=[shard.tierd.get("state", {}) for shard in by_rank],
            tensors={tensor.name: tensor for tensor in whole_tensors(shards)},
        )


class _LikeTree(msgspec.Struct):
    """An optimizer in a state tree."""

    groups: list[_LikeGroupTree]
    state: dict[str, dict[str, Any]] = {}
    defaults: list[str] = []
    foreign: list[str] = []


class _LikeGroupTree(msgspec.Struct):
    params: list[str]
    options: dict[str, Any] = {}


def like_of(template: Template, *, where: str) -> Like:
    """What names the parameters of an optimizer. Raises Unsupported if the template has not exactly one optimizer."""
    (optimizer,), sections = _optimizers(template, where=where), template.trees[0]
    return Like(
        groups=[LikeGroup(params=group.params, options=list(group.options)) for group in optimizer.groups],
        defaults=optimizer.defaults,
        sections={name: section["kind"] for name, section in sections.items() if isinstance(section.get("kind"), str)},
    )


def _optimizers(template: Template, *, where: str) -> list[_LikeTree]:
    section = template.trees[0].get("optimizer", {})
    what = f"import {where} like {template.manifest.id}"
    try:
        trees = msgspec.convert(section.get("value") if section.get("kind") == "optimizers" else [], list[_LikeTree])
    except msgspec.ValidationError as error:
        raise Corrupt(f"{what}: read its optimizer: {error}") from error
    if not trees:
        raise Unsupported(
            f"{what}: it has no optimizer whose parameters are named",
            hint="a snapshot of TrainingState(model=…, optimizer=…) has one",
        )
    if len(trees) > 1:
        raise Unsupported(f"{what}: it has {len(trees)} optimizers", hint="--like is for one optimizer")
    if trees[0].foreign:
        raise Unsupported(
            f"{what}: its optimizer has parameters that are not the model's",
            hint="load the file in the training, and take a snapshot",
        )
    return trees


def check_fits(tree: Mapping[str, Any], tensors: Sequence[WholeTensor], template: Template, *, where: str) -> None:
    """Raises Unsupported unless the tensors of model, optimizer and averages have the names, shapes and dtypes of the
    template. Reports what comes from the template, and what is missing."""
    own = {tensor.name: _form(tensor) for tensor in tensors}
    expected = {name: _form(tensor) for name, tensor in template.tensors.items()}
    checked = tuple(f"{name}." for name in _COMPARED if name in tree)
    names = sorted(name for name in own.keys() | expected.keys() if name.startswith(checked))
    different = [name for name in names if own.get(name) != expected.get(name)]
    if different:
        name, more = different[0], len(different) - 1
        raise Unsupported(
            f"import {where}: {name} is {own.get(name, 'absent')} in the file, and {expected.get(name, 'absent')} in "
            f"{template.manifest.id}" + (f"; {more} more differ" if more else ""),
            hint="--like names a checkpoint of the same model and optimizer, after its first step",
        )
    (optimizer,) = _optimizers(template, where=where)
    for name, entries in tree["optimizer"]["value"][0]["state"].items():
        if entries.keys() != (there := optimizer.state.get(name, {})).keys():
            raise Unsupported(
                f"import {where}: its optimizer keeps {', '.join(entries)} of {name}, and that of "
                f"{template.manifest.id} {', '.join(there) or 'nothing'}",
                hint="--like names a checkpoint of the same model and optimizer, after its first step",
            )
    print_note(f"tierd: only the names of the optimizer's parameters come from {template.manifest.id}")
    if lacking := sorted(name for name in template.trees[0] if name not in tree):
        print_note(f"tierd: not in the file, so left out: {', '.join(lacking)}")


def _form(tensor: WholeTensor) -> str:
    torch_dtype = tensor.parts[0].entry.torch_dtype
    return f"{tensor.dtype} {list(tensor.shape)}" + (f" of {torch_dtype}" if torch_dtype else "")
