"""All metrics: name, labels, buckets and help. The only file that imports prometheus_client.

An attribute is the metric's name without `tierd_`: `metrics.persist_seconds.observe(0.3)`. The registry is injected,
one per daemon. Series with known labels exist at 0 from the start, so rate() and increase() also see the first
failure. A step number is never a label, and the number of runs with series is bounded: RUNS_MAX.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Collection, Iterable

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
from tierd.format.ids import HOT, MEMORY

# Runs that have series of their own: those with trainers or slots, then those with the newest checkpoint.
RUNS_MAX = 100
OTHER_RUNS = "(other)"  # no run can have this name; sums over the runs without series of their own
SNAPSHOT_OUTCOMES = ("persisted", "written_through", "skipped", "failed", "lost")
STAGES = (
    "stage",
    "persist",
    "copy",
    "replicate",
    "reap",
    "list",
    "restore",
    "wire",
    "examine",
    "scrub",
    "drill",
    "loop",
    "audit",
    "watch",
    "sidecar",
)
VERDICTS = ("healthy", "unhealthy", "failed")
FAILURE_KINDS = (
    "transient",
    "full",
    "given_up",
    "corrupt",
    "foreign",
    "lost",
    "stale",
    "tier_unreachable",
    "newer_format",
    "bug",
    "not_found",
    "bad_request",
    "unsupported",
    "target_not_empty",
    "lock_held",
)
WATCH_OUTCOMES = ("adopted", "missed", "refused")
GIVEN_UP_REASONS = ("replaced", "no_space")
HALT_REASONS = ("unreadable_manifest", "damaged_replica", "tier_unreachable", "shared_generation")
PROOFS = ("deep", "checksum", "size")
SLOT_STATES = ("free", "filling", "sealed", "persisting", "retained")
DIRECTIONS = ("read", "write")
PEER_DIRECTIONS = ("in", "out")

# From 1 ms to the longest wait for a slot (60 s); two cores copy a pre-faulted gigabyte in 0.06 s.
_STALL_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
# From megabytes on NVMe to terabytes over a slow link.
_TRANSFER_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)

# The _created series would double the number of series; no panel or alert uses them.
disable_created_metrics()


class Metrics:
    """All series of one daemon. `tiers`: the names of hot and of the cold tiers; their series begin at 0."""

    def __init__(self, registry: CollectorRegistry | None = None, *, tiers: Iterable[str] = (HOT,)) -> None:
        registry = CollectorRegistry() if registry is None else registry
        self.registry = registry
        ProcessCollector(registry=registry)
        counter = functools.partial(Counter, namespace="tierd", registry=registry)
        gauge = functools.partial(Gauge, namespace="tierd", registry=registry)
        histogram = functools.partial(Histogram, namespace="tierd", registry=registry)

        self.build_info = gauge("build_info", "Always 1. The labels have the versions.", ["version", "python"])
        self.snapshots_total = counter(
            "snapshots_total",
            "Snapshots by outcome: persisted (in hot); written_through (hot had no space: in cold only); skipped (no "
            "free slot); failed (not staged); lost (never durable).",
            ["run", "outcome"],
        )
        self.snapshot_stall_seconds = histogram(
            "snapshot_stall_seconds",
            "How long snapshot() delayed training, including waits for a slot and for other ranks; also if skipped.",
            buckets=_STALL_BUCKETS_S,
        )
        self.persist_seconds = histogram(
            "persist_seconds",
            "Time from the last rank's sealed snapshot to the commit in the hot tier.",
            buckets=_TRANSFER_BUCKETS_S,
        )
        self.replicate_seconds = histogram(
            "replicate_seconds",
            "Time to copy one checkpoint from the hot tier and commit it in a cold tier.",
            ["tier"],
            buckets=_TRANSFER_BUCKETS_S,
        )
        self.last_copy_timestamp_seconds = gauge(
            "last_copy_timestamp_seconds",
            "When the last copy was committed in the tier since the daemon's start (Unix time).",
            ["tier"],
        )
        self.copies_given_up_total = counter(
            "copies_given_up_total",
            "Checkpoints that hot deleted before they were copied to the tier: replaced (by newer ones, because copies "
            "are slower than snapshots); no_space (in hot).",
            ["tier", "reason"],
        )
        self.restore_seconds = histogram(
            "restore_seconds",
            "Time from a rank's request for a checkpoint to its verified bytes, by the tier that they came from.",
            ["tier"],
            buckets=_TRANSFER_BUCKETS_S,
        )
        self.bytes_total = counter(
            "bytes_total", "Bytes of checkpoints read from or written to the tier.", ["tier", "direction"]
        )
        self.last_committed_step = gauge(
            "last_committed_step",
            "Step of the newest checkpoint that the tier has whole.",
            ["run", "tier"],
        )
        self.last_committed_timestamp_seconds = gauge(
            "last_committed_timestamp_seconds",
            "Creation time of the newest checkpoint committed in the tier (Unix time).",
            ["run", "tier"],
        )
        self.everywhere_age_seconds = gauge(
            "everywhere_age_seconds",
            "Age of the newest checkpoint that all nodes of the run have persisted; no series where the run is on one "
            "node, or none is known.",
            ["run"],
        )
        self.commit_missing_ranks = gauge(
            "commit_missing_ranks",
            "Ranks whose parts of the oldest uncommitted checkpoint are not in the cold tier, as far as this node has "
            "listed it; no series where the run is on one node.",
            ["run", "tier"],
        )
        self.peer_lag_seconds = gauge(
            "peer_lag_seconds",
            "Age of the oldest checkpoint of which this node has its own part, but not yet the copy of its partner's; "
            "0 if there is none; no series where it keeps no copies.",
            ["run"],
        )
        self.peer_bytes_total = counter(
            "peer_bytes_total",
            "Bytes of parts of checkpoints that this node has read from other nodes (in) and sent to them (out).",
            ["direction"],
        )
        self.checkpoints = gauge(
            "checkpoints",
            "Checkpoints committed in the tier; in hot also parts of those over several nodes. Of more than "
            f"{RUNS_MAX} runs, the older ones are run={OTHER_RUNS}.",
            ["run", "tier"],
        )
        self.tier_used_bytes = gauge(
            "tier_used_bytes",
            "Size of the checkpoints committed in the tier; no series until it was listed.",
            ["tier"],
        )
        self.tier_free_bytes = gauge("tier_free_bytes", "Free space of the tier, if it is limited.", ["tier"])
        self.tier_room_bytes = gauge("tier_room_bytes", "Free space that hot needs for the next checkpoints.", ["tier"])
        self.pressure_evictions_total = counter(
            "pressure_evictions_total",
            "Replicas that hot evicted beyond its policy, because its disk was full and every cold tier had them.",
        )
        self.queue_checkpoints = gauge("queue_checkpoints", "Checkpoints that have not reached the tier yet.", ["tier"])
        self.queue_oldest_age_seconds = gauge(
            "queue_oldest_age_seconds",
            "Age of the oldest checkpoint that has not reached the tier yet; 0 if there is none. In hot: since the "
            "first snapshot after the newest durable one, also if newer ones have taken its place.",
            ["tier"],
        )
        self.run_state = gauge(
            "run_state",
            "1 for the state of a run: running, or how its trainers ended within the last day.",
            ["run", "state"],
        )
        self.run_pause_seconds = gauge(
            "run_pause_seconds",
            "Time since the attached trainers of a run last gave a sign: a step time, or a snapshot.",
            ["run"],
        )
        self.run_pause_limit_seconds = gauge(
            "run_pause_limit_seconds",
            "Trainers that pause for longer probably hang: 3 times the longest pause so far, at least 30 s.",
            ["run"],
        )
        self.slots = gauge("slots", "Slots of all ranks, by state.", ["state"])
        self.failures_total = counter(
            "failures_total",
            "Failed attempts, including those that were retried, by stage and kind of error.",
            ["stage", "kind"],
        )
        self.cold_requests_total = counter(
            "cold_requests_total",
            "Requests to a cold tier. code: the HTTP status, or the kind of error if there was no response.",
            ["tier", "op", "code"],
        )
        self.verify_failures_total = counter(
            "verify_failures_total", "Chunks or files that do not match their checksum.", ["tier"]
        )
        self.scrubbed_checkpoints_total = counter(
            "scrubbed_checkpoints_total",
            "Replicas scrubbed, by proof: deep (all bytes read); checksum (stored by the bucket); size (size only).",
            ["tier", "proof"],
        )
        self.damaged_checkpoints = gauge(
            "damaged_checkpoints", "Replicas that are known to be damaged and are not repaired yet.", ["tier"]
        )
        self.lost_checkpoints_total = counter(
            "lost_checkpoints_total",
            "Replicas that disappeared from the tier although its policy keeps them; tierd had not deleted them.",
            ["tier"],
        )
        self.repaired_files_total = counter(
            "repaired_files_total", "Damaged files that were replaced by valid ones from another tier.", ["tier"]
        )
        self.drill_restore_seconds = gauge(
            "drill_restore_seconds",
            "Duration of the last drill: restoring a checkpoint from the tier into scratch space.",
            ["tier"],
        )
        self.drill_newest_step_proven = gauge(
            "drill_newest_step_proven",
            "Step of the newest checkpoint that a drill has restored from the tier.",
            ["run", "tier"],
        )
        self.drill_last_success_timestamp_seconds = gauge(
            "drill_last_success_timestamp_seconds", "When a drill last succeeded (Unix time).", ["tier"]
        )
        self.watched_total = counter(
            "watched_total",
            "What became of checkpoints in watched folders: adopted; missed (deleted before they were adopted); "
            "refused (something was wrong; the status says what).",
            ["run", "outcome"],
        )
        self.watch_lag_seconds = gauge(
            "watch_lag_seconds",
            "How long the oldest complete checkpoint in the watched folder waits to be adopted; 0 if there is none.",
            ["run"],
        )
        self.sidecar_lag_seconds = gauge(
            "sidecar_lag_seconds",
            "How long the oldest change of a file of sidecars.keep waits to be in every tier; 0 if there is none.",
            ["run"],
        )
        self.sidecar_rewritten_total = counter(
            "sidecar_rewritten_total",
            "Files of sidecars.keep whose past has changed; the former content stays as a version of its own.",
            ["run"],
        )
        self.watch_problems = gauge(
            "watch_problems",
            "What keeps checkpoints in the watched folder from being adopted; the status says what.",
            ["run"],
        )
        self.examinations_total = counter(
            "examinations_total",
            "Checkpoints examined: healthy; unhealthy (NaN or Inf); failed (could not be read).",
            ["run", "verdict"],
        )
        self.unhealthy_checkpoints = gauge("unhealthy_checkpoints", "Unhealthy checkpoints in any tier.", ["run"])
        self.stale_snapshots_total = counter(
            "stale_snapshots_total", "Snapshots whose weights are bit-identical to those of an earlier step.", ["run"]
        )
        self.step_slowdown_ratio = gauge(
            "step_slowdown_ratio", "Slowdown of a trainer's steps compared with an idle daemon; 0.05 is 5 %.", ["run"]
        )
        self.write_limit_bytes_per_second = gauge(
            "write_limit_bytes_per_second",
            "Limit of the write rate to the tier while training steps are slower; no series without a limit.",
            ["tier"],
        )
        self.event_loop_lag_seconds = histogram(
            "event_loop_lag_seconds",
            "How late a timer of the daemon's event loop ran, four times a second: how long calls blocked the loop.",
            buckets=_STALL_BUCKETS_S,
        )
        self.event_loop_tasks = gauge("event_loop_tasks", "Tasks on the daemon's event loop.")
        self.foreign_checkpoints = gauge(
            "foreign_checkpoints",
            "Manifests and markers in the tier that no daemon of the run has signed or claimed; they do not count.",
            ["tier"],
        )
        self.newer_generations = gauge(
            "newer_generations",
            "Runs with trainers attached here of which a tier shows a newer generation, that another daemon has begun.",
        )
        self.fenced_total = counter(
            "fenced_total",
            "How often the trainers of a run here were told to end, because a later start has taken over.",
        )
        self.halted = gauge(
            "halted", "1 while nothing is deleted because something could not be read; the label says what.", ["reason"]
        )

        self.build_info.labels(__version__, platform.python_version()).set(1)
        self._begin_at_zero(tuple(tiers))

    def begin_run(self, run: str) -> None:
        """Create the series of a run at 0, unless they exist."""
        for outcome in SNAPSHOT_OUTCOMES:
            self.snapshots_total.labels(run, outcome)
        for verdict in VERDICTS:
            self.examinations_total.labels(run, verdict)
        self.stale_snapshots_total.labels(run)

    def begin_watch(self, run: str) -> None:
        """Create the series of a watched folder at 0."""
        for outcome in WATCH_OUTCOMES:
            self.watched_total.labels(run, outcome)
        self.watch_lag_seconds.labels(run)
        self.watch_problems.labels(run)

    def keep_runs(self, runs: Collection[str]) -> None:
        """Remove the series of all other runs, which would add up for ever. Gauges that are set at each scrape are
        cleared there."""
        of_runs = (self.snapshots_total, self.examinations_total, self.stale_snapshots_total)
        for metric in (*of_runs, self.drill_newest_step_proven):
            for family in list(metric.collect()):
                for sample in family.samples:
                    if sample.labels["run"] not in runs:
                        metric.remove(*sample.labels.values())

    @staticmethod
    def mean_s(histogram: Histogram) -> dict[str, tuple[float, int]]:
        """By its label, "" without one: the mean in seconds of what was observed since the daemon's start, and how
        often. Nothing where nothing was observed."""
        samples = [sample for family in histogram.collect() for sample in family.samples]
        sums, counts = (
            {"".join(sample.labels.values()): sample.value for sample in samples if sample.name.endswith(suffix)}
            for suffix in ("_sum", "_count")
        )
        return {label: (sums[label] / count, int(count)) for label, count in counts.items() if count}

    def render(self) -> tuple[bytes, str]:
        """The text exposition, and the value of the Content-Type header with its parameters."""
        return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4

    def _begin_at_zero(self, tiers: tuple[str, ...]) -> None:
        """Create the series of known labels. Not free bytes or the last commit: 0 would be false and cause an alert."""
        for tier in tiers:
            self.queue_checkpoints.labels(tier)
            self.queue_oldest_age_seconds.labels(tier)
            self.verify_failures_total.labels(tier)
            self.damaged_checkpoints.labels(tier)
            self.lost_checkpoints_total.labels(tier)
            self.foreign_checkpoints.labels(tier)
            self.repaired_files_total.labels(tier)
            for proof in PROOFS:
                self.scrubbed_checkpoints_total.labels(tier, proof)
            self.restore_seconds.labels(tier)
            if tier != HOT:
                self.replicate_seconds.labels(tier)
                for reason in GIVEN_UP_REASONS:
                    self.copies_given_up_total.labels(tier, reason)
            for direction in DIRECTIONS:
                self.bytes_total.labels(tier, direction)
        for direction in PEER_DIRECTIONS:
            self.peer_bytes_total.labels(direction)
        self.restore_seconds.labels(MEMORY)
        for state in SLOT_STATES:
            self.slots.labels(state)
        for stage in STAGES:
            for kind in FAILURE_KINDS:
                self.failures_total.labels(stage, kind)
        for reason in HALT_REASONS:
            self.halted.labels(reason)
