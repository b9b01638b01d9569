"""Takes snapshots for hours while trainers are killed and start again, and fails when the daemon's footprint grows.

    python -m tests.support.soak --hours 8 [--seed 1]      prints a line per minute; `make soak HOURS=8`

A leak grows with every snapshot, restore or restart. What grows once, such as the threads of a pool, is in SLACK.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.support.daemon import Daemon
from tests.support.trainer import Trainer
from tests.support.wire_peer import Peer
from tierd.format import wire

SETTLE_S = 30.0  # for tasks that end and descriptors that are closed after the last message
PAUSE_S = 0.5  # between two measurements: each makes two HTTP connections, which the daemon must have closed
REPORT_S = 60.0
LIFE_SNAPSHOTS = 25  # between two restarts of a trainer
WARM_UP_SNAPSHOTS = 100
TIERS = ("memory", "hot", "cold")


@dataclass(frozen=True)
class Footprint:
    """What the daemon uses while no trainer is attached. `mappings`: of /proc/PID/maps."""

    descriptors: int
    mappings: int
    threads: int
    tasks: int
    slots: int
    memory_mib: int

    def growth(self, first: Footprint) -> dict[str, int]:
        """By how much each number exceeds the first one and its slack; empty when none does."""
        slack, former = asdict(SLACK), asdict(first)
        grown = {name: count - former[name] - slack[name] for name, count in asdict(self).items()}
        return {name: count for name, count in grown.items() if count > 0}

    def __str__(self) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in asdict(self).items())


# A few descriptors and tasks may be there at that moment: a file that is read, a connection that ends. Pools start a
# thread when no other is idle, long after the start too, each with up to three mappings; the allocator keeps what it
# has used once.
SLACK = Footprint(descriptors=3, mappings=36, threads=12, tasks=3, slots=0, memory_mib=48)


def footprint(daemon: Daemon) -> Footprint:
    proc = Path(f"/proc/{daemon.pid}")
    resident_kib = proc.joinpath("status").read_text().partition("RssAnon:")[2].split()[0]
    return Footprint(
        descriptors=daemon.descriptors(),
        mappings=len(proc.joinpath("maps").read_text().splitlines()),
        threads=len(os.listdir(proc / "task")),
        tasks=int(daemon.metric("tierd_event_loop_tasks")),
        slots=sum(daemon.status()["slots"].values()),
        memory_mib=int(resident_kib) >> 10,
    )


def open_files(daemon: Daemon) -> list[str]:
    """What the daemon's descriptors refer to, for the message of a failure."""
    folder = Path(f"/proc/{daemon.pid}/fd")
    return sorted(os.readlink(link) for link in folder.iterdir() if link.is_symlink())


def settled_growth(daemon: Daemon, first: Footprint) -> dict[str, int]:
    """The growth since `first`, once what the last trainer has left behind is gone, or after SETTLE_S."""
    deadline_s = time.monotonic() + SETTLE_S
    while (growth := footprint(daemon).growth(first)) and time.monotonic() < deadline_s:
        time.sleep(PAUSE_S)
    return growth


def settled(daemon: Daemon) -> Footprint:
    """The footprint once two measurements are equal, or after SETTLE_S."""
    former = footprint(daemon)
    deadline_s = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline_s:
        time.sleep(PAUSE_S)
        now = footprint(daemon)
        if now == former:
            break
        former = now
    return former


def take_snapshots(daemon: Daemon, count: int, *, first_step: int, life: int = LIFE_SNAPSHOTS) -> None:
    """Messages of trainers that are killed after `life` snapshots; each start restores from a tier."""
    for begin in range(first_step, first_step + count, life):
        with Peer(daemon.socket) as peer:
            peer.greet("run")
            if begin > 1:
                peer.find(tier=TIERS[begin // life % len(TIERS)])
                peer.take_files()
            peer.attach(0)
            peer.attach(1)
            for step in range(begin, min(begin + life, first_step + count)):
                peer.seal(step % 2, step, b"state of step %d" % step)
                peer.hear(wire.Persisted)
            peer.hear(wire.Replicated)


def live_once(daemon: Daemon, chance: random.Random) -> int:
    """A real trainer that restores, trains, and is killed at any instant, or ends. The number of its snapshots."""
    with Trainer() as trainer:
        trainer.connect(daemon.socket)
        trainer.enter()
        trainer.restore()
        snapshots = chance.randint(1, 2 * LIFE_SNAPSHOTS)
        for _ in range(snapshots):
            trainer.train(1)
            trainer.durable() if chance.random() < 0.5 else trainer.snapshot()
        if chance.random() < 0.2:
            trainer.close()
        else:
            trainer.train(1)
            trainer.begin("snapshot")
            time.sleep(chance.uniform(0.0, 0.05))
    return snapshots


def soak(daemon: Daemon, *, duration_s: float, seed: int) -> dict[str, int]:
    """Prints a line per minute. Returns the growth; empty when there is none."""
    chance = random.Random(seed)
    began_s = reported_s = time.monotonic()
    first: Footprint | None = None
    snapshots = restarts = 0
    while True:
        snapshots, restarts = snapshots + live_once(daemon, chance), restarts + 1
        is_over = time.monotonic() - began_s >= duration_s
        if first is None and snapshots >= WARM_UP_SNAPSHOTS:
            first = settled(daemon)
        if first is None or not (is_over or time.monotonic() - reported_s >= REPORT_S):
            continue
        reported_s = time.monotonic()
        grown = settled_growth(daemon, first)
        minutes = (reported_s - began_s) / 60
        print(f"{minutes:.0f} min: {snapshots} snapshots, {restarts} trainers; {footprint(daemon)}", flush=True)
        if grown or is_over:
            return grown


def main() -> int:
    parser = argparse.ArgumentParser(description="Soak the daemon and watch its footprint.")
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="tierd-soak-") as root, Daemon(Path(root)) as daemon:
        grown = soak(daemon, duration_s=arguments.hours * 3600, seed=arguments.seed)
    if grown:
        print(f"grown beyond the slack: {grown}", file=sys.stderr)
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
