"""Checks the promises after every change, from the bytes in the tiers and from what trainers were told.

The promises are the invariants of docs/ARCHITECTURE.md. It shares no code with what it checks: keys, manifests and
checksums are read here as docs/FORMAT.md describes them, and the retention rules are computed from the config alone.
The first violation ends the simulation.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from awscrt.checksums import crc64nvme

_FOLDER = re.compile(r"([A-Za-z0-9._-]+)/(\d{12})-g(\d{4,8})")
_NAMED = re.compile(r"([\w.-]+)/(\d{12})-g(\d+)")
COLD = "cold"
GONE = "gone.json"
KNOWN_S = 5.0  # a deletion that began before the daemon knew may end so much later
FULL_S = 300.0  # how long after a write had no space hot may evict what cold holds; a listing of cold may take minutes


class Id(NamedTuple):
    """A checkpoint, in the order of age."""

    run: str
    generation: int
    step: int


@dataclass(frozen=True)
class Violation:
    """`kind`: which promise was broken. The message says how."""

    kind: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


class Place(Protocol):
    """One replica's home as the checker sees it: a bucket or a folder."""

    def folders(self) -> Iterable[str]:
        """`<run>/<checkpoint>` of each folder with a manifest."""
        ...

    def read(self, key: str) -> bytes | None: ...


class FolderPlace:
    def __init__(self, root: Path) -> None:
        self._root = str(root)

    def folders(self) -> Iterable[str]:
        runs = [name for name in _names(self._root) if not name.startswith(".")]
        folders = [
            f"{run}/{name}" for run in runs for name in _names(f"{self._root}/{run}") if not name.endswith(".json")
        ]
        return [folder for folder in folders if os.path.exists(f"{self._root}/{folder}/manifest.json")]

    def read(self, key: str) -> bytes | None:
        try:
            with open(f"{self._root}/{key}", "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None


class BucketPlace:
    def __init__(self, objects: dict[str, bytes], prefix: str) -> None:
        self._objects = objects
        self._prefix = prefix

    def folders(self) -> Iterable[str]:
        """Without those that have a tombstone."""
        ending = "/manifest.json"
        folders = [key[: -len(ending)] for key in self._objects if key.endswith(ending)]
        return [folder[len(self._prefix) :] for folder in folders if f"{folder}/{GONE}" not in self._objects]

    def read(self, key: str) -> bytes | None:
        return self._objects.get(self._prefix + key)


@dataclass
class Committed:
    """A committed checkpoint: its sequence, and the content of its files by name."""

    sequence: int
    files: dict[str, bytes]


@dataclass
class Policy:
    hot_last: int
    cold_last: int
    cold_every: int


@dataclass
class Checker:
    """`committed`: by place, what is there now. `ever`: all checkpoints that were ever committed anywhere."""

    policy: Policy
    honours_conditions: bool = True
    has_one_writer: bool = False  # there is one node, and cold can be reached at any time
    is_slow: bool = False  # a listing of cold may take longer than a commit waits for it
    places: dict[str, Place] = field(default_factory=dict[str, Place])
    committed: dict[str, dict[Id, Committed]] = field(default_factory=dict[str, dict[Id, Committed]])
    ever: set[Id] = field(default_factory=set[Id])
    formerly: dict[Id, Committed] = field(default_factory=dict[Id, Committed])  # what was deleted from cold
    damaged: dict[str, float] = field(default_factory=dict[str, float])  # shard keys in cold that a fault deleted
    snapshots: dict[Id, list[dict[str, bytes]]] = field(default_factory=dict[Id, list[dict[str, bytes]]])
    claimed: dict[tuple[str, int], tuple[str, float]] = field(default_factory=dict[Any, Any])  # trainer, when
    holders: dict[tuple[str, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    """The trainers of each generation. A fault during a claim excuses that there are two: their checkpoints differ."""
    acknowledged: set[Id] = field(default_factory=set[Id])
    looks: dict[tuple[str, Id], list[tuple[float, bool]]] = field(default_factory=dict[Any, Any])
    """By node and checkpoint: when a listing of its folder in cold arrived, and whether it showed a missing shard."""
    milestones: set[Id] = field(default_factory=set[Id])  # that were snapshotted as one
    marks: dict[tuple[str, Id], float] = field(default_factory=dict[tuple[str, Id], float])
    """By node and checkpoint: when a listing of its folder in cold arrived that showed a milestone."""
    known_damaged: dict[tuple[str, Id], float] = field(default_factory=dict[tuple[str, Id], float])  # since when
    full_at_s: dict[str, float] = field(default_factory=dict[str, float])  # by node: when a write last had no space
    violation: Violation | None = None  # the first one
    on_violation: Callable[[], None] = lambda: None

    def violate(self, kind: str, message: str) -> None:
        if self.violation is None:
            self.violation = Violation(kind, message)
            self.on_violation()

    # ── places ──

    def add_place(self, name: str, place: Place) -> None:
        self.places[name], self.committed[name] = place, {}

    def lose_place(self, name: str) -> None:
        """Its disk was lost: nothing there is expected any more."""
        self.committed[name] = {}

    def observe(self, name: str, now_s: float, by: str = "") -> None:
        """Something may have been committed or deleted in the place. `by`: the node that did it; empty: unknown."""
        place, before = self.places[name], self.committed[name]
        now = {identify(folder): folder for folder in place.folders()}
        for checkpoint in [each for each in before if each not in now]:
            if name == COLD:
                self.formerly[checkpoint] = before[checkpoint]
            self._check_deletion(name, checkpoint, before.pop(checkpoint), now_s, by)
        for checkpoint, folder in now.items():
            if checkpoint not in before:
                before[checkpoint] = self._read_whole(name, folder)
                self.ever.add(checkpoint)
                if self.has_one_writer:
                    self._check_sequence(name, checkpoint)

    def _check_sequence(self, name: str, checkpoint: Id) -> None:
        """A checkpoint has one manifest in all places. No other one of its run has its sequence, if cold was listed."""
        sequence = self.committed[name][checkpoint].sequence
        for place, found in self.committed.items():
            for other, committed in found.items():
                if other == checkpoint:
                    if committed.sequence != sequence:
                        self.violate("a checkpoint has two manifests", f"{checkpoint} in {name} and in {place}")
                elif other.run == checkpoint.run and committed.sequence == sequence and not self.is_slow:
                    self.violate("a sequence was given twice", f"{sequence} to {checkpoint} in {name} and to {other}")

    def observe_bytes(self, name: str, now_s: float) -> None:
        """Compare every committed file with the bytes that were there when it was committed."""
        self.observe(name, now_s)
        for checkpoint, committed in self.committed[name].items():
            for file in committed.files:
                key = f"{folder_of(checkpoint)}/{file}"
                if not (name == COLD and key in self.damaged):
                    self.check_file(name, checkpoint, file, self.places[name].read(key))

    def check_file(self, name: str, checkpoint: Id, file: str, content: bytes | None) -> None:
        """A file of a committed checkpoint has this content now."""
        if content is None:
            self.violate("a file of a committed checkpoint was deleted", f"{file} of {checkpoint} in {name}")
        elif content != self.committed[name][checkpoint].files[file]:
            self.violate("a committed file was overwritten", f"{file} of {checkpoint} in {name}")

    def object_changed(self, key: str, content: bytes | None, now_s: float, by: str = "") -> None:
        """One object of the cold bucket was written or deleted, by a node."""
        folder, _, file = key.rpartition("/")
        if not _FOLDER.fullmatch(folder):
            return
        checkpoint = identify(folder)
        committed = self.committed[COLD].get(checkpoint)
        if file in ("manifest.json", GONE):
            self.observe(COLD, now_s, by)
        elif committed is not None and file in committed.files:
            if content is not None and self.damaged.pop(key, None) is not None:
                self.known_damaged = {
                    known: at_s for known, at_s in self.known_damaged.items() if self._damage(known[1])
                }
            self.check_file(COLD, checkpoint, file, content)

    def _read_whole(self, name: str, folder: str) -> Committed:
        place = self.places[name]
        manifest: dict[str, Any] = json.loads(place.read(f"{folder}/manifest.json") or b"{}")
        files: dict[str, bytes] = {}
        for entry in manifest["files"]:
            key, was_there = f"{folder}/{entry['name']}", self.formerly.get(identify(folder))
            if name == COLD and key in self.damaged and was_there is not None:  # its manifest was put back
                files[entry["name"]] = was_there.files[entry["name"]]
                continue
            content = files[entry["name"]] = place.read(key) or b""
            if len(content) != entry["size_bytes"]:
                self.violate("a manifest without whole files", f"{entry['name']} of {folder} in {name} is not whole")
            checksum = base64.b64encode(crc64nvme(content).to_bytes(8, "big")).decode()
            if checksum != entry["crc64nvme"]:
                self.violate("a manifest of other bytes", f"{entry['name']} of {folder} in {name}")
        checkpoint = identify(folder)
        if files not in self.snapshots.get(checkpoint, []):
            self.violate("a commit of bytes that were no snapshot", f"{folder} in {name}")
        return Committed(manifest["sequence"], files)

    # ── deletion ──

    def is_kept_in_hot(self, checkpoint: Id) -> bool:
        """Whether the policy keeps it among all checkpoints that ever were. It keeps no less of those that are left."""
        newer = sum(each.run == checkpoint.run and each > checkpoint for each in self.ever)
        return newer < self.policy.hot_last

    def is_kept_in_cold(self, checkpoint: Id, sequence: int) -> bool:
        """As `is_kept_in_hot`."""
        newer = sum(each.run == checkpoint.run and each > checkpoint for each in self.ever)
        is_one_of_every = self.policy.cold_every and sequence % self.policy.cold_every == 0
        return newer < self.policy.cold_last or bool(is_one_of_every) or checkpoint in self.milestones

    def is_whole_in_cold(self, checkpoint: Id) -> bool:
        return checkpoint in self.committed[COLD] and not self._damage(checkpoint)

    def _damage(self, checkpoint: Id) -> list[str]:
        return [key for key in self.damaged if key.startswith(f"{folder_of(checkpoint)}/")]

    def _check_deletion(self, name: str, checkpoint: Id, deleted: Committed, now_s: float, by: str) -> None:
        is_kept_in_cold = self.is_kept_in_cold(checkpoint, deleted.sequence)
        if name == COLD:
            if is_kept_in_cold:
                self.violate("cold deleted what its policy keeps", f"{checkpoint}")
            elif self.marks.get((by, checkpoint), now_s) < now_s:
                self.violate("cold deleted a milestone", f"{checkpoint}, after a listing had shown it to {by}")
        elif self.is_kept_in_hot(checkpoint) and now_s - self.full_at_s.get(name, -FULL_S) >= FULL_S:
            self.violate("hot deleted what its policy keeps", f"{checkpoint} in {name}")
        elif is_kept_in_cold and checkpoint not in self.committed[COLD]:
            self.violate("hot deleted a checkpoint before its cold copy", f"{checkpoint} in {name}")
        elif is_kept_in_cold and self._damage(checkpoint):
            arrived = [is_missing for at_s, is_missing in self.looks.get((name, checkpoint), ()) if at_s <= now_s]
            if arrived and arrived[-1]:
                self.violate("hot deleted the last whole replica", f"{checkpoint} in {name}, whose last look showed it")
            elif now_s - self.known_damaged.get((name, checkpoint), now_s) > KNOWN_S:
                self.violate("hot deleted the last whole replica on a stale decision", f"{checkpoint} in {name}")

    def reported_lost(self, message: str) -> None:
        """A daemon reported that checkpoints disappeared from cold; `message` names them. Only daemons delete here, so
        this is wrong, but for a deletion that a kill interrupted: files are left, without a manifest and a tombstone.
        """
        named = [Id(run, int(generation), int(step)) for run, step, generation in _NAMED.findall(message)]
        if not named or not all(self._is_half_deleted(checkpoint) for checkpoint in named):
            self.violate("what a daemon has deleted was reported as a loss", message)

    def _is_half_deleted(self, checkpoint: Id) -> bool:
        place, folder, deleted = self.places[COLD], folder_of(checkpoint), self.formerly.get(checkpoint)
        if deleted is None or any(place.read(f"{folder}/{name}") is not None for name in ("manifest.json", GONE)):
            return False
        return any(place.read(f"{folder}/{name}") is not None for name in deleted.files)

    def reported_damaged(self, node: str, checkpoint: Id, now_s: float) -> None:
        """A node's daemon reports that the replica in cold is unreadable. Ignored if it is not, or not any more."""
        if self._damage(checkpoint):
            self.known_damaged.setdefault((node, checkpoint), now_s)

    def looked(self, node: str, prefix: str, keys: list[str], arrives_s: float) -> None:
        """A node gets this listing of one checkpoint's folder in the cold bucket."""
        if prefix.endswith("/") and _FOLDER.fullmatch(prefix[:-1]):
            checkpoint = identify(prefix[:-1])
            looks = self.looks.setdefault((node, checkpoint), [])
            looks.append((arrives_s, bool(set(self._damage(checkpoint)) - set(keys))))
            looks.sort()
            if any(key.startswith(f"{prefix}milestone-") for key in keys):
                self.marks.setdefault((node, checkpoint), arrives_s)

    # ── what trainers were told ──

    def claim(self, run: str, generation: int, trainer: str, *, began_s: float, ended_s: float) -> None:
        """A daemon gave a generation to a trainer. A fault meanwhile excuses that another daemon gave the same one."""
        former, former_ended_s = self.claimed.setdefault((run, generation), (trainer, ended_s))
        if former != trainer and (self.honours_conditions or began_s > former_ended_s):
            self.violate("a generation was claimed twice", f"{generation} of {run} by {former} and {trainer}")

    def told(self, tier: str, node: str, checkpoint: Id, files: dict[str, bytes]) -> None:
        """A trainer was told that its snapshot is committed in a tier."""
        place = self.committed[COLD if tier == COLD else node].get(checkpoint) or self.committed[COLD].get(checkpoint)
        if place is not None and place.files != files:
            self.violate("Persisted was said of other bytes", f"{checkpoint} in {tier} of {node}")
        if checkpoint not in self.ever:
            self.violate("Persisted was said and nothing was committed", f"{checkpoint} in {tier} of {node}")
        else:
            self.acknowledged.add(checkpoint)

    def newest_reachable(self, run: str, node: str) -> Id | None:
        """The newest acknowledged checkpoint of a run that is whole in a node's hot tier or in cold."""
        reachable = [each for each in self.committed[node] if each in self.acknowledged]
        reachable += [each for each in self.committed[COLD] if each in self.acknowledged and not self._damage(each)]
        return max((each for each in reachable if each.run == run), default=None)

    def restored(self, run: str, node: str, restored: Id | None, files: dict[str, bytes], least: Id | None) -> None:
        """A restore ended with a checkpoint, or None: there is none. `least`: what was reachable all the time."""
        if restored is not None and files not in self.snapshots.get(restored, []):
            self.violate("a restore gave other bytes", f"{restored} on {node}")
        if least is not None and (restored is None or restored < least):
            kind = "a restore found nothing" if restored is None else "a restore gave an older checkpoint"
            self.violate(kind, f"{restored} on {node}, but {least} was reachable")

    def newest_acknowledged(self, run: str) -> Id | None:
        return max((each for each in self.acknowledged if each.run == run), default=None)

    def check_advanced(self, run: str, node: str, before: Id | None, sealed: int) -> None:
        """The disk was full for a while, and nothing else was wrong. `sealed`: snapshots of the run meanwhile."""
        newest = self.newest_acknowledged(run)
        if sealed > 2 and newest == before:
            self.violate("a full disk stopped durability", f"{run} on {node}: {sealed} snapshots since {before}")

    # ── at the end ──

    def check_settled(self, live_nodes: Iterable[str]) -> None:
        """After a long time without a fault: retention holds in hot, and cold has what hot has and cold keeps. Hot also
        keeps the newest checkpoint of an older generation until a later generation has passed its step."""
        shared_runs = {run for (run, _), trainers in self.holders.items() if len(trainers) > 1}
        for node in live_nodes:
            hot = self.committed[node]
            for checkpoint, committed in hot.items():
                if checkpoint.run in shared_runs:
                    continue  # cold has a checkpoint of the other trainer, so deletions of the run are halted
                if checkpoint not in self.committed[COLD] and self._is_claimed_elsewhere(checkpoint, node):
                    continue  # the trainers that wrote it here are fenced
                newer = [each for each in hot if each.run == checkpoint.run and each > checkpoint]
                if self.is_kept_in_cold(checkpoint, committed.sequence) and not self.is_whole_in_cold(checkpoint):
                    self.violate("cold lacks what it keeps", f"{checkpoint} of {node} after a long quiet time")
                is_passed = any(each.step >= checkpoint.step for each in newer)
                if len(newer) >= self.policy.hot_last and is_passed:
                    self.violate("hot keeps too much", f"{checkpoint} in {node} after a long quiet time")

    def _is_claimed_elsewhere(self, checkpoint: Id, node: str) -> bool:
        """Whether cold has the claim of another node for its generation. The node could not reach cold meanwhile, or
        cold ignores conditions; the other one's trainer may have died before it had the generation."""
        marker = self.places[COLD].read(f"{checkpoint.run}/generation-{checkpoint.generation:04d}.json")
        return marker is not None and json.loads(marker)["node"] != node


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def identify(folder: str) -> Id:
    match = _FOLDER.fullmatch(folder)
    assert match, folder
    return Id(match[1], int(match[3]), int(match[2]))


def folder_of(checkpoint: Id) -> str:
    return f"{checkpoint.run}/{checkpoint.step:012d}-g{checkpoint.generation:04d}"
