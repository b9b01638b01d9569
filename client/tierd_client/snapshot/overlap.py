"""The snapshot that is being copied while training goes on: at most one, and the thread that trains ends it.

In a step of an optimizer, in `poll` or in `settle` it is sealed, or given up because something changed what was still
being copied: that snapshot is then lost on every rank, loudly, and the next one copies those tensors at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from tierd.errors import TierdError, Torn
from tierd.format import wire
from tierd_client.snapshot.guards import Guard, deferrable, is_guarded
from tierd_client.snapshot.handle import Shot
from tierd_client.snapshot.slot_pool import SlotPool
from tierd_client.snapshot.staging import Staging
from tierd_client.state.training_state import Captured

log = logging.getLogger("tierd_client")

TEXT_MAX = 4096  # of what went wrong: it travels in one message


@dataclass(frozen=True, slots=True)
class _Copy:
    """`sealed` is what will be said of it."""

    shot: Shot
    staging: Staging
    sealed: wire.Sealed


class Overlap:
    def __init__(self, run: str, held: SlotPool) -> None:
        self._run = run
        self._held = held
        self._copy: _Copy | None = None
        self._thread = 0
        self._lock = threading.RLock()  # backward may step optimizers on threads of its own
        self._guard: Guard | None = None
        self._guarded: list[torch.optim.Optimizer] = []
        self._restless: set[str] = set()
        self._has_warned = False

    def deferrable(self, captured: Captured, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
        """Names of the tensors that may be copied later, each with the live object."""
        self._guarded = [one for one in optimizers if is_guarded(one)]
        unguarded = sorted({type(one).__qualname__ for one in optimizers if one not in self._guarded})
        if unguarded and not self._has_warned:
            self._has_warned = True
            log.warning(
                'tierd: staging="overlap": %s may step without running step hooks, or inside a CUDA graph; '
                "what it changes is copied before snapshot() returns",
                ", ".join(unguarded),
            )
        found = deferrable(captured, self._guarded)
        return {name: live for name, live in found.items() if name not in self._restless}

    def begin(self, shot: Shot, staging: Staging, sealed: wire.Sealed) -> None:
        """Hand over what is staged; or let the rest be copied from now on, guarded."""
        self._thread = threading.get_ident()
        self._copy = _Copy(shot, staging, sealed)
        if staging.is_deferred:
            self._guard = self._guard or Guard(self._before_step)
            staging.start()
        else:
            self.settle()

    @property
    def slot(self) -> int | None:
        """The one that is being filled."""
        copy = self._copy
        return copy.sealed.slot if copy is not None else None

    def settle(self) -> None:
        """Waits for the copy, and hands it over or gives it up: then the state may be changed by any means."""
        with self._lock:
            if self._copy is not None:
                self._hand_over(self._copy)

    def settle_here(self, shot: Shot) -> None:
        """The same for this shot, if this is the thread that trains: no other one may judge what that has changed."""
        copy = self._copy
        if copy is not None and copy.shot is shot and threading.get_ident() == self._thread:
            self.settle()

    def poll(self) -> None:
        """Hands over a copy that is done. Waits for nothing."""
        copy = self._copy
        if copy is not None and copy.staging.is_copied:
            self.settle()

    def close(self) -> None:
        """After the last `settle`: optimizers step unseen from now on."""
        if self._guard is not None:
            self._guard.close()
            self._guard = None

    def _before_step(self) -> None:
        """An optimizer is about to change what may still be read."""
        with self._lock:
            copy = self._copy
            if copy is None:
                return
            began = time.perf_counter()
            copy.staging.release()
            copy.shot.guard_wait_s += time.perf_counter() - began
            if copy.staging.is_copied:  # else a GPU is still at it, and the step waits there
                self._hand_over(copy)

    def _hand_over(self, copy: _Copy) -> None:
        shot, staging, sealed = copy.shot, copy.staging, copy.sealed
        doing = f"snapshot step {shot.step} of {self._run}"
        error: TierdError | None = None
        try:
            staging.finish()
            if staging.is_deferred and not all(map(is_guarded, self._guarded)):
                raise Torn("copy the state: an optimizer has stopped running step hooks meanwhile")
        except Torn as torn:
            error = Torn(f"{doing}: {torn.message}", hint=torn.hint)
            self._restless.update(staging.changed or ())
        except RuntimeError as raised:  # torch's, of a copy on a thread or a GPU
            error = TierdError(f"{doing}: copy the state: {raised}")
        self._copy = None
        if error is None:
            self._held.seal(msgspec.structs.replace(sealed, stall_s=shot.stall_s + shot.guard_wait_s))
            return
        log.error("tierd: %s", error)
        lost = wire.Lost(step=shot.step, kind=error.kind, message=error.message[:TEXT_MAX], hint=error.hint)
        self._held.abandon(sealed.slot, lost)
        shot.failed(error, is_final=True)
