"""The daemon is killed at each failpoint: what it acknowledged is there, nothing partial is listed, nothing remains.

The checker is tests/support/kills/audit.py, which reads the files without tierd's code. A failure names the kill.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from tests.e2e.test_nodes import OVER_NODES
from tests.e2e.test_sidecars import FOLLOWING
from tests.e2e.test_watch import WATCHING
from tests.e2e.test_watch_nodes import ANNOUNCING
from tests.support.bucket import Bucket
from tests.support.kills import shards
from tests.support.kills.audit import HOT, Audit, Folder, Policy
from tests.support.kills.battery import LIMITS, RUN, Battery, Kill, battery, shuffled
from tests.support.kills.daemon import JUMPING_CLOCK, KilledDaemon
from tests.support.kills.trainer import SIZE_BYTES, take_snapshots
from tests.support.processes import ForkedProcess
from tests.support.waiting import wait_until
from tierd.failpoints import FAILPOINTS

Group = list[Kill]
LISTINGS_DELAYED = 6
CONVERSATION = ("slot.", "snapshot.", "trainer.")


def each(name: str, *hits: int, anew: bool = False) -> list[Group]:
    return [[Kill(f"{name}@{hit}", anew=anew)] for hit in hits]


FIRST = [Kill("root.create@1")]  # while the folder of the cold tier does not exist
PERSISTING: list[Group] = [
    *each("run.claim", 1, anew=True),
    *each("run.claimed", 1, anew=True),
    *each("slot.map", 1, 3, 4),
    *each("slot.adopt", 1, 2),
    *each("slot.adopt", 2, anew=True),
    *each("snapshot.accept", 1, 2, 3),
    *each("snapshot.accepted", 1, 2, 4),
    *each("trainer.send", 1, 3, 5, 6, 9),
    *each("trainer.sent", 1, 4, 7, 8),
    *each("persist.begin", 1, 2),
    *each("persist.commit", 1, 2),
    *each("persist.committed", 1, 2),
    *each("persist.answer", 1, 2, 3),
    *each("folder.sync", 1, 3, 5),
    *each("file.created", 1, 2, 3, 4),
    *each("file.write", 1, 2, 5, 6, 9),
    *each("file.sync", 1, 2, 3, 4),
    *each("file.link", 1, 2, 3, 5),
    *each("file.linked", 1, 2, 3, 4),
    *each("file.sync_folder", 1, 2, 3),
    *each("file.done", 1, 2, 3, 6),
    *each("tier.mark", 1),
    *each("tier.commit", 1, 2, 3),
    *each("tier.committed", 1, 2),
    *each("reap.delete", 1, 2),
    *each("reap.deleted", 1, 2),
    *each("tier.delete", 1, 2),
    *each("delete.unlink", 1, 2, 3, 4),
    *each("delete.sync", 1, 2, 3),
    *each("delete.folder", 1, 2),
    *each("delete.folder_sync", 1),
    *each("trainer.answer", 1, 2),
    [Kill("persist.committed@1"), Kill("persist.repeat@1")],
    [Kill("tier.committed@1"), Kill("file.exists@1")],
    [Kill("file.write@3"), Kill("sweep.unlink@1")],
    [Kill("tier.commit@1", anew=True), Kill("recover.delete@1")],
    [Kill("file.sync=ENOSPC@1 file.abandon=kill@1")],
    [Kill("file.sync=ENOSPC@3 leftover.delete=kill@1")],
]
COPYING: list[Group] = [
    *each("cold.copy", 1, 2, 3),
    *each("cold.copied", 1, 2),
    *each("tier.commit", 2, 4),
    *each("tier.committed", 2, 4),
    *each("persist.answer", 2),
    *each("trainer.sent", 7, 10),
    *each("reap.delete", 2, 3),
]
TO_DIRECTORY: list[Group] = [
    *COPYING,
    *each("file.write", 7, 10),
    *each("file.sync", 5, 6, 11),
    *each("file.linked", 4, 5, 10),
    *each("file.sync_folder", 4, 5, 6),
    *each("delete.unlink", 5, 7),
    *each("delete.folder", 3),
]
TO_BUCKET: list[Group] = [
    *each("s3.put", 1, 2),
    *each("s3.create", 1, 2),
    *each("s3.part", 1, 2, 4, 6),
    *each("s3.part_sent", 1, 3, 4, 5),
    *each("s3.complete", 1, 2),
    *each("s3.completed", 1, 2),
    *each("s3.put_bytes", 1, 2),
    *each("s3.placed", 1, 2),
    *each("s3.delete", 1, 2),
    *each("s3.batch", 1, 2),
    [Kill("s3.part@2"), Kill("s3.abort@1")],
]
FETCHING: list[Group] = [
    [Kill(name, anew=True) for name in names.split()]
    for names in (
        "fetch.begin@1 fetch.write@1",
        "fetch.begin@2 fetch.sync@1",
        "fetch.write@3 fetch.sync@2",
        "fetch.write@5 fetch.rename@1",
        "fetch.rename@2 fetch.commit@1",
        "fetch.sync_folder@1 tier.commit@1",
        "fetch.sync_folder@2",
    )
]
"""In each group the hot disk is lost before the first kill, and the fetch continues after the others."""
REPAIRING = [Kill("repair.keep@1"), Kill("file.write@2"), Kill("file.rename@1")]
EXAMINING = [Kill("tier.diagnose@1")]


def one_each(groups: Sequence[Group]) -> list[Group]:
    """Of the hits of each failpoint one, and every sequence of kills: what the short run does. It takes the first hit
    and the last one in turns; of the conversation with the trainers the first, because each step repeats it."""
    by_name: dict[object, list[Group]] = {}
    for number, group in enumerate(groups):
        is_sequence = len(group) > 1 or "=" in group[0].failpoints
        name = number if is_sequence else (group[0].failpoints.partition("@")[0], group[0].anew)
        by_name.setdefault(name, []).append(group)
    return [
        hits[0 if number % 2 == 0 or hits[0][0].failpoints.startswith(CONVERSATION) else -1]
        for number, hits in enumerate(by_name.values())
    ]


def run_persisting(root: Path, seed: int, groups: Sequence[Group] = PERSISTING) -> int:
    kills = shuffled(groups, seed)
    # At a first start the write that fails is a claim. Then the trainer is refused, and nothing is written to clear up.
    begin = next(index for index, kill in enumerate(kills) if "ENOSPC" not in kill.failpoints)
    with battery(root) as to_kill:
        to_kill.run([*kills[begin:], *kills[:begin]])
        to_kill.settle()
        return to_kill.killed


def run_to_directory(root: Path, seed: int, groups: Sequence[Group] = TO_DIRECTORY) -> int:
    with battery(root, directory=True) as to_kill:
        to_kill.run([*FIRST, *shuffled(groups, seed)])
        to_kill.settle()
        return to_kill.killed


def run_to_bucket(root: Path, seed: int, bucket: Bucket, groups: Sequence[Group] = TO_BUCKET) -> int:
    def upload_twice() -> None:
        """Another unfinished upload of each object: only one can be continued."""
        with bucket.lock:
            bucket.uploads |= {f"{upload}-2": replace(begun) for upload, begun in bucket.uploads.items()}

    with battery(root, bucket=bucket) as to_kill:
        to_kill.before["s3.abort@1"] = upload_twice
        to_kill.run(shuffled(groups, seed))
        to_kill.settle()
        return to_kill.killed


def run_fetching(root: Path, seed: int) -> int:
    with battery(root, directory=True) as to_kill:
        serve_unarmed(to_kill, steps=3)
        to_kill.audit.is_hot_lost = True

        to_kill.before = {group[0].failpoints: lambda: shutil.rmtree(root / "hot") for group in FETCHING}
        to_kill.run(shuffled(FETCHING, seed))
        # An unfinished download stays for a day, so that a restore can continue it.
        for download in (root / "hot").rglob("*.partial"):
            download.unlink()
        to_kill.settle()
        return to_kill.killed


def serve_unarmed(to_kill: Battery, *, steps: int) -> None:
    to_kill.daemon.start_armed()
    to_kill.ranks.connect(to_kill.daemon.socket)
    for _ in range(steps):
        to_kill.ranks.step()
    to_kill.ranks.disconnect()
    to_kill.daemon.kill()
    to_kill.check("a kill of an idle daemon")


# The bounds of the four tests below are 80 kills together.


def test_a_daemon_killed_while_it_persists_or_deletes_loses_nothing(tmp_path: Path) -> None:
    killed = run_persisting(tmp_path, 0, one_each(PERSISTING))
    print(f"{killed} kills")
    assert killed >= 42


def test_a_daemon_killed_while_it_copies_to_a_directory_loses_nothing(tmp_path: Path) -> None:
    killed = run_to_directory(tmp_path, 0, one_each(TO_DIRECTORY))
    print(f"{killed} kills")
    assert killed >= 13


def test_a_daemon_killed_while_it_copies_to_a_bucket_loses_nothing(tmp_path: Path, served: Bucket) -> None:
    killed = run_to_bucket(tmp_path, 0, served, one_each(TO_BUCKET))
    print(f"{killed} kills")
    assert killed >= 12


def test_a_daemon_killed_while_it_fetches_loses_nothing(tmp_path: Path) -> None:
    killed = run_fetching(tmp_path, seed=0)
    print(f"{killed} kills")
    assert killed >= 13


@pytest.mark.long
def test_a_daemon_killed_while_it_marks_a_diagnosis_marks_it_after_its_restart(tmp_path: Path) -> None:
    # Checkpoints stay long enough to be examined.
    audit = Audit(RUN, Policy(hot_last=100), {HOT: Folder(tmp_path / "hot")}, (SIZE_BYTES,))
    daemon = KilledDaemon(tmp_path, cold="", more=LIMITS.format(examine="true") + audit.policy.lines)
    trainer = ForkedProcess(take_snapshots, daemon.socket, RUN, str(tmp_path / "notes"), 0.2)
    try:
        for kill in EXAMINING:
            daemon.start_armed(kill.armed)
            daemon.wait_killed()
            audit.observe(kill.failpoints)
        daemon.start_armed()
        wait_until(lambda: any("healthy.json" in key for key in audit.places[HOT].files()), "a diagnosis")
    finally:
        trainer.kill()
        trainer.wait()
        daemon.kill()
    audit.observe("the end")
    assert audit.problems == []


def test_a_daemon_killed_while_it_repairs_repairs_it_after_its_restart(tmp_path: Path) -> None:
    scrub = {"TIERD_SCRUB_INTERVAL_S": "0.1", "TIERD_SCRUB_DEEP_SHARE": "1", "TIERD_SCRUB_MAX_READ_MIB_S": "0"}
    with battery(tmp_path, directory=True, environ=scrub) as to_kill:
        serve_unarmed(to_kill, steps=2)
        shard = sorted((tmp_path / "hot").rglob("rank-00000*.safetensors"))[-1]
        whole = shard.read_bytes()
        shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        for kill in REPAIRING:
            to_kill.daemon.start_armed(kill.armed)
            to_kill.daemon.wait_killed()
            assert shard.read_bytes() != whole
        to_kill.daemon.start_armed()
        wait_until(lambda: shard.read_bytes() == whole, "the repair")
        to_kill.daemon.kill()
        to_kill.check("the repair")
        assert shards.decode(shard.read_bytes())


@pytest.mark.long
def test_sequences_continue_though_the_hot_disk_is_lost_with_the_daemon(tmp_path: Path, served: Bucket) -> None:
    """The ranks live on, and seal their next snapshot before the new daemon has listed the bucket."""
    with battery(tmp_path, bucket=served) as to_kill:
        serve_unarmed(to_kill, steps=3)
        shutil.rmtree(tmp_path / "hot")
        to_kill.audit.is_hot_lost = True
        listings = count()

        def delay_first_listings(operation: str, key: str) -> str:
            """By then the ranks have sealed; waits for later ones would only take time."""
            if operation == "list_objects_v2" and next(listings) < LISTINGS_DELAYED:
                time.sleep(0.5)
            return ""

        served.script = delay_first_listings
        serve_unarmed(to_kill, steps=2)


@pytest.mark.long
@pytest.mark.parametrize("hits", [(2,), (2, 7)], ids=len)
def test_a_clock_that_jumps_by_days_loses_nothing(tmp_path: Path, hits: tuple[int, ...]) -> None:
    with battery(tmp_path, directory=True, broken=JUMPING_CLOCK) as to_kill:
        names = ("cold.copy", "tier.committed", "reap.delete", "file.linked", "file.write", "delete.unlink")
        to_kill.run(shuffled([group for name in names for group in each(name, *hits)], seed=0))
        to_kill.settle()


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(1, 10))
def test_no_order_of_the_kills_loses_anything(tmp_path: Path, served: Bucket, seed: int) -> None:
    killed = run_persisting(tmp_path / "persisting", seed) + run_to_directory(tmp_path / "directory", seed)
    killed += run_to_bucket(tmp_path / "bucket", seed, served, [*TO_BUCKET, *COPYING])
    killed += run_fetching(tmp_path / "fetching", seed)
    print(f"seed {seed}: {killed} kills")


def test_each_failpoint_is_in_a_battery() -> None:
    to_cold = [*one_each(TO_DIRECTORY), *one_each(TO_BUCKET), *FETCHING]
    groups: Sequence[Sequence[Kill]] = [*one_each(PERSISTING), *to_cold, REPAIRING, EXAMINING, FIRST]
    armed = [entry for group in groups for kill in group for entry in kill.armed.split()]
    killed = [entry.partition("=")[0] for entry in armed if "=kill@" in entry]
    assert FAILPOINTS - set(killed) - set(OVER_NODES) - {*WATCHING, *ANNOUNCING, *FOLLOWING} == set()
    assert len(killed) >= 80


# ── daemons that are broken on purpose ──

MUTATIONS: list[tuple[str, bool, list[Kill], str]] = [
    ("acknowledges before the commit", False, [Kill("persist.commit@2")], "lost"),
    ("writes the manifest of a copy first", True, [Kill("file.sync@12")], "torn"),
    ("deletes shards before the manifest", False, [Kill("delete.unlink@2")], "torn"),
    ("recovers nothing", False, [Kill("file.write@2", anew=True), Kill("slot.map@1", anew=True)], "leftover"),
    ("forgets sequences", False, [Kill("persist.answer@3")], "sequence"),
    ("claims a generation in memory", False, [Kill("snapshot.accept@1"), Kill("slot.map@1", anew=True)], "claim"),
    ("evicts what hot keeps", False, [Kill("delete.folder_sync@1")], "lost"),
    ("writes under the final name", False, [Kill("file.write@8")], "torn"),
]
"""(what is broken, whether there is a cold tier, kills, the promise that the audit finds broken)."""


def run_all(to_kill: Battery, kills: list[Kill]) -> None:
    to_kill.run(kills)
    to_kill.settle(patience_s=2.0)


@pytest.mark.parametrize(("broken", "directory", "kills", "promise"), MUTATIONS, ids=[each[0] for each in MUTATIONS])
def test_a_broken_daemon_is_caught(
    tmp_path: Path, broken: str, directory: bool, kills: list[Kill], promise: str
) -> None:
    with battery(tmp_path, directory=directory, broken=broken) as to_kill:
        with pytest.raises(AssertionError):
            run_all(to_kill, kills)
        assert {problem.partition(":")[0] for problem in to_kill.audit.problems} == {promise}
