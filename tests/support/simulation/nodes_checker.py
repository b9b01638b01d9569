"""The promises about checkpoints over several nodes: what a node keeps of one, and when all of it is committed in cold.

As checker.py, it shares no code with what it checks: docs/FORMAT.md#node-files is read here once more.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from awscrt.checksums import crc64nvme

from tests.support.simulation.checker import (
    COLD,
    FULL_S,
    GONE,
    BucketPlace,
    Checker,
    FolderPlace,
    Id,
    folder_of,
    identify,
)

_NODE_FILE = re.compile(r"node-\d{5}-of-\d{5}\.json")
_CHECKPOINT = re.compile(r"\d{12}-g\d{4,8}")
_KEY = re.compile(r"([A-Za-z0-9._-]+/\d{12}-g\d{4,8})/([^/]+)")
MANIFEST = "manifest.json"


class Part(NamedTuple):
    """What one hot tier holds of a checkpoint: the name of its node file, and its files."""

    node_file: str
    files: dict[str, bytes]


class PartsPlace(FolderPlace):
    """A hot tier, whose folders may hold parts."""

    def parts(self) -> dict[str, str]:
        """The node file of each `<run>/<checkpoint>` without a manifest."""
        found: dict[str, str] = {}
        for folder, files in self.contents().items():
            if MANIFEST not in files and (nodes := sorted(filter(_NODE_FILE.fullmatch, files))):
                found[folder] = nodes[0]
        return found

    def contents(self) -> dict[str, list[str]]:
        """The names of the files of each `<run>/<checkpoint>`."""
        return {
            f"{run}/{name}": _names(f"{self._root}/{run}/{name}")
            for run in _names(self._root)
            if not run.startswith(".")
            for name in _names(f"{self._root}/{run}")
            if _CHECKPOINT.fullmatch(name)
        }


class NodesPlace(BucketPlace):
    """A cold tier."""

    def all_folders(self) -> dict[str, set[str]]:
        """The names of the files of each `<run>/<checkpoint>`, committed or not."""
        found: dict[str, set[str]] = defaultdict(set)
        for key in self._objects:
            if match := _KEY.fullmatch(key.removeprefix(self._prefix)):
                found[match[1]].add(match[2])
        return found


@dataclass
class NodesChecker(Checker):
    """Besides the promises of `Checker`. `parts`: by node, what is in its hot tier now. `parts_ever`: by checkpoint,
    the node files that any hot tier had, and `sent_ever` those that cold had. `in_cold_ever`: by checkpoint, the bytes
    of its manifest. `unhealthy`: with a NaN. `placements`: the node of each rank."""

    parts: dict[str, dict[Id, Part]] = field(default_factory=lambda: defaultdict(dict))
    parts_ever: dict[Id, set[str]] = field(default_factory=lambda: defaultdict(set))
    sent_ever: dict[Id, set[str]] = field(default_factory=lambda: defaultdict(set))
    in_cold_ever: dict[Id, bytes] = field(default_factory=dict[Id, bytes])
    deleted: dict[Id, float] = field(default_factory=dict[Id, float])  # when cold had a tombstone first
    unhealthy: set[Id] = field(default_factory=set[Id])
    placements: dict[Id, Sequence[str]] = field(default_factory=dict[Id, Sequence[str]])

    def sealed(self, checkpoint: Id, files: dict[str, bytes], placement: Sequence[str], *, is_milestone: bool) -> None:
        self.snapshots.setdefault(checkpoint, []).append(files)
        self.placements[checkpoint] = placement
        if is_milestone:
            self.milestones.add(checkpoint)
        if any(content.startswith(b"NaN") for content in files.values()):
            self.unhealthy.add(checkpoint)

    # ── hot ──

    def lose_place(self, name: str) -> None:
        super().lose_place(name)
        self.parts[name] = {}

    def observe(self, name: str, now_s: float, by: str = "") -> None:
        super().observe(name, now_s, by)
        if name == COLD:
            return
        place = self.places[name]
        assert isinstance(place, PartsPlace)
        before = self.parts[name]
        now = {identify(folder): node_file for folder, node_file in place.parts().items()}
        for checkpoint in [each for each in before if each not in now]:
            part = before.pop(checkpoint)
            if checkpoint not in self.committed[name]:
                self._check_part_deletion(name, checkpoint, part, now_s)
        for checkpoint, node_file in now.items():
            if checkpoint not in before:
                before[checkpoint] = self._read_part(name, checkpoint, node_file)
                self.parts_ever[checkpoint].add(node_file)

    def observe_bytes(self, name: str, now_s: float) -> None:
        super().observe_bytes(name, now_s)
        for checkpoint, part in self.parts[name].items() if name != COLD else ():
            self._check_bytes(name, checkpoint, part)

    def _check_bytes(self, name: str, checkpoint: Id, part: Part) -> None:
        for file, content in part.files.items():
            if self.places[name].read(f"{folder_of(checkpoint)}/{file}") != content:
                self.violate("a file of a part was changed", f"{file} of {checkpoint} in {name}")

    def _read_part(self, name: str, checkpoint: Id, node_file: str) -> Part:
        place, folder = self.places[name], folder_of(checkpoint)
        about: dict[str, Any] = json.loads(place.read(f"{folder}/{node_file}") or b"{}")
        files: dict[str, bytes] = {}
        for entry in about["files"]:
            content = files[entry["name"]] = place.read(f"{folder}/{entry['name']}") or b""
            checksum = base64.b64encode(crc64nvme(content).to_bytes(8, "big")).decode()
            if len(content) != entry["size_bytes"] or checksum != entry["crc64nvme"]:
                self.violate("a node file without whole files", f"{entry['name']} of {folder} in {name}")
        self._check_sealed(f"{folder} in {name}", checkpoint, files)
        return Part(node_file, files)

    def _check_sealed(self, what: str, checkpoint: Id, files: dict[str, bytes]) -> None:
        """These are files of one snapshot."""
        snapshots = self.snapshots.get(checkpoint, [])
        if not any(files.items() <= snapshot.items() for snapshot in snapshots):
            self.violate("a part of bytes that were no snapshot", what)

    def _newer(self, checkpoint: Id, among: Iterable[Id]) -> int:
        return sum(each.run == checkpoint.run and each > checkpoint for each in among)

    def is_kept_in_hot(self, checkpoint: Id) -> bool:
        known = self.ever | self.parts_ever.keys()
        return checkpoint not in self.unhealthy and self._newer(checkpoint, known) < self.policy.hot_last

    def is_kept_in_cold(self, checkpoint: Id, sequence: int) -> bool:
        """Of what cold has had. It keeps no less of what is left there."""
        return self._is_kept(checkpoint, sequence, self.in_cold_ever)

    def _is_kept(self, checkpoint: Id, sequence: int, among: Iterable[Id]) -> bool:
        if checkpoint in self.milestones:
            return True
        is_one_of_every = bool(self.policy.cold_every) and sequence % self.policy.cold_every == 0
        is_last = self._newer(checkpoint, among) < self.policy.cold_last
        return checkpoint not in self.unhealthy and (is_last or is_one_of_every)

    def _check_part_deletion(self, name: str, checkpoint: Id, part: Part, now_s: float) -> None:
        known = self.ever | self.parts_ever.keys()
        if now_s - self.full_at_s.get(name, -FULL_S) < FULL_S or checkpoint in self.unhealthy:
            return
        if self.is_kept_in_hot(checkpoint):
            self.violate("hot deleted a part that its policy keeps", f"{checkpoint} in {name}")
        elif self._is_kept(checkpoint, 1, known) and part.node_file not in self.sent_ever[checkpoint]:
            self.violate("hot deleted a part before its cold copy", f"{checkpoint} in {name}")

    # ── cold ──

    def object_changed(self, key: str, content: bytes | None, now_s: float, by: str = "") -> None:
        match = _KEY.fullmatch(key)
        if match is not None:
            checkpoint, file = identify(match[1]), match[2]
            if file == GONE:
                if content is not None:
                    self.deleted.setdefault(checkpoint, now_s)
                self.observe(COLD, now_s, by)
            elif file == MANIFEST and content is not None:
                if self.in_cold_ever.setdefault(checkpoint, content) != content:
                    self.violate("two manifests of one checkpoint", f"{checkpoint}, the second by {by}")
            elif _NODE_FILE.fullmatch(file) and content is not None:
                self._node_file_written(checkpoint, key, file, content, by)
        was_there = set(self.committed[COLD])
        super().object_changed(key, content, now_s, by)
        for checkpoint in self.committed[COLD].keys() - was_there:
            if checkpoint in self.deleted and not self._is_milestone_now(checkpoint):
                self.violate("a deleted checkpoint was revived", f"{checkpoint} by {by}")

    def _is_milestone_now(self, checkpoint: Id) -> bool:
        place = self.places[COLD]
        assert isinstance(place, NodesPlace)
        return any(name.startswith("milestone-") for name in place.all_folders()[folder_of(checkpoint)])

    def _node_file_written(self, checkpoint: Id, key: str, file: str, content: bytes, by: str) -> None:
        about: dict[str, Any] = json.loads(content)
        self.sent_ever[checkpoint].add(file)
        self.parts_ever[checkpoint].add(file)  # hot may have been full
        files: dict[str, bytes] = {}
        for entry in about["files"]:
            found = self.places[COLD].read(f"{folder_of(checkpoint)}/{entry['name']}")
            if found is None:
                self.violate("a node file in cold without whole files", f"{entry['name']} of {checkpoint} by {by}")
            files[entry["name"]] = found or b""
        self._check_sealed(f"{file} of {checkpoint} in cold, by {by}", checkpoint, files)

    def told_rank(self, tier: str, node: str, checkpoint: Id, rank: int) -> None:
        """A rank was told that its snapshot is committed in a tier: in hot its node's part, in cold all of it."""
        if tier == COLD and checkpoint not in self.in_cold_ever:
            self.violate("Replicated was said and nothing was committed", f"{checkpoint} to rank {rank} on {node}")
        if tier != COLD and checkpoint not in self.parts_ever and checkpoint not in self.ever:
            self.violate("Persisted was said and nothing was committed", f"{checkpoint} to rank {rank} on {node}")
        if tier == COLD:
            self.acknowledged.add(checkpoint)

    def newest_reachable(self, run: str, node: str) -> Id | None:
        """The newest healthy one that is whole in cold."""
        whole = [each for each in self.committed[COLD] if each not in self.unhealthy and not self._damage(each)]
        return max((each for each in whole if each.run == run), default=None)

    # ── at the end ──

    def check_whole(self, live_nodes: Iterable[str]) -> None:
        """After a long time without a fault: cold has what it keeps and what all nodes have their parts of."""
        nodes = list(live_nodes)
        known = self.ever | self.parts_ever.keys()
        for checkpoint in sorted({each for node in nodes for each in self.parts[node]}):
            was_there = checkpoint in self.in_cold_ever or checkpoint in self.deleted
            if not was_there and self._is_kept(checkpoint, 1, known) and self._is_covered(checkpoint, nodes):
                self.violate("cold lacks what it keeps", f"{checkpoint} after a long quiet time")

    def check_settled(self, live_nodes: Iterable[str]) -> None:
        nodes = list(live_nodes)
        self.check_whole(nodes)
        place = self.places[COLD]
        assert isinstance(place, NodesPlace)
        folders = place.all_folders()
        healthy = {identify(folder) for folder, names in folders.items() if "healthy.json" in names}
        for node in nodes:
            # Every policy keeps the newest that was found healthy, of all and of those that are here.
            in_hot = {*self.parts[node], *self.committed[node]}
            kept = {max(healthy, default=None), max(healthy & in_hot, default=None)}
            for checkpoint, part in self.parts[node].items():
                newer = [each for each in in_hot - self.unhealthy if each > checkpoint]  # "last N" counts no others
                is_passed = any(each.step >= checkpoint.step for each in newer)
                is_sent = part.node_file in self.sent_ever[checkpoint]
                is_kept = checkpoint in self.unhealthy or checkpoint in kept or self._is_needed(node, checkpoint)
                if len(newer) >= self.policy.hot_last and is_passed and not is_kept:
                    what = f"{checkpoint} in {node} after a long quiet time, {is_sent=}"
                    self.violate("hot keeps too much", what)
        newest = max(self.committed[COLD], default=None)
        for folder, names in folders.items():
            checkpoint = identify(folder)
            if checkpoint not in self.committed[COLD] and newest is not None and checkpoint < newest:
                self.violate("leftovers stay in cold", f"{checkpoint}: {', '.join(sorted(names))}")

    def _is_needed(self, node: str, checkpoint: Id) -> bool:
        """Whether the node keeps it for a restart."""
        return False

    def _kept_on(self, node: str) -> list[dict[Id, Part]]:
        return [self.parts[node]]

    def _is_covered(self, checkpoint: Id, nodes: Iterable[str]) -> bool:
        """Whether every part of one start is in a hot tier now, or was sent."""
        held = [kept for node in nodes for kept in self._kept_on(node)]
        parts = [kept[checkpoint].files for kept in held if checkpoint in kept]
        cold = self.places[COLD]
        size = len(self.placements[checkpoint])
        for snapshot in self.snapshots[checkpoint]:
            found = {name for part in parts if part.items() <= snapshot.items() for name in part}
            for rank in range(size):
                name = f"node-{rank:05d}-of-{size:05d}.json"
                raw = cold.read(f"{folder_of(checkpoint)}/{name}")
                found |= {entry["name"] for entry in json.loads(raw)["files"]} if raw else set()
            if found >= snapshot.keys():
                return True
        return False


def shard_name(rank: int, world_size: int) -> str:
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
