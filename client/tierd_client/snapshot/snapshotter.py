"""Takes one rank's snapshots: capture, share out, find a slot, stage. All ranks do each part, or all raise."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
import torch

import tierd
from tierd.errors import BadRequest, SlotsBusy, TierdError
from tierd.format import layout, manifest, wire
from tierd.format.ids import checkpoint_id
from tierd.format.manifest import CheckpointRef
from tierd.format.shard import FORMAT_VERSION
from tierd_client.ranks import Ranks
from tierd_client.snapshot.handle import Shot
from tierd_client.snapshot.overlap import Overlap
from tierd_client.snapshot.slot_pool import SlotPool
from tierd_client.snapshot.staging import Stager, Staging
from tierd_client.state.ownership import HeldTensor, assign_owners
from tierd_client.state.training_state import Capturable, Captured, State, TrainingState, architecture_hash

log = logging.getLogger("tierd_client")

METRICS_BYTES_MAX = 32 << 10  # they travel in one message of 64 KiB


class Snapshotter:
    """Belongs to one generation: going back in time begins a new one."""

    def __init__(
        self,
        run: str,
        generation: int,
        ranks: Ranks,
        held: SlotPool,
        told: wire.Welcome,
        *,
        check_open: Callable[[], None],
        why_waiting: Callable[[], TierdError | None],
    ) -> None:
        """`check_open` raises what forbids a snapshot; `why_waiting` says why no slot becomes free, if it is known."""
        self.last_step: int | None = None
        self.underway = Overlap(run, held)
        self._run = run
        self._generation = generation
        self._ranks = ranks
        self._held = held
        self._told = told
        self._check_open = check_open
        self._why_waiting = why_waiting
        self._stager = Stager()
        self._is_prepared = False
        self._owned: set[str] | None = None
        self._owned_of: list[tuple[str, int]] | None = None

    def prepare(self, state: State) -> None:
        """Make the slots before they are needed, so that even the first snapshot finds warm memory.

        Before the first optimizer step there are no moments yet, and the size is not known: later then. What
        goes wrong here goes wrong again in `take`, which says so.
        """
        if self._is_prepared or self._ranks.maximum([not state.is_stepped])[0]:
            return
        self._is_prepared = True
        try:
            captured = self._ranks.together(lambda: state.capture(self._ranks.rank, self._ranks.world_size))
            self._share_out(captured)
            self._make_slots(captured)
        except TierdError as error:
            log.warning("tierd: make the slots ready: %s", error)

    def take(
        self,
        shot: Shot,
        state: Capturable,
        *,
        metrics: Mapping[str, float],
        milestone: str | None,
        parent: CheckpointRef | None,
    ) -> None:
        """Returns when training may go on; `shot.stall_s` is how long it could not.

        Raises SlotsBusy or DaemonUnreachable when no slot is free in time, Unsupported for state with no safe form.
        """
        began = time.perf_counter()

        def capture() -> tuple[Captured, dict[str, float | str]]:
            self._check(shot.step, milestone)
            return state.capture(self._ranks.rank, self._ranks.world_size), plain_metrics(metrics)

        captured, plain = self._ranks.together(capture)
        self._share_out(captured)
        index = self._ranks.together(lambda: self._take_slot(captured, shot.step))
        staging = self._ranks.together(lambda: self._stage(index, captured, shot.step, state))
        self.last_step = shot.step
        sealed = wire.Sealed(
            slot=index,
            step=shot.step,
            size_bytes=staging.size_bytes,
            created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            stall_s=0.0,
            metrics=plain,
            milestone=milestone,
            parent=parent,
            architecture_hash=architecture_hash(captured),
            versions={
                "tierd": tierd.__version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
            resent=False,
        )
        shot.stall_s = time.perf_counter() - began
        self.underway.begin(shot, staging, sealed)
        if staging.is_deferred:
            shot.stall_s = time.perf_counter() - began

    def _check(self, step: int, milestone: str | None) -> None:
        self._check_open()
        self.underway.settle()
        self._held.reclaim()  # from a snapshot that an interrupt broke off
        checkpoint = checkpoint_id(self._run, step, self._generation)
        if self.last_step is not None and step <= self.last_step:
            raise BadRequest(
                f"snapshot step {step} of {self._run}: step {self.last_step} was taken before it",
                hint="to go back, restore that step first: it begins a new generation",
            )
        if milestone is not None:
            layout.milestone_key(checkpoint, milestone)

    def _share_out(self, captured: Captured) -> None:
        """Decide which rank writes what several hold. Asked anew only when some rank's tensors have changed."""
        sizes = captured.sizes() if self._ranks.world_size > 1 else None
        if self._ranks.maximum([sizes != self._owned_of])[0]:
            mine = captured.held_tensors() if sizes is not None else []
            held = [
                msgspec.json.decode(one, type=list[HeldTensor]) for one in self._ranks.gather(msgspec.json.encode(mine))
            ]
            self._owned = assign_owners(held)[self._ranks.rank]
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

    def _make_slots(self, captured: Captured) -> None:
        if len(self._held) < self._told.slots_per_rank:
            plan = self._stager.plan(captured, self._owned, {"format_version": FORMAT_VERSION, "state": captured.tree})
            self._held.make(self._told.slots_per_rank, plan.size_bytes)

    def _stage(self, index: int, captured: Captured, step: int, state: Capturable) -> Staging:
        metadata = {
            "format_version": FORMAT_VERSION,
            "run": self._run,
            "step": step,
            "generation": self._generation,
            "rank": self._ranks.rank,
            "world_size": self._ranks.world_size,
            "state": captured.tree,
        }
        later: dict[str, torch.Tensor] = {}
        if self._told.staging == "overlap" and isinstance(state, TrainingState):  # of others no optimizer is known
            later = self.underway.deferrable(captured, state.optimizers)
        try:
            staging = self._stager.begin(captured, self._owned, self._held.slot(index), metadata, later)
            if not staging.is_deferred:
                staging.finish()
        except RuntimeError as error:  # torch's: a GPU that has failed, or has no memory left
            raise TierdError(f"snapshot step {step} of {self._run}: copy the state: {error}") from error
        self._held.report_unpinned(index, step)
        return staging


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, float | str]:
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
