"""The catalog: listings that race with commits and deletions, and its answers."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from tests.support.cli import make_manifest
from tierd.catalog.catalog import Catalog
from tierd.format.ids import CheckpointId, checkpoint_id
from tierd.format.layout import manifest_key
from tierd.format.manifest import FileEntry, Manifest, file_entry
from tierd.status.report import foreign_sentences

NONE: frozenset[str] = frozenset()


def manifest_of(step: int, *, run: str = "run42", generation: int = 1, sequence: int = 1) -> Manifest:
    files: list[FileEntry] = [file_entry("rank-00000-of-00001.safetensors", 10, 4096, [step])]
    return make_manifest(checkpoint_id(run, step, generation), files, sequence=sequence)


A, B = manifest_of(100), manifest_of(200, sequence=2)


@pytest.fixture
def catalog() -> Catalog:
    return Catalog(["hot", "cold", "dr"])


def saw(catalog: Catalog, tier: str, *manifests: Manifest, since: int, **more: Any) -> None:
    unreadable: dict[CheckpointId, str] = more.pop("unreadable", {})
    catalog.enter_listing(tier, {one.id: (one, NONE) for one in manifests}, unreadable, since=since, **more)


def steps(catalog: Catalog, tier: str) -> list[int]:
    return [entry.id.step for entry in catalog.entries() if tier in entry.tiers]


# ── listings and changes at the same time ──


def test_checkpoint_committed_during_a_listing_is_not_forgotten(catalog: Catalog) -> None:
    since = catalog.changes
    catalog.add(A, "hot", ["best"])
    saw(catalog, "hot", since=since)  # it had been listed before the commit
    assert steps(catalog, "hot") == [100]
    saw(catalog, "hot", since=catalog.changes)  # a listing begun after the commit lacks it
    assert steps(catalog, "hot") == []


def test_checkpoint_deleted_during_a_listing_does_not_come_back(catalog: Catalog) -> None:
    catalog.add(A, "hot")
    since = catalog.changes
    catalog.drop(A.id, "hot")
    saw(catalog, "hot", A, since=since)
    assert catalog.get(A.id) is None
    saw(catalog, "hot", A, since=catalog.changes)  # someone put it there again
    assert steps(catalog, "hot") == [100]


def test_checkpoint_half_deleted_during_a_listing_is_not_damaged(catalog: Catalog) -> None:
    catalog.add(A, "hot")
    since = catalog.changes
    catalog.drop(A.id, "hot")
    saw(catalog, "hot", since=since, unreadable={A.id: "its shard is missing"})
    assert catalog.unreadable() == {}


def test_what_a_listing_of_one_run_found_is_not_forgotten_by_an_older_listing(catalog: Catalog) -> None:
    since = catalog.changes
    key, why = manifest_key(B.id), "its signature is wrong"
    catalog.enter_run("cold", {}, {A.id: "of a newer format"}, diagnoses={}, newer_format=[A.id], foreign={key: why})
    saw(catalog, "cold", since=since)
    assert catalog.foreign() == {("cold", key): why}
    assert catalog.tiers["cold"].newer_format == {A.id}
    before = catalog.changes
    catalog.enter_run("cold", {}, {}, diagnoses={}, newer_format=[], foreign={key: why})
    assert catalog.changes == before, "it was known"
    saw(catalog, "cold", since=catalog.changes)
    assert catalog.foreign() == {}
    assert catalog.tiers["cold"].newer_format == set()


def test_change_in_one_tier_does_not_affect_the_listing_of_another(catalog: Catalog) -> None:
    catalog.add(A, "hot")
    catalog.add(A, "cold")
    since = catalog.changes
    catalog.add(A, "cold")
    saw(catalog, "hot", since=since)
    assert steps(catalog, "hot") == []
    assert steps(catalog, "cold") == [100]


def test_milestone_marked_during_a_listing_stays(catalog: Catalog) -> None:
    catalog.add(A, "hot")
    since = catalog.changes
    catalog.add(A, "hot", ["best"])
    saw(catalog, "hot", A, since=since)
    entry = catalog.get(A.id)
    assert entry is not None
    assert entry.all_milestones == {"best"}


def test_listings_free_the_memory_of_deleted_checkpoints(catalog: Catalog) -> None:
    for step in range(1000):
        catalog.add(manifest_of(step), "hot")
        catalog.drop(checkpoint_id("run42", step, 1), "hot")
    saw(catalog, "hot", since=catalog.changes)
    assert not any(catalog._changed.values()), "memory must not grow over months"


# ── the moment ──


def test_moment_changes_with_every_change_and_only_then(catalog: Catalog) -> None:
    saw(catalog, "hot", A, since=catalog.changes)
    before = catalog.changes
    saw(catalog, "hot", A, since=catalog.changes)
    assert catalog.changes == before
    for change in (
        lambda: catalog.add(B, "hot"),
        lambda: catalog.drop(B.id, "hot"),
        lambda: catalog.listing_failed("hot", "disk gone"),
        lambda: saw(catalog, "hot", A, since=catalog.changes),
        lambda: saw(catalog, "hot", since=catalog.changes, unreadable={A.id: "torn"}),
    ):
        before = catalog.changes
        change()
        assert catalog.changes > before


# ── what is known ──


def test_tier_that_cannot_be_listed_keeps_its_entries_and_is_not_known(catalog: Catalog) -> None:
    assert not catalog.tiers["cold"].is_known
    saw(catalog, "cold", A, since=catalog.changes)
    catalog.listing_failed("cold", "403")
    assert steps(catalog, "cold") == [100]
    assert (catalog.tiers["cold"].is_known, catalog.tiers["cold"].error) == (False, "403")


def test_checkpoint_is_known_as_long_as_one_tier_has_it(catalog: Catalog) -> None:
    catalog.add(A, "hot", ["best"])
    catalog.add(A, "cold")
    catalog.drop(A.id, "hot")
    entry = catalog.get(A.id)
    assert entry is not None
    assert (entry.tiers, entry.all_milestones) == ({"cold"}, NONE)
    catalog.drop(A.id, "cold")
    catalog.drop(A.id, "dr")
    assert catalog.get(A.id) is None


def test_generation_is_never_forgotten(catalog: Catalog) -> None:
    catalog.saw_generation("run42", 7)  # pyright: ignore[reportArgumentType]
    catalog.add(A, "hot")
    catalog.drop(A.id, "hot")
    assert catalog.generation_max(A.id.run) == 7
    assert catalog.runs() == ["run42"]


def test_newest_is_the_newest_step_of_the_newest_generation(catalog: Catalog) -> None:
    catalog.add(manifest_of(900, sequence=9), "hot")
    catalog.add(manifest_of(500, generation=2, sequence=10), "hot")
    catalog.add(manifest_of(600, generation=2, sequence=11), "cold")
    run = A.id.run
    newest = {tier: catalog.newest(run, tier) for tier in ("hot", "cold", "dr")}
    assert {tier: one and one.step for tier, one in newest.items()} == {"hot": 500, "cold": 600, "dr": None}
    assert catalog.sequence_max(run) == 11
    assert [one.step for one in catalog.manifests_in("hot")] == [900, 500]


def test_views_have_times_and_metrics(catalog: Catalog) -> None:
    for manifest, created_at in ((A, "2026-03-01T01:00:00+02:00"), (B, "yesterday")):
        saw(catalog, "hot", msgspec.structs.replace(manifest, created_at=created_at), since=catalog.changes)
        (found,) = catalog.views()
        assert found.created_at == {A.id: datetime(2026, 2, 28, 23, tzinfo=UTC)}.get(manifest.id)
        assert found.metrics == {"loss": 2.5}


def test_foreign_claims_of_a_run_are_one_sentence(catalog: Catalog) -> None:
    """After a key was removed, every start from before is one."""
    cold = catalog.tiers["cold"]
    cold.foreign = {f"run/generation-{number:04d}.json": f"claim {number} is not signed" for number in range(7, 23)}
    cold.foreign |= {"other/generation-0003.json": "claim 3 is not signed", "run/000000000005-g0001/x": "not signed"}
    assert foreign_sentences(catalog) == [
        "cold: claim 3 is not signed",
        "cold: not signed",
        "cold: claim 7 is not signed; and 15 more claims of run, up to generation 22",
    ]
    assert foreign_sentences(catalog, lambda checkpoint: checkpoint.step != 5) == [
        "cold: claim 3 is not signed",
        "cold: claim 7 is not signed; and 15 more claims of run, up to generation 22",
    ]
