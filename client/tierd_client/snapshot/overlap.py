"""The snapshot that is copied while training continues. There is at most one; the training thread seals it.

It is sealed in an optimizer step, in `poll` or in `finish`. If something changed a tensor that was still being copied,
the snapshot fails on every rank with Torn, and the next one copies that tensor before snapshot() returns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from tierd.errors import TierdError, Torn, Transient
from tierd.format import wire
from tierd_client.generation import Generation
from tierd_client.log import log
from tierd_client.snapshot.guards import Guard, deferrable, is_guarded
from tierd_client.snapshot.handle import Shot
from tierd_client.snapshot.staging import Staging
from tierd_client.state.training_state import Captured
from tierd_client.step_times import StepTimes


@dataclass(frozen=True, slots=True)
class _Copy:
    """`sealed`: the message for the daemon once the copy is done."""

    shot: Shot
    staging: Staging
    sealed: wire.Sealed


class Overlap:
    def __init__(self, generation: Generation, step_times: StepTimes) -> None:
        self._generation = generation
        self._step_times = step_times
        self._copy: _Copy | None = None
        self._thread = 0
        self._lock = threading.RLock()  # backward may step optimizers on threads of its own
        self._guard: Guard | None = None
        self._guarded: list[torch.optim.Optimizer] = []
        self._torn_names: set[str] = set()  # of tensors that were changed during a copy: no longer deferred
        self._has_warned = False

    def deferrable(self, captured: Captured, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
        """Names of the tensors that may be copied later, each with the live tensor."""
        self._guarded = [optimizer for optimizer in optimizers if is_guarded(optimizer)]
        unguarded = sorted({type(optimizer).__qualname__ for optimizer in optimizers if not is_guarded(optimizer)})
        if unguarded and not self._has_warned:
            self._has_warned = True
            log.warning(
                'tierd: staging="overlap": %s may step without running step hooks, or inside a CUDA graph; '
                "the tensors it changes are copied before snapshot() returns",
                ", ".join(unguarded),
            )
        live = deferrable(captured, self._guarded)
        return {name: tensor for name, tensor in live.items() if name not in self._torn_names}

    def begin(self, shot: Shot, staging: Staging, sealed: wire.Sealed) -> None:
        """Seal what is staged; or start to copy the deferred tensors, guarded."""
        self._thread = threading.get_ident()
        self._copy = _Copy(shot, staging, sealed)
        if staging.deferred:
            self._guard = self._guard or Guard(self._before_step)
            staging.start()
            self._step_times.is_skipped = True  # the next step shares the machine with the copy
        else:
            self.finish()

    @property
    def slot(self) -> int | None:
        """The slot that is being copied into."""
        copy = self._copy
        return copy.sealed.slot if copy is not None else None

    def finish(self) -> None:
        """Wait for the copy, and seal it or fail it. The state may then be changed by any means."""
        with self._lock:
            copy = self._copy
            if copy is None:
                return
            shot, staging, sealed = copy.shot, copy.staging, copy.sealed
            action = f"snapshot step {shot.step} of {self._generation.run}"
            error: TierdError | None = None
            try:
                staging.finish()
                if staging.deferred and not all(map(is_guarded, self._guarded)):
                    raise Torn("copy the state: an optimizer has stopped running step hooks meanwhile")
            except Torn as torn:
                error = Torn(f"{action}: {torn.message}", hint=torn.hint)
                self._torn_names.update(staging.changed or ())
            except RuntimeError as raised:  # from torch, of a copy on a thread or a GPU
                error = TierdError(f"{action}: copy the state: {raised}")
            self._copy = None
            pool = self._generation.pool
            if error is None:
                pool.seal(msgspec.structs.replace(sealed, stall_s=shot.stall_s + shot.guard_wait_s))
                return
            log.error("tierd: %s", error)
            message = error.message[: wire.TEXT_CHARS_MAX]
            pool.abandon(
                sealed.slot, wire.SnapshotLost(step=shot.step, kind=error.kind, message=message, hint=error.hint)
            )
            shot.failed(error, is_final=True)

    def before_wait(self, shot: Shot) -> None:
        """`finish` this shot if called on the thread that took it: version counters can be compared only there."""
        self._step_times.is_skipped = True
        copy = self._copy
        if copy is not None and copy.shot is shot and threading.get_ident() == self._thread:
            self.finish()

    def why_unsealed(self, shot: Shot) -> TierdError | None:
        """Why a wait for this shot cannot end before the training thread does something; None when it can."""
        copy = self._copy
        if copy is None or copy.shot is not shot:
            return None
        return Transient(
            f"wait for step {shot.step} on another thread: the thread that took the snapshot has not sealed it yet",
            hint="call client.wait_staged() there first; it seals in its next step, due() or snapshot() otherwise",
        )

    def poll(self) -> None:
        """Seal a copy that is done. Never waits."""
        copy = self._copy
        if copy is not None and copy.staging.is_copied:
            self.finish()

    def close(self) -> None:
        """Wait for the copy and remove the hook of the optimizers."""
        self.finish()
        if self._guard is not None:
            self._guard.close()
            self._guard = None

    def _before_step(self) -> None:
        """An optimizer is about to change tensors that may still be copied."""
        with self._lock:
            copy = self._copy
            if copy is None:
                return
            started_s = time.perf_counter()
            copy.staging.release()
            copy.shot.guard_wait_s += time.perf_counter() - started_s
            if copy.staging.is_copied:  # else a GPU still copies, and the step waits on the GPU
                self.finish()
