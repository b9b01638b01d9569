"""Routes of the status pages: all runs, one run, one checkpoint, and the static files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import PurePath

from aiohttp import web

from tierd.api.operator import Operator
from tierd.format.ids import CheckpointId, Run, is_run
from tierd.web import pages


class WebPages:
    """Each answer is made from the operator's reports at the moment of the request."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/", self._overview)
        app.router.add_get("/runs/{run}", self._run)
        app.router.add_get("/runs/{run}/{name}", self._checkpoint)
        app.router.add_get("/static/{file}", self._static)

    async def _overview(self, _: web.Request) -> web.Response:
        status = await self._operator.status()
        runs = [Run(report.run) for report in pages.pictured(status)]
        rows = [row for run in runs for row in await self._operator.rows(run)]
        parents = {child: parent for run in runs for child, parent in self._operator.parents(run).items()}
        return await _page(pages.overview_page, status, rows, parents)

    async def _run(self, request: web.Request) -> web.Response:
        name = request.match_info["run"]
        status = await self._operator.status(nodes_of=name)
        report = status.find_run(name)
        if report is None:
            return await _page(pages.missing_page, status, f"run {name}", code=404)
        run = Run(name)
        rows = await self._operator.rows(run)
        return await _page(pages.run_page, status, report, rows, self._operator.parents(run))

    async def _checkpoint(self, request: web.Request) -> web.Response:
        run, name = request.match_info["run"], request.match_info["name"]
        status = await self._operator.status()
        report = await self._operator.report(run, name) if is_run(run) else None
        if report is None:
            return await _page(pages.missing_page, status, f"checkpoint {run}/{name}", code=404)
        checkpoint: CheckpointId = report.manifest.id
        planned = self._operator.planned(checkpoint)
        return await _page(pages.checkpoint_page, status, report, planned)

    async def _static(self, request: web.Request) -> web.Response:
        name = request.match_info["file"]
        if name not in pages.FILES:
            raise web.HTTPNotFound
        kind = pages.TYPES[PurePath(name).suffix]
        return web.Response(body=pages.FILES[name], content_type=kind, charset="utf-8", headers=pages.HEADERS)


async def _page(render: Callable[..., str], *reports: object, code: int = 200) -> web.Response:
    """Rendered in a thread: with many checkpoints it takes longer than the event loop should stand still."""
    html = await asyncio.to_thread(render, *reports)
    return web.Response(text=html, status=code, content_type="text/html", headers=pages.HEADERS)
