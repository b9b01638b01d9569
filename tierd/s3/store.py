"""A bucket as a store: objects below the prefix of a tier's URL.

Large objects are multipart uploads of the file's chunks: each part carries its checksum, and S3's checksum of the whole
is compared, in the answer or by a HEAD (no egress). On a server that ignores checksums or conditional writes, tierd
checks by itself: it relies only on what the server's answers say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

from tierd.config.sections import ColdConfig, LimitsConfig
from tierd.errors import BadRequest, Corrupt, NotFound, TierdError, TierUnreachable
from tierd.failpoints import failpoint
from tierd.format import checksum
from tierd.format.manifest import FileEntry
from tierd.s3.client import Answer
from tierd.s3.errors import BATCH_REFUSED, CONDITION_FAILED, OF_ONE_OBJECT, code_of, retention
from tierd.s3.requests import RETRY_MIN_S, OnRequest, S3Requests
from tierd.s3.upload import PART_BYTES_MIN, Upload, abort_upload, part_bytes, unfinished_uploads, whole_checksum
from tierd.tiers.chunks import measure
from tierd.tiers.pool import for_each
from tierd.tiers.store import Progress, Source, StoredObject, check_key, conflict, is_key

DELETE_KEYS_MAX = 1000
ABORTS_MAX = 100  # unfinished uploads aborted in one call


class S3Store:
    """The bucket of a [[cold]] section. Credentials come from boto3's own chain.

    The storage classes apply to `put` only: `put_bytes` writes small objects that are read often. `part_bytes_min`: the
    smallest part that the server accepts. `on_request` and `retry_min_s` as of S3Requests.
    """

    is_local = False

    def __init__(
        self,
        cold: ColdConfig,
        limits: LimitsConfig,
        *,
        on_request: OnRequest | None = None,
        part_bytes_min: int = PART_BYTES_MIN,
        retry_min_s: float = RETRY_MIN_S,
    ) -> None:
        self.requests = S3Requests(cold, limits, on_request=on_request, retry_min_s=retry_min_s)
        self.url = cold.url
        # As many files at once as parts, so that small files use the bandwidth too.
        self.puts_at_once = limits.parts_in_flight
        self._part_bytes_min = part_bytes_min
        self._storage_class = cold.storage_class
        self._lasting_storage_class = cold.milestone_storage_class or cold.storage_class

    @property
    def answered_s(self) -> float:
        return self.requests.pool.answered_s

    async def put(
        self,
        key: str,
        source: Source,
        *,
        size_bytes: int,
        chunk_bytes: int,
        expect: FileEntry | None = None,
        progress: Progress | None = None,
        is_lasting: bool = False,
        replace: bool = False,
    ) -> FileEntry:
        action, object_key = self.requests.addressed("write", key)
        report: Progress = progress or (lambda length: None)
        storage_class = self._lasting_storage_class if is_lasting else self._storage_class
        entry = expect or await measure(source, key.rpartition("/")[2], size_bytes, chunk_bytes)
        if (entry.size_bytes, entry.chunk_bytes) != (size_bytes, chunk_bytes):
            raise BadRequest(f"{action}: {size_bytes} bytes in chunks of {chunk_bytes} are not what is expected")
        sent_bytes = 0

        def count(length: int) -> None:
            nonlocal sent_bytes
            sent_bytes += length
            report(length)

        upload = Upload(
            requests=self.requests,
            object_key=object_key,
            source=source,
            entry=entry,
            part_bytes=part_bytes(size_bytes, chunk_bytes, self._part_bytes_min),
            progress=count,
            options={"StorageClass": storage_class} if storage_class else {},
            action=action,
            if_absent=not replace,
        )
        # Looked for first, because some servers ignore If-None-Match.
        existing = await self.requests.head(object_key, action) if expect and not replace else None
        if existing is None:
            try:
                if not await upload.run():
                    await self._check_arrived(object_key, entry, action)
                return entry
            except TierUnreachable as error:
                # 412: it exists, by another writer or by our first attempt whose answer was lost.
                is_there = code_of(error.__cause__) in CONDITION_FAILED
                existing = await self.requests.head(object_key, action) if is_there else None
                if existing is None:
                    raise
        if not await self._is_same(key, upload, existing):
            raise conflict(f"{action}: there is an object with other bytes")
        report(size_bytes - sent_bytes)
        return entry

    async def put_bytes(self, key: str, content: bytes, *, if_absent: bool = False) -> bool:
        action, object_key = self.requests.addressed("write", key)
        arguments: dict[str, Any] = {"ChecksumCRC64NVME": checksum.encode(checksum.crc64nvme(content))}
        if if_absent:
            if await self.requests.head(object_key, action) is not None:
                return False  # checked first, because some servers ignore If-None-Match
            arguments["IfNoneMatch"] = "*"
        failpoint("s3.put_bytes")
        try:
            await self.requests.request("put_object", action, Key=object_key, Body=content, **arguments)
            failpoint("s3.placed")
        except TierUnreachable as error:
            # 412: it exists, by another writer or by our first attempt whose answer was lost. The caller compares. It
            # may also have been deleted since.
            if not (if_absent and code_of(error.__cause__) in CONDITION_FAILED):
                raise
            if await self.requests.head(object_key, action) is None:
                raise
            return False
        return True

    async def get_bytes(self, key: str, *, size_max: int) -> bytes:
        action, object_key = self.requests.addressed("read", key)

        def fetch(answer: Answer) -> bytes:
            if answer["ContentLength"] > size_max:
                raise Corrupt(f"{action}: {answer['ContentLength']} bytes, more than {size_max}")
            content = cast(bytes, answer["Body"].read())
            if whole_checksum(answer) not in (None, checksum.encode(checksum.crc64nvme(content))):
                raise TierUnreachable(f"{action}: the bytes were altered on their way", hint="they are read again")
            return content

        try:
            return await self.requests.request("get_object", action, use=fetch, Key=object_key, ChecksumMode="ENABLED")
        except TierUnreachable as error:
            if await self.requests.is_absent(object_key, action, error):
                raise NotFound(f"{action}: no such object") from error
            raise

    async def get_many(self, keys: Sequence[str], *, size_max: int) -> Sequence[bytes | TierdError]:
        contents: dict[str, bytes | TierdError] = {}

        async def get(key: str) -> None:
            try:
                contents[key] = await self.get_bytes(key, size_max=size_max)
            except TierdError as error:
                if isinstance(error, TierUnreachable) and code_of(error.__cause__) not in OF_ONE_OBJECT:
                    raise
                contents[key] = error

        await for_each(self.requests.parts_in_flight, keys, get)
        return [contents[key] for key in keys]

    async def read(self, key: str, offset: int, buffer: memoryview) -> None:
        action, object_key = self.requests.addressed(f"read {len(buffer)} bytes at {offset} of", key)
        if not buffer:  # no range expresses this, but a missing object must be NotFound
            await self._existing(object_key, action)
            return
        await self.requests.read_range(object_key, action, offset, buffer)

    def source(self, key: str) -> Source:
        return Source(partial(self.read, key))

    async def make_durable(self, keys: Sequence[str]) -> None:
        """Nothing is needed: a bucket lists only what is durable."""

    async def stored_checksum(self, key: str) -> str | None:
        action, object_key = self.requests.addressed("read the checksum of", key)
        return whole_checksum(await self._existing(object_key, action))

    async def list(self, prefix: str = "", *, until: str = "") -> list[StoredObject]:
        objects: list[StoredObject] = []
        async for page in self.requests.list_pages(f"list {self.url} in {self.requests.name}", prefix):
            objects += [listed for listed in page if is_key(listed.key)]
            keys = [listed.key for listed in page]
            # Directory buckets of S3 list in no order.
            if until and keys and keys[-1] > until and keys == sorted(keys):
                break
        return objects

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)
        if not keys:
            return
        await self._delete_one(keys[0])  # alone, because a batch has no order
        for begin in range(1, len(keys), DELETE_KEYS_MAX):
            await self._delete_batch(keys[begin : begin + DELETE_KEYS_MAX])

    async def exists(self) -> bool:
        return True

    async def free_bytes(self) -> int | None:
        return None

    async def disk(self) -> int | None:
        return None

    def limit_writes(self, mib_s: float) -> None:
        self.requests.bandwidth.limit(mib_s)

    async def remove_unfinished(self, is_abandoned: Callable[[str], bool], *, grace_s: float) -> int:
        action = f"look for abandoned uploads in {self.url} in {self.requests.name}"
        aborted = 0
        for upload in await unfinished_uploads(self.requests, self.requests.prefix, action):
            key = upload.object_key.removeprefix(self.requests.prefix)
            if aborted < ABORTS_MAX and upload.age_s > grace_s and is_key(key) and is_abandoned(key):
                await abort_upload(self.requests, upload.object_key, upload.upload_id, action)
                aborted += 1
        return aborted

    async def unfinished(self) -> list[str]:
        action = f"look for unfinished uploads in {self.url} in {self.requests.name}"
        uploads = await unfinished_uploads(self.requests, self.requests.prefix, action)
        keys = (upload.object_key.removeprefix(self.requests.prefix) for upload in uploads)
        return [key for key in keys if is_key(key)]

    async def close(self) -> None:
        await self.requests.close()

    async def _existing(self, object_key: str, action: str) -> Answer:
        head = await self.requests.head(object_key, action)
        if head is None:
            raise NotFound(f"{action}: no such object")
        return head

    async def _is_same(self, key: str, upload: Upload, head: Answer) -> bool:
        """Whether the object that is there has the bytes of the upload."""
        entry = upload.entry
        if await upload.is_done(head):
            return True
        if whole_checksum(head) is not None or head["ContentLength"] != entry.size_bytes:
            return False
        # No checksum, and the server may encrypt, so that no ETag is an MD5: only the bytes tell.
        size, chunk, algorithm = entry.size_bytes, entry.chunk_bytes, entry.algorithm
        return await measure(self.source(key), entry.name, size, chunk, algorithm=algorithm) == entry

    async def _check_arrived(self, object_key: str, entry: FileEntry, action: str) -> None:
        """After an upload whose answer proves nothing. Without a checksum of the server, the size must do: readers
        check every chunk."""
        head = await self.requests.head(object_key, action)
        if head is None:
            raise TierUnreachable(f"{action}: it was deleted after the upload", hint="find out what else deletes there")
        if head["ContentLength"] != entry.size_bytes:
            raise Corrupt(f"{action}: {head['ContentLength']} bytes arrived of {entry.size_bytes}")
        if whole_checksum(head) not in (None, entry.crc64nvme):
            raise Corrupt(f"{action}: crc64nvme {whole_checksum(head)} arrived, {entry.crc64nvme} was sent")

    async def _delete_one(self, key: str) -> None:
        action, object_key = self.requests.addressed("delete", key)
        failpoint("s3.delete")
        try:
            await self.requests.request("delete_object", action, Key=object_key)
        except NotFound:
            return
        except TierUnreachable as error:
            if code_of(error.__cause__) == "AccessDenied":  # also the answer for an object under Object Lock
                with suppress(TierUnreachable, KeyError, TypeError, ValueError):
                    retained = retention(await self.requests.head(object_key, action) or {}, action)
                    if retained is not None:
                        raise retained from error
            raise

    async def _delete_batch(self, keys: Sequence[str]) -> None:
        action = f"delete {keys[0]} and {len(keys) - 1} more in {self.requests.name} ({self.url})"
        failpoint("s3.batch")
        objects = [{"Key": self.requests.prefix + key} for key in keys]
        try:
            batch = {"Objects": objects, "Quiet": True}
            is_refused = bool((await self.requests.request("delete_objects", action, Delete=batch)).get("Errors"))
        except TierUnreachable as error:
            if code_of(error.__cause__) not in BATCH_REFUSED:
                raise
            is_refused = True
        if is_refused:  # one by one, so that the error names its key
            await for_each(self.requests.parts_in_flight, keys, self._delete_one)
