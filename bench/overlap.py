"""What a snapshot adds to a training loop on a CPU whose cores are all busy, with staging="sync" and "overlap".

Each round, in rotating order: a step without a snapshot; a snapshot and a step, in each mode; and the limit, the bytes
of the state copied in memory with all threads. A step is forward, backward and optimizer; what it takes longer is
added by the snapshot. The daemon's writing begins when the copy is done, and is waited for outside the clock. JSON
lines on stdout, the table on stderr.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rounds import add_threads, arguments, fact, in_turn, machine, run_of, say
from snapshot import PERSIST_TIMEOUT_S, SETTLE_S, Limits, build_state, daemon
from torch.nn import functional as F

import tierd_client  # snapshot.py has put it on the path  # isort: skip

CALL_GOAL_MS = 5.0
ADDED_GOAL = 1.0  # of the memory copy


def measure(args: argparse.Namespace, folder: Path) -> None:
    model, optimizer, tensors = build_state(args.mib)
    limits = Limits(tensors, args.threads, folder)
    tokens = torch.randint(0, 256, (args.batch, 128))
    number = 0

    def train() -> float:
        began = time.perf_counter()
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    with daemon(folder) as address:
        state = tierd_client.TrainingState(model=model, optimizer=optimizer)
        clients = {
            mode: tierd_client.connect(f"bench-{mode}", socket=address, staging=mode) for mode in ("sync", "overlap")
        }
        for client in clients.values():
            client.restore(state)  # finds nothing, and begins to make the slots

        def snapshot(mode: str) -> dict[str, float]:
            began = time.perf_counter()
            shot = clients[mode].snapshot(number, state)
            returned_s = time.perf_counter() - began
            train()
            whole_s = time.perf_counter() - began
            shot.wait_persisted(PERSIST_TIMEOUT_S)
            return {f"{mode} call": returned_s, f"{mode} whole": whole_s, f"{mode} guard": shot.guard_wait_s}

        ways: list[Callable[[], dict[str, float]]] = [
            lambda: {"copy": limits.copy()},
            lambda: {"step": train()},
            lambda: snapshot("sync"),
            lambda: snapshot("overlap"),
        ]
        rounds: list[dict[str, float]] = []
        for number in range(1, args.rounds + 2):
            found: dict[str, float] = {}
            for way in in_turn(ways, number):
                time.sleep(SETTLE_S)
                found |= way()
            rounds.append(found)
        for client in clients.values():
            client.close()
    report(
        rounds[1:], limits.size_bytes, machine(folder) | {"torch": torch.__version__, "copy_threads": args.threads}
    )  # the first finds nothing warm


def report(rounds: list[dict[str, float]], size_bytes: int, where: dict[str, object]) -> None:
    median = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    fact(machine=where | {"size_bytes": size_bytes})
    shown = f"copy {median['copy']:.3f} s, step {median['step']:.3f} s"
    say(f"\n{size_bytes / 1e9:.2f} GB, medians of {len(rounds)}; {shown}\n")
    for mode in ("sync", "overlap"):
        added = [one[f"{mode} whole"] - one["step"] for one in rounds]
        facts = {
            "staging": mode,
            "call_ms": round(median[f"{mode} call"] * 1e3, 2),
            "call_ms_min": round(min(one[f"{mode} call"] for one in rounds) * 1e3, 2),
            "guard_wait_ms": round(median[f"{mode} guard"] * 1e3, 2),
            "added_s": round(statistics.median(added), 4),
            "added / memory copy": round(statistics.median(added) / median["copy"], 2),
        }
        fact(**facts)
        said = ", ".join(f"{name} {value}" for name, value in facts.items())
        goal = f"  (goal: call_ms {CALL_GOAL_MS:g}, ratio {ADDED_GOAL:g} at most)" if mode == "overlap" else ""
        say(said + goal)


def main() -> None:
    parser = arguments("What a snapshot adds to a training loop.", mib=700, rounds=9, first="is left out")
    add_threads(parser)
    parser.add_argument("--batch", type=int, default=4, help="sequences of 128 tokens a step")
    with run_of(parser) as (args, folder):
        measure(args, folder)


if __name__ == "__main__":
    main()
