"""A node's part has a copy on its partner: a node and its disk may be lost, and the training goes on from there.

Names are those of rows of the table in docs/RELIABILITY.md, "When a node fails". In every test one node sends almost
nothing to cold, so that no checkpoint of the last steps becomes whole there.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from tests.e2e.test_nodes_peers import PEERS, left_behind, peers
from tests.e2e.test_nodes_restore import hold_cold, restart, save
from tests.support.cli import flip_a_bit
from tests.support.daemon import Daemon
from tests.support.nodes import connect_on
from tests.support.trainer import Trainer, Training, joined, together
from tests.support.waiting import wait_until


def lose(daemon: Daemon) -> None:
    """The node dies with its disk."""
    daemon.kill()
    shutil.rmtree(daemon.hot)


def safe(trainers: Sequence[Trainer]) -> list[str]:
    """One more step, durable on every node and copied. The digests of the ranks."""
    digests = save(trainers)
    together(trainers, "wait_everywhere")
    return digests


def doctor(daemon: Daemon) -> list[str]:
    """What `tierd doctor` says there of reading between nodes."""
    return [line for line in daemon.tierd("doctor").stdout.splitlines() if line.split()[1] == "peers"]


def copies(daemon: Daemon) -> list[int]:
    """The steps of the copies that the node keeps."""
    found = (daemon.hot / ".peers" / "run").glob("*/node-*.json")
    return sorted(int(path.parent.name.partition("-")[0]) for path in found)


def assert_restored(
    daemons: Sequence[Daemon], digests: list[str], *, tier: str = "", tiers: Sequence[str] = ()
) -> None:
    """New trainers go on at step 1 with the same state. `tier`: from there; `tiers`: each from there; else from any."""
    with joined(daemons[0].root, 4, seed=2) as trainers:
        connect_on(daemons, trainers)
        found = together(trainers, "restore")
        assert [each.step for each in found] == [1] * 4
        assert not tier or {each.tier for each in found} == {tier}
        assert not tiers or [each.tier for each in found] == list(tiers)
        assert together(trainers, "digest") == digests


@pytest.mark.usefixtures("checkpoints_examined")
def test_a_node_persisted_and_copied_and_a_spare_comes(tmp_path: Path) -> None:
    with peers(tmp_path, "a", "b", "spare", tls=True) as (first, second, spare):
        with joined(tmp_path, 4) as trainers:
            connect_on([first, second], trainers)
            together(trainers, "restore")
            hold_cold(second)
            safe(trainers)
            digests = safe(trainers)
            copied = first.status()["runs"][0]["nodes"]["copied"]
            assert (copied["step"], copied["ranks"]) == (2, [2, 3])
            assert {line.split()[0] for line in doctor(first)} == {"ok", "WARNING"}  # 127.0.0.1 is no other node
            assert any("accepts connections with TLS" in line for line in doctor(first))
        lose(second)
        assert any(
            line.startswith("PROBLEM") and "cannot be read: connection refused" in line for line in doctor(first)
        )
        with joined(tmp_path, 4, seed=2) as trainers:
            connect_on([first, spare], trainers)
            found = together(trainers, "restore")
            assert [(each.step, each.tier) for each in found] == [(2, "memory")] * 2 + [(2, "peer")] * 2
            assert together(trainers, "digest") == digests
            assert not list((tmp_path / "cold" / "run").glob("*/manifest.json"))  # cold had nothing whole
            safe(trainers)
            wait_until(lambda: copies(first)[-1:] == copies(spare)[-1:] == [3], "copies of the new generation")
        assert not left_behind([first, spare])


def test_a_node_staging(tmp_path: Path) -> None:
    """It dies while its ranks copy their state. The others have sealed nothing: they have the step before in memory."""
    with peers(tmp_path, "a", "b", "spare") as (first, second, spare):
        with joined(tmp_path, 4) as trainers:
            connect_on([first, second], trainers)
            together(trainers, "restore")
            hold_cold(second)
            digests = safe(trainers)
            together(trainers, "train", 1)
            trainers[3].apply(_stage_for_ever, began := tmp_path / "began")
            for trainer in trainers:
                trainer.begin("snapshot")
            wait_until(began.exists, "the last rank to stage")
        lose(second)
        assert_restored([first, spare], digests, tiers=["memory"] * 2 + ["peer"] * 2)


def _stage_for_ever(training: Training, began: Path) -> None:
    def stage(*_: object) -> NoReturn:
        began.touch()
        while True:
            time.sleep(1.0)

    training.client._snapshotter._stager.begin = stage


def test_a_node_just_sealed(tmp_path: Path) -> None:
    """It dies when its snapshot is in its memory only. The others have persisted theirs: the step before is in hot."""
    with peers(tmp_path, "a", "b", "spare") as (first, second, spare):
        with joined(tmp_path, 4) as trainers:
            connect_on([first, second], trainers)
            together(trainers, "restore")
            hold_cold(second)
            digests = safe(trainers)
            (second.hot / "run" / "000000000002-g0001").write_text("")  # a file where the folder of its part would be
            together(trainers, "train", 1)
            together(trainers, "snapshot")
            trainers[0].wait_persisted()
            wait_until(lambda: "persist" in {each["stage"] for each in second.status()["failures"]}, "an attempt")
        lose(second)
        assert_restored([first, spare], digests, tiers=["hot"] * 2 + ["peer"] * 2)


@pytest.mark.long
def test_a_node_in_the_middle_of_its_upload(tmp_path: Path) -> None:
    """Its partner sends the rest, some minutes later, and the checkpoint is committed."""
    with peers(tmp_path, "a", "b") as (first, second):
        with joined(tmp_path, 4) as trainers:
            connect_on([first, second], trainers)
            together(trainers, "restore")
            hold_cold(second)  # which lets one of two files pass
            digests = safe(trainers)
        lose(second)
        manifest = tmp_path / "cold" / "run" / "000000000001-g0001" / "manifest.json"
        wait_until(manifest.exists, "the commit", 300.0)
        lose(first)
        first.start()
        assert_restored([first], digests, tier="cold")


@pytest.mark.long
def test_home_is_the_node_that_is_lost(tmp_path: Path) -> None:
    with peers(tmp_path, "a", "b", "spare") as (first, second, spare):
        with joined(tmp_path, 4) as trainers:
            connect_on([first, second], trainers)
            together(trainers, "restore")
            hold_cold(second)
            digests = safe(trainers)
        lose(first)
        assert_restored([spare, second], digests)


@pytest.mark.long
def test_a_node_persisted_and_not_copied(tmp_path: Path) -> None:
    """The step before is restored, which all have."""
    with peers(tmp_path, "a", "b", "spare") as (first, second, spare):
        with joined(tmp_path, 4) as trainers:
            connect_on([first, second], trainers)
            together(trainers, "restore")
            hold_cold(second)
            digests = safe(trainers)
            for step in (2, 3, 4):  # a file where a folder would be: nothing can be copied there
                (first.hot / ".peers" / "run" / f"{step:012d}-g0001").write_text("")
                save(trainers)
            assert copies(first) == [1]
        lose(second)
        assert_restored([first, spare], digests)


@pytest.mark.long
def test_both_of_a_pair(tmp_path: Path) -> None:
    """The newest in cold is restored."""
    names = ["a", "b", "c", "d", "e", "f"]
    with peers(tmp_path, *names) as (*four, fifth, sixth):
        with joined(tmp_path, 4) as trainers:
            connect_on(four, trainers)
            together(trainers, "restore")
            hold_cold(four[1])  # which lets one file pass
            digests = save(trainers, in_cold=True)
            safe(trainers)
        lose(four[1])
        lose(four[3])
        assert_restored([four[0], fifth, four[2], sixth], digests, tier="cold")


@pytest.mark.long
def test_a_whole_domain(tmp_path: Path) -> None:
    """Every partner is in another one, so that the copies are there."""
    names = ["a", "b", "c", "d", "e", "f"]
    with peers(tmp_path, *names) as (*four, fifth, sixth):
        for daemon, rack in zip(four, ("one", "one", "two", "two"), strict=True):
            daemon.config.write_text(daemon.config.read_text().replace(PEERS, f'{PEERS}\ndomain = "{rack}"'))
            daemon.kill()
            daemon.start()
        with joined(tmp_path, 4) as trainers:
            connect_on(four, trainers)
            together(trainers, "restore")
            hold_cold(four[1])
            digests = safe(trainers)
        lose(four[0])
        lose(four[1])
        assert_restored([fifth, sixth, *four[2:]], digests)


@pytest.mark.long
def test_a_damaged_part_is_read_from_its_copy(tmp_path: Path) -> None:
    with peers(tmp_path, "a", "b") as (first, second):
        with joined(tmp_path, 4) as trainers:
            connect_on([first, second], trainers)
            together(trainers, "restore")
            hold_cold(second)
            digests = safe(trainers)
        restart([first, second])
        (shard,) = (second.hot / "run").glob("*/rank-00002-*")
        flip_a_bit(shard)
        assert_restored([first, second], digests)


@pytest.mark.long
def test_copies_are_deleted_when_no_restart_needs_them(tmp_path: Path) -> None:
    with peers(tmp_path) as (first, second), joined(tmp_path, 4) as trainers:
        connect_on([first, second], trainers)
        together(trainers, "restore")
        for _ in range(6):
            safe(trainers)
        for daemon in (first, second):
            wait_until(lambda daemon=daemon: copies(daemon) and min(copies(daemon)) >= 5, "old copies are deleted")


@pytest.mark.long
@pytest.mark.usefixtures("checkpoints_examined")
def test_daemons_that_restart_after_the_last_snapshot_hold_up_no_wait_everywhere(tmp_path: Path) -> None:
    with peers(tmp_path) as daemons, joined(tmp_path, 4) as trainers:
        connect_on(daemons, trainers)
        together(trainers, "restore")
        hold_cold(daemons[1])
        safe(trainers)
        (daemons[0].hot / ".peers" / "run" / "000000000002-g0001").write_text("")  # no copy of step 2 for now
        save(trainers)
        (daemons[0].hot / ".peers" / "run" / "000000000002-g0001").unlink(missing_ok=True)
        restart(daemons)
        together(trainers, "wait_everywhere", timeout_s=100)
        assert copies(daemons[0])[-1:] == [2]


@pytest.mark.long
def test_daemon_without_peers_says_that_copies_are_left(tmp_path: Path) -> None:
    with peers(tmp_path) as daemons:
        with joined(tmp_path, 4) as trainers:
            connect_on(daemons, trainers)
            together(trainers, "restore")
            safe(trainers)
        daemons[0].config.write_text(daemons[0].config.read_text().replace(PEERS, ""))
        restart(daemons[:1])
        daemons[0].wait_log("copies of other nodes' parts are left in")


@pytest.mark.long
def test_node_that_lost_its_disk_is_copied_and_then_its_partner_dies(tmp_path: Path) -> None:
    """A chain of losses: the spare of a lost node is the only one that has the copy of the next lost node."""
    with peers(tmp_path, "a", "b", "c", "d") as (first, second, third, fourth):
        with joined(tmp_path, 4) as trainers:
            connect_on([first, second], trainers)
            together(trainers, "restore")
            hold_cold(second)
            safe(trainers)
        lose(second)
        with joined(tmp_path, 4, seed=2) as trainers:
            connect_on([first, third], trainers)
            assert [each.step for each in together(trainers, "restore")] == [1] * 4
            digests = safe(trainers)
        lose(first)
        with joined(tmp_path, 4, seed=3) as trainers:
            connect_on([fourth, third], trainers)
            assert [each.step for each in together(trainers, "restore")] == [2] * 4
            assert together(trainers, "digest") == digests
