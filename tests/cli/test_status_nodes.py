"""`tierd status` shows all nodes of a run, also those that do not answer, within a bounded time."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.handmade_nodes import HandmadeNodes, handmade_nodes
from tests.support.waiting import wait_until
from tierd.cli.status_lines import print_roster
from tierd.format import wire
from tierd.format.peers import NodeAddress
from tierd.status.node_reports import NewestPart, NodeReport
from tierd.tiers.node_parts import ASK_S
from tierd.workers.roster_reader import REUSE_S


def roster(nodes: HandmadeNodes, at: int) -> list[Any]:
    (run,) = nodes.daemons[at].json("status")["runs"]
    return run["nodes"]["roster"]


def test_status_shows_every_node_and_what_it_lacks(tmp_path: Path) -> None:
    with handmade_nodes(tmp_path, 4) as nodes:
        nodes.save(1)
        found = roster(nodes, 1)
        assert [(each["ranks"], each["is_here"]) for each in found] == [
            ([0], False),
            ([1], True),
            ([2], False),
            ([3], False),
        ]
        assert [each["address"] for each in found] == [each.peer.address for each in nodes.addresses if each.peer]
        assert [each["persisted"]["step"] for each in found] == [each["copied"]["step"] for each in found] == [1] * 4
        assert not any(each["lacks_part"] or each["lacks_copy"] or each["problem"] for each in found)
        nodes.daemons[3].signal(signal.SIGSTOP)
        nodes.daemons[0].kill()
        nodes.seal(1, 2)
        wait_until((nodes.part(1, 2) / "node-00001-of-00004.json").exists, "the part")
        began_s = time.monotonic()
        printed = nodes.daemons[2].tierd("status").stdout  # which has asked nobody before
        assert time.monotonic() - began_s < ASK_S + REUSE_S + 6  # a busy machine
        lines = printed.splitlines()
        begin = next(i for i, line in enumerate(lines) if line.startswith("  nodes "))
        assert lines[begin] == "  nodes      2 of 4 answer"
        rows = [line.split() for line in lines[begin + 2 : begin + 6]]
        assert [row[:2] for row in rows] == [["0", "no"], ["1", "2"], ["2", "1"], ["3", "no"]]
        assert rows[2][-1] == "(here)"
        assert "  NO ANSWER from ranks 0: connection refused" in lines
        assert f"  NO ANSWER from ranks 3: no answer within {ASK_S:.0f} s" in lines
        assert "  step 2 is missing on the nodes of ranks 2" in lines
        assert "  the copy of step 2 is missing on the nodes of ranks 1-2" in lines
        assert max(map(len, lines[begin : begin + 10])) <= 80
        assert "\x1b" not in printed
        nodes.daemons[3].signal(signal.SIGCONT)


def test_the_restore_command_restores_what_only_the_nodes_together_have(tmp_path: Path) -> None:
    """Also where a node is lost whose part has a copy."""
    with handmade_nodes(tmp_path, 4) as nodes:
        nodes.save(1)
        for peer in nodes.ranks:
            peer.send(wire.Everywhere(step=1))
        wait_until(lambda: nodes.daemons[1].status()["runs"][0]["nodes"].get("everywhere"), "the daemon to note it")
        nodes.daemons[0].kill()
        printed = nodes.daemons[1].tierd("status").stdout.splitlines()
        command = next(line.split("get it back:")[1] for line in printed if "get it back:" in line)
        arguments = command.split()[3:-1]
        assert arguments == ["restore", "--run", "run", "--to"]
        restored = nodes.daemons[1].tierd(*arguments, tmp_path / "restored")
        assert "restored run step 1 " in restored.stdout, restored.stderr


def test_nodes_of_the_start_before_are_no_nodes_of_this_one(tmp_path: Path) -> None:
    """The ranks tell their daemons the nodes at the first snapshot. One node has gone; the others have other ranks."""
    with handmade_nodes(tmp_path, 3) as nodes:
        nodes.save(1)
        nodes.close()
        lost, *others = nodes.daemons
        lost.kill()
        assert [each["ranks"] for each in roster(nodes, 1)] == [[0], [1], [2]]
        again = nodes.start_on(others[::-1], tells=False)
        for daemon in others:
            status = daemon.json("status")
            (run,) = status["runs"]
            assert run["generation"] == 2
            assert "roster" not in run["nodes"]
            assert not [alarm for alarm in status["alarms"] if "do not answer" in alarm["message"]]
        again.close()


def test_node_without_peers_is_no_node_that_does_not_answer(tmp_path: Path) -> None:
    with handmade_nodes(tmp_path, 2) as nodes:
        nodes.addresses[0] = NodeAddress(ranks=[0])
        nodes.tell_roster()
        wait_until(lambda: not roster(nodes, 1)[0]["address"], "the daemon to note it")
        printed = nodes.daemons[1].tierd("status").stdout
        assert "NO ANSWER" not in printed
        assert "do not answer" not in printed
        assert "  not asked, because peers.listen is not set there: ranks 0" in printed.splitlines()


@pytest.mark.parametrize("count", [3, 2048])
def test_many_nodes_are_a_short_table_of_80_columns(count: int, capsys: pytest.CaptureFixture[str]) -> None:
    def part(step: int) -> NewestPart:
        return NewestPart(ranks=[0], world_size=8 * count, step=step, generation=12, created_at="")

    reports = [
        NodeReport(
            ranks=list(range(8 * i, 8 * i + 8)),
            address=f"10.200.{i // 256 + 100}.{i % 256}:29465",
            is_here=i == 2,
            persisted=part(1_200_000),
            copied=part(1_100_000),
            copy_lag_s=3599.0,
            lacks_copy=i % 2 == 0,
        )
        for i in range(count)
    ]
    reports[1] = NodeReport(ranks=[8, 10, 12, 14, 16, 18, 20, 22], address="", is_here=False, problem="no peers.listen")
    print_roster(reports)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert all(len(line) <= 80 for line in lines[:-1])
    assert f"{count - 1} of {count} answer" in lines[0]
    assert "the copy of step 1200000 is missing on the nodes of ranks 0-7, 16-23" in lines[-1]
