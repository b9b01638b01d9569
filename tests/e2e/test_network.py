"""Nodes with networks of their own, over which a real training runs: FSDP2 under `torchrun`, two ranks on each node.

A node dies with its disk, loses its link, or has a slow one. The bucket is a directory that all nodes see.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.e2e.test_nodes_copies import copies
from tests.support.daemon import Daemon
from tests.support.network import NOTHING_PASSES, Host, network, why_not
from tests.support.nodes import node
from tests.support.processes import ENVIRONMENT
from tests.support.waiting import wait_until

pytestmark = pytest.mark.long

PORT = 9465


@pytest.fixture(autouse=True, scope="module")
def _needs_network() -> None:
    if why := why_not():
        pytest.skip(why)


@dataclass
class Node:
    """A host, its daemon, and its agent of `torchrun`."""

    host: Host
    daemon: Daemon
    agent: subprocess.Popen[bytes] | None = None
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.log = self.daemon.root.with_suffix(".agent.log")

    def train(self, root: Path, *, rank: int, of: int, host: Host) -> None:
        """`rank`: of the node, `of` so many. `host`: where the agents meet."""
        self.log.unlink(missing_ok=True)
        nodes = f"--nnodes={of}", f"--node-rank={rank}", f"--master-addr={host.address}", "--master-port=29400"
        length = "--steps", "100000", "--every", "5", "--step-delay-s", "0.1", "--threads", "1"
        what = "--run", "run", "--model-size", "tiny", "--loss-file", str(root / "losses.jsonl"), "--device", "cpu"
        # After "--": torchrun would take --run for an abbreviation of its --run-path.
        script = "-m", "--", "tierd_client.examples.train_gpt", *length, *what, "--socket", self.daemon.socket
        command = sys.executable, "-m", "torch.distributed.run", *nodes, "--nproc-per-node=2"
        environ = {**ENVIRONMENT, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0"}
        self.agent = self.host.popen([*command, *script], log=self.log, environ=environ)

    def resumed(self) -> list[tuple[int, str]]:
        """The steps at which its ranks have gone on, and from where."""
        found = re.findall(r"resumed at step (\d+) from (\w+)", self.log.read_text(errors="replace"))
        return [(int(step), tier) for step, tier in found]

    def end(self) -> None:
        """Its agent and its ranks, as a launcher does when a node is lost. Its daemon goes on."""
        if self.agent is not None:
            daemon = self.daemon.process
            for pid in set(self.host.pids()) - {daemon.pid if daemon is not None else 0}:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.agent.wait()

    def lose(self) -> None:
        """All of its processes, and its disk."""
        self.host.kill()
        assert self.agent is not None
        self.agent.wait()
        self.daemon.kill()
        shutil.rmtree(self.daemon.hot)


@contextmanager
def nodes(root: Path, count: int, *, upload_mib_s: float = 0.0) -> Generator[list[Node]]:
    """`upload_mib_s`: to cold; 0: as fast as it can."""
    with network(count) as hosts, ExitStack() as stack:
        made: list[Node] = []
        for host, name in zip(hosts, "abcdefgh", strict=False):
            daemon = node(root, name, cold=root / "cold", more=f'[peers]\nlisten = "{host.address}:{PORT}"')
            if upload_mib_s:
                text = daemon.config.read_text().replace('"cold"', f'"cold"\nmax_upload_mib_s = {upload_mib_s}', 1)
                daemon.config.write_text(text)
            daemon.run_with(host.run_tierd)
            made.append(Node(host, stack.enter_context(daemon)))
        try:
            yield made
        finally:
            for each in made:
                each.end()


def train(root: Path, started: Sequence[Node]) -> None:
    for rank, each in enumerate(started):
        each.train(root, rank=rank, of=len(started), host=started[0].host)


def losses(root: Path) -> list[int]:
    path = root / "losses.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("}")]


def newest(root: Path) -> int:
    return max(losses(root), default=0)


def copied(started: Sequence[Node]) -> int:
    """The newest step of which every node's part has a copy."""
    return min(max(copies(each.daemon), default=0) for each in started)


def test_a_node_dies_with_its_disk_and_the_training_goes_on_with_a_spare(tmp_path: Path) -> None:
    """Nothing is whole in cold: what the lost node had comes from its partner, and the daemons' new start from them."""
    with nodes(tmp_path, 5, upload_mib_s=1e-6) as (*four, spare):
        train(tmp_path, four)
        wait_until(lambda: copied(four) >= 10, "copies of step 10", 240)
        four[3].lose()
        reached = newest(tmp_path)
        for each in four[:3]:
            each.end()
        train(tmp_path, [*four[:3], spare])
        wait_until(lambda: all(len(each.resumed()) == 2 for each in (four[0], spare)), "the spare to go on", 240)
        assert {tier for _, tier in spare.resumed()} == {"peer"}
        (step,) = {step for step, _ in spare.resumed()}
        assert 10 <= step <= reached
        assert {each for each, _ in four[0].resumed()} == {step}
        wait_until(lambda: newest(tmp_path) > reached, "steps that were not trained before", 120)
        assert not list((tmp_path / "cold" / "run").glob("*/manifest.json"))
        wait_until(lambda: copied([*four[:3], spare]) > reached, "copies of the nodes that there are now", 120)


def test_a_link_that_is_down_for_a_while_delays_the_training_and_loses_nothing(tmp_path: Path) -> None:
    with nodes(tmp_path, 4) as four:
        train(tmp_path, four)
        wait_until(lambda: copied(four) >= 5, "copies of step 5", 240)
        four[2].host.unplug()
        stood = newest(tmp_path)
        time.sleep(8)
        four[2].host.plug()
        wait_until(lambda: copied(four) > stood + 10, "copies of later steps", 120)
        assert not any(each.resumed() for each in four)  # no rank has begun again
        wait_until(
            lambda: any(int(path.parent.name[:12]) > stood for path in (tmp_path / "cold").rglob("manifest.json")),
            "a commit of a later step",
            120,
        )


def test_a_slow_link_delays_the_copies_and_loses_nothing(tmp_path: Path) -> None:
    with nodes(tmp_path, 4) as four:
        train(tmp_path, four)
        wait_until(lambda: copied(four) >= 5, "copies of step 5", 240)
        slow = four[1]
        slow.host.set_link("tbf", "rate", "8mbit", "burst", "32kbit", "latency", "200ms")
        began = newest(tmp_path)
        wait_until(lambda: newest(tmp_path) >= began + 15, "the training to go on", 240)
        slow.host.clear_link()
        wait_until(lambda: copied(four) > began, "the copies to follow", 120)
        assert losses(tmp_path) == list(range(1, newest(tmp_path) + 1))


def test_a_node_of_which_nothing_arrives_ends_the_training_and_the_next_start_loses_nothing_safe(
    tmp_path: Path,
) -> None:
    """It receives what the others send. gloo gives the connections up after some seconds."""
    with nodes(tmp_path, 4) as four:
        train(tmp_path, four)
        wait_until(lambda: copied(four) >= 5, "copies of step 5", 240)
        mute = four[1]
        mute.host.set_link(*NOTHING_PASSES)
        wait_until(
            lambda: any(each.agent is not None and each.agent.poll() for each in four), "an error of a rank", 120
        )
        mute.host.clear_link()
        safe = copied(four)
        for each in four:
            each.end()
        train(tmp_path, four)
        wait_until(lambda: all(len(each.resumed()) == 2 for each in four), "the ranks to go on", 240)
        (step,) = {step for each in four for step, _ in each.resumed()}
        assert step >= safe
        wait_until(lambda: copied(four) > step, "copies of later steps", 120)
