"""Lists the entries of a checkpoint, by which a restore selects, renames and reports."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from tierd.errors import Corrupt
from tierd.format import tagged
from tierd_client.state.encoding import Json
from tierd_client.state.optimizers import OptimizersSection, OptimizerTree, prefixes_of
from tierd_client.state.restore_filter import StoredEntries
from tierd_client.state.restore_plan import Available
from tierd_client.state.sections import ModuleSection, SectionTree, TensorsSection, entry_of_key

_RANK = re.compile(r"@\d{5}(?:#\d+)?$")  # ends the names of tensors that differ between ranks


def stored_entries(
    saved: Mapping[str, SectionTree], available: Available, per_rank_names: Mapping[str, str]
) -> StoredEntries:
    """The entries of a checkpoint with the sections `saved` and the tensors `available`. `per_rank_names`: of tensors
    that differ by rank, the name in the shards by the name in the state tree.

    Raises Corrupt when a section is not what its kind says.
    """
    entries = StoredEntries()
    values = [section.value for section in saved.values() if section.kind != OptimizersSection.kind]
    in_values = {name for value in values for name in tensor_names(value)}
    for name, section in saved.items():
        if section.kind in (ModuleSection.kind, TensorsSection.kind):
            if not isinstance(section.value, dict):
                raise Corrupt(f"read the state tree: {name} holds no {section.kind}")
            if section.kind == ModuleSection.kind:
                tensors = [tensor for tensor in available if tensor not in in_values]
                _add_module(f"{name}.", section, tensors, per_rank_names, entries)
            else:
                _add_values(name, section.value, entries)
        elif section.kind == OptimizersSection.kind:
            entries.tensors.update(_optimizer_entries(name, section.value))
        else:
            entries.tensors.setdefault(name, "")  # a tensor of a module may have the name of another section
    return entries


def _add_module(
    prefix: str, section: SectionTree, tensors: Iterable[str], per_rank_names: Mapping[str, str], entries: StoredEntries
) -> None:
    for key, value in section.value.items():
        entries.objects[prefix + key] = value
        entries.tensors[prefix + key] = ""
    for stored in tensors:
        if (name := _RANK.sub("", stored)) in per_rank_names and stored.startswith(prefix):
            entries.tensors[name] = name
        elif stored.startswith(prefix):
            is_own = stored.endswith(section.suffix)
            if not is_own and _RANK.search(stored):
                continue  # another rank's
            entry = stored.removesuffix(section.suffix) if is_own else stored
            entries.tensors[entry] = stored
            if section.is_part or not is_own:
                entries.optional.add(entry)


def _add_values(section_name: str, items: dict[str, Json], entries: StoredEntries) -> None:
    for entry, path, value in _values(section_name, items):
        is_tensor = isinstance(value, dict) and "$tensor" in value
        entries.tensors[entry] = next(tensor_names(value), "") if is_tensor else ""
        if not is_tensor:
            entries.objects[entry] = value
            entries.paths[entry] = path


def _values(section_name: str, items: dict[str, Json]) -> Iterator[tuple[str, str, Json]]:
    """(entry, what the names of its tensors begin with, value) of each item of an encoded dict."""
    ((tag, pairs),) = items.items() if len(items) == 1 else (("", None),)
    if not tag.startswith("$"):
        for key, value in items.items():
            yield entry_of_key(section_name, key), f"{section_name}.{key}", value
        return
    if tag == "$defaultdict" and isinstance(pairs, list) and len(pairs) == 2:
        pairs = pairs[1]
    if tag not in ("$dict", "$ordered", "$counter", "$defaultdict"):  # a class of the user's own
        yield section_name, section_name, items
        return
    if not isinstance(pairs, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in pairs):
        raise Corrupt(f"read the state tree: {section_name} holds a {tag} that is no list of pairs")
    for pair in pairs:
        # A key of a class of its own gets a name that no live key has.
        key = tagged.decode(pair[0], lambda tag, content: (tag, content), lambda parts, _: parts)
        yield entry_of_key(section_name, key), f"{section_name}[{key!r}]", pair[1]


def containing_entries(saved: Mapping[str, SectionTree]) -> dict[str, str]:
    """The entry that contains each tensor of an encoded value, by the tensor's name. A tensor that is absent here is an
    entry itself. Raises Corrupt when a section is not what its kind says."""
    values: list[tuple[str, Json]] = []
    for name, section in saved.items():
        if section.kind in (ModuleSection.kind, TensorsSection.kind) and isinstance(section.value, dict):
            values += [(f"{name}.{key}", value) for key, value in section.value.items()]
        elif section.kind == OptimizersSection.kind:
            for prefix, tree in _optimizer_trees(name, section.value):
                values += [(f"{prefix}.state.{parameter}", value) for parameter, value in tree.state.items()]
                for index, group in enumerate(tree.groups):
                    options = group.options.items() if isinstance(group.options, dict) else ()
                    values += [(f"{prefix}.param_groups.{index}.{key}", value) for key, value in options]
        else:
            values.append((name, section.value))
    return {tensor: entry for entry, value in values for tensor in tensor_names(value)}


def tensor_names(value: Json) -> Iterator[str]:
    """The stored names of the tensors and arrays in an encoded value."""
    if isinstance(value, dict):
        for tag, item in value.items():
            if tag in ("$tensor", "$ndarray"):
                yield str(item["name"] if isinstance(item, dict) else item)
            else:
                yield from tensor_names(item)
    elif isinstance(value, list):
        for item in value:
            yield from tensor_names(item)


def _optimizer_trees(section_name: str, value: Json) -> list[tuple[str, OptimizerTree]]:
    try:
        trees = msgspec.convert(value, list[OptimizerTree])
    except msgspec.ValidationError as error:
        raise Corrupt(f"read the optimizer in the state tree: {error}") from error
    return list(zip(prefixes_of(section_name, len(trees)), trees, strict=True))


def _optimizer_entries(section_name: str, value: Json) -> Iterator[tuple[str, str]]:
    for prefix, tree in _optimizer_trees(section_name, value):
        for name in tree.foreign:
            yield f"{prefix}.{name}", f"{prefix}.{name}"
        for name in tree.state:
            yield f"{prefix}.state.{name}", ""
        for index, group in enumerate(tree.groups):
            if not isinstance(group.options, dict):
                raise Corrupt(f"read the optimizer in the state tree: the options of group {index} are not a dict")
            for key in group.options:
                yield f"{prefix}.param_groups.{index}.{key}", ""
