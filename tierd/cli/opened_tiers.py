"""The tiers that a verb uses, opened and listed: those of the config, or one place named on the command line.

Needs no daemon: manifests and listings are the truth. A tier that cannot be reached is reported; the others still
answer, and the exit code is 3, or 14 when no tier answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierd.catalog import Catalog
from tierd.cli.console import print_note
from tierd.cli.options import Settings, check_tier
from tierd.cold_tier import open_cold_tier
from tierd.config import ColdConfig, Config
from tierd.errors import BadConfig, Corrupt, TierdError, TierUnreachable
from tierd.lifecycle.policy import HOT
from tierd.lifecycle.selection import CheckpointQuery
from tierd.listing import refresh
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.tier import Tier

PARTIAL = 3  # the exit code of an answer that lacks a part


def exit_code(errors: Sequence[TierdError], *, of: int) -> int:
    """Of a verb that checks `of` replicas or tiers and could not check some: 12 if one is damaged, 3 if others could be
    checked, 14 if none could and a tier cannot be reached."""
    if any(isinstance(error, Corrupt) for error in errors):
        return Corrupt.exit_code
    if len(errors) < of:
        return PARTIAL if errors else 0
    unreachable = [error for error in errors if isinstance(error, TierUnreachable)]
    return (unreachable or errors)[0].exit_code


@dataclass(frozen=True, slots=True)
class OpenedTiers:
    """`by_name`: nearest first. `absent`: tiers whose directory does not exist; they count as empty."""

    by_name: dict[str, Tier]
    catalog: Catalog
    absent: set[str]

    def check_reachable(self) -> int:
        """Report the tiers that could not be listed. Returns the exit code of an answer from the others: PARTIAL, or 0
        if all were listed. Raises TierUnreachable if none was."""
        unreachable = self.catalog.unlisted()
        if len(unreachable) == len(self.by_name):
            raise TierUnreachable(
                "list " + "; ".join(f"{name}: {why}" for name, why in unreachable.items()),
                hint="docs/RUNBOOK.md#tier-unreachable",
            )
        for name in sorted(self.absent):
            print_note(f"tierd: {name} is empty: {self.by_name[name].store.url} does not exist")
        for name, why in unreachable.items():
            print_note(f"tierd: {name} is left out, it cannot be listed: {why}")
        return PARTIAL if unreachable else 0

    def report_unreadable(self, query: CheckpointQuery) -> None:
        for (_, checkpoint), why in self.catalog.unreadable().items():
            if query.matches(checkpoint):
                print_note(f"tierd: left out: {why}")


@asynccontextmanager
async def open_tiers(
    settings: Settings, *, place: str | None = None, only: str | None = None
) -> AsyncGenerator[OpenedTiers, Any]:
    """Open the tiers and list them; close them at the end. `place`: that directory or s3:// URL alone. `only`: the one
    tier of that name."""
    if place is not None:
        opened = [_open_place(place, settings)]
    else:
        config = settings.config()
        check_tier(only, config)
        opened = [Tier(HOT, DirectoryStore(config.hot_path))] if only in (None, HOT) else []
        opened += [open_cold_tier(cold, config.limits) for cold in config.cold if only in (None, cold.name)]
    catalog = Catalog([tier.name for tier in opened])
    # To list a tier must not make its directory, and before the first `tierd serve` there is none.
    absent = {tier.name for tier in opened if not tier.store.exists()}
    for name in absent:
        catalog.enter_listing(name, {}, {}, since=catalog.changes)
    present = [tier for tier in opened if tier.name not in absent]
    try:
        # The nearest first, as in the daemon: where two manifests differ, the other tier's is the one not used.
        for tier in present[:1]:
            await refresh(catalog, tier)
        await asyncio.gather(*(refresh(catalog, tier) for tier in present[1:]))
        yield OpenedTiers({tier.name: tier for tier in opened}, catalog, absent)
    finally:
        for tier in opened:
            await tier.store.close()


def _open_place(place: str, settings: Settings) -> Tier:
    """A bucket has the settings of the cold tier with its URL if a config has one; otherwise boto3's defaults."""
    if not place.startswith("s3://"):
        path = Path(place.removeprefix("file://")).absolute()
        if not path.is_dir():
            raise BadConfig(f"list {place}: no such directory", hint="name a directory or s3://bucket/prefix")
        return Tier(place, DirectoryStore(path))
    try:
        config = settings.config()
    except BadConfig:
        if settings.config_file is not None:
            raise
        config = Config()
    same = [cold for cold in config.cold if cold.url.rstrip("/") == place.rstrip("/")]
    tier = open_cold_tier((same or [ColdConfig(url=place)])[0], config.limits)
    return Tier(place, tier.store, tier.cache)
