"""Serves this node's parts of checkpoints to other nodes, over HTTP, read-only.

GET /parts/v1/<run> lists them, and GET /parts/v1/<run>/<checkpoint>/<file> reads one. Every request must have the run's
token. `Range` selects bytes of a shard. What is read for a copy is held back while training steps here are slower; a
restore is not, because all ranks of a run wait for it. Spec: docs/FORMAT.md#peers.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable

import msgspec
from aiohttp import web

import tierd
from tierd.api.http_server import HttpServer, has_token, no_token
from tierd.config.sections import Config
from tierd.context import DaemonContext
from tierd.errors import NotFound, TierdError
from tierd.format import layout
from tierd.format.ids import HOT, Run, is_run, parse_name
from tierd.format.node_messages import HELD_MAX
from tierd.format.peers import TIER_HEADER
from tierd.keys.peer_certificate import make_certificate
from tierd.keys.peer_key import PeerKey
from tierd.throttle import WriteThrottle
from tierd.tiers.peer_store import CONNECTIONS_MAX, RATE_MIN_BYTES_S
from tierd.tiers.rate_limit import Bandwidth
from tierd.workers.inventory import durable_parts
from tierd.workers.part_files import PartFile, PartFiles
from tierd.workers.restorer import Restorer

log = logging.getLogger("tierd")

PIECE_BYTES = 1 << 20  # of an answer in memory: each connection has one
ANSWER_TIMEOUT_S = 30.0  # without progress: the other node has gone
SERVED = "served"  # the name of this traffic for the throttle
SERVED_MIN_MIB_S = CONNECTIONS_MAX * RATE_MIN_BYTES_S / (1 << 20)  # a node that reads more slowly is dropped

_RANGE = re.compile(r"bytes=([0-9]{1,15})-([0-9]{1,15})")


class PeerParts:
    """The listener at `peers.listen`."""

    def __init__(
        self,
        context: DaemonContext,
        restorer: Restorer,
        *,
        copy_lag_s: Callable[[Run], float | None] = lambda run: None,
    ) -> None:
        self._context, self._copy_lag_s = context, copy_lag_s
        self._config: Config = context.config
        self._key: PeerKey = context.peer_key
        self._throttle: WriteThrottle = context.throttle
        self._bandwidth = Bandwidth(0.0)
        self._count_out = context.metrics.peer_bytes_total.labels(direction="out").inc
        self._files = PartFiles(context, restorer)
        app = web.Application()
        app.router.add_get("/parts/v1/{run}", self._list)
        app.router.add_get("/parts/v1/{run}/{newest:newest}", self._list)
        app.router.add_get("/parts/v1/{run}/{checkpoint}/{file}", self._answer)
        self._server = HttpServer(app, context.config, peers_check=self._check)

    async def start(self) -> None:
        """Raises BadConfig."""
        tls = None
        if self._config.peers.tls:
            tls, self._key.fingerprint = await asyncio.to_thread(make_certificate)
        await self._server.start(tls)
        host, port = self._config.peers_host, self._server.address.rpartition(":")[2]
        self._key.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        with_tls = f", with the certificate sha256:{self._key.fingerprint}" if tls is not None else ""
        log.info("tierd %s serves parts at %s%s", tierd.__version__, self._key.address, with_tls)

    async def close(self) -> None:
        await self._server.close()

    def limit_copies(self, mib_s: float) -> None:
        """Cap what is read for copies, at SERVED_MIN_MIB_S or more; 0: no cap."""
        self._bandwidth.limit(max(mib_s, SERVED_MIN_MIB_S) if mib_s else 0.0)

    def _check(self, request: web.Request) -> web.Response | None:
        run = request.match_info.get("run", "")
        is_admitted = is_run(run) and has_token(request, self._key.token(Run(run)))
        return None if is_admitted else no_token("the token of the run is needed\n")

    async def _list(self, request: web.Request) -> web.Response:
        run, count = Run(request.match_info["run"]), 1 if "newest" in request.match_info else HELD_MAX
        parts = durable_parts(self._context, run, copy_lag_s=self._copy_lag_s(run), count=count)
        return web.Response(body=msgspec.json.encode(parts), content_type="application/json")

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["file"]
        checkpoint = parse_name(Run(request.match_info["run"]), request.match_info["checkpoint"])
        if checkpoint is None:
            return web.Response(status=404, text="no checkpoint has such a name\n")
        try:
            is_hot = request.headers.get(TIER_HEADER) == HOT
            if layout.parse_node_file(name) is not None:
                node_file = await self._files.node_file(checkpoint, name, is_hot=is_hot)
                return web.Response(body=node_file.encode(), content_type="application/json")
            async with self._files.open(checkpoint, name, is_hot=is_hot) as file:
                return await self._send(request, file, bandwidth=self._bandwidth if is_hot else Bandwidth(0.0))
        except NotFound as error:
            return web.Response(status=404, text=f"{error.message}\n")
        except TierdError as error:
            return web.Response(status=503, text=f"{error.message}\n")

    async def _send(self, request: web.Request, file: PartFile, *, bandwidth: Bandwidth) -> web.StreamResponse:
        begin, end, status = 0, file.size_bytes, 200
        if "Range" in request.headers:
            match = _RANGE.fullmatch(request.headers["Range"])
            begin, end, status = (int(match[1]), int(match[2]) + 1, 206) if match else (0, 0, 416)
            if not begin < end <= file.size_bytes:
                headers = {"Content-Range": f"bytes */{file.size_bytes}"}
                return web.Response(status=416, headers=headers, text="no such range\n")
        response = web.StreamResponse(status=status)
        response.content_type = "application/octet-stream"
        response.content_length = end - begin
        if status == 206:
            response.headers["Content-Range"] = f"bytes {begin}-{end - 1}/{file.size_bytes}"
        await response.prepare(request)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S + (end - begin) / RATE_MIN_BYTES_S):
                with self._throttle.writing(SERVED) as count_sent:
                    for offset in range(begin, end, PIECE_BYTES):
                        # A new buffer each time: what the socket does not take at once is not copied.
                        piece = bytearray(min(PIECE_BYTES, end - offset))
                        await bandwidth.take(len(piece))
                        await self._files.read(file, offset, memoryview(piece))
                        async with asyncio.timeout(ANSWER_TIMEOUT_S):
                            await response.write(piece)
                        count_sent(len(piece))
                        self._count_out(len(piece))
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    await response.write_eof()
        except (TierdError, TimeoutError):
            if request.transport is not None:
                request.transport.abort()  # the other node sees that the answer is not complete
        return response
