"""Fetches from other nodes what the trainers here need of their parts of a checkpoint, chunk by chunk.

The files have temporary names in hot, are never committed, and are deleted once the run is restored. Each chunk is
fetched once, whichever rank asks first, and verified against the node file of its part.
"""

from __future__ import annotations

import logging
import re

import msgspec

from tierd.config_file import is_host
from tierd.context import DaemonContext
from tierd.descriptors import close_all
from tierd.errors import BadRequest, NotFound
from tierd.format import layout
from tierd.format.bitmap import unpack_indexes
from tierd.format.ids import CheckpointId, Run, checkpoint_id
from tierd.format.node_file import NodeFile
from tierd.format.node_messages import FindElsewhere
from tierd.format.peers import PeerAddress
from tierd.format.wire import DESCRIPTORS_MAX
from tierd.tiers.peer_store import PeerStore
from tierd.tiers.readable_tier import ReadableTier
from tierd.transfer.fetch import Fetch
from tierd.workers.fetcher import Fetcher, OnProgress, PeerFetches

log = logging.getLogger("tierd")

PEER = "peer"
_FINGERPRINT = re.compile(r"([0-9a-f]{64})?")


class PeerFetcher:
    def __init__(self, context: DaemonContext, fetcher: Fetcher) -> None:
        self._context = context
        self._fetcher = fetcher

    async def bring(self, run: Run, asked: FindElsewhere, on_progress: OnProgress) -> list[int]:
        """Descriptors of the files that are asked for, in order. Raises NotFound when that node has no such part,
        TierUnreachable, Corrupt, Full."""
        checkpoint = checkpoint_id(run, asked.step, asked.generation)
        if not 0 < len(asked.files) == len(asked.chunks) <= DESCRIPTORS_MAX:
            raise BadRequest(f"find files of {checkpoint} on another node: {len(asked.files)} files")
        check_address(asked.peer)
        descriptors: list[int] = []
        started_s, size_bytes = self._context.monotonic_s(), 0
        config, count_read = self._context.config, self._context.metrics.peer_bytes_total.labels(direction="in").inc
        async with PeerStore(asked.peer, needs_tls=config.peers.tls, count_read=count_read) as store:
            tier = ReadableTier(f"the node at {asked.peer.address}", store, limits=config.limits)
            part = await self._part(tier, checkpoint, asked)
            fetches = self._fetches(run, checkpoint)
            try:
                for name, packed in zip(asked.files, asked.chunks, strict=True):
                    async with fetches.locks[name]:
                        fetch = self._fetch(fetches, part, name)
                        fetch.want({name: unpack_indexes(packed)})
                        size_bytes += fetch.missing_bytes
                        await self._bring_file(fetch, tier, on_progress)
                        descriptors += await fetch.open_files()
            except BaseException:
                close_all(descriptors)
                raise
        if size_bytes:
            seconds = self._context.monotonic_s() - started_s
            log.info("fetched %d bytes of %s from %s in %.3f s", size_bytes, checkpoint, tier.name, seconds)
        return descriptors

    async def _part(self, tier: ReadableTier, checkpoint: CheckpointId, asked: FindElsewhere) -> NodeFile:
        if layout.parse_node_file(asked.node_file) is None:
            raise BadRequest(f"find files of {checkpoint} on another node: {asked.node_file[:80]!r} is no node file")
        part, _ = await tier.read_manifest(layout.file_key(checkpoint, asked.node_file))
        assert isinstance(part, NodeFile)
        return part

    def _fetches(self, run: Run, checkpoint: CheckpointId) -> PeerFetches:
        """Those of the checkpoint that is being restored. Those of another one are given up."""
        fetches = self._fetcher.from_peers.get(run)
        if fetches is None or fetches.checkpoint != checkpoint:
            fetches = self._fetcher.from_peers[run] = PeerFetches(checkpoint)
        return fetches

    def _fetch(self, fetches: PeerFetches, part: NodeFile, name: str) -> Fetch:
        """The fetch of this file that was begun before, or a new one that wants no chunk yet."""
        files = [entry for entry in part.files if entry.name == name]
        if not files:
            raise NotFound(f"find {name[:80]!r} of {part.id} on another node: it is not in {part.name}")
        of_file = msgspec.structs.replace(part, files=files)
        fetch = fetches.fetches.get(name)
        if fetch is None or fetch.manifest.files != files:
            fetch = fetches.fetches[name] = Fetch(of_file, self._context.hot_store, wanted={name: ()})
        return fetch

    async def _bring_file(self, fetch: Fetch, tier: ReadableTier, on_progress: OnProgress) -> None:
        await self._fetcher.begin(fetch)

        def count(size_bytes: int) -> None:
            on_progress(fetch.wanted_bytes - fetch.missing_bytes, fetch.wanted_bytes)

        count(0)
        if fetch.missing_bytes and (problem := await fetch.take(tier, count)) is not None:
            raise problem


def check_address(peer: PeerAddress) -> None:
    """Raises BadRequest unless a request to this address asks for nothing but a part."""
    host, _, port = peer.address.rpartition(":")
    is_pinned = _FINGERPRINT.fullmatch(peer.fingerprint) is not None
    if not is_host(host.strip("[]")) or not port.isdecimal() or not peer.token.isalnum() or not is_pinned:
        raise BadRequest(f"read from the node at {peer.address[:80]!r}: not host:port, no token, or no fingerprint")
