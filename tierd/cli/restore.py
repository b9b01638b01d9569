"""`tierd restore`: one checkpoint out of any tier into a directory, every chunk checked on the way.

Needs no daemon, but for the memory tier. A replica that turns out damaged or out of reach is named, and the next
tier that has the checkpoint is tried; the directory appears whole and verified, or not at all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from tierd.catalog import MEMORY
from tierd.cli import daemon, options
from tierd.cli.choice import Candidate, Wanted, candidates, choose, wanted
from tierd.cli.console import answer, answer_json, duration, progress_bar, say, size
from tierd.cli.descriptors import ask_memory
from tierd.cli.places import Places, Settings, look, settings_of
from tierd.config import Config
from tierd.errors import (
    BadConfig,
    BadRequest,
    Corrupt,
    DaemonUnreachable,
    NewerFormat,
    NotFound,
    TierdError,
    TierUnreachable,
    Unhealthy,
)
from tierd.format.ids import CheckpointId
from tierd.format.manifest import Manifest
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.publish import Landing, check_target, landing
from tierd.tiers.tier import Tier, copy_checkpoint

AUTO = "auto"

_SOURCE_FAULTS = (Corrupt, NewerFormat, NotFound, TierUnreachable, DaemonUnreachable, BadRequest)
"""What another tier may do better. A fault of the target, such as no space, would only happen again."""


class Restored(msgspec.Struct, kw_only=True):
    """What `tierd restore --json` prints. `passed_over`: tiers that have the checkpoint but could not give it."""

    run: str
    step: int
    generation: int
    tier: str
    to: str
    size_bytes: int
    seconds: float
    bytes_per_s: float
    is_verified: bool
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
    json: options.Json = False,
) -> None:
    """Copy a checkpoint into a directory, verified."""
    settings = settings_of(context)
    target = target_of(to, tier, place)
    wish = wanted(run, step, generation)
    restored = asyncio.run(bring(settings, wish, tier, place, target, allow_unhealthy=allow_unhealthy))
    if json:
        answer_json(restored)
    else:
        answer(
            f"restored {restored.run} step {restored.step} (generation {restored.generation}) from {restored.tier} "
            f"to {restored.to}: {size(restored.size_bytes)} in {duration(restored.seconds)}, "
            f"{size(restored.bytes_per_s)}/s, verified"
        )


def target_of(to: Path, tier: str, place: str | None) -> Path:
    """Where `--to` leads, which must be new or empty."""
    if place is not None and tier != AUTO:
        raise BadConfig("--from names the one place to look in, --tier a tier of the config", hint="give one of them")
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
    making: Making | None = None,
    *,
    allow_unhealthy: bool = False,
) -> Restored:
    """The wanted checkpoint, verified, at the target; or what is made of it."""
    config = None if place else settings.config()
    in_memory = _in_memory(config, tier) if config else {}
    only = None if tier in (AUTO, MEMORY) else tier
    async with look(settings, place=place, only=only) as places:
        if tier != MEMORY:
            places.check_reachable()
        where = place or ("any tier" if tier == AUTO else tier)
        chosen = await _choose(wish, tier, places, in_memory, where, allow_unhealthy=allow_unhealthy)
        _check_place(chosen.id, target, config, is_checkpoint=making is None)
        return await _first_whole(chosen, places, config, target, making)


def _in_memory(config: Config, tier: str) -> dict[CheckpointId, dict[str, Any]]:
    """What the memory tier holds: asked for by name it must answer, otherwise it may be absent."""
    if tier not in (AUTO, MEMORY):
        return {}
    try:
        return daemon.find(config).in_memory()
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


async def _first_whole(
    chosen: Candidate, places: Places, config: Config | None, target: Path, making: Making | None
) -> Restored:
    """Tries the tiers in order until one gives every byte as its manifest says."""
    passed_over: dict[str, TierdError] = {}
    for name in chosen.tiers:
        is_copied = False
        try:
            async with _replica(name, chosen.id, places, config) as (source, manifest):
                began = time.monotonic()
                room = round(manifest.size_bytes * (1 + making.extra_share if making else 1))
                with landing(target, size_bytes=room) as land:
                    folder = await _copy(manifest, source, land, chosen)
                    is_copied = True
                    land.publish(await making.make(folder, manifest, land.partial) if making else folder)
                seconds = time.monotonic() - began
        except _SOURCE_FAULTS as error:
            if is_copied:
                raise  # another replica has the same bytes
            passed_over[name] = error
            say(f"tierd: {name} cannot give {chosen.id}: {error.message}")
            continue
        return Restored(
            run=chosen.id.run,
            step=chosen.id.step,
            generation=chosen.id.generation,
            tier=name,
            to=str(target),
            size_bytes=manifest.size_bytes,
            seconds=round(seconds, 6),
            bytes_per_s=round(manifest.size_bytes / max(seconds, 1e-6)),
            is_verified=True,
            passed_over={name: error.message for name, error in passed_over.items()},
        )
    raise _worst(chosen, passed_over)


async def _copy(manifest: Manifest, source: Tier, land: Landing, chosen: Candidate) -> Path:
    store = DirectoryStore(land.partial)
    try:
        with progress_bar(f"step {chosen.id.step} from {source.name}", manifest.size_bytes) as progress:
            await copy_checkpoint(
                manifest,
                source,
                Tier("restored", store),
                milestones=chosen.milestones,
                is_healthy=chosen.is_healthy,
                progress=progress,
            )
    finally:
        await store.close()
    return land.partial / chosen.id.run / chosen.id.name


@asynccontextmanager
async def _replica(
    name: str, checkpoint: CheckpointId, places: Places, config: Config | None
) -> AsyncGenerator[tuple[Tier, Manifest], Any]:
    if name != MEMORY or config is None:
        yield places.tiers[name], await places.tiers[name].manifest(checkpoint)
        return
    store = await asyncio.to_thread(ask_memory, config.socket_path, checkpoint)
    try:
        yield Tier(MEMORY, store), store.manifest
    finally:
        await store.close()


def _worst(chosen: Candidate, passed_over: dict[str, TierdError]) -> TierdError:
    """One replica that is damaged outweighs any number that are out of reach."""
    errors = list(passed_over.values())
    kinds: tuple[type[TierdError], ...] = (Corrupt, NewerFormat, TierUnreachable)
    worst = next((error for kind in kinds for error in errors if isinstance(error, kind)), errors[0])
    hint = "`tierd ls` shows older steps; --step takes one; docs/RUNBOOK.md#corrupt-chunk"
    if isinstance(worst, Corrupt) and len(chosen.tiers) == 1:
        hint = "--tier auto goes on with the next tier that has it; " + hint
    return type(worst)(f"restore {chosen.id}: no whole copy in {', '.join(chosen.tiers)}", hint=hint)
