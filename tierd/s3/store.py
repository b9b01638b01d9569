"""A bucket as a store: objects below a prefix, each request retried a few times here and for ever by the workers.

Uploads are our own multipart on the file's chunks: each part carries the checksum that was taken once, and the whole
is compared with what S3 computed, in its answer or in a HEAD (no egress). Servers that ignore checksums or conditional
writes are still served right: nothing is believed that they did not say.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

from tierd.backoff import backoff_s
from tierd.errors import BadRequest, Corrupt, NotFound, TierdError, TierUnreachable
from tierd.format import checksum
from tierd.format.manifest import FileEntry
from tierd.s3.body import PIECE_BYTES, Body
from tierd.s3.client import Answer, Line, S3Client
from tierd.s3.dialect import NOTHING, Dialect, Trial
from tierd.s3.errors import Trouble, code_of, retention, retry_after_s, server_time, trouble_of
from tierd.s3.upload import PART_BYTES_MIN, Upload, whole_checksum
from tierd.tiers.pool import Buffers, Pool, each
from tierd.tiers.rate_limit import Bandwidth, Window
from tierd.tiers.store import Progress, Source, StoredObject, check_key, is_key

DELETE_KEYS_MAX = 1000
READ_BYTES = 1 << 20  # urllib3 copies each read: one that fits the processor's cache costs half
RETRY_S_MAX = 20.0  # the longest pause before the next attempt, also where the server asks for more
ATTEMPTS = 3  # of one request, before it goes back to the worker that wanted it, which never gives up
_FINAL = {Trouble.AWAY, Trouble.MISCONFIGURED, Trouble.REFUSED}  # at once again would be no better
SLOWEST_BYTES_PER_S = 64 << 10  # a request whose bytes go slower than this has stopped
_ENCRYPTS = {"put_object", "create_multipart_upload"}
ABORTS_MAX = 100  # in one pass over the uploads that nobody finished
# Some servers know no DeleteObjects, or want an MD5 with it that boto3 no longer sends.
_BATCH_UNKNOWN = {"NotImplemented", "MissingContentMD5", "InvalidRequest", "InvalidArgument", "MethodNotAllowed", "501"}


@dataclass(frozen=True, slots=True)
class Begun:
    """A multipart upload under way. `age_s` by the server's own clock; 0 where it does not tell the time."""

    object_key: str
    upload_id: str
    age_s: float


OnRequest = Callable[[str, str], None]


class S3Store:
    """Objects below `url` (s3://bucket/prefix). Credentials come from boto3's own chain.

    `on_request` is told (operation, outcome) of every attempt: an HTTP status, an S3 error code, or the name of
    what went wrong on the network. `storage_class`: of what `put` writes, and `lasting_storage_class` of what lasts;
    empty: not sent. What `put_bytes` writes is read all the time, and never has one. `part_bytes_min`: what the
    server takes as a part at least. `retry_min_s`: the pause before the second attempt of a request; it doubles.
    """

    def __init__(
        self,
        url: str,
        *,
        region: str = "",
        endpoint_url: str = "",
        ca_bundle: str = "",
        sse: str = "",
        sse_kms_key_id: str = "",
        name: str = "cold",
        parts_in_flight: int = 4,
        request_timeout_s: float = 60.0,
        max_upload_mib_s: float = 0.0,
        storage_class: str = "",
        lasting_storage_class: str = "",
        part_bytes_min: int = PART_BYTES_MIN,
        retry_min_s: float = 0.2,
        on_request: OnRequest | None = None,
    ) -> None:
        parts = urlsplit(url)
        self.url = url
        self.name = name
        self.prefix = parts.path.strip("/") + "/" if parts.path.strip("/") else ""
        self.parts_in_flight = parts_in_flight
        # So that small files, each one part, fill the line too; the end of a large one hides behind parts of others.
        self.puts_at_once = parts_in_flight
        self.part_bytes_min = part_bytes_min
        self._request_timeout_s = request_timeout_s
        self._retry_min_s = retry_min_s
        self._storage_class = storage_class
        self._lasting_storage_class = lasting_storage_class or storage_class
        self._bandwidth = Bandwidth(max_upload_mib_s * (1 << 20))
        self.window = Window(parts_in_flight)
        self._on_request = on_request
        self.pool = Pool(parts_in_flight + 2, "tierd-s3")
        self.buffers = Buffers(usual_bytes=PIECE_BYTES, count=parts_in_flight)
        self.dialect = Dialect(f"{url} in {name}")
        encryption = {"ServerSideEncryption": sse, "SSEKMSKeyId": sse_kms_key_id}
        self._encryption = {name: value for name, value in encryption.items() if value}
        self._client = S3Client(
            f"{url} in {name}",
            parts.netloc,
            region=region,
            endpoint_url=endpoint_url,
            ca_bundle=ca_bundle,
            connections=parts_in_flight + 2,
            timeout_s=request_timeout_s,
        )

    async def put(
        self,
        key: str,
        source: memoryview | Source,
        *,
        size_bytes: int,
        chunk_bytes: int,
        expect: FileEntry | None = None,
        progress: Progress | None = None,
        is_lasting: bool = False,
        replace: bool = False,
    ) -> FileEntry:
        doing = self._doing("write", key)
        if isinstance(source, memoryview) and source.nbytes < size_bytes:
            raise BadRequest(f"{doing}: {source.nbytes} bytes given, {size_bytes} named")
        upload = Upload(
            store=self,
            key=key,
            source=source,
            size_bytes=size_bytes,
            chunk_bytes=chunk_bytes,
            progress=progress,
            storage_class=self._lasting_storage_class if is_lasting else self._storage_class,
            doing=doing,
        )
        if expect is None:
            expect = await upload.measure()
        elif (expect.size_bytes, expect.chunk_bytes) != (size_bytes, chunk_bytes):
            raise BadRequest(f"{doing}: {size_bytes} bytes in chunks of {chunk_bytes} are not what is expected")
        elif not replace and await upload.is_done(expect, await self.head(key, doing)):
            if progress is not None:
                progress(size_bytes)
            return expect
        if not await upload.run(expect):
            await self._check_arrived(key, expect, doing)
        return expect

    async def put_bytes(self, key: str, content: bytes, *, if_absent: bool = False) -> bool:
        doing = self._doing("write", key)
        # Looked at first, because some servers ignore If-None-Match.
        if if_absent and await self.head(key, doing) is not None:
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
            content = cast(bytes, answer["Body"].read())
            if whole_checksum(answer) not in (None, checksum.encode(checksum.crc64nvme(content))):
                raise TierUnreachable(f"{doing}: the bytes were altered on their way", hint="they are read again")
            return content

        return await self._get(doing, fetch, Key=self.object_key(key), ChecksumMode="ENABLED")

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
            if await self.head(key, doing) is None:
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

        wanted = f"bytes={offset}-{offset + len(buffer) - 1}"
        await self._get(doing, fetch, size_bytes=len(buffer), Key=self.object_key(key), Range=wanted)

    async def kept_checksum(self, key: str) -> str | None:
        doing = self._doing("look at", key)
        found = await self.head(key, doing)
        if found is None:
            raise NotFound(f"{doing}: no such object")
        return whole_checksum(found)

    async def list(self, prefix: str = "") -> list[StoredObject]:
        doing = f"list {self.url} in {self.name}"
        found: list[StoredObject] = []
        after: dict[str, str] = {}
        while True:
            page = await self.request("list_objects_v2", doing, Prefix=self.prefix + prefix, **after)
            for one in page.get("Contents", ()):
                key = one["Key"].removeprefix(self.prefix)
                if is_key(key):
                    found.append(StoredObject(key, one["Size"], one.get("ETag", "")))
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

    def limit_writes(self, mib_s: float) -> None:
        self._bandwidth.limit(mib_s * (1 << 20))

    async def abort_uploads(self, is_abandoned: Callable[[str], bool], *, grace_s: float) -> int:
        doing = f"look for abandoned uploads in {self.url} in {self.name}"
        aborted = 0
        for one in await self.uploads(self.prefix, doing):
            key = one.object_key.removeprefix(self.prefix)
            if aborted < ABORTS_MAX and one.age_s > grace_s and is_key(key) and is_abandoned(key):
                await self.abort_upload(key, one.upload_id, doing)
                aborted += 1
        return aborted

    async def uploads(self, prefix: str, doing: str) -> list[Begun]:
        """Multipart uploads under way for object keys with this prefix; none where the server does not list them."""
        found: list[Begun] = []
        after: dict[str, str] = {}
        while True:
            try:
                page = await self.request("list_multipart_uploads", doing, Prefix=prefix, **after)
            except (TierUnreachable, NotFound) as error:
                if trouble_of(error.__cause__) is Trouble.REFUSED:
                    return found
                raise
            found += [Begun(one["Key"], one["UploadId"], _age_s(page, one)) for one in page.get("Uploads", ())]
            if not page.get("IsTruncated"):
                return found
            after = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    async def abort_upload(self, key: str, upload_id: str, doing: str) -> None:
        try:
            await self.request("abort_multipart_upload", doing, Key=self.object_key(key), UploadId=upload_id)
        except (TierUnreachable, NotFound) as error:
            if code_of(error.__cause__) not in ("NoSuchUpload", "404"):  # done or aborted meanwhile
                raise

    async def close(self) -> None:
        self.pool.close()
        self.buffers.close()
        self._client.close()

    async def request(
        self, operation: str, doing: str, use: Callable[[Answer], Any] = lambda answer: answer, /, **arguments: Any
    ) -> Any:
        """One request to the bucket, and what `use` makes of its answer. Raises what the caller can act on."""
        return await self._get(doing, use, operation=operation, **arguments)

    @property
    def region(self) -> str:
        """The one in force: known after the first request where the config names none."""
        return self._client.region

    async def send(
        self, operation: str, doing: str, make_body: Callable[[], Body], size_bytes: int, **arguments: Any
    ) -> Answer:
        """A request that carries a part, within what the tier may use. Each attempt has a body of its own."""
        await self._bandwidth.take(size_bytes)
        return await self._get(
            doing,
            lambda answer: answer,
            operation=operation,
            size_bytes=size_bytes,
            make_body=make_body,
            **arguments,
        )

    async def _get(
        self,
        doing: str,
        use: Callable[[Answer], Any],
        *,
        operation: str = "get_object",
        size_bytes: int = 0,
        make_body: Callable[[], Body] | None = None,
        **arguments: Any,
    ) -> Any:
        """A request, and what `use` makes of the answer and its body, both in one thread; a few times over, if that
        may help. `size_bytes`: of what is sent or read."""
        if operation in _ENCRYPTS:
            arguments |= self._encryption
        attempt = 0
        trial = NOTHING  # what is left out this time, to see whether the server minds
        while True:
            attempt += 1
            try:
                body = None if make_body is None else make_body()
                result = await self._attempt(doing, use, operation, size_bytes, body, arguments, trial)
            except (TierUnreachable, NotFound) as error:
                trial = self.dialect.suspect(error.__cause__, arguments, trial)
                if trial:
                    continue
                trouble = trouble_of(error.__cause__)
                if trouble is Trouble.THROTTLED:
                    self.window.slow_down()
                if trouble is Trouble.CREDENTIALS:
                    # Read afresh, once: a key that is wrong stays wrong, and the workers come back anyway.
                    attempt = max(attempt, ATTEMPTS - 1)
                if trouble in _FINAL or attempt >= ATTEMPTS:
                    raise
                asked_s = min(RETRY_S_MAX, retry_after_s(error.__cause__))
                pause_s = max(asked_s, backoff_s(attempt, min_s=self._retry_min_s, max_s=RETRY_S_MAX))
            else:
                self.dialect.learn(trial)
                if make_body is not None:
                    self.window.went_well()
                return result
            await asyncio.sleep(pause_s)

    async def _attempt(
        self,
        doing: str,
        use: Callable[[Answer], Any],
        operation: str,
        size_bytes: int,
        body: Body | None,
        arguments: Answer,
        trial: Trial,
    ) -> Any:
        line = Line(signs_payload=self.dialect.signs_payload(trial))
        arguments = self.dialect.spoken(arguments, trial)

        def cut() -> None:
            line.cut()
            if body is not None:
                body.cut()

        if body is not None:
            body.keeps_size = line.signs_payload
            arguments = {**arguments, "Body": body}
        # Twice the timeout of a socket, which is to speak first where nothing comes at all.
        stop_watching = self._watch(line, cut, 2 * self._request_timeout_s + size_bytes / SLOWEST_BYTES_PER_S)
        outcome = "cancelled"
        try:
            outcome, result = await self.pool.run_until(cut, self._client.call, operation, doing, line, use, arguments)
        except Exception as error:
            if body is not None and body.damage is not None and not line.is_cut:
                outcome = "damaged"
                raise body.damage from None
            if not isinstance(error, TierdError):
                raise
            outcome = "deadline" if line.is_cut else code_of(error.__cause__ or error)
            if trouble_of(error.__cause__) is Trouble.CREDENTIALS:
                self._client.renew(line)
            raise
        finally:
            stop_watching()
            if self._on_request is not None:
                self._on_request(operation, outcome)
        return result

    def _watch(self, line: Line, cut: Callable[[], None], deadline_s: float) -> Callable[[], None]:
        """Cuts the line when its request has not ended `deadline_s` after it got a thread."""
        loop = asyncio.get_running_loop()

        def look() -> None:
            nonlocal timer
            left_s = deadline_s if line.began_s is None else line.began_s + deadline_s - time.monotonic()
            if left_s > 0:
                timer = loop.call_later(left_s, look)
            else:
                cut()

        timer = loop.call_later(deadline_s, look)
        return lambda: timer.cancel()

    def object_key(self, key: str) -> str:
        return self.prefix + check_key(key)

    def _doing(self, verb: str, key: str) -> str:
        return f"{verb} {check_key(key)} in {self.name} ({self.url})"

    async def head(self, key: str, doing: str) -> Answer | None:
        try:
            return await self.request("head_object", doing, Key=self.object_key(key), ChecksumMode="ENABLED")
        except NotFound:
            return None

    async def _check_arrived(self, key: str, entry: FileEntry, doing: str) -> None:
        """After an upload whose answer proves nothing. A server that keeps no checksums is believed: readers check
        every chunk anyway."""
        found = await self.head(key, doing)
        if found is None:
            raise TierUnreachable(f"{doing}: written, and gone again", hint="does someone else delete there?")
        if found["ContentLength"] != entry.size_bytes:
            raise Corrupt(f"{doing}: {found['ContentLength']} bytes arrived of {entry.size_bytes}")
        if whole_checksum(found) not in (None, entry.crc64nvme):
            raise Corrupt(f"{doing}: crc64nvme {whole_checksum(found)} arrived, {entry.crc64nvme} was sent")

    async def _delete_one(self, key: str) -> None:
        doing = self._doing("delete", key)
        try:
            await self.request("delete_object", doing, Key=self.object_key(key))
        except NotFound:
            return
        except TierUnreachable as error:
            if code_of(error.__cause__) == "AccessDenied":
                with suppress(TierUnreachable, KeyError, TypeError, ValueError):
                    retained = retention(await self.head(key, doing) or {}, doing)
                    if retained is not None:
                        raise retained from error
            raise

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


def _age_s(page: Answer, upload: Answer) -> float:
    try:
        return (server_time(page) - upload["Initiated"]).total_seconds()
    except (KeyError, ValueError, TypeError):
        return 0.0
