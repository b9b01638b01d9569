"""Reads from another node: what breaks off is requested again, and an answer of another length is refused."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tierd.errors import BadRequest, Corrupt, NotFound, PeerRestarted, PeerUnreachable
from tierd.format.peers import PeerAddress
from tierd.keys.peer_certificate import make_certificate
from tierd.tiers import peer_store
from tierd.tiers.peer_store import ATTEMPTS, PeerStore
from tierd.tiers.store import Progress

KEY = "run/000000000005-g0001/rank-00000-of-00002.safetensors"
CONTENT = bytes(range(256))

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_store, "RETRY_MIN_S", 0.001)


@asynccontextmanager
async def reading(
    answer: Answer, *, tls: ssl.SSLContext | None = None, fingerprint: str = "", count_read: Progress | None = None
) -> AsyncIterator[PeerStore]:
    """A store that reads from a server that answers so, and expects this fingerprint."""
    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    server = TestServer(app, scheme="https" if tls is not None else "http")
    await server.start_server(ssl=tls)
    try:
        peer = PeerAddress(address=f"127.0.0.1:{server.port}", token="secret", fingerprint=fingerprint)
        async with PeerStore(peer, count_read=count_read) as store:
            yield store
    finally:
        await server.close()


async def certificate() -> tuple[ssl.SSLContext, str]:
    return await asyncio.to_thread(make_certificate)


async def piece(request: web.Request) -> web.Response:
    assert request.path == f"/parts/v1/{KEY}"
    assert request.headers["Authorization"] == "Bearer secret"
    return web.Response(status=206, body=CONTENT[request.http_range])


async def read(store: PeerStore, offset: int, length: int) -> bytes:
    buffer = bytearray(length)
    await store.source(KEY).fill(offset, memoryview(buffer))
    return bytes(buffer)


@pytest.mark.parametrize("has_tls", [False, True])
async def test_reads_the_bytes_that_are_asked_for(has_tls: bool) -> None:
    tls, fingerprint = await certificate() if has_tls else (None, "")
    counts: list[int] = []
    async with reading(piece, tls=tls, fingerprint=fingerprint, count_read=counts.append) as store:
        assert await read(store, 3, 100) == CONTENT[3:103]
        assert await read(store, 0, 0) == b""
    assert sum(counts) == 100


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


@pytest.mark.parametrize("status", [200, 302, 500, 503])
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


@pytest.mark.parametrize(("status", "error"), [(404, NotFound), (416, Corrupt), (401, PeerRestarted)])
async def test_answer_that_will_not_change_is_not_requested_again(status: int, error: type[Exception]) -> None:
    requests = 0

    async def refuse(_: web.Request) -> web.Response:
        nonlocal requests
        requests += 1
        return web.Response(status=status)

    async with reading(refuse) as store:
        with pytest.raises(error):
            await read(store, 0, 4)
    assert requests == 1


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

    async def trickle(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(status=206 if "Range" in request.headers else 200)
        await answer.prepare(request)
        for byte in CONTENT:
            await answer.write(bytes([byte]))
            await asyncio.sleep(0.05)
        return answer

    monkeypatch.setattr(peer_store, "READ_TIMEOUT_S", 0.2)
    async with reading(trickle) as store:
        with pytest.raises(PeerUnreachable):
            await read(store, 0, len(CONTENT))
        with pytest.raises(PeerUnreachable):
            await store.get_bytes(KEY, size_max=len(CONTENT))


# ── TLS ──


async def test_server_with_another_certificate_gets_neither_a_request_nor_the_token() -> None:
    """The daemon has restarted, or another server is at its address. It is not tried again: it will not change back."""
    tls, fingerprint = await certificate()
    _, other = await certificate()
    requests: list[str] = []

    async def record(request: web.Request) -> web.Response:
        requests.append(request.headers["Authorization"])
        return await piece(request)

    async with reading(record, tls=tls, fingerprint=other) as store:
        with pytest.raises(PeerRestarted, match=f"its certificate is sha256:{fingerprint}") as refused:
            await read(store, 3, 100)
    assert "restarted" in refused.value.hint
    assert requests == []


async def test_node_without_tls_where_tls_was_told_is_named() -> None:
    async with reading(piece, fingerprint=(await certificate())[1]) as store:
        with pytest.raises(PeerUnreachable, match="no TLS handshake") as refused:
            await read(store, 3, 100)
    assert "peers.tls" in refused.value.hint


async def test_node_with_tls_where_none_was_told_is_unreachable() -> None:
    async with reading(piece, tls=(await certificate())[0]) as store:
        with pytest.raises(PeerUnreachable):
            await read(store, 3, 100)


async def test_node_that_needs_tls_reads_nothing_in_plain_http() -> None:
    with pytest.raises(PeerUnreachable, match=r"peers\.tls is set here, and not on that node"):
        PeerStore(PeerAddress(address="127.0.0.1:1", token=""), needs_tls=True)


@pytest.mark.parametrize("closes", [True, False])
async def test_server_that_closes_or_hangs_in_the_handshake_is_unreachable(
    monkeypatch: pytest.MonkeyPatch, closes: bool
) -> None:
    monkeypatch.setattr(peer_store, "CONNECT_TIMEOUT_S", 0.5)
    writers: list[asyncio.StreamWriter] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        if closes:
            await reader.read(1 << 16)  # the client's first message
            writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        peer = PeerAddress(address=f"127.0.0.1:{port}", token="", fingerprint=(await certificate())[1])
        async with PeerStore(peer, attempts=2) as store:
            with pytest.raises(PeerUnreachable):
                await read(store, 3, 100)
        async with asyncio.timeout(30):
            while len(writers) < 2:  # the server may accept the second one later than the client gives up
                await asyncio.sleep(0.01)
        for writer in writers:
            writer.close()
