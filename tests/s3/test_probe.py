"""The advice of `tierd doctor` on many kinds of buckets; the probe leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.support.bucket import Bucket, Stored, bucket_server
from tests.support.s3 import BUCKET, rclone_server, silent_server
from tests.support.s3_store import s3_store
from tierd.config.sections import ColdConfig
from tierd.s3.probe import PREFIX, BucketProbe, endpoint_advice
from tierd.s3.requests import DOCTOR_ACTIONS, NEEDED_ACTIONS
from tierd.s3.upload import unfinished_uploads
from tierd.tiers.probe import Advice

ABORTS = """<LifecycleConfiguration><Rule><ID>a</ID><Filter><Prefix>{prefix}</Prefix></Filter><Status>{status}</Status>
<AbortIncompleteMultipartUpload><DaysAfterInitiation>7</DaysAfterInitiation></AbortIncompleteMultipartUpload>
{more}</Rule></LifecycleConfiguration>"""
EXPIRES = "<NoncurrentVersionExpiration><NoncurrentDays>1</NoncurrentDays></NoncurrentVersionExpiration>"
VERSIONED = "<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
LOCKED = """<ObjectLockConfiguration><ObjectLockEnabled>Enabled</ObjectLockEnabled><Rule><DefaultRetention>
<Mode>COMPLIANCE</Mode><Days>30</Days></DefaultRetention></Rule></ObjectLockConfiguration>"""


@pytest.fixture
def served() -> Iterator[Bucket]:
    with bucket_server(configuration={"lifecycle": lifecycle()}) as found:
        yield found


def lifecycle(prefix: str = "", status: str = "Enabled", more: str = "") -> str:
    return ABORTS.format(prefix=prefix, status=status, more=more)


async def probe(
    url: str, *, url_of_tier: str = f"s3://{BUCKET}/deep", ahead_s: float = 0, **keys: str
) -> dict[str, Advice]:
    """The worst advice of each check."""
    cold = ColdConfig(url=url_of_tier, endpoint_url=url, **keys)  # type: ignore[arg-type]
    store = s3_store(
        cold.url, endpoint_url=url, region=cold.region, sse=cold.sse, request_timeout_s=20, retry_min_s=0.001
    )
    found = await BucketProbe(store.requests, cold, lambda: datetime.now(UTC) + timedelta(seconds=ahead_s)).run()
    await store.close()
    order = ["ok", "note", "warning", "problem"]
    return {one.check: one for one in sorted(found, key=lambda one: order.index(one.verdict))}


def said(found: dict[str, Advice], verdict: str) -> set[str]:
    return {check for check, one in found.items() if one.verdict == verdict}


async def test_fully_capable_bucket_gets_only_ok(served: Bucket) -> None:
    found = await probe(served.url)
    assert {one.verdict for one in found.values()} == {"ok"}, found
    assert said(found, "ok") == {
        *("list", "clock", "put", "checksum", "get", "if_none_match", "damage", "delete"),
        *("multipart", "list_parts", "list_uploads", "abort", "lifecycle"),
    }
    assert served.objects == {}
    assert served.uploads == {}
    below = {one.key for one in served.seen if one.key}
    assert all(key.startswith(f"deep/{PREFIX}") for key in below)


async def test_objects_of_a_probe_are_not_listed(served: Bucket) -> None:
    store = s3_store(f"s3://{BUCKET}/deep", endpoint_url=served.url)
    about = {"Key": f"deep/{PREFIX}x-object", "Body": b"", "ChecksumCRC64NVME": "AAAAAAAAAAA="}
    await store.requests.request("put_object", "put", **about)
    assert await store.list() == []
    await store.close()


async def test_probe_of_moto_and_rclone_completes_and_leaves_nothing(moto: str, tmp_path: Path) -> None:
    store = s3_store(f"s3://{BUCKET}/doctor", endpoint_url=moto)
    found = await probe(moto, url_of_tier=store.url)
    assert said(found, "problem") == set()
    assert said(found, "warning") == {"lifecycle"}
    assert "Contents" not in await store.requests.request("list_objects_v2", "look", Prefix="doctor/")
    assert await unfinished_uploads(store.requests, "doctor/", "look") == []
    await store.close()
    with rclone_server(tmp_path) as url:
        found = await probe(url)
        assert said(found, "problem") == set()
        assert {"checksum", "if_none_match", "damage"} <= said(found, "note"), "this server verifies nothing"
        assert [path for path in (tmp_path / BUCKET).rglob("*") if path.is_file()] == []


SHORT = {"put_object", "delete_objects", "list_parts", "get_bucket_lifecycle_configuration"}


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(each, marks=() if each in SHORT else pytest.mark.long)
        for each in (*NEEDED_ACTIONS, *DOCTOR_ACTIONS)
    ],
)
async def test_each_missing_permission_is_named(served: Bucket, operation: str) -> None:
    served.script = lambda found, key: "AccessDenied" if found == operation else ""
    found = await probe(served.url)
    if operation in DOCTOR_ACTIONS:
        assert said(found, "problem") == set()
        assert any(f"needs {DOCTOR_ACTIONS[operation]}" in one.message for one in found.values())
        return
    told = [one for one in found.values() if f"this identity needs {NEEDED_ACTIONS[operation]}" in one.message]
    assert [one.verdict for one in told] == ["problem"]
    assert told[0].exit_code == 14
    if operation not in ("delete_object", "list_multipart_uploads", "abort_multipart_upload"):
        assert (served.objects, served.uploads) == ({}, {})


async def test_absent_object_answered_with_403_is_reported_only_where_its_key_cannot_be_listed(served: Bucket) -> None:
    """As AWS answers an identity that may list only with a prefix, or not at all."""
    served.script = lambda operation, key: "AccessDenied" if "head" in operation and not served.objects else ""
    assert "absent" not in await probe(served.url)
    served.script = lambda operation, key: (
        "AccessDenied" if operation == "list_objects_v2" or ("head" in operation and not served.objects) else ""
    )
    found = await probe(served.url)
    assert "its key cannot be listed" in found["absent"].message


@pytest.mark.parametrize(
    ("configuration", "check", "sentence"),
    [
        ({}, "lifecycle", "no lifecycle rule"),
        ({"lifecycle": lifecycle(prefix="elsewhere/")}, "lifecycle", "no lifecycle rule"),
        ({"lifecycle": lifecycle(status="Disabled")}, "lifecycle", "no lifecycle rule"),
        ({"lifecycle": lifecycle("deep/"), "versioning": VERSIONED}, "versioning", "no rule expires old versions"),
        ({"lifecycle": lifecycle(), "object-lock": LOCKED}, "object_lock", "for 30 days (COMPLIANCE)"),
    ],
)
async def test_configuration_that_is_billed_forever_is_reported(
    configuration: dict[str, str], check: str, sentence: str
) -> None:
    with bucket_server(configuration=configuration) as served:
        found = await probe(served.url)
    assert said(found, "warning") == {check}
    assert sentence in found[check].message


async def test_versions_that_expire_are_ok() -> None:
    configuration = {"lifecycle": lifecycle(more=EXPIRES), "versioning": VERSIONED}
    with bucket_server(configuration=configuration) as served:
        assert said(await probe(served.url), "warning") == set()


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("NoSuchBucket", "there is no such bucket"),
        ("InvalidAccessKeyId", "S3 does not know this access key"),
        ("SignatureDoesNotMatch", "the secret key does not belong"),
        ("PermanentRedirect", "the bucket is in another region, eu-west-1"),
        ("RequestTimeTooSkewed", "this machine's clock is wrong"),
    ],
)
async def test_unreachable_bucket_is_reported_in_one_sentence(served: Bucket, code: str, sentence: str) -> None:
    served.script = lambda operation, key: code
    found = await probe(served.url)
    assert said(found, "problem") == {"reach"}
    assert sentence in found["reach"].message
    assert {one.operation for one in served.seen} <= {"list_objects_v2", "head_object"}


async def test_silent_server_takes_a_bounded_time() -> None:
    with silent_server() as url:
        store = s3_store(f"s3://{BUCKET}", endpoint_url=url, request_timeout_s=0.1)
        found = await BucketProbe(store.requests, ColdConfig(url=f"s3://{BUCKET}"), lambda: datetime.now(UTC)).run()
        assert [one.verdict for one in found] == ["problem"]
        await store.close()


async def test_different_clock_region_and_encryption_are_reported() -> None:
    with bucket_server(
        configuration={"lifecycle": lifecycle()}, headers={"x-amz-bucket-region": "eu-west-1"}
    ) as served:
        found = await probe(served.url, ahead_s=120, region="us-east-1")
        assert "s off the server's" in found["clock"].message
        assert "the bucket is in eu-west-1" in found["region"].message
        assert said(found, "warning") == {"clock", "region"}
        found = await probe(served.url, region="eu-west-1", sse="AES256")
        assert said(found, "warning") == set()


async def test_server_that_refuses_checksums_is_reported_and_probed_without() -> None:
    with bucket_server(keeps_checksums=False, refuses={"x-amz-checksum": "InvalidRequest"}) as served:
        found = await probe(served.url)
        assert said(found, "problem") == set()
        assert "signed instead" in found["checksum"].message


async def test_probe_cancelled_at_any_request_leaves_nothing(served: Bucket) -> None:
    """Ctrl-C: the probe only removes its objects."""
    for operation in ("put_object", "upload_part", "list_parts", "get_bucket_versioning"):
        served.held.clear()
        served.seen.clear()
        served.script = lambda found, key, operation=operation: "hold" if found == operation else ""
        running = asyncio.ensure_future(probe(served.url))
        await asyncio.to_thread(served.held.wait, 60)
        served.script = lambda found, key: ""
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        assert running.cancelled()
        assert (served.objects, served.uploads) == ({}, {}), operation


async def test_objects_of_a_killed_probe_are_removed_after_an_hour(served: Bucket) -> None:
    now = served.now
    served.now = lambda: now() - timedelta(hours=2)
    store = s3_store(f"s3://{BUCKET}/deep", endpoint_url=served.url)
    await store.requests.request("create_multipart_upload", "begin", Key=f"deep/{PREFIX}old-upload")
    served.now = now
    await store.requests.request("create_multipart_upload", "begin", Key=f"deep/{PREFIX}young-upload")
    await store.close()
    for name, age in (("old", timedelta(hours=2)), ("young", timedelta(0))):
        served.objects[f"deep/{PREFIX}{name}-object"] = Stored(b"", '"x"', 0)
        served.modified[f"deep/{PREFIX}{name}-object"] = now() - age
    await probe(served.url)
    assert [*served.objects, *(one.key for one in served.uploads.values())] == [
        f"deep/{PREFIX}young-object",
        f"deep/{PREFIX}young-upload",
    ]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"endpoint_url": "http://s3.example.com:9000"}, "anyone on the way can read"),
        ({"endpoint_url": "http://8.8.8.8"}, "anyone on the way can read"),
        ({"endpoint_url": "https://s3.eu-west-1.amazonaws.com", "region": "us-east-1"}, "endpoint_url is in eu-west-1"),
        ({"endpoint_url": "http://10.1.2.3:9000"}, "anyone on the way can read"),
        ({"endpoint_url": "http://minio:9000"}, "anyone on the way can read"),
        ({"endpoint_url": "http://127.0.0.1:9000"}, ""),
        ({"endpoint_url": "http://localhost:9000"}, ""),
        ({"endpoint_url": "http://[::1]:9000"}, ""),
        ({"endpoint_url": "https://s3.example.com"}, ""),
        ({"region": "eu-west-1"}, ""),
    ],
)
def test_endpoint_is_checked_from_the_config_alone(keys: dict[str, str], said: str) -> None:
    found = [one.message for one in endpoint_advice(ColdConfig(url="s3://bucket", **keys))]  # type: ignore[arg-type]
    assert len(found) == bool(said)
    assert all(said in one for one in found)
