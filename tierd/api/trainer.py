"""The trainers' door: one session per rank on the Unix socket. Speaks wire; moves no bytes, only descriptors.

harmless input: a peer of another user is refused, a message that breaks the protocol ends its connection, a slot
that could shrink is never mapped. fenced: when a newer generation comes, sessions of the older are told and closed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import time
import uuid
from collections.abc import Callable, Coroutine
from datetime import datetime
from typing import Any

import tierd
from tierd.api.handover import Finder, refused
from tierd.api.packets import PacketConnection
from tierd.api.rank_requests import Requests
from tierd.api.session import FIRST, NO_RANK, TrainerSession, Writer
from tierd.catalog import MEMORY, Catalog
from tierd.config import Config
from tierd.errors import BadRequest, Corrupt, Full, Stale, TierdError, TierUnreachable, Transient
from tierd.format import layout, wire
from tierd.format.ids import GENERATION_MAX, WORLD_SIZE_MAX, Generation, Rank, Run, check_run, checkpoint_id
from tierd.format.manifest import CheckpointRef
from tierd.incidents import Incidents
from tierd.memory.slot import MappedSlot
from tierd.memory.slot_states import SlotState
from tierd.memory.tier import MemoryTier
from tierd.metrics import Metrics
from tierd.throttle import WriteThrottle
from tierd.tiers.tier import Tier
from tierd.workers.restorer import Restorer, close_all, duplicates

log = logging.getLogger("tierd")

TEXT_MAX = 4096  # of a trainer's words that others are told: their message has room for it
ACCEPT_PAUSE_S = 0.2  # before the next try when there are no descriptors left
HURRY_S = 10.0  # a trainer that waits for its snapshot asks every two seconds
UNSEEN_MAX, UNSEEN_CHARS = 8, 1000  # they travel in one message


class TrainerDoor:
    def __init__(
        self,
        memory: MemoryTier,
        catalog: Catalog,
        hot: Tier,
        restorer: Restorer,
        config: Config,
        *,
        metrics: Metrics,
        incidents: Incidents,
        neighbour: WriteThrottle,
        on_whole: Callable[[], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        now: Callable[[], datetime],
    ) -> None:
        self._memory = memory
        self._catalog = catalog
        self._hot = hot
        self._restorer = restorer
        self._finder = Finder(restorer, incidents, spawn)
        self._config = config
        self._metrics = metrics
        self._incidents = incidents
        self._neighbour = neighbour
        self._on_whole = on_whole
        self._spawn = spawn
        self._now = now
        self._sessions: dict[tuple[Run, Rank], TrainerSession] = {}
        self._requests = Requests(self._sessions)
        self._writers: dict[tuple[Run, Rank], Writer] = {}  # who may have a rank's slots mapped
        self._connections = 0
        self._claiming = asyncio.Lock()
        self._boot = uuid.uuid4().hex

    # ── for workers ──

    def tell(self, run: Run, message: wire.ToClient) -> None:
        """To every rank of the run's current generation."""
        for session in self._sessions.values():
            if session.run == run:
                session.post(message)
        self._requests.tell(run, message)

    def settle(self, run: Run) -> None:
        """Tell ranks which slots are free again, now that a newer snapshot is whole or an older one persisted."""
        for found, is_lost in self._memory.release(run):
            for rank, snapshot in found.snapshots.items():
                session = self._sessions.get((run, rank))
                # A trainer that brought slots of its own must not hear of its predecessor's.
                if session is not None and self._memory.slots(run, rank).get(snapshot.index) is snapshot.slot:
                    session.post(wire.Released(slot=snapshot.index))
            # One that was sent again after it had been committed is not lost.
            if is_lost and self._catalog.get(found.id) is None:
                self._metrics.snapshots_total.labels(run=run, outcome="lost").inc()
                self.tell(
                    run,
                    wire.Failed(
                        step=found.id.step,
                        generation=found.id.generation,
                        stage="persist",
                        kind="superseded",
                        message=f"{found.id} was not persisted before a newer snapshot took its place",
                        hint="the daemon's log and `tierd status` say why persisting was behind",
                        is_final=True,
                    ),
                )

    def forget(self, run: Run) -> None:
        """The run's memory was given back: nobody writes into its slots any more."""
        for key in [key for key in self._writers if key[0] == run and key not in self._sessions]:
            self._writers.pop(key).close()

    # ── the door ──

    async def serve(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                self._incidents.record("wire", Transient(f"accept a connection: {error.strerror}"))
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            if self._connections >= self._config.limits.connections_max:
                sock.close()
                self._incidents.record("wire", Transient(f"accept a connection: {self._connections} are open"))
                continue
            self._connections += 1
            self._spawn(self._serve_one(PacketConnection(sock)))

    async def _serve_one(self, connection: PacketConnection) -> None:
        try:
            await self._attend(connection)
        except TierdError as error:
            await self._refuse(connection, error)
        except OSError:
            pass  # the peer has gone; leaving is all there is to do
        except Exception as error:  # a bug that one peer has met must not end the daemon for all
            self._incidents.record("wire", error)
        finally:
            self._connections -= 1
            connection.close()

    async def _attend(self, connection: PacketConnection) -> None:
        _check_peer(connection)
        hello = await self._hear_hello(connection)
        run = check_run(hello.run)
        if hello.rank is None:
            session, kept = TrainerSession(connection, run, NO_RANK, Generation(0)), {}
        else:
            session, kept = await self._enter(connection, hello, run, Rank(hello.rank))
        try:
            self._welcome(session, kept)
            self._requests.entered(session)
            async with asyncio.TaskGroup() as group:
                group.create_task(session.send_queued())
                try:
                    await self._converse(session)
                finally:
                    self._leave(session)
                    session.finish()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._leave(session)
            session.close()

    async def _hear_hello(self, connection: PacketConnection) -> wire.Hello:
        try:
            async with asyncio.timeout(self._config.limits.hello_timeout_s):
                raw, descriptors = await connection.receive()
        except TimeoutError:
            raise BadRequest("wait for Hello: the peer said nothing") from None
        close_all(descriptors)
        if not raw:
            raise ConnectionResetError
        hello = wire.decode_to_daemon(raw)
        if not isinstance(hello, wire.Hello):
            raise BadRequest(f"wait for Hello: the peer said {type(hello).__name__}")
        if hello.protocol != wire.PROTOCOL_VERSION:
            raise BadRequest(
                f"greet a client {hello.version[:80]}: it speaks protocol {hello.protocol}, this daemon "
                f"({tierd.__version__}) speaks {wire.PROTOCOL_VERSION}",
                hint="install the same tierd version in the trainer and the daemon",
            )
        return hello

    async def _enter(
        self, connection: PacketConnection, hello: wire.Hello, run: Run, rank: Rank
    ) -> tuple[TrainerSession, dict[int, MappedSlot]]:
        """The session of a trainer's rank, and the slots that it may adopt."""
        if not 0 <= rank < hello.world_size <= WORLD_SIZE_MAX:
            raise BadRequest(f"greet {run}: rank {rank} of world size {hello.world_size}")
        given = hello.generation
        generation = Generation(given) if given is not None else await self._claim(run, rank, hello)
        known = max(self._catalog.generation_max(run), self._memory.generation(run))
        if not 1 <= generation <= GENERATION_MAX:
            raise BadRequest(f"join run {run} as generation {generation}: not between 1 and {GENERATION_MAX}")
        if generation < known:
            raise Stale(
                f"join run {run} as generation {generation}: generation {known} has taken over",
                hint="another trainer of this run was started later; stop this one",
            )
        previous = self._memory.generation(run)
        self._memory.enter(run, generation, rank, hello.world_size)
        self._catalog.saw_generation(run, generation)
        if previous and generation > previous:
            self._fence(run, generation)
        key = (run, rank)
        replaced = self._sessions.get(key)
        if replaced is not None:
            replaced.finish()
        session = self._sessions[key] = TrainerSession(connection, run, rank, generation)
        writer, former = Writer.open(connection.peer_pid), self._writers.get(key)
        # A process that only lost its connection has its slots mapped; any other may take over what is there.
        is_back = former is not None and generation == previous and former.pid == writer.pid and not former.is_dead
        kept = {} if is_back else self._adoptable(run, rank)
        if former is not None:
            former.close()
        self._writers[key] = writer
        log.info("welcome %s rank %d of %d, generation %d", run, rank, hello.world_size, generation)
        return session, kept

    async def _claim(self, run: Run, rank: Rank, hello: wire.Hello) -> Generation:
        """A new generation, durably taken: no later start of any daemon on this directory gives it again."""
        if rank != 0:
            raise BadRequest(
                f"claim a generation of {run} as rank {rank}: only rank 0 does",
                hint="rank 0 connects first and gives its generation to the others",
            )
        await self._restorer.wait_first_listings()
        unseen = self._restorer.unlisted()
        least = 1
        if unseen and not self._catalog.generation_max(run) and not self._memory.generation(run):
            if not hello.starts_anew:
                raise TierUnreachable(
                    f"start {run}: nothing is known of it here, and these could not be listed: {'; '.join(unseen)}",
                    hint="its checkpoints may be there: bring the tier back, take it out of the config, or begin anew "
                    "with TIERD_RESUME=scratch in the trainer's environment",
                )
            # Minutes since 1970: more than any count of starts, so what may lie there stays older than what comes now.
            least = int(self._now().timestamp() / 60)
        async with self._claiming:
            generation = max(least, self._catalog.generation_max(run) + 1, self._memory.generation(run) + 1)
            while not await self._hot.claim_generation(
                run, Generation(generation), {"node": self._config.daemon.node, "claimed_by": tierd.__version__}
            ):
                generation += 1
            self._catalog.saw_generation(run, generation)
        return Generation(generation)

    def _fence(self, run: Run, generation: Generation) -> None:
        for key, session in list(self._sessions.items()):
            if session.run == run and session.generation < generation:
                session.post(wire.Fenced(generation=generation))
                session.finish()
                del self._sessions[key]

    def _adoptable(self, run: Run, rank: Rank) -> dict[int, MappedSlot]:
        """The rank's slots, if whoever had them is dead for certain: else it could write into them."""
        writer = self._writers.get((run, rank))
        slots = self._memory.slots(run, rank)
        if writer is not None and writer.is_dead:
            return slots
        if slots:
            log.warning("%s rank %d: its former trainer may still live; new slots instead of its old ones", run, rank)
            self._memory.detach(run, rank)
        return {}

    def _welcome(self, session: TrainerSession, kept: dict[int, MappedSlot]) -> None:
        told = self._config.snapshot
        newest = self._restorer.newest(session.run)
        session.post(
            wire.Welcome(
                protocol=wire.PROTOCOL_VERSION,
                version=tierd.__version__,
                node=self._config.daemon.node,
                boot=self._boot,
                generation=session.generation,
                slots=[
                    wire.KeptSlot(slot=index, capacity_bytes=slot.capacity_bytes, is_free=slot.state is SlotState.FREE)
                    for index, slot in kept.items()
                ],
                every_steps=told.every_steps,
                every_s=told.every_s,
                slots_per_rank=told.slots,
                slot_wait_s=told.slot_wait_s,
                when_busy=told.when_busy,
                staging=told.staging,
                stop_grace_s=told.stop_grace_s,
                newest=newest and CheckpointRef(run=newest.run, step=newest.step, generation=newest.generation),
                unseen=[why[:UNSEEN_CHARS] for why in self._restorer.unlisted()[:UNSEEN_MAX]],
                report_s=self._neighbour.report_s if session.rank == FIRST else 0.0,
            ),
            duplicates([slot.fd for slot in kept.values()]),
        )

    async def _converse(self, session: TrainerSession) -> None:
        while True:
            raw, descriptors = await session.connection.receive()
            if not raw:
                return
            try:
                message = wire.decode_to_daemon(raw)
                if isinstance(message, wire.Goodbye):
                    self._part(session, message)
                    return
                if isinstance(message, wire.Find):
                    self._finder.ask(session, message)
                elif isinstance(message, wire.Request):
                    self._neighbour.hurry(session)  # it waits for what comes of it
                    self._requests.ask(session, message)
                elif session.rank == NO_RANK:
                    raise BadRequest(f"take {type(message).__name__} from a peer that is no trainer")
                elif isinstance(message, wire.AttachSlot):
                    taken, descriptors = descriptors, []
                    self._attach(session, message, taken)
                else:
                    self._take(session, message)
            finally:
                close_all(descriptors)

    def _part(self, session: TrainerSession, goodbye: wire.Goodbye) -> None:
        log.info("goodbye %s rank %d: %s %s", session.run, session.rank, goodbye.state, goodbye.reason[:200])
        if self._sessions.get((session.run, session.rank)) is session:  # a fenced one has no say
            self._memory.endings.said(session.run, session.rank, goodbye.state, goodbye.reason)

    def _attach(self, session: TrainerSession, message: wire.AttachSlot, descriptors: list[int]) -> None:
        if len(descriptors) != 1:
            close_all(descriptors)
            raise BadRequest(f"attach slot {message.slot}: {len(descriptors)} descriptors, expected 1")
        slot = MappedSlot(descriptors[0], message.capacity_bytes)
        self._memory.attach(session.run, session.rank, message.slot, slot)

    def _take(self, session: TrainerSession, message: wire.ToDaemon) -> None:
        run, generation, rank = session.run, session.generation, session.rank
        match message:
            case wire.Filling():
                self._memory.fill(run, generation, rank, message.slot)
            case wire.Abandon():
                self._memory.abandon(run, generation, rank, message.slot)
            case wire.Sealed():
                _check_sealed(message)
                found = self._memory.seal(run, generation, rank, message, now_s=time.monotonic())
                session.post(wire.Accepted(slot=message.slot, step=message.step))
                if message.resent:
                    self._answer(session, wire.Ask(step=message.step, generation=generation))
                else:
                    self._metrics.snapshot_stall_seconds.observe(message.stall_s)
                if self._memory.is_lost(found.id):
                    self._release_lost(session, message.step)
                self.settle(run)
                if found.is_pending:
                    self._on_whole()
            case wire.Lost():
                self._lose(session, message)
            case wire.Ask():
                self._neighbour.hurry(session, HURRY_S)
                self._answer(session, message)
            case wire.Stepped():
                if session.rank != FIRST or not 0 < message.seconds < math.inf:
                    raise BadRequest(f"hear of steps of {message.seconds} s from rank {rank} of {run}")
                self._neighbour.heard(run, message.seconds)
            case wire.Report():
                self._report(session, message)
            case wire.Convene():
                self._requests.convene(session, message)
            case wire.Answer():
                self._requests.answer(session, message)
            case _:
                raise BadRequest(f"take {type(message).__name__} in the middle of a conversation")

    def _lose(self, session: TrainerSession, lost: wire.Lost) -> None:
        """One rank's part is not coming: all ranks hear of it, and those that have sealed get their slots back."""
        run, generation, rank = session.run, session.generation, session.rank
        checkpoint = checkpoint_id(run, lost.step, generation)
        is_news = not self._memory.is_lost(checkpoint)
        self._release_lost(session, lost.step)
        if not is_news:
            return
        self._metrics.snapshots_total.labels(run=run, outcome="failed").inc()
        log.warning("%s rank %d lost step %d: %r", run, rank, lost.step, lost.message[:TEXT_MAX])
        self.tell(
            run,
            wire.Failed(
                step=lost.step,
                generation=generation,
                stage="stage",
                kind=lost.kind,
                message=f"rank {rank}: {lost.message[:TEXT_MAX]}",
                hint=lost.hint[:TEXT_MAX],
                is_final=True,
            ),
        )

    def _release_lost(self, session: TrainerSession, step: int) -> None:
        for rank, index in self._memory.lose(session.run, session.generation, step):
            other = self._sessions.get((session.run, rank))
            if other is not None:
                other.post(wire.Released(slot=index))

    def _answer(self, session: TrainerSession, ask: wire.Ask) -> None:
        entry = self._catalog.get(checkpoint_id(session.run, ask.step, ask.generation))
        for tier in entry.tiers if entry else ():
            if tier == self._hot.name:
                session.post(wire.Persisted(step=ask.step, generation=ask.generation, seconds=0.0))
            else:
                session.post(wire.Replicated(step=ask.step, generation=ask.generation, tier=tier))

    def _report(self, session: TrainerSession, report: wire.Report) -> None:
        run, detail = session.run, repr(report.detail)
        tier = report.tier if report.tier in (*self._catalog.tiers, MEMORY) else "other"
        _check_seconds("take a report", report.seconds)
        match report.outcome:
            case "restored":
                self._metrics.restore_seconds.labels(tier=tier).observe(report.seconds)
                log.info("restored %s to step %d from %s", run, report.step, tier)
                self._spawn(self._restorer.restored(run))  # a rank says so when all of them have it
            case "skipped":
                if session.rank == 0:  # all ranks skip a step together, and all say so
                    self._metrics.snapshots_total.labels(run=run, outcome="skipped").inc()
                log.warning("%s rank %d skipped step %d: %s", run, session.rank, report.step, detail)
            case "failed":
                self._metrics.snapshots_total.labels(run=run, outcome="failed").inc()
                log.warning("%s rank %d could not stage step %d: %s", run, session.rank, report.step, detail)
            case "unpinned":
                self._incidents.record("stage", Full(f"{run} rank {session.rank} step {report.step}: {detail}"))
            case "corrupt":
                self._metrics.verify_failures_total.labels(tier=tier).inc()
                self._incidents.record("restore", Corrupt(f"{run} step {report.step} in {tier}: {detail}"))
            case _:
                raise BadRequest(f"take a report: outcome {report.outcome!r}")

    async def _refuse(self, connection: PacketConnection, error: TierdError) -> None:
        self._incidents.record("wire", error)
        try:
            async with asyncio.timeout(1.0):
                await connection.send(wire.encode(refused(0, error)))
        except (OSError, TimeoutError):
            pass  # it will not hear the reason

    def _leave(self, session: TrainerSession) -> None:
        self._requests.left(session)
        self._neighbour.calm(session)
        key = (session.run, session.rank)
        if self._sessions.get(key) is session:
            del self._sessions[key]
            if session.rank == FIRST:
                self._neighbour.left(session.run)
            self._memory.leave(session.run, session.rank, now_s=time.monotonic())
            if not self._memory.slots(session.run, session.rank):
                self._writers.pop(key).close()  # there is nothing that it could write into
            log.info("%s rank %d has gone; its sealed snapshots stay", session.run, session.rank)


def _check_peer(connection: PacketConnection) -> None:
    if connection.peer_uid not in (0, os.geteuid()):
        raise BadRequest(
            f"greet process {connection.peer_pid}: it runs as uid {connection.peer_uid}, the daemon as {os.geteuid()}",
            hint="run the daemon and the trainer as the same user",
        )


def _check_sealed(sealed: wire.Sealed) -> None:
    """What ends up in a manifest, a file name or a metric must be what it says it is."""
    doing = f"seal step {sealed.step}"
    _check_seconds(doing, sealed.stall_s)
    if sealed.milestone is not None and layout.milestone_of(f"milestone-{sealed.milestone}.json") is None:
        raise BadRequest(f"{doing}: {sealed.milestone!r} cannot name a milestone")
    try:
        is_zoned = datetime.fromisoformat(sealed.created_at).tzinfo is not None
    except ValueError:
        is_zoned = False
    if not is_zoned:
        raise BadRequest(f"{doing}: created_at {sealed.created_at[:80]!r} is no ISO 8601 time with a zone")


def _check_seconds(doing: str, seconds: float) -> None:
    if not math.isfinite(seconds) or seconds < 0:
        raise BadRequest(f"{doing}: {seconds} seconds")
