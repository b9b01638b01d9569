"""What signed checkpoints cost: the stall of a snapshot, the rate at which it becomes durable, and restores.

One run, one state, one disk. A daemon without a key and one with a key take turns, in another order each round. The
digests of the signed one are BLAKE3 where its package is installed, else SHA-256. Files are out of the page cache
before they are read. JSON lines on stdout, the table on stderr.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from restore import drop
from rounds import Figures, arguments, fact, in_turn, machine, on, run_of, say, spread, table
from serving import daemon, wait_quiet
from states import build_state

import tierd_client  # states.py has put it on the path  # isort: skip
from tierd.format.digest import preferred
from tierd.key_file import make_key_file

PLAIN, SIGNED = "unsigned", "signed"
TIMEOUT_S = 120.0
NAMES = {
    "stall_s": "stall (signed / unsigned)",
    "durable_s": "durable after it (rate / unsigned)",
    "hot_s": "restore from hot (rate / unsigned)",
    "cold_s": "restore from a cold directory (rate / unsigned)",
}
GOALS = {"stall_s": "at most 1.05", "durable_s": "at least 0.90", "hot_s": "at least 0.90", "cold_s": "at least 0.90"}


class Way:
    """One daemon and the trainer that it serves."""

    def __init__(self, name: str, args: argparse.Namespace, folder: Path, stack: ExitStack) -> None:
        self.name, self.folder = name, folder
        folder.mkdir()
        more = ""
        if name == SIGNED:
            make_key_file(folder / "key")
            more = f'[security]\nkey_file = "{folder}/key"\n'
        cold = f'[[cold]]\nname = "cold"\nurl = "file://{folder}/cold"\n'
        self.daemon = stack.enter_context(daemon(folder, more=cold + more, cold=""))
        self.state = build_state(args.mib, "gpt")
        self.client = tierd_client.connect("bench", socket=self.daemon.socket, every_steps=1)
        stack.callback(self.client.close)
        self.whole = tierd_client.TrainingState(model=self.state.model, optimizer=self.state.optimizer)
        self.step = 0

    def turn(self) -> dict[str, float]:
        self.state.change()
        wait_quiet([self.daemon.pid])
        self.step += 1
        began_s = time.perf_counter()
        shot = self.client.snapshot(self.step, self.whole)
        stalled_s = time.perf_counter()
        shot.wait_persisted(TIMEOUT_S)
        durable_s = time.perf_counter()
        shot.wait_replicated("cold", TIMEOUT_S)
        wait_quiet([self.daemon.pid])
        return {
            "stall_s": stalled_s - began_s,
            "durable_s": durable_s - stalled_s,
            "hot_s": self.restore("hot"),
            "cold_s": self.restore("cold"),
        }

    def restore(self, tier: str) -> float:
        drop(self.folder / tier)
        began_s = time.perf_counter()
        found = self.client.restore(self.whole, tier=tier)
        seconds = time.perf_counter() - began_s
        assert found is not None
        assert (found.step, found.tier) == (self.step, tier), found
        return seconds


def measure(args: argparse.Namespace, folder: Path) -> None:
    figures = Figures()
    with ExitStack() as stack:
        ways = [Way(name, args, folder / name, stack) for name in (PLAIN, SIGNED)]
        for number in range(args.rounds + 1):
            say(f"round {number} of {args.rounds}")
            for way in in_turn(ways, number):
                figures.add(way.name, **way.turn())
    report(figures, machine(folder), args.mib)


def report(figures: Figures, where: dict[str, Any], mib: int) -> None:
    facts = {(one["way"], one["figure"]): one for one in figures.facts()}
    fact(machine=where | {"mib": mib, "digest": preferred()})
    for one in facts.values():
        fact(**one)
    say(f"\n{mib} MiB, digests by {preferred()}; {on(where)}")
    say(f"seconds, medians of {facts[PLAIN, 'stall_s']['rounds']} rounds (least to most)\n")
    rows: list[list[str]] = []
    for figure in ("stall_s", "durable_s", "hot_s", "cold_s"):
        plain, signed = facts[PLAIN, figure], facts[SIGNED, figure]
        is_stall = figure == "stall_s"
        ratio = signed["median"] / plain["median"] if is_stall else plain["median"] / signed["median"]
        fact(figure=figure, ratio="signed / unsigned" if is_stall else "rate / unsigned", median=round(ratio, 3))
        rows.append([NAMES[figure], spread(plain), spread(signed), f"{ratio:.2f}", GOALS[figure]])
    table(["", PLAIN, SIGNED, "ratio", "goal"], rows)


def main() -> None:
    parser = arguments(__doc__ or "", mib=512, rounds=5, first="warms up")
    with run_of(parser) as (args, folder):
        measure(args, folder)


if __name__ == "__main__":
    main()
