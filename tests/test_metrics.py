"""Metrics: names and labels as promised, series that exist before anything happens, an exposition that parses."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tierd import __version__
from tierd.memory.slot_states import SlotState
from tierd.metrics import Metrics

# The public surface, as docs and dashboards know it: name → (type, labels).
PROMISED = {
    "tierd_build_info": ("gauge", {"version", "python"}),
    "tierd_snapshots_total": ("counter", {"run", "outcome"}),
    "tierd_snapshot_stall_seconds": ("histogram", set[str]()),
    "tierd_persist_seconds": ("histogram", set[str]()),
    "tierd_replicate_seconds": ("histogram", {"tier"}),
    "tierd_restore_seconds": ("histogram", {"tier"}),
    "tierd_bytes_total": ("counter", {"tier", "direction"}),
    "tierd_last_committed_step": ("gauge", {"run", "tier"}),
    "tierd_last_committed_timestamp_seconds": ("gauge", {"run", "tier"}),
    "tierd_checkpoints": ("gauge", {"run", "tier"}),
    "tierd_tier_used_bytes": ("gauge", {"tier"}),
    "tierd_tier_free_bytes": ("gauge", {"tier"}),
    "tierd_queue_checkpoints": ("gauge", {"tier"}),
    "tierd_queue_oldest_age_seconds": ("gauge", {"tier"}),
    "tierd_slots": ("gauge", {"state"}),
    "tierd_failures_total": ("counter", {"stage", "kind"}),
    "tierd_cold_requests_total": ("counter", {"tier", "op", "code"}),
    "tierd_verify_failures_total": ("counter", {"tier"}),
    "tierd_scrubbed_checkpoints_total": ("counter", {"tier", "proof"}),
    "tierd_damaged_checkpoints": ("gauge", {"tier"}),
    "tierd_repaired_files_total": ("counter", {"tier"}),
    "tierd_drill_restore_seconds": ("gauge", {"tier"}),
    "tierd_drill_newest_step_proven": ("gauge", {"run", "tier"}),
    "tierd_drill_last_success_timestamp_seconds": ("gauge", {"tier"}),
    "tierd_examinations_total": ("counter", {"run", "verdict"}),
    "tierd_unhealthy_checkpoints": ("gauge", {"run"}),
    "tierd_stale_snapshots_total": ("counter", {"run"}),
    "tierd_step_slowdown_ratio": ("gauge", {"run"}),
    "tierd_write_limit_bytes_per_second": ("gauge", {"tier"}),
    "tierd_halted": ("gauge", {"reason"}),
}


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(CollectorRegistry(), tiers=("hot", "cold", "dr"))


def samples(metrics: Metrics) -> list[Sample]:
    body, _ = metrics.render()
    return [one for family in text_string_to_metric_families(body.decode()) for one in family.samples]


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def touch_every_series(metrics: Metrics) -> None:
    for name, (_, labels) in PROMISED.items():
        metric = getattr(metrics, name.removeprefix("tierd_"))
        if labels:
            metric.labels(**dict.fromkeys(labels, "x"))


def test_every_promised_metric_exists_with_exactly_its_labels_and_type(metrics: Metrics) -> None:
    touch_every_series(metrics)
    body, _ = metrics.render()
    families = {one.name: one for one in text_string_to_metric_families(body.decode())}
    ours = {name: family for name, family in families.items() if name.startswith("tierd_")}
    assert set(ours) == {name.removesuffix("_total") for name in PROMISED}
    for name, (kind, labels) in PROMISED.items():
        family = ours[name.removesuffix("_total")]
        assert family.type == kind, name
        found = {frozenset(one.labels) - {"le"} for one in family.samples}
        assert found == {frozenset(labels)}, name
        assert family.documentation.endswith("."), f"the help of {name} is a sentence"


def test_attribute_is_the_name_without_its_prefix(metrics: Metrics) -> None:
    for name in PROMISED:
        assert hasattr(metrics, name.removeprefix("tierd_")), name


def test_no_series_says_when_it_was_created(metrics: Metrics) -> None:
    touch_every_series(metrics)
    assert not [one.name for one in samples(metrics) if one.name.endswith("_created")]


def test_no_label_is_a_step(metrics: Metrics) -> None:
    touch_every_series(metrics)
    assert not [one for one in samples(metrics) if "step" in one.labels]


def test_two_daemons_in_one_process_share_nothing() -> None:
    one, other = Metrics(), Metrics()
    one.snapshots_total.labels("gpt", "persisted").inc()
    assert value(other, "tierd_snapshots_total", run="gpt", outcome="persisted") is None


def test_build_info_names_the_version(metrics: Metrics) -> None:
    found = next(one for one in samples(metrics) if one.name == "tierd_build_info")
    assert found.value == 1
    assert found.labels["version"] == __version__


def test_known_series_exist_at_zero_before_anything_happens(metrics: Metrics) -> None:
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


def test_what_is_unknown_has_no_series_rather_than_a_zero(metrics: Metrics) -> None:
    names = {one.name for one in samples(metrics)}
    assert "tierd_tier_free_bytes" not in names, "0 would read as a full disk"
    assert "tierd_last_committed_timestamp_seconds" not in names, "0 would read as a commit in 1970"


def test_series_of_a_run_begin_at_zero_and_beginning_again_changes_nothing(metrics: Metrics) -> None:
    metrics.begin_run("gpt")
    assert value(metrics, "tierd_snapshots_total", run="gpt", outcome="skipped") == 0
    metrics.snapshots_total.labels("gpt", "skipped").inc()
    metrics.begin_run("gpt")
    assert value(metrics, "tierd_snapshots_total", run="gpt", outcome="skipped") == 1


def test_process_metrics_are_there(metrics: Metrics) -> None:
    assert (value(metrics, "process_resident_memory_bytes") or 0) > 0
    assert (value(metrics, "process_open_fds") or 0) > 0


def test_exposition_is_the_text_format_that_every_prometheus_reads(metrics: Metrics) -> None:
    body, content_type = metrics.render()
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert body.endswith(b"\n")


def test_hostile_label_stays_one_escaped_label(metrics: Metrics) -> None:
    metrics.checkpoints.labels('a"b\\c\nd', "hot").set(2)
    found = [one for one in samples(metrics) if one.name == "tierd_checkpoints"]
    assert [(one.labels["run"], one.value) for one in found] == [('a"b\\c\nd', 2.0)]


@pytest.mark.parametrize("name", [name for name, (kind, _) in PROMISED.items() if kind == "histogram"])
def test_buckets_of_times_reach_from_tens_of_milliseconds_to_a_minute_and_more(metrics: Metrics, name: str) -> None:
    touch_every_series(metrics)
    bounds = {float(one.labels["le"]) for one in samples(metrics) if one.name == f"{name}_bucket"}
    finite = sorted(bound for bound in bounds if math.isfinite(bound))
    assert finite[0] <= 0.05
    assert finite[-1] >= 60
    assert max(later / earlier for earlier, later in pairwise(finite)) <= 5
