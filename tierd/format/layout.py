"""All paths and object keys. Keys use '/', are relative to a tier's root, and are never overwritten.

<run>/<step:012d>-g<generation:04d>/rank-00003-of-00008.safetensors   a shard
<run>/<step:012d>-g<generation:04d>/node-00000-of-00016.json          the part of the node whose lowest rank is 0
<run>/<step:012d>-g<generation:04d>/manifest.json                     the commit
<run>/<step:012d>-g<generation:04d>/milestone-<name>.json             a marker: exempt from retention
<run>/<step:012d>-g<generation:04d>/removed-milestone-<name>.json     a marker: that milestone counts no longer
<run>/<step:012d>-g<generation:04d>/gone.json                         a marker: deleted, where it had node files
<run>/<step:012d>-g<generation:04d>/healthy.json                      a marker: the verdict, or unhealthy.json
<run>/generation-0003.json                                            a marker: generation 3 is claimed
.tierd-tier-<uuid>.json                                               a marker: the identity of the tier
<run>/<step:012d>-g<generation:04d>/.<file>.damaged                   only in a directory: replaced by a repair
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from tierd.errors import BadRequest
from tierd.format.ids import CheckpointId, Generation, Rank, Run, is_run, parse_name

MANIFEST = "manifest.json"
NODE_FILES_END = "node."  # sorts after the node files, the manifest and the tombstone, and before the shards
MARKERS_END = "n"  # sorts after most markers, the manifest and the tombstone, and before the node files
GONE = "gone.json"  # a tombstone in a cold tier: the checkpoint is deleted, whatever else is in its folder
HEALTHY, UNHEALTHY = "healthy.json", "unhealthy.json"
LATE_MARKERS = ("removed-", UNHEALTHY)  # with these the names of the other markers begin: they sort after the shards
HEAD = "head.json"  # a marker in a cold tier: what node 0 of a watched run says of the checkpoint, before any part
PARTIAL_SUFFIX = ".partial"  # a file being written; it is renamed when it is complete and durable
LOCK = ".tierd.lock"
KNOWN_TIERS = ".tierd-known"  # a folder of the hot directory: which place each cold tier is
RUN_SECRETS = ".tierd-secrets"  # a folder of the hot directory: what proves that a peer knows a run's secret
PEERS = ".peers"  # a folder of the hot directory: copies of other nodes' parts
ATTACHED_RUNS = ".tierd-runs.json"  # a file of the hot directory: which runs have trainers here
ATTACHED_RUNS_NEW = ".tierd-runs.new"  # while it is written
AUDIT = ".tierd-audit"  # a folder of the hot directory: the audit trail
TIER_MARKERS = ".tierd-tier-"  # the prefix of a tier's identity markers; their dot keeps them out of `rm *`
_DAMAGED_SUFFIX = ".damaged"
NAME_CHARS_MAX = 200  # of a file name that gets a suffix: a filesystem allows 255

_PARTIAL_DOWNLOAD = re.compile(r".+\.[0-9a-f]{16}\.partial")
_SHARD = re.compile(r"rank-([0-9]{5,7})-of-([0-9]{5,7})\.safetensors")
_NODE_FILE = re.compile(r"node-([0-9]{5,7})-of-([0-9]{5,7})\.json")
MILESTONE_CHARS_MAX = 64
MILESTONE_PATTERN = rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MILESTONE_CHARS_MAX - 1}}}"
_MILESTONE = re.compile(rf"milestone-({MILESTONE_PATTERN})\.json")
_REMOVED_MILESTONE = re.compile(rf"removed-milestone-({MILESTONE_PATTERN})\.json")
_REMOVED = "-"  # before the name: no milestone begins with it
_TIER_MARKER = re.compile(r"\.tierd-tier-([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\.json")
_AUDIT_FILE = re.compile(r"([0-9]{12})\.jsonl")
_GENERATION = re.compile(r"generation-([0-9]{4}|[1-9][0-9]{4,7})\.json")
# One path component, no leading dot: no file name in a manifest leads out of its folder.
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


def shard_name(rank: Rank, world_size: int) -> str:
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


def parse_shard(name: str) -> tuple[int, int] | None:
    """(rank, world size) of the name of a shard, or None if it is not one."""
    match = _SHARD.fullmatch(name)
    parsed = (int(match[1]), int(match[2])) if match else None
    return parsed if parsed and shard_name(Rank(parsed[0]), parsed[1]) == name else None


def node_file_name(lowest_rank: int, world_size: int) -> str:
    """The name of the file that lists the shards of one node of several."""
    return f"node-{lowest_rank:05d}-of-{world_size:05d}.json"


def parse_node_file(name: str) -> tuple[int, int] | None:
    """(lowest rank, world size) of the name of a node file, or None if it is not one."""
    match = _NODE_FILE.fullmatch(name)
    parsed = (int(match[1]), int(match[2])) if match else None
    return parsed if parsed and node_file_name(*parsed) == name else None


def node_files(file_names: Iterable[str]) -> list[str]:
    """The node files among the files of a checkpoint, in order of their lowest rank."""
    return sorted(name for name in file_names if parse_node_file(name) is not None)


def part_prefix(node: int) -> str:
    """The prefix of the names of the files that one node of several has adopted."""
    return f"part-{node:05d}-"


def checkpoint_prefix(checkpoint: CheckpointId) -> str:
    return file_key(checkpoint, "")


def file_key(checkpoint: CheckpointId, name: str) -> str:
    return f"{checkpoint.run}/{checkpoint.name}/{name}"


def step_prefix(run: Run, step: int) -> str:
    """The prefix of the keys of all checkpoints of this step, in any generation."""
    return f"{run}/{step:012d}-g"


def manifest_key(checkpoint: CheckpointId) -> str:
    return file_key(checkpoint, MANIFEST)


def milestone_file(milestone: str) -> str:
    """The name of the marker file. Raises BadRequest when the milestone's name cannot be part of a file name."""
    name = f"milestone-{milestone}.json"
    if not _MILESTONE.fullmatch(name):
        raise BadRequest(
            f"{milestone[:80]!r} cannot name a milestone",
            hint="use 1 to 64 letters, digits, '.', '-' or '_', beginning with a letter or digit",
        )
    return name


def removed_milestone_file(milestone: str) -> str:
    """The name of the marker that removes a milestone. Raises as `milestone_file`."""
    return f"removed-{milestone_file(milestone)}"


def milestone_of(file_name: str) -> str | None:
    match = _MILESTONE.fullmatch(file_name)
    return match[1] if match else None


def mark_of(file_name: str) -> str | None:
    """What the marker of a milestone says: its name, or what `removal` returns for the name. None of any other file."""
    if not file_name.startswith(("milestone-", "removed-")):  # a listing asks for every file
        return None
    match = _REMOVED_MILESTONE.fullmatch(file_name)
    return removal(match[1]) if match else milestone_of(file_name)


def removal(milestone: str) -> str:
    """Among marks: that this milestone is removed."""
    return _REMOVED + milestone


def removed_by(mark: str) -> str | None:
    """The milestone that this mark removes, or None if it sets one."""
    return mark[len(_REMOVED) :] if mark.startswith(_REMOVED) else None


def marks_of(file_names: Iterable[str]) -> frozenset[str]:
    return frozenset(mark for name in file_names if (mark := mark_of(name)) is not None)


def counted(marks: Iterable[str]) -> frozenset[str]:
    """The milestones that these marks, of all tiers, give a checkpoint. A removal is for good."""
    marks = frozenset(marks)
    return frozenset(mark for mark in marks if removed_by(mark) is None and removal(mark) not in marks)


def milestones_of(file_names: Iterable[str]) -> frozenset[str]:
    """The milestones that the files of a checkpoint give it."""
    return counted(marks_of(file_names))


def diagnosis_of(file_names: Collection[str]) -> bool | None:
    """Whether a checkpoint with these files is healthy; None when it was not examined. If both markers exist, it is
    unhealthy."""
    return False if UNHEALTHY in file_names else True if HEALTHY in file_names else None


def diagnosis_key(checkpoint: CheckpointId, *, is_healthy: bool) -> str:
    return file_key(checkpoint, HEALTHY if is_healthy else UNHEALTHY)


def is_marker(file_name: str) -> bool:
    """Whether a file in a checkpoint's folder is a marker of it."""
    return file_name in (HEALTHY, UNHEALTHY, GONE, HEAD) or mark_of(file_name) is not None


def is_ours(file_name: str) -> bool:
    """Whether a file in a checkpoint's folder is the manifest, a node file or a marker, so not a shard."""
    return file_name == MANIFEST or is_marker(file_name) or parse_node_file(file_name) is not None


def partial_name(file_name: str, token: str) -> str:
    """The name of a file while it is written; `token`, hexadecimal digits, tells writers apart."""
    return f"{file_name[:NAME_CHARS_MAX]}.{token}{PARTIAL_SUFFIX}"


def is_partial_download(file_name: str) -> bool:
    """Whether it is the partial name of a file that is fetched. Its token has 16 digits, a new file's has 8."""
    return _PARTIAL_DOWNLOAD.fullmatch(file_name) is not None


def damaged_copy_name(file_name: str) -> str:
    """The name that a damaged file gets when a repair replaces it. Not a key, so no listing shows it."""
    return f".{file_name[:NAME_CHARS_MAX]}{_DAMAGED_SUFFIX}"


def is_damaged_copy(file_name: str) -> bool:
    return file_name.startswith(".") and file_name.endswith(_DAMAGED_SUFFIX)


def generation_prefix(run: Run) -> str:
    """The prefix of the keys of all generation markers of a run."""
    return f"{run}/generation-"


def generation_key(run: Run, generation: Generation) -> str:
    return f"{generation_prefix(run)}{generation:04d}.json"


def tier_marker_key(identity: str) -> str:
    """`identity`: a UUID in its usual form of 36 characters."""
    return f"{TIER_MARKERS}{identity}.json"


def audit_file(first: int) -> str:
    """The name of a file of the audit trail. `first`: the sequence number of its first event."""
    return f"{first:012d}.jsonl"


def parse_audit_file(name: str) -> int | None:
    match = _AUDIT_FILE.fullmatch(name)
    return int(match[1]) if match else None


def parse_tier_marker(key: str) -> str | None:
    """The identity that a key at the root of a tier gives it, or None if it is no such key."""
    match = _TIER_MARKER.fullmatch(key)
    return match[1] if match else None


def is_safe_file_name(name: str) -> bool:
    return _FILE.fullmatch(name) is not None and not name.endswith(PARTIAL_SUFFIX)


def parse_key(key: str) -> CheckpointId | None:
    """The checkpoint that a file with this key belongs to, or None if it is not a key of a checkpoint's file."""
    parts = key.split("/")
    return parse_name(Run(parts[0]), parts[1]) if len(parts) == 3 and is_run(parts[0]) else None


def parse_generation_key(key: str) -> tuple[Run, Generation] | None:
    """(run, generation) of the key of a generation marker, or None if it is not one."""
    run, _, name = key.partition("/")
    match = _GENERATION.fullmatch(name)
    return (Run(run), Generation(int(match[1]))) if match and is_run(run) else None
