"""`tierd status`: what is safe, where, how old, and the command that brings it back. The first thing on-call types.

With no daemon the tiers themselves are looked at, the same answer is given from them, and the exit code is 13.
"""

from __future__ import annotations

import asyncio
import shlex

import typer

from tierd import __version__
from tierd.cli import daemon_http, options
from tierd.cli.console import age_s, answer, answer_json, duration, size, table
from tierd.cli.daemon_http import Held, RunStatus, Status, TierStatus
from tierd.cli.opened_tiers import Places, Settings, look, settings_of
from tierd.config import Config
from tierd.errors import DaemonUnreachable
from tierd.format.ids import Run
from tierd.format.manifest import Manifest
from tierd.workers.reaper import halted


def status(context: typer.Context, json: options.Json = False) -> None:
    """Say what is restorable, from where, and what stands still."""
    settings = settings_of(context)
    config = settings.config()
    try:
        running = daemon_http.find(config)
    except DaemonUnreachable as error:
        found = asyncio.run(_look(settings, config))
        if json:
            answer_json(found)
        else:
            answer("no daemon: nothing is taking snapshots here; what follows was read from the tiers just now\n")
            _print(found, settings)
        raise error
    if json:
        answer_json(running.status_json)
    else:
        answer(_daemon_line(running.status) + "\n")
        _print(running.status, settings)


async def _look(settings: Settings, config: Config) -> Status:
    async with look(settings) as places:
        catalog = places.catalog
        return Status(
            version=__version__,
            node=config.daemon.node,
            pid=None,
            uptime_s=None,
            is_ready=False,
            halted=halted(catalog),
            runs=[_run_status(places, run) for run in catalog.runs()],
            tiers=[await _tier_status(places, name) for name in places.tiers],
        )


def _run_status(places: Places, run: Run) -> RunStatus:
    newest = {name: places.catalog.newest(run, name) for name in places.tiers}
    return RunStatus(
        run=run,
        generation=places.catalog.generation_max(run),
        tiers={name: _held(manifest) for name, manifest in newest.items() if manifest},
        unhealthy_steps=sorted(entry.id.step for entry in places.catalog.entries(run) if entry.healthy is False),
    )


def _held(manifest: Manifest) -> Held:
    return Held(
        step=manifest.step,
        generation=manifest.generation,
        created_at=manifest.created_at,
        age_s=age_s(manifest.created_at),
    )


async def _tier_status(places: Places, name: str) -> TierStatus:
    known = places.catalog.tiers[name]
    is_there = known.is_known and name not in places.absent
    return TierStatus(
        name=name,
        url=places.tiers[name].store.url,
        is_known=known.is_known,
        error="no such directory" if name in places.absent else known.error or None,
        checkpoints=sum(name in entry.tiers for entry in places.catalog.entries()),
        used_bytes=known.used_bytes if known.is_known else None,
        free_bytes=await places.tiers[name].store.free_bytes() if is_there else None,
    )


# ── for people ──


def _daemon_line(found: Status) -> str:
    ready = "ready" if found.is_ready else "not ready yet"
    up = f", up {duration(found.uptime_s)}" if found.uptime_s is not None else ""
    return f"tierd {found.version} on {found.node}, pid {found.pid}{up}, {ready}"


def _print(found: Status, settings: Settings) -> None:
    if not found.runs:
        answer("no run is known")
    for run in found.runs:
        _print_run(run, settings)
    table(
        ["TIER", "CHECKPOINTS", "USED", "FREE", "WHERE"],
        [_tier_cells(tier) for tier in found.tiers],
        right=("CHECKPOINTS", "USED", "FREE"),
    )
    for queue in found.queues:
        if queue.checkpoints:
            waited = "" if queue.oldest_age_s is None else f", the oldest for {duration(queue.oldest_age_s)}"
            answer(f"waiting for {queue.tier}: {queue.checkpoints}{waited}")
    if slots := [f"{count} {state}" for state, count in sorted(found.slots.items()) if count]:
        answer("slots: " + ", ".join(slots))
    for reason in found.halted:
        answer(f"DELETION HALTED: {reason}")
    for failure in found.failures[:5]:
        answer(f"failure {failure.at} {failure.stage} {failure.run or ''} {failure.step or ''}: {failure.message}")
        if failure.hint:
            answer(f"  hint: {failure.hint}")


def _print_run(run: RunStatus, settings: Settings) -> None:
    ranks = "" if run.ranks_attached is None else f", {run.ranks_attached} of {run.world_size or '?'} ranks attached"
    answer(f"{run.run}  generation {run.generation}{ranks}{_ending(run)}")
    held_in = {tier: held for tier, held in run.tiers.items() if held}
    for tier, held in held_in.items():
        ago = "" if held.age_s is None else f"{duration(held.age_s)} ago"
        answer(f"  {tier:<10} step {held.step:<10} generation {held.generation:<6} {ago}")
    if run.unhealthy_steps:
        answer(f"  UNHEALTHY: step {', '.join(map(str, run.unhealthy_steps))}: numbers that are not finite")
    if not held_in:
        answer("  nothing restorable")
    else:
        answer(f"  get it back:  {restore_command(run, settings)}")
    answer("")


def _ending(run: RunStatus) -> str:
    """Only the daemon knows it: how the trainers are, or how they ended."""
    meaning = {"stopped": "stopped: start it again", "halted": "HALTED: a person must decide"}
    told = meaning.get(run.state or "", run.state or "")
    return (f", {told}" if told else "") + (f" ({run.reason})" if run.reason else "")


def restore_command(run: RunStatus, settings: Settings) -> str:
    """The command that restores the newest checkpoint of the run, as it can be pasted."""
    newest = max((held for held in run.tiers.values() if held), key=lambda held: (held.generation, held.step))
    config = ["--config", settings.config_file] if settings.config_file else []
    which = ["--run", run.run, "--step", str(newest.step), "--generation", str(newest.generation)]
    return shlex.join(["tierd", *config, "restore", *which, "--to", f"./restored-{run.run}-{newest.step}"])


def _tier_cells(tier: TierStatus) -> list[str]:
    trouble = f"  {'NOT REACHABLE' if not tier.is_known else 'note'}: {tier.error}" if tier.error else ""
    return [
        tier.name,
        str(tier.checkpoints),
        "" if tier.used_bytes is None else size(tier.used_bytes),
        "" if tier.free_bytes is None else size(tier.free_bytes),
        tier.url + trouble,
    ]
