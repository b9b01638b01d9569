"""Attacks on the listener between nodes: by another user of the node, and by whoever reaches its port."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from tests.api.test_peer_parts import LONG, RUN, SHARD, Served, served
from tierd.format.ids import Run
from tierd.peer_key import PeerKey

__all__ = ["served"]
CONNECTIONS = 300


async def raw_request(served: Served, lines: bytes) -> bytes:
    """The answer to these bytes, until the daemon closes the connection."""
    host, _, port = served.key.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(lines)
    answer = b""
    with suppress(ConnectionError):
        async with asyncio.timeout(20.0):
            answer = await reader.read()
    writer.close()
    return answer


async def test_token_of_an_earlier_daemon_opens_nothing(served: Served) -> None:
    served.seal(5)
    former = PeerKey(address=served.key.address).token(RUN)
    assert former != served.key.token(RUN)
    assert (await served.get(f"parts/v1/{RUN}/{5:012d}-g0001/{SHARD}", token=former))[0] == 401
    assert (await served.part(SHARD)) == (200, LONG)


@pytest.mark.parametrize("run", ["..", "%2e%2e", "%00", "a%2fb", "%0d%0aX", "%ff", "r" * 5000, "."])
async def test_run_of_an_odd_name_opens_nothing(served: Served, run: str) -> None:
    """Also with the token that such a name would have."""
    served.seal(5)
    path = f"/parts/v1/{run}/{5:012d}-g0001/{SHARD}"
    token = served.key.token(Run(run))
    head = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer {token}\r\n\r\n"
    assert b" 401 " in (await raw_request(served, head.encode())).split(b"\r\n")[0]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "CONNECT"])
async def test_nothing_is_written_or_deleted(served: Served, method: str) -> None:
    served.seal(5)
    path = f"/parts/v1/{RUN}/{5:012d}-g0001/{SHARD}"
    token = served.key.token(RUN)
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer {token}\r\n\r\n"
    status = (await raw_request(served, head.encode())).split(b"\r\n")[0]
    assert b" 4" in status
    assert (await served.part(SHARD)) == (200, LONG)


async def test_half_open_connections_keep_no_node_out(served: Served) -> None:
    served.seal(5)
    host, _, port = served.key.address.rpartition(":")
    writers: list[asyncio.StreamWriter] = []
    for _ in range(CONNECTIONS):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /parts/v1/")
        writers.append(writer)
    assert await served.part(SHARD) == (200, LONG)
    for writer in writers:
        writer.close()
