"""What signed checkpoints cost: the stall of a snapshot, the rate at which it becomes durable, and restores.

One run, one state, one disk. A daemon without a key and one with a key take turns, in another order each round. The
digests of the signed one are BLAKE3 where its package is installed, else SHA-256. Files are out of the page cache
before they are read. The checkpoint that is restored from cold is no longer in hot, so the daemon fetches it.

On busy cores the processor seconds, of trainer and daemon together, are what to compare. JSON lines on stdout, the
table on stderr.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from restore import drop
from rounds import Figures, arguments, fact, in_turn, machine, on, run_of, say, spread, table
from serving import cpu_s, daemon, wait_quiet
from states import build_state

import tierd_client  # states.py has put it on the path  # isort: skip
from tierd.format.digest import preferred
from tierd.keys.key_file import make_key_file

Timed = TypeVar("Timed")

PLAIN, SIGNED = "unsigned", "signed"
TIMEOUT_S = 120.0
POLL_S = 0.05
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
        tiers = f'[[cold]]\nname = "cold"\nurl = "file://{folder}/cold"\n[lifecycle.hot]\nkeep_last = 1\n'
        self.daemon = stack.enter_context(daemon(folder, more=tiers + more, cold=""))
        self.state = build_state(args.mib, "gpt")
        self.client = tierd_client.connect("bench", socket=self.daemon.socket, every_steps=1)
        stack.callback(self.client.close)
        self.whole = tierd_client.TrainingState(model=self.state.model, optimizer=self.state.optimizer)
        self.step = 0
        self.figures: dict[str, float] = {}
        self.snapshot()  # the first turn restores it from cold

    def turn(self) -> dict[str, float]:
        self.figures = {}
        self.snapshot()
        self.restore("hot", self.step)
        evicted = self.step - 1
        while any((self.folder / "hot" / "bench").glob(f"{evicted:012d}-g*")):
            time.sleep(POLL_S)
        self.restore("cold", evicted)
        return self.figures

    def snapshot(self) -> None:
        self.state.change()
        wait_quiet([self.daemon.pid])
        self.step += 1
        shot = self.timed("stall", lambda: self.client.snapshot(self.step, self.whole))
        self.timed("durable", lambda: shot.wait_persisted(TIMEOUT_S))
        shot.wait_replicated("cold", TIMEOUT_S)
        wait_quiet([self.daemon.pid])

    def restore(self, tier: str, step: int) -> None:
        drop(self.folder / tier)
        found = self.timed(tier, lambda: self.client.restore(self.whole, resume=step, tier=tier))
        assert found is not None
        assert (found.step, found.tier) == (step, tier), found

    def timed(self, name: str, act: Callable[[], Timed]) -> Timed:
        began_s, began_cpu_s = time.perf_counter(), cpu_s([os.getpid()])
        result = act()
        self.figures |= {
            f"{name}_s": time.perf_counter() - began_s,
            f"{name}_cpu_s": cpu_s([os.getpid()]) - began_cpu_s,  # the daemon is a child
        }
        return result


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
    load = os.getloadavg()
    fact(machine=where | {"mib": mib, "digest": preferred(), "load": load})
    for one in facts.values():
        fact(**one)
    say(f"\n{mib} MiB, digests by {preferred()}; {on(where)}; load {load[0]:.1f}, {load[1]:.1f}, {load[2]:.1f}")
    say(f"seconds, medians of {facts[PLAIN, 'stall_s']['rounds']} rounds (least to most)\n")
    rows: list[list[str]] = []
    for figure in NAMES:
        plain, signed = facts[PLAIN, figure], facts[SIGNED, figure]
        ratio = {
            key: signed[key] / plain[key] if figure == "stall_s" else plain[key] / signed[key]
            for key in ("median", "min")
        }
        cpu = [facts[way, figure.replace("_s", "_cpu_s")]["median"] for way in (PLAIN, SIGNED)]
        fact(figure=figure, **{key: round(value, 3) for key, value in ratio.items()}, cpu_s=cpu)
        rows.append(
            [
                NAMES[figure],
                spread(plain),
                spread(signed),
                f"{ratio['median']:.2f}",
                f"{ratio['min']:.2f}",
                GOALS[figure],
                f"{cpu[0]:.2f} → {cpu[1]:.2f}",
            ]
        )
    table(["", PLAIN, SIGNED, "ratio", "of the least", "goal", "processor"], rows)


def main() -> None:
    parser = arguments(__doc__ or "", mib=512, rounds=5, first="warms up")
    with run_of(parser) as (args, folder):
        measure(args, folder)


if __name__ == "__main__":
    main()
