"""Fetches from other nodes what the trainers here need of their parts of a checkpoint, chunk by chunk.

The files have temporary names in hot, are never committed, and are deleted once the run is restored. Each chunk is
fetched once, whichever rank asks first, and verified against the node file of its part.

A trainer names the address, so the server there may be its own and its node file may claim any size. With a key, only
signed node files count. Without one, nothing in hot gives way to more bytes than have come and were verified.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager

import msgspec

from tierd.config.file import is_host
from tierd.context import DaemonContext
from tierd.descriptors import closed_on_error
from tierd.errors import BadRequest, Corrupt, NotFound, Transient
from tierd.format import layout
from tierd.format.bitmap import unpack_indexes
from tierd.format.checksum import CHUNK_BYTES
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

_FINGERPRINT = re.compile(r"([0-9a-f]{64})?")


class PeerFetcher:
    def __init__(self, context: DaemonContext, fetcher: Fetcher) -> None:
        self._context = context
        self._fetcher = fetcher
        self._node_files_bytes = 0  # of all requests in progress

    async def bring(self, run: Run, asked: FindElsewhere, on_progress: OnProgress) -> list[int]:
        """Descriptors of the files that are asked for, in order. Raises NotFound when that node has no such part,
        TierUnreachable, Corrupt, Full."""
        checkpoint = checkpoint_id(run, asked.step, asked.generation)
        if not 0 < len(asked.files) == len(asked.chunks) <= DESCRIPTORS_MAX:
            raise BadRequest(f"find files of {checkpoint} on another node: {len(asked.files)} files")
        check_address(asked.peer)
        descriptors: list[int] = []
        started_s, size_bytes = self._context.monotonic_s(), 0
        context, config = self._context, self._context.config
        count_read = context.metrics.peer_bytes_total.labels(direction="in").inc
        async with PeerStore(asked.peer, needs_tls=config.peers.tls, count_read=count_read) as store:
            where = f"the node at {asked.peer.address}"
            tier = ReadableTier(where, store, limits=config.limits, keyring=context.keyring)
            async with self._part(tier, checkpoint, asked) as part:
                fetches = await self._fetches(run, checkpoint)
                with closed_on_error(descriptors):
                    for name, packed in zip(asked.files, asked.chunks, strict=True):
                        async with fetches.locks[name]:
                            fetch = self._fetch(fetches, part, name)
                            size_bytes += await self._bring_file(fetch, unpack_indexes(packed), tier, on_progress)
                            descriptors += await fetch.open_files()
        if size_bytes:
            seconds = context.monotonic_s() - started_s
            log.info("fetched %d bytes of %s from %s in %.3f s", size_bytes, checkpoint, tier.name, seconds)
        return descriptors

    @asynccontextmanager
    async def _part(
        self, tier: ReadableTier, checkpoint: CheckpointId, asked: FindElsewhere
    ) -> AsyncGenerator[NodeFile]:
        if layout.parse_node_file(asked.node_file) is None:
            raise BadRequest(f"find files of {checkpoint} on another node: {asked.node_file[:80]!r} is no node file")
        part, raw = await tier.read_manifest(layout.file_key(checkpoint, asked.node_file))
        assert isinstance(part, NodeFile)
        if any(entry.chunk_bytes > CHUNK_BYTES for entry in part.files):
            raise Corrupt(f"read {part.name} of {checkpoint} from {tier.name}: its chunks are larger than any daemon's")
        limit_bytes = self._context.config.limits.manifests_mib_max << 20
        if self._node_files_bytes + len(raw) > limit_bytes:
            raise Transient(f"read {part.name} of {checkpoint} from {tier.name}: too many are being read")
        self._node_files_bytes += len(raw)
        try:
            yield part
        finally:
            self._node_files_bytes -= len(raw)

    async def _fetches(self, run: Run, checkpoint: CheckpointId) -> PeerFetches:
        """The fetches of the checkpoint that is being restored. Those of other checkpoints are given up and deleted."""
        fetches = self._fetcher.from_peers.get(run)
        if fetches is None or fetches.checkpoint != checkpoint:
            former, fetches = fetches, PeerFetches(checkpoint)
            self._fetcher.from_peers[run] = fetches
            if former is not None:
                await self._fetcher.sweep(run)
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

    async def _bring_file(
        self, fetch: Fetch, indexes: Iterable[int], tier: ReadableTier, on_progress: OnProgress
    ) -> int:
        """Returns how many bytes have come. Without a key, the first chunk must find free space, and then room is made
        for no more bytes at a time than have come before. A hole in a file reads as zeros, so what is found here does
        not count."""
        (entry,) = fetch.manifest.files
        is_signed = self._context.keyring is not None
        left = fetch.unverified(entry.name, indexes)
        total_bytes = sum(min(entry.chunk_bytes, entry.size_bytes - index * entry.chunk_bytes) for index in left)
        come_bytes = 0

        def count(size_bytes: int) -> None:
            nonlocal come_bytes
            come_bytes += size_bytes
            on_progress(min(come_bytes, total_bytes), total_bytes)

        count(0)
        while True:
            step = len(left) if is_signed else max(1, come_bytes // entry.chunk_bytes)
            fetch.want({entry.name: left[:step]})
            left = left[step:]
            await self._fetcher.begin(fetch, room_bytes_max=None if is_signed else come_bytes)
            if fetch.missing_bytes and (problem := await fetch.take(tier, count)) is not None:
                raise problem
            if not left:
                return come_bytes


def check_address(peer: PeerAddress) -> None:
    """Raises BadRequest unless a request to this address asks for nothing but a part."""
    host, _, port = peer.address.rpartition(":")
    is_pinned = _FINGERPRINT.fullmatch(peer.fingerprint) is not None
    is_port = re.fullmatch("[0-9]{1,5}", port) is not None and 0 < int(port) < 1 << 16
    if not is_host(host.strip("[]")) or not is_port or not peer.token.isalnum() or not is_pinned:
        raise BadRequest(f"read from the node at {peer.address[:80]!r}: not host:port, no token, or no fingerprint")
