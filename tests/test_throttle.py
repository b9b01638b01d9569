"""How fast tiers are written beside a trainer: a closed loop, bounded below, that holds nobody up who waits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierd.config import DaemonConfig
from tierd.format.ids import Run
from tierd.metrics import Metrics
from tierd.throttle import HEADROOM, REPORTS_MIN, REPORTS_REMEMBERED, WriteThrottle

MIB = 1 << 20
RUN = Run("run42")
USUAL_S = 0.1
RATE = 1000 * MIB  # of the disk, when nothing holds it back


class Street:
    """A neighbour, a clock, and a trainer that reports once a second."""

    def __init__(self, **config: float) -> None:
        self.now_s = 1000.0
        self.metrics = Metrics(tiers=("hot", "cold"))
        self.told: list[str] = []
        self.neighbour = WriteThrottle(
            ("hot", "cold"),
            DaemonConfig(**config),  # pyright: ignore[reportArgumentType]
            metrics=self.metrics,
            on_limit=self.told.append,
            now_s=lambda: self.now_s,
        )

    def report(self, step_s: float = USUAL_S, *, run: Run = RUN) -> None:
        self.now_s += 1.0
        self.neighbour.heard(run, step_s)

    def rest(self, reports: int = 2 * REPORTS_MIN, step_s: float = USUAL_S) -> None:
        for _ in range(reports):
            self.report(step_s)

    @contextmanager
    def writing(self, tier: str = "hot") -> Iterator[None]:
        """A second of writing, as fast as it may."""
        with self.neighbour.writing(tier) as wrote:
            wrote(int(min(RATE, self.limit(tier))))
            yield

    def write(self, step_s: float, seconds: int = 1, tier: str = "hot") -> list[float]:
        found: list[float] = []
        for _ in range(seconds):
            with self.writing(tier):
                self.report(step_s)
            found.append(self.limit(tier))
        return found

    def limit(self, tier: str = "hot") -> float:
        return self.neighbour.limit(tier)

    def shown(self, tier: str = "hot") -> float | None:
        return self.metrics.registry.get_sample_value("tierd_write_limit_bytes_per_second", {"tier": tier})

    def slowdown(self) -> float | None:
        return self.metrics.registry.get_sample_value("tierd_step_slowdown_ratio", {"run": RUN})


@pytest.fixture
def street() -> Street:
    found = Street()
    found.rest()
    return found


def test_nothing_is_held_back_while_steps_take_what_they_usually_do(street: Street) -> None:
    assert set(street.write(USUAL_S * 1.04, 20)) == {math.inf}
    assert street.told == []
    assert street.shown() is None
    assert street.slowdown() == pytest.approx(0.04)


def test_what_is_written_while_steps_are_slower_gets_half_of_its_rate(street: Street) -> None:
    assert street.write(USUAL_S * 1.3) == [RATE / 2]
    assert street.limit("cold") == math.inf, "it was not being written"
    assert street.told == ["hot"]
    assert street.shown() == RATE / 2
    assert street.shown("cold") is None
    assert street.slowdown() == pytest.approx(0.3)
    assert street.write(USUAL_S * 1.3, 2) == [RATE / 4, RATE / 8]


def test_it_is_never_held_back_to_less_than_the_least(street: Street) -> None:
    found = street.write(USUAL_S * 3, 50)
    assert found[-1] == min(found) == 32 * MIB


def test_it_comes_back_bit_by_bit_until_nothing_holds_it_back(street: Street) -> None:
    street.write(USUAL_S * 3, 5)
    found = [street.limit(), *street.write(USUAL_S, 100)]
    assert found == sorted(found)
    assert found[-1] == math.inf
    assert found[1] < 1.2 * found[0]
    assert street.shown() is None


def test_slow_steps_while_nothing_is_written_change_no_limit_and_become_what_is_usual(street: Street) -> None:
    street.write(USUAL_S * 3)
    before = street.limit()
    street.rest(REPORTS_REMEMBERED, USUAL_S * 3)
    assert street.limit() == before
    street.write(USUAL_S * 3, 100)
    assert street.limit() == math.inf


def test_trainer_whose_steps_vary_by_themselves_is_not_taken_for_slowed(street: Street) -> None:
    for number in range(REPORTS_REMEMBERED):
        street.report(USUAL_S * (1.5 if number % 5 == 0 else 1.0))
    assert street.write(USUAL_S * 1.4) == [math.inf]
    assert street.write(USUAL_S * 1.6) == [RATE / 2]


def test_before_it_knows_what_is_usual_nothing_is_held_back() -> None:
    street = Street()
    street.rest(REPORTS_MIN)  # the first tells of steps before anybody looked
    assert street.write(USUAL_S * 9) == [math.inf]
    assert street.slowdown() is None
    street.rest(1)
    assert street.write(USUAL_S * 9) == [RATE / 2]


def test_report_that_spans_the_end_of_a_write_is_not_of_a_time_at_rest(street: Street) -> None:
    with street.writing():
        pass
    street.report(USUAL_S * 3)
    assert street.limit() < math.inf


def test_piece_that_takes_longer_than_a_report_is_judged_when_it_has_come_through(street: Street) -> None:
    with street.neighbour.writing("cold") as wrote:
        street.report(USUAL_S * 3)
        assert street.limit("cold") == math.inf, "nobody knows how fast it goes"
        wrote(256 * MIB)
        street.report(USUAL_S * 3)
        assert street.limit("cold") == 128 * MIB
        street.report(USUAL_S * 3)
        assert street.limit("cold") == 256 * MIB / 3 / 2


def test_upload_that_was_under_way_when_steps_got_slower_is_held_back_though_no_piece_ends(street: Street) -> None:
    with street.neighbour.writing("cold") as wrote:
        wrote(320 * MIB)
        street.rest(4)
        street.report(USUAL_S * 3)
        assert street.limit("cold") == 32 * MIB


# ── never so slow that durability suffers ──


def test_snapshot_is_durable_in_half_the_time_until_the_next_however_slow_the_steps(street: Street) -> None:
    size_bytes, interval_s = 6000 * MIB, 60.0
    for number in range(2):
        street.neighbour.sealed(RUN, size_bytes, 2000.0 + interval_s * number)
    street.write(USUAL_S * 9, 50)
    assert street.limit() == HEADROOM * size_bytes / interval_s == 200 * MIB


def test_retry_of_a_snapshot_is_no_second_one(street: Street) -> None:
    for at_s in (2000.0, 2060.0, 2060.0):
        street.neighbour.sealed(RUN, 6000 * MIB, at_s)
    street.write(USUAL_S * 9, 50)
    assert street.limit() == 200 * MIB


def test_first_snapshot_is_not_held_back_since_nobody_knows_when_the_next_is_due(street: Street) -> None:
    street.neighbour.sealed(RUN, MIB, 2000.0)
    assert set(street.write(USUAL_S * 9, 10)) == {math.inf}


def test_while_two_snapshots_wait_persisting_is_not_held_back_and_uploads_are(street: Street) -> None:
    for tier in ("hot", "cold"):
        street.write(USUAL_S * 3, 1, tier)
    street.neighbour.queued(2)
    assert (street.limit("hot"), street.limit("cold")) == (math.inf, RATE / 2)
    street.neighbour.queued(1)
    assert (street.limit("hot"), street.limit("cold")) == (RATE / 2, RATE / 2)


def test_nothing_is_held_back_while_somebody_waits(street: Street) -> None:
    street.write(USUAL_S * 3)
    street.neighbour.hurry("operator")
    assert street.limit() == math.inf
    assert street.shown() is None
    street.neighbour.hurry("trainer", 10.0)
    street.neighbour.calm("operator")
    assert street.limit() == math.inf
    street.now_s += 10.0
    street.rest(1)
    assert street.limit() == RATE / 2
    street.neighbour.calm("somebody else")
    assert street.limit() == RATE / 2
    assert street.told == ["hot"] * 3


def test_where_no_trainer_is_nothing_is_held_back(street: Street) -> None:
    street.report(run=Run("other"))
    street.write(USUAL_S * 3)
    held_back = street.limit()
    street.neighbour.left(RUN)
    assert street.limit() == held_back < math.inf, "another one is there"
    street.neighbour.left(Run("other"))
    street.neighbour.left(Run("other"))
    assert street.limit() == math.inf
    assert street.slowdown() is None


def test_turned_off_it_asks_for_no_reports() -> None:
    assert Street(slowdown_max=0.0).neighbour.report_s == 0
    assert Street().neighbour.report_s > 0


@settings(deadline=None)
@given(
    steps=st.lists(st.floats(1e-6, 1e6), max_size=60),
    wrote=st.lists(st.integers(0, 1 << 50), min_size=60, max_size=60),
    sealed=st.lists(st.floats(0, 1e6), max_size=5),
)
def test_whatever_is_reported_no_limit_is_below_the_least(
    steps: list[float], wrote: list[int], sealed: list[float]
) -> None:
    street = Street()
    street.rest()
    for at_s in sealed:
        street.neighbour.sealed(RUN, 1 << 40, at_s)
    for step_s, size_bytes in zip(steps, wrote, strict=False):
        with street.neighbour.writing("hot") as told:
            told(size_bytes)
            street.report(step_s)
        assert street.limit() >= 32 * MIB
