"""The only user of boto3: its low-level client, one attempt for each request, and never its transfer manager.

Adds what boto3 lacks: a request that another thread can abort, because urllib3's timeouts begin again with every byte;
and credentials that are read again when the bucket says that they have expired.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import boto3.session
import botocore.session
from botocore.awsrequest import (
    AWSHTTPConnection,
    AWSHTTPConnectionPool,
    AWSHTTPSConnection,
    AWSHTTPSConnectionPool,
)
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.loaders import Loader

from tierd.config.sections import ColdConfig, is_exposed_endpoint
from tierd.errors import TierdError, TierUnreachable
from tierd.s3.errors import translate

CONNECT_TIMEOUT_S_MAX = 10.0  # also the limit for one send of 256 KiB

_MODELS = Loader()
"""Shared by all clients: each loader reads its own copy of S3's service model, 12 MB and 60 ms."""

Answer = dict[str, Any]
"""A response of S3 as boto3 parses it."""

for _logger in ("boto3", "botocore", "urllib3"):
    # At debug level they log whole requests, with the session token and the string to sign.
    logging.getLogger(_logger).setLevel(logging.INFO)


@dataclass(eq=False)
class RequestConnection:
    """The connection that one request uses. `abort` makes the request fail at once, in its own thread."""

    signs_payload: bool = False
    is_aborted: bool = False
    started_s: float | None = None  # monotonic; None while the request waits for a thread
    client: object = None  # boto3's client of this request
    _socket: socket.socket | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def attach(self, connected: socket.socket) -> None:
        with self._lock:
            self._socket = connected
            if self.is_aborted:
                _shut(connected)

    def detach(self) -> None:
        """The socket returns to its pool, for other requests."""
        with self._lock:
            self._socket = None

    def abort(self) -> None:
        with self._lock:
            self.is_aborted = True
            if self._socket is not None:
                _shut(self._socket)


class S3Client:
    """Requests to the bucket of a tier. Credentials come from boto3's own chain. Every call blocks."""

    def __init__(self, cold: ColdConfig, bucket: str, *, connections: int, timeout_s: float) -> None:
        self._where = f"{cold.url} in {cold.name}"
        self._bucket = bucket
        self._allows_plain_http = cold.allow_plain_http
        self._boto3: dict[bool, Any] = {}  # by whether the payload is signed
        self._connecting = threading.Lock()
        self.region = cold.region  # in force: boto3's own where none is configured, known after the first request
        self._options: dict[str, Any] = {
            # A custom endpoint checks no region, but a signature needs one.
            "region_name": cold.region or ("us-east-1" if cold.endpoint_url else None),
            "endpoint_url": cold.endpoint_url or None,
            "verify": cold.ca_bundle or None,  # None: AWS_CA_BUNDLE, else the system's CAs; never unverified
            "config": Config(
                # We send checksums as plain headers: boto3's default adds trailers that other servers refuse.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                # We retry: the SDK's retry quota is used up in a long outage.
                retries={"total_max_attempts": 1, "mode": "standard"},
                connect_timeout=min(timeout_s, CONNECT_TIMEOUT_S_MAX),
                read_timeout=timeout_s,
                max_pool_connections=connections,
            ),
        }

    def call(
        self,
        operation: str,
        action: str,
        connection: RequestConnection,
        use: Callable[[Answer], Any],
        arguments: Answer,
    ) -> tuple[str, Any]:
        """One attempt. Returns (HTTP status, result of `use` on the answer with its open body). Raises TierdError,
        whose cause is boto3's exception."""
        connection.started_s = time.monotonic()
        client = connection.client = self._connect(signs_payload=connection.signs_payload)
        _in_thread.connection = connection
        answer: Answer | None = None
        try:
            answer = getattr(client, operation)(Bucket=self._bucket, **arguments)
            assert answer is not None
            with answer.get("Body", nullcontext()):  # closes it at the end
                return str(answer["ResponseMetadata"]["HTTPStatusCode"]), use(answer)
        except TierdError:
            raise
        except Exception as error:
            if connection.is_aborted:
                hint = "is the network or the server too slow, or partly down? The request is tried again"
                raise TierUnreachable(f"{action}: it did not end within the deadline", hint=hint) from error
            if isinstance(error, (BotoCoreError, ClientError)):
                raise translate(error, action) from error
            if answer is None:  # botocore raises AttributeError and others for answers that it cannot parse
                hint = "is endpoint_url an S3 server? The request is tried again"
                raise TierUnreachable(f"{action}: {type(error).__name__}: {error}", hint=hint) from error
            raise
        finally:
            connection.detach()
            _in_thread.connection = None

    def close(self, connection: RequestConnection | None = None) -> None:
        """Requests in progress keep their own connections until they end. The next request reads credentials again
        (environment, files, role). `connection`: do nothing if another request did this after this one began."""
        with self._connecting:
            if connection is None or connection.client in self._boto3.values():
                for client in self._boto3.values():
                    client.close()
                self._boto3 = {}

    def _connect(self, *, signs_payload: bool) -> Any:
        """boto3's client, made by the first request: it takes 0.1 s, and it reads files that may be invalid."""
        with self._connecting:
            if signs_payload not in self._boto3:
                session = botocore.session.Session()
                session.register_component("data_loader", _MODELS)
                # The checksum header protects the bytes; a hash of them in the signature costs 2 CPU-s per GB more.
                signing = Config(s3={"payload_signing_enabled": signs_payload})
                options = {**self._options, "config": self._options["config"].merge(signing)}
                try:
                    client: Any = boto3.session.Session(botocore_session=session).client("s3", **options)
                except ValueError as error:
                    hint = "check region and endpoint_url of this tier"
                    raise TierUnreachable(f"connect to {self._where}: {error}", hint=hint) from error
                except BotoCoreError as error:
                    raise translate(error, f"connect to {self._where}") from error
                # boto3 has no public access to its connections; tests/s3/test_client.py fails when this one ends.
                pools = client._endpoint.http_session._pool_classes_by_scheme
                pools.update(http=_ConnectionPool, https=_TLSConnectionPool)
                # boto3 takes an endpoint from the environment and ~/.aws too.
                endpoint_url = str(client.meta.endpoint_url)
                if is_exposed_endpoint(endpoint_url) and not self._allows_plain_http:
                    why = f"{endpoint_url} is plain HTTP, and requests carry credentials"
                    hint = "use https://, or set allow_plain_http = true in this tier"
                    raise TierUnreachable(f"connect to {self._where}: {why}", hint=hint)
                self.region = str(client.meta.region_name)
                self._boto3[signs_payload] = client
            return self._boto3[signs_payload]


class _InThread(threading.local):
    connection: RequestConnection | None = None


_in_thread = _InThread()


class _Attached:
    """An HTTP connection that tells the RequestConnection of its thread which socket it uses."""

    sock: Any

    def connect(self) -> None:
        super().connect()  # type: ignore[misc]
        self._attach()

    def request(self, *arguments: Any, **more: Any) -> Any:
        self._attach()
        return super().request(*arguments, **more)  # type: ignore[misc]

    def _attach(self) -> None:
        if _in_thread.connection is not None and self.sock is not None:
            _in_thread.connection.attach(self.sock)


class _Connection(_Attached, AWSHTTPConnection):
    pass


class _TLSConnection(_Attached, AWSHTTPSConnection):
    pass


class _ConnectionPool(AWSHTTPConnectionPool):
    ConnectionCls = _Connection


class _TLSConnectionPool(AWSHTTPSConnectionPool):
    ConnectionCls = _TLSConnection

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        # urllib3 sets the protocols again for each connection. That frees those of the context, which a thread that
        # opens another connection may be reading: https://github.com/python/cpython/issues/141012
        context: Any = self.conn_kw["ssl_context"]
        context.set_alpn_protocols(["http/1.1"])
        context.set_alpn_protocols = lambda protocols: None


def _shut(connected: socket.socket) -> None:
    with suppress(OSError):  # it is closed already
        # Below TLS, because TLS's own shutdown must not be called from a second thread.
        socket.socket.shutdown(connected, socket.SHUT_RDWR)
