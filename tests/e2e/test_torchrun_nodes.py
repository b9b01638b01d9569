"""Real `torchrun` over two nodes: an agent and a daemon on each, one training with DDP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.daemon import Daemon
from tests.support.nodes import nodes
from tests.support.processes import ENVIRONMENT

SCRIPT = """
import json, sys, tierd_client, torch
import torch.distributed as dist

target = int(sys.argv[1])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())
state = tierd_client.TrainingState(model=model, optimizer=optimizer)
with tierd_client.connect("run") as client:
    found = client.restore(state)
    begun = {"world": world, "step": found.step if found else 0, "generation": client.generation}
    if rank == 0:
        print(json.dumps(begun), flush=True)
    for step in range(begun["step"] + 1, target + 1):
        loss = model(torch.full((4, 8), float(step))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shot = client.snapshot(step, state)
        shot.wait_replicated("cold", 60)
    if rank == 0:
        print(json.dumps({"world": world, "loss": loss.item()}), flush=True)
dist.destroy_process_group()
"""


class Agent:
    """`torchrun` of one node, in a process group of its own: what it has printed is in `log`."""

    def __init__(self, daemon: Daemon, *arguments: str) -> None:
        """`arguments`: options, then the script and its arguments."""
        self.log = daemon.root / f"agent-{time.monotonic_ns()}.log"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", *arguments]
        # Else an agent of torch 2.13 that joins while rank 0's goes on waits for an address that was told before.
        own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        environ = {**ENVIRONMENT, **own_store, "TIERD_SOCKET": daemon.socket, "OMP_NUM_THREADS": "1"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environ, start_new_session=True)

    def kill(self) -> None:
        """The agent and its workers."""
        if self.process.poll() is None:
            workers = [int(pid) for pid in _children(self.process.pid)]
            self.process.kill()
            for worker in workers:
                os.kill(worker, signal.SIGKILL)
            self.process.wait()

    def said(self) -> list[dict[str, float]]:
        """The lines of JSON that rank 0 has printed."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@contextmanager
def agents(root: Path, daemons: list[Daemon], *options: str, target: int) -> Generator[list[Agent]]:
    script = root / "train.py"
    script.write_text(SCRIPT)
    started: list[Agent] = []
    try:
        for number, daemon in enumerate(daemons):
            started.append(Agent(daemon, *options, f"--node-rank={number}", str(script), str(target)))
        yield started
    finally:
        for agent in started:
            agent.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def finish(started: list[Agent]) -> dict[str, float]:
    """What rank 0 has printed at the end of its training."""
    for agent in started:
        assert agent.process.wait(120) == 0, agent.log.read_text(errors="replace")
    return next(said[-1] for agent in started if (said := agent.said()))


@pytest.mark.long
def test_torchrun_over_two_nodes_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    with nodes(tmp_path) as daemons:
        static = ("--nnodes=2", "--master-addr=127.0.0.1")
        with agents(tmp_path, daemons, *static, f"--master-port={free_port()}", target=2) as started:
            assert finish(started)["world"] == 2
        with agents(tmp_path, daemons, *static, f"--master-port={free_port()}", target=4) as started:
            finish(started)
            (begun, _) = started[0].said()
        assert begun == {"world": 2, "step": 2, "generation": 2}
        assert (tmp_path / "cold" / "run" / "000000000004-g0002" / "manifest.json").exists()
