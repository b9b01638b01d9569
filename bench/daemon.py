"""What the daemon costs: to start, with nothing to do, under load, and what the verbs cost beside many checkpoints.

Processor time and memory are those of the daemon and all that it has started. JSON lines on stdout, the table on
stderr.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rounds import MIB, Figures, arguments, fact, machine, on, run_of, say, spread, table
from serving import ENVIRONMENT, cpu_s, daemon, family, memory_of, wait_quiet
from states import build_state

import tierd_client  # states.py has put it on the path  # isort: skip
from tierd.format import checksum, layout
from tierd.format.ids import Rank, checkpoint_id
from tierd.format.manifest import Manifest, file_entry

IDLE_S = 10.0
TIMEOUT_S = 300.0
# What is listed is kept, and nobody looks into shards that hold no tensors.
LISTED_ONLY = "[lifecycle.hot]\nkeep_last = 1000000\n[health]\nexamine = false\n[scrub]\ninterval_s = 0\n"
VERBS = {"ls": ["ls"], "status": ["status"], "lifecycle --explain": ["lifecycle", "--explain"]}
GOALS = {
    ("start until ready", "s"): "below 1",
    ("idle", "cpu_percent"): "about 0",
    ("idle", "mb"): "at most 60",
    ("persisting and replicating", "mb_beside_slots"): "at most 256",
}


def memory_mb(pid: int) -> tuple[float, float]:
    """(all, all but the slots, which are the trainer's) of the daemon and its children."""
    found: list[dict[str, int]] = []
    for one in family([pid]):
        try:
            found.append(memory_of(one))
        except (OSError, TypeError):  # it ended meanwhile
            continue
    whole = sum(sum(one.values()) for one in found)
    return whole / 1e6, (whole - sum(one["RssShmem"] for one in found)) / 1e6


def start_and_idle(figures: Figures, folder: Path, rounds: int, idle_s: float) -> None:
    for number in range(rounds + 1):
        (folder / f"start-{number}").mkdir()
        with daemon(folder / f"start-{number}") as served:
            figures.add("start until ready", s=served.ready_s)
            if number == rounds:
                wait_quiet([served.pid])
                used_s = cpu_s([served.pid])
                time.sleep(idle_s)
                for _ in range(2):  # measured once: there is no first round to be apart
                    figures.add("idle", cpu_percent=(cpu_s([served.pid]) - used_s) / idle_s * 100)
                    figures.add("idle", mb=memory_mb(served.pid)[0])


def under_load(figures: Figures, folder: Path, rounds: int, mib: int) -> None:
    """Snapshots that are persisted, looked at, and replicated to a directory."""
    state = build_state(mib)
    peak = [0.0, 0.0]
    ended = threading.Event()
    folder.mkdir()
    with daemon(folder, cold='[[cold]]\nname = "cold"\nurl = "file://cold"\n') as served:

        def watch() -> None:
            while not ended.wait(0.02):
                peak[:] = [max(pair) for pair in zip(peak, memory_mb(served.pid), strict=True)]

        with tierd_client.connect("bench", socket=served.socket) as client:
            whole = tierd_client.TrainingState(model=state.model, optimizer=state.optimizer)
            client.restore(whole)
            watcher = threading.Thread(target=watch)
            watcher.start()
            try:
                for number in range(1, rounds + 2):
                    peak[:] = [0.0, 0.0]
                    used_s = cpu_s([served.pid])
                    state.change()
                    client.snapshot(number, whole).wait_replicated("cold", TIMEOUT_S)
                    wait_quiet([served.pid])
                    cpu_s_per_gb = (cpu_s([served.pid]) - used_s) / (state.size_bytes / 1e9)
                    figures.add("persisting and replicating", mb_beside_slots=peak[1], cpu_s_per_gb=cpu_s_per_gb)
            finally:
                ended.set()
                watcher.join()


def fill(hot: Path, counts: range) -> None:
    """As if a run had committed them."""
    shard = b"0123456789"
    entry = file_entry(layout.shard_name(Rank(0), 1), len(shard), 4096, [checksum.crc64nvme(shard)])
    for step in counts:
        checkpoint = checkpoint_id("bench", step, 1)
        manifest = Manifest(
            format_version=1,
            run=checkpoint.run,
            step=checkpoint.step,
            generation=checkpoint.generation,
            sequence=step + 1,
            parent=None,
            world_size=1,
            created_at="2025-01-01T00:00:00.000+00:00",
            kind="snapshot",
            metrics={},
            architecture_hash="0123abcd",
            versions={},
            files=[entry],
        )
        folder = hot / checkpoint.run / checkpoint.name
        folder.mkdir(parents=True)
        (folder / entry.name).write_bytes(shard)
        (folder / layout.MANIFEST).write_bytes(manifest.encode())


def with_many(figures: Figures, folder: Path, counts: list[int], rounds: int) -> None:
    folder.mkdir()
    held = 0
    for count in counts:
        fill(folder / "hot", range(held, count))
        held = count
        with daemon(folder, LISTED_ONLY) as served:
            wait_quiet([served.pid])
            for _ in range(rounds + 1):
                for name, verb in VERBS.items():
                    used_s = cpu_s([served.pid])
                    seconds, own_s = run([*verb, "--json"], served.config)
                    more_s = cpu_s([served.pid]) - used_s
                    figures.add(f"{name}, {count:,} checkpoints", s=seconds, cpu_s=own_s + more_s)


def run(verb: list[str], config: Path) -> tuple[float, float]:
    """(seconds, CPU-s) of the verb, as a process."""
    command = [sys.executable, "-m", "tierd", "--config", str(config), *verb]
    before, began = cpu_of_children(), time.perf_counter()
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, timeout=TIMEOUT_S, check=False)
    seconds = time.perf_counter() - began
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(verb)}: exit code {done.returncode}: {done.stderr.decode()[-500:]}")
    return seconds, cpu_of_children() - before


def cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(args: argparse.Namespace, folder: Path) -> None:
    figures = Figures()
    start_and_idle(figures, folder, args.rounds, args.idle_s)
    under_load(figures, folder / "load", args.rounds, args.mib)
    with_many(figures, folder / "many", args.counts, args.rounds)
    report(figures, machine(folder) | {"size_bytes": args.mib * MIB})


def report(figures: Figures, where: dict[str, Any]) -> None:
    fact(machine=where)
    say(f"\n{on(where)}; medians (least to most), the first round apart; load: {where['size_bytes'] / 1e9:.2f} GB\n")
    rows = []
    for one in figures.facts():
        fact(**one)
        goal = GOALS.get((one["way"], one["figure"]), "")
        rows.append([one["way"], one["figure"], spread(one, 2), f"{one['first']:.2f}", goal])
    table(["", "", "median", "first", "goal"], rows)


def main() -> None:
    parser = arguments("What the daemon costs.", mib=1024, rounds=5, first="is shown apart")
    parser.add_argument("--counts", type=int, nargs="+", default=[10, 1_000, 10_000], help="of checkpoints")
    parser.add_argument("--idle-s", type=float, default=IDLE_S)
    with run_of(parser) as (args, folder):
        measure(args, folder)


if __name__ == "__main__":
    main()
