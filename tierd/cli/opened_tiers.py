"""The tiers a verb looks at, and what they hold: those of the config, or one place named on the command line.

Needs no daemon: manifests and listings are the truth. A tier that cannot be reached is reported, not hidden:
the others still answer, and the exit code says 3, or 14 when none of them does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from tierd import config_file
from tierd.catalog import Catalog
from tierd.cli.console import say
from tierd.cli.selection import Wanted
from tierd.cold_tier import open_cold_tier
from tierd.config import ColdConfig, Config, LimitsConfig
from tierd.errors import BadConfig, Corrupt, TierdError, TierUnreachable
from tierd.lifecycle.policy import HOT
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.tier import Tier
from tierd.workers.recovery import refresh

PARTIAL = 3  # the exit code of an answer that lacks a part


def exit_code(errors: Sequence[TierdError], *, of: int) -> int:
    """Of a verb that was to judge so many replicas or tiers, and could not judge some: 12 where one is damaged, 3 where
    the others have been judged, 14 where none could be and a tier is in the way (an archived shard is as far away)."""
    if any(isinstance(error, Corrupt) for error in errors):
        return Corrupt.exit_code
    if len(errors) < of:
        return PARTIAL if errors else 0
    away = [error for error in errors if isinstance(error, TierUnreachable)]
    return (away or errors)[0].exit_code


@dataclass(frozen=True, slots=True)
class Settings:
    """What stood before the verb."""

    config_file: str | None
    wants_traceback: bool = False

    def config(self) -> Config:
        return config_file.load(self.config_file)


def settings_of(context: typer.Context) -> Settings:
    return context.find_object(Settings) or Settings(None)


@dataclass(frozen=True, slots=True)
class Places:
    """Tiers by name, those to restore from first in front, and a catalog of what a fresh look at them gave."""

    tiers: dict[str, Tier]
    catalog: Catalog
    absent: set[str] = field(default_factory=set)  # tiers whose directory is not there: empty, as far as one can see

    @property
    def unreachable(self) -> dict[str, str]:
        return {name: known.error for name, known in self.catalog.tiers.items() if not known.is_known}

    def check_reachable(self) -> bool:
        """Tells of tiers that gave no answer; False when there were some. Raises TierUnreachable when none gave one."""
        missing = self.unreachable
        if len(missing) == len(self.tiers):
            raise TierUnreachable(
                "look at " + "; ".join(f"{name}: {why}" for name, why in missing.items()),
                hint="docs/RUNBOOK.md#tier-unreachable",
            )
        for name in sorted(self.absent):
            say(f"tierd: {name} holds nothing: {self.tiers[name].store.url} does not exist")
        for name, why in missing.items():
            say(f"tierd: {name} is left out, it cannot be looked at: {why}")
        return not missing

    def tell_unreadable(self, wish: Wanted) -> None:
        for (_, checkpoint), why in self.catalog.unreadable().items():
            if wish.fits(checkpoint):
                say(f"tierd: left out: {why}")


@asynccontextmanager
async def look(settings: Settings, *, place: str | None = None, only: str | None = None) -> AsyncGenerator[Places, Any]:
    """Opens the tiers, lists them, and closes them at the end.

    `place`: that directory or s3:// URL alone. `only`: the one tier of that name.
    """
    opened = _open_place(place, settings) if place is not None else _open_configured(settings.config(), only)
    places = Places({tier.name: tier for tier in opened}, Catalog([tier.name for tier in opened]))
    try:
        # The nearest first, as the daemon does: where two tiers differ, it is the other one that is doubted.
        await _look_at(opened[0], places)
        await asyncio.gather(*(_look_at(tier, places) for tier in opened[1:]))
        yield places
    finally:
        for tier in opened:
            await tier.store.close()


async def _look_at(tier: Tier, places: Places) -> None:
    if not tier.store.exists():
        # Looking must not make directories, and before the first `tierd serve` there are none.
        places.absent.add(tier.name)
        places.catalog.saw_tier(tier.name, {}, {}, 0, since=places.catalog.moment())
    else:
        await refresh(places.catalog, tier)


def check_one_place(place: str | None, tier: str | None) -> None:
    """Raises BadConfig where both say what to look at."""
    if place is not None and tier is not None:
        raise BadConfig("--from names the one place to look in, --tier a tier of the config", hint="give one of them")


def tier_names(config: Config) -> list[str]:
    return [HOT, *(cold.name for cold in config.cold)]


def _open_configured(config: Config, only: str | None) -> list[Tier]:
    if only is not None and only not in tier_names(config):
        raise BadConfig(
            f"no tier is called {only!r}", hint=f"the tiers of this config are {', '.join(tier_names(config))}"
        )
    opened: list[Tier] = []
    if only in (None, HOT):
        opened.append(Tier(HOT, DirectoryStore(config.hot_path)))
    opened += [open_cold_tier(cold, config.limits) for cold in config.cold if only in (None, cold.name)]
    return opened


def _open_place(place: str, settings: Settings) -> list[Tier]:
    if place.startswith("s3://"):
        cold, limits = _configured_cold(place, settings)
        opened = open_cold_tier(cold, limits)
        return [Tier(place, opened.store, opened.cache)]
    path = Path(place.removeprefix("file://")).absolute()
    if not path.is_dir():
        raise BadConfig(f"look at {place}: no such directory", hint="name a directory or s3://bucket/prefix")
    return [Tier(place, DirectoryStore(path))]


def _configured_cold(url: str, settings: Settings) -> tuple[ColdConfig, LimitsConfig]:
    """The settings of the cold tier with this URL, where a config has one; else boto3's own chain decides."""
    plain = ColdConfig(url=url)
    try:
        config = settings.config()
    except BadConfig:
        if settings.config_file is not None:
            raise
        return plain, LimitsConfig()
    same = [cold for cold in config.cold if cold.url.rstrip("/") == url.rstrip("/")]
    return (same[0] if same else plain), config.limits
