"""One file on its way into a bucket: a single PUT where it fits one part, else multipart on its chunks.

Parts are whole chunks, so their checksums are known beforehand. An upload that was interrupted goes on from what the
server says it has; a part counts only when its bytes are proven to be ours, by checksum or by MD5. Nothing is visible
before the last request, and that one is only sent when every part is there.
"""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tierd.errors import BadRequest, NotFound, TierdError, TierUnreachable
from tierd.format import checksum
from tierd.format.manifest import FileEntry
from tierd.s3.body import PIECE_BYTES, Body
from tierd.s3.errors import Trouble, trouble_of
from tierd.tiers.chunks import ChunkSums
from tierd.tiers.pool import each
from tierd.tiers.store import Progress, Source

if TYPE_CHECKING:
    from tierd.s3.store import S3Store

# https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
PART_BYTES_MIN = 5 << 20  # but for the last
PART_BYTES_MAX = 5 << 30
PARTS_MAX = 10_000

Answer = dict[str, Any]


def part_bytes(size_bytes: int, chunk_bytes: int, least_bytes: int = PART_BYTES_MIN) -> int:
    """A chunk, where S3 takes it as a part; else as many whole chunks as make 64 MiB, or 10,000 parts of the file.

    Raises BadRequest where S3 has no place for that.
    """
    least = max(least_bytes, -(-size_bytes // PARTS_MAX))
    if chunk_bytes >= least:
        found = chunk_bytes
    else:
        usual = checksum.CHUNK_BYTES if least_bytes == PART_BYTES_MIN else least
        found = -(-max(least, usual) // chunk_bytes) * chunk_bytes
    if found > PART_BYTES_MAX:
        raise BadRequest(f"upload {size_bytes} bytes in chunks of {chunk_bytes}: S3 takes no part of {found} bytes")
    return found


@dataclass(frozen=True, kw_only=True)
class Upload:
    store: S3Store
    key: str
    source: memoryview | Source
    size_bytes: int
    chunk_bytes: int
    progress: Progress | None
    storage_class: str
    doing: str

    async def measure(self) -> FileEntry:
        """The file's entry, where nobody has taken it before: one reading more."""
        sums = ChunkSums(self.size_bytes, self.chunk_bytes)

        async def add(piece: tuple[int, int]) -> None:
            async with self.store.buffers.lend(PIECE_BYTES) as buffer:
                view = await self._read(*piece, buffer)
                await self.store.pool.run(sums.add, piece[0], view)

        await each(self.store.parts_in_flight, checksum.chunk_ranges(self.size_bytes, PIECE_BYTES), add)
        return sums.entry(self.key.rpartition("/")[2], None, self.doing)

    async def run(self, entry: FileEntry) -> bool:
        """Sends it. Returns whether the last answer proves that all of it arrived. Raises Corrupt, and nothing becomes
        visible, when a chunk is not what `entry` says."""
        if self.size_bytes <= self._part_bytes:
            about = {"ChecksumCRC64NVME": entry.crc64nvme, **self._class}
            return _proves(await self._send("put_object", entry, 0, self.size_bytes, **about), entry)
        upload_id, finished = await self._resume(entry)
        try:
            return await self._send_parts(entry, upload_id, finished)
        except TierdError as error:
            # What may pass leaves the upload there, for the next attempt to go on with. What the source or the
            # server says about the parts themselves would only be said again.
            if not isinstance(error, TierUnreachable) or trouble_of(error.__cause__) is Trouble.REFUSED:
                with suppress(TierdError):
                    await self.store.abort_upload(self.key, upload_id, self.doing)
            raise

    async def is_done(self, entry: FileEntry, head: Answer | None) -> bool:
        """Whether the object is there already, with these very bytes: the server's checksum says so, or, where it
        keeps none, the MD5 of what we would send."""
        if head is None or head["ContentLength"] != entry.size_bytes:
            return False
        kept = whole_checksum(head)
        if kept is not None:
            return kept == entry.crc64nvme
        if _is_md5(head):
            return head["ETag"].strip('"') == (await self._md5(entry, 0, self.size_bytes)).hex()
        if not re.fullmatch(rf'"?[0-9a-f]{{32}}-{len(self._ranges())}"?', head["ETag"]):
            return False
        md5s = [await self._md5(entry, offset, length) for offset, length in self._ranges()]
        return head["ETag"].strip('"') == _etag_of_parts(md5s)

    @property
    def _class(self) -> dict[str, str]:
        return {"StorageClass": self.storage_class} if self.storage_class else {}

    @property
    def _part_bytes(self) -> int:
        return part_bytes(self.size_bytes, self.chunk_bytes, self.store.part_bytes_min)

    def _ranges(self) -> list[tuple[int, int]]:
        return list(checksum.chunk_ranges(self.size_bytes, self._part_bytes))

    # ── sending ──

    async def _send_parts(self, entry: FileEntry, upload_id: str, finished: dict[int, str]) -> bool:
        """As `run`. `finished`: ETags by part number, of parts that are there. Grows."""
        sums: dict[int, str] = {}

        async def send(numbered: tuple[int, tuple[int, int]]) -> None:
            number, (offset, length) = numbered
            sums[number] = self._sum(entry, offset, length)
            if number in finished:
                self._tell(length)
                return
            about = {"UploadId": upload_id, "PartNumber": number, "ChecksumCRC64NVME": sums[number]}
            answer = await self._send("upload_part", entry, offset, length, **about)
            finished[number] = answer["ETag"]

        await each(self.store.parts_in_flight, enumerate(self._ranges(), start=1), send)
        parts = [
            {"PartNumber": number, "ETag": finished[number], "ChecksumCRC64NVME": sums[number]}
            for number in sorted(finished)
        ]
        try:
            answer = await self._request(
                "complete_multipart_upload",
                UploadId=upload_id,
                MultipartUpload={"Parts": parts},
                ChecksumCRC64NVME=entry.crc64nvme,
                ChecksumType="FULL_OBJECT",
            )
            return _proves(answer, entry)
        except TierUnreachable:
            # Done all the same, when only the answer was lost: a repeated request then finds no such upload.
            if not self._is_made_of(entry, parts, await self.store.head(self.key, self.doing)):
                raise
            return False

    def _is_made_of(self, entry: FileEntry, parts: list[dict[str, Any]], head: Answer | None) -> bool:
        if head is None or head["ContentLength"] != entry.size_bytes:
            return False
        kept = whole_checksum(head)
        if kept is not None:
            return kept == entry.crc64nvme
        if not all(_is_md5(part) for part in parts):
            return False
        return head["ETag"].strip('"') == _etag_of_parts([bytes.fromhex(part["ETag"].strip('"')) for part in parts])

    async def _send(self, operation: str, entry: FileEntry, offset: int, length: int, **about: Any) -> Answer:
        async with self.store.window.part(), self.store.buffers.lend(PIECE_BYTES) as buffer:
            make_body = partial(Body, self.source, entry, offset, length, buffer=buffer, doing=self.doing)
            key = self.store.object_key(self.key)
            answer = await self.store.send(operation, self.doing, make_body, length, Key=key, **about)
        self._tell(length)
        return answer

    async def _request(self, operation: str, **arguments: Any) -> Answer:
        return await self.store.request(operation, self.doing, Key=self.store.object_key(self.key), **arguments)

    def _tell(self, length: int) -> None:
        if self.progress is not None:
            self.progress(length)

    def _sum(self, entry: FileEntry, offset: int, length: int) -> str:
        """The checksum of whole chunks, combined from theirs."""
        chunks = list(checksum.chunk_ranges(length, self.chunk_bytes))
        first = offset // self.chunk_bytes
        sums = [checksum.decode(one) for one in entry.chunks[first : first + len(chunks)]]
        return checksum.encode(checksum.combine(zip(sums, (size for _, size in chunks), strict=True)))

    # ── going on with an upload that was interrupted ──

    async def _resume(self, entry: FileEntry) -> tuple[str, dict[int, str]]:
        """(id, ETags of the parts that are there and proven) of the newest upload for this key, or of a new one."""
        key = self.store.object_key(self.key)
        begun = [one for one in await self.store.uploads(key, self.doing) if one.object_key == key]
        begun.sort(key=lambda one: one.age_s)
        chosen: tuple[str, dict[int, str]] | None = None
        for one in begun:
            listed = await self._list_parts(one.upload_id) if chosen is None else None
            if listed is None:
                await self.store.abort_upload(self.key, one.upload_id, self.doing)
            else:
                chosen = (one.upload_id, await self._proven(entry, listed))
        if chosen is not None:
            return chosen
        created = await self._request(
            "create_multipart_upload", ChecksumAlgorithm="CRC64NVME", ChecksumType="FULL_OBJECT", **self._class
        )
        return created["UploadId"], {}

    async def _list_parts(self, upload_id: str) -> dict[int, Answer] | None:
        """By number; None when this upload is gone, or of a kind that we cannot go on with."""
        found: dict[int, Answer] = {}
        after: dict[str, Any] = {}
        while True:
            try:
                page = await self._request("list_parts", UploadId=upload_id, **after)
            except (TierUnreachable, NotFound) as error:
                if trouble_of(error.__cause__) is Trouble.REFUSED:
                    return None
                raise
            if page.get("ChecksumAlgorithm") not in (None, "CRC64NVME"):
                return None
            found |= {one["PartNumber"]: one for one in page.get("Parts", ())}
            if not page.get("IsTruncated"):
                return found
            after = {"PartNumberMarker": page["NextPartNumberMarker"]}

    async def _proven(self, entry: FileEntry, listed: dict[int, Answer]) -> dict[int, str]:
        """ETags of the parts whose bytes are ours. By the server's checksum, for nothing; where it keeps none, by the
        MD5 that its ETag is: that is one reading more, and still far less than to send it again."""
        proven: dict[int, str] = {}
        for number, (offset, length) in enumerate(self._ranges(), start=1):
            part = listed.get(number)
            if part is None or part["Size"] != length:
                continue
            if "ChecksumCRC64NVME" in part:
                is_ours = part["ChecksumCRC64NVME"] == self._sum(entry, offset, length)
            elif _is_md5(part):
                is_ours = part["ETag"].strip('"') == (await self._md5(entry, offset, length)).hex()
                if not is_ours:
                    break  # encrypted by the server, perhaps: its ETags are no MD5s, and more reading is no use
            else:
                break
            if is_ours:
                proven[number] = part["ETag"]
        return proven

    async def _md5(self, entry: FileEntry, offset: int, length: int) -> bytes:
        """Of bytes that the manifest knows. Raises Corrupt where the source has others."""
        digest = hashlib.md5(usedforsecurity=False)
        sums = ChunkSums(length, self.chunk_bytes)
        async with self.store.buffers.lend(PIECE_BYTES) as buffer:
            for at, size in checksum.chunk_ranges(length, PIECE_BYTES):
                piece = await self._read(offset + at, size, buffer)
                await self.store.pool.run(digest.update, piece)
                await self.store.pool.run(sums.add, at, piece)
        sums.check(entry, first=offset // self.chunk_bytes, doing=self.doing)
        return digest.digest()

    async def _read(self, offset: int, length: int, buffer: memoryview) -> memoryview:
        if isinstance(self.source, memoryview):
            return self.source[offset : offset + length]
        await self.source.fill(offset, buffer[:length])
        return buffer[:length]


def _proves(answer: Answer, entry: FileEntry) -> bool:
    """Only where the server says of what kind its checksum is: some repeat what they were sent."""
    return answer.get("ChecksumType") == "FULL_OBJECT" and whole_checksum(answer) == entry.crc64nvme


def _is_md5(found: Answer) -> bool:
    if found.get("ServerSideEncryption", "").startswith("aws:kms"):
        return False  # of what was encrypted, with a key that is not ours
    return re.fullmatch(r'"?[0-9a-f]{32}"?', found.get("ETag", "")) is not None


def _etag_of_parts(md5s: list[bytes]) -> str:
    """S3's ETag of a multipart object."""
    return f"{hashlib.md5(b''.join(md5s), usedforsecurity=False).hexdigest()}-{len(md5s)}"


def whole_checksum(head: Answer) -> str | None:
    """The CRC64NVME of the whole object as the server has it; a checksum of checksums ends in "-<parts>"."""
    found = head.get("ChecksumCRC64NVME")
    is_whole = found is not None and "-" not in found and head.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT"
    return found if is_whole else None
