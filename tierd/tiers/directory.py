"""A directory as a store: each object is a file below the root.

A put writes a file beside its final name and links it there, so an object is whole and durable, or absent. See
new_file.py for how a file is written and tree.py for how paths are opened. Every call has a deadline: one that gets no
answer raises TierUnreachable and is left behind; until it ends, nothing is written or deleted here.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, closing, suppress
from functools import partial
from itertools import islice
from pathlib import Path

from tierd.access import PRIVATE, Access
from tierd.descriptors import close_all, open_all, read_all
from tierd.errors import BadRequest, Corrupt, TierdError, TierUnreachable
from tierd.failpoints import failpoint
from tierd.format import layout
from tierd.format.checksum import chunk_ranges
from tierd.format.manifest import FileEntry
from tierd.format.shard import round_up
from tierd.tiers.chunks import ChunkSums, measure
from tierd.tiers.new_file import NewFile, is_abandoned
from tierd.tiers.pool import Buffers, ThreadPool, for_each
from tierd.tiers.rate_limit import MIB, Bandwidth
from tierd.tiers.store import Progress, Source, StoredObject, check_key, conflict, is_key
from tierd.tiers.tree import Tree, closing_fd, translated

_OF_ONE_FILE = {errno.EACCES, errno.EPERM, errno.EIO}  # other files of the directory may be readable
# One write from memory. Eight in flight reach the limit of a disk, with digests too.
WRITE_BYTES = 8 * MIB
# One read from another store. With 8 MiB, a bucket gets twice as many requests, and a fetch takes a third more CPU
# time than with 16.
PIECE_BYTES = 16 * MIB
# Reads in flight for one directory, for all copies and fetches together. Each has PIECE_BYTES of memory. Six hide more
# of the latency of a bucket than four, but took 5 % more CPU time on two cores, which the training needs.
BUFFERS = 6 if len(os.sched_getaffinity(0)) > 2 else 4
TIMEOUT_S = 120.0  # of a call, without a config; else limits.directory_timeout_s
SYNC_BYTES_PER_S = 8 * MIB  # the fsync of a file gets the time for its bytes at this rate besides
FREE_SPACE_TIMEOUT_S = 1.0  # status, which needs it, is asked with a timeout of 3 s
WALK_FILES = 256  # one call of a walk: the deadline is not for a whole tree


class DirectoryStore(AbstractAsyncContextManager["DirectoryStore"]):
    """The root is made by the first put unless `create` is False. `timeout_s`: of each call; more for each file that
    one call deletes, and for the bytes of an fsync. `access`: of what is written. `url`: where it is, for messages."""

    is_local = True
    # While one put fills the disk, the other fsyncs. More would only wait; an interrupted file begins again.
    puts_at_once = 2
    pieces_in_flight = 8

    def __init__(
        self,
        root: Path,
        *,
        create: bool = True,
        max_write_mib_s: float = 0.0,
        timeout_s: float = TIMEOUT_S,
        access: Access = PRIVATE,
        url: str = "",
    ) -> None:
        self.tree = Tree(root, create=create, access=access, url=url)
        self.root = self.tree.root
        self.url = self.tree.url
        # Two threads more than writes, so that a listing does not wait behind a large file.
        self.pool = ThreadPool(self.pieces_in_flight + 2, "tierd-directory", where=self.url, timeout_s=timeout_s)
        # Not in the queue of the others, for the answer is needed at once.
        self._free_space_pool = ThreadPool(1, "tierd-free-space", where=self.url, timeout_s=FREE_SPACE_TIMEOUT_S)
        threads = min(self.pieces_in_flight, len(os.sched_getaffinity(0)))
        self.sums_pool = ThreadPool(threads, "tierd-checksums", where=self.url, timeout_s=timeout_s)
        self.buffers = Buffers(usual_bytes=PIECE_BYTES, count=BUFFERS)
        self._bandwidth = Bandwidth(max_write_mib_s)
        self._has_swept = False

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
        algorithm: str = "",
        clone: Callable[[int], bool] | None = None,
    ) -> FileEntry:
        """As of `Store`. `algorithm`: of the digests that the entry gets; empty: none. A memoryview may be read up to
        the next multiple of 4096 after `size_bytes` where it is that long. `clone`: as of `NewFile.begin`; where it
        succeeds, `source` is not read."""
        action = f"write {check_key(key)} in {self.url}"
        if isinstance(source, memoryview) and source.nbytes < size_bytes:
            raise BadRequest(f"{action}: {source.nbytes} bytes given, {size_bytes} named")
        sums = ChunkSums(size_bytes, chunk_bytes, algorithm)
        file = NewFile(self.tree, key, size_bytes)

        def write_and_sum(offset: int, piece: memoryview, length: int) -> None:
            file.write(offset, piece, length)
            sums.add(offset, piece[:length])

        def sum_up(offset: int, piece: memoryview) -> None:
            if missing := file.read(offset, piece):
                raise Corrupt(f"{action}: the clone ends at byte {offset + len(piece) - missing}")
            sums.add(offset, piece)

        async def copy(piece: tuple[int, int]) -> None:
            offset, length = piece
            if not is_clone:
                await self._bandwidth.take(length)
            if is_clone:
                async with self.buffers.borrow(min(PIECE_BYTES, round_up(size_bytes))) as buffer:
                    await self.pool.run(sum_up, offset, buffer[:length])
            elif isinstance(source, memoryview):
                # Written and summed at the same time, so that the disk does not wait for a digest.
                view = source[offset : offset + round_up(length)]
                write, add = partial(file.write, offset, view, length), partial(sums.add, offset, view[:length])
                await for_each(2, ((self.pool, write), (self.sums_pool, add)), lambda call: call[0].run(call[1]))
            else:
                async with self.buffers.borrow(min(PIECE_BYTES, round_up(size_bytes))) as buffer:
                    await source.fill(offset, buffer[:length])
                    # In one thread: other pieces are read meanwhile, and a second thread costs processor time.
                    await self.pool.run(write_and_sum, offset, buffer[: round_up(length)], length)
            if progress is not None:
                progress(length)

        with translated(action, missing=TierUnreachable):
            self.pool.check_settled()
            try:
                is_clone = await self.pool.run(file.begin, clone)
                step = WRITE_BYTES if isinstance(source, memoryview) else PIECE_BYTES
                await for_each(self.pieces_in_flight, chunk_ranges(size_bytes, step), copy)
                entry = sums.entry(key.rpartition("/")[2], expect, action)
                if replace:
                    await self.pool.run(file.keep_damaged)
                commit = partial(file.commit, if_absent=not replace)
                is_new = await self.pool.run(commit, timeout_s=self.sync_timeout_s(size_bytes))
            finally:
                await self.pool.clean_up(file.close)
        if not is_new:
            await self._check_same(key, entry, action)
        return entry

    @property
    def answered_s(self) -> float:
        return self.pool.answered_s

    def sync_timeout_s(self, size_bytes: int) -> float:
        return self.pool.timeout_s + size_bytes / SYNC_BYTES_PER_S

    async def _check_same(self, key: str, entry: FileEntry, action: str) -> None:
        """Raises Corrupt unless the file that another put has made has the bytes of `entry`."""
        sizes = [stored.size_bytes for stored in await self.list(key) if stored.key == key]
        is_same = sizes == [entry.size_bytes]
        size, chunk, algorithm = entry.size_bytes, entry.chunk_bytes, entry.algorithm
        if not is_same or await measure(self.source(key), entry.name, size, chunk, algorithm=algorithm) != entry:
            raise conflict(f"{action}: there is a file with other bytes")

    async def put_bytes(self, key: str, content: bytes, *, if_absent: bool = False) -> bool:
        def write() -> bool:
            with closing(NewFile(self.tree, key, len(content), is_small=True)) as file:
                file.begin()
                file.write(0, memoryview(content), len(content))
                return file.commit(if_absent=if_absent)

        with translated(f"write {check_key(key)} in {self.url}", missing=TierUnreachable):
            self.pool.check_settled()
            return await self.pool.run(write)

    async def get_bytes(self, key: str, *, size_max: int) -> bytes:
        return await self.pool.query(self._get, key, size_max)

    async def get_many(self, keys: Sequence[str], *, size_max: int) -> Sequence[bytes | TierdError]:
        def get(key: str) -> bytes | TierdError:
            try:
                return self._get(key, size_max)
            except TierdError as error:
                if isinstance(error, TierUnreachable) and getattr(error.__cause__, "errno", None) not in _OF_ONE_FILE:
                    raise
                return error

        # One call in a thread for all: handing a call over costs more than reading a manifest.
        return await self.pool.query(lambda: [get(key) for key in keys])

    async def make_durable(self, keys: Sequence[str]) -> None:
        with translated(f"fsync the folder of {keys[0]} and {len(keys) - 1} more in {self.url}" if keys else ""):
            await self.pool.query(self.tree.sync_folders, keys, timeout_s=self.pool.timeout_s + len(keys))

    def _get(self, key: str, size_max: int) -> bytes:
        action = f"read {check_key(key)} in {self.url}"
        with translated(action), closing_fd(self.tree.open_file(key)) as fd:
            size_bytes = os.fstat(fd).st_size
            if size_bytes > size_max:
                raise Corrupt(f"{action}: {size_bytes} bytes, more than {size_max}")
            return os.read(fd, size_bytes)

    async def read(self, key: str, offset: int, buffer: memoryview) -> None:
        await self.pool.query(self.read_blocking, key, offset, buffer)

    def read_blocking(self, key: str, offset: int, buffer: memoryview) -> None:
        """As `read`, in the caller's thread and without a deadline."""
        action = f"read {len(buffer)} bytes at {offset} of {check_key(key)} in {self.url}"
        with translated(action), closing_fd(self.tree.open_file(key)) as fd:
            # Also for no bytes at all: the file has been opened, so a missing one is NotFound.
            if missing := read_all(fd, offset, buffer):
                raise Corrupt(f"{action}: the file ends at byte {offset + len(buffer) - missing}")

    def source(self, key: str) -> Source:
        return Source(partial(self.read, key), partial(self.read_blocking, key))

    async def stored_checksum(self, key: str) -> str | None:
        def open_file() -> None:
            os.close(self.tree.open_file(key))

        with translated(f"open {check_key(key)} in {self.url}"):
            await self.pool.query(open_file)
        return None  # no filesystem in use provides a checksum

    async def list(self, prefix: str = "", *, until: str = "") -> list[StoredObject]:
        del until  # all keys cost one walk
        objects: list[StoredObject] = []

        def add(key: str, entry: os.DirEntry[str], folder: int) -> None:
            if key.startswith(prefix) and is_key(key):
                with suppress(FileNotFoundError):  # deleted since the folder was read
                    stat = entry.stat(follow_symlinks=False)
                    objects.append(StoredObject(key, stat.st_size, written_at_s=stat.st_mtime))

        with translated(f"list {self.url}"):
            await self._walk(self.pool.query, prefix.rpartition("/")[0], add, prefix)
        return objects

    async def _walk(
        self,
        run: Callable[[Callable[[], bool]], Awaitable[bool]],
        below: str,
        visit: Callable[[str, os.DirEntry[str], int], None],
        prefix: str = "",
    ) -> None:
        """Calls visit(key, entry, descriptor of its folder), in a thread, for every file in this folder. `run`: of the
        pool. `prefix`: as of `Tree.walk`."""
        entries = self.tree.walk(below, prefix)

        def walk() -> bool:
            count = 0
            for key, entry, folder in islice(entries, WALK_FILES):
                visit(key, entry, folder)
                count += 1
            return count == WALK_FILES

        while await run(walk):
            pass

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)
        if keys:
            with translated(f"delete {keys[0]} and {len(keys) - 1} more in {self.url}"):
                self.pool.check_settled()
                await self.pool.run(self.tree.delete, keys, timeout_s=self.pool.timeout_s + len(keys))

    async def exists(self) -> bool:
        return await self.pool.query(self.root.is_dir)

    async def free_bytes(self) -> int | None:
        with translated(f"measure the free space of {self.url}"):
            return await self._free_space_pool.query(lambda: shutil.disk_usage(self._existing()).free)

    async def disk(self) -> int | None:
        with translated(f"look on which disk {self.url} is"):
            return await self._free_space_pool.query(lambda: self._existing().stat().st_dev)

    def _existing(self) -> Path:
        return next(path for path in (self.root, *self.root.parents) if path.exists())

    def limit_writes(self, mib_s: float) -> None:
        self._bandwidth.limit(mib_s)

    async def remove_unfinished(self, is_abandoned: Callable[[str], bool], *, grace_s: float) -> int:
        if self._has_swept:
            return 0  # a put of this process removes its own file when it fails
        swept = await self.sweep_partials()
        self._has_swept = True
        return swept

    async def unfinished(self) -> list[str]:
        return []  # an interrupted file begins again

    async def sweep_partials(self, below: str = "", *, is_given_up: Callable[[str, float], bool] | None = None) -> int:
        """Removes partial files whose writer is dead, but none of another user. Returns how many.

        `below`: only in this folder. `is_given_up`: also partial downloads, which a later fetch could continue, where
        it returns True for (key, Unix time of the last write).
        """

        swept = 0

        def sweep(key: str, entry: os.DirEntry[str], folder: int) -> None:
            nonlocal swept
            if not entry.name.endswith(layout.PARTIAL_SUFFIX):
                return
            if layout.is_partial_download(entry.name) and not (
                is_given_up and is_given_up(key, entry.stat(follow_symlinks=False).st_mtime)
            ):
                return
            if is_abandoned(entry.name, folder):
                failpoint("sweep.unlink")
                os.unlink(entry.name, dir_fd=folder)
                swept += 1
                self.tree.remove_if_empty(key)

        with translated(f"sweep {self.url}"):
            await self._walk(self.pool.run, below, sweep)
        return swept

    async def close(self) -> None:
        self.pool.close()
        self.sums_pool.close()
        self._free_space_pool.close()
        self.buffers.close()

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def open_files(self, keys: Iterable[str]) -> list[int]:
        """Read-only descriptors of regular files, to be passed to a trainer. The caller closes them."""
        return await self.pool.query(lambda: open_all(map(self.open_blocking, keys)), discard=close_all)

    def open_blocking(self, key: str) -> int:
        """As `open_files`, of one file, in the caller's thread and without a deadline."""
        with translated(f"open {check_key(key)} in {self.url}"):
            return self.tree.open_file(key)
