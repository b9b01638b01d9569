"""Forwards requests of operators to rank 0, its answers back, and calls for a meeting to all ranks of a generation.

Over several nodes the lowest rank of this node stands in for rank 0: the ranks agree among themselves anyway.

Decides nothing. bounded: a limited number of requests wait for an answer, and a request whose trainer disconnects is
refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from tierd.api.session import TrainerSession, refused
from tierd.audit import AuditTrail
from tierd.errors import BadRequest, NotFound, TierdError, Transient
from tierd.format import layout, wire
from tierd.format.audit import EventKind
from tierd.format.ids import Generation, Rank, Run
from tierd.format.text import printable

REQUESTS_MAX = 64  # pending at once, of all operators together


@dataclass(frozen=True, slots=True)
class _Pending:
    """`request`: the operator's own number. `trainer`: the session that must answer."""

    operator: TrainerSession
    request: int
    trainer: TrainerSession


class RankRequests:
    """`sessions`: the trainers that are connected now; the owner keeps it up to date. `operators`: those who have
    requested something, and also receive what the ranks of their run receive."""

    def __init__(self, sessions: Mapping[tuple[Run, Rank], TrainerSession], audit: AuditTrail) -> None:
        self._audit = audit
        self._sessions = sessions
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self.operators: set[TrainerSession] = set()
        self._meetings: dict[Run, tuple[Generation, int]] = {}

    # ── operators ──

    def forward(self, session: TrainerSession, request: wire.Request) -> None:
        """Forward an operator's request. The answer, Agreed or Refused, is posted to the session."""
        try:
            trainer = self._trainer(session.run, request)
        except TierdError as error:
            session.post(refused(request.request, error))
            return
        reason = request.kind if request.milestone is None else f"{request.kind}, milestone {request.milestone}"
        generation = trainer.generation
        self._audit.record(EventKind.REQUESTED, run=session.run, generation=generation, reason=reason, who=session.peer)
        self.operators.add(session)
        number = next(self._numbers)
        self._pending[number] = _Pending(session, request.request, trainer)
        message = wire.Requested(request=number, kind=request.kind, milestone=request.milestone)
        for each in self._ranks(trainer) if request.kind == "force" else [trainer]:
            each.post(message)

    def _trainer(self, run: Run, request: wire.Request) -> TrainerSession:
        """Who must answer. Raises BadRequest, NotFound, Unsupported, or Transient when too many requests wait."""
        action = f"request {request.kind[:40]!r} of {run}"
        if request.kind not in wire.REQUESTS:
            raise BadRequest(f"{action}: expected one of {', '.join(wire.REQUESTS)}")
        if request.milestone is not None:
            layout.milestone_file(request.milestone)
        trainers = [session for session in self._sessions.values() if session.run == run]
        trainer = next((each for each in trainers if each.speaks_for_node), None)
        if trainer is None and trainers:
            raise NotFound(
                f"{action}: its lowest rank on this node is not connected to this daemon",
                hint="it may be starting; `tierd status` shows the ranks that are connected",
            )
        if trainer is None:
            raise NotFound(
                f"{action}: no trainer of this run is connected to this daemon",
                hint="`tierd status` shows the runs of this daemon; is it the daemon of a node of the run? An "
                "adopted run has no trainer here: stop its program as usual",
            )
        if len(self._pending) >= REQUESTS_MAX:
            raise Transient(f"{action}: {REQUESTS_MAX} requests wait for an answer")
        return trainer

    def forward_answer(self, session: TrainerSession, answer: wire.Answer) -> None:
        pending = self._pending.get(answer.request)
        if pending is None or pending.trainer is not session:
            return  # a second or late answer
        del self._pending[answer.request]
        if answer.kind:
            message: wire.ToClient = wire.Refused(
                request=pending.request,
                kind=printable(answer.kind, 80),
                message=printable(answer.message),
                hint=printable(answer.hint),
            )
        else:
            message = wire.Agreed(request=pending.request, step=answer.step, generation=session.generation)
        pending.operator.post(message)

    # ── ranks ──

    def convene(self, session: TrainerSession, convene: wire.Convene) -> None:
        """Call every rank of the session's generation, itself too; `rank_entered` calls those that connect later."""
        if convene.is_forced:
            for rank in self._ranks(session):
                rank.post(wire.Convened(meeting=convene.meeting, is_forced=True))
            return
        generation, highest = self._meetings.get(session.run, (session.generation, -1))
        if generation != session.generation or convene.meeting > highest:
            self._meetings[session.run] = (session.generation, convene.meeting)
        for rank in self._ranks(session):
            rank.post(wire.Convened(meeting=convene.meeting))

    def rank_entered(self, session: TrainerSession) -> None:
        generation, meeting = self._meetings.get(session.run, (None, 0))
        if generation == session.generation:
            session.post(wire.Convened(meeting=meeting))

    def session_ended(self, session: TrainerSession) -> None:
        """Forget an operator's requests; refuse those that this trainer has not answered."""
        self.operators.discard(session)
        for number, pending in list(self._pending.items()):
            if session in (pending.operator, pending.trainer):
                del self._pending[number]
                message = f"wait for rank {pending.trainer.rank} of {session.run}: it disconnected before it answered"
                pending.operator.post(refused(pending.request, Transient(message, hint="see `tierd status`")))
        if not self._ranks(session):
            self._meetings.pop(session.run, None)

    def _ranks(self, session: TrainerSession) -> list[TrainerSession]:
        key = (session.run, session.generation)
        return [each for each in self._sessions.values() if (each.run, each.generation) == key]
