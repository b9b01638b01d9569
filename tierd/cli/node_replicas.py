"""A checkpoint that no tier here has whole, assembled from the parts that the nodes of its run have in hot.

The parts are this node's own, its copy of another node's, and those that other nodes serve. The daemon here knows the
addresses and tokens of the other nodes from the trainers. Each node file is checked as any manifest is, and the fetch
verifies every chunk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace

from tierd.catalog.entry import Entry
from tierd.catalog.listing import files_of
from tierd.cli.console import print_note
from tierd.cli.joined_parts import Holder, JoinedParts
from tierd.cli.opened_tiers import OpenedTiers
from tierd.config.file import run_proof
from tierd.config.sections import Config
from tierd.errors import BadConfig, Corrupt, Incomplete, NotFound, TierdError, TierUnreachable, unhealthy
from tierd.format import layout
from tierd.format.ids import AUTO, HOT, CheckpointId, checkpoint_id
from tierd.format.manifest import Manifest
from tierd.format.node_file import NodeFile, assemble, milestones, missing_ranks, ranks_text
from tierd.format.node_messages import HELD_MAX
from tierd.format.peers import HeldPart, NodeAddress, NodeParts
from tierd.lifecycle.selection import Candidate, CheckpointQuery, SelectableReplicas, select, with_run
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.readable_tier import ReadableTier
from tierd.tiers.tier import Tier

COPIES = "copies"  # the second replica, where parts have more than one holder: it leaves out the first of each
_HINT = "`tierd status` shows the nodes; --tier cold takes what is committed there; docs/RUNBOOK.md#peers"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReplica:
    """The checkpoint that was chosen. `tiers`: by name; hot is replaced by the parts on the nodes. `holders`: by the
    name of the node file."""

    query: CheckpointQuery
    inventory: SelectableReplicas
    tiers: Mapping[str, ReadableTier]
    holders: Mapping[str, Sequence[Holder]]

    def refusal(self, error: TierdError) -> TierdError:
        """The error of the restore: `error`, or Incomplete with the missing ranks if nodes were lost meanwhile."""
        reasons: list[str] = []
        ranks: list[int] = []
        for holders in self.holders.values():
            errors = [
                holder.lost for holder in holders if holder.lost is not None and not isinstance(holder.lost, Corrupt)
            ]
            if len(errors) == len(holders):
                ranks += holders[0].ranks
                reasons.append(errors[0].message)
        checkpoint = self.inventory.candidates[0].id
        return _incomplete(checkpoint, sorted(ranks), reasons) if ranks else error


async def find_on_nodes(
    query: CheckpointQuery, inventory: SelectableReplicas, tiers: OpenedTiers, config: Config, stack: AsyncExitStack
) -> NodeReplica | None:
    """The newest checkpoint that matches and whose parts the nodes have together. None if there is none, or if a tier
    here has that checkpoint or a newer one whole: then the caller selects from the tiers. `stack` closes what is
    opened.

    Raises Incomplete with the ranks that are missing, if no tier has the answer either.
    """
    if query.tier not in (AUTO, HOT):
        return None
    whole: CheckpointId | None = None
    try:
        whole = select(query, inventory).candidate.id
    except (NotFound, TierUnreachable) as error:
        if isinstance(error, TierUnreachable) and not query.is_named:
            return None  # the tier that cannot be listed may have a newer one
    runs = [entry.id.run for entry in tiers.catalog.entries() if _has_shards(entry)]
    run = whole.run if whole is not None else with_run(query, runs).run
    if run is None:
        return None
    search = _Search(replace(query, run=run), tiers, config, stack)
    refusals: list[TierdError] = []
    for checkpoint in await search.newer_than(whole):
        try:
            return await search.join(checkpoint)
        except TierdError as error:
            refusals.append(error)
            if whole is not None or not query.is_named:
                print_note(f"tierd: passed over: {error.message}")
    if whole is None and refusals:
        raise refusals[0]
    return None


def _has_shards(entry: Entry) -> bool:
    """Whether hot has a node's part of a snapshot. Nodes do not read from each other what they have adopted."""
    return entry.part is not None and not entry.part.is_adopted


class _Search:
    """A search for the parts of checkpoints of one run on all of its nodes."""

    def __init__(self, query: CheckpointQuery, tiers: OpenedTiers, config: Config, stack: AsyncExitStack) -> None:
        assert query.run is not None
        self._query, self._run = query, query.run
        self._by_name, self._hot = tiers.by_name, tiers.by_name[HOT]
        self._config, self._stack = config, stack
        self._entries = {entry.id: entry for entry in tiers.catalog.entries(self._run) if _has_shards(entry)}
        folder = config.hot_path / layout.PEERS
        timeout_s = config.limits.directory_timeout_s
        store = DirectoryStore(folder, timeout_s=timeout_s, access=config.access, url=f"file://{folder}")
        stack.push_async_callback(store.close)
        self._copies = Tier(HOT, store, limits=config.limits, keyring=self._hot.keyring)
        self._others: list[tuple[ReadableTier, NodeParts]] = []
        self._reasons: list[str] = []  # why nodes cannot be read

    async def newer_than(self, whole: CheckpointId | None) -> list[CheckpointId]:
        """The checkpoints that match and of which a node has a part, newest first, at most HELD_MAX. Asks the other
        nodes only if this node has a part, or if the tier hot was named."""
        found = self._matching(self._entries, whole)
        if found or self._query.tier == HOT:
            await self._ask_others()
            ids = {checkpoint_id(self._run, part.step, part.generation) for _, part in self._on_others()}
            found = self._matching(ids | self._entries.keys(), whole)
        return sorted(found, key=lambda checkpoint: checkpoint.recency, reverse=True)[:HELD_MAX]

    def _matching(self, found: Iterable[CheckpointId], whole: CheckpointId | None) -> list[CheckpointId]:
        return [
            checkpoint
            for checkpoint in found
            if (whole is None or checkpoint.recency > whole.recency)
            and self._query.matches(checkpoint, self._milestones(checkpoint))
        ]

    def _milestones(self, checkpoint: CheckpointId, *others: str) -> frozenset[str]:
        """The milestones of the checkpoint that this node knows, and of `others`, without those that are removed."""
        entry = self._entries.get(checkpoint)
        if entry is None or entry.part is None:
            return frozenset(others)
        return layout.counted(entry.all_marks | {entry.part.milestone, *others} - {""})

    async def _ask_others(self) -> None:
        from tierd.api.operator_socket import find_nodes
        from tierd.tiers.node_parts import ask_nodes
        from tierd.tiers.peer_store import PeerStore

        config, nodes = self._config, list[NodeAddress]()
        try:
            uid, proof = config.daemon_uid, run_proof()
            nodes = await asyncio.to_thread(find_nodes, config.socket_path, self._run, daemon_uid=uid, proof=proof)
            if not nodes:
                self._reasons.append("the daemon here knows no other node: the trainers tell it at their next snapshot")
        except TierdError as error:
            self._reasons.append(f"the daemon here, which may know the other nodes, was not asked: {error.message}")
        for node, answer in zip(nodes, await ask_nodes(self._run, nodes, needs_tls=config.peers.tls), strict=True):
            where = f"the node of ranks {ranks_text(node.ranks)}"
            where += "" if node.peer is None else f" at {node.peer.address}"
            if isinstance(answer, NodeParts) and node.peer is not None:  # which it is not where TLS is missing there
                store = await self._stack.enter_async_context(
                    PeerStore(node.peer, needs_tls=config.peers.tls, is_hot=True)
                )
                tier = ReadableTier(where, store, limits=config.limits, keyring=self._hot.keyring)
                self._others.append((tier, answer))
            else:
                self._reasons.append(f"{where}: {answer}")

    def _on_others(self) -> Iterator[tuple[ReadableTier, HeldPart]]:
        """First all parts, then all copies."""
        yield from ((tier, part) for tier, node in self._others for part in node.parts)
        yield from ((tier, part) for tier, node in self._others for part in node.copies)

    async def join(self, checkpoint: CheckpointId) -> NodeReplica:
        """Raises Incomplete, Unhealthy, or Corrupt when the parts are not of one checkpoint."""
        holders = await self._holders(checkpoint)
        parts: dict[str, NodeFile] = {}
        for name, each in list(holders.items()):
            part, holders[name] = await self._read_part(checkpoint, name, each)
            if part is None:
                continue
            if part.head_digest == next(iter(parts.values()), part).head_digest:
                parts[name] = part
            else:
                ranks, where = ranks_text(part.ranks), holders[name][0].tier.name
                self._reasons.append(f"{where} has ranks {ranks} of another start of the run")
        found = list(parts.values())
        missing = missing_ranks(found) if found else []
        if missing or not found:
            raise _incomplete(checkpoint, missing, self._reasons)
        verdicts = {holder.healthy for name in parts for holder in holders[name]}
        if False in verdicts and not self._query.allow_unhealthy:
            raise unhealthy(checkpoint, "the part of a node")
        return self._replica(assemble(found), parts, {name: holders[name] for name in parts}, verdicts)

    def _replica(
        self,
        manifest: Manifest,
        parts: Mapping[str, NodeFile],
        holders: Mapping[str, Sequence[Holder]],
        verdicts: set[bool | None],
    ) -> NodeReplica:
        checkpoint, keyring = manifest.id, self._hot.keyring
        if keyring is not None:
            try:
                manifest = keyring.sign_manifest(manifest)
            except BadConfig:
                print_note(f"tierd: the manifest of {checkpoint} is not signed: there are only public keys here")
        files = {layout.file_key(checkpoint, file.name): name for name, part in parts.items() for file in part.files}
        raw, hot = manifest.encode(), self._hot.store
        joined = {HOT: {key: list(holders[name]) for key, name in files.items()}}
        if any(len(holder) > 1 for holder in holders.values()):
            joined[COPIES] = {key: each[1:] for key, each in joined[HOT].items()}
        replicas = {name: ReadableTier(name, JoinedParts(raw, manifest, each, hot)) for name, each in joined.items()}
        print_note(
            f"tierd: {checkpoint} is read from "
            + ", ".join(f"{holder[0].tier.name} (ranks {ranks_text(holder[0].ranks)})" for holder in holders.values())
        )
        is_healthy = False if False in verdicts else None if None in verdicts else True
        names = self._milestones(checkpoint, *milestones(parts.values()))
        candidate = Candidate(id=checkpoint, milestones=names, tiers=tuple(replicas), is_healthy=is_healthy)
        step, generation = checkpoint.step, checkpoint.generation
        return NodeReplica(
            query=replace(self._query, step=step, generation=generation, milestone=None, tier=AUTO),
            inventory=SelectableReplicas(candidates=[candidate]),
            tiers={**self._by_name, **replicas},
            holders=holders,
        )

    async def _holders(self, checkpoint: CheckpointId) -> dict[str, list[Holder]]:
        """The holders of each part, by the name of its node file: this node first, copies last."""
        found: dict[str, list[Holder]] = {}
        entry = self._entries.get(checkpoint)
        if entry is not None and entry.part is not None:
            hot = replace(self._hot, name="hot here")
            found[entry.part.name] = [Holder(hot, entry.part.ranks, entry.examined)]
        with suppress(TierdError):  # there are none, or the folder is being changed
            here = replace(self._copies, name="the copy here")
            for name in layout.node_files(await files_of(self._copies, checkpoint)):
                found.setdefault(name, []).append(Holder(here, [], None))
        for tier, held in self._on_others():
            is_same = (held.step, held.generation) == (checkpoint.step, checkpoint.generation)
            if is_same and layout.parse_node_file(held.node_file) is not None:
                found.setdefault(held.node_file, []).append(Holder(tier, held.ranks, held.healthy))
        return found

    async def _read_part(
        self, checkpoint: CheckpointId, name: str, holders: Sequence[Holder]
    ) -> tuple[NodeFile | None, list[Holder]]:
        """The part, and the holders that have it. Why others cannot be read is added to the reasons."""
        part: NodeFile | None = None
        able: list[Holder] = []
        for holder in holders:
            try:
                own, _ = await holder.tier.read_manifest(layout.file_key(checkpoint, name))
            except TierdError as error:
                self._reasons.append(error.message)
                continue
            assert isinstance(own, NodeFile)
            if part is None or own.files == part.files:
                part, holder.ranks = part or own, own.ranks
                holder.healthy = own.is_healthy if holder.healthy is None else holder.healthy
                able.append(holder)
        return part, able


def _incomplete(checkpoint: CheckpointId, ranks: Sequence[int], reasons: Sequence[str]) -> Incomplete:
    missing = f"the parts of ranks {ranks_text(ranks)} are missing" if ranks else "no part of it can be read"
    return Incomplete(
        f"restore {checkpoint} from the nodes: {missing}: {'; '.join(reasons) or 'no node has them'}", hint=_HINT
    )
