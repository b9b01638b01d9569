"""Copies the parts of one other node, the partner of this one, so that they survive the loss of that node and its disk.

The trainers tell which node that is. When this node has persisted its part of a checkpoint, it fetches the other node's
part as soon as that node has persisted it. A copy is deleted when no restart can need it.

A trainer names that node's address, so the server there may be its own. Without a key nothing is reserved for the size
that its node file claims. Where several runs have partners, each gets a turn, however slow the node of another one is.
"""

from __future__ import annotations

import asyncio
import logging

from tierd.context import DaemonContext, PartnerNode
from tierd.errors import Corrupt, Full, NotFound, TierdError
from tierd.format import layout, wire
from tierd.format.ids import CheckpointId, Run
from tierd.format.node_file import NodeFile, ranks_text
from tierd.lifecycle.everywhere import needed_parts
from tierd.tiers.part_copies import PartCopies
from tierd.tiers.peer_store import PeerStore
from tierd.tiers.readable_tier import ReadableTier
from tierd.transfer.fetch import Fetch
from tierd.workers.fresh_replica import is_newest_there
from tierd.workers.hot_space import HotSpace, no_room

log = logging.getLogger("tierd")

PEERS = "peers"  # the name of this traffic for the throttle
POLL_MIN_S, POLL_MAX_S = 0.1, 2.0  # until the other node is asked again whether it has persisted its part
TURN_S = 120.0  # where several runs have partners; then the copy of the next run goes on
CHECK_S = 5.0  # while a copy is being made: whether the trainers have told another partner
IDLE_S = 10.0  # where every part has its copy
COPIED_MAX = 2  # of the newest checkpoints; an older one is copied only while no newer one has a copy
ASKED_MAX = 8  # of the newest checkpoints, while no newer one has a copy: the other node may be slower than this one


class PartCopier:
    name = "copy"
    is_urgent = True

    def __init__(self, context: DaemonContext, copies: PartCopies) -> None:
        self._context = context
        self._copies = copies
        self._space = HotSpace(context.hot, no_room)
        self.interval_s = IDLE_S
        self._poll_s = POLL_MIN_S
        self._waiting: set[CheckpointId] = set()  # after the last pass
        self._begun: dict[CheckpointId, Fetch] = {}  # copies that are not complete
        self._active: CheckpointId | None = None  # the one that is being written now
        self._deleting = asyncio.Lock()

    async def run_once(self) -> bool:
        """False when a part could not be copied, or a copy not deleted."""
        is_well = await self._delete_old()
        partners = self._context.partners
        for run in [run for run in partners if run not in self._context.memory.runs()]:
            del partners[run]  # its trainers left long ago
        for run, partner in list(partners.items()):
            is_well &= await self._copy_run(run, partner)
        self._set_interval()
        return is_well

    async def _copy_run(self, run: Run, partner: PartnerNode) -> bool:
        """False when a part could not be copied."""
        for own in self._uncopied(run, partner):
            if own not in self._uncopied(run, partner):
                break  # newer ones have been copied since
            if self._copies.get(own.id) is not None:
                continue  # of another node, of which this one was the partner
            try:
                async with asyncio.timeout(TURN_S if len(self._context.partners) > 1 else None):
                    await self._copy_for(own, partner)
            except NotFound:
                continue  # not persisted there yet, or not kept any more
            except TimeoutError:
                return True  # it goes on with the next pass
            except TierdError as error:
                self._context.incidents.record(self.name, error, own.id)
                return False  # the next one would fail, too
        return True

    async def _copy_for(self, own: NodeFile, partner: PartnerNode) -> None:
        """As `_copy`. Raises TimeoutError when the trainers have told another partner meanwhile: the node of an earlier
        start may be slow, and the new one waits."""
        copy = asyncio.create_task(self._copy(own, partner))
        try:
            while not (await asyncio.wait({copy}, timeout=CHECK_S))[0]:
                if self._context.partners.get(own.id.run) != partner:
                    raise TimeoutError
            await copy
        finally:
            copy.cancel()
            await asyncio.gather(copy, return_exceptions=True)

    def _set_interval(self) -> None:
        """The other node has often persisted its part a moment later than this one."""
        waiting = {own.id for run, partner in self._context.partners.items() for own in self._uncopied(run, partner)}
        self._poll_s = min(2 * self._poll_s, POLL_MAX_S) if waiting == self._waiting else POLL_MIN_S
        self.interval_s = self._poll_s if waiting else IDLE_S
        self._waiting = waiting

    async def make_room(self, need_bytes: int) -> int:
        """Deletes incomplete copies that are not being written now, then copies of checkpoints that cold has, oldest
        first. Returns how many bytes were freed."""
        freed_bytes = 0
        for checkpoint in sorted(self._begun, key=lambda checkpoint: checkpoint.recency):
            if freed_bytes < need_bytes and checkpoint != self._active:
                size_bytes = self._begun[checkpoint].taken_bytes
                if await self._delete(checkpoint, only_begun=True):
                    freed_bytes += size_bytes
        for run in self._copies.runs():
            sizes = self._copies.sizes(run)
            for checkpoint in reversed(await self._not_needed(run, is_full=True)):
                if freed_bytes < need_bytes and await self._delete(checkpoint):
                    freed_bytes += sizes[checkpoint]
        return freed_bytes

    def lag_s(self, run: Run) -> float | None:
        """The age of the oldest checkpoint of which this node has its own part but not the copy that it should have; 0
        if there is none; None if this node keeps no copies."""
        partner = self._context.partners.get(run)
        if partner is None:
            return None
        created = [own.created for own in self._uncopied(run, partner) if own.created is not None]
        # The time is that of the node of rank 0, whose clock may be ahead.
        return max((max(0.0, (self._context.now() - time).total_seconds()) for time in created), default=0.0)

    def _uncopied(self, run: Run, partner: PartnerNode) -> list[NodeFile]:
        """This node's parts of the checkpoints of which the partner's part is to be copied, newest first: of those that
        have no copy, the ones among the COPIED_MAX newest and, where the partner is slower, older ones that are newer
        than every copy. Without those whose copy would be deleted at once."""
        parts = self._context.catalog.parts(run)
        needed = self._needed_least(run, [part.id for part in parts], is_full=False)
        own = [part for part in parts if part.generation == partner.generation and part.id in needed]
        uncopied: list[NodeFile] = []
        has_newer = False
        for index, part in enumerate(own[:ASKED_MAX]):
            copy = self._copies.get(part.id)
            if copy is not None and copy.name == partner.node_file:
                has_newer = True
            elif index < COPIED_MAX or not has_newer:
                uncopied.append(part)
        return uncopied

    async def _copy(self, own: NodeFile, partner: PartnerNode) -> None:
        """Raises NotFound while the partner has not persisted its part, PeerUnreachable, Corrupt, Full."""
        context, config = self._context, self._context.config
        started_s = context.monotonic_s()
        async with PeerStore(
            partner.peer,
            needs_tls=config.peers.tls,
            is_hot=True,
            bandwidth=self._copies.bandwidth,
            count_read=context.metrics.peer_bytes_total.labels(direction="in").inc,
        ) as store:
            where = f"the node at {partner.peer.address}"
            tier = ReadableTier(where, store, limits=config.limits, keyring=context.keyring)
            part, raw = await tier.read_manifest(layout.file_key(own.id, partner.node_file))
            assert isinstance(part, NodeFile)
            if part.head_digest != own.head_digest:
                raise Corrupt(f"copy {part.name} of {own.id} from {where}: it is a part of another checkpoint")
            if shared := set(part.ranks).intersection(own.ranks):
                ranks = ranks_text(sorted(shared))
                raise Corrupt(f"copy {part.name} of {own.id} from {where}: its ranks overlap this node's part: {ranks}")
            begun = self._begun.get(own.id)
            is_of_another_node = begun is not None and begun.manifest.files != part.files
            if own.id in self._copies.unreadable or is_of_another_node:
                await self._delete(own.id)
            # A copy must leave room for the next part of this node. What was begun has its space already.
            begun_bytes = begun.taken_bytes if begun is not None and not is_of_another_node else 0
            if missing_bytes := await self._space.missing_bytes(part.size_bytes - begun_bytes + own.size_bytes):
                raise Full(f"copy {part.name} of {own.id} into hot: {missing_bytes} bytes more are needed")
            fetch = Fetch(part, self._copies.store, reserves=context.keyring is not None)
            async with self._deleting:  # else what make_room deletes of an earlier attempt may be of this one
                self._begun[own.id] = fetch
                self._active = own.id
            try:
                with context.throttle.writing(PEERS) as count_written:
                    await fetch.begin()
                    problem = await fetch.take(tier, count_written) if fetch.missing_bytes else None
                if problem is not None:
                    raise problem
                await fetch.finish()
                async with self._deleting:
                    await self._copies.commit(part, raw, peer=partner.peer)
                    self._begun.pop(own.id, None)
            finally:
                self._active = None
        seconds, ranks = context.monotonic_s() - started_s, ranks_text(part.ranks)
        log.info("copied %d bytes of %s from %s (ranks %s) in %.3f s", part.size_bytes, own.id, where, ranks, seconds)
        # The trainers may have told another partner meanwhile, of whose part this is no copy.
        if (now := context.partners.get(own.id.run)) is not None and now.node_file == part.name:
            context.notify.send(own.id.run, wire.Copied(step=own.step, generation=own.generation))

    async def _delete_old(self) -> bool:
        """Deletes copies that no restart needs, and incomplete ones that are not wanted any more."""
        wanted = {
            own.id
            for run, partner in self._context.partners.items()
            for own in self._uncopied(run, partner)[:COPIED_MAX]
        }
        is_well = all([await self._delete(each) for each in list(self._begun) if each not in wanted])
        for run in self._copies.runs():
            # Delete these before the next run is examined: the trainers of this run may come back meanwhile.
            is_well &= all([await self._delete(each) for each in await self._not_needed(run, is_full=False)])
        return is_well

    async def _delete(self, checkpoint: CheckpointId, *, only_begun: bool = False) -> bool:
        """False when it could not be deleted. `only_begun`: keep a copy that was completed meanwhile, or is being
        written."""
        async with self._deleting:
            if only_begun and (checkpoint not in self._begun or checkpoint == self._active):
                return False
            try:
                await self._copies.delete(checkpoint)
            except TierdError as error:
                self._context.incidents.record(self.name, error, checkpoint)
                return False
        self._begun.pop(checkpoint, None)
        self._context.notify.space_freed()
        return True

    async def _not_needed(self, run: Run, *, is_full: bool) -> list[CheckpointId]:
        """The copies that no restart may need, newest first. If that rests on a checkpoint in cold, cold has it now."""
        copies = list(self._copies.sizes(run))
        without_cold = self._needed(run, copies, None)
        needed = self._needed_least(run, copies, is_full=is_full)
        if newest := next((copy for copy in copies if copy in without_cold - needed), None):
            action, failed_tiers = f"delete the copy of {newest}", set[str]()
            is_there = await is_newest_there(self._context, run, newest, failed_tiers, action=action, worker=self.name)
            # Trainers may have come back, or a newer checkpoint may be known to be durable on every node.
            copies = list(self._copies.sizes(run))
            needed = self._needed_least(run, copies, is_full=is_full) if is_there else self._needed(run, copies, None)
        return [copy for copy in copies if copy not in needed]

    def _needed_least(self, run: Run, checkpoints: list[CheckpointId], *, is_full: bool) -> set[CheckpointId]:
        """As `_needed`, given what cold has."""
        catalog = self._context.catalog
        has_left = run in catalog.left and run not in self._context.memory.runs()
        return self._needed(run, checkpoints, catalog.newest_in_cold(run), is_cold_enough=is_full or has_left)

    def _needed(
        self,
        run: Run,
        checkpoints: list[CheckpointId],
        newest_in_cold: CheckpointId | None,
        *,
        is_cold_enough: bool = False,
    ) -> set[CheckpointId]:
        """Of these, those whose copies a restart may need: the same as of the parts."""
        return needed_parts(
            checkpoints,
            everywhere=self._context.catalog.everywhere.get(run),
            newest_in_cold=newest_in_cold,
            is_cold_enough=is_cold_enough,
        )
