"""What we know: checkpoints, and the tiers that hold a committed replica of each. Only a cache.

Manifests and listings are the truth; delete this, look again, and it is the same. Knows no I/O: workers/recovery
feeds it with what it saw. A tier that could not be listed is `unknown`, which stops deletion, never causes it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from tierd.format.ids import CheckpointId, Generation, Run
from tierd.format.manifest import Manifest
from tierd.lifecycle.policy import CheckpointView
from tierd.lifecycle.selection import MEMORY, Candidate, Inventory, UnreadableReplica


@dataclass(slots=True)
class Entry:
    """One checkpoint. `milestones` and `diagnoses` (healthy or not) by tier: a marker lies beside each replica."""

    id: CheckpointId
    manifest: Manifest
    tiers: set[str] = field(default_factory=set)
    milestones: dict[str, frozenset[str]] = field(default_factory=dict)
    diagnoses: dict[str, bool] = field(default_factory=dict)

    @property
    def healthy(self) -> bool | None:
        """None: not judged. The bytes are the same everywhere, so one diagnosis holds for all; the worst counts."""
        return all(self.diagnoses.values()) if self.diagnoses else None

    @property
    def all_milestones(self) -> frozenset[str]:
        return frozenset().union(*self.milestones.values())


@dataclass(slots=True)
class TierKnowledge:
    """What the last look at a tier gave. `error` is why it is not known now. `fingerprints`: size and ETag of each
    manifest that was read there; one with others now is read again. `partial`: what has no manifest. `damaged`: of the
    unreadable ones, those whose bytes were found wrong, which no listing shows. `newer_format`: of the unreadable ones,
    those that a later tierd wrote."""

    is_known: bool = False
    error: str = "not looked at yet"
    unreadable: dict[CheckpointId, str] = field(default_factory=dict)
    fingerprints: dict[CheckpointId, tuple[int, str]] = field(default_factory=dict)
    partial: frozenset[CheckpointId] = frozenset()
    damaged: dict[CheckpointId, str] = field(default_factory=dict)
    newer_format: frozenset[CheckpointId] = frozenset()


class Catalog:
    def __init__(self, tiers: Iterable[str]) -> None:
        self._entries: dict[CheckpointId, Entry] = {}
        self._generations: dict[Run, int] = {}
        self._changes = 0
        self._changed: dict[str, dict[CheckpointId, int]] = {}  # by tier, since its last look
        self.tiers: dict[str, TierKnowledge] = {name: TierKnowledge() for name in tiers}

    # ── what workers saw ──

    def moment(self) -> int:
        """To be taken before a look at a tier begins, and given to `saw_tier`. As long as it stays the same,
        nothing has changed: what was decided at that moment still holds."""
        return self._changes

    def add(self, manifest: Manifest, tier: str, milestones: Iterable[str] = ()) -> None:
        """A committed replica in `tier`."""
        checkpoint = manifest.id
        self._touch(checkpoint, tier)
        self.tiers[tier].damaged.pop(checkpoint, None)
        entry = self._put(checkpoint, manifest, tier)
        if found := frozenset(milestones):
            entry.milestones[tier] = entry.milestones.get(tier, frozenset()) | found

    def diagnosed(self, checkpoint: CheckpointId, tier: str, *, is_healthy: bool) -> None:
        """The diagnosis is marked beside the replica in `tier`, unless that has gone meanwhile."""
        entry = self._entries.get(checkpoint)
        if entry is not None and tier in entry.tiers:
            self._touch(checkpoint, tier)
            entry.diagnoses[tier] = is_healthy

    def drop(self, checkpoint: CheckpointId, tier: str) -> None:
        """The replica in `tier` is gone."""
        self._touch(checkpoint, tier)
        self.tiers[tier].damaged.pop(checkpoint, None)
        self._remove(checkpoint, tier)

    def damaged(self, checkpoint: CheckpointId, tier: str, why: str) -> None:
        """The replica in `tier` is none: it counts as unreadable until it is mended, or gone."""
        self._touch(checkpoint, tier)
        self._remove(checkpoint, tier)
        self.tiers[tier].damaged[checkpoint] = self.tiers[tier].unreadable[checkpoint] = why

    def mended(self, checkpoint: CheckpointId, tier: str) -> None:
        """It counts again once a look at the tier has seen it: with its markers, or it could be taken for less."""
        self.tiers[tier].damaged.pop(checkpoint, None)

    def _put(self, checkpoint: CheckpointId, manifest: Manifest, tier: str) -> Entry:
        entry = self._entries.get(checkpoint)
        if entry is None:
            entry = self._entries[checkpoint] = Entry(checkpoint, manifest)
        entry.manifest = manifest
        entry.tiers.add(tier)
        self.saw_generation(checkpoint.run, checkpoint.generation)
        return entry

    def _remove(self, checkpoint: CheckpointId, tier: str) -> None:
        entry = self._entries.get(checkpoint)
        if entry is None:
            return
        entry.tiers.discard(tier)
        entry.milestones.pop(tier, None)
        entry.diagnoses.pop(tier, None)
        if not entry.tiers:
            del self._entries[checkpoint]

    def saw_generation(self, run: Run, generation: int) -> None:
        self._generations[run] = max(self._generations.get(run, 0), generation)

    def saw_tier(
        self,
        tier: str,
        found: Mapping[CheckpointId, tuple[Manifest, frozenset[str]]],
        unreadable: Mapping[CheckpointId, str],
        *,
        since: int,
        diagnoses: Mapping[CheckpointId, bool] = MappingProxyType({}),
        fingerprints: Mapping[CheckpointId, tuple[int, str]] = MappingProxyType({}),
        partial: Iterable[CheckpointId] = (),
        newer_format: Iterable[CheckpointId] = (),
    ) -> None:
        """A whole look at a tier, begun at the moment `since`: this is all it held, but for what changed meanwhile.

        One look at a tier at a time."""
        damaged = {c: why for c, why in self.tiers[tier].damaged.items() if c in found or c in unreadable}
        found = {c: one for c, one in found.items() if c not in damaged}
        held = {checkpoint for checkpoint, entry in self._entries.items() if tier in entry.tiers}
        changed = self._changed.pop(tier, {})
        settled = {c for c in held | found.keys() if changed.get(c, 0) <= since}
        is_news = False
        for checkpoint in settled:
            if checkpoint not in found:
                self._remove(checkpoint, tier)
                is_news = True
                continue
            manifest, milestones = found[checkpoint]
            entry = self._entries.get(checkpoint)
            former_marks = (entry.milestones.get(tier, frozenset()), entry.diagnoses.get(tier)) if entry else None
            diagnosis = diagnoses.get(checkpoint)
            if entry is None or tier not in entry.tiers or former_marks != (milestones, diagnosis):
                entry = self._put(checkpoint, manifest, tier)
                entry.milestones[tier] = milestones
                entry.diagnoses.pop(tier, None)
                if diagnosis is not None:
                    entry.diagnoses[tier] = diagnosis
                is_news = True
        former = self.tiers[tier]
        unreadable = {c: why for c, why in unreadable.items() if changed.get(c, 0) <= since} | damaged
        begun = frozenset(c for c in partial if changed.get(c, 0) <= since)
        self.tiers[tier] = TierKnowledge(
            True, "", unreadable, dict(fingerprints), begun, damaged, frozenset(newer_format)
        )
        if is_news or not former.is_known or (former.unreadable, former.partial) != (unreadable, begun):
            self._changes += 1

    def lost_tier(self, tier: str, error: str) -> None:
        """A look that gave no answer: what was known stays, but nothing may be deleted on the strength of it."""
        self.tiers[tier].is_known = False
        self.tiers[tier].error = error
        self._changes += 1

    # ── questions ──

    def get(self, checkpoint: CheckpointId) -> Entry | None:
        return self._entries.get(checkpoint)

    def manifest(self, checkpoint: CheckpointId) -> Manifest | None:
        entry = self._entries.get(checkpoint)
        return entry.manifest if entry else None

    def entries(self, run: Run | None = None) -> list[Entry]:
        """Newest first within a run; runs by name."""
        found = [entry for entry in self._entries.values() if run is None or entry.id.run == run]
        found.sort(key=lambda entry: (entry.id.generation, entry.id.step), reverse=True)
        found.sort(key=lambda entry: entry.id.run)
        return found

    def runs(self) -> list[Run]:
        return sorted({checkpoint.run for checkpoint in self._entries} | set(self._generations))

    def newest(self, run: Run, tier: str) -> Manifest | None:
        """What a restore would take: none that is known to be unhealthy."""
        found = (entry for entry in self._entries.values() if entry.id.run == run and tier in entry.tiers)
        newest = max((one for one in found if one.healthy is not False), key=lambda one: one.id.recency, default=None)
        return newest.manifest if newest else None

    def held(self, tier: str) -> list[Manifest]:
        """All that are committed in a tier."""
        return [entry.manifest for entry in self._entries.values() if tier in entry.tiers]

    def generation_max(self, run: Run) -> Generation:
        """The highest generation ever seen of a run; 0 when there is none."""
        return Generation(self._generations.get(run, 0))

    def sequence_max(self, run: Run) -> int:
        return max((entry.manifest.sequence for entry in self._entries.values() if entry.id.run == run), default=0)

    def unreadable(self) -> dict[tuple[str, CheckpointId], str]:
        """(tier, checkpoint) of every manifest that could not be read, and why."""
        return {
            (tier, checkpoint): why
            for tier, knowledge in self.tiers.items()
            for checkpoint, why in knowledge.unreadable.items()
        }

    def inventory(
        self,
        run: Run | None = None,
        *,
        in_memory: Collection[CheckpointId] = (),
        health: Mapping[CheckpointId, bool | None] = MappingProxyType({}),
    ) -> Inventory:
        """What a restore selects from. `in_memory`: the checkpoints of the memory tier. `health`: of checkpoints that
        have no diagnosis marker yet."""
        listed = {entry.id: entry for entry in self._entries.values() if run in (None, entry.id.run)}
        candidates: list[Candidate] = []
        for checkpoint in {*in_memory, *listed}:
            entry = listed.get(checkpoint)
            tiers = [MEMORY] if checkpoint in in_memory else []
            tiers += [tier for tier in self.tiers if entry and tier in entry.tiers]
            is_healthy = entry.healthy if entry else None
            candidates.append(
                Candidate(
                    id=checkpoint,
                    milestones=entry.all_milestones if entry else frozenset(),
                    tiers=tuple(tiers),
                    is_healthy=health.get(checkpoint) if is_healthy is None else is_healthy,
                )
            )
        unreadable = [
            UnreadableReplica(
                id=checkpoint,
                tier=tier,
                reason=reason,
                is_newer_format=checkpoint in self.tiers[tier].newer_format,
            )
            for (tier, checkpoint), reason in self.unreadable().items()
        ]
        unlisted = {tier: knowledge.error for tier, knowledge in self.tiers.items() if not knowledge.is_known}
        return Inventory(candidates=candidates, unreadable=unreadable, unlisted=unlisted)

    def views(self) -> list[CheckpointView]:
        """What the lifecycle plans with."""
        return [
            CheckpointView(
                id=entry.id,
                sequence=entry.manifest.sequence,
                milestones=entry.all_milestones,
                healthy=entry.healthy,
                tiers=frozenset(entry.tiers),
                created_at=entry.manifest.created,
                metrics=entry.manifest.metrics,
            )
            for entry in self._entries.values()
        ]

    def _touch(self, checkpoint: CheckpointId, tier: str) -> None:
        self._changes += 1
        self._changed.setdefault(tier, {})[checkpoint] = self._changes
