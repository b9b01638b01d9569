"""What the tiers hold, as far as entries and last listings tell: the questions of a catalog that need no claims."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from tierd.catalog.entries import Entries
from tierd.catalog.entry import Entry, SentParts, TierKnowledge
from tierd.format.ids import HOT, CheckpointId, Run
from tierd.format.manifest import Manifest
from tierd.format.node_file import NodeFile

T = TypeVar("T")


class Contents:
    def __init__(self, tiers: Iterable[str]) -> None:
        self._entries = Entries()
        self.tiers: dict[str, TierKnowledge] = {name: TierKnowledge() for name in tiers}

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
        whole = (entry for entry in newest_first if entry.is_whole_in(tier))
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

    def unlisted(self) -> dict[str, str]:
        """Why a tier is not known now, by tier."""
        return {tier: knowledge.error for tier, knowledge in self.tiers.items() if not knowledge.is_known}

    def unreadable(self) -> dict[tuple[str, CheckpointId], str]:
        """Why a replica cannot be used, by (tier, checkpoint)."""
        return {
            (tier, checkpoint): why
            for tier, knowledge in self.tiers.items()
            for checkpoint, why in knowledge.unreadable.items()
        }

    def sent(self, run: Run | None = None) -> dict[tuple[str, CheckpointId], SentParts]:
        """What nodes have sent of checkpoints that are not committed, by (cold tier, checkpoint), as last listed."""
        return {
            (tier, checkpoint): parts
            for tier, knowledge in self.tiers.items()
            for checkpoint, parts in knowledge.sent.items()
            if run in (None, checkpoint.run) and checkpoint not in self._entries.in_tier(tier)
        }

    def sent_of(self, checkpoint: CheckpointId) -> dict[str, SentParts]:
        """As `sent`, of one checkpoint, by cold tier."""
        listed = {tier: sent for tier, each in self.tiers.items() if (sent := each.sent.get(checkpoint)) is not None}
        return {tier: sent for tier, sent in listed.items() if checkpoint not in self._entries.in_tier(tier)}
