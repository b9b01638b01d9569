"""The states of a slot in a rank's slot pool, as one table: which event leads from which state to which.

    FREE → FILLING → SEALED → SENT → ACCEPTED → PERSISTED → FREE

Unlisted moves raise. The daemon has its own states for the same memory: tierd/memory/slot.py.
"""

from __future__ import annotations

from enum import Enum


class PooledSlotState(Enum):
    FREE = "free"
    FILLING = "filling"  # a snapshot is being copied into it
    SEALED = "sealed"  # it holds a whole snapshot that was not sent to the daemon yet
    SENT = "sent"  # sent; the daemon has not answered
    ACCEPTED = "accepted"  # the snapshot outlives this process as long as the daemon runs
    PERSISTED = "persisted"  # the checkpoint is durable; the daemon keeps the slot until a newer snapshot is whole
    RESENT = "resent"  # durable, and sent again to a daemon that came back and has not answered
    INHERITED = "inherited"  # the daemon keeps the previous process's snapshot until a newer set is complete


class PooledSlotEvent(Enum):
    TAKE = "take"
    ABANDON = "abandon"  # the copy was interrupted, or its source changed meanwhile
    SEAL = "seal"
    SEND = "send"
    ACCEPT = "accept"
    PERSIST = "persist"
    RELEASE = "release"  # the daemon no longer needs the slot
    REATTACH = "reattach"  # a daemon is back, and is sent everything again
    KEEPER_GONE = "keeper_gone"  # the daemon that is back is another process than the one that kept the slot


_S, _E = PooledSlotState, PooledSlotEvent

TRANSITIONS: dict[tuple[PooledSlotState, PooledSlotEvent], PooledSlotState] = {
    (_S.FREE, _E.TAKE): _S.FILLING,
    (_S.FILLING, _E.ABANDON): _S.FREE,
    (_S.FILLING, _E.SEAL): _S.SEALED,
    (_S.SEALED, _E.SEND): _S.SENT,
    # SEALED too: an interrupt may come after the message is sent and before SENT is recorded.
    **{(state, _E.ACCEPT): _S.ACCEPTED for state in (_S.SEALED, _S.SENT, _S.ACCEPTED)},
    **{(state, _E.ACCEPT): _S.PERSISTED for state in (_S.PERSISTED, _S.RESENT)},
    **{(state, _E.PERSIST): _S.PERSISTED for state in (_S.SEALED, _S.SENT, _S.ACCEPTED, _S.PERSISTED, _S.RESENT)},
    **{(state, _E.RELEASE): _S.FREE for state in _S if state is not _S.FILLING},
    (_S.FILLING, _E.RELEASE): _S.FILLING,  # a late message about the snapshot before this one
    **{(state, _E.REATTACH): _S.SENT for state in (_S.SEALED, _S.SENT, _S.ACCEPTED)},
    **{(state, _E.REATTACH): _S.RESENT for state in (_S.PERSISTED, _S.RESENT)},
    **{(state, _E.REATTACH): state for state in (_S.FREE, _S.FILLING, _S.INHERITED)},
    (_S.INHERITED, _E.KEEPER_GONE): _S.FREE,
}
