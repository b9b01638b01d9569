"""The promises about copies of parts: what a restart needs stays, and one node may be lost with its disk.

As the other checkers, it shares no code with what it checks. It knows which step the trainers have agreed on as safe on
every node, and what each daemon was told of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.support.simulation.checker import COLD, FULL_S, Id, identify
from tests.support.simulation.nodes_checker import NodesChecker, Part, PartsPlace

PEERS = ".peers"


def copies_of(name: str) -> str:
    """The place in which a node keeps copies."""
    return f"{name} copies"


@dataclass
class CopiesChecker(NodesChecker):
    """`copies`: by node, what it keeps of other nodes' parts. `everywhere`: the newest healthy checkpoint that was
    agreed on. `survives_a_loss`: it had all copies then, and no disk was lost since. `told`: by node, what its daemon
    was told since its start."""

    copies: dict[str, dict[Id, Part]] = field(default_factory=lambda: defaultdict(dict))
    everywhere: Id | None = None
    survives_a_loss: bool = False
    told: dict[str, Id] = field(default_factory=dict[str, Id])

    # ── what the trainers say ──

    def agreed(self, checkpoint: Id, *, has_copies: bool, has_verdicts: bool) -> None:
        """The ranks have agreed that it is safe on every node. `has_copies`, `has_verdicts`: not because copies, or the
        examination of a part, took too long."""
        if checkpoint in self.unhealthy and has_verdicts:
            self.violate("an unhealthy step counts as safe", f"{checkpoint}: the nodes let the one before it go")
        self.everywhere = None if checkpoint in self.unhealthy else checkpoint
        self.survives_a_loss = has_copies
        self._check_restorable("an agreement on what one lost node would cost")

    def told_everywhere(self, node: str, checkpoint: Id) -> None:
        """Before the message arrives."""
        self.told[node] = max(self.told.get(node, checkpoint), checkpoint)

    def daemon_died(self, node: str) -> None:
        """It forgets what it was told."""
        self.told.pop(node, None)

    # ── what is on the disks ──

    def lose_place(self, name: str) -> None:
        super().lose_place(name)
        self.copies[name] = {}
        if not self.survives_a_loss:
            self.everywhere = None  # the second one, or it had no copies
        self.survives_a_loss = False
        self._check_restorable(f"the loss of {name} cost more than the steps since")

    def observe(self, name: str, now_s: float, by: str = "") -> None:
        in_cold = len(self.committed[COLD]) if name == COLD else 0
        super().observe(name, now_s, by)
        if name == COLD:
            if len(self.committed[COLD]) < in_cold:
                self._check_restorable("cold deleted what a restart needs")
            return
        place = self.places[copies_of(name)]
        assert isinstance(place, PartsPlace)
        before = self.copies[name]
        now = {identify(folder): node_file for folder, node_file in place.parts().items()}
        for checkpoint in [each for each in before if each not in now]:
            before.pop(checkpoint)
            self._check_needed(f"the copy of {checkpoint} in {name}", name, checkpoint, now_s)
        for checkpoint, node_file in now.items():
            if checkpoint not in before:
                before[checkpoint] = self._read_part(copies_of(name), checkpoint, node_file)

    def observe_bytes(self, name: str, now_s: float) -> None:
        super().observe_bytes(name, now_s)
        for checkpoint, copy in self.copies[name].items() if name != COLD else ():
            self._check_bytes(copies_of(name), checkpoint, copy)

    def _check_part_deletion(self, name: str, checkpoint: Id, part: Part, now_s: float) -> None:
        super()._check_part_deletion(name, checkpoint, part, now_s)
        if checkpoint not in self.unhealthy:
            self._check_needed(f"the part of {checkpoint} in {name}", name, checkpoint, now_s)

    def _check_needed(self, what: str, name: str, checkpoint: Id, now_s: float) -> None:
        """It was deleted. H1: not from the newest step on that is known to be safe on every node, unless hot is full
        and cold has that one or a newer one."""
        in_cold, floor = self._newest_in_cold(), self._floor(name)
        is_full = now_s - self.full_at_s.get(name, -FULL_S) < FULL_S
        is_replaced = is_full and in_cold is not None and in_cold >= checkpoint
        if (floor is None or checkpoint >= floor) and not is_replaced:
            self.violate("a node deleted what a restart may need", f"{what}, from {floor} on it stays")
        self._check_restorable(f"without {what} a lost node costs more than the steps since")

    def _floor(self, name: str) -> Id | None:
        """The oldest checkpoint that a node keeps for a restart; None: all."""
        told, in_cold = self.told.get(name), self._newest_in_cold()
        is_former = told is not None and in_cold is not None and told.generation < in_cold.generation
        return in_cold if told is None or is_former else told

    def _is_needed(self, node: str, checkpoint: Id) -> bool:
        """The last snapshots of a job may be examined after its last exchange: then the daemons are told of an older
        one."""
        return node in self.told and checkpoint >= (self._floor(node) or checkpoint)

    def _newest_in_cold(self) -> Id | None:
        return max((each for each in self.in_cold_ever if each not in self.unhealthy), default=None)

    # ── what could be restored ──

    def _check_restorable(self, message: str) -> None:
        """`everywhere` or a newer one, also without any one of the nodes."""
        if self.everywhere is None:
            return
        for lost in [None, *self._nodes()] if self.survives_a_loss else [None]:
            newest = self._newest_without(lost, self._nodes())
            if newest is None or newest < self.everywhere:
                what = f"without {lost} the newest is {newest}" if lost else f"the newest is {newest}"
                self.violate("what is safe on every node can not be restored", f"{self.everywhere}: {message}; {what}")

    def newest_on(self, run: str, placement: Sequence[str]) -> Id | None:
        """The newest healthy one that these nodes have together, or that cold has whole."""
        return self._newest_without(None, dict.fromkeys(placement))

    def _newest_without(self, lost: str | None, nodes: Iterable[str]) -> Id | None:
        left = [node for node in nodes if node != lost]
        found = [each for each in self.committed[COLD] if each not in self.unhealthy]
        known = {each for node in left for each in (*self.parts[node], *self.copies[node])}
        found += [each for each in known if each not in self.unhealthy and self._is_on(each, left)]
        return max(found, default=None)

    def _is_on(self, checkpoint: Id, nodes: Iterable[str]) -> bool:
        """Whether the parts and copies on these nodes are all of one snapshot."""
        return any(self._lacks(checkpoint, snapshot, nodes) == set() for snapshot in self.snapshots[checkpoint])

    def _lacks(self, checkpoint: Id, snapshot: dict[str, bytes], nodes: Iterable[str]) -> set[str]:
        held = [kept[checkpoint] for node in nodes for kept in self._kept_on(node) if checkpoint in kept]
        found = {name for part in held if part.files.items() <= snapshot.items() for name in part.files}
        return snapshot.keys() - found

    def _kept_on(self, node: str) -> list[dict[Id, Part]]:
        return [self.parts[node], self.copies[node]]

    def _nodes(self) -> list[str]:
        return [name for name in self.places if copies_of(name) in self.places]

    # ── at the end ──

    def check_settled(self, live_nodes: Iterable[str]) -> None:
        nodes = list(live_nodes)
        super().check_settled(nodes)
        for node in nodes:
            floor = self._floor(node)
            for checkpoint in self.copies[node]:
                if floor is not None and checkpoint < floor:
                    self.violate("a copy stays that nobody needs", f"{checkpoint} in {node}, needed is {floor}")
            place = self.places[copies_of(node)]
            assert isinstance(place, PartsPlace)
            for folder, names in place.contents().items():
                if names and identify(folder) not in self.copies[node]:
                    self.violate("a part of a copy stays", f"{folder} in {node}: {', '.join(sorted(names))}")
