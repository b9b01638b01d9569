"""The picture of a run: pure."""

from __future__ import annotations

import pytest

from tierd.format.ids import CheckpointId, checkpoint_id
from tierd.status.checkpoint_report import CheckpointRow
from tierd.status.node_reports import PartReport
from tierd.web.timeline import MARGIN, SHOWN_MAX, timeline


def row(step: int, minute: int, *tiers: str, generation: int = 1, **fields: object) -> CheckpointRow:
    values: dict[str, object] = {
        "milestone": None,
        "healthy": None,
        "metrics": {"loss": float(100 - step)},
        "created_at": f"2026-01-01T00:{minute:02}:00+00:00",
    }
    return CheckpointRow(
        run="run",
        step=step,
        generation=generation,
        tiers=list(tiers),
        size_bytes=1,
        **(values | fields),  # type: ignore[arg-type]
    )


def test_marks_are_placed_by_time_in_the_lanes_of_their_tiers() -> None:
    drawn = timeline([row(30, 20, "hot"), row(20, 5, "hot", "cold"), row(10, 0, "cold")], ["hot", "cold"], {})
    assert drawn is not None
    hot, cold = drawn.lanes
    assert [mark.x for mark in hot.marks] == [pytest.approx(26.0), 100 - MARGIN]
    assert [mark.x for mark in cold.marks] == [MARGIN, pytest.approx(26.0)]
    assert (drawn.begins, drawn.ends) == ("2026-01-01 00:00:00", "2026-01-01 00:20:00")
    assert drawn.summary == "3 checkpoints from step 10 to step 30: 2 in hot, 2 in cold"


def test_kinds_of_marks() -> None:
    part = {"hot": PartReport(ranks=[0], world_size=2)}
    rows = [
        row(1, 1, "hot"),
        row(2, 2, "hot", milestone="best"),
        row(3, 3, "hot", healthy=False, milestone="worst"),
        row(4, 4, parts=part),
    ]
    drawn = timeline(rows, ["hot"], {})
    assert drawn is not None
    assert [mark.kind for mark in drawn.lanes[0].marks] == ["checkpoint", "milestone", "unhealthy", "part"]
    assert drawn.lanes[0].marks[1].title == "step 2, generation 1: milestone best"


def test_a_generation_branches_off_its_parent_or_what_is_left_before_it() -> None:
    parents: dict[CheckpointId, CheckpointId | None] = {checkpoint_id("run", 21, 2): checkpoint_id("run", 20, 1)}
    rows = [row(10, 0, "hot"), row(20, 10, "hot"), row(30, 20, "hot"), row(21, 40, "hot", generation=2)]
    drawn = timeline(rows, ["hot"], parents)
    assert drawn is not None
    first, second = drawn.steps.lines
    assert (first.generation, first.start) == (1, "")
    assert second.start == first.points.split()[1]
    without = timeline([rows[0], rows[2], rows[3]], ["hot"], parents)
    assert without is not None
    assert without.steps.lines[1].start == without.steps.lines[0].points.split()[0]


def test_metric_is_drawn_where_it_is_a_number() -> None:
    rows = [
        row(1, 1, "hot", metrics={"loss": "nan"}),
        row(2, 2, "hot", metrics={"loss": 3.0}),
        row(3, 3, "hot", metrics={"loss": 1.0}),
    ]
    drawn = timeline(rows, ["hot"], {})
    assert drawn is not None
    assert drawn.metric is not None
    assert (drawn.metric.name, drawn.metric.low, drawn.metric.high) == ("loss", 1.0, 3.0)
    assert drawn.metric.lines[0].points == "50.0,5.0 98.0,95.0"
    without = timeline([row(1, 1, "hot", metrics={"accuracy_of_something": 1.0})], ["hot"], {})
    assert without is not None
    assert without.metric is None


def test_a_metric_of_the_largest_numbers_has_a_place_for_each() -> None:
    drawn = timeline([row(step, step, "hot", metrics={"loss": (step - 1) * 1.7e308}) for step in range(3)], ["hot"], {})
    assert drawn is not None
    assert drawn.metric is not None
    assert drawn.metric.lines[0].points == "2.0,95.0 50.0,50.0 98.0,5.0"


def test_one_checkpoint_is_in_the_middle_and_none_is_no_picture() -> None:
    drawn = timeline([row(5, 5, "hot")], ["hot"], {})
    assert drawn is not None
    assert drawn.lanes[0].marks[0].x == 50.0
    assert drawn.steps.lines[0].points == "50.0,50.0"
    assert timeline([], ["hot"], {}) is None
    assert timeline([row(5, 5, "hot", created_at="some day")], ["hot"], {}) is None


def test_times_of_any_zone_and_of_none_are_compared() -> None:
    rows = [
        row(1, 0, "hot", created_at="2026-01-01T02:00:00+02:00"),
        row(2, 0, "hot", created_at="2026-01-01T01:00:00"),
        row(3, 0, "hot", created_at="0001-01-01T00:00:00+14:00"),
    ]
    drawn = timeline(rows[:2], ["hot"], {})
    assert drawn is not None
    assert (drawn.begins, drawn.ends) == ("2026-01-01 00:00:00", "2026-01-01 01:00:00")
    assert timeline(rows, ["hot"], {}) == drawn, "the third is not a time in UTC"


def test_only_the_newest_are_drawn() -> None:
    drawn = timeline([row(step, step % 60, "hot") for step in range(SHOWN_MAX + 50)], ["hot"], {})
    assert drawn is not None
    assert (len(drawn.lanes[0].marks), drawn.left_out) == (SHOWN_MAX, 50)
