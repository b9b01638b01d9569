"""A directory as a store, and the only place that fsyncs and renames.

A file is written beside its name, O_DIRECT where the filesystem allows, fsynced, renamed, and its folders
fsynced up to the root: whole and durable, or absent. Every path is walked component by component without
following links, so no key leads out of the root.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tierd.errors import BadRequest, Corrupt, Full, NotFound, TierdError, TierUnreachable
from tierd.format import layout
from tierd.format.checksum import chunk_ranges
from tierd.format.manifest import FileEntry
from tierd.tiers.chunks import ChunkSums
from tierd.tiers.direct_io import ALIGN_BYTES, page_aligned, reserve, round_up, set_direct
from tierd.tiers.pool import Buffers, Pool, each
from tierd.tiers.rate_limit import Bandwidth
from tierd.tiers.store import Progress, Source, StoredObject, check_key, is_key

MIB = 1 << 20
PIECE_BYTES = 16 * MIB  # one write; four in flight reach the disk's limit and bound what a copy holds

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC


class DirectoryStore:
    """Objects as files under `root`, which is made at first use unless `create` is False."""

    # One fills the disk, and while it is fsynced the next is written. A file that is cut off here begins anew.
    puts_at_once = 2

    def __init__(
        self, root: Path, *, pieces_in_flight: int = 4, create: bool = True, max_write_mib_s: float = 0.0
    ) -> None:
        self.root = root.absolute()
        self.url = f"file://{self.root}"
        self._may_create = create  # and only until it has been seen
        self.pieces_in_flight = pieces_in_flight
        # Two threads more than writes, so that a listing does not wait behind a large file.
        self.pool = Pool(pieces_in_flight + 2, "tierd-directory")
        self.buffers = Buffers(usual_bytes=PIECE_BYTES, count=pieces_in_flight)
        self._bandwidth = Bandwidth(max_write_mib_s * MIB)

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
        doing = f"write {check_key(key)} in {self.url}"
        if isinstance(source, memoryview) and source.nbytes < size_bytes:
            raise BadRequest(f"{doing}: {source.nbytes} bytes given, {size_bytes} named")
        sums = ChunkSums(size_bytes, chunk_bytes)
        unfinished = _Unfinished(self, key, size_bytes)

        def write(offset: int, piece: memoryview, length: int) -> None:
            sums.add(offset, piece[:length])
            unfinished.write(offset, piece, length)

        async def copy(piece: tuple[int, int]) -> None:
            offset, length = piece
            await self._bandwidth.take(length)
            if isinstance(source, memoryview):
                view = source[offset : offset + round_up(length)]
                await self.pool.run(write, offset, view, length)
            else:
                async with self.buffers.lend(min(PIECE_BYTES, round_up(size_bytes))) as buffer:
                    await source.fill(offset, buffer[:length])
                    await self.pool.run(write, offset, buffer[: round_up(length)], length)
            if progress is not None:
                progress(length)

        with translated(doing, missing=TierUnreachable):
            try:
                await self.pool.run(unfinished.begin)
                await each(self.pieces_in_flight, chunk_ranges(size_bytes, PIECE_BYTES), copy)
                entry = sums.entry(key.rpartition("/")[2], expect, doing)
                if replace:
                    await self.pool.run(unfinished.set_former_aside)
                await self.pool.run(unfinished.commit)
            finally:
                await self.pool.run(unfinished.close)
        return entry

    async def put_bytes(self, key: str, content: bytes, *, if_absent: bool = False) -> bool:
        def write() -> bool:
            unfinished = _Unfinished(self, key, len(content), is_small=True)
            try:
                unfinished.begin()
                unfinished.write(0, memoryview(content), len(content))
                return unfinished.commit(if_absent=if_absent)
            finally:
                unfinished.close()

        with translated(f"write {check_key(key)} in {self.url}", missing=TierUnreachable):
            return await self.pool.run(write)

    async def get_bytes(self, key: str, *, size_max: int) -> bytes:
        return await self.pool.run(self._get, key, size_max)

    async def get_many(self, keys: Sequence[str], *, size_max: int) -> Sequence[bytes | TierdError]:
        def get(key: str) -> bytes | TierdError:
            try:
                return self._get(key, size_max)
            except TierUnreachable:
                raise
            except TierdError as error:
                return error

        # One call of a thread for all: the way there and back costs more than the reading.
        return await self.pool.run(lambda: [get(key) for key in keys])

    def _get(self, key: str, size_max: int) -> bytes:
        doing = f"read {check_key(key)} in {self.url}"
        with translated(doing):
            fd = self._open_file(key)
            try:
                size_bytes = os.fstat(fd).st_size
                content = b"" if size_bytes > size_max else os.read(fd, size_bytes)
            finally:
                os.close(fd)
        if size_bytes > size_max:
            raise Corrupt(f"{doing}: {size_bytes} bytes, more than {size_max}")
        return content

    async def read(self, key: str, offset: int, buffer: memoryview) -> None:
        await self.pool.run(self.read_now, key, offset, buffer)

    def read_now(self, key: str, offset: int, buffer: memoryview) -> None:
        """As `read`, for who is in a thread already."""
        doing = f"read {len(buffer)} bytes at {offset} of {check_key(key)} in {self.url}"
        with translated(doing):
            fd = self._open_file(key)
            try:
                done = 0
                while done < len(buffer):
                    count = os.preadv(fd, [buffer[done:]], offset + done)
                    if count == 0:
                        raise Corrupt(f"{doing}: the file ends at byte {offset + done}")
                    done += count
            finally:
                os.close(fd)

    async def kept_checksum(self, key: str) -> str | None:
        with translated(f"look at {check_key(key)} in {self.url}"):
            os.close(await self.pool.run(self._open_file, key))
        return None  # no filesystem in use keeps one that it would tell

    async def list(self, prefix: str = "") -> list[StoredObject]:
        def walk() -> list[StoredObject]:
            found: list[StoredObject] = []
            for key, entry in self._walk(prefix.rpartition("/")[0]):
                if key.startswith(prefix) and is_key(key):
                    with suppress(FileNotFoundError):  # deleted since the folder was read
                        found.append(StoredObject(key, entry.stat(follow_symlinks=False).st_size))
            return found

        with translated(f"list {self.url}"):
            return await self.pool.run(walk)

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)
        if keys:
            with translated(f"delete {keys[0]} and {len(keys) - 1} more in {self.url}"):
                await self.pool.run(self._delete, keys)

    async def free_bytes(self) -> int | None:
        def measure() -> int:
            found = os.statvfs(next(path for path in (self.root, *self.root.parents) if path.exists()))
            return found.f_bavail * found.f_frsize

        with translated(f"measure the room in {self.url}"):
            return await self.pool.run(measure)

    async def sweep_partials(self, below: str = "", *, is_given_up: Callable[[str, float], bool] | None = None) -> int:
        """Removes what writers left that were killed; a file that is being written is let be. Returns how many.

        `below`: only in this folder. `is_given_up`: whether a file that is arriving, to be gone on with, goes too; told
        its path and when it was last written (Unix time).
        """

        def sweep() -> int:
            swept = 0
            for key, entry in self._walk(below):
                if not entry.name.endswith(layout.PARTIAL_SUFFIX):
                    continue
                if layout.is_arriving(entry.name) and not (
                    is_given_up and is_given_up(key, entry.stat(follow_symlinks=False).st_mtime)
                ):
                    continue
                if _is_abandoned(entry.path):
                    os.unlink(entry.path)
                    swept += 1
                    with suppress(OSError):  # not empty
                        if "/" in key:
                            os.rmdir(os.path.dirname(entry.path))
            return swept

        with translated(f"sweep {self.url}"):
            return await self.pool.run(sweep)

    def limit_writes(self, mib_s: float) -> None:
        self._bandwidth.limit(mib_s * MIB)

    async def abort_uploads(self, is_abandoned: Callable[[str], bool], *, grace_s: float) -> int:
        return 0  # see sweep_partials

    async def close(self) -> None:
        self.pool.close()
        self.buffers.close()

    def path(self, key: str) -> Path:
        """Where the object lies, for messages and for people. To read it, use `open_fd`."""
        return self.root / check_key(key)

    def open_fd(self, key: str) -> int:
        """A read-only descriptor of a regular file, to be handed to a trainer. The caller closes it."""
        with translated(f"open {check_key(key)} in {self.url}"):
            return self._open_file(key)

    def open_folder(self, key: str, *, create: bool) -> tuple[int, str]:
        """(descriptor of the folder that holds the key, name in it). `create`: made where missing, and durable."""
        *parents, name = key.split("/")
        folder = self._open_root(create=create)
        try:
            for parent in parents:
                if create:
                    with suppress(FileExistsError):
                        os.mkdir(parent, dir_fd=folder)
                    # Even when it stood already: its maker may have been killed before this line.
                    os.fsync(folder)
                below = os.open(parent, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
                os.close(folder)
                folder = below
        except OSError:
            os.close(folder)
            raise
        return folder, name

    def _open_root(self, *, create: bool) -> int:
        may_create = self._may_create  # before the look: another thread may be making it
        try:
            folder = os.open(self.root, _FOLDER)
        except FileNotFoundError as error:
            # A root that vanishes is an unmounted disk, not an empty tier.
            if not may_create:
                hint = "is the disk mounted, and is the path right?"
                raise TierUnreachable(f"open {self.url}: no such directory", hint=hint) from error
            if not create:
                raise
            for path in reversed([path for path in (self.root, *self.root.parents) if not path.exists()]):
                path.mkdir(exist_ok=True)
                _fsync_folder(path.parent)
            folder = os.open(self.root, _FOLDER)
        self._may_create = False
        return folder

    def _open_file(self, key: str) -> int:
        folder, name = self.open_folder(key, create=False)
        try:
            # O_NONBLOCK: opening a FIFO that someone put there would wait for ever.
            fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | _NO_LINK, dir_fd=folder)
        finally:
            os.close(folder)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise BadRequest(f"open {key} in {self.url}: no regular file")
        return fd

    def _walk(self, start: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """(key, entry) of every regular file below `start`, half-written ones too. Foreign names are passed by."""
        try:
            # Opened component by component, so that the walk does not begin behind a link.
            os.close(self.open_folder(f"{check_key(start)}/-" if start else "-", create=False)[0])
        except (FileNotFoundError, NotADirectoryError):
            return
        folders = [start]
        while folders:
            folder = folders.pop()
            try:
                entries = os.scandir(self.root / folder)
            except FileNotFoundError:
                continue  # deleted since its parent was read
            with entries:
                for entry in entries:
                    key = f"{folder}/{entry.name}" if folder else entry.name
                    if entry.is_file(follow_symlinks=False):
                        yield key, entry
                    elif entry.is_dir(follow_symlinks=False) and is_key(key):
                        folders.append(key)

    def _delete(self, keys: Sequence[str]) -> None:
        parents: set[str] = set()
        for position, key in enumerate(keys):
            try:
                folder, name = self.open_folder(key, create=False)
            except FileNotFoundError:
                continue
            try:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)
                # The first is the manifest: it must be gone from the disk before any shard goes.
                if position == 0:
                    os.fsync(folder)
            finally:
                os.close(folder)
            parents.add(key.rpartition("/")[0])
        for parent in parents - {""}:
            self._settle(parent)
        if "" in parents:
            _fsync_folder(self.root)

    def _settle(self, parent: str) -> None:
        """Makes deletions in a folder durable; a folder that is empty now goes too."""
        with suppress(FileNotFoundError):
            above, name = self.open_folder(parent, create=False)
            try:
                folder = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=above)
                try:
                    os.fsync(folder)
                    # What was set aside goes with the last of what it stood beside.
                    left = os.listdir(folder)
                    for one in left if all(map(layout.is_set_aside, left)) else ():
                        os.unlink(one, dir_fd=folder)
                finally:
                    os.close(folder)
                try:
                    os.rmdir(name, dir_fd=above)
                except OSError:
                    return  # not empty
                os.fsync(above)
            finally:
                os.close(above)


class _Unfinished:
    """A file on its way: under another name until `commit`, gone after `close` without it."""

    def __init__(self, store: DirectoryStore, key: str, size_bytes: int, *, is_small: bool = False) -> None:
        self._store = store
        self._key = key
        self._size_bytes = size_bytes
        self._is_direct = not is_small
        self._folder = -1
        self._fd = -1
        self._name = ""
        self._written_as = ""

    def begin(self) -> None:
        self._folder, self._name = self._store.open_folder(self._key, create=True)
        # A name of its own: two writers of one key must not write into one file.
        written_as = f"{self._name[:200]}.{secrets.token_hex(4)}{layout.PARTIAL_SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK
        self._fd = os.open(written_as, flags, 0o666, dir_fd=self._folder)
        self._written_as = written_as
        with suppress(OSError):  # a filesystem without locks only loses the sweeper's courtesy
            fcntl.flock(self._fd, fcntl.LOCK_EX)
        if self._is_direct and self._size_bytes:
            reserve(self._fd, self._size_bytes)
            self._is_direct = set_direct(self._fd)

    def write(self, offset: int, piece: memoryview, length: int) -> None:
        """Writes `length` bytes of `piece`; the rest of it, up to a multiple of 4096, may be written too."""
        if not self._is_direct:
            self._write_all(offset, piece[:length])
            return
        aligned = min(round_up(length), len(piece) // ALIGN_BYTES * ALIGN_BYTES)
        self._write_all(offset, piece[:aligned])
        if aligned < length:
            tail = page_aligned(ALIGN_BYTES)
            tail[: length - aligned] = piece[aligned:length]
            self._write_all(offset + aligned, tail)

    def set_former_aside(self) -> None:
        """A second name, which no listing takes for anything, for what lies there now: its bytes can be looked at."""
        aside = layout.set_aside(self._name)
        with suppress(OSError):  # missing, or no links here: no evidence is worth a file that stays damaged
            with suppress(FileNotFoundError):
                os.unlink(aside, dir_fd=self._folder)  # the newest is kept
            os.link(self._name, aside, src_dir_fd=self._folder, dst_dir_fd=self._folder, follow_symlinks=False)

    def commit(self, *, if_absent: bool = False) -> bool:
        """Makes it visible and durable. `if_absent`: returns False and changes nothing where the name is taken."""
        os.ftruncate(self._fd, self._size_bytes)
        os.fsync(self._fd)
        if if_absent and not self._link():
            # Whoever made it may have been killed before its own fsync: what the caller sees must last.
            os.fsync(self._folder)
            return False
        if self._written_as:
            os.rename(self._written_as, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        self._written_as = ""
        # fsync the directory too: without it the rename itself may be lost on power failure.
        os.fsync(self._folder)
        return True

    def close(self) -> None:
        if self._written_as:
            with suppress(FileNotFoundError):
                os.unlink(self._written_as, dir_fd=self._folder)
            self._written_as = ""
        for fd in (self._fd, self._folder):
            if fd >= 0:
                os.close(fd)
        self._fd = self._folder = -1

    def _link(self) -> bool:
        """Takes the name unless it is taken: link refuses that, whoever took it, where rename would replace."""
        try:
            os.link(self._written_as, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            # No hard links here (exFAT, some FUSE): looked at, then renamed; the tier's lock keeps others away.
            return not os.access(self._name, os.F_OK, dir_fd=self._folder)
        os.unlink(self._written_as, dir_fd=self._folder)
        self._written_as = ""
        return True

    def _write_all(self, offset: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            was_direct = self._is_direct
            try:
                done += os.pwrite(self._fd, view[done:], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not was_direct:
                    raise
                # An address, or a write that was cut short, that O_DIRECT does not take: buffered from here on.
                # In this order, for other threads are writing: who sees False has a buffered descriptor.
                self._is_direct = set_direct(self._fd, wanted=False)


def _fsync_folder(path: Path) -> None:
    folder = os.open(path, _FOLDER)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _is_abandoned(path: str) -> bool:
    """Whether nobody holds the lock that a writer has on its unfinished file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | _NO_LINK)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    finally:
        os.close(fd)
    return True


@contextmanager
def translated(doing: str, *, missing: type[TierdError] = NotFound) -> Generator[None]:
    """Turns what the filesystem says into what the caller can do about it."""
    try:
        yield
    except OSError as error:
        found = f"{doing}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "free space there, or keep fewer checkpoints; see docs/RUNBOOK.md#disk-full"
            raise Full(found, hint=hint) from error
        if error.errno == errno.ENOENT:
            raise missing(found) from error
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise BadRequest(found, hint="links below a tier's root are not followed") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            hint = "the daemon's user must own the directory, and it must be mounted for writing"
            raise TierUnreachable(found, hint=hint) from error
        raise TierUnreachable(found, hint="look at the disk: dmesg, mount, df") from error
