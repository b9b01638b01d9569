"""How fast tiers may be written while trainers work beside: a closed loop on the step times that they report.

What is written while steps take longer than with the daemon at rest gets half of its rate; while they do not, a little
more with each report, until nothing holds it back. Never so slow that a snapshot would not be durable in half the time
until the next; and not at all while someone waits for one, while two wait to be persisted, or where no trainer is.
Plain bookkeeping: no I/O, and the clock is given.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field

from tierd.config import DaemonConfig
from tierd.format.ids import Run
from tierd.lifecycle.policy import HOT
from tierd.metrics import Metrics

REPORT_S = 1.0  # how often a trainer is to say how long its steps take
REPORTS_REMEMBERED = 64  # of times when nothing was written: a minute of steps is what is usual
REPORTS_MIN = 5  # before that many of them nothing is judged
USUAL_SPREAD = 0.9  # as slow as one report in ten is with the daemon at rest is no news
CUT, RECOVERY = 0.5, 1.1
LOOSE = 4.0  # a limit that is so many times the rate holds nothing back
HEADROOM = 2.0  # a checkpoint is written in half the time between two


@dataclass(slots=True)
class _Traffic:
    """Of one tier. `limit` in bytes per second. `begun`: when what is under way began, and what had been written."""

    limit: float = math.inf
    written_bytes: int = 0
    begun: tuple[float, int] | None = None

    def rate(self, moved_bytes: int, elapsed_s: float, now_s: float) -> float:
        """Of the time since the last report; where a piece takes longer than that, since the beginning."""
        if not moved_bytes and self.begun is not None:
            moved_bytes, elapsed_s = self.written_bytes - self.begun[1], now_s - self.begun[0]
        return moved_bytes / elapsed_s if elapsed_s > 0 else 0.0


@dataclass(slots=True)
class _Trainer:
    """`usual_s`: step times while nothing was written. `seen`: what each tier had been written by the last report."""

    heard_s: float
    seen: dict[str, int]
    usual_s: deque[float] = field(default_factory=lambda: deque(maxlen=REPORTS_REMEMBERED))
    sealed_at_s: float | None = None
    size_bytes: int = 0
    interval_s: float = 0.0  # between its last two snapshots; 0: not known yet

    @property
    def need(self) -> float:
        """Bytes per second that keep up with its snapshots."""
        if self.sealed_at_s is None:
            return 0.0
        return HEADROOM * self.size_bytes / self.interval_s if self.interval_s > 0 else math.inf


class WriteThrottle:
    """`on_limit` is told a tier's name whenever `limit` says something else of it."""

    def __init__(
        self,
        tiers: Iterable[str],
        config: DaemonConfig,
        *,
        metrics: Metrics,
        on_limit: Callable[[str], None],
        now_s: Callable[[], float],
    ) -> None:
        self.report_s = REPORT_S if config.slowdown_max > 0 else 0.0
        """How often trainers are to report; 0: never."""
        self._slowdown_max = config.slowdown_max
        self._least = config.write_min_mib_s * (1 << 20)
        self._traffic = {tier: _Traffic() for tier in tiers}
        self._trainers: dict[Run, _Trainer] = {}
        self._hurried_until_s: dict[Hashable, float] = {}
        self._waiting = 0
        self._metrics = metrics
        self._on_limit = on_limit
        self._now_s = now_s
        self._told = dict.fromkeys(self._traffic, math.inf)

    def limit(self, tier: str) -> float:
        """Bytes per second that may be written to it now; infinite when nothing holds it back."""
        return self._told[tier]

    # ── what workers write ──

    @contextmanager
    def writing(self, tier: str) -> Generator[Callable[[int], None]]:
        """While a checkpoint is written to the tier. What it yields is told the size of each piece."""
        traffic = self._traffic[tier]

        def wrote(size_bytes: int) -> None:
            traffic.written_bytes += size_bytes

        traffic.begun = self._now_s(), traffic.written_bytes
        try:
            yield wrote
        finally:
            traffic.begun = None

    def sealed(self, run: Run, size_bytes: int, at_s: float) -> None:
        """A snapshot of the run is to be persisted, whole since `at_s`. Of one that is tried again, nothing new."""
        trainer = self._trainers.get(run)
        if trainer is None:
            return
        if trainer.sealed_at_s is not None and at_s > trainer.sealed_at_s:
            trainer.interval_s = at_s - trainer.sealed_at_s
        trainer.sealed_at_s, trainer.size_bytes = at_s, size_bytes
        self._settle()

    def queued(self, count: int) -> None:
        """So many whole snapshots are not persisted yet."""
        self._waiting = count
        self._settle()

    # ── what trainers say ──

    def heard(self, run: Run, step_s: float) -> None:
        """The run's steps take so long of late."""
        now_s = self._now_s()
        written = {tier: traffic.written_bytes for tier, traffic in self._traffic.items()}
        trainer = self._trainers.get(run)
        if trainer is None:  # nobody knows what was written during these first steps
            self._trainers[run] = _Trainer(now_s, written)
            return
        moved = {tier: written[tier] - trainer.seen[tier] for tier in written}
        busy = [tier for tier, traffic in self._traffic.items() if traffic.begun or moved[tier]]
        elapsed_s, trainer.heard_s, trainer.seen = now_s - trainer.heard_s, now_s, written
        if not busy:
            trainer.usual_s.append(step_s)
        if len(trainer.usual_s) >= REPORTS_MIN:
            usual_s = statistics.median(trainer.usual_s)
            self._metrics.step_slowdown_ratio.labels(run).set(step_s / usual_s - 1)
            slow_s = sorted(trainer.usual_s)[int(USUAL_SPREAD * (len(trainer.usual_s) - 1))]
            is_slowed = step_s > max(usual_s * (1 + self._slowdown_max), slow_s)
            for tier in busy:
                traffic = self._traffic[tier]
                self._judge(traffic, traffic.rate(moved[tier], elapsed_s, now_s), is_slowed)
        self._settle()

    def left(self, run: Run) -> None:
        """Its trainer is gone, and is disturbed by nothing any more."""
        if self._trainers.pop(run, None) is not None:
            self._metrics.step_slowdown_ratio.clear()  # of other runs it is set again with their next report
            self._settle()

    def hurry(self, who: Hashable, for_s: float = math.inf) -> None:
        """Somebody waits for a snapshot: nothing is held back for so long, or until `calm`."""
        self._hurried_until_s[who] = self._now_s() + for_s
        self._settle()

    def calm(self, who: Hashable) -> None:
        if self._hurried_until_s.pop(who, None) is not None:
            self._settle()

    # ── the loop ──

    def _judge(self, traffic: _Traffic, rate: float, is_slowed: bool) -> None:
        """A rate of 0 is one that is not known before the first piece has come through."""
        if is_slowed:
            known = min(traffic.limit, rate or math.inf)
            traffic.limit = max(self._floor(), known * CUT)
        else:
            traffic.limit *= RECOVERY
            if rate > 0 and traffic.limit > LOOSE * rate:
                traffic.limit = math.inf

    def _floor(self) -> float:
        return max(self._least, sum(trainer.need for trainer in self._trainers.values()))

    def _settle(self) -> None:
        now_s, floor = self._now_s(), self._floor()
        is_free = not self._trainers or any(until_s > now_s for until_s in self._hurried_until_s.values())
        found = {
            tier: math.inf if is_free or (tier == HOT and self._waiting > 1) else max(traffic.limit, floor)
            for tier, traffic in self._traffic.items()
        }
        changed = [tier for tier in found if found[tier] != self._told[tier]]
        self._told = found
        if changed:
            gauge = self._metrics.write_limit_bytes_per_second
            gauge.clear()
            for tier, limit in found.items():
                if limit < math.inf:
                    gauge.labels(tier).set(limit)
        for tier in changed:
            self._on_limit(tier)
