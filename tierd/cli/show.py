"""`tierd show`: everything that is known of one checkpoint: its manifest, its files, its replicas, its markers."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
import typer

from tierd.cli import daemon_http, options
from tierd.cli.console import age, answer, answer_json, metrics_line, say, size, table
from tierd.cli.opened_tiers import PARTIAL, Settings, look, settings_of
from tierd.cli.selection import Wanted, candidates, choose, wanted
from tierd.errors import NotFound
from tierd.format.health import Diagnosis
from tierd.format.ids import checkpoint_id

Facts = dict[str, Any]


def show(
    context: typer.Context,
    run: Annotated[str, typer.Argument(metavar="RUN")],
    step: Annotated[str, typer.Argument(metavar="STEP", help="A number, latest, or milestone:NAME.")] = "latest",
    generation: options.GenerationNumber = None,
    place: options.From = None,
    json: options.Json = False,
) -> None:
    """Show everything about one checkpoint."""
    facts, is_whole = asyncio.run(_facts(settings_of(context), place, wanted(run, step, generation)))
    if json:
        answer_json(facts)
    else:
        _print(facts)
    if not is_whole:
        raise typer.Exit(PARTIAL)


async def _facts(settings: Settings, place: str | None, wish: Wanted) -> tuple[Facts, bool]:
    running = None if place else daemon_http.find_or_none(settings.config())
    in_memory = running.in_memory() if running else {}
    async with look(settings, place=place) as places:
        is_whole = places.check_reachable()
        places.tell_unreadable(wish)
        chosen = choose(wish, candidates(places.catalog, in_memory), place or "any tier")
        entry = places.catalog.get(chosen.id)
        if entry is None and running is not None:
            return running.checkpoint(chosen.id), is_whole  # in memory only, not persisted yet
        if entry is None:
            raise NotFound(f"show {chosen.id}: it is gone", hint="`tierd ls` shows what there is")
        diagnosis = None
        for tier, is_healthy in entry.diagnoses.items():
            diagnosis = await places.tiers[tier].diagnosis(entry.id, is_healthy=is_healthy)
        facts: Facts = {
            "manifest": msgspec.to_builtins(entry.manifest),
            "tiers": list(chosen.tiers),
            "milestones": sorted(entry.all_milestones),
            "healthy": entry.healthy,
            "diagnosis": msgspec.to_builtins(diagnosis),
        }
        return facts, is_whole


def _health(facts: Facts) -> str:
    if facts["healthy"] is None:
        return "not examined"
    diagnosis = msgspec.convert(facts["diagnosis"], Diagnosis)
    return f"{'yes' if diagnosis.healthy else 'NO'}: {diagnosis}"


def _print(facts: Facts) -> None:
    manifest, tiers = facts["manifest"], facts["tiers"]
    checkpoint = checkpoint_id(manifest["run"], manifest["step"], manifest["generation"])
    parent = manifest["parent"]
    came_from = f"{parent['run']} step {parent['step']} generation {parent['generation']}" if parent else "-"
    lines = {
        "checkpoint": str(checkpoint),
        "step": manifest["step"],
        "generation": f"{manifest['generation']}, from {came_from}" if parent else manifest["generation"],
        "sequence": f"{manifest['sequence']}, counted from 1 in its run",
        "created": f"{manifest['created_at']}, {age(manifest['created_at'])} ago",
        "kind": manifest["kind"],
        "ranks": manifest["world_size"],
        "size": f"{size(sum(one['size_bytes'] for one in manifest['files']))} in {len(manifest['files'])} files",
        "metrics": metrics_line(manifest["metrics"]) or "-",
        "tiers": ", ".join(tiers),
        "milestones": ", ".join(facts["milestones"]) or "-",
        "healthy": _health(facts),
        "architecture": manifest["architecture_hash"] or "-",
        "versions": ", ".join(f"{name} {number}" for name, number in manifest["versions"].items()) or "-",
    }
    for key, value in lines.items():
        answer(f"{key:<14}{value}")
    answer("")
    rows = [
        [one["name"], str(one["size_bytes"]), str(len(one["chunks"])), one["crc64nvme"]] for one in manifest["files"]
    ]
    table(["FILE", "BYTES", "CHUNKS", "CRC64NVME"], rows, right=("BYTES", "CHUNKS"))
    say("`tierd verify --deep` reads every byte and compares it with these checksums")
