"""Checks the files that a killed daemon leaves against what it acknowledged. Shares no code with tierd.

Reads folders and buckets as docs/FORMAT.md describes them, and computes the retention rules from the policy alone.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from awscrt.checksums import crc64nvme

from tests.support.kills import shards
from tests.support.simulation.checker import Id, folder_of, identify

HOT, COLD = "hot", "cold"
_KEY = re.compile(r"([^/]+/\d{12}-g\d{4,8})/([^/]+)")
_FILE = re.compile(r"rank-\d{5}-of-\d{5}\.safetensors|manifest\.json|milestone-[A-Za-z0-9._-]+\.json|healthy\.json")
_CLAIM = re.compile(r"[^/]+/generation-\d{4,8}\.json")
_IDENTITY = re.compile(
    r"\.tierd-tier-[0-9a-f-]{36}\.json|\.tierd-known/[a-z]+\.json|\.tierd-audit/\d{12}\.jsonl|\.tierd-runs\.(?:json|new)"
)


class Place(Protocol):
    """A tier as its files: all of them, whatever their names."""

    def files(self) -> dict[str, bytes]: ...


class Folder:
    def __init__(self, root: Path) -> None:
        self.root = root

    def files(self) -> dict[str, bytes]:
        contents: dict[str, bytes] = {}
        for folder, _, names in os.walk(self.root):
            for name in names:
                path = Path(folder, name)
                with suppress(FileNotFoundError):  # a daemon that runs has deleted it since
                    contents[path.relative_to(self.root).as_posix()] = path.read_bytes()
        contents.pop(".tierd.lock", None)
        return contents


@dataclass
class Policy:
    """`cold_every`: every n-th checkpoint by sequence; 0: off."""

    hot_last: int = 2
    cold_last: int = 2
    cold_every: int = 0

    @property
    def lines(self) -> str:
        """The section of the config."""
        return (
            f"[lifecycle.hot]\nkeep_last = {self.hot_last}\nkeep_generations = 0\n"
            f"[lifecycle.cold]\nkeep_last = {self.cold_last}\nkeep_every = {self.cold_every}\nkeep_generations = 0\n"
        )


@dataclass
class Audit:
    """`sizes`: of the tensor of each rank. `sequences`: of all checkpoints that were ever seen committed. `problems`:
    each begins with the promise that is broken."""

    run: str
    policy: Policy
    places: Mapping[str, Place]
    sizes: tuple[int, ...]
    sequences: dict[Id, int] = field(default_factory=dict[Id, int])
    acknowledged: set[Id] = field(default_factory=set[Id])
    replicated: set[Id] = field(default_factory=set[Id])
    milestones: set[Id] = field(default_factory=set[Id])
    generations: list[int] = field(default_factory=list[int])
    committed: dict[str, set[Id]] = field(default_factory=dict[str, set[Id]])
    manifests: dict[Id, bytes] = field(default_factory=dict[Id, bytes])
    problems: list[str] = field(default_factory=list[str])
    is_hot_lost: bool = False

    # ── what the trainers were told ──

    def claim(self, generation: int) -> None:
        if self.generations and generation <= self.generations[-1]:
            self.problems.append(f"claim: generation {generation} after {self.generations[-1]}")
        self.generations.append(generation)

    def id(self, generation: int, step: int) -> Id:
        return Id(self.run, generation, step)

    def expected(self, checkpoint: Id, rank: int) -> bytes:
        return shards.weight(self.run, checkpoint.generation, checkpoint.step, rank, self.sizes[rank])

    def restored(self, checkpoint: Id | None, files: Iterable[bytes], least: Id | None) -> None:
        """A restore gave these files. `least`: the newest that was acknowledged before."""
        if least is not None and (checkpoint is None or checkpoint < least):
            self.problems.append(f"restore: {checkpoint}, and {least} was acknowledged")
        if checkpoint is not None:
            self.problems += [f"restore: {checkpoint} {why}" for why in self._differences(checkpoint, list(files))]

    # ── what is there ──

    def observe(self, moment: str) -> None:
        """Check everything that holds at any instant. No daemon may run meanwhile."""
        before = len(self.problems)
        for name, place in self.places.items():
            self.committed[name] = set(self._read(name, place.files()))
        self._check_kept()
        self._check_sequences()
        self.problems[before:] = [f"{problem}, after {moment}" for problem in self.problems[before:]]

    def unsettled(self) -> list[str]:
        """What differs from the state in which a daemon without work leaves the tiers; it may run."""
        differences: list[str] = []
        contents = {name: place.files() for name, place in self.places.items()}
        for files in contents.values():
            for key, content in files.items():
                if key.endswith("/manifest.json"):
                    self.sequences.setdefault(checkpoint_of(content), json.loads(content)["sequence"])
        kept = {HOT: {each for each in self.sequences if self._is_kept_in_hot(each)}}
        kept[COLD] = {each for each in self.sequences if self._is_kept_in_cold(each)}
        for name, files in contents.items():
            folders = {match[1] for key in files if (match := _KEY.fullmatch(key)) and match[2] == "manifest.json"}
            there = {identify(folder) for folder in folders}
            if there != kept[name]:
                differences.append(f"leftover: {name} has {_short(there)}, expected {_short(kept[name])}")
            for key in files:
                match = _KEY.fullmatch(key)
                is_file = match and match[1] in folders and _FILE.fullmatch(match[2])
                if not is_file and not _CLAIM.fullmatch(key) and not _IDENTITY.fullmatch(key):
                    differences.append(f"leftover: {key} in {name}")
        return differences

    def check_end(self) -> None:
        """Every n-th checkpoint is in cold, from the first on. For runs whose hot tier was never lost."""
        if every := self.policy.cold_every:
            there = {self.sequences[each] for each in self.committed[COLD]}
            due = set(range(every, max(self.sequences.values()) + 1, every))
            if due - there:
                self.problems.append(f"lost: cold lacks the sequences {sorted(due - there)}")

    # ── rules ──

    def _read(self, name: str, files: Mapping[str, bytes]) -> Iterator[Id]:
        for key in files:
            match = _KEY.fullmatch(key)
            if not match or match[2] != "manifest.json":
                continue
            checkpoint = identify(match[1])
            for why in self._tears(checkpoint, files):
                self.problems.append(f"torn: {folder_of(checkpoint)} in {name}: {why}")
            if self.manifests.setdefault(checkpoint, files[key]) != files[key]:
                self.problems.append(f"torn: another manifest of {folder_of(checkpoint)} in {name}")
            yield checkpoint

    def _tears(self, checkpoint: Id, files: Mapping[str, bytes]) -> Iterator[str]:
        folder = folder_of(checkpoint)
        try:
            manifest: dict[str, Any] = json.loads(files[f"{folder}/manifest.json"])
        except ValueError as error:
            yield f"manifest.json: {error}"
            return
        named = checkpoint_of(files[f"{folder}/manifest.json"])
        if named != checkpoint or manifest["world_size"] != len(self.sizes):
            yield f"it is of {named} with {manifest['world_size']} ranks"
        self.sequences.setdefault(checkpoint, manifest["sequence"])
        count = len(self.sizes)
        names = [f"rank-{rank:05d}-of-{count:05d}.safetensors" for rank in range(count)]
        if sorted(entry["name"] for entry in manifest["files"]) != names:
            yield f"files {[entry['name'] for entry in manifest['files']]}"
        contents = [files.get(f"{folder}/{name}", b"") for name in names]
        for entry in manifest["files"]:
            content = files.get(f"{folder}/{entry['name']}", b"")
            chunks = [content[at : at + entry["chunk_bytes"]] for at in range(0, len(content), entry["chunk_bytes"])]
            if len(content) != entry["size_bytes"]:
                yield f"{entry['name']}: {len(content)} bytes of {entry['size_bytes']}"
            elif [_checksum(content), *map(_checksum, chunks)] != [entry["crc64nvme"], *entry["chunks"]]:
                yield f"{entry['name']}: its checksums differ"
        yield from self._differences(checkpoint, contents)

    def _differences(self, checkpoint: Id, contents: list[bytes]) -> Iterator[str]:
        for rank, content in enumerate(contents):
            try:
                if shards.decode(content) != self.expected(checkpoint, rank):
                    yield f"rank {rank}: other bytes"
            except (ValueError, KeyError) as error:
                yield f"rank {rank}: {error}"

    def _newer(self, checkpoint: Id) -> int:
        return sum(each > checkpoint for each in self.sequences)

    def _is_kept_in_hot(self, checkpoint: Id) -> bool:
        is_last_place = COLD not in self.places and checkpoint in self.milestones
        return self._newer(checkpoint) < self.policy.hot_last or is_last_place

    def _is_kept_in_cold(self, checkpoint: Id) -> bool:
        if COLD not in self.places:
            return False
        sequence = self.sequences.get(checkpoint)
        is_due = bool(sequence and self.policy.cold_every and sequence % self.policy.cold_every == 0)
        return self._newer(checkpoint) < self.policy.cold_last or is_due or checkpoint in self.milestones

    def _check_kept(self) -> None:
        hot, cold = self.committed[HOT], self.committed.get(COLD, set[Id]())
        for checkpoint in sorted(self.sequences.keys() | self.acknowledged):
            name = folder_of(checkpoint)
            is_kept = self._is_kept_in_hot(checkpoint) or self._is_kept_in_cold(checkpoint)
            if checkpoint in self.acknowledged and is_kept and checkpoint not in hot | cold:
                self.problems.append(f"lost: {name} was acknowledged and is nowhere")
            elif self._is_kept_in_cold(checkpoint) and checkpoint not in hot | cold:
                self.problems.append(f"lost: {name} was deleted in hot before cold had it")
            elif self._is_kept_in_hot(checkpoint) and checkpoint not in hot and not self.is_hot_lost:
                self.problems.append(f"lost: {name} was deleted in hot, which keeps it")
        for checkpoint in sorted(self.replicated - cold):
            if self._is_kept_in_cold(checkpoint):
                self.problems.append(f"lost: {folder_of(checkpoint)} was replicated and is not in cold")

    def _check_sequences(self) -> None:
        numbers = [self.sequences[each] for each in sorted(self.sequences)]
        if any(later <= earlier for earlier, later in itertools.pairwise(numbers)):
            self.problems.append(f"sequence: {numbers} in the order of the checkpoints")


def checkpoint_of(manifest: bytes) -> Id:
    content: dict[str, Any] = json.loads(manifest)
    return Id(content["run"], content["generation"], content["step"])


def _checksum(content: bytes) -> str:
    return base64.b64encode(crc64nvme(content).to_bytes(8, "big")).decode()


def _short(checkpoints: Iterable[Id]) -> list[str]:
    return [f"{each.generation}:{each.step}" for each in sorted(checkpoints)]
