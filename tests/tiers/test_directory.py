from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.hung_directory import hung_directory
from tests.support.store_contract import CHUNK_BYTES, KEY, BytesSource, StoreContract, content, entry_of, read_whole
from tierd.errors import BadRequest, Corrupt, Full, LockHeld, NotFound, TierUnreachable
from tierd.tiers import directory
from tierd.tiers.direct_io import reserve
from tierd.tiers.directory import PIECE_BYTES, DirectoryStore
from tierd.tiers.lock import Lock


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[DirectoryStore]:
    found = DirectoryStore(tmp_path / "above" / "root")
    yield found
    await found.close()


class TestContract(StoreContract):
    is_atomic = True
    chunk_bytes = CHUNK_BYTES


def mounted(kind: str, options: str, at: Path) -> Iterator[Path]:
    at.mkdir()
    done = subprocess.run(["mount", "-t", kind, "-o", options, kind, str(at)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"mounting {kind} takes root: {done.stderr.strip()}")
    yield at
    subprocess.run(["umount", str(at)], check=True)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    yield from mounted("tmpfs", "size=8m", tmp_path / "tiny")


@pytest.fixture
def buffered_disk(tmp_path: Path) -> Iterator[Path]:
    """ramfs refuses O_DIRECT and fallocate."""
    yield from mounted("ramfs", "mode=755", tmp_path / "buffered")


def partials(root: Path) -> list[str]:
    return [path.name for path in root.rglob("*.partial")]


def open_flags_of_partials() -> list[int]:
    """The open flags of every partial file that this process has open."""
    found: list[int] = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").endswith(".partial"):
                found.append(fcntl.fcntl(int(fd), fcntl.F_GETFL))
        except OSError:
            continue  # listdir's own descriptor
    return found


class WatchingSource(BytesSource):
    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.flags: list[int] = []

    async def read_piece(self, offset: int, buffer: memoryview) -> None:
        self.flags += open_flags_of_partials()
        await super().read_piece(offset, buffer)


# ── writing ──


async def test_writes_are_direct_where_the_filesystem_allows(store: DirectoryStore) -> None:
    store.root.mkdir(parents=True)
    probe = os.open(store.root / "probe", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.fcntl(probe, fcntl.F_SETFL, os.O_DIRECT)
    except OSError:
        pytest.skip("the filesystem of the temporary directory refuses O_DIRECT")
    finally:
        os.close(probe)
    source = WatchingSource(content((64 << 20) + 12345))
    await store.put(KEY, source, size_bytes=(64 << 20) + 12345, chunk_bytes=CHUNK_BYTES)
    assert len(source.flags) == 5
    assert all(flags & os.O_DIRECT for flags in source.flags)


def test_nothing_is_written_where_space_cannot_be_reserved(buffered_disk: Path) -> None:
    """posix_fallocate would write to every block instead."""
    with (buffered_disk / "file").open("wb") as file:
        reserve(file.fileno(), 1 << 20)
        assert os.fstat(file.fileno()).st_size == 0


def test_a_lock_that_cannot_be_checked_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon goes on while its disk returns errors."""

    def fail(path: Path) -> os.stat_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with Lock(tmp_path) as lock:
        with monkeypatch.context() as patched:
            patched.setattr(Path, "stat", fail)
            with pytest.raises(TierUnreachable, match="Input/output error"):
                lock.renew()
        with pytest.raises(LockHeld):
            Lock(tmp_path)


def test_reserved_space_belongs_to_the_file(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        reserve(file.fileno(), 1 << 20)
        about = os.fstat(file.fileno())
    assert about.st_blocks * 512 >= 1 << 20
    assert about.st_size == 1 << 20


def test_a_full_disk_refuses_the_reservation(tiny_disk: Path) -> None:
    with (tiny_disk / "file").open("wb") as file, pytest.raises(OSError, match="No space left"):
        reserve(file.fileno(), 64 << 20)


async def test_writes_are_buffered_where_direct_io_is_refused(buffered_disk: Path) -> None:
    store = DirectoryStore(buffered_disk)
    source = WatchingSource(content((16 << 20) + 1))
    entry = await store.put(KEY, source, size_bytes=(16 << 20) + 1, chunk_bytes=CHUNK_BYTES)
    assert source.flags
    assert not any(flags & os.O_DIRECT for flags in source.flags)
    assert entry == entry_of(content((16 << 20) + 1))
    assert await read_whole(store, KEY, (16 << 20) + 1) == content((16 << 20) + 1)
    await store.close()


@pytest.mark.parametrize("shift", [1, 512, 4096])
async def test_buffer_at_any_address_is_written_correctly(store: DirectoryStore, shift: int) -> None:
    data = content((16 << 20) + 1)
    view = memoryview(bytes(shift) + data)[shift:]
    assert await store.put(KEY, view, size_bytes=len(data), chunk_bytes=CHUNK_BYTES) == entry_of(data)
    assert await read_whole(store, KEY, len(data)) == data


async def test_short_buffer_is_refused(store: DirectoryStore) -> None:
    with pytest.raises(BadRequest):
        await store.put(KEY, memoryview(b"ab"), size_bytes=3, chunk_bytes=CHUNK_BYTES)


async def test_bytes_after_the_given_length_are_never_in_the_file(store: DirectoryStore) -> None:
    data = content(4097)
    view = memoryview(data + b"slack" * 2000)
    assert await store.put(KEY, view, size_bytes=4097, chunk_bytes=CHUNK_BYTES) == entry_of(data)
    assert (store.root / KEY).read_bytes() == data


async def test_put_fsyncs_the_file_then_links_it_then_fsyncs_the_folder(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str]] = []
    fsync, link = os.fsync, os.link

    def watched_fsync(fd: int) -> None:
        events.append(("fsync", os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))))
        fsync(fd)

    def watched_link(old: str, new: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        events.append(("link", new))
        link(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "link", watched_link)
    await store.put("run/a/x", memoryview(b"bytes"), size_bytes=5, chunk_bytes=CHUNK_BYTES)
    folders, (file, named, last) = events[:-3], events[-3:]
    # Every new folder is durable in its parent, and so is the deepest existing one.
    existing = store.root.parent.parent
    assert folders == [("fsync", name) for name in (existing.parent.name, existing.name, "above", "root", "run")]
    assert file[0] == "fsync"
    assert file[1].endswith(".partial")
    assert (named, last) == (("link", "x"), ("fsync", "a"))


async def test_file_that_cannot_be_read_does_not_make_the_directory_unreachable(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.put_bytes("run/a", b"a")
    await store.put_bytes("run/b", b"b")
    real, codes = store.tree.open_file, [errno.EACCES, errno.EIO, errno.ESTALE]

    def open_file(key: str) -> int:
        if key == "run/b":
            raise OSError(codes[0], os.strerror(codes[0]))
        return real(key)

    monkeypatch.setattr(store.tree, "open_file", open_file)
    while codes[0] != errno.ESTALE:
        readable, other = await store.get_many(["run/a", "run/b"], size_max=10)
        assert readable == b"a"
        assert isinstance(other, TierUnreachable)
        del codes[0]
    with pytest.raises(TierUnreachable):
        await store.get_many(["run/a", "run/b"], size_max=10)


async def test_manifest_is_durably_deleted_before_any_shard(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, unlink = os.fsync, os.unlink
    for name in ("manifest.json", "shard-1", "shard-2"):
        await store.put_bytes(f"run/a/{name}", b"x")
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append("fsync"), fsync(fd))[1])
    monkeypatch.setattr(os, "unlink", lambda name, *, dir_fd: (events.append(name), unlink(name, dir_fd=dir_fd))[1])
    await store.delete(["run/a/manifest.json", "run/a/shard-1", "run/a/shard-2"])
    assert events[:2] == ["manifest.json", "fsync"]
    assert events[2:4] == ["shard-1", "shard-2"]
    assert "fsync" in events[4:]
    assert not (store.root / "run" / "a").exists()
    assert (store.root / "run").exists()


# ── a full, broken or missing disk ──


async def test_full_disk_raises_full_and_keeps_existing_objects(tiny_disk: Path) -> None:
    store = DirectoryStore(tiny_disk)
    await store.put_bytes("run/kept", b"kept")
    with pytest.raises(Full, match="No space left"):
        await store.put(KEY, memoryview(content((16 << 20) + 1)), size_bytes=(16 << 20) + 1, chunk_bytes=CHUNK_BYTES)
    with pytest.raises(Full):
        await store.put_bytes("run/big", bytes(9 << 20))
    assert partials(tiny_disk) == []
    assert [one.key for one in await store.list()] == ["run/kept"]
    free = await store.free_bytes()
    assert free is not None
    assert 7 << 20 < free <= 8 << 20
    await store.put(KEY, memoryview(content(4096)), size_bytes=4096, chunk_bytes=CHUNK_BYTES)
    await store.close()


async def test_put_that_cannot_remove_its_partial_file_closes_it(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that returns errors for hours must not use up the descriptors."""

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    await store.put_bytes("run/x", b"x")
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        for name in ("rename", "unlink"):
            patched.setattr(os, name, fail)
        for _ in range(3):
            with pytest.raises(TierUnreachable):
                await store.put_bytes("run/y", b"y")
    assert len(os.listdir("/proc/self/fd")) == before
    assert await store.sweep_partials() == 3


async def test_directory_that_could_not_be_synced_is_synced_by_the_next_put(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name in its parent would be lost with the power, and all that is in it."""
    real, synced = os.fsync, list[str]()

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def watch(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    store.root.parent.mkdir()
    store.root.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(TierUnreachable):
            await store.put_bytes("run/x", b"x")
    monkeypatch.setattr(os, "fsync", watch)
    await store.put_bytes("run/x", b"x")
    assert synced[0] == str(store.root.parent)
    await store.put_bytes("run/y", b"y")
    assert synced.count(str(store.root.parent)) == 1


async def test_root_that_disappears_is_unreachable_and_not_empty(store: DirectoryStore) -> None:
    await store.put_bytes("run/x", b"x")
    store.root.rename(store.root.with_name("unmounted"))
    for attempt in (store.list(), store.get_bytes("run/x", size_max=1), store.put_bytes("run/y", b"y")):
        with pytest.raises(TierUnreachable, match="no such directory"):
            await attempt
    assert not store.root.exists()


async def test_reading_creates_no_directory(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "absent")
    assert await store.list() == []
    assert await store.free_bytes()
    await store.delete(["run/x"])
    with pytest.raises(NotFound):
        await store.get_bytes("run/x", size_max=1)
    assert os.listdir(tmp_path) == []
    strict = DirectoryStore(tmp_path / "absent", create=False)
    with pytest.raises(TierUnreachable):
        await strict.list()
    with pytest.raises(TierUnreachable):
        await strict.put_bytes("run/x", b"")
    await store.close()
    await strict.close()


CALLS: dict[str, Callable[[DirectoryStore], Awaitable[object]]] = {
    "put": lambda store: store.put("run/a", memoryview(bytearray(8)), size_bytes=8, chunk_bytes=8),
    "put_bytes": lambda store: store.put_bytes("run/a", b"content"),
    "get_bytes": lambda store: store.get_bytes("run/b", size_max=8),
    "get_many": lambda store: store.get_many(["run/b"], size_max=8),
    "read": lambda store: store.read("run/b", 0, memoryview(bytearray(1))),
    "stored_checksum": lambda store: store.stored_checksum("run/b"),
    "list": lambda store: store.list(),
    "delete": lambda store: store.delete(["run/b"]),
    "exists": lambda store: store.exists(),
    "free_bytes": lambda store: store.free_bytes(),
    "sweep": lambda store: store.sweep_partials(),
}


@pytest.mark.parametrize("name", CALLS)
async def test_no_call_waits_for_ever_while_the_directory_hangs(store: DirectoryStore, name: str) -> None:
    """A thread in a system call of a dead NFS server cannot be ended. Its caller continues, and a later call succeeds
    once the server is back."""
    await store.put_bytes("run/b", b"content")
    store.pool.timeout_s = 0.05
    with hung_directory(store.root) as hung:
        with pytest.raises(TierUnreachable, match="no answer within"):
            await CALLS[name](store)
        hung.answer()
        store.pool.timeout_s = 60.0
        while True:
            try:
                await CALLS[name](store)
                break
            except TierUnreachable:  # until the call that was left behind has ended
                await asyncio.sleep(0.001)


async def settled(store: DirectoryStore) -> None:
    """Waits until no call that was left behind may still change something."""
    while True:
        try:
            return store.pool.check_settled()
        except TierUnreachable:
            await asyncio.sleep(0.001)


async def test_nothing_is_written_or_deleted_while_a_commit_without_an_answer_may_still_take_effect(
    store: DirectoryStore,
) -> None:
    """Otherwise the files of a checkpoint could be deleted, and then its manifest appears."""
    await store.put_bytes("run/b", b"content")
    store.pool.timeout_s = 0.05
    with hung_directory(store.root, "open") as hung:
        with pytest.raises(TierUnreachable, match="no answer within"):
            await store.put_bytes("run/manifest.json", b"{}")
        for name in ("put", "put_bytes", "delete"):
            with pytest.raises(TierUnreachable, match="may still take effect"):
                await CALLS[name](store)
        hung.answer()
        await settled(store)
    assert sorted(stored.key for stored in await store.list()) == ["run/b", "run/manifest.json"], "it took effect"


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
async def test_put_without_an_answer_closes_its_file_when_the_last_write_ends(
    store: DirectoryStore, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closed before, the descriptor's number could belong to another file, and the write would go there."""
    await store.put_bytes("run/b", b"content")
    is_answering, closed = threading.Event(), list[int]()
    real, real_close = getattr(os, call), os.close

    def hang(fd: int, *arguments: object) -> object:
        is_answering.wait()
        assert fd not in closed
        return real(fd, *arguments)

    def close(fd: int) -> None:
        if not is_answering.is_set():
            closed.append(fd)
        real_close(fd)

    before = len(os.listdir("/proc/self/fd"))
    store.pool.timeout_s = 0.2
    size_bytes = PIECE_BYTES + 4096
    with monkeypatch.context() as patches:
        patches.setattr(os, call, hang)
        patches.setattr(os, "close", close)
        with pytest.raises(TierUnreachable, match="no answer within"):
            await store.put("run/a", BytesSource(bytes(size_bytes)), size_bytes=size_bytes, chunk_bytes=size_bytes)
        is_answering.set()
        await settled(store)
    store.pool.timeout_s = 60.0
    assert partials(store.root) == []
    assert len(os.listdir("/proc/self/fd")) == before
    assert await store.put("run/a", BytesSource(bytes(size_bytes)), size_bytes=size_bytes, chunk_bytes=size_bytes), (
        "a later put succeeds, whether the former one was committed or not"
    )


async def test_deadline_of_a_listing_is_for_a_part_of_it(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large tree on a slow filesystem takes longer than one deadline."""
    monkeypatch.setattr(directory, "WALK_FILES", 2)
    keys = [f"run/{index:02d}" for index in range(9)]
    for key in keys:
        await store.put_bytes(key, b"")
    calls: list[object] = []
    real_query = store.pool.query

    async def query(*arguments: Any) -> Any:
        calls.append(arguments)
        return await real_query(*arguments)

    monkeypatch.setattr(store.pool, "query", query)
    assert sorted(stored.key for stored in await store.list()) == keys
    assert len(calls) == 5


async def test_concurrent_first_writes_create_the_root(tmp_path: Path) -> None:
    for attempt in range(50):
        store = DirectoryStore(tmp_path / str(attempt) / "deep")
        await asyncio.gather(*(store.put_bytes(f"run/x{number}", b"x") for number in range(6)))
        assert len(await store.list()) == 6
        await store.close()


async def test_sweep_removes_partial_files_of_dead_writers_only(store: DirectoryStore) -> None:
    await store.put_bytes("run/a/x", b"x")
    (store.root / "run" / "b").mkdir()
    (store.root / "run" / "b" / "shard.0000.partial").write_bytes(b"half")
    (store.root / "run" / "a" / "shard.0000.partial").write_bytes(b"half")
    swept: list[int] = []

    class Sweeping(BytesSource):
        async def read_piece(self, offset: int, buffer: memoryview) -> None:
            swept.append(await store.sweep_partials())
            await super().read_piece(offset, buffer)

    assert len(await store.list()) == 1
    await store.put("run/a/y", Sweeping(b"living"), size_bytes=6, chunk_bytes=CHUNK_BYTES)
    assert swept == [2]
    assert sorted(one.key for one in await store.list()) == ["run/a/x", "run/a/y"]
    assert not (store.root / "run" / "b").exists()


async def test_foreign_files_are_not_listed(store: DirectoryStore) -> None:
    await store.put_bytes("run/x", b"x")
    (store.root / ".tierd.lock").touch()
    (store.root / "lost+found").mkdir(mode=0)
    (store.root / "run" / "né").touch()
    (store.root / "run" / "link").symlink_to("/etc/passwd")
    (store.root / "away").symlink_to("/etc")
    os.mkfifo(store.root / "run" / "pipe")
    assert [one.key for one in await store.list()] == ["run/x"]


# ── harmless input ──


async def test_no_link_leads_out_of_the_root(store: DirectoryStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x").write_bytes(b"secret")
    await store.put_bytes("run/x", b"x")
    (store.root / "away").symlink_to(outside)
    (store.root / "run" / "link").symlink_to(outside / "x")
    for key in ("away/x", "run/link"):
        for attempt in (store.get_bytes(key, size_max=10), store.read(key, 0, memoryview(bytearray(1)))):
            with pytest.raises(BadRequest, match="not followed"):
                await attempt
        with pytest.raises(BadRequest):
            await store.open_files([key])
    for attempt in (store.put_bytes("away/new", b""), store.delete(["away/x"])):
        with pytest.raises(BadRequest):
            await attempt
    assert await store.list("away/") == []
    await store.put_bytes("run/link", b"replaced")  # replaces the link, not its target
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == {"x": b"secret"}


async def test_fifo_in_place_of_a_file_is_refused_without_blocking(store: DirectoryStore) -> None:
    await store.put_bytes("run/x", b"x")
    os.mkfifo(store.root / "run" / "pipe")
    with pytest.raises(BadRequest, match="not a regular file"):
        await store.get_bytes("run/pipe", size_max=1)


async def test_descriptor_for_the_trainer_is_read_only_and_not_inherited(store: DirectoryStore) -> None:
    await store.put_bytes("run/x", b"bytes")
    (fd,) = await store.open_files(["run/x"])
    try:
        assert os.pread(fd, 10, 0) == b"bytes"
        assert not os.get_inheritable(fd)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(fd, b"x")
    finally:
        os.close(fd)
    with pytest.raises(NotFound):
        await store.open_files(["run/x", "run/absent"])


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_descriptors_that_nobody_takes_are_closed(store: DirectoryStore, is_cancelled: bool) -> None:
    """The directory answers after the deadline, or after the trainer that asked has gone."""
    await store.put_bytes("run/x", b"bytes")
    with hung_directory(store.root) as hung:
        before = os.listdir("/proc/self/fd")
        store.pool.timeout_s = 60.0 if is_cancelled else 0.05
        opening = asyncio.ensure_future(store.open_files(["run/x"]))
        while not hung.blocked:
            await asyncio.sleep(0.01)
        if is_cancelled:
            opening.cancel()
        with pytest.raises((asyncio.CancelledError, TierUnreachable)):
            await opening
        hung.answer()
        store.pool.timeout_s = 60.0
        async with asyncio.timeout(60):
            while len(os.listdir("/proc/self/fd")) > len(before) or store.pool._left_behind:
                await asyncio.sleep(0.01)


async def test_truncated_file_is_corrupt(store: DirectoryStore) -> None:
    await store.put(KEY, memoryview(content(4096)), size_bytes=4096, chunk_bytes=CHUNK_BYTES)
    os.truncate((store.root / KEY), 4095)
    with pytest.raises(Corrupt, match="ends at byte 4095"):
        await read_whole(store, KEY, 4096)


# ── the lock ──

HOLD = """
import sys
from pathlib import Path
from tierd.tiers.lock import Lock, LockHolder
held = Lock(Path(sys.argv[1]), LockHolder(node="node-7"))
print("held", flush=True)
sys.stdin.read()
"""


def test_lock_has_one_holder_and_is_released_when_it_is_killed(tmp_path: Path) -> None:
    root = tmp_path / "hot"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(LockHeld, match=f"pid {holder.pid}, node node-7"):
            Lock(root)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with Lock(root), pytest.raises(LockHeld, match=f"pid {os.getpid()}"):
        Lock(root)
    Lock(root).release()


def test_lock_file_without_a_valid_description_still_locks(tmp_path: Path) -> None:
    with Lock(tmp_path):
        (tmp_path / ".tierd.lock").write_bytes(b"\x00garbage")
        with pytest.raises(LockHeld, match="another process"):
            Lock(tmp_path)


def test_lock_file_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".tierd.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TierUnreachable):
        Lock(tmp_path)


async def test_write_cap_is_kept_and_raising_it_speeds_up_a_write_in_progress(tmp_path: Path) -> None:
    """At this cap, the second of the three pieces would begin after hours."""
    store = DirectoryStore(tmp_path / "root", max_write_mib_s=0.001)
    shard, has_begun = memoryview(bytes(40 << 20)), asyncio.Event()
    putting = asyncio.ensure_future(
        store.put(KEY, shard, size_bytes=len(shard), chunk_bytes=CHUNK_BYTES, progress=lambda _: has_begun.set())
    )
    async with asyncio.timeout(60):
        await has_begun.wait()
        assert not putting.done()
        store.limit_writes(0.0)
        await putting
    assert (await store.list())[0].size_bytes == len(shard)
    await store.close()
