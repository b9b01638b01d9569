"""A TCP proxy that delays what passes it in either direction, as a distance does. As a program:

python bench/latency.py http://127.0.0.1:9000 30    prints its own address; 30 ms a round trip
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

PIECE_BYTES = 1 << 18
PIECES = 64  # on their way in one direction of a connection


@contextmanager
def delayed(url: str, round_trip_ms: float) -> Generator[str]:
    """The address of a proxy before the server at `url`, in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), url, str(round_trip_ms)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    loop, pieces = asyncio.get_running_loop(), asyncio.Queue[tuple[float, bytes]](PIECES)

    async def write() -> None:
        while True:
            due_s, piece = await pieces.get()
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            if not piece:
                return
            writer.write(piece)
            await writer.drain()

    async def read() -> None:
        piece = b"-"
        while piece:
            piece = await reader.read(PIECE_BYTES)
            await pieces.put((loop.time() + delay_s, piece))

    with suppress(ConnectionError):
        async with asyncio.TaskGroup() as both:
            both.create_task(write())
            both.create_task(read())
    with suppress(ConnectionError):
        writer.close()


async def _serve(host: str, port: int, delay_s: float) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(host, port)
        with suppress(BaseExceptionGroup):
            async with asyncio.TaskGroup() as both:
                both.create_task(_pass_on(reader, there[1], delay_s))
                both.create_task(_pass_on(there[0], writer, delay_s))

    server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=4 * PIECE_BYTES)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    target = urlsplit(sys.argv[1])
    asyncio.run(_serve(str(target.hostname), int(target.port or 80), float(sys.argv[2]) / 2000))
