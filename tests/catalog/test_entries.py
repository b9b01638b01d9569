"""What a catalog keeps of its entries is what they say, after any order of changes, and is not made each time."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cli import make_manifest
from tests.support.config import make_config
from tests.support.policy import explain
from tierd.catalog.catalog import Catalog
from tierd.catalog.decisions import decisions, pending, to_reap, waiting
from tierd.catalog.entry import deleted_in, view_of
from tierd.config.sections import ColdConfig, ColdPolicy, Config, LifecycleConfig, TierPolicy
from tierd.format.ids import CheckpointId, Run, checkpoint_id
from tierd.format.manifest import Manifest, file_entry
from tierd.format.node_file import NodeFile, as_part
from tierd.lifecycle import policy
from tierd.lifecycle.policy import HOT, Action, CheckpointView

TIERS = (HOT, "cold", "dr")
RUNS = ("a", "b")
RULES = LifecycleConfig(hot=TierPolicy(keep_last=1), cold=ColdPolicy(keep_last=2, keep_every=3))


def config_of(**more: Any) -> Config:
    colds = tuple(ColdConfig(name=name, url=f"file:///nowhere/{name}", **more) for name in TIERS[1:])
    return make_config(Path("/nowhere"), cold=colds, lifecycle=RULES)


CONFIGS = config_of(), config_of(deletes=False)


def manifest_of(run: str, step: int, generation: int) -> Manifest:
    files = [file_entry("rank-00000-of-00001.safetensors", 10 + step, 4096, [step])]
    created_at = f"2026-01-01T00:{step:02d}:00+00:00"
    sequence = 10 * generation + step + 1
    return make_manifest(checkpoint_id(run, step, generation), files, sequence=sequence, created_at=created_at)


MANIFESTS = [manifest_of(run, step, generation) for run in RUNS for generation in (1, 2, 3) for step in range(4)]


class Changes:
    """Changes of a catalog as the workers and listings make them, by chance."""

    def __init__(self, seed: int) -> None:
        self.catalog, self.random = Catalog(TIERS), random.Random(seed)

    def make_one(self) -> None:
        change, manifest = self.random.choice(self._all()), self.random.choice(MANIFESTS)
        change(manifest, self.random.choice(TIERS))

    def _all(self) -> list[Any]:
        usual = self.add, self.add, self.add, self.diagnose, self.drop, self.disappear, self.damage, self.list_tier
        return [
            *usual,
            self.fail_listing,
            self.claim,
            self.write,
            self.bury,
            self.give_up_part,
            self.copy,
            self.forget,
        ]

    def add(self, manifest: Manifest, tier: str) -> None:
        is_part = tier == HOT and self.random.random() < 0.3
        names = self.random.sample(["best", "-best", "last"], self.random.randrange(3))
        self.catalog.add(as_part(manifest) if is_part else manifest, tier, names)

    def diagnose(self, manifest: Manifest, tier: str) -> None:
        self.catalog.diagnosed(manifest.id, tier, is_healthy=self.random.random() < 0.6)

    def drop(self, manifest: Manifest, tier: str) -> None:
        self.catalog.drop(manifest.id, tier)

    def disappear(self, manifest: Manifest, tier: str) -> None:
        self.catalog.disappeared(manifest.id, tier)

    def damage(self, manifest: Manifest, tier: str) -> None:
        self.catalog.damaged(manifest.id, tier, "chunk 1")

    def list_tier(self, manifest: Manifest, tier: str) -> None:
        listed = self.random.sample(MANIFESTS, self.random.randrange(len(MANIFESTS)))
        marks = [frozenset[str](), frozenset({"best"})]
        self.catalog.enter_listing(
            tier,
            {each.id: (each, self.random.choice(marks)) for each in listed},
            {manifest.id: "torn"} if manifest not in listed and self.random.random() < 0.3 else {},
            since=self.catalog.changes - self.random.randrange(3),
            diagnoses={each.id: self.random.random() < 0.5 for each in listed[::2]},
        )

    def fail_listing(self, _: Manifest, tier: str) -> None:
        self.catalog.listing_failed(tier, "503")

    def claim(self, manifest: Manifest, tier: str) -> None:
        self.catalog.claims.saw(manifest.id.run, [manifest.generation], tier, is_here=tier == HOT)

    def write(self, manifest: Manifest, _: str) -> None:
        if self.catalog.get(manifest.id) is not None:
            self.catalog.claims.wrote(manifest.id)

    def bury(self, manifest: Manifest, tier: str) -> None:
        self.catalog.saw_gone(tier, manifest.id, self.random.choice(["", None, manifest.save_digest]))

    def give_up_part(self, manifest: Manifest, tier: str) -> None:
        self.catalog.part_gone(tier, manifest.id)

    def copy(self, manifest: Manifest, tier: str) -> None:
        self.catalog.set_copying(tier, self.random.choice([manifest.id, None]))

    def forget(self, _: Manifest, tier: str) -> None:
        self.catalog.forget_missing(tier, ())


def in_hot(catalog: Catalog) -> dict[CheckpointId, bool]:
    """Of all checkpoints that are or were in a tier."""
    gone = {checkpoint: False for each in catalog.tiers.values() for checkpoint in each.missing}
    there = {entry.id: HOT in entry.tiers for entry in catalog.entries()}
    return gone | there | dict.fromkeys(catalog.tiers[HOT].unreadable, True)


def views_of(catalog: Catalog) -> list[CheckpointView]:
    """Made again."""
    doubts, sent = catalog.claims.doubts(in_hot(catalog)), catalog._sent_parts  # pyright: ignore[reportPrivateUsage]
    return [
        view_of(entry, doubts.get(entry.id, ""), deleted_in(entry, catalog.tiers, sent))
        for run in catalog.runs()
        for entry in reversed(catalog.entries(run))
    ]


def check(catalog: Catalog) -> None:
    views, entries = views_of(catalog), catalog.entries()
    assert catalog.views() == views
    assert [view for _, of_run in catalog.views_by_run() for view in of_run] == views
    newest_first = sorted(entries, key=lambda entry: entry.id.recency, reverse=True)
    assert entries == sorted(newest_first, key=lambda entry: entry.id.run)
    assert catalog.doubts() == catalog.claims.doubts(in_hot(catalog))
    shared = catalog.claims.shared_generations(in_hot(catalog))
    assert {checkpoint for _, checkpoint in catalog.shared_generations()} == shared.keys() & {
        each.id for each in entries
    }
    for tier in TIERS:
        there = [entry for entry in entries if tier in entry.tiers]
        assert catalog.in_tier(tier) == {entry.id: entry for entry in there}
        assert catalog.sizes(tier) == {entry.id: entry.held(tier).size_bytes for entry in there}
        assert catalog.used_bytes(tier) == sum(entry.held(tier).size_bytes for entry in there)
    for run in map(Run, RUNS):
        of_run = catalog.entries(run)
        assert catalog.newest_entry(run) == (of_run[0] if of_run else None)
        assert catalog.sequence_max(run) == max((entry.manifest.sequence for entry in of_run), default=0)
        assert catalog.unhealthy(run) == [entry.id for entry in reversed(of_run) if entry.healthy is False]
        parts = [entry for entry in of_run if entry.part is not None]
        assert catalog.parts(run) == [entry.part for entry in parts]
        assert catalog.newest_part(run) == next((each.part for each in parts if each.healthy is not False), None)
        healthy = [entry for entry in of_run if entry.healthy is not False]
        listed = {tier for tier in TIERS[1:] if catalog.tiers[tier].is_known}
        known = {tier for tier in listed if run not in {each.run for each in catalog.tiers[tier].unreadable}}
        assert catalog.known_cold(run) == known
        trusted = [each for each in healthy if each.tiers & known and each.id not in catalog.doubts()]
        assert catalog.newest_in_cold(run) == next((each.id for each in trusted), None)
        for tier in TIERS:
            whole = (each.manifest for each in healthy if tier in each.tiers and not each.is_part_in(tier))
            assert catalog.newest(run, tier) == next(whole, None)


def check_decisions(catalog: Catalog, config: Config) -> None:
    """What is remembered of a run is what would be decided now."""
    decided = decisions(catalog, config)
    assert decisions(catalog, config, with_kept=False) == [each for each in decided if each.action is not Action.KEEP]
    for entry in catalog.entries()[:2]:
        assert decisions(catalog, config, only=entry.id) == [each for each in decided if each.checkpoint == entry.id]
    copying = {cold.name: {copied} for cold in config.cold if (copied := catalog.copying(cold.name)) is not None}
    cold = {name: catalog.tiers[name].is_known for name in TIERS[1:]}
    copies = explain(views_of(catalog), config.lifecycle, cold=cold, hot_known=True, copying=copying)
    wanted = [each for each in copies if each.action in (Action.REPLICATE, Action.WAIT)]
    for name, checkpoints in waiting(catalog, config).items():
        assert set(checkpoints) <= {each.checkpoint for each in wanted if each.tier == name}
        assert set(pending(catalog, config, name)) <= set(checkpoints)
    to_reap(catalog, config)


@settings(max_examples=12)
@given(st.integers(0, 1 << 32))
def test_after_any_changes_what_is_kept_is_what_the_entries_say(seed: int) -> None:
    changes = Changes(seed)
    for _ in range(60):
        changes.make_one()
        if changes.random.random() < 0.4:  # so that things are kept over one change and over several
            check(changes.catalog)
            check_decisions(changes.catalog, changes.random.choice(CONFIGS))


def decided_of(catalog: Catalog) -> list[object]:
    """All that is decided."""
    config = CONFIGS[0]
    copies = [pending(catalog, config, tier) for tier in TIERS[1:]]
    return [decisions(catalog, config), copies, waiting(catalog, config)]


@settings(max_examples=6)
@given(st.integers(0, 1 << 32))
def test_a_decision_changes_only_with_the_number_of_changes(seed: int) -> None:
    """The reaper plans again, and goes on with a plan, by this number."""
    changes = Changes(seed)
    catalog, decided = changes.catalog, decided_of(changes.catalog)
    for _ in range(40):
        before = catalog.changes
        changes.make_one()
        former, decided = decided, decided_of(catalog)
        assert decided == former or catalog.changes != before


def test_a_claim_that_changes_what_is_in_doubt_is_a_change() -> None:
    catalog = Catalog(TIERS)
    manifest = next(each for each in MANIFESTS if each.generation == 2)
    catalog.enter_listing("cold", {manifest.id: (manifest, frozenset())}, {}, since=catalog.changes)
    for generation, tier, doubted in ((1, HOT, [manifest.id]), (2, "cold", [])):
        before = catalog.changes
        catalog.claims.saw(manifest.id.run, [generation], tier, is_here=tier == HOT)
        assert list(catalog.doubts()) == doubted
        assert catalog.changes > before
        before = catalog.changes
        catalog.claims.saw(manifest.id.run, [generation], tier, is_here=tier == HOT)
        assert catalog.changes == before, "it was known"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_after_any_of_many_changes_what_is_kept_is_what_the_entries_say() -> None:
    for seed in range(1000):
        test_after_any_changes_what_is_kept_is_what_the_entries_say.hypothesis.inner_test(seed)  # type: ignore[attr-defined]


def test_what_has_not_changed_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Status and workers ask again and again; of one run that changes, the other ones are not judged again."""
    catalog, judged = Catalog(TIERS), list[Run]()
    for manifest in MANIFESTS:
        catalog.add(manifest, "cold")
    explain_run = policy.explain_run

    def count(views: list[CheckpointView], *args: Any, **options: Any) -> Any:
        judged.append(views[0].id.run)
        return explain_run(views, *args, **options)

    monkeypatch.setattr(policy, "explain_run", count)
    config = config_of()
    for _ in range(3):
        decisions(catalog, config, with_kept=False)
        waiting(catalog, config)
        pending(catalog, config, "cold")
    assert sorted(set(judged)) == ["a", "b"]
    count_before = len(judged)
    catalog.diagnosed(MANIFESTS[-1].id, "cold", is_healthy=True)
    decisions(catalog, config, with_kept=False)
    assert judged[count_before:] == ["b"]


def test_a_part_is_held_in_hot_and_counts_with_its_own_size() -> None:
    catalog, manifest = Catalog(TIERS), MANIFESTS[1]
    part = as_part(manifest)
    catalog.add(part, HOT)
    assert isinstance(catalog.manifests_in(HOT)[0], NodeFile)
    catalog.add(manifest, "cold")
    assert (catalog.used_bytes(HOT), catalog.used_bytes("cold")) == (part.size_bytes, manifest.size_bytes)
