"""Restores sections that differ per rank (generators, data loader, extra) on another number of ranks.

An object with `load_state_dicts` gets the states of all ranks that saved the checkpoint. Any other section is restored
if all ranks saved the same bits; else it is a Mismatch, because to choose one rank's would lose the others'. A rank
beyond the saved ones gets new random numbers, derived from the saved generators.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import torch

from tierd_client.log import log
from tierd_client.state import rng
from tierd_client.state.encoding import Json
from tierd_client.state.restore_filter import RestoreFilter
from tierd_client.state.restore_plan import Available, ReadTensors, RestorePlan
from tierd_client.state.sections import RngSection, Section, SectionTree, StatefulSection
from tierd_client.state.stored_entries import containing_entries
from tierd_client.state.tensors import DTYPES, as_bytes, capture_tensor

_Split = tuple[str, str]
"""What precedes and what follows the rank's suffix in a tensor's name."""

_Form = tuple[str, tuple[int, ...], str]
"""dtype, shape, and the name of torch's dtype where safetensors has none for it."""


@dataclass(frozen=True, slots=True)
class RankLocal:
    """The state trees of all ranks that saved the checkpoint, for one rank that restores it."""

    rank_trees: Sequence[Mapping[str, SectionTree]]
    rank: int
    available: Available
    read: ReadTensors

    @property
    def difference(self) -> str:
        return f"it differs between the {len(self.rank_trees)} ranks that saved the checkpoint"

    def plan(self, name: str, section: Section, plan: RestorePlan, *, source: str, is_required: bool) -> None:
        """Plans the restore of the section `name` from the stored section `source`. Adds a difference when that is
        impossible.

        `is_required`: the live state has this section. Otherwise it is skipped instead.
        """
        if plan.filter.keeps(name) and plan.keep_section(name):
            return
        saved = [tree[source] for tree in self.rank_trees if source in tree and tree[source].kind == section.kind]
        if len(saved) == len(self.rank_trees):
            values = [tree.value for tree in saved]
            if isinstance(section, StatefulSection) and section.plan_from_all_ranks(values, plan):
                return
            if isinstance(section, RngSection):
                self._plan_rng(values, section, plan)
                return
            if self._are_equal(source, saved):
                section.plan(saved[0].value, saved[0].suffix, plan)
                return
        if is_required:
            why = f"{self.difference}: give it load_state_dicts(states), or restore without it in the state"
            plan.mismatch(name, why)
        elif self.rank == 0:
            log.warning("restore: %s: %s, and this state lacks it: skipped", name, self.difference)

    def per_rank_names(self, sections: Sequence[str], selection: RestoreFilter) -> tuple[dict[str, str], list[str]]:
        """(the stored names of the tensors that `TrainingState(per_rank=…)` named in these sections, by their names in
        the state tree; a sentence for the first whose entry is asked for and that is not the same on all ranks)."""
        by_rank: list[dict[str, str]] = []
        containing: dict[str, str] = {}
        for tree in self.rank_trees:
            entries = [tree[name].per_rank for name in sections if name in tree]
            stored_names = [entry.stored_names() for entry in entries if entry is not None]
            by_rank.append({name: stored for names in stored_names for name, stored in names.items()})
            containing |= containing_entries({name: tree[name] for name in sections if name in tree})
        names = {name for stored_names in by_rank for name in stored_names}

        def size_bytes(name: str) -> int:
            stored = next(stored_names[name] for stored_names in by_rank if name in stored_names)
            return sum(entry.size_bytes for entry in self.available.get(stored, ()))

        stored = {name: [stored_names.get(name, "") for stored_names in by_rank] for name in names}
        per_rank_names = {name: next(filter(None, by_name)) for name, by_name in stored.items()}
        for name in sorted(names, key=lambda name: (size_bytes(name), name)):  # those that cost the least to compare
            entry = containing.get(name, name)
            is_asked = selection.takes(entry) and not selection.keeps(selection.destination(entry))
            if is_asked and not self._are_equal_tensors(stored[name]):
                count = len(self.rank_trees)
                return per_rank_names, [f"{name}: {self.difference}: restore it on {count} ranks, as it was saved"]
        return per_rank_names, []

    def _are_equal_tensors(self, names: Sequence[str]) -> bool:
        entries = [self.available.get(name, ()) for name in names]
        forms = {(entry.dtype, entry.shape, entry.torch_dtype) for parts in entries for entry in parts}
        if len(forms) != 1 or any(len(parts) != 1 for parts in entries):
            return False
        layout = {("", ""): next(iter(forms))}
        expected = self._read_bytes(layout, names[0])["", ""]
        return all(torch.equal(self._read_bytes(layout, name)["", ""], expected) for name in names[1:])

    def is_shared(self, name: str) -> bool:
        """Whether all ranks saved the same section. The ranks in the names of `per_rank` tensors may differ."""
        first, *others = [_without_rank(tree.get(name)) for tree in self.rank_trees]
        return all(_are_same(first, other) for other in others)

    def _plan_rng(self, saved: Sequence[Json], section: RngSection, plan: RestorePlan) -> None:
        if self.rank < len(saved):
            section.plan(saved[self.rank], "", plan)
        elif len(saved) > 1 and all(value == saved[0] for value in saved):
            section.plan(saved[0], "", plan)  # as with tensor parallel, where ranks must draw the same numbers
        else:
            seed = hashlib.sha256(msgspec.json.encode([saved, self.rank], order="sorted")).digest()
            plan.on_finish("rng", partial(rng.seed_all, seed))

    def _are_equal(self, name: str, saved: Sequence[SectionTree]) -> bool:
        """Whether all ranks saved the same bits. Reads the tensors of two ranks at a time."""
        first, *others = saved
        if not others:
            return True
        if not first.suffix:  # all ranks name the same tensors, but is_shared has found other values
            return False
        value = _without_suffix(first.value, first.suffix)
        if not all(_are_same(_without_suffix(other.value, other.suffix), value) for other in others):
            return False
        layout = self._layout(name, first.suffix)
        if any(self._layout(name, other.suffix) != layout for other in others):
            return False
        expected = self._read_bytes(layout, first.suffix)
        return all(
            torch.equal(content, expected[split])
            for other in others
            for split, content in self._read_bytes(layout, other.suffix).items()
        )

    def _layout(self, name: str, suffix: str) -> dict[_Split, _Form]:
        """(dtype, shape, torch dtype) of the tensors that one rank stored in the section `name`."""
        layout: dict[_Split, _Form] = {}
        for stored_name, (entry, *_) in self.available.items():
            path, found_suffix, rest = stored_name.rpartition(suffix)
            is_in_section = path == name or path.startswith((name + ".", name + "["))
            if found_suffix and is_in_section and (not rest or rest.startswith("#")):
                layout[path, rest] = entry.dtype, entry.shape, entry.torch_dtype
        return layout

    def _read_bytes(self, layout: Mapping[_Split, _Form], suffix: str) -> dict[_Split, torch.Tensor]:
        tensors = {
            split: torch.empty(shape, dtype=DTYPES[dtype], device="cpu") for split, (dtype, shape, _) in layout.items()
        }
        self.read([capture_tensor(suffix.join(split), tensor) for split, tensor in tensors.items()])
        return {split: as_bytes(tensor) for split, tensor in tensors.items()}


def _without_rank(tree: SectionTree | None) -> Json:
    builtins: Json = msgspec.to_builtins(tree)
    if tree is not None and tree.per_rank is not None:
        builtins["per_rank"] = sorted(tree.per_rank.names)
    return builtins


def _are_same(value: Json, other: Json) -> bool:
    """Whether two values are the same JSON: unlike for Python, 1, 1.0 and true differ, and so do 0.0 and -0.0."""
    return json.dumps(value, sort_keys=True) == json.dumps(other, sort_keys=True)


def _without_suffix(value: Json, suffix: str) -> Json:
    """A section's tree with the rank's suffix removed from the names of its tensors."""
    match value:
        case {"$tensor": str(name)}:
            return {"$tensor": "".join(name.rsplit(suffix, 1))}
        case {"$tensor": {"name": str(name), **rest}}:
            return {"$tensor": {"name": "".join(name.rsplit(suffix, 1)), **rest}}
        case {"$ndarray": {"name": str(name), **rest}}:
            return {"$ndarray": {"name": "".join(name.rsplit(suffix, 1)), **rest}}
        case dict():
            return {key: _without_suffix(item, suffix) for key, item in value.items()}
        case list():
            return [_without_suffix(item, suffix) for item in value]
        case _:
            return value
