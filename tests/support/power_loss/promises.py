"""What must hold of a disk after a loss of power, and after the recovery from it.

Shares no code with tierd: keys, manifests and checksums are read here as docs/FORMAT.md describes them.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from awscrt.checksums import crc64nvme

from tests.support.power_loss.file_calls import Tree

HOT, COLD = "hot", "cold"
SHARD_BYTES = 4500  # two pages, the second one not full

_MANIFEST = re.compile(r"(.+)/([A-Za-z0-9._-]+)/(\d{12})-g(\d{4})/manifest\.json")


class Id(NamedTuple):
    """A checkpoint, in the order of age."""

    run: str
    generation: int
    step: int

    @property
    def name(self) -> str:
        return f"{self.step:012d}-g{self.generation:04d}"

    @property
    def folder(self) -> str:
        return f"{self.run}/{self.name}"


def shard_of(checkpoint: Id, rank: int) -> bytes:
    """Bytes that no other shard has, and no two pages of it."""
    return b"".join(b"%s %d %08d\n" % (checkpoint.folder.encode(), rank, line) for line in range(200))[:SHARD_BYTES]


@dataclass(frozen=True)
class Policy:
    """How many of the newest checkpoints of a run each tier keeps, as in the daemon's config. 0 in cold: there is no
    cold tier."""

    hot_last: int
    cold_last: int


@dataclass(frozen=True)
class Expected:
    """What was certain when the power was lost. `durable`: the checkpoints that were whole on the disk at some time, by
    tier. `milestones`: those among them that a trainer marked, by tier. `claims`: the highest generation of each run
    that a trainer was given. `damaged`: (tier, checkpoint) whose files the test has damaged."""

    durable: frozenset[tuple[str, Id]] = frozenset()
    milestones: frozenset[tuple[str, Id, str]] = frozenset()
    claims: frozenset[tuple[str, int]] = frozenset()
    damaged: frozenset[tuple[str, Id]] = frozenset()


@dataclass(frozen=True)
class Contents:
    """A tree as a reader of the format sees it. `whole`: the replicas whose manifest names only files that are there
    and have the bytes of the snapshot. `broken`: the other replicas with a manifest, and what is wrong."""

    whole: frozenset[tuple[str, Id]]
    broken: dict[tuple[str, Id], str] = field(compare=False, hash=False)


def contents_of(tree: Tree) -> Contents:
    whole: set[tuple[str, Id]] = set()
    broken: dict[tuple[str, Id], str] = {}
    for path in tree:
        if path.endswith("/manifest.json") and (match := _MANIFEST.fullmatch(path)):
            tier, checkpoint = match[1], Id(match[2], int(match[4]), int(match[3]))
            raw = tree[path]
            assert raw is not None
            folder = path.removesuffix("manifest.json")
            if folder + "gone.json" in tree:  # a tombstone
                continue
            prefix_length = len(folder)
            names = tuple(other[prefix_length:] for other in tree if other.startswith(folder + "rank-"))
            why = _problem(raw, checkpoint, names, tuple(tree[folder + name] for name in names))
            if why:
                broken[tier, checkpoint] = why
            else:
                whole.add((tier, checkpoint))
    return Contents(frozenset(whole), broken)


@lru_cache(maxsize=100_000)
def _problem(raw: bytes, checkpoint: Id, names: tuple[str, ...], contents: tuple[bytes | None, ...]) -> str:
    """What is wrong with a replica; empty: nothing."""
    try:
        manifest: dict[str, Any] = json.loads(raw)
        entries: list[dict[str, Any]] = manifest["files"]
    except (ValueError, KeyError, TypeError):
        return "its manifest cannot be read"
    files = dict(zip(names, contents, strict=True))
    if (manifest["run"], manifest["generation"], manifest["step"]) != checkpoint:
        return "its manifest is of another checkpoint"
    if len(entries) != manifest["world_size"]:
        return "its manifest does not name a file of each rank"
    for rank, entry in enumerate(sorted(entries, key=lambda entry: entry["name"])):
        content = files.get(entry["name"])
        if content is None:
            return f"{entry['name']} is missing"
        checksum = base64.b64encode(crc64nvme(content).to_bytes(8, "big")).decode()
        if (len(content), checksum) != (entry["size_bytes"], entry["crc64nvme"]):
            return f"{entry['name']} has other bytes than its manifest says"
        if content != shard_of(checkpoint, rank):
            return f"{entry['name']} has other bytes than the snapshot"
    return ""


def required(expected: Expected, policy: Policy) -> tuple[frozenset[tuple[str, Id]], frozenset[Id]]:
    """(replicas that no policy lets go, checkpoints of which some replica must be left)."""
    ever: dict[str, set[Id]] = {}
    for _, checkpoint in expected.durable:
        ever.setdefault(checkpoint.run, set()).add(checkpoint)
    marked = {checkpoint for _, checkpoint, _ in expected.milestones}
    in_hot: set[tuple[str, Id]] = set()
    anywhere: set[Id] = set()
    for checkpoints in ever.values():
        newest_first = sorted(checkpoints, reverse=True)
        in_hot |= {(HOT, each) for each in newest_first[: policy.hot_last] if (HOT, each) in expected.durable}
        # Until a checkpoint that cold keeps is there, hot keeps it, too.
        anywhere |= set(newest_first[: max(policy.hot_last, policy.cold_last)])
    anywhere |= {checkpoint for _, checkpoint in expected.durable if checkpoint in marked}
    return frozenset(in_hot), frozenset(anywhere)


_required = lru_cache(maxsize=10_000)(required)


def broken_promises(contents: Contents, tree: Tree, expected: Expected, policy: Policy) -> list[str]:
    """Sentences about a tree, before or after a recovery; empty when every promise holds."""
    problems = [
        f"commit_last: {checkpoint.folder} in {tier} has a manifest, and {why}"
        for (tier, checkpoint), why in contents.broken.items()
        if (tier, checkpoint) not in expected.damaged
    ]
    in_hot, anywhere = _required(expected, policy)
    present = {checkpoint for _, checkpoint in contents.whole}
    problems += [
        f"durable: {checkpoint.folder} is not whole in {tier}"
        for tier, checkpoint in in_hot - contents.whole - expected.damaged
    ]
    problems += [f"last_replica: {checkpoint.folder} is nowhere" for checkpoint in anywhere - present]
    for tier, checkpoint, name in expected.milestones:
        path = f"{tier}/{checkpoint.folder}/milestone-{name}.json"
        if (tier, checkpoint) in contents.whole and path not in tree:
            problems.append(f"durable: the milestone {name} of {checkpoint.folder} in {tier} is gone")
    for run, generation in expected.claims:
        if highest_generation(tree, contents, run) < generation:
            problems.append(f"fenced: generation {generation} of {run} may be claimed again")
    return problems


def highest_generation(tree: Tree, contents: Contents, run: str) -> int:
    names = [path.rpartition("/")[2] for path in tree if f"/{run}/generation-" in path and path.endswith(".json")]
    claimed = [int(name.removeprefix("generation-").removesuffix(".json")) for name in names]
    return max(
        [*claimed, *(checkpoint.generation for _, checkpoint in contents.whole if checkpoint.run == run)],
        default=0,
    )


def newest(replicas: Iterable[tuple[str, Id]], run: str) -> Id | None:
    return max((checkpoint for _, checkpoint in replicas if checkpoint.run == run), default=None)
