"""What a snapshot adds to a training loop on a CPU whose cores are all busy: tierd with staging="sync" and "overlap",
and torch.save and DCP beside it.

Each round, in rotating order: a step without a snapshot; a snapshot and a step, in each way; and the limit, the bytes
of the state copied in memory with all threads. A step is forward, backward and optimizer; what it takes longer is
added by the snapshot. What is written after the step is waited for outside the clock. JSON lines on stdout, the table
on stderr.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from limits import Limits
from rounds import Figures, add_threads, arguments, fact, in_turn, machine, on, run_of, say, spread, table
from serving import SETTLE_S, daemon
from states import build_state
from torch.nn import functional as F
from ways import TIMEOUT_S, Place, Save, dcp, torch_save

import tierd_client  # states.py has put it on the path  # isort: skip

PEERS = {"torch.save": torch_save, "DCP async_save, thread": lambda state, place: dcp(state, place, "thread")}


def measure(args: argparse.Namespace, folder: Path) -> None:
    state = build_state(args.mib)
    limits = Limits(state.tensors, args.threads, folder)
    tokens = torch.randint(0, 256, (args.batch, 128))
    figures = Figures()

    def train() -> None:
        F.cross_entropy(state.model(tokens).flatten(0, 1), tokens.flatten()).backward()
        state.optimizer.step()
        state.optimizer.zero_grad()

    def step(number: int) -> None:
        began = time.perf_counter()
        train()
        figures.add("a step", s=time.perf_counter() - began)

    def copy(number: int) -> None:
        figures.add("limit: memory copy", s=limits.copy())

    def saving(way: str, save: Save) -> Callable[[int], None]:
        def turn(number: int) -> None:
            target = folder / f"step-{number}"
            began = time.perf_counter()
            wait = save(number, target)
            called = time.perf_counter()
            train()
            trained = time.perf_counter()
            wait()
            figures.add(way, call_s=called - began, whole_s=trained - began)
            shutil.rmtree(target, ignore_errors=True)

        return turn

    with ExitStack() as stack:
        socket = stack.enter_context(daemon(folder)).socket
        place = Place(folder=folder, socket=socket, run="")
        turns = [step, copy]
        for mode in ("sync", "overlap"):
            client = tierd_client.connect(f"bench-{mode}", socket=socket, staging=mode)
            stack.callback(client.close)
            whole = tierd_client.TrainingState(model=state.model, optimizer=state.optimizer)
            client.restore(whole)  # finds nothing, and begins to make the slots
            turns.append(saving(f"tierd, {mode}", with_tierd(client, whole)))
        turns += [saving(way, stack.enter_context(save(state, place))) for way, save in PEERS.items()]
        for number in range(1, args.rounds + 2):
            for turn in in_turn(turns, number):
                time.sleep(SETTLE_S)
                turn(number)
    added(figures)
    report(figures, machine(folder) | {"torch": torch.__version__, "size_bytes": limits.size_bytes})


def with_tierd(client: tierd_client.Client, whole: tierd_client.TrainingState) -> Save:
    def save(number: int, _: Path) -> Callable[[], object]:
        shot = client.snapshot(number, whole)
        return lambda: shot.wait_persisted(TIMEOUT_S)

    return save


def added(figures: Figures) -> None:
    """Of each round: both had the same neighbours."""
    steps = figures.values["a step", "s"]
    for way in [way for way, figure in figures.values if figure == "whole_s"]:
        for whole_s, step_s in zip(figures.values[way, "whole_s"], steps, strict=True):
            figures.add(way, added_s=whole_s - step_s)


def report(figures: Figures, where: dict[str, Any]) -> None:
    facts = {(one["way"], one["figure"]): one for one in figures.facts()}
    copied, step = facts["limit: memory copy", "s"], facts["a step", "s"]
    fact(machine=where)
    for one in facts.values():
        fact(**one)
    say(f"\n{where['size_bytes'] / 1e9:.2f} GB; {on(where)}; medians (least to most) of {step['rounds']} rounds")
    say(f"a step {spread(step)} s, memory copy {spread(copied)} s\n")
    rows = []
    for way in [way for way, figure in facts if figure == "added_s"]:
        called, more = facts[way, "call_s"], facts[way, "added_s"]
        ratio = more["median"] / copied["median"]
        fact(way=way, ratio="added / memory copy", median=round(ratio, 2))
        rows.append([way, f"{called['median'] * 1e3:.1f}", f"{called['min'] * 1e3:.1f}", spread(more), f"{ratio:.2f}"])
    table(["", "call ms", "least", "added to the loop s", "by the memory copy"], rows)
    say("\ngoals: tierd, overlap: the call at most 5 ms, added at most 1.00 of the memory copy")


def main() -> None:
    parser = arguments("What a snapshot adds to a training loop.", mib=700, rounds=9, first="is left out")
    add_threads(parser)
    parser.add_argument("--batch", type=int, default=4, help="sequences of 128 tokens a step")
    with run_of(parser) as (args, folder):
        measure(args, folder)


if __name__ == "__main__":
    main()
