"""The trainers of a job whose nodes keep copies of each other's parts: what they tell the daemons, how they restore.

Two decisions of the client are real: which snapshot is safe on every node, and from where a checkpoint is restored.
They are loaded from their files, because the package needs torch. Modelled after snapshotter.py, node_parts.py and
attempts.py: the exchange before each snapshot, partners, inventories, and the sources that are tried one by one.

Not modelled: domains, chunks (a simulated shard has one), more than 32 checkpoints of a node.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tests.support.simulation.checker import Id
from tests.support.simulation.copies_checker import CopiesChecker
from tests.support.simulation.node_trainers import NodeRank, NodeTrainers
from tests.support.simulation.nodes_checker import shard_name
from tests.support.simulation.trainer import SLOW_S, Disconnected, Refusal, is_intact, read_and_close
from tierd.format import layout, wire
from tierd.format.bitmap import pack_indexes
from tierd.format.ids import CheckpointId, checkpoint_id

VERDICT_S = 60.0  # a rank waits so long for the verdict on a part
CLIENT = Path(__file__).parents[3] / "client" / "tierd_client"


def _load(path: str) -> Any:
    name = f"simulated_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, CLIENT / path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


everywhere = _load("snapshot/everywhere.py")
node_choice = _load("restore/node_choice.py")


def partners(lowest: Sequence[int]) -> dict[int, int]:
    """For each node, known by its lowest rank, the one that keeps its copy: of one domain."""
    nodes, half = sorted(lowest), len(lowest) // 2
    keeps: dict[int, int] = {}
    for one, other in zip(nodes[:half], nodes[len(nodes) - half :], strict=True):
        keeps[one], keeps[other] = other, one
    if len(nodes) % 2 and half:
        keeps |= {nodes[half - 1]: nodes[half], nodes[half]: nodes[-1], nodes[-1]: nodes[half - 1]}
    return keeps


class CopyingTrainers(NodeTrainers):
    _checker: CopiesChecker

    # ── partners, and what is safe on every node ──

    async def _join(self) -> None:
        self._partner_of: list[str] = []
        self._partners: dict[int, wire.Partner] = {}
        loop = asyncio.get_running_loop()
        self._heard: dict[tuple[int, int], float] = {}  # since when each rank waits for the verdict on a step
        self._safe = [everywhere.EverywherePersisted(loop.time) for _ in self._ranks]
        await super()._join()

    @property
    def _lowest(self) -> list[NodeRank]:
        """The lowest rank of each node, ascending."""
        return [self._ranks[self.placement.index(node)] for node in dict.fromkeys(self.placement)]

    def _ranks_on(self, node: str) -> list[int]:
        return [rank for rank, each in enumerate(self.placement) if each == node]

    async def _exchange(self) -> None:
        attached_to = [rank.welcome.boot for rank in self._ranks if rank.welcome is not None]
        maxima = [max(column) for column in zip(*(safe.missing() for safe in self._safe), strict=True)]
        if attached_to != self._partner_of:
            self._partner_of = attached_to
            await self._find_partners()
        await self._agree(maxima)

    async def _find_partners(self) -> None:
        lowest = {rank.number: rank for rank in self._lowest}
        for owner, keeper in partners(list(lowest)).items():
            welcome = lowest[owner].welcome
            assert welcome is not None
            assert welcome.peer is not None
            name = layout.node_file_name(owner, self.job.world_size)
            self._partners[keeper] = wire.Partner(peer=welcome.peer, node_file=name)
            self._safe[keeper].keeps_copies = True
            await self._tell(lowest[keeper], self._partners[keeper])

    async def _agree(self, maxima: list[int]) -> None:
        steps = [safe.agree(maxima) for safe in self._safe]
        if steps[0] is None:
            return
        assert len(set(steps)) == 1, steps
        assert self.generation is not None
        has_copies = all(not safe.keeps_copies or steps[0] in safe._copied for safe in self._safe)
        agreed = Id(self.job.run, self.generation, steps[0])
        self._trace("everywhere", self.holder, agreed, "" if has_copies else "without all copies")
        now_s = asyncio.get_running_loop().time()
        heard = [self._heard.get((rank, steps[0]), math.inf) for rank in range(len(self._ranks))]
        has_verdicts = not any(now_s - heard_s > VERDICT_S for heard_s in heard)
        self._checker.agreed(agreed, has_copies=has_copies, has_verdicts=has_verdicts)
        for rank in self._lowest:
            if await self._tell(rank, wire.Everywhere(step=steps[0])):
                self._checker.told_everywhere(rank.node, agreed)

    async def _tell(self, rank: NodeRank, message: wire.ToDaemon) -> bool:
        """False when the daemon has died. What is sent arrives later."""
        try:
            await rank.send(message)
        except (Disconnected, BrokenPipeError):
            return False
        return True

    async def _attach(self, rank: NodeRank) -> None:
        await super()._attach(rank)
        if rank.number in self._partners:
            await self._tell(rank, self._partners[rank.number])

    def _hear(self, rank: NodeRank, message: wire.ToClient) -> None:
        safe = self._safe[rank.number] if rank in self._ranks else None
        if safe is not None and isinstance(message, wire.Copied | wire.Replicated):
            safe.copied(message.generation, message.step)
        if safe is not None and isinstance(message, wire.Persisted | wire.Replicated):
            safe.persisted(message.generation, message.step)
        if safe is not None and isinstance(message, wire.Persisted):
            now_s = asyncio.get_running_loop().time() if message.is_healthy is None else math.inf
            self._heard[rank.number, message.step] = min(now_s, self._heard.get((rank.number, message.step), now_s))
        if safe is not None and isinstance(message, wire.Persisted) and message.is_healthy is not None:
            self._heard[rank.number, message.step] = math.inf
            safe.examined(message.generation, message.step, is_healthy=message.is_healthy)

    def _taken(self) -> None:
        for safe in self._safe:
            safe.taken(self.generation, self.step)

    # ── restore ──

    async def _restore(self) -> None:
        faults, began_s = self._faults(), asyncio.get_running_loop().time()
        least = self._checker.newest_on(self.job.run, self.placement)
        restored, files = await self._restore_newest()
        now = self._checker.newest_on(self.job.run, self.placement)
        is_slow = asyncio.get_running_loop().time() - began_s > SLOW_S
        is_excused = self._faults() != faults or is_slow or least is None or now is None or now < least
        is_excused = is_excused or self._allows_unhealthy
        self._trace("restored", self.holder, restored)
        self._checker.restored(self.job.run, self.node, restored, files, None if is_excused else least)
        self.restored, self.step = restored, restored.step if restored else 0
        for rank in self._ranks if restored is not None else ():
            report = wire.Report(outcome="restored", step=self.step, tier="peer", seconds=1.0, detail="")
            await self._tell(rank, report)

    async def _restore_newest(self) -> tuple[Id | None, dict[str, bytes]]:
        run, nodes = self.job.run, [await self._ask(rank) for rank in self._lowest]
        failed: list[tuple[CheckpointId, str]] = []
        unhealthy: set[CheckpointId] = set()
        while True:
            narrowed = {"allow_unhealthy": self._allows_unhealthy, "failed": failed, "unhealthy": unhealthy}
            parts, passed_over = node_choice.choose_parts(nodes, run, **narrowed)
            whole = node_choice.newest_whole(nodes, run, **narrowed)
            if parts is None or (whole is not None and whole.recency > parts.checkpoint.recency):
                exclude = [f"{checkpoint.name}@{tier}" for checkpoint, tier in failed]
                try:
                    found, files = await self._find_on(self._ranks[0], None, exclude)
                except Refusal:
                    if parts is None:
                        raise
                    found, files = None, {}
                if found is not None and (parts is None or (found.generation, found.step) > parts.checkpoint.recency):
                    return await self._read_whole(found), files
                if parts is None:
                    await self._check_scratch(passed_over)
                    return None, {}
            checkpoint = parts.checkpoint
            try:
                files = await self._read_parts(nodes, checkpoint, parts.tier)
            except Refusal as refused:
                self._trace("could not read", self.holder, checkpoint, parts.tier, refused)
                failed.append((checkpoint, parts.tier))
                if refused.kind == "peer_unreachable":
                    nodes = [msgspec.structs.replace(node, peer=None) for node in nodes]
                elif refused.kind == "unhealthy":
                    unhealthy.add(checkpoint)
                elif refused.kind not in ("corrupt", "not_found", "tier_unreachable", "transient"):
                    raise
                continue
            return Id(run, checkpoint.generation, checkpoint.step), files

    async def _read_whole(self, found: Id) -> Id:
        for rank in self._lowest[1:]:
            same, files = await self._find_on(rank, found)
            if same is None:
                raise Refusal("not_found")
            self._checker.restored(self.job.run, rank.node, same, files, None)
        return found

    async def _check_scratch(self, passed_over: list[Any]) -> None:
        """Nothing is whole in a tier, and the nodes together have nothing."""
        if passed_over and all(each.is_unhealthy for each in passed_over):
            raise Refusal("unhealthy")
        if any(each.is_covered for each in passed_over):
            raise Refusal("unreachable")
        for rank in self._lowest[1:]:
            if (known := await self._find_on(rank, None))[0] is not None:
                self._trace("not from scratch", self.holder, known[0])
                raise Refusal("unreachable")

    async def _ask(self, rank: NodeRank) -> Any:
        question = wire.Inventory(request=0, step=None, generation=None, milestone=None, lists_cold=rank.number == 0)
        await rank.send(question)
        held = await rank.answer(wire.Held)
        ranks = self._ranks_on(rank.node)
        return node_choice.NodeInventory(ranks=ranks, checkpoints=held.checkpoints, peer=held.peer, copies=held.copies)

    async def _read_parts(self, nodes: list[Any], checkpoint: CheckpointId, tier: str) -> dict[str, bytes]:
        """The whole checkpoint: of each node's ranks as that node reads their shards."""
        size = self.job.world_size
        own: dict[int, dict[str, bytes]] = {}  # by the lowest rank of a node: the shards of its part
        sources: dict[str, tuple[Any, dict[str, Any]]] = {}  # of each shard: the node, and the node file
        copies = node_choice.used_copies(nodes, checkpoint, tier)
        for node in nodes:
            rank, lowest = self._ranks[node.ranks[0]], node.ranks[0]
            held = node_choice.used_part(node, nodes, checkpoint, tier)
            if held is not None:
                about, own[lowest] = await self._find_part(rank, checkpoint, "hot" if tier == "hot" else "auto")
                sources |= dict.fromkeys(own[lowest], (node, about))
            if lowest in copies:
                about, files = await self._find_part(rank, checkpoint, "hot", is_copy=True)
                sources |= dict.fromkeys(files, (node, about))
        read: dict[str, bytes] = {}
        for node in nodes:
            here = own.get(node.ranks[0], {})
            for name in (shard_name(rank, size) for rank in node.ranks):
                if name in here:
                    read[name] = here[name]
                else:
                    rank = self._ranks[node.ranks[0]]
                    read[name] = await self._find_elsewhere(rank, checkpoint, *sources[name], name)
        return read

    async def _find_part(
        self, rank: NodeRank, checkpoint: CheckpointId, tier: str, *, is_copy: bool = False
    ) -> tuple[dict[str, Any], dict[str, bytes]]:
        """The node file, and the files in it."""
        find = wire.Find(
            request=0,
            step=checkpoint.step,
            generation=checkpoint.generation,
            milestone=None,
            tier=tier,
            exclude=[],
            allow_unhealthy=self._allows_unhealthy,
            is_node_part=True,
            is_copy=is_copy,
        )
        await rank.send(find)
        _, descriptors = await rank.answer(wire.FoundReplica)
        raw, *contents = [read_and_close(descriptor) for descriptor in descriptors]
        about = json.loads(raw)
        entries = zip(about["files"], contents, strict=True)
        files = {entry["name"]: content[: entry["size_bytes"]] for entry, content in entries}
        if checkpoint != checkpoint_id(about["run"], about["step"], about["generation"]) or not is_intact(about, files):
            raise Refusal("corrupt")
        return about, files

    async def _find_elsewhere(
        self, rank: NodeRank, checkpoint: CheckpointId, node: Any, about: dict[str, Any], name: str
    ) -> bytes:
        """A shard that another node has, as this rank's daemon reads it there."""
        saved = min(about["ranks"])
        asked = wire.FindElsewhere(
            request=0,
            step=checkpoint.step,
            generation=checkpoint.generation,
            peer=node.peer,
            node_file=layout.node_file_name(saved, about["world_size"]),
            files=[name],
            chunks=[pack_indexes([0])],
        )
        await rank.send(asked)
        _, (descriptor,) = await rank.answer(wire.FoundReplica)
        entry = next(entry for entry in about["files"] if entry["name"] == name)
        content = read_and_close(descriptor)[: entry["size_bytes"]]
        if not is_intact({"files": [entry]}, {name: content}):
            raise Refusal("corrupt")
        return content
