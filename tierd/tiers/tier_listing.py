"""What one listing of a tier shows: checkpoints with their files, claims, markers and identities."""

from __future__ import annotations

from dataclasses import dataclass, field

from tierd.format import layout
from tierd.format.ids import GENERATION_SEEN_MAX, CheckpointId, Generation, Run
from tierd.tiers.cache import Fingerprint

OBJECTS_AT_ONCE = 2048  # of a listing, without a pause: some milliseconds


@dataclass(frozen=True, slots=True)
class Listing:
    """One listing of a tier. `files`: sizes by file name, of every checkpoint, committed or not. `fingerprints` and
    `written_at_s`, Unix times: of the manifests. `generations`: the highest of each run; `claims`: those with a claim.
    `numbers`: all generations in the names of claims and manifests, of each run, trusted or not.
    `markers`: what tells whether one has changed, by key. `foreign`: why a marker does not count, by key. `identities`:
    those that the markers at the root give it. `node_files`: of folders without a manifest; in hot they are this node's
    parts, and count as committed. `gone`: folders with a tombstone, which hold no checkpoint."""

    committed: set[CheckpointId] = field(default_factory=set)
    partial: dict[CheckpointId, float] = field(default_factory=dict)
    gone: set[CheckpointId] = field(default_factory=set)
    files: dict[CheckpointId, dict[str, int]] = field(default_factory=dict)
    generations: dict[Run, Generation] = field(default_factory=dict)
    fingerprints: dict[CheckpointId, Fingerprint] = field(default_factory=dict)
    identities: set[str] = field(default_factory=set)
    written_at_s: dict[CheckpointId, float] = field(default_factory=dict)
    claims: dict[Run, set[Generation]] = field(default_factory=dict)
    numbers: dict[Run, set[Generation]] = field(default_factory=dict)
    markers: dict[str, tuple[int, str, float]] = field(default_factory=dict)
    foreign: dict[str, str] = field(default_factory=dict)
    node_files: dict[CheckpointId, list[str]] = field(default_factory=dict)

    def record(self, checkpoint: CheckpointId) -> str:
        """The name of the file that commits the checkpoint: its manifest, or in hot the node file of a part."""
        return self.node_files[checkpoint][0] if checkpoint in self.node_files else layout.MANIFEST

    def add_generation(self, run: Run, generation: Generation) -> None:
        """A generation that a manifest or a claim shows. Any other file of that name proves nothing."""
        if generation <= GENERATION_SEEN_MAX:
            self.generations[run] = max(generation, self.generations.get(run, generation))

    def add_number(self, run: Run, generation: Generation) -> None:
        self.numbers.setdefault(run, set()).add(generation)

    def add_claim(self, run: Run, generation: Generation) -> None:
        self.add_generation(run, generation)
        self.claims.setdefault(run, set()).add(generation)

    def sent_ranks(self, checkpoint: CheckpointId) -> tuple[list[int], int, bool] | None:
        """(the ranks whose shards are there, the world size), of a checkpoint over several nodes without a manifest.
        Of an adopted one, the nodes whose parts are there, their number, and True. None of any other."""
        if checkpoint not in self.node_files or checkpoint in self.gone:
            return None
        names = self.files[checkpoint]
        sent = sorted(parsed for name in names if (parsed := layout.parse_shard(name)))
        if is_adopted := not sent:
            sent = sorted(parsed for name in names if (parsed := layout.parse_node_file(name)))
        return [rank for rank, _ in sent], sent[0][1], is_adopted

    def milestones(self, checkpoint: CheckpointId) -> frozenset[str]:
        """The milestones that this tier has for the checkpoint."""
        return layout.milestones_of(self.files.get(checkpoint, ()))

    def marks(self, checkpoint: CheckpointId) -> frozenset[str]:
        """The marks of milestones and of their removals, as `layout.mark_of` returns them."""
        return layout.marks_of(self.files.get(checkpoint, ()))

    def diagnosis(self, checkpoint: CheckpointId) -> bool | None:
        return layout.diagnosis_of(self.files.get(checkpoint, ()))
