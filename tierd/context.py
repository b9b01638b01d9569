"""What the workers and sockets of one daemon share: its config, tiers, catalog, metrics and clocks, and whom to notify.

The daemon builds it once. Clocks are injected, so that tests decide what time it is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

import msgspec

from tierd.audit import AuditTrail
from tierd.cadences import Cadences
from tierd.catalog.catalog import Catalog
from tierd.catalog.identity import Identities
from tierd.config.sections import Config
from tierd.copies import CopyRecords
from tierd.format import wire
from tierd.format.claim import Claim
from tierd.format.ids import HOT, CheckpointId, Generation, Run
from tierd.format.manifest import Manifest
from tierd.format.node_file import NodeFile
from tierd.format.peers import NodeAddress, PeerAddress
from tierd.format.signature import Keyring, SomeManifest
from tierd.keys.peer_key import PeerKey
from tierd.memory.snapshot_set import SnapshotSet
from tierd.memory.tier import MemoryTier
from tierd.metrics import Metrics
from tierd.status.incidents import Incidents
from tierd.throttle import WriteThrottle
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.part_copies import PartCopies
from tierd.tiers.tier import Tier
from tierd.traces import Traces


class Notifier(Protocol):
    """What has happened, for the other workers and the trainers. Every call returns at once."""

    def send(self, run: Run, message: wire.ToClient) -> None:
        """Send a message to every rank of the run's current generation."""

    def snapshot_sealed(self) -> None:
        """All ranks have sealed a snapshot: it can be persisted and examined."""

    def persist_ended(self, run: Run) -> None:
        """A snapshot was persisted, or an attempt to persist it failed."""

    def replicated(self) -> None:
        """A cold tier has one more replica: hot may evict its own."""

    def part_sent(self, tier: str) -> None:
        """A cold tier has this node's part of a checkpoint over several nodes."""

    def examined(self) -> None:
        """A checkpoint has a health verdict: the plan may be different now."""

    def hot_refused(self) -> None:
        """Hot could not take a snapshot, because it is full or broken: a cold tier may take it."""

    def space_freed(self) -> None:
        """A replica was deleted: its tier has room again."""

    def relist(self, tier: str, *, is_wrong: bool = True) -> None:
        """List the tier again. `is_wrong`: the catalog may be wrong about it. Otherwise it has not answered, and a node
        that is not home need not list it, but look at what it holds."""

    def run_forgotten(self, run: Run) -> None:
        """The run's slots were given back to the system."""


class PartnerNode(NamedTuple):
    """The node whose parts of a generation are copied here. `node_file`: the name of its node files. `lifecycle`: the
    digest of its rules."""

    generation: Generation
    peer: PeerAddress
    node_file: str
    lifecycle: str = ""


class RunRoster(NamedTuple):
    """The nodes of a generation, as its ranks have told. `own_ranks`: of this node in it; in a later one they may be on
    another node."""

    generation: Generation
    nodes: list[NodeAddress]
    own_ranks: list[int]


@dataclass(slots=True, kw_only=True)
class DaemonContext:
    """`config`: of the moment, because a reload changes it. `now` is the wall clock, in UTC; `monotonic_s` a clock that
    never goes back, in seconds. `part_copies`: None where nodes do not read from each other. `partners`: of the runs of
    which parts are copied here. `rosters`: of the runs over several nodes whose trainers have told it.
    `watched_nodes`: of the runs whose checkpoints each node adopts from its own folder, which node this is."""

    config: Config
    catalog: Catalog
    memory: MemoryTier
    hot: Tier
    hot_store: DirectoryStore
    cold: Mapping[str, Tier]
    identities: Identities
    metrics: Metrics
    incidents: Incidents
    throttle: WriteThrottle
    notify: Notifier
    keyring: Keyring | None = None
    audit: AuditTrail = field(default_factory=AuditTrail)
    traces: Traces = field(default_factory=Traces)
    copies: CopyRecords = field(default_factory=CopyRecords)
    cadences: Cadences = field(default_factory=Cadences)
    peer_key: PeerKey = field(default_factory=PeerKey)
    part_copies: PartCopies | None = None
    partners: dict[Run, PartnerNode] = field(default_factory=dict[Run, PartnerNode])
    rosters: dict[Run, RunRoster] = field(default_factory=dict[Run, RunRoster])
    watched_nodes: dict[Run, int] = field(default_factory=dict[Run, int])
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    monotonic_s: Callable[[], float] = time.monotonic
    _fenced: dict[Run, int] = field(default_factory=dict[Run, int])
    _locks: WeakValueDictionary[CheckpointId, asyncio.Lock] = field(default_factory=WeakValueDictionary)

    def reload(self, config: Config) -> None:
        """Decide by this config from now on. A pass that has planned deletions plans again before the next one."""
        self.config = config
        self.catalog.changes += 1

    @property
    def tiers(self) -> dict[str, Tier]:
        """The tiers with a store, by name: hot first, then the cold ones in the order of the config."""
        return {HOT: self.hot, **self.cold}

    def make_manifest(self, snapshot_set: SnapshotSet, *, sequence: int) -> Manifest:
        """The manifest of a whole set, or the node file of a run over several nodes; signed where there is a key."""
        if snapshot_set.node is not None:
            return self.signed(snapshot_set.make_node_file())
        return self.signed(snapshot_set.make_manifest(sequence=sequence))

    def node_file(self, part: NodeFile, *, is_healthy: bool | None) -> NodeFile:
        """The node file of this node's part, with the verdict on it as far as it is known."""
        return part if is_healthy is None else self.signed(msgspec.structs.replace(part, is_healthy=is_healthy))

    def signed(self, manifest: SomeManifest) -> SomeManifest:
        """The same manifest, signed where there is a key."""
        return manifest if self.keyring is None else self.keyring.sign_manifest(manifest)

    @property
    def runs_here(self) -> set[Run]:
        """The runs that have checkpoints in hot, trainers, or a watched folder on this node."""
        return {checkpoint.run for checkpoint in self.catalog.in_tier(HOT)} | self._training

    @property
    def lists_cold(self) -> bool:
        """Whether this daemon lists the cold tiers at each interval: it is home of a run on this node, or no run is
        here. While one trains here, a run that was on this node alone and has ended does not count: each node may have
        one, and the home of the run that trains is home of that one, too."""
        training = self._training
        runs = {run for run in self.runs_here if not training or run in training or self.catalog.parts(run)}
        return not runs or any(map(self.is_home, runs))

    @property
    def _training(self) -> set[Run]:
        """The runs with trainers or a watched folder on this node."""
        return {*self.memory.runs(), *self.watched_nodes}

    def is_home(self, run: Run) -> bool:
        """Whether this daemon deletes and clears the run's checkpoints in cold tiers. Of a run over several nodes that
        is the daemon of rank 0, also when its trainers have left, until another node claims a newer generation; without
        it, deletions there wait."""
        if run in self.memory.runs():
            is_replaced = self.is_continued_elsewhere(run, self.memory.generation(run))
            return 0 in self.memory.ranks(run) and not (is_replaced and self.memory.node(run) is not None)
        if run in self.watched_nodes:
            return self.watched_nodes[run] == 0
        parts = self.catalog.parts(run)  # newest first
        if not parts:
            return True
        newest = next(entry.id for entry in self.catalog.entries(run) if HOT in entry.tiers)
        # The last start may have been on this node alone. A restore also fetches whole checkpoints of other nodes, and
        # of the start over several nodes whose claim is here, too.
        is_later = newest.generation > parts[0].generation
        is_alone = is_later and self.catalog.claims.was_claimed_here(run, newest.generation)
        is_first, last = is_alone or 0 in parts[0].ranks, newest if is_alone else parts[0].id
        return is_first and not self.is_continued_elsewhere(run, last.generation)

    def is_continued_elsewhere(self, run: Run, generation: int) -> bool:
        """Whether another node has claimed a newer generation of the run."""
        newest = self.catalog.generation_max(run)
        return newest > generation and not self.catalog.claims.was_claimed_here(run, newest)

    def other_nodes(self, run: Run) -> list[NodeAddress]:
        """The nodes of the run but this one, as far as the trainers have told them. Until those of a new start do, the
        nodes of the one before."""
        roster = self.rosters.get(run)
        return [node for node in roster.nodes if node.ranks != roster.own_ranks] if roster is not None else []

    def new_claim(self) -> Claim:
        """A new claim of a start on this node."""
        return Claim.new(self.config.daemon.node, self.identities.hot, now_s=self.now().timestamp())

    def persisted(self, checkpoint: CheckpointId, *, seconds: float = 0.0, every_s: float = 0.0) -> wire.Persisted:
        """What the trainers are told of a checkpoint in hot: of a part also the verdict on it, if there is one yet."""
        entry, snapshot_set = self.catalog.get(checkpoint), self.memory.find(checkpoint)
        is_healthy: bool | None = True
        part = entry.part if entry is not None else None
        if entry is not None and part is not None and (self.config.health.examine or part.is_reported_unhealthy):
            is_healthy = entry.examined
            if is_healthy is None and snapshot_set is not None:
                is_healthy = snapshot_set.is_healthy
        return wire.Persisted(
            step=checkpoint.step,
            generation=checkpoint.generation,
            seconds=seconds,
            every_s=every_s,
            is_healthy=is_healthy,
        )

    async def claim(self, tier: Tier, run: Run, generation: Generation, claim: Claim) -> bool:
        """Claim a generation in a tier. False when another start has it there. Raises as the tier's store."""
        is_ours = await tier.claim_generation(run, generation, claim)
        if is_ours or tier is not self.hot:
            self.catalog.claims.saw(run, [generation], tier.name, is_here=tier is self.hot)
        return is_ours

    def fence(self, run: Run, generation: int, *, by: int) -> bool:
        """Another start has replaced this generation: its trainers here, if there are any, are told to end. True the
        first time, which is counted: more than one tier may say it, again and again."""
        self.catalog.saw_generation(run, by)
        if self.memory.generation(run) != generation:
            return False
        self.notify.send(run, wire.Fenced(generation=by))
        is_new = self._fenced.get(run) != generation
        self._fenced[run] = generation
        self.metrics.fenced_total.inc(is_new)
        return is_new

    def lock(self, checkpoint: CheckpointId) -> asyncio.Lock:
        """To be held while a replica of the checkpoint is deleted, or a marker is written beside one: a marker that is
        written after the deletion would leave a folder without a manifest."""
        return self._locks.setdefault(checkpoint, asyncio.Lock())

    def newer_generations(self) -> dict[Run, int]:
        """The newest generation seen in a tier, of each run whose attached trainers here have an older one."""
        newest = {run: self.catalog.generation_max(run) for run in self.memory.runs() if self.memory.present(run)}
        return {run: newer for run, newer in newest.items() if newer > self.memory.generation(run)}

    def timestamp(self) -> str:
        """The time as ISO 8601 in UTC, to the millisecond."""
        return self.now().isoformat(timespec="milliseconds")
