"""Nodes whose framework writes on local disks: a daemon on each, their folders are one checkpoint, and come back."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.support.daemon import Daemon
from tests.support.foreign import contents
from tests.support.framework_saves import archive, save_deepspeed_on
from tests.support.nodes import node
from tests.support.waiting import wait_until

COUNT = 3
ANNOUNCING = ("watch.announce", "watch.announced")  # failpoints


class Cluster:
    """Each node has a folder of its own, and a daemon that is not started yet."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.outs = [root / f"node-{number}" / "out" for number in range(COUNT)]
        self.daemons = [self._daemon(number) for number in range(COUNT)]

    def _daemon(self, number: int) -> Daemon:
        self.outs[number].mkdir(parents=True)
        watch = (
            f'[[watch]]\npath = "{self.outs[number]}"\nrun = "ds"\npreset = "deepspeed"\nquiet_s = 0.3\nnodes = {COUNT}'
        )
        environ = {"SLURM_NODEID": str(number)}
        return node(self.root, f"house-{number}", cold=self.root / "cold", more=watch, environ=environ)

    def start(self) -> None:
        for daemon in self.daemons:
            daemon.start()

    def kill(self) -> None:
        for daemon in self.daemons:
            daemon.kill()

    def wipe(self) -> None:
        """The local disks of all nodes."""
        for number, out in enumerate(self.outs):
            shutil.rmtree(out)
            shutil.rmtree(self.root / f"house-{number}" / "hot")

    def waiting(self, number: int) -> list[str]:
        return self.daemons[number].status()["watches"][0]["waiting"]

    def awaited(self) -> list[int]:
        """The nodes whose parts node 0 misses in cold."""
        awaited = self.daemons[0].status()["runs"][0]["nodes"]["awaited"]
        return awaited["cold"]["ranks"] if awaited else []

    def restore(self, to: Path, *options: str) -> str:
        """The error; empty if it succeeds."""
        done = self.daemons[1].tierd("restore", "--run", "ds", "--tier", "cold", "--to", to, *options)
        return done.stderr if done.returncode else ""


def merged(folders: list[Path], to: Path) -> Path:
    """As a person would merge them: what all have once, with the times of the last."""
    for folder in folders:
        shutil.copytree(folder, to, dirs_exist_ok=True)
    for path in [path for path in to.rglob("*") if path.is_file()]:
        newest = max(
            (folder / path.relative_to(to)).stat().st_mtime_ns
            for folder in folders
            if (folder / path.relative_to(to)).exists()
        )
        os.utime(path, ns=(newest, newest))
    return to


@pytest.mark.long
def test_the_folders_of_all_nodes_are_one_checkpoint_that_comes_back_on_empty_disks(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    home, _, late = cluster.daemons
    try:
        cluster.start()
        save_deepspeed_on(cluster.outs, 10)
        wait_until(lambda: home.steps("cold") == [10], "the first checkpoint")
        late.kill()
        folders = save_deepspeed_on(cluster.outs, 20)
        before = [contents(folder) for folder in folders]
        whole = contents(merged(folders, tmp_path / "merged"))
        wait_until(lambda: cluster.awaited() == [2], "the parts of the others")
        printed = home.tierd("status").stdout
        assert "step 20 has the parts of 2 of 3 nodes; missing: 2" in printed
        assert f"watch {cluster.outs[0]} (deepspeed) for ds, node 0 of 3: 2 adopted" in printed
        assert "the parts of 2 of 3 nodes, without nodes 2" in cluster.restore(tmp_path / "no", "--step", "20")
        assert home.steps("cold") == [10], "it is no checkpoint"
        late.start()
        for daemon in cluster.daemons:
            wait_until(lambda daemon=daemon: daemon.steps("cold") == [10, 20], "the whole checkpoint")
        (row, _) = home.json("ls", "--run", "ds")
        assert (row["step"], row["generation"]) == (20, 1)
        assert home.json("show", "ds", "20")["manifest"]["kind"] == "adopted"
        assert home.tierd("verify", "--deep").returncode == 0
        assert [daemon.status()["watches"][0]["problems"] for daemon in cluster.daemons] == [[], [], []]

        cluster.kill()
        cluster.wipe()
        assert cluster.restore(tmp_path / "back") == ""
        assert contents(tmp_path / "back") == whole
        for number, folder in enumerate(folders):
            assert cluster.restore(folder, "--node", str(number)) == ""
            (folder.parent / "latest").write_text(folder.name)
            assert contents(folder) == before[number]
        cluster.start()
        save_deepspeed_on(cluster.outs, 30)
        wait_until(lambda: home.steps("cold") == [10, 20, 30], "the next checkpoint")
        assert [row["generation"] for row in home.json("ls", "--run", "ds")] == [1, 1, 1]

        save_deepspeed_on(cluster.outs, 40, model=archive(999))
        wait_until(lambda: home.steps("cold") == [10, 20, 30, 40], "one that does not merge")
        error = cluster.restore(tmp_path / "refused")
        assert "they differ in mp_rank_00_model_states.pt (nodes 0 and 2)" in error
        assert "--node N restores the folder of one node" in error
        assert not (tmp_path / "refused").exists()
        assert cluster.restore(tmp_path / "alone", "--node", "2") == ""
        assert contents(tmp_path / "alone") == contents(cluster.outs[2] / "global_step40")
    finally:
        cluster.kill()


@pytest.mark.parametrize(
    ("number", "failpoint"),
    [
        *((0, name) for name in (*ANNOUNCING, "adopt.commit", "cold.node_file", "cold.assemble")),
        *((2, name) for name in ("adopt.commit", "adopt.committed", "cold.node_file", "cold.part_sent")),
    ],
)
@pytest.mark.long
def test_a_daemon_killed_at_any_instant_goes_on_and_the_checkpoint_becomes_whole(
    tmp_path: Path, number: int, failpoint: str
) -> None:
    cluster = Cluster(tmp_path)
    dies = cluster.daemons[number]
    try:
        for daemon in cluster.daemons:
            if daemon is not dies:
                daemon.start()
        folders = save_deepspeed_on(cluster.outs, 10)
        dies.restart_armed(f"{failpoint}=kill@1")
        assert dies.wait_exit() != 0
        dies.restart_armed("")
        for daemon in cluster.daemons:
            wait_until(lambda daemon=daemon: daemon.steps("cold") == [10], "the whole checkpoint")
        assert [(row["step"], row["generation"]) for row in dies.json("ls", "--run", "ds")] == [(10, 1)]
        for node_number, folder in enumerate(folders):
            to = tmp_path / f"back-{node_number}"
            assert cluster.restore(to, "--node", str(node_number)) == ""
            assert contents(to) == contents(folder)
        save_deepspeed_on(cluster.outs, 20)
        wait_until(lambda: dies.steps("cold") == [10, 20], "the next one")
        assert [daemon.status()["watches"][0]["problems"] for daemon in cluster.daemons] == [[], [], []]
    finally:
        cluster.kill()
