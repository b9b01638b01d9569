"""The audit trail on a real disk: restarts, rotation, incomplete lines, a full disk, and who else may append."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import resource
import stat
import threading
from collections import deque
from pathlib import Path

import pytest

from tierd.audit import QUEUED_MAX, AuditTrail, TrailFiles, Who
from tierd.errors import BadConfig, TierdError
from tierd.format import audit, layout
from tierd.format.audit import EventKind
from tierd.format.signature import Keyring, new_key


def make_trail(hot: Path, keyring: Keyring | None = None, **options: int) -> AuditTrail:
    return AuditTrail(TrailFiles(hot, keyring, create=True, **options), node="node", now=lambda: "2026-01-01T00:00:00Z")


async def check(hot: Path, keyring: Keyring | None = None) -> audit.Chain:
    return audit.check(await asyncio.to_thread(TrailFiles(hot, keyring, create=False).read), keyring)


async def test_a_restart_continues_the_chain(tmp_path: Path) -> None:
    keyring = Keyring([new_key()])
    for run in ("first", "second"):
        trail = make_trail(tmp_path, keyring)
        trail.record(EventKind.COMMITTED, run=run, tier="hot")
        assert await trail.run_once()
        trail.record(EventKind.EVICTED, run=run, tier="hot", who=Who("operator", 7, 8))
        await trail.close()
    chain = await check(tmp_path, keyring)
    assert chain.problem == ""
    assert [event.action for event in chain.events] == ["committed", "evicted", "ended"] * 2
    assert [event.sequence for event in chain.events] == [1, 2, 3, 4, 5, 6]
    assert (chain.events[4].run, chain.events[4].uid, chain.events[4].pid) == ("second", 7, 8)
    assert (chain.events[2].uid, chain.events[2].pid) == (os.geteuid(), os.getpid())


async def test_the_file_is_the_users_alone_and_no_key_of_the_tier(tmp_path: Path) -> None:
    former = os.umask(0)
    try:
        trail = make_trail(tmp_path)
        trail.record(EventKind.STARTED)
        await trail.close()
    finally:
        os.umask(former)
    path = tmp_path / layout.AUDIT / layout.audit_file(1)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


async def test_an_incomplete_last_line_is_cut_off_and_noted(tmp_path: Path) -> None:
    trail = make_trail(tmp_path)
    trail.record(EventKind.COMMITTED, run="a")
    await trail.close()
    path = tmp_path / layout.AUDIT / layout.audit_file(1)
    os.truncate(path, path.stat().st_size - 20)
    trail = make_trail(tmp_path)
    await trail.run_once()
    trail.record(EventKind.STARTED)
    await trail.run_once()
    await trail.close()
    chain = await check(tmp_path)
    assert chain.problem == ""
    assert [event.action for event in chain.events] == ["committed", "trail_cut", "started", "ended"]
    assert "incomplete last line" in chain.events[1].reason


async def test_an_incomplete_last_line_is_noted_by_a_daemon_that_ends_before_its_first_write(tmp_path: Path) -> None:
    trail = make_trail(tmp_path)
    await trail.close()
    path = tmp_path / layout.AUDIT / layout.audit_file(1)
    path.write_bytes(path.read_bytes() + b'{"sequence":')
    await make_trail(tmp_path).close()
    chain = await check(tmp_path)
    assert (chain.problem, [event.action for event in chain.events]) == ("", ["ended", "ended", "trail_cut"])


async def test_an_incomplete_last_line_is_noted_by_a_daemon_that_ends_during_its_first_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / layout.AUDIT / layout.audit_file(1)
    path.parent.mkdir()
    path.write_text('{"sequence":')
    trail, may_sync = make_trail(tmp_path), threading.Event()
    sync = os.fsync

    def sync_late(fd: int) -> None:
        assert b"started" not in path.read_bytes() or may_sync.wait(10)
        sync(fd)

    monkeypatch.setattr(os, "fsync", sync_late)
    trail.begin()
    writing = asyncio.create_task(trail.run_once())
    while b"started" not in path.read_bytes():
        await asyncio.sleep(0.001)
    writing.cancel()
    await asyncio.sleep(0)
    may_sync.set()
    with pytest.raises(asyncio.CancelledError):
        await writing
    await trail.close()
    assert [event.action for event in (await check(tmp_path)).events] == ["started", "ended", "trail_cut"]


async def test_the_oldest_files_are_deleted_and_the_chain_goes_on(tmp_path: Path) -> None:
    trail = make_trail(tmp_path, file_bytes_max=1000)
    for number in range(40):
        trail.record(EventKind.COMMITTED, run=f"run{number}")
        await trail.run_once()
    await trail.close()
    files = sorted((tmp_path / layout.AUDIT).iterdir())
    assert len(files) == audit.FILES_MAX
    assert all(path.stat().st_size <= 1000 for path in files)
    chain = await check(tmp_path)
    assert (chain.problem, chain.events[-1].sequence) == ("", 41)
    assert len(chain.notes) == 1


async def test_a_new_file_whose_first_line_was_not_written_continues_the_chain(tmp_path: Path) -> None:
    trail = make_trail(tmp_path)
    await trail.close()
    (tmp_path / layout.AUDIT / layout.audit_file(2)).write_bytes(b'{"seq')
    trail = make_trail(tmp_path)
    trail.begin()
    await trail.close()
    chain = await check(tmp_path)
    assert (chain.problem, [event.action for event in chain.events]) == ("", ["ended", "started", "ended", "trail_cut"])


async def test_a_full_disk_is_reported_once_and_the_events_are_written_later(tmp_path: Path) -> None:
    trail = make_trail(tmp_path)
    trail.record(EventKind.STARTED)
    await trail.run_once()
    path = tmp_path / layout.AUDIT / layout.audit_file(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 50, hard))  # the write is cut short
    try:
        for number in range(QUEUED_MAX + 5):
            trail.record(EventKind.COMMITTED, run=f"run{number}")
        with pytest.raises(TierdError):
            await trail.run_once()
        assert await trail.run_once() is False
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert await trail.run_once()
    await trail.close()
    chain = await check(tmp_path)
    assert (chain.problem, len(chain.events)) == ("", 1 + QUEUED_MAX + 1)
    assert chain.events[-1].lost == 5


async def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / layout.AUDIT).write_bytes(b"")
    trail = make_trail(tmp_path)
    with caplog.at_level(logging.INFO, "tierd"):
        trail.record(EventKind.COMMITTED, run="a", tier="hot")
        with pytest.raises(TierdError):
            await trail.run_once()
        await trail.close()
    assert "committed a in hot" in caplog.text
    assert "2 events of the audit trail are lost" in caplog.text


async def test_a_command_appends_between_events_of_the_daemon(tmp_path: Path) -> None:
    trail = make_trail(tmp_path)
    trail.record(EventKind.STARTED)
    await trail.run_once()
    event = AuditTrail().record(EventKind.MARKED, run="a", who=Who.this_process("command"))
    await asyncio.to_thread(TrailFiles(tmp_path, None, create=False).append, deque([event]))
    await trail.close()
    chain = await check(tmp_path)
    assert (chain.problem, [event.by for event in chain.events]) == ("", ["daemon", "command", "daemon"])


def test_a_command_makes_no_trail(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=os.strerror(errno.ENOENT)):
        TrailFiles(tmp_path, None, create=False).append(deque())
    assert not any(tmp_path.iterdir())


async def test_a_link_in_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"")
    path = tmp_path / layout.AUDIT / layout.audit_file(1)
    path.parent.mkdir()
    path.symlink_to(victim)
    trail = make_trail(tmp_path)
    trail.record(EventKind.STARTED)
    with pytest.raises(TierdError):
        await trail.run_once()
    await trail.close()
    assert victim.read_bytes() == b""


async def test_events_whose_sync_failed_are_written_later_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trail = make_trail(tmp_path)
    trail.record(EventKind.STARTED)
    await trail.run_once()
    for run in ("a", "b"):
        trail.record(EventKind.COMMITTED, run=run)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lose)
        with pytest.raises(TierdError):
            await trail.run_once()
    assert await trail.run_once()
    await trail.close()
    chain = await check(tmp_path)
    assert (chain.problem, [event.run for event in chain.events]) == ("", ["", "a", "b", ""])
    assert chain.events[-1].lost == 0


def lose(fd: int) -> None:
    """What a disk may do that reports an error: the file has only its first line."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return
    os.ftruncate(fd, os.pread(fd, 10_000, 0).index(b"\n") + 1)
    raise OSError(errno.EIO, os.strerror(errno.EIO))


async def test_a_process_that_holds_the_lock_delays_events_for_a_limited_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a command that was stopped by a signal."""
    monkeypatch.setattr("tierd.audit.LOCK_TRIES", 2)
    trail = make_trail(tmp_path)
    trail.record(EventKind.STARTED)
    await trail.run_once()
    trail.record(EventKind.COMMITTED, run="a")
    holder = os.open(tmp_path / layout.AUDIT, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    with pytest.raises(TierdError, match="another process holds its lock"):
        await trail.run_once()
    os.close(holder)
    await trail.close()
    chain = await check(tmp_path)
    assert (chain.problem, len(chain.events)) == ("", 3)


def test_a_trail_that_is_rotated_while_it_is_read_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = TrailFiles(tmp_path, None, create=True, file_bytes_max=1000)
    writer.append(deque(AuditTrail().record(EventKind.COMMITTED, run=f"run{number}") for number in range(40)))
    listdir = os.listdir

    def list_and_rotate(path: Path) -> list[str]:
        names = listdir(path)
        monkeypatch.setattr(os, "listdir", listdir)
        writer.append(deque(AuditTrail().record(EventKind.COMMITTED, run=f"more{number}") for number in range(10)))
        return names

    monkeypatch.setattr(os, "listdir", list_and_rotate)
    chain = audit.check(TrailFiles(tmp_path, None, create=False).read(), None)
    assert (chain.problem, chain.events[-1].run) == ("", "more9")


async def test_after_a_key_was_removed_its_events_cannot_be_checked_and_the_chain_is_whole(tmp_path: Path) -> None:
    old, new = new_key(), new_key()
    for keys in ([old], [new, old], [new]):
        trail = make_trail(tmp_path, Keyring(keys))
        trail.record(EventKind.COMMITTED, run="a")
        await trail.close()
    chain = await check(tmp_path, Keyring([new]))
    assert (chain.problem, len(chain.events)) == ("", 6)
    assert "2 events are signed by keys that are not in the key file" in chain.notes[0]
    assert (await check(tmp_path, Keyring([new, old]))).notes == []
    path = tmp_path / layout.AUDIT / layout.audit_file(1)
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"run":"a"', b'"run":"b"', 1))
    assert "another digest of the line before" in (await check(tmp_path, Keyring([new]))).problem
    path.write_bytes(content)
    trail = make_trail(tmp_path, Keyring([old]))  # who has the old key writes on
    await trail.close()
    assert "is not in the key file" in (await check(tmp_path, Keyring([new]))).problem


async def test_a_trail_of_another_key_alone_is_a_broken_chain(tmp_path: Path) -> None:
    await make_trail(tmp_path, Keyring([new_key()])).close()
    assert "no event is signed by a key of the key file" in (await check(tmp_path, Keyring([new_key()]))).problem


def test_no_event_without_a_signature_is_appended_to_signed_ones(tmp_path: Path) -> None:
    keyring = Keyring([new_key()])
    event = AuditTrail().record(EventKind.STARTED)
    TrailFiles(tmp_path, keyring, create=True).append(deque([event]))
    with pytest.raises(BadConfig, match="its events are signed, and no key is configured"):
        TrailFiles(tmp_path, None, create=False).append(deque([event]))
    chain = audit.check(TrailFiles(tmp_path, keyring, create=False).read(), keyring)
    assert (chain.problem, len(chain.events)) == ("", 1)
