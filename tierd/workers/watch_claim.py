"""Decides which of several daemons adopts from one folder: the one whose claim of the generation is in the cold tiers.

Several nodes may watch one shared folder, and they share the cold tiers. The holder of the claim writes it again at an
interval. When it has not done so for TAKEOVER_S, another daemon claims the next generation, and the former holder stops
adopting if it comes back. Where each node has a folder of its own, node 0 holds the claim, and the daemon that was
started last as node 0 takes over at once, as with trainers. Without a cold tier, every daemon adopts into its own hot
tier.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from contextlib import suppress
from dataclasses import dataclass

from tierd.catalog.listing import newest_claim, refresh_run
from tierd.context import DaemonContext
from tierd.errors import TierdError, text_of
from tierd.format import layout
from tierd.format.claim import Claim
from tierd.format.ids import Generation, Run
from tierd.tiers.tier import Tier

log = logging.getLogger("tierd")

BEAT_S = 120.0  # how often the holder writes its claim again
TAKEOVER_S = 600.0  # for how long a holder must have been silent
TIMEOUT_S = 20.0  # of one tier


@dataclass(frozen=True, slots=True)
class Standing:
    """The claim that counts now. `holder`: the node of the daemon that adopts; empty: this daemon."""

    generation: Generation
    holder: str = ""


class WatchClaim:
    """A worker too, so that the claim is written again while a large checkpoint is copied."""

    name = "watch"
    interval_s = BEAT_S
    is_urgent = False

    def __init__(self, context: DaemonContext, run: Run, path: str, *, is_node_0: bool = False) -> None:
        self._context, self._run, self._is_node_0 = context, run, is_node_0
        # It is the same after a restart of the daemon, which then goes on with its own generation.
        self.number = hashlib.sha256("\0".join((context.config.daemon.node, path, run)).encode()).hexdigest()[:32]
        self._held: Generation | None = None
        self._beat_s = -BEAT_S
        self._standing: Standing | None = None
        self._silent: dict[
            str, tuple[object, float]
        ] = {}  # by tier: the holder's claim, and since when it is unchanged
        self._asking = asyncio.Lock()

    async def run_once(self) -> bool:
        if self._held is not None:
            await self.standing()
        return True

    async def standing(self, *, generation_min: int = 1) -> Standing:
        """Which daemon adopts now, and in which generation: if it is this one, `generation_min` or higher. Reads the
        tiers at most once in BEAT_S. Raises what the claim in hot raises."""
        async with self._asking:
            context, now_s = self._context, self._context.monotonic_s()
            generation = Generation(max(1, context.catalog.generation_max(self._run)))
            if not context.cold:
                return Standing(Generation(max(generation_min, generation)))
            if not self._standing or self._standing.generation < generation or now_s - self._beat_s >= BEAT_S:
                self._standing = await self._ask(generation)
                self._beat_s = now_s
            if not self._standing.holder and self._standing.generation < generation_min:
                self._standing = await self._ask(Generation(generation_min))
            return self._standing

    async def _ask(self, generation: Generation) -> Standing:
        holder, are_silent = "", True
        for tier in self._context.cold.values():
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    newest = await newest_claim(self._context.catalog, tier, self._run, above=generation)
                    if newest > generation:
                        self._context.catalog.saw_generation(self._run, newest)
                        return await self._ask(Generation(newest))
                    if other := await self._holder(tier, generation):
                        holder = other
                        are_silent = await self._is_silent(tier, generation) and are_silent
            except (TierdError, TimeoutError) as error:
                # The claim is made before the first copy of the generation there.
                log.warning("watch: claim %s in %s: %s", self._run, tier.name, text_of(error))
        replaces = self._is_node_0 and self._held is None
        if holder and (are_silent or replaces):
            why = "was node 0 of it before" if replaces else "is silent"
            log.warning("watch: %s, which adopts for %s, %s: this node takes over", holder, self._run, why)
            self._silent.clear()
            await self._list()  # the former holder may have adopted checkpoints that this daemon does not know
            return await self._ask(Generation(generation + 1))
        if not holder and self._held != generation:
            if not await self._context.claim(self._context.hot, self._run, generation, self._claim):
                return await self._ask(Generation(generation + 1))  # a trainer's, or an earlier watch of another folder
            self._held = generation
        return Standing(generation, holder)

    async def _list(self) -> None:
        for tier in self._context.cold.values():
            with suppress(TierdError, TimeoutError):
                async with asyncio.timeout(TIMEOUT_S):
                    await refresh_run(self._context.catalog, tier, self._run, self._context.identities)

    @property
    def _claim(self) -> Claim:
        claim = Claim.new(self._context.config.daemon.node, self._context.identities.hot)
        return Claim(node=claim.node, claimed_by=claim.claimed_by, claim=self.number, hot=claim.hot)

    async def _holder(self, tier: Tier, generation: Generation) -> str:
        """The node whose claim is in the tier; empty if it is this one, whose claim is written again."""
        if await self._context.claim(tier, self._run, generation, self._claim):
            if self._held == generation:
                await tier.replace_claim(self._run, generation, self._claim)
            return ""
        other = await tier.claim(self._run, generation)
        return (other.node if other else "") or "another daemon"

    async def _is_silent(self, tier: Tier, generation: Generation) -> bool:
        """Whether the claim in the tier has not been written for TAKEOVER_S, as far as this daemon has seen."""
        key, now_s = layout.generation_key(self._run, generation), self._context.monotonic_s()
        listed = await tier.store.list(key)
        seen = next(((each.etag, each.written_at_s) for each in listed if each.key == key), None)
        former, since_s = self._silent.get(tier.name, (None, now_s))
        self._silent[tier.name] = (seen, since_s if former == seen else now_s)
        return now_s - self._silent[tier.name][1] >= TAKEOVER_S
