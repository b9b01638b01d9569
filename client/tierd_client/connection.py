"""`connect`: begins or continues a run. Checks its arguments, and fills in what the environment says."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping

from tierd.errors import BadConfig
from tierd.format.run_secret import VARIABLE, proof_of
from tierd.format.wire import SLOTS_MAX, SLOTS_MIN
from tierd_client.client import Client
from tierd_client.generation import Generation
from tierd_client.ranks import find_ranks
from tierd_client.restore.resume import SCRATCH
from tierd_client.stopping.deadline import find_deadline
from tierd_client.stopping.requests import Meaning, StopRequests, signals_of

DEFAULT_SOCKET = ".tierd/tierd.sock"  # as in the daemon's built-in config


def connect(
    run: str,
    *,
    socket: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    every_steps: int | None = None,
    every_s: float | None = None,
    slots: int | None = None,
    slot_wait_s: float | None = None,
    when_busy: str | None = None,
    max_runtime_s: float | None = None,
    stop_file: str | None = None,
    stop_grace_s: float | None = None,
    signals: Mapping[int, Meaning | None] | None = None,
    staging: str | None = None,
    daemon_uid: int | None = None,
) -> Client:
    """Begin or continue a run. Each start of the trainer is a new generation, which fences the one before.

    `socket`: default $TIERD_SOCKET, then ./.tierd/tierd.sock. `rank`, `world_size`: default from torch.distributed,
    then from $RANK and $WORLD_SIZE. `when_busy`: "wait" up to `slot_wait_s` seconds for a free slot, or "skip" the
    snapshot. `staging`: "sync" copies the state before snapshot() returns, "overlap" during the next step. Options
    that are not given come from the daemon's [snapshot] section. `daemon_uid`, default $TIERD_DAEMON_UID: the user that
    the daemon runs as, if it is neither this user nor root. $TIERD_RUN_SECRET: from the first start with one, the run
    can be joined, stopped and read only with it.

    The run stops before the earliest of `max_runtime_s` seconds from now, $SLURM_JOB_END_TIME and $TIERD_DEADLINE;
    when `stop_file` (default $TIERD_STOP_FILE) appears, which is then removed; and at SIGTERM or SIGINT. SIGUSR1
    requests a snapshot. `signals` changes that: {SIGUSR2: "snapshot", SIGUSR1: "stop", SIGINT: None}.
    `stop_grace_s`: how long the end of `with client:` may wait after a stop for the last snapshot to be durable.
    Raises DaemonUnreachable, WrongUser, WrongSecret, Stale, TierUnreachable, BadRequest or BadConfig.
    """
    if slots is not None and not SLOTS_MIN <= slots <= SLOTS_MAX:
        raise BadConfig(f"connect {run} with slots={slots}: expected {SLOTS_MIN} to {SLOTS_MAX} per rank")
    if when_busy not in (None, "wait", "skip"):
        raise BadConfig(f'connect {run} with when_busy={when_busy!r}: expected "wait" or "skip"')
    if stop_grace_s is not None and not 0 <= stop_grace_s < math.inf:
        raise BadConfig(f"connect {run} with stop_grace_s={stop_grace_s!r}: expected seconds, 0 or more")
    if staging not in (None, "sync", "overlap"):
        raise BadConfig(f'connect {run} with staging={staging!r}: expected "sync" or "overlap"')
    deadline, meanings = find_deadline(os.environ, max_runtime_s, time.time()), signals_of(signals)
    ranks = find_ranks(rank, world_size, os.environ)
    options = {
        "every_steps": every_steps,
        "every_s": every_s,
        "slots_per_rank": slots,
        "slot_wait_s": slot_wait_s,
        "when_busy": when_busy,
        "stop_grace_s": stop_grace_s,
        "staging": staging,
    }
    generation = Generation(
        run,
        socket or os.environ.get("TIERD_SOCKET") or DEFAULT_SOCKET,
        ranks,
        {name: value for name, value in options.items() if value is not None},
        # Of this start only: a script's argument applies to restarts too, so it does not count here.
        starts_anew=os.environ.get("TIERD_RESUME") == SCRATCH,
        daemon_uid=_uid_of_daemon(daemon_uid),
        proof=proof_of(os.environ.get(VARIABLE, "")),
    )
    stop_file = stop_file or os.environ.get("TIERD_STOP_FILE") or None
    requests = StopRequests(
        ranks,
        lambda message: generation.session.send(message),  # of the session at that time
        signals=meanings,
        deadline=deadline,
        stop_file=stop_file,
        answers_operators=lambda: generation.is_lowest_of_node,
    )
    return Client(generation, ranks, requests, os.environ)


def _uid_of_daemon(daemon_uid: int | None) -> int | None:
    named = os.environ.get("TIERD_DAEMON_UID", "")
    if daemon_uid is not None or not named:
        return daemon_uid
    if not named.isdecimal():
        raise BadConfig(f"read $TIERD_DAEMON_UID={named!r}: expected a user id", hint="as `id -u NAME` prints it")
    return int(named)
