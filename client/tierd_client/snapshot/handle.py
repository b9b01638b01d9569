"""The handle of a snapshot, as `Client.snapshot` returns it: what it cost, and whether it is durable yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tierd.errors import TierdError, Transient
from tierd_client.slots.slot_pool import ASK_INTERVAL_S


@dataclass(eq=False)
class Shot:
    """One snapshot. `stall_s`: how long the call held up training, waiting for a slot included. `guard_wait_s`: with
    staging="overlap", how long the next optimizer step waited on the host for the copy. A wait on the GPU is not
    counted."""

    step: int
    generation: int
    stall_s: float = 0.0
    guard_wait_s: float = 0.0
    is_last: bool = field(default=False, repr=False)  # the run stops and waits for it: older snapshots come after it
    _before_wait: Callable[[Shot], object] = field(default=lambda shot: None, repr=False)
    _ask: Callable[[Shot], object] = field(default=lambda shot: None, repr=False)
    """Has the daemon report which tiers hold the checkpoint. Raises why waiting is pointless."""
    _why_waiting: Callable[[Shot], TierdError | None] = field(default=lambda shot: None, repr=False)
    _changed: threading.Condition = field(default_factory=threading.Condition, repr=False)
    _tiers: set[str] = field(default_factory=set, repr=False)
    _retried_error: TierdError | None = field(default=None, repr=False)
    _final_error: TierdError | None = field(default=None, repr=False)

    @property
    def is_persisted(self) -> bool:
        """Whether the checkpoint is known to be durable as `wait_persisted` says: in the hot tier, or a cold one."""
        return bool(self._tiers)

    def wait_persisted(self, timeout_s: float = 600.0) -> None:
        """Wait until the checkpoint is durable, even if every process dies: committed in the hot tier or, when that has
        no space, in a cold tier. Where the ranks span several nodes: this node's part of it; without that of every
        node it is not restored.

        With staging="overlap", the thread that took the snapshot also seals it: in its wait, its next optimizer step,
        due() or snapshot(), or in client.wait_staged(). A wait on another thread includes the time until then.

        Raises the error that ended it for good. After `timeout_s`: what kept it waiting, or Transient.
        """
        self._wait(None, timeout_s)

    def wait_replicated(self, tier: str = "cold", timeout_s: float = 3600.0) -> None:
        """Wait until the checkpoint is committed in this tier: in a cold tier, those of all nodes as a whole. Raises as
        `wait_persisted` does."""
        self._wait(tier, timeout_s)

    def _wait(self, tier: str | None, timeout_s: float) -> None:
        """`tier` None: any."""
        deadline_s = time.monotonic() + timeout_s
        self._before_wait(self)
        while True:
            with self._changed:
                if self._is_in(tier):
                    return
                if self._final_error is not None:
                    raise self._final_error
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                late = Transient(
                    f"wait for step {self.step} in {tier or 'hot'}: not there after {timeout_s:g} s",
                    hint="`tierd status` shows what is queued, and what went wrong",
                )
                raise self._why_waiting(self) or self._retried_error or late
            self._ask(self)  # at once: the daemon lifts its write limit while a trainer waits
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_in(tier) or self._final_error is not None, min(ASK_INTERVAL_S, left_s)
                )

    def _is_in(self, tier: str | None) -> bool:
        return bool(self._tiers) if tier is None else tier in self._tiers

    def reached(self, tier: str) -> None:
        """The checkpoint is committed in `tier`."""
        with self._changed:
            self._tiers.add(tier)
            self._changed.notify_all()

    def failed(self, error: TierdError, *, is_final: bool) -> None:
        """A final error ends all waits; another one is only what a timeout then raises."""
        with self._changed:
            if is_final:
                self._final_error = error
            else:
                self._retried_error = error
            self._changed.notify_all()
