"""What has a port: another daemon is recognised, and any other answer is that of another program."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from tierd.api import port_occupant as module
from tierd.api.port_occupant import OTHER, port_occupant

STATUS = b'{"pid": 7, "node": "gpu-7", "tiers": [{"name": "hot", "url": "file:///nvme"}], "version": "9"}'


@asynccontextmanager
async def served(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[int]:
    app = web.Application()
    app.router.add_get("/{any:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (200, STATUS, "another tierd, pid 7 on gpu-7 with the hot tier /nvme,"),
        (
            401,
            b"a token is needed: listen.token_file\n",
            "another tierd, which answers only with its listen.token_file,",
        ),
        (200, STATUS.replace(b"7,", b"null,"), OTHER),
        (200, b"<html>", OTHER),
        (404, b"", OTHER),
        (302, b"", OTHER),
        (200, b"\xff" * 100, OTHER),
        (200, b'{"nested": ' + b"[" * 100_000, OTHER),
    ],
)
async def test_only_an_answer_of_a_daemon_counts(status: int, body: bytes, expected: str) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, body=body, headers={"Location": "/elsewhere"})

    async with served(answer) as port:
        assert await port_occupant("0.0.0.0", port) == expected


async def test_an_endless_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_BYTES_MAX", 1 << 16)

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(bytes(1 << 14))

    async with served(endless) as port:
        assert await port_occupant("127.0.0.1", port) == OTHER
