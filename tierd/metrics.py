"""Every metric: its name, labels, buckets and help, declared once. The only file that imports prometheus_client.

An attribute is the metric's name without `tierd_`: `metrics.persist_seconds.observe(0.3)`. The registry is
injected, one per daemon. Series whose labels are known beforehand exist at 0 from the start, so that rate()
and increase() see the first failure too. A step number is never a label.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from tierd import __version__

SNAPSHOT_OUTCOMES = ("persisted", "skipped", "failed", "lost")
STAGES = ("stage", "persist", "replicate", "reap", "list", "restore", "wire", "examine", "scrub", "drill")
VERDICTS = ("healthy", "unhealthy", "failed")
FAILURE_KINDS = ("transient", "full", "corrupt", "stale", "tier_unreachable", "newer_format", "bug")
HALT_REASONS = ("unreadable_manifest", "damaged_replica", "tier_unreachable")
PROOFS = ("deep", "checksum", "size")
SLOT_STATES = ("free", "filling", "sealed", "persisting", "retained")
DIRECTIONS = ("read", "write")

# From a pre-faulted gigabyte copied by two cores (0.06 s) to a wait for a slot at its bound (60 s).
_STALL_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
# From megabytes on NVMe to terabytes over a slow link.
_TRANSFER_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)

# The _created series would double the count of series and say nothing that a panel or a rule needs.
disable_created_metrics()


class Metrics:
    """All series of one daemon. `tiers`: hot and the cold tiers' names, whose series begin at 0."""

    def __init__(self, registry: CollectorRegistry | None = None, *, tiers: Iterable[str] = ("hot",)) -> None:
        registry = CollectorRegistry() if registry is None else registry
        self.registry = registry
        ProcessCollector(registry=registry)

        self.build_info = Gauge(
            "tierd_build_info", "Always 1; the labels say what runs.", ["version", "python"], registry=registry
        )
        self.snapshots_total = Counter(
            "tierd_snapshots_total",
            "Snapshots by end: persisted; skipped (no slot free); failed (not staged); lost (given up unpersisted).",
            ["run", "outcome"],
            registry=registry,
        )
        self.snapshot_stall_seconds = Histogram(
            "tierd_snapshot_stall_seconds",
            "How long snapshot() held up a rank's training, waiting for a slot included.",
            buckets=_STALL_BUCKETS_S,
            registry=registry,
        )
        self.persist_seconds = Histogram(
            "tierd_persist_seconds",
            "From the last rank's sealed snapshot to the commit in the hot tier.",
            buckets=_TRANSFER_BUCKETS_S,
            registry=registry,
        )
        self.replicate_seconds = Histogram(
            "tierd_replicate_seconds",
            "One checkpoint's copy from the hot tier to its commit in a cold tier.",
            ["tier"],
            buckets=_TRANSFER_BUCKETS_S,
            registry=registry,
        )
        self.restore_seconds = Histogram(
            "tierd_restore_seconds",
            "From a rank's request for a checkpoint to its verified bytes, by the tier that served them.",
            ["tier"],
            buckets=_TRANSFER_BUCKETS_S,
            registry=registry,
        )
        self.bytes_total = Counter(
            "tierd_bytes_total", "Bytes of checkpoints moved.", ["tier", "direction"], registry=registry
        )
        self.last_committed_step = Gauge(
            "tierd_last_committed_step",
            "Step of the newest checkpoint committed in the tier.",
            ["run", "tier"],
            registry=registry,
        )
        self.last_committed_timestamp_seconds = Gauge(
            "tierd_last_committed_timestamp_seconds",
            "When the newest checkpoint committed in the tier was made (Unix time).",
            ["run", "tier"],
            registry=registry,
        )
        self.checkpoints = Gauge(
            "tierd_checkpoints", "Checkpoints committed in the tier.", ["run", "tier"], registry=registry
        )
        self.tier_used_bytes = Gauge(
            "tierd_tier_used_bytes", "Size of the checkpoints committed in the tier.", ["tier"], registry=registry
        )
        self.tier_free_bytes = Gauge(
            "tierd_tier_free_bytes", "Room left, of tiers that have such a limit.", ["tier"], registry=registry
        )
        self.queue_checkpoints = Gauge(
            "tierd_queue_checkpoints",
            "Checkpoints that have yet to reach the tier.",
            ["tier"],
            registry=registry,
        )
        self.queue_oldest_age_seconds = Gauge(
            "tierd_queue_oldest_age_seconds",
            "Age of the oldest checkpoint that has yet to reach the tier; 0 when there is none.",
            ["tier"],
            registry=registry,
        )
        self.slots = Gauge("tierd_slots", "Slots of all ranks, by state.", ["state"], registry=registry)
        self.failures_total = Counter(
            "tierd_failures_total",
            "Attempts that went wrong, retried ones included, by stage and kind of error.",
            ["stage", "kind"],
            registry=registry,
        )
        self.cold_requests_total = Counter(
            "tierd_cold_requests_total",
            "Requests to a cold tier. code: the HTTP status, or the kind of error when there was no answer.",
            ["tier", "op", "code"],
            registry=registry,
        )
        self.verify_failures_total = Counter(
            "tierd_verify_failures_total",
            "Chunks or files whose bytes were not what their checksum says.",
            ["tier"],
            registry=registry,
        )
        self.scrubbed_checkpoints_total = Counter(
            "tierd_scrubbed_checkpoints_total",
            "Replicas looked at, by proof: deep (read whole); checksum (the bucket's own); size (no more is known).",
            ["tier", "proof"],
            registry=registry,
        )
        self.damaged_checkpoints = Gauge(
            "tierd_damaged_checkpoints",
            "Replicas that are known to be damaged, and are not mended.",
            ["tier"],
            registry=registry,
        )
        self.repaired_files_total = Counter(
            "tierd_repaired_files_total",
            "Damaged files that were replaced by whole ones of another tier.",
            ["tier"],
            registry=registry,
        )
        self.drill_restore_seconds = Gauge(
            "tierd_drill_restore_seconds",
            "How long the last drill took to restore a checkpoint of the tier into scratch space.",
            ["tier"],
            registry=registry,
        )
        self.drill_newest_step_proven = Gauge(
            "tierd_drill_newest_step_proven",
            "Step of the newest checkpoint that a drill has restored from the tier.",
            ["run", "tier"],
            registry=registry,
        )
        self.drill_last_success_timestamp_seconds = Gauge(
            "tierd_drill_last_success_timestamp_seconds",
            "When a drill last went well (Unix time).",
            ["tier"],
            registry=registry,
        )
        self.examinations_total = Counter(
            "tierd_examinations_total",
            "Checkpoints looked at: healthy; unhealthy (numbers that are not finite); failed (could not be read).",
            ["run", "verdict"],
            registry=registry,
        )
        self.unhealthy_checkpoints = Gauge(
            "tierd_unhealthy_checkpoints", "Checkpoints in any tier that are unhealthy.", ["run"], registry=registry
        )
        self.stale_snapshots_total = Counter(
            "tierd_stale_snapshots_total",
            "Snapshots whose weights are those of an earlier step, bit for bit.",
            ["run"],
            registry=registry,
        )
        self.step_slowdown_ratio = Gauge(
            "tierd_step_slowdown_ratio",
            "How much longer a trainer's steps take than with the daemon at rest; 0.05 is 5 %.",
            ["run"],
            registry=registry,
        )
        self.write_limit_bytes_per_second = Gauge(
            "tierd_write_limit_bytes_per_second",
            "What the tier is written with at most, for the sake of trainers; no series while nothing is held back.",
            ["tier"],
            registry=registry,
        )
        self.halted = Gauge(
            "tierd_halted",
            "1 while nothing is deleted because something could not be read; the reason says what.",
            ["reason"],
            registry=registry,
        )

        self.build_info.labels(__version__, platform.python_version()).set(1)
        self._begin_at_zero(tuple(tiers))

    def begin_run(self, run: str) -> None:
        """Make the series of a run exist, at 0 where they are new."""
        for outcome in SNAPSHOT_OUTCOMES:
            self.snapshots_total.labels(run, outcome)
        for verdict in VERDICTS:
            self.examinations_total.labels(run, verdict)
        self.stale_snapshots_total.labels(run)

    def render(self) -> tuple[bytes, str]:
        """The text exposition and its content type, parameters included: set it as a whole header."""
        return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4

    def _begin_at_zero(self, tiers: tuple[str, ...]) -> None:
        """Not the free bytes nor the last commit: there a 0 would be a lie that raises an alert."""
        for tier in tiers:
            self.queue_checkpoints.labels(tier)
            self.queue_oldest_age_seconds.labels(tier)
            self.verify_failures_total.labels(tier)
            self.damaged_checkpoints.labels(tier)
            self.repaired_files_total.labels(tier)
            for proof in PROOFS:
                self.scrubbed_checkpoints_total.labels(tier, proof)
            self.restore_seconds.labels(tier)
            if tier != "hot":
                self.replicate_seconds.labels(tier)
            for direction in DIRECTIONS:
                self.bytes_total.labels(tier, direction)
        self.restore_seconds.labels("memory")
        for state in SLOT_STATES:
            self.slots.labels(state)
        for stage in STAGES:
            for kind in FAILURE_KINDS:
                self.failures_total.labels(stage, kind)
        for reason in HALT_REASONS:
            self.halted.labels(reason)
