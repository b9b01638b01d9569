"""The store contract on Ceph, over http and https: a real server that keeps no CRC64NVME."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from uuid import uuid4

import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.support.ceph import ceph_server
from tests.support.s3 import BUCKET, s3_client, self_signed
from tests.support.s3_store import s3_store
from tests.support.store_contract import KEY, BytesSource, StoreContract, content, entry_of, read_whole
from tierd.errors import TierUnreachable
from tierd.s3.store import S3Store

pytestmark = pytest.mark.long

CHUNK_BYTES = 5 << 20
SIZE_BYTES = 5 * CHUNK_BYTES + 77
ENTRY = entry_of(content(SIZE_BYTES), chunk_bytes=CHUNK_BYTES)


@pytest.fixture(scope="module", params=["http", "https"])
def ceph(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        tls = None
        if request.param == "https":
            tls = self_signed(tmp_path_factory.mktemp("tls"))
            patch.setenv("AWS_CA_BUNDLE", str(tls[0]))
        with ceph_server(tls) as url:
            yield url


class Requests(list[str]):
    """The operations that on_request was called with."""

    def __call__(self, operation: str, outcome: str) -> None:
        self.append(operation)


class TestCeph(StoreContract):
    is_atomic = True

    @pytest.fixture
    async def store(self, ceph: str) -> AsyncIterator[S3Store]:
        found = s3_store(f"s3://{BUCKET}/{uuid4().hex}/deep", endpoint_url=ceph)
        yield found
        await found.close()


class Ending(BytesSource):
    """Becomes unreachable at the fourth part."""

    async def read_piece(self, offset: int, buffer: memoryview) -> None:
        if offset >= 3 * CHUNK_BYTES:
            raise TierUnreachable("read hot: out of reach")
        await super().read_piece(offset, buffer)


async def test_interrupted_upload_continues_and_whole_objects_are_not_sent_again(ceph: str) -> None:
    """Proven by MD5, because Ceph returns nothing else."""
    requests = Requests()
    store = s3_store(f"s3://{BUCKET}/{uuid4().hex}", endpoint_url=ceph, parts_in_flight=1, on_request=requests)

    async def put(source: BytesSource) -> list[str]:
        requests.clear()
        await store.put(KEY, source, size_bytes=SIZE_BYTES, chunk_bytes=CHUNK_BYTES, expect=ENTRY)
        return list(requests)

    with pytest.raises(TierUnreachable, match="out of reach"):
        await put(Ending(content(SIZE_BYTES)))
    assert (await put(BytesSource(content(SIZE_BYTES)))).count("upload_part") == 3
    assert await put(BytesSource(content(SIZE_BYTES))) == ["head_object"]
    assert await read_whole(store, KEY, SIZE_BYTES) == content(SIZE_BYTES)
    await store.close()


async def test_age_of_an_abandoned_upload_is_by_the_clock_of_the_server(ceph: str) -> None:
    store = s3_store(f"s3://{BUCKET}/{uuid4().hex}", endpoint_url=ceph)
    await store.requests.request("create_multipart_upload", "begin", Key=store.requests.prefix + KEY)
    assert await store.remove_unfinished(lambda key: key == KEY, grace_s=3600.0) == 0
    assert await store.remove_unfinished(lambda key: key == KEY, grace_s=-3600.0) == 1
    assert await store.remove_unfinished(lambda key: True, grace_s=-3600.0) == 0
    await store.close()


async def test_versions_under_object_lock_outlive_whoever_deletes_or_overwrites(ceph: str) -> None:
    """The recipe of docs/guides/s3.md on a real server: with a default retention, tierd deletes as usual; no version
    can be deleted, and the bytes of each can be read."""
    # Ceph refuses a body without a length.
    client = s3_client(ceph, config=Config(request_checksum_calculation="when_required"))
    bucket = uuid4().hex
    client.create_bucket(Bucket=bucket, ObjectLockEnabledForBucket=True)
    rule = {"DefaultRetention": {"Mode": "COMPLIANCE", "Days": 1}}
    client.put_object_lock_configuration(
        Bucket=bucket, ObjectLockConfiguration={"ObjectLockEnabled": "Enabled", "Rule": rule}
    )
    store = s3_store(f"s3://{bucket}", endpoint_url=ceph)
    await store.put(KEY, BytesSource(content(SIZE_BYTES)), size_bytes=SIZE_BYTES, chunk_bytes=CHUNK_BYTES, expect=ENTRY)
    await store.put_bytes("run/other", b"genuine")
    client.put_object(Bucket=bucket, Key="run/other", Body=b"forged")
    await store.delete([KEY, "run/other"])
    assert await store.list() == []
    versions = client.list_object_versions(Bucket=bucket)["Versions"]
    assert len(versions) == 3
    for version in versions:
        with pytest.raises(ClientError, match="AccessDenied"):
            client.delete_object(Bucket=bucket, Key=version["Key"], VersionId=version["VersionId"])
    found = {
        client.get_object(Bucket=bucket, Key=version["Key"], VersionId=version["VersionId"])["Body"].read()
        for version in versions
    }
    assert found == {content(SIZE_BYTES), b"genuine", b"forged"}
    await store.close()
    client.close()
