"""The parts of checkpoints that the daemon of another node serves, as a store for reading. Spec: docs/FORMAT.md#peers.

Bytes are not verified here. A request whose answer breaks off is sent again a few times, then PeerUnreachable is
raised. With TLS, no request is sent to a server whose certificate differs from the one in the node's address.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import aiohttp

from tierd.backoff import backoff_s
from tierd.errors import Corrupt, NotFound, PeerRestarted, PeerUnreachable
from tierd.format.ids import HOT
from tierd.format.peers import TIER_HEADER, PeerAddress
from tierd.tiers.rate_limit import Bandwidth
from tierd.tiers.store import Progress, Source, check_key

ATTEMPTS = 6
RETRY_MIN_S, RETRY_MAX_S = 0.2, 3.0
CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 30.0  # without a byte
RATE_MIN_BYTES_S = (
    1 << 20
)  # of one connection: a node that sends or reads more slowly counts as one that does not answer
CONNECTIONS_MAX = 4  # to one node, which others read too
RECEIVED_BYTES = 1 << 20  # of an answer, before they are copied

_HINT_TLS = "set peers.tls to the same on all nodes of the run: docs/RUNBOOK.md#peers"
_HINT_RESTARTED = "its daemon has restarted meanwhile, or something else answers there: docs/RUNBOOK.md#peers"


class PeerStore(AbstractAsyncContextManager["PeerStore"]):
    """`close` ends its connections. `needs_tls`: raises PeerUnreachable for a node that answers in plain HTTP.
    `is_hot`: only what is in hot there. `bandwidth`: of what is read. `attempts`: of a request that fails. `count_read`
    is called with the bytes of each piece that has come."""

    def __init__(
        self,
        peer: PeerAddress,
        *,
        needs_tls: bool = False,
        is_hot: bool = False,
        bandwidth: Bandwidth | None = None,
        attempts: int = ATTEMPTS,
        count_read: Progress | None = None,
    ) -> None:
        self._bandwidth, self._attempts, self._count_read = bandwidth, attempts, count_read
        self.url = f"{'https' if peer.fingerprint else 'http'}://{peer.address}/parts/v1"
        if needs_tls and not peer.fingerprint:
            raise PeerUnreachable(f"read from {self.url}: peers.tls is set here, and not on that node", hint=_HINT_TLS)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=READ_TIMEOUT_S)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=CONNECTIONS_MAX,
                ssl=aiohttp.Fingerprint(bytes.fromhex(peer.fingerprint)) if peer.fingerprint else True,
            ),
            headers={"Authorization": f"Bearer {peer.token}", "Accept-Encoding": "identity"}
            | ({TIER_HEADER: HOT} if is_hot else {}),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            timeout=timeout,
            read_bufsize=RECEIVED_BYTES,
        )

    async def get_bytes(self, key: str, *, size_max: int) -> bytes:
        async def get() -> bytes:
            time_s = READ_TIMEOUT_S + size_max / RATE_MIN_BYTES_S
            async with asyncio.timeout(time_s), self._answer(key, {}, 200) as answer:
                content = bytearray()
                async for piece in self._pieces(answer):
                    content += piece
                    if len(content) > size_max:
                        raise Corrupt(f"read {key} from {self.url}: more than {size_max} bytes")
                return bytes(content)

        return await self._try(get, f"read {key} from {self.url}")

    async def read(self, key: str, offset: int, buffer: memoryview) -> None:
        async def read() -> bytes:
            done = 0
            headers = {"Range": f"bytes={offset}-{offset + len(buffer) - 1}"}
            time_s = READ_TIMEOUT_S + len(buffer) / RATE_MIN_BYTES_S
            async with asyncio.timeout(time_s), self._answer(key, headers, 206) as answer:
                async for piece in self._pieces(answer):
                    if len(piece) > len(buffer) - done:
                        raise Corrupt(f"read {key} from {self.url}: more bytes than were requested")
                    buffer[done : done + len(piece)] = piece
                    done += len(piece)
            if done < len(buffer):
                raise PeerUnreachable(f"read {key} from {self.url}: the answer ended {len(buffer) - done} bytes early")
            return b""

        if buffer:
            if self._bandwidth is not None:
                await self._bandwidth.take(len(buffer))
            await self._try(read, f"read {key} from {self.url}")

    def source(self, key: str) -> Source:
        return Source(partial(self.read, key))

    async def close(self) -> None:
        await self._session.close()

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _try(self, call: Callable[[], Awaitable[bytes]], action: str) -> bytes:
        failures = 0
        while True:
            try:
                return await call()
            except PeerRestarted:
                raise
            except PeerUnreachable as error:
                failure = error
            except aiohttp.ServerFingerprintMismatch as error:
                found = f"its certificate is sha256:{error.got.hex()}, and the trainers have sent another one"
                raise PeerRestarted(f"{action}: {found}", hint=_HINT_RESTARTED) from error
            except aiohttp.ClientSSLError as error:
                failure = PeerUnreachable(f"{action}: no TLS handshake: {error}", hint=_HINT_TLS)
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                failure = PeerUnreachable(f"{action}: {error or type(error).__name__}", hint="docs/RUNBOOK.md#peers")
                failure.__cause__ = error
            failures += 1
            if failures >= self._attempts:
                raise failure
            await asyncio.sleep(backoff_s(failures, min_s=RETRY_MIN_S, max_s=RETRY_MAX_S))

    async def _pieces(self, answer: aiohttp.ClientResponse) -> AsyncGenerator[bytes]:
        async for piece in answer.content.iter_any():
            if self._count_read is not None:
                self._count_read(len(piece))
            yield piece

    @asynccontextmanager
    async def _answer(self, key: str, headers: dict[str, str], status: int) -> AsyncGenerator[aiohttp.ClientResponse]:
        url = f"{self.url}/{check_key(key)}"
        async with self._session.get(url, headers=headers, allow_redirects=False) as answer:
            if answer.status == 404:
                raise NotFound(f"read {key} from {self.url}: that node has no such file")
            if answer.status == 401:
                raise PeerRestarted(f"read {key} from {self.url}: that daemon has started again, with another token")
            if answer.status == 416:
                raise Corrupt(f"read {key} from {self.url}: the file is shorter there")
            if answer.status != status:
                raise PeerUnreachable(f"read {key} from {self.url}: HTTP status {answer.status}")
            yield answer
