"""The replicas of one checkpoint, nearest first: each in turn gives a fetch what the ones before could not.

All must have the very same manifest. One that is damaged or out of reach is told, and what came from it and verified
stays.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from types import TracebackType

from tierd.catalog import MEMORY
from tierd.cli.console import progress_bar, say, size
from tierd.cli.memory_store import ask_memory
from tierd.cli.opened_tiers import Places
from tierd.cli.selection import Candidate
from tierd.config import Config
from tierd.errors import (
    BadRequest,
    Corrupt,
    DaemonUnreachable,
    NewerFormat,
    NotFound,
    TierdError,
    TierUnreachable,
)
from tierd.format import layout
from tierd.format.manifest import MANIFEST_BYTES_MAX, Manifest, decode
from tierd.tiers.tier import ReadableTier
from tierd.transfer.atomic_output import AtomicOutput
from tierd.transfer.fetch import Fetch

_SOURCE_FAULTS = (Corrupt, NewerFormat, NotFound, TierUnreachable, DaemonUnreachable, BadRequest)
"""What another tier may do better. A fault of the target, such as no space, would only happen again."""


class Replicas:
    """`passed_over`: the tiers that could not give all that they were asked for, and why. `given_bytes`: by tier."""

    def __init__(self, chosen: Candidate, places: Places, config: Config | None) -> None:
        self.chosen = chosen
        self.passed_over: dict[str, TierdError] = {}
        self.given_bytes: dict[str, int] = {}
        self.raw = b""
        self._places = places
        self._config = config
        self._opened: dict[str, ReadableTier] = {}
        self._gone: set[str] = set()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Replicas:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def first(self) -> tuple[Manifest, ReadableTier]:
        """The manifest, and the nearest replica that has one to be read. Raises what is wrong where none has."""
        for name in self.chosen.tiers:
            if tier := await self._open(name):
                return decode(self.raw, where=f"{self.chosen.id} in {name}", expect=self.chosen.id), tier
        raise self._worst("")

    async def complete(self, fetch: Fetch, land: AtomicOutput, doing: str) -> None:
        """Until nothing is missing. Raises what is wrong when all of them together cannot give it."""
        try:
            with progress_bar("checking what is there", land.taken_bytes) as progress:
                await fetch.begin(progress)
            await self._take(fetch, doing)
        finally:
            land.is_worth_keeping = land.is_worth_keeping or fetch.missing_bytes < fetch.wanted_bytes
        if fetch.missing_bytes:
            raise self._worst(f": {size(fetch.missing_bytes)} of {size(fetch.wanted_bytes)} could be had nowhere")

    async def _take(self, fetch: Fetch, doing: str) -> None:
        for name in self.chosen.tiers:
            tier = await self._open(name) if fetch.missing_bytes else None
            if tier is None:
                continue
            before = fetch.missing_bytes
            try:
                with progress_bar(
                    f"{doing} from {name}", fetch.wanted_bytes, done_bytes=fetch.wanted_bytes - before
                ) as progress:
                    problem = await fetch.take(tier, progress)
            finally:
                if before > fetch.missing_bytes:
                    self.given_bytes[name] = self.given_bytes.get(name, 0) + before - fetch.missing_bytes
            if problem is not None:
                self._pass_over(name, problem)

    async def _open(self, name: str) -> ReadableTier | None:
        """None when it is of no use, which is told."""
        if name in self._opened or name in self._gone:
            return None if name in self._gone else self._opened[name]
        try:
            tier = await self._find(name)
            raw = await tier.store.get_bytes(layout.manifest_key(self.chosen.id), size_max=MANIFEST_BYTES_MAX)
            decode(raw, where=f"{self.chosen.id} in {name}", expect=self.chosen.id)
            if raw != (self.raw or raw):
                raise Corrupt(f"read {self.chosen.id} in {name}: its manifest is not that of the nearer replicas")
        except _SOURCE_FAULTS as error:
            self._gone.add(name)
            self._pass_over(name, error)
            return None
        self.raw = raw
        self._opened[name] = tier
        return tier

    async def _find(self, name: str) -> ReadableTier:
        if name != MEMORY or self._config is None:
            return self._places.tiers[name]
        store = await asyncio.to_thread(ask_memory, self._config.socket_path, self.chosen.id)
        self._stack.push_async_callback(store.close)
        return ReadableTier(MEMORY, store)

    def _pass_over(self, name: str, error: TierdError) -> None:
        if not isinstance(error, Corrupt):
            self._gone.add(name)
        if name not in self.passed_over:
            self.passed_over[name] = error
            say(f"tierd: {name} cannot give all of {self.chosen.id}: {error.message}")

    def _worst(self, what: str) -> TierdError:
        """One replica that is damaged outweighs any number that are out of reach."""
        errors = list(self.passed_over.values())
        kinds: tuple[type[TierdError], ...] = (Corrupt, NewerFormat, TierUnreachable)
        worst = next((error for kind in kinds for error in errors if isinstance(error, kind)), errors[0])
        hint = "`tierd ls` shows older steps; --step takes one; docs/RUNBOOK.md#corrupt-chunk"
        if isinstance(worst, Corrupt) and len(self.chosen.tiers) == 1:
            hint = "--tier auto goes on with the next tier that has it; " + hint
        return type(worst)(
            f"restore {self.chosen.id}: no whole copy in {', '.join(self.chosen.tiers)}{what}", hint=hint
        )
