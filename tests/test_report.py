"""The report model, filled from a catalog."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from tests.support.cli import make_manifest
from tierd.catalog import Catalog
from tierd.format.ids import CheckpointId, checkpoint_id
from tierd.format.manifest import Manifest, file_entry
from tierd.report import age_s, checkpoint_rows, newest_report, run_report, tier_report

NONE: frozenset[str] = frozenset()
NOW = datetime.fromisoformat("2025-01-01T00:01:30+00:00")


def manifest_of(step: int, *, run: str = "run42", generation: int = 1) -> Manifest:
    files = [file_entry("rank-00000-of-00001.safetensors", 10, 4096, [step])]
    return make_manifest(checkpoint_id(run, step, generation), files)


A, B = manifest_of(100), manifest_of(200)


@pytest.fixture
def catalog() -> Catalog:
    return Catalog(["hot", "cold", "dr"])


def test_rows_are_newest_first_within_a_run_and_list_the_nearest_tier_first(catalog: Catalog) -> None:
    for tier in ("dr", "cold", "hot"):
        catalog.add(A, tier)
    catalog.add(manifest_of(50, run="another"), "cold", ["first"])
    rows = checkpoint_rows(catalog, in_memory=[B, A], health={B.id: False})
    assert [(row.run, row.step, row.tiers) for row in rows] == [
        ("another", 50, ["cold"]),
        ("run42", 200, ["memory"]),
        ("run42", 100, ["memory", "hot", "cold", "dr"]),
    ]
    assert (rows[0].milestone, rows[1].healthy, rows[2].healthy) == ("first", False, None)
    assert [row.step for row in checkpoint_rows(catalog, A.id.run, in_memory=[B, A])] == [200, 100]


def test_used_bytes_are_those_of_committed_checkpoints_and_unknown_before_the_first_listing(catalog: Catalog) -> None:
    assert tier_report(catalog, "hot", "file:///hot", None).used_bytes is None
    committed: dict[CheckpointId, tuple[Manifest, frozenset[str]]] = {A.id: (A, NONE), B.id: (B, NONE)}
    catalog.enter_listing("hot", committed, {}, since=catalog.changes, partial=[checkpoint_id("run42", 300, 1)])
    report = tier_report(catalog, "hot", "file:///hot", 7)
    assert (report.checkpoints, report.used_bytes, report.free_bytes, report.error) == (2, 20, 7, None)
    catalog.listing_failed("hot", "I/O error")
    report = tier_report(catalog, "hot", "file:///hot", None)
    assert (report.used_bytes, report.is_known, report.error) == (20, False, "I/O error")


def test_run_report_names_the_newest_healthy_checkpoint_of_each_tier(catalog: Catalog) -> None:
    for manifest in (A, B):
        catalog.add(manifest, "hot")
    catalog.diagnosed(B.id, "hot", is_healthy=False)
    report = run_report(catalog, A.id.run, NOW)
    assert {tier: newest and newest.step for tier, newest in report.tiers.items()} == {
        "hot": 100,
        "cold": None,
        "dr": None,
    }
    assert (report.unhealthy_steps, report.state) == ([200], None)


@pytest.mark.parametrize(
    ("created_at", "expected"),
    [
        ("2025-01-01T00:00:00+00:00", 90.0),
        ("2025-01-01T00:00:00", 90.0),
        ("2026-01-01T00:00:00+00:00", 0.0),
        ("some day", None),
    ],
)
def test_age_of_a_checkpoint_is_none_without_a_valid_time_and_never_negative(
    created_at: str, expected: float | None
) -> None:
    assert age_s(created_at, NOW) == expected
    assert newest_report(A.id, created_at, NOW + timedelta(seconds=0.04)).age_s == expected
