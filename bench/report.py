"""Writes the figures of docs/PERFORMANCE.md and its plot from what bench/all.py collected.

Only the text between the two markers of the page changes.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from rounds import ROOT

COLLECTED, PAGE, PLOT = "performance.json", "PERFORMANCE.md", "performance.svg"
BEGIN, END = "<!-- figures: `make bench` writes from here -->", "<!-- to here -->"
BAR, LEFT, RIGHT = 18, 250, 90


@dataclass(frozen=True)
class Goal:
    """One figure with its goal. `fact` is a part of the JSON line that holds the figure. The goal is a maximum unless
    `at_least`."""

    told: str
    limit: float
    bench: str
    fact: dict[str, str]
    key: str = "median"
    at_least: bool = False


GOALS = [
    Goal("stall / memory copy", 1.1, "snapshot", {"way": "tierd", "ratio": "stall / memory copy"}),
    Goal(
        "first stall / later ones",
        1.1,
        "snapshot",
        {"way": "tierd", "figure": "stall_s"},
        key="first / median",
    ),
    Goal(
        "durable rate after the stall / O_DIRECT rate",
        0.9,
        "snapshot",
        {"way": "tierd", "ratio": "durable rate after the stall / O_DIRECT rate"},
        at_least=True,
    ),
    Goal("stall / the best peer's", 1.0, "snapshot", {"way": "tierd", "ratio": "stall / the best peer's"}),
    Goal(
        "durable rate / the best peer's",
        2.0,
        "snapshot",
        {"way": "tierd", "ratio": "durable rate / the best peer's"},
        at_least=True,
    ),
    Goal("overlap: the call, s", 0.005, "time", {"way": "tierd, overlap", "figure": "call_s"}),
    Goal("overlap: added / memory copy", 1.0, "time", {"way": "tierd, overlap", "ratio": "added / memory copy"}),
    Goal(
        "memory restore / memory copy",
        0.8,
        "restore",
        {"way": "tierd: memory", "ratio": "rate / memory copy"},
        at_least=True,
    ),
    Goal(
        "hot restore / best raw read",
        0.9,
        "restore",
        {"way": "tierd: hot", "ratio": "rate / best raw read"},
        at_least=True,
    ),
    Goal("upload, CPU-s per GB", 0.6, "cold", {"way": "tierd", "direction": "up"}, key="cpu_s_per_gb"),
    Goal("upload, CPU / boto3's upload_file", 0.21, "cold", {"ratio": "up: tierd / boto3 upload_file"}, "cpu_s_per_gb"),
    Goal("upload, rate / s5cmd's", 1.0, "cold", {"ratio": "up: tierd / s5cmd cp"}, key="gb_s", at_least=True),
    Goal("daemon: ready after, s", 1.0, "daemon", {"way": "start until ready"}),
    Goal("daemon: idle, MB", 60.0, "daemon", {"way": "idle", "figure": "mb"}),
    Goal("daemon: idle, % of a core", 0.5, "daemon", {"way": "idle", "figure": "cpu_percent"}),
    Goal(
        "daemon: memory beside the slots, MB",
        256.0,
        "daemon",
        {"way": "persisting and replicating", "figure": "mb_beside_slots"},
    ),
    Goal("`tierd ls` of 10,000 checkpoints, s", 1.0, "daemon", {"way": "ls, 10,000 checkpoints", "figure": "s"}),
    Goal("stall, four nodes / one", 1.1, "nodes", {"figure": "ratio"}, key="stall"),
]


def figure(goal: Goal, collected: dict[str, Any]) -> float | None:
    of = next((one for name, one in collected.items() if name.split(",")[0].startswith(goal.bench)), {"facts": []})
    for line in of["facts"]:
        if goal.fact.items() <= line.items():
            if goal.key == "first / median":
                return line["first"] / line["median"]
            return line.get(goal.key)
    return None


def goals(collected: dict[str, Any]) -> list[str]:
    rows = ["| figure | goal | measured | |", "|---|---|---|---|"]
    for goal in GOALS:
        found = figure(goal, collected)
        side = "at least" if goal.at_least else "at most"
        reached = found is not None and (found >= goal.limit if goal.at_least else found <= goal.limit)
        shown, word = (
            ("", "not measured") if found is None else (f"{found:.3g}", "reached" if reached else "**missed**")
        )
        rows.append(f"| {goal.told} | {side} {goal.limit:g} | {shown} | {word} |")
    return rows


def page(collected: dict[str, Any]) -> str:
    lines = [*goals(collected), "", f"![stall and time to durable]({PLOT})"]
    for name, one in collected.items():
        lines += [
            "",
            f"### {name[0].upper()}{name[1:]}",
            "",
            f"`python bench/{' '.join(one['command'])}`, {one['seconds']} s.",
        ]
        lines += (
            [f"Left out: {one['failed'].splitlines()[-1]}"] if one["failed"] else ["", "```text", one["told"], "```"]
        )
    return "\n".join(lines)


def plot(collected: dict[str, Any]) -> str:
    """An SVG with one bar for each tool: how long training waited, and how long until the state was durable."""
    facts = collected.get("snapshot", {"facts": []})["facts"]
    median = {(one["way"], one["figure"]): one["median"] for one in facts if "figure" in one}
    bars = [(way.removeprefix("limit: "), value, value) for (way, figure), value in median.items() if figure == "s"]
    bars += [(way, value, median[way, "durable_s"]) for (way, figure), value in median.items() if figure == "stall_s"]
    scale = 500 / max((durable for _, _, durable in bars), default=1)
    height = BAR * len(bars) + 30
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + 500 + RIGHT}" height="{height}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
    ]
    for number, (name, stall, durable) in enumerate(bars):
        top = BAR * number + 4
        svg += [
            f'<text x="{LEFT - 8}" y="{top + 11}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{LEFT}" y="{top}" width="{durable * scale:.1f}" height="{BAR - 5}" fill="#b8cfe8"/>',
            f'<rect x="{LEFT}" y="{top}" width="{stall * scale:.1f}" height="{BAR - 5}" fill="#c0392b"/>',
            f'<text x="{LEFT + 4 + durable * scale:.1f}" y="{top + 11}">{stall:.2f} / {durable:.2f} s</text>',
        ]
    svg.append(
        f'<text x="{LEFT}" y="{height - 8}">red: training waits; blue: until durable; medians of one run</text></svg>'
    )
    return "\n".join(svg) + "\n"


def write(docs: Path, collected: dict[str, Any]) -> None:
    path = docs / PAGE
    text = path.read_text(encoding="utf-8")
    between = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    if not between.search(text):
        raise SystemExit(f"{path} has no markers for the figures: {BEGIN} … {END}")
    path.write_text(between.sub(lambda _: f"{BEGIN}\n\n{page(collected)}\n\n{END}", text), encoding="utf-8")
    (docs / PLOT).write_text(plot(collected), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the page of figures again from docs/performance.json.")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    args = parser.parse_args()
    write(args.docs, json.loads((args.docs / COLLECTED).read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
