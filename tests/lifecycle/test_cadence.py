"""The interval between snapshots: the formulas, and a simulation of failures that assumes neither."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierd.errors import BadConfig
from tierd.lifecycle.cadence import (
    FIRST_S,
    HOLDS_BELOW,
    LEAST_S,
    MOST_S,
    PRIOR_MTBF_S,
    Choice,
    Costs,
    choose,
    daly_s,
    efficiency,
    estimate_mtbf_s,
    gpus_mtbf_s,
    outcome,
    simulate,
    young_s,
)

DAY_S = 86400.0
REFERENCE = Costs(save_s=120, mtbf_s=gpus_mtbf_s(2048, 180 * DAY_S))


def test_reference_job_saves_every_1350_s() -> None:
    assert REFERENCE.mtbf_s == 7593.75
    assert young_s(REFERENCE.save_s, REFERENCE.mtbf_s) == 1350
    assert daly_s(REFERENCE.save_s, REFERENCE.mtbf_s) == pytest.approx(1391.2, abs=0.1)


@pytest.mark.parametrize(
    ("interval_s", "first_order", "daly"),
    # 900 s is 80.74 %; whoever adds the rounded 13.3 % and 5.9 % gets 80.8 %.
    [(300, 58.0, 58.8), (900, 80.7, 81.6), (1350, 82.2, 83.3), (3600, 73.0, 75.6), (14400, 4.4, 33.2)],
)
def test_reference_efficiencies(interval_s: float, first_order: float, daly: float) -> None:
    found = outcome(REFERENCE, interval_s)
    assert (round(100 * found.first_order, 1), round(100 * found.daly, 1)) == (first_order, daly)
    assert found.simulated == pytest.approx(found.daly, abs=0.003)


def test_first_order_holds_within_about_one_percent_point_and_is_useless_beyond_the_mtbf() -> None:
    for interval_s in (200, 300, 900, 1350, HOLDS_BELOW * REFERENCE.mtbf_s):
        found = outcome(REFERENCE, interval_s)
        assert found.first_order_holds
        assert found.first_order == pytest.approx(found.simulated, abs=0.011)
    beyond = outcome(REFERENCE, 4 * 3600)
    assert not beyond.first_order_holds
    assert beyond.failures_per_interval > 1  # as a probability it says nothing
    assert beyond.simulated - beyond.first_order > 0.25
    assert outcome(REFERENCE, 5 * 3600).first_order < 0 < outcome(REFERENCE, 5 * 3600).simulated


@pytest.mark.parametrize("lag_s", [0, 5, 60, 400, 900])
@pytest.mark.parametrize("interval_s", [30, 123, 600])
def test_simulation_of_two_kinds_of_failure_agrees_with_the_model(lag_s: float, interval_s: float) -> None:
    costs = Costs(save_s=1, mtbf_s=7594, restart_s=60, node_loss_share=0.3, node_restart_s=300, lag_s=lag_s)
    assert simulate(costs, interval_s) == pytest.approx(efficiency(costs, interval_s), abs=0.005)


def test_a_lag_longer_than_the_interval_costs_half_a_lag_more() -> None:
    """A snapshot that waits for the transfer of an older one leaves the node later."""
    every = {
        lag_s: simulate(Costs(save_s=0.001, mtbf_s=100_000, node_loss_share=1, lag_s=lag_s), 100, seed=1)
        for lag_s in (0, 90, 910)
    }
    assert (every[0] - every[90]) * 100_000 == pytest.approx(90, rel=0.1)
    assert (every[0] - every[910]) * 100_000 == pytest.approx(1.5 * 910, rel=0.05)


@settings(max_examples=30, deadline=None)
@given(
    save_s=st.floats(0.01, 600),
    mtbf_s=st.floats(600, 1e6),
    share=st.floats(0.05, 20),
    restart_s=st.floats(0, 300),
)
def test_daly_is_what_random_failures_cost(save_s: float, mtbf_s: float, share: float, restart_s: float) -> None:
    costs = Costs(save_s=save_s, mtbf_s=mtbf_s, restart_s=restart_s)
    interval_s = share * young_s(save_s, mtbf_s)
    assert simulate(costs, interval_s, failures=5000) == pytest.approx(efficiency(costs, interval_s), abs=0.02)


@settings(max_examples=100, deadline=None)
@given(
    costs=st.builds(
        Costs,
        save_s=st.floats(1e-3, 1e4),
        mtbf_s=st.floats(1, 1e10),
        restart_s=st.floats(0, 1e5),
        node_loss_share=st.floats(0, 1),
        node_restart_s=st.floats(0, 1e5),
        lag_s=st.floats(0, 1e5),
    ),
    interval_s=st.floats(1e-3, 1e10),
)
def test_any_costs_give_numbers_in_bounded_time(costs: Costs, interval_s: float) -> None:
    found = outcome(costs, interval_s, failures=50)
    assert 0 <= found.simulated <= 1
    assert 0 <= found.daly <= 1
    assert found.first_order <= 1
    assert math.isfinite(found.first_order)
    assert found == outcome(costs, interval_s, failures=50)  # the seed decides


@settings(max_examples=100, deadline=None)
@given(save_s=st.floats(0.001, 1000), ratio=st.floats(30, 1e7))
def test_no_interval_is_better_than_that_of_daly(save_s: float, ratio: float) -> None:
    costs = Costs(save_s=save_s, mtbf_s=ratio * save_s)
    best = efficiency(costs, daly_s(save_s, costs.mtbf_s))
    for factor in (0.5, 0.8, 1.25, 2):
        assert efficiency(costs, factor * daly_s(save_s, costs.mtbf_s)) < best
    assert efficiency(costs, young_s(save_s, costs.mtbf_s)) == pytest.approx(best, abs=0.002)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"save_s": 0.0}, "save cost is 0 s"),
        ({"save_s": math.nan}, "save cost is nan s"),
        ({"mtbf_s": -1.0}, "MTBF is -1 s"),
        ({"mtbf_s": math.inf}, "MTBF is inf s"),
        ({"restart_s": -0.1}, "restart cost is -0.1 s"),
        ({"node_restart_s": math.nan}, "loss of a node is nan s"),
        ({"lag_s": 1e11}, "to 1e+10 s"),
        ({"node_loss_share": 1.5}, "lose a node is 1.5, expected 0 to 1"),
    ],
)
def test_a_cost_out_of_range_is_refused_by_name(wrong: dict[str, float], word: str) -> None:
    with pytest.raises(BadConfig, match="compute a cadence: ") as refused:
        Costs(**{"save_s": 1.0, "mtbf_s": 1000.0, **wrong})
    assert word in refused.value.message


def test_no_gpus_and_no_interval_are_refused() -> None:
    for refused in (lambda: gpus_mtbf_s(0, DAY_S), lambda: gpus_mtbf_s(8, 0), lambda: outcome(REFERENCE, 0)):
        with pytest.raises(BadConfig):
            refused()


def test_interval_not_longer_than_the_save_does_no_work() -> None:
    assert (efficiency(REFERENCE, 120), simulate(REFERENCE, 120)) == (0, 0)


# ── cadence = "auto" ──


def chosen(stall_s: float | None, persist_s: float | None = 0.2, mtbf_s: float = 7594, cap: float = 0.01) -> Choice:
    return choose(stall_s=stall_s, persist_s=persist_s, mtbf_s=mtbf_s, mtbf_source="MTBF", stall_share_max=cap)


def test_auto_is_young_unless_stalls_or_persists_take_longer() -> None:
    assert chosen(0.04).every_s == young_s(0.04, 7594)
    assert chosen(120, cap=0).every_s == pytest.approx(1350, abs=0.1)
    capped = chosen(120, mtbf_s=100)
    assert capped.every_s == MOST_S  # 12,000 s by the cap
    assert "stalls may take 1 % of the time" in capped.reasons[-2]
    slow = chosen(0.001, persist_s=90, mtbf_s=1000)
    assert (slow.every_s, slow.reasons[-1]) == (90, "longer, because a snapshot takes 90 s to persist")
    assert chosen(0.0, persist_s=None).every_s == LEAST_S
    assert chosen(10, mtbf_s=1e9).every_s == MOST_S


def test_auto_begins_with_a_short_interval_until_a_snapshot_was_measured() -> None:
    assert chosen(None).every_s == FIRST_S
    assert "no snapshot was measured yet" in chosen(None).reasons[0]


def test_mtbf_without_a_configured_one_follows_the_failures_seen() -> None:
    assert estimate_mtbf_s(500, 7, 1000) == (500, "MTBF 500 s as configured")
    assert estimate_mtbf_s(0, 0, 0)[0] == PRIOR_MTBF_S
    mtbf_s, why = estimate_mtbf_s(0, 99, 99 * 3600)
    assert mtbf_s == pytest.approx(3600, rel=0.25)  # the prior counts as one failure
    assert "99 failures in 356400 s of training" in why


@given(
    stall_s=st.none() | st.floats(0, 1e6),
    persist_s=st.none() | st.floats(0, 1e6),
    mtbf_s=st.floats(1, 1e12),
    cap=st.floats(0, 1),
)
def test_auto_is_always_an_interval_that_can_be_followed(
    stall_s: float | None, persist_s: float | None, mtbf_s: float, cap: float
) -> None:
    choice = chosen(stall_s, persist_s, mtbf_s, cap)
    assert LEAST_S <= choice.every_s <= MOST_S
    assert all(choice.reasons)
