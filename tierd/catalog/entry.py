"""What the catalog holds: an entry for each checkpoint, and the last listing of each tier."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tierd.format import layout
from tierd.format.ids import HOT, CheckpointId, Generation, Run
from tierd.format.layout import parse_generation_key
from tierd.format.manifest import Manifest
from tierd.format.node_file import NodeFile, other_ranks_text
from tierd.lifecycle.policy import CheckpointView

NOT_LISTED_YET = "not listed yet"


@dataclass(slots=True)
class Entry:
    """One checkpoint. Only catalog/entries.py changes it. `milestones` (marks of them and of removals) and `diagnoses`
    (whether healthy) by tier, because each replica has its markers.
    `part`: what hot has of it, if that is only this node's part. `manifest`: of the whole checkpoint, as far as it is
    known, else the part."""

    id: CheckpointId
    manifest: Manifest
    part: NodeFile | None = None
    tiers: set[str] = field(default_factory=set)
    milestones: dict[str, frozenset[str]] = field(default_factory=dict)
    diagnoses: dict[str, bool] = field(default_factory=dict)
    kept_view: CheckpointView | None = field(default=None, compare=False, repr=False)  # until the entry changes

    def held(self, tier: str) -> Manifest:
        """What `tier` has of it: the whole checkpoint, or in hot this node's part."""
        return self.part if self.part is not None and tier == HOT else self.manifest

    def is_part_in(self, tier: str) -> bool:
        return tier == HOT and self.part is not None

    def is_whole_in(self, tier: str) -> bool:
        return tier in self.tiers and not self.is_part_in(tier)

    @property
    def is_whole(self) -> bool:
        """Whether a tier has all of it."""
        return not isinstance(self.manifest, NodeFile)

    def contradiction(self, manifest: Manifest) -> str:
        """Why a manifest in another tier is not of this checkpoint; empty if it is."""
        if isinstance(manifest, NodeFile):
            if self.part is not None and self.part != manifest:
                return "the node file differs"
            return manifest.contradiction(self.manifest) if self.is_whole else ""
        if self.is_whole and manifest is not self.manifest and manifest != self.manifest:
            return "the manifest differs"
        return self.part.contradiction(manifest) if self.part is not None else ""

    @property
    def view(self) -> CheckpointView:
        """As the lifecycle sees it, as far as the entry tells."""
        if self.kept_view is None:
            self.kept_view = view_of(self)
        return self.kept_view

    @property
    def healthy(self) -> bool | None:
        """None: not examined. The bytes are the same in every tier, so one diagnosis is enough; the worst counts. That
        this node's part is healthy says nothing about the others."""
        if self.manifest.is_reported_unhealthy:
            return False
        verdicts = [healthy for tier, healthy in self.diagnoses.items() if not (healthy and self.is_part_in(tier))]
        return all(verdicts) if verdicts else None

    @property
    def examined(self) -> bool | None:
        """As `healthy`, but of a part what its own examination has shown."""
        if self.part is None or self.part.is_reported_unhealthy:
            return self.healthy
        return self.diagnoses.get(HOT)

    @property
    def all_milestones(self) -> frozenset[str]:
        return layout.counted(self.all_marks)

    @property
    def all_marks(self) -> frozenset[str]:
        """Milestones and removals of all tiers."""
        return frozenset[str]().union(*self.milestones.values())

    @property
    def counted_marks(self) -> frozenset[str]:
        """The marks that every tier should have: those of removed milestones do not count."""
        return self.all_milestones | {mark for mark in self.all_marks if layout.removed_by(mark) is not None}


def recency(entry: Entry) -> tuple[int, int]:
    """To sort entries of a run by."""
    return entry.id.recency


class SentParts(NamedTuple):
    """The ranks whose shards a cold tier has of a checkpoint over several nodes that is not committed there.
    `is_adopted`: instead, the nodes whose parts it has."""

    ranks: list[int]
    world_size: int
    is_adopted: bool = False

    def __str__(self) -> str:
        missing = other_ranks_text(self.ranks, self.world_size)
        what, whose = ("parts", "nodes") if self.is_adopted else ("shards", "ranks")
        waits = f"without {whose} {missing}" if missing else "not committed yet"
        return f"the {what} of {len(self.ranks)} of {self.world_size} {whose}, {waits}"


@dataclass(slots=True)
class TierKnowledge:
    """The last listing of a tier. `error`: why it is not known now. `is_whole`: whether nothing but that listing is
    known; otherwise only single checkpoints were looked at since, and others may have been deleted. `fingerprints`:
    size and ETag of each manifest that was read; one that differs now is read again. `partial`: checkpoints without a
    manifest or with a tombstone, and when their newest file was written, in Unix time. `sent`: what nodes sent of those
    over several nodes. `gone`: those with a tombstone: a daemon has deleted them there, while another one may still
    have them. By checkpoint the save digest of what was deleted: "" if the tombstone does not say it, None if it was
    not read. `damaged`: the unreadable ones whose bytes were found to be wrong, which no listing shows. `newer_format`:
    the unreadable ones that a later tierd wrote. `foreign`: replicas and markers that count for nothing, and why, by
    key. `missing`: replicas that were there and that a listing did not show any more, as they were."""

    is_known: bool = False
    is_whole: bool = True
    error: str = NOT_LISTED_YET
    unreadable: dict[CheckpointId, str] = field(default_factory=dict)
    fingerprints: dict[CheckpointId, tuple[int, str]] = field(default_factory=dict)
    partial: Mapping[CheckpointId, float] = field(default_factory=dict[CheckpointId, float])
    sent: Mapping[CheckpointId, SentParts] = field(default_factory=dict[CheckpointId, SentParts])
    gone: Mapping[CheckpointId, str | None] = field(default_factory=dict[CheckpointId, str | None])
    damaged: dict[CheckpointId, str] = field(default_factory=dict)
    newer_format: frozenset[CheckpointId] = frozenset()
    missing: dict[CheckpointId, CheckpointView] = field(default_factory=dict)
    foreign: dict[str, str] = field(default_factory=dict)

    def has_deleted(self, manifest: Manifest) -> bool:
        """Whether a daemon has deleted this checkpoint, and not another save of the same id."""
        return self.gone.get(manifest.id) in ("", manifest.save_digest)


def deleted_in(
    entry: Entry, tiers: Mapping[str, TierKnowledge], sent: Mapping[tuple[str, CheckpointId], NodeFile | None]
) -> frozenset[str]:
    """The tiers in which the checkpoint was deleted, or that will not get this node's part of it. `sent`: the parts by
    (tier, checkpoint); None: deleted there."""
    return frozenset(
        tier
        for tier, knowledge in tiers.items()
        if sent.get((tier, entry.id), ...) is None or knowledge.has_deleted(entry.manifest)
    )


def view_of(entry: Entry, doubt: str = "", gone: frozenset[str] = frozenset()) -> CheckpointView:
    """One checkpoint as the lifecycle sees it. `doubt`: why it is foreign; empty if it is not. `gone`: see there."""
    return CheckpointView(
        id=entry.id,
        sequence=entry.manifest.sequence,
        milestones=entry.all_milestones,
        healthy=entry.healthy,
        tiers=frozenset(entry.tiers),
        gone=gone,
        created_at=entry.manifest.created,
        metrics=entry.manifest.metrics,
        foreign=doubt,
        is_part=entry.part is not None,
    )


def sum_up_foreign(foreign: Iterable[tuple[str, str, str]]) -> list[str]:
    """A sentence for each (tier, key, why), in this order; one for all claims of a run in a tier."""
    claims: dict[tuple[str, Run], list[tuple[Generation, str]]] = {}
    sentences: dict[tuple[str, str], str] = {}
    for tier, key, why in foreign:
        if (claimed := parse_generation_key(key)) is None:
            sentences[tier, key] = f"{tier}: {why}"
            continue
        run, generation = claimed
        same = claims.setdefault((tier, run), [])
        same.append((generation, why))
        more = f"; and {len(same) - 1} more claims of {run}, up to generation {max(same)[0]}" if len(same) > 1 else ""
        sentences[tier, f"{run}/"] = f"{tier}: {min(same)[1]}{more}"
    return list(sentences.values())
