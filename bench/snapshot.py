"""What a snapshot costs training, and how soon it is durable, beside what this machine can do at best and beside peers.

One run, one state, one disk. Each way is a process of its own (bench/ways.py) with the same state; they take turns, in
another order each round. A way that does not run here is left out, and said. JSON lines on stdout, the table on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from limits import Limits
from rounds import (
    MIB,
    ROOT,
    Figures,
    add_threads,
    arguments,
    fact,
    in_turn,
    machine,
    memory_bytes,
    on,
    run_of,
    say,
    spread,
    table,
)
from serving import ENVIRONMENT, cpu_s, daemon, wait_quiet
from states import SHAPES, build_state
from ways import TIMEOUT_S, WAYS, Way

PEERS_PYTHON = ROOT / ".venv-peers-torch" / "bin" / "python"  # sees the same torch: `make peers`
COPY, WRITE = "limit: memory copy", "limit: O_DIRECT write + fsync"
STATES_HELD = 2.5  # by a way, at most: the state, what it is staged in, what it is written from
GOALS = {
    "stall / memory copy": "at most 1.10",
    "durable rate after the stall / O_DIRECT rate": "at least 0.90",
    "stall / the best peer's": "below 1.00",
    "durable rate / the best peer's": "at least 2.00",
}


class LeftOut(Exception):
    """This way does not run here, and why."""


class Rank:
    """A process of one way. Ends with it, and with all that it has started."""

    def __init__(self, python: Path, log: Path, **options: Any) -> None:
        given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [python, ROOT / "bench" / "ways.py", *given],
                env=ENVIRONMENT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
            )

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], TIMEOUT_S)[0]:
            raise LeftOut(f"said nothing for {TIMEOUT_S:g} s")
        line = self.process.stdout.readline()
        found = json.loads(line) if line else {"error": "ended: " + self.log.read_text(errors="replace")[-300:]}
        if "error" in found:
            raise LeftOut(found["error"])
        return found

    def end(self) -> None:
        """In good order, so that it takes with it what it left in shared memory."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.close()
            self.process.wait(20)
        except (OSError, subprocess.TimeoutExpired):
            pass
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process.stdout.close()


@dataclass
class Running:
    """A way with all its ranks, and whose processor time is its own."""

    name: str
    ranks: list[Rank] = field(default_factory=list[Rank])
    daemons: list[int] = field(default_factory=list[int])

    @property
    def pids(self) -> list[int]:
        return [*(rank.process.pid for rank in self.ranks), *self.daemons]

    def ask(self, line: str = "") -> list[dict[str, Any]]:
        try:
            if line:
                for rank in self.ranks:
                    rank.tell(line)
            return [rank.answer() for rank in self.ranks]
        except BrokenPipeError as error:
            raise LeftOut(f"ended: {self.ranks[0].log.read_text(errors='replace')[-300:]}") from error

    def take(self) -> dict[str, float]:
        """One turn. Several ranks have stalled, and are durable, when the last one is."""
        self.ask("change")
        wait_quiet(self.pids)
        os.sync()
        used_s = cpu_s(self.pids)
        answers = self.ask("save")
        wait_quiet(self.pids)
        found = {name: max(one[name] for one in answers) for name in answers[0]}
        return found | {"after_s": found["durable_s"] - found["stall_s"], "cpu_s": cpu_s(self.pids) - used_s}

    def end(self) -> None:
        for rank in self.ranks:
            rank.end()


def start(way: Way, ranks: int, args: argparse.Namespace, folder: Path, socket: str, pid: int) -> Running:
    python = PEERS_PYTHON if way.package else Path(sys.executable)
    if not python.exists():
        raise LeftOut("not installed: `make peers`")
    own = way.name == "tierd"
    running = Running(f"{way.name}, {ranks} ranks" if ranks > 1 else way.name, daemons=[pid] if own else [])
    place = folder / running.name.replace(" ", "-")
    running.ranks = [
        Rank(
            python,
            folder / f"{place.name}-{rank}.log",
            way=way.name,
            mib=args.mib,
            shape=args.shape,
            folder=place,
            socket=socket,
            run=f"bench-{ranks}",
            rank=rank,
            ranks=ranks,
        )
        for rank in range(ranks)
    ]
    return running


def measure(args: argparse.Namespace, folder: Path) -> None:
    chosen = [(way, ranks) for way in WAYS if args.ways is None or way.name in args.ways
              for ranks in (args.ranks if way.name == "tierd" else [1])]  # fmt: skip
    need = args.mib * MIB * (2 + STATES_HELD * sum(ranks for _, ranks in chosen))
    if need > memory_bytes("MemAvailable"):
        raise SystemExit(
            f"{len(chosen)} ways at {args.mib} MiB need {need / 1e9:.0f} GB of memory, and "
            f"{memory_bytes('MemAvailable') / 1e9:.0f} are available: give a smaller --mib, or fewer --ways"
        )
    left_out: dict[str, str] = {}
    figures = Figures()
    state = build_state(args.mib, args.shape)
    limits = Limits(state.tensors, args.threads, folder)

    def limit(name: str, what: Callable[[], float]) -> None:
        state.change()
        os.sync()
        figures.add(name, s=what())

    with ExitStack() as stack:
        served = stack.enter_context(daemon(folder))
        running: list[Running] = []
        for way, ranks in chosen:
            try:
                one = start(way, ranks, args, folder, served.socket, served.pid)
                stack.callback(one.end)
                one.ask()
                running.append(one)
            except LeftOut as error:
                left_out[way.name] = str(error)
        turns: list[Running | tuple[str, Callable[[], float]]] = [
            (COPY, limits.copy),
            (WRITE, limits.write),
            *running,
        ]
        for number in range(args.rounds + 1):
            for turn in in_turn(turns, number):
                if not isinstance(turn, Running):
                    limit(*turn)
                elif turn.name not in left_out:
                    try:
                        figures.add(turn.name, **turn.take())
                    except LeftOut as error:
                        left_out[turn.name] = str(error)
                        figures.drop(turn.name)
    where = machine(folder) | {"torch": torch.__version__, "copy_threads": args.threads}
    where |= {"size_bytes": limits.size_bytes, "tensors": len(state.tensors), "shape": args.shape}
    report(figures, left_out, where | {"o_direct": limits.direct})


def report(figures: Figures, left_out: dict[str, str], where: dict[str, Any]) -> None:
    size_gb = where["size_bytes"] / 1e9
    facts = {(one["way"], one["figure"]): one for one in figures.facts()}
    fact(machine=where)
    for one in facts.values():
        fact(**one)
    copied, written = facts[COPY, "s"], facts[WRITE, "s"]
    say(f"\n{size_gb:.2f} GB of model and Adam state in {where['tensors']} tensors ({where['shape']}); {on(where)}")
    say(f"medians of {copied['rounds']} rounds (least to most), the first round apart\n")
    rows = [
        [COPY, spread(copied), f"{copied['first']:.3f}", "1.00", "", "", "", ""],
        [WRITE, "", "", "", spread(written), f"{written['first']:.3f}", "1.00", ""],
    ]
    for way in [way for way, figure in facts if figure == "stall_s"]:
        stalled, durable, used = (facts[way, figure] for figure in ("stall_s", "durable_s", "cpu_s"))
        rows.append([
            way,
            *(spread(stalled), f"{stalled['first']:.3f}", f"{stalled['median'] / copied['median']:.2f}"),
            *(spread(durable), f"{durable['first']:.3f}", f"{durable['median'] / written['median']:.2f}"),
            f"{used['median'] / size_gb:.2f}",
        ])  # fmt: skip
    heads = ["", "stall s", "first", "by copy", "durable s, in all", "first", "by write", "CPU-s/GB"]
    table(heads, rows)
    for name, reason in left_out.items():
        fact(left_out=name, reason=reason)
        say(f"left out: {name}: {reason}")
    if not where["o_direct"]:
        say("this filesystem refuses O_DIRECT: the write limit is that of buffered writes")
    say()
    for way in [way for way, figure in facts if figure == "after_s" and way.startswith("tierd")]:
        for name, ratio in ratios_of(way, facts).items():
            fact(way=way, ratio=name, **ratio)
            say(f"{way}: {name} {ratio['median']:.2f}, best by best {ratio['best']:.2f}    (goal: {GOALS[name]})")


def ratios_of(way: str, facts: dict[tuple[str, str], dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By the limits and the best peer, of the medians and of the best rounds: they part when something else had the
    machine busy."""
    columns = {"median": "median", "best": "min"}

    def ratio(one: Callable[[str], float], other: Callable[[str], float]) -> dict[str, float]:
        return {name: round(one(key) / other(key), 3) for name, key in columns.items()}

    def of(way: str, figure: str) -> Callable[[str], float]:
        return lambda key: facts[way, figure][key]

    def of_best_peer(figure: str) -> Callable[[str], float]:
        return lambda key: min(facts[peer, figure][key] for peer in peers)

    found = {
        "stall / memory copy": ratio(of(way, "stall_s"), of(COPY, "s")),
        "durable rate after the stall / O_DIRECT rate": ratio(of(WRITE, "s"), of(way, "after_s")),
    }
    peers = [peer for peer, figure in facts if figure == "stall_s" and not peer.startswith("tierd")]
    if peers:
        found["stall / the best peer's"] = ratio(of(way, "stall_s"), of_best_peer("stall_s"))
        found["durable rate / the best peer's"] = ratio(of_best_peer("durable_s"), of(way, "durable_s"))
    return found


def main() -> None:
    parser = arguments("Stall and time to durable of a snapshot.", mib=1024, rounds=5, first="is shown apart")
    add_threads(parser)
    parser.add_argument("--shape", choices=SHAPES, default="gpt", help="many: 20,000 tensors; large: three")
    parser.add_argument("--ways", nargs="*", choices=[way.name for way in WAYS], help="none: only the limits")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1], help="of tierd; each number is a way")
    with run_of(parser) as (args, folder):
        measure(args, folder)


if __name__ == "__main__":
    main()
