"""The only place that knows boto3: its low-level client, never its transfer manager, and one attempt a request.

Adds what boto3 has not: a request that another thread can cut, for urllib3's timeouts begin anew with every byte;
and credentials read afresh when the bucket says that they have expired.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
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

from tierd.errors import TierdError, TierUnreachable
from tierd.s3.errors import translate

CONNECT_TIMEOUT_S_MAX = 10.0  # also what one send of 256 KiB may take

_MODELS = Loader()
"""Shared by all clients: every further one would read its own copy of S3's service model, 12 MB and 60 ms."""

Answer = dict[str, Any]

for _talker in ("boto3", "botocore", "urllib3"):
    # At debug level they write whole requests, with the session token and what the signature is made of.
    logging.getLogger(_talker).setLevel(logging.INFO)


class Line:
    """The connection that one request is on. Cut it, and the request ends in its thread at once with an error."""

    def __init__(self, *, signs_payload: bool = False) -> None:
        self.signs_payload = signs_payload
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self.is_cut = False
        self.began_s: float | None = None  # monotonic; None while the request waits for a thread
        self.client: object = None  # boto3's that it goes through

    def take(self, connected: socket.socket) -> None:
        with self._lock:
            self._socket = connected
            if self.is_cut:
                _shut(connected)

    def release(self) -> None:
        """The connection goes back to its pool: from here it is someone else's."""
        with self._lock:
            self._socket = None

    def cut(self) -> None:
        with self._lock:
            self.is_cut = True
            if self._socket is not None:
                _shut(self._socket)


class S3Client:
    """Requests to one bucket. Credentials come from boto3's own chain. Every call blocks: run it in a thread."""

    def __init__(
        self,
        where: str,
        bucket: str,
        *,
        region: str,
        endpoint_url: str,
        connections: int,
        timeout_s: float,
        ca_bundle: str = "",
    ) -> None:
        self._where = where
        self._bucket = bucket
        self._boto3: dict[bool, Any] = {}  # by whether the payload is signed
        self._connecting = threading.Lock()
        self.region = region  # in force: boto3's own where none is given, known after the first request
        self._options: dict[str, Any] = {
            # A custom endpoint checks no region, but a signature needs one.
            "region_name": region or ("us-east-1" if endpoint_url else None),
            "endpoint_url": endpoint_url or None,
            # None: AWS_CA_BUNDLE, else the CAs that everyone trusts. There is no way to trust nobody.
            "verify": ca_bundle or None,
            "config": Config(
                # Checksums are ours, sent as plain headers: boto3's default adds trailers that other servers refuse.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                # We retry: the SDK's quota runs dry in just the outage that it is for.
                retries={"total_max_attempts": 1, "mode": "standard"},
                connect_timeout=min(timeout_s, CONNECT_TIMEOUT_S_MAX),
                read_timeout=timeout_s,
                max_pool_connections=connections,
            ),
        }

    def call(
        self, operation: str, doing: str, line: Line, use: Callable[[Answer], Any], arguments: Answer
    ) -> tuple[str, Any]:
        """One attempt: (HTTP status, what `use` makes of the answer and its body). Raises TierdError, whose cause is
        what boto3 raised."""
        line.began_s = time.monotonic()
        client = line.client = self._connect(signs_payload=line.signs_payload)
        _lines.current = line
        try:
            answer: Answer = getattr(client, operation)(Bucket=self._bucket, **arguments)
            body = answer.get("Body")
            try:
                return str(answer["ResponseMetadata"]["HTTPStatusCode"]), use(answer)
            finally:
                if body is not None:
                    body.close()
        except TierdError:
            raise
        except (BotoCoreError, ClientError) as error:
            raise self._cut(doing, line) or translate(error, doing) from error
        except Exception as error:
            if cut := self._cut(doing, line):
                raise cut from error
            raise
        finally:
            line.release()
            _lines.current = None

    def renew(self, line: Line) -> None:
        """Before the next request reads credentials afresh (environment, files, role), if nobody has since this one."""
        with self._connecting:
            if line.client in self._boto3.values():
                self._close()

    def close(self) -> None:
        with self._connecting:
            self._close()

    def _close(self) -> None:
        """Requests under way end on their own connections, which are closed then."""
        for one in self._boto3.values():
            one.close()
        self._boto3 = {}

    def _cut(self, doing: str, line: Line) -> TierdError | None:
        if not line.is_cut:
            return None
        hint = "is the network or the server too slow, or half gone? It is tried again"
        return TierUnreachable(f"{doing}: it did not end within the deadline", hint=hint)

    def _connect(self, *, signs_payload: bool) -> Any:
        """The client, made at the first request: it takes 0.1 s, and it reads files that may be wrong."""
        with self._connecting:
            if signs_payload not in self._boto3:
                session = botocore.session.Session()
                session.register_component("data_loader", _MODELS)
                # The checksum header protects the bytes; to hash them once more for the signature costs 2 CPU-s per GB.
                signing = Config(s3={"payload_signing_enabled": signs_payload})
                options = {**self._options, "config": self._options["config"].merge(signing)}
                try:
                    made: Any = boto3.session.Session(botocore_session=session).client("s3", **options)
                except ValueError as error:
                    hint = "check region and endpoint_url of this tier"
                    raise TierUnreachable(f"connect to {self._where}: {error}", hint=hint) from error
                except BotoCoreError as error:
                    raise translate(error, f"connect to {self._where}") from error
                # No public way leads to boto3's connections; test_s3_client.py says so when this one ends.
                made._endpoint.http_session._pool_classes_by_scheme.update(http=_Pool, https=_PoolWithTLS)
                self.region = str(made.meta.region_name)
                self._boto3[signs_payload] = made
            return self._boto3[signs_payload]


class _Lines(threading.local):
    current: Line | None = None


_lines = _Lines()


class _OnALine:
    """A connection that tells the line of its thread's request which socket it uses."""

    sock: Any

    def connect(self) -> None:
        super().connect()  # type: ignore[misc]
        self._tell()

    def request(self, *arguments: Any, **more: Any) -> Any:
        self._tell()
        return super().request(*arguments, **more)  # type: ignore[misc]

    def _tell(self) -> None:
        if _lines.current is not None and self.sock is not None:
            _lines.current.take(self.sock)


class _Connection(_OnALine, AWSHTTPConnection):
    pass


class _ConnectionWithTLS(_OnALine, AWSHTTPSConnection):
    pass


class _Pool(AWSHTTPConnectionPool):
    ConnectionCls = _Connection


class _PoolWithTLS(AWSHTTPSConnectionPool):
    ConnectionCls = _ConnectionWithTLS


def _shut(connected: socket.socket) -> None:
    with suppress(OSError):  # it was gone already
        # Below TLS: its own shutdown is not made for a second thread.
        socket.socket.shutdown(connected, socket.SHUT_RDWR)
