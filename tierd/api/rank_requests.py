"""What goes through the door between operators, rank 0 and the other ranks: requests, answers, calls to a meeting.

Decides nothing: an operator's request goes to rank 0, its answer back, and a call for a meeting to all ranks of the
generation. bounded: so many requests wait for an answer, and one whose trainer leaves is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from tierd.api.handover import refused
from tierd.api.session import FIRST, TrainerSession
from tierd.errors import BadRequest, NotFound, TierdError, Transient
from tierd.format import layout, wire
from tierd.format.ids import Generation, Rank, Run

REQUESTS_MAX = 64  # that wait for an answer at once, of all operators together


@dataclass(frozen=True, slots=True)
class _Asked:
    """By whom, under which number of theirs; `to` is who must answer."""

    by: TrainerSession
    request: int
    to: TrainerSession


class Requests:
    def __init__(self, sessions: Mapping[tuple[Run, Rank], TrainerSession]) -> None:
        """`sessions`: the trainers that are there now, kept by the door."""
        self._sessions = sessions
        self._numbers = itertools.count(1)
        self._asked: dict[int, _Asked] = {}
        self._listeners: set[TrainerSession] = set()  # operators hear what becomes of snapshots, until they leave
        self._meetings: dict[Run, tuple[Generation, int]] = {}

    # ── operators ──

    def ask(self, session: TrainerSession, request: wire.Request) -> None:
        """The answer is posted to the session: Agreed, or Refused."""
        try:
            self._ask(session, request)
        except TierdError as error:
            session.post(refused(request.request, error))

    def _ask(self, session: TrainerSession, request: wire.Request) -> None:
        doing = f"ask for {request.kind[:40]!r} of {session.run}"
        if request.kind not in wire.REQUESTS:
            raise BadRequest(f"{doing}: expected one of {', '.join(wire.REQUESTS)}")
        if request.milestone is not None:
            layout.milestone_file(request.milestone)
        first = self._sessions.get((session.run, FIRST))
        if first is None:
            raise NotFound(
                f"{doing}: no trainer of it is attached here",
                hint="`tierd status` shows the runs of this daemon; is it the daemon of that node?",
            )
        if len(self._asked) >= REQUESTS_MAX:
            raise Transient(f"{doing}: {REQUESTS_MAX} requests wait for an answer")
        self._listeners.add(session)
        number = next(self._numbers)
        self._asked[number] = _Asked(session, request.request, first)
        message = wire.Requested(request=number, kind=request.kind, milestone=request.milestone)
        for one in self._ranks(first) if request.kind == "force" else [first]:
            one.post(message)

    def tell(self, run: Run, message: wire.ToClient) -> None:
        """What all ranks are told, to the operators who have asked the run for something."""
        for one in self._listeners:
            if one.run == run:
                one.post(message)

    def answer(self, session: TrainerSession, answer: wire.Answer) -> None:
        asked = self._asked.get(answer.request)
        if asked is None or asked.to is not session:
            return  # it came again, or too late
        del self._asked[answer.request]
        if answer.kind:
            told: wire.ToClient = wire.Refused(
                request=asked.request, kind=answer.kind, message=answer.message, hint=answer.hint
            )
        else:
            told = wire.Agreed(request=asked.request, step=answer.step, generation=session.generation)
        asked.by.post(told)

    # ── ranks ──

    def convene(self, session: TrainerSession, convene: wire.Convene) -> None:
        """Every rank hears of it, the asking one too: those that are there now, and those that come back later."""
        generation, highest = self._meetings.get(session.run, (session.generation, -1))
        if generation != session.generation or convene.meeting > highest:
            self._meetings[session.run] = (session.generation, convene.meeting)
        for one in self._ranks(session):
            one.post(wire.Convened(meeting=convene.meeting))

    def entered(self, session: TrainerSession) -> None:
        generation, meeting = self._meetings.get(session.run, (None, 0))
        if generation == session.generation:
            session.post(wire.Convened(meeting=meeting))

    def left(self, session: TrainerSession) -> None:
        """An operator waits no more, or a trainer will answer no more."""
        self._listeners.discard(session)
        for number, asked in list(self._asked.items()):
            if session in (asked.by, asked.to):
                del self._asked[number]
                why = Transient(f"ask {session.run}: its rank 0 left before it answered", hint="see `tierd status`")
                asked.by.post(refused(asked.request, why))
        if not self._ranks(session):
            self._meetings.pop(session.run, None)

    def _ranks(self, session: TrainerSession) -> list[TrainerSession]:
        return [
            one for one in self._sessions.values() if (one.run, one.generation) == (session.run, session.generation)
        ]
