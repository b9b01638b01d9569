"""How a trainer's ranks join their run: rank 0 claims a generation, the others follow it in."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tierd.format import wire
from tierd_client.ranks import Ranks
from tierd_client.session import DaemonSession, Identity
from tierd_client.snapshot.slot_pool import SlotPool

CONNECT_TIMEOUT_S = 60.0  # the daemon may be listing a cold tier to learn the run's history


def join(
    run: str,
    path: str,
    ranks: Ranks,
    starts_anew: bool,
    on_message: Callable[[SlotPool, wire.ToClient], None],
    on_attach: Callable[[], None],
) -> tuple[DaemonSession, SlotPool]:
    """A session that listens, and this rank's slots. `on_message` is told every message, on the session's thread,
    and `on_attach` that the daemon has come back and has been sent our slots."""
    first = ranks.together(lambda: _open(run, path, ranks, None, starts_anew) if ranks.rank == 0 else None)
    told = ranks.from_first(msgspec.json.encode(first.welcome.generation) if first is not None else None)
    generation = msgspec.json.decode(told or b"0", type=int)
    session: DaemonSession | None = first
    try:
        session = ranks.together(lambda: first or _open(run, path, ranks, generation, starts_anew))
        held = SlotPool(session)
    except BaseException:
        if session is not None:
            session.close()
        raise

    def offer() -> None:
        held.on_attach()
        on_attach()

    session.start(on_message=lambda message: on_message(held, message), on_attach=offer)
    return session, held


def _open(run: str, path: str, ranks: Ranks, generation: int | None, starts_anew: bool) -> DaemonSession:
    identity = Identity(
        run=run,
        rank=ranks.rank,
        world_size=ranks.world_size,
        generation=generation,
        starts_anew=starts_anew,
    )
    return DaemonSession(path, identity, timeout_s=CONNECT_TIMEOUT_S)
