"""`tierd milestone` of a checkpoint over several nodes: the same on any of them."""

from __future__ import annotations

from pathlib import Path

from tests.support.handmade_nodes import handmade_nodes, layout_name
from tests.support.waiting import wait_until


def test_milestone_is_marked_in_cold_from_a_node_that_does_not_delete_there(tmp_path: Path) -> None:
    with handmade_nodes(tmp_path, 2, sends=True) as nodes:
        nodes.save(1, copied=False)
        wait_until((tmp_path / "cold" / "run" / layout_name(1) / "manifest.json").exists, "step 1 in cold")
        home, other = nodes.daemons
        assert other.json("milestone", "--run", "run", "--step", "1", "best")["tiers"] == ["cold"]
        assert home.json("ls")[0]["milestone"] == "best"
        explained = home.json("lifecycle", "--explain")["planned"]
        assert [each["reason"] for each in explained if each["tier"] == "cold"] == ["milestone best"], explained


def test_parts_alone_are_not_marked_and_the_answer_says_what_to_do(tmp_path: Path) -> None:
    with handmade_nodes(tmp_path, 2) as nodes:
        nodes.save(1, copied=False)
        whole = tmp_path / "cold" / "run" / layout_name(1) / "manifest.json"
        wait_until(whole.exists, "the first parts, which a limit of the rate lets through")
        nodes.save(2, copied=False)
        for daemon in nodes.daemons:
            refused = daemon.tierd("milestone", "--run", "run", "--step", "2", "best")
            assert refused.returncode == 3
            assert "mark as best: " in refused.stderr
            assert "once a cold tier has it whole" in refused.stderr
        assert not list(tmp_path.rglob("milestone-*"))
