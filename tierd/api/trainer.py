"""The trainers' socket: one session per rank. Reads wire messages and acts on them; moves no bytes, only descriptors.

harmless input: a message that breaks the protocol ends its connection; a slot that could shrink is never mapped.
Who may connect, and with which generation, is decided in admission.py.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import datetime
from typing import Any

from tierd.api.admission import Admission
from tierd.api.node_ranks import copy_from_partner, take_roster
from tierd.api.packets import PacketConnection
from tierd.api.quotas import Quotas
from tierd.api.rank_requests import RankRequests
from tierd.api.restore_requests import Asked, RestoreRequests
from tierd.api.session import FIRST, NO_RANK, TrainerSession, refused
from tierd.context import DaemonContext
from tierd.descriptors import close_all
from tierd.errors import BadRequest, Corrupt, Full, TierdError, Transient, WrongSecret
from tierd.failpoints import failpoint
from tierd.format import layout, wire
from tierd.format.audit import EventKind
from tierd.format.ids import MEMORY, CheckpointId, Rank, Run, check_run, checkpoint_id
from tierd.format.run_state import BROKE_OFF, RunState
from tierd.format.text import printable
from tierd.memory.slot import MappedSlot
from tierd.memory.snapshot_set import SnapshotSet
from tierd.peer import process_state
from tierd.status.report import HolderReport
from tierd.workers.restorer import Restorer

log = logging.getLogger("tierd")

ACCEPT_PAUSE_S = 0.2  # before accepting again when there are no descriptors left
KIND_CHARS_MAX = 80  # of a kind of error, or of a state, that a peer names
DETAIL_CHARS_MAX = 1000  # of what a trainer says about an event
HURRY_S = 10.0  # a trainer that waits for its snapshot asks every two seconds


class TrainerDoor:
    """`spawn` starts a task that the daemon cancels at its end."""

    def __init__(
        self,
        context: DaemonContext,
        restorer: Restorer,
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._context = context
        self._memory = context.memory
        self._catalog = context.catalog
        self._metrics = context.metrics
        self._incidents = context.incidents
        self._throttle = context.throttle
        self._restorer = restorer
        self._restore_requests = RestoreRequests(restorer, context, spawn)
        self._spawn = spawn
        self._sessions: dict[tuple[Run, Rank], TrainerSession] = {}
        self._quotas = Quotas(
            context.config.limits,
            context.memory,
            has_checkpoint=lambda run: restorer.newest(run) is not None,
            now_s=context.monotonic_s,
        )
        self.admission = Admission(context, restorer, self._sessions, self._quotas)
        self._requests = RankRequests(self._sessions, context.audit)
        self._connections = 0

    # ── for workers ──

    def send(self, run: Run, message: wire.ToClient) -> None:
        """To every rank of the run's current generation, and to the operators who have requested something of it."""
        for session in (*self._sessions.values(), *self._requests.operators):
            if session.run == run:
                session.post(message)

    def processes(self, run: Run) -> list[HolderReport]:
        """The processes of the connected ranks, where they are visible here."""
        pids = sorted({session.connection.peer_pid for session in self._sessions.values() if session.run == run})
        return [HolderReport(pid=pid, state=state) for pid in pids if (state := process_state(pid))]

    def release_slots(self, run: Run) -> None:
        """Tell ranks which slots are free again: a newer snapshot is complete, or an older one was persisted."""
        for snapshot_set, is_lost in self._memory.release(run):
            self._released(snapshot_set, is_lost=is_lost)

    def _released(self, snapshot_set: SnapshotSet, *, is_lost: bool) -> None:
        checkpoint = snapshot_set.id
        run = checkpoint.run
        for rank, snapshot in snapshot_set.snapshots.items():
            session = self._sessions.get((run, rank))
            # A trainer with new slots must not get messages about those of its predecessor.
            if session is not None and self._memory.slots(run, rank).get(snapshot.index) is snapshot.slot:
                session.post(wire.Released(slot=snapshot.index))
        # What was sent again after its checkpoint had been committed is not lost, unless the two were compared.
        if is_lost and (snapshot_set.failures or self._catalog.get(checkpoint) is None):
            self._metrics.snapshots_total.labels(run=run, outcome="lost").inc()
            message = f"{checkpoint} was not persisted before a newer snapshot took its place"
            hint = "the daemon's log and `tierd status` say why persisting was behind"
            self._send_lost(checkpoint, "persist", "superseded", message, hint)

    def _send_lost(self, checkpoint: CheckpointId, stage: str, kind: str, message: str, hint: str) -> None:
        """Tell every rank that this snapshot will not become durable."""
        step, generation = checkpoint.step, checkpoint.generation
        failed = wire.Failed(
            step=step, generation=generation, stage=stage, kind=kind, message=message, hint=hint, is_final=True
        )
        self.send(checkpoint.run, failed)

    def forget_ended(self, run: Run) -> None:
        """Give back the memory of a run that has ended in good order and is durable."""
        if self._memory.forget_ended(run):
            self.admission.forget_writers(run)
            log.info("gave back the memory of %s: its trainers have ended in good order", run)

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
            if self._connections >= self._context.config.limits.connections_max:
                sock.close()
                self._incidents.record("wire", Transient(f"accept a connection: {self._connections} are open"))
                await asyncio.sleep(ACCEPT_PAUSE_S)  # else it would be logged as fast as a peer connects
                continue
            self._connections += 1
            self._spawn(self._serve_peer(PacketConnection(sock)))

    async def _serve_peer(self, connection: PacketConnection) -> None:
        """Serve one connection, from Hello to its end."""
        try:
            await asyncio.sleep(self._quotas.connection_wait_s(connection.peer_uid))
            session, slots = await self.admission.admit(connection)
            try:
                if session.rank != NO_RANK:
                    now_s = self._context.monotonic_s()
                    self._context.cadences.entered(session.run, now_s)
                    self._memory.progress.entered(session.run, now_s, is_start=session.is_start)
                self.admission.welcome(session, slots)
                await self.admission.secrets.save(session.run)  # before the answer is sent
                self._requests.rank_entered(session)
                async with asyncio.TaskGroup() as group:
                    group.create_task(session.send_queued())
                    try:
                        with connection.ended_by_death():
                            await self._converse(session)
                    finally:
                        self._leave(session)
                        session.finish()
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
            finally:
                self._leave(session)
                session.close()
        except TierdError as error:
            await self._refuse(connection, error)
        except OSError:
            pass  # the peer has gone
        except Exception as error:  # a bug in one conversation must not end the daemon
            self._incidents.record("wire", error)
        finally:
            self._connections -= 1
            connection.close()

    async def _converse(self, session: TrainerSession) -> None:
        rate = self._quotas.messages()
        while True:
            await asyncio.sleep(rate.spend())  # even 0 s lets the other tasks run: a peer may send without a pause
            raw, descriptors = await session.connection.receive()
            if not raw:
                return
            try:
                message = wire.decode_to_daemon(raw)
                self.admission.secrets.check(session)  # the run may have got a secret since the peer connected
                if isinstance(message, wire.Goodbye):
                    self._end(session, message)
                    return
                if isinstance(message, Asked):
                    self._restore_requests.answer(session, message)
                elif isinstance(message, wire.Request):
                    self._throttle.hurry(session)  # it waits for the result
                    self._requests.forward(session, message)
                elif session.rank == NO_RANK:
                    raise BadRequest(f"take {type(message).__name__} from a peer that is not a trainer")
                elif isinstance(message, wire.AttachSlot):
                    if len(descriptors) != 1:
                        raise BadRequest(f"attach slot {message.slot}: {len(descriptors)} descriptors, expected 1")
                    capacity_bytes = message.capacity_bytes
                    self._quotas.check_slot(session.run, session.rank, message.slot, capacity_bytes)
                    slot = MappedSlot(descriptors.pop(), capacity_bytes)
                    self._memory.attach(session.run, session.generation, session.rank, message.slot, slot)
                elif isinstance(message, wire.Roster):
                    if len(descriptors) != 1:
                        raise BadRequest(f"take the nodes of {session.run}: {len(descriptors)} descriptors, expected 1")
                    take_roster(self._context, session.run, session.generation, descriptors[0])
                else:
                    self._take(session, message)
            finally:
                close_all(descriptors)

    def _end(self, session: TrainerSession, goodbye: wire.Goodbye) -> None:
        if session.rank == NO_RANK:
            return
        state, reason = printable(goodbye.state, KIND_CHARS_MAX), printable(goodbye.reason, DETAIL_CHARS_MAX)
        log.info("goodbye %s rank %d: %s %s", session.run, session.rank, state, reason)
        if self._sessions.get((session.run, session.rank)) is session:  # not fenced meanwhile
            self._memory.outcomes.rank_exited(session.run, session.rank, goodbye.state, reason)

    def _take(self, session: TrainerSession, message: wire.ToDaemon) -> None:
        run, generation, rank = session.run, session.generation, session.rank
        match message:
            case wire.Filling():
                self._memory.progress.sign(run, self._context.monotonic_s())
                self._memory.fill(run, generation, rank, message.slot)
            case wire.Abandon():
                self._memory.abandon(run, generation, rank, message.slot)
            case wire.Sealed():
                _check_sealed(message)
                failpoint("snapshot.accept")
                snapshot_set = self._memory.seal(run, generation, rank, message, now_s=self._context.monotonic_s())
                failpoint("snapshot.accepted")
                session.post(wire.Accepted(slot=message.slot, step=message.step))
                if message.resent:
                    self._answer(session, wire.Ask(step=message.step, generation=generation))
                else:
                    self._memory.progress.sign(run, self._context.monotonic_s())
                    self._metrics.snapshot_stall_seconds.observe(message.stall_s)
                    self._context.cadences.stalled(run, message.stall_s)
                if self._memory.is_given_up(snapshot_set.id):
                    self._release_lost(session, message.step)
                self.release_slots(run)
                if snapshot_set.is_pending:
                    self._context.notify.snapshot_sealed()
            case wire.SnapshotLost():
                self._lose(session, message)
            case wire.Ask():
                self._throttle.hurry(session, HURRY_S)
                checkpoint = checkpoint_id(run, message.step, message.generation)
                slot = self._memory.slot_of(checkpoint, rank)
                if slot is not None and message.generation == generation:
                    session.post(wire.Accepted(slot=slot, step=message.step))
                self._answer(session, message)
                if message.needs_slot:
                    if superseded := self._memory.give_way(run, rank, is_last=message.is_last):
                        self._released(superseded, is_lost=True)
                elif message.is_last and (snapshot_set := self._memory.find(checkpoint)) is not None:
                    snapshot_set.is_last = True
            case wire.Stepped():
                if not session.speaks_for_node or not 0 < message.seconds < math.inf:
                    raise BadRequest(f"take a step time of {message.seconds} s from rank {rank} of {run}")
                self._throttle.report_step(run, message.seconds)
                self._memory.progress.sign(run, self._context.monotonic_s(), step_s=message.seconds)
            case wire.Everywhere():
                if self._memory.node(run) is not None:
                    self._catalog.saw_everywhere(checkpoint_id(run, message.step, generation))
            case wire.Partner():
                copy_from_partner(self._context, session, message)
            case wire.Report():
                self._report(session, message)
            case wire.Convene():
                self._requests.convene(session, message)
            case wire.Answer():
                self._requests.forward_answer(session, message)
            case _:
                raise BadRequest(f"take {type(message).__name__}: it may only be the first message")

    def _lose(self, session: TrainerSession, lost: wire.SnapshotLost) -> None:
        """One rank will not seal this step: tell all ranks, and give back the slots of those that have sealed it."""
        run, generation, rank = session.run, session.generation, session.rank
        checkpoint = checkpoint_id(run, lost.step, generation)
        is_known = self._memory.is_given_up(checkpoint)
        self._release_lost(session, lost.step)
        if is_known:
            return
        self._metrics.snapshots_total.labels(run=run, outcome="failed").inc()
        message, hint, kind = printable(lost.message), printable(lost.hint), printable(lost.kind, KIND_CHARS_MAX)
        if session.may_log():
            log.warning("%s rank %d lost step %d: %s", run, rank, lost.step, message)
        self._send_lost(checkpoint, "stage", kind, f"rank {rank}: {message}", hint)

    def _release_lost(self, session: TrainerSession, step: int) -> None:
        for rank, index in self._memory.give_up(session.run, session.generation, step):
            other = self._sessions.get((session.run, rank))
            if other is not None:
                other.post(wire.Released(slot=index))

    def _answer(self, session: TrainerSession, ask: wire.Ask) -> None:
        checkpoint = checkpoint_id(session.run, ask.step, ask.generation)
        if self._memory.is_unpersisted(checkpoint):
            return  # the persister answers: a committed checkpoint of this id may have other bytes
        entry = self._catalog.get(checkpoint)
        copies, partner = self._context.part_copies, self._context.partners.get(session.run)
        copy = copies.get(checkpoint) if copies is not None else None
        if copy is not None and partner is not None and copy.name == partner.node_file:
            session.post(wire.Copied(step=ask.step, generation=ask.generation))
        failpoint("trainer.answer")
        for tier in entry.tiers if entry else ():
            if tier == self._context.hot.name:
                session.post(self._context.persisted(checkpoint))
            else:
                session.post(wire.Replicated(step=ask.step, generation=ask.generation, tier=tier))

    def _report(self, session: TrainerSession, report: wire.Report) -> None:
        run, detail = check_run(report.run or session.run), printable(report.detail, DETAIL_CHARS_MAX)
        if run != session.run:
            try:
                self.admission.secrets.check_proof(run, session.proof)
            except WrongSecret as error:  # not the end of the session: that run may have got its secret meanwhile
                if session.may_log():
                    log.warning("%s rank %d: its report is left out: %s", session.run, session.rank, error)
                return
        tier = report.tier if report.tier in (*self._catalog.tiers, MEMORY) else "other"
        _check_seconds("take a report", report.seconds)
        match report.outcome:
            case "restored":
                self._metrics.restore_seconds.labels(tier=tier).observe(report.seconds)
                if session.may_log():
                    reason = f"to step {report.step} by rank {session.rank}"
                    self._context.audit.record(EventKind.RESTORED, run=run, tier=tier, reason=reason, who=session.peer)
                self._spawn(self._restorer.fetcher.restored(run))  # a rank reports it after all ranks have restored
            case "skipped":
                if session.rank == FIRST:  # all ranks skip a step together, and each reports it
                    self._metrics.snapshots_total.labels(run=session.run, outcome="skipped").inc()
                self._metrics.snapshot_stall_seconds.observe(report.seconds)
                if session.may_log():
                    log.warning("%s rank %d skipped step %d: %s", run, session.rank, report.step, detail)
            case "failed":
                self._metrics.snapshot_stall_seconds.observe(report.seconds)
                self._metrics.snapshots_total.labels(run=session.run, outcome="failed").inc()
                if session.may_log():
                    log.warning("%s rank %d could not stage step %d: %s", run, session.rank, report.step, detail)
            case "unpinned":
                if session.may_log():
                    self._incidents.record("stage", Full(f"{run} rank {session.rank} step {report.step}: {detail}"))
            case "corrupt":
                self._metrics.verify_failures_total.labels(tier=tier).inc()
                if session.may_log():
                    self._incidents.record("restore", Corrupt(f"{run} step {report.step} in {tier}: {detail}"))
            case _:
                raise BadRequest(f"take a report: outcome {report.outcome[:KIND_CHARS_MAX]!r}")

    async def _refuse(self, connection: PacketConnection, error: TierdError) -> None:
        if self._quotas.may_record_refusal(connection.peer_uid):
            self._incidents.record("wire", error)
        with suppress(OSError, TimeoutError):  # it cannot receive the reason
            async with asyncio.timeout(1.0):
                await connection.send(wire.encode(refused(0, error)))

    def _leave(self, session: TrainerSession) -> None:
        self._requests.session_ended(session)
        self._throttle.calm(session)
        key = (session.run, session.rank)
        if self._sessions.get(key) is session:
            del self._sessions[key]
            if session.speaks_for_node:
                self._throttle.left(session.run)
            now_s = self._context.monotonic_s()
            self._memory.leave(session.run, session.rank, now_s=now_s)
            if not self._memory.present(session.run):
                state, _ = self._memory.outcomes.state(session.run) or (RunState.LOST, "")
                self._context.cadences.left(session.run, now_s, has_failed=state in BROKE_OFF)
            self.admission.left(session)
            log.info("%s rank %d left; its sealed snapshots stay", session.run, session.rank)
            self.forget_ended(session.run)


def _check_sealed(sealed: wire.Sealed) -> None:
    """Check the fields that end up in a manifest, a file name or a metric. Raises BadRequest."""
    doing = f"seal step {sealed.step}"
    _check_seconds(doing, sealed.stall_s)
    if sealed.milestone is not None:
        layout.milestone_file(sealed.milestone)
    try:
        is_zoned = datetime.fromisoformat(sealed.created_at).tzinfo is not None
    except ValueError:
        is_zoned = False
    if not is_zoned:
        raise BadRequest(f"{doing}: created_at {sealed.created_at[:80]!r} is not an ISO 8601 time with a zone")


def _check_seconds(doing: str, seconds: float) -> None:
    if not math.isfinite(seconds) or seconds < 0:
        raise BadRequest(f"{doing}: {seconds} seconds")
