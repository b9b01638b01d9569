"""What a snapshot over four nodes costs a training more than one on a single node: the time in `client.snapshot()`.

Eight ranks share a model (FSDP2). Each has two clients: one at the daemon of a node that has all eight ranks, one at
the daemon of one of four nodes with two ranks each. They take turns in every round, so both have the same state and the
same load on the machine; only the nodes differ. A round's stall is that of the slowest rank. JSON lines on stdout, the
table on stderr.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rounds import Figures, arguments, fact, in_turn, machine, on, run_of, say, spread, table
from serving import Daemon, daemon, wait_quiet
from states import gpt
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tierd_client  # states.py has put it on the path  # isort: skip

RANKS, NODES = 8, 4
TIMEOUT_S = 300.0
ONE, FOUR = "one node, 8 ranks", "4 nodes x 2 ranks"


def train(rank: int, port: int, paths: dict[str, str], mib: int, pipe: Connection) -> None:
    """A rank. Takes the snapshots that it is asked for, and sends what each has cost: seconds, and those of processor
    time of this process."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = gpt(mib)
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = tierd_client.TrainingState(model=model, optimizer=optimizer)
    with ExitStack() as stack:
        clients = {
            way: stack.enter_context(tierd_client.connect("bench", socket=path, every_steps=1))
            for way, path in paths.items()
        }
        while (asked := pipe.recv()) is not None:
            way, step = asked
            dist.barrier()
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            shot = clients[way].snapshot(step, state)
            pipe.send((time.perf_counter() - began_s, time.process_time() - began_cpu_s))
            shot.wait_persisted(TIMEOUT_S)
            clients[way].wait_everywhere(TIMEOUT_S)
            pipe.send(True)
    dist.destroy_process_group()


class Ranks:
    def __init__(self, stack: ExitStack, one: Daemon, four: list[Daemon], mib: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        for rank in range(RANKS):
            here, there = context.Pipe()
            paths = {ONE: one.socket, FOUR: four[rank * NODES // RANKS].socket}
            process = context.Process(target=train, args=(rank, port, paths, mib, there))
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
            self._pipes.append(here)

    def snapshot(self, way: str, step: int) -> list[tuple[float, float]]:
        """What it has cost each rank. Returns when it is durable."""
        for pipe in self._pipes:
            pipe.send((way, step))
        costs, _ = self._answers(), self._answers()
        return costs

    def _answers(self) -> list[Any]:
        for pipe in self._pipes:
            if not pipe.poll(TIMEOUT_S):
                raise SystemExit("a rank of the benchmark does not answer")
        return [pipe.recv() for pipe in self._pipes]


def report(figures: Figures, where: dict[str, Any], mib: int) -> None:
    facts = {(one["way"], one["figure"]): one for one in figures.facts()}
    for one in facts.values():
        fact(**one)
    rounds = facts[ONE, "stall_s"]["rounds"]
    say(f"\n{mib} MiB over 8 ranks on one machine; {on(where)}; medians of {rounds} rounds (least to most)\n")
    names = {"stall_s": "stall of the slowest rank, s", "cpu_s": "processor time in it, mean of the ranks, s"}
    ways = [ONE, FOUR]
    rows = [[name, *(spread(facts[way, figure], 4) for way in ways)] for figure, name in names.items()]
    table(["", *ways], rows)
    of_round = [
        four / one
        for one, four in zip(figures.values[ONE, "stall_s"][1:], figures.values[FOUR, "stall_s"][1:], strict=True)
    ]
    ratio = facts[FOUR, "stall_s"]["median"] / facts[ONE, "stall_s"]["median"]
    cpu = facts[FOUR, "cpu_s"]["median"] / facts[ONE, "cpu_s"]["median"]
    fact(figure="ratio", stall=round(ratio, 3), of_rounds=round(statistics.median(of_round), 3), cpu=round(cpu, 3))
    say(
        f"\nstall, four nodes / one: {ratio:.2f} of the medians, {statistics.median(of_round):.2f} the median of the "
        f"rounds' ratios; processor time: {cpu:.2f}"
    )


def measure(args: argparse.Namespace, folder: Path) -> None:
    figures = Figures()
    with ExitStack() as stack:
        daemons: list[Daemon] = []
        for name in ("one", *"abcd"):
            (folder / name).mkdir()
            peers = "" if name == "one" or not args.peers else '[peers]\nlisten = "127.0.0.1:0"\n'
            cold = f'[[cold]]\nname = "cold"\nurl = "file://{folder}/cold-{"one" if name == "one" else "four"}"\n'
            daemons.append(stack.enter_context(daemon(folder / name, more=cold + peers, cold="")))
        ranks = Ranks(stack, daemons[0], daemons[1:], args.mib)
        step = 0
        for number in range(args.rounds + 1):
            say(f"round {number} of {args.rounds}")
            for way in in_turn([ONE, FOUR], number):
                step += 1
                wait_quiet(each.pid for each in daemons)
                costs = ranks.snapshot(way, step)
                figures.add(
                    way,
                    stall_s=max(stalled_s for stalled_s, _ in costs),
                    cpu_s=statistics.mean(used_s for _, used_s in costs),
                )
    where = machine(folder)
    fact(machine=where | {"mib": args.mib, "peers": args.peers})
    report(figures, where, args.mib)


def main() -> None:
    parser = arguments(__doc__ or "", mib=256, rounds=20, first="warms up")
    parser.add_argument("--peers", action="store_true", help="the four nodes keep copies of each other's parts")
    with run_of(parser) as (args, folder):
        measure(args, folder)


if __name__ == "__main__":
    main()
