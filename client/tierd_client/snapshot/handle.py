"""A snapshot as its taker sees it: what it cost, and whether it has become durable yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tierd.errors import TierdError, Transient

ASK_INTERVAL_S = 2.0  # an answer may be lost with the daemon that had it: ask again


@dataclass(eq=False)
class Shot:
    """One snapshot. `stall_s`: how long the call held up training, waiting for a slot included. `guard_wait_s`: with
    staging="overlap", how long the next step of an optimizer waited for the copy; a GPU waits by itself, uncounted."""

    step: int
    generation: int
    stall_s: float = 0.0
    guard_wait_s: float = 0.0
    _ask: Callable[[Shot], None] = field(default=lambda shot: None, repr=False)
    _why_waiting: Callable[[], TierdError | None] = field(default=lambda: None, repr=False)
    _settle: Callable[[Shot], None] = field(default=lambda shot: None, repr=False)
    _changed: threading.Condition = field(default_factory=threading.Condition, repr=False)
    _tiers: set[str] = field(default_factory=set, repr=False)
    _trouble: TierdError | None = field(default=None, repr=False)
    _ended: TierdError | None = field(default=None, repr=False)

    @property
    def is_persisted(self) -> bool:
        """Whether the checkpoint is known to be committed in the hot tier."""
        return "hot" in self._tiers

    def wait_persisted(self, timeout_s: float = 600.0) -> None:
        """Until the checkpoint is committed in the hot tier: durable, whatever dies next.

        Raises what has gone wrong for good, or, when the time is over, what has kept it waiting.
        """
        self._wait("hot", timeout_s)

    def wait_replicated(self, tier: str = "cold", timeout_s: float = 3600.0) -> None:
        """Until the checkpoint is committed in a cold tier. Raises as `wait_persisted` does."""
        self._wait(tier, timeout_s)

    def _wait(self, tier: str, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        self._settle(self)
        with self._changed:
            while tier not in self._tiers:
                if self._ended is not None:
                    raise self._ended
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise (
                        self._why_waiting()
                        or self._trouble
                        or Transient(
                            f"wait for step {self.step} in {tier}: not there after {timeout_s:g} s",
                            hint="`tierd status` shows what is queued, and what went wrong",
                        )
                    )
                self._changed.release()
                try:
                    self._ask(self)  # at once: what somebody waits for is not held back
                finally:
                    self._changed.acquire()
                self._changed.wait_for(
                    lambda: tier in self._tiers or self._ended is not None, min(ASK_INTERVAL_S, left_s)
                )

    # ── told by the client ──

    def reached(self, tier: str) -> None:
        """Called by the client: the checkpoint is committed in `tier`."""
        with self._changed:
            self._tiers.add(tier)
            self._changed.notify_all()

    def failed(self, error: TierdError, *, is_final: bool) -> None:
        """Called by the client. A final error ends all waits; another one is only what a timeout then raises."""
        with self._changed:
            if is_final:
                self._ended = error
            else:
                self._trouble = error
            self._changed.notify_all()
