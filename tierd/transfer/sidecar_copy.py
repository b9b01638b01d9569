"""Reads a file that grows beside the checkpoints, and writes the segments that a tier lacks.

Each pass reads and digests the whole file, because a program may change any byte of it. Only the listing of a tier says
what the tier has. Nothing about it is kept in memory, so any daemon can continue what another one has begun.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import stat
from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tierd.errors import BadRequest, NotFound, TierdError
from tierd.failpoints import failpoint
from tierd.format.ids import Run
from tierd.format.sidecar import (
    SEGMENT_BYTES_MAX,
    TAIL_BYTES,
    Segment,
    chain,
    encode_segment,
    parse_segment,
    short,
    unsettled_bytes,
    version_prefix,
)
from tierd.tiers.new_file import Uses
from tierd.tiers.pool import ThreadPool
from tierd.tiers.tier import Tier
from tierd.tiers.tree import closing_fd

_PIECE_BYTES = 1 << 20


class FileChanged(Exception):
    """Raised when a file was written while it was read: it is read again."""


@dataclass(frozen=True, slots=True)
class FileState:
    """A file as it was read.

    `key`: its `state_key`; a different key means that the file has changed. `settled`: its size without the bytes that
    only close its JSON document. `hashes`: by offset, the SHA-256 of the bytes up to it, as hash objects that can be
    continued. `open_file`: the file, if the caller keeps it open; it may have another name now, or none."""

    path: Path
    key: tuple[int, ...]
    size: int
    settled: int
    hashes: dict[int, Any] = field(default_factory=dict[int, Any])
    open_file: OpenSidecar | None = None

    def digest(self, end: int) -> str:
        """The digest of the bytes up to `end`, in hexadecimal; empty if it is not known or `end` is beyond the file."""
        return self.hashes[end].hexdigest() if end in self.hashes else ""

    def begins_with(self, end: int, digest: str) -> bool:
        """Whether the bytes up to `end` have this digest, which may be shortened as in the name of a segment."""
        return bool(digest) and self.digest(end).startswith(digest)

    def piece(self, begin: int, end: int) -> bytes:
        """The bytes from `begin` to `end`, both in `hashes`. Raises FileChanged if they have changed."""
        try:
            with _opened(self.path, self.open_file) as fd:
                content = bytearray()
                while more := os.pread(fd, end - begin - len(content), begin + len(content)):
                    content += more
        except TierdError as error:
            raise FileChanged(self.path) from error
        again = self.hashes[begin].copy()
        again.update(content)
        if again.hexdigest() != self.digest(end):
            raise FileChanged(self.path)
        return bytes(content)


def followed_files(folder: Path, patterns: Sequence[str]) -> list[str]:
    """The names that fit a pattern; none without the folder. Blocks. Raises BadRequest when it cannot be listed."""
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadRequest(f"list {folder}: {error.strerror}", hint="sidecars.path names a folder") from error
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def state_key(stat_result: os.stat_result) -> tuple[int, ...]:
    return stat_result.st_dev, stat_result.st_ino, stat_result.st_size, stat_result.st_mtime_ns, stat_result.st_ctime_ns


def read_state(path: Path, offsets: Iterable[int], open_file: OpenSidecar | None = None) -> FileState:
    """Reads the file once. `open_file`: the file, if the caller keeps it open. `hashes` of the result has the offsets
    that are not beyond the end, 0, and both sizes. Raises NotFound, BadRequest when it is not a regular file or cannot
    be read, and FileChanged when it was written meanwhile."""
    with _opened(path, open_file) as opened:
        stat_result = os.fstat(opened)
        size = stat_result.st_size
        tail = os.pread(opened, TAIL_BYTES, max(0, size - TAIL_BYTES))
        settled = size - unsettled_bytes(tail)
        hashes: dict[int, Any] = {}
        digest, at = hashlib.sha256(), 0
        for end in sorted({0, *(offset for offset in offsets if offset <= size), settled, size}):
            while at < end:
                piece = os.pread(opened, min(_PIECE_BYTES, end - at), at)
                if not piece:
                    raise FileChanged(path)
                digest.update(piece)
                at += len(piece)
            hashes[end] = digest.copy()
        return FileState(path, state_key(stat_result), size, settled, hashes, open_file)


def check_readable(path: Path) -> None:
    """Raises NotFound, and BadRequest when it is not a regular file or cannot be read. Blocks."""
    os.close(_descriptor(path))


class OpenSidecar:
    """A file that is kept open while it may be renamed or deleted. `close` may be called while other threads read."""

    def __init__(self, path: Path) -> None:
        """Raises as `check_readable`. Blocks."""
        self._fd = _descriptor(path)
        self._uses = Uses(self._release)

    @contextmanager
    def opened(self, path: Path) -> Generator[int]:
        """Raises FileChanged after `close`."""
        with self._uses:
            if self._fd < 0:
                raise FileChanged(path)
            yield self._fd

    def close(self) -> None:
        with self._uses:
            self._uses.is_over = True

    def _release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _descriptor(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise NotFound(f"read {path}: it does not exist any more") from error
    except OSError as error:
        raise BadRequest(f"read {path}: {error.strerror}", hint="the daemon must be able to read it") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise BadRequest(f"read {path}: it is not a regular file", hint="[sidecars] names files")
    return fd


def _opened(path: Path, open_file: OpenSidecar | None) -> AbstractContextManager[int]:
    return closing_fd(_descriptor(path)) if open_file is None else open_file.opened(path)


def new_spans(chained: Sequence[Segment], covered: int, settled: int) -> list[tuple[int, int]]:
    """The begin and end of each new segment. `chained`: the segments that cover the bytes up to `covered`.

    A new segment replaces the last segments that are not larger than itself. So the number of segments grows with the
    logarithm of the number of passes, and with the file's size divided by SEGMENT_BYTES_MAX.
    """
    if covered >= settled:
        return []
    begin = covered
    for segment in reversed(chained):
        size = settled - begin
        if segment.end - segment.begin > size or settled - segment.begin > SEGMENT_BYTES_MAX:
            break
        begin = segment.begin
    return [(at, min(at + SEGMENT_BYTES_MAX, settled)) for at in range(begin, settled, SEGMENT_BYTES_MAX)]


def matching(segments: Iterable[Segment], state: FileState) -> list[Segment]:
    """The segments whose bytes are those of this file."""
    return [
        segment
        for segment in segments
        if state.begins_with(segment.begin, segment.before) and state.begins_with(segment.end, segment.after)
    ]


def of_other_files(segments: Iterable[Segment], state: FileState) -> list[Segment]:
    """The segments that this file does not begin with. A tail does not count: it may be written anew at any time.
    `state`: read after the segments were listed, with their `offsets`."""
    return [each for each in segments if not each.is_tail and not state.begins_with(each.end, each.after)]


class SidecarCopy:
    """Copies one version of one file into one tier. `stored`: the segments of that version in the tier."""

    def __init__(
        self,
        pool: ThreadPool,
        tier: Tier,
        run: Run,
        file: str,
        version: int,
        stored: list[Segment],
        *,
        phase: str = "",
    ) -> None:
        self._pool, self._tier = pool, tier
        self._run, self._file, self._version, self._phase = run, file, version, phase
        self._stored = stored

    @staticmethod
    def offsets(stored: Iterable[Segment]) -> set[int]:
        """The offsets whose digests are needed to compare the file with the segments."""
        return {at for segment in stored for at in (segment.begin, segment.end)}

    async def run(self, state: FileState) -> int:
        """Write the missing segments, then delete those that they replace. Returns the number of bytes written. Raises
        FileChanged when the file was written meanwhile, and what `put_bytes`, `list` and `delete` of a store raise."""
        own = matching(self._stored, state)
        path = chain([each for each in own if not each.is_tail])
        covered = path[-1].end if path else 0
        spans = [(begin, end, False) for begin, end in new_spans(path, covered, state.settled)]
        if state.settled < state.size:
            spans.append((state.settled, state.size, True))
        if missing := {at for begin, end, _ in spans for at in (begin, end)} - state.hashes.keys():
            try:
                again = await self._pool.query(read_state, state.path, [*state.hashes, *missing], state.open_file)
            except (NotFound, BadRequest) as error:
                raise FileChanged(state.path) from error
            if any(again.digest(at) != state.digest(at) for at in state.hashes):
                raise FileChanged(state.path)
            state.hashes.update(again.hashes)
        written, kept = 0, {each.key for each in path if not spans or each.end <= spans[0][0]}
        for begin, end, is_tail in spans:
            before, after = state.digest(begin), state.digest(end)
            name = self._run, self._file, self._version
            segment = Segment(*name, begin, end, short(before), short(after), is_tail, self._phase)
            kept.add(segment.key)
            if segment in own:
                continue
            content = await self._pool.query(state.piece, begin, end)
            failpoint("sidecar.put")
            raw = encode_segment(segment, content, before=before, after=after, keyring=self._tier.keyring)
            await self._tier.store.put_bytes(segment.key, raw, if_absent=True)
            written += end - begin
        await self._delete_replaced(own, kept, state)
        return written

    async def _delete_replaced(self, own: list[Segment], kept: set[str], state: FileState) -> None:
        """Delete the segments with this file's content that others cover, and tails that were written anew."""
        replaced = [each.key for each in own if each.key not in kept and each.end <= state.settled]
        replaced += [
            each.key
            for each in self._stored
            if each.is_tail and each.key not in kept and state.begins_with(each.begin, each.before)
        ]
        if replaced and self._tier.deletes and not await self._has_other_file(state):
            failpoint("sidecar.delete")
            await self._tier.store.delete(sorted(set(replaced)))

    async def _has_other_file(self, state: FileState) -> bool:
        """Whether the version in the tier has segments of another file now: they may go on where one of these ends."""
        prefix = version_prefix(self._run, self._phase, self._file, self._version)
        listed = [parse_segment(each.key) for each in await self._tier.store.list(prefix)]
        return bool(of_other_files([each for each in listed if each is not None], state))
