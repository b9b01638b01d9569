"""How fast a checkpoint is back in the tensors of a training, beside what this machine can do at best and beside torch.

One state, saved once in each way; each round every way brings it back, in another order. tierd's snapshot is that of a
trainer that was killed; its slots are adopted. A file is out of the page cache before it is read (dropped, and looked
at with mincore), and every way ends with the values in the live tensors. tierd verifies every chunk; the others verify
nothing. JSON lines on stdout, the table on stderr.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from limits import Limits
from rounds import ROOT, Figures, add_threads, arguments, fact, in_turn, machine, on, run_of, say, spread, table
from safetensors.torch import load_file, save_file
from serving import ENVIRONMENT, daemon, wait_quiet
from states import SHAPES, State, build_state

import tierd_client  # states.py has put it on the path  # isort: skip

COPY = "limit: memory copy"
DIRECT, BUFFERED = "limit: read, O_DIRECT", "limit: read, buffered"
MEMORY, HOT = "tierd: memory", "tierd: hot"


def drop(folder: Path) -> None:
    """Every file below it out of the page cache: else it is memory that is measured."""
    for path in [one for one in folder.rglob("*") if one.is_file()] if folder.is_dir() else [folder]:
        try:
            handle = os.open(path, os.O_RDONLY)
        except FileNotFoundError:  # a daemon has renamed it meanwhile
            continue
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            left = cached_pages(handle)
        finally:
            os.close(handle)
        if left:
            say(f"{left} pages of {path.name} stay in the page cache")


def cached_pages(handle: int) -> int:
    size_bytes = os.fstat(handle).st_size
    if size_bytes == 0:
        return 0
    with mmap.mmap(handle, size_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
        pages = (ctypes.c_ubyte * -(-size_bytes // mmap.PAGESIZE))()
        first = ctypes.c_ubyte.from_buffer(mapped)
        failed = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size_bytes), pages
        )
        del first
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(page & 1 for page in bytes(pages))


def by_torch(state: State, path: Path) -> None:
    found = torch.load(path, weights_only=True)
    state.model.load_state_dict(found["model"])
    state.optimizer.load_state_dict(found["optimizer"])


def by_torch_mapped(state: State, path: Path) -> None:
    """The optimizer's own load_state_dict() would take the file's pages for its moments, and read nothing yet."""
    found = torch.load(path, mmap=True, weights_only=True)
    state.model.load_state_dict(found["model"])
    for entry, loaded in zip(state.optimizer.state.values(), found["optimizer"]["state"].values(), strict=True):
        for name, tensor in loaded.items():
            entry[name].copy_(tensor)


def by_safetensors(state: State, path: Path) -> None:
    found = load_file(path)
    for number, tensor in enumerate(state.tensors):
        tensor.copy_(found[str(number)])


def save_and_be_killed(args: argparse.Namespace, folder: Path, socket: str) -> None:
    """A trainer of its own, with the same state, changed once. It is killed when its snapshot is durable."""
    options = {"way": "tierd", "mib": args.mib, "shape": args.shape, "folder": folder / "trainer", "socket": socket}
    command = [sys.executable, f"{ROOT}/bench/ways.py", *(f"--{name}={value}" for name, value in options.items())]
    with subprocess.Popen(
        command, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as trainer:
        assert trainer.stdin is not None
        assert trainer.stdout is not None
        trainer.stdin.write("change\nsave\n")
        trainer.stdin.flush()
        answers = [trainer.stdout.readline() for _ in ("it is there", "changed", "saved")]
        trainer.kill()
    if not answers[-1] or "durable_s" not in json.loads(answers[-1]):
        raise SystemExit(f"the trainer that is to be killed: {answers}")


def measure(args: argparse.Namespace, folder: Path) -> None:
    state = build_state(args.mib, args.shape)
    limits = Limits(state.tensors, args.threads, folder)
    figures = Figures()
    with ExitStack() as stack:
        served = stack.enter_context(daemon(folder))
        save_and_be_killed(args, folder, served.socket)
        client = tierd_client.connect("bench", socket=served.socket)
        stack.callback(client.close)
        whole = tierd_client.TrainingState(model=state.model, optimizer=state.optimizer)
        state.change()
        limits.write()
        torch.save(state.dicts(), folder / "state.pt")
        dcp.save(state.dicts(), checkpoint_id=folder / "dcp", no_dist=True)
        save_file({str(number): tensor for number, tensor in enumerate(state.tensors)}, folder / "state.safetensors")
        saved = [tensor.clone() for tensor in samples(state)]
        wait_quiet([served.pid])

        def from_tierd(tier: str) -> None:
            found = client.restore(whole, tier=tier)
            assert found is not None
            assert found.tier == tier

        turns: dict[str, tuple[Path | None, Callable[[], Any]]] = {
            COPY: (None, limits.copy),
            DIRECT: (limits.path, lambda: limits.read(direct=True)),
            BUFFERED: (limits.path, lambda: limits.read(direct=False)),
            MEMORY: (None, lambda: from_tierd("memory")),
            HOT: (folder / "hot", lambda: from_tierd("hot")),
            "torch.load": (folder / "state.pt", lambda: by_torch(state, folder / "state.pt")),
            "torch.load, mmap": (folder / "state.pt", lambda: by_torch_mapped(state, folder / "state.pt")),
            "dcp.load": (
                folder / "dcp",
                lambda: dcp.load(state.dicts(), checkpoint_id=folder / "dcp", no_dist=True),
            ),
            "safetensors load_file": (
                folder / "state.safetensors",
                lambda: by_safetensors(state, folder / "state.safetensors"),
            ),
        }
        for number in range(args.rounds + 1):
            for way in in_turn([*turns], number):
                files, turn = turns[way]
                if not way.startswith("limit"):
                    state.change()
                os.sync()
                if files:
                    drop(files)
                began = time.perf_counter()
                turn()
                figures.add(way, s=time.perf_counter() - began)
                if not way.startswith("limit"):
                    check(way, state, saved)
    report(figures, machine(folder) | {"torch": torch.__version__, "size_bytes": limits.size_bytes})


def samples(state: State) -> list[torch.Tensor]:
    """One of the model, and what is last in the optimizer."""
    return [state.tensors[0], *state.tensors[-2:]]


def check(way: str, state: State, saved: list[torch.Tensor]) -> None:
    if not all(torch.equal(is_, was) for is_, was in zip(samples(state), saved, strict=True)):
        raise SystemExit(f"{way} restored other values than were saved")


def report(figures: Figures, where: dict[str, Any]) -> None:
    facts = {one["way"]: one for one in figures.facts()}
    fact(machine=where)
    for one in facts.values():
        fact(**one)
    size_gb = where["size_bytes"] / 1e9
    read_s = min(facts[way]["median"] for way in (DIRECT, BUFFERED))
    say(f"\n{size_gb:.2f} GB back in place, files out of the page cache; {on(where)}")
    say(f"medians of {facts[COPY]['rounds']} rounds (least to most), the first round apart\n")
    rows = [
        [way, spread(one), f"{one['first']:.3f}", f"{size_gb / one['median']:.2f}", f"{read_s / one['median']:.2f}"]
        for way, one in facts.items()
    ]
    table(["", "s", "first", "GB/s", "of the best read"], rows)
    say()
    for way, limit_s, name, goal in (
        (MEMORY, facts[COPY]["median"], "memory copy", 0.8),
        (HOT, read_s, "best raw read", 0.9),
    ):
        ratio = limit_s / facts[way]["median"]
        fact(way=way, ratio=f"rate / {name}", median=round(ratio, 3))
        say(f"{way}: rate / {name} {ratio:.2f}    (goal: at least {goal})")


def main() -> None:
    parser = arguments("Rate of a restore.", mib=1024, rounds=5, first="is shown apart")
    add_threads(parser)
    parser.add_argument("--shape", choices=SHAPES, default="gpt", help="many: 20,000 tensors; large: three")
    warnings.simplefilter("ignore")  # DCP's, that it runs alone
    with run_of(parser) as (args, folder):
        measure(args, folder)


if __name__ == "__main__":
    main()
