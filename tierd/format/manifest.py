"""The manifest: the list of a checkpoint's shards with sizes and checksums. Its presence is the commit.

It is written once and never changed. Decoding checks that file names stay inside their folder, that sizes and chunk
counts agree, that the chunk checksums combine to the file's checksum, and that numbers are in range. A newer version
is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

import msgspec

from tierd.errors import UNDECODABLE, Corrupt, NewerFormat, TierdError
from tierd.format import checksum, digest, layout
from tierd.format.ids import WORLD_SIZE_MAX, CheckpointId, checkpoint_id
from tierd.format.text import parse_time

FORMAT_VERSION = 1
MANIFEST_BYTES_MAX = 64 << 20  # 64 MiB: 10,000 shards of 400 chunks
FILES_MAX = WORLD_SIZE_MAX
SNAPSHOT, ADOPTED = "snapshot", "adopted"  # kinds of a checkpoint: of tierd's client, or of another program
REPORTED_UNHEALTHY = "tierd.unhealthy"  # a metric; not 0: the training itself reported the state as bad
NOT_FINITE = ("nan", "inf", "-inf")  # metrics that are not numbers in JSON


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a checkpoint. `crc64nvme`: of the whole file; `chunks`: the checksum of each `chunk_bytes` bytes.
    Of a signed checkpoint also `digests`: one of each chunk, by the algorithm `digest`."""

    name: str
    size_bytes: int
    crc64nvme: str
    chunk_bytes: int
    chunks: list[str]
    digest: str | msgspec.UnsetType = msgspec.UNSET
    digests: list[str] | msgspec.UnsetType = msgspec.UNSET

    @property
    def algorithm(self) -> str:
        """The algorithm of its digests; empty if it has none."""
        return self.digest if isinstance(self.digest, str) else ""

    def digest_of(self, index: int) -> str:
        """The digest of a chunk; empty if it has none."""
        return self.digests[index] if isinstance(self.digests, list) else ""


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What describes a whole checkpoint. `sequence` counts the run's checkpoints from 1; `kind`: SNAPSHOT or ADOPTED.
    `parent`: the checkpoint that it continues, of the same run or of the run that it was forked from."""

    format_version: int
    run: str
    step: int
    generation: int
    sequence: int
    parent: CheckpointId | None
    world_size: int
    created_at: str
    kind: str
    metrics: dict[str, float | str]
    architecture_hash: str
    versions: dict[str, str]

    @property
    def id(self) -> CheckpointId:
        return checkpoint_id(self.run, self.step, self.generation)

    @property
    def is_adopted(self) -> bool:
        """Whether another program wrote it: its files are opaque, and format/adopted.py describes them."""
        return self.kind == ADOPTED

    @property
    def is_reported_unhealthy(self) -> bool:
        """Whether the training itself said that the state is bad."""
        return self.metrics.get(REPORTED_UNHEALTHY, 0) != 0

    @property
    def created(self) -> datetime | None:
        """None if `created_at` is not a time: `decode` does not check it."""
        return parse_time(self.created_at)

    @property
    def save_digest(self) -> str:
        """In hexadecimal, the same of the whole checkpoint and of its parts. It differs between two saves of one id:
        two nodes may have claimed one generation while no cold tier answered."""
        fields = (self.run, self.step, self.generation, self.sequence, self.world_size, self.created_at)
        return hashlib.sha256(msgspec.json.encode((*fields, self.architecture_hash))).hexdigest()

    def encode(self) -> bytes:
        """The exact bytes of the file: indented JSON, in field order, ending in a newline."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


class Manifest(Head, frozen=True, kw_only=True):
    """One checkpoint with its files."""

    files: list[FileEntry]
    signature: str | msgspec.UnsetType = msgspec.UNSET  # last: it is over the bytes before it

    @property
    def key(self) -> str:
        """The key of the manifest in a tier."""
        return layout.manifest_key(self.id)

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.files)

    def missing_file(self, sizes: Mapping[str, int]) -> str:
        """Which of its files is not among these, or has another size; empty if none. `sizes`: in bytes, by name."""
        for entry in self.files:
            if sizes.get(entry.name) != entry.size_bytes:
                return f"{entry.name} is missing or has another size"
        return ""


def file_entry(
    name: str, size_bytes: int, chunk_bytes: int, chunks: list[int], *, algorithm: str = "", digests: Sequence[str] = ()
) -> FileEntry:
    """The entry of a file, from the checksums of its chunks in order; with their digests if `algorithm` names one."""
    lengths = [length for _, length in checksum.chunk_ranges(size_bytes, chunk_bytes)]
    return FileEntry(
        name=name,
        size_bytes=size_bytes,
        crc64nvme=checksum.encode(checksum.combine(zip(chunks, lengths, strict=True))),
        chunk_bytes=chunk_bytes,
        chunks=[checksum.encode(chunk) for chunk in chunks],
        digest=algorithm or msgspec.UNSET,
        digests=list(digests) if algorithm else msgspec.UNSET,
    )


def architecture_hash(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> str:
    """sha256, in hexadecimal, of the model's among these tensors. `tensors`: (name, dtype as torch has it, global
    shape) of each."""
    model = sorted(tensor for tensor in tensors if tensor[0].startswith("model."))
    return hashlib.sha256(json.dumps(model, separators=(",", ":")).encode()).hexdigest()


def plain_metrics(metrics: Mapping[str, float | str]) -> dict[str, float | str]:
    """Metrics as JSON can contain them: numbers that are not finite become "nan", "inf" or "-inf"."""
    return {
        name: value if isinstance(value, str) or math.isfinite(value) else str(value) for name, value in metrics.items()
    }


class _Version(msgspec.Struct):
    format_version: int


def decode(raw: bytes, *, where: str, expect: CheckpointId | None = None) -> Manifest:
    """Decode and check a manifest.

    `where` says in messages where it is; `expect` is the checkpoint in whose folder it is.
    Raises NewerFormat for a later version, Corrupt for any other violation of the format.
    """
    action = f"decode the manifest {where if expect is None else f'{expect} in {where}'}"
    return decode_file(raw, Manifest, _check, action=action, expect=expect)


ManifestFile = TypeVar("ManifestFile", bound=Head)


def decode_file(
    raw: bytes,
    kind: type[ManifestFile],
    check: Callable[[ManifestFile], None],
    *,
    action: str,
    expect: CheckpointId | None,
) -> ManifestFile:
    """Decode a manifest or a node file. `check` raises ValueError for a violation. Errors as of `decode`."""
    hint = "the checkpoint is kept but not used; see docs/RUNBOOK.md#unreadable-manifest"
    if len(raw) > MANIFEST_BYTES_MAX:
        raise Corrupt(f"{action}: {len(raw)} bytes, more than {MANIFEST_BYTES_MAX}", hint=hint)

    def check_all(decoded: ManifestFile) -> None:
        _check_head(decoded, expect)
        check(decoded)

    return decode_versioned(raw, kind, check_all, version_max=FORMAT_VERSION, action=action, hint=hint)


Versioned = TypeVar("Versioned", bound=msgspec.Struct)


def decode_versioned(
    raw: bytes, kind: type[Versioned], check: Callable[[Versioned], None], *, version_max: int, action: str, hint: str
) -> Versioned:
    """Decode a file with a `format_version`. `check` raises ValueError for a violation, `hint` says what that means.
    Raises NewerFormat for a version above `version_max`, Corrupt for any other violation."""
    try:
        version = msgspec.json.decode(raw, type=_Version).format_version
        if version > version_max:
            message = f"{action}: format version {version}, this tierd reads up to {version_max}"
            raise NewerFormat(message, hint="upgrade tierd")
        if version < 1:
            raise ValueError(f"format version {version}")
        decoded = msgspec.json.decode(raw, type=kind)
        check(decoded)
    except UNDECODABLE as error:
        raise Corrupt(f"{action}: {error}", hint=hint) from error
    return decoded


def _check_head(head: Head, expect: CheckpointId | None) -> None:
    """Raises ValueError for the first violation."""
    try:
        checkpoint = head.id
    except TierdError as error:
        raise ValueError(error.message) from error
    if expect is not None and checkpoint != expect:
        raise ValueError(f"it is of {checkpoint}, but in the folder of {expect}")
    if head.sequence < 1:
        raise ValueError(f"sequence {head.sequence}, expected 1 or more")
    if not 1 <= head.world_size <= WORLD_SIZE_MAX:
        raise ValueError(f"world size {head.world_size}")
    for name, value in head.metrics.items():
        if isinstance(value, str) and value not in NOT_FINITE:
            raise ValueError(f"metric {name!r} is {value[:40]!r}, not a number")


def _check(manifest: Manifest) -> None:
    check_files(manifest.files)


def check_files(files: Sequence[FileEntry]) -> None:
    """Raises ValueError for the first violation."""
    if not files or len(files) > FILES_MAX:
        raise ValueError(f"{len(files)} files")
    if len({entry.name for entry in files}) != len(files):
        raise ValueError("two files have the same name")
    for entry in files:
        if not layout.is_safe_file_name(entry.name) or layout.is_ours(entry.name):
            raise ValueError(f"file name {entry.name!r}")
        if entry.size_bytes < 0 or not 4096 <= entry.chunk_bytes <= 5 << 30:
            raise ValueError(f"{entry.name}: size {entry.size_bytes}, chunk size {entry.chunk_bytes}")
        # Compare the count before making a list from the size: a forged size must not exhaust memory.
        expected = -(-entry.size_bytes // entry.chunk_bytes)
        if len(entry.chunks) != expected:
            raise ValueError(f"{entry.name}: {len(entry.chunks)} chunk checksums, expected {expected}")
        if entry.algorithm and entry.algorithm not in digest.ALGORITHMS:
            raise ValueError(f"{entry.name}: digests by {entry.algorithm[:40]!r}")
        digests = entry.digests if isinstance(entry.digests, list) else []
        if len(digests) != (expected if entry.algorithm else 0) or not all(map(digest.is_digest, digests)):
            raise ValueError(f"{entry.name}: its digests are not one of each chunk")
        chunks = [checksum.decode(chunk) for chunk in entry.chunks]
        lengths = [length for _, length in checksum.chunk_ranges(entry.size_bytes, entry.chunk_bytes)]
        if checksum.combine(zip(chunks, lengths, strict=True)) != checksum.decode(entry.crc64nvme):
            raise ValueError(f"{entry.name}: the chunk checksums do not combine to the file's checksum")


def encode_marker(content: Mapping[str, Any] | msgspec.Struct) -> bytes:
    """The bytes of a marker file: a small JSON object."""
    return msgspec.json.encode(content) + b"\n"
