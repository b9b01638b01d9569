"""The entries of a catalog in the orders in which they are asked for, with what follows from them: sizes and views.

A catalog may hold ten thousand, and a status or a pass of a worker must not go through all of them for one answer. What
is derived is kept until an entry changes. Every change of an entry is made here, so nothing that is kept gets old.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tierd.catalog.entry import Entry, recency
from tierd.format.ids import CheckpointId, Run
from tierd.format.manifest import Manifest
from tierd.format.node_file import NodeFile
from tierd.lifecycle.policy import HOT, CheckpointView

T = TypeVar("T")

RESULTS_KEPT = 3  # of each run: the plan, the copies if all manifests could be read, and what waits for `tierd reap`


@dataclass(slots=True)
class _OfRun:
    """`entries`, and `views` in the same order: oldest first. `views` and `sequence_max` None: to be made again.
    `results`: see `Entries.remembered`."""

    entries: list[Entry] = field(default_factory=list[Entry])
    views: list[CheckpointView] | None = None
    sequence_max: int | None = None
    results: list[tuple[Any, Any]] = field(default_factory=list[tuple[Any, Any]])


class Entries:
    """The checkpoints that some tier has."""

    def __init__(self) -> None:
        self._by_id: dict[CheckpointId, Entry] = {}
        self._runs: dict[Run, _OfRun] = {}
        self._tiers: dict[str, dict[CheckpointId, Entry]] = {}
        self._sizes: dict[str, dict[CheckpointId, int]] = {}
        self._used_bytes: dict[str, int] = {}

    # ── changes ──

    def put(self, checkpoint: CheckpointId, manifest: Manifest, tier: str) -> Entry:
        """A replica in `tier`."""
        entry = self._by_id.get(checkpoint)
        if entry is None:
            entry = self._by_id[checkpoint] = Entry(checkpoint, manifest)
            insort(self._runs.setdefault(checkpoint.run, _OfRun()).entries, entry, key=recency)
        if tier == HOT:
            entry.part = manifest if isinstance(manifest, NodeFile) else None
        if not isinstance(manifest, NodeFile) or not entry.is_whole:
            entry.manifest = manifest
        entry.tiers.add(tier)
        self._tiers.setdefault(tier, {})[checkpoint] = entry
        for name in entry.tiers:  # one manifest is that of all
            self._set_size(name, checkpoint, entry.held(name).size_bytes)
        self._changed(entry)
        return entry

    def remove(self, checkpoint: CheckpointId, tier: str) -> bool:
        """There is no replica in `tier`. True when that was the last one."""
        entry = self._by_id.get(checkpoint)
        if entry is None:
            return False
        entry.tiers.discard(tier)
        entry.milestones.pop(tier, None)
        entry.diagnoses.pop(tier, None)
        if tier == HOT:
            entry.part = None
        if self._tiers.get(tier, {}).pop(checkpoint, None) is not None:
            self._set_size(tier, checkpoint, None)
        self._changed(entry)
        if entry.tiers:
            return False
        del self._by_id[checkpoint]
        of_run = self._runs[checkpoint.run]
        del of_run.entries[bisect_left(of_run.entries, checkpoint.recency, key=recency)]
        if not of_run.entries:
            del self._runs[checkpoint.run]
        return True

    def mark(self, entry: Entry, tier: str, marks: frozenset[str]) -> None:
        """The replica in `tier` has these markers of milestones and removals."""
        entry.milestones[tier] = marks
        self._changed(entry)

    def diagnose(self, entry: Entry, tier: str, is_healthy: bool | None) -> None:
        """The replica in `tier` has this verdict; None: it has none."""
        if is_healthy is None:
            entry.diagnoses.pop(tier, None)
        else:
            entry.diagnoses[tier] = is_healthy
        self._changed(entry)

    def _set_size(self, tier: str, checkpoint: CheckpointId, size_bytes: int | None) -> None:
        sizes = self._sizes.setdefault(tier, {})
        self._used_bytes[tier] = self._used_bytes.get(tier, 0) - sizes.pop(checkpoint, 0) + (size_bytes or 0)
        if size_bytes is not None:
            sizes[checkpoint] = size_bytes

    def _changed(self, entry: Entry) -> None:
        of_run = self._runs[entry.id.run]
        entry.kept_view = of_run.views = of_run.sequence_max = None

    # ── questions ──

    def get(self, checkpoint: CheckpointId) -> Entry | None:
        return self._by_id.get(checkpoint)

    def runs(self) -> list[Run]:
        """By name."""
        return sorted(self._runs)

    def of_run(self, run: Run) -> list[Entry]:
        """Oldest first."""
        return self._runs[run].entries if run in self._runs else []

    def in_tier(self, tier: str) -> Mapping[CheckpointId, Entry]:
        return self._tiers.get(tier, {})

    def sizes(self, tier: str) -> Mapping[CheckpointId, int]:
        """In bytes, of what the tier has of each checkpoint."""
        return self._sizes.get(tier, {})

    def used_bytes(self, tier: str) -> int:
        return self._used_bytes.get(tier, 0)

    def views(self, run: Run) -> list[CheckpointView]:
        """Oldest first, as far as the entries tell. The same list until an entry of the run changes."""
        of_run = self._runs[run]
        if of_run.views is None:
            of_run.views = [entry.view for entry in of_run.entries]
        return of_run.views

    def sequence_max(self, run: Run) -> int:
        of_run = self._runs.get(run)
        if of_run is None:
            return 0
        if of_run.sequence_max is None:
            of_run.sequence_max = max(entry.manifest.sequence for entry in of_run.entries)
        return of_run.sequence_max

    def remembered(self, run: Run, inputs: tuple[Any, ...], make: Callable[[], T]) -> T:
        """What `make` returns for these inputs, which must be all that it depends on. Kept for the last RESULTS_KEPT
        inputs of the run."""
        of_run = self._runs[run]
        for known, result in of_run.results:
            if known == inputs:
                return result
        result = make()
        of_run.results = [(inputs, result), *of_run.results[: RESULTS_KEPT - 1]]
        return result
