"""What a run over several nodes loses when something fails. Each test is named after what fails."""

from __future__ import annotations

import hashlib
import shutil
import signal
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from tierd_client import Full, Stale, TierdError

from tests.e2e.test_nodes_restore import hold_cold
from tests.support.bucket import bucket_server
from tests.support.daemon import Daemon
from tests.support.handmade_nodes import handmade_nodes
from tests.support.nodes import connect_on, connected, nodes, run_watchful
from tests.support.s3 import BUCKET, ENVIRONMENT, faulty_proxy
from tests.support.small_disk import small_disk
from tests.support.trainer import Trainer, Training, joined, refusals, together
from tests.support.waiting import wait_until
from tierd.format import wire


def cold_folder(root: Path, step: int, generation: int = 1) -> Path:
    return root / "cold" / "run" / f"{step:012d}-g{generation:04d}"


def save(trainers: list[Trainer]) -> list[str]:
    """One more step and a snapshot that is committed in cold. The digests of the ranks."""
    together(trainers, "train", 1)
    together(trainers, "snapshot")
    together(trainers, "wait_replicated", timeout_s=60)
    return together(trainers, "digest")


def resumed(daemons: list[Daemon], world_size: int) -> tuple[set[tuple[int, str]], list[str]]:
    """(step and tier of all ranks, digests) after a restart of all trainers."""
    with connected(daemons, world_size) as trainers:
        found = together(trainers, "restore")
        return {(each.step, each.tier) for each in found}, together(trainers, "digest")


def test_a_node_after_its_node_file(tmp_path: Path) -> None:
    """Nothing is lost: the others commit what it has sent, and a spare with an empty disk takes its place."""
    with nodes(tmp_path, "a", "b", "spare") as (a, b, spare):
        with connected([a, b], 2) as trainers:
            together(trainers, "restore")
            together(trainers, "train", 1)
            a.signal(signal.SIGSTOP)  # it seals later, and then commits
            together(trainers, "snapshot")
            digests = together(trainers, "digest")
            wait_until((cold_folder(tmp_path, 1) / "node-00001-of-00002.json").exists, "the part of the second node")
            b.kill()
            shutil.rmtree(b.hot)
            a.signal(signal.SIGCONT)
            wait_until((cold_folder(tmp_path, 1) / "manifest.json").exists, "the commit by the first node")
        assert resumed([a, spare], 2) == ({(1, "cold")}, digests)


@pytest.mark.long
def test_all_disks_and_fewer_nodes_come_back(tmp_path: Path) -> None:
    """Two ranks on one node go on from what four on two nodes have saved."""
    with nodes(tmp_path) as (a, b):
        with connected([a, b], 4) as trainers:
            together(trainers, "restore")
            digests = save(trainers)
        for daemon in (a, b):
            daemon.kill()
            shutil.rmtree(daemon.hot)
        a.start()
        with connected([a], 2) as trainers:
            together(trainers, "apply", _leave_out_rank)
            assert {(each.step, each.tier) for each in together(trainers, "restore")} == {(1, "cold")}
        assert resumed([a], 4) == ({(1, "hot")}, digests)


def _leave_out_rank(training: Training) -> None:
    """What each rank has of its own, another number of ranks can not take."""
    del training.extra["rank"]


@pytest.mark.long
def test_a_node_and_its_disk_and_a_spare_takes_its_place(tmp_path: Path) -> None:
    with nodes(tmp_path, "a", "b", "c", "spare") as (a, b, c, spare):
        with connected([a, b, c], 3) as trainers:
            together(trainers, "restore")
            digests = save(trainers)
            b.kill()
            shutil.rmtree(b.hot)
        assert resumed([a, spare, c], 3) == ({(1, "cold")}, digests)
        with connected([a, spare, c], 3) as trainers:
            together(trainers, "restore")
            digests = save(trainers)
        assert resumed([a, spare, c], 3) == ({(2, "memory")}, digests)


def test_the_training_network_splits(tmp_path: Path) -> None:
    """The half that is left alone gets an error and commits nothing more; a restart of all goes on."""
    with nodes(tmp_path) as daemons:
        with connected(daemons, 2) as trainers:
            together(trainers, "restore")
            digests = save(trainers)
            trainers[1].kill()
            with pytest.raises((TierdError, RuntimeError)):
                trainers[0].snapshot(step=2)
        found, again = resumed(daemons, 2)
        assert found <= {(1, "memory"), (1, "hot"), (1, "cold")}
        assert again == digests


@pytest.mark.long
def test_a_split_training_network_and_both_halves_go_on(tmp_path: Path) -> None:
    """Each half is started again, on the nodes that it has left. The later claim fences the earlier one."""
    more = "[health]\nexamine = false"
    with handmade_nodes(tmp_path, 4, sends=True, more=more) as all_four, ExitStack() as stack:
        all_four.save(1, copied=False)
        for rank in all_four.ranks:
            rank.close()
        halves = [all_four.half(0, 2), all_four.half(2, 4)]
        for half in halves:
            for rank in half.ranks:
                stack.callback(rank.close)
        earlier, later = halves
        earlier.save(2, copied=False)
        # The commit of step 1 may already have found the newer claim, before step 2 was saved.
        first = earlier.ranks[0]
        fenced = [message for message in first.heard if isinstance(message, wire.Fenced)] or [first.hear(wire.Fenced)]
        assert fenced[0].generation == 3
        later.save(2, copied=False)
        for rank in later.ranks:
            while rank.hear(wire.Replicated).step != 2:
                pass
        assert earlier.daemons[0].metric("tierd_fenced_total") == 1
        assert [daemon.metric("tierd_fenced_total") for daemon in later.daemons] == [0, 0]
        # What the earlier one has sealed is committed, and nothing was overwritten. If its daemon of rank 0 was
        # replaced before that, the other one commits, within two minutes.
        for generation in (2, 3):
            wait_until((cold_folder(tmp_path, 2, generation) / "manifest.json").exists, f"generation {generation}")
        assert (later.daemons[0].json("ls")[0]["step"], later.daemons[0].json("ls")[0]["generation"]) == (2, 3)


@pytest.mark.long
def test_two_jobs_under_one_run_name(tmp_path: Path) -> None:
    """The later fences the earlier. Nothing that the earlier has committed is overwritten."""
    with nodes(tmp_path, "a", "b", "c", "d") as (a, b, c, d), ExitStack() as stack:
        earlier = stack.enter_context(joined(tmp_path / "a", 2))
        connect_on([a, b], earlier)
        together(earlier, "restore")
        save(earlier)
        before = contents(cold_folder(tmp_path, 1))
        later = stack.enter_context(joined(tmp_path / "c", 2))
        connect_on([c, d], later)
        assert {each.step for each in together(later, "restore")} == {1}
        save(later)
        with pytest.raises(Stale):
            save_until_fenced(earlier)
        assert contents(cold_folder(tmp_path, 1)) == before
        save(later)


def save_until_fenced(trainers: list[Trainer]) -> None:
    """The first commit finds the newer claim."""
    for _ in range(2):
        save(trainers)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.long
def test_one_node_is_cut_off_from_the_bucket(tmp_path: Path) -> None:
    """Commits wait for it, its ranks are named, and nothing is lost."""
    cut_off: set[str] = set()
    with ExitStack() as stack:
        upstream = stack.enter_context(bucket_server()).url
        daemons: list[Daemon] = []
        for name in ("a", "b"):
            proxy = faulty_proxy(upstream, lambda _method, _path, name=name: "503" if name in cut_off else "")
            url = stack.enter_context(proxy)
            cold = f'url = "s3://{BUCKET}/x"\nendpoint_url = "{url}"\nregion = "us-east-1"'
            daemons.append(Daemon(tmp_path / name, cold=cold, environ=ENVIRONMENT))
            daemons[-1].run_with(run_watchful)
            stack.enter_context(daemons[-1])
        trainers = stack.enter_context(connected(daemons, 2))
        together(trainers, "restore")
        save(trainers)
        cut_off.add("b")
        together(trainers, "train", 1)
        together(trainers, "durable")
        together(trainers, "train", 1)
        together(trainers, "durable")
        wait_until(lambda: "503" in daemons[1].log, "an upload that fails")
        assert all((daemon.hot / "run" / "000000000003-g0001").is_dir() for daemon in daemons)
        missing = 'tierd_commit_missing_ranks{run="run",tier="cold"}'
        wait_until(lambda: daemons[0].metric(missing) == 1, "the metric of what is missing")
        (run,) = daemons[0].status()["runs"]
        assert (run["nodes"]["awaited"]["cold"]["step"], run["nodes"]["awaited"]["cold"]["ranks"]) == (2, [1])
        assert "waits for the parts of ranks 1 of 2, of other nodes" in daemons[0].tierd("status").stdout
        in_cold = {"ranks": [0], "world_size": 2}
        wait_until(lambda: daemons[0].json("ls")[0]["parts"].get("cold") == in_cold, "`ls` to name the part in cold")
        cut_off.clear()
        together(trainers, "wait_replicated", timeout_s=100)
        wait_until(lambda: daemons[0].metric(missing) == 0, "the metric to fall")


@pytest.mark.long
def test_hot_is_full_on_one_node(tmp_path: Path) -> None:
    """Its older parts go as cold has them; where none may go, its snapshots wait, and the others' parts stay."""
    with small_disk(tmp_path / "b" / "hot", size_mib=10) as hot, nodes(tmp_path) as (a, b):
        assert hot == b.hot
        with joined(tmp_path, 2, width=16 << 10) as trainers:  # 2 MiB of parameters, 4 of moments
            connect_on([a, b], trainers)
            together(trainers, "restore")
            digests = [save(trainers) for _ in range(4)][-1]
        with joined(tmp_path, 2, width=16 << 10) as trainers:
            connect_on([a, b], trainers)
            assert {each.step for each in together(trainers, "restore")} == {4}
            assert together(trainers, "digest") == digests


@pytest.mark.long
def test_hot_is_full_on_one_node_and_nothing_may_go(tmp_path: Path) -> None:
    """Everywhere stands still and keeps what the others have, and the alarm of a full disk is raised; with space on the
    disk, the last snapshot goes on."""
    with small_disk(tmp_path / "b" / "hot", size_mib=10) as hot, nodes(tmp_path) as (a, b):
        hold_cold(b)
        with joined(tmp_path, 2, width=16 << 10) as trainers:  # 2 MiB of parameters, 4 of moments
            connect_on([a, b], trainers)
            together(trainers, "restore")
            train_and_snapshot(trainers)
            together(trainers, "wait_everywhere")
            fill(hot / "of-somebody-else")
            train_and_snapshot(trainers)
            trainers[0].wait_persisted()
            full = 'tierd_failures_total{kind="full",stage="persist"}'  # of TierdDiskFull
            wait_until(lambda: full.encode() in b.request("/metrics")[1] and b.metric(full) > 0, "the alarm")
            assert {type(error) for error in refusals(trainers, "wait_everywhere", 1)} == {Full}
            assert [everywhere(daemon) for daemon in (a, b)] == [1, 1]
            assert all(part.exists() for part in (a.folder(1), a.folder(2), b.folder(1)))
            (hot / "of-somebody-else").unlink()
            together(trainers, "wait_everywhere")
            wait_until(lambda: everywhere(b) == 2, "the step that all nodes have")


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


def train_and_snapshot(trainers: list[Trainer]) -> None:
    together(trainers, "train", 1)
    together(trainers, "snapshot")


def everywhere(daemon: Daemon) -> int:
    """The newest step that all nodes have persisted, as the daemon was told."""
    (run,) = daemon.status()["runs"]
    return run["nodes"]["everywhere"]["step"]
