from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.support.bucket import bucket_server
from tests.support.s3 import (
    ACCESS_KEY,
    BUCKET,
    SECRET_KEY,
    faulty_proxy,
    rclone_server,
    self_signed,
    silent_server,
)
from tests.support.s3_store import s3_store
from tests.support.store_contract import CHUNK_BYTES, KEY, BytesSource, StoreContract, content, entry_of, read_whole
from tierd.errors import BadRequest, Corrupt, Full, NotFound, TierUnreachable
from tierd.format import checksum
from tierd.s3.errors import Trouble, translate, trouble_of
from tierd.s3.store import S3Store
from tierd.s3.upload import PART_BYTES_MAX, part_bytes

SMALL_CHUNK_BYTES = 5 << 20  # the smallest part that S3 accepts
BIG = 2 * SMALL_CHUNK_BYTES + 12345


@pytest.fixture(scope="module")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with rclone_server(tmp_path_factory.mktemp("rclone")) as url:
        yield url


class Requests(list[tuple[str, str]]):
    """The arguments of each call of on_request."""

    def __call__(self, operation: str, outcome: str) -> None:
        self.append((operation, outcome))

    def operations(self) -> list[str]:
        return [operation for operation, _ in self]


def bucket(endpoint_url: str, **options: object) -> S3Store:
    """A store with a new prefix in the server's bucket."""
    return s3_store(f"s3://{BUCKET}/{uuid4().hex}/deep", endpoint_url=endpoint_url, **options)  # type: ignore[arg-type]


class TestMoto(StoreContract):
    @pytest.fixture
    async def store(self, moto: str) -> AsyncIterator[S3Store]:
        found = bucket(moto)
        yield found
        await found.close()


class TestRclone(StoreContract):
    @pytest.fixture
    async def store(self, rclone: str) -> AsyncIterator[S3Store]:
        found = bucket(rclone)
        yield found
        await found.close()


class TestBucket(StoreContract):
    """The test server, which refuses what AWS refuses, with pages of three."""

    is_atomic = True
    chunk_bytes = CHUNK_BYTES

    @pytest.fixture
    async def store(self) -> AsyncIterator[S3Store]:
        with bucket_server(page=3) as served:
            found = bucket(served.url)
            yield found
            await found.close()


@pytest.mark.long
class TestBucketThatKeepsNothing(StoreContract):
    """Like Ceph: no checksums, no conditions."""

    @pytest.fixture
    async def store(self) -> AsyncIterator[S3Store]:
        with bucket_server(keeps_checksums=False, honours_conditions=False) as served:
            found = bucket(served.url)
            yield found
            await found.close()


# ── conditions ──


async def test_a_refused_condition_counts_only_if_the_object_is_there() -> None:
    """Another process may have deleted it since, and then a marker that was just set would be missing."""
    with bucket_server() as served:
        store = bucket(served.url)
        served.script = lambda operation, key: "PreconditionFailed" if operation == "put_object" else ""
        with pytest.raises(TierUnreachable, match="PreconditionFailed"):
            await store.put_bytes("run/gone.json", b"{}", if_absent=True)
        served.script = lambda operation, key: ""
        assert await store.put_bytes("run/gone.json", b"{}", if_absent=True)
        assert not await store.put_bytes("run/gone.json", b"{}", if_absent=True)
        await store.close()


# ── uploads ──


async def test_large_file_is_sent_in_parts_of_its_chunks_and_compared_afterwards(moto: str) -> None:
    requests = Requests()
    store = bucket(moto, on_request=requests)
    entry = await store.put(KEY, BytesSource(content(BIG)), size_bytes=BIG, chunk_bytes=SMALL_CHUNK_BYTES)
    assert requests.operations().count("upload_part") == 3
    assert requests.operations()[-2:] == ["complete_multipart_upload", "head_object"]
    requests.clear()
    again = await store.put(KEY, BytesSource(b""), size_bytes=BIG, chunk_bytes=SMALL_CHUNK_BYTES, expect=entry)
    assert again == entry
    assert requests == [("head_object", "200")]  # its checksum is that of the file
    await store.close()


async def test_damaged_object_is_replaced_only_when_asked(moto: str) -> None:
    store = bucket(moto)
    await store.put_bytes(KEY, b"damaged")
    good = entry_of(b"correct")
    options: dict[str, Any] = {"size_bytes": 7, "chunk_bytes": CHUNK_BYTES, "expect": good}
    with pytest.raises(Corrupt, match="other bytes"):
        await store.put(KEY, BytesSource(b"correct"), **options)
    assert await store.put(KEY, BytesSource(b"correct"), **options, replace=True) == good
    assert await store.get_bytes(KEY, size_max=7) == b"correct"
    await store.close()


async def test_parts_in_flight_and_their_memory_are_bounded(moto: str) -> None:
    filling = 0
    most = 0

    class Counting(BytesSource):
        async def read_piece(self, offset: int, buffer: memoryview) -> None:
            nonlocal filling, most
            filling += 1
            most = max(most, filling)
            for _ in range(100):  # until another part is in flight, or for a second
                await asyncio.sleep(0.01 if most < 2 else 0)
                most = max(most, filling)
                if most >= 2:
                    break
            await super().read_piece(offset, buffer)
            filling -= 1

    store = bucket(moto, parts_in_flight=2)
    size_bytes, chunk_bytes = 4 * SMALL_CHUNK_BYTES, SMALL_CHUNK_BYTES
    await asyncio.gather(
        *(
            store.put(
                f"run/{name}",
                Counting(content(size_bytes)),
                size_bytes=size_bytes,
                chunk_bytes=chunk_bytes,
                expect=entry_of(content(size_bytes), name, chunk_bytes),
            )
            for name in ("a", "b")
        )
    )
    assert most == 2
    await store.close()


@pytest.mark.parametrize(
    ("size_bytes", "chunk_bytes", "expected"),
    [
        (1 << 40, 64 << 20, 128 << 20),
        (625 << 30, 64 << 20, 64 << 20),
        (100 << 20, 16 << 20, 16 << 20),
        (100 << 20, 4096, 64 << 20),
        (10 << 30, 5 << 30, 5 << 30),
        (100 << 20, 3 << 20, 66 << 20),
    ],
)
def test_parts_are_whole_chunks(size_bytes: int, chunk_bytes: int, expected: int) -> None:
    assert part_bytes(size_bytes, chunk_bytes) == expected


def test_file_that_is_too_large_for_s3_is_refused() -> None:
    with pytest.raises(BadRequest):
        part_bytes(PART_BYTES_MAX * 10_000 + 1, 5 << 30)


async def test_uploads_keep_to_the_bandwidth_cap(moto: str) -> None:
    store = bucket(moto, max_upload_mib_s=50, parts_in_flight=4)
    begin = time.monotonic()
    await store.put(KEY, BytesSource(content(BIG)), size_bytes=BIG, chunk_bytes=SMALL_CHUNK_BYTES)
    assert time.monotonic() - begin >= 10 / 50  # the last part begins after the time of the 10 MiB before it
    await store.close()


async def test_tls_servers_take_the_checksum_as_a_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """boto3's default, a trailer with aws-chunked over https, fails on many servers."""
    certificate, key = self_signed(tmp_path)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    with rclone_server(tmp_path / "buckets", "--cert", str(certificate), "--key", str(key)) as url:
        assert url.startswith("https:")
        store = bucket(url)
        await store.put(KEY, BytesSource(content(BIG)), size_bytes=BIG, chunk_bytes=SMALL_CHUNK_BYTES)
        assert await read_whole(store, KEY, BIG) == content(BIG)
        monkeypatch.delenv("AWS_CA_BUNDLE")
        untrusting = bucket(url)
        with pytest.raises(TierUnreachable, match="no trusted TLS connection"):
            await untrusting.list()
        await untrusting.close()
        await store.close()


@pytest.mark.long
async def test_more_than_a_page_is_listed_and_deleted(rclone: str) -> None:
    store = bucket(rclone, parts_in_flight=8)
    keys = [f"run/a/{index:04d}" for index in range(1010)]
    await asyncio.gather(*(store.put_bytes(key, b"x") for key in keys))
    assert sorted(one.key for one in await store.list("run/")) == keys
    await store.delete(keys)
    assert await store.list() == []
    await store.close()


async def test_manifest_is_deleted_alone_before_the_batch(moto: str) -> None:
    requests = Requests()
    store = bucket(moto, on_request=requests)
    for name in ("manifest.json", "a", "b"):
        await store.put_bytes(f"run/x/{name}", b"x")
    requests.clear()
    await store.delete(["run/x/manifest.json", "run/x/a", "run/x/b"])
    assert requests.operations() == ["delete_object", "delete_objects"]
    await store.close()


# ── faults of the network and of the server ──


class Once:
    """A fault at the first request that matches."""

    def __init__(self, method: str, part_of_path: str, fault: str) -> None:
        self._wanted = (method, part_of_path, fault)
        self.hit = False

    def __call__(self, method: str, path: str) -> str:
        wanted, part_of_path, fault = self._wanted
        if self.hit or method != wanted or part_of_path not in path:
            return ""
        self.hit = True
        return fault


async def test_retry_finds_the_commit_whose_answer_was_lost(moto: str) -> None:
    fault = Once("PUT", "manifest.json", "lose")
    with faulty_proxy(moto, fault) as url:
        store = bucket(url)
        # The retry gets a 412 from its own first attempt: False, and the caller compares.
        assert not await store.put_bytes("run/manifest.json", b"mine", if_absent=True)
        assert await store.get_bytes("run/manifest.json", size_max=10) == b"mine"
        await store.close()
    assert fault.hit


async def test_completed_upload_whose_answer_was_lost_counts_as_done(moto: str) -> None:
    fault = Once("POST", "uploadId=", "lose")
    with faulty_proxy(moto, fault) as url:
        store = bucket(url)
        entry = await store.put(KEY, BytesSource(content(BIG)), size_bytes=BIG, chunk_bytes=SMALL_CHUNK_BYTES)
        assert entry == entry_of(content(BIG), chunk_bytes=SMALL_CHUNK_BYTES)
        assert await read_whole(store, KEY, BIG) == content(BIG)
        await store.close()
    assert fault.hit


@pytest.mark.parametrize(
    ("method", "where"),
    [
        ("PUT", "partNumber=2"),
        pytest.param("POST", "uploads", marks=pytest.mark.long),  # tests/s3/test_upload.py loses each request
        pytest.param("HEAD", "rank-", marks=pytest.mark.long),
    ],
)
async def test_one_lost_or_refused_request_does_not_fail_an_upload(moto: str, method: str, where: str) -> None:
    for what in ("lose", "503"):
        fault = Once(method, where, what)
        with faulty_proxy(moto, fault) as url:
            store = bucket(url)
            await store.put(KEY, BytesSource(content(BIG)), size_bytes=BIG, chunk_bytes=SMALL_CHUNK_BYTES)
            await store.close()
        assert fault.hit


async def test_truncated_answer_is_not_a_success(moto: str) -> None:
    with faulty_proxy(moto, lambda method, path: "cut" if method == "GET" else "") as url:
        store = bucket(url, request_timeout_s=5)
        await store.put_bytes("run/x", content(4096))
        with pytest.raises(TierUnreachable, match=r"cut short|ended after|closed the connection"):
            await store.read("run/x", 0, memoryview(bytearray(4096)))
        with pytest.raises(TierUnreachable, match=r"cut short|ended after|closed the connection"):
            await store.get_bytes("run/x", size_max=4096)
        await store.close()


async def test_server_that_is_down_is_unreachable_at_once() -> None:
    requests = Requests()
    with silent_server() as url:
        pass  # closed again: a port that nobody listens on
    store = bucket(url, on_request=requests)
    for attempt in (store.list(), store.get_bytes("run/x", size_max=1), store.put_bytes("run/x", b"", if_absent=True)):
        with pytest.raises(TierUnreachable, match=r"no connection \(EndpointConnectionError\)"):
            await attempt
    assert requests == [
        ("list_objects_v2", "EndpointConnectionError"),
        ("get_object", "EndpointConnectionError"),
        ("head_object", "EndpointConnectionError"),
    ]
    await store.close()


async def test_silent_server_is_unreachable_within_the_deadline() -> None:
    with silent_server() as url:
        store = bucket(url, request_timeout_s=0.2)
        begin = time.monotonic()
        with pytest.raises(TierUnreachable, match="no answer within the deadline"):
            await store.list()
        assert time.monotonic() - begin < 30
        await store.close()


@pytest.mark.parametrize("status", ["500", "503", "429"])
async def test_server_with_internal_errors_is_unreachable(moto: str, status: str) -> None:
    with faulty_proxy(moto, lambda method, path: status) as url:
        store = bucket(url)
        with pytest.raises(TierUnreachable):
            await store.put(KEY, BytesSource(b"x"), size_bytes=1, chunk_bytes=CHUNK_BYTES, expect=entry_of(b"x"))
        await store.close()


async def test_answer_that_ignores_the_range_is_refused(moto: str) -> None:
    with faulty_proxy(moto, lambda method, path: "whole") as url:
        store = bucket(url)
        await store.put_bytes("run/x", content(4096))
        for offset in (0, 10):
            with pytest.raises(TierUnreachable, match="ignored the range"):
                await store.read("run/x", offset, memoryview(bytearray(10)))
        await store.close()


# ── error messages ──


async def test_wrong_credentials_are_reported_in_one_sentence(rclone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-" + SECRET_KEY)
    store = bucket(rclone)
    with pytest.raises(TierUnreachable, match=r"the secret key does not belong.*\(SignatureDoesNotMatch\)") as error:
        await store.list()
    await store.close()
    assert SECRET_KEY not in str(error.value)
    assert ACCESS_KEY not in str(error.value)

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    store = bucket(rclone)
    with pytest.raises(TierUnreachable, match=r"does not know this access key \(InvalidAccessKeyId\)"):
        await store.list()
    await store.close()

    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    store = bucket(rclone)
    with pytest.raises(TierUnreachable, match="no S3 credentials found"):
        await store.list()
    await store.close()


async def test_missing_bucket_is_unreachable_and_not_empty(moto: str) -> None:
    store = s3_store("s3://no-such-bucket/x", endpoint_url=moto)
    for attempt in (
        store.list(),
        store.get_bytes("run/x", size_max=1),
        store.put_bytes("run/x", b"", if_absent=True),
        store.put(KEY, BytesSource(b"x"), size_bytes=1, chunk_bytes=CHUNK_BYTES, expect=entry_of(b"x")),
    ):
        with pytest.raises(TierUnreachable, match="there is no such bucket"):
            await attempt
    await store.close()


@pytest.mark.parametrize("code", ["InvalidObjectState", "AccessDenied"])
async def test_object_that_is_archived_or_forbidden_does_not_make_the_bucket_unreachable(code: str) -> None:
    with bucket_server() as served:
        store = s3_store(f"s3://{BUCKET}/deep", endpoint_url=served.url, retry_min_s=0.001)
        for name in ("readable", "other"):
            await store.put_bytes(f"run/{name}", name.encode())
        served.script = lambda operation, key: code if key.endswith("other") else ""
        readable, other = await store.get_many(["run/readable", "run/other"], size_max=10)
        assert readable == b"readable"
        assert isinstance(other, TierUnreachable)
        served.script = lambda operation, key: "SlowDown" if key.endswith("other") else ""
        with pytest.raises(TierUnreachable, match="slow down"):
            await store.get_many(["run/readable", "run/other"], size_max=10)
        served.script = lambda operation, key: code if operation == "list_objects_v2" else ""
        with pytest.raises(TierUnreachable):
            await store.list()
        await store.close()


async def test_answer_that_boto3_cannot_parse_is_unreachable() -> None:
    """botocore raises AttributeError for an error whose answer has a checksum's header."""
    with bucket_server() as served:
        store = s3_store(f"s3://{BUCKET}/deep", endpoint_url=served.url, retry_min_s=0.001)
        await store.list()
        client = store.requests.client._connect(signs_payload=False)
        client.meta.events.register("before-parse.s3.ListObjectsV2", lambda **_: [].absent)  # type: ignore[attr-defined]
        with pytest.raises(TierUnreachable, match=r"list .*AttributeError"):
            await store.list()
        await store.close()


async def test_wrong_endpoint_is_unreachable() -> None:
    store = s3_store("s3://bucket", endpoint_url="not a url")
    with pytest.raises(TierUnreachable, match="Invalid endpoint"):
        await store.list()
    await store.close()


class Said(Exception):
    def __init__(self, code: str, status: int = 400) -> None:
        super().__init__(code)
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("NoSuchKey", NotFound),
        ("404", NotFound),
        ("NoSuchUpload", TierUnreachable),
        ("NoSuchBucket", TierUnreachable),
        ("PermanentRedirect", TierUnreachable),
        ("RequestTimeTooSkewed", TierUnreachable),
        ("InvalidObjectState", TierUnreachable),
        ("AccessDenied", TierUnreachable),
        ("SlowDown", TierUnreachable),
        ("BadDigest", TierUnreachable),
        ("QuotaExceeded", Full),
        ("InvalidRange", Corrupt),
        ("SomethingNew", TierUnreachable),
    ],
)
def test_every_answer_of_s3_becomes_a_tierd_error(code: str, kind: type[Exception]) -> None:
    assert type(translate(Said(code), "read x in cold")) is kind


@pytest.mark.parametrize(
    ("code", "trouble"),
    [
        ("SlowDown", Trouble.THROTTLED),
        ("503", Trouble.THROTTLED),
        ("429", Trouble.THROTTLED),
        ("InternalError", Trouble.TRANSIENT),
        ("ConditionalRequestConflict", Trouble.TRANSIENT),
        ("BadDigest", Trouble.CORRUPT),
        ("ExpiredToken", Trouble.CREDENTIALS),
        ("403", Trouble.CREDENTIALS),
        ("NoSuchBucket", Trouble.MISCONFIGURED),
        ("RequestTimeTooSkewed", Trouble.MISCONFIGURED),
        ("PreconditionFailed", Trouble.REFUSED),
        ("NoSuchUpload", Trouble.REFUSED),
        ("SomethingNew", Trouble.REFUSED),
    ],
)
def test_every_error_code_has_one_trouble(code: str, trouble: Trouble) -> None:
    assert trouble_of(Said(code)) is trouble


def test_request_without_an_answer_is_transient() -> None:
    for error in (None, OSError("reset"), TimeoutError()):
        assert trouble_of(error) is Trouble.TRANSIENT


def test_archived_objects_are_named_as_such() -> None:
    assert "restore-object" in translate(Said("InvalidObjectState"), "read x in cold").message


def test_boto3_is_loaded_by_this_module_alone() -> None:
    loaded = (
        "import sys, tierd.tiers.tier, tierd.tiers.directory; print('boto3' in sys.modules, 'botocore' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout == "False False\n"


def test_crc64nvme_is_what_the_s3_server_computes() -> None:
    """The check value of the catalogue of parametrised CRC algorithms, for "123456789"."""
    assert checksum.crc64nvme(b"123456789") == 0xAE8B14860A799888
