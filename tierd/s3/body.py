"""The body of a request, read piece by piece while it is sent: a part of 64 MiB takes 4 MiB of memory.

Each piece is checksummed, and the last one is sent only when the checksums are those of the manifest. So damaged bytes
never become a part, even on a server that verifies nothing.
"""

from __future__ import annotations

import asyncio
import os

from tierd.format.manifest import FileEntry
from tierd.tiers.chunks import ChunkSums
from tierd.tiers.store import Source

PIECE_BYTES = 4 << 20  # each is a request where the source is another bucket
SEND_BYTES = 256 << 10  # one send, which must end within the socket's timeout


class Body:
    """Bytes `offset` to `offset + length` of a file: whole chunks of `entry`. `buffer` has PIECE_BYTES.

    boto3 reads it in a thread, which reads a local source directly; another source is read on the event loop. Each
    attempt needs a new Body, because `abort` is final. `source_error`: what the source raised.
    """

    def __init__(
        self, source: Source, entry: FileEntry, offset: int, length: int, *, buffer: memoryview, action: str
    ) -> None:
        self._source = source
        self._entry = entry
        self._offset = offset
        self._length = length
        self._buffer = buffer
        self._action = action
        self._loop = asyncio.get_running_loop()
        self._fill_task: asyncio.Task[None] | None = None
        self._at = 0
        self._is_aborted = False
        self.source_error: Exception | None = None
        self.limits_reads = False  # whether `read` returns at most `size` bytes, as a signed payload needs
        self.seek(0)

    def read(self, size: int = -1) -> memoryview:
        """The next SEND_BYTES, mostly whatever `size` says: 16 KiB at a time would be 4096 system calls for a part."""
        if not self._piece and self._at < self._length:
            begin, length = self._offset + self._at, min(PIECE_BYTES, self._length - self._at)
            piece = self._buffer[:length]
            try:
                if self._source.fill_blocking is not None:
                    self._source.fill_blocking(begin, piece)
                else:
                    asyncio.run_coroutine_threadsafe(self._fill(begin, piece), self._loop).result()
                self._sums.add(self._at, piece)
                if self._at + length == self._length:
                    self._sums.check(self._entry, first=self._offset // self._entry.chunk_bytes, action=self._action)
            except Exception as error:
                self.source_error = error
                raise
            self._piece = piece
        count = size if self.limits_reads and size >= 0 else SEND_BYTES
        sent, self._piece = self._piece[:count], self._piece[count:]
        self._at += len(sent)
        return sent

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """boto3 finds the length by seeking to the end and back. Reading continues only from the beginning."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if self._at == 0:
            self._piece = memoryview(b"")
            self._sums = ChunkSums(self._length, self._entry.chunk_bytes)
        return self._at

    def tell(self) -> int:
        return self._at

    def abort(self) -> None:
        """Ends the wait for the source. Called on the event loop."""
        self._is_aborted = True
        if self._fill_task is not None:
            self._fill_task.cancel()

    async def _fill(self, offset: int, piece: memoryview) -> None:
        # `abort` cancels this task, not the future that the thread waits for: the thread must wait until nobody writes
        # into the piece any more.
        self._fill_task = asyncio.current_task()
        if self._is_aborted:
            raise asyncio.CancelledError
        await self._source.fill(offset, piece)
