"""Metrics: names, labels, initial series and the exposition."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tierd import __version__
from tierd.memory.slot import SlotState
from tierd.metrics import Metrics

# Used in docs and dashboards: name → (type, labels).
PUBLIC = {
    "tierd_build_info": ("gauge", {"version", "python"}),
    "tierd_snapshots_total": ("counter", {"run", "outcome"}),
    "tierd_snapshot_stall_seconds": ("histogram", set[str]()),
    "tierd_persist_seconds": ("histogram", set[str]()),
    "tierd_replicate_seconds": ("histogram", {"tier"}),
    "tierd_last_copy_timestamp_seconds": ("gauge", {"tier"}),
    "tierd_copies_given_up_total": ("counter", {"tier", "reason"}),
    "tierd_restore_seconds": ("histogram", {"tier"}),
    "tierd_bytes_total": ("counter", {"tier", "direction"}),
    "tierd_last_committed_step": ("gauge", {"run", "tier"}),
    "tierd_last_committed_timestamp_seconds": ("gauge", {"run", "tier"}),
    "tierd_everywhere_age_seconds": ("gauge", {"run"}),
    "tierd_peer_bytes_total": ("counter", {"direction"}),
    "tierd_peer_lag_seconds": ("gauge", {"run"}),
    "tierd_commit_missing_ranks": ("gauge", {"run", "tier"}),
    "tierd_checkpoints": ("gauge", {"run", "tier"}),
    "tierd_tier_used_bytes": ("gauge", {"tier"}),
    "tierd_tier_free_bytes": ("gauge", {"tier"}),
    "tierd_tier_room_bytes": ("gauge", {"tier"}),
    "tierd_pressure_evictions_total": ("counter", set[str]()),
    "tierd_queue_checkpoints": ("gauge", {"tier"}),
    "tierd_queue_oldest_age_seconds": ("gauge", {"tier"}),
    "tierd_run_state": ("gauge", {"run", "state"}),
    "tierd_run_pause_seconds": ("gauge", {"run"}),
    "tierd_run_pause_limit_seconds": ("gauge", {"run"}),
    "tierd_slots": ("gauge", {"state"}),
    "tierd_failures_total": ("counter", {"stage", "kind"}),
    "tierd_cold_requests_total": ("counter", {"tier", "op", "code"}),
    "tierd_verify_failures_total": ("counter", {"tier"}),
    "tierd_scrubbed_checkpoints_total": ("counter", {"tier", "proof"}),
    "tierd_damaged_checkpoints": ("gauge", {"tier"}),
    "tierd_repaired_files_total": ("counter", {"tier"}),
    "tierd_lost_checkpoints_total": ("counter", {"tier"}),
    "tierd_drill_restore_seconds": ("gauge", {"tier"}),
    "tierd_drill_newest_step_proven": ("gauge", {"run", "tier"}),
    "tierd_drill_last_success_timestamp_seconds": ("gauge", {"tier"}),
    "tierd_watched_total": ("counter", {"run", "outcome"}),
    "tierd_sidecar_lag_seconds": ("gauge", {"run"}),
    "tierd_sidecar_rewritten_total": ("counter", {"run"}),
    "tierd_watch_lag_seconds": ("gauge", {"run"}),
    "tierd_watch_problems": ("gauge", {"run"}),
    "tierd_examinations_total": ("counter", {"run", "verdict"}),
    "tierd_unhealthy_checkpoints": ("gauge", {"run"}),
    "tierd_stale_snapshots_total": ("counter", {"run"}),
    "tierd_step_slowdown_ratio": ("gauge", {"run"}),
    "tierd_write_limit_bytes_per_second": ("gauge", {"tier"}),
    "tierd_event_loop_lag_seconds": ("histogram", set[str]()),
    "tierd_event_loop_tasks": ("gauge", set[str]()),
    "tierd_foreign_checkpoints": ("gauge", {"tier"}),
    "tierd_newer_generations": ("gauge", set()),
    "tierd_fenced_total": ("counter", set()),
    "tierd_halted": ("gauge", {"reason"}),
}


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(CollectorRegistry(), tiers=("hot", "cold", "dr"))


def samples(metrics: Metrics) -> list[Sample]:
    body, _ = metrics.render()
    return [sample for family in text_string_to_metric_families(body.decode()) for sample in family.samples]


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def touch_every_series(metrics: Metrics) -> None:
    for name, (_, labels) in PUBLIC.items():
        metric = getattr(metrics, name.removeprefix("tierd_"))
        if labels:
            metric.labels(**dict.fromkeys(labels, "x"))


def test_every_public_metric_exists_with_its_labels_and_type(metrics: Metrics) -> None:
    touch_every_series(metrics)
    body, _ = metrics.render()
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    ours = {name: family for name, family in families.items() if name.startswith("tierd_")}
    assert set(ours) == {name.removesuffix("_total") for name in PUBLIC}
    for name, (kind, labels) in PUBLIC.items():
        family = ours[name.removesuffix("_total")]
        assert family.type == kind, name
        used = {frozenset(sample.labels) - {"le"} for sample in family.samples}
        assert used == {frozenset(labels)}, name
        assert family.documentation.endswith("."), f"the help of {name} is a sentence"


def test_an_attribute_is_the_name_without_its_prefix(metrics: Metrics) -> None:
    for name in PUBLIC:
        assert hasattr(metrics, name.removeprefix("tierd_")), name


def test_there_are_no_created_series(metrics: Metrics) -> None:
    touch_every_series(metrics)
    assert not [sample.name for sample in samples(metrics) if sample.name.endswith("_created")]


def test_no_label_is_a_step(metrics: Metrics) -> None:
    touch_every_series(metrics)
    assert not [sample for sample in samples(metrics) if "step" in sample.labels]


def test_two_daemons_in_one_process_share_no_series() -> None:
    first, second = Metrics(), Metrics()
    first.snapshots_total.labels("gpt", "persisted").inc()
    assert value(second, "tierd_snapshots_total", run="gpt", outcome="persisted") is None


def test_build_info_has_the_version(metrics: Metrics) -> None:
    build_info = next(sample for sample in samples(metrics) if sample.name == "tierd_build_info")
    assert build_info.value == 1
    assert build_info.labels["version"] == __version__


def test_series_with_known_labels_exist_at_zero(metrics: Metrics) -> None:
    for tier in ("hot", "cold", "dr"):
        assert value(metrics, "tierd_verify_failures_total", tier=tier) == 0
        assert value(metrics, "tierd_queue_checkpoints", tier=tier) == 0
        assert value(metrics, "tierd_bytes_total", tier=tier, direction="write") == 0
    for state in SlotState:
        assert value(metrics, "tierd_slots", state=state.value) == 0
    assert value(metrics, "tierd_failures_total", stage="persist", kind="full") == 0
    assert value(metrics, "tierd_halted", reason="unreadable_manifest") == 0
    assert value(metrics, "tierd_replicate_seconds_count", tier="cold") == 0
    assert value(metrics, "tierd_replicate_seconds_count", tier="hot") is None
    assert value(metrics, "tierd_copies_given_up_total", tier="cold", reason="no_space") == 0


def test_an_unknown_value_has_no_series(metrics: Metrics) -> None:
    names = {sample.name for sample in samples(metrics)}
    assert "tierd_tier_free_bytes" not in names, "0 would mean a full disk"
    assert "tierd_tier_used_bytes" not in names, "0 would mean an empty tier"
    assert "tierd_last_committed_timestamp_seconds" not in names, "0 would mean a commit in 1970"


def test_series_of_a_run_begin_at_zero_and_are_created_once(metrics: Metrics) -> None:
    metrics.begin_run("gpt")
    assert value(metrics, "tierd_snapshots_total", run="gpt", outcome="skipped") == 0
    metrics.snapshots_total.labels("gpt", "skipped").inc()
    metrics.begin_run("gpt")
    assert value(metrics, "tierd_snapshots_total", run="gpt", outcome="skipped") == 1


def test_series_of_runs_that_are_not_kept_are_removed(metrics: Metrics) -> None:
    for run in ("gpt", "old"):
        metrics.begin_run(run)
        metrics.drill_newest_step_proven.labels(run, "cold").set(7)
    metrics.snapshots_total.labels("gpt", "persisted").inc()
    metrics.keep_runs({"gpt"})
    assert value(metrics, "tierd_snapshots_total", run="gpt", outcome="persisted") == 1
    assert {sample.labels["run"] for sample in samples(metrics) if "run" in sample.labels} == {"gpt"}


def test_process_metrics_exist(metrics: Metrics) -> None:
    assert (value(metrics, "process_resident_memory_bytes") or 0) > 0
    assert (value(metrics, "process_open_fds") or 0) > 0


def test_the_exposition_is_the_prometheus_text_format(metrics: Metrics) -> None:
    body, content_type = metrics.render()
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert body.endswith(b"\n")


def test_special_characters_in_a_label_are_escaped(metrics: Metrics) -> None:
    metrics.checkpoints.labels('a"b\\c\nd', "hot").set(2)
    matching = [sample for sample in samples(metrics) if sample.name == "tierd_checkpoints"]
    assert [(sample.labels["run"], sample.value) for sample in matching] == [('a"b\\c\nd', 2.0)]


@pytest.mark.parametrize("name", [name for name, (kind, _) in PUBLIC.items() if kind == "histogram"])
def test_time_buckets_cover_50_ms_to_a_minute(metrics: Metrics, name: str) -> None:
    touch_every_series(metrics)
    bounds = {float(sample.labels["le"]) for sample in samples(metrics) if sample.name == f"{name}_bucket"}
    finite = sorted(bound for bound in bounds if math.isfinite(bound))
    assert finite[0] <= 0.05
    assert finite[-1] >= 60
    assert max(later / earlier for earlier, later in pairwise(finite)) <= 5
