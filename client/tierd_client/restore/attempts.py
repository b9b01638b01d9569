"""Which replica the ranks restore: they try one after the other until all ranks have read the same one.

On one node the daemon of rank 0 selects each. Over several nodes, the parts that the nodes have are a source, too: see
node_parts.py. If one rank cannot read a replica, all ranks give it up.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tierd.errors import Corrupt, NotFound, PeerUnreachable, TierdError, TierUnreachable, Unhealthy
from tierd.format.ids import CheckpointId
from tierd_client.log import log
from tierd_client.ranks import Ranks
from tierd_client.restore.node_parts import Attempt, NodeReplicas, Problem, is_over_nodes
from tierd_client.restore.replica import Replica, RestoreRequest, find_replica
from tierd_client.session import DaemonSession

ReadReplica = Callable[[Replica], None]
"""Reads a replica into its destination. Called again with the next replica if any rank could not read this one."""


def restore_replica(
    session: DaemonSession,
    ranks: Ranks,
    request: RestoreRequest,
    read: ReadReplica,
    *,
    reports: DaemonSession | None = None,
) -> Replica:
    """Calls `read` with the newest replica that all ranks can read, and returns it, closed.

    Reports damaged replicas to the daemon, in the session `reports` if `session` is not a trainer's. Raises the
    daemon's error: NotFound when there is no checkpoint, Corrupt when all replicas were tried; and what `read` raises,
    except Corrupt, NotFound, TierUnreachable and Unhealthy.
    """
    replicas = (NodeReplicas if is_over_nodes(session, ranks) else _WholeReplicas)(session, ranks, request)
    while True:
        attempt = replicas.next()
        replica: Replica | None = None
        skip_error: TierdError | None = None
        final_error: Exception | None = None
        try:
            replica = attempt.open()
            with replica:
                read(replica)
        except Corrupt as error:
            skip_error = error
            if replica is not None and replica.may_change:
                log.warning("tierd: %s was replaced in memory while it was read", replica.manifest.id)
            elif replica is not None and not replica.fetch_failed:
                log.error("tierd: %s; trying the next replica", error.message)
                step, run = replica.manifest.step, replica.manifest.run
                (reports or session).report("corrupt", step, run=run, tier=replica.tier, detail=error.message)
        except (NotFound, TierUnreachable, Unhealthy) as error:
            skip_error = error  # this rank cannot read the replica that rank 0 has chosen
        except Exception as error:  # of any kind: the state's own load_state_dict was called
            final_error = error
        ranks.raise_on_all(final_error)
        problem = Problem(ranks.maximum([_problem(skip_error)])[0])
        if replica is not None and problem is Problem.NONE:
            return replica
        replicas.failed(attempt, problem)


def _problem(error: TierdError | None) -> Problem:
    if error is None:
        return Problem.NONE
    if isinstance(error, Corrupt):
        return Problem.DAMAGED
    if isinstance(error, PeerUnreachable):
        return Problem.NO_PEER
    return Problem.UNHEALTHY if isinstance(error, Unhealthy) else Problem.NOT_READABLE


class _WholeReplicas:
    """The replicas that the daemon of rank 0 selects. The other ranks ask their daemons for the same one."""

    def __init__(self, session: DaemonSession, ranks: Ranks, request: RestoreRequest) -> None:
        self._session = session
        self._ranks = ranks
        self._request = request
        self._excluded: list[str] = []

    def next(self) -> Attempt:
        """All ranks. Raises the daemon's error on all when there is none left."""
        session, ranks, excluded = self._session, self._ranks, self._excluded
        replica = ranks.run_on_all(lambda: find_replica(session, self._request, excluded) if ranks.rank == 0 else None)
        choice = msgspec.json.encode((replica.manifest.id, replica.tier)) if replica is not None else b""
        chosen, tier = msgspec.json.decode(ranks.broadcast(choice), type=tuple[CheckpointId, str])
        exactly = RestoreRequest.exactly(chosen, tier)
        return Attempt(chosen, tier, lambda: replica or find_replica(session, exactly, excluded))

    def failed(self, attempt: Attempt, problem: Problem) -> None:
        self._excluded.append(f"{attempt.checkpoint.name}@{attempt.tier}")
