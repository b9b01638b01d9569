"""What a snapshot costs training, and how soon it is durable, beside what this machine can do at best.

One run, one state (a GPT with its Adam moments), four ways in turn, each round in another order: a plain memory copy,
plain O_DIRECT writes, torch.save, and tierd with a real daemon. JSON lines on stdout, the table on stderr.
The limits are those of DESIGN: copy with all threads into pages already there; 16 MiB writes, four in flight, fsync.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from rounds import MIB, add_threads, arguments, fact, in_turn, machine, run_of, say

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "client"), str(ROOT / "examples")]

import tierd_client  # noqa: E402
from train_gpt import GPT, Shape, build_optimizer  # noqa: E402  # pyright: ignore[reportMissingImports]

COPY_BYTES = 8 * MIB  # one call of memmove: small enough to share the work out evenly
WRITE_BYTES = 16 * MIB
WRITES_IN_FLIGHT = 4
READY_TIMEOUT_S = 30.0
PERSIST_TIMEOUT_S = 300.0
SETTLE_S = 0.3  # before each measure: the daemon evicts, the filesystem frees what the way before has left


class Measure:
    """Seconds of one figure of one way, the first round apart: it pays for what later rounds find ready."""

    def __init__(self, way: str, figure: str) -> None:
        self.way = way
        self.figure = figure
        self.first_s = 0.0
        self.seconds: list[float] = []

    def facts(self, size_bytes: int) -> dict[str, Any]:
        median = statistics.median(self.seconds)
        return {
            "way": self.way,
            "figure": self.figure,
            "first_s": round(self.first_s, 4),
            "median_s": round(median, 4),
            "min_s": round(min(self.seconds), 4),
            "max_s": round(max(self.seconds), 4),
            "rounds": len(self.seconds),
            "median_gb_s": round(size_bytes / median / 1e9, 3),
        }


def build_state(mib: int) -> tuple[GPT, torch.optim.AdamW, list[torch.Tensor]]:
    """A GPT whose parameters and two Adam moments take about `mib`, with gradients, so that step() changes it all."""
    torch.manual_seed(0)
    width = 768 if mib >= 300 else 256
    layer_bytes = 12 * width * width * 4 * 3
    model = GPT(Shape(layers=max(1, round(mib * MIB / layer_bytes)), heads=8, width=width))
    optimizer = build_optimizer(model, 1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    moments = [tensor for entry in optimizer.state.values() for tensor in entry.values()]
    return model, optimizer, [parameter.detach() for parameter in model.parameters()] + moments


class Limits:
    """The same bytes as the state, copied and written by the shortest way there is."""

    def __init__(self, tensors: list[torch.Tensor], threads: int, folder: Path) -> None:
        self.size_bytes = sum(tensor.nbytes for tensor in tensors)
        self.folder = folder
        self.direct = True
        self.copiers = ThreadPoolExecutor(threads)
        self.writers = ThreadPoolExecutor(WRITES_IN_FLIGHT)
        padded = -(-self.size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE  # O_DIRECT writes whole pages
        self.memory = memoryview(mmap.mmap(-1, padded))
        self.memory[:: mmap.PAGESIZE] = bytes(padded // mmap.PAGESIZE)  # touch each page before any clock runs
        self.shares: list[list[tuple[int, int, int]]] = [[] for _ in range(threads)]
        target = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        done = 0
        for tensor in tensors:
            for offset in range(0, tensor.nbytes, COPY_BYTES):
                size = min(COPY_BYTES, tensor.nbytes - offset)
                share = self.shares[min(threads - 1, done * threads // self.size_bytes)]
                share.append((target + done, tensor.data_ptr() + offset, size))
                done += size

    def copy(self) -> float:
        def work(share: list[tuple[int, int, int]]) -> None:
            for piece in share:
                ctypes.memmove(*piece)

        started = time.perf_counter()
        list(self.copiers.map(work, self.shares))
        return time.perf_counter() - started

    def write(self) -> float:
        path = self.folder / "limit"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        started = time.perf_counter()
        try:
            handle = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError:  # tmpfs and some others refuse O_DIRECT
            self.direct = False
            handle = os.open(path, flags, 0o600)
        try:
            offsets = range(0, len(self.memory), WRITE_BYTES)
            sizes = self.writers.map(lambda at: os.pwrite(handle, self.memory[at : at + WRITE_BYTES], at), offsets)
            if sum(sizes) != len(self.memory):
                raise OSError(f"write {path}: fewer bytes than asked for were written")
            os.fsync(handle)
        finally:
            os.close(handle)
        seconds = time.perf_counter() - started
        path.unlink()
        return seconds


def save_with_torch(model: GPT, optimizer: torch.optim.AdamW, folder: Path) -> tuple[float, float]:
    """Seconds in torch.save, and seconds until fsync was done as well."""
    path = folder / "torch.pt"
    started = time.perf_counter()
    with path.open("wb") as file:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.flush()
        saved = time.perf_counter()
        os.fsync(file.fileno())
    durable = time.perf_counter()
    path.unlink()
    return saved - started, durable - started


@contextmanager
def daemon(
    folder: Path, *, cold: str = "cold = []\n", settings: Mapping[str, str] = MappingProxyType({})
) -> Generator[str]:
    """A daemon of its own with its hot tier under `folder`. Yields its socket. `cold` is TOML, `settings` are in its
    environment."""
    with tempfile.TemporaryDirectory(prefix="tierd-bench-", dir="/tmp") as short:  # socket paths have 107 bytes at most
        address = f"{short}/tierd.sock"
        config = folder / "tierd.toml"
        config.write_text(
            f'{cold}[daemon]\nsocket = "{address}"\nlisten = "127.0.0.1:0"\n[hot]\npath = "hot"\n',
            encoding="utf-8",
        )
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TIERD_")}
        environment |= settings
        environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'client'}"
        with (folder / "daemon.log").open("wb") as log:
            command = [sys.executable, "-m", "tierd", "--config", str(config), "serve"]
            child = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            wait_ready(address, child, folder / "daemon.log")
            yield address
        finally:
            child.terminate()
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def wait_ready(address: str, child: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while True:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
                probe.connect(address)
            return
        except OSError:
            if child.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"start the daemon: not listening on {address}\n{log.read_text()[-4000:]}") from None
            time.sleep(0.02)


def measure(args: argparse.Namespace, folder: Path) -> None:
    model, optimizer, tensors = build_state(args.mib)
    limits = Limits(tensors, args.threads, folder)
    copied = Measure("limit", "memory copy")
    written = Measure("limit", "O_DIRECT write + fsync")
    saved, saved_durable = Measure("torch.save", "stall"), Measure("torch.save", "durable, in all")
    stalled, durable = Measure("tierd", "stall"), Measure("tierd", "durable, in all")
    persisted = Measure("tierd", "durable, after stall")
    measures = [copied, written, saved, saved_durable, stalled, persisted, durable]

    def run(ways: list[Callable[[], list[tuple[Measure, float]]]]) -> None:
        for number in range(args.rounds + 1):
            for way in in_turn(ways, number):
                optimizer.step()  # every byte of the state changes, as training would change it
                time.sleep(SETTLE_S)
                os.sync()
                for figure, seconds in way():
                    if number == 0:
                        figure.first_s = seconds
                    else:
                        figure.seconds.append(seconds)

    def torch_save() -> list[tuple[Measure, float]]:
        stall_s, durable_s = save_with_torch(model, optimizer, folder)
        return [(saved, stall_s), (saved_durable, durable_s)]

    ways: list[Callable[[], list[tuple[Measure, float]]]] = [
        lambda: [(copied, limits.copy())],
        lambda: [(written, limits.write())],
        torch_save,
    ]
    if args.limits_only:
        run(ways)
    else:
        with daemon(folder) as address:
            client = tierd_client.connect(run="bench", socket=address, every_steps=1)
            state = tierd_client.TrainingState(model=model, optimizer=optimizer)
            client.restore(state)  # finds nothing, and begins to make the slots, as in any training
            step = 0

            def tierd_snapshot() -> list[tuple[Measure, float]]:
                nonlocal step
                step += 1
                started = time.perf_counter()
                shot = client.snapshot(step, state)
                returned = time.perf_counter()
                shot.wait_persisted(PERSIST_TIMEOUT_S)
                done = time.perf_counter()
                return [(stalled, returned - started), (persisted, done - returned), (durable, done - started)]

            with client:
                run([*ways, tierd_snapshot])
    report(
        [one for one in measures if one.seconds],
        limits,
        machine(folder) | {"torch": torch.__version__, "copy_threads": args.threads},
    )


def report(measures: list[Measure], limits: Limits, where: dict[str, Any]) -> None:
    size_bytes = limits.size_bytes
    where |= {"size_bytes": size_bytes, "o_direct": limits.direct}
    facts = [one.facts(size_bytes) for one in measures]
    ratios = ratios_of({(one["way"], one["figure"]): one for one in facts})
    for line in [{"machine": where}, *facts, *([{"ratios": ratios}] if ratios else [])]:
        fact(**line)
    say(f"\n{size_bytes / 1e9:.2f} GB of model and Adam state; {where['cores']} cores, {where['cpu']};")
    say(f"{where['filesystem']} on {where['disk']}; medians of {facts[0]['rounds']}, the first round apart\n")
    say(f"{'':32}{'median s':>10}{'min':>8}{'max':>8}{'GB/s':>8}{'first s':>10}")
    for one in facts:
        name = f"{one['way']}: {one['figure']}"
        spread = f"{one['median_s']:>10.3f}{one['min_s']:>8.3f}{one['max_s']:>8.3f}"
        say(f"{name:32}{spread}{one['median_gb_s']:>8.2f}{one['first_s']:>10.3f}")
    if not limits.direct:
        say("\nthis filesystem refuses O_DIRECT: the write limit is that of buffered writes")
    if ratios:
        say()
        for name, goal in (("stall / memory copy", "at most 1.10"), ("durable rate / O_DIRECT rate", "at least 0.90")):
            say(f"{name:30} {ratios[name]['medians']:.2f}, best by best {ratios[name]['best']:.2f}    (goal: {goal})")


def ratios_of(facts: dict[tuple[str, str], dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Ours by the limit, of the medians and of the best rounds: they part when something else had the machine busy."""
    if ("tierd", "stall") not in facts:
        return {}
    copied, written = facts["limit", "memory copy"], facts["limit", "O_DIRECT write + fsync"]
    stalled, durable = facts["tierd", "stall"], facts["tierd", "durable, after stall"]
    columns = {"medians": "median_s", "best": "min_s"}
    return {
        "stall / memory copy": {name: round(stalled[key] / copied[key], 3) for name, key in columns.items()},
        "durable rate / O_DIRECT rate": {name: round(written[key] / durable[key], 3) for name, key in columns.items()},
    }


def main() -> None:
    parser = arguments(
        "Stall and durable rate of a snapshot, beside the limits.", mib=700, rounds=7, first="is shown apart"
    )
    add_threads(parser)
    parser.add_argument("--limits-only", action="store_true", help="no daemon: only the limits and torch.save")
    with run_of(parser) as (args, folder):
        measure(args, folder)


if __name__ == "__main__":
    main()
