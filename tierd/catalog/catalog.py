"""The known checkpoints, and the tiers that have a committed replica of each. A cache in memory, without I/O.

Manifests and listings are the truth: workers/recovery.py builds the catalog from them, and can build it again. A tier
that could not be listed is not known, which stops deletions and never causes one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from types import MappingProxyType

from tierd.catalog.claims import Claims
from tierd.catalog.contents import Contents
from tierd.catalog.entry import Entry, SentParts, TierKnowledge, deleted_in
from tierd.format.ids import HOT, CheckpointId, Generation, Run
from tierd.format.layout import manifest_key, parse_key
from tierd.format.manifest import Manifest
from tierd.format.node_file import NodeFile
from tierd.lifecycle.policy import CheckpointView


class Catalog(Contents):
    """`changes`: the number of changes so far. While it stays the same, a decision made before is still valid."""

    def __init__(self, tiers: Iterable[str]) -> None:
        super().__init__(tiers)
        self._generations: dict[Run, int] = {}
        self.claims = Claims(self._claims_changed)
        self.changes = 0
        self._changed: dict[str, dict[CheckpointId, int]] = {}  # by tier, since its last listing
        self._copying: dict[str, CheckpointId] = {}  # by tier
        self._copying_unknown: set[str] = set()  # tiers
        self.everywhere: dict[Run, CheckpointId] = {}  # the newest that every node of the run has persisted
        self.left: dict[Run, datetime] = {}  # the runs over several nodes that have left this one, and since when
        self.awaited: dict[str, dict[Run, tuple[CheckpointId, list[int]]]] = {}
        """By tier and run: the oldest checkpoint that waits for parts of other nodes, and the ranks of these parts."""
        self.everywhere_created: dict[Run, str] = {}  # its `created_at`, as far as it is known
        self.asked_for_sequence: dict[Run, set[str]] = {}  # the tiers in which it was listed because of its sequence
        self._sent_parts: dict[tuple[str, CheckpointId], NodeFile | None] = {}  # by tier; None: deleted there

    # ── reports of the workers ──

    def add(self, manifest: Manifest, tier: str, milestones: Iterable[str] = ()) -> None:
        """A committed replica in `tier`."""
        checkpoint = manifest.id
        self._touch(checkpoint, tier)
        self._forget_unreadable(checkpoint, tier)
        if checkpoint not in self._entries.in_tier(tier):
            self.claims.wrote(checkpoint)
        entry = self._put(checkpoint, manifest, tier)
        if names := frozenset(milestones):
            self._entries.mark(entry, tier, entry.milestones.get(tier, frozenset()) | names)

    def diagnosed(self, checkpoint: CheckpointId, tier: str, *, is_healthy: bool) -> None:
        """The replica in `tier` has got a health marker. Ignored when the replica is gone."""
        entry = self._entries.get(checkpoint)
        if entry is not None and tier in entry.tiers:
            self._touch(checkpoint, tier)
            self._entries.diagnose(entry, tier, is_healthy)

    def drop(self, checkpoint: CheckpointId, tier: str) -> None:
        """The replica in `tier` was deleted."""
        self.tiers[tier].missing.pop(checkpoint, None)
        self._touch(checkpoint, tier)
        self._forget_unreadable(checkpoint, tier)
        self._remove(checkpoint, tier)

    def disappeared(self, checkpoint: CheckpointId, tier: str) -> None:
        """The replica in `tier` is gone, and this daemon has not deleted it."""
        entry = self._entries.get(checkpoint)
        if entry is not None and tier in entry.tiers:
            view = entry.view
            self.drop(checkpoint, tier)
            self.tiers[tier].missing[checkpoint] = view

    def forget_missing(self, tier: str, kept: Collection[CheckpointId]) -> None:
        """Keep only these of the missing replicas."""
        self.tiers[tier].missing = {c: view for c, view in self.tiers[tier].missing.items() if c in kept}

    def damaged(self, checkpoint: CheckpointId, tier: str, why: str) -> None:
        """The replica in `tier` counts as unreadable until it is repaired or deleted."""
        self._touch(checkpoint, tier)
        self._remove(checkpoint, tier)
        self.tiers[tier].damaged[checkpoint] = self.tiers[tier].unreadable[checkpoint] = why

    def forget_damage(self, checkpoint: CheckpointId, tier: str) -> None:
        """The replica was repaired. It counts again after the next listing, which also reads its markers."""
        self.tiers[tier].damaged.pop(checkpoint, None)

    def _forget_unreadable(self, checkpoint: CheckpointId, tier: str) -> None:
        self.tiers[tier].damaged.pop(checkpoint, None)
        self.tiers[tier].unreadable.pop(checkpoint, None)

    def _put(self, checkpoint: CheckpointId, manifest: Manifest, tier: str) -> Entry:
        entry, knowledge = self._entries.put(checkpoint, manifest, tier), self.tiers[tier]
        self._sent_parts.pop((tier, checkpoint), None)
        knowledge.missing.pop(checkpoint, None)
        if checkpoint in knowledge.gone:
            knowledge.gone = {c: save for c, save in knowledge.gone.items() if c != checkpoint}
        self.saw_generation(checkpoint.run, checkpoint.generation)
        return entry

    def _remove(self, checkpoint: CheckpointId, tier: str) -> None:
        if self._entries.remove(checkpoint, tier):
            self.claims.forget_written(checkpoint)
            for key in [key for key, part in self._sent_parts.items() if key[1] == checkpoint and part is None]:
                del self._sent_parts[key]

    def saw_generation(self, run: Run, generation: int) -> None:
        self._generations[run] = max(self._generations.get(run, 0), generation)

    def forget_run(self, run: Run) -> None:
        """The claims of a run without checkpoints were deleted."""
        self._generations.pop(run, None)
        self.everywhere.pop(run, None)
        self.everywhere_created.pop(run, None)
        self.asked_for_sequence.pop(run, None)
        self.claims.forget(run)

    def enter_listing(
        self,
        tier: str,
        listed: Mapping[CheckpointId, tuple[Manifest, frozenset[str]]],
        unreadable: Mapping[CheckpointId, str],
        *,
        since: int,
        diagnoses: Mapping[CheckpointId, bool] = MappingProxyType({}),
        fingerprints: Mapping[CheckpointId, tuple[int, str]] = MappingProxyType({}),
        partial: Mapping[CheckpointId, float] = MappingProxyType({}),
        sent: Mapping[CheckpointId, SentParts] = MappingProxyType({}),
        gone: Mapping[CheckpointId, str | None] = MappingProxyType({}),
        newer_format: Iterable[CheckpointId] = (),
        foreign: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """A whole listing of a tier, begun when `changes` was `since`: it replaces what was known, except for
        checkpoints that have changed since. `listed`: (manifest, milestones). One listing of a tier at a time."""
        former = self.tiers[tier]
        damaged = {c: why for c, why in former.damaged.items() if c in listed or c in unreadable}
        changed = {c for c, change in self._changed.pop(tier, {}).items() if change > since}
        buried = {c: save for c, save in gone.items() if c not in changed}
        buried |= {c: save for c, save in former.gone.items() if c in changed}
        has_changed = buried != former.gone
        for checkpoint in buried:  # a daemon has deleted it: that is no loss
            former.missing.pop(checkpoint, None)
        there = self._entries.in_tier(tier)
        for checkpoint in [each for each in there if each not in changed and (each not in listed or each in damaged)]:
            is_there = checkpoint in listed or checkpoint in unreadable or manifest_key(checkpoint) in foreign
            if not is_there and checkpoint not in buried:
                former.missing[checkpoint] = there[checkpoint].view
            self._remove(checkpoint, tier)
            has_changed = True
        for checkpoint, (manifest, milestones) in listed.items():
            if checkpoint in changed or checkpoint in damaged:
                continue
            diagnosis, entry = diagnoses.get(checkpoint), there.get(checkpoint)
            markers = (entry.milestones.get(tier, frozenset()), entry.diagnoses.get(tier)) if entry else None
            if entry is None or markers != (milestones, diagnosis):
                entry = self._put(checkpoint, manifest, tier)
                self._entries.mark(entry, tier, milestones)
                self._entries.diagnose(entry, tier, diagnosis)
                has_changed = True
        unreadable = (
            {c: why for c, why in unreadable.items() if c not in changed}
            | {c: why for c, why in former.unreadable.items() if c in changed}
            | damaged
        )
        uncommitted = {checkpoint: newest_s for checkpoint, newest_s in partial.items() if checkpoint not in changed}
        found_since = {key: why for key, why in former.foreign.items() if parse_key(key) in changed}
        self.tiers[tier] = TierKnowledge(
            is_known=True,
            error="",
            unreadable=unreadable,
            fingerprints=dict(fingerprints),
            partial=uncommitted,
            sent={checkpoint: parts for checkpoint, parts in sent.items() if checkpoint in uncommitted},
            gone=buried,
            damaged=damaged,
            newer_format=frozenset(newer_format) | (former.newer_format & changed),
            missing=former.missing,
            foreign=found_since | dict(foreign),
        )
        if has_changed or not former.is_known or (former.unreadable, former.partial) != (unreadable, uncommitted):
            self.changes += 1

    def enter_run(
        self,
        tier: str,
        listed: Mapping[CheckpointId, tuple[Manifest, frozenset[str]]],
        unreadable: Mapping[CheckpointId, str],
        *,
        diagnoses: Mapping[CheckpointId, bool],
        newer_format: Iterable[CheckpointId],
        foreign: Mapping[str, str],
        fingerprints: Mapping[CheckpointId, tuple[int, str]] = MappingProxyType({}),
    ) -> None:
        """What a listing of one run has found besides what is known: replicas, and markers of known ones. It removes
        nothing: a listing of the whole tier may be under way, and an older one must not undo this one either."""
        for checkpoint, (manifest, milestones) in listed.items():
            if checkpoint in self.tiers[tier].damaged:
                continue  # no listing shows that its bytes are wrong
            entry = self._entries.get(checkpoint)
            if entry is None or tier not in entry.tiers:
                self._touch(checkpoint, tier)
                self._forget_unreadable(checkpoint, tier)
                entry = self._put(checkpoint, manifest, tier)
            if checkpoint in fingerprints and entry.held(tier) == manifest:  # else it is read again
                self.tiers[tier].fingerprints[checkpoint] = fingerprints[checkpoint]
            if not milestones <= (known := entry.milestones.get(tier, frozenset())):
                self._touch(checkpoint, tier)
                self._entries.mark(entry, tier, known | milestones)
            if checkpoint in diagnoses and diagnoses[checkpoint] != entry.diagnoses.get(tier):
                self.diagnosed(checkpoint, tier, is_healthy=diagnoses[checkpoint])
        for checkpoint, why in unreadable.items():
            self._touch(checkpoint, tier)
            self.tiers[tier].unreadable[checkpoint] = why
        self.tiers[tier].newer_format |= frozenset(newer_format)
        for key in foreign.keys() - self.tiers[tier].foreign.keys():
            if checkpoint := parse_key(key):
                self._touch(checkpoint, tier)
        self.tiers[tier].foreign |= foreign

    def listing_failed(self, tier: str, error: str) -> None:
        """A listing failed: what was known stays, but must not be the reason for a deletion."""
        self.tiers[tier].is_known = False
        self.tiers[tier].error = error
        self.changes += 1

    def looked(self, tier: str) -> None:
        """Single checkpoints in the tier were looked at, and agree with what is known: it answers."""
        knowledge = self.tiers[tier]
        self.changes += not knowledge.is_known or knowledge.is_whole
        knowledge.is_known, knowledge.is_whole, knowledge.error = True, False, ""

    def forget_copying(self, tier: str) -> None:
        """What a former daemon was copying to `tier` is not known, until `set_copying` is called."""
        self._copying_unknown.add(tier)
        self.changes += 1

    def set_copying(self, tier: str, checkpoint: CheckpointId | None) -> None:
        """What is being copied to `tier` now, or is to be continued after an error; None: nothing."""
        if tier in self._copying_unknown or self._copying.get(tier) != checkpoint:
            self.changes += 1
        self._copying_unknown.discard(tier)
        self._copying.pop(tier, None)
        if checkpoint is not None:
            self._copying[tier] = checkpoint

    def saw_everywhere(self, checkpoint: CheckpointId) -> None:
        """Every node of the run has persisted its part of this checkpoint."""
        known = self.everywhere.get(checkpoint.run)
        if known is None or checkpoint.recency > known.recency:
            self.everywhere[checkpoint.run] = checkpoint
            self.everywhere_created.pop(checkpoint.run, None)
            self.changes += 1
        entry = self._entries.get(checkpoint)
        if entry is not None and self.everywhere.get(checkpoint.run) == checkpoint:
            self.everywhere_created[checkpoint.run] = entry.manifest.created_at

    def part_sent(self, tier: str, node_file: NodeFile) -> None:
        """This node's part is in `tier`. The checkpoint is committed there when all parts are."""
        self._touch(node_file.id, tier)
        self._sent_parts[tier, node_file.id] = node_file
        self.claims.wrote(node_file.id)

    def part_gone(self, tier: str, checkpoint: CheckpointId) -> None:
        """The checkpoint was deleted in `tier` before it was committed, or it can never be: it is not sent again."""
        self._touch(checkpoint, tier)
        self._sent_parts[tier, checkpoint] = None

    def saw_gone(self, tier: str, checkpoint: CheckpointId, save: str | None) -> None:
        """`tier` has a tombstone of it. `save`: see TierKnowledge."""
        self._touch(checkpoint, tier)
        self.tiers[tier].gone = {**self.tiers[tier].gone, checkpoint: save}

    # ── questions ──

    def sent_parts(self, tier: str) -> list[NodeFile]:
        """This node's parts in `tier` of checkpoints that are not committed there yet."""
        return [part for (name, _), part in self._sent_parts.items() if name == tier and part is not None]

    def is_part_sent(self, tier: str, checkpoint: CheckpointId) -> bool:
        """Whether `tier` has this node's part, or it must not be sent again."""
        return (tier, checkpoint) in self._sent_parts

    def copying(self, tier: str) -> CheckpointId | None:
        """What is being copied to `tier`, as far as it is known."""
        return self._copying.get(tier)

    def copied_to(self, checkpoint: CheckpointId) -> set[str]:
        """The tiers to which it is being copied: one of them may have it already."""
        return {tier for tier, copied in self._copying.items() if copied == checkpoint}

    def is_copying_known(self, tier: str) -> bool:
        return tier not in self._copying_unknown

    def runs(self) -> list[Run]:
        return sorted({*self._entries.runs(), *self._generations})

    def newest_in_cold(self, run: Run) -> CheckpointId | None:
        """The newest in any cold tier that is known for this run now; not one that is unhealthy or in doubt."""
        cold = self.known_cold(run)
        in_cold = (entry for entry in reversed(self._entries.of_run(run)) if not cold.isdisjoint(entry.tiers))
        return next((e.id for e in in_cold if e.view.healthy is not False and e.id not in self.doubts()), None)

    def known_cold(self, run: Run) -> set[str]:
        """The cold tiers of which it is known now what they have of the run."""
        known = ((name, each.unreadable) for name, each in self.tiers.items() if name != HOT and each.is_known)
        return {name for name, unreadable in known if all(checkpoint.run != run for checkpoint in unreadable)}

    def absent(self, tier: str, committed: Collection[CheckpointId], *, since: int) -> list[CheckpointId]:
        """The replicas, newest first, that are not in `committed` and have not changed since `changes` was `since`."""
        changed = self._changed.get(tier, {})
        absent = (checkpoint for checkpoint in self._entries.in_tier(tier) if checkpoint not in committed)
        unchanged = (checkpoint for checkpoint in absent if changed.get(checkpoint, 0) <= since)
        return sorted(unchanged, key=lambda checkpoint: checkpoint.recency, reverse=True)

    def generation_max(self, run: Run) -> Generation:
        """The highest generation of a run that was ever seen; 0 when there is none."""
        return Generation(self._generations.get(run, 0))

    def views(self) -> list[CheckpointView]:
        """The checkpoints as the lifecycle sees them."""
        return [view for _, views in self.views_by_run() for view in views]

    def views_by_run(self) -> list[tuple[Run, list[CheckpointView]]]:
        """The runs by name, each with the views of its checkpoints, oldest first. Not to be changed."""
        others = self._other_views()
        return [(run, self._views(run, others.get(run, {}))) for run in self._entries.runs()]

    def _views(self, run: Run, others: Mapping[CheckpointId, CheckpointView]) -> list[CheckpointView]:
        views = self._entries.views(run)
        return [others.get(view.id, view) for view in views] if others else views

    def _other_views(self) -> dict[Run, dict[CheckpointId, CheckpointView]]:
        """By run: the views of checkpoints that are foreign or deleted in a tier, which their entries do not tell."""
        doubts = self.doubts()
        gone = {checkpoint for knowledge in self.tiers.values() for checkpoint in knowledge.gone}
        gone |= {checkpoint for (_, checkpoint), part in self._sent_parts.items() if part is None}
        others: dict[Run, dict[CheckpointId, CheckpointView]] = {}
        for checkpoint in doubts.keys() | gone:
            if (entry := self._entries.get(checkpoint)) is not None:
                deleted = deleted_in(entry, self.tiers, self._sent_parts)
                view = replace(entry.view, foreign=doubts.get(checkpoint, ""), gone=deleted)
                others.setdefault(checkpoint.run, {})[checkpoint] = view
        return others

    def foreign(self) -> dict[tuple[str, str], str]:
        """Why a replica or marker is not one of this run's daemons, by (tier, key)."""
        found = {(tier, key): why for tier, knowledge in self.tiers.items() for key, why in knowledge.foreign.items()}
        for checkpoint, why in self.doubts().items():
            entry = self._entries.get(checkpoint)
            found |= {(tier, manifest_key(checkpoint)): why for tier in (entry.tiers if entry else ())}
        return found

    def doubts(self) -> dict[CheckpointId, str]:
        """Why a checkpoint that is or was in a tier seems not to be one of this run's daemons."""
        return self.claims.doubts(self._is_in_hot())

    def shared_generations(self) -> dict[tuple[str, CheckpointId], str]:
        """Why another daemon may hold the generation that was claimed here, by (tier, checkpoint of another node)."""
        shared = self.claims.shared_generations(self._is_in_hot())
        entries = ((self._entries.get(c), why) for c, why in shared.items())
        return {(tier, entry.id): why for entry, why in entries if entry is not None for tier in entry.tiers}

    def _is_in_hot(self) -> dict[CheckpointId, bool]:
        """Whether hot has each checkpoint that is in a tier or has disappeared from one. A checkpoint that cannot be in
        doubt, and because of which no other can be, is left out."""
        in_hot, hot = self._entries.in_tier(HOT), self.tiers.get(HOT)
        unreadable = dict.fromkeys(hot.unreadable if hot else (), True)
        here = {(checkpoint.run, checkpoint.generation) for checkpoint in (*in_hot, *unreadable)}
        found = {checkpoint: checkpoint in in_hot for each in self.tiers.values() for checkpoint in each.missing}
        for run in filter(self.claims.has_claims_here, self._entries.runs()):
            for entry in self.claims.to_judge(run, self._entries.of_run(run), here):
                found[entry.id] = HOT in entry.tiers
        return found | unreadable

    def _claims_changed(self) -> None:
        self.changes += 1

    def _touch(self, checkpoint: CheckpointId, tier: str) -> None:
        self.changes += 1
        self._changed.setdefault(tier, {})[checkpoint] = self.changes
