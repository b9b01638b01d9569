"""The one object that a training loop uses: connect, restore, due, snapshot.

trainer_never_waits_on_cold: snapshot() copies into a slot and returns; it waits for a slot at most, and that wait
is bounded. A daemon that is dead or hung costs a typed error once the slots are full, never a hang; when it comes
back, what it had not acknowledged is sent again. Whatever a call does, it does on all ranks or raises on all.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

import msgspec

from tierd.errors import BadConfig, BadRequest, DaemonUnreachable, SlotsBusy, TierdError, from_kind
from tierd.format import wire
from tierd.format.manifest import CheckpointRef
from tierd_client.generation import join
from tierd_client.ranks import Ranks, find_ranks
from tierd_client.restore.replica import ReadReplica, Replica, RestoreRequest, restore_replica
from tierd_client.restore.resume import Resume, agree_on_policy, restore_by_policy, starts_anew
from tierd_client.snapshot.handle import Shot
from tierd_client.snapshot.slot_pool import SlotPool
from tierd_client.snapshot.snapshotter import Snapshotter
from tierd_client.state.training_state import Capturable, State
from tierd_client.step_times import StepTimes
from tierd_client.stopping.deadline import find_deadline
from tierd_client.stopping.outcome import Halted, ending_of, wait_last
from tierd_client.stopping.requests import Meaning, StopRequests, signals_of

log = logging.getLogger("tierd_client")

DEFAULT_SOCKET = ".tierd/tierd.sock"  # what the daemon's built-in config has
SILENCE_S = 10.0  # a sealed snapshot unacknowledged for longer: the daemon is hung
CLOSE_TIMEOUT_S = 10.0
SLOTS_MIN, SLOTS_MAX = 2, 16  # one holds the newest snapshot while the other is filled; the daemon takes no more


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that was restored. `tier` is where its bytes came from: memory, hot, a cold tier's name, a path."""

    step: int
    generation: int
    tier: str
    seconds: float
    metrics: dict[str, float]


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
) -> Client:
    """Begin (or go on with) a run. Every start of the trainer is a new generation, which fences the one before.

    `socket`: else $TIERD_SOCKET, else ./.tierd/tierd.sock. `rank`, `world_size`: else from torch.distributed, else
    from $RANK and $WORLD_SIZE. `when_busy`: "wait" up to `slot_wait_s` for a free slot, or "skip" at once. `staging`:
    "sync" copies the state before snapshot() returns, "overlap" during the next step. What is not given comes from
    the daemon's [snapshot] section.

    The run stops in good order before the earliest of `max_runtime_s` from now, $SLURM_JOB_END_TIME and
    $TIERD_DEADLINE; when `stop_file` (else $TIERD_STOP_FILE) appears, which is then removed; and at SIGTERM or SIGINT.
    SIGUSR1 asks for a snapshot. `signals` changes that: {SIGUSR2: "snapshot", SIGUSR1: "stop", SIGINT: None}.
    `stop_grace_s`: how long leaving `with client:` after a stop may wait for the last snapshot to be durable.
    Raises DaemonUnreachable, Stale, TierUnreachable, BadRequest or BadConfig.
    """
    if slots is not None and not SLOTS_MIN <= slots <= SLOTS_MAX:
        raise BadConfig(f"connect {run} with slots={slots}: expected {SLOTS_MIN} to {SLOTS_MAX} per rank")
    if when_busy not in (None, "wait", "skip"):
        raise BadConfig(f'connect {run} with when_busy={when_busy!r}: expected "wait" or "skip"')
    if stop_grace_s is not None and not 0 <= stop_grace_s < math.inf:
        raise BadConfig(f"connect {run} with stop_grace_s={stop_grace_s!r}: expected seconds, 0 or more")
    deadline, caught = find_deadline(os.environ, max_runtime_s, time.time()), signals_of(signals)
    if staging not in (None, "sync", "overlap"):
        raise BadConfig(f'connect {run} with staging={staging!r}: expected "sync" or "overlap"')
    ranks = find_ranks(rank, world_size, os.environ)
    stop_file = stop_file or os.environ.get("TIERD_STOP_FILE") or None
    stops = StopRequests(ranks, signals=caught, deadline=deadline, stop_file=stop_file)
    path = socket or os.environ.get("TIERD_SOCKET") or DEFAULT_SOCKET
    overrides = {
        "every_steps": every_steps,
        "every_s": every_s,
        "slots_per_rank": slots,
        "slot_wait_s": slot_wait_s,
        "when_busy": when_busy,
        "stop_grace_s": stop_grace_s,
        "staging": staging,
    }
    return Client(run, path, ranks, stops, {name: value for name, value in overrides.items() if value is not None})


class Client:
    """Use `connect`. One thread trains; nothing here is meant for several at once."""

    def __init__(self, run: str, path: str, ranks: Ranks, stops: StopRequests, overrides: Mapping[str, Any]) -> None:
        self._run = run
        self._path = path
        self._ranks = ranks
        self._stops = stops
        self._steps = StepTimes(time.monotonic)
        self._last_shot: Shot | None = None
        self._shots: weakref.WeakValueDictionary[tuple[int, int], Shot] = weakref.WeakValueDictionary()
        self._overrides = overrides
        self._state: State | None = None
        self._parent: CheckpointRef | None = None
        self._pid = os.getpid()
        self._is_closed = False
        self._join()
        stops.start(lambda message: self._session.send(message), self._told.every_s)
        atexit.register(self._close_at_exit)  # a script that just ends has still handed its last snapshot over

    @property
    def generation(self) -> int:
        return self._session.welcome.generation

    @property
    def world_size(self) -> int:
        return self._ranks.world_size

    def allow_thread(self) -> None:
        """All ranks: from now on one thread beside the training thread may take snapshots. For integrations."""
        self._ranks.allow_thread()

    @property
    def stopping(self) -> bool:
        """Whether the run should stop now: take a snapshot and leave the loop.

        With several ranks, as of the last due() or snapshot(): all see it at the same step.
        """
        self._stops.look()
        return bool(self._stops.reason)

    # ── restore ──

    def restore(
        self,
        state: State,
        *,
        resume: Resume | None = None,
        force: bool = False,
        generation: int | None = None,
        milestone: str | None = None,
        tier: str = "auto",
        allow_unhealthy: bool = False,
    ) -> Found | None:
        """Put a checkpoint into `state`, in place, on any number of ranks. None: there is none, start fresh.

        `resume`: "auto", the newest that all ranks can reach; "require", the same, and NotFound where there is none;
        a step; the path of a directory with a checkpoint, of this run or another; "scratch", none, which refuses
        (TargetNotEmpty, TierUnreachable) where there are some or may be, unless `force`. Else $TIERD_RESUME, else
        "auto". The others narrow the choice. None is taken that holds NaN or Inf (Unhealthy where there is no other, or
        it was named), unless `allow_unhealthy`. A damaged replica is reported and the next one tried.

        Raises Mismatch, with nothing changed, when the checkpoint does not fit; NotFound when what was asked for by
        name is not there; Corrupt, NewerFormat, TierUnreachable or DaemonUnreachable when there is one out of reach:
        never a silent start from scratch.
        """
        self._state = state
        policy = agree_on_policy(resume, self._ranks, os.environ)
        request = RestoreRequest(
            step=policy.step, generation=generation, milestone=milestone, tier=tier, allow_unhealthy=allow_unhealthy
        )

        def read(replica: Replica) -> None:
            replica.read_into_state(state, self._ranks.rank, self._ranks.world_size)

        found = self._read(lambda: restore_by_policy(self._session, self._ranks, policy, request, read, force=force))
        self._prepare()
        return found

    def read(self, request: RestoreRequest, read: ReadReplica) -> Found:
        """Have `read` restore the state from the requested replica. For integrations.

        `read` is called again with the next replica when it raises Corrupt, on any rank. Raises NotFound when there
        is none, and otherwise as `restore` does.
        """
        found = self._read(lambda: restore_replica(self._session, self._ranks, request, read))
        assert found is not None, "restore_replica raises NotFound"
        return found

    def _read(self, choose: Callable[[], Replica | None]) -> Found | None:
        began = time.monotonic()
        self._steps.spoil()
        self._ranks.together(self._check_open)
        self._taker.underway.settle()
        if self._taker.last_step is not None:
            self._renew()
        replica = choose()
        if replica is None:
            self._parent = None
            return None
        found = replica.manifest
        seconds = time.monotonic() - began
        self._parent = CheckpointRef(run=found.run, step=found.step, generation=found.generation)
        self._report("restored", found.step, replica.tier, seconds, "")
        metrics = {name: float(value) for name, value in found.metrics.items()}
        return Found(found.step, found.generation, replica.tier, seconds, metrics)

    def inspect(self, request: RestoreRequest, read: ReadReplica) -> None:
        """As `read`, where `read` changes nothing: the run goes on as before. For integrations."""
        self._ranks.together(self._check_open)
        restore_replica(self._session, self._ranks, request, read)

    # ── snapshot ──

    def due(self, step: int) -> bool:
        """Whether a snapshot should be taken after `step`: every so many steps or seconds, or because someone asks.

        All ranks ask after the same steps: the first time, they also make their slots ready.
        """
        with self._steps.apart(step):
            self._prepare()
            self._taker.underway.poll()
            is_wished = self._stops.at(step)
            self._say_step_time()
            every_steps = self._told.every_steps
            return is_wished or (every_steps > 0 and step % every_steps == 0)

    def snapshot(
        self,
        step: int,
        state: Capturable,
        *,
        metrics: Mapping[str, float] | None = None,
        milestone: str | None = None,
    ) -> Shot:
        """Copy the state into a slot and hand it to the daemon. Returns when training may go on.

        With staging="overlap" the parameters and the optimizer's state are copied while it does: the next step of the
        optimizer waits for that, and whatever else changes them in place before makes the shot fail with Torn.
        Raises SlotsBusy or DaemonUnreachable when no slot is free in time: the step was not staged, training may
        go on. Raises Unsupported when the state has no safe form, Stale when a newer trainer has taken over.
        """
        with self._steps.apart(step):
            return self._snapshot(step, state, metrics or {}, milestone)

    def _snapshot(self, step: int, state: Capturable, metrics: Mapping[str, float], milestone: str | None) -> Shot:
        self._stops.at(step)
        milestone = self._stops.milestone(milestone)
        began = time.perf_counter()
        shot = Shot(
            step,
            self.generation,
            _ask=self._ask,
            _why_waiting=self._why_waiting,
            _settle=self._begin_wait,
        )
        self._shots[step, shot.generation] = shot
        try:
            self._taker.take(shot, state, metrics=metrics, milestone=milestone, parent=self._parent)
        except BaseException as error:
            self._break_off(step, error, time.perf_counter() - began)
            raise
        self._last_shot = shot
        if self._taker.underway.slot is not None:
            self._steps.spoil()  # the next step shares the machine with the copy
        self._stops.taken(step, shot.stall_s, milestone)
        return shot

    def _begin_wait(self, shot: Shot) -> None:
        self._steps.spoil()
        self._taker.underway.settle_here(shot)

    def _say_step_time(self) -> None:
        """So that the daemon holds back while it slows the training down."""
        seconds = self._steps.report(self._told.report_s)
        if seconds is not None:
            self._session.send(wire.Stepped(seconds=seconds))

    def wait_staged(self) -> None:
        """Returns when nothing of the last snapshot is being copied any more: the state may be changed by any means."""
        self._check_open()
        self._taker.underway.settle()

    def _break_off(self, step: int, error: BaseException, seconds: float) -> None:
        if os.getpid() != self._pid:
            return
        self._held.reclaim(keep=self._taker.underway.slot)
        self._stops.not_taken(error)
        if self._ranks.rank == 0:  # what is true of all ranks is counted once
            outcome = "skipped" if isinstance(error, SlotsBusy | DaemonUnreachable) else "failed"
            self._report(outcome, step, "", seconds, str(error))

    def _prepare(self) -> None:
        if self._state is not None:
            self._taker.prepare(self._state)

    # ── the session ──

    def _join(self) -> None:
        """A generation of our own, and all that belongs to it."""
        self._session, self._held = join(
            self._run,
            self._path,
            self._ranks,
            starts_anew(os.environ),
            self._on_message,
            self._stops.on_attach,
        )
        self._told = msgspec.structs.replace(self._session.welcome, **self._overrides)
        self._taker = Snapshotter(
            self._run,
            self.generation,
            self._ranks,
            self._held,
            self._told,
            check_open=self._check_open,
            why_waiting=self._why_waiting,
        )

    def _renew(self) -> None:
        """Going back in time is a new timeline: a new generation of ours takes over from our own."""
        session, held, taker = self._session, self._held, self._taker
        held.wait_safe(CLOSE_TIMEOUT_S)
        session.has_successor = True
        try:
            self._ranks.agree(None)  # all are ready to be fenced
            self._join()
        finally:
            session.has_successor = self._session is not session
        self._stops.on_attach()  # what was asked of the former session may not have been heard
        taker.underway.close()
        session.close()
        held.close()

    def _on_message(self, held: SlotPool, message: wire.ToClient) -> None:
        """On the session's thread."""
        held.on_message(message)
        self._stops.on_message(message)
        match message:
            case wire.Persisted() | wire.Replicated():
                shot = self._shots.get((message.step, message.generation))
                if shot is not None:
                    shot.reached(message.tier if isinstance(message, wire.Replicated) else "hot")
            case wire.Failed():
                error = from_kind(message.kind, message.message, message.hint)
                log.warning("tierd: step %d, %s: %s", message.step, message.stage, error)
                shot = self._shots.get((message.step, message.generation))
                if shot is not None:
                    shot.failed(error, is_final=message.is_final)
            case _:
                pass

    def _ask(self, shot: Shot) -> None:
        """Have the daemon say again where the shot is. Raises what makes waiting pointless."""
        self._check_open()
        self._session.send(wire.Ask(step=shot.step, generation=shot.generation))

    def _why_waiting(self) -> TierdError | None:
        """Why nothing comes from the daemon, or None when it is there and answers."""
        if self._session.ended_by is not None:
            return self._session.ended_by
        if not self._session.is_attached:
            return self._session.unreachable("it is gone")
        if self._held.silent_s() > SILENCE_S:
            return self._session.unreachable(f"it has not acknowledged a snapshot for more than {SILENCE_S:.0f} s")
        return None

    def _report(self, outcome: str, step: int, tier: str, seconds: float, detail: str) -> None:
        self._session.send(wire.Report(outcome=outcome, step=step, tier=tier, seconds=seconds, detail=detail[:4096]))

    def _check_open(self) -> None:
        if self._is_closed:
            raise BadRequest(f"go on with {self._run}: its client was closed", hint="wait for shots inside `with`")
        if os.getpid() != self._pid:
            raise BadRequest(
                f"go on with {self._run} in process {os.getpid()}: its client belongs to process {self._pid}",
                hint="a forked child has none of its threads; connect where the training runs",
            )
        if self._session.ended_by is not None:
            raise self._session.ended_by

    # ── the loop's frame ──

    def __enter__(self) -> Client:
        self._stops.catch_signals()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After a stop, wait until the last snapshot is durable. Raises Transient when it is not in time."""
        ending = ending_of(error, self._stops.reason)
        wait_s = 0.0 if isinstance(error, KeyboardInterrupt) else CLOSE_TIMEOUT_S
        try:
            if ending.state == "stopped" and not self._is_closed:
                wait_last(self._stops, self._last_shot, self._stops.grace_s(self._told.stop_grace_s))
        except BaseException as late:
            ending, wait_s = ending_of(late, ""), 0.0
            raise
        finally:
            self._stops.release_signals()
            self._end(ending, wait_s)

    def halt(self, reason: str) -> NoReturn:
        """End with exit code 17, because a person must decide before this run goes on. On all ranks, inside `with`."""
        log.error("tierd: %s is halted: %s", self._run, reason)
        raise Halted(reason)

    def close(self) -> None:
        """Leave in good order: what was sealed is in the daemon's hands, or the log says that it is not."""
        self._end(wire.Goodbye(state="finished", reason=""))

    def _close_at_exit(self) -> None:
        self._end(wire.Goodbye(state="lost", reason="the script ended outside of `with client:`"))

    def _end(self, ending: wire.Goodbye, wait_s: float = CLOSE_TIMEOUT_S) -> None:
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = True
        self._taker.underway.settle()
        self._taker.underway.close()
        if not self._held.wait_safe(wait_s):
            log.error("tierd: the last snapshot is not in the hands of a daemon: it is lost with this process")
        self._stops.close()
        self._session.close(ending)
        self._held.close()
        self._ranks.close()
        atexit.unregister(self._close_at_exit)
