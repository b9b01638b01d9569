"""What a training loop on a CPU feels of the daemon beside it: how step times spread, with and without holding back.

Each round, in rotating order, the same loop trains for some seconds: with no snapshots; with snapshots that a daemon
persists and copies to a cold tier at normal priority and as fast as it can; and with a daemon as it is by default. A
step is forward, backward and optimizer; the call of snapshot() is left out, see bench/snapshot.py. JSON lines on
stdout, the table on stderr.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from rounds import arguments, fact, in_turn, machine, run_of, say
from serving import SETTLE_S, daemon
from states import build_state
from torch.nn import functional as F
from ways import TIMEOUT_S

import tierd_client  # states.py has put it on the path  # isort: skip

WITHOUT, FREELY, QUIETLY = "no snapshots", "not held back", "held back"
SETTINGS = {FREELY: {"TIERD_DAEMON_NICE": "0", "TIERD_DAEMON_SLOWDOWN_MAX": "0"}, QUIETLY: {}}
COLD = '[[cold]]\nurl = "file://cold"\n'
SNAPSHOTS = 3  # in each way's share of a round, evenly apart


class Steps:
    """Of one way, all rounds together: seconds of each step, and how long after the last one the last snapshot was in
    cold."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.copied_s: list[float] = []

    def facts(self) -> dict[str, float]:
        cuts = statistics.quantiles(self.seconds, n=100, method="inclusive")
        found = {f"p{cut}_ms": round(cuts[cut - 1] * 1e3, 1) for cut in (50, 95, 99)}
        found["mean_ms"] = round(statistics.mean(self.seconds) * 1e3, 1)
        if self.copied_s:
            found["in_cold_after_s"] = round(statistics.median(self.copied_s), 2)
        return found


def measure(args: argparse.Namespace, folder: Path) -> None:
    torch.set_num_threads(args.threads)
    built = build_state(args.mib)
    model, optimizer = built.model, built.optimizer
    state = tierd_client.TrainingState(model=model, optimizer=optimizer)
    tokens = torch.randint(0, 256, (args.batch, 128))
    number = 0

    def train() -> float:
        began = time.perf_counter()
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    def run(client: tierd_client.Client | None, found: Steps) -> None:
        nonlocal number
        began = time.perf_counter()
        shots: list[tierd_client.Shot] = []
        while (passed_s := time.perf_counter() - began) < args.seconds:
            number += 1
            found.seconds.append(train())
            if client is not None:
                client.due(number)
                if passed_s * (SNAPSHOTS + 1) > args.seconds * (len(shots) + 1):
                    shots.append(client.snapshot(number, state))
        if shots:  # what is left to do must not fall to the next way
            ended = time.perf_counter()
            shots[-1].wait_replicated("cold", TIMEOUT_S)
            found.copied_s.append(time.perf_counter() - ended)

    with ExitStack() as stack:
        clients: dict[str, tierd_client.Client | None] = {WITHOUT: None}
        for way, settings in SETTINGS.items():
            own = folder / way.replace(" ", "-")
            own.mkdir()
            served = stack.enter_context(daemon(own, cold=COLD, settings=settings))
            clients[way] = client = tierd_client.connect(f"bench-{len(clients)}", socket=served.socket, every_steps=0)
            stack.enter_context(client)
            client.restore(state)  # finds nothing, and begins to make the slots
        measured = {way: Steps() for way in clients}
        for turn in range(args.rounds + 1):
            for way in in_turn(list(clients), turn):
                time.sleep(SETTLE_S)
                # The first round finds nothing warm, and the daemon learns what is usual in it.
                run(clients[way], measured[way] if turn else Steps())
    report(
        measured,
        machine(folder)
        | {"torch": torch.__version__, "size_bytes": built.size_bytes}
        | {"seconds": args.seconds, "threads": args.threads},
    )


def report(measured: dict[str, Steps], where: dict[str, object]) -> None:
    fact(machine=where)
    say(f"\n{where['size_bytes']} bytes, {SNAPSHOTS} snapshots in {where['seconds']:g} s; {where['cores']} cores\n")
    say(f"{'steps':16}{'count':>8}{'p50 ms':>10}{'p95 ms':>10}{'p99 ms':>10}{'mean ms':>10}{'mean / none':>14}")
    without = measured[WITHOUT].facts()
    for way, steps in measured.items():
        facts = steps.facts()
        ratio = round(facts["mean_ms"] / without["mean_ms"], 3)
        fact(way=way, steps=len(steps.seconds), **facts, **{"mean / no snapshots": ratio})
        shown = "".join(f"{facts[name]:>10.1f}" for name in ("p50_ms", "p95_ms", "p99_ms", "mean_ms"))
        say(f"{way:16}{len(steps.seconds):>8}{shown}{ratio:>14.3f}")


def main() -> None:
    parser = arguments("Step times beside a daemon that persists and uploads.", mib=400, rounds=4, first="is left out")
    parser.add_argument("--seconds", type=float, default=24.0, help="of training, for each way in each round")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="that train")
    parser.add_argument("--batch", type=int, default=1, help="sequences of 128 tokens a step")
    with run_of(parser) as (args, folder):
        measure(args, folder)


if __name__ == "__main__":
    main()
