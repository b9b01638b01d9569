"""What a run over two nodes costs, and what its copies save: on one machine, each node a daemon with a disk folder.

A model is sharded over two ranks (FSDP2), one on each node. Measured are the stall, the time until the part of each
node is durable, the time until each has a copy on the other with the processor time of both daemons for it, and then,
with one node and its disk lost, the restore on a spare from the copy, beside the same restore from a cold bucket: of
`rclone serve s3`, behind a proxy with the latency of a bucket of the same region. The limit is the time in which the
same bytes are copied to the disk by `shutil.copyfile` and fsync. JSON lines on stdout, the table on stderr.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import socket
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from latency import delayed
from restore import drop
from rounds import MIB, Figures, arguments, fact, machine, on, run_of, say, spread, table
from serving import Daemon, cpu_s, daemon, wait_quiet
from states import gpt
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tierd_client  # states.py has put it on the path  # isort: skip
from tests.support.s3 import BUCKET, ENVIRONMENT, rclone_server  # isort: skip

TIMEOUT_S = 300.0
NAMES = {
    "stall_s": "stall, seconds",
    "durable_s": "durable on both nodes after it, seconds",
    "copied_s": "copied to the other node after it, seconds",
    "limit_s": "limit: the same bytes by copyfile and fsync, seconds",
    "copy_cpu_s_per_gb": "processor time of both daemons for a copy, seconds per GB",
    "peers_s": "restore with a spare, from the copy, seconds",
    "cold_s": "the same from a cold bucket, seconds",
}


def train(rank: int, port: int, path: str, mib: int, pipe: Connection) -> None:
    """A rank. Does what it is asked for, and sends how long it took."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = gpt(mib)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = tierd_client.TrainingState(model=model, optimizer=optimizer)
    with tierd_client.connect("bench", socket=path, every_steps=1) as client:
        while (asked := pipe.recv()) is not None:
            dist.barrier()
            began_s = time.perf_counter()
            what, value = asked
            if what == "restore":
                found = client.restore(state, tier=value)
                assert found is not None
                pipe.send((time.perf_counter() - began_s, found.tier))
                continue
            shot = client.snapshot(value, state)
            stalled_s = time.perf_counter()
            shot.wait_persisted(TIMEOUT_S)
            dist.barrier()
            pipe.send((stalled_s - began_s, time.perf_counter() - stalled_s))
            began_s = time.perf_counter()
            client.wait_everywhere(TIMEOUT_S)
            pipe.send(time.perf_counter() - began_s)
            shot.wait_replicated("cold", TIMEOUT_S)
            pipe.send(True)
    dist.destroy_process_group()


class Ranks:
    """Two trainers, each at the daemon of its node."""

    def __init__(self, daemons: list[Daemon], mib: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank, served in enumerate(daemons):
            here, there = context.Pipe()
            process = context.Process(target=train, args=(rank, port, served.socket, mib, there))
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    def ask(self, what: str, value: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((what, value))
        return self.answers()

    def answers(self) -> list[Any]:
        for pipe in self._pipes:
            if not pipe.poll(TIMEOUT_S):
                raise SystemExit("a rank of the benchmark does not answer")
        return [pipe.recv() for pipe in self._pipes]

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def copied(source: Path, target: Path) -> float:
    """Seconds to copy all files below a folder, durably."""
    began_s = time.perf_counter()
    for number, path in enumerate(sorted(path for path in source.rglob("*") if path.is_file())):
        shutil.copyfile(path, target / str(number))
        with (target / str(number)).open("rb") as file:
            os.fsync(file.fileno())
    return time.perf_counter() - began_s


def turn(folder: Path, mib: int, *, tls: bool, latency_ms: float) -> dict[str, float]:
    """One round with new nodes."""
    with ExitStack() as stack:
        url = stack.enter_context(delayed(stack.enter_context(rclone_server(folder / "served")), latency_ms))
        daemons: list[Daemon] = []
        lost = stack.enter_context(ExitStack())
        for name in ("a", "b", "spare"):
            (folder / name).mkdir(parents=True)
            bucket = f'url = "s3://{BUCKET}"\nendpoint_url = "{url}"\nregion = "us-east-1"\n'
            cold = f'[[cold]]\nname = "cold"\n{bucket}'
            peers = f'[peers]\nlisten = "127.0.0.1:0"\ntls = {str(tls).lower()}\n'
            of = lost if name == "b" else stack
            daemons.append(of.enter_context(daemon(folder / name, cold + peers, "", ENVIRONMENT)))
        first, second, spare = daemons
        both = [first.pid, second.pid]
        ranks = Ranks([first, second], mib)
        stack.callback(ranks.end)
        (stall_s, durable_s), other = ranks.ask("snapshot", 1)
        began_cpu_s = cpu_s(both)
        copied_s = max(ranks.answers())
        copy_cpu_s = cpu_s(both) - began_cpu_s
        ranks.answers()  # a cold tier has it
        size_bytes = sum(path.stat().st_size for path in (folder / "served").rglob("rank-*"))
        wait_quiet(both)
        ranks.end()
        lost.close()
        shutil.rmtree(folder / "b")
        seconds = {tier: restored([first, spare], mib, tier, folder) for tier in ("auto", "cold")}
        (folder / "limit").mkdir()
        drop(folder / "served")
        limit_s = copied(folder / "served", folder / "limit")
    shutil.rmtree(folder)
    return {
        "stall_s": max(stall_s, other[0]),
        "durable_s": max(durable_s, other[1]),
        "copied_s": copied_s,
        "limit_s": limit_s,
        "copy_cpu_s_per_gb": copy_cpu_s / (size_bytes / 1e9),
        "peers_s": seconds["auto"],
        "cold_s": seconds["cold"],
    }


def restored(daemons: list[Daemon], mib: int, tier: str, folder: Path) -> float:
    """Seconds until the last rank has its state, with new trainers."""
    drop(folder)
    ranks = Ranks(daemons, mib)
    try:
        answers = ranks.ask("restore", tier)
        assert {found for _, found in answers} == ({"memory", "peer"} if tier == "auto" else {"cold"}), answers
        return max(taken_s for taken_s, _ in answers)
    finally:
        ranks.end()


def report(figures: Figures, where: dict[str, Any], mib: int) -> None:
    facts = {one["figure"]: one for one in figures.facts()}
    fact(machine=where | {"mib": mib})
    for one in facts.values():
        fact(**one)
    rounds = facts["stall_s"]["rounds"]
    say(f"\n{mib} MiB over two nodes on one machine; {on(where)}; medians of {rounds} rounds (least to most)\n")
    table(["", "median"], [[name, spread(facts[figure])] for figure, name in NAMES.items()])
    gb_s = mib * MIB / 1e9 / facts["copied_s"]["median"]
    ratio = facts["limit_s"]["median"] / facts["copied_s"]["median"]
    say(f"\ncopies: {gb_s:.2f} GB/s, both directions together; {ratio:.2f} of the limit's rate")
    say(f"restore from the copy / from cold: {facts['peers_s']['median'] / facts['cold_s']['median']:.2f}")


def measure(args: argparse.Namespace, folder: Path) -> None:
    figures = Figures()
    for number in range(args.rounds + 1):
        say(f"round {number} of {args.rounds}")
        figures.add("nodes", **turn(folder / str(number), args.mib, tls=args.tls, latency_ms=args.latency_ms))
    report(figures, machine(folder) | {"tls": args.tls, "latency_ms": args.latency_ms}, args.mib)


def main() -> None:
    parser = arguments(__doc__ or "", mib=512, rounds=3, first="warms up")
    parser.add_argument("--tls", action="store_true", help="the nodes read from each other with peers.tls")
    parser.add_argument("--latency-ms", type=float, default=20.0, help="of a round trip to the bucket")
    with run_of(parser) as (args, folder):
        measure(args, folder)


if __name__ == "__main__":
    main()
