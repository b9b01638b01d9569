"""An interrupted upload continues, with parts whose bytes are proven only."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.support.bucket import Bucket, Stored, bucket_server
from tests.support.s3 import BUCKET
from tests.support.s3_store import s3_store
from tests.support.store_contract import KEY, BytesSource, content, entry_of, read_whole
from tierd.errors import Corrupt, TierUnreachable
from tierd.format import checksum
from tierd.s3.store import S3Store

CHUNK_BYTES = 16 << 10
SIZE_BYTES = 9 * CHUNK_BYTES + 123
ENTRY = entry_of(content(SIZE_BYTES), chunk_bytes=CHUNK_BYTES)
PARTS = 10


@pytest.fixture(params=[True, False], ids=["checksums", "etags"])
def served(request: pytest.FixtureRequest) -> Iterator[Bucket]:
    """A server that returns checksums, and one that returns only ETags."""
    with bucket_server(part_bytes_min=1024, page=4, keeps_checksums=request.param) as found:
        yield found


def store_at(served: Bucket, **options: Any) -> S3Store:
    return s3_store(f"s3://{BUCKET}/deep", endpoint_url=served.url, part_bytes_min=1024, retry_min_s=0.001, **options)


async def put(store: S3Store, data: bytes = content(SIZE_BYTES)) -> int:
    """Returns the sum of the reported progress in bytes."""
    told: list[int] = []
    await store.put(
        KEY, BytesSource(data), size_bytes=SIZE_BYTES, chunk_bytes=CHUNK_BYTES, expect=ENTRY, progress=told.append
    )
    return sum(told)


class After:
    """Refuses an operation permanently after `count` requests."""

    def __init__(self, operation: str, count: int, fault: str) -> None:
        self._wanted = operation
        self._left = count
        self._fault = fault

    def __call__(self, operation: str, key: str) -> str:
        if operation != self._wanted:
            return ""
        self._left -= 1
        return self._fault if self._left < 0 else ""


async def interrupted(served: Bucket, parts: int = 6) -> S3Store:
    """A store whose upload of KEY failed after `parts` parts."""
    store = store_at(served, parts_in_flight=1)
    served.script = After("upload_part", parts, "ServiceUnavailable")
    with pytest.raises(TierUnreachable, match="slow down"):
        await put(store)
    served.script = lambda operation, key: ""
    assert len(served.uploads) == 1
    assert len(next(iter(served.uploads.values())).parts) == parts
    served.seen.clear()
    return store


async def finish(served: Bucket, store: S3Store, *, sent: int) -> None:
    """Asserts that the upload continues, sends `sent` parts, ends with the right bytes and leaves nothing else."""
    assert await put(store) == SIZE_BYTES
    assert served.count("upload_part") == sent
    assert served.uploads == {}
    assert await read_whole(store, KEY, SIZE_BYTES) == content(SIZE_BYTES)
    await store.close()


async def test_part_that_arrived_is_not_sent_again(served: Bucket) -> None:
    store = await interrupted(served)
    await finish(served, store, sent=PARTS - 6)
    assert served.count("create_multipart_upload") == 0


async def test_upload_with_all_parts_is_only_completed(served: Bucket) -> None:
    store = store_at(served)
    served.script = After("complete_multipart_upload", 0, "InternalError")
    with pytest.raises(TierUnreachable):
        await put(store)
    served.script = lambda operation, key: ""
    served.seen.clear()
    await finish(served, store, sent=0)


def other_bytes(part: Stored) -> Stored:
    """A part of other content: the same size, and its own valid checksums."""
    wrong = bytes(len(part.content))
    return Stored(wrong, f'"{hashlib.md5(wrong).hexdigest()}"', checksum.crc64nvme(wrong))


def shorter(part: Stored) -> Stored:
    short = part.content[:-1]
    return Stored(short, f'"{hashlib.md5(short).hexdigest()}"', checksum.crc64nvme(short))


@pytest.mark.parametrize("spoil", [other_bytes, shorter])
async def test_part_with_other_bytes_is_sent_again(served: Bucket, spoil: Callable[[Stored], Stored]) -> None:
    store = await interrupted(served)
    parts = next(iter(served.uploads.values())).parts
    parts[6] = spoil(parts[6])
    await finish(served, store, sent=PARTS - 5)


async def test_etags_that_are_not_md5_prove_nothing() -> None:
    """As in a bucket that encrypts with KMS."""
    with bucket_server(part_bytes_min=1024, keeps_checksums=False) as served:
        store = await interrupted(served)
        parts = next(iter(served.uploads.values())).parts
        for number, part in parts.items():
            parts[number] = replace(part, etag=f'"{number:032x}"')
        await finish(served, store, sent=PARTS)


async def test_upload_with_another_checksum_algorithm_begins_again() -> None:
    with bucket_server(part_bytes_min=1024) as served:
        store = await interrupted(served)
        upload = next(iter(served.uploads.values()))
        upload.algorithm = "CRC64NVME"  # only then ListParts returns it
        served.list_parts = lambda *arguments: _retold(Bucket.list_parts(served, *arguments))  # type: ignore[method-assign]
        await finish(served, store, sent=PARTS)
        assert served.count("abort_multipart_upload") == 1


def _retold(answer: Any) -> Any:
    return replace(answer, body=answer.body.replace(b"CRC64NVME</ChecksumAlgorithm>", b"SHA256</ChecksumAlgorithm>"))


async def test_newest_upload_continues_and_the_others_are_aborted(served: Bucket) -> None:
    store = await interrupted(served)
    old = await store.requests.request(
        "create_multipart_upload", "begin", Key=store.requests.prefix + KEY, ChecksumAlgorithm="SHA256"
    )
    served.uploads[old["UploadId"]].initiated -= timedelta(hours=1)
    await finish(served, store, sent=PARTS - 6)
    assert served.count("abort_multipart_upload") == 1


async def test_upload_of_a_key_with_the_same_prefix_is_untouched(served: Bucket) -> None:
    store = store_at(served)
    await store.requests.request("create_multipart_upload", "begin", Key=store.requests.prefix + KEY + "x")
    await put(store)
    assert [one.key for one in served.uploads.values()] == [store.requests.prefix + KEY + "x"]
    await store.close()


async def test_upload_that_was_aborted_meanwhile_begins_again(served: Bucket) -> None:
    store = store_at(served)
    served.script = After("upload_part", 3, "NoSuchUpload")
    with pytest.raises(TierUnreachable, match="the upload is gone"):
        await put(store)
    served.script = lambda operation, key: ""
    served.seen.clear()
    await finish(served, store, sent=PARTS)


async def test_all_parts_are_sent_again_where_uploads_are_not_listed() -> None:
    with bucket_server(part_bytes_min=1024, lists_uploads=False) as served:
        store = await interrupted(served)
        assert await put(store) == SIZE_BYTES
        assert served.count("upload_part") == PARTS
        await store.close()


async def test_whole_object_is_not_sent_again(served: Bucket) -> None:
    """Without checksums of the server, the MD5 of the source proves it."""
    store = store_at(served)
    await put(store)
    served.seen.clear()
    assert await put(store) == SIZE_BYTES
    assert Counter(one.operation for one in served.seen) == {"head_object": 1}
    served.objects[store.requests.prefix + KEY] = replace(
        served.objects[store.requests.prefix + KEY], etag=f'"{"0" * 32}-{PARTS}"', crc64nvme=0
    )
    if served.keeps_checksums:
        with pytest.raises(Corrupt, match="other bytes"):
            await put(store)
    else:
        assert await put(store) == SIZE_BYTES, "the ETag proves nothing, so the object is read"
        assert served.count("get_object") == 1
    assert served.count("upload_part") == 0
    await store.close()


@pytest.mark.parametrize("size_bytes", [SIZE_BYTES, 5])
@pytest.mark.parametrize("is_same", [True, False])
async def test_object_of_another_writer_that_appears_during_the_upload_stays(
    served: Bucket, size_bytes: int, is_same: bool
) -> None:
    """The last request has If-None-Match. The same bytes count as done, others are refused."""
    store = store_at(served)
    data = content(size_bytes)
    other = data if is_same else data[:-1] + bytes([data[-1] ^ 1])
    object_key = store.requests.prefix + KEY

    def appear(operation: str, key: str) -> str:
        if operation in ("put_object", "complete_multipart_upload"):
            etag = f'"{hashlib.md5(other).hexdigest()}"'
            served.objects[object_key] = Stored(other, etag, checksum.crc64nvme(other))
        return ""

    served.script = appear
    expect = entry_of(data, chunk_bytes=CHUNK_BYTES)
    told: list[int] = []
    writing = store.put(
        KEY,
        BytesSource(data),
        size_bytes=size_bytes,
        chunk_bytes=CHUNK_BYTES,
        expect=expect,
        progress=told.append,
    )
    if is_same:
        assert await writing == expect
        assert sum(told) == size_bytes
    else:
        with pytest.raises(Corrupt, match="other bytes"):
            await writing
    assert served.objects[object_key].content == other
    assert sum(served.written.values()) == 0
    assert served.uploads == {}
    await store.close()


@pytest.mark.parametrize("size_bytes", [SIZE_BYTES, 5])
async def test_upload_whose_answer_was_lost_is_compared(served: Bucket, size_bytes: int) -> None:
    served.script = EveryOther("put_object", "lose")
    store = store_at(served)
    data = content(size_bytes)
    told: list[int] = []
    options: dict[str, Any] = {"size_bytes": size_bytes, "chunk_bytes": CHUNK_BYTES, "progress": told.append}
    entry = await store.put(KEY, BytesSource(data), **options)
    assert entry == entry_of(data, chunk_bytes=CHUNK_BYTES)
    assert sum(told) == size_bytes
    assert sum(served.written.values()) == 1
    await store.close()


async def test_damaged_chunk_is_never_sent_whole(served: Bucket) -> None:
    """Also to a server that checks nothing; the upload is aborted."""
    damaged = bytearray(content(SIZE_BYTES))
    damaged[5 * CHUNK_BYTES + 7] ^= 1
    store = store_at(served, parts_in_flight=1)
    with pytest.raises(Corrupt, match="chunk 5 of 10"):
        await put(store, bytes(damaged))
    assert served.count("upload_part") == 6
    assert sum(one.operation == "upload_part" and one.status == 200 for one in served.seen) == 5
    assert served.objects == {}
    assert served.uploads == {}
    await store.close()


async def test_source_damaged_since_is_detected_when_parts_are_proven() -> None:
    with bucket_server(part_bytes_min=1024, keeps_checksums=False) as served:
        store = await interrupted(served)
        damaged = bytearray(content(SIZE_BYTES))
        damaged[0] ^= 1
        with pytest.raises(Corrupt, match="chunk 0 of 10"):
            await put(store, bytes(damaged))
        await store.close()


async def test_abandoned_upload_is_aborted_after_its_grace(served: Bucket) -> None:
    store = await interrupted(served)
    await store.requests.request("create_multipart_upload", "begin", Key="elsewhere/another")
    for key, age, gone in [(KEY, 0, 0), ("other", 3, 0), (KEY, 3, 1)]:
        served.now = lambda hours=age: datetime.now(UTC) + timedelta(hours=hours)
        assert await store.remove_unfinished(lambda found, key=key: found == key, grace_s=7200) == gone
    assert [one.key for one in served.uploads.values()] == ["elsewhere/another"]
    await store.close()


async def test_unfinished_uploads_are_those_below_the_prefix_of_the_tier(served: Bucket) -> None:
    store = await interrupted(served)
    await store.requests.request("create_multipart_upload", "begin", Key="elsewhere/another")
    assert await store.unfinished() == [KEY]
    await put(store)
    assert await store.unfinished() == []
    await store.close()


# ── lost answers ──


async def everything(store: S3Store) -> None:
    """Uses every operation of a store, each of which must succeed."""
    await put(store)
    await store.put(
        "run/small", BytesSource(b"small"), size_bytes=5, chunk_bytes=4096, expect=entry_of(b"small", "small", 4096)
    )
    await store.put_bytes("run/manifest.json", b"mine", if_absent=True)
    assert await store.get_bytes("run/manifest.json", size_max=10) == b"mine"
    assert await read_whole(store, KEY, SIZE_BYTES) == content(SIZE_BYTES)
    assert len(await store.list()) == 3
    await store.delete(["run/manifest.json", "run/small", KEY])
    assert await store.list() == []


OPERATIONS = [
    *("put_object", "get_object", "head_object", "delete_object", "delete_objects", "list_objects_v2"),
    *("create_multipart_upload", "upload_part", "complete_multipart_upload", "list_multipart_uploads"),
]


FAULTS = ["lose", "InternalError", "reset", "SlowDown", "TooManyRequests", "RequestTimeout"]
SHORT = {
    *((operation, "lose") for operation in OPERATIONS),
    ("upload_part", "InternalError"),
    ("put_object", "SlowDown"),
}


@pytest.mark.parametrize(
    ("operation", "fault"),
    [
        pytest.param(*each, marks=() if each in SHORT else pytest.mark.long)
        for each in itertools.product(OPERATIONS, FAULTS)
    ],
)
async def test_each_operation_survives_one_failure_of_each_of_its_requests(
    served: Bucket, operation: str, fault: str
) -> None:
    served.script = EveryOther(operation, fault)
    store = store_at(served, parts_in_flight=1)
    await everything(store)
    assert served.faults()[fault] >= 1
    # Only an upload whose creation was not answered may remain.
    assert len(served.uploads) == (operation == "create_multipart_upload" and fault == "lose")
    await store.close()


class EveryOther:
    """The first, the third, … request of an operation and a key fails."""

    def __init__(self, operation: str, fault: str) -> None:
        self._wanted = operation
        self._fault = fault
        self._seen: Counter[str] = Counter()

    def __call__(self, operation: str, key: str) -> str:
        if operation != self._wanted:
            return ""
        self._seen[key] += 1
        return self._fault if self._seen[key] % 2 else ""


async def test_resumed_upload_continues_when_its_list_of_parts_is_lost(served: Bucket) -> None:
    store = await interrupted(served)
    served.script = EveryOther("list_parts", "lose")
    await finish(served, store, sent=PARTS - 6)


@pytest.mark.parametrize("fault", ["lose", "error-in-200", "InternalError"])
async def test_lost_completion_is_detected_from_the_object(served: Bucket, fault: str) -> None:
    """The repeated request finds no such upload; the object's checksum, or its parts' MD5s, prove it complete."""
    served.script = EveryOther("complete_multipart_upload", fault)
    store = store_at(served)
    await finish(served, store, sent=PARTS)
    assert sum(served.written.values()) == 1


async def test_commit_whose_answer_was_lost_is_compared(served: Bucket) -> None:
    served.script = EveryOther("put_object", "lose")
    store = store_at(served)
    assert not await store.put_bytes("run/manifest.json", b"mine", if_absent=True), (
        "a 412 from the first attempt: the caller compares"
    )
    assert await store.get_bytes("run/manifest.json", size_max=10) == b"mine"
    await store.close()


async def test_repeated_commit_without_conditions_writes_the_same_bytes() -> None:
    with bucket_server(honours_conditions=False) as served:
        served.script = EveryOther("put_object", "lose")
        store = store_at(served)
        assert await store.put_bytes("run/manifest.json", b"mine", if_absent=True)
        assert len(served.written) == 1
        assert not await store.put_bytes("run/manifest.json", b"other", if_absent=True)
        await store.close()


async def test_conflict_between_two_writers_is_retried(served: Bucket) -> None:
    served.script = EveryOther("put_object", "ConditionalRequestConflict")
    store = store_at(served)
    assert await store.put_bytes("run/manifest.json", b"mine", if_absent=True)
    await store.close()


# ── the last answer as a proof ──


SMALL = entry_of(b"small", "small", 4096)


async def put_small(store: S3Store) -> None:
    await store.put("run/small", BytesSource(b"small"), size_bytes=5, chunk_bytes=4096, expect=SMALL)


async def test_object_is_checked_afterwards_only_when_the_answer_proves_nothing(served: Bucket) -> None:
    """A server without checksums still reports the size, and whether the object exists."""
    store = store_at(served)
    await put(store)
    await put_small(store)
    assert served.count("head_object") == (2 if served.keeps_checksums else 4)
    await store.close()


@pytest.mark.parametrize(
    "retold",
    [
        {"x-amz-checksum-type": "COMPOSITE"},
        {"x-amz-checksum-type": ""},
        {"x-amz-checksum-crc64nvme": f"{ENTRY.crc64nvme}-10"},
        {"x-amz-checksum-crc64nvme": SMALL.crc64nvme},
    ],
    ids=["composite", "of no type", "of checksums", "of other bytes"],
)
async def test_answer_with_another_checksum_is_checked(retold: dict[str, str]) -> None:
    with bucket_server(part_bytes_min=1024) as served:
        names = {"x-amz-checksum-crc64nvme": "ChecksumCRC64NVME", "x-amz-checksum-type": "ChecksumType"}

        def complete(*arguments: Any) -> Any:
            answer = Bucket.complete_multipart_upload(served, *arguments)
            body = answer.body.decode()
            for header, value in retold.items():
                body = re.sub(rf"<{names[header]}>[^<]*", f"<{names[header]}>{value}", body)
            return replace(answer, body=body.encode())

        served.complete_multipart_upload = complete  # type: ignore[method-assign]
        store = store_at(served)
        await put(store)
        assert served.count("head_object") == 2
        await store.close()


async def test_object_missing_after_an_answer_without_proof_is_unreachable() -> None:
    with bucket_server(part_bytes_min=1024, keeps_checksums=False) as served:
        served.script = lambda operation, key: "NoSuchKey" if operation == "head_object" else ""
        store = store_at(served)
        with pytest.raises(TierUnreachable, match="deleted after the upload"):
            await put_small(store)
        await store.close()


# ── bytes altered on their way ──


@pytest.mark.parametrize("operation", ["put_object", "upload_part"])
async def test_part_with_a_bit_flipped_on_the_way_is_sent_again(operation: str) -> None:
    with bucket_server(part_bytes_min=1024) as served:
        served.script = EveryOther(operation, "garble")
        store = store_at(served, parts_in_flight=1)
        await everything(store)
        assert any(one.fault == "garble" and one.status == 400 for one in served.seen)
        await store.close()


async def test_small_object_with_a_bit_flipped_on_the_way_is_read_again() -> None:
    with bucket_server() as served:
        store = store_at(served)
        await store.put_bytes("run/manifest.json", b"mine")
        served.script = EveryOther("get_object", "flip")
        assert await store.get_bytes("run/manifest.json", size_max=10) == b"mine"
        await store.close()
