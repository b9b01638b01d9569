"""The simulated bucket, through the real S3Store, keeps the contract of a store; and its faults are those it names."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.simulation.bucket import BucketClient, SimulatedBucket
from tests.support.store_contract import KEY, StoreContract
from tierd.config import ColdConfig, LimitsConfig
from tierd.errors import TierUnreachable
from tierd.s3.store import S3Store

ONE_PART = 1 << 30  # multipart uploads are not simulated


@pytest.fixture
def bucket() -> SimulatedBucket:
    return SimulatedBucket(random.Random(1), page_keys=2)


@pytest_asyncio.fixture
async def store(bucket: SimulatedBucket) -> AsyncIterator[S3Store]:
    cold = ColdConfig(name="cold", url="s3://simulated/tier")
    store = S3Store(cold, LimitsConfig(), part_bytes_min=ONE_PART, retry_min_s=0.001)
    store.requests.client = BucketClient(cold, bucket, "node")
    yield store
    await store.close()


class TestSimulatedBucket(StoreContract):
    pass


async def test_a_lost_answer_leaves_the_effect(bucket: SimulatedBucket, store: S3Store) -> None:
    bucket.lost_rate = 1.0
    with pytest.raises(TierUnreachable):
        await store.put_bytes(KEY, b"content")
    assert bucket.objects == {f"tier/{KEY}": b"content"}


async def test_an_error_has_no_effect(bucket: SimulatedBucket, store: S3Store) -> None:
    bucket.error_rate = 1.0
    with pytest.raises(TierUnreachable):
        await store.put_bytes(KEY, b"content")
    assert bucket.objects == {}
    assert bucket.faults == 3  # the attempts of one request


async def test_a_server_may_ignore_conditions(bucket: SimulatedBucket) -> None:
    requests = BucketClient(ColdConfig(url="s3://simulated"), bucket, "node")._connect(signs_payload=False)
    bucket.ignores_conditions = True
    for content in (b"first", b"second"):
        requests.put_object(Bucket="simulated", Key="key", Body=content, IfNoneMatch="*")
    assert bucket.objects["key"] == b"second"
