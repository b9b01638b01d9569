"""The network between daemons: what PeerStore asks of aiohttp's client, and PeerParts of its server.

Modelled: requests from one daemon to another, links that are slow, or pass nothing in one direction or both, answers
that break off, a process that has died (the connection is refused or reset) or sleeps (the connection is accepted and
nothing comes). The daemon that answers runs the real handler, in its own process. The client's time limits are real.

Not modelled: bytes of HTTP, connections that are kept, the number of connections that a listener admits.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, Protocol

import aiohttp
from aiohttp import web

from tests.support.simulation.loop import OWNER, Process

PORT = 9465
LATENCY_S, SLOW_S = 0.005, 8.0  # of a link, at most


_OF_AIOHTTP = (
    *("ClientTimeout", "ClientResponse", "ClientError", "ClientSSLError", "ServerFingerprintMismatch"),
    "Fingerprint",
)
"""What is the same with the simulated network."""


class PeerProcess(Protocol):
    """A daemon as the network sees it."""

    process: Process

    @property
    def is_listening(self) -> bool: ...

    def answer_peer(self, request: PeerRequest) -> None: ...


class SimulatedNetwork:
    """`find`: the newest daemon of a node. `cut`: the links that pass nothing, as (from, to). `slow`: the nodes whose
    links are slow. `break_rate`: the share of answers that break off. `faults` counts what went wrong. `requests`: how
    many there were."""

    def __init__(self, rng: random.Random, find: Callable[[str], PeerProcess | None]) -> None:
        self.random = rng
        self.cut: set[tuple[str, str]] = set()
        self.slow: set[str] = set()
        self.break_rate = 0.0
        self.faults = 0
        self.requests = 0
        self._find = find
        self._waiting: dict[PeerRequest, None] = {}  # in order: a set's depends on addresses
        self.aiohttp = SimpleNamespace(
            **{name: getattr(aiohttp, name) for name in _OF_AIOHTTP},
            TCPConnector=lambda **_: None,
            DummyCookieJar=lambda: None,
            ClientSession=lambda *, headers, timeout, **_: _Session(self, headers, timeout),
        )
        self.web = SimpleNamespace(
            Application=web.Application, Request=web.Request, Response=web.Response, StreamResponse=_StreamResponse
        )

    def mend(self) -> None:
        self.cut.clear()
        self.slow.clear()
        self.break_rate = 0.0
        self.changed()

    def changed(self) -> None:
        """A link may pass again, or a daemon has died: whoever waits looks again."""
        for request in self._waiting:
            request.changed.set()

    def is_up(self, one: str, other: str) -> bool:
        return not {(one, other), (other, one)} & self.cut

    async def connect(self, node: str) -> PeerProcess:
        """The daemon at this node's address. Waits for ever where packets are lost: the caller has a time limit."""
        here = _here()
        await asyncio.sleep(self._latency_s(here, node))
        if not self.is_up(here, node):
            self.faults += 1
            await asyncio.get_running_loop().create_future()
        daemon = self._find(node)
        if daemon is None or not daemon.is_listening:
            self.faults += 1
            raise ConnectionRefusedError(111, "Connection refused")
        return daemon

    async def create_connection(self, factory: Callable[[], Any], host: str, port: int, **_: Any) -> Any:
        """What asyncio.open_connection asks of a loop, for a connection on which nothing is sent."""
        assert port == PORT
        await self.connect(host)
        protocol = factory()
        transport = _Transport(protocol)
        protocol.connection_made(transport)
        return transport, protocol

    @asynccontextmanager
    async def get(
        self, url: str, headers: dict[str, str], timeout: aiohttp.ClientTimeout
    ) -> AsyncGenerator[PeerRequest]:
        address, _, path = url.removeprefix("http://").partition("/")
        node, here = address.rpartition(":")[0], _here()
        self.requests += 1
        try:
            async with asyncio.timeout(timeout.sock_connect):
                daemon = await self.connect(node)
        except TimeoutError:
            raise aiohttp.ConnectionTimeoutError(f"Connection timeout to host {url}") from None
        except OSError as error:
            raise aiohttp.ClientConnectionError(str(error)) from error
        breaks_off = self.random.random() < self.break_rate
        request = PeerRequest(self, here, daemon, path, headers, timeout.sock_read or 0.0, breaks_off=breaks_off)
        self._waiting[request] = None
        try:
            daemon.answer_peer(request)
            await request.wait_for(lambda: request.status != 0)
            yield request
        finally:
            self._waiting.pop(request, None)

    def _latency_s(self, one: str, other: str) -> float:
        return self.random.random() * (SLOW_S if self.slow & {one, other} else LATENCY_S)


class PeerRequest:
    """One request, with its answer. To the handler it is a web.Request, to PeerStore a ClientResponse."""

    def __init__(
        self,
        network: SimulatedNetwork,
        here: str,
        daemon: PeerProcess,
        path: str,
        headers: dict[str, str],
        read_timeout_s: float,
        *,
        breaks_off: bool,
    ) -> None:
        _, _, run, checkpoint, file = path.split("/")
        self.match_info = {"run": run, "checkpoint": checkpoint, "file": file}
        self.headers = headers
        self.transport = SimpleNamespace(abort=self.break_off)
        self.content = self
        self.status = 0
        self.changed = asyncio.Event()
        self._network = network
        self._here, self._daemon = here, daemon
        self._read_timeout_s = read_timeout_s
        self._breaks_off = breaks_off
        self._pieces: list[bytes] = []
        self._is_complete = self._is_broken = False

    # ── the side that answers ──

    def begin(self, status: int) -> None:
        self.status = status
        self.changed.set()

    def write(self, piece: bytes) -> None:
        if self._breaks_off:
            self._network.faults += 1
            self._pieces.append(piece[: len(piece) // 2])
            self.break_off()
        elif not self._is_broken:
            self._pieces.append(piece)
            self.changed.set()

    def end(self) -> None:
        self._is_complete = not self._is_broken
        self.changed.set()

    def break_off(self) -> None:
        self._is_broken = True
        self.changed.set()

    # ── the side that asks ──

    async def wait_for(self, has_arrived: Callable[[], bool]) -> None:
        network, there = self._network, self._daemon.process.name
        await asyncio.sleep(network._latency_s(self._here, there))
        try:
            async with asyncio.timeout(self._read_timeout_s):
                while not (has_arrived() and network.is_up(self._here, there)):
                    if self._is_broken or not self._daemon.process.is_alive:
                        network.faults += 1
                        raise aiohttp.ServerDisconnectedError
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            network.faults += 1
            raise aiohttp.SocketTimeoutError("Timeout on reading data from socket") from None

    async def iter_any(self) -> AsyncGenerator[bytes]:
        while True:
            await self.wait_for(lambda: bool(self._pieces) or self._is_complete)
            if not self._pieces:
                return
            yield self._pieces.pop(0)


class _Session:
    """aiohttp.ClientSession."""

    def __init__(self, network: SimulatedNetwork, headers: dict[str, str], timeout: aiohttp.ClientTimeout) -> None:
        self._network, self._headers, self._timeout = network, headers, timeout

    def get(self, url: str, *, headers: dict[str, str], allow_redirects: bool) -> Any:
        return self._network.get(url, self._headers | headers, self._timeout)

    async def close(self) -> None:
        pass


class _StreamResponse:
    """web.StreamResponse."""

    def __init__(self, *, status: int) -> None:
        self.status = status
        self.headers: dict[str, str] = {}
        self._request: PeerRequest | None = None

    async def prepare(self, request: PeerRequest) -> None:
        self._request = request
        request.begin(self.status)

    async def write(self, piece: bytearray) -> None:
        assert self._request is not None
        self._request.write(bytes(piece))

    async def write_eof(self) -> None:
        assert self._request is not None
        self._request.end()


class _Transport:
    """Of a connection on which nothing is sent."""

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol

    def close(self) -> None:
        asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


def _here() -> str:
    owner = OWNER.get()
    assert owner is not None
    return owner.name
