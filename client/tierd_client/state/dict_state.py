"""The state of a training as one nested dict, as frameworks give it: tensors, DTensors, arrays, plain values.

For whoever has `state_dict()` of everything at hand and wants it back as it was. A `TrainingState` fits where the
live objects are at hand: it restores in place, and by the names of parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import torch

from tierd.errors import BadConfig
from tierd_client.state.encoding import Collector, Json
from tierd_client.state.rank_local import RankLocal
from tierd_client.state.restore_plan import Available, RestorePlan
from tierd_client.state.sections import ValueSection
from tierd_client.state.training_state import Captured, parse_tree

logger = logging.getLogger(__name__)


class DictState:
    """`values`: what a snapshot takes, and where a restore puts what it finds, under the same keys.

    A tensor goes into the live one at the same place where name, dtype and shape agree, else into a new one on the
    CPU, or on `accelerator` when that is where it lived. `per_rank` names the keys whose tensors differ between
    ranks; of the others, a tensor that several ranks hold is written once.
    Raises BadConfig unless the keys of `values` are strings: they begin the names of tensors.
    """

    def __init__(
        self,
        values: dict[str, Any],
        *,
        per_rank: Collection[str] = (),
        accelerator: torch.device | None = None,
    ) -> None:
        if not all(isinstance(key, str) for key in values):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BadConfig("DictState(…): its keys must be strings: they name entries of the checkpoint")
        self.values = values
        self._per_rank = frozenset(per_rank)
        self._accelerator = accelerator or torch.device("cpu")

    @property
    def is_stepped(self) -> bool:
        """Whether there is anything to make room for yet."""
        return bool(self.values)

    def capture(self, rank: int, world_size: int) -> Captured:
        """The dict as it is now, without copying a tensor. Raises Unsupported, naming what has no safe form."""
        into = Collector()
        tree: dict[str, Json] = {}
        for key in self.values:
            into.suffix = f"@{rank:05d}" if key in self._per_rank and world_size > 1 else ""
            section = ValueSection(self.values, key, key)
            tree[key] = {"kind": section.kind, "suffix": into.suffix, "value": section.capture(into)}
        return Captured(into.tensors, tree)

    def plan_restore(self, tree: Json, available: Available, local: RankLocal | None = None) -> RestorePlan:
        """How this rank's `tree` and all shards' tensors become values again. Changes nothing.

        `local`: for another number of ranks than saved it. What differed between them is a Mismatch then. What only
        `values` has stays as it is, with a warning. Raises Mismatch when a tensor is not whole in the checkpoint,
        Corrupt when `tree` is none of ours.
        """
        saved = parse_tree(tree)
        plan = RestorePlan(available, self._accelerator)
        for key, section in saved.items():
            live = ValueSection(self.values, key, key)
            if section.kind != live.kind:
                plan.differ(f"{key}: checkpoint holds a {section.kind}, now it is a {live.kind}")
            elif local is not None and not local.is_shared(key):
                local.plan(key, live, plan, is_wanted=True)
            else:
                live.plan(section.value, section.suffix, plan)
        for key in self.values.keys() - saved.keys():
            logger.warning("restore: the checkpoint has no %s, it stays as it is", key)
        plan.check()
        return plan
