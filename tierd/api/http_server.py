"""The daemon's HTTP listener: whom it answers, and how much any client can cost.

bounded: the number of connections, with a share of the open files that leaves the rest to the trainers; the time and
the bytes until a request is complete. Those in a TLS handshake count. When all connections are taken, the oldest one
without a request in progress gives way. A request must name this machine in its Host header: a web page can point a
name of its own at this address, but not make a browser send another name. With `listen.token_file` it must also have
the token: as a bearer token, or as the password of basic authentication, for which a browser asks its user.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import hmac
import ipaddress
import logging
import math
import os
import resource
import ssl
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler

from tierd.api.port_occupant import port_occupant
from tierd.config.sections import Config, split_address
from tierd.errors import BadConfig

log = logging.getLogger("tierd")

REQUEST_TIMEOUT_S = 10.0  # until a request is complete, and between two requests of a connection
REQUEST_BYTES_MAX = 64 << 10  # no request has a body
DESCRIPTORS_SHARE = 16  # one of so many descriptors may be a connection here
PROBES = ("/healthz", "/readyz")  # answered without a token: they tell nothing of a run


Check = Callable[[web.Request], web.Response | None]
"""The answer to a request that is refused; None admits it."""


class HttpServer:
    """Serves `app` at `daemon.listen` from `start` until `close`.

    `peers_check`: serves at `peers.listen` instead the requests that it admits."""

    def __init__(self, app: web.Application, config: Config, *, peers_check: Check | None = None) -> None:
        self._config = config
        self._key, self._listen = "daemon.listen", config.daemon.listen
        self._tls: ssl.SSLContext | None = None
        self._check = self._check_name_and_token
        if peers_check is not None:
            self._key, self._listen = "peers.listen", config.peers.listen
            self._check = peers_check
        self._hosts = {"localhost", config.daemon.node.lower(), config.listen_address[0].lower(), *config.listen.hosts}
        self._token = ""
        self._connections: dict[int, _Bounded] = {}  # by the id of the transport, oldest first
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._connections_max = min(config.limits.http_connections_max, max(4, descriptors // DESCRIPTORS_SHARE))
        app.middlewares.append(self._admit)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        self._listener: asyncio.Server | None = None
        self.address = ""
        """host:port, once it has started."""

    @property
    def url(self) -> str:
        return f"{'https' if self._tls is not None else 'http'}://{self.address}"

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        """`tls`: None for the certificate of the config, or none. Raises BadConfig."""
        config = self._config
        host, port = split_address(self._listen)
        self._token = await asyncio.to_thread(read_token, config.listen.token_file)
        await self._runner.setup()
        serve = self._runner.server
        assert serve is not None
        if tls is None and self._key == "daemon.listen":
            tls = await asyncio.to_thread(_tls, config.listen.cert_file, config.listen.key_file)
        self._tls = tls

        def accept() -> asyncio.Protocol:
            connection = _Connection(serve(), self._connections, self._connections_max)
            return connection if tls is None else _Handshake(connection, tls)

        try:
            self._listener = await asyncio.get_running_loop().create_server(accept, host, port)
        except OSError as error:
            # asyncio puts the address into strerror. The codes of getaddrinfo are negative.
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or error
            hint = f"set {self._key} to an address of this machine, such as 127.0.0.1"
            if error.errno == errno.EADDRINUSE:
                reason = f"{await port_occupant(host, port)} has this port"
                hint = f"set {self._key} to a free port; port 0 takes any"
            elif error.errno in (errno.EACCES, errno.EPERM):
                hint = f"set {self._key} to a port above 1023"
            raise BadConfig(f"listen on {self._listen}: {reason}", hint=hint) from error
        bound_host, bound_port = self._listener.sockets[0].getsockname()[:2]
        self.address = f"[{bound_host}]:{bound_port}" if ":" in bound_host else f"{bound_host}:{bound_port}"

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()

    @web.middleware
    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        connection = self._connections.get(id(request.transport))
        if isinstance(connection, _Connection):
            connection.begin_request()
        try:
            return self._check(request) or await handler(request)
        finally:
            if isinstance(connection, _Connection):
                connection.wait_for_request()

    def _check_name_and_token(self, request: web.Request) -> web.Response | None:
        if not is_named(request.headers.get("Host", ""), self._hosts):
            hint = "use an IP address or localhost, or add the name to listen.hosts"
            return web.Response(status=421, text=f"this daemon has another name; {hint}\n")
        if self._token and request.path not in PROBES and not self._has_token(request):
            # The first scheme that a browser knows makes it ask for the password.
            return no_token("a token is needed: listen.token_file\n", 'Bearer, Basic realm="tierd", charset="UTF-8"')
        return None

    def _has_token(self, request: web.Request) -> bool:
        return has_token(request, self._token) or _same(_password(request), self._token)


def has_token(request: web.Request, token: str) -> bool:
    """Whether the request has this bearer token. Compares in constant time."""
    return _same(_credentials(request, "bearer"), token)


def no_token(text: str, schemes: str = "Bearer") -> web.Response:
    return web.Response(status=401, headers={"WWW-Authenticate": schemes}, text=text)


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(errors="surrogateescape"), token.encode())


def _credentials(request: web.Request, scheme: str) -> str:
    """What follows the scheme in the header `Authorization` (RFC 9110, section 11.6.2); empty if it has another one."""
    given, _, credentials = request.headers.get("Authorization", "").partition(" ")
    return credentials.strip() if given.lower() == scheme else ""


def _password(request: web.Request) -> str:
    """The password of basic authentication (RFC 7617), with any user name; empty if there is none."""
    try:
        user_and_password = base64.b64decode(_credentials(request, "basic"), validate=True).decode()
    except ValueError:
        return ""
    return user_and_password.partition(":")[2]


class _Bounded(asyncio.Protocol):
    """A connection that counts. `others`: all of the listener."""

    def __init__(self, others: dict[int, _Bounded], count_max: int) -> None:
        self.others = others
        self.count_max = count_max
        self.is_busy = False
        self.transport: asyncio.Transport | None = None

    def count(self, transport: asyncio.BaseTransport) -> None:
        """Counts it from now on. If there are too many, one without a request in progress is ended."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        if len(self.others) >= self.count_max:
            idle = next((other for other in self.others.values() if not other.is_busy), self)
            log.warning("HTTP: %d connections are open: one without a request is ended", self.count_max)
            idle.end()
        self.others[id(transport)] = self

    def connection_lost(self, exc: Exception | None) -> None:
        self.others.pop(id(self.transport), None)

    def end(self) -> None:
        if self.transport is not None:
            self.others.pop(id(self.transport), None)
            self.transport.abort()


class _Handshake(_Bounded):
    """A connection until its TLS handshake is complete. asyncio's own server would tell of it only afterwards."""

    def __init__(self, connection: _Connection, tls: ssl.SSLContext) -> None:
        super().__init__(connection.others, connection.count_max)
        self._connection = connection
        self._tls = tls
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.count(transport)
        self._task = asyncio.get_running_loop().create_task(self._shake_hands())

    async def _shake_hands(self) -> None:
        assert self.transport is not None
        try:
            encrypted = await asyncio.get_running_loop().start_tls(
                self.transport,
                self._connection,
                self._tls,
                server_side=True,
                ssl_handshake_timeout=REQUEST_TIMEOUT_S,
                ssl_shutdown_timeout=REQUEST_TIMEOUT_S,
            )
        except (OSError, asyncio.CancelledError):  # the client has gone, sent something else, or took too long
            self.end()
            return
        self.others.pop(id(self.transport), None)
        if encrypted is not None:
            self._connection.connection_made(encrypted)


class _Connection(_Bounded):
    """Passes everything on to aiohttp's protocol, and ends a connection that goes over a bound."""

    def __init__(self, inner: Any, others: dict[int, _Bounded], count_max: int) -> None:
        super().__init__(others, count_max)
        self._inner = inner
        self._received_bytes = 0
        self._unsent_bytes = math.inf  # of a response, when it was last looked at
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.count(transport)
        self._inner.connection_made(transport)
        self.wait_for_request()

    def data_received(self, data: bytes) -> None:
        self._received_bytes += len(data)
        if self._received_bytes > REQUEST_BYTES_MAX:
            self.end()
        else:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()
        if self.transport is not None:  # else it ended during the handshake, and aiohttp does not know of it
            self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def begin_request(self) -> None:
        self.is_busy = True
        if self._timer is not None:
            self._timer.cancel()

    def wait_for_request(self) -> None:
        """The time for the next request begins. A client that still reads a response gets more."""
        self.is_busy, self._received_bytes, self._unsent_bytes = False, 0, math.inf
        self._start_timer()

    def _start_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(REQUEST_TIMEOUT_S, self._check_progress)

    def _check_progress(self) -> None:
        unsent_bytes = self.transport.get_write_buffer_size() if self.transport is not None else 0
        if 0 < unsent_bytes < self._unsent_bytes:
            self._unsent_bytes = unsent_bytes
            self._start_timer()
        else:
            self.end()


def is_named(host: str, names: Collection[str]) -> bool:
    """Whether the Host header of a request is an IP address or one of these names. True without one, which HTTP/1.0
    allows: every browser sends it."""
    if not host:
        return True
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    if name in names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def read_token(file: str) -> str:
    """The content of `listen.token_file`; empty without one. Raises BadConfig."""
    if not file:
        return ""
    try:
        token = Path(file).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(f"read listen.token_file {file}: {error}") from error
    if not token:
        raise BadConfig(f"read listen.token_file {file}: it is empty", hint="one line with any text, such as a UUID")
    return token


def _tls(cert_file: str, key_file: str) -> ssl.SSLContext | None:
    """None without a certificate. Raises BadConfig."""
    if not cert_file:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert_file, key_file or None)
    except OSError as error:  # ssl.SSLError too
        raise BadConfig(f"read listen.cert_file {cert_file}: {error}", hint="PEM, with the key in key_file") from error
    return context
