"""Slows down writes to the tiers, and reads for copies on other nodes, while training steps are slower than usual.

A closed loop on reported step times.

While steps take longer than with an idle daemon, the write rate of the busy tiers is halved at each report; while they
do not, it grows by 10 % at each report until there is no limit. The rate never falls below what makes a snapshot
durable in half the time until the next one. There is no limit while a peer waits for a snapshot, while two snapshots
wait to be persisted, or when no trainer is connected. No I/O; the clock is injected."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field

from tierd.config.sections import DaemonConfig
from tierd.format.ids import HOT, Run
from tierd.metrics import Metrics

REPORT_S = 1.0  # how often a trainer reports how long its steps take
REPORTS_REMEMBERED = 64  # step times while nothing was written: the last minute is the baseline
REPORTS_MIN = 5  # no limit changes before the baseline has so many reports
IDLE_QUANTILE = 0.9  # ignore step times below the p90 of those with an idle daemon
CUT, RECOVERY = 0.5, 1.1
LOOSE = 4.0  # a limit of so many times the rate has no effect and is removed
HEADROOM = 2.0  # a checkpoint must be written in half the time between two snapshots


@dataclass(slots=True)
class _Traffic:
    """Writes to one tier. `limit`: bytes per second. `count`: of those in progress. `started`: the time and
    `written_bytes` when the first of these began."""

    limit: float = math.inf
    written_bytes: int = 0
    count: int = 0
    started: tuple[float, int] | None = None

    def rate(self, moved_bytes: int, elapsed_s: float, now_s: float) -> float:
        """Bytes per second since the last report, or, where no piece has ended since, since the checkpoint began."""
        if not moved_bytes and self.started is not None:
            moved_bytes, elapsed_s = self.written_bytes - self.started[1], now_s - self.started[0]
        return moved_bytes / elapsed_s if elapsed_s > 0 else 0.0


@dataclass(slots=True)
class _Trainer:
    """`idle_steps_s`: step times while nothing was written. `written_bytes`: per tier, until the last report."""

    reported_at_s: float
    written_bytes: dict[str, int]
    idle_steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=REPORTS_REMEMBERED))
    sealed_at_s: float | None = None
    size_bytes: int = 0
    interval_s: float = 0.0  # between its last two snapshots; 0: there was only one

    @property
    def rate_min(self) -> float:
        """Bytes per second that keep up with its snapshots."""
        if self.sealed_at_s is None:
            return 0.0
        return HEADROOM * self.size_bytes / self.interval_s if self.interval_s > 0 else math.inf


class WriteThrottle:
    """`on_limit` is called with the name of a tier whose `limit` has changed."""

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
        self._rate_min = config.write_min_mib_s * (1 << 20)
        self._traffic = {tier: _Traffic() for tier in tiers}
        self._trainers: dict[Run, _Trainer] = {}
        self._unlimited_until_s: dict[Hashable, float] = {}
        self._queued = 0
        self._metrics = metrics
        self._on_limit = on_limit
        self._now_s = now_s
        self._limits = dict.fromkeys(self._traffic, math.inf)

    def limit(self, tier: str) -> float:
        """Bytes per second that may be written to the tier now; infinite without a limit."""
        return self._limits[tier]

    def written_bytes(self) -> dict[str, int]:
        """The bytes written to each tier since the daemon's start, including writes in progress."""
        return {tier: traffic.written_bytes for tier, traffic in self._traffic.items()}

    # ── from workers ──

    @contextmanager
    def writing(self, tier: str) -> Generator[Callable[[int], None]]:
        """Use around writing a checkpoint to the tier. Yields a function to call with the size of each written
        piece."""
        traffic = self._traffic[tier]

        def count_written(size_bytes: int) -> None:
            traffic.written_bytes += size_bytes

        if not traffic.count:
            traffic.started = self._now_s(), traffic.written_bytes
        traffic.count += 1
        try:
            yield count_written
        finally:
            traffic.count -= 1
            if not traffic.count:
                traffic.started = None

    def sealed(self, run: Run, size_bytes: int, at_s: float) -> None:
        """A snapshot of the run will be persisted; all ranks had sealed it at `at_s`. Repeating it changes nothing."""
        trainer = self._trainers.get(run)
        if trainer is None:
            return
        if trainer.sealed_at_s is not None and at_s > trainer.sealed_at_s:
            trainer.interval_s = at_s - trainer.sealed_at_s
        trainer.sealed_at_s, trainer.size_bytes = at_s, size_bytes
        self._update_limits()

    def queued(self, count: int) -> None:
        """`count` complete snapshots are not persisted yet."""
        self._queued = count
        self._update_limits()

    # ── from trainers ──

    def report_step(self, run: Run, step_s: float) -> None:
        """The run's last steps took `step_s` seconds each."""
        now_s = self._now_s()
        written = self.written_bytes()
        trainer = self._trainers.get(run)
        if trainer is None:  # what was written during these first steps is not known
            self._trainers[run] = _Trainer(now_s, written)
            return
        moved = {tier: written[tier] - trainer.written_bytes[tier] for tier in written}
        busy = [tier for tier, traffic in self._traffic.items() if traffic.started or moved[tier]]
        elapsed_s = now_s - trainer.reported_at_s
        trainer.reported_at_s, trainer.written_bytes = now_s, written
        if not busy:
            trainer.idle_steps_s.append(step_s)
        if len(trainer.idle_steps_s) >= REPORTS_MIN:
            idle_s = statistics.median(trainer.idle_steps_s)
            self._metrics.step_slowdown_ratio.labels(run).set(step_s / idle_s - 1)
            idle_p90_s = sorted(trainer.idle_steps_s)[int(IDLE_QUANTILE * (len(trainer.idle_steps_s) - 1))]
            is_slowed = step_s > max(idle_s * (1 + self._slowdown_max), idle_p90_s)
            for tier in busy:
                traffic = self._traffic[tier]
                self._adjust(traffic, traffic.rate(moved[tier], elapsed_s, now_s), is_slowed)
        self._update_limits()

    def left(self, run: Run) -> None:
        """The run's trainer has left."""
        if self._trainers.pop(run, None) is not None:
            self._metrics.step_slowdown_ratio.clear()  # other runs set it again with their next report
            self._update_limits()

    def hurry(self, peer: Hashable, for_s: float = math.inf) -> None:
        """The peer waits for a snapshot: remove all limits for `for_s` seconds, or until `calm`."""
        self._unlimited_until_s[peer] = self._now_s() + for_s
        self._update_limits()

    def calm(self, peer: Hashable) -> None:
        if self._unlimited_until_s.pop(peer, None) is not None:
            self._update_limits()

    # ── the loop ──

    def _adjust(self, traffic: _Traffic, rate: float, is_slowed: bool) -> None:
        """`rate`: bytes per second; 0 before the first piece was written."""
        if is_slowed:
            current = min(traffic.limit, rate or math.inf)
            traffic.limit = max(self._floor(), current * CUT)
        else:
            traffic.limit *= RECOVERY
            if rate > 0 and traffic.limit > LOOSE * rate:
                traffic.limit = math.inf

    def _floor(self) -> float:
        return max(self._rate_min, sum(trainer.rate_min for trainer in self._trainers.values()))

    def _update_limits(self) -> None:
        now_s, floor = self._now_s(), self._floor()
        is_free = not self._trainers or any(until_s > now_s for until_s in self._unlimited_until_s.values())
        limits = {
            tier: math.inf if is_free or (tier == HOT and self._queued > 1) else max(traffic.limit, floor)
            for tier, traffic in self._traffic.items()
        }
        changed = [tier for tier in limits if limits[tier] != self._limits[tier]]
        self._limits = limits
        if changed:
            gauge = self._metrics.write_limit_bytes_per_second
            gauge.clear()
            for tier, limit in limits.items():
                if limit < math.inf:
                    gauge.labels(tier).set(limit)
        for tier in changed:
            self._on_limit(tier)
