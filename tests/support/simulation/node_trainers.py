"""The trainers of one start of a job over several nodes. Each rank speaks with its node's daemon, as the client does.

Modelled: the look at all daemons before the claim, the claim by rank 0, the join of the others, one head and number
for all ranks, ranks that reconnect one by one and send again, and restores that begin on rank 0. When a rank cannot
join or restore, the whole start ends and another one begins. All ranks die together, as under torchrun.

Not modelled: partial restores, stop requests, a changed number of ranks.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import msgspec

from tests.support.simulation.checker import Id
from tests.support.simulation.daemon import EPOCH, Connection, SimulatedDaemon
from tests.support.simulation.loop import OWNER, Process
from tests.support.simulation.nodes_checker import NodesChecker, shard_name
from tests.support.simulation.trainer import (
    MILESTONE_STEPS,
    SLOTS,
    SLOW_S,
    Disconnected,
    Job,
    Refusal,
    SimulatedSlot,
    is_intact,
    make_memfd,
    make_shard,
    next_answer,
    read_and_close,
    sealed_message,
)
from tierd.format import wire

NAN = b"NaN"  # in a shard of an unhealthy snapshot
START_PAUSE_S = 10.0  # between two starts


class NodeRank:
    """One rank. `answers`: messages that somebody waits for; None: the connection has ended."""

    def __init__(self, number: int, node: str) -> None:
        self.number, self.node = number, node
        self.slots = [SimulatedSlot(make_memfd()) for _ in range(SLOTS)]
        self.connection: Connection | None = None
        self.answers: asyncio.Queue[tuple[Any, list[int]] | None] = asyncio.Queue()
        self.hello: wire.Hello | None = None
        self.welcome: wire.Welcome | None = None

    async def answer(self, kind: type) -> Any:
        return await next_answer(self.answers, kind)

    async def send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        if self.connection is None:
            raise Disconnected
        await self.connection.send(wire.encode(message), descriptors)


class NodeTrainers:
    """`placement`: the node of each rank. `find_daemon`: of a node, or None. `faults`: how many were injected so far.
    `poisoned`: nodes whose next snapshot is unhealthy."""

    def __init__(
        self,
        job: Job,
        placement: Sequence[str],
        name: str,
        checker: NodesChecker,
        find_daemon: Callable[[str], SimulatedDaemon | None],
        faults: Callable[[], float],
        trace: Callable[..., None],
        poisoned: set[str],
    ) -> None:
        self.job, self.placement, self.name = job, list(placement), name
        self.process = Process(name)
        self.step = 0
        self.generation: int | None = None
        self.restored: Id | None = None
        self.has_restored = False
        self.is_over = False
        self.is_paused = False
        self._allows_unhealthy = False
        self._checker = checker
        self._find_daemon = find_daemon
        self._faults = faults
        self._trace = trace
        self._poisoned = poisoned
        self._ranks: list[NodeRank] = []
        self._changed = asyncio.Event()
        self._number = 0
        self._requests = 0
        self._starts = 0

    @property
    def node(self) -> str:
        """Of rank 0."""
        return self.placement[0]

    @property
    def holder(self) -> str:
        return f"{self.name}.{self._starts}"

    def start(self) -> None:
        context = contextvars.copy_context()
        context.run(OWNER.set, self.process)
        self.task = context.run(asyncio.get_running_loop().create_task, self._run())

    def kill(self) -> None:
        self.process.is_alive = False
        self._disconnect()

    def _disconnect(self) -> None:
        for rank in self._ranks:
            if rank.connection is not None:
                rank.connection.shutdown()

    # ── one start ──

    async def _run(self) -> None:
        while not self.is_over:
            self._starts += 1
            self._ranks = [NodeRank(number, node) for number, node in enumerate(self.placement)]
            self.generation, self._number = None, 0
            try:
                await self._join()
                await self._restore()
            except (Disconnected, BrokenPipeError, TimeoutError, Refusal) as error:
                self._trace("start failed", self.holder, repr(error))
                # A person decides, after a while, to go on from it.
                self._allows_unhealthy = self._starts > 3 and isinstance(error, Refusal) and error.kind == "unhealthy"
                self._disconnect()
                await asyncio.sleep(START_PAUSE_S)
                continue
            self.has_restored = True
            keepers = [asyncio.get_running_loop().create_task(self._keep(rank)) for rank in self._ranks]
            await self._train()
            for keeper in keepers:
                keeper.cancel()
        self._disconnect()

    async def _join(self) -> None:
        nodes, seen = await self._look()
        faults, began_s = self._faults(), asyncio.get_running_loop().time()
        first = self._ranks[0]
        hello = self._hello(0, None)
        if nodes is not None:
            hello = msgspec.structs.replace(hello, node=nodes[0], above=seen)
        welcome = await self._open(first, hello)
        self.generation = welcome.generation
        self._trace("claimed", self.holder, welcome.generation)
        self._checker.holders[self.job.run, welcome.generation].add(self.holder)
        ended_s = asyncio.get_running_loop().time()
        if self._faults() == faults and ended_s - began_s < SLOW_S:
            self._checker.claim(self.job.run, welcome.generation, self.holder, began_s=began_s, ended_s=ended_s)
        for rank in self._ranks:
            hello = self._hello(rank.number, welcome.generation)
            if nodes is not None:
                node = msgspec.structs.replace(nodes[rank.number], claim=welcome.claim, base=welcome.base)
                hello = msgspec.structs.replace(hello, node=node)
            if rank is not first:
                await self._open(rank, hello)
            rank.hello = hello
            await self._attach(rank)

    async def _look(self) -> tuple[list[wire.NodeRanks] | None, int]:
        """(the node of each rank, None if all are on one; the highest generation that a daemon knows)."""
        daemons = await self._ask_all()
        while len({welcome.boot for welcome in daemons}) > 1:
            former, daemons = daemons, await self._ask_all()
            if [welcome.boot for welcome in daemons] == [welcome.boot for welcome in former]:
                break
        by_boot: dict[str, list[int]] = {}
        for rank, welcome in enumerate(daemons):
            by_boot.setdefault(welcome.boot, []).append(rank)
        if len(by_boot) == 1:
            return None, 0
        lowest = sorted(ranks[0] for ranks in by_boot.values())
        nodes = [wire.NodeRanks(ranks=by_boot[welcome.boot], lowest=lowest) for welcome in daemons]
        return nodes, max(welcome.seen or 0 for welcome in daemons)

    async def _ask_all(self) -> list[wire.Welcome]:
        async def ask(node: str) -> wire.Welcome:
            peer = NodeRank(0, node)
            for slot in peer.slots:
                os.close(slot.descriptor)
            welcome = await self._open(peer, self._hello(None, None))
            assert peer.connection is not None
            peer.connection.shutdown()
            return welcome

        answers = {node: await ask(node) for node in dict.fromkeys(self.placement)}
        return [answers[node] for node in self.placement]

    def _hello(self, rank: int | None, generation: int | None) -> wire.Hello:
        return wire.Hello(
            protocol=wire.PROTOCOL_VERSION,
            version="simulated",
            run=self.job.run,
            rank=rank,
            world_size=self.job.world_size,
            generation=generation,
        )

    async def _open(self, rank: NodeRank, hello: wire.Hello) -> wire.Welcome:
        daemon = self._find_daemon(rank.node)
        rank.connection = daemon.connect() if daemon is not None else None
        if rank.connection is None:
            raise Disconnected
        rank.answers = asyncio.Queue()
        asyncio.get_running_loop().create_task(self._receive(rank, rank.connection, rank.answers))
        await rank.send(hello)
        rank.welcome = await rank.answer(wire.Welcome)
        return rank.welcome

    async def _attach(self, rank: NodeRank) -> None:
        for index, slot in enumerate(rank.slots):
            await rank.send(wire.AttachSlot(slot=index, capacity_bytes=2 * 4096), [slot.descriptor])
        for sealed in sorted((slot.sealed for slot in rank.slots if slot.sealed), key=lambda sealed: sealed.step):
            await rank.send(msgspec.structs.replace(sealed, resent=True))

    async def _keep(self, rank: NodeRank) -> None:
        """Connect again whenever the connection has ended."""
        assert rank.hello is not None
        while not self.is_over:
            try:
                while (await rank.answers.get()) is not None:
                    pass
                await asyncio.sleep(2.0)
                while not self.is_over:
                    try:
                        await self._open(rank, rank.hello)
                        await self._attach(rank)
                        break
                    except (Disconnected, BrokenPipeError, TimeoutError):
                        await asyncio.sleep(2.0)
            except (Disconnected, BrokenPipeError):
                rank.answers.put_nowait(None)
            except Refusal as refused:
                if refused.kind == "stale":
                    self._end()
                rank.answers.put_nowait(None)
                await asyncio.sleep(5.0)

    async def _receive(
        self, rank: NodeRank, connection: Connection, answers: asyncio.Queue[tuple[Any, list[int]] | None]
    ) -> None:
        while True:
            raw, descriptors = await connection.receive()
            if not raw:
                answers.put_nowait(None)
                self._changed.set()
                return
            message = wire.decode_to_client(raw)
            self._hear(rank, message)
            match message:
                case wire.Welcome() | wire.FoundReplica() | wire.Held() | wire.Refused():
                    answers.put_nowait((message, descriptors))
                case wire.Released():
                    rank.slots[message.slot].sealed = None
                case wire.Persisted() | wire.Replicated() if message.generation == self.generation:
                    tier = message.tier if isinstance(message, wire.Replicated) else "hot"
                    checkpoint = Id(self.job.run, message.generation, message.step)
                    self._checker.told_rank(tier, rank.node, checkpoint, rank.number)
                    if rank.number == 0:
                        self._trace("told", self.holder, tier, checkpoint)
                case wire.Fenced():
                    self._end()
                case _:
                    pass
            self._changed.set()

    def _hear(self, rank: NodeRank, message: wire.ToClient) -> None:
        """Every message of a daemon, before anything else happens with it."""

    def _end(self) -> None:
        self.is_over = True
        self._trace("fenced", self.holder)
        self._changed.set()

    # ── restore ──

    async def _restore(self) -> None:
        """The newest checkpoint that rank 0's daemon finds, on all nodes; or step 0 when no daemon has one."""
        faults, began_s = self._faults(), asyncio.get_running_loop().time()
        least = self._checker.newest_reachable(self.job.run, self.node)
        restored, files = await self._find_on(self._ranks[0], None)
        lowest = [self._ranks[self.placement.index(node)] for node in dict.fromkeys(self.placement)][1:]
        for rank in lowest:
            if restored is not None:
                same, its_files = await self._find_on(rank, restored)
                if same is None:
                    raise Refusal("not_found")  # what another rank lacks, the real client asks for again
                self._checker.restored(self.job.run, rank.node, same, its_files, None)
            elif (known := await self._find_on(rank, None))[0] is not None:
                self._trace("not from scratch", self.holder, known[0])
                raise Refusal("unreachable")
        now = self._checker.newest_reachable(self.job.run, self.node)
        is_slow = asyncio.get_running_loop().time() - began_s > SLOW_S
        is_excused = self._faults() != faults or is_slow or least is None or now is None or now < least
        is_excused = is_excused or self._allows_unhealthy
        self._trace("restored", self.holder, restored)
        self._checker.restored(self.job.run, self.node, restored, files, None if is_excused else least)
        self.restored, self.step = restored, restored.step if restored else 0

    async def _find_on(
        self, rank: NodeRank, wanted: Id | None, excluded: Sequence[str] = ()
    ) -> tuple[Id | None, dict[str, bytes]]:
        exclude = list(excluded)
        while True:
            self._requests += 1
            await rank.send(
                wire.Find(
                    request=self._requests,
                    step=wanted.step if wanted else None,
                    generation=wanted.generation if wanted else None,
                    milestone=None,
                    tier="auto",
                    exclude=exclude,
                    allow_unhealthy=wanted is not None or self._allows_unhealthy,
                )
            )
            try:
                found, descriptors = await rank.answer(wire.FoundReplica)
            except Refusal as refused:
                if refused.kind != "not_found":
                    raise
                return None, {}
            manifest, *contents = [read_and_close(descriptor) for descriptor in descriptors]
            about = json.loads(manifest)
            names = zip(about["files"], contents, strict=True)
            files = {entry["name"]: content[: entry["size_bytes"]] for entry, content in names}
            if is_intact(about, files):
                return Id(about["run"], about["generation"], about["step"]), files
            exclude.append(f"{about['step']:012d}-g{about['generation']:04d}@{found.tier}")

    # ── training ──

    async def _train(self) -> None:
        while not self.is_over:
            await asyncio.sleep(self.job.interval_s)
            if self.is_paused:
                continue
            self.step += self.job.every_steps
            await self._exchange()
            await self._snapshot()

    async def _exchange(self) -> None:
        """What the ranks tell each other before each snapshot."""

    async def _snapshot(self) -> None:
        """Fill one slot of each rank, all with the head of rank 0. Skipped when no slot becomes free in time."""
        assert self.generation is not None
        try:
            async with asyncio.timeout(30.0):
                while not self.is_over and not all(
                    any(slot.sealed is None for slot in rank.slots) for rank in self._ranks
                ):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return
        if self.is_over:
            return
        checkpoint = Id(self.job.run, self.generation, self.step)
        self._number += 1
        self._taken()
        size = self.job.world_size
        files = {shard_name(rank.number, size): self._shard(checkpoint, rank) for rank in self._ranks}
        self._poisoned.difference_update(self.placement)
        self._checker.sealed(checkpoint, files, self.placement, is_milestone=self.step % MILESTONE_STEPS == 0)
        self._trace("sealed", self.holder, checkpoint)
        created_at = (EPOCH + timedelta(seconds=asyncio.get_running_loop().time())).isoformat()
        for rank, content in zip(self._ranks, files.values(), strict=True):
            index = next(index for index, slot in enumerate(rank.slots) if slot.sealed is None)
            os.pwrite(rank.slots[index].descriptor, content, 0)
            sealed = rank.slots[index].sealed = sealed_message(
                index, self.step, len(content), created_at=created_at, number=self._number
            )
            try:
                await rank.send(wire.Filling(slot=sealed.slot, step=self.step))
                await rank.send(sealed)
            except (Disconnected, BrokenPipeError):
                pass  # it is sent again after the reconnect
            await asyncio.sleep(0.01)

    def _taken(self) -> None:
        """A snapshot is being taken."""

    def _shard(self, checkpoint: Id, rank: NodeRank) -> bytes:
        content = make_shard(self.holder, checkpoint, rank.number)
        return NAN + content[len(NAN) :] if rank.node in self._poisoned else content
