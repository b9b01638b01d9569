"""The plot of `tierd cadence --svg`: efficiency over the interval, as SVG that needs no font, script or network."""

from __future__ import annotations

import math

from tierd.lifecycle.cadence import Costs, Outcome, efficiency

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 400, 60, 20, 46, 56
POINTS = 200
_TICKS_S = {1: "1 s", 10: "10 s", 60: "1 min", 300: "5 min", 900: "15 min", 3600: "1 h", 14400: "4 h", 86400: "1 d"}
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#222}.grid{stroke:#ddd}.first{stroke:#c4562b;stroke-dasharray:6 4}"
    ".daly{stroke:#1f6fb2}.curve{fill:none;stroke-width:2}.point{fill:#fff;stroke:#222;stroke-width:1.5}"
    ".best{stroke:#777;stroke-dasharray:2 3}rect{fill:#fff}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.grid{stroke:#444}.point{fill:#181818;stroke:#ddd}"
    "rect{fill:#181818}}"
)


def plot(costs: Costs, outcomes: list[Outcome], best_s: float) -> str:
    """An SVG document: both formulas as curves, the simulation as circles, the best interval as a line."""
    low_s = min(outcomes[0].interval_s, best_s) / 1.3
    high_s = max(outcomes[-1].interval_s, best_s) * 1.3
    span = math.log(high_s / low_s)

    def x(interval_s: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(interval_s / low_s) / span

    def y(share: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - min(1.0, max(0.0, share)))

    def first_order(interval_s: float) -> float:
        lost_s = interval_s / 2 + costs.node_loss_share * costs.lag_loss_s(interval_s) + costs.mean_restart_s
        return 1 - costs.save_s / interval_s - lost_s / costs.mtbf_s

    def curve(name: str, share_of: list[float]) -> str:
        points = " ".join(f"{x(s):.1f},{y(share):.1f}" for s, share in zip(intervals, share_of, strict=True))
        return f'<polyline class="curve {name}" points="{points}"/>'

    intervals = [low_s * math.exp(span * index / POINTS) for index in range(POINTS + 1)]
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'role="img"><title>Efficiency over the interval between snapshots</title>',
        f'<style>{_STYLE}</style><rect width="{WIDTH}" height="{HEIGHT}"/>',
    ]
    for percent in range(0, 101, 20):
        at = y(percent / 100)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{percent} %</text>')
    for seconds, label in _TICKS_S.items():
        if low_s <= seconds <= high_s:
            parts.append(
                f'<line class="grid" x1="{x(seconds):.1f}" x2="{x(seconds):.1f}" y1="{TOP}" y2="{bottom}"/>'
                f'<text x="{x(seconds):.1f}" y="{bottom + 18}" text-anchor="middle">{label}</text>'
            )
    at = x(best_s)
    parts += [
        f'<line class="best" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}"/>',
        f'<text x="{at:.1f}" y="{TOP - 6}" text-anchor="middle">save every {best_s:,.0f} s</text>',
        curve("first", [first_order(interval) for interval in intervals]),
        curve("daly", [efficiency(costs, interval) for interval in intervals]),
        *(
            f'<circle class="point" r="4" cx="{x(outcome.interval_s):.1f}" cy="{y(outcome.simulated):.1f}"/>'
            for outcome in outcomes
        ),
        f'<text x="{LEFT}" y="18">share of useful work: circles are simulated</text>',
        f'<line class="curve daly" x1="{LEFT}" x2="{LEFT + 24}" y1="{HEIGHT - 14}" y2="{HEIGHT - 14}"/>',
        f'<text x="{LEFT + 30}" y="{HEIGHT - 10}">Daly 2006</text>',
        f'<line class="curve first" x1="{LEFT + 120}" x2="{LEFT + 144}" y1="{HEIGHT - 14}" y2="{HEIGHT - 14}"/>',
        f'<text x="{LEFT + 150}" y="{HEIGHT - 10}">first order (Young 1974)</text>',
        f'<text x="{right}" y="{HEIGHT - 10}" text-anchor="end">interval between snapshots</text>',
        "</svg>\n",
    ]
    return "\n".join(parts)
