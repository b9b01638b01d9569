"""Copies of parts, while daemons restart and disks are damaged."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.e2e.test_nodes_copies import copies, safe
from tests.e2e.test_nodes_peers import PEERS, peers
from tests.e2e.test_nodes_restore import hold_cold, restart, save
from tests.support.cli import flip_a_bit
from tests.support.nodes import connect_on
from tests.support.trainer import joined, together


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
        together(trainers, "wait_everywhere", timeout_s=20)
        assert copies(daemons[0])[-1:] == [2]


def test_part_that_is_damaged_on_its_node_is_read_from_its_copy(tmp_path: Path) -> None:
    with peers(tmp_path) as daemons:
        with joined(tmp_path, 4) as trainers:
            connect_on(daemons, trainers)
            together(trainers, "restore")
            hold_cold(daemons[1])
            safe(trainers)
            digests = safe(trainers)
        shard = next((daemons[1].hot / "run" / "000000000002-g0001").glob("rank-*"))
        shard.chmod(0o600)
        flip_a_bit(shard)
        restart(daemons)
        with joined(tmp_path, 4, seed=2) as trainers:
            connect_on(daemons, trainers)
            found = together(trainers, "restore")
            assert [each.step for each in found] == [2] * 4
            assert together(trainers, "digest") == digests


def test_daemon_without_peers_deletes_the_copies_that_nobody_can_use(tmp_path: Path) -> None:
    with peers(tmp_path) as daemons:
        with joined(tmp_path, 4) as trainers:
            connect_on(daemons, trainers)
            together(trainers, "restore")
            safe(trainers)
            assert copies(daemons[0]) == [1]
        daemons[0].config.write_text(daemons[0].config.read_text().replace(PEERS, ""))
        restart(daemons)
        status = daemons[0].log + str(daemons[0].status())
        assert copies(daemons[0]) == [] or ".peers" in status  # deleted, or told


def test_node_that_lost_its_disk_is_copied_and_then_its_partner_dies(tmp_path: Path) -> None:
    """A chain of losses: the spare of a lost node is the only one that has the copy of the next lost node."""
    with peers(tmp_path, "a", "b", "c", "d") as (first, second, third, fourth):
        with joined(tmp_path, 4) as trainers:
            connect_on([first, second], trainers)
            together(trainers, "restore")
            hold_cold(second)
            safe(trainers)
        second.kill()
        shutil.rmtree(second.hot)
        with joined(tmp_path, 4, seed=2) as trainers:
            connect_on([first, third], trainers)
            assert [each.step for each in together(trainers, "restore")] == [1] * 4
            digests = safe(trainers)
        first.kill()
        shutil.rmtree(first.hot)
        with joined(tmp_path, 4, seed=3) as trainers:
            connect_on([fourth, third], trainers)
            assert [each.step for each in together(trainers, "restore")] == [2] * 4
            assert together(trainers, "digest") == digests
