"""One file on its way into a bucket: a single PUT where it fits one part, else multipart on its chunks.

Each part is filled, summed once and sent from one buffer; parts in flight are bounded over all uploads of the
store. Nothing is visible before the last request, and that one is only sent when every chunk is as expected.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tierd.errors import BadRequest, TierdError, TierUnreachable
from tierd.format import checksum
from tierd.format.manifest import FileEntry
from tierd.tiers.chunks import ChunkSums
from tierd.tiers.pool import each
from tierd.tiers.store import Progress, Source

if TYPE_CHECKING:
    from tierd.tiers.s3 import S3Store

# https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
PART_BYTES_MIN = 5 << 20  # but for the last
PARTS_MAX = 10_000
PART_BYTES_MAX = 512 << 20  # S3 would take 5 GiB, but a part is held in memory


def part_bytes(size_bytes: int, chunk_bytes: int) -> int:
    """A chunk, where S3 takes it as a part; else 64 MiB, or what makes 10,000 parts. Raises BadRequest past that."""
    least = max(PART_BYTES_MIN, -(-size_bytes // PARTS_MAX))
    if least <= chunk_bytes <= checksum.CHUNK_BYTES:
        return chunk_bytes
    if least > PART_BYTES_MAX:
        raise BadRequest(f"upload {size_bytes} bytes: more than {PARTS_MAX} parts of {PART_BYTES_MAX} bytes")
    return max(checksum.CHUNK_BYTES, least)


@dataclass(frozen=True, kw_only=True)
class Upload:
    store: S3Store
    key: str
    source: memoryview | Source
    size_bytes: int
    chunk_bytes: int
    expect: FileEntry | None
    progress: Progress | None
    doing: str

    async def run(self) -> FileEntry:
        """Sends it. Raises Corrupt, and leaves nothing, when a chunk is not what `expect` says."""
        part = part_bytes(self.size_bytes, self.chunk_bytes)
        if self.size_bytes <= part:
            return await self._send_whole()
        await self._abort_leftovers()
        created = await self._request(
            "create_multipart_upload", ChecksumAlgorithm="CRC64NVME", ChecksumType="FULL_OBJECT"
        )
        upload_id: str = created["UploadId"]
        try:
            return await self._send_parts(upload_id, part)
        except BaseException:
            with suppress(TierdError):
                await self._request("abort_multipart_upload", UploadId=upload_id)
            raise

    @cached_property
    def _sums(self) -> ChunkSums:
        return ChunkSums(self.size_bytes, self.chunk_bytes)

    def _entry(self) -> FileEntry:
        return self._sums.entry(self.key.rpartition("/")[2], self.expect, self.doing)

    async def _send_whole(self) -> FileEntry:
        async with self.store.buffers.lend(self.size_bytes) as buffer:
            await self._fill(0, buffer)
            entry = self._entry()
            await self._send("put_object", buffer, ChecksumCRC64NVME=entry.crc64nvme)
        return entry

    async def _send_parts(self, upload_id: str, part: int) -> FileEntry:
        parts: dict[int, dict[str, Any]] = {}

        async def send(numbered: tuple[int, tuple[int, int]]) -> None:
            number, (offset, length) = numbered
            async with self.store.buffers.lend(length) as buffer:
                sum_of_part = checksum.encode(await self._fill(offset, buffer))
                answer = await self._send(
                    "upload_part", buffer, UploadId=upload_id, PartNumber=number, ChecksumCRC64NVME=sum_of_part
                )
            parts[number] = {"PartNumber": number, "ETag": answer["ETag"], "ChecksumCRC64NVME": sum_of_part}

        ranges = enumerate(checksum.chunk_ranges(self.size_bytes, part), start=1)
        await each(self.store.parts_in_flight, ranges, send)
        entry = self._entry()
        try:
            await self._request(
                "complete_multipart_upload",
                UploadId=upload_id,
                MultipartUpload={"Parts": [parts[number] for number in sorted(parts)]},
                ChecksumCRC64NVME=entry.crc64nvme,
                ChecksumType="FULL_OBJECT",
            )
        except TierUnreachable:
            # Done all the same, when only the answer was lost: a repeated request then finds no such upload.
            if not await self.store.is_stored(self.key, entry, self.doing):
                raise
        return entry

    async def _fill(self, offset: int, buffer: bytearray) -> int:
        """The part's bytes, and their checksum."""
        view = memoryview(buffer)
        if isinstance(self.source, memoryview):
            await self.store.pool.run(_copy, view, self.source[offset : offset + len(view)])
        elif view:
            await self.source.fill(offset, view)
        return await self.store.pool.run(self._sums.add, offset, view)

    async def _send(self, operation: str, buffer: bytearray, **arguments: Any) -> dict[str, Any]:
        key = self.store.object_key(self.key)
        answer = await self.store.send(operation, self.doing, buffer, Key=key, **arguments)
        if self.progress is not None:
            self.progress(len(buffer))
        return answer

    async def _request(self, operation: str, **arguments: Any) -> dict[str, Any]:
        return await self.store.request(operation, self.doing, Key=self.store.object_key(self.key), **arguments)

    async def _abort_leftovers(self) -> None:
        """What a killed daemon began for this very key is billed until it is aborted."""
        key = self.store.object_key(self.key)
        with suppress(TierdError):  # not every server can list them
            found = await self.store.request("list_multipart_uploads", self.doing, Prefix=key)
            for one in found.get("Uploads", ()):
                if one["Key"] == key:
                    await self._request("abort_multipart_upload", UploadId=one["UploadId"])


def _copy(target: memoryview, source: memoryview) -> None:
    target[:] = source
