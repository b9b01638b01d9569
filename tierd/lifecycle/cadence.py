"""How often to save: the interval between snapshots that loses least to saves and to failures, and what each one loses.

Pure. The formulas are those of J. W. Young, "A first order approximation to the optimum checkpoint interval" (CACM
17(9), 1974), and J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps" (FGCS
22(3), 2006). `simulate` draws failures and assumes neither.

An interval is the time from one snapshot to the next, including the save. Failures are of two kinds: after a process
crash the newest snapshot is still in memory; after the loss of a node only snapshots that had left the node remain.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from tierd.errors import BadConfig

HOLDS_BELOW = 0.2  # interval / MTBF: up to this ratio the first-order formula is wrong by about 1 %-point
FAILURES_SIMULATED = 20_000  # a standard error of about 0.1 %-points
SECONDS_MIN, SECONDS_MAX = 1e-9, 1e10  # to 300 years: beyond these, the formulas overflow
COUNT_MAX = 10**9  # of GPUs and of failures
_EXPONENT_MAX = 700.0  # exp() of more overflows, and the efficiency is 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """In seconds. `save_s`: what a snapshot delays training. `mtbf_s`: mean time between failures of the whole job, of
    both kinds. `restart_s`: from a process crash until training goes on. `node_loss_share`: the share of failures that
    lose a node with its memory and disk. `node_restart_s`: from the loss of a node until training goes on. `lag_s`:
    from the end of a save until a peer or a cold tier has the snapshot; snapshots are sent one after the other. Raises
    BadConfig for a number out of range."""

    save_s: float
    mtbf_s: float
    restart_s: float = 0.0
    node_loss_share: float = 0.0
    node_restart_s: float = 0.0
    lag_s: float = 0.0

    def __post_init__(self) -> None:
        check_seconds("the save cost", self.save_s)
        check_seconds("the MTBF", self.mtbf_s)
        check_seconds("the restart cost", self.restart_s, may_be_0=True)
        check_seconds("the restart cost after the loss of a node", self.node_restart_s, may_be_0=True)
        check_seconds("the lag until a snapshot has left the node", self.lag_s, may_be_0=True)
        if not 0 <= self.node_loss_share <= 1:
            share = self.node_loss_share
            raise BadConfig(f"compute a cadence: the share of failures that lose a node is {share:g}, expected 0 to 1")

    @property
    def mean_restart_s(self) -> float:
        return (1 - self.node_loss_share) * self.restart_s + self.node_loss_share * self.node_restart_s

    def lag_loss_s(self, interval_s: float) -> float:
        """The work that the loss of a node loses beyond that of a process crash, on average. If the lag is longer than
        the interval, a snapshot also waits until the one before it has left the node."""
        return self.lag_s if self.lag_s <= interval_s else 1.5 * self.lag_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an interval costs, as shares of the time. `saving`, `lost` (work that is done again) and `restarting` are
    those of the first-order formula, and `first_order` is 1 minus their sum; a negative one has no meaning. `daly`: the
    share of useful work for exponentially distributed failures. `simulated`: the same, with failures drawn at
    random."""

    interval_s: float
    saving: float
    lost: float
    restarting: float
    first_order: float
    daly: float
    simulated: float
    failures_per_interval: float

    @property
    def first_order_holds(self) -> bool:
        return self.failures_per_interval <= HOLDS_BELOW


def check_seconds(what: str, seconds: float, *, may_be_0: bool = False) -> None:
    """Raises BadConfig unless `seconds` is a number from SECONDS_MIN, or 0 if it may be, to SECONDS_MAX."""
    least_s = 0.0 if may_be_0 else SECONDS_MIN
    if not least_s <= seconds <= SECONDS_MAX:
        raise BadConfig(f"compute a cadence: {what} is {seconds:g} s, expected {least_s:g} s to {SECONDS_MAX:g} s")


def check_count(what: str, count: int) -> None:
    """Raises BadConfig unless `count` is from 1 to COUNT_MAX."""
    if not 1 <= count <= COUNT_MAX:
        shown = str(count) if abs(count) <= COUNT_MAX else "out of range"
        raise BadConfig(f"compute a cadence: {what} is {shown}, expected 1 to {COUNT_MAX:,}")


def young_s(save_s: float, mtbf_s: float) -> float:
    """The interval with the least first-order loss, sqrt(2 × save × MTBF): Young 1974. The costs of restarts and of the
    lag do not depend on the interval, so they do not change the best one."""
    return math.sqrt(2 * save_s * mtbf_s)


def daly_s(save_s: float, mtbf_s: float) -> float:
    """The higher order estimate of Daly 2006, plus the save, because his interval is only the work between two saves.

    sqrt(2 × save × MTBF) × (1 + sqrt(x) / 3 + x / 9) with x = save / (2 × MTBF); if the save takes more than twice the
    MTBF, the work takes one MTBF."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s + save_s
    x = save_s / (2 * mtbf_s)
    return young_s(save_s, mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9)


def gpus_mtbf_s(gpus: int, gpu_mtbf_s: float) -> float:
    """The MTBF of a job that ends when any of its GPUs fails. Raises BadConfig."""
    check_seconds("the MTBF of a GPU", gpu_mtbf_s)
    check_count("the number of GPUs", gpus)
    return gpu_mtbf_s / gpus


def efficiency(costs: Costs, interval_s: float) -> float:
    """The share of the time that is useful work: the complete model of Daly 2006, with `interval_s - save_s` as the
    work between saves. Exact for one kind of failure. For two kinds it takes the mean of their costs beyond the
    interval."""
    work_s = interval_s - costs.save_s
    extra_s = costs.mean_restart_s + costs.node_loss_share * costs.lag_loss_s(interval_s)
    if work_s <= 0 or (interval_s + extra_s) / costs.mtbf_s > _EXPONENT_MAX:
        return 0.0
    return work_s / (costs.mtbf_s * math.exp(extra_s / costs.mtbf_s) * math.expm1(interval_s / costs.mtbf_s))


def outcome(costs: Costs, interval_s: float, *, failures: int = FAILURES_SIMULATED) -> Outcome:
    """Raises BadConfig for an interval that is no positive number."""
    check_seconds("the interval", interval_s)
    saving = min(1.0, costs.save_s / interval_s)
    lost_s = interval_s / 2 + costs.node_loss_share * costs.lag_loss_s(interval_s)
    lost, restarting = lost_s / costs.mtbf_s, costs.mean_restart_s / costs.mtbf_s
    return Outcome(
        interval_s=interval_s,
        saving=saving,
        lost=lost,
        restarting=restarting,
        first_order=1 - saving - lost - restarting,
        daly=efficiency(costs, interval_s),
        simulated=simulate(costs, interval_s, failures=failures),
        failures_per_interval=interval_s / costs.mtbf_s,
    )


def simulate(costs: Costs, interval_s: float, *, failures: int = FAILURES_SIMULATED, seed: int = 0) -> float:
    """The share of useful work in a job with so many failures at random, exponentially distributed times. The same seed
    gives the same failures."""
    if interval_s <= costs.save_s:
        return 0.0
    rng, snapshots, elapsed_s, restart_s = Random(seed), _Snapshots(interval_s, costs.lag_s), 0.0, 0.0
    for _ in range(failures):
        until_failure_s = rng.expovariate(1 / costs.mtbf_s)
        is_node_loss = rng.random() < costs.node_loss_share
        elapsed_s += until_failure_s
        snapshots.pause(min(restart_s, until_failure_s))
        if until_failure_s > restart_s:
            snapshots.train(until_failure_s - restart_s)
        if is_node_loss:
            snapshots.lose_node()
        restart_s = costs.node_restart_s if is_node_loss else costs.restart_s
    return snapshots.taken * (interval_s - costs.save_s) / elapsed_s


class _Snapshots:
    """`taken`: how many intervals of work the newest snapshot holds; `away`: the newest that has left the node."""

    def __init__(self, interval_s: float, lag_s: float) -> None:
        self._interval_s, self._lag_s = interval_s, lag_s
        self.taken = self.away = 0
        self._sending = 0  # the one that is leaving the node
        self._left_s = 0.0  # until it has; only while `_sending` is newer than `away`

    def train(self, seconds: float) -> None:
        """Training for `seconds` that begin with a snapshot and end with a failure, which loses the work since the last
        whole interval."""
        began, count, now_s = self.taken, int(seconds // self._interval_s), 0.0
        self.taken = began + count
        if self._lag_s == 0:
            self.away = self.taken
            return
        while True:
            if self._sending <= self.away:  # nothing is being sent
                newest = began + min(count, int(now_s // self._interval_s))
                if newest <= self.away:
                    if self.away >= self.taken:
                        return  # before the first interval has ended, or all are away
                    newest += 1
                    now_s = (newest - began) * self._interval_s
                newest, now_s = self._send_many(newest, now_s, seconds, began)
                if newest <= self.away:
                    continue
                self._sending, self._left_s = newest, self._lag_s
            if now_s + self._left_s > seconds:
                self._left_s -= seconds - now_s
                return
            now_s += self._left_s
            self.away = self._sending

    def _send_many(self, newest: int, now_s: float, seconds: float, began: int) -> tuple[int, float]:
        """Count the snapshots that leave the node one after the other until `seconds`, without a loop over each.
        Returns the snapshot that is sent next, and when."""
        if self._lag_s <= self._interval_s:  # each leaves before the next is taken
            whole = min(self.taken - newest, max(0, int((seconds - self._lag_s - now_s) // self._interval_s)))
            self.away = max(self.away, newest - 1 + whole)
            return newest + whole, now_s + whole * self._interval_s
        if whole := int((seconds - now_s) // self._lag_s):
            now_s += whole * self._lag_s
            self.away = max(newest, began + int((now_s - self._lag_s) // self._interval_s))
        return began + min(self.taken - began, int(now_s // self._interval_s)) if whole else newest, now_s

    def pause(self, seconds: float) -> None:
        """No work is done. What is being sent goes on, and then the newest."""
        while self.away < self.taken:
            if self._sending <= self.away:
                self._sending, self._left_s = self.taken, self._lag_s
            if self._left_s > seconds:
                self._left_s -= seconds
                return
            seconds -= self._left_s
            self.away = self._sending

    def lose_node(self) -> None:
        """The job goes on from what had left the node."""
        self.taken = self._sending = self.away


# ── cadence = "auto" ──

FIRST_S = 60.0  # until the first snapshot was measured
LEAST_S, MOST_S = 1.0, 3600.0  # clocks are checked once a second; a failure may cost an hour of work at most
PRIOR_MTBF_S = 86400.0  # with nothing known: a large job fails a few times a day, a small one rarely


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """`reasons`: how it follows from what was measured, for people."""

    every_s: float
    reasons: tuple[str, ...]


def estimate_mtbf_s(configured_s: float, failures: int, observed_s: float) -> tuple[float, str]:
    """(the MTBF, where it comes from). A configured MTBF is taken as it is. Without one, the prior counts as one
    failure in PRIOR_MTBF_S: (prior + observed) / (1 + failures), the inverse mean of a gamma distribution of the
    rate."""
    if configured_s > 0:
        return configured_s, f"MTBF {configured_s:.0f} s as configured"
    mtbf_s = (PRIOR_MTBF_S + observed_s) / (1 + failures)
    seen = f"{failures} failure{'' if failures == 1 else 's'} in {observed_s:.0f} s"
    return mtbf_s, f"MTBF {mtbf_s:.0f} s from a prior of {PRIOR_MTBF_S:.0f} s and {seen} of training"


def choose(
    *, stall_s: float | None, persist_s: float | None, mtbf_s: float, mtbf_source: str, stall_share_max: float
) -> Choice:
    """The interval of `cadence = "auto"`: Young's for the measured stall, longer where stalls would take more than
    `stall_share_max` of the time (0: no cap) or where a snapshot would not be durable before the next one."""
    if stall_s is None:
        return Choice(every_s=FIRST_S, reasons=("no snapshot was measured yet", mtbf_source))
    every_s = young_s(max(stall_s, 0.0), mtbf_s)
    reasons = [f"Young's interval is {every_s:.3g} s for a stall of {stall_s:.3g} s", mtbf_source]
    floors = [(LEAST_S, f"at least {LEAST_S:.0f} s")]
    if stall_share_max > 0:
        share = f"stalls may take {100 * stall_share_max:g} % of the time"
        floors.append((stall_s / stall_share_max, share))
    if persist_s is not None:
        floors.append((persist_s, f"a snapshot takes {persist_s:.3g} s to persist"))
    least_s, why = max(floors)
    if every_s < least_s:
        every_s = least_s
        reasons.append(f"longer, because {why}" if why != floors[0][1] else why)
    if every_s > MOST_S:
        every_s = MOST_S
        reasons.append(f"at most {MOST_S:.0f} s")
    return Choice(every_s=every_s, reasons=tuple(reasons))
