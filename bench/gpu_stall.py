"""What a snapshot costs a training on a GPU: how long the call takes, how much longer the next steps do, and when the
state is durable. A GPT of 350 M parameters, bf16 autocast, fused AdamW.

Each round, in rotating order: steps without a snapshot, and the same steps behind a snapshot by tierd (both modes),
torch.save, and DCP's async_save with pinned staging (its thread, its process). Beside them the limit: the bytes at
the rate at which this GPU copies into page-locked memory. JSON lines on stdout, the table on stderr.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from rounds import MIB, arguments, fact, in_turn, machine, run_of, say
from serving import SETTLE_S, daemon
from states import GPT, Shape
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.nn import functional as F
from ways import TIMEOUT_S

import tierd_client  # states.py has put it on the path  # isort: skip

SMALL_MIB = 5
LIMIT_BYTES = 1 << 30  # enough to time, and no second copy of the state


class Training:
    """`before_step` runs between backward and the optimizer's step: there a way waits that has to."""

    def __init__(self, device: torch.device, mib: int, batch: int, *, is_small: bool) -> None:
        torch.manual_seed(0)
        width = 128 if is_small else 1024
        layers = max(1, round(mib * MIB / (12 * width * width * 4 * 3)))
        shape = Shape(layers=layers, heads=width // 64, width=width, block_size=32 if is_small else 1024, dropout=0.0)
        self.device = device
        self.model = GPT(shape).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tokens = torch.randint(0, 256, (batch, shape.block_size), device=device)
        self.parameters = sum(one.numel() for one in self.model.parameters())
        self.train(1, lambda: None)
        self.moments = [one for entries in self.optimizer.state.values() for one in entries.values()]
        self.size_bytes = sum(one.nbytes for one in (*self.model.parameters(), *self.moments))

    def train(self, steps: int, before_step: Callable[[], None]) -> None:
        for _ in range(steps):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                loss = F.cross_entropy(self.model(self.tokens).flatten(0, 1).float(), self.tokens.flatten())
            loss.backward()
            before_step()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Way(Protocol):
    """One way to a checkpoint."""

    name: str

    def call(self, step: int) -> None:
        """Returns when training may go on."""
        ...

    def before_step(self) -> None:
        """Returns when the optimizer may change the state."""
        ...

    def wait_durable(self) -> None: ...


class Tierd:
    """Its own hook waits before the step."""

    def __init__(self, mode: str, address: str, training: Training) -> None:
        self.name = f"tierd {mode}"
        self.client = tierd_client.connect(f"bench-{mode}", socket=address, staging=mode)
        self.state = tierd_client.TrainingState(model=training.model, optimizer=training.optimizer)
        self.client.restore(self.state)  # finds nothing, and begins to make the slots, as in any training

    def call(self, step: int) -> None:
        self.shot = self.client.snapshot(step, self.state)

    def before_step(self) -> None:
        pass

    def wait_durable(self) -> None:
        self.shot.wait_persisted(TIMEOUT_S)


class TorchSave:
    name = "torch.save"

    def __init__(self, folder: Path, training: Training) -> None:
        self.path = folder / "torch.pt"
        self.training = training

    def call(self, step: int) -> None:
        self.path.unlink(missing_ok=True)
        torch.save(self.training.state_dict(), self.path)

    def before_step(self) -> None:
        pass

    def wait_durable(self) -> None:
        handle = os.open(self.path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


class Dcp:
    """async_save as its documentation has it: staged by a thread into memory that is kept and page-locked, which
    training waits for before it steps. The writer fsyncs."""

    def __init__(self, kind: str, folder: Path, training: Training) -> None:
        self.name = f"DCP {kind}"
        self.kind = AsyncCheckpointerType(kind)
        self.folder = folder / f"dcp-{kind}"
        self.training = training
        is_cuda = training.device.type == "cuda"
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=is_cuda,
                use_shared_memory=kind == "process",
                use_async_staging=True,
                use_non_blocking_copy=is_cuda,
            )
        )

    def call(self, step: int) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.saving: Any = dcp.async_save(
            self.training.state_dict(),
            storage_writer=dcp.FileSystemWriter(self.folder),
            async_checkpointer_type=self.kind,
            async_stager=self.stager,
        )

    def before_step(self) -> None:
        self.saving.staging_completion.result()

    def wait_durable(self) -> None:
        self.saving.upload_completion.result()


def page_locked_rate(training: Training) -> float:
    """Bytes a second from the device into memory that is page-locked and has been touched; the best of five."""
    device = training.device
    size = min(LIMIT_BYTES, training.size_bytes)
    from_ = torch.zeros(size, dtype=torch.uint8, device=device)
    to = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    seconds: list[float] = []
    for _ in range(5):
        training.wait()
        began = time.perf_counter()
        to.copy_(from_, non_blocking=True)
        training.wait()
        seconds.append(time.perf_counter() - began)
    return size / min(seconds)


@contextmanager
def one_rank(folder: Path) -> Generator[None]:
    """DCP asks for a process group, and its process for an address to meet at."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "ranks"), 1), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


Found = dict[str, dict[str, float]]
"""Figures of one round, by way."""


def measure(args: argparse.Namespace, folder: Path) -> None:
    device = torch.device(args.device)
    training = Training(device, args.mib, args.batch, is_small=args.small)
    rate = page_locked_rate(training)
    number = 0

    def steps(before_step: Callable[[], None]) -> float:
        began = time.perf_counter()
        training.train(args.steps, before_step)
        training.wait()
        return time.perf_counter() - began

    def undisturbed() -> Found:
        return {"": {"steps": steps(lambda: None)}}

    def behind(way: Way) -> Callable[[], Found]:
        def run() -> Found:
            began = time.perf_counter()
            way.call(number)
            call_s = time.perf_counter() - began
            whole_s = call_s + steps(way.before_step)
            way.wait_durable()
            return {way.name: {"call": call_s, "whole": whole_s, "durable": time.perf_counter() - began}}

        return run

    with ExitStack() as stack:
        address = stack.enter_context(daemon(folder)).socket
        ours = [Tierd(mode, address, training) for mode in ("sync", "overlap")]
        for one in ours:
            stack.callback(one.client.close)
        ways: list[Way] = [*ours, TorchSave(folder, training)]
        stack.enter_context(one_rank(folder))
        ways += [Dcp(kind, folder, training) for kind in ("thread", "process")]
        turns = [undisturbed, *map(behind, ways)]
        rounds: list[Found] = []
        began = time.monotonic()
        while number <= args.rounds and (number < 2 or time.monotonic() - began < args.budget_s):
            number += 1
            found: Found = {}
            for turn in in_turn(turns, number):
                training.wait()
                time.sleep(SETTLE_S)
                found |= turn()
            rounds.append(found)
        began = time.perf_counter()
        restored = ours[1].client.restore(ours[1].state)
        training.wait()
        restore_s = time.perf_counter() - began
    assert restored is not None, "the last checkpoint has just become durable"
    where = machine(folder) | {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "parameters": training.parameters,
        "size_bytes": training.size_bytes,
        "batch": args.batch,
        "steps": args.steps,
        "rounds": len(rounds) - 1,
    }
    report([way.name for way in ways], rounds, where, rate, (restored.tier, restore_s))


def report(
    ways: list[str], rounds: list[Found], where: dict[str, Any], rate: float, restored: tuple[str, float]
) -> None:
    size_bytes, steps = where["size_bytes"], where["steps"]
    limit_s = size_bytes / rate
    step_s = statistics.median(one[""]["steps"] for one in rounds[1:]) / steps
    tier, restore_s = restored
    fact(machine=where)
    fact(limit_gb_s=round(rate / 1e9, 2), limit_ms=round(limit_s * 1e3, 1), step_ms=round(step_s * 1e3, 2))
    state = f"{where['parameters'] / 1e6:.0f} M parameters, {size_bytes / 1e9:.2f} GB"
    say(f"\n{where['device']}, torch {where['torch']}: {state}; a step takes {step_s * 1e3:.1f} ms")
    say(f"limit: into page-locked memory at {rate / 1e9:.1f} GB/s, {limit_s * 1e3:.0f} ms")
    say(f"medians of {where['rounds']}, the first apart; added: to the call and {steps} steps\n")
    say(f"{'':16}{'call ms':>10}{'added ms':>10}{'/ limit':>9}{'durable s':>11}{'first call ms':>15}")
    for name in ways:
        added = [one[name]["whole"] - one[""]["steps"] for one in rounds[1:]]
        facts = {
            "way": name,
            "call_ms": round(statistics.median(one[name]["call"] for one in rounds[1:]) * 1e3, 2),
            "added_ms": round(statistics.median(added) * 1e3, 2),
            "added_ms_min": round(min(added) * 1e3, 2),
            "added_ms_max": round(max(added) * 1e3, 2),
            "added / limit": round(statistics.median(added) / limit_s, 2),
            "durable_s": round(statistics.median(one[name]["durable"] for one in rounds[1:]), 3),
            "first_call_ms": round(rounds[0][name]["call"] * 1e3, 1),
        }
        fact(**facts)
        columns = f"{facts['call_ms']:>10.1f}{facts['added_ms']:>10.1f}{facts['added / limit']:>9.2f}"
        say(f"{name:16}{columns}{facts['durable_s']:>11.2f}{facts['first_call_ms']:>15.1f}")
    fact(way="tierd restore", tier=tier, seconds=round(restore_s, 3), gb_s=round(size_bytes / restore_s / 1e9, 2))
    say(f"\ntierd restores it from {tier} in {restore_s:.2f} s, {size_bytes / restore_s / 1e9:.1f} GB/s")


def main() -> None:
    first = "is shown apart: it makes and page-locks the memory that later ones find"
    parser = arguments("What a snapshot costs a training on a GPU.", mib=4100, rounds=5, first=first)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help=f"{SMALL_MIB} MiB of state: to see that it works")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step")
    parser.add_argument("--steps", type=int, default=4, help="behind each snapshot")
    parser.add_argument("--budget-s", type=float, default=300.0, help="no round begins later, but for the second")
    with run_of(parser) as (args, folder):
        if args.device.startswith("cuda") and not torch.cuda.is_available():
            parser.error("there is no CUDA device; --device cpu --small shows that the rest works")
        if args.small:
            args.mib = SMALL_MIB
        measure(args, folder)


if __name__ == "__main__":
    main()
