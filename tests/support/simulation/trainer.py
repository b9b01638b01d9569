"""A simulated trainer: one process that speaks for all ranks of a run, over the real wire messages and real memfds.

Modelled: claims and joins, slots, snapshots, what is sent again after a reconnect, restores with the exclusion of
damaged replicas, and training on from the restored step. It reports to the checker what it did and what it was told.

Not modelled: partial restores, stop requests, overlap, the client library's threads.
"""

from __future__ import annotations

import asyncio
import base64
import contextvars
import fcntl
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from awscrt.checksums import crc64nvme

from tests.support.simulation.checker import Checker, Id
from tests.support.simulation.daemon import EPOCH, Connection, SimulatedDaemon
from tests.support.simulation.loop import OWNER, Process
from tests.support.slots import make_sealed
from tierd.format import wire

SLOTS = 2
MILESTONE_STEPS = 50
SHARD_BYTES = 4500  # more than one block, and no multiple of it
ANSWER_TIMEOUT_S = 60.0
SLOW_S = 5.0  # a claim or a restore that takes longer may have left out a cold tier whose last listing failed


@dataclass(frozen=True)
class Job:
    """A training job: its run, the number of its ranks and nodes, and how often it takes a snapshot."""

    name: str
    run: str
    world_size: int
    interval_s: float
    every_steps: int = 10
    nodes: int = 1


class Disconnected(Exception):
    pass


class Refusal(Exception):
    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


@dataclass
class SimulatedSlot:
    """`sealed`: what it holds; None: it is free."""

    descriptor: int
    sealed: wire.Sealed | None = None


@dataclass
class _Rank:
    """One rank's connection and slots. `answers`: messages that somebody waits for."""

    number: int
    slots: list[SimulatedSlot]
    connection: Connection
    answers: asyncio.Queue[tuple[Any, list[int]] | None] = field(default_factory=asyncio.Queue)


class SimulatedTrainer:
    """`find_daemon`: the daemon of its node, or None. `faults`: how many faults were injected so far."""

    def __init__(
        self,
        job: Job,
        node: str,
        name: str,
        checker: Checker,
        find_daemon: Callable[[], SimulatedDaemon | None],
        faults: Callable[[], int],
        trace: Callable[..., None],
    ) -> None:
        self.job, self.node, self.name = job, node, name
        self.process = Process(name)
        self.step = 0
        self.generation: int | None = None
        self.restored: Id | None = None
        self.is_fenced = False
        self._checker = checker
        self._find_daemon = find_daemon
        self._faults = faults
        self._trace = trace
        self._ranks: list[_Rank] = []
        self._changed = asyncio.Event()
        self._requests = 0
        self._files: dict[int, dict[str, bytes]] = {}  # by step, of this generation

    def start(self) -> None:
        context = contextvars.copy_context()
        context.run(OWNER.set, self.process)
        self.task = context.run(asyncio.get_running_loop().create_task, self._run())

    def kill(self) -> None:
        self.process.is_alive = False
        for rank in self._ranks:
            rank.connection.shutdown()

    # ── connection ──

    async def _run(self) -> None:
        has_restored = False
        while not self.is_fenced:
            try:
                await self._connect()
                if not has_restored:
                    await self._restore()
                    has_restored = True
                await self._train()
            except (Disconnected, BrokenPipeError, TimeoutError):
                await asyncio.sleep(2.0)
            except Refusal as refused:
                if refused.kind == "stale":
                    return
                await asyncio.sleep(5.0)
            finally:
                for rank in self._ranks:
                    rank.connection.shutdown()

    async def _connect(self) -> None:
        former = {rank.number: rank.slots for rank in self._ranks}
        self._ranks = []
        for number in range(self.job.world_size):
            daemon = self._find_daemon()
            connection = daemon.connect() if daemon is not None else None
            if connection is None:
                raise Disconnected
            slots = former.get(number) or [SimulatedSlot(make_memfd()) for _ in range(SLOTS)]
            rank = _Rank(number, slots, connection)
            self._ranks.append(rank)
            asyncio.get_running_loop().create_task(self._receive(rank))
            hello = wire.Hello(
                protocol=wire.PROTOCOL_VERSION,
                version="simulated",
                run=self.job.run,
                rank=number,
                world_size=self.job.world_size,
                generation=self.generation,
            )
            faults, began_s = self._faults(), asyncio.get_running_loop().time()
            await self._send(rank, hello)
            welcome = await next_answer(rank.answers, wire.Welcome)
            if self.generation is None:
                self.generation = welcome.generation
                self._trace("claimed", self.name, welcome.generation)
                self._checker.holders[self.job.run, welcome.generation].add(self.name)
                ended_s = asyncio.get_running_loop().time()
                if self._faults() == faults and ended_s - began_s < SLOW_S:
                    self._checker.claim(self.job.run, welcome.generation, self.name, began_s=began_s, ended_s=ended_s)
            for index, slot in enumerate(slots):
                await self._send(rank, wire.AttachSlot(slot=index, capacity_bytes=2 * 4096), [slot.descriptor])
            for sealed in sorted((slot.sealed for slot in slots if slot.sealed), key=lambda sealed: sealed.step):
                await self._send(rank, msgspec.structs.replace(sealed, resent=True))

    async def _send(self, rank: _Rank, message: Any, descriptors: list[int] | None = None) -> None:
        await rank.connection.send(wire.encode(message), descriptors or [])

    async def _receive(self, rank: _Rank) -> None:
        while True:
            raw, descriptors = await rank.connection.receive()
            if not raw:
                rank.answers.put_nowait(None)
                self._changed.set()
                return
            message = wire.decode_to_client(raw)
            match message:
                case wire.Welcome() | wire.FoundReplica() | wire.Refused():
                    rank.answers.put_nowait((message, descriptors))
                case wire.Released():
                    rank.slots[message.slot].sealed = None
                case wire.Persisted() | wire.Replicated() if rank.number == 0 and message.generation == self.generation:
                    tier = message.tier if isinstance(message, wire.Replicated) else "hot"
                    checkpoint = Id(self.job.run, message.generation, message.step)
                    self._trace("told", self.name, tier, checkpoint)
                    if self._is_of_another(message.step):
                        continue
                    self._checker.told(tier, self.node, checkpoint, self._files[message.step])
                case wire.Fenced():
                    self.is_fenced = True
                case _:
                    pass
            self._changed.set()

    def _is_of_another(self, step: int) -> bool:
        """Whether another trainer with the same generation has written the step. The daemon here has fetched it."""
        has_other_holders = len(self._checker.holders[self.job.run, self.generation or 0]) > 1
        return has_other_holders and step not in self._files

    # ── restore ──

    async def _restore(self) -> None:
        """Restore the newest checkpoint, or begin at step 0 when the daemon says that there is none."""
        exclude: list[str] = []
        faults, began_s = self._faults(), asyncio.get_running_loop().time()
        least = self._checker.newest_reachable(self.job.run, self.node)
        while True:
            self._requests += 1
            find = wire.Find(
                request=self._requests, step=None, generation=None, milestone=None, tier="auto", exclude=exclude
            )
            restored, files = None, {}
            await self._send(self._ranks[0], find)
            try:
                found, descriptors = await next_answer(self._ranks[0].answers, wire.FoundReplica)
            except Refusal as refused:
                if refused.kind != "not_found":
                    raise
            else:
                manifest, *contents = [read_and_close(descriptor) for descriptor in descriptors]
                about = json.loads(manifest)
                restored = Id(about["run"], about["generation"], about["step"])
                files = {
                    entry["name"]: content[: entry["size_bytes"]]
                    for entry, content in zip(about["files"], contents, strict=True)
                }
                if not is_intact(about, files):
                    exclude.append(f"{about['step']:012d}-g{about['generation']:04d}@{found.tier}")
                    continue
            # A fault meanwhile may excuse an older checkpoint, and so does its own loss.
            now = self._checker.newest_reachable(self.job.run, self.node)
            is_slow = asyncio.get_running_loop().time() - began_s > SLOW_S
            is_excused = self._faults() != faults or is_slow or least is None or now is None or now < least
            self._trace("restored", self.name, restored)
            self._checker.restored(self.job.run, self.node, restored, files, None if is_excused else least)
            self.restored, self.step = restored, restored.step if restored else 0
            if restored is not None:
                await self._send(
                    self._ranks[0],
                    wire.Report(outcome="restored", step=restored.step, tier="hot", seconds=1.0, detail=""),
                )
            return

    # ── training ──

    async def _train(self) -> None:
        while not self.is_fenced:
            await asyncio.sleep(self.job.interval_s)
            self.step += self.job.every_steps
            await self._snapshot()

    async def _snapshot(self) -> None:
        """Fill one slot of each rank. Skipped when no slot becomes free in time."""
        assert self.generation is not None
        try:
            async with asyncio.timeout(30.0):
                while not all(any(slot.sealed is None for slot in rank.slots) for rank in self._ranks):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return
        checkpoint = Id(self.job.run, self.generation, self.step)
        size = self.job.world_size
        files = {
            f"rank-{rank:05d}-of-{size:05d}.safetensors": make_shard(self.name, checkpoint, rank)
            for rank in range(size)
        }
        self._files[self.step] = files
        self._checker.snapshots.setdefault(checkpoint, []).append(files)
        if self.step % MILESTONE_STEPS == 0:
            self._checker.milestones.add(checkpoint)
        self._trace("sealed", self.name, checkpoint)
        filled: list[tuple[_Rank, wire.Sealed]] = []
        for rank, content in zip(self._ranks, files.values(), strict=True):
            index = next(index for index, slot in enumerate(rank.slots) if slot.sealed is None)
            os.pwrite(rank.slots[index].descriptor, content, 0)
            sealed = rank.slots[index].sealed = sealed_message(index, self.step, len(content))
            filled.append((rank, sealed))
        for rank, sealed in filled:
            await self._send(rank, wire.Filling(slot=sealed.slot, step=self.step))
            await self._send(rank, sealed)
            await asyncio.sleep(0.01)


async def next_answer(answers: asyncio.Queue[tuple[Any, list[int]] | None], kind: type) -> Any:
    """With its descriptors if it is FoundReplica."""
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        answer = await answers.get()
    if answer is None:
        raise Disconnected
    message, descriptors = answer
    if isinstance(message, wire.Refused):
        raise Refusal(message.kind)
    assert isinstance(message, kind), message
    return (message, descriptors) if kind is wire.FoundReplica else message


def sealed_message(
    slot: int, step: int, size_bytes: int, *, created_at: str = EPOCH.isoformat(), number: int = 0
) -> wire.Sealed:
    milestone = f"step{step}" if step % MILESTONE_STEPS == 0 else None
    fields = {"created_at": created_at, "metrics": {}, "milestone": milestone, "number": number}
    return make_sealed(step, size_bytes, slot=slot, **fields)


def make_shard(trainer: str, checkpoint: Id, rank: int) -> bytes:
    """Bytes that no other trainer, checkpoint or rank has."""
    line = f"{trainer} {checkpoint} {rank}\n".encode()
    return (line * (SHARD_BYTES // len(line) + 1))[:SHARD_BYTES]


def make_memfd() -> int:
    descriptor = os.memfd_create("slot", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.posix_fallocate(descriptor, 0, 2 * 4096)  # a sparse one cannot be sealed
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return descriptor


def read_and_close(descriptor: int) -> bytes:
    try:
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    finally:
        os.close(descriptor)


def is_intact(manifest: dict[str, Any], files: dict[str, bytes]) -> bool:
    """As the client does, compare the checksums. A shard here is one chunk."""
    return all(
        base64.b64encode(crc64nvme(files[entry["name"]]).to_bytes(8, "big")).decode() == entry["crc64nvme"]
        for entry in manifest["files"]
    )
