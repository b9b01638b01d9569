"""Restores a sidecar file from a tier, verified. It appears whole or not at all, and never replaces another file."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Collection, Sequence
from functools import partial
from pathlib import Path

from tierd.access import Access
from tierd.errors import Corrupt, NotFound, TargetNotEmpty
from tierd.format.sidecar import SEGMENT_BYTES_MAX, Segment, decode_segment, short
from tierd.tiers.new_file import NewFile
from tierd.tiers.tier import Tier
from tierd.tiers.tree import Tree
from tierd.transfer.atomic_output import output_error

_OBJECT_BYTES_MAX = SEGMENT_BYTES_MAX + (64 << 10)


class PrefixDigests:
    """The digests of a file up to some offsets, of its bytes in their order. `found`: by offset, as names have them."""

    def __init__(self, ends: Collection[int]) -> None:
        self._left = sorted({*ends}, reverse=True)
        self._digest, self._at = hashlib.sha256(), 0
        self.found: dict[int, str] = {}

    def update(self, content: bytes) -> None:
        rest = memoryview(content)
        while self._left and self._left[-1] <= self._at + len(rest):
            piece = rest[: self._left.pop() - self._at]
            self._digest.update(piece)
            self._at += len(piece)
            rest = rest[len(piece) :]
            self.found[self._at] = short(self._digest.hexdigest())
        self._digest.update(rest)
        self._at += len(rest)


async def write_sidecar(
    tier: Tier, path: Sequence[Segment], target: Path, access: Access, prefixes: PrefixDigests | None = None
) -> bool:
    """Write the bytes of these segments, which have no holes, to `target`. False if the target has them already.
    `prefixes`: gets the bytes too. Raises NotFound without segments, or when one was replaced meanwhile, Corrupt,
    Foreign, TierUnreachable, Full, and TargetNotEmpty when the target has other bytes."""
    if not path:
        raise NotFound(f"write {target}: {tier.name} has no segment of it that begins at 0")
    file = NewFile(Tree(target.parent, create=True, access=access), target.name, path[-1].end, is_small=True)
    digest, offset = hashlib.sha256(), 0
    try:
        await asyncio.to_thread(file.begin)
        async for _, _, content in verified_segments(tier, path):
            digest.update(content)
            if prefixes is not None:
                prefixes.update(content)
            await asyncio.to_thread(file.write, offset, memoryview(content), len(content))
            offset += len(content)
        if await asyncio.to_thread(partial(file.commit, if_absent=True)):
            return True
        await asyncio.to_thread(_check_same, target, digest.hexdigest())
        return False
    except OSError as error:
        raise output_error(error, target) from error
    finally:
        await asyncio.to_thread(file.close)


async def prefix_digests(tier: Tier, path: Sequence[Segment], ends: Collection[int]) -> dict[int, str]:
    """By offset, of those that these segments reach, the digest of the file up to there, as names have it. Raises as
    `verified_segments`."""
    digests, last = PrefixDigests(ends), max(ends, default=0)
    async for _, _, content in verified_segments(tier, [each for each in path if each.begin < last]):
        digests.update(content)
    return digests.found


async def read_segment(tier: Tier, segment: Segment) -> tuple[bytes, bytes, str]:
    """(its object, its bytes of the file, the digest of the file up to its end). Raises as `verified_segments`."""
    raw = await tier.store.get_bytes(segment.key, size_max=_OBJECT_BYTES_MAX)
    return raw, *decode_segment(segment, raw, keyring=tier.keyring, where=tier.name)


async def verified_segments(tier: Tier, path: Sequence[Segment]) -> AsyncGenerator[tuple[Segment, bytes, bytes]]:
    """Each of these segments, which have no holes, with its object and the file's bytes in it.

    Raises NotFound when one was replaced meanwhile, Corrupt, Foreign and TierUnreachable."""
    digest = hashlib.sha256()
    for segment in path:
        raw, content, after = await read_segment(tier, segment)
        digest.update(content)
        if digest.hexdigest() != after:
            message = f"read {segment.key} in {tier.name}: the digest of its bytes is not the one in its header"
            raise Corrupt(message, hint="another tier may have it whole: `tierd sidecars --tier TIER`")
        yield segment, raw, content


def _check_same(target: Path, expected: str) -> None:
    """Raises TargetNotEmpty if the file has not these bytes."""
    with target.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != expected:
        raise TargetNotEmpty(f"write {target}: it exists with other bytes", hint="move it away, or name another folder")
