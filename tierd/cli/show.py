"""`tierd show`: everything that is known of one checkpoint: its manifest, its files, its replicas, its markers."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from msgspec import UNSET

from tierd.catalog.selectable import selectable_replicas
from tierd.cli import daemon_http, options
from tierd.cli.console import age, metrics_line, print_json, print_note, print_result, size, table
from tierd.cli.note import NotedCheckpoint, note_line, notes_of
from tierd.cli.opened_tiers import open_tiers
from tierd.cli.options import parse_query, settings_of
from tierd.errors import BadConfig, NotFound
from tierd.format.ids import AUTO, MEMORY, CheckpointId
from tierd.format.text import counted
from tierd.lifecycle.selection import select
from tierd.status.checkpoint_report import (
    CheckpointReport,
    CheckpointRow,
    checkpoint_report,
    checkpoint_rows,
    read_diagnosis,
)
from tierd.status.report import tiers_text

NOT_WHOLE = "the other ranks' shards are on other nodes"
OTHER_PARTS = "the other nodes adopt the rest"


async def show(
    context: typer.Context,
    run: Annotated[str, typer.Argument(metavar="RUN", help="The name of a run: `tierd runs` lists them.")],
    step: Annotated[str, typer.Argument(metavar="STEP", help="A number, latest, or milestone:NAME.")] = "latest",
    generation: options.GenerationNumber = None,
    place: options.From = None,
    json: options.Json = False,
) -> int:
    """Show everything about one checkpoint."""
    if "/" in run:
        raise BadConfig(f"show {run}: that cannot name a run", hint=f"tierd show {run.replace('/', ' ', 1)}")
    query = parse_query(run, step, generation, tier=place or AUTO)
    settings = settings_of(context)
    daemon = None if place else daemon_http.find_or_none(settings.config(), is_fresh=True)
    rows = daemon.rows() if daemon else []
    health = {row.id: row.healthy for row in rows if MEMORY in row.tiers}
    async with open_tiers(settings, place=place) as tiers:
        code = tiers.check_reachable()
        tiers.report_unreadable(query)
        rows = rows or checkpoint_rows(tiers.catalog, query.run)
        parts = [row for row in rows if row.parts is not UNSET and not row.tiers and query.matches(row.id)]
        part = max(parts, key=lambda row: row.id.recency, default=None)
        try:
            chosen = select(query, selectable_replicas(tiers.catalog, in_memory=health.keys(), health=health)).candidate
            checkpoint, whole_in = chosen.id, _counted(list(chosen.tiers), chosen.id, rows if daemon else [])
            if part is not None and part.id.recency > checkpoint.recency:
                print_note(f"tierd: newer, and no tier here has it whole: {part.id} {tiers_text([], part.parts)}")
        except NotFound:
            if part is None:
                raise
            checkpoint, whole_in = part.id, list[str]()
        entry = tiers.catalog.get(checkpoint)
        if entry is not None:
            diagnosis = await read_diagnosis(entry, tiers.by_name)
            report = checkpoint_report(tiers.catalog, entry, whole_in, diagnosis)
        elif daemon is not None:
            report = daemon.checkpoint(checkpoint)  # in memory only, not persisted yet
        else:
            raise NotFound(f"show {checkpoint}: it has been deleted", hint="`tierd ls` shows what there is")
        noted = await notes_of(tiers, checkpoint)
    if json:
        print_json(msgspec.to_builtins(report) | {"tags": noted.tags, "notes": noted.notes})
    else:
        _print(report, noted)
    return code


def _counted(tiers: list[str], checkpoint: CheckpointId, rows: list[CheckpointRow]) -> list[str]:
    """Those of `tiers` that count for the daemon, of which `rows` are: only it knows which replicas are damaged."""
    counted_in = next((row.tiers for row in rows if row.id == checkpoint), tiers)
    if others := [tier for tier in tiers if tier not in counted_in]:
        where = " and ".join(others)
        print_note(f"tierd: {checkpoint} in {where} does not count for the daemon: `tierd status` says why")
    return [tier for tier in tiers if tier in counted_in]


def _print(report: CheckpointReport, noted: NotedCheckpoint) -> None:
    manifest, parent, diagnosis = report.manifest, report.manifest.parent, report.diagnosis
    origin = f", from {parent.run} step {parent.step} generation {parent.generation}" if parent else ""
    lines = {
        "checkpoint": str(manifest.id),
        "step": manifest.step,
        "generation": f"{manifest.generation}{origin}",
        "sequence": f"{manifest.sequence}, counted from 1 in its run",
        "created": f"{manifest.created_at}, {age(manifest.created_at)} ago",
        "kind": manifest.kind,
        "nodes" if manifest.is_adopted and manifest.world_size > 1 else "ranks": manifest.world_size,
        "size": f"{size(manifest.size_bytes)} in {counted(len(manifest.files), 'file')}",
        "metrics": metrics_line(manifest.metrics) or "-",
        "tiers": ", ".join(report.tiers) or "none has it whole",
        "milestones": ", ".join(report.milestones) or "-",
        "tags": ", ".join(noted.tags) or "-",
        "healthy": f"{'yes' if diagnosis.healthy else 'NO'}: {diagnosis}" if diagnosis else "not examined",
        "architecture": manifest.architecture_hash or "-",
        "versions": ", ".join(f"{name} {number}" for name, number in manifest.versions.items()) or "-",
    }
    for key, value in lines.items():
        print_result(f"{key:<14}{value}")
    for note in noted.notes:
        print_result(f"{'note':<14}{note_line(note)}")
    for tier, part in ({} if report.parts is UNSET else report.parts).items():
        others = OTHER_PARTS if part.is_adopted is True else NOT_WHOLE
        print_result(f"{f'in {tier}':<14}only {part.whose}: {others}")
    print_result("")
    rows = [[file.name, str(file.size_bytes), str(len(file.chunks)), file.crc64nvme] for file in manifest.files]
    table(["FILE", "BYTES", "CHUNKS", "CRC64NVME"], rows, right=("BYTES", "CHUNKS"))
    print_note("`tierd verify --deep` reads every byte and compares it with these checksums")
