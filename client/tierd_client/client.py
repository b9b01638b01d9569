"""The one object that a training loop uses: connect, restore, due, snapshot.

trainer_never_waits_on_cold: snapshot() copies into a slot and returns; it waits for a slot at most, and that wait
is bounded. A daemon that is dead or hung costs a typed error once the slots are full, never a hang; when it comes
back, what it had not acknowledged is sent again.
"""

from __future__ import annotations

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
from tierd.errors import BadRequest, Corrupt, DaemonUnreachable, Mismatch, NotFound, SlotsBusy, TierdError, from_kind
from tierd.format import layout, manifest, wire
from tierd.format.ids import Rank, checkpoint_id
from tierd.format.manifest import CheckpointRef, Manifest
from tierd.format.shard import FORMAT_VERSION
from tierd_client.ownership import owner_of
from tierd_client.ranks import Ranks, find_ranks
from tierd_client.restoring import SourceFile, index_tensors, load, read_headers
from tierd_client.session import Identity, Session
from tierd_client.shots import Shot
from tierd_client.slots import Slot
from tierd_client.staging import Stager
from tierd_client.state import Captured, TrainingState, architecture_hash

log = logging.getLogger("tierd_client")

DEFAULT_SOCKET = ".tierd/tierd.sock"  # what the daemon's built-in config has
CONNECT_TIMEOUT_S = 60.0  # the daemon may be listing a cold tier to learn the run's history
SILENCE_S = 10.0  # a sealed snapshot unacknowledged for longer: the daemon is hung
CLOSE_TIMEOUT_S = 10.0
METRICS_BYTES_MAX = 32 << 10  # they travel in one message of 64 KiB


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that was restored. `tier` is where its bytes came from: memory, hot, or a cold tier's name."""

    step: int
    generation: int
    tier: str
    seconds: float
    metrics: dict[str, float]


@dataclass(slots=True)
class _Held:
    """A slot and what is in it, as far as we know. `inherited_from`: the start of the daemon that keeps our
    predecessor's snapshot in it."""

    slot: Slot
    is_free: bool = True
    sealed: wire.Sealed | None = None
    sent_s: float = 0.0
    is_accepted: bool = False
    is_offered: bool = False
    inherited_from: str = ""


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
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._held: dict[int, _Held] = {}
        self._shots: weakref.WeakValueDictionary[tuple[int, int], Shot] = weakref.WeakValueDictionary()
        self._stager = Stager()
        self._state: TrainingState | None = None
        self._owned: set[str] | None = None
        self._owned_of: list[tuple[str, int]] | None = None
        self._parent: CheckpointRef | None = None
        self._last_step: int | None = None
        self._last_snapshot_s = time.monotonic()
        self._stop_seen = False
        self._former_handlers: dict[int, Any] = {}
        self._session = self._enter()
        self._session.start()
        self._told = msgspec.structs.replace(self._session.welcome, **overrides)

    @property
    def generation(self) -> int:
        return self._session.welcome.generation

    @property
    def stopping(self) -> bool:
        """Whether this process was asked to stop (SIGTERM): take a snapshot and leave the loop."""
        return self._stop_seen

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
        checkpoint does not fit; Corrupt, TierUnreachable or DaemonUnreachable when there is one out of reach:
        never a silent start from scratch.
        """
        self._state = state
        began = time.monotonic()
        if self._last_step is not None:
            self._renew()  # going back in time is a new timeline
        exclude: list[str] = []
        while True:
            chosen = self._choose(step, generation, milestone, tier, exclude)
            if chosen is None:
                self._prepare(state)
                return None
            source, found, descriptors = chosen
            error: TierdError | None = None
            try:
                self._load(state, found, descriptors, where=source)
            except Corrupt as corrupt:
                error = corrupt
                log.error("tierd: %s; trying the next replica", corrupt)
                self._report("corrupt", found.step, source, 0.0, corrupt.message)
            except TierdError as other:
                error = other
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            # All ranks go the same way: on, to the next replica, or out.
            is_bad, is_over = self._ranks.maximum([error is not None, not isinstance(error, Corrupt | None)])
            if is_over:
                raise error or TierdError(f"restore {found.id}: another rank could not", hint="its error says why")
            if not is_bad:
                break
            exclude.append(f"{found.id.name}@{source}")
        seconds = time.monotonic() - began
        self._parent = CheckpointRef(run=found.run, step=found.step, generation=found.generation)
        self._report("restored", found.step, source, seconds, "")
        self._prepare(state)
        return Found(found.step, found.generation, source, seconds, {k: float(v) for k, v in found.metrics.items()})

    def _choose(
        self, step: int | None, generation: int | None, milestone: str | None, tier: str, exclude: list[str]
    ) -> tuple[str, Manifest, list[int]] | None:
        """(tier, manifest, descriptors of its files): rank 0 chooses, the others take the same replica."""
        error: TierdError | None = None
        mine: tuple[str, list[int]] | None = None
        told: bytes | None = None
        if self._ranks.rank == 0:
            try:
                mine = self._find(step, generation, milestone, tier, exclude)
                found = self._manifest(mine)
                told = msgspec.json.encode((found.step, found.generation, mine[0]))
            except TierdError as raised:
                error = raised
                told = msgspec.json.encode((raised.kind, raised.message, raised.hint))
        told = self._ranks.from_first(told)
        if self._ranks.rank != 0 and told is not None:
            first, second, third = msgspec.json.decode(told)
            if isinstance(first, str):
                error = from_kind(first, str(second), str(third))
            else:
                mine = self._find(first, second, None, third, [])
        if isinstance(error, NotFound):
            if step is None and milestone is None and tier == "auto":
                return None
            raise error
        if error is not None or mine is None:
            raise error or DaemonUnreachable(f"restore {self._run}: rank 0 said nothing")
        return mine[0], self._manifest(mine), mine[1][1:]

    def _find(
        self, step: int | None, generation: int | None, milestone: str | None, tier: str, exclude: list[str]
    ) -> tuple[str, list[int]]:
        return self._session.find(
            lambda number: wire.Find(
                request=number, step=step, generation=generation, milestone=milestone, tier=tier, exclude=exclude
            )
        )

    def _manifest(self, found: tuple[str, list[int]]) -> Manifest:
        descriptor = found[1][0]
        raw = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        return manifest.decode(raw, where=f"the manifest that the daemon handed over from {found[0]}")

    def _load(self, state: TrainingState, found: Manifest, descriptors: list[int], *, where: str) -> None:
        if found.world_size != self._ranks.world_size:
            raise Mismatch(
                f"restore {found.id}: it has {found.world_size} ranks, this run has {self._ranks.world_size}",
                hint="start with as many ranks, or load its directory with torch's HuggingFaceStorageReader",
            )
        files = [
            SourceFile(f"{found.id}/{entry.name} in {where}", descriptor, entry)
            for entry, descriptor in zip(found.files, descriptors, strict=True)
        ]
        shards = read_headers(files)
        name = layout.shard_name(Rank(self._ranks.rank), self._ranks.world_size)
        mine = next((shards[file.name] for file in files if file.entry.name == name), None)
        if mine is None or "state" not in mine.tierd:
            raise Corrupt(f"restore {found.id} from {where}: it has no state of rank {self._ranks.rank}")
        plan = state.plan_restore(mine.tierd["state"], index_tensors(shards))
        load(files, plan.destinations)
        plan.finish()

    # ── snapshot ──

    def due(self, step: int) -> bool:
        """Whether a snapshot should be taken after `step`: every so many steps, or so many seconds.

        All ranks ask after each step: the first time, they also make their slots ready.
        """
        if self._state is not None and not self._held:
            self._prepare(self._state)
        told = self._told
        by_steps = told.every_steps > 0 and step % told.every_steps == 0
        by_time = told.every_s > 0 and time.monotonic() - self._last_snapshot_s >= told.every_s
        if told.every_s > 0:
            by_time = bool(self._ranks.maximum([by_time])[0])  # clocks differ, and all ranks must do the same
        return by_steps or by_time

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
        self._state = state
        if self._session.ended_by is not None:
            raise self._session.ended_by
        if self._last_step is not None and step <= self._last_step:
            raise BadRequest(
                f"snapshot step {step} of {self._run}: step {self._last_step} was taken before it",
                hint="to go back, restore that step first: it begins a new generation",
            )
        if milestone is not None:
            layout.milestone_key(checkpoint_id(self._run, step, self.generation), milestone)
        plain = _plain(metrics or {})
        captured = state.capture(self._ranks.rank, self._ranks.world_size)
        self._share_out(captured)
        self._make_slots(captured)
        index = self._take_slot(step)
        try:
            size_bytes = self._stage(index, captured, step)
        except BaseException as error:
            self._abandon(index)
            self._report("failed", step, "", time.perf_counter() - began, str(error))
            raise
        shot = Shot(step, self.generation, _ask=self._ask, _why_waiting=self._why_waiting)
        self._shots[step, shot.generation] = shot
        shot.stall_s = time.perf_counter() - began
        self._seal(
            index,
            wire.Sealed(
                slot=index,
                step=step,
                size_bytes=size_bytes,
                created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
                stall_s=shot.stall_s,
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
            ),
        )
        self._last_step = step
        self._last_snapshot_s = time.monotonic()
        return shot

    def _share_out(self, captured: Captured) -> None:
        """Decide which rank writes what several hold. Asked anew only when some rank's tensors have changed."""
        if self._ranks.world_size == 1:
            return
        sizes = captured.sizes()
        if self._ranks.maximum([sizes != self._owned_of])[0]:
            everyone = self._ranks.gather(msgspec.json.encode(sizes))
            held = [msgspec.json.decode(one, type=list[tuple[str, int]]) for one in everyone]
            self._owned = owner_of(held)[self._ranks.rank]
            self._owned_of = sizes

    def _take_slot(self, step: int) -> int:
        """A free slot, now being filled. All ranks get one, or none does."""
        index = self._wait_free()
        missing = self._ranks.maximum([index is None])[0]
        if index is not None and not missing:
            with self._lock:
                self._session.send(wire.Filling(slot=index, step=step))
            return index
        if index is not None:
            with self._lock:
                self._held[index].is_free = True
        self._report("skipped", step, "", 0.0, "no slot was free")
        raise self._why_waiting() or SlotsBusy(
            f"snapshot step {step} of {self._run}: no slot free after {self._told.slot_wait_s:g} s"
            if self._told.when_busy == "wait"
            else f"snapshot step {step} of {self._run}: no slot free",
            hint="the hot tier is slower than the snapshots come: take fewer, or give more slots",
        )

    def _wait_free(self) -> int | None:
        deadline_s = time.monotonic() + (self._told.slot_wait_s if self._told.when_busy == "wait" else 0.0)
        with self._changed:
            while True:
                for index, held in self._held.items():
                    if held.is_free:
                        held.is_free = False
                        return index
                left_s = deadline_s - time.monotonic()
                # Without a daemon no slot can become free: the wait would only hold up training.
                if left_s <= 0 or not self._session.is_attached:
                    return None
                self._changed.wait(min(left_s, 1.0))

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
        held = self._held[index]
        capacity_bytes = held.slot.capacity_bytes
        size_bytes = self._stager.stage(captured, self._owned, held.slot, metadata)
        if held.slot.capacity_bytes != capacity_bytes:
            held.is_offered = False
        return size_bytes

    def _seal(self, index: int, sealed: wire.Sealed) -> None:
        with self._lock:
            held = self._held[index]
            held.sealed, held.sent_s, held.is_accepted = sealed, time.monotonic(), False
            if not held.is_offered:
                self._offer(index)
                # The daemon takes a slot that it has just been given as free.
                self._session.send(wire.Filling(slot=index, step=sealed.step))
            self._session.send(sealed)

    def _abandon(self, index: int) -> None:
        with self._lock:
            self._held[index].is_free = True
            if self._held[index].is_offered:
                self._session.send(wire.Abandon(slot=index))
            self._changed.notify_all()

    # ── slots ──

    def _prepare(self, state: TrainingState) -> None:
        """Make the slots before they are needed, so that even the first snapshot finds warm memory.

        Before the first optimizer step there are no moments yet, and the size is not known: later then.
        """
        if state.is_stepped:
            captured = state.capture(self._ranks.rank, self._ranks.world_size)
            self._share_out(captured)
            self._make_slots(captured)

    def _make_slots(self, captured: Captured) -> None:
        if len(self._held) >= self._told.slots_per_rank:
            return
        plan = self._stager.plan(captured, self._owned, {"format_version": FORMAT_VERSION, "state": captured.tree})
        with self._lock:
            for index in range(self._told.slots_per_rank):
                if index not in self._held:
                    self._held[index] = _Held(Slot.create(plan.size_bytes))
                    self._offer(index)

    def _offer(self, index: int) -> None:
        held = self._held[index]
        self._session.send(wire.AttachSlot(slot=index, capacity_bytes=held.slot.capacity_bytes), [held.slot.fd])
        held.is_offered = True

    # ── the session ──

    def _enter(self) -> Session:
        """Rank 0 claims a generation and gives it to the others."""
        session: Session | None = None
        told: bytes | None = None
        error: TierdError | None = None
        if self._ranks.rank == 0:
            try:
                session = self._open(None)
                told = msgspec.json.encode(session.welcome.generation)
            except TierdError as raised:
                error = raised
        told = self._ranks.from_first(told)
        if error is not None:
            raise error
        if told is None:
            raise DaemonUnreachable(f"connect {self._run}: rank 0 could not", hint="its error says why")
        if session is None:
            session = self._open(msgspec.json.decode(told, type=int))
        self._adopt(session)
        return session

    def _open(self, generation: int | None) -> Session:
        identity = Identity(
            run=self._run, rank=self._ranks.rank, world_size=self._ranks.world_size, generation=generation
        )
        return Session(
            self._path,
            identity,
            timeout_s=CONNECT_TIMEOUT_S,
            lock=self._lock,
            on_message=self._on_message,
            on_attach=self._on_attach,
        )

    def _adopt(self, session: Session) -> None:
        """Take over the slots that outlived our predecessor: their pages are warm."""
        with self._lock:
            for kept, descriptor in zip(session.welcome.slots, session.kept_descriptors, strict=True):
                slot = Slot.adopt(descriptor, kept.capacity_bytes)
                boot = "" if kept.is_free else session.welcome.boot
                self._held[kept.slot] = _Held(slot, is_free=kept.is_free, is_offered=True, inherited_from=boot)

    def _renew(self) -> None:
        self._session.close()
        with self._lock:
            for held in self._held.values():
                held.slot.close()
            self._held.clear()
            self._last_step = None
        self._session = self._enter()
        self._session.start()

    def _on_attach(self) -> None:
        """The daemon is back, perhaps a new one: offer the slots, and send again what is in them, oldest first.

        On the session's thread, with the lock held.
        """
        for index, held in self._held.items():
            self._offer(index)
            if held.inherited_from and held.inherited_from != self._session.welcome.boot:
                held.is_free, held.inherited_from = True, ""  # who kept it for our predecessor is gone
            elif held.sealed is None and not held.is_free and not held.inherited_from:
                self._session.send(wire.Filling(slot=index, step=(self._last_step or 0) + 1))
        sealed = [one.sealed for one in self._held.values() if one.sealed is not None]
        for message in sorted(sealed, key=lambda one: one.step):
            self._session.send(msgspec.structs.replace(message, resent=True))
        self._changed.notify_all()

    def _on_message(self, message: wire.ToClient) -> None:
        """On the session's thread."""
        match message:
            case wire.Accepted():
                with self._changed:
                    held = self._held.get(message.slot)
                    if held is not None and held.sealed is not None and held.sealed.step == message.step:
                        held.is_accepted = True
                        self._changed.notify_all()
            case wire.Released():
                with self._changed:
                    held = self._held.get(message.slot)
                    if held is not None:
                        held.is_free, held.sealed, held.inherited_from = True, None, ""
                        self._changed.notify_all()
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
        self._session.send(wire.Ask(step=shot.step, generation=shot.generation))

    def _why_waiting(self) -> TierdError | None:
        """Why nothing comes from the daemon, or None when it is there and answers."""
        if self._session.ended_by is not None:
            return self._session.ended_by
        if not self._session.is_attached:
            return self._session.unreachable("it is gone")
        with self._lock:
            unheard = [one for one in self._held.values() if one.sealed is not None and not one.is_accepted]
        if any(time.monotonic() - one.sent_s > SILENCE_S for one in unheard):
            return self._session.unreachable(f"it has not acknowledged a snapshot for more than {SILENCE_S:.0f} s")
        return None

    def _report(self, outcome: str, step: int, tier: str, seconds: float, detail: str) -> None:
        self._session.send(wire.Report(outcome=outcome, step=step, tier=tier, seconds=seconds, detail=detail[:4096]))

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
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        with self._changed:
            while any(one.sealed is not None and not one.is_accepted for one in self._held.values()):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or self._session.ended_by is not None:
                    log.error(
                        "tierd: the last snapshot was not acknowledged by the daemon: it is lost with this process"
                    )
                    break
                self._changed.wait(min(left_s, 1.0))
        self._session.close()
        with self._lock:
            for held in self._held.values():
                held.slot.close()
            self._held.clear()


def _plain(metrics: Mapping[str, Any]) -> dict[str, float | str]:
    """Metrics as a manifest holds them. Raises BadRequest for what is no number, or for too many to send."""
    try:
        plain = manifest.plain_metrics(
            {
                name: float(value.detach() if isinstance(value, torch.Tensor) else value)
                for name, value in metrics.items()
            }
        )
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadRequest(f"snapshot with metrics {sorted(metrics)}: {error}", hint="metrics are numbers") from error
    if sum(len(name) + 16 for name in plain) > METRICS_BYTES_MAX:
        raise BadRequest(f"snapshot with {len(plain)} metrics: more than {METRICS_BYTES_MAX} bytes", hint="send fewer")
    return plain
