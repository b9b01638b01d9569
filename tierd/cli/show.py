"""`tierd show`: everything that is known of one checkpoint: its manifest, its files, its replicas, its markers."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from tierd.cli import daemon_http, options
from tierd.cli.console import age, metrics_line, print_json, print_note, print_result, size, table
from tierd.cli.opened_tiers import PARTIAL, open_tiers
from tierd.cli.options import Settings, parse_query, settings_of
from tierd.errors import NotFound
from tierd.lifecycle.selection import AUTO, CheckpointQuery, select
from tierd.report import CheckpointReport


def show(
    context: typer.Context,
    run: Annotated[str, typer.Argument(metavar="RUN")],
    step: Annotated[str, typer.Argument(metavar="STEP", help="A number, latest, or milestone:NAME.")] = "latest",
    generation: options.GenerationNumber = None,
    place: options.From = None,
    json: options.Json = False,
) -> None:
    """Show everything about one checkpoint."""
    query = parse_query(run, step, generation, tier=place or AUTO)
    report, is_complete = asyncio.run(_report(settings_of(context), place, query))
    if json:
        print_json(report)
    else:
        _print(report)
    if not is_complete:
        raise typer.Exit(PARTIAL)


async def _report(settings: Settings, place: str | None, query: CheckpointQuery) -> tuple[CheckpointReport, bool]:
    """(report, whether every tier could be listed)"""
    daemon = None if place else daemon_http.find_or_none(settings.config())
    health = daemon.health_in_memory() if daemon else {}
    async with open_tiers(settings, place=place) as tiers:
        is_complete = tiers.check_reachable()
        tiers.report_unreadable(query)
        chosen = select(query, tiers.catalog.inventory(in_memory=health.keys(), health=health)).candidate
        entry = tiers.catalog.get(chosen.id)
        if entry is None and daemon is not None:
            return daemon.checkpoint(chosen.id), is_complete  # in memory only, not persisted yet
        if entry is None:
            raise NotFound(f"show {chosen.id}: it has been deleted", hint="`tierd ls` shows what there is")
        diagnosis = None
        for tier, is_healthy in entry.diagnoses.items():
            diagnosis = await tiers.by_name[tier].diagnosis(entry.id, is_healthy=is_healthy)
        report = CheckpointReport(
            manifest=entry.manifest,
            tiers=list(chosen.tiers),
            milestones=sorted(entry.all_milestones),
            healthy=entry.healthy,
            diagnosis=diagnosis,
        )
        return report, is_complete


def _print(report: CheckpointReport) -> None:
    manifest, parent, diagnosis = report.manifest, report.manifest.parent, report.diagnosis
    origin = f", from {parent.run} step {parent.step} generation {parent.generation}" if parent else ""
    lines = {
        "checkpoint": str(manifest.id),
        "step": manifest.step,
        "generation": f"{manifest.generation}{origin}",
        "sequence": f"{manifest.sequence}, counted from 1 in its run",
        "created": f"{manifest.created_at}, {age(manifest.created_at)} ago",
        "kind": manifest.kind,
        "ranks": manifest.world_size,
        "size": f"{size(manifest.size_bytes)} in {len(manifest.files)} files",
        "metrics": metrics_line(manifest.metrics) or "-",
        "tiers": ", ".join(report.tiers),
        "milestones": ", ".join(report.milestones) or "-",
        "healthy": f"{'yes' if diagnosis.healthy else 'NO'}: {diagnosis}" if diagnosis else "not examined",
        "architecture": manifest.architecture_hash or "-",
        "versions": ", ".join(f"{name} {number}" for name, number in manifest.versions.items()) or "-",
    }
    for key, value in lines.items():
        print_result(f"{key:<14}{value}")
    print_result("")
    rows = [[file.name, str(file.size_bytes), str(len(file.chunks)), file.crc64nvme] for file in manifest.files]
    table(["FILE", "BYTES", "CHUNKS", "CRC64NVME"], rows, right=("BYTES", "CHUNKS"))
    print_note("`tierd verify --deep` reads every byte and compares it with these checksums")
