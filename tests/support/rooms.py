"""The rooms between the doors and the tiers, real ones, for tests of a single worker."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.cli import content, make_manifest
from tests.support.config import make_config
from tests.support.slots import make_memfd, make_sealed
from tests.support.store_contract import BytesSource
from tierd.catalog.catalog import Catalog
from tierd.catalog.identity import Identities
from tierd.catalog.listing import refresh
from tierd.config.sections import Config
from tierd.context import DaemonContext
from tierd.format import layout, wire
from tierd.format.checksum import CHUNK_BYTES
from tierd.format.digest import preferred
from tierd.format.ids import CheckpointId, Generation, Rank, Run, checkpoint_id
from tierd.format.manifest import Manifest
from tierd.format.signature import Keyring
from tierd.memory.slot import MappedSlot, SlotEvent
from tierd.memory.snapshot_set import SnapshotSet
from tierd.memory.tier import MemoryTier
from tierd.metrics import Metrics
from tierd.status.incidents import Incidents
from tierd.throttle import WriteThrottle
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.tier import Tier
from tierd.workers.lister import Lister
from tierd.workers.persister import Persister
from tierd.workers.reaper import Reaper
from tierd.workers.replicator import Replicator

RUN = Run("run42")


class Rooms:
    """A daemon's context over real directories. It records what workers report instead of acting on it: `sent` has the
    messages to trainers, `events` the other calls of Notifier."""

    def __init__(self, config: Config, keyring: Keyring | None = None, **clocks: Any) -> None:
        names = [cold.name for cold in config.cold]
        self.catalog = Catalog(["hot", *names])
        self.memory = MemoryTier(algorithm="" if keyring is None else preferred())
        self.metrics = Metrics(tiers=["hot", *names])
        self.incidents = Incidents(self.metrics, lambda: "now")
        self.hot_store = DirectoryStore(config.hot_path)
        self.hot = Tier("hot", self.hot_store, keyring=keyring)
        self.cold = {
            cold.name: Tier(cold.name, DirectoryStore(Path("/", cold.url.removeprefix("file://"))), keyring=keyring)
            for cold in config.cold
        }
        self.throttle = WriteThrottle(
            ["hot", *names, "peers", "served"],
            config.daemon,
            metrics=self.metrics,
            on_limit=lambda tier: None,
            now_s=time.monotonic,
        )
        self.sent: list[wire.ToClient] = []
        self.events: list[tuple[str, ...]] = []
        self.context = DaemonContext(
            config=config,
            catalog=self.catalog,
            memory=self.memory,
            hot=self.hot,
            hot_store=self.hot_store,
            cold=self.cold,
            identities=Identities(config, lambda error: self.incidents.record("list", error)),
            metrics=self.metrics,
            incidents=self.incidents,
            throttle=self.throttle,
            notify=self,
            keyring=keyring,
            **clocks,
        )
        self.tiers = self.context.tiers
        self.listers = {name: Lister(self.context, tier, 10.0) for name, tier in self.tiers.items()}

    @property
    def config(self) -> Config:
        return self.context.config

    @config.setter
    def config(self, config: Config) -> None:
        self.context = replace(self.context, config=config)

    # ── Notifier ──

    def send(self, run: Run, message: wire.ToClient) -> None:
        self.sent.append(message)

    def snapshot_sealed(self) -> None:
        self.events.append(("snapshot_sealed",))

    def persist_ended(self, run: Run) -> None:
        self.events.append(("persist_ended", run))
        list(self.memory.release(run))

    def replicated(self) -> None:
        self.events.append(("replicated",))

    def part_sent(self, tier: str) -> None: ...

    def examined(self) -> None:
        self.events.append(("examined",))

    def hot_refused(self) -> None:
        self.events.append(("hot_refused",))

    def space_freed(self) -> None:
        self.events.append(("space_freed",))

    def relist(self, tier: str, *, is_wrong: bool = True) -> None:
        self.listers[tier].must_list |= is_wrong
        self.events.append(("relist", tier))

    def run_forgotten(self, run: Run) -> None:
        self.events.append(("run_forgotten", run))

    # ── workers ──

    def persister(self) -> Persister:
        return Persister(self.context, Reaper(self.context).make_room)

    def replicator(self, tier: str = "cold") -> Replicator:
        return Replicator(self.context, self.cold[tier])

    def seal(
        self,
        step: int,
        contents: Iterable[bytes] = (b"state",),
        *,
        run: str = RUN,
        generation: int = 1,
        node: wire.NodeRanks | None = None,
        world_size: int = 0,
        **fields: Any,
    ) -> SnapshotSet:
        """A whole set: one rank for each of the contents, each in a new slot. `node`: of these ranks, where the run has
        others elsewhere, `world_size` in all."""
        shards = list(contents)
        found = None
        for number, shard in zip(range(len(shards)) if node is None else node.ranks, shards, strict=True):
            rank, of = Rank(number), (Run(run), Generation(generation), Rank(number))
            if self.memory.generation(of[0]) != generation or rank not in self.memory.present(of[0]):
                self.memory.enter(*of, world_size or len(shards), node)
            index = step % 16
            capacity_bytes = -(-len(shard) // 4096) * 4096
            descriptor = make_memfd(capacity_bytes)
            os.pwrite(descriptor, shard, 0)
            self.memory.attach(*of, index, MappedSlot(descriptor, capacity_bytes))
            if not fields.get("resent"):
                self.memory.fill(*of, index)
            sealed = make_sealed(step, len(shard), slot=index, **fields)
            found = self.memory.seal(*of, sealed, now_s=float(step))
        assert found is not None
        return found

    async def commit(
        self,
        *tiers: str,
        step: int = 100,
        generation: int = 1,
        sequence: int = 1,
        size_bytes: int = 20_000,
        **more: Any,
    ) -> Manifest:
        """The same checkpoint of two ranks in each of the tiers, which nobody has looked at yet."""
        checkpoint = checkpoint_id(more.pop("run", RUN), step, generation)
        milestones: tuple[str, ...] = more.pop("milestones", ())
        for name in tiers:
            tier = self.tiers[name]
            entries = []
            for rank in (0, 1):
                shard = content(checkpoint, rank, size_bytes)
                key = layout.file_key(checkpoint, layout.shard_name(Rank(rank), 2))
                entries.append(
                    await tier.store.put(key, BytesSource(shard), size_bytes=size_bytes, chunk_bytes=CHUNK_BYTES)
                )
            for milestone in milestones:
                await tier.mark_milestone(checkpoint, milestone, "now")
            manifest = make_manifest(checkpoint, entries, sequence=sequence)
            await tier.commit(manifest)
        return manifest

    async def list_tiers(self, *names: str) -> None:
        """List these tiers as the daemon does, or all. Raises TierUnreachable."""
        for name in names or self.tiers:
            await self.listers[name].run_once()

    async def look(self) -> None:
        for tier in self.tiers.values():
            await refresh(self.catalog, tier)

    def folder(self, tier: str, checkpoint: CheckpointId) -> Path:
        store = self.tiers[tier].store
        assert isinstance(store, DirectoryStore)
        return store.root / checkpoint.run / checkpoint.name

    def steps(self, tier: str, run: str = RUN) -> list[int]:
        """Of the committed checkpoints on the disk, newest first."""
        folder = self.folder(tier, checkpoint_id(run, 0, 1)).parent
        return sorted((int(one.parent.name[:12]) for one in folder.glob("*/manifest.json")), reverse=True)

    def count(self, metric: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(metric, labels)

    async def close(self) -> None:
        for tier in self.tiers.values():
            await tier.store.close()
        for run in self.memory.runs():
            for rank in self.memory.present(run):
                self.memory.leave(run, rank, now_s=0.0)
        for one in self.memory.pending():
            one.move(SlotEvent.PERSIST)
            one.move(SlotEvent.PERSISTED)
        self.memory.forget_departed(now_s=1e12, grace_s=0.0)


@asynccontextmanager
async def rooms_at(
    root: Path, *, keyring: Keyring | None = None, clocks: dict[str, Any] | None = None, **sections: Any
) -> AsyncIterator[Rooms]:
    rooms = Rooms(make_config(root, **sections), keyring, **(clocks or {}))
    try:
        yield rooms
    finally:
        await rooms.close()
