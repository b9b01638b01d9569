"""One way to save a state, as a process of its own: its own copy of the state, its own interpreter where that has what
this one has not. The driver tells it over stdin when to change the state and when to save it, and reads JSON.

A way saves, and returns when training may change the state again: that was the stall. What it returns waits until it
says that it is done. Then all that it wrote is fsynced, files and folders, whether or not it has done so itself.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from states import SHAPES, State, build_state

TIMEOUT_S = 300.0
Save = Callable[[int, Path], Callable[[], object]]
"""(number, folder of its own that is not there yet) → what waits until it is done."""


@dataclass(frozen=True, kw_only=True)
class Place:
    folder: Path
    socket: str  # of the daemon
    run: str


@contextmanager
def tierd(state: State, place: Place) -> Generator[Save]:
    import tierd_client

    client = tierd_client.connect(place.run, socket=place.socket, every_steps=1)
    whole = tierd_client.TrainingState(model=state.model, optimizer=state.optimizer)
    client.restore(whole)  # finds nothing, and begins to make the slots, as in any training
    for thread in threading.enumerate():
        if thread.name == "tierd-prefault":
            thread.join()  # a training comes to its first snapshot long after

    def save(number: int, _: Path) -> Callable[[], object]:
        shot = client.snapshot(number, whole)
        return lambda: shot.wait_persisted(TIMEOUT_S)

    with client:
        yield save


@contextmanager
def torch_save(state: State, _: Place) -> Generator[Save]:
    def save(_: int, folder: Path) -> Callable[[], object]:
        folder.mkdir()
        torch.save(state.dicts(), folder / "state.pt")
        return lambda: None

    yield save


@contextmanager
def dcp(state: State, place: Place, kind: str) -> Generator[Save]:
    """Staged into the same memory each time: its default allocates anew."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    dist.init_process_group("gloo", init_method=f"file://{place.folder}/rendezvous", rank=0, world_size=1)
    pinned = torch.cuda.is_available()
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=pinned,
            use_shared_memory=kind == "process",
            use_async_staging=False,
            use_non_blocking_copy=pinned,
        )
    )

    def save(_: int, folder: Path) -> Callable[[], object]:
        found: Any = dcp.async_save(
            state.dicts(),
            checkpoint_id=str(folder),
            async_checkpointer_type=AsyncCheckpointerType(kind),
            async_stager=stager,
        )
        return lambda: found.result(TIMEOUT_S)

    yield save
    stager.close()
    dist.destroy_process_group()


@contextmanager
def torchsnapshot(state: State, _: Place) -> Generator[Save]:
    from torchsnapshot import Snapshot, StateDict  # pyright: ignore[reportMissingImports]

    def save(_: int, folder: Path) -> Callable[[], object]:
        pending = Snapshot.async_take(str(folder), {"state": StateDict(**state.dicts())})
        return pending.wait

    yield save


@contextmanager
def torch_checkpointing(state: State, _: Place) -> Generator[Save]:
    from torch_checkpointing import CheckpointManager  # pyright: ignore[reportMissingImports]
    from torch_checkpointing.storage.filesystem import (  # pyright: ignore[reportMissingImports]
        LocalFileSystemStorageConfig,
    )

    # Version 0.1.1 writes unaligned pieces with O_DIRECT: ext4 refuses that, and it does not fall back.
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    manager = CheckpointManager.Config(storage_config=storage).build()

    def save(_: int, folder: Path) -> Callable[[], object]:
        written = manager.save(str(folder), state.dicts())
        with manager.lock():  # staging goes on after save(): what holds up the optimizer's step
            pass
        return lambda: written.result(TIMEOUT_S)

    yield save
    manager.close()


@contextmanager
def dlrover(state: State, place: Place) -> Generator[Save]:
    run = os.environ["TORCHELASTIC_RUN_ID"] = f"bench-{os.getpid()}"  # names its shared memory and its sockets
    from dlrover.python.common.multi_process import SOCKET_TMP_DIR  # pyright: ignore[reportMissingImports]
    from dlrover.trainer.torch.flash_checkpoint.ddp import (  # pyright: ignore[reportMissingImports]
        DdpCheckpointer,
        StorageType,
    )

    checkpointer = DdpCheckpointer(str(place.folder))
    committed = place.folder / "dlrover_latest.txt"

    def save(number: int, folder: Path) -> Callable[[], object]:
        checkpointer.save_checkpoint(number, state.dicts(), str(folder / "state.pt"), storage_type=StorageType.DISK)

        def wait() -> None:  # its own wait looks every three seconds
            deadline_s = time.monotonic() + TIMEOUT_S
            while not (committed.exists() and committed.read_text() == str(number)):
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"dlrover did not commit step {number} in {TIMEOUT_S:g} s")
                time.sleep(0.005)

        return wait

    try:
        yield save
    finally:
        checkpointer._engine._shm_handler.unlink()
        shutil.rmtree(Path(SOCKET_TMP_DIR) / run, ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class Way:
    name: str
    save: Callable[[State, Place], AbstractContextManager[Save]]
    package: str = ""  # not in .venv: `make peers` installs it


WAYS = [
    Way(name="torch.save", save=torch_save),
    Way(name="DCP async_save, thread", save=lambda state, place: dcp(state, place, "thread")),
    Way(name="DCP async_save, process", save=lambda state, place: dcp(state, place, "process")),
    Way(name="torchsnapshot async_take", save=torchsnapshot, package="torchsnapshot"),
    Way(name="torch_checkpointing", save=torch_checkpointing, package="torch_checkpointing"),
    Way(name="DLRover flash checkpoint", save=dlrover, package="dlrover"),
    Way(name="tierd", save=tierd),
]


def fsync_all(folder: Path) -> None:
    """Files and folders, and the name of the folder itself."""
    for path in [*folder.rglob("*"), folder, folder.parent]:
        with suppress(FileNotFoundError):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def timed(save: Save, number: int, folder: Path) -> dict[str, float]:
    began = time.perf_counter()
    wait = save(number, folder)
    returned = time.perf_counter()
    wait()
    if folder.exists():
        fsync_all(folder)
    durable = time.perf_counter()
    shutil.rmtree(folder, ignore_errors=True)
    return {"stall_s": returned - began, "durable_s": durable - began}


def serve(args: argparse.Namespace, say: Callable[[dict[str, Any]], None]) -> None:
    args.folder.mkdir(exist_ok=True)
    (way,) = [way for way in WAYS if way.name == args.way]
    state = build_state(args.mib, args.shape)
    if args.ranks > 1:  # replicas, as under DDP: each tensor is written by one
        dist.init_process_group(
            "gloo", init_method=f"file://{args.folder}/rendezvous", rank=args.rank, world_size=args.ranks
        )
    with way.save(state, Place(folder=args.folder, socket=args.socket, run=args.run)) as save:
        say({"size_bytes": state.size_bytes, "tensors": len(state.tensors)})
        for number, line in enumerate(sys.stdin):
            if line.strip() == "change":
                state.change()
                say({})
            else:
                say(timed(save, number, args.folder / f"step-{number}"))


def main() -> None:
    parser = argparse.ArgumentParser(description="One way to save a state; bench/snapshot.py drives it.")
    parser.add_argument("--way", choices=[way.name for way in WAYS], required=True)
    parser.add_argument("--mib", type=int, required=True)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to write to")
    parser.add_argument("--socket", default="", help="of the daemon")
    parser.add_argument("--run", default="bench")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    warnings.simplefilter("ignore")

    def say(facts: dict[str, Any]) -> None:
        print(json.dumps(facts), file=answers, flush=True)

    try:
        serve(args, say)
    except Exception as error:  # the driver goes on without this way
        say({"error": f"{type(error).__name__}: {error}".splitlines()[0]})
        raise


if __name__ == "__main__":
    main()
