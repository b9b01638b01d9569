"""The copies of other nodes' parts of checkpoints that this node keeps, in a folder of the hot directory.

The folder is laid out as a tier. A copy exists when its node file does, which is written last. If a node is lost, a
restore reads its part from here.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from tierd.config.sections import Config
from tierd.errors import NotFound, TierdError
from tierd.format import layout
from tierd.format.ids import HOT, CheckpointId, Run
from tierd.format.node_file import NodeFile
from tierd.format.peers import PeerAddress
from tierd.format.signature import Keyring
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.rate_limit import Bandwidth
from tierd.tiers.tier import Tier

log = logging.getLogger("tierd")


class PartCopies:
    """At most one copy for each checkpoint: a node keeps the copies of one other node. `bandwidth`: limits the copying.
    `unreadable`: the sizes in bytes of copies that are damaged, or whose node file cannot be read. They stay for a
    person to look at while their checkpoint is needed; a new copy replaces them."""

    def __init__(self, config: Config, keyring: Keyring | None = None) -> None:
        self.store = DirectoryStore(
            config.hot_path / layout.PEERS, timeout_s=config.limits.directory_timeout_s, access=config.access
        )
        self.tier = Tier(HOT, self.store, limits=config.limits, keyring=keyring)  # there, parts are complete
        self.bandwidth = Bandwidth(0.0)
        self.unreadable: dict[CheckpointId, int] = {}
        self._parts: dict[CheckpointId, NodeFile] = {}
        self._peers: dict[CheckpointId, PeerAddress] = {}

    async def recover(self) -> None:
        """At the start: learns what is there, and deletes what is not complete. A failure is logged: the daemon does
        not need copies to serve its own node."""
        try:
            listing = await self.tier.listing()
            keys = {each: layout.file_key(each, names[0]) for each, names in listing.node_files.items()}
            for checkpoint, found in zip(keys, await self.tier.decode_many(list(keys.values())), strict=True):
                if isinstance(found, NodeFile):
                    self._parts[found.id] = found
                elif isinstance(found, TierdError):
                    text = "a copy of another node's part is not used; its files are kept for inspection: %s"
                    log.warning(text, found.message)
                    self.unreadable[checkpoint] = sum(listing.files[checkpoint].values())
            # Last: a file that cannot be deleted must not hide the copies that are complete.
            for checkpoint in listing.partial:
                try:
                    await self.delete(checkpoint)
                except TierdError as error:
                    log.warning("delete an incomplete copy of another node's part: %s", error.message)
            await self.store.sweep_partials(is_given_up=_always)
        except TierdError as error:
            log.warning("find the copies of other nodes' parts: %s", error.message)

    def get(self, checkpoint: CheckpointId) -> NodeFile | None:
        return self._parts.get(checkpoint)

    def of_run(self, run: Run) -> list[NodeFile]:
        """Newest first."""
        return sorted(
            (part for part in self._parts.values() if part.run == run), key=lambda part: part.id.recency, reverse=True
        )

    def runs(self) -> Collection[Run]:
        return {checkpoint.run for checkpoint in (*self._parts, *self.unreadable)}

    def sizes(self, run: Run) -> dict[CheckpointId, int]:
        """The sizes in bytes of all copies of the run, readable or not, newest first."""
        found = {part.id: part.size_bytes for part in self._parts.values()} | self.unreadable
        ids = sorted((each for each in found if each.run == run), key=lambda each: each.recency, reverse=True)
        return {checkpoint: found[checkpoint] for checkpoint in ids}

    async def open_files(self, part: NodeFile, names: Collection[str]) -> list[int]:
        """Descriptors, which the caller closes. Raises NotFound when it has just been deleted."""
        if self._parts.get(part.id) != part:
            raise NotFound(f"open the copy of {part.name} of {part.id}: it was just deleted")
        return await self.store.open_files(layout.file_key(part.id, name) for name in names)

    def peer(self, checkpoint: CheckpointId) -> PeerAddress | None:
        """The daemon whose part it is; None where that is not known, after a restart."""
        return self._peers.get(checkpoint)

    async def commit(self, part: NodeFile, raw: bytes, *, peer: PeerAddress | None) -> None:
        """Commit a copy whose shards are durable. `raw`: the node file. `peer`: the daemon whose part it is."""
        await self.tier.commit(part, raw=raw)
        self._parts[part.id] = part
        if peer is not None:
            self._peers[part.id] = peer

    def set_aside(self, part: NodeFile) -> None:
        """The copy is damaged: from now on nothing reads it."""
        del self._parts[part.id]
        self.unreadable[part.id] = part.size_bytes

    async def delete(self, checkpoint: CheckpointId) -> None:
        """Delete a copy, even an incomplete one. Raises as `Store.delete`; what is left then counts as unreadable, so
        that it is deleted later."""
        part, left_bytes = self._parts.pop(checkpoint, None), self.unreadable.pop(checkpoint, 0)
        self._peers.pop(checkpoint, None)
        try:
            await self.tier.delete(checkpoint)
            await self.store.sweep_partials(layout.checkpoint_prefix(checkpoint).rstrip("/"), is_given_up=_always)
        except TierdError:
            self.unreadable[checkpoint] = part.size_bytes if part is not None else left_bytes
            raise


def _always(key: str, written_at_s: float) -> bool:
    return True
