"""The state of a training as one nested dict, as frameworks provide it: tensors, DTensors, arrays, plain values.

For code that has the `state_dict()` of everything and wants it back unchanged. Code that has the live objects uses
`TrainingState`, which restores in place and by the names of parameters.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from tierd.errors import BadConfig
from tierd_client.log import log
from tierd_client.state.objects import Decode, Encode, Objects
from tierd_client.state.restore_filter import EXACT, RestoreFilter, StoredEntries
from tierd_client.state.restore_plan import RestorePlan
from tierd_client.state.sections import ValueSection
from tierd_client.state.stored_state import StoredState
from tierd_client.state.training_state import Captured, capture_sections, parse_tree


class DictState:
    """`values`: the dict that a snapshot captures, and that a restore fills under the same keys.

    A stored tensor is read into the live one at the same path if name, dtype and shape agree. Otherwise it becomes a
    new tensor on the CPU, or on `accelerator` if it was saved from one. `per_rank` names the keys whose tensors differ
    between ranks; other tensors that several ranks hold are written once.

    `encode` and `decode` are those of TrainingState. Members of an Enum, dataclasses and named tuples are refused: a
    restore may fill an empty dict, which does not tell their classes.

    Tensors have any shape and dtype, as in TrainingState. Raises BadConfig unless the keys of `values` are strings.
    """

    def __init__(
        self,
        values: dict[str, Any],
        *,
        per_rank: Collection[str] = (),
        accelerator: torch.device | None = None,
        encode: Encode | None = None,
        decode: Decode | None = None,
    ) -> None:
        if not all(isinstance(key, str) for key in values):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BadConfig("DictState(…): its keys must be strings: they name entries of the checkpoint")
        self.values = values
        self._per_rank = frozenset(per_rank)
        self._accelerator = accelerator or torch.device("cpu")
        self._objects = Objects.of(encode, decode, from_live=False)  # a restore may fill an empty dict

    @property
    def is_stepped(self) -> bool:
        """Whether the dict has content, so that the size of a snapshot is known."""
        return bool(self.values)

    def capture(self, rank: int, world_size: int) -> Captured:
        """The dict as it is now, without copying a tensor. Raises Unsupported, naming what has no safe form."""
        sections = {key: ValueSection(self.values, key, key) for key in self.values}
        return capture_sections(sections, self._per_rank, rank, world_size, self._objects)

    def plan_restore(self, stored: StoredState, *, is_dry: bool = False, filter: RestoreFilter = EXACT) -> RestorePlan:
        """As `TrainingState.plan_restore`, with the same errors. Keys that only `values` has stay as they are, with a
        warning."""
        saved, rank_local = parse_tree(stored.tree), stored.rank_local
        entries = StoredEntries(tensors=dict.fromkeys(saved, ""), has_optimizers=False)
        plan = RestorePlan(
            stored.available, self._accelerator, is_dry=is_dry, filter=filter, entries=entries, objects=self._objects
        )
        for key in plan.sources | self.values:
            if key not in plan.sources and not filter.keeps(key):
                if filter.takes(key):
                    log.warning("restore: the checkpoint has no %s, it stays as it is", key)
                    plan.report.missing.append(key)
                continue
            source = plan.take(key)
            if source is None:
                plan.protect(key, self.values.get(key))
                continue
            section, tree = ValueSection(self.values, key, key), saved[source]
            if tree.kind != section.kind:
                plan.mismatch(key, f"checkpoint holds a {tree.kind}, now it is a {section.kind}")
            elif rank_local is not None and not rank_local.is_shared(source):
                rank_local.plan(key, section, plan, source=source, is_required=True)
            else:
                section.plan(tree.value, tree.suffix, plan)
        plan.finish(())
        return plan
