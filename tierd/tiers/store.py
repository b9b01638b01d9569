"""What a tier is built on: a flat set of keys, each with a whole object. A directory and a bucket implement it.

An object appears whole or not at all, is durable when its put returns, and is never overwritten with other bytes.
A store knows nothing of checkpoints. Its methods raise NotFound, Full, Corrupt, Retained, BadRequest or
TierUnreachable, and no exception of the operating system or of boto3.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from tierd.errors import BadRequest, Corrupt, TierdError
from tierd.format import layout
from tierd.format.manifest import FileEntry

Progress = Callable[[int], None]
"""Called after each piece with its size in bytes."""

KEY_BYTES_MAX = 900
"""S3 allows 1024 bytes with the bucket's prefix; a path may have 4096."""


def is_key(text: str) -> bool:
    """Whether every component is a plain name: no leading dot or slash, no '..', no NUL, no partial file. The identity
    marker of a tier, at its root, is the one key that begins with a dot."""
    is_plain = len(text) <= KEY_BYTES_MAX and all(layout.is_safe_file_name(name) for name in text.split("/"))
    return is_plain or layout.parse_tier_marker(text) is not None


def check_key(key: str) -> str:
    """Returns `key`. Raises BadRequest when it is not a key: no name in a manifest leads out of its tier."""
    if not is_key(key):
        raise BadRequest(
            f"{key[:80]!r} is not a key of a tier",
            hint="components of letters, digits, '.', '-' and '_', each beginning with a letter or digit",
        )
    return key


def conflict(message: str) -> Corrupt:
    """The error of a write whose key has other bytes already."""
    return Corrupt(message, hint="do two jobs write one run into one tier? Rename one run; nothing was overwritten")


class StoredObject(msgspec.Struct, frozen=True):
    """`etag` differs when the content differs, as in S3; empty where the store has none. `written_at_s`: Unix time; inf
    where the store does not say."""

    key: str
    size_bytes: int
    etag: str = ""
    written_at_s: float = math.inf


@dataclass(eq=False)
class Source:
    """Bytes that a put reads piece by piece. `fill(offset, buffer)` fills the whole buffer from `offset`, and raises
    Corrupt when the source ends early.

    `fill_blocking`: the same in the caller's thread; None where only the event loop can read. A round trip through the
    loop takes 0.5 ms of processor time, which is 0.3 CPU-s per GB at pieces of 4 MiB.
    """

    fill: Callable[[int, memoryview], Awaitable[None]]
    fill_blocking: Callable[[int, memoryview], None] | None = None


class ReadableStore(Protocol):
    """What a restore needs of a store. The memory tier has no more than this."""

    async def get_bytes(self, key: str, *, size_max: int) -> bytes:
        """A small object whole. Raises NotFound, or Corrupt when it is larger than `size_max`."""
        ...

    async def read(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill the whole buffer from `offset` of the object. Raises NotFound, or Corrupt when it ends early."""
        ...

    def source(self, key: str) -> Source:
        """The bytes of an object, to be read piece by piece."""
        ...

    async def close(self) -> None: ...


class Store(ReadableStore, Protocol):
    """`is_local`: reading costs no requests and no egress. `puts_at_once`: how many puts use the store fully; more of
    them would share the same buffers and bandwidth and only wait."""

    url: str
    is_local: bool
    puts_at_once: int

    @property
    def answered_s(self) -> float:
        """When it last answered a call, by the event loop's clock; -inf: never."""
        ...

    async def put(
        self,
        key: str,
        source: Source,
        *,
        size_bytes: int,
        chunk_bytes: int,
        expect: FileEntry | None = None,
        progress: Progress | None = None,
        is_lasting: bool = False,
        replace: bool = False,
    ) -> FileEntry:
        """Write `size_bytes` bytes as `key`, with one checksum per `chunk_bytes` of what is written.

        Returns the file's entry, named as the last component of the key. Repeating a put of the same bytes is harmless.
        `expect`: raises Corrupt at the first chunk whose checksum differs, and nothing becomes visible.
        `replace`: the object is damaged, whatever the store reports about it; it stays until the new one is whole.
        `is_lasting`: the object is never deleted, so it may be stored where that is cheaper.
        """
        ...

    async def put_bytes(self, key: str, content: bytes, *, if_absent: bool = False) -> bool:
        """Write a small object at once. `if_absent`: leave an existing one unchanged and return False."""
        ...

    async def get_many(self, keys: Sequence[str], *, size_max: int) -> Sequence[bytes | TierdError]:
        """Small objects, each whole or with the error that `get_bytes` would raise. Raises TierUnreachable, except for
        an object that cannot be read while others can: forbidden, archived, or in a bad sector."""
        ...

    async def make_durable(self, keys: Sequence[str]) -> None:
        """Make these objects durable as far as they are listed: whoever wrote them may have been killed before its last
        fsync. Absent ones are ignored."""
        ...

    async def stored_checksum(self, key: str) -> str | None:
        """The CRC64NVME of the whole object that the store keeps beside it, without reading the object; None where it
        keeps none. Raises NotFound."""
        ...

    async def list(self, prefix: str = "", *, until: str = "") -> list[StoredObject]:
        """Every whole object whose key begins with `prefix`, in any order. `until`: later keys may be left out, where
        that saves requests; empty: none are."""
        ...

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, the first one before all others; absent ones are ignored. Durable on return. Raises Retained
        where the store refuses to delete an object for some time."""
        ...

    async def exists(self) -> bool:
        """False where the directory is missing, so that no object can be there. True for a bucket, which only a
        request can tell."""
        ...

    async def free_bytes(self) -> int | None:
        """Free space, or None where there is no limit."""
        ...

    async def disk(self) -> int | None:
        """Which file system of this machine it is on, as its device number; None: on none."""
        ...

    def limit_writes(self, mib_s: float) -> None:
        """Cap puts, those in progress too, at `mib_s` MiB/s from now on; 0: no cap."""
        ...

    async def remove_unfinished(self, is_abandoned: Callable[[str], bool], *, grace_s: float) -> int:
        """Remove what puts left that never finished, a bounded number in each call. Returns how many.

        What a later put of the key could continue is removed only where `is_abandoned(key)` holds, and only when it is
        older than `grace_s`.
        """
        ...

    async def unfinished(self) -> list[str]:
        """The keys of the objects that puts have begun and never finished, and that a later put continues."""
        ...
