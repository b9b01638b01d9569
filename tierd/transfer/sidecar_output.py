"""Restores a sidecar file from a tier, verified. It appears whole or not at all, and never replaces another file."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import secrets
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from tierd.access import Access
from tierd.errors import Corrupt, Full, TargetNotEmpty, TierdError
from tierd.format.layout import PARTIAL_SUFFIX
from tierd.format.sidecar import SEGMENT_BYTES_MAX, Segment, decode_segment
from tierd.tiers.tier import Tier
from tierd.tiers.tree import FOLDER

_OBJECT_BYTES_MAX = SEGMENT_BYTES_MAX + (64 << 10)


async def write_sidecar(tier: Tier, path: Sequence[Segment], target: Path, access: Access) -> bool:
    """Write the bytes of these segments, which have no holes, to `target`. False if the target has them already. Raises
    NotFound when a segment was replaced meanwhile, Corrupt, Foreign, TierUnreachable, Full, and TargetNotEmpty when the
    target has other bytes."""
    try:
        output = await asyncio.to_thread(_Output, target, access)
        try:
            digest = hashlib.sha256()
            async for _, _, content in verified_segments(tier, path):
                digest.update(content)
                await asyncio.to_thread(output.write, content)
            return await asyncio.to_thread(output.publish, digest.hexdigest())
        finally:
            await asyncio.to_thread(output.close)
    except OSError as error:
        raise _translated(error, target) from error


async def verified_segments(tier: Tier, path: Sequence[Segment]) -> AsyncGenerator[tuple[Segment, bytes, bytes]]:
    """Each of these segments, which have no holes, with its object and the file's bytes in it.

    Raises NotFound when one was replaced meanwhile, Corrupt, Foreign and TierUnreachable."""
    digest = hashlib.sha256()
    for segment in path:
        raw = await tier.store.get_bytes(segment.key, size_max=_OBJECT_BYTES_MAX)
        content, after = decode_segment(segment, raw, keyring=tier.keyring, where=tier.name)
        digest.update(content)
        if digest.hexdigest() != after:
            message = f"read {segment.key} in {tier.name}: the digest of its bytes is not the one in its header"
            raise Corrupt(message, hint="another tier may have it whole: `tierd sidecars --tier TIER`")
        yield segment, raw, content


class _Output:
    """A file beside the target, which gets the target's name when it is whole. Every method blocks, and raises
    OSError."""

    def __init__(self, target: Path, access: Access) -> None:
        self._target = target
        self._name = f".{target.name}.{secrets.token_hex(4)}{PARTIAL_SUFFIX}"
        target.parent.mkdir(parents=True, exist_ok=True)
        self._folder = os.open(target.parent, FOLDER)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(self._name, flags, 0o600, dir_fd=self._folder)
        except BaseException:
            os.close(self._folder)
            raise
        access.share(self._fd)

    def write(self, content: bytes) -> None:
        while content:
            content = content[os.write(self._fd, content) :]

    def publish(self, digest: str) -> bool:
        """False if the target exists with this digest."""
        os.fsync(self._fd)
        if _is_same(self._target, digest):
            return False
        os.link(self._name, self._target.name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        os.fsync(self._folder)
        return True

    def close(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._name, dir_fd=self._folder)
        os.close(self._fd)
        os.close(self._folder)


def _is_same(target: Path, expected: str) -> bool:
    """Whether the file is there with these bytes. Raises TargetNotEmpty if it is there with others."""
    try:
        with target.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return False
    if digest != expected:
        raise TargetNotEmpty(f"write {target}: it exists with other bytes", hint="move it away, or name another folder")
    return True


def _translated(error: OSError, target: Path) -> TierdError:
    message = f"write {target}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Full(message, hint="free space there, or name another disk")
    if error.errno == errno.EEXIST:
        return TargetNotEmpty(message, hint="another process wrote it meanwhile")
    return TierdError(message, hint="check the path and its permissions")
