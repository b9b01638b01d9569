"""Requests to the bucket of one tier: attempts, deadlines, throttling, encryption and the server's dialect.

A request is attempted a few times here. When that fails, the worker that made it tries again later, without end.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any
from urllib.parse import urlsplit

from tierd.backoff import backoff_s
from tierd.config.sections import ColdConfig, LimitsConfig
from tierd.errors import Corrupt, NotFound, TierdError, TierUnreachable
from tierd.s3.body import PIECE_BYTES, Body
from tierd.s3.client import Answer, RequestConnection, S3Client
from tierd.s3.dialect import NO_EXTRAS, Dialect, Extra, Extras
from tierd.s3.errors import ABSENT_OR_DENIED, Trouble, code_of, retry_after_s, trouble_of
from tierd.tiers.directory import BUFFERS
from tierd.tiers.pool import Buffers, ThreadPool
from tierd.tiers.rate_limit import Bandwidth, UploadWindow
from tierd.tiers.store import StoredObject, check_key

ATTEMPTS = 3
RETRY_MIN_S, RETRY_MAX_S = 0.2, 20.0  # pauses between attempts; the maximum also where the server asks for more
READ_BYTES = 1 << 20  # urllib3 copies each read: one that fits the processor's cache costs half
SLOWEST_BYTES_PER_S = 64 << 10  # below this rate a request counts as stopped
_FINAL = {Trouble.UNREACHABLE, Trouble.MISCONFIGURED, Trouble.REFUSED}  # another attempt at once would not help
_ENCRYPTED = {"put_object", "create_multipart_upload"}

NEEDED_ACTIONS = {
    "put_object": "s3:PutObject",
    "create_multipart_upload": "s3:PutObject",
    "upload_part": "s3:PutObject",
    "complete_multipart_upload": "s3:PutObject",
    "get_object": "s3:GetObject",
    "head_object": "s3:GetObject",
    "delete_object": "s3:DeleteObject",
    "delete_objects": "s3:DeleteObject",
    "list_objects_v2": "s3:ListBucket",
    "list_multipart_uploads": "s3:ListBucketMultipartUploads",
    "list_parts": "s3:ListMultipartUploadParts",
    "abort_multipart_upload": "s3:AbortMultipartUpload",
}
"""The IAM action of each request. deploy/iam-policy.json allows exactly these and DOCTOR_ACTIONS."""

DOCTOR_ACTIONS = {
    "get_bucket_lifecycle_configuration": "s3:GetLifecycleConfiguration",
    "get_bucket_versioning": "s3:GetBucketVersioning",
    "get_object_lock_configuration": "s3:GetBucketObjectLockConfiguration",
}
"""For `tierd doctor` alone, which reports what it may not read and continues."""

ACTIONS = NEEDED_ACTIONS | DOCTOR_ACTIONS

OnRequest = Callable[[str, str], None]


class S3Requests:
    """`on_request` gets (operation, outcome) of every attempt: an HTTP status, an S3 error code, or the name of a
    network error. `retry_min_s`: the pause before the second attempt."""

    def __init__(
        self,
        cold: ColdConfig,
        limits: LimitsConfig,
        *,
        on_request: OnRequest | None = None,
        retry_min_s: float = RETRY_MIN_S,
    ) -> None:
        parts = urlsplit(cold.url)
        path = parts.path.strip("/")
        self.url = cold.url
        self.name = cold.name
        self.prefix = f"{path}/" if path else ""
        self.parts_in_flight = limits.parts_in_flight
        self.window = UploadWindow(limits.parts_in_flight)
        self.bandwidth = Bandwidth(cold.max_upload_mib_s)
        # Two more than parts and the reads of a fetch, so that a look or a listing does not wait behind these.
        threads = limits.parts_in_flight + BUFFERS + 2
        self.pool = ThreadPool(threads, "tierd-s3")
        self.buffers = Buffers(usual_bytes=PIECE_BYTES, count=limits.parts_in_flight)
        self.dialect = Dialect(f"{cold.url} in {cold.name}")
        self._timeout_s = limits.request_timeout_s
        self._retry_min_s = retry_min_s
        self._on_request = on_request
        encryption = {"ServerSideEncryption": cold.sse, "SSEKMSKeyId": cold.sse_kms_key_id}
        self._encryption = {name: value for name, value in encryption.items() if value}
        self.client = S3Client(cold, parts.netloc, connections=threads, timeout_s=limits.request_timeout_s)

    def addressed(self, verb: str, key: str) -> tuple[str, str]:
        """(what a request does, for messages; the key of its object)."""
        return f"{verb} {key} in {self.name} ({self.url})", self.prefix + check_key(key)

    async def list_pages(self, action: str, prefix: str) -> AsyncGenerator[list[StoredObject]]:
        """The objects whose keys begin with `prefix`, one page of the server at a time. All keys are relative to the
        prefix of the tier's URL."""
        after: dict[str, Any] = {}
        while True:
            page = await self.request("list_objects_v2", action, Prefix=self.prefix + prefix, **after)
            yield [
                StoredObject(
                    listed["Key"].removeprefix(self.prefix),
                    listed["Size"],
                    listed.get("ETag", ""),
                    listed["LastModified"].timestamp() if "LastModified" in listed else math.inf,
                )
                for listed in page.get("Contents", ())
            ]
            if not page.get("IsTruncated"):
                return
            after = {"ContinuationToken": page["NextContinuationToken"]}

    async def request(
        self,
        operation: str,
        action: str,
        *,
        use: Callable[[Answer], Any] = lambda answer: answer,
        size_bytes: int = 0,
        make_body: Callable[[], Body] | None = None,
        **arguments: Any,
    ) -> Any:
        """A request of S3's API. Returns what `use` returns for the answer; it may read the body, in the same thread.

        `size_bytes`: of the payload in either direction; the deadline grows with it. `make_body`: makes the payload,
        again for each attempt. Raises TierdError, whose cause is boto3's exception.
        """
        if operation in _ENCRYPTED:
            arguments |= self._encryption
        attempt = 0
        omitted = NO_EXTRAS  # tried without these, in case the server refuses them
        while True:
            attempt += 1
            body = None if make_body is None else make_body()
            try:
                result = await self._attempt(operation, action, use, size_bytes, body, arguments, omitted)
            except (TierUnreachable, NotFound) as error:
                omitted = self.dialect.to_omit(error.__cause__, arguments, omitted)
                if omitted:
                    continue
                trouble = trouble_of(error.__cause__)
                if trouble is Trouble.THROTTLED:
                    self.window.shrink()
                if trouble is Trouble.CREDENTIALS:
                    attempt = max(attempt, ATTEMPTS - 1)  # one more attempt, with credentials that are read again
                if trouble in _FINAL or attempt >= ATTEMPTS:
                    raise
                asked_s = min(RETRY_MAX_S, retry_after_s(error.__cause__))
                pause_s = max(asked_s, backoff_s(attempt, min_s=self._retry_min_s, max_s=RETRY_MAX_S))
            else:
                self.dialect.learn(omitted)
                if make_body is not None:
                    self.window.grow()
                return result
            await asyncio.sleep(pause_s)

    async def read_range(
        self,
        object_key: str,
        action: str,
        offset: int,
        buffer: memoryview,
        check: Callable[[Answer], None] = lambda answer: None,
    ) -> None:
        """Fill the buffer, which is not empty. `check` may refuse the answer. Raises Corrupt when the object ends
        before."""

        def fetch(answer: Answer) -> None:
            check(answer)
            length = answer["ContentLength"]
            if length < len(buffer):
                raise Corrupt(f"{action}: the object ends at byte {offset + length}")
            is_range = answer.get("ContentRange", "").startswith(f"bytes {offset}-")
            if length > len(buffer) or (offset > 0 and not is_range):
                raise TierUnreachable(f"{action}: the server ignored the range", hint="tierd needs ranged GETs")
            done = 0
            while done < len(buffer):
                count = answer["Body"].readinto(buffer[done : done + READ_BYTES])
                if count == 0:
                    raise TierUnreachable(f"{action}: the connection ended after {done} bytes")
                done += count

        span = f"bytes={offset}-{offset + len(buffer) - 1}"
        await self.request("get_object", action, use=fetch, size_bytes=len(buffer), Key=object_key, Range=span)

    async def head(self, object_key: str, action: str) -> Answer | None:
        """None when there is no such object."""
        try:
            return await self.request("head_object", action, Key=object_key, ChecksumMode="ENABLED")
        except NotFound:
            return None
        except TierUnreachable as error:
            if await self.is_absent(object_key, action, error):
                return None
            raise

    async def is_absent(self, object_key: str, action: str, error: TierUnreachable) -> bool:
        """Whether `error` refuses access to an object that is absent. S3 answers so where the identity may not list the
        whole bucket, as with a condition on s3:prefix; the object's own key may be listed."""
        if code_of(error.__cause__) not in ABSENT_OR_DENIED:
            return False
        page = await self.request("list_objects_v2", action, Prefix=object_key, MaxKeys=1)
        return all(listed["Key"] != object_key for listed in page.get("Contents", ()))

    async def close(self) -> None:
        self.pool.close()
        self.buffers.close()
        self.client.close()

    async def _attempt(
        self,
        operation: str,
        action: str,
        use: Callable[[Answer], Any],
        size_bytes: int,
        body: Body | None,
        arguments: Answer,
        omitted: Extras,
    ) -> Any:
        connection = RequestConnection(signs_payload=Extra.CHECKSUMS in self.dialect.refused | omitted)
        arguments = self.dialect.adapt(arguments, omitted)

        def abort() -> None:
            connection.abort()
            if body is not None:
                body.abort()

        if body is not None:
            body.limits_reads = connection.signs_payload
            arguments = {**arguments, "Body": body}
        # Twice the socket's timeout, so that the socket reports first when nothing arrives at all.
        deadline_s = 2 * self._timeout_s + size_bytes / SLOWEST_BYTES_PER_S
        stop_timer = _abort_after(deadline_s, connection, abort)
        outcome = "cancelled"
        try:
            outcome, result = await self.pool.run(
                self.client.call, operation, action, connection, use, arguments, abort=abort
            )
        except Exception as error:
            if body is not None and body.source_error is not None and not connection.is_aborted:
                outcome = "damaged"
                raise body.source_error from None
            if not isinstance(error, TierdError):
                raise
            outcome = "deadline" if connection.is_aborted else code_of(error.__cause__ or error)
            if trouble_of(error.__cause__) is Trouble.CREDENTIALS:
                self.client.close(connection)  # another attempt reads credentials again
            raise
        finally:
            stop_timer()
            if self._on_request is not None:
                self._on_request(operation, outcome)
        return result


def _abort_after(deadline_s: float, connection: RequestConnection, abort: Callable[[], None]) -> Callable[[], None]:
    """Aborts the request `deadline_s` after it got a thread. Returns a function that stops the timer."""
    loop = asyncio.get_running_loop()

    def check() -> None:
        nonlocal timer
        left_s = deadline_s if connection.started_s is None else connection.started_s + deadline_s - time.monotonic()
        if left_s > 0:
            timer = loop.call_later(left_s, check)
        else:
            abort()

    timer = loop.call_later(deadline_s, check)
    return lambda: timer.cancel()
