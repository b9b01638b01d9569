"""What the tiers hold, as far as the entries tell: the questions of a catalog that need neither listings nor claims."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tierd.catalog.entries import Entries
from tierd.catalog.entry import Entry
from tierd.format.ids import CheckpointId, Run
from tierd.format.manifest import Manifest
from tierd.format.node_file import NodeFile
from tierd.lifecycle.policy import HOT

T = TypeVar("T")


class Contents:
    def __init__(self) -> None:
        self._entries = Entries()

    def get(self, checkpoint: CheckpointId) -> Entry | None:
        return self._entries.get(checkpoint)

    def entries(self, run: Run | None = None) -> list[Entry]:
        """Newest first within a run; runs by name."""
        runs = self._entries.runs() if run is None else [run]
        return [entry for each in runs for entry in reversed(self._entries.of_run(each))]

    def newest_entry(self, run: Run) -> Entry | None:
        """Whole or not, healthy or not."""
        return next(reversed(self._entries.of_run(run)), None)

    def in_tier(self, tier: str) -> Mapping[CheckpointId, Entry]:
        """The checkpoints of which `tier` has a replica, in any order."""
        return self._entries.in_tier(tier)

    def sizes(self, tier: str) -> Mapping[CheckpointId, int]:
        """In bytes, of what `tier` has of each checkpoint."""
        return self._entries.sizes(tier)

    def used_bytes(self, tier: str) -> int:
        return self._entries.used_bytes(tier)

    def manifests_in(self, tier: str) -> list[Manifest]:
        """The manifests of all checkpoints that are committed in a tier; in hot also those of this node's parts."""
        return [entry.held(tier) for entry in self._entries.in_tier(tier).values()]

    def newest(self, run: Run, tier: str) -> Manifest | None:
        """The newest checkpoint that `tier` has whole and that is not known to be unhealthy."""
        newest_first = reversed(self._entries.of_run(run)) if self._entries.in_tier(tier) else ()
        whole = (entry for entry in newest_first if tier in entry.tiers and not entry.is_part_in(tier))
        return next((entry.manifest for entry in whole if entry.view.healthy is not False), None)

    def parts(self, run: Run) -> list[NodeFile]:
        """This node's parts in hot, newest first."""
        return [entry.part for entry in reversed(self._entries.of_run(run)) if entry.part is not None]

    def newest_part(self, run: Run) -> NodeFile | None:
        """The newest part in hot that is not known to be unhealthy."""
        hot = self._entries.in_tier(HOT)
        return next((part for part in self.parts(run) if hot[part.id].view.healthy is not False), None)

    def sequence_max(self, run: Run) -> int:
        """0 when there is no checkpoint."""
        return self._entries.sequence_max(run)

    def unhealthy(self, run: Run) -> list[CheckpointId]:
        """Oldest first."""
        entries = self._entries.of_run(run)
        return [view.id for view in self._entries.views(run) if view.healthy is False] if entries else []

    def remembered(self, run: Run, inputs: tuple[Any, ...], make: Callable[[], T]) -> T:
        """As of `Entries`."""
        return self._entries.remembered(run, inputs, make)
