"""Makes nodes that each write into a folder of their own adopt one checkpoint together: all take its head from node 0.

Node 0 writes the head into the cold tiers when the checkpoint is complete in its folder, before its own part. The other
nodes take the newest head of the step, unless their files may be those of another save. All parts then have the same
generation and sequence, and the committer can assemble them.
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
from tierd.errors import BadConfig, Corrupt, NotFound, TierdError, TierUnreachable, text_of
from tierd.failpoints import failpoint
from tierd.format import layout
from tierd.format.announced import Announced, decode_announced
from tierd.format.ids import GENERATION_SEEN_MAX, CheckpointId, check_run
from tierd.format.manifest import Manifest
from tierd.lifecycle.watched import Whole, preset_of
from tierd.tiers.tier import Tier
from tierd.transfer.adoption import adopted_id, new_head
from tierd.transfer.source_tree import SourceTree
from tierd.workers.watch_claim import TIMEOUT_S, WatchClaim

log = logging.getLogger("tierd")

SPREAD = 6  # times quiet_s: the most time between the last writes of two nodes for one save
NOTICED = 3  # times quiet_s: within so long after the last write of a save, node 0 announces it
SAME_S = 1.0  # clocks that agree differ by less, and no step is saved twice within it
RETRY_MIN_S, RETRY_MAX_S = 1.0, 60.0  # between two searches for the head of one step
AWAITED_MAX = 32  # steps whose heads are searched for: those that were written last
GENERATIONS_TRIED = 8  # in one pass, for a new save of a step
ABSENT, GONE = "absent", "gone"


@dataclass(slots=True)
class _Wait:
    """The search for the head of one step. `count`: the searches so far; `due_s`: when the next one is due. `answer`:
    the result of the last one: why there is no head, or what is wrong with it."""

    count: int = 0
    due_s: float = 0.0
    answer: str | BadConfig = ""


class Announcements:
    """The heads of the checkpoints in one watched folder. `node`: the number of this node, below `watch.nodes`."""

    def __init__(self, context: DaemonContext, watch: WatchConfig, claim: WatchClaim) -> None:
        self._context, self._watch, self._claim = context, watch, claim
        self._run = check_run(watch.run)
        self.node = watch.node
        self._started_s = context.now().timestamp()
        # The run's newest checkpoint before the first announcement, if it has another number of nodes.
        self._earlier: Manifest | None = None
        self._is_earlier_known = False
        self.apart_s = SPREAD * watch.quiet_s if watch.node else 0.0  # by which the clock of node 0 may differ
        self._is_last_on_node_0 = preset_of(watch).whole is Whole.ANNOUNCED
        self._waits: dict[int, _Wait] = {}  # by step

    async def head(
        self, step: int, tree: SourceTree, *, generation_min: int, waiting: Collection[int]
    ) -> Announced | str:
        """The head for this node's part of the step, or why there is none yet. `generation_min`: ignore heads of lower
        generations, because the step was saved again. `waiting`: the steps that are complete here and not adopted,
        oldest first.

        Raises BadConfig when the nodes do not agree on their number, TierUnreachable when no cold tier answers, and
        what `adopted_id` raises."""
        if self.node == 0:
            return await self._announce(step, tree, generation_min)
        self._waits = {waited: wait for waited, wait in self._waits.items() if waited in waiting}
        wait = self._waits.setdefault(step, _Wait())
        if step in list(waiting)[-AWAITED_MAX:] and self._context.monotonic_s() >= wait.due_s:
            wait.count += 1
            wait.due_s = self._context.monotonic_s() + backoff_s(wait.count, min_s=RETRY_MIN_S, max_s=RETRY_MAX_S)
            answer = self._judge(await self._newest_head(step, generation_min), step, tree, generation_min)
            if isinstance(answer, Announced):
                return answer
            wait.answer = answer
        if isinstance(wait.answer, BadConfig):
            raise BadConfig(wait.answer.message, hint=wait.answer.hint)
        return wait.answer or self._not_announced(step, generation_min)

    def forget(self, step: int) -> None:
        self._waits.pop(step, None)

    def _judge(
        self, announced: Announced | None, step: int, tree: SourceTree, generation_min: int
    ) -> Announced | str | BadConfig:
        if announced is None:
            return self._not_announced(step, generation_min)
        if announced.world_size != self._watch.nodes:
            return BadConfig(
                f"adopt {tree.path}: node 0 has announced {announced.id} of {announced.world_size} nodes, and "
                f"watch.nodes is {self._watch.nodes} here",
                hint="set the same number on all nodes",
            )
        return self._other_save(announced, tree) or announced

    def _not_announced(self, step: int, generation_min: int) -> str:
        if generation_min > 1:
            return f"step {step} was saved again here, and node 0 has not announced the new save yet"
        return f"node 0 has not announced step {step} yet: its daemon must run and have the same cold tier"

    def _other_save(self, announced: Announced, tree: SourceTree) -> str:
        """Why the files here may belong to another save of the step than those of node 0; empty if they do not."""
        assert announced.created is not None  # decode_announced refuses others
        here_s, there_s = tree.modified_ns / 1e9, announced.created.timestamp()
        later_s, quiet_s, spread_s = here_s - there_s, self._watch.quiet_s, SPREAD * self._watch.quiet_s
        same_s = min(SAME_S, quiet_s)
        how = f"it was written {abs(later_s):.0f} s {'later' if later_s > 0 else 'earlier'} than on node 0"
        other = f"{how}, so it may be another save of step {announced.step}: "
        if self._is_last_on_node_0:
            # Node 0 writes the last file of a save. The files here do not show when the save is complete.
            must = f"the clocks of the nodes must agree within quiet_s, {quiet_s:g} s"
            is_other, is_same = later_s > quiet_s, later_s <= same_s
        else:
            must = f"the clocks must agree, and a save must end on all nodes within 6 times quiet_s, {spread_s:g} s"
            is_other, is_same = abs(later_s) > spread_s, abs(later_s) <= same_s
        if is_other:
            return other + must
        # If the files here are of another save, node 0 has its files too within this time, and announces that save.
        until_s = spread_s if abs(later_s) > quiet_s else NOTICED * quiet_s
        if not is_same and self._context.now().timestamp() < max(here_s, there_s) + until_s:
            until = f"within {until_s:g} s of the later write"
            return f"{how}: it is adopted if node 0 announces no other save of step {announced.step} {until}"
        return ""

    # ── node 0 ──

    async def _announce(self, step: int, tree: SourceTree, generation_min: int) -> Announced | str:
        context, run = self._context, self._run
        self._check_number(tree)
        for _ in range(GENERATIONS_TRIED):
            standing = await self._claim.standing(generation_min=generation_min)
            if standing.holder:
                return f"{standing.holder} is node 0 of {run} since generation {standing.generation}"
            if (former := await self._announced_before(step, tree, standing.generation, generation_min)) is not None:
                return former
            checkpoint = adopted_id(context.catalog, run, step, standing.generation, is_lenient=True)
            announced = await self._write_head(checkpoint, tree)
            if announced is not None:
                return announced
            generation_min = standing.generation + 1
        raise Corrupt(
            f"announce step {step} of {run}: a cold tier has other saves of it up to generation {generation_min - 1}",
            hint="nothing was overwritten; do two jobs write one run?",
        )

    def _check_number(self, tree: SourceTree) -> None:
        """Raises BadConfig if another number of nodes may have made the save: the parts of `watch.nodes` nodes would
        then be committed as the whole checkpoint, although others are missing."""
        nodes = self._watch.nodes
        if not self._is_earlier_known:
            newest = self._context.catalog.newest_entry(self._run)
            self._earlier = newest.manifest if newest is not None and newest.manifest.world_size != nodes else None
            self._is_earlier_known = True
        if self._earlier is not None and tree.modified_ns / 1e9 < self._started_s:
            raise BadConfig(
                f"announce {tree.path}: it was written before this daemon was started for {nodes} nodes, and "
                f"{self._earlier.id} is of {self._earlier.world_size} nodes, so {nodes} nodes may not have all of it",
                hint="later saves are adopted; this one is not",
            )

    async def _announced_before(
        self, step: int, tree: SourceTree, generation: int, generation_min: int
    ) -> Announced | None:
        """What a former node 0, on another host or of another start of the run, has said about this save: the other
        nodes may have adopted their parts already, and would adopt none for a second head of it."""
        found = [
            announced
            for tier in self._context.cold.values()
            if (announced := await self._find_before(tier, step, tree, generation, generation_min)) is not None
        ]
        return max(found, key=lambda announced: announced.generation, default=None)

    async def _find_before(
        self, tier: Tier, step: int, tree: SourceTree, generation: int, generation_min: int
    ) -> Announced | None:
        """None also where the tier does not answer: then the save is announced anew."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                listing = await tier.listing(layout.step_prefix(self._run, step))
                for checkpoint in sorted(listing.files, key=lambda checkpoint: checkpoint.generation, reverse=True):
                    is_former = generation_min <= checkpoint.generation < generation and checkpoint not in listing.gone
                    if not is_former or layout.HEAD not in listing.files[checkpoint]:
                        continue
                    announced = await self._read(tier, checkpoint)
                    if (announced.created_at, announced.world_size) == (tree.created_at, self._watch.nodes):
                        return announced
        except (TierdError, TimeoutError) as error:
            log.warning("look for step %d of %s in %s: %s", step, self._run, tier.name, text_of(error))
        return None

    async def _write_head(self, checkpoint: CheckpointId, tree: SourceTree) -> Announced | None:
        """Write the head into the cold tiers that lack it, and return it. One tier is enough. None if a tier has
        another head of the step in this generation, or a tombstone: the caller tries the next generation. Raises
        TierUnreachable if no tier has the head."""
        errors: list[str] = []
        known = await self._heads_by_tier(checkpoint, errors)
        if GONE in known.values():
            return None
        announced = next((head for head in known.values() if isinstance(head, Announced)), None)
        if announced is None:
            sequence = self._context.catalog.sequence_max(checkpoint.run) + 1
            head = new_head(checkpoint, tree, sequence=sequence, world_size=self._watch.nodes)
            announced = Announced(**msgspec.structs.asdict(head), claim=self._claim.number)
        elif (announced.claim, announced.created_at) != (self._claim.number, tree.created_at):
            return None
        failpoint("watch.announce")
        written = [name for name, head in known.items() if isinstance(head, Announced)]
        for name in known.keys() - written:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    key, tier = layout.file_key(checkpoint, layout.HEAD), self._context.cold[name]
                    is_new = await tier.put_marker(key, announced.encode())
                    if not is_new and await self._read(tier, checkpoint) != announced:
                        return None  # another head, which the listing did not show yet
                    written.append(name)
            except (TierdError, TimeoutError) as error:
                errors.append(f"{name}: {text_of(error)}")
        if not written:
            raise TierUnreachable(
                f"announce {checkpoint} to the other nodes: {'; '.join(errors)}",
                hint="they adopt their parts once a cold tier has its head; the daemon tries again",
            )
        for error in errors:
            log.warning("announce %s to the other nodes: %s", checkpoint, error)
        failpoint("watch.announced")
        return announced

    async def _heads_by_tier(self, checkpoint: CheckpointId, errors: list[str]) -> dict[str, Announced | str]:
        """What each cold tier has: the head, ABSENT, or GONE if the checkpoint was deleted there. Tiers that cannot be
        read are left out, and `errors` gets the reason."""
        known: dict[str, Announced | str] = {}
        for name, tier in self._context.cold.items():
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await self._context.identities.check(tier)  # do not write into another place that is mounted there
                    names = await files_of(tier, checkpoint, until=layout.NODE_FILES_END)
                    if layout.GONE in names:
                        known[name] = GONE
                    else:
                        known[name] = await self._read(tier, checkpoint) if layout.HEAD in names else ABSENT
            except (TierdError, TimeoutError) as error:
                errors.append(f"{name}: {text_of(error)}")
        return known

    @staticmethod
    async def _read(tier: Tier, checkpoint: CheckpointId) -> Announced:
        raw = await tier.marker_bytes(layout.file_key(checkpoint, layout.HEAD))
        return decode_announced(raw, where=tier.name, expect=checkpoint)

    # ── the other nodes ──

    async def _newest_head(self, step: int, generation_min: int) -> Announced | None:
        """The head of the step with the highest generation in any cold tier: a tier that was down may lack it. Raises
        TierUnreachable when no tier answers."""
        found: list[Announced] = []
        errors: list[TierdError | TimeoutError] = []
        for tier in self._context.cold.values():
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    if (announced := await self._newest_head_in(tier, step, generation_min)) is not None:
                        found.append(announced)
            except (TierdError, TimeoutError) as error:
                errors.append(error)
        if len(errors) == len(self._context.cold):
            why = "; ".join(map(text_of, errors))
            raise TierUnreachable(f"find the announcement of step {step} of {self._run} by node 0: {why}")
        return max(found, key=lambda announced: announced.generation, default=None)

    async def _newest_head_in(self, tier: Tier, step: int, generation_min: int) -> Announced | None:
        listing = await tier.listing(layout.step_prefix(self._run, step))
        limit = self._generation_limit(tier)
        found = [
            checkpoint
            for checkpoint, names in listing.files.items()
            if generation_min <= checkpoint.generation <= limit and layout.HEAD in names
        ]
        newest = max(found, key=lambda checkpoint: checkpoint.generation, default=None)
        if newest is None or newest in listing.gone:
            return None
        try:
            return await self._read(tier, newest)
        except NotFound:
            return None  # it has just been deleted

    def _generation_limit(self, tier: Tier) -> int:
        """The highest generation that is believed. A forged head can raise it no further than a forged claim can."""
        if tier.keyring is not None:
            return GENERATION_SEEN_MAX
        return self._context.catalog.claims.generation_limit(self._run, self._context.now().timestamp())
