"""Each promise, broken once by hand: the checker must notice."""

from __future__ import annotations

import base64
import json

import pytest
from awscrt.checksums import crc64nvme

from tests.support.simulation.checker import COLD, BucketPlace, Checker, Id, Policy

NEW, OLD = Id("run", 1, 20), Id("run", 1, 10)


class Tiers:
    """A hot and a cold tier with the same two checkpoints, whose files a test changes."""

    def __init__(self) -> None:
        self.hot: dict[str, bytes] = {}
        self.cold: dict[str, bytes] = {}
        self.checker = Checker(Policy(hot_last=1, cold_last=2, cold_every=0))
        self.checker.add_place("node", BucketPlace(self.hot, ""))
        self.checker.add_place(COLD, BucketPlace(self.cold, ""))
        for sequence, checkpoint in enumerate([OLD, NEW], start=1):
            for tier in (self.hot, self.cold):
                self.write(tier, checkpoint, sequence, b"%d" % checkpoint.step)
        self.look()
        self.checker.acknowledged = {OLD, NEW}
        assert self.checker.violation is None

    def write(self, tier: dict[str, bytes], checkpoint: Id, sequence: int, content: bytes) -> None:
        self.checker.snapshots[checkpoint] = [{"shard": content}]
        tier[f"{self.folder(checkpoint)}/shard"] = content
        checksum = base64.b64encode(crc64nvme(content).to_bytes(8, "big")).decode()
        entry = {"name": "shard", "size_bytes": len(content), "crc64nvme": checksum}
        manifest = json.dumps({"sequence": sequence, "files": [entry]})
        tier[f"{self.folder(checkpoint)}/manifest.json"] = manifest.encode()

    def folder(self, checkpoint: Id) -> str:
        return f"{checkpoint.run}/{checkpoint.step:012d}-g{checkpoint.generation:04d}"

    def delete(self, tier: dict[str, bytes], checkpoint: Id) -> None:
        for key in [key for key in tier if key.startswith(self.folder(checkpoint))]:
            del tier[key]

    def look(self) -> None:
        for place in ("node", COLD):
            self.checker.observe_bytes(place, 100.0)

    @property
    def kind(self) -> str:
        assert self.checker.violation is not None
        return self.checker.violation.kind


@pytest.fixture
def tiers() -> Tiers:
    return Tiers()


def test_eviction_of_what_cold_has_is_allowed(tiers: Tiers) -> None:
    tiers.delete(tiers.hot, OLD)
    tiers.look()
    assert tiers.checker.violation is None


def test_hot_must_keep_its_newest(tiers: Tiers) -> None:
    tiers.delete(tiers.hot, NEW)
    tiers.look()
    assert tiers.kind == "hot deleted what its policy keeps"


def test_cold_must_keep_what_its_policy_keeps(tiers: Tiers) -> None:
    tiers.delete(tiers.cold, OLD)
    tiers.look()
    assert tiers.kind == "cold deleted what its policy keeps"


def test_hot_must_keep_what_cold_does_not_have_yet(tiers: Tiers) -> None:
    del tiers.checker.committed[COLD][OLD]
    tiers.delete(tiers.cold, OLD)
    tiers.delete(tiers.hot, OLD)
    tiers.look()
    assert tiers.kind == "hot deleted a checkpoint before its cold copy"


def test_cold_must_keep_a_milestone_of_any_age(tiers: Tiers) -> None:
    for step, sequence in ((30, 3), (40, 4)):
        tiers.write(tiers.cold, Id("run", 1, step), sequence, b"%d" % step)
    tiers.look()
    tiers.checker.milestones = {OLD}
    tiers.delete(tiers.cold, NEW)
    tiers.look()
    assert tiers.checker.violation is None
    tiers.delete(tiers.cold, OLD)
    tiers.look()
    assert tiers.kind == "cold deleted what its policy keeps"


@pytest.mark.parametrize("seen_by", ["node", "other"])
def test_cold_must_keep_what_the_deleting_node_saw_to_be_a_milestone(tiers: Tiers, seen_by: str) -> None:
    for step, sequence in ((30, 3), (40, 4)):
        tiers.write(tiers.cold, Id("run", 1, step), sequence, b"%d" % step)
    tiers.look()
    prefix = f"{tiers.folder(OLD)}/"
    tiers.checker.looked(seen_by, prefix, [f"{prefix}milestone-best.json"], 50.0)
    tiers.delete(tiers.cold, OLD)
    tiers.checker.observe(COLD, 60.0, "node")
    assert (tiers.checker.violation is not None) == (seen_by == "node")


@pytest.mark.parametrize(
    ("is_shown", "known_s", "kind"),
    [
        (True, 100.0, "hot deleted the last whole replica"),
        (False, 50.0, "hot deleted the last whole replica on a stale decision"),
        (False, 100.0, None),
    ],
)
def test_hot_must_keep_what_is_known_to_be_damaged_in_cold(
    tiers: Tiers, is_shown: bool, known_s: float, kind: str | None
) -> None:
    shard = f"{tiers.folder(OLD)}/shard"
    tiers.checker.damaged[shard] = 10.0
    del tiers.cold[shard]
    tiers.checker.looked("node", f"{tiers.folder(OLD)}/", [] if is_shown else [shard], 20.0)
    tiers.checker.known_damaged["node", OLD] = known_s
    tiers.delete(tiers.hot, OLD)
    tiers.look()
    assert tiers.checker.violation is None if kind is None else tiers.kind == kind


def test_a_committed_file_must_not_change(tiers: Tiers) -> None:
    tiers.cold[f"{tiers.folder(OLD)}/shard"] = b"xx"
    tiers.look()
    assert tiers.kind == "a committed file was overwritten"


def test_a_committed_file_must_not_go(tiers: Tiers) -> None:
    del tiers.hot[f"{tiers.folder(OLD)}/shard"]
    tiers.look()
    assert tiers.kind == "a file of a committed checkpoint was deleted"


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (None, "a manifest without whole files"),
        (b"3", "a manifest without whole files"),
        (b"31", "a manifest of other bytes"),
    ],
)
def test_a_manifest_must_have_its_files(tiers: Tiers, content: bytes | None, kind: str) -> None:
    newer = Id("run", 1, 30)
    tiers.write(tiers.cold, newer, 3, b"30")
    key = f"{tiers.folder(newer)}/shard"
    if content is None:
        del tiers.cold[key]
    else:
        tiers.cold[key] = content
    tiers.look()
    assert tiers.kind == kind


def test_only_snapshots_may_be_committed(tiers: Tiers) -> None:
    newer = Id("run", 1, 30)
    tiers.write(tiers.hot, newer, 3, b"30")
    tiers.checker.snapshots[newer] = [{"shard": b"31"}]
    tiers.look()
    assert tiers.kind == "a commit of bytes that were no snapshot"


@pytest.mark.parametrize(("honours_conditions", "began_s"), [(True, 1.5), (True, 3.0), (False, 3.0)])
def test_a_generation_has_one_trainer(tiers: Tiers, honours_conditions: bool, began_s: float) -> None:
    tiers.checker.honours_conditions = honours_conditions
    tiers.checker.claim("run", 2, "first", began_s=1.0, ended_s=2.0)
    tiers.checker.claim("run", 2, "first", began_s=2.5, ended_s=2.6)
    tiers.checker.claim("run", 3, "second", began_s=2.5, ended_s=2.6)
    assert tiers.checker.violation is None
    tiers.checker.claim("run", 2, "second", began_s=began_s, ended_s=began_s + 1.0)
    assert tiers.kind == "a generation was claimed twice"


def test_claims_at_once_may_agree_where_the_bucket_ignores_conditions(tiers: Tiers) -> None:
    tiers.checker.honours_conditions = False
    tiers.checker.claim("run", 2, "first", began_s=1.0, ended_s=2.0)
    tiers.checker.claim("run", 2, "second", began_s=1.5, ended_s=2.5)
    assert tiers.checker.violation is None


def test_persisted_is_said_only_of_committed_bytes(tiers: Tiers) -> None:
    tiers.checker.told("hot", "node", NEW, {"shard": b"20"})
    assert tiers.checker.violation is None
    tiers.checker.told("hot", "node", NEW, {"shard": b"21"})
    assert tiers.kind == "Persisted was said of other bytes"


def test_persisted_is_said_only_after_a_commit(tiers: Tiers) -> None:
    tiers.checker.told("hot", "node", Id("run", 1, 30), {"shard": b"30"})
    assert tiers.kind == "Persisted was said and nothing was committed"


def test_a_restore_gives_the_newest_that_can_be_reached(tiers: Tiers) -> None:
    assert tiers.checker.newest_reachable("run", "node") == NEW
    tiers.checker.restored("run", "node", NEW, {"shard": b"20"}, NEW)
    assert tiers.checker.violation is None
    tiers.checker.restored("run", "node", OLD, {"shard": b"10"}, NEW)
    assert tiers.kind == "a restore gave an older checkpoint"


def test_a_restore_finds_what_can_be_reached(tiers: Tiers) -> None:
    tiers.checker.restored("run", "node", None, {}, NEW)
    assert tiers.kind == "a restore found nothing"


def test_a_restore_gives_the_bytes_of_the_snapshot(tiers: Tiers) -> None:
    tiers.checker.restored("run", "node", NEW, {"shard": b"21"}, None)
    assert tiers.kind == "a restore gave other bytes"


def test_what_a_daemon_deleted_is_not_reported_as_lost(tiers: Tiers) -> None:
    tiers.delete(tiers.cold, OLD)
    tiers.look()
    tiers.checker.violation = None
    tiers.checker.reported_lost(f"list cold: {tiers.folder(OLD)} disappeared")
    assert tiers.kind == "what a daemon has deleted was reported as a loss"


@pytest.mark.parametrize("named", [[OLD], [OLD, NEW]])
def test_a_deletion_that_a_kill_interrupted_may_be_reported_as_a_loss(tiers: Tiers, named: list[Id]) -> None:
    del tiers.cold[f"{tiers.folder(OLD)}/manifest.json"]
    tiers.look()
    tiers.checker.violation = None
    tiers.checker.reported_lost(f"list cold: {', '.join(map(tiers.folder, named))} disappeared")
    assert (tiers.checker.violation is None) == (named == [OLD])


def test_cold_has_what_it_keeps_in_the_end(tiers: Tiers) -> None:
    tiers.checker.check_settled(["node"])
    assert tiers.kind == "hot keeps too much"
    tiers = Tiers()
    del tiers.checker.committed["node"][OLD]
    tiers.checker.check_settled(["node"])
    assert tiers.checker.violation is None
    del tiers.checker.committed[COLD][NEW]
    tiers.checker.check_settled(["node"])
    assert tiers.kind == "cold lacks what it keeps"
