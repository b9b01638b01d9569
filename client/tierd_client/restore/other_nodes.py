"""What the daemons of other nodes know of a run, before a training over several nodes starts from scratch.

Rank 0's daemon chooses what to restore. It sees its own hot tier and the cold ones, not the hot tier of another node.
"""

from __future__ import annotations

from tierd.errors import NotFound, TierdError, TierUnreachable
from tierd.format.ids import CheckpointId
from tierd_client.log import log
from tierd_client.nodes import is_lowest_of_node
from tierd_client.ranks import Ranks
from tierd_client.restore.replica import RestoreRequest, find_replica
from tierd_client.session import DaemonSession


def check_nothing_elsewhere(session: DaemonSession, ranks: Ranks) -> None:
    """All ranks, after rank 0's daemon had no checkpoint. Raises TierUnreachable on all ranks when the daemon of a node
    has one, or a part of one that may still become whole. Raises any other error of that daemon, for example that it
    cannot list a tier. A node logs an error if its newest checkpoint is a part that can never become whole."""

    def check() -> None:
        if not is_lowest_of_node(session.hello):
            return
        known = _whole_here(session) if session.hello.node is not None else ""
        if known:
            raise TierUnreachable(
                f"start {session.hello.run} from scratch: the daemon of this node has {known}, which the daemon of "
                "rank 0 did not find",
                hint='if it is still being copied, start again later; restore(state, resume="scratch", force=True) '
                "begins anew",
            )
        newest = session.welcome.newest
        if newest is not None:
            log.error(
                "tierd: %s starts from scratch: this node has only its own part of step %d of generation %d, and the "
                "other parts are missing: all steps up to that one are lost",
                session.hello.run,
                newest.step,
                newest.generation,
            )

    ranks.run_on_all(check)


def newest_here(session: DaemonSession) -> str:
    """The newest checkpoint of the run that this node's daemon knows, after a look at the cold tiers; empty: none.
    Raises what the daemon answers when it cannot tell."""
    newest = session.welcome.newest
    if newest is not None:
        return f"step {newest.step} of generation {newest.generation}"
    return _whole_here(session)


def _whole_here(session: DaemonSession) -> str:
    """The newest checkpoint that this node's daemon has whole; empty: none. Raises TierUnreachable while one of its
    parts may still become whole, and otherwise as `newest_here`."""
    try:
        with find_replica(session, RestoreRequest(allow_unhealthy=True), [], chunks=()) as replica:
            return f"{replica.manifest.id} in {replica.tier}"
    except NotFound:
        return ""


def check_scratch_elsewhere(session: DaemonSession, rank: int) -> str:
    """For "scratch", on the lowest rank of another node than rank 0's: as `newest_here`. Rank 0 has checked its own."""
    if session.hello.node is None or rank == 0 or not is_lowest_of_node(session.hello):
        return ""
    try:
        return newest_here(session)
    except TierUnreachable as error:
        if not session.hello.starts_anew:
            raise
        log.warning("tierd: %s starts from scratch: %s", session.hello.run, error)
        return ""
    except TierdError as error:
        return f"one that cannot be read: {error.message}"


def report_newer_here(session: DaemonSession, restored: CheckpointId) -> None:
    """Log an error when this node's daemon has a newer checkpoint than was restored: the steps since are lost."""
    if session.hello.node is None or not is_lowest_of_node(session.hello):
        return
    newest = session.welcome.newest
    if newest is not None and newest.recency > restored.recency:
        log.error(
            "tierd: %s was restored, although the daemon of this node has step %d of generation %d: "
            "the steps since are lost",
            restored,
            newest.step,
            newest.generation,
        )
