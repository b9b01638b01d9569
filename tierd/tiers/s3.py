"""A bucket as a store, and the only place that knows boto3: the low-level client, never its transfer manager.

Uploads are our own multipart on the file's chunks: each part carries the checksum that was taken once, from the
buffer that is sent, and the whole is compared with what S3 computed (HEAD, no egress). Servers that ignore
checksums or conditional writes are still served right: nothing is believed that they did not say.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast
from urllib.parse import urlsplit

import boto3.session
import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.loaders import Loader

from tierd.errors import BadRequest, Corrupt, NotFound, TierdError, TierUnreachable
from tierd.format import checksum
from tierd.format.manifest import FileEntry
from tierd.tiers.pool import Buffers, Pool, each
from tierd.tiers.s3_errors import code_of, translate
from tierd.tiers.s3_upload import Upload
from tierd.tiers.store import Progress, Source, StoredObject, check_key, is_key

DELETE_KEYS_MAX = 1000
READ_BYTES = 1 << 20  # urllib3 copies each read: one that fits the processor's cache costs half
CONNECT_TIMEOUT_S_MAX = 10.0
# Some servers know no DeleteObjects, or want an MD5 with it that boto3 no longer sends.
_BATCH_UNKNOWN = {"NotImplemented", "MissingContentMD5", "InvalidRequest", "InvalidArgument", "MethodNotAllowed", "501"}

_MODELS = Loader()
"""Shared by all stores: every further client would read its own copy of S3's service model, 12 MB and 60 ms."""

OnRequest = Callable[[str, str], None]
Answer = dict[str, Any]


class S3Store:
    """Objects below `url` (s3://bucket/prefix). Credentials come from boto3's own chain.

    `on_request` is told (operation, outcome) of every request: an HTTP status, an S3 error code, or the name of
    what went wrong on the network.
    """

    def __init__(
        self,
        url: str,
        *,
        region: str = "",
        endpoint_url: str = "",
        name: str = "cold",
        parts_in_flight: int = 4,
        request_timeout_s: float = 60.0,
        max_upload_mib_s: float = 0.0,
        on_request: OnRequest | None = None,
    ) -> None:
        parts = urlsplit(url)
        self.url = url
        self.name = name
        self._bucket = parts.netloc
        self._prefix = parts.path.strip("/") + "/" if parts.path.strip("/") else ""
        self.parts_in_flight = parts_in_flight
        self._bandwidth = _Bandwidth(max_upload_mib_s * (1 << 20))
        self._on_request = on_request
        self.pool = Pool(parts_in_flight + 2, "tierd-s3")
        self.buffers: Buffers[bytearray] = Buffers(bytearray, usual_bytes=checksum.CHUNK_BYTES, count=parts_in_flight)
        self._client: Any = None
        self._connecting = threading.Lock()
        self._options: dict[str, Any] = {
            # A custom endpoint checks no region, but a signature needs one.
            "region_name": region or ("us-east-1" if endpoint_url else None),
            "endpoint_url": endpoint_url or None,
            "config": Config(
                # Checksums are ours, sent as plain headers: boto3's default adds trailers that other servers refuse.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                # The checksum header protects the bytes; hashing them once more for the signature costs 2 CPU-s per GB.
                s3={"payload_signing_enabled": False},
                # The reconciler owns retrying: the SDK's quota runs dry in just the outage it is for.
                retries={"total_max_attempts": 2, "mode": "standard"},
                connect_timeout=min(request_timeout_s, CONNECT_TIMEOUT_S_MAX),
                read_timeout=request_timeout_s,
                max_pool_connections=parts_in_flight + 2,
            ),
        }

    async def put(
        self,
        key: str,
        source: memoryview | Source,
        *,
        size_bytes: int,
        chunk_bytes: int,
        expect: FileEntry | None = None,
        progress: Progress | None = None,
    ) -> FileEntry:
        doing = self._doing("write", key)
        if isinstance(source, memoryview) and source.nbytes < size_bytes:
            raise BadRequest(f"{doing}: {source.nbytes} bytes given, {size_bytes} named")
        if expect is not None and await self.is_stored(key, expect, doing):
            if progress is not None:
                progress(size_bytes)
            return expect
        upload = Upload(
            store=self,
            key=key,
            source=source,
            size_bytes=size_bytes,
            chunk_bytes=chunk_bytes,
            expect=expect,
            progress=progress,
            doing=doing,
        )
        entry = await upload.run()
        await self._check_arrived(key, entry, doing)
        return entry

    async def put_bytes(self, key: str, content: bytes, *, if_absent: bool = False) -> bool:
        doing = self._doing("write", key)
        # Looked at first, because some servers ignore If-None-Match.
        if if_absent and await self._head(key, doing) is not None:
            return False
        integrity = {"ChecksumCRC64NVME": checksum.encode(checksum.crc64nvme(content))}
        condition = {"IfNoneMatch": "*"} if if_absent else {}
        try:
            await self.request("put_object", doing, Key=self.object_key(key), Body=content, **integrity, **condition)
        except TierUnreachable as error:
            # 412: taken. By another writer, or by our own first attempt whose answer was lost: the caller compares.
            if if_absent and code_of(error.__cause__) in ("PreconditionFailed", "412"):
                return False
            raise
        return True

    async def get_bytes(self, key: str, *, size_max: int) -> bytes:
        doing = self._doing("read", key)

        def fetch(answer: Answer) -> bytes:
            if answer["ContentLength"] > size_max:
                raise Corrupt(f"{doing}: {answer['ContentLength']} bytes, more than {size_max}")
            return cast(bytes, answer["Body"].read())

        return await self._get(doing, fetch, Key=self.object_key(key))

    async def get_many(self, keys: Sequence[str], *, size_max: int) -> Sequence[bytes | TierdError]:
        found: dict[str, bytes | TierdError] = {}

        async def get(key: str) -> None:
            try:
                found[key] = await self.get_bytes(key, size_max=size_max)
            except TierUnreachable:
                raise
            except TierdError as error:
                found[key] = error

        await each(self.parts_in_flight, keys, get)
        return [found[key] for key in keys]

    async def read(self, key: str, offset: int, buffer: memoryview) -> None:
        doing = self._doing(f"read {len(buffer)} bytes at {offset} of", key)
        if not buffer:
            if await self._head(key, doing) is None:
                raise NotFound(f"{doing}: no such object")
            return

        def fetch(answer: Answer) -> None:
            found = answer["ContentLength"]
            if found < len(buffer):
                raise Corrupt(f"{doing}: the object ends at byte {offset + found}")
            is_range = answer.get("ContentRange", "").startswith(f"bytes {offset}-")
            if found > len(buffer) or (offset > 0 and not is_range):
                raise TierUnreachable(f"{doing}: the server ignored the range", hint="tierd needs ranged GETs")
            done = 0
            while done < len(buffer):
                count = answer["Body"].readinto(buffer[done : done + READ_BYTES])
                if count == 0:
                    raise TierUnreachable(f"{doing}: the connection ended after {done} bytes")
                done += count

        await self._get(doing, fetch, Key=self.object_key(key), Range=f"bytes={offset}-{offset + len(buffer) - 1}")

    async def list(self, prefix: str = "") -> list[StoredObject]:
        doing = f"list {self.url} in {self.name}"
        found: list[StoredObject] = []
        after: dict[str, str] = {}
        while True:
            page = await self.request("list_objects_v2", doing, Prefix=self._prefix + prefix, **after)
            for one in page.get("Contents", ()):
                key = one["Key"].removeprefix(self._prefix)
                if is_key(key):
                    found.append(StoredObject(key, one["Size"]))
            if not page.get("IsTruncated"):
                return found
            after = {"ContinuationToken": page["NextContinuationToken"]}

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)
        if not keys:
            return
        # The first is the manifest: it must be gone before any shard goes, and a batch has no order.
        await self._delete_one(keys[0])
        for begin in range(1, len(keys), DELETE_KEYS_MAX):
            await self._delete_batch(keys[begin : begin + DELETE_KEYS_MAX])

    async def free_bytes(self) -> int | None:
        return None

    async def close(self) -> None:
        self.pool.close()
        self.buffers.close()
        if self._client is not None:
            self._client.close()

    async def request(self, operation: str, doing: str, **arguments: Any) -> Answer:
        """One request to the bucket, retried by boto3 at most once. Raises what the caller can act on."""
        return await self._get(doing, lambda answer: answer, operation=operation, **arguments)

    async def send(self, operation: str, doing: str, body: bytearray, **arguments: Any) -> Answer:
        """A request that carries a part, within the bandwidth that the tier may use."""
        await self._bandwidth.take(len(body))
        return await self.request(operation, doing, Body=_Body(body), **arguments)

    async def _get(
        self, doing: str, use: Callable[[Answer], Any], *, operation: str = "get_object", **arguments: Any
    ) -> Any:
        """A request, and what `use` makes of the answer and its body, both in one thread."""

        def call() -> tuple[str, Any]:
            answer: Answer = getattr(self._connect(), operation)(Bucket=self._bucket, **arguments)
            body = answer.get("Body")
            try:
                return str(answer["ResponseMetadata"]["HTTPStatusCode"]), use(answer)
            finally:
                if body is not None:
                    body.close()

        outcome = "cancelled"
        try:
            outcome, result = await self.pool.run(call)
        except (BotoCoreError, ClientError) as error:
            outcome = code_of(error)
            raise translate(error, doing) from error
        except TierdError as error:
            outcome = error.kind
            raise
        finally:
            if self._on_request is not None:
                self._on_request(operation, outcome)
        return result

    def _connect(self) -> Any:
        """The client, made at the first request: it takes 0.1 s, and it reads files that may be wrong."""
        with self._connecting:
            if self._client is None:
                session = botocore.session.Session()
                session.register_component("data_loader", _MODELS)
                try:
                    self._client = boto3.session.Session(botocore_session=session).client("s3", **self._options)
                except ValueError as error:
                    hint = "check region and endpoint_url of this tier"
                    raise TierUnreachable(f"connect to {self.url} in {self.name}: {error}", hint=hint) from error
            return self._client

    def object_key(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _doing(self, verb: str, key: str) -> str:
        return f"{verb} {check_key(key)} in {self.name} ({self.url})"

    async def _head(self, key: str, doing: str) -> Answer | None:
        try:
            return await self.request("head_object", doing, Key=self.object_key(key), ChecksumMode="ENABLED")
        except NotFound:
            return None

    async def is_stored(self, key: str, entry: FileEntry, doing: str) -> bool:
        """Whether the object is there and the server itself says that its bytes are these."""
        found = await self._head(key, doing)
        return (
            found is not None
            and found["ContentLength"] == entry.size_bytes
            and _whole_checksum(found) == entry.crc64nvme
        )

    async def _check_arrived(self, key: str, entry: FileEntry, doing: str) -> None:
        """After an upload. A server that keeps no checksums is believed: readers check every chunk anyway."""
        found = await self._head(key, doing)
        if found is None:
            raise TierUnreachable(f"{doing}: written, and gone again", hint="does someone else delete there?")
        if found["ContentLength"] != entry.size_bytes:
            raise Corrupt(f"{doing}: {found['ContentLength']} bytes arrived of {entry.size_bytes}")
        if _whole_checksum(found) not in (None, entry.crc64nvme):
            raise Corrupt(f"{doing}: crc64nvme {_whole_checksum(found)} arrived, {entry.crc64nvme} was sent")

    async def _delete_one(self, key: str) -> None:
        with suppress(NotFound):
            await self.request("delete_object", self._doing("delete", key), Key=self.object_key(key))

    async def _delete_batch(self, keys: Sequence[str]) -> None:
        doing = f"delete {keys[0]} and {len(keys) - 1} more in {self.name} ({self.url})"
        objects = [{"Key": self.object_key(key)} for key in keys]
        try:
            answer = await self.request("delete_objects", doing, Delete={"Objects": objects, "Quiet": True})
            refused = bool(answer.get("Errors"))
        except TierUnreachable as error:
            if code_of(error.__cause__) not in _BATCH_UNKNOWN:
                raise
            refused = True
        if refused:  # one by one, so that the error names its key
            await each(self.parts_in_flight, keys, self._delete_one)


def _whole_checksum(head: Answer) -> str | None:
    """The CRC64NVME of the whole object as the server has it; a checksum of checksums ends in "-<parts>"."""
    found = head.get("ChecksumCRC64NVME")
    is_whole = found is not None and "-" not in found and head.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT"
    return found if is_whole else None


class _Body:
    """A part as a stream. Handed the buffer itself, boto3 would copy it whole to sign the request.

    `read` gives all that is left, whatever is asked: 16 KiB at a time would be 4096 system calls a part.
    """

    def __init__(self, part: bytearray) -> None:
        self._view = memoryview(part)
        self._at = 0

    def read(self, size: int = -1) -> memoryview:
        rest = self._view[self._at :]
        self._at = len(self._view)
        return rest

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._view)}[whence]
        return self._at

    def tell(self) -> int:
        return self._at


class _Bandwidth:
    """A cap on bytes per second: each part waits until the ones before it have had their time. 0: no cap."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    async def take(self, size_bytes: int) -> None:
        if self._bytes_per_s <= 0:
            return
        now = asyncio.get_running_loop().time()
        begin = max(now, self._free_at)
        self._free_at = begin + size_bytes / self._bytes_per_s
        await asyncio.sleep(begin - now)
