"""Requests that would never end are aborted, and expired credentials are read again."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.support.bucket import Bucket, bucket_server
from tests.support.s3 import ACCESS_KEY, BUCKET, SECRET_KEY, self_signed
from tests.support.s3_store import s3_store
from tests.support.store_contract import KEY, BytesSource, content, entry_of
from tierd.errors import TierUnreachable
from tierd.s3 import requests as s3
from tierd.s3.errors import retry_after_s
from tierd.s3.store import S3Store
from tierd.tiers.directory import BUFFERS

CHUNK_BYTES = 16 << 10
SIZE_BYTES = 4 * CHUNK_BYTES


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "SLOWEST_BYTES_PER_S", 1 << 30)


@pytest.fixture(params=["http", "https"])
def served(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    tls = None
    if request.param == "https":
        tls = self_signed(tmp_path)
        monkeypatch.setenv("AWS_CA_BUNDLE", str(tls[0]))
    with bucket_server(tls, part_bytes_min=1024) as found:
        yield found


def store_at(served: Bucket, **options: Any) -> S3Store:
    return s3_store(f"s3://{BUCKET}/deep", endpoint_url=served.url, part_bytes_min=1024, retry_min_s=0.001, **options)


async def put(store: S3Store) -> None:
    data = content(SIZE_BYTES)
    entry = entry_of(data, chunk_bytes=CHUNK_BYTES)
    await store.put(KEY, BytesSource(data), size_bytes=SIZE_BYTES, chunk_bytes=CHUNK_BYTES, expect=entry)


@pytest.mark.parametrize("served", ["https"], indirect=True)  # it waits for seconds
async def test_answer_that_arrives_too_slowly_is_aborted_at_its_deadline(served: Bucket) -> None:
    """A byte now and then keeps every timeout of the socket from expiring."""
    patient, store = store_at(served), store_at(served, request_timeout_s=0.25)
    await patient.put_bytes("run/x", content(4096))
    served.script = lambda operation, key: "drip"
    for attempt in (
        store.list,
        lambda: store.get_bytes("run/x", size_max=4096),
        lambda: store.read("run/x", 0, memoryview(bytearray(4096))),
    ):
        began = time.monotonic()
        with pytest.raises(TierUnreachable, match="did not end within the deadline"):
            await attempt()
        assert time.monotonic() - began < 30
    await store.close()
    await patient.close()


@pytest.mark.parametrize("served", ["https"], indirect=True)  # it waits for seconds
async def test_request_after_an_aborted_one_has_its_own_connection(served: Bucket) -> None:
    patient, store = store_at(served), store_at(served, request_timeout_s=1)
    await patient.put_bytes("run/x", content(4096))
    served.script = lambda operation, key: "drip" if served.count("get_object") == 0 else ""
    assert await store.get_bytes("run/x", size_max=4096) == content(4096)
    assert served.count("get_object") == 2
    await store.close()
    await patient.close()


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param("list_objects_v2", marks=pytest.mark.long),
        "upload_part",
        pytest.param("complete_multipart_upload", marks=pytest.mark.long),
        "get_object",
    ],
)
async def test_server_that_stops_answering_takes_a_bounded_time(served: Bucket, operation: str) -> None:
    patient, store = store_at(served), store_at(served, request_timeout_s=0.2)
    await patient.put_bytes("run/x", b"x")
    served.script = lambda found, key: "silence" if found == operation else ""
    began = time.monotonic()
    attempt = {"list_objects_v2": store.list, "get_object": lambda: store.get_bytes("run/x", size_max=1)}
    with pytest.raises(TierUnreachable, match="within the deadline"):
        await attempt.get(operation, lambda: put(store))()
    assert time.monotonic() - began < 30
    served.script = lambda found, key: ""
    await put(patient)
    await store.close()
    await patient.close()


@pytest.mark.parametrize("served", ["https"], indirect=True)  # it waits for seconds
@pytest.mark.long
async def test_part_whose_source_was_too_slow_is_read_again(served: Bucket) -> None:
    """Only one attempt is aborted, and an upload that lacks a part is never completed."""

    class SlowOnce(BytesSource):
        begun = 0

        async def read_piece(self, offset: int, buffer: memoryview) -> None:
            self.begun += 1
            if self.begun == 2:
                await asyncio.sleep(60)
            await super().read_piece(offset, buffer)

    store = store_at(served, request_timeout_s=2)
    data = content(SIZE_BYTES)
    entry = entry_of(data, chunk_bytes=CHUNK_BYTES)
    await store.put(KEY, SlowOnce(data), size_bytes=SIZE_BYTES, chunk_bytes=CHUNK_BYTES, expect=entry)
    assert served.count("complete_multipart_upload") == 1
    assert await store.get_bytes(KEY, size_max=SIZE_BYTES) == data
    await store.close()


async def test_request_ends_at_once_when_its_caller_is_cancelled(served: Bucket) -> None:
    """A daemon that stops does not wait for a part of 64 MiB."""
    store = store_at(served, request_timeout_s=60, parts_in_flight=2)
    served.script = lambda operation, key: "silence" if operation == "upload_part" else ""
    upload = asyncio.ensure_future(put(store))
    while served.count("upload_part") < 2:
        await asyncio.sleep(0.01)
    began = time.monotonic()
    upload.cancel()
    with pytest.raises(asyncio.CancelledError):
        await upload
    assert time.monotonic() - began < 30
    assert len(served.uploads) == 1, "the next daemon continues it"
    await store.close()


async def test_a_look_is_answered_while_a_fetch_has_all_its_reads_in_flight(served: Bucket) -> None:
    """Over a slow link, a read of 16 MiB takes longer than the time after which a look notes the tier as not known."""
    store = store_at(served, request_timeout_s=60)
    await store.put_bytes("run/x", b"x")
    served.script = lambda operation, key: "silence" if operation == "get_object" else ""
    buffers = [memoryview(bytearray(1)) for _ in range(BUFFERS)]
    reads = [asyncio.ensure_future(store.read("run/x", 0, buffer)) for buffer in buffers]
    while served.count("get_object") < len(reads):
        await asyncio.sleep(0.01)
    look = asyncio.ensure_future(store.stored_checksum("run/x"))
    answered, _ = await asyncio.wait([look], timeout=10)
    for read in reads:
        read.cancel()
    await asyncio.gather(look, *reads, return_exceptions=True)
    await store.close()
    assert answered


def write_credentials(path: Path, access_key: str) -> None:
    path.write_text(f"[default]\naws_access_key_id = {access_key}\naws_secret_access_key = {SECRET_KEY}\n")


async def test_expired_credentials_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of an upload, which continues. Four parts refused at once read the credentials once."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    write_credentials(tmp_path / "credentials", ACCESS_KEY)
    with bucket_server(part_bytes_min=1024) as served:
        store = store_at(served, parts_in_flight=1)

        def expire(operation: str, key: str) -> str:
            if operation == "upload_part" and served.count("upload_part") == 2:
                write_credentials(tmp_path / "credentials", "fresh")
                served.access_keys = {"fresh"}
            return ""

        served.script = expire
        await put(store)
        assert served.count("upload_part") == 5
        assert served.count("create_multipart_upload") == 1

        served.access_keys = {"another"}
        for _ in range(2):
            with pytest.raises(TierUnreachable, match=r"does not know this access key.*check what boto3 finds"):
                await store.list()
        write_credentials(tmp_path / "credentials", "another")
        assert len(await store.list()) == 1, "the daemon continues once the credentials are corrected"
        await store.close()


async def test_expired_token_is_tried_once_more_and_then_reported() -> None:
    with bucket_server() as served:
        store = store_at(served)
        served.script = lambda operation, key: "ExpiredToken"
        with pytest.raises(TierUnreachable, match="the credentials have expired"):
            await store.list()
        assert served.count("list_objects_v2") == 2
        await store.close()


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("RequestTimeTooSkewed", "this machine's clock is wrong"),
        ("AccessDenied", "access denied"),
        ("PermanentRedirect", "the bucket is in another region"),
        ("NoSuchBucket", "there is no such bucket"),
    ],
)
async def test_configuration_error_is_reported_at_the_first_request(code: str, sentence: str) -> None:
    with bucket_server() as served:
        store = store_at(served)
        served.script = lambda operation, key: code
        with pytest.raises(TierUnreachable, match=sentence):
            await store.list()
        # boto3 itself repeats the request in the other region.
        assert served.count("list_objects_v2") == (2 if code == "PermanentRedirect" else 1)
        await store.close()


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("PermanentRedirect", r"the bucket is in another region, eu-west-1 \(PermanentRedirect\)"),
        ("AuthorizationHeaderMalformed", r"the bucket is in another region, eu-west-1 \(Auth"),
        ("AccessDenied", r"access denied, s3:ListBucket \(AccessDenied\)"),
        ("SignatureDoesNotMatch", r"the secret key does not belong to the access key \(Sig"),
    ],
)
async def test_error_message_has_details_of_the_answer(code: str, sentence: str) -> None:
    with bucket_server() as served:
        store = store_at(served)
        served.script = lambda operation, key: code
        with pytest.raises(TierUnreachable, match=sentence):
            await store.list()
        await store.close()


async def test_pause_requested_by_the_server_is_kept() -> None:
    with bucket_server(headers={"Retry-After": "1"}) as served:
        store = store_at(served)
        served.script = lambda operation, key: "" if served.seen else "SlowDown"
        began = time.monotonic()
        assert await store.list() == []
        assert time.monotonic() - began >= 1
        assert served.count("list_objects_v2") == 2
        await store.close()


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7),
        ({"retry-after": "Sat, 01 Nov 2025 10:00:30 GMT", "date": "Sat, 01 Nov 2025 10:00:00 GMT"}, 30),
        ({"retry-after": "soon", "date": "Sat, 01 Nov 2025 10:00:00 GMT"}, 0),
        ({"retry-after": "Sat, 01 Nov 2025 10:00:30 GMT"}, 0),
        ({}, 0),
    ],
)
def test_retry_after_is_seconds_or_a_time_by_the_clock_of_the_server(headers: dict[str, str], seconds: float) -> None:
    error = ClientError({"ResponseMetadata": {"HTTPHeaders": headers}}, "PutObject")  # type: ignore[typeddict-item]
    assert retry_after_s(error) == seconds
    assert retry_after_s(ValueError()) == 0


async def test_certificate_is_checked_against_the_configured_authority(tmp_path: Path) -> None:
    """Verification cannot be turned off."""
    tls = self_signed(tmp_path)
    with bucket_server(tls) as served:
        store = store_at(served)
        with pytest.raises(TierUnreachable, match=r"no trusted TLS connection.*ca_bundle"):
            await store.list()
        await store.close()
        store = store_at(served, ca_bundle=str(tls[0]))
        assert await store.list() == []
        await store.close()


@pytest.mark.parametrize("size_bytes", [100, SIZE_BYTES], ids=["put", "multipart"])
@pytest.mark.parametrize("keeps_checksums", [True, False])
async def test_encryption_is_requested_and_etags_that_are_not_md5_are_not_used(
    size_bytes: int, keeps_checksums: bool
) -> None:
    with bucket_server(part_bytes_min=1024, keeps_checksums=keeps_checksums) as served:
        store = store_at(served, sse="aws:kms", sse_kms_key_id="alias/tierd")
        data = content(size_bytes)
        entry = entry_of(data, chunk_bytes=CHUNK_BYTES)
        for _ in range(2):
            await store.put(KEY, BytesSource(data), size_bytes=size_bytes, chunk_bytes=CHUNK_BYTES, expect=entry)
        await store.put_bytes("run/x", b"x", if_absent=True)
        assert {(one.encryption, one.kms_key_id) for one in served.objects.values()} == {("aws:kms", "alias/tierd")}
        written = sum(count for (key, _), count in served.written.items() if key.endswith(KEY))
        assert written == 1, "recognized by its checksum, or by its bytes"
        assert served.count("get_object") == (0 if keeps_checksums else 1)
        await store.close()


async def test_transfer_manager_is_not_used_where_boto3_prefers_it(
    served: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On such machines boto3 would use its CRT client, which ignores endpoint_url and takes 24 GiB of buffers."""
    monkeypatch.setattr("awscrt.s3.is_optimized_for_system", lambda: True)
    store = store_at(served)
    await put(store)
    assert served.count("upload_part") == SIZE_BYTES // CHUNK_BYTES
    assert await store.get_bytes(KEY, size_max=SIZE_BYTES) == content(SIZE_BYTES)
    await store.close()


@pytest.mark.parametrize("served", ["https"], indirect=True)
async def test_no_connection_changes_the_tls_context_that_all_share(
    served: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that opens a connection reads the context without Python's lock: it would read freed memory."""
    set_protocols, changed = ssl.SSLContext.set_alpn_protocols, list[ssl.SSLContext]()

    def change(context: ssl.SSLContext, protocols: Iterable[str]) -> None:
        changed.append(context)
        set_protocols(context, protocols)

    monkeypatch.setattr(ssl.SSLContext, "set_alpn_protocols", change)
    store = store_at(served)
    await put(store)
    await asyncio.gather(*(store.get_bytes(KEY, size_max=SIZE_BYTES) for _ in range(4)))
    assert len(changed) == 1, "when the context was made"
    await store.close()


async def test_every_body_has_a_checksum_or_signature_and_no_trailer(served: Bucket) -> None:
    """The test server refuses a trailer, and an unsigned body without a checksum."""
    store = store_at(served)
    await put(store)
    await store.put_bytes("run/x", b"x", if_absent=True)
    await store.delete(["run/x", KEY, "run/y"])
    assert {one.status for one in served.seen} <= {200, 204, 404}
    await store.close()
