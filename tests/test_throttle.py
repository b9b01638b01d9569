"""How fast tiers are written beside a trainer: a closed loop, bounded below, that holds nobody up who waits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierd.config.sections import DaemonConfig
from tierd.format.ids import Run
from tierd.metrics import Metrics
from tierd.throttle import HEADROOM, REPORTS_MIN, REPORTS_REMEMBERED, WriteThrottle

MIB = 1 << 20
RUN = Run("run42")
USUAL_S = 0.1
RATE = 1000 * MIB  # of the disk, when nothing holds it back


class Lab:
    """A write throttle, a clock, and a trainer that reports once a second."""

    def __init__(self, **config: float) -> None:
        self.now_s = 1000.0
        self.metrics = Metrics(tiers=("hot", "cold"))
        self.changed_tiers: list[str] = []
        self.throttle = WriteThrottle(
            ("hot", "cold"),
            DaemonConfig(**config),  # pyright: ignore[reportArgumentType]
            metrics=self.metrics,
            on_limit=self.changed_tiers.append,
            now_s=lambda: self.now_s,
        )

    def report(self, step_s: float = USUAL_S, *, run: Run = RUN) -> None:
        self.now_s += 1.0
        self.throttle.report_step(run, step_s)

    def rest(self, reports: int = 2 * REPORTS_MIN, step_s: float = USUAL_S) -> None:
        for _ in range(reports):
            self.report(step_s)

    @contextmanager
    def writing(self, tier: str = "hot") -> Iterator[None]:
        """A second of writing, as fast as it may."""
        with self.throttle.writing(tier) as count_written:
            count_written(int(min(RATE, self.limit(tier))))
            yield

    def write(self, step_s: float, seconds: int = 1, tier: str = "hot") -> list[float]:
        found: list[float] = []
        for _ in range(seconds):
            with self.writing(tier):
                self.report(step_s)
            found.append(self.limit(tier))
        return found

    def limit(self, tier: str = "hot") -> float:
        return self.throttle.limit(tier)

    def shown(self, tier: str = "hot") -> float | None:
        return self.metrics.registry.get_sample_value("tierd_write_limit_bytes_per_second", {"tier": tier})

    def slowdown(self) -> float | None:
        return self.metrics.registry.get_sample_value("tierd_step_slowdown_ratio", {"run": RUN})


@pytest.fixture
def lab() -> Lab:
    found = Lab()
    found.rest()
    return found


def test_nothing_is_held_back_while_steps_take_what_they_usually_do(lab: Lab) -> None:
    assert set(lab.write(USUAL_S * 1.04, 20)) == {math.inf}
    assert lab.changed_tiers == []
    assert lab.shown() is None
    assert lab.slowdown() == pytest.approx(0.04)


def test_what_is_written_while_steps_are_slower_gets_half_of_its_rate(lab: Lab) -> None:
    assert lab.write(USUAL_S * 1.3) == [RATE / 2]
    assert lab.limit("cold") == math.inf, "it was not being written"
    assert lab.changed_tiers == ["hot"]
    assert lab.shown() == RATE / 2
    assert lab.shown("cold") is None
    assert lab.slowdown() == pytest.approx(0.3)
    assert lab.write(USUAL_S * 1.3, 2) == [RATE / 4, RATE / 8]


def test_it_is_never_held_back_to_less_than_the_least(lab: Lab) -> None:
    found = lab.write(USUAL_S * 3, 50)
    assert found[-1] == min(found) == 32 * MIB


def test_it_comes_back_bit_by_bit_until_nothing_holds_it_back(lab: Lab) -> None:
    lab.write(USUAL_S * 3, 5)
    found = [lab.limit(), *lab.write(USUAL_S, 100)]
    assert found == sorted(found)
    assert found[-1] == math.inf
    assert found[1] < 1.2 * found[0]
    assert lab.shown() is None


def test_slow_steps_while_nothing_is_written_change_no_limit_and_become_what_is_usual(lab: Lab) -> None:
    lab.write(USUAL_S * 3)
    before = lab.limit()
    lab.rest(REPORTS_REMEMBERED, USUAL_S * 3)
    assert lab.limit() == before
    lab.write(USUAL_S * 3, 100)
    assert lab.limit() == math.inf


def test_trainer_whose_steps_vary_by_themselves_is_not_taken_for_slowed(lab: Lab) -> None:
    for number in range(REPORTS_REMEMBERED):
        lab.report(USUAL_S * (1.5 if number % 5 == 0 else 1.0))
    assert lab.write(USUAL_S * 1.4) == [math.inf]
    assert lab.write(USUAL_S * 1.6) == [RATE / 2]


def test_before_it_knows_what_is_usual_nothing_is_held_back() -> None:
    lab = Lab()
    lab.rest(REPORTS_MIN)  # the first tells of steps before anybody looked
    assert lab.write(USUAL_S * 9) == [math.inf]
    assert lab.slowdown() is None
    lab.rest(1)
    assert lab.write(USUAL_S * 9) == [RATE / 2]


def test_report_that_spans_the_end_of_a_write_is_not_of_a_time_at_rest(lab: Lab) -> None:
    with lab.writing():
        pass
    lab.report(USUAL_S * 3)
    assert lab.limit() < math.inf


def test_piece_that_takes_longer_than_a_report_is_judged_when_it_has_come_through(lab: Lab) -> None:
    with lab.throttle.writing("cold") as count_written:
        lab.report(USUAL_S * 3)
        assert lab.limit("cold") == math.inf, "nobody knows how fast it goes"
        count_written(256 * MIB)
        lab.report(USUAL_S * 3)
        assert lab.limit("cold") == 128 * MIB
        lab.report(USUAL_S * 3)
        assert lab.limit("cold") == 256 * MIB / 3 / 2


def test_upload_that_was_under_way_when_steps_got_slower_is_held_back_though_no_piece_ends(lab: Lab) -> None:
    with lab.throttle.writing("cold") as count_written:
        count_written(320 * MIB)
        lab.rest(4)
        lab.report(USUAL_S * 3)
        assert lab.limit("cold") == 32 * MIB


# ── never so slow that durability suffers ──


def test_snapshot_is_durable_in_half_the_time_until_the_next_however_slow_the_steps(lab: Lab) -> None:
    size_bytes, interval_s = 6000 * MIB, 60.0
    for number in range(2):
        lab.throttle.sealed(RUN, size_bytes, 2000.0 + interval_s * number)
    lab.write(USUAL_S * 9, 50)
    assert lab.limit() == HEADROOM * size_bytes / interval_s == 200 * MIB


def test_retry_of_a_snapshot_is_no_second_one(lab: Lab) -> None:
    for at_s in (2000.0, 2060.0, 2060.0):
        lab.throttle.sealed(RUN, 6000 * MIB, at_s)
    lab.write(USUAL_S * 9, 50)
    assert lab.limit() == 200 * MIB


def test_first_snapshot_is_not_held_back_since_nobody_knows_when_the_next_is_due(lab: Lab) -> None:
    lab.throttle.sealed(RUN, MIB, 2000.0)
    assert set(lab.write(USUAL_S * 9, 10)) == {math.inf}


def test_while_two_snapshots_wait_persisting_is_not_held_back_and_uploads_are(lab: Lab) -> None:
    for tier in ("hot", "cold"):
        lab.write(USUAL_S * 3, 1, tier)
    lab.throttle.queued(2)
    assert (lab.limit("hot"), lab.limit("cold")) == (math.inf, RATE / 2)
    lab.throttle.queued(1)
    assert (lab.limit("hot"), lab.limit("cold")) == (RATE / 2, RATE / 2)


def test_nothing_is_held_back_while_somebody_waits(lab: Lab) -> None:
    lab.write(USUAL_S * 3)
    lab.throttle.hurry("operator")
    assert lab.limit() == math.inf
    assert lab.shown() is None
    lab.throttle.hurry("trainer", 10.0)
    lab.throttle.calm("operator")
    assert lab.limit() == math.inf
    lab.now_s += 10.0
    lab.rest(1)
    assert lab.limit() == RATE / 2
    lab.throttle.calm("somebody else")
    assert lab.limit() == RATE / 2
    assert lab.changed_tiers == ["hot"] * 3


def test_what_is_still_written_while_another_write_to_the_tier_ends_is_held_back(lab: Lab) -> None:
    """Several requests of another node at once: one has written nothing since the last report."""
    with lab.throttle.writing("hot") as count_written:
        with lab.throttle.writing("hot"):
            count_written(RATE)
        lab.report(USUAL_S * 3)
        assert lab.limit() == RATE / 2
        lab.report(USUAL_S * 3)
        assert lab.limit() < RATE / 2


def test_where_no_trainer_is_nothing_is_held_back(lab: Lab) -> None:
    lab.report(run=Run("other"))
    lab.write(USUAL_S * 3)
    held_back = lab.limit()
    lab.throttle.left(RUN)
    assert lab.limit() == held_back < math.inf, "another one is there"
    lab.throttle.left(Run("other"))
    lab.throttle.left(Run("other"))
    assert lab.limit() == math.inf
    assert lab.slowdown() is None


def test_turned_off_it_asks_for_no_reports() -> None:
    assert Lab(slowdown_max=0.0).throttle.report_s == 0
    assert Lab().throttle.report_s > 0


@settings(deadline=None)
@given(
    steps=st.lists(st.floats(1e-6, 1e6), max_size=60),
    wrote=st.lists(st.integers(0, 1 << 50), min_size=60, max_size=60),
    sealed=st.lists(st.floats(0, 1e6), max_size=5),
)
def test_whatever_is_reported_no_limit_is_below_the_least(
    steps: list[float], wrote: list[int], sealed: list[float]
) -> None:
    lab = Lab()
    lab.rest()
    for at_s in sealed:
        lab.throttle.sealed(RUN, 1 << 40, at_s)
    for step_s, size_bytes in zip(steps, wrote, strict=False):
        with lab.throttle.writing("hot") as told:
            told(size_bytes)
            lab.report(step_s)
        assert lab.limit() >= 32 * MIB
