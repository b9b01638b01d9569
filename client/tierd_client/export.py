"""`python -m tierd_client.export torch|dcp FOLDER TARGET [PREFIX]`: a checkpoint as one state, written by torch.

For `tierd export`. FOLDER is a restored checkpoint. The files are in torch's formats, pickle included, for other tools:
no restore reads them. They hold tensors, numbers, strings, bytes and containers of these, so that
`torch.load(weights_only=True)` accepts them. Holds the whole state in memory.
"""

from __future__ import annotations

import sys
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from tierd.errors import BadRequest, NotFound, TierdError
from tierd.format.shard import Shard
from tierd_client.frameworks.dcp_contents import KIND as DCP_KIND
from tierd_client.frameworks.dcp_contents import OBJECT, DcpTree
from tierd_client.restore.load import ReadPlan, read_headers
from tierd_client.restore.resume import open_directory
from tierd_client.state.encoding import Json
from tierd_client.state.objects import described
from tierd_client.state.optimizers import GroupTree, OptimizersSection, OptimizerTree, prefixes_of
from tierd_client.state.restore_filter import StoredEntries
from tierd_client.state.restore_plan import Available, RestorePlan
from tierd_client.state.sections import ModuleSection, ValueSection
from tierd_client.state.stored_entries import stored_entries
from tierd_client.state.training_state import SectionTree, parse_tree

CPU = torch.device("cpu")


class _ExportPlan(RestorePlan):
    """Reads each stored tensor once, into a new one on the CPU: the values of several ranks may contain one DTensor."""

    def __init__(self, available: Available) -> None:
        super().__init__(available, CPU, rebuild=described)
        self.tensors: dict[str, torch.Tensor] = {}

    def read_new(self, name: str, device: torch.device = CPU, like: torch.Tensor | None = None) -> torch.Tensor:
        del device, like
        if name not in self.tensors:
            self.tensors[name] = super().read_new(name, CPU)
        return self.tensors[name]


def whole_state(folder: Path, prefix: str = "") -> dict[str, Any]:
    """The checkpoint in `folder` as one nested dict, on the CPU, every chunk verified.

    By section: `model` is a state dict, `optimizer` is keyed by parameter names, as by
    torch.distributed.checkpoint.state_dict. A value that differs by rank is a list, by rank. With `prefix`: a flat dict
    of the tensors whose names begin with it, without the prefix. Raises Corrupt, NewerFormat or NotFound.
    """
    with open_directory(str(folder)) as replica:
        files = replica.files()
        shards, tensors = read_headers(files)
        plan = _ExportPlan(tensors)
        if prefix:
            names = [name for name in plan.available if name.startswith(prefix) and name != prefix]
            state = {name.removeprefix(prefix): plan.read_new(name) for name in names}
            if not state:
                raise NotFound(f"export {replica.manifest.id}: no tensor's name begins with {prefix!r}")
        else:
            state = _state(list(shards.values()), plan)
        plan.check()
        assert plan.tensors.keys() == plan.destinations.keys(), "a tensor of the export would not be read"
        ReadPlan(files, plan.destinations.values()).run()
        return plain(state)


def _state(shards: Sequence[Shard], plan: _ExportPlan) -> dict[str, Any]:
    by_rank = [
        parse_tree(shard.tierd.get("state", {}))
        for shard in sorted(shards, key=lambda shard: shard.tierd.get("rank", 0))
    ]
    # The sections of a DictState are its keys, which may have any dots.
    is_dict = all(section.kind == ValueSection.kind for sections in by_rank for section in sections.values())
    state: dict[str, Any] = {}
    for name in dict.fromkeys(name for sections in by_rank for name in sections):
        trees = [sections for sections in by_rank if name in sections]
        saved = [sections[name] for sections in trees]
        if saved[0].kind == DCP_KIND:
            _fill_dcp(state, saved, plan)
            continue
        if any(section.per_rank is not None for section in saved):
            raise _differs(name, "tensors (per_rank)")
        if saved[0].suffix:
            value: Any = [_value(name, sections[name], sections, plan) for sections in trees]
        else:
            value = _value(name, _merged(name, saved), trees[0], plan)
        set_element(state, (name,) if is_dict else tuple(name.split(".", 1)), value)
    return state


def _merged(name: str, saved: Sequence[SectionTree]) -> SectionTree:
    """The section `name` of all ranks as one. The ranks of a pipeline hold different parts of a model."""
    merged, *others = saved
    for other in others:
        if other.value == merged.value:
            continue
        if merged.kind == ModuleSection.kind:
            value = _union(name, merged.value, other.value)
        elif merged.kind == OptimizersSection.kind and len(merged.value) == len(other.value):
            optimizers = zip(
                *(msgspec.convert(each.value, list[OptimizerTree]) for each in (merged, other)), strict=True
            )
            value = msgspec.to_builtins([_merged_optimizer(name, *pair) for pair in optimizers])
        else:
            raise _differs(name, "values")
        merged = msgspec.structs.replace(merged, value=value)
    return merged


def _merged_optimizer(name: str, tree: OptimizerTree, other: OptimizerTree) -> OptimizerTree:
    if [group.options for group in tree.groups] != [group.options for group in other.groups]:
        raise _differs(name, "options of parameter groups")
    groups = [
        GroupTree(params=list(dict.fromkeys([*group.params, *others.params])), options=group.options)
        for group, others in zip(tree.groups, other.groups, strict=True)
    ]
    foreign = list(dict.fromkeys([*tree.foreign, *other.foreign]))
    return OptimizerTree(tree.defaults, foreign, groups, _union(name, tree.state, other.state))


def _union(name: str, values: Mapping[str, Json], others: Mapping[str, Json]) -> dict[str, Json]:
    if differing := [key for key in values.keys() & others.keys() if values[key] != others[key]]:
        raise _differs(name, f"values of {min(differing)}")
    return {**values, **others}


def _differs(name: str, what: str) -> BadRequest:
    return BadRequest(
        f"export {name}: its ranks hold different {what}, which one state cannot hold",
        hint="export the tensors of a prefix, or read the shards with safetensors",
    )


def _value(name: str, section: SectionTree, sections: Mapping[str, SectionTree], plan: _ExportPlan) -> Any:
    """What is in the section `name`. `sections`: those of one rank."""
    if section.kind == ModuleSection.kind:
        sections = {**sections, name: section}
        objects = {key: plan.decode(value) for key, value in section.value.items()}
        entries = stored_entries(sections, plan.available, {})
        keys = _keys(name, sections, entries)
        return {key: plan.read_new(entries.tensors[f"{name}.{key}"]) for key in keys} | objects
    if section.kind == OptimizersSection.kind:
        trees = msgspec.convert(section.value, list[OptimizerTree])
        optimizers = [_optimizer(*named, plan) for named in zip(prefixes_of(name, len(trees)), trees, strict=True)]
        return optimizers[0] if len(optimizers) == 1 else optimizers
    return plan.decode(section.value)


def _keys(name: str, sections: Mapping[str, SectionTree], entries: StoredEntries) -> list[str]:
    """The keys of a module's tensors. The sections `extra.net` and `extra.net.ema` begin alike: a tensor belongs to the
    module with the longest name."""
    longer = tuple(
        f"{other}."
        for other, section in sections.items()
        if section.kind == ModuleSection.kind and other.startswith(f"{name}.")
    )
    return [
        entry.removeprefix(f"{name}.")
        for entry, stored in entries.tensors.items()
        if stored and entry.startswith(f"{name}.") and not entry.startswith(longer)
    ]


def _optimizer(prefix: str, tree: OptimizerTree, plan: _ExportPlan) -> dict[str, Any]:
    state = {name: plan.decode(value) for name, value in tree.state.items()}
    groups = [{"params": list(group.params), **plan.decode(group.options)} for group in tree.groups]
    foreign = {name: plan.read_new(f"{prefix}.{name}") for name in tree.foreign}
    return {"state": state, "param_groups": groups} | ({"params": foreign} if foreign else {})


def _fill_dcp(state: dict[str, Any], saved: Sequence[SectionTree], plan: _ExportPlan) -> None:
    """Put tensors and objects where they were in the dict that DCP saved."""
    trees = [msgspec.convert(section.value, DcpTree) for section in saved]
    paths = {name: path for tree in trees for name, path in tree.paths.items()}
    objects = {name: value for tree in trees for name, value in tree.objects.items()}
    for name in sorted({*objects, *plan.available}):
        if name in objects:
            set_element(state, tuple(paths.get(name, [name])), plan.decode(objects[name]))
        elif not name.endswith(OBJECT):
            set_element(state, tuple(paths.get(name, [name])), plan.read_new(name))


def plain(value: Any) -> Any:
    """What torch.load(weights_only=True) accepts: arrays become tensors, or lists where torch has no such dtype."""
    if isinstance(value, torch.Tensor | torch.dtype | torch.device) or value is None:
        return value
    if isinstance(value, np.ndarray):
        try:
            return torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))
        except TypeError:
            return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item()) if value.dtype.kind not in "mM" else str(value)
    if isinstance(value, Mapping):
        items = ((plain(key), plain(item)) for key, item in cast("Mapping[Any, Any]", value).items())
        return OrderedDict(items) if isinstance(value, OrderedDict) else dict(items)
    if isinstance(value, list | tuple | set | frozenset):
        items = [plain(item) for item in cast("Sequence[Any]", value)]
        return items if isinstance(value, list) else tuple(items) if isinstance(value, tuple) else set(items)
    return value


def main(arguments: Sequence[str]) -> None:
    format, folder, target, *prefix = arguments
    state = whole_state(Path(folder), prefix[0] if prefix else "")
    if format == "torch":
        torch.save(state, target)
    elif format == "dcp":
        warnings.simplefilter("ignore")  # torch warns of one process without torch.distributed
        save_dcp(state, storage_writer=FileSystemWriter(target), no_dist=True)
    else:
        raise BadRequest(f"export as {format}: torch or dcp")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except TierdError as error:
        sys.exit(f"{error}")
