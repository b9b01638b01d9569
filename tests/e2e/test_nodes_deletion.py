"""Deletion in a cold tier that nodes share: by the daemon of rank 0 alone, and not of what another node has marked."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

from tests.e2e.test_nodes import run_impatient
from tests.support.handmade_nodes import RUN, HandmadeNodes, handmade_nodes, layout_name
from tests.support.waiting import wait_until

KEEP_ONE = """
[lifecycle.hot]
keep_last = 1
[lifecycle.cold]
keep_last = 1
keep_every = 0
[health]
examine = false
"""


def committed(root: Path) -> list[int]:
    """The steps that are whole in cold."""
    return sorted(int(path.parent.name[:12]) for path in (root / "cold" / RUN).glob("*/manifest.json"))


def save(nodes: HandmadeNodes, root: Path, step: int) -> None:
    nodes.save(step)
    wait_until(lambda: step in committed(root), f"step {step} in cold")


def test_milestone_that_another_node_has_set_outlives_the_deletion_by_home(tmp_path: Path) -> None:
    """The daemon of rank 0 has not heard of the mark: it looks for it in cold before it deletes."""
    with handmade_nodes(tmp_path, 2, sends=True, more=KEEP_ONE) as nodes:
        home, other = nodes.daemons
        save(nodes, tmp_path, 1)
        assert other.json("milestone", "--run", RUN, "--step", "1", "best")["tiers"] == ["cold"]
        for step in (2, 3):
            save(nodes, tmp_path, step)
        wait_until(lambda: committed(tmp_path) == [1, 3], "step 2 to be deleted in cold, and step 1 to stay")
        save(nodes, tmp_path, 4)
        wait_until(lambda: committed(tmp_path) == [1, 4], "step 3 to be deleted, too")
        marked = tmp_path / "cold" / RUN / layout_name(1)
        assert {path.name for path in marked.iterdir()} == {
            "manifest.json",
            "milestone-best.json",
            *(f"node-0000{rank}-of-00002.json" for rank in (0, 1)),
            *(f"rank-0000{rank}-of-00002.safetensors" for rank in (0, 1)),
        }
        assert "from cold" in home.log
        assert "from cold" not in other.log
        assert home.json("ls", "--run", RUN)[-1]["milestone"] == "best"


def test_without_the_daemon_of_home_another_one_commits_and_deletion_waits_for_the_next_home(tmp_path: Path) -> None:
    with handmade_nodes(tmp_path, 3, sends=True, more=KEEP_ONE, run=run_impatient) as nodes, ExitStack() as stack:
        home, *others = nodes.daemons
        save(nodes, tmp_path, 1)
        home.restart_armed("cold.assemble=kill@1")
        start = nodes.start_on(nodes.daemons)
        stack.callback(start.close)
        for rank in range(3):
            start.seal(rank, 2)
        assert home.wait_exit() == -signal.SIGKILL
        for other in others:
            wait_until(lambda other=other: other.steps("cold") == [1, 2], "each daemon to know of the commit")
        assert committed(tmp_path) == [1, 2]
        assert all("from cold" not in other.log for other in others)
        next_start = nodes.start_on(others)
        stack.callback(next_start.close)
        next_start.save(4, copied=False)
        wait_until(lambda: committed(tmp_path) == [4], "the next home to delete what its policy does not keep")
