"""The one object that a training loop uses: connect, restore, due, snapshot.

trainer_never_waits_on_cold: snapshot() copies into a slot and returns; it waits for a slot at most, and that wait
is bounded. A daemon that is dead or hung costs a typed error once the slots are full, never a hang; when it comes
back, what it had not acknowledged is sent again. Whatever a call does, it does on all ranks or raises on all.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import platform
import signal
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from types import FrameType, TracebackType
from typing import Any

import msgspec
import torch

import tierd
from tierd.errors import BadConfig, BadRequest, Corrupt, DaemonUnreachable, NotFound, SlotsBusy, TierdError, from_kind
from tierd.format import layout, manifest, wire
from tierd.format.ids import checkpoint_id
from tierd.format.manifest import CheckpointRef
from tierd.format.shard import FORMAT_VERSION
from tierd_client import replicas
from tierd_client.held import HeldSlots
from tierd_client.ownership import owner_of
from tierd_client.ranks import Ranks, find_ranks
from tierd_client.session import Identity, Session
from tierd_client.shots import Shot
from tierd_client.staging import Stager
from tierd_client.state import Captured, TrainingState, architecture_hash

log = logging.getLogger("tierd_client")

DEFAULT_SOCKET = ".tierd/tierd.sock"  # what the daemon's built-in config has
CONNECT_TIMEOUT_S = 60.0  # the daemon may be listing a cold tier to learn the run's history
SILENCE_S = 10.0  # a sealed snapshot unacknowledged for longer: the daemon is hung
CLOSE_TIMEOUT_S = 10.0
METRICS_BYTES_MAX = 32 << 10  # they travel in one message of 64 KiB
SLOTS_MIN, SLOTS_MAX = 2, 16  # one holds the newest snapshot while the other is filled; the daemon takes no more


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that was restored. `tier` is where its bytes came from: memory, hot, or a cold tier's name."""

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
) -> Client:
    """Begin (or go on with) a run. Every start of the trainer is a new generation, which fences the one before.

    `socket`: else $TIERD_SOCKET, else ./.tierd/tierd.sock. `rank`, `world_size`: else from torch.distributed, else
    from $RANK and $WORLD_SIZE. `when_busy`: "wait" up to `slot_wait_s` for a free slot, or "skip" at once; what is
    not given comes from the daemon's [snapshot] section.
    Raises DaemonUnreachable, Stale, TierUnreachable, BadRequest or BadConfig.
    """
    if slots is not None and not SLOTS_MIN <= slots <= SLOTS_MAX:
        raise BadConfig(f"connect {run} with slots={slots}: expected {SLOTS_MIN} to {SLOTS_MAX} per rank")
    if when_busy not in (None, "wait", "skip"):
        raise BadConfig(f'connect {run} with when_busy={when_busy!r}: expected "wait" or "skip"')
    ranks = find_ranks(rank, world_size, os.environ)
    path = socket or os.environ.get("TIERD_SOCKET") or DEFAULT_SOCKET
    overrides = {
        "every_steps": every_steps,
        "every_s": every_s,
        "slots_per_rank": slots,
        "slot_wait_s": slot_wait_s,
        "when_busy": when_busy,
    }
    return Client(run, path, ranks, {name: value for name, value in overrides.items() if value is not None})


class Client:
    """Use `connect`. One thread trains; nothing here is meant for several at once."""

    def __init__(self, run: str, path: str, ranks: Ranks, overrides: Mapping[str, Any]) -> None:
        self._run = run
        self._path = path
        self._ranks = ranks
        self._shots: weakref.WeakValueDictionary[tuple[int, int], Shot] = weakref.WeakValueDictionary()
        self._stager = Stager()
        self._state: TrainingState | None = None
        self._is_prepared = False
        self._owned: set[str] | None = None
        self._owned_of: list[tuple[str, int]] | None = None
        self._parent: CheckpointRef | None = None
        self._last_step: int | None = None
        self._last_snapshot_s = time.monotonic()
        self._stop_seen = False
        self._stop_agreed = False
        self._former_handlers: dict[int, Any] = {}
        self._pid = os.getpid()
        self._is_closed = False
        self._session, self._held = self._enter()
        self._told = msgspec.structs.replace(self._session.welcome, **overrides)
        atexit.register(self.close)  # a script that just ends has still handed its last snapshot over

    @property
    def generation(self) -> int:
        return self._session.welcome.generation

    @property
    def stopping(self) -> bool:
        """Whether this process was asked to stop (SIGTERM): take a snapshot and leave the loop.

        With several ranks, whether any of them was, as of the last due() or snapshot(): all see it at the same step.
        """
        return self._stop_agreed or (self._stop_seen and self._ranks.world_size == 1)

    # ── restore ──

    def restore(
        self,
        state: TrainingState,
        *,
        step: int | None = None,
        generation: int | None = None,
        milestone: str | None = None,
        tier: str = "auto",
    ) -> Found | None:
        """Put the newest checkpoint that all ranks can reach into `state`, in place. None: there is none, start fresh.

        A damaged replica is reported and the next one tried. Raises Mismatch, with nothing changed, when the
        checkpoint does not fit; NotFound when what was asked for by name is not there; Corrupt, TierUnreachable or
        DaemonUnreachable when there is one out of reach: never a silent start from scratch.
        """
        began = time.monotonic()
        self._ranks.together(self._check_open)
        self._state = state
        if self._last_step is not None:
            self._renew()
        wanted = replicas.Wanted(step=step, generation=generation, milestone=milestone, tier=tier)
        try:
            replica = replicas.restore(self._session, self._ranks, state, wanted, on_corrupt=self._pass_by)
        except NotFound:
            if not wanted.is_any:
                raise
            self._prepare()
            return None
        found = replica.manifest
        seconds = time.monotonic() - began
        self._parent = CheckpointRef(run=found.run, step=found.step, generation=found.generation)
        self._report("restored", found.step, replica.tier, seconds, "")
        self._prepare()
        metrics = {name: float(value) for name, value in found.metrics.items()}
        return Found(found.step, found.generation, replica.tier, seconds, metrics)

    def _pass_by(self, replica: replicas.Replica, error: Corrupt) -> None:
        log.error("tierd: %s; trying the next replica", error.message)
        self._report("corrupt", replica.manifest.step, replica.tier, 0.0, error.message)

    # ── snapshot ──

    def due(self, step: int) -> bool:
        """Whether a snapshot should be taken after `step`: every so many steps, or so many seconds.

        All ranks ask after each step: the first time, they also make their slots ready.
        """
        self._prepare()
        told = self._told
        by_steps = told.every_steps > 0 and step % told.every_steps == 0
        by_time = told.every_s > 0 and time.monotonic() - self._last_snapshot_s >= told.every_s
        # Clocks differ and signals come when they come, but all ranks must do the same.
        by_time, stop = self._ranks.maximum([by_time, self._stop_seen])
        self._stop_agreed = bool(stop)
        return by_steps or bool(by_time)

    def snapshot(
        self,
        step: int,
        state: TrainingState,
        *,
        metrics: Mapping[str, float] | None = None,
        milestone: str | None = None,
    ) -> Shot:
        """Copy the state into a slot and hand it to the daemon. Returns when training may change the state again.

        Raises SlotsBusy or DaemonUnreachable when no slot is free in time: the step was not staged, training may
        go on. Raises Unsupported when the state has no safe form, Stale when a newer trainer has taken over.
        """
        began = time.perf_counter()
        try:
            captured, plain = self._ranks.together(lambda: self._capture(step, state, metrics, milestone))
            self._share_out(captured)
            index = self._ranks.together(lambda: self._take_slot(captured, step))
            size_bytes = self._ranks.together(lambda: self._stage(index, captured, step))
        except BaseException as error:
            self._break_off(step, error, time.perf_counter() - began)
            raise
        stall_s = time.perf_counter() - began
        shot = Shot(step, self.generation, stall_s, _ask=self._ask, _why_waiting=self._why_waiting)
        self._shots[step, shot.generation] = shot
        self._last_step = step
        self._last_snapshot_s = time.monotonic()
        self._held.seal(
            wire.Sealed(
                slot=index,
                step=step,
                size_bytes=size_bytes,
                created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
                stall_s=stall_s,
                metrics=plain,
                milestone=milestone,
                parent=self._parent,
                architecture_hash=architecture_hash(captured),
                versions={
                    "tierd": tierd.__version__,
                    "torch": str(torch.__version__),
                    "python": platform.python_version(),
                },
                resent=False,
            )
        )
        return shot

    def _capture(
        self, step: int, state: TrainingState, metrics: Mapping[str, float] | None, milestone: str | None
    ) -> tuple[Captured, dict[str, float | str]]:
        self._check_open()
        self._held.reclaim()  # from a snapshot that an interrupt broke off
        self._state = state
        checkpoint = checkpoint_id(self._run, step, self.generation)
        if self._last_step is not None and step <= self._last_step:
            raise BadRequest(
                f"snapshot step {step} of {self._run}: step {self._last_step} was taken before it",
                hint="to go back, restore that step first: it begins a new generation",
            )
        if milestone is not None:
            layout.milestone_key(checkpoint, milestone)
        plain = _plain(metrics or {})
        return state.capture(self._ranks.rank, self._ranks.world_size), plain

    def _break_off(self, step: int, error: BaseException, seconds: float) -> None:
        if os.getpid() != self._pid:
            return
        self._held.reclaim()
        if self._ranks.rank == 0:  # what is true of all ranks is counted once
            outcome = "skipped" if isinstance(error, SlotsBusy | DaemonUnreachable) else "failed"
            self._report(outcome, step, "", seconds, str(error))

    def _share_out(self, captured: Captured) -> None:
        """Decide which rank writes what several hold. Asked anew only when some rank's tensors have changed."""
        sizes = captured.sizes() if self._ranks.world_size > 1 else None
        has_changed, stop = self._ranks.maximum([sizes != self._owned_of, self._stop_seen])
        self._stop_agreed = bool(stop)
        if has_changed:
            everyone = self._ranks.gather(msgspec.json.encode(sizes))
            held = [msgspec.json.decode(one, type=list[tuple[str, int]]) for one in everyone]
            self._owned = owner_of(held)[self._ranks.rank]
            self._owned_of = sizes

    def _take_slot(self, captured: Captured, step: int) -> int:
        self._make_slots(captured)
        wait_s = self._told.slot_wait_s if self._told.when_busy == "wait" else 0.0
        index = self._held.take(step, wait_s)
        if index is not None:
            return index
        raise self._why_waiting() or SlotsBusy(
            f"snapshot step {step} of {self._run}: no slot free{f' after {wait_s:g} s' if wait_s else ''}",
            hint="the hot tier is slower than the snapshots come: take fewer, or give more slots",
        )

    def _stage(self, index: int, captured: Captured, step: int) -> int:
        metadata = {
            "format_version": FORMAT_VERSION,
            "run": self._run,
            "step": step,
            "generation": self.generation,
            "rank": self._ranks.rank,
            "world_size": self._ranks.world_size,
            "state": captured.tree,
        }
        return self._stager.stage(captured, self._owned, self._held.slot(index), metadata)

    # ── slots ──

    def _prepare(self) -> None:
        """Make the slots before they are needed, so that even the first snapshot finds warm memory.

        Before the first optimizer step there are no moments yet, and the size is not known: later then. What
        goes wrong here goes wrong again in snapshot(), which says so.
        """
        state = self._state
        if self._is_prepared or state is None or self._ranks.maximum([not state.is_stepped])[0]:
            return
        self._is_prepared = True
        try:
            captured = self._ranks.together(lambda: state.capture(self._ranks.rank, self._ranks.world_size))
            self._share_out(captured)
            self._make_slots(captured)
        except TierdError as error:
            log.warning("tierd: make the slots ready: %s", error)

    def _make_slots(self, captured: Captured) -> None:
        if len(self._held) < self._told.slots_per_rank:
            plan = self._stager.plan(captured, self._owned, {"format_version": FORMAT_VERSION, "state": captured.tree})
            self._held.make(self._told.slots_per_rank, plan.size_bytes)

    # ── the session ──

    def _enter(self) -> tuple[Session, HeldSlots]:
        """Rank 0 claims a generation and gives it to the others."""
        first = self._ranks.together(lambda: self._open(None) if self._ranks.rank == 0 else None)
        told = self._ranks.from_first(msgspec.json.encode(first.welcome.generation) if first is not None else None)
        generation = msgspec.json.decode(told or b"0", type=int)
        session: Session | None = first
        try:
            session = self._ranks.together(lambda: first or self._open(generation))
            held = HeldSlots(session)
        except BaseException:
            if session is not None:
                session.close()
            raise
        session.start(on_message=functools.partial(self._on_message, held), on_attach=held.on_attach)
        return session, held

    def _open(self, generation: int | None) -> Session:
        identity = Identity(
            run=self._run, rank=self._ranks.rank, world_size=self._ranks.world_size, generation=generation
        )
        return Session(self._path, identity, timeout_s=CONNECT_TIMEOUT_S)

    def _renew(self) -> None:
        """Going back in time is a new timeline: a new generation of ours takes over from our own."""
        session, held = self._session, self._held
        held.wait_safe(CLOSE_TIMEOUT_S)
        session.has_successor = True
        try:
            self._ranks.agree(None)  # all are ready to be fenced
            self._session, self._held = self._enter()
        finally:
            session.has_successor = self._session is not session
        session.close()
        held.close()
        self._last_step, self._is_prepared = None, False

    def _on_message(self, held: HeldSlots, message: wire.ToClient) -> None:
        """On the session's thread."""
        held.on_message(message)
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
        if threading.current_thread() is threading.main_thread():
            self._former_handlers[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._on_sigterm)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former_handlers.items():
            signal.signal(number, handler)
        self._former_handlers.clear()
        self.close()

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self._stop_seen = True

    def close(self) -> None:
        """Leave in good order: what was sealed is in the daemon's hands, or the log says that it is not."""
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = True
        if not self._held.wait_safe(CLOSE_TIMEOUT_S):
            log.error("tierd: the last snapshot is not in the hands of a daemon: it is lost with this process")
        self._session.close()
        self._held.close()
        self._ranks.close()
        atexit.unregister(self.close)


def _plain(metrics: Mapping[str, Any]) -> dict[str, float | str]:
    """Metrics as a manifest holds them. Raises BadRequest for what is no number, or for too many to send."""
    try:
        plain = manifest.plain_metrics(
            {
                str(name): float(value.detach() if isinstance(value, torch.Tensor) else value)
                for name, value in metrics.items()
            }
        )
        size_bytes = len(msgspec.msgpack.encode(plain))
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadRequest(
            f"snapshot with metrics {', '.join(map(repr, metrics))}: {error}", hint="metrics are numbers"
        ) from error
    if size_bytes > METRICS_BYTES_MAX:
        raise BadRequest(
            f"snapshot with {len(plain)} metrics: {size_bytes} bytes, more than {METRICS_BYTES_MAX}", hint="send fewer"
        )
    return plain
