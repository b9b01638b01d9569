"""The report model, filled from a catalog."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from msgspec import UNSET

from tests.support.cli import make_manifest
from tierd.catalog.catalog import Catalog
from tierd.catalog.decisions import missing_room_bytes
from tierd.format.ids import CheckpointId, checkpoint_id
from tierd.format.manifest import Head, Manifest, file_entry
from tierd.format.node_file import NodeFile
from tierd.status.alarm_rules import alarms
from tierd.status.checkpoint_report import checkpoint_rows
from tierd.status.node_reports import age_s, everywhere_report, newest_report
from tierd.status.report import StatusReport, run_report, tier_report, tiers_text

NONE: frozenset[str] = frozenset()
NOW = datetime.fromisoformat("2025-01-01T00:01:30+00:00")


def manifest_of(step: int, *, run: str = "run42", generation: int = 1) -> Manifest:
    files = [file_entry("rank-00000-of-00001.safetensors", 10, 4096, [step])]
    return make_manifest(checkpoint_id(run, step, generation), files)


def part_of(step: int) -> NodeFile:
    """Rank 0 of two ranks on two nodes."""
    files = [file_entry("rank-00000-of-00002.safetensors", 10, 4096, [step])]
    manifest = make_manifest(checkpoint_id("run42", step, 1), files)
    fields = {name: getattr(manifest, name) for name in Head.__struct_fields__} | {"world_size": 2}
    return NodeFile(**fields, files=files, claim="0" * 32, ranks=[0], is_healthy=None, milestone="")


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
    catalog.enter_listing("hot", committed, {}, since=catalog.changes, partial={checkpoint_id("run42", 300, 1): 0.0})
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
        ("2025-01-01T00:02:00+00:00", 0.0),
        ("2025-01-01T01:00:00+00:00", None),
        ("some day", None),
    ],
)
def test_age_of_a_checkpoint_is_not_known_without_a_valid_time_or_if_that_is_to_come(
    created_at: str, expected: float | None
) -> None:
    assert age_s(created_at, NOW) == expected
    assert newest_report(A.id, created_at, NOW + timedelta(seconds=0.04)).age_s == expected


def test_of_a_run_over_several_nodes_the_report_tells_parts_from_what_is_whole(catalog: Catalog) -> None:
    older, newer = part_of(100), part_of(200)
    catalog.add(older, "hot")
    catalog.add(newer, "hot")
    catalog.saw_everywhere(older.id)
    report = run_report(catalog, older.id.run, NOW)
    assert set(report.tiers.values()) == {None}
    assert report.nodes is not UNSET
    assert (str(report.nodes), report.nodes.parts["hot"].step) == ("ranks 0 of 2", 200)
    assert report.nodes.everywhere == newest_report(older.id, older.created_at, NOW)
    assert tier_report(catalog, "hot", "file:///hot", None).parts == 2
    rows = checkpoint_rows(catalog, in_memory=[newer])
    assert [(row.step, tiers_text(row.tiers, row.parts)) for row in rows] == [
        (200, "memory(part 1/2 ranks),hot(part 1/2 ranks)"),
        (100, "hot(part 1/2 ranks)"),
    ]


def test_age_of_what_all_nodes_have_stays_known_after_its_part_has_gone(catalog: Catalog) -> None:
    part = part_of(100)
    catalog.add(part, "hot")
    catalog.saw_everywhere(part.id)
    catalog.drop(part.id, "hot")
    everywhere = everywhere_report(catalog, part.id.run, NOW)
    assert everywhere is not None
    assert everywhere.age_s == 90.0
    catalog.saw_everywhere(checkpoint_id("run42", 300, 1))
    everywhere = everywhere_report(catalog, part.id.run, NOW)
    assert everywhere is not None
    assert (everywhere.step, everywhere.age_s) == (300, None)


def test_the_alarm_about_a_disk_almost_full_and_deletion_need_the_same_room(catalog: Catalog) -> None:
    """One large checkpoint among small ones: two of the mean would fit, two of the largest do not."""
    large = make_manifest(
        checkpoint_id("large", 1, 1), [file_entry("rank-00000-of-00001.safetensors", 1000, 4096, [1])]
    )
    for manifest in (A, B, large):
        catalog.add(manifest, "hot")
    for free_bytes in (1999, 2000):
        tiers = [tier_report(catalog, "hot", "file:///hot", free_bytes)]
        found = alarms(StatusReport(version="0", node="", pid=1, uptime_s=1.0, is_ready=True, tiers=tiers), NOW)
        is_missing = missing_room_bytes(catalog, free_bytes) > 0
        assert ["TierdDiskAlmostFull"] * is_missing == [alarm.alert for alarm in found], free_bytes
