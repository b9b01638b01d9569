"""`tierd reap`: deletes in cold tiers alone, by the daemon's policy and with the daemon's guards."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path

import pytest

from tests.support.bucket import Begun, Bucket
from tests.support.cli import House, make_checkpoint, make_house
from tests.support.s3 import BUCKET
from tierd.audit import AuditTrail, TrailFiles
from tierd.format import layout
from tierd.format.audit import EventKind
from tierd.format.ids import Generation, Run
from tierd.format.signature import ED25519, Keyring, new_key

ONE = """
deletes = false
[lifecycle.hot]
keep_last = 1
[lifecycle.cold]
keep_last = 1
keep_every = 0
"""


@pytest.fixture
def house(tmp_path: Path) -> House:
    """Steps 100 to 400 in cold, of which its policy keeps one. The daemon's hot tier is not on this machine."""
    house = make_house(tmp_path, more=ONE)
    for number in range(1, 5):
        make_checkpoint(house.cold, step=number * 100, sequence=number)
    house.hot.rmdir()
    return house


def steps(root: Path, run: str = "run42") -> list[int]:
    return sorted(int(path.parent.name[:12]) for path in (root / run).glob("*/manifest.json"))


def claim(root: Path, generation: int) -> Path:
    path = root / layout.generation_key(Run("run42"), Generation(generation))
    path.write_text('{"format_version": 1}\n')
    return path


def test_reap_deletes_what_no_policy_keeps_and_says_why(house: House) -> None:
    result = house.tierd("reap")
    assert result.exit_code == 0, result.output
    assert steps(house.cold) == [400]
    rows = [line.split()[:4] for line in result.stdout.splitlines()[1:]]
    assert rows == [["expire", "cold", "run42", str(step)] for step in (100, 200, 300)]
    assert "no policy keeps it" in result.stdout
    left = {
        path.name
        for folder in (house.cold / "run42").iterdir()
        if "400" not in folder.name
        for path in folder.iterdir()
    }
    assert left == {"gone.json"}
    assert not house.hot.exists(), "it makes no hot directory"


def test_second_reap_has_nothing_to_do(house: House) -> None:
    house.tierd("reap")
    assert house.json("reap")["deletions"] == []


def test_dry_run_plans_the_same_and_deletes_nothing(house: House) -> None:
    planned = house.json("reap", "--dry-run")
    assert planned["is_dry_run"]
    assert steps(house.cold) == [100, 200, 300, 400]
    assert house.json("reap")["deletions"] == planned["deletions"]


def test_milestone_stays(tmp_path: Path) -> None:
    house = make_house(tmp_path, more=ONE)
    make_checkpoint(house.cold, step=100, sequence=1, milestones=("best",))
    make_checkpoint(house.cold, step=200, sequence=2)
    assert house.json("reap")["deletions"] == []


def test_only_the_named_run_is_reaped(house: House) -> None:
    for number in (1, 2):
        make_checkpoint(house.cold, run="other", step=number * 100, sequence=number)
    assert {each["run"] for each in house.json("reap", "--run", "other")["deletions"]} == {"other"}
    assert steps(house.cold) == [100, 200, 300, 400]
    assert steps(house.cold, "other") == [200]


def test_only_the_named_tier_is_reaped(tmp_path: Path) -> None:
    house = make_house(tmp_path, more=ONE + '[[cold]]\nname = "dr"\nurl = "file://dr"\n')
    (tmp_path / "dr").mkdir(mode=0o700)
    for number in (1, 2):
        make_checkpoint(house.cold, tmp_path / "dr", step=number * 100, sequence=number)
    assert [each["tier"] for each in house.json("reap", "--tier", "dr")["deletions"]] == ["dr"]
    assert (steps(house.cold), steps(tmp_path / "dr")) == ([100, 200], [200])


def test_what_hot_selects_stays_because_no_hot_tier_can_be_seen(house: House) -> None:
    house.config.write_text(
        house.config.read_text().replace("[lifecycle.hot]\nkeep_last = 1", "[lifecycle.hot]\nkeep_last = 3")
    )
    assert [each["step"] for each in house.json("reap")["deletions"]] == [100]


@pytest.mark.parametrize("name", ["hot", "absent"])
def test_a_tier_that_is_not_cold_is_refused(house: House, name: str) -> None:
    assert house.tierd("reap", "--tier", name).exit_code == 2


def test_nothing_is_deleted_while_another_cold_tier_cannot_be_listed(tmp_path: Path) -> None:
    house = make_house(tmp_path, more=ONE + '[[cold]]\nname = "dr"\nurl = "file://not-mounted"\n')
    for number in (1, 2):
        make_checkpoint(house.cold, step=number * 100, sequence=number)
    result = house.tierd("reap")
    assert result.exit_code == 3
    assert "not-mounted" in result.stderr
    assert steps(house.cold) == [100, 200]


def test_a_tier_that_is_not_mounted_ends_with_its_exit_code(tmp_path: Path) -> None:
    house = make_house(tmp_path, more=ONE)
    house.cold.rmdir()
    assert house.tierd("reap").exit_code == 14
    assert not house.cold.exists()


def test_unreadable_manifest_halts_the_deletions_of_its_run(house: House) -> None:
    (house.cold / "run42/000000000200-g0001/manifest.json").write_text("{")
    result = house.tierd("reap")
    assert result.exit_code == 3
    assert "deletion is halted" in result.stderr
    assert steps(house.cold) == [100, 200, 300, 400]


def test_without_a_key_a_generation_that_nobody_claimed_pushes_out_nothing(house: House) -> None:
    claim(house.cold, 1)
    make_checkpoint(house.cold, step=999_999, generation=2, sequence=9)
    house.tierd("reap")
    assert steps(house.cold) == [400, 999_999], "400 stays beside the newer one"
    claim(house.cold, 2)
    house.tierd("reap")
    assert 999_999 in steps(house.cold)


DAY_S = 86_400


def age(path: Path, days: float) -> None:
    then_s = time.time() - days * DAY_S
    for each in path.iterdir() if path.is_dir() else [path]:
        os.utime(each, (then_s, then_s))


def make_leftover(root: Path, step: int = 500, *, days: float = 8) -> Path:
    make_checkpoint(root, step=step, sequence=5)
    folder = root / f"run42/{step:012d}-g0001"
    (folder / "manifest.json").unlink()
    age(folder, days)
    return folder


@pytest.mark.parametrize(
    ("days", "generation", "claimed_days", "is_cleared"),
    [(8, 2, 8, True), (6, 2, 8, False), (8, 2, 6, False), (8, 1, 8, False)],
    ids=["old and replaced", "young", "just replaced", "of the newest generation"],
)
def test_leftovers_are_deleted_a_week_after_a_newer_generation_was_claimed(
    house: House, days: float, generation: int, claimed_days: float, is_cleared: bool
) -> None:
    """Until then, a daemon may continue the copy: also one of an older generation that was down for days."""
    folder = make_leftover(house.cold, days=days)
    age(claim(house.cold, generation), claimed_days)
    planned = house.json("reap", "--dry-run")["deletions"]
    assert (500 in [each["step"] for each in planned]) == is_cleared
    assert folder.exists()
    deleted = house.json("reap")["deletions"]
    assert deleted == planned
    assert bool(list(folder.glob("*"))) != is_cleared


@pytest.mark.parametrize(
    ("days", "left", "is_cleared"), [(2, "shards", True), (0.5, "shards", False), (2, "all", False)]
)
def test_a_tombstone_goes_after_a_day_and_takes_nothing_that_is_whole(
    house: House, days: float, left: str, *, is_cleared: bool
) -> None:
    """Daemons that may not delete wait for it before they send the checkpoint again. Whoever cannot delete must not
    have `tierd reap` delete it either, by a tombstone."""
    make_checkpoint(house.cold, step=500, sequence=5)
    folder = house.cold / "run42/000000000500-g0001"
    if left == "shards":
        (folder / "manifest.json").unlink()
    (folder / "gone.json").write_text('{"deleted":true}')
    age(folder, days)
    planned = house.json("reap", "--dry-run")["deletions"]
    assert (500 in [each["step"] for each in planned]) == is_cleared
    deleted = house.json("reap")["deletions"]
    assert deleted == planned
    assert bool(list(folder.glob("*"))) != is_cleared
    if left == "all":
        assert 500 in steps(house.cold)
        assert not (folder / "gone.json").exists()


@pytest.fixture
def bucket_house(tmp_path: Path, served: Bucket, house: House) -> House:
    """Steps 500 and 600 are leftovers in the bucket, of a generation that was replaced long ago."""
    url = f'url = "s3://{BUCKET}/deep"\nendpoint_url = "{served.url}"'
    house.config.write_text(house.config.read_text().replace('url = "file://cold"', url))
    for step in (500, 600):
        make_leftover(house.cold, step)
    claim(house.cold, 2)
    served.fill(house.cold, "deep")
    served.modified = dict.fromkeys(served.objects, datetime.now(UTC) - timedelta(days=8))
    return house


def leftovers(served: Bucket) -> set[int]:
    return {int(key.split("/")[2][:12]) for key in served.objects if key.endswith(".safetensors")} & {500, 600}


def test_a_copy_that_a_daemon_continues_during_the_pass_is_not_deleted(bucket_house: House, served: Bucket) -> None:
    def continue_copy(operation: str, key: str) -> str:
        if "000000000500" in key and operation.startswith("delete"):
            key = "deep/run42/000000000600-g0001/rank-00000-of-00002.safetensors"
            served.uploads["continued"] = Begun(key, datetime.now(UTC), "")
        return ""

    served.script = continue_copy
    assert 500 in [each["step"] for each in bucket_house.json("reap")["deletions"]]
    assert leftovers(served) == {600}


def test_a_retained_leftover_does_not_block_the_others(bucket_house: House, served: Bucket) -> None:
    key = next(key for key in served.objects if "000000000500" in key)
    served.locked[key] = datetime.now(UTC) + timedelta(days=30)
    report = bucket_house.json("reap")
    assert leftovers(served) == {500}
    assert ["retained by Object Lock" in message for message in report["retained"]] == [True]


def test_a_tier_that_fails_during_the_pass_gives_its_exit_code(bucket_house: House, served: Bucket) -> None:
    """The bucket answers its first listing only."""
    more = '[[cold]]\nname = "dr"\nurl = "file://dr"\n'
    bucket_house.config.write_text(bucket_house.config.read_text() + more)
    dr = bucket_house.root / "dr"
    dr.mkdir(mode=0o700)
    for number in range(1, 5):
        make_checkpoint(dr, step=number * 100, sequence=number)
    lists = count(1)
    served.script = lambda operation, key: "AccessDenied" if operation == "list_objects_v2" and next(lists) > 1 else ""
    result = bucket_house.tierd("reap")
    assert result.exit_code == 3, result.output
    assert "deletion is halted: tier_unreachable" in result.stderr
    assert steps(dr) == [100, 200, 300, 400], "an evicted replica counts on the other tier"


def test_two_reaps_at_once_end_well(house: House) -> None:
    processes = [house.start("reap", "--json") for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert steps(house.cold) == [400]
    named = {each["step"] for output, _ in outputs for each in json.loads(output)["deletions"]}
    assert named == {100, 200, 300}


def events_of(house: House, trail: Path) -> list[tuple[str, str, int | None]]:
    report = house.json("log", "--audit", "--trail", trail)
    return [(event["action"], event["by"], event.get("step")) for event in report["events"]]


def test_deletions_are_in_an_audit_trail_in_the_folder_that_was_named(house: House, tmp_path: Path) -> None:
    trail = tmp_path / "trail"
    assert house.tierd("reap", "--trail", trail).exit_code == 2, "there is no such folder"
    trail.mkdir(mode=0o700)
    age(claim(house.cold, 2), 8)
    make_leftover(house.cold)
    house.tierd("reap", "--trail", trail, "--dry-run")
    assert not list(trail.iterdir())
    assert house.tierd("reap", "--trail", trail).exit_code == 0
    assert events_of(house, trail) == [("expired", "command", step) for step in (100, 200, 300, 500)]


def test_deletions_are_in_the_audit_trail_of_the_node_where_there_is_one(house: House) -> None:
    house.hot.mkdir(mode=0o700)
    TrailFiles(house.hot, None, create=True).append(deque([AuditTrail().record(EventKind.STARTED)]))
    house.json("reap")
    assert events_of(house, house.hot)[1:] == [("expired", "command", step) for step in (100, 200, 300)]


def test_without_its_key_no_command_writes_beside_a_signed_trail(house: House) -> None:
    house.hot.mkdir(mode=0o700)
    keyring = Keyring([new_key()])
    TrailFiles(house.hot, keyring, create=True).append(deque([AuditTrail().record(EventKind.STARTED)]))
    for command in (["reap"], ["milestone", "--step", "100", "best"]):
        result = house.tierd(*command)
        assert (result.exit_code, "its audit trail is signed" in result.stderr) == (2, True)
    assert steps(house.cold) == [100, 200, 300, 400]
    assert not list(house.cold.rglob("milestone-*"))


def test_with_public_keys_alone_it_plans_and_deletes_nothing(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deletion of a checkpoint of several nodes begins with a tombstone, which is signed."""
    key = tmp_path / "public"
    key.write_text(new_key(ED25519).public_line)
    monkeypatch.setenv("TIERD_KEY_FILE", str(key))
    refused = house.tierd("reap")
    assert (refused.exit_code, "only public keys" in refused.stderr) == (2, True)
    assert house.tierd("reap", "--dry-run").exit_code == 0
