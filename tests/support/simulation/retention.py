"""Retention under simulated time: real tiers on directories, and the workers' passes, one callback at a time.

A task is one pass of a worker, or one checkpoint that is being persisted. `advance` runs a number of callbacks of the
event loop, so that passes, new checkpoints, markers, unmounted tiers and kills meet at any await. Deletions are
observed directly after the job that made them. Simulated: the clock and the threads.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tests.support.cli import make_manifest
from tests.support.config import make_config
from tests.support.rooms import RUN, Rooms
from tests.support.simulation.loop import OWNER, Process, SimulatedLoop
from tests.support.store_contract import BytesSource
from tierd.catalog.listing import refresh
from tierd.config.sections import ColdPolicy, Config, LifecycleConfig
from tierd.errors import TierdError
from tierd.format import layout
from tierd.format.checksum import CHUNK_BYTES
from tierd.format.health import Diagnosis
from tierd.format.ids import HOT, Rank, checkpoint_id
from tierd.format.manifest import Manifest
from tierd.workers.reaper import Reaper
from tierd.workers.recovery import recover

READ_ONLY = {"walk", "_get", "<lambda>", "read_blocking", "begin"}  # jobs of a directory after which nothing differs
SHARD = layout.shard_name(Rank(0), 1)
MILESTONE = "milestone-kept.json"


class Id(NamedTuple):
    """A checkpoint of the run, in the order of age."""

    generation: int
    step: int


class Replica(NamedTuple):
    """What is beside a manifest."""

    has_milestone: bool
    verdict: bool | None  # whether it was found healthy


class SteppedLoop(SimulatedLoop):
    """Runs so many callbacks, not until something ends."""

    @contextmanager
    def running(self) -> Iterator[None]:
        asyncio._set_running_loop(self)
        try:
            yield
        finally:
            asyncio._set_running_loop(None)

    def advance(self, count: int, is_over: Callable[[], bool]) -> None:
        with self.running():
            for _ in range(count):
                if is_over():
                    return
                self._run_one()


class RetentionWorld:
    """`on_change`: called after each job that may have changed a directory, with the contents of all tiers before and
    after it."""

    def __init__(
        self,
        root: Path,
        lifecycle: LifecycleConfig,
        own: dict[str, ColdPolicy],
        *,
        seed: int,
        on_change: Callable[[dict[str, dict[Id, Replica]]], None],
    ) -> None:
        self.root = root
        self.cold = tuple(own)
        config = make_config(root, cold=self.cold, lifecycle=lifecycle)
        cold = [msgspec.structs.replace(tier, lifecycle=own[tier.name]) for tier in config.cold]
        self._config: Config = msgspec.structs.replace(config, cold=cold)
        self._on_change = on_change
        self._began = datetime.now(UTC)  # the directories are real, and so are the times of their files
        self.loop = SteppedLoop(seed)
        self.loop.latency_s = lambda name: (self.loop.random.uniform(0.0, 0.02), self.loop.random.uniform(0.0, 0.002))
        self.unmounted: set[str] = set()
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.bugs: list[BaseException] = []
        for tier in (HOT, *self.cold):
            (root / tier).mkdir()
        self.start()
        self.loop.after_job = self._after_job  # until here there is no checkpoint

    # ── the daemon ──

    def start(self) -> None:
        """A daemon that has recovered hot and has listed cold. Before it lists cold, it may delete from hot what no
        policy keeps, with the verdict `healthy`, which a cold replica may lack."""
        self._process = Process("daemon")
        self._context = contextvars.copy_context()
        self._context.run(OWNER.set, self._process)
        with self.loop.running():
            clocks: dict[str, Any] = {
                "now": lambda: self._began + timedelta(seconds=self.loop.time()),
                "monotonic_s": self.loop.time,
            }
            self.rooms = rooms = Rooms(self._config, **clocks)
            self._passes: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {
                "reap": Reaper(rooms.context).run_once
            }
            self._passes |= {
                f"list {name}": partial(refresh, rooms.catalog, tier) for name, tier in rooms.tiers.items()
            }
            self._passes |= {f"replicate {name}": rooms.replicator(name).run_once for name in self.cold}
        self.spawn("recover", lambda: recover(rooms.catalog, rooms.hot, rooms.hot_store, now_s=self._began.timestamp()))
        self.run_until_idle()
        for name in self.cold:  # a tier that a daemon has opened once and that disappears is unmounted, not empty
            os.close(rooms.cold[name].store.tree.open_folder("-", create=False)[0])  # type: ignore[attr-defined]
            self.begin_pass(f"list {name}")
        self.run_until_idle()

    def kill(self) -> None:
        """SIGKILL: nothing of it runs again, its `finally` blocks included."""
        self._process.is_alive = False
        self.tasks = {}

    @property
    def workers(self) -> list[str]:
        return list(self._passes)

    def check(self) -> None:
        """Raises what no worker may raise, and an error of a callback: the job that it belongs to would never end."""
        for bug in (*self.bugs, *(each["exception"] for each in self.loop.errors if "exception" in each)):
            raise bug

    def is_running(self, name: str) -> bool:
        return name in self.tasks and not self.tasks[name].done()

    def is_idle(self) -> bool:
        return not any(self.is_running(name) for name in self.tasks)

    def spawn(self, name: str, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        async def run() -> None:
            try:
                await work()
            except TierdError:
                pass  # the loop of the worker would record it
            except Exception as error:
                self.bugs.append(error)

        with self.loop.running():
            self.tasks[name] = self._context.run(self.loop.create_task, run())

    def begin_pass(self, worker: str) -> None:
        self.spawn(worker, self._passes[worker])

    def advance(self, count: int) -> None:
        self.loop.advance(count, self.is_idle)

    def advance_until(self, is_over: Callable[[], bool]) -> None:
        self.loop.advance(1_000_000, is_over)

    def run_until_idle(self) -> None:
        self.advance_until(self.is_idle)

    def wait(self, seconds: float) -> None:
        self.spawn("wait", partial(asyncio.sleep, seconds))
        self.advance_until(lambda: not self.is_running("wait"))

    # ── what happens to checkpoints ──

    def persist(self, checkpoint: Id, *, milestone: bool) -> None:
        """Begin to write a checkpoint to hot, as the persister does."""
        rooms, identity = self.rooms, checkpoint_id(RUN, checkpoint.step, checkpoint.generation)

        async def persist() -> None:
            content = f"{checkpoint}".encode()
            key = layout.file_key(identity, SHARD)
            source = BytesSource(content)
            entry = await rooms.hot_store.put(key, source, size_bytes=len(content), chunk_bytes=CHUNK_BYTES)
            manifest: Manifest = make_manifest(identity, [entry], sequence=rooms.catalog.sequence_max(RUN) + 1)
            names = ["kept"] if milestone else []
            await rooms.hot.commit(manifest, milestones=names)
            rooms.catalog.add(manifest, HOT, names)

        self.spawn("persist", persist)

    def examine(self, checkpoint: Id, *, is_healthy: bool) -> None:
        """Begin to write the verdict beside the hot replica, as the examiner does."""
        rooms, identity = self.rooms, checkpoint_id(RUN, checkpoint.step, checkpoint.generation)

        async def mark() -> None:
            async with rooms.context.lock(identity):
                entry = rooms.catalog.get(identity)
                if entry is not None and HOT in entry.tiers and not entry.diagnoses:
                    await rooms.hot.mark_diagnosis(identity, Diagnosis(healthy=is_healthy))
                    rooms.catalog.diagnosed(identity, HOT, is_healthy=is_healthy)

        self.spawn("examine", mark)

    def mark(self, checkpoint: Id, tiers: list[str]) -> None:
        """`tierd milestone` on another machine, at one instant."""
        for tier in tiers:
            (self._folder(tier, checkpoint) / MILESTONE).write_text("{}")
        self._on_change(self.contents())

    def unmount(self, tier: str) -> None:
        os.rename(self.root / tier, self.root / f"{tier}-unmounted")
        self.unmounted.add(tier)

    def mount(self, tier: str) -> None:
        os.rename(self.root / f"{tier}-unmounted", self.root / tier)
        self.unmounted.discard(tier)

    # ── what is there ──

    def contents(self) -> dict[str, dict[Id, Replica]]:
        """The committed checkpoints by tier, also of an unmounted one, as the disk has them."""
        return {tier: self._contents_of(tier) for tier in (HOT, *self.cold)}

    def sequence(self, tier: str, checkpoint: Id) -> int:
        manifest = self._folder(tier, checkpoint) / layout.MANIFEST
        return msgspec.json.decode(manifest.read_bytes())["sequence"]

    def _contents_of(self, tier: str) -> dict[Id, Replica]:
        replicas: dict[Id, Replica] = {}
        run = f"{self._root_of(tier)}/{RUN}"
        try:
            folders = os.listdir(run)
        except FileNotFoundError:
            folders = []
        for name in folders:
            step, separator, generation = name.partition("-g")
            files = os.listdir(f"{run}/{name}") if separator else ()
            if layout.MANIFEST in files and layout.GONE not in files:
                verdict = False if layout.UNHEALTHY in files else True if layout.HEALTHY in files else None
                replicas[Id(int(generation), int(step))] = Replica(MILESTONE in files, verdict)
        return replicas

    def _root_of(self, tier: str) -> Path:
        return self.root / (f"{tier}-unmounted" if tier in self.unmounted else tier)

    def _folder(self, tier: str, checkpoint: Id) -> Path:
        return self._root_of(tier) / RUN / checkpoint_id(RUN, checkpoint.step, checkpoint.generation).name

    def _after_job(self, name: str, function: str) -> None:
        if name == "tierd-directory" and function not in READ_ONLY:
            self._on_change(self.contents())

    def close(self) -> None:
        self.loop.after_job = lambda name, function: None
        self.loop.unwind()


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    memory = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(prefix="retention-", dir=memory if memory.is_dir() else None))
    state = random.getstate()
    try:
        yield root
    finally:
        random.setstate(state)
        shutil.rmtree(root, ignore_errors=True)
