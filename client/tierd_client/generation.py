"""The generation that this rank trains in, with what belongs to it: the session, the slots and the settings.

Rank 0 claims a new generation, which fences the one before; the other ranks join it, each with the daemon of its node.
A later restore begins another.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import msgspec

import tierd
from tierd.errors import BadRequest, TierdError, Unsupported
from tierd.format import wire
from tierd_client.nodes import SHARED_SETTINGS, find_node, is_lowest_of_node, with_place
from tierd_client.ranks import Ranks
from tierd_client.session import DaemonSession, Listener
from tierd_client.slots.slot_pool import SILENCE_S, SlotPool

CONNECT_TIMEOUT_S = 60.0  # the daemon may be listing a cold tier to learn the run's history
RENEW_TIMEOUT_S = 10.0


class Generation:
    """`join` comes first: it sets the attributes below. `settings`: the daemon's config for snapshots with `overrides`
    in place. `node`: where the run spans several nodes. `proof`: of the run's secret."""

    number: int
    node: wire.NodeRanks | None
    session: DaemonSession
    pool: SlotPool
    settings: wire.Welcome

    def __init__(
        self,
        run: str,
        path: str,
        ranks: Ranks,
        overrides: Mapping[str, Any],
        *,
        starts_anew: bool,
        daemon_uid: int | None = None,
        proof: str = "",
    ) -> None:
        self.run = run
        self._path = path
        self._ranks = ranks
        self._overrides = overrides
        self._starts_anew = starts_anew
        self._daemon_uid = daemon_uid
        self._proof = proof
        self._listeners: tuple[Listener, ...] = ()
        self._former = 0  # the generation until now
        self._pid = os.getpid()
        self.is_closed = False
        """Set when the close begins: from then on `check_open` raises."""

    def join(self, *listeners: Listener) -> None:
        """All ranks. `listeners` receive every message of the daemon, in this order, after the slot pool."""
        self._listeners = listeners
        node, seen = find_node(self._ranks, self._ask_daemon)
        first = self._ranks.run_on_all(lambda: self._open(None, node, above=seen) if self._ranks.rank == 0 else None)
        with ExitStack() as on_error:
            if first is not None:
                on_error.callback(first.close)
            answer = self._first_answer(first)
            if node is not None:
                node = msgspec.structs.replace(node, claim=answer.claim, base=answer.base)
            session = self._ranks.run_on_all(lambda: first or self._open(answer.generation, node))
            on_error.callback(session.close)
            pool = SlotPool(session)
            on_error.pop_all()
        self.session, self.pool, self.number, self.node = session, pool, session.welcome.generation, node
        self._former = self.number
        shared = {name: getattr(answer, name) for name in SHARED_SETTINGS} if node is not None else {}
        # An interval of the script's own replaces all of the cadence "auto".
        is_fixed = "every_steps" in self._overrides or "every_s" in self._overrides
        fixed = {"cadence": "", "every_s": 0.0} if is_fixed and answer.cadence else {}
        self.settings = msgspec.structs.replace(session.welcome, **{**shared, **fixed, **self._overrides})
        session.start(pool, *listeners)

    def _first_answer(self, first: DaemonSession | None) -> wire.Welcome:
        """What its daemon has answered to rank 0, without its slots."""
        content = b"" if first is None else wire.encode(msgspec.structs.replace(first.welcome, slots=[]))
        answer = wire.decode_to_client(self._ranks.broadcast(content))
        assert isinstance(answer, wire.Welcome)
        return answer

    def renew(self) -> None:
        """All ranks. Begin a new generation, which takes over from this one."""
        session, pool = self.session, self.pool
        pool.wait_safe(RENEW_TIMEOUT_S)
        session.has_successor = True
        try:
            self._ranks.raise_on_all(None)  # a barrier: all ranks are here before rank 0 fences the old generation
            self.join(*self._listeners)
        finally:
            session.has_successor = self.session is not session
        for listener in self._listeners:
            listener.on_attach()  # the daemon may not have read the last messages of the former session
        session.close()
        pool.close()

    def check_open(self) -> None:
        """Raises BadRequest after the close and in a forked child, Stale when a newer trainer has taken over."""
        if self.is_closed:
            raise BadRequest(f"go on with {self.run}: its client was closed", hint="wait for shots inside `with`")
        if os.getpid() != self._pid:
            raise BadRequest(
                f"go on with {self.run} in process {os.getpid()}: its client belongs to process {self._pid}",
                hint="a forked child has none of its threads; connect where the training runs",
            )
        if self.session.ended_by is not None:
            raise self.session.ended_by

    def why_waiting(self) -> TierdError | None:
        """Why the daemon does not answer, or None when it is connected and answers."""
        if self.session.ended_by is not None:
            return self.session.ended_by
        if not self.session.is_attached:
            return self.session.unreachable("it is not connected")
        if self.pool.is_silent():
            return self.session.unreachable(f"it has not answered for more than {SILENCE_S:.0f} s")
        return None

    @property
    def is_open(self) -> bool:
        """False after the close, and in a forked child."""
        return os.getpid() == self._pid and not self.is_closed

    @property
    def is_lowest_of_node(self) -> bool:
        """Whether this rank speaks for all ranks of its node: the lowest one does."""
        return is_lowest_of_node(self.session.hello)

    def _ask_daemon(self) -> wire.Welcome:
        """The daemon's answer to a peer that is no trainer."""
        hello = self._hello(rank=None, number=None)
        try:
            session = DaemonSession(self._path, hello, timeout_s=CONNECT_TIMEOUT_S, daemon_uid=self._daemon_uid)
        except TierdError as error:
            raise with_place(error, self._ranks, self.run) from error
        session.close()
        return session.welcome

    def _open(self, number: int | None, node: wire.NodeRanks | None, *, above: int = 0) -> DaemonSession:
        hello = self._hello(rank=self._ranks.rank, number=number)
        if node is not None:
            hello = msgspec.structs.replace(hello, node=node, above=above)
        try:
            session = DaemonSession(self._path, hello, timeout_s=CONNECT_TIMEOUT_S, daemon_uid=self._daemon_uid)
        except TierdError as error:
            if node is None:
                raise
            raise with_place(error, self._ranks, self.run) from error
        if self._proof and not session.welcome.checks_secrets:
            session.close()
            raise Unsupported(
                f"join {self.run} with a secret: the daemon (tierd {session.welcome.version}) does not check secrets",
                hint="start the daemon again with the trainer's version of tierd, or unset TIERD_RUN_SECRET",
            )
        return session

    def _hello(self, *, rank: int | None, number: int | None) -> wire.Hello:
        return wire.Hello(
            protocol=wire.PROTOCOL_VERSION,
            version=tierd.__version__,
            run=self.run,
            rank=rank,
            world_size=self._ranks.world_size,
            generation=number,
            starts_anew=self._starts_anew,
            proof=self._proof,
            continues=self._former,
        )
