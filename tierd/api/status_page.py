"""The status page `/` of the daemon: plain tables, no script, nothing loaded from elsewhere."""

from __future__ import annotations

import html

from msgspec import UNSET

from tierd.format.text import printable, size
from tierd.lifecycle.selection import MEMORY
from tierd.status.report import FailureReport, StatusReport


def render(status: StatusReport) -> str:
    tiers = [MEMORY, *(tier.name for tier in status.tiers)]
    runs: list[list[str]] = []
    for run in status.runs:
        state = f"{run.state or 'not seen'}{': ' if run.reason else ''}{run.reason}"
        ranks = f"{run.ranks_attached} of {run.world_size}" if run.world_size else "none"
        cells = [run.run, str(run.generation), state, ranks]
        for tier in tiers:
            newest = run.tiers.get(tier)
            age = f", {newest.age_s:.0f} s ago" if newest and newest.age_s is not None else ""
            part = run.nodes.parts.get(tier) if run.nodes is not UNSET else None
            cells.append(f"step {newest.step}{age}" if newest else f"step {part.step}: {part}" if part else "none")
        runs.append([*cells, ", ".join(map(str, run.unhealthy_steps))])
    tier_rows = [
        [
            tier.name,
            tier.url,
            "known" if tier.is_known else f"not known: {tier.error}",
            "unknown" if tier.checkpoints is None else str(tier.checkpoints),
            "" if tier.used_bytes is None else size(tier.used_bytes),
            "" if tier.free_bytes is None else size(tier.free_bytes),
        ]
        for tier in status.tiers
    ]
    queues = [
        [
            queue.tier,
            str(queue.checkpoints),
            f"{queue.oldest_age_s:.0f} s",
            queue.copying or "",
            "" if queue.copy_s is None else f"{queue.copy_s:.0f} s",
            "" if queue.last_copy_age_s is None else f"{queue.last_copy_age_s:.0f} s ago",
            ", ".join(f"{count} {reason}" for reason, count in sorted(queue.given_up.items())),
        ]
        for queue in status.queues
    ]
    queue_heads = ["to", "checkpoints", "oldest", "copying", "a copy takes", "last copy", "given up"]
    watch_heads = ["folder", "preset", "run", "adopted", "pending", "newest step", "holder", "problems"]
    watches = [
        [
            watch.path,
            watch.preset,
            watch.run,
            str(watch.adopted),
            str(watch.pending),
            "" if watch.newest_step is None else str(watch.newest_step),
            watch.holder or "this node",
            "; ".join(watch.problems),
        ]
        for watch in status.watches
    ]
    failures = [[one.at, _times(one), one.stage, one.kind, one.message, one.hint] for one in status.failures]
    wrong = [[one.severity, one.message, one.command, f"RUNBOOK.md#{one.runbook}", one.alert] for one in status.alarms]
    return (
        "<!doctype html><meta charset=utf-8><meta http-equiv=refresh content=5><title>tierd</title>"
        "<style>body{font:15px system-ui;margin:2em;max-width:75em}table{border-collapse:collapse;margin:0 0 2em}"
        "td,th{border:1px solid #bbb;padding:.3em .7em;text-align:left}</style>"
        f"<h1>tierd on {_cell(status.node)}</h1><p>version {status.version}, up "
        f"{status.uptime_s:.0f} s; deletion halted: {_cell('; '.join(status.halted) or 'no')}</p>"
        + _table("What is wrong", ["severity", "what", "command", "section", "alert"], wrong)
        + _table("Newest restorable step", ["run", "generation", "state", "ranks", *tiers, "unhealthy steps"], runs)
        + _table("Tiers", ["tier", "where", "listing", "checkpoints", "used", "free"], tier_rows)
        + _table("Still to be copied", queue_heads, queues)
        + (_table("Watched folders", watch_heads, watches) if watches else "")
        + _table("Failures, newest first", ["at", "how often", "stage", "kind", "what", "hint"], failures)
    )


def _times(failure: FailureReport) -> str:
    return f"{failure.count} times since {failure.first_at}" if failure.count > 1 else "once"


def _table(title: str, heads: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{_cell(heading)}" for heading in heads)
    body = "".join("<tr>" + "".join(f"<td>{_cell(cell)}" for cell in row) for row in rows)
    return f"<h2>{_cell(title)}</h2><table><tr>{head}{body or '<tr><td>none'}</table>"


def _cell(text: str) -> str:
    return html.escape(printable(text))
