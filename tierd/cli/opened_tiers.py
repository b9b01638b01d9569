"""The tiers that a verb uses, opened and listed: those of the config, or one place named on the command line.

Needs no daemon: manifests and listings are the truth. A tier that cannot be reached, or is silent for 10 s, is
reported; the others still answer, and the exit code is 3, or 14 when no tier answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierd.catalog.catalog import Catalog
from tierd.catalog.identity import Identities
from tierd.catalog.listing import refresh
from tierd.cli.console import print_note
from tierd.cli.options import Settings, check_tier
from tierd.cold_tier import cold_of_bucket, open_cold_tier
from tierd.config.sections import Config
from tierd.errors import BadConfig, Corrupt, TierdError, TierUnreachable
from tierd.format.ids import HOT
from tierd.keys.key_file import keyring_of
from tierd.lifecycle.selection import CheckpointQuery
from tierd.status.report import foreign_sentences
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.pool import while_answered
from tierd.tiers.tier import Tier
from tierd.tiers.tier_listing import Listing

PARTIAL = 3  # the exit code of an answer that lacks a part
SILENCE_S = 10.0  # a listing in which a tier answers nothing for so long is given up
NOTE_AFTER_S = 3.0  # a wait of this length is explained


def exit_code(errors: Sequence[TierdError], *, of: int) -> int:
    """Of a verb that checks `of` replicas or tiers and could not check some: 12 if one is damaged, 3 if others could be
    checked, 14 if none could and a tier cannot be reached."""
    if any(isinstance(error, Corrupt) for error in errors):
        return Corrupt.exit_code
    if not errors:  # also where the last replica was just deleted
        return 0
    if len(errors) < of:
        return PARTIAL
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
        for (tier, checkpoint), parts in self.catalog.sent().items():
            if query.matches(checkpoint) and self.catalog.get(checkpoint) is None:
                print_note(f"tierd: not committed: {checkpoint} in {tier}: {parts}")
        for sentence in foreign_sentences(self.catalog, query.matches):
            print_note(f"tierd: foreign: {sentence}")


@asynccontextmanager
async def open_tiers(
    settings: Settings, *, place: str | None = None, only: str | None = None, allow_unsigned: bool = False
) -> AsyncGenerator[OpenedTiers, Any]:
    """Open the tiers and list them; close them at the end. `place`: that directory or s3:// URL alone. `only`: the one
    tier of that name. `allow_unsigned`: without the keys of the config, so that nothing is foreign."""
    if place is not None:
        opened = [_open_place(place, settings, allow_unsigned=allow_unsigned)]
    else:
        check_tier(only, settings.config())
        opened = open_unlisted(settings.config(), only=only, allow_unsigned=allow_unsigned)
    catalog = Catalog([tier.name for tier in opened])
    identities = None if place is not None else Identities(settings.config())
    absent: set[str] = set()

    async def list_tier(tier: Tier) -> None:
        # To list a tier must not make its directory, and before the first `tierd serve` there is none.
        if await tier.store.exists():
            await refresh(catalog, tier, identities, is_read_only=True)
        else:
            if identities is not None:
                await identities.check(tier, Listing())  # raises where there was one before
            absent.add(tier.name)
            catalog.enter_listing(tier.name, {}, {}, since=catalog.changes)

    waiting = list(opened)
    try:
        # The nearest first, as in the daemon: where two manifests differ, the other tier's is the one not used.
        while waiting:
            tier = waiting.pop(0)
            await _unless_silent(catalog, tier, list_tier(tier))
            if tier.name not in absent:
                break
        await asyncio.gather(*(_unless_silent(catalog, tier, list_tier(tier)) for tier in waiting))
        yield OpenedTiers({tier.name: tier for tier in opened}, catalog, absent)
    finally:
        for tier in opened:
            await tier.store.close()


def open_unlisted(config: Config, *, only: str | None = None, allow_unsigned: bool = False) -> list[Tier]:
    """The tiers of the config, nearest first; the caller closes their stores. `allow_unsigned`: as of `open_tiers`."""
    access = config.access
    keyring = None if allow_unsigned else keyring_of(config.security.key_file)
    hot = DirectoryStore(config.hot_path, timeout_s=config.limits.directory_timeout_s, access=access)
    opened = [Tier(HOT, hot, limits=config.limits, keyring=keyring)] if only in (None, HOT) else []
    colds = [cold for cold in config.cold if only in (None, cold.name)]
    return opened + [open_cold_tier(cold, config.limits, access=access, keyring=keyring) for cold in colds]


async def _unless_silent(catalog: Catalog, tier: Tier, listing: Coroutine[Any, Any, None]) -> None:
    """Gives a listing up, and notes the tier as not known, when the tier has answered nothing for SILENCE_S."""
    waits = f"tierd: waiting for {tier.name}, which has not answered yet: {tier.store.url}"
    note = asyncio.get_running_loop().call_later(NOTE_AFTER_S, print_note, waits)
    try:
        await while_answered(listing, lambda: tier.store.answered_s, silence_s=SILENCE_S)
    except TimeoutError:
        catalog.listing_failed(tier.name, f"list {tier.store.url}: no answer for {SILENCE_S:.0f} s")
    except TierdError as error:
        catalog.listing_failed(tier.name, str(error))
    finally:
        note.cancel()


def _open_place(place: str, settings: Settings, *, allow_unsigned: bool) -> Tier:
    """The keys of a config hold for any place. Raises BadConfig where a config is there and cannot be used: without its
    keys, no signature would be checked."""
    config = settings.config()
    keyring = None if allow_unsigned else keyring_of(config.security.key_file)
    if not place.startswith("s3://"):
        path = Path(place.removeprefix("file://")).absolute()
        if not path.is_dir():
            raise BadConfig(f"list {place}: no such directory", hint="name a directory or s3://bucket/prefix")
        return Tier(place, DirectoryStore(path), keyring=keyring)
    tier = open_cold_tier(cold_of_bucket(place, config), config.limits)
    return Tier(place, tier.store, tier.cache, limits=tier.limits, keyring=keyring)
