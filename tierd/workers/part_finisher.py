"""Sends the part of a lost node to a cold tier, from the copy of it that this node, its partner, keeps.

A checkpoint over several nodes is committed when the parts of all nodes are in the tier. A node counts as lost when for
LOST_AFTER_S it has accepted no connection, or has answered that it lacks the part (as after the loss of its disk), or
its address or token is not known here (after a restart of either daemon). A slow node is not lost: otherwise both would
send the same bytes.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from tierd.catalog.listing import files_of
from tierd.context import DaemonContext
from tierd.descriptors import close_all
from tierd.errors import NotFound, PeerRestarted, TierdError, Transient
from tierd.format import layout
from tierd.format.audit import EventKind
from tierd.format.ids import CheckpointId
from tierd.format.node_file import NodeFile
from tierd.tiers.checkpoint_copy import copy_part
from tierd.tiers.part_copies import PartCopies
from tierd.tiers.peer_store import PeerStore
from tierd.tiers.tier import Tier
from tierd.workers.open_copy import examine_copy

log = logging.getLogger("tierd")

LOST_AFTER_S = 120.0  # since the first of consecutive looks at which the other node could not send its part
CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 10.0


class PartFinisher:
    name = "replicate"
    interval_s = 30.0
    is_urgent = False

    def __init__(self, context: DaemonContext, copies: PartCopies, cold: Tier) -> None:
        self._context = context
        self._copies = copies
        self._cold = cold
        self._silent_since_s: dict[CheckpointId, float] = {}  # since when the other node could not send its part

    async def run_once(self) -> bool:
        """False when a part could not be sent. Raises Transient when the tier does not answer, or a copy cannot be read
        now: the others are sent all the same, as that may be one bad sector."""
        waiting = {part.id: part for part in self._context.catalog.sent_parts(self._cold.name)}
        waiting = {checkpoint: own for checkpoint, own in waiting.items() if self._copies.get(checkpoint) is not None}
        self._silent_since_s = {each: since for each, since in self._silent_since_s.items() if each in waiting}
        is_well, failure = True, None
        for own in sorted(waiting.values(), key=lambda own: own.id.recency, reverse=True):
            if await self._has_part(own.id):
                self._silent_since_s.pop(own.id, None)
                continue
            now_s = self._context.monotonic_s()
            if now_s - self._silent_since_s.setdefault(own.id, now_s) < LOST_AFTER_S:
                continue
            try:
                await self._finish(own)
            except Transient as error:
                failure = failure or error
            except TierdError as error:
                self._context.incidents.record(self.name, error, own.id)
                is_well = False
        if failure is not None:
            raise failure
        return is_well

    async def _has_part(self, checkpoint: CheckpointId) -> bool:
        """Whether the other node can send its part itself: it accepts a connection, and does not answer that it lacks
        the part, as after the loss of its disk. False also if its address is not known, because this daemon has
        restarted, and if that daemon has restarted and the trainers have not told its new token yet."""
        peer, part = self._copies.peer(checkpoint), self._copies.get(checkpoint)
        if peer is None or part is None:
            return False
        partner = self._context.partners.get(checkpoint.run)
        if partner is not None and partner.peer.address == peer.address:
            peer = partner.peer
        host, _, port = peer.address.rpartition(":")
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except (OSError, TimeoutError):
            return False
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        with suppress(TimeoutError, TierdError):
            async with (
                asyncio.timeout(ANSWER_TIMEOUT_S),
                PeerStore(peer, needs_tls=self._context.config.peers.tls, is_hot=True) as store,
            ):
                try:
                    await store.get_bytes(part.key, size_max=self._copies.tier.manifest_bytes_max)
                except (NotFound, PeerRestarted):
                    return False
        return True  # also a node that is too slow to answer

    async def _finish(self, own: NodeFile) -> None:
        """Raises as `copy_part`."""
        part = self._copies.get(own.id)
        if part is None:
            return
        names = set(await files_of(self._cold, own.id))
        if part.name in names or own.name not in names or names & {layout.GONE, layout.MANIFEST}:
            return
        # Its node may have found a NaN after it had written the node file that was copied.
        descriptors = await self._copies.open_files(part, [file.name for file in part.files])
        try:
            is_healthy = await examine_copy(self._context, part, descriptors)
        finally:
            close_all(descriptors)
        node_file = self._context.node_file(part, is_healthy=is_healthy)
        with self._context.throttle.writing(self._cold.name) as count_written:
            await copy_part(part, self._copies.tier, self._cold, lambda: node_file, progress=count_written)
        text = "sent %s of %s to %s from the copy here: for %.0f s it could not be read from the node that saved it"
        log.info(text, part.name, own.id, self._cold.name, LOST_AFTER_S)
        self._context.audit.record(EventKind.REPLICATED, checkpoint=own.id, tier=self._cold.name, reason=part.name)
        self._context.metrics.bytes_total.labels(tier=self._cold.name, direction="write").inc(part.size_bytes)
        self._context.notify.part_sent(self._cold.name)
