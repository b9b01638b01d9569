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
from tierd_client.state.restore_plan import Available, ReadTensors, RestorePlan
from tierd_client.state.sections import RngSection, Section, SectionTree, StatefulSection
from tierd_client.state.tensors import DTYPES, as_bytes, capture_tensor

_Split = tuple[str, str]
"""What precedes and what follows the rank's suffix in a tensor's name."""


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

    def is_shared(self, name: str) -> bool:
        """Whether all ranks saved one and the same section, with its tensors under the same names."""
        first, *others = [tree.get(name) for tree in self.rank_trees]
        return all(_are_same(msgspec.to_builtins(first), msgspec.to_builtins(other)) for other in others)

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

    def _layout(self, name: str, suffix: str) -> dict[_Split, tuple[str, tuple[int, ...]]]:
        """(dtype, shape) of the tensors that one rank stored in the section `name`."""
        layout: dict[_Split, tuple[str, tuple[int, ...]]] = {}
        for stored_name, (entry, *_) in self.available.items():
            path, found_suffix, rest = stored_name.rpartition(suffix)
            is_in_section = path == name or path.startswith((name + ".", name + "["))
            if found_suffix and is_in_section and (not rest or rest.startswith("#")):
                layout[path, rest] = entry.dtype, entry.shape
        return layout

    def _read_bytes(
        self, layout: Mapping[_Split, tuple[str, tuple[int, ...]]], suffix: str
    ) -> dict[_Split, torch.Tensor]:
        tensors = {
            split: torch.empty(shape, dtype=DTYPES[dtype], device="cpu") for split, (dtype, shape) in layout.items()
        }
        self.read([capture_tensor(suffix.join(split), tensor) for split, tensor in tensors.items()])
        return {split: as_bytes(tensor) for split, tensor in tensors.items()}


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
