"""What nodes agree on before they adopt one checkpoint together, each from its own folder: its head, from node 0.

Node 0 writes it into the cold tiers when the checkpoint is complete in its folder, before its own part. The others take
the newest one of the step, unless their files may be those of another save. So all parts have one generation and one
sequence, and the committer can assemble them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from tierd.backoff import backoff_s
from tierd.catalog.listing import files_of
from tierd.config.sections import WatchConfig
from tierd.context import DaemonContext
from tierd.errors import BadConfig, Corrupt, NotFound, TierdError, TierUnreachable
from tierd.failpoints import failpoint
from tierd.format import layout
from tierd.format.announced import Announced, decode_announced
from tierd.format.ids import GENERATION_SEEN_MAX, CheckpointId, check_run
from tierd.format.manifest import Manifest
from tierd.lifecycle.watched import Whole, preset_of
from tierd.tiers.tier import Tier
from tierd.transfer.adoption import adopted_id, created_at, new_head
from tierd.transfer.source_tree import SourceTree
from tierd.workers.watch_claim import TIMEOUT_S, WatchClaim

log = logging.getLogger("tierd")

SPREAD = 6  # times quiet_s: between the last writes of two nodes of one save
NOTICED = 3  # times quiet_s: within so long after the last write of a save, node 0 announces it
SAME_S = 1.0  # clocks that agree differ by less, and no step is saved twice within it
LOOK_MIN_S, LOOK_MAX_S = 1.0, 60.0  # how often a node looks for the head of one step
LOOKED_AT = 32  # steps, those that were written last
GENERATIONS_TRIED = 8  # at once, for a new save of a step
ABSENT, GONE = "absent", "gone"


@dataclass(slots=True)
class _Wait:
    """For the head of a step. `count`: how often it was looked for; `due_s`: when it is next. `answer`: what was found
    last: why there is nothing, or what is wrong."""

    count: int = 0
    due_s: float = 0.0
    answer: str | BadConfig = ""


class Announcements:
    """Of one watched folder. `node`: which of the `watch.nodes` this is."""

    def __init__(self, context: DaemonContext, watch: WatchConfig, claim: WatchClaim) -> None:
        self._context, self._watch, self._claim = context, watch, claim
        self._run = check_run(watch.run)
        self.node = watch.node
        self._began_s = context.now().timestamp()
        self._former: Manifest | None = None  # the newest before the first announcement, if of another number of nodes
        self._is_former_known = False
        self.apart_s = SPREAD * watch.quiet_s if watch.node else 0.0  # between the clock here and that of node 0
        self._is_last_on_node_0 = preset_of(watch).whole is Whole.ANNOUNCED
        self._waits: dict[int, _Wait] = {}  # by step

    async def head(self, step: int, tree: SourceTree, *, least: int, waiting: Collection[int]) -> Announced | str:
        """What this node's part of the step begins with, or why there is nothing yet. `least`: its generation is at
        least so high, because the step was saved again. `waiting`: the steps that are complete here and not adopted,
        oldest first.

        Raises BadConfig where the nodes do not agree on their number, TierUnreachable where no cold tier answers, and
        as `adopted_id`."""
        if self.node == 0:
            return await self._announce(step, tree, least)
        self._waits = {each: wait for each, wait in self._waits.items() if each in waiting}
        wait = self._waits.setdefault(step, _Wait())
        if step in list(waiting)[-LOOKED_AT:] and self._context.monotonic_s() >= wait.due_s:
            wait.count += 1
            wait.due_s = self._context.monotonic_s() + backoff_s(wait.count, min_s=LOOK_MIN_S, max_s=LOOK_MAX_S)
            answer = self._answer(await self._find(step, least), step, tree, least)
            if isinstance(answer, Announced):
                return answer
            wait.answer = answer
        if isinstance(wait.answer, BadConfig):
            raise BadConfig(wait.answer.message, hint=wait.answer.hint)
        return wait.answer or self._not_announced(step, least)

    def forget(self, step: int) -> None:
        self._waits.pop(step, None)

    def _answer(
        self, announced: Announced | None, step: int, tree: SourceTree, least: int
    ) -> Announced | str | BadConfig:
        if announced is None:
            return self._not_announced(step, least)
        if announced.world_size != self._watch.nodes:
            return BadConfig(
                f"adopt {tree.path}: node 0 has announced {announced.id} of {announced.world_size} nodes, and "
                f"watch.nodes is {self._watch.nodes} here",
                hint="set the same number on all nodes",
            )
        return self._other_save(announced, tree) or announced

    def _not_announced(self, step: int, least: int) -> str:
        if least > 1:
            return f"it was saved again here, and node 0 has not announced that for step {step} yet"
        return f"node 0 has not announced step {step} yet: its daemon must run and have the same cold tier"

    def _other_save(self, announced: Announced, tree: SourceTree) -> str:
        """Why the files here may be of another save of the step than those of node 0; empty if they are of the same."""
        assert announced.created is not None  # decode_announced refuses others
        here_s, there_s = tree.modified_ns / 1e9, announced.created.timestamp()
        later_s, quiet_s, spread_s = here_s - there_s, self._watch.quiet_s, SPREAD * self._watch.quiet_s
        same_s = min(SAME_S, quiet_s)
        how = f"it was written {abs(later_s):.0f} s {'later' if later_s > 0 else 'earlier'} than on node 0"
        other = f"{how}, so it may be another save of step {announced.step}: "
        if self._is_last_on_node_0:
            # The last file of all is on node 0, and what is here shows nothing by itself.
            must = f"the clocks of the nodes must agree within {quiet_s:g} s, quiet_s"
            is_other, is_same = later_s > quiet_s, later_s <= same_s
        else:
            must = f"the clocks of the nodes must agree, and a save end on all within {spread_s:g} s, 6 times quiet_s"
            is_other, is_same = abs(later_s) > spread_s, abs(later_s) <= same_s
        if is_other:
            return other + must
        # Of another save, the other node has its files within this time, and node 0 announces it.
        until_s = spread_s if abs(later_s) > quiet_s else NOTICED * quiet_s
        if not is_same and self._context.now().timestamp() < max(here_s, there_s) + until_s:
            return f"{how}: it is adopted if node 0 announces no other save of step {announced.step} for {until_s:g} s"
        return ""

    # ── node 0 ──

    async def _announce(self, step: int, tree: SourceTree, least: int) -> Announced | str:
        context, run = self._context, self._run
        self._check_number(tree)
        for _ in range(GENERATIONS_TRIED):
            standing = await self._claim.standing(least=least)
            if standing.holder:
                return f"{standing.holder} is node 0 of {run} since generation {standing.generation}"
            if (former := await self._announced_before(step, tree, standing.generation, least)) is not None:
                return former
            checkpoint = adopted_id(context.catalog, run, step, standing.generation, is_lenient=True)
            announced = await self._announced(checkpoint, tree)
            if announced is not None:
                return announced
            least = standing.generation + 1
        raise Corrupt(
            f"announce step {step} of {run}: a cold tier has other saves of it up to generation {least - 1}",
            hint="nothing was overwritten; do two jobs write one run?",
        )

    def _check_number(self, tree: SourceTree) -> None:
        """Raises BadConfig where the save may be of another number of nodes: the parts of these nodes would count as
        the whole of it."""
        nodes = self._watch.nodes
        if not self._is_former_known:
            newest = next(iter(self._context.catalog.entries(self._run)), None)
            self._former = newest.manifest if newest is not None and newest.manifest.world_size != nodes else None
            self._is_former_known = True
        if self._former is not None and tree.modified_ns / 1e9 < self._began_s:
            raise BadConfig(
                f"announce {tree.path}: it was written before this daemon began with {nodes} nodes, and "
                f"{self._former.id} is of {self._former.world_size}, so {nodes} nodes may not have all of it",
                hint="later saves are adopted; this one is not",
            )

    async def _announced_before(self, step: int, tree: SourceTree, generation: int, least: int) -> Announced | None:
        """What a former node 0, on another host or of another start of the run, has said about this save: the other
        nodes may have adopted their parts already, and would adopt none for a second head of it."""
        found = [
            announced
            for tier in self._context.cold.values()
            if (announced := await self._find_before(tier, step, tree, generation, least)) is not None
        ]
        return max(found, key=lambda announced: announced.generation, default=None)

    async def _find_before(
        self, tier: Tier, step: int, tree: SourceTree, generation: int, least: int
    ) -> Announced | None:
        """None also where the tier does not answer: then the save is announced anew."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                listing = await tier.listing(layout.step_prefix(self._run, step))
                for checkpoint in sorted(listing.files, key=lambda each: each.generation, reverse=True):
                    is_former = least <= checkpoint.generation < generation and checkpoint not in listing.gone
                    if not is_former or layout.HEAD not in listing.files[checkpoint]:
                        continue
                    announced = await self._read(tier, checkpoint)
                    if (announced.created_at, announced.world_size) == (created_at(tree), self._watch.nodes):
                        return announced
        except (TierdError, TimeoutError) as error:
            log.warning("look for step %d of %s in %s: %s", step, self._run, tier.name, str(error) or "no answer")
        return None

    async def _announced(self, checkpoint: CheckpointId, tree: SourceTree) -> Announced | None:
        """What the cold tiers say about the checkpoint. It is written where it is missing; one is enough. None if they
        have an earlier save of the step in this generation, of which no part is left here. Raises TierUnreachable."""
        errors: list[str] = []
        known = await self._known(checkpoint, errors)
        if any(each is GONE for each in known.values()):
            return None
        announced = next((each for each in known.values() if isinstance(each, Announced)), None)
        if announced is None:
            sequence = self._context.catalog.sequence_max(checkpoint.run) + 1
            head = new_head(checkpoint, tree, sequence=sequence, world_size=self._watch.nodes)
            announced = Announced(**msgspec.structs.asdict(head), claim=self._claim.number)
        elif (announced.claim, announced.created_at) != (self._claim.number, created_at(tree)):
            return None
        failpoint("watch.announce")
        written = [name for name, each in known.items() if isinstance(each, Announced)]
        for name in known.keys() - written:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    key, tier = layout.file_key(checkpoint, layout.HEAD), self._context.cold[name]
                    is_new = await tier.put_marker(key, announced.encode())
                    if not is_new and await self._read(tier, checkpoint) != announced:
                        return None  # which the listing did not show yet
                    written.append(name)
            except (TierdError, TimeoutError) as error:
                errors.append(f"{name}: {str(error) or 'no answer'}")
        if not written:
            raise TierUnreachable(
                f"announce {checkpoint} to the other nodes: {'; '.join(errors)}",
                hint="they adopt their parts when a cold tier has its head; it is tried again",
            )
        for error in errors:
            log.warning("announce %s to the other nodes: %s", checkpoint, error)
        failpoint("watch.announced")
        return announced

    async def _known(self, checkpoint: CheckpointId, errors: list[str]) -> dict[str, Announced | str]:
        """By cold tier what it has: the head, ABSENT, or GONE if the checkpoint was deleted there. Without the tiers
        that cannot be read: `errors` says why."""
        known: dict[str, Announced | str] = {}
        for name, tier in self._context.cold.items():
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await self._context.identities.check(tier)  # nothing is written where another place is mounted
                    names = await files_of(tier, checkpoint, until=layout.NODE_FILES_END)
                    if layout.GONE in names:
                        known[name] = GONE
                    else:
                        known[name] = await self._read(tier, checkpoint) if layout.HEAD in names else ABSENT
            except (TierdError, TimeoutError) as error:
                errors.append(f"{name}: {str(error) or 'no answer'}")
        return known

    @staticmethod
    async def _read(tier: Tier, checkpoint: CheckpointId) -> Announced:
        raw = await tier.marker_bytes(layout.file_key(checkpoint, layout.HEAD))
        return decode_announced(raw, where=tier.name, expect=checkpoint)

    # ── the other nodes ──

    async def _find(self, step: int, least: int) -> Announced | None:
        """The head of the newest generation of the step in any cold tier: one that was down lacks the newest. Raises
        TierUnreachable where none answers."""
        found: list[Announced] = []
        errors: list[TierdError | TimeoutError] = []
        for tier in self._context.cold.values():
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    if (announced := await self._find_in(tier, step, least)) is not None:
                        found.append(announced)
            except (TierdError, TimeoutError) as error:
                errors.append(error)
        if len(errors) == len(self._context.cold):
            why = "; ".join(str(error) or "no answer" for error in errors)
            raise TierUnreachable(f"find what node 0 says about step {step} of {self._run}: {why}")
        return max(found, key=lambda announced: announced.generation, default=None)

    async def _find_in(self, tier: Tier, step: int, least: int) -> Announced | None:
        listing = await tier.listing(layout.step_prefix(self._run, step))
        limit = self._generation_limit(tier)
        found = [
            checkpoint
            for checkpoint, names in listing.files.items()
            if least <= checkpoint.generation <= limit and layout.HEAD in names
        ]
        newest = max(found, key=lambda checkpoint: checkpoint.generation, default=None)
        if newest is None or newest in listing.gone:
            return None
        try:
            return await self._read(tier, newest)
        except NotFound:
            return None  # it has just been deleted

    def _generation_limit(self, tier: Tier) -> int:
        """What a forged head says leads no generation further than a forged claim."""
        if tier.keyring is not None:
            return GENERATION_SEEN_MAX
        return self._context.catalog.claims.generation_limit(self._run, self._context.now().timestamp())
