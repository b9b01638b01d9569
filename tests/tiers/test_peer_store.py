"""Reads from another node: what breaks off is requested again, and an answer of another length is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tierd.errors import BadRequest, Corrupt, NotFound, PeerUnreachable
from tierd.format.peers import PeerAddress
from tierd.tiers import peer_store
from tierd.tiers.peer_store import ATTEMPTS, PeerStore

KEY = "run/000000000005-g0001/rank-00000-of-00002.safetensors"
CONTENT = bytes(range(256))

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_store, "RETRY_MIN_S", 0.001)
    monkeypatch.setattr(peer_store, "READ_TIMEOUT_S", 0.5)


@asynccontextmanager
async def reading(answer: Answer) -> AsyncIterator[PeerStore]:
    """A store that reads from a server that answers so."""
    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with (
        TestServer(app) as server,
        PeerStore(PeerAddress(address=f"127.0.0.1:{server.port}", token="secret")) as store,
    ):
        yield store


async def piece(request: web.Request) -> web.Response:
    assert request.path == f"/parts/v1/{KEY}"
    assert request.headers["Authorization"] == "Bearer secret"
    return web.Response(status=206, body=CONTENT[request.http_range])


async def read(store: PeerStore, offset: int, length: int) -> bytes:
    buffer = bytearray(length)
    await store.source(KEY).fill(offset, memoryview(buffer))
    return bytes(buffer)


async def test_reads_the_bytes_that_are_asked_for() -> None:
    async with reading(piece) as store:
        assert await read(store, 3, 100) == CONTENT[3:103]
        assert await read(store, 0, 0) == b""


async def test_small_object_is_read_whole_and_a_large_one_refused() -> None:
    async def whole(_: web.Request) -> web.Response:
        return web.Response(body=CONTENT)

    async with reading(whole) as store:
        assert await store.get_bytes(KEY, size_max=256) == CONTENT
        with pytest.raises(Corrupt, match="more than 255 bytes"):
            await store.get_bytes(KEY, size_max=255)


async def test_answer_that_breaks_off_is_requested_again() -> None:
    requests = 0

    async def broken_once(request: web.Request) -> web.StreamResponse:
        nonlocal requests
        requests += 1
        if requests > 1:
            return await piece(request)
        response = web.StreamResponse(status=206)
        response.content_length = 100
        await response.prepare(request)
        await response.write(b"x" * 50)
        assert request.transport is not None
        request.transport.abort()
        return response

    async with reading(broken_once) as store:
        assert await read(store, 3, 100) == CONTENT[3:103]
    assert requests == 2


@pytest.mark.parametrize("status", [200, 302, 401, 500, 503])
async def test_any_other_status_is_unreachable_after_some_attempts(status: int) -> None:
    requests = 0

    async def refuse(request: web.Request) -> web.Response:
        nonlocal requests
        requests += 1
        return web.Response(status=status, headers={"Location": "/elsewhere"})

    async with reading(refuse) as store:
        with pytest.raises(PeerUnreachable, match=f"status {status}"):
            await read(store, 0, 4)
    assert requests == ATTEMPTS


@pytest.mark.parametrize(("status", "error"), [(404, NotFound), (416, Corrupt)])
async def test_file_that_is_absent_or_shorter_is_not_requested_again(status: int, error: type[Exception]) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=status)

    async with reading(refuse) as store:
        with pytest.raises(error):
            await read(store, 0, 4)


@pytest.mark.parametrize(("given_bytes", "error"), [(99, PeerUnreachable), (101, Corrupt)])
async def test_answer_of_another_length_is_refused(given_bytes: int, error: type[Exception]) -> None:
    async def other(_: web.Request) -> web.Response:
        return web.Response(status=206, body=bytes(given_bytes))

    async with reading(other) as store:
        with pytest.raises(error):
            await read(store, 0, 100)


async def test_node_that_has_gone_is_unreachable_and_a_name_that_is_no_key_refused() -> None:
    async with PeerStore(PeerAddress(address="127.0.0.1:1", token="")) as store:
        with pytest.raises(PeerUnreachable, match="RUNBOOK"):
            await read(store, 0, 4)
        with pytest.raises(BadRequest):
            await store.get_bytes("run/../secret", size_max=9)


async def test_node_that_sends_a_byte_now_and_then_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes in time, and all of them would take minutes."""
    monkeypatch.setattr(peer_store, "ATTEMPTS", 2)

    async def trickle(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(status=206 if "Range" in request.headers else 200)
        await answer.prepare(request)
        for byte in CONTENT:
            await answer.write(bytes([byte]))
            await asyncio.sleep(0.1)
        return answer

    async with reading(trickle) as store:
        with pytest.raises(PeerUnreachable):
            await read(store, 0, len(CONTENT))
        with pytest.raises(PeerUnreachable):
            await store.get_bytes(KEY, size_max=len(CONTENT))
