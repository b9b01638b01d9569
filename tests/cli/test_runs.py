"""`tierd runs`, and `tierd ls` by metric."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cli import House, make_checkpoint, make_house
from tierd.format.ids import checkpoint_id


@pytest.fixture
def house(tmp_path: Path) -> House:
    return make_house(tmp_path)


def test_runs_sums_up_each_run_over_its_tiers(house: House) -> None:
    make_checkpoint(house.hot, house.cold, run="a", step=100, milestones=("best",))
    make_checkpoint(house.cold, run="a", step=200, sequence=2)
    make_checkpoint(house.hot, run="b", step=7)

    a, b = house.json("runs")

    assert (a["run"], a["newest_step"], a["checkpoints"], a["tiers"]) == ("a", 200, 2, ["hot", "cold"])
    assert a["size_bytes"] == 80_000
    assert a["generations"] == [
        {
            "generation": 1,
            "parent": None,
            "checkpoints": 2,
            "first_step": 100,
            "last_step": 200,
            "milestones": {"best": 100},
        }
    ]
    assert (b["run"], b["tiers"]) == ("b", ["hot"])
    assert [row["run"] for row in house.json("runs", str(house.cold))] == ["a"]


def test_tree_says_from_which_checkpoint_each_generation_went_on(house: House) -> None:
    make_checkpoint(house.hot, run="a", step=100, milestones=("best",))
    make_checkpoint(house.hot, run="a", step=200, sequence=2)
    make_checkpoint(house.hot, run="a", step=150, generation=2, sequence=3, parent=checkpoint_id("a", 100, 1))

    lines = house.tierd("runs", "--tree").stdout.splitlines()

    assert lines[-3:] == [
        "a",
        "├─ generation 1: 2 in steps 100 to 200, from scratch, milestone best at 100",
        "└─ generation 2: 1 in step 150, from a/000000000100-g0001",
    ]


def test_no_runs_is_said(house: House) -> None:
    result = house.tierd("runs")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "no runs" in result.stderr


def losses(house: House) -> None:
    """NaN is stored as a text."""
    for step, metrics in ((1, {"loss": 3.0}), (2, {"loss": 2.0, "accuracy": 0.5}), (3, {"loss": "nan"}), (4, {})):
        make_checkpoint(house.hot, step=step, sequence=step, metrics=metrics)


@pytest.mark.parametrize(
    ("conditions", "steps"),
    [
        (["loss < 3"], [2]),
        (["loss<=3"], [2, 1]),
        (["loss >= 2.5"], [1]),
        (["loss != 2"], [1]),
        (["loss = nan"], [3]),
        (["loss > 0", "accuracy = 0.5"], [2]),
        (["loss = low"], []),
        (["speed > 0"], []),
        (["  loss==3  "], [1]),
    ],
)
def test_ls_shows_only_what_fits_all_conditions(house: House, conditions: list[str], steps: list[int]) -> None:
    losses(house)
    arguments = [word for condition in conditions for word in ("--where", condition)]
    assert [row["step"] for row in house.json("ls", *arguments)] == steps


def test_ls_sorts_by_a_metric_and_puts_those_without_it_last(house: House) -> None:
    losses(house)
    assert [row["step"] for row in house.json("ls", "--lowest", "loss")] == [2, 1, 4, 3]
    assert [row["step"] for row in house.json("ls", "--highest", "loss")] == [1, 2, 4, 3]


def test_ls_names_the_metrics_where_nothing_fits_and_refuses_what_is_no_condition(house: House) -> None:
    losses(house)
    result = house.tierd("ls", "--where", "acc > 1")
    assert (result.exit_code, "where acc > 1" in result.stderr, "accuracy, loss" in result.stderr) == (0, True, True)
    result = house.tierd("ls", "--lowest", "los")
    assert "not sorted: no checkpoint here has a number los; the metrics there are accuracy, loss" in result.stderr
    for condition in ("loss", "< 3", "loss <", "loss << 3", "loss =< 3", " " * 20_000 + "x"):
        assert house.tierd("ls", "--where", condition).exit_code == 2, condition[:20]
    assert house.tierd("ls", "--lowest", "a", "--highest", "b").exit_code == 2
