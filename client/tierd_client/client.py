"""The object that a training loop uses: restore, due, snapshot. `tierd_client.connect` makes it.

trainer_never_waits_on_cold: snapshot() copies into a slot and returns; it waits for a free slot at most, and that wait
is bounded. With a daemon that is dead or hangs, it raises once the slots are full: after one short wait, then at once
until the daemon answers. When the daemon comes back, it is sent again what it had not acknowledged. Every call has the
same outcome on all ranks: each returns or each raises.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

from tierd.errors import BadConfig, BadRequest, DaemonUnreachable, SlotsBusy
from tierd.format import wire
from tierd.format.ids import CheckpointId
from tierd.format.run_state import ENDED_WELL, RunState
from tierd_client.generation import Generation
from tierd_client.log import log
from tierd_client.ranks import Ranks
from tierd_client.restore.attempts import ReadReplica, restore_replica
from tierd_client.restore.replica import Replica, RestoreRequest
from tierd_client.restore.resume import Resume, agree_on_policy, check_start, restore_by_policy
from tierd_client.snapshot.handle import Shot
from tierd_client.snapshot.snapshotter import Snapshotter
from tierd_client.state.restore_filter import Patterns, Rename, RestoreFilter
from tierd_client.state.restore_report import RestoreReport
from tierd_client.state.training_state import Capturable, State
from tierd_client.step_times import StepTimes, as_step
from tierd_client.stopping.node_calls import open_store
from tierd_client.stopping.outcome import Halted, outcome_of, wait_last_snapshot
from tierd_client.stopping.requests import StopRequests

CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that was restored. `tier` is where its bytes came from: memory, hot, a cold tier's name, a path.
    `run` is the run that saved it, and `report` what this rank has loaded and what not."""

    step: int
    generation: int
    tier: str
    seconds: float
    metrics: dict[str, float]
    run: str
    report: RestoreReport = field(default_factory=RestoreReport)


class Client:
    """Use `connect`. Not safe for use by several threads at once."""

    def __init__(
        self, generation: Generation, ranks: Ranks, requests: StopRequests, environ: Mapping[str, str]
    ) -> None:
        self._generation = generation
        self._ranks = ranks
        self._requests = requests
        self._environ = environ
        self._step_times = StepTimes(time.monotonic)
        self._snapshotter = Snapshotter(generation, ranks, self._step_times)
        self._last_shot: Shot | None = None
        self._state: State | None = None
        self._parent: CheckpointId | None = None
        self._start_is_chosen = False  # True after a restore, also if there was no checkpoint
        generation.join(requests, self._snapshotter)
        store = open_store(generation.run, generation.number) if generation.node is not None else None
        settings = generation.settings
        requests.start(settings.every_s, generation.node, store, follows_daemon=settings.cadence == "auto")
        lost = wire.Goodbye(state=RunState.LOST, reason="the script ended outside of `with client:`")
        atexit.register(self._close, lost, CLOSE_TIMEOUT_S)  # also for a script that ends without close()

    @property
    def generation(self) -> int:
        """The generation of this start of the trainer. It increases with each start and fences earlier ones."""
        return self._generation.number

    @property
    def rank(self) -> int:
        """This process among the ranks that train together, from 0."""
        return self._ranks.rank

    @property
    def world_size(self) -> int:
        """The number of ranks that train together."""
        return self._ranks.world_size

    @property
    def last_step(self) -> int | None:
        """The step of the last snapshot in this generation."""
        return self._snapshotter.last_step

    @property
    def parent(self) -> CheckpointId | None:
        """The checkpoint of this run that was restored last: training goes on from it."""
        return self._parent if self._parent is not None and self._parent.run == self._generation.run else None

    def maximum(self, values: Sequence[int]) -> list[int]:
        """Call it on all ranks. Returns the maximum over the ranks, element by element. For integrations."""
        return self._ranks.maximum(values)

    def allow_thread(self) -> None:
        """Call it on all ranks: from now on one more thread than the training thread may snapshot. For integrations."""
        self._ranks.allow_thread()

    @property
    def stopping(self) -> bool:
        """Whether the run should stop now: take a snapshot and leave the loop.

        With several ranks, as of the last due() or snapshot(): it becomes true at the same step on all. On a single
        rank, as of the first reading after due(), until the next due() or snapshot().
        """
        self._requests.check_between_steps()
        return bool(self._requests.reason)

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
        only: Patterns | None = None,
        rename: Rename | None = None,
        strict: bool = True,
        cast: bool | Patterns = False,
        keep: Patterns = (),
    ) -> Found | None:
        """Put a checkpoint into `state`, in place, on any number of ranks. None: there is none, start fresh.

        `resume`: "auto", the newest that all ranks can read; "require", the same, and NotFound where there is none;
        a step; the path of a directory with a checkpoint, of this run or another; "run:NAME", "run:NAME@STEP" or
        "run:NAME@milestone:NAME", a checkpoint of another run, but only while this run has none; "scratch", none, which
        raises TargetNotEmpty or TierUnreachable where checkpoints exist or may exist, unless `force`. Default
        $TIERD_RESUME, then "auto". `generation`, `milestone` and `tier` narrow the choice. A checkpoint with NaN or
        Inf is passed over unless `allow_unhealthy`; Unhealthy is raised when there is no other, or when it was named.
        A damaged replica is reported and the next one tried.

        The other arguments restore a part; `Found.report` has what was loaded and what not. `only`: the entries of the
        checkpoint to restore, by name, by what contains them, or by a pattern with `*`. `rename`: prefixes of stored
        names and what they are in `state`, or a function of a stored name. `strict=False`: what one side lacks or does
        not fit stays as it is. `cast`: the entries whose floating-point dtype may change, or True. `keep`: the
        entries of `state` to leave alone. With "run:NAME" these apply to the other run's checkpoint only: a checkpoint
        of this run is restored whole.

        Raises BadConfig for a wrong argument; Mismatch, with nothing changed, when the checkpoint does not fit;
        NotFound when the named checkpoint does not exist; Corrupt, NewerFormat, TierUnreachable or DaemonUnreachable
        when a checkpoint exists and cannot be read: it never silently starts from scratch.
        """
        self._state = state
        policy = agree_on_policy(resume, self._ranks, self._environ)
        request = RestoreRequest(
            step=policy.step,
            generation=generation,
            milestone=milestone or policy.milestone,
            tier=tier,
            allow_unhealthy=allow_unhealthy,
        )
        filter = self._ranks.run_on_all(
            lambda: RestoreFilter.parse(only=only, rename=rename, strict=strict, cast=cast, keep=keep)
        )
        read = partial(Replica.read_into_state, state=state, rank=self._ranks.rank, world_size=self._ranks.world_size)
        started_s = self._begin_restore()
        replica = restore_by_policy(
            self._generation.session,
            self._ranks,
            policy,
            request,
            partial(read, filter=filter),
            read_own=read,
            force=force,
        )
        self._start_is_chosen = True
        self._parent = None
        restored = self._restored(replica, started_s) if replica is not None else None
        self._snapshotter.prepare(state)
        return restored

    def read(self, request: RestoreRequest, read: ReadReplica) -> Found:
        """Restore the state from the requested replica by a call of `read`. For integrations.

        `read` is called again with the next replica when it raises Corrupt, on any rank. Raises NotFound when there
        is none, and otherwise as `restore` does.
        """
        started_s = self._begin_restore()
        return self._restored(restore_replica(self._generation.session, self._ranks, request, read), started_s)

    def inspect(self, request: RestoreRequest, read: ReadReplica) -> None:
        """As `read`, for a callback that changes no state: the generation is kept. For integrations."""
        self._ranks.run_on_all(self._wait_accepted)
        restore_replica(self._generation.session, self._ranks, request, read)

    def inspect_by_policy(self, read: ReadReplica) -> bool:
        """As `inspect`, for the checkpoint that $TIERD_RESUME selects: the newest without it. False: training starts
        fresh. Raises as `restore`, and BadConfig when it selects a path or another run."""
        policy = agree_on_policy(None, self._ranks, self._environ)
        if policy.path is not None or policy.run is not None:
            where = policy.path or f"run:{policy.run}"
            raise BadConfig(
                f"read a checkpoint with TIERD_RESUME={where}: this reader takes those of its own run",
                hint='"auto", "require", "scratch" or a step; Client.restore takes paths and other runs',
            )
        self._ranks.run_on_all(self._wait_accepted)
        request, session = RestoreRequest(step=policy.step), self._generation.session
        return restore_by_policy(session, self._ranks, policy, request, read, read_own=read, force=False) is not None

    def _wait_accepted(self) -> None:
        """Waits until the daemon has this rank's part of the last snapshot: rank 0 may then ask for it."""
        self._generation.check_open()
        self._snapshotter.overlap.finish()
        self._generation.pool.wait_safe(CLOSE_TIMEOUT_S)

    def _begin_restore(self) -> float:
        """Prepares for a restore. Returns the monotonic time at its start, in seconds."""
        started_s = time.monotonic()
        self._step_times.is_skipped = True
        self._ranks.run_on_all(self._generation.check_open)
        self._snapshotter.overlap.finish()
        if self._snapshotter.last_step is not None:
            self._generation.renew()  # a restore after a snapshot starts a new generation
        return started_s

    def _restored(self, replica: Replica, started_s: float) -> Found:
        manifest = replica.manifest
        seconds = time.monotonic() - started_s
        self._start_is_chosen = True
        self._parent = manifest.id
        session, report = self._generation.session, replica.report or RestoreReport()
        session.report("restored", manifest.step, run=manifest.run, tier=replica.tier, seconds=seconds)
        if self._ranks.rank == 0 and report.loaded:
            log.info("tierd: restored %s from %s: %s", manifest.id, replica.tier, report)
        metrics = {name: float(value) for name, value in manifest.metrics.items()}
        return Found(manifest.step, manifest.generation, replica.tier, seconds, metrics, manifest.run, report)

    def due(self, step: int) -> bool:
        """Whether a snapshot should be taken after `step`: every so many steps or seconds, because of a request, or
        because the run stops and none was taken since.

        All ranks call it after the same steps. Before the first snapshot it also makes the slots ready.
        """
        step = as_step(step)
        with self._step_times.outside_steps(step):
            if self._state is not None:
                self._snapshotter.prepare(self._state)
            self._snapshotter.overlap.poll()
            is_requested = self._requests.due(step)
            settings = self._generation.settings
            step_s = self._step_times.report(settings.report_s)
            if step_s is not None:
                self._generation.session.send(wire.Stepped(seconds=step_s))
            return is_requested or (settings.every_steps > 0 and step % settings.every_steps == 0)

    def snapshot(
        self,
        step: int,
        state: Capturable,
        *,
        metrics: Mapping[str, float] | None = None,
        milestone: str | None = None,
    ) -> Shot:
        """Copy the state into a slot and hand it to the daemon. Returns when training may go on.

        With staging="overlap" the parameters and the optimizer state are copied during the next step. The next
        optimizer step waits for that copy; any other change of them in place before then fails the shot with Torn.
        Raises SlotsBusy or DaemonUnreachable when no slot is free in time: no snapshot was taken, training may go on.
        After a stop request, it waits for a slot as long as the grace time allows.
        A second call with the same step returns the first one's handle.
        Raises Unsupported when the state has no safe form, Stale when a newer trainer has taken over. Raises
        TargetNotEmpty when the run has checkpoints and `restore` was not called: the new ones would push them out.
        """
        step = as_step(step)
        if milestone is None and self._last_shot is not None and step == self._snapshotter.last_step:
            return self._last_shot  # for example at the end of a loop whose last step was due
        if not self._start_is_chosen:
            self._ranks.run_on_all(self._check_start)
            self._start_is_chosen = True
        with self._step_times.outside_steps(step):
            self._requests.at(step)
            milestone = self._requests.milestone(milestone)
            started_s = time.perf_counter()
            try:
                shot = self._snapshotter.take(
                    step,
                    state,
                    metrics=metrics or {},
                    milestone=milestone,
                    parent=self._parent,
                    last_wait_s=self._grace_left_s() if self._requests.reason else None,
                )
            except BaseException as error:  # an interrupt too: the slot must become free again
                if self._generation.is_open:
                    seconds = time.perf_counter() - started_s
                    self._generation.pool.reclaim(keep=self._snapshotter.overlap.slot)
                    self._requests.not_taken(error, seconds)
                    if self._ranks.rank == 0:  # the same on all ranks: counted once
                        outcome = "skipped" if isinstance(error, SlotsBusy | DaemonUnreachable) else "failed"
                        self._generation.session.report(outcome, step, seconds=seconds, detail=str(error))
                raise
            self._last_shot = shot
            self._requests.taken(step, shot.stall_s, self._snapshotter.milestone)
            return shot

    def _check_start(self) -> None:
        if self._generation.is_lowest_of_node:
            check_start(self._generation.session)

    def wait_staged(self) -> None:
        """Returns when no copy of the last snapshot is in progress: the state may then be changed by any means."""
        self._generation.check_open()
        self._snapshotter.overlap.finish()

    def wait_everywhere(self, timeout_s: float = 900.0) -> None:
        """Call it on all ranks. Wait until the last snapshot is durable on every node: then a restart on the same nodes
        goes on from it or from a newer one. On one node the same as `wait_persisted` of its handle.

        Raises on all ranks what `wait_persisted` raises on one, and BadRequest when no snapshot was taken.
        """
        shot = self._last_shot
        if shot is None:
            raise BadRequest("wait until the last snapshot is durable on every node: none was taken")
        self._snapshotter.wait_everywhere(shot, timeout_s)

    def start(self) -> None:
        """Handle signals from now on, as `with client:` does when it begins."""
        self._requests.catch_signals()

    def stop(self, error: BaseException | None = None) -> None:
        """Leave the run, as `with client:` does at its end; `error` is what ended the loop.

        After a stop request, waits until the last snapshot is durable. Raises Transient when it is not in time. Raises
        DaemonUnreachable when the last snapshot is lost because the daemon refuses this client.
        """
        outcome = outcome_of(error, self._requests.reason)
        wait_s = 0.0 if isinstance(error, KeyboardInterrupt) else CLOSE_TIMEOUT_S
        try:
            if outcome.state == RunState.STOPPED and self._generation.is_open:
                wait_last_snapshot(self._requests.last_step, self._last_shot, self._grace_left_s())
        except BaseException as late:  # an interrupt too: it changes the outcome
            outcome, wait_s = outcome_of(late, ""), 0.0
            raise
        finally:
            self._requests.release_signals()
            lost = self._close(outcome, wait_s)
        if lost is not None and outcome.state in ENDED_WELL:
            raise lost

    def __enter__(self) -> Client:
        self.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.stop(error)

    def halt(self, reason: str) -> NoReturn:
        """End with exit code 17, because a person must decide before this run goes on. On all ranks, inside `with`."""
        log.error("tierd: %s is halted: %s", self._generation.run, reason)
        raise Halted(reason)

    def close(self) -> None:
        """Leave the run as finished. Waits up to 10 s until the daemon has accepted the last snapshot; otherwise logs
        an error. Raises DaemonUnreachable when it is lost because the daemon refuses this client."""
        if not self._generation.is_closed:  # `__del__` may call this after Python has cleared the modules
            lost = self._close(wire.Goodbye(state=RunState.FINISHED, reason=""), CLOSE_TIMEOUT_S)
            if lost is not None:
                raise lost

    def _grace_left_s(self) -> float:
        return self._requests.grace_left_s(self._generation.settings.stop_grace_s)

    def _close(self, outcome: wire.Goodbye, wait_s: float) -> DaemonUnreachable | None:
        """Returns the error of a last snapshot that is lost because the daemon refuses this client."""
        if not self._generation.is_open:
            return None
        self._generation.is_closed = True
        self._snapshotter.overlap.close()
        lost = None
        if not self._generation.pool.wait_safe(wait_s):
            log.error("tierd: no daemon has accepted the last snapshot: it is lost with this process")
            lost = self._lost_by_refusal()
        self._requests.close()
        self._generation.session.close(outcome)
        self._generation.pool.close()
        self._ranks.close()
        atexit.unregister(self._close)
        return lost

    def _lost_by_refusal(self) -> DaemonUnreachable | None:
        if self._generation.session.refusal is None:
            return None
        error = self._generation.session.unreachable("it is not connected")
        message = f"leave {self._generation.run}: the last snapshot is lost: {error.message}"
        return DaemonUnreachable(message, hint=error.hint)
