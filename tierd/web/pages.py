"""Renders the status pages: all runs, one run, one checkpoint. All text from outside is made printable and escaped."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from msgspec import UNSET

from tierd.format.ids import MEMORY, CheckpointId
from tierd.format.text import duration, printable, size
from tierd.status.checkpoint_report import CheckpointReport, CheckpointRow
from tierd.status.lifecycle_report import PlannedAction
from tierd.status.outlook import outlook
from tierd.status.report import RunReport, StatusReport
from tierd.web.timeline import LABEL_PX, LANE_PX, PLOT_PX, Timeline, timeline

# Read here, at the import: the event loop must not wait for a disk.
_TEMPLATES = {path.name: path.read_text(encoding="utf-8") for path in (Path(__file__).parent / "templates").iterdir()}
FILES = {path.name: path.read_bytes() for path in (Path(__file__).parent / "static").iterdir()}
TYPES = {".css": "text/css", ".js": "text/javascript"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
PICTURES_MAX = 5  # runs with a picture on the first page
RUNS_MAX = 30  # on the first page
ROWS_MAX = 200  # checkpoints in the table of a run
FILES_MAX = 200  # in the table of a checkpoint

Parents = Mapping[CheckpointId, CheckpointId | None]


def overview_page(status: StatusReport, rows: Sequence[CheckpointRow], parents: Parents) -> str:
    """All runs: what is wrong, what is safe where, what a loss would cost. Runs with trainers come first. `rows`: at
    least of those that are pictured."""
    runs = _shown_runs(status)
    pictures = {
        run.run: timeline([row for row in rows if row.run == run.run], tier_names(status), parents)
        for run in pictured(status)
    }
    costs = {
        "stall of a step at snapshot()": status.costs.stall,
        "from snapshot() to the commit in hot": status.costs.persist,
    }
    costs |= {f"copy to {tier}": cost for tier, cost in status.costs.replicate.items()}
    costs |= {f"restore from {tier}": cost for tier, cost in status.costs.restore.items()}
    title = f"tierd on {status.node}"
    left_out = len(status.runs) - len(runs)
    return _render(
        "overview.html",
        status=status,
        runs=runs,
        left_out=left_out,
        pictures=pictures,
        costs=costs.items(),
        outlook=outlook(status),
        title=title,
    )


def _shown_runs(status: StatusReport) -> list[RunReport]:
    return sorted(status.runs, key=lambda run: (not run.ranks_attached, run.run))[:RUNS_MAX]


def pictured(status: StatusReport) -> list[RunReport]:
    """The runs with a picture on the first page."""
    return _shown_runs(status)[:PICTURES_MAX]


def run_page(
    status: StatusReport, run: RunReport, rows: Sequence[CheckpointRow], parents: Parents, failures_max: int = 20
) -> str:
    """`rows`: of this run, newest first."""
    failures = [failure for failure in status.failures if failure.run in (None, run.run)][:failures_max]
    return _render(
        "run.html",
        status=status,
        run=run,
        rows=rows[:ROWS_MAX],
        left_out=max(0, len(rows) - ROWS_MAX),
        picture=timeline(rows, tier_names(status), parents),
        failures=failures,
        title=f"run {run.run}",
    )


def checkpoint_page(status: StatusReport, report: CheckpointReport, planned: Sequence[PlannedAction]) -> str:
    """`planned`: what the lifecycle does with it in each tier, and why."""
    manifest = report.manifest
    return _render(
        "checkpoint.html",
        status=status,
        report=report,
        manifest=manifest,
        planned=planned,
        files=manifest.files[:FILES_MAX],
        left_out=max(0, len(manifest.files) - FILES_MAX),
        commands=_commands(report),
        title=f"step {manifest.step} of {manifest.run}",
    )


def missing_page(status: StatusReport, what: str) -> str:
    return _render("missing.html", status=status, what=what, title="not found")


def tier_names(status: StatusReport) -> list[str]:
    return [MEMORY, *(tier.name for tier in status.tiers)]


def on_hot_disk(status: StatusReport) -> list[str]:
    """The cold tiers that are lost with hot's disk."""
    return [tier.name for tier in status.tiers if tier.is_on_hot_disk]


def _commands(report: CheckpointReport) -> list[tuple[str, str]]:
    """(what it does, the command to copy)"""
    manifest = report.manifest
    generation = f"--generation {manifest.generation}"  # a step may be of several
    which = f"--run {shlex.quote(manifest.run)} --step {manifest.step} {generation}"
    found = [("Everything about it", f"tierd show {shlex.quote(manifest.run)} {manifest.step} {generation}")]
    if report.tiers:
        target = shlex.quote(f"{manifest.run}-{manifest.step}")
        found = [("Restore it into a new directory", f"tierd restore {which} --to ./{target}"), *found]
    return found


def _render(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(values)


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.DictLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"size": size, "duration": duration}
    shared: dict[str, Any] = environment.globals
    shared |= {
        "UNSET": UNSET,
        "LABEL_PX": LABEL_PX,
        "LANE_PX": LANE_PX,
        "PLOT_PX": PLOT_PX,
        "tier_names": tier_names,
        "on_hot_disk": on_hot_disk,
        "height_of": height_of,
    }
    return environment


def _shown(value: object) -> object:
    """What a template prints. Markup is made by templates alone and is escaped already."""
    if isinstance(value, Markup):
        return value
    return printable(value) if isinstance(value, str) else value


def height_of(picture: Timeline) -> int:
    """The height of a picture in pixels."""
    plots = 1 + (picture.metric is not None)
    return plots * PLOT_PX + len(picture.lanes) * LANE_PX
