"""Computes the picture of a run's checkpoints: the position of each mark, in percent and pixels. Pure.

The horizontal axis is time. From top to bottom: the step over time, one line for each generation, which begins at the
checkpoint from which it was restored; one lane for each tier; a metric. SVG polylines cannot use percent, so their
points are in an inner picture of 100 by 100 units that is stretched.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from tierd.format.ids import CheckpointId
from tierd.format.text import parse_time
from tierd.status.checkpoint_report import CheckpointRow

SHOWN_MAX = 300  # checkpoints; the newest
LANE_PX = 40
PLOT_PX = 110
LABEL_PX = 20  # of PLOT_PX: the line with the name above the plot
MARGIN = 2.0  # percent, left and right
METRICS = ("loss", "train_loss", "val_loss", "eval_loss")  # the first that the checkpoints have is drawn


@dataclass(frozen=True)
class Mark:
    """A checkpoint in a tier. `x`: percent; `kind`: checkpoint, milestone, unhealthy or part."""

    x: float
    kind: str
    title: str


@dataclass(frozen=True)
class Lane:
    tier: str
    marks: list[Mark]


@dataclass(frozen=True)
class Line:
    """The line of one generation. `points`: in a picture of 100 by 100; `start`: the point where it branches off."""

    generation: int
    points: str
    start: str = ""


@dataclass(frozen=True)
class Plot:
    """Numbers over time. `low` and `high`: the ends of the vertical axis."""

    name: str
    low: float
    high: float
    lines: list[Line]


@dataclass(frozen=True)
class Timeline:
    """`left_out`: older checkpoints that are not drawn. `summary`: the picture in words."""

    begins: str
    ends: str
    steps: Plot
    lanes: list[Lane]
    metric: Plot | None
    left_out: int
    summary: str


def timeline(
    rows: Sequence[CheckpointRow], tiers: Sequence[str], parents: Mapping[CheckpointId, CheckpointId | None]
) -> Timeline | None:
    """`rows`: of one run. `tiers`: the lanes, nearest first. None if no row has a time."""
    times = [(parse_time(row.created_at), row) for row in rows]
    dated = [(time.timestamp(), row) for time, row in times if time is not None]
    dated.sort(key=lambda pair: pair[0])
    shown = dated[-SHOWN_MAX:]
    if not shown:
        return None
    begin_s, end_s = shown[0][0], shown[-1][0]

    def x(at_s: float) -> float:
        span_s = end_s - begin_s
        share = (at_s - begin_s) / span_s if span_s > 0 else 0.5
        return round(MARGIN + share * (100 - 2 * MARGIN), 2)

    placed = [(x(at_s), row) for at_s, row in shown]
    metric = next((name for name in METRICS if any(_number(row, name) is not None for _, row in placed)), None)
    lanes = [Lane(tier, [_mark(at, row, tier) for at, row in placed if row.is_in(tier)]) for tier in tiers]
    counts = ", ".join(f"{len(lane.marks)} in {lane.tier}" for lane in lanes)
    return Timeline(
        begins=_shown_time(begin_s),
        ends=_shown_time(end_s),
        steps=_plot("step", [(at, row, float(row.step)) for at, row in placed], parents),
        lanes=lanes,
        metric=None
        if metric is None
        else _plot(
            metric, [(at, row, value) for at, row in placed if (value := _number(row, metric)) is not None], parents
        ),
        left_out=len(dated) - len(shown),
        summary=f"{len(shown)} checkpoints from step {placed[0][1].step} to step {placed[-1][1].step}: {counts}",
    )


def _plot(
    name: str,
    points: Sequence[tuple[float, CheckpointRow, float]],
    parents: Mapping[CheckpointId, CheckpointId | None],
) -> Plot:
    values = [value for _, _, value in points]
    low, high = min(values), max(values)

    def point(x: float, value: float) -> str:
        # Halved: the difference of two numbers may be infinite.
        share = (value / 2 - low / 2) / (high / 2 - low / 2) if high / 2 > low / 2 else 0.5
        return f"{x},{round(95 - 90 * share, 2)}"

    lines: list[Line] = []
    for generation in sorted({row.generation for _, row, _ in points}):
        own = [(x, row, value) for x, row, value in points if row.generation == generation]
        parent = parents.get(own[0][1].id)
        start = ""
        if parent is not None and parent.generation != generation:
            # The parent itself may have been deleted meanwhile.
            before = [
                point for point in points if point[1].generation == parent.generation and point[1].step <= parent.step
            ]
            start = point(before[-1][0], before[-1][2]) if before else ""
        lines.append(Line(generation, " ".join(point(x, value) for x, _, value in own), start))
    return Plot(name, low, high, lines)


def _mark(x: float, row: CheckpointRow, tier: str) -> Mark:
    kind = "checkpoint"
    if row.milestone is not None:
        kind = "milestone"
    if row.healthy is False:
        kind = "unhealthy"
    if tier not in row.tiers:
        kind = "part"
    called = f" {row.milestone}" if row.milestone is not None else ""
    return Mark(x, kind, f"step {row.step}, generation {row.generation}: {kind}{called}")


def _number(row: CheckpointRow, name: str) -> float | None:
    value = row.metrics.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _shown_time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
