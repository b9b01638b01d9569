"""Asks all nodes of a run what they have of it, for `tierd status`.

Each node is asked at most once in REUSE_S, however often the status is requested. A node that does not answer is
reported as such.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime

from tierd.context import DaemonContext
from tierd.format.ids import Run
from tierd.format.peers import HeldPart, NodeAddress, NodeParts
from tierd.format.text import printable
from tierd.status.node_reports import NewestPart, NodeReport, age_s
from tierd.tiers.node_parts import ask_nodes
from tierd.workers.inventory import durable_parts

REUSE_S = 2.0


class RosterReader:
    """`copy_lag_s`: of this node."""

    def __init__(self, context: DaemonContext, copy_lag_s: Callable[[Run], float | None]) -> None:
        self._context = context
        self._copy_lag_s = copy_lag_s
        self._asked: dict[Run, tuple[float, asyncio.Task[list[NodeReport]]]] = {}

    async def read(self, run: Run) -> list[NodeReport] | None:
        """Sorted by rank; None if the trainers of the newest start have sent no roster yet, or are on other nodes: a
        node of the one before may have gone, and its ranks may be on another one."""
        roster = self._context.rosters.get(run)
        if roster is None or roster.generation < self._context.memory.generation(run):
            return None
        if self._context.is_continued_elsewhere(run, roster.generation):
            return None
        now_s = self._context.monotonic_s()
        asked_s, task = self._asked.get(run, (0.0, None))
        if task is None or now_s - asked_s > REUSE_S:
            self._asked = {run: asked for run, asked in self._asked.items() if run in self._context.rosters}
            task = asyncio.create_task(self._ask(run, roster.nodes))
            self._asked[run] = now_s, task
        return await asyncio.shield(task)  # others may wait for it, too

    async def _ask(self, run: Run, nodes: list[NodeAddress]) -> list[NodeReport]:
        others = self._context.other_nodes(run)
        answers = await ask_nodes(run, others, needs_tls=self._context.config.peers.tls, only_newest=True)
        answered = {node.ranks[0]: answer for node, answer in zip(others, answers, strict=True)}
        here = durable_parts(self._context, run, copy_lag_s=self._copy_lag_s(run), count=1)
        reports = [
            _report(node, answered.get(node.ranks[0], here), self._context.now(), is_here=node not in others)
            for node in sorted(nodes, key=lambda node: node.ranks)
        ]
        _compare(reports)
        return reports


def _report(node: NodeAddress, answer: NodeParts | Exception, now: datetime, *, is_here: bool) -> NodeReport:
    report = NodeReport(ranks=node.ranks, address=node.peer.address if node.peer else "", is_here=is_here)
    if isinstance(answer, NodeParts):
        report.persisted, report.copied = _newest(answer.parts, now), _newest(answer.copies, now)
        report.copy_lag_s = answer.copy_lag_s
    else:
        report.problem = printable(str(answer), 200)
    return report


def _newest(parts: list[HeldPart], now: datetime) -> NewestPart | None:
    if not parts:
        return None
    part = max(parts, key=lambda part: (part.generation, part.step))
    age = age_s(part.created_at, now)
    fields = {name: getattr(part, name) for name in ("step", "generation", "ranks", "world_size")}
    return NewestPart(**fields, created_at=printable(part.created_at, 40), age_s=age and round(age, 1))


def _compare(reports: list[NodeReport]) -> None:
    newest = max((_place(report.persisted) for report in reports), default=_place(None))
    for report in reports:
        if not report.problem and newest != _place(None):
            report.lacks_part = _place(report.persisted) < newest
            report.lacks_copy = report.copy_lag_s is not None and _place(report.copied) < newest


def _place(part: NewestPart | None) -> tuple[int, int]:
    return (part.generation, part.step) if part is not None else (0, -1)
