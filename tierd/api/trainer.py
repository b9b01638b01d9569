"""The trainers' door: one session per rank on the Unix socket. Speaks wire; moves no bytes, only descriptors.

harmless input: a peer of another user is refused, a message that breaks the protocol ends its connection, a slot
that could shrink is never mapped. fenced: when a newer generation comes, sessions of the older are told and closed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
import stat
import time
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

import tierd
from tierd.api.packets import PacketConnection
from tierd.catalog import Catalog
from tierd.config import Config
from tierd.errors import BadConfig, BadRequest, LockHeld, NotFound, Stale, TierdError, TierUnreachable, Transient
from tierd.format import wire
from tierd.format.ids import GENERATION_MAX, WORLD_SIZE_MAX, Generation, Rank, Run, check_run, checkpoint_id
from tierd.incidents import Incidents
from tierd.lifecycle.states import SlotEvent, SlotState
from tierd.memory import MemoryTier
from tierd.metrics import Metrics
from tierd.slots import Slot
from tierd.tiers.tier import Tier
from tierd.workers.restorer import Restorer, close_all

log = logging.getLogger("tierd")

OUTBOX_MAX = 256  # messages a peer may leave unread before it is dropped; it re-attaches and asks again
ANY_RUN_RANK = Rank(-1)  # a session that only asks


class Session:
    """One connected rank. `rank` is -1 for one that only asks."""

    def __init__(self, connection: PacketConnection, run: Run, rank: Rank, generation: Generation) -> None:
        self.connection = connection
        self.run = run
        self.rank = rank
        self.generation = generation
        self.process = _open_process(connection.peer_pid)
        self._outbox: asyncio.Queue[tuple[wire.ToClient, list[int]] | None] = asyncio.Queue(OUTBOX_MAX)

    def post(self, message: wire.ToClient, descriptors: list[int] | None = None) -> None:
        """Queue a message; takes the descriptors over."""
        try:
            self._outbox.put_nowait((message, descriptors or []))
        except asyncio.QueueFull:
            close_all(descriptors or [])
            log.warning("dropping %s rank %d: it has left %d messages unread", self.run, self.rank, OUTBOX_MAX)
            self.connection.shutdown()

    def finish(self) -> None:
        """End the connection after what is queued has been sent."""
        if not self._outbox.full():
            self._outbox.put_nowait(None)

    async def send_queued(self) -> None:
        """Sends until `finish`. Ends quietly when the peer has gone."""
        while (queued := await self._outbox.get()) is not None:
            message, descriptors = queued
            try:
                await self.connection.send(wire.encode(message), descriptors)
            except OSError:
                break
            finally:
                close_all(descriptors)
        self.connection.shutdown()

    def close(self) -> None:
        while not self._outbox.empty():
            queued = self._outbox.get_nowait()
            close_all(queued[1] if queued else [])
        self.connection.close()


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
        wake_persister: Callable[[], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._memory = memory
        self._catalog = catalog
        self._hot = hot
        self._restorer = restorer
        self._config = config
        self._metrics = metrics
        self._incidents = incidents
        self._wake_persister = wake_persister
        self._spawn = spawn
        self._sessions: dict[tuple[Run, Rank], Session] = {}
        self._writers: dict[tuple[Run, Rank], int | None] = {}  # pidfd of who may have a rank's slots mapped
        self._connections = 0
        self._claiming = asyncio.Lock()
        self._boot = uuid.uuid4().hex

    # ── for workers ──

    def tell(self, run: Run, message: wire.ToClient) -> None:
        """To every rank of the run's current generation."""
        for session in self._sessions.values():
            if session.run == run:
                session.post(message)

    def settle(self, run: Run) -> None:
        """Tell ranks which slots are free again, now that a newer snapshot is whole or an older one persisted."""
        for found, is_lost in self._memory.release(run):
            for rank, snapshot in found.snapshots.items():
                session = self._sessions.get((run, rank))
                # A trainer that brought slots of its own must not hear of its predecessor's.
                if session is not None and self._memory.slots(run, rank).get(snapshot.index) is snapshot.slot:
                    session.post(wire.Released(slot=snapshot.index))
            if is_lost:
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

    # ── the door ──

    async def serve(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            sock, _ = await loop.sock_accept(listener)
            if self._connections >= self._config.limits.connections_max:
                sock.close()
                self._incidents.record("wire", Transient(f"accept a connection: {self._connections} are open"))
                continue
            self._connections += 1
            self._spawn(self._serve_one(PacketConnection(sock)))

    async def _serve_one(self, connection: PacketConnection) -> None:
        session: Session | None = None
        try:
            _check_peer(connection)
            session = await self._admit(connection)
            async with asyncio.TaskGroup() as group:
                group.create_task(session.send_queued())
                try:
                    await self._converse(session, group)
                finally:
                    session.finish()
        except* TierdError as errors:
            for error in errors.exceptions:
                if isinstance(error, TierdError):
                    await self._refuse(connection, error)
        except* OSError:
            pass  # the peer has gone; leaving is all there is to do
        finally:
            self._connections -= 1
            if session is not None:
                self._leave(session)
                session.close()
            else:
                connection.close()

    async def _admit(self, connection: PacketConnection) -> Session:
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
                f"greet a client {hello.version}: it speaks protocol {hello.protocol}, this daemon "
                f"({tierd.__version__}) speaks {wire.PROTOCOL_VERSION}",
                hint="install the same tierd version in the trainer and the daemon",
            )
        run = check_run(hello.run)
        if hello.rank is None:
            session = Session(connection, run, ANY_RUN_RANK, Generation(0))
            self._welcome(session, {})
            return session
        if not 0 <= hello.rank < hello.world_size <= WORLD_SIZE_MAX:
            raise BadRequest(f"greet {run}: rank {hello.rank} of world size {hello.world_size}")
        return await self._enter(connection, hello, run, Rank(hello.rank))

    async def _enter(self, connection: PacketConnection, hello: wire.Hello, run: Run, rank: Rank) -> Session:
        generation = Generation(hello.generation) if hello.generation is not None else await self._claim(run, rank)
        known = max(self._catalog.generation_max(run), self._memory.generation(run))
        if generation < known:
            raise Stale(
                f"join run {run} as generation {generation}: generation {known} has taken over",
                hint="another trainer of this run was started later; stop this one",
            )
        if generation > GENERATION_MAX:
            raise BadRequest(f"join run {run} as generation {generation}: more than {GENERATION_MAX}")
        previous = self._memory.generation(run)
        self._memory.enter(run, generation, rank, hello.world_size)
        self._catalog.saw_generation(run, generation)
        if previous and generation > previous:
            self._fence(run, generation)
        session = Session(connection, run, rank, generation)
        replaced = self._sessions.pop((run, rank), None)
        if replaced is not None:
            replaced.finish()
        # A rank that only lost its connection has its slots mapped; any other may take over what is there.
        is_back = generation == previous and self._lives((run, rank))
        kept = {} if is_back else self._adoptable(run, rank)
        self._sessions[run, rank] = session
        self._keep_writer((run, rank), session.process)
        self._welcome(session, kept)
        log.info("welcome %s rank %d of %d, generation %d", run, rank, hello.world_size, generation)
        return session

    async def _claim(self, run: Run, rank: Rank) -> Generation:
        """A new generation, durably taken: no later start of any daemon on this directory gives it again."""
        if rank != 0:
            raise BadRequest(
                f"claim a generation of {run} as rank {rank}: only rank 0 does",
                hint="rank 0 connects first and gives its generation to the others",
            )
        await self._restorer.wait_first_looks()
        unseen = [f"{name} ({known.error})" for name, known in self._catalog.tiers.items() if not known.is_known]
        if unseen and not self._catalog.generation_max(run) and not self._memory.generation(run):
            raise TierUnreachable(
                f"start {run}: nothing is known of it here, and these could not be listed: {'; '.join(unseen)}",
                hint="its checkpoints may be there: bring the tier back, or take it out of the config",
            )
        async with self._claiming:
            generation = max(self._catalog.generation_max(run), self._memory.generation(run)) + 1
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

    def _adoptable(self, run: Run, rank: Rank) -> dict[int, Slot]:
        """The rank's slots, if whoever had them is dead for certain: else it could write into them."""
        pidfd = self._writers.get((run, rank))
        slots = self._memory.slots(run, rank)
        if pidfd is not None and _is_dead(pidfd):
            for slot in slots.values():
                slot.move(SlotEvent.TRAINER_DIED)  # its connection may be held open by a child of it
            return slots
        if slots:
            log.warning("%s rank %d: its former trainer may still live; new slots instead of its old ones", run, rank)
            self._memory.detach(run, rank)
        return {}

    def _lives(self, key: tuple[Run, Rank]) -> bool:
        held = self._writers.get(key)
        return held is not None and not _is_dead(held)

    def _keep_writer(self, key: tuple[Run, Rank], process: int | None) -> None:
        held = self._writers.get(key)
        if held is not None:
            os.close(held)
        self._writers[key] = process

    def _welcome(self, session: Session, kept: dict[int, Slot]) -> None:
        told = self._config.snapshot
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
            ),
            [os.dup(slot.fd) for slot in kept.values()],
        )

    async def _converse(self, session: Session, group: asyncio.TaskGroup) -> None:
        while True:
            raw, descriptors = await session.connection.receive()
            if not raw:
                return
            try:
                message = wire.decode_to_daemon(raw)
                if isinstance(message, wire.Goodbye):
                    log.info("goodbye %s rank %d", session.run, session.rank)
                    return
                if isinstance(message, wire.Find):
                    group.create_task(self._find(session, message))
                elif session.rank == ANY_RUN_RANK:
                    raise BadRequest(f"take {type(message).__name__} from a peer that is no trainer")
                elif isinstance(message, wire.AttachSlot):
                    taken, descriptors = descriptors, []
                    self._attach(session, message, taken)
                else:
                    self._take(session, message)
            finally:
                close_all(descriptors)

    def _attach(self, session: Session, message: wire.AttachSlot, descriptors: list[int]) -> None:
        if len(descriptors) != 1:
            close_all(descriptors)
            raise BadRequest(f"attach slot {message.slot}: {len(descriptors)} descriptors, expected 1")
        slot = Slot(descriptors[0], message.capacity_bytes)
        self._memory.attach(session.run, session.rank, message.slot, slot)

    def _take(self, session: Session, message: wire.ToDaemon) -> None:
        run, generation, rank = session.run, session.generation, session.rank
        match message:
            case wire.Filling():
                self._memory.fill(run, generation, rank, message.slot)
            case wire.Abandon():
                self._memory.abandon(run, generation, rank, message.slot)
            case wire.Sealed():
                found = self._memory.seal(run, generation, rank, message, now_s=time.monotonic())
                session.post(wire.Accepted(slot=message.slot, step=message.step))
                if not message.resent:
                    self._metrics.snapshot_stall_seconds.observe(message.stall_s)
                if found.is_whole:
                    self.settle(run)
                    self._wake_persister()
            case wire.Ask():
                self._answer(session, message)
            case wire.Report():
                self._report(session, message)
            case _:
                raise BadRequest(f"take {type(message).__name__} in the middle of a conversation")

    def _answer(self, session: Session, ask: wire.Ask) -> None:
        entry = self._catalog.get(checkpoint_id(session.run, ask.step, ask.generation))
        for tier in entry.tiers if entry else ():
            if tier == self._hot.name:
                session.post(wire.Persisted(step=ask.step, generation=ask.generation, seconds=0.0))
            else:
                session.post(wire.Replicated(step=ask.step, generation=ask.generation, tier=tier))

    def _report(self, session: Session, report: wire.Report) -> None:
        match report.outcome:
            case "restored":
                tier = report.tier if report.tier in (*self._catalog.tiers, "memory") else "other"
                self._metrics.restore_seconds.labels(tier=tier).observe(report.seconds)
                log.info("restored %s to step %d from %s", session.run, report.step, report.tier)
            case "skipped" | "failed":
                self._metrics.snapshots_total.labels(run=session.run, outcome=report.outcome).inc()
                log.warning("%s step %d %s: %s", session.run, report.step, report.outcome, report.detail)
            case "corrupt":
                tier = report.tier if report.tier in (*self._catalog.tiers, "memory") else "other"
                self._metrics.verify_failures_total.labels(tier=tier).inc()
                log.error("%s step %d in %s is damaged: %s", session.run, report.step, report.tier, report.detail)
            case _:
                raise BadRequest(f"take a report: outcome {report.outcome!r}")

    async def _find(self, session: Session, find: wire.Find) -> None:
        def on_progress(done: int, total: int) -> None:
            session.post(wire.Progress(request=find.request, done_bytes=done, total_bytes=total))

        try:
            found = await self._restorer.find(session.run, find, on_progress)
        except TierdError as error:
            if not isinstance(error, NotFound):
                self._incidents.record("restore", error)
            session.post(_refused(find.request, error))
            return
        session.post(
            wire.Found(request=find.request, tier=found.tier), [_as_memfd(found.manifest.encode()), *found.descriptors]
        )

    async def _refuse(self, connection: PacketConnection, error: TierdError) -> None:
        self._incidents.record("wire", error)
        try:
            async with asyncio.timeout(1.0):
                await connection.send(wire.encode(_refused(0, error)))
        except (OSError, TimeoutError):
            pass  # it will not hear the reason

    def _leave(self, session: Session) -> None:
        key = (session.run, session.rank)
        if self._sessions.get(key) is session:
            del self._sessions[key]
            self._memory.leave(session.run, session.rank, now_s=time.monotonic())
            log.info("%s rank %d has gone; its sealed snapshots stay", session.run, session.rank)


def _check_peer(connection: PacketConnection) -> None:
    if connection.peer_uid not in (0, os.geteuid()):
        raise BadRequest(
            f"greet process {connection.peer_pid}: it runs as uid {connection.peer_uid}, the daemon as {os.geteuid()}",
            hint="run the daemon and the trainer as the same user",
        )


def _refused(request: int, error: TierdError) -> wire.Refused:
    return wire.Refused(request=request, kind=error.kind, message=error.message[:8192], hint=error.hint)


def _open_process(pid: int) -> int | None:
    """A descriptor that tells when the process ends; None when it cannot be seen (another PID namespace)."""
    try:
        return os.pidfd_open(pid) if pid > 0 else None
    except OSError:
        return None


def _is_dead(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _as_memfd(content: bytes) -> int:
    descriptor = os.memfd_create("tierd-manifest", os.MFD_CLOEXEC)
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def open_listener(path: str) -> socket.socket:
    """The daemon's socket, open to its own user alone from the first instant.

    A stale file of a dead daemon is replaced; anything that is no socket is refused.
    """
    if os.path.lexists(path):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise BadConfig(f"listen on {path}: something that is no socket is there", hint="move it away")
        if _is_answered(path):
            raise LockHeld(f"listen on {path}: another daemon answers there", hint="set another daemon.socket")
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    # umask before bind, not chmod after: there is no instant in which others may connect
    former = os.umask(0o177)
    try:
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise BadConfig(f"listen on {path}: {error.strerror}", hint="set daemon.socket to a path of yours") from error
    finally:
        os.umask(former)
    listener.listen(128)
    return listener


def _is_answered(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(path)
        except BlockingIOError:
            return True  # its backlog is full: someone lives there
        except OSError:
            return False
        return True
