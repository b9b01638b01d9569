"""The walltime: what sets it, what is refused, and that a run which stops at the reserve ends in time."""

from __future__ import annotations

import itertools
import math
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tierd_client import BadConfig
from tierd_client.stopping.deadline import FLOOR_S, UNMEASURED_S, Pace, find_deadline

NOW_S = 1_700_000_000.0
seconds = st.floats(0, 10_000)


def test_without_settings_there_is_no_deadline() -> None:
    assert find_deadline({}, None, NOW_S) is None
    assert find_deadline({"SLURM_JOB_END_TIME": "", "TIERD_DEADLINE": ""}, None, NOW_S) is None


def test_earliest_deadline_counts_and_is_named() -> None:
    environ = {"SLURM_JOB_END_TIME": f"{NOW_S + 100:.0f}", "TIERD_DEADLINE": f"{NOW_S + 50}"}
    deadlines = [find_deadline(environ, max_runtime_s, NOW_S) for max_runtime_s in (None, 60.0, 40.0)]
    assert [(deadline.at_s - NOW_S, deadline.source) for deadline in deadlines if deadline] == [
        (50, "$TIERD_DEADLINE"),
        (50, "$TIERD_DEADLINE"),
        (40, "max_runtime_s=40"),
    ]
    slurm = find_deadline({"SLURM_JOB_END_TIME": "1700000100"}, None, NOW_S)
    assert slurm is not None
    assert (slurm.at_s, slurm.source) == (1_700_000_100, "$SLURM_JOB_END_TIME")


@pytest.mark.parametrize("text", ["2023-11-14T22:13:20Z", "2023-11-14T23:13:20+01:00", "2023-11-14 22:13:20.000+00:00"])
def test_time_with_a_zone_is_understood(text: str) -> None:
    deadline = find_deadline({"TIERD_DEADLINE": text}, None, 0.0)
    assert deadline is not None
    assert datetime.fromtimestamp(deadline.at_s, UTC) == datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("SLURM_JOB_END_TIME", "tomorrow"),
        ("SLURM_JOB_END_TIME", "2023-11-14T22:13:20Z"),
        ("SLURM_JOB_END_TIME", "nan"),
        ("SLURM_JOB_END_TIME", "-5"),
        ("TIERD_DEADLINE", "inf"),
        ("TIERD_DEADLINE", "0"),
        ("TIERD_DEADLINE", "22:00"),
        ("TIERD_DEADLINE", "2023-11-14T22:13:20"),
    ],
)
def test_invalid_time_is_refused_by_the_name_of_its_variable(name: str, text: str) -> None:
    with pytest.raises(BadConfig) as caught:
        find_deadline({name: text}, None, NOW_S)
    assert f"${name} is {text!r}" in caught.value.message


@pytest.mark.parametrize("max_runtime_s", [0.0, -1.0, math.nan, math.inf])
def test_invalid_max_runtime_is_refused(max_runtime_s: float) -> None:
    with pytest.raises(BadConfig, match="max_runtime_s"):
        find_deadline({}, max_runtime_s, NOW_S)


def reserve_s(step_s: float, stage_s: float, persist_s: float) -> float:
    pace = Pace()
    pace.steps_s.append(step_s)
    pace.stages_s.append(stage_s)
    pace.persists_s.append(persist_s)
    return pace.reserve_s(0)


@given(seconds, seconds, seconds, seconds)
def test_reserve_covers_the_measured_times_and_grows_with_them(
    step_s: float, stage_s: float, persist_s: float, more_s: float
) -> None:
    reserve = reserve_s(step_s, stage_s, persist_s)
    assert reserve >= FLOOR_S + 2 * step_s + stage_s + persist_s
    assert reserve_s(step_s + more_s, stage_s, persist_s) >= reserve
    assert reserve_s(step_s, stage_s + more_s, persist_s) >= reserve
    assert reserve_s(step_s, stage_s, persist_s + more_s) >= reserve


@settings(deadline=None)
@given(
    step_s=st.floats(0.1, 100),
    factors=st.lists(st.floats(1, 1.4), min_size=1, max_size=50),
    stage_s=st.floats(0, 20),
    persist_s=st.floats(0, 120),
    walltime_s=st.floats(1000, 2000),
)
def test_run_that_stops_at_the_reserve_is_durable_before_the_walltime(
    step_s: float, factors: list[float], stage_s: float, persist_s: float, walltime_s: float
) -> None:
    """Steps differ by up to 40 %, the ranks agree a step later, and the last snapshot is the slowest of all."""
    pace, now_s = Pace(), 0.0
    pace.stepped(now_s)
    pace.stages_s.append(stage_s)
    pace.persists_s.append(persist_s)
    for factor in itertools.cycle(factors):
        now_s += step_s * factor
        pace.stepped(now_s)
        if walltime_s - now_s <= pace.reserve_s(walltime_s):
            break
    assert now_s + 1.4 * (step_s + stage_s + persist_s) <= walltime_s


def test_before_the_first_snapshot_the_reserve_assumes_a_slow_persist_of_at_most_a_tenth_of_the_run() -> None:
    assert Pace().reserve_s(86_400) == reserve_s(0, 0, UNMEASURED_S)
    assert Pace().reserve_s(60) == reserve_s(0, 0, 6)
    assert Pace().reserve_s(-5) == FLOOR_S


def test_slow_step_long_ago_is_forgotten() -> None:
    pace = Pace()
    pace.persists_s.append(0.0)
    pace.stepped(0)
    pace.stepped(600)  # an evaluation
    assert pace.reserve_s(0) > 600
    for step in range(20):
        pace.stepped(601 + step)
    assert pace.reserve_s(0) == reserve_s(1, 0, 0)
