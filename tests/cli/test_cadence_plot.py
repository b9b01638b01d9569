"""The plot of `tierd cadence`: SVG that needs nothing else, for any costs."""

from __future__ import annotations

import xml.etree.ElementTree

import pytest

from tierd.cli.cadence_plot import HEIGHT, plot
from tierd.lifecycle.cadence import Costs, outcome, young_s

REFERENCE = Costs(save_s=120, mtbf_s=7593.75)


@pytest.mark.parametrize(
    ("costs", "intervals_s"),
    [
        (REFERENCE, [300, 1350, 14400]),
        (REFERENCE, [1350]),
        (Costs(save_s=30_000, mtbf_s=10_800), [50_000]),
        (Costs(save_s=0.001, mtbf_s=1e10, node_loss_share=1, node_restart_s=60, lag_s=1e6), [0.002, 1e10]),
    ],
)
def test_plot_stays_in_its_frame_and_needs_nothing_else(costs: Costs, intervals_s: list[float]) -> None:
    outcomes = [outcome(costs, interval_s, failures=100) for interval_s in intervals_s]
    text = plot(costs, outcomes, young_s(costs.save_s, costs.mtbf_s))
    root = xml.etree.ElementTree.fromstring(text)
    curves = [element.attrib["points"] for element in root.iter() if element.tag.endswith("polyline")]
    points = [float(point.split(",")[1]) for curve in curves for point in curve.split()]
    points += [float(element.attrib["cy"]) for element in root.iter() if element.tag.endswith("circle")]
    assert len(points) == 2 * 201 + len(intervals_s)
    assert 0 < min(points) <= max(points) < HEIGHT
    assert [word for word in ("href", "script", "url(", "@import", "nan") if word in text] == []
