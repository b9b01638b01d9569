"""What a tier sits on: flat keys with whole objects. A directory or a bucket; nothing here knows checkpoints.

Objects appear whole or not at all, are durable when a put returns, and are never overwritten with other bytes.
Every call raises NotFound, Full, Corrupt or TierUnreachable; nothing else of the outside world gets through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from tierd.errors import BadRequest, TierdError
from tierd.format import layout
from tierd.format.manifest import FileEntry

Progress = Callable[[int], None]
"""Told after every chunk how many bytes it had."""


KEY_BYTES_MAX = 900
"""S3 allows 1024 with the bucket's prefix, a path 4096."""


def is_key(text: str) -> bool:
    """Whether every component is a plain name: no leading dot or slash, no '..', no NUL, nothing half-written."""
    return len(text) <= KEY_BYTES_MAX and all(layout.is_safe_file_name(name) for name in text.split("/"))


def check_key(key: str) -> str:
    """Raises BadRequest for what is no key: nothing that a manifest names can leave its tier."""
    if not is_key(key):
        raise BadRequest(
            f"{key[:80]!r} is no key of a tier",
            hint="components of letters, digits, '.', '-' and '_', each beginning with a letter or digit",
        )
    return key


class StoredObject(msgspec.Struct, frozen=True):
    """`etag`: another one for other content, as S3 has it; empty where the store has none."""

    key: str
    size_bytes: int
    etag: str = ""


class Source(Protocol):
    """Where the bytes of a put come from when they are not already in memory."""

    async def fill(self, offset: int, buffer: memoryview) -> None:
        """Fill the whole buffer from `offset`. Raises Corrupt when the source ends early."""
        ...


@runtime_checkable
class LocalSource(Source, Protocol):
    """One that whoever is in a thread already reads there: each turn of the event loop costs 0.5 ms of processor time,
    which for pieces of 4 MiB is 0.3 CPU-s per GB."""

    def fill_now(self, offset: int, buffer: memoryview) -> None:
        """As `fill`, and blocks as long as the disk does."""
        ...


class Store(Protocol):
    """`puts_at_once`: as many as make full use of it; what more of them hold in memory and send at once has the same
    bounds, so they would only wait."""

    url: str
    puts_at_once: int

    async def put(
        self,
        key: str,
        source: memoryview | Source,
        *,
        size_bytes: int,
        chunk_bytes: int,
        expect: FileEntry | None = None,
        progress: Progress | None = None,
        is_lasting: bool = False,
        replace: bool = False,
    ) -> FileEntry:
        """Write `size_bytes` bytes as `key`, one checksum per `chunk_bytes`, computed from the very buffer that is
        written. Returns the file's entry (its name is the last component of the key).

        `expect`: raises Corrupt at the first chunk whose checksum differs; nothing becomes visible then.
        Repeating a put of the same bytes is harmless. `replace`: what lies there is damaged, whatever the store says of
        it; it stays until the whole file takes its place. A memoryview source may be read up to the next multiple
        of 4096 past `size_bytes` where it is that long. `is_lasting`: nothing will ever delete it, so it may lie where
        that is cheaper.
        """
        ...

    async def put_bytes(self, key: str, content: bytes, *, if_absent: bool = False) -> bool:
        """Write a small object at once. `if_absent`: leave an existing one alone and return False."""
        ...

    async def get_bytes(self, key: str, *, size_max: int) -> bytes:
        """A small object whole. Raises NotFound, or Corrupt when it is larger than `size_max`."""
        ...

    async def get_many(self, keys: Sequence[str], *, size_max: int) -> Sequence[bytes | TierdError]:
        """Small objects, each whole or with the error that `get_bytes` would raise. Raises TierUnreachable."""
        ...

    async def read(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill the whole buffer from `offset` of the object. Raises NotFound, or Corrupt when it ends early."""
        ...

    async def kept_checksum(self, key: str) -> str | None:
        """The CRC64NVME of the whole object that the store keeps with it, for no byte read; None: it keeps none. Raises
        NotFound."""
        ...

    async def list(self, prefix: str = "") -> list[StoredObject]:
        """Every object whose key begins with `prefix`, in any order. Half-written ones are never among them."""
        ...

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; absent ones are fine. Durable on return, in the order given. Raises Retained where the store
        keeps one for a while, whatever it is asked."""
        ...

    async def free_bytes(self) -> int | None:
        """Room left, or None where there is no such limit."""
        ...

    def limit_writes(self, mib_s: float) -> None:
        """From now on puts take no more than so much, those under way too; 0: no cap."""
        ...

    async def abort_uploads(self, is_abandoned: Callable[[str], bool], *, grace_s: float) -> int:
        """Give up what was begun longer than `grace_s` ago and never finished, for keys that are abandoned; a bounded
        number each time. Returns how many. Nothing, where what is unfinished leaves no such thing."""
        ...

    async def close(self) -> None: ...
