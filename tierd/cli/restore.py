"""`tierd restore`: one checkpoint out of any tier into a directory, every chunk checked on the way.

Needs no daemon, but for the memory tier. What a replica cannot give is told, and comes from the next tier that has the
checkpoint; the directory appears whole and verified, or not at all. Broken off, the same command goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from tierd.catalog import MEMORY
from tierd.cli import daemon_http, options
from tierd.cli.console import answer, answer_json, duration, say, size
from tierd.cli.opened_tiers import Places, Settings, check_one_place, look, settings_of
from tierd.cli.partial_restore import Part, bring_part
from tierd.cli.replicas import Replicas
from tierd.cli.selection import Candidate, Wanted, candidates, choose, wanted
from tierd.config import Config
from tierd.errors import BadConfig, Corrupt, DaemonUnreachable, NotFound, TierUnreachable, Unhealthy
from tierd.format.ids import CheckpointId
from tierd.format.manifest import Manifest
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.tier import ReadableTier, Tier
from tierd.transfer.atomic_output import AtomicOutput, atomic_output, check_target
from tierd.transfer.fetch import Fetch, partial_keys

AUTO = "auto"


class Restored(msgspec.Struct, kw_only=True):
    """What `tierd restore --json` prints. `tier`: the last that was needed; `given_bytes`: what each gave.
    `resumed_bytes`: what an earlier attempt had left. `passed_over`: tiers that could not give all of it, and why."""

    run: str
    step: int
    generation: int
    tier: str
    to: str
    size_bytes: int
    seconds: float
    bytes_per_s: float
    is_verified: bool
    is_whole: bool
    given_bytes: dict[str, int]
    resumed_bytes: int
    passed_over: dict[str, str]


def restore(
    context: typer.Context,
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="A new or empty directory.")],
    tier: options.SourceTier = AUTO,
    run: options.RunName = None,
    step: options.StepName = "latest",
    generation: options.GenerationNumber = None,
    place: options.From = None,
    allow_unhealthy: options.AllowUnhealthy = False,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="GLOB", help="Only tensors whose names fit, as 'model.*'; may be repeated."),
    ] = None,
    rank: Annotated[int | None, typer.Option("--rank", metavar="N", min=0, help="Only the shard of that rank.")] = None,
    json: options.Json = False,
) -> None:
    """Copy a checkpoint, or a part of it, into a directory, verified."""
    settings = settings_of(context)
    target = target_of(to, tier, place)
    wish = wanted(run, step, generation)
    part = Part(only=tuple(only or ()), rank=rank) if only or rank is not None else None
    restored = asyncio.run(bring(settings, wish, tier, place, target, part=part, allow_unhealthy=allow_unhealthy))
    if json:
        answer_json(restored)
    else:
        what = "restored" if restored.is_whole else "restored a part of"
        resumed = f", {size(restored.resumed_bytes)} of it there before" if restored.resumed_bytes else ""
        answer(
            f"{what} {restored.run} step {restored.step} (generation {restored.generation}) from "
            f"{' and '.join(restored.given_bytes) or restored.tier} to {restored.to}: {size(restored.size_bytes)} in "
            f"{duration(restored.seconds)}, {size(restored.bytes_per_s)}/s{resumed}, verified"
        )


def target_of(to: Path, tier: str, place: str | None) -> Path:
    """Where `--to` leads, which must be new or empty."""
    check_one_place(place, None if tier == AUTO else tier)
    target = to.absolute().parent.resolve() / to.absolute().name if not to.is_dir() else to.resolve()
    check_target(target)
    return target


@dataclass(frozen=True, slots=True)
class Making:
    """What is made of a restored checkpoint and appears at the target in its place.

    `make` is given its folder, and where to work: it returns the durable file or folder to publish. `extra_share` is
    the room for that, as a share of the checkpoint.
    """

    make: Callable[[Path, Manifest, Path], Awaitable[Path]]
    extra_share: float = 1.0


async def bring(
    settings: Settings,
    wish: Wanted,
    tier: str,
    place: str | None,
    target: Path,
    *,
    making: Making | None = None,
    part: Part | None = None,
    allow_unhealthy: bool = False,
) -> Restored:
    """The wanted checkpoint, verified, at the target; or what is made of it, or a part of it."""
    config = None if place else settings.config()
    in_memory = _in_memory(config, tier) if config else {}
    only = None if tier in (AUTO, MEMORY) else tier
    async with look(settings, place=place, only=only) as places:
        if tier != MEMORY:
            places.check_reachable()
        where = place or ("any tier" if tier == AUTO else tier)
        chosen = await _choose(wish, tier, places, in_memory, where, allow_unhealthy=allow_unhealthy)
        _check_place(chosen.id, target, config, is_checkpoint=making is None and part is None)
        async with Replicas(chosen, places, config) as replicas:
            return await _land(replicas, target, making, part)


def _in_memory(config: Config, tier: str) -> dict[CheckpointId, dict[str, Any]]:
    """What the memory tier holds: asked for by name it must answer, otherwise it may be absent."""
    if tier not in (AUTO, MEMORY):
        return {}
    try:
        return daemon_http.find(config).in_memory()
    except DaemonUnreachable:
        if tier == MEMORY:
            raise
        return {}


async def _choose(
    wish: Wanted,
    tier: str,
    places: Places,
    in_memory: dict[CheckpointId, dict[str, Any]],
    where: str,
    *,
    allow_unhealthy: bool,
) -> Candidate:
    """The newest restorable checkpoint that fits. Tells of a newer one that is there but cannot be read."""
    among = candidates(places.catalog, in_memory)
    if tier != AUTO:
        among = [replace(one, tiers=(tier,)) for one in among if tier in one.tiers]
    if not allow_unhealthy:
        among = _healthy(wish, among, where)
    unreadable = {at: why for at, why in places.catalog.unreadable().items() if wish.fits(at[1])}
    try:
        chosen = choose(wish, among, where)
    except NotFound as error:
        for (name, checkpoint), why in unreadable.items():
            await places.tiers[name].manifest(checkpoint)  # raises what is wrong with it, where that is the manifest
            raise Corrupt(why, hint="another tier may have it: `tierd status`") from error
        if missing := places.unreachable:
            raise TierUnreachable(
                f"{error.message}; {', '.join(missing)} cannot be looked at", hint="it may be there: try again later"
            ) from error
        raise
    for (_, checkpoint), why in unreadable.items():
        if checkpoint.run == chosen.id.run and checkpoint.recency >= chosen.id.recency:
            say(f"tierd: passed over: {why}")
    return chosen


def _healthy(wish: Wanted, among: list[Candidate], where: str) -> list[Candidate]:
    """Without those whose numbers are not all finite; it says so. Raises Unhealthy when no other could be meant."""
    fits = [one for one in among if wish.fits(one.id, one.milestones)]
    sick = [one for one in fits if one.is_healthy is False]
    is_named = wish.step is not None or wish.milestone is not None
    if sick and (len(sick) == len(fits) or (is_named and choose(wish, among, where).is_healthy is False)):
        raise Unhealthy(
            f"restore {max(sick, key=lambda one: one.id.recency).id}: it holds numbers that are not finite",
            hint="`tierd show` says where; --allow-unhealthy restores it all the same",
        )
    for one in sick:
        older = [fit.id.recency for fit in fits if fit not in sick and fit.id.run == one.id.run]
        if older and one.id.recency > max(older):
            say(f"tierd: passed over: {one.id} is unhealthy")
    return [one for one in among if one not in sick]


def _check_place(checkpoint: CheckpointId, target: Path, config: Config | None, *, is_checkpoint: bool) -> None:
    """Inside a tier only the checkpoint's own folder will do: anywhere else it would be read as something it is not."""
    own = f"{checkpoint.run}/{checkpoint.name}"
    roots = [config.hot_path] if config else []
    roots += (
        [Path(one.url.removeprefix("file://")) for one in config.cold if one.url.startswith("file://")]
        if config
        else []
    )
    for root in (root.resolve() for root in roots):
        if target.is_relative_to(root) and not (is_checkpoint and target == root / own):
            raise BadConfig(
                f"write {checkpoint} into {target}: that is inside the tier at {root}, but not its place there",
                hint=f"--to {root / own}" if is_checkpoint else "name a place outside of it",
            )


async def _land(replicas: Replicas, target: Path, making: Making | None, part: Part | None) -> Restored:
    manifest, nearest = await replicas.first()
    chosen = replicas.chosen
    began = time.monotonic()
    files = part.files(manifest) if part else [entry.name for entry in manifest.files]
    room = 0 if part else round(manifest.size_bytes * (1 + making.extra_share if making else 1))
    with atomic_output(target, size_bytes=room, keep=partial_keys(manifest, files)) as land, _kept_is_told(land):
        store = DirectoryStore(land.partial)
        try:
            if part:
                wanted_bytes, built = await bring_part(part, manifest, files, replicas, store, land)
            else:
                fetch = Fetch(manifest, store)
                await replicas.complete(fetch, land, f"step {chosen.id.step}")
                await fetch.finish()
                await _commit(replicas, manifest, nearest, Tier("restored", store))
                wanted_bytes, built = fetch.wanted_bytes, land.partial / chosen.id.run / chosen.id.name
            if making:
                land.is_worth_keeping = False
                built = await making.make(built, manifest, land.partial)
            size_bytes = manifest.size_bytes if part is None else sum(one.stat().st_size for one in built.iterdir())
            land.publish(built)
        finally:
            await store.close()
    seconds = time.monotonic() - began
    given = replicas.given_bytes
    return Restored(
        run=chosen.id.run,
        step=chosen.id.step,
        generation=chosen.id.generation,
        tier=list(given)[-1] if given else nearest.name,
        to=str(target),
        size_bytes=size_bytes,
        seconds=round(seconds, 6),
        bytes_per_s=round(sum(given.values()) / max(seconds, 1e-6)),
        is_verified=True,
        is_whole=part is None,
        given_bytes=given,
        resumed_bytes=wanted_bytes - sum(given.values()),
        passed_over={name: error.message for name, error in replicas.passed_over.items()},
    )


async def _commit(replicas: Replicas, manifest: Manifest, source: ReadableTier, restored: Tier) -> None:
    """The markers, then the manifest's own bytes, as in any tier."""
    chosen = replicas.chosen
    for milestone in chosen.milestones:
        await restored.mark_milestone(manifest.id, milestone, manifest.created_at)
    if chosen.is_healthy is not None:
        diagnosis = await source.diagnosis(manifest.id, is_healthy=chosen.is_healthy)
        await restored.mark_diagnosis(manifest.id, diagnosis)
    await restored.commit(manifest, raw=replicas.raw)


@contextmanager
def _kept_is_told(land: AtomicOutput) -> Generator[None]:
    try:
        yield
    except BaseException:
        if land.is_worth_keeping:
            say(f"tierd: what has arrived stays in {land.partial}: the same command goes on from there")
        raise
