"""What each rank has of its own (generators, data loader, extra), where other ranks restore it than have saved it.

An object with `load_state_dicts` is given what all of them saved, and shares it out itself. Anything else is restored
where all saved the same: to choose among different ones would lose the rest, so that is a Mismatch. A rank that is new
has random numbers of its own, derived from those that were saved.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch

from tierd_client.state.encoding import Json
from tierd_client.state.restore_plan import Available, RestorePlan
from tierd_client.state.sections import RngSection, Section, SectionTree, StatefulSection
from tierd_client.state.tensors import DTYPES, CapturedTensor, as_bytes, captured

logger = logging.getLogger(__name__)

Read = Callable[[Mapping[str, CapturedTensor]], object]
"""Fills tensors of the checkpoint, by name: what `restoring.load` does."""


class RankLocal:
    """The state trees of all ranks that saved the checkpoint, for one that restores it."""

    def __init__(self, trees: Sequence[Mapping[str, SectionTree]], rank: int, available: Available, read: Read) -> None:
        self._trees = trees
        self._rank = rank
        self._available = available
        self._read = read

    def plan(self, name: str, section: Section, plan: RestorePlan, *, is_wanted: bool) -> None:
        """Adds the section `name` to the plan, which notes a difference when there is no way to restore it.

        `is_wanted`: the live state has it. What only the checkpoint has is left out instead.
        """
        saved = [tree[name] for tree in self._trees if name in tree and tree[name].kind == section.kind]
        if len(saved) == len(self._trees):
            if isinstance(section, StatefulSection) and section.plan_shared([one.value for one in saved], plan):
                return
            if isinstance(section, RngSection):
                self._plan_rng(saved, section, plan)
                return
            if self._are_same(name, saved):
                section.plan(saved[0].value, saved[0].suffix, plan)
                return
        found = f"{name}: the {len(self._trees)} ranks that saved the checkpoint have different ones"
        if is_wanted:
            plan.differ(f"{found}: give it load_state_dicts(states), or leave it out of the state for this restore")
        elif self._rank == 0:
            logger.warning("restore: %s, and this state lacks it: left out", found)

    def is_shared(self, name: str) -> bool:
        """Whether the section is one and the same of all ranks: its tensors are stored under the same names."""
        return all(tree.get(name) == self._trees[0].get(name) for tree in self._trees)

    def _plan_rng(self, saved: Sequence[SectionTree], section: RngSection, plan: RestorePlan) -> None:
        values = [one.value for one in saved]
        if self._rank < len(saved):
            section.plan(values[self._rank], "", plan)
        elif len(saved) > 1 and all(value == values[0] for value in values):
            section.plan(values[0], "", plan)  # as tensor parallel ranks have it, which must draw the same
        else:
            seed = hashlib.sha256(msgspec.json.encode([values, self._rank], order="sorted")).digest()
            section.plan_new(seed, plan)

    def _are_same(self, name: str, saved: Sequence[SectionTree]) -> bool:
        """Whether all ranks have saved the same, bit for bit. Reads the tensors of two of them at a time."""
        first, *others = saved
        if not others:
            return True
        plain = _without_suffix(first.value, first.suffix)
        if any(_without_suffix(other.value, other.suffix) != plain for other in others):
            return False
        mine, *theirs = [self._layout(name, one.suffix) for one in saved]
        if any(layout != mine for layout in theirs):
            return False
        expected = self._bytes(mine, first.suffix) if mine else {}
        return all(
            torch.equal(found, expected[where])
            for other in others
            if mine
            for where, found in self._bytes(mine, other.suffix).items()
        )

    def _layout(self, name: str, suffix: str) -> dict[tuple[str, str], tuple[str, tuple[int, ...]]]:
        """Dtype and shape of one rank's tensors in one section, by what stands before and behind the suffix."""
        found: dict[tuple[str, str], tuple[str, tuple[int, ...]]] = {}
        for stored, (part, *_) in self._available.items():
            path, mark, more = stored.rpartition(suffix)
            if (
                mark
                and (not more or more.startswith("#"))
                and (path == name or path.startswith((name + ".", name + "[")))
            ):
                found[path, more] = part.dtype, part.shape
        return found

    def _bytes(
        self, layout: Mapping[tuple[str, str], tuple[str, tuple[int, ...]]], suffix: str
    ) -> dict[tuple[str, str], torch.Tensor]:
        made = {where: torch.empty(shape, dtype=DTYPES[dtype]) for where, (dtype, shape) in layout.items()}
        names = {where: suffix.join(where) for where in layout}
        self._read({names[where]: captured(names[where], tensor) for where, tensor in made.items()})
        return {where: as_bytes(tensor) for where, tensor in made.items()}


def _without_suffix(value: Json, suffix: str) -> Json:
    """A tree as it would be if tensors were not called after their rank."""
    match value:
        case {"$tensor": str(name)}:
            return {"$tensor": _bare(name, suffix)}
        case {"$tensor": {"name": str(name), **more}}:
            return {"$tensor": {"name": _bare(name, suffix), **more}}
        case {"$ndarray": {"name": str(name), **more}}:
            return {"$ndarray": {"name": _bare(name, suffix), **more}}
        case dict():
            return {key: _without_suffix(item, suffix) for key, item in value.items()}
        case list():
            return [_without_suffix(item, suffix) for item in value]
        case _:
            return value


def _bare(name: str, suffix: str) -> str:
    path, _, more = name.rpartition(suffix)
    return path + more
