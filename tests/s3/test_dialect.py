"""A server that refuses checksums or conditions gets them once, and then requests without them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.support.bucket import Bucket, bucket_server
from tests.support.s3 import BUCKET
from tests.support.s3_store import s3_store
from tests.support.store_contract import KEY, BytesSource, StoreContract, content, entry_of, read_whole
from tierd.errors import Corrupt, TierUnreachable
from tierd.s3.dialect import NO_EXTRAS, Dialect, Extra
from tierd.s3.store import S3Store

CHUNK_BYTES = 16 << 10
SIZE_BYTES = 5 * CHUNK_BYTES


@pytest.fixture(params=["InvalidRequest", "InvalidArgument", "NotImplemented"])
def refusing(request: pytest.FixtureRequest) -> Iterator[Bucket]:
    """Refuses a request with a checksum, as old StorageGRID, Qumulo and B2 do."""
    manners: dict[str, Any] = {"keeps_checksums": False, "part_bytes_min": 1024}
    with bucket_server(refuses={"x-amz-checksum": request.param, "x-amz-sdk": request.param}, **manners) as found:
        yield found


def store_at(served: Bucket, **options: Any) -> S3Store:
    return s3_store(f"s3://{BUCKET}/deep", endpoint_url=served.url, part_bytes_min=1024, retry_min_s=0.001, **options)


async def put(store: S3Store, key: str = KEY) -> bytes:
    data = content(SIZE_BYTES)
    entry = entry_of(data, chunk_bytes=CHUNK_BYTES)
    await store.put(key, BytesSource(data), size_bytes=SIZE_BYTES, chunk_bytes=CHUNK_BYTES, expect=entry)
    return data


@pytest.mark.long
class TestBucketThatRefusesChecksums(StoreContract):
    @pytest.fixture
    async def store(self) -> AsyncIterator[S3Store]:
        refuses = {"x-amz-checksum": "InvalidRequest", "if-none-match": "NotImplemented"}
        with bucket_server(keeps_checksums=False, honours_conditions=False, refuses=refuses) as served:
            found = s3_store(f"s3://{BUCKET}/deep", endpoint_url=served.url)
            yield found
            await found.close()


async def test_first_refusal_is_remembered_and_logged_once(refusing: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    store = store_at(refusing, parts_in_flight=1)
    with caplog.at_level(logging.WARNING, "tierd"):
        assert await put(store) == await read_whole(store, KEY, SIZE_BYTES)
        await put(store, "run/other")
        assert await store.put_bytes("run/x", b"x", if_absent=True)
    assert store.requests.dialect.refused == {Extra.CHECKSUMS}
    assert sum(one.status in (400, 501) for one in refusing.seen) == 1, "every later request had none"
    told = [one.getMessage() for one in caplog.records if "refuses" in one.getMessage()]
    assert told == [f"s3://{BUCKET}/deep in cold refuses {Extra.CHECKSUMS.value}"]
    await store.close()


async def test_without_checksums_every_payload_is_signed(refusing: Bucket) -> None:
    """The test server refuses a payload without checksum and signature, and a damaged payload with either."""
    store = store_at(refusing)
    await put(store)
    spoilt: list[str] = []

    def garble_once(operation: str, key: str) -> str:
        if operation == "upload_part" and not spoilt:
            spoilt.append(key)
            return "garble"
        return ""

    refusing.script = garble_once
    data = await put(store, "run/other")
    assert spoilt
    assert await read_whole(store, "run/other", SIZE_BYTES) == data
    assert not any(stored.content != data for stored in refusing.objects.values())
    await store.close()


async def test_refused_condition_is_omitted_and_the_commit_checks_first() -> None:
    with bucket_server(
        refuses={"if-none-match": "NotImplemented"}, honours_conditions=False, part_bytes_min=1024
    ) as served:
        store = store_at(served)
        assert await store.put_bytes("run/x", b"x", if_absent=True)
        assert not await store.put_bytes("run/x", b"y", if_absent=True)
        assert served.objects["deep/run/x"].content == b"x"
        assert store.requests.dialect.refused == {Extra.CONDITION}, "checksums are still sent"
        await put(store)
        assert (await store.requests.head(f"deep/{KEY}", "look") or {}).get("ChecksumCRC64NVME")
        other = entry_of(b"other")
        with pytest.raises(Corrupt, match="other bytes"):
            await store.put(KEY, BytesSource(b"other"), size_bytes=5, chunk_bytes=other.chunk_bytes, expect=other)
        await store.close()


@pytest.mark.parametrize("size_bytes", [SIZE_BYTES, 5])
async def test_condition_refused_by_an_upload_is_omitted(size_bytes: int) -> None:
    with bucket_server(
        refuses={"if-none-match": "NotImplemented"}, honours_conditions=False, part_bytes_min=1024
    ) as served:
        store = store_at(served)
        data = content(size_bytes)
        await store.put(KEY, BytesSource(data), size_bytes=size_bytes, chunk_bytes=CHUNK_BYTES)
        assert served.objects[f"deep/{KEY}"].content == data
        assert store.requests.dialect.refused == {Extra.CONDITION}
        await store.close()


async def test_refusal_for_another_reason_changes_nothing() -> None:
    with bucket_server() as served:
        store = store_at(served)
        served.script = lambda operation, key: "NotImplemented" if operation == "put_object" else ""
        with pytest.raises(TierUnreachable, match="not implemented"):
            await store.put_bytes("run/x", b"x")
        assert store.requests.dialect.refused == frozenset()
        served.script = lambda operation, key: ""
        await store.put_bytes("run/x", b"x")
        assert (await store.requests.head("deep/run/x", "look") or {}).get("ChecksumCRC64NVME")
        await store.close()


def test_transient_error_is_not_taken_for_a_refusal() -> None:
    said = ClientError({"Error": {"Code": "SlowDown", "Message": "checksum"}}, "PutObject")
    assert Dialect("here").to_omit(said, {"ChecksumCRC64NVME": "x"}, NO_EXTRAS) == NO_EXTRAS
