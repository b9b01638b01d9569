"""The audit trail of a hot directory: who committed, marked, deleted, restored and stopped what.

`record` logs an event at once and queues it; a worker appends queued events to `.tierd-audit` in a thread, and syncs
them. A disk that does not take them never fails an operation: they wait, and what does not fit in memory is counted.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import logging
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

import tierd
from tierd.descriptors import read_all
from tierd.errors import BadConfig, TierdError, TierUnreachable
from tierd.format import audit, layout
from tierd.format.audit import Event, EventKind
from tierd.format.ids import CheckpointId
from tierd.format.signature import Keyring
from tierd.format.text import printable
from tierd.tiers.pool import ThreadPool
from tierd.tiers.tree import closing_fd, make_folder, translated

log = logging.getLogger("tierd")

QUEUED_MAX = 1000  # events that wait for the disk; about 1 MiB
WRITE_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 1.0
LOCK_TRIES = 100  # 5 s: a process that was stopped by a signal may hold the lock for any time
LOCK_PAUSE_S = 0.05
READ_TRIES = 10  # of a trail that is rotated meanwhile


@dataclass(frozen=True, slots=True)
class Who:
    """Who has caused an event. The fields are those of `Event`."""

    by: str
    uid: int
    pid: int

    @classmethod
    def this_process(cls, by: str) -> Who:
        return cls(by, os.geteuid(), os.getpid())


class AuditTrail:
    """`files`: where events are written; None: they are only logged. `now`: ISO 8601 in UTC. It is a Worker: `on_event`
    wakes it. `by`: what this process is, in its own events."""

    name = "audit"
    interval_s = 3600.0  # every event wakes it
    is_urgent = False

    def __init__(
        self,
        files: TrailFiles | None = None,
        *,
        node: str = "",
        now: Callable[[], str] = str,
        on_event: Callable[[], object] = lambda: None,
        by: str = "daemon",
    ) -> None:
        self._files = files
        self._node = node
        self._now = now
        self._on_event = on_event
        self._this_process = Who.this_process(by)
        self._queued: deque[Event] = deque()
        self._lost = 0
        self._is_failing = False
        self._pool = ThreadPool(1, "tierd-audit", where="the audit trail", timeout_s=WRITE_TIMEOUT_S)

    def record(
        self,
        action: EventKind,
        *,
        checkpoint: CheckpointId | None = None,
        run: str = "",
        generation: int | None = None,
        tier: str = "",
        reason: str = "",
        who: Who | None = None,
    ) -> Event:
        """Log an event, and queue it for the trail. Returns it at once. `checkpoint` gives run, step and generation.
        `who`: the peer that asked for it; None: this process."""
        who = who or self._this_process
        event = Event(
            sequence=0,
            at=self._now(),
            action=action.value,
            by=who.by,
            uid=who.uid,
            pid=who.pid,
            node=self._node,
            previous="",
            run=checkpoint.run if checkpoint else run,
            step=checkpoint.step if checkpoint else None,
            generation=checkpoint.generation if checkpoint else generation,
            tier=tier,
            reason=printable(reason, audit.REASON_CHARS_MAX),
            lost=self._lost,
        )
        log.info("%s", event.sentence())
        if self._files is not None and len(self._queued) < QUEUED_MAX:
            self._lost = 0
            self._queued.append(event)
            self._on_event()
        elif self._files is not None:
            self._lost += 1
        return event

    def begin(self) -> None:
        self.record(EventKind.STARTED, reason=f"tierd {tierd.__version__}")

    async def run_once(self) -> bool:
        """Write the queued events. Raises a TierdError for the first of several attempts that fail."""
        if self._files is None:
            return True
        try:
            await self._write()
        except TierdError:
            if self._is_failing:
                return False
            self._is_failing = True
            raise
        self._is_failing = False
        return True

    async def close(self) -> None:
        """Write what is queued, and log where the trail ends, when the daemon ends."""
        self.record(EventKind.ENDED)
        await self.flush(timeout_s=CLOSE_TIMEOUT_S)

    async def flush(self, *, timeout_s: float = WRITE_TIMEOUT_S) -> None:
        """Write what is queued. Nothing can be recorded afterwards."""
        if self._files is not None:
            try:
                tail = await self._write(timeout_s=timeout_s)
                if self._queued:  # that an incomplete line was cut off
                    tail = await self._write(timeout_s=timeout_s)
            except TierdError as error:
                log.warning("%s: %d events of the audit trail are lost", error, len(self._queued) + self._lost)
            else:
                log.info("the audit trail ends with event %d, SHA-256 %s", tail.sequence, tail.previous)
        self._pool.close()

    async def _write(self, timeout_s: float = WRITE_TIMEOUT_S) -> audit.Tail:
        assert self._files is not None
        with translated("write the audit trail", missing=TierUnreachable):
            tail = await self._pool.run(self._files.append, self._queued, timeout_s=timeout_s)
        torn_bytes, self._files.torn_bytes = self._files.torn_bytes, 0
        if torn_bytes:
            reason = f"{torn_bytes} bytes of an incomplete last line were removed"
            self.record(EventKind.TRAIL_CUT, reason=reason)
        return tail


class TrailFiles:
    """The files of the trail below a hot directory, for blocking calls in a thread. `create`: make the folder and new
    files; a command only appends to what the daemon has made, so that every file stays the daemon's."""

    def __init__(
        self,
        hot: Path,
        keyring: Keyring | None,
        *,
        create: bool,
        file_bytes_max: int = audit.FILE_BYTES_MAX,
    ) -> None:
        self._folder = hot / layout.AUDIT
        self._keyring = keyring
        self._create = create
        self._file_bytes_max = file_bytes_max
        self._written = (0, 0)  # (first sequence number, size) of the newest file after the last append
        self._tail = audit.Tail()
        self.torn_bytes = 0
        """Of an incomplete last line that was cut off. It stays until it is noted: whoever called `append` may have
        been cancelled while the thread went on."""

    def append(self, events: deque[Event]) -> audit.Tail:
        """Append the events, and remove each from `events` that was written and synced. Returns the new tail. Raises
        OSError; BadConfig where signed events would be followed by one without a signature, which breaks the chain."""
        if self._create:
            make_folder(self._folder)
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with closing_fd(folder):
            self._lock(folder)  # the daemon and a command may append at the same time
            return self._append(folder, events)

    def _lock(self, folder: int) -> None:
        for _ in range(LOCK_TRIES):
            with suppress(BlockingIOError):
                return fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            threading.Event().wait(LOCK_PAUSE_S)
        raise OSError(f"another process holds its lock for {LOCK_TRIES * LOCK_PAUSE_S:.0f} s")

    def _append(self, folder: int, events: deque[Event]) -> audit.Tail:
        firsts = self._firsts() or [1]
        first = firsts[-1]
        fd = self._open(first)
        try:
            size_bytes = os.fstat(fd).st_size
            tail = self._tail if self._written == (first, size_bytes) else self._read_tail(fd, firsts)
            self._written = (0, 0)  # after an error the tail is read again
            if tail.torn_bytes:
                size_bytes -= tail.torn_bytes
                os.ftruncate(fd, size_bytes)
                self.torn_bytes += tail.torn_bytes
                tail = dataclasses.replace(tail, torn_bytes=0)
            if tail.is_signed and self._keyring is None:
                raise BadConfig(
                    f"append to {self._path(first)}: its events are signed, and no key is configured",
                    hint="set [security] key_file or $TIERD_KEY_FILE: an unsigned event would break the chain",
                )
            synced_bytes, unsynced = size_bytes, 0
            error: OSError | None = None
            try:
                while error is None and unsynced < len(events):
                    event = msgspec.structs.replace(
                        events[unsynced], sequence=tail.sequence + 1, previous=tail.previous
                    )
                    line = audit.encode(event, self._keyring)
                    if self._create and size_bytes and size_bytes + len(line) > self._file_bytes_max:
                        os.fsync(fd)
                        unsynced = _remove(events, unsynced)
                        following = self._open(event.sequence)
                        os.close(fd)
                        fd, first, size_bytes, synced_bytes = following, event.sequence, 0, 0
                        self._delete_oldest()
                    error = _write_line(fd, line, size_bytes)
                    if error is None:
                        size_bytes += len(line)
                        tail = audit.Tail(
                            sequence=event.sequence, previous=audit.digest(line), is_signed=self._keyring is not None
                        )
                        unsynced += 1
                os.fsync(fd)
                os.fsync(folder)  # the file may be new
            except OSError:
                os.ftruncate(fd, synced_bytes)  # these events are written again
                raise
            _remove(events, unsynced)
            if error is not None:
                raise error
        finally:
            os.close(fd)
        self._written, self._tail = (first, size_bytes), tail
        return tail

    def _read_tail(self, fd: int, firsts: Sequence[int]) -> audit.Tail:
        content = _read(fd)
        if b"\n" in content or len(firsts) < 2:
            return audit.tail_of(content, first=firsts[-1])
        former = self._open(firsts[-2])  # the first line of the new file was never written whole
        try:
            return audit.tail_of(_read(former) + content, first=firsts[-2])
        finally:
            os.close(former)

    def is_signed(self) -> bool:
        """Whether the last event is signed. False where there is none. Raises OSError."""
        files = self.read()
        return bool(files) and audit.tail_of(files[-1][1], first=files[-1][0]).is_signed

    def exists(self) -> bool:
        return bool(self._firsts())

    def read(self) -> list[tuple[int, bytes]]:
        """(the first sequence number, content) of each file, oldest first. Raises OSError."""
        files: list[tuple[int, bytes]] = []
        for _ in range(READ_TRIES):
            files.clear()
            with suppress(FileNotFoundError):  # the oldest was deleted since the folder was listed
                for first in self._firsts():
                    fd = os.open(self._path(first), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                    with closing_fd(fd):
                        files.append((first, _read(fd)))
                break
        return files

    def _firsts(self) -> list[int]:
        with suppress(FileNotFoundError):
            names = os.listdir(self._folder)
            return sorted(first for name in names if (first := layout.parse_audit_file(name)) is not None)
        return []

    def _path(self, first: int) -> Path:
        return self._folder / layout.audit_file(first)

    def _open(self, first: int) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(self._path(first), flags | (os.O_CREAT if self._create else 0), 0o600)
        stat_result = os.fstat(fd)
        if not stat.S_ISREG(stat_result.st_mode) or stat_result.st_nlink != 1:
            os.close(fd)
            raise OSError(f"{self._path(first)} is not a file, or has a second name")
        return fd

    def _delete_oldest(self) -> None:
        for first in self._firsts()[: -audit.FILES_MAX]:
            os.unlink(self._path(first))


def _write_line(fd: int, line: bytes, size_bytes: int) -> OSError | None:
    """Append a line to a file of this size. If it does not fit, nothing of it stays. Returns the error."""
    try:
        if os.write(fd, line) == len(line):
            return None
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as refused:
        error = refused
    os.ftruncate(fd, size_bytes)
    return error


def _remove(events: deque[Event], count: int) -> int:
    """Remove the oldest, which are durable. Returns how many are left to sync: 0."""
    for _ in range(count):
        events.popleft()
    return 0


def _read(fd: int) -> bytes:
    content = bytearray(min(os.fstat(fd).st_size, 4 * audit.FILE_BYTES_MAX))
    missing = read_all(fd, 0, memoryview(content))
    return bytes(content[: len(content) - missing])
