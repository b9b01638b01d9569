"""`tierd demo --nodes`: a training over three nodes loses one of them with its disk, then all, and continues.

Each node is a daemon with its own memory and disk, and a trainer with a third of the model (FSDP2). All are on this
machine. The bucket is a directory.
"""

from __future__ import annotations

import shutil
import socket
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from tierd.cli import daemon_http
from tierd.cli.console import print_note, table
from tierd.cli.demo_run import RUN, TRAINER, DemoRun, event_row
from tierd.config.file import load
from tierd.format import layout, text
from tierd.format.ids import PEER, parse_name

EVERY = 5  # steps between snapshots
STEP_DELAY_S = 0.15  # with a small model: a copy takes up to two seconds to begin


@dataclass(slots=True)
class _Node:
    """A machine: its folder is its disk."""

    name: str
    folder: Path
    socket: Path

    @property
    def trainer(self) -> str:
        return f"trainer of node {self.name}"

    @property
    def daemon(self) -> str:
        return f"daemon of node {self.name}"

    @property
    def config(self) -> Path:
        """The config file, which is not on the node's disk, so that it survives the loss of the disk."""
        return self.folder.with_suffix(".toml")

    @property
    def hot(self) -> Path:
        return self.folder / "hot"


class NodesDemo(DemoRun):
    def __init__(self, root: Path, sockets: Path, *, is_fast: bool) -> None:
        super().__init__(root, root / "node-a.toml", steps=60 if is_fast else 80)
        self._model = "tiny" if is_fast else "default"
        self._cold = root / "bucket"
        self._all = {name: _Node(name, root / f"node-{name}", sockets / f"{name}.sock") for name in "abcd"}
        self._nodes = [self._all[name] for name in "abc"]  # of rank 0, 1, 2

    def run(self) -> int:
        """Print the table of the failures. Returns the exit code: 0 if the two loss curves are the same."""
        print_note(
            f"working in {self._root}", f"1/4  training {self._steps} steps undisturbed over 3 nodes, for comparison"
        )
        undisturbed = self._root / "undisturbed.jsonl"
        self._train(undisturbed, with_tierd=False)
        self._wait_trainers("the undisturbed training")

        print_note(f"2/4  the same training with tierd: a daemon on each node, a snapshot every {EVERY} steps")
        for node in self._nodes:
            self._start_daemon(node)
        self._train(self._losses)
        rows = [self._lose_one(), self._lose_all()]

        self._wait_trainers("the training to end")
        headings = ["EVENT", "RECOVERED FROM", "AT STEP", "WORK LOST", "SECONDS", "READ FROM THE BUCKET"]
        table(headings, rows, right=["AT STEP", "WORK LOST", "SECONDS", "READ FROM THE BUCKET"])
        return self._compare(undisturbed)

    # ── the failures: each returns its row of the table ──

    def _lose_one(self) -> list[str]:
        """Node c and its disk. A spare takes its place."""
        self._wait_step(28, *self._trainers)
        self._wait(lambda: self._copied() >= 20, "a copy of the part of each node", *self._trainers)
        lost, spare = self._nodes[2], self._all["d"]
        print_note(
            f"3/4  step {self._last_step()}: SIGKILL to all of node {lost.name}, its disk is deleted; node d joins"
        )
        started_s = time.monotonic()
        self._kill(lost.trainer)
        self._kill(lost.daemon)
        shutil.rmtree(lost.folder)
        reached = self._last_step()
        for node in self._nodes[:2]:  # as a launcher does: the ranks that are left wait for the lost one
            self._end_trainer(node)
        self._nodes[2] = spare
        self._start_daemon(spare)
        self._train(self._losses)
        step, tier = self._wait_resumed(spare.trainer)
        source = "the copy on its peer" if tier == PEER else tier
        return [
            *event_row("node c and its disk lost", source, step, reached - step, started_s, self._read_from_bucket())
        ]

    def _lose_all(self) -> list[str]:
        wanted = (self._steps - 10) // EVERY * EVERY
        self._wait_step(wanted, *self._trainers)
        self._wait(
            lambda: self._newest(self._cold)["step"] >= wanted - 2 * EVERY, "the bucket to have a newer checkpoint"
        )
        print_note(
            f"4/4  step {self._last_step()}: SIGKILL to everything, all disks are deleted; only the bucket is left"
        )
        started_s = time.monotonic()
        for node in self._nodes:
            self._end_trainer(node)
            self._kill(node.daemon)
            shutil.rmtree(node.folder)
        reached = self._last_step()
        for node in self._nodes:
            self._start_daemon(node)
        self._train(self._losses)
        step, tier = self._wait_resumed(self._nodes[0].trainer)
        return [*event_row("all nodes and disks lost", tier, step, reached - step, started_s, self._read_from_bucket())]

    # ── processes ──

    @property
    def _trainers(self) -> list[str]:
        return [node.trainer for node in self._nodes]

    def _start_daemon(self, node: _Node) -> None:
        node.folder.mkdir()
        node.config.write_text(
            f'[daemon]\nsocket = "{node.socket}"\nlisten = "127.0.0.1:0"\nnode = "{node.name}"\n\n'
            f'[hot]\npath = "node-{node.name}/hot"\n\n[peers]\nlisten = "127.0.0.1:0"\n\n'
            f'[[cold]]\nname = "cold"\nurl = "file://{self._cold}"\n'
        )
        node.socket.unlink(missing_ok=True)
        self._start(node.daemon, "tierd", "--config", str(node.config), "serve")
        self._wait(node.socket.is_socket, f"the {node.daemon} to listen")

    def _train(self, losses: Path, *, with_tierd: bool = True) -> None:
        """One rank on each node, as torchrun would start them."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        length = ("--steps", str(self._steps), "--every", str(EVERY), "--model-size", self._model)
        delay = ("--step-delay-s", str(STEP_DELAY_S if self._model == "tiny" and with_tierd else 0.0))
        command = (
            TRAINER,
            *length,
            *delay,
            "--run",
            RUN,
            "--loss-file",
            str(losses),
            "--device",
            "cpu",
            "--threads",
            "1",
        )
        for rank, node in enumerate(self._nodes):
            own = ("--socket", str(node.socket)) if with_tierd else ("--no-tierd",)
            self._log_of(node.trainer).write_bytes(b"")
            self._start(
                node.trainer,
                *(*command, *own),
                RANK=str(rank),
                WORLD_SIZE=str(len(self._nodes)),
                LOCAL_RANK="0",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )

    def _end_trainer(self, node: _Node) -> None:
        """It may have ended by itself, because another rank has."""
        self._processes[node.trainer].kill()
        self._processes[node.trainer].wait()

    def _wait_trainers(self, what: str) -> None:
        for trainer in self._trainers:
            self._wait_ended(trainer, what)

    # ── what the daemons have done ──

    def _copied(self) -> int:
        """The newest step of which each node's part has a copy on its partner."""
        steps: list[int] = []
        for node in self._nodes:
            folders = (path.parent.name for path in (node.hot / layout.PEERS / RUN).glob("*/node-*.json"))
            copies = [checkpoint.step for name in folders if (checkpoint := parse_name(RUN, name))]
            steps.append(max(copies, default=0))
        return min(steps)

    def _read_from_bucket(self) -> str:
        """The bytes of shards that the daemons have read there since they started."""
        read_bytes = 0.0
        for node in self._nodes:
            daemon = daemon_http.find(load(str(node.config), environ={}))
            with urllib.request.urlopen(f"http://{daemon.address}/metrics", timeout=60) as answer:
                for line in answer.read().decode().splitlines():
                    if line.startswith("tierd_bytes_total{") and '"read"' in line and 'tier="cold"' in line:
                        read_bytes += float(line.rpartition(" ")[2])
        return text.size(read_bytes)
