"""The body of a request, read piece by piece while it is sent: a part of 64 MiB costs 4 MiB of memory.

Each piece is summed as it goes, and the last one is held back until the sum is what the manifest promises. So
damaged bytes never arrive whole, and no server has to notice.
"""

from __future__ import annotations

import asyncio
import os

from tierd.format.manifest import FileEntry
from tierd.tiers.chunks import ChunkSums
from tierd.tiers.store import LocalSource, Source

PIECE_BYTES = 4 << 20  # each is a request where the source is another bucket
SEND_BYTES = 256 << 10  # one send; all of it has to go within the socket's timeout


class Body:
    """Bytes `offset` to `offset + length` of a file: whole chunks of `entry`. boto3 reads it in a thread of its own,
    where a local source is read too; another is asked on the event loop. `buffer` has PIECE_BYTES, where the source is
    not memory already.

    For one attempt: once cut, it stays so. What went wrong with the source itself is in `damage`.
    """

    def __init__(
        self,
        source: memoryview | Source,
        entry: FileEntry,
        offset: int,
        length: int,
        *,
        buffer: memoryview,
        doing: str,
    ) -> None:
        self._source = source
        self._entry = entry
        self._offset = offset
        self._length = length
        self._buffer = buffer
        self._doing = doing
        self._loop = asyncio.get_running_loop()
        self._filling: asyncio.Task[None] | None = None
        self._is_cut = False
        self.damage: Exception | None = None
        self.keeps_size = False  # whether a read gives no more than is asked for: who signs the payload insists
        self._rewind()

    def _rewind(self) -> None:
        self._at = 0
        self._piece = memoryview(b"")
        self._sums = ChunkSums(self._length, self._entry.chunk_bytes)

    def read(self, size: int = -1) -> memoryview:
        """The next bytes, mostly whatever size is asked: 16 KiB at a time would be 4096 system calls a part."""
        if not self._piece and self._at < self._length:
            try:
                self._piece = self._next()
            except Exception as error:
                self.damage = error
                raise
        count = size if self.keeps_size and size >= 0 else SEND_BYTES
        sent, self._piece = self._piece[:count], self._piece[count:]
        self._at += len(sent)
        return sent

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """boto3 asks for the length this way; in earnest it only goes back to the beginning."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if self._at == 0:
            self._rewind()
        return self._at

    def tell(self) -> int:
        return self._at

    def cut(self) -> None:
        """Ends the wait for the source, from the event loop."""
        self._is_cut = True
        if self._filling is not None:
            self._filling.cancel()

    def _next(self) -> memoryview:
        length = min(PIECE_BYTES, self._length - self._at)
        begin = self._offset + self._at
        if isinstance(self._source, memoryview):
            piece = self._source[begin : begin + length]
        else:
            piece = self._buffer[:length]
            if isinstance(self._source, LocalSource):
                self._source.fill_now(begin, piece)
            else:
                asyncio.run_coroutine_threadsafe(self._fill(self._source, begin, piece), self._loop).result()
        self._sums.add(self._at, piece)
        if self._at + length == self._length:
            self._sums.check(self._entry, first=self._offset // self._entry.chunk_bytes, doing=self._doing)
        return piece

    async def _fill(self, source: Source, offset: int, piece: memoryview) -> None:
        # The task is cancelled, not the future that the thread waits for: that one ends when nobody writes any more.
        self._filling = asyncio.current_task()
        if self._is_cut:
            raise asyncio.CancelledError
        await source.fill(offset, piece)
