"""An upload that is interrupted goes on where it was, and never with a part that is not proven to be ours."""

from __future__ import annotations

import hashlib
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
    """A server that gives back checksums, and one that gives back nothing but ETags."""
    with bucket_server(part_bytes_min=1024, page=4, keeps_checksums=request.param) as found:
        yield found


def store_at(served: Bucket, **options: Any) -> S3Store:
    return s3_store(f"s3://{BUCKET}/deep", endpoint_url=served.url, part_bytes_min=1024, retry_min_s=0.001, **options)


async def put(store: S3Store, data: bytes = content(SIZE_BYTES)) -> int:
    """Returns how many bytes its progress told."""
    told: list[int] = []
    await store.put(
        KEY, BytesSource(data), size_bytes=SIZE_BYTES, chunk_bytes=CHUNK_BYTES, expect=ENTRY, progress=told.append
    )
    return sum(told)


class After:
    """Refuses an operation for good after so many of it."""

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
    """A store whose upload of KEY was given up after so many parts."""
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
    """The upload goes on, sends so many parts, and ends with the right bytes and nothing left over."""
    assert await put(store) == SIZE_BYTES
    assert served.count("upload_part") == sent
    assert served.uploads == {}
    assert await read_whole(store, KEY, SIZE_BYTES) == content(SIZE_BYTES)
    await store.close()


async def test_no_part_that_is_there_is_sent_again(served: Bucket) -> None:
    store = await interrupted(served)
    await finish(served, store, sent=PARTS - 6)
    assert served.count("create_multipart_upload") == 0


async def test_all_parts_are_there_and_only_the_end_is_missing(served: Bucket) -> None:
    store = store_at(served)
    served.script = After("complete_multipart_upload", 0, "InternalError")
    with pytest.raises(TierUnreachable):
        await put(store)
    served.script = lambda operation, key: ""
    served.seen.clear()
    await finish(served, store, sent=0)


def other_bytes(part: Stored) -> Stored:
    """What another state of the training would have left there: the same size, and sums that are right for it."""
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


async def test_etags_that_are_no_md5_prove_nothing() -> None:
    """As of a bucket that encrypts with KMS."""
    with bucket_server(part_bytes_min=1024, keeps_checksums=False) as served:
        store = await interrupted(served)
        parts = next(iter(served.uploads.values())).parts
        for number, part in parts.items():
            parts[number] = replace(part, etag=f'"{number:032x}"')
        await finish(served, store, sent=PARTS)


async def test_upload_with_checksums_of_another_kind_begins_anew() -> None:
    with bucket_server(part_bytes_min=1024) as served:
        store = await interrupted(served)
        upload = next(iter(served.uploads.values()))
        upload.algorithm = "CRC64NVME"  # ListParts tells it only then
        served.list_parts = lambda *arguments: _retold(Bucket.list_parts(served, *arguments))  # type: ignore[method-assign]
        await finish(served, store, sent=PARTS)
        assert served.count("abort_multipart_upload") == 1


def _retold(answer: Any) -> Any:
    return replace(answer, body=answer.body.replace(b"CRC64NVME</ChecksumAlgorithm>", b"SHA256</ChecksumAlgorithm>"))


async def test_of_two_uploads_the_newer_goes_on_and_the_other_is_aborted(served: Bucket) -> None:
    store = await interrupted(served)
    old = await store.requests.request(
        "create_multipart_upload", "begin", Key=store.requests.object_key(KEY), ChecksumAlgorithm="SHA256"
    )
    served.uploads[old["UploadId"]].initiated -= timedelta(hours=1)
    await finish(served, store, sent=PARTS - 6)
    assert served.count("abort_multipart_upload") == 1


async def test_upload_of_another_key_with_the_same_beginning_is_let_be(served: Bucket) -> None:
    store = store_at(served)
    await store.requests.request("create_multipart_upload", "begin", Key=store.requests.object_key(KEY + "x"))
    await put(store)
    assert [one.key for one in served.uploads.values()] == [store.requests.object_key(KEY + "x")]
    await store.close()


async def test_upload_that_was_aborted_meanwhile_begins_anew(served: Bucket) -> None:
    store = store_at(served)
    served.script = After("upload_part", 3, "NoSuchUpload")
    with pytest.raises(TierUnreachable, match="the upload is gone"):
        await put(store)
    served.script = lambda operation, key: ""
    served.seen.clear()
    await finish(served, store, sent=PARTS)


async def test_server_that_lists_no_uploads_is_sent_all_parts_again() -> None:
    with bucket_server(part_bytes_min=1024, lists_uploads=False) as served:
        store = await interrupted(served)
        assert await put(store) == SIZE_BYTES
        assert served.count("upload_part") == PARTS
        await store.close()


async def test_whole_object_is_not_sent_again(served: Bucket) -> None:
    """Where the server keeps no checksums, the MD5 of what would be sent proves it."""
    store = store_at(served)
    await put(store)
    served.seen.clear()
    assert await put(store) == SIZE_BYTES
    assert Counter(one.operation for one in served.seen) == {"head_object": 1}
    served.objects[store.requests.object_key(KEY)] = replace(
        served.objects[store.requests.object_key(KEY)], etag=f'"{"0" * 32}-{PARTS}"', crc64nvme=0
    )
    await put(store)
    assert served.count("upload_part") == PARTS
    await store.close()


async def test_damaged_chunk_never_arrives_whole(served: Bucket) -> None:
    """Not even at a server that checks nothing; and what was sent of the rest is taken back."""
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


async def test_source_that_is_damaged_since_is_found_while_old_parts_are_proven() -> None:
    with bucket_server(part_bytes_min=1024, keeps_checksums=False) as served:
        store = await interrupted(served)
        damaged = bytearray(content(SIZE_BYTES))
        damaged[0] ^= 1
        with pytest.raises(Corrupt, match="chunk 0 of 10"):
            await put(store, bytes(damaged))
        await store.close()


async def test_upload_that_nobody_goes_on_with_is_aborted_after_its_grace(served: Bucket) -> None:
    store = await interrupted(served)
    await store.requests.request("create_multipart_upload", "begin", Key="elsewhere/another")
    for key, age, gone in [(KEY, 0, 0), ("other", 3, 0), (KEY, 3, 1)]:
        served.now = lambda hours=age: datetime.now(UTC) + timedelta(hours=hours)
        assert await store.remove_unfinished(lambda found, key=key: found == key, grace_s=7200) == gone
    assert [one.key for one in served.uploads.values()] == ["elsewhere/another"]
    await store.close()


# ── done, and the answer lost ──


async def everything(store: S3Store) -> None:
    """Each operation that a store has; all of it goes well."""
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


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("fault", ["lose", "reset", "InternalError", "SlowDown", "TooManyRequests", "RequestTimeout"])
async def test_each_operation_survives_each_of_its_requests_going_wrong_once(
    served: Bucket, operation: str, fault: str
) -> None:
    served.script = EveryOther(operation, fault)
    store = store_at(served, parts_in_flight=1)
    await everything(store)
    assert served.faults()[fault] >= 1
    # A created upload whose answer was lost is nobody's; all else is cleared away.
    assert len(served.uploads) == (operation == "create_multipart_upload" and fault == "lose")
    await store.close()


class EveryOther:
    """The first, the third, … request of an operation and a key goes wrong."""

    def __init__(self, operation: str, fault: str) -> None:
        self._wanted = operation
        self._fault = fault
        self._seen: Counter[str] = Counter()

    def __call__(self, operation: str, key: str) -> str:
        if operation != self._wanted:
            return ""
        self._seen[key] += 1
        return self._fault if self._seen[key] % 2 else ""


async def test_resumed_upload_whose_list_of_parts_was_lost_goes_on(served: Bucket) -> None:
    store = await interrupted(served)
    served.script = EveryOther("list_parts", "lose")
    await finish(served, store, sent=PARTS - 6)


@pytest.mark.parametrize("fault", ["lose", "error-in-200", "InternalError"])
async def test_completion_is_told_by_what_lies_there(served: Bucket, fault: str) -> None:
    """The repeated request finds no such upload; the object's checksum, or its parts' MD5s, say that it is ours."""
    served.script = EveryOther("complete_multipart_upload", fault)
    store = store_at(served)
    await finish(served, store, sent=PARTS)
    assert sum(served.written.values()) == 1


async def test_commit_whose_answer_was_lost_is_compared(served: Bucket) -> None:
    served.script = EveryOther("put_object", "lose")
    store = store_at(served)
    assert not await store.put_bytes("run/manifest.json", b"mine", if_absent=True), "its own 412: the caller compares"
    assert await store.get_bytes("run/manifest.json", size_max=10) == b"mine"
    await store.close()


async def test_without_conditions_a_repeated_commit_writes_the_same_again() -> None:
    with bucket_server(honours_conditions=False) as served:
        served.script = EveryOther("put_object", "lose")
        store = store_at(served)
        assert await store.put_bytes("run/manifest.json", b"mine", if_absent=True)
        assert len(served.written) == 1
        assert not await store.put_bytes("run/manifest.json", b"other", if_absent=True)
        await store.close()


async def test_conflict_between_two_writers_is_tried_again(served: Bucket) -> None:
    served.script = EveryOther("put_object", "ConditionalRequestConflict")
    store = store_at(served)
    assert await store.put_bytes("run/manifest.json", b"mine", if_absent=True)
    await store.close()


# ── what the last answer proves ──


SMALL = entry_of(b"small", "small", 4096)


async def put_small(store: S3Store) -> None:
    await store.put("run/small", BytesSource(b"small"), size_bytes=5, chunk_bytes=4096, expect=SMALL)


async def test_object_is_looked_at_afterwards_only_where_the_answer_does_not_prove_it(served: Bucket) -> None:
    """A server that keeps no checksums tells the size at least, and whether the object is there at all."""
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
async def test_answer_that_proves_something_else_is_looked_into(retold: dict[str, str]) -> None:
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


async def test_object_that_is_gone_again_after_an_answer_that_proves_nothing_is_not_there() -> None:
    with bucket_server(part_bytes_min=1024, keeps_checksums=False) as served:
        served.script = lambda operation, key: "NoSuchKey" if operation == "head_object" else ""
        store = store_at(served)
        with pytest.raises(TierUnreachable, match="gone again"):
            await put_small(store)
        await store.close()


# ── altered on its way ──


@pytest.mark.parametrize("operation", ["put_object", "upload_part"])
async def test_bit_that_flips_on_its_way_there_is_sent_again(operation: str) -> None:
    with bucket_server(part_bytes_min=1024) as served:
        served.script = EveryOther(operation, "garble")
        store = store_at(served, parts_in_flight=1)
        await everything(store)
        assert any(one.fault == "garble" and one.status == 400 for one in served.seen)
        await store.close()


async def test_small_object_whose_bit_flips_on_its_way_here_is_read_again() -> None:
    with bucket_server() as served:
        store = store_at(served)
        await store.put_bytes("run/manifest.json", b"mine")
        served.script = EveryOther("get_object", "flip")
        assert await store.get_bytes("run/manifest.json", size_max=10) == b"mine"
        await store.close()
