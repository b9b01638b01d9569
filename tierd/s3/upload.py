"""Uploads one file into a bucket: a single PUT where it fits one part, else a multipart upload of its chunks.

Parts are whole chunks, so their checksums are known beforehand. An interrupted upload continues with the parts that
the server lists; a part counts only when its checksum or its MD5 proves its bytes. The object becomes visible with the
last request, which is sent only when every part is there.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from tierd.errors import BadRequest, NotFound, TierdError, TierUnreachable
from tierd.failpoints import failpoint
from tierd.format import checksum
from tierd.format.manifest import FileEntry
from tierd.s3.body import PIECE_BYTES, Body
from tierd.s3.client import Answer
from tierd.s3.errors import CONDITION_FAILED, Trouble, code_of, server_time, trouble_of
from tierd.s3.requests import S3Requests
from tierd.tiers.chunks import ChunkSums
from tierd.tiers.pool import for_each
from tierd.tiers.store import Progress, Source

# https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
PART_BYTES_MIN = 5 << 20  # except the last part
PART_BYTES_MAX = 5 << 30
PARTS_MAX = 10_000


def part_bytes(size_bytes: int, chunk_bytes: int, min_bytes: int = PART_BYTES_MIN) -> int:
    """The size of a part: a chunk where S3 accepts that, else as many whole chunks as make 64 MiB, or 10,000 parts.

    Raises BadRequest where a part would be larger than S3 accepts.
    """
    least = max(min_bytes, -(-size_bytes // PARTS_MAX))
    if chunk_bytes >= least:
        size = chunk_bytes
    else:
        usual = checksum.CHUNK_BYTES if min_bytes == PART_BYTES_MIN else least
        size = -(-max(least, usual) // chunk_bytes) * chunk_bytes
    if size > PART_BYTES_MAX:
        raise BadRequest(f"upload {size_bytes} bytes in chunks of {chunk_bytes}: S3 accepts no part of {size} bytes")
    return size


@dataclass(frozen=True, slots=True)
class UnfinishedUpload:
    """A multipart upload that is not completed. `age_s` by the server's clock; 0 where it does not send the time."""

    object_key: str
    upload_id: str
    age_s: float


async def unfinished_uploads(requests: S3Requests, prefix: str, action: str) -> list[UnfinishedUpload]:
    """The unfinished uploads to keys that begin with `prefix`; none if the server cannot list them."""
    uploads: list[UnfinishedUpload] = []
    after: dict[str, Any] = {}
    while True:
        try:
            page = await requests.request("list_multipart_uploads", action, Prefix=prefix, **after)
        except (TierUnreachable, NotFound) as error:
            if trouble_of(error.__cause__) is Trouble.REFUSED:
                return uploads
            raise
        uploads += [
            UnfinishedUpload(listed["Key"], listed["UploadId"], _age_s(page, listed))
            for listed in page.get("Uploads", ())
        ]
        if not page.get("IsTruncated"):
            return uploads
        after = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


async def abort_upload(requests: S3Requests, object_key: str, upload_id: str, action: str) -> None:
    """Does nothing when the upload is completed or aborted already."""
    failpoint("s3.abort")
    try:
        await requests.request("abort_multipart_upload", action, Key=object_key, UploadId=upload_id)
    except (TierUnreachable, NotFound) as error:
        if code_of(error.__cause__) not in ("NoSuchUpload", "404"):
            raise


@dataclass(frozen=True, kw_only=True)
class Upload:
    """One file to be sent. `part_bytes`: a multiple of the entry's chunk size. `options`: of the new object.
    `if_absent`: the server must refuse to replace an existing object."""

    requests: S3Requests
    object_key: str
    source: Source
    entry: FileEntry
    part_bytes: int
    progress: Progress
    options: Mapping[str, str]
    action: str
    if_absent: bool

    async def run(self) -> bool:
        """Sends the file. Returns whether the last answer proves that all of it arrived. Raises Corrupt, and nothing
        becomes visible, when a chunk differs from the entry."""
        if self.entry.size_bytes <= self.part_bytes:
            failpoint("s3.put")
            arguments = {"ChecksumCRC64NVME": self.entry.crc64nvme, **self.options, **self._condition()}
            return self._is_proof(await self._send("put_object", 0, self.entry.size_bytes, **arguments))
        upload_id, etags = await self._resume()
        try:
            return await self._send_parts(upload_id, etags)
        except TierdError as error:
            # After a transient error the upload stays for the next attempt to continue. An error about the parts
            # themselves, from the source or from the server, would only repeat.
            if not isinstance(error, TierUnreachable) or trouble_of(error.__cause__) is Trouble.REFUSED:
                with suppress(TierdError):
                    await abort_upload(self.requests, self.object_key, upload_id, self.action)
            raise

    async def is_done(self, head: Answer) -> bool:
        """Whether the object has these very bytes already: by the server's checksum, or, where it keeps none, by the
        MD5 of what would be sent, which reads the source once. `head`: empty where there is no object."""
        if (is_same := self._compare(head)) is not None:
            return is_same
        if _is_md5(head):
            return _etag(head) == (await self._md5(0, self.entry.size_bytes)).hex()
        if not re.fullmatch(rf"[0-9a-f]{{32}}-{len(self._ranges())}", _etag(head)):
            return False
        return _etag(head) == _etag_of_parts([await self._md5(offset, length) for offset, length in self._ranges()])

    def _compare(self, head: Answer) -> bool | None:
        """Whether size and checksum are those of the entry; None where the size is, and there is no checksum."""
        if head.get("ContentLength") != self.entry.size_bytes:
            return False
        stored = whole_checksum(head)
        return None if stored is None else stored == self.entry.crc64nvme

    def _ranges(self) -> list[tuple[int, int]]:
        """(offset, length) of each part."""
        return list(checksum.chunk_ranges(self.entry.size_bytes, self.part_bytes))

    # ── sending ──

    async def _send_parts(self, upload_id: str, etags: dict[int, str]) -> bool:
        """As `run`. `etags`: by part number, of the parts that are there; the others are added."""
        sums: dict[int, str] = {}

        async def send(numbered: tuple[int, tuple[int, int]]) -> None:
            number, (offset, length) = numbered
            sums[number] = self._sum(offset, length)
            if number in etags:
                self.progress(length)
                return
            arguments = {"UploadId": upload_id, "PartNumber": number, "ChecksumCRC64NVME": sums[number]}
            failpoint("s3.part")
            etags[number] = (await self._send("upload_part", offset, length, **arguments))["ETag"]
            failpoint("s3.part_sent")

        await for_each(self.requests.parts_in_flight, enumerate(self._ranges(), start=1), send)
        parts = [
            {"PartNumber": number, "ETag": etags[number], "ChecksumCRC64NVME": sums[number]} for number in sorted(etags)
        ]
        failpoint("s3.complete")
        try:
            answer = await self.requests.request(
                "complete_multipart_upload",
                self.action,
                Key=self.object_key,
                UploadId=upload_id,
                MultipartUpload={"Parts": parts},
                ChecksumCRC64NVME=self.entry.crc64nvme,
                ChecksumType="FULL_OBJECT",
                **self._condition(),
            )
            failpoint("s3.completed")
            return self._is_proof(answer)
        except TierUnreachable as error:
            # It may be completed: when only the answer was lost, the next attempt finds no such upload.
            if not await self._is_made_of(parts):
                raise
            if code_of(error.__cause__) in CONDITION_FAILED:  # another writer completed the same bytes
                with suppress(TierdError):
                    await abort_upload(self.requests, self.object_key, upload_id, self.action)
            return False

    def _condition(self) -> dict[str, Any]:
        return {"IfNoneMatch": "*"} if self.if_absent else {}

    async def _is_made_of(self, parts: list[dict[str, Any]]) -> bool:
        head = await self.requests.head(self.object_key, self.action) or {}
        if (is_same := self._compare(head)) is not None:
            return is_same
        md5s = [bytes.fromhex(_etag(part)) for part in parts if _is_md5(part)]
        return len(md5s) == len(parts) and _etag(head) == _etag_of_parts(md5s)

    async def _send(self, operation: str, offset: int, length: int, **arguments: Any) -> Answer:
        async with self.requests.window.part(), self.requests.buffers.borrow(PIECE_BYTES) as buffer:
            await self.requests.bandwidth.take(length)
            make_body = partial(Body, self.source, self.entry, offset, length, buffer=buffer, action=self.action)
            answer = await self.requests.request(
                operation, self.action, size_bytes=length, make_body=make_body, Key=self.object_key, **arguments
            )
        self.progress(length)
        return answer

    def _sum(self, offset: int, length: int) -> str:
        """The checksum of a part, combined from those of its chunks."""
        first = offset // self.entry.chunk_bytes
        chunks = list(checksum.chunk_ranges(length, self.entry.chunk_bytes))
        sums = [checksum.decode(crc) for crc in self.entry.chunks[first : first + len(chunks)]]
        return checksum.encode(checksum.combine(zip(sums, (size for _, size in chunks), strict=True)))

    def _is_proof(self, answer: Answer) -> bool:
        """Whether the answer proves the checksum: it must name the type. Some servers repeat what they were sent."""
        return answer.get("ChecksumType") == "FULL_OBJECT" and whole_checksum(answer) == self.entry.crc64nvme

    # ── continuing an interrupted upload ──

    async def _resume(self) -> tuple[str, dict[int, str]]:
        """(upload id, ETags of the proven parts) of the newest upload of this key that can continue, or of a new one.
        The others are aborted."""
        uploads = await unfinished_uploads(self.requests, self.object_key, self.action)
        resumed: tuple[str, dict[int, str]] | None = None
        for upload in sorted(uploads, key=lambda upload: upload.age_s):
            if upload.object_key != self.object_key:
                continue  # its key only begins with ours
            parts = await self._list_parts(upload.upload_id) if resumed is None else None
            if parts is None:
                await abort_upload(self.requests, self.object_key, upload.upload_id, self.action)
            else:
                resumed = (upload.upload_id, await self._proven(parts))
        if resumed is not None:
            return resumed
        failpoint("s3.create")
        kind: dict[str, Any] = {"ChecksumAlgorithm": "CRC64NVME", "ChecksumType": "FULL_OBJECT", **self.options}
        created = await self.requests.request("create_multipart_upload", self.action, Key=self.object_key, **kind)
        return created["UploadId"], {}

    async def _list_parts(self, upload_id: str) -> dict[int, Answer] | None:
        """The parts by number; None when the upload is gone, or has another checksum algorithm."""
        parts: dict[int, Answer] = {}
        listing: dict[str, Any] = {"Key": self.object_key, "UploadId": upload_id}
        while True:
            try:
                page = await self.requests.request("list_parts", self.action, **listing)
            except (TierUnreachable, NotFound) as error:
                if trouble_of(error.__cause__) is Trouble.REFUSED:
                    return None
                raise
            if page.get("ChecksumAlgorithm") not in (None, "CRC64NVME"):
                return None
            parts |= {part["PartNumber"]: part for part in page.get("Parts", ())}
            if not page.get("IsTruncated"):
                return parts
            listing["PartNumberMarker"] = page["NextPartNumberMarker"]

    async def _proven(self, parts: dict[int, Answer]) -> dict[int, str]:
        """ETags of the parts whose bytes are those of the source: by the server's checksum, or, where it keeps none,
        by the MD5 in the ETag, which reads the source once instead of sending it again."""
        proven: dict[int, str] = {}
        for number, (offset, length) in enumerate(self._ranges(), start=1):
            part = parts.get(number)
            if part is None or part["Size"] != length:
                continue
            if "ChecksumCRC64NVME" in part:
                is_same = part["ChecksumCRC64NVME"] == self._sum(offset, length)
            elif _is_md5(part):
                is_same = _etag(part) == (await self._md5(offset, length)).hex()
                if not is_same:
                    break  # the server may encrypt, so that no ETag is an MD5: reading the rest would be useless
            else:
                break
            if is_same:
                proven[number] = part["ETag"]
        return proven

    async def _md5(self, offset: int, length: int) -> bytes:
        """Raises Corrupt where the source differs from the entry."""
        digest = hashlib.md5(usedforsecurity=False)
        sums = ChunkSums(length, self.entry.chunk_bytes)
        async with self.requests.buffers.borrow(PIECE_BYTES) as buffer:
            for at, size in checksum.chunk_ranges(length, PIECE_BYTES):
                await self.source.fill(offset + at, buffer[:size])
                await self.requests.pool.run(digest.update, buffer[:size])
                await self.requests.pool.run(sums.add, at, buffer[:size])
        sums.check(self.entry, first=offset // self.entry.chunk_bytes, action=self.action)
        return digest.digest()


def whole_checksum(head: Answer) -> str | None:
    """The CRC64NVME of the whole object as the server has it; a checksum of checksums ends in "-<parts>"."""
    stored = head.get("ChecksumCRC64NVME")
    is_whole = stored is not None and "-" not in stored and head.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT"
    return stored if is_whole else None


def _etag(answer: Answer) -> str:
    return answer.get("ETag", "").strip('"')


def _is_md5(answer: Answer) -> bool:
    if answer.get("ServerSideEncryption", "").startswith("aws:kms"):
        return False  # the MD5 of the encrypted bytes
    return re.fullmatch(r"[0-9a-f]{32}", _etag(answer)) is not None


def _etag_of_parts(md5s: list[bytes]) -> str:
    """S3's ETag of a multipart object."""
    return f"{hashlib.md5(b''.join(md5s), usedforsecurity=False).hexdigest()}-{len(md5s)}"


def _age_s(page: Answer, upload: Answer) -> float:
    try:
        return (server_time(page) - upload["Initiated"]).total_seconds()
    except (KeyError, ValueError, TypeError):
        return 0.0
