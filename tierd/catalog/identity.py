"""Which place each tier of a config is: known by the markers at its root, and not by its path.

identified: an absent mount is not an empty tier, and one place under two names is not two replicas. The identity is in
a marker's name. Of two daemons that make a marker at the same time, neither replaces the other's, and both count. The
daemon remembers the identity of each cold tier in the hot directory.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import shlex
import uuid
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from urllib.parse import urlsplit

import msgspec

import tierd
from tierd.config.sections import Config
from tierd.errors import UNDECODABLE, BadConfig, Lost, NotFound, TierdError, TierUnreachable
from tierd.format import layout
from tierd.format.ids import HOT
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.tier import Tier
from tierd.tiers.tier_listing import Listing

log = logging.getLogger("tierd")

FORMAT_VERSION = 1
START_WAIT_S = 1.0  # how long the start of the daemon waits for the markers of all cold tiers together
MEMORY_TIMEOUT_S = 5.0  # of a call to the small files that remember the tiers
_BYTES_MAX = 4096


class _Remembered(msgspec.Struct, frozen=True, kw_only=True):
    """`place`: the tier's URL and endpoint in the config at that time."""

    identity: str
    place: str
    format_version: int = FORMAT_VERSION


class Identities:
    """The identities of the tiers of one config. The daemon makes missing markers and remembers what it saw; a command
    only reads. `on_loss`: the daemon's; gets the error of a bucket whose marker has disappeared."""

    def __init__(self, config: Config, on_loss: Callable[[TierdError], None] | None = None) -> None:
        self._folder = config.hot_path / layout.KNOWN_TIERS
        self._node = config.daemon.node
        self._endpoints = {cold.name: cold.endpoint_url for cold in config.cold}
        self._places = {cold.name: f"{cold.url} {cold.endpoint_url}".strip() for cold in config.cold}
        self._on_loss = on_loss
        self._remembered: dict[str, str | None] = {}  # by tier, once it was read; hot's only in this process
        self._seen: dict[str, tuple[str, Set[str]]] = {}  # by tier that was accepted: its URL and its identities
        self._unmarked: set[str] = set()  # tiers of which was logged that they cannot be marked
        self._unsaved: set[str] = set()  # tiers that could not be written down, as on a full hot disk

    @property
    def hot(self) -> str:
        """A digest of the identity of the hot tier, for claims; empty before it was seen. Who could read the identity
        itself in a bucket could give it to a cold tier, which then counts as hot under another name."""
        _, identities = self._seen.get(HOT, ("", frozenset[str]()))
        return hashlib.sha256(min(identities).encode()).hexdigest()[:32] if identities else ""

    async def begin(self, tiers: Mapping[str, Tier]) -> None:
        """Before the daemon starts: mark every tier that answers in time. Another problem of a cold tier is met by its
        first listing.

        Raises BadConfig when two tiers are one place, and TierUnreachable when hot cannot be listed."""
        hot = tiers[HOT]
        identities = await hot.identities()
        await self._check(hot, identities)
        await self._settle(hot, identities, is_empty=False)
        colds = [tier for name, tier in tiers.items() if name != HOT]
        try:
            async with asyncio.timeout(START_WAIT_S):
                answers = await asyncio.gather(*(tier.identities() for tier in colds), return_exceptions=True)
                for tier, answer in zip(colds, answers, strict=True):
                    if not isinstance(answer, BaseException):
                        await self._begin(tier, answer)
        except TimeoutError:
            log.info("not every tier has answered within %.0f s: its first listing checks it", START_WAIT_S)

    async def _begin(self, tier: Tier, identities: Set[str]) -> None:
        expected: str | None = None
        with suppress(Exception):  # whatever it is, the first listing meets it again and reports it
            expected = await self._expected(tier.name)
            if not identities and expected is None:
                identities = await self._mark(tier, None)
        # A tier that was a place of its own before is no error of the config: somebody may have put a marker there.
        if expected not in identities and (error := self._same_place(tier, identities)):
            raise BadConfig(error.message, hint=error.hint)
        with suppress(Exception):
            await self._check(tier, identities)

    async def check(self, tier: Tier, listing: Listing | None = None) -> None:
        """Raises TierUnreachable when the tier is another place than before, or the same as another tier.

        `listing`: of the whole tier. Without it, only the markers are listed, and none is made.
        """
        identities = await tier.identities() if listing is None else listing.identities
        await self._check(tier, identities)
        if listing is not None and self._on_loss is not None:
            await self._settle(tier, identities, is_empty=not listing.committed)

    async def _check(self, tier: Tier, identities: Set[str]) -> None:
        expected = await self._expected(tier.name)
        error = self._same_place(tier, identities)
        # A directory without its disk is just empty. A server that cannot reach its disks answers with an error.
        if expected and expected not in identities and (identities or tier.store.is_local):
            error = self._other_place(tier, expected, identities)
        if error is not None:
            self._seen.pop(tier.name, None)
            raise error
        self._seen[tier.name] = (tier.store.url, frozenset(identities))

    async def _settle(self, tier: Tier, identities: Set[str], *, is_empty: bool) -> None:
        """Mark the tier if it has no marker, and remember its identity. `is_empty`: it has no checkpoint, so nothing is
        missed when it is left out because it cannot be marked."""
        expected = await self._expected(tier.name)
        if expected in identities and tier.name not in self._unsaved:
            return
        if not identities:
            try:
                identities = await self._mark(tier, expected)
            except TierdError as error:
                if is_empty:
                    raise
                if tier.name not in self._unmarked:
                    self._unmarked.add(tier.name)
                    log.warning("%s cannot be marked, so another place there will not be noticed: %s", tier.name, error)
                return
            await self._check(tier, identities)
        identity = self._remembered[tier.name] = expected or min(identities)
        if tier.name in self._places and (expected is None or tier.name in self._unsaved):
            await self._remember(tier.name, identity)

    async def _mark(self, tier: Tier, expected: str | None) -> Set[str]:
        """Make a marker: of the remembered identity if there is one. Returns the identities that the tier has then."""
        # From `secrets`, whose numbers a simulation can repeat.
        identity = expected or str(uuid.UUID(hex=secrets.token_hex(16), version=4))
        content = {"format_version": FORMAT_VERSION, "identity": identity, "node": self._node}
        await tier.mark_identity(identity, {**content, "made_by": tierd.__version__})
        if expected is None:
            mounted = "; if checkpoints should be there, its disk is not mounted" if tier.store.is_local else ""
            log.info("%s: began a new tier at %s%s", tier.name, tier.store.url, mounted)
        elif self._on_loss is not None:
            key = layout.tier_marker_key(expected)
            message = f"list {tier.name}: {tier.store.url} had the marker {key} and has none now"
            hint = "was it emptied, or replaced by an empty one? The marker was written again; "
            self._on_loss(Lost(message, hint=f"{hint}docs/RUNBOOK.md#checkpoints-lost"))
        return await tier.identities() | {identity}

    # ── what was seen before ──

    async def _expected(self, tier: str) -> str | None:
        """The identity that the tier had when it was seen first, or None."""
        if tier not in self._remembered and tier in self._places:
            try:
                self._remembered[tier] = await self._recall(tier)
            except TierdError:
                if self._on_loss is not None:
                    raise
                return None  # a command reads what it can
        return self._remembered.get(tier)

    async def _recall(self, tier: str) -> str | None:
        try:
            async with DirectoryStore(self._folder, timeout_s=MEMORY_TIMEOUT_S) as store:
                raw = await store.get_bytes(f"{tier}.json", size_max=_BYTES_MAX)
            remembered = msgspec.json.decode(raw, type=_Remembered)
        except NotFound:
            return None
        except UNDECODABLE as error:
            path = self._folder / f"{tier}.json"
            remove = f"If {self._places[tier]} is the right one: rm {shlex.quote(str(path))}"
            hint = f"it says which place {tier} is. {remove}; docs/RUNBOOK.md#another-place"
            raise TierUnreachable(f"read {path}: {error}", hint=hint) from error
        # Another URL in the config is another place on purpose.
        return remembered.identity if remembered.place == self._places[tier] else None

    async def _remember(self, tier: str, identity: str) -> None:
        content = msgspec.json.encode(_Remembered(identity=identity, place=self._places[tier])) + b"\n"
        try:
            async with DirectoryStore(self._folder, timeout_s=MEMORY_TIMEOUT_S) as store:
                await store.sweep_partials()
                await store.put_bytes(f"{tier}.json", content)
            self._unsaved.discard(tier)
        except TierdError as error:  # this process remembers it, and writes it with the next listing
            if tier not in self._unsaved:
                self._unsaved.add(tier)
                log.warning("write down which place %s is: %s", tier, error)

    # ── errors ──

    def _other_place(self, tier: Tier, expected: str, identities: Set[str]) -> TierUnreachable:
        key = layout.tier_marker_key(expected)
        has = f"has {' and '.join(map(layout.tier_marker_key, sorted(identities)))}, not" if identities else "has no"
        cause = "another place is there" if identities else "its disk is not mounted, or it was replaced"
        return TierUnreachable(
            f"list {tier.name}: {tier.store.url} {has} marker {key}: {cause}",
            hint=f"bring the right one back; if this is {tier.name} from now on: "
            f"{_accept(tier.store.url, key, self._endpoints.get(tier.name, ''))}; docs/RUNBOOK.md#another-place",
        )

    def _same_place(self, tier: Tier, identities: Set[str]) -> TierUnreachable | None:
        """The error if another tier has one of these identities."""
        for name, (url, others) in self._seen.items():
            if name != tier.name and (shared := others & identities):
                key = layout.tier_marker_key(min(shared))
                place = f"{tier.store.url} is the same place as {name}, {url}"
                return TierUnreachable(
                    f"list {tier.name}: {place}: both have the marker {key}",
                    hint="one replica would count as two. Give each tier a place of its own; if one is a copy of the "
                    "other, delete that marker in the copy; docs/RUNBOOK.md#another-place",
                )
        return None


def _accept(url: str, key: str, endpoint_url: str) -> str:
    """The command that gives a place the expected marker."""
    if url.startswith("file://"):
        path = url.removeprefix("file://")
        return shlex.join(["touch", f"{path}/{key}"])
    parts = urlsplit(url)
    prefix = parts.path.strip("/")
    arguments = ["--bucket", parts.netloc, "--key", f"{prefix}/{key}" if prefix else key]
    endpoint = ["--endpoint-url", endpoint_url] if endpoint_url else []
    return shlex.join(["aws", *endpoint, "s3api", "put-object", *arguments])
