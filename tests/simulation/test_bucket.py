"""The simulated bucket, through the real S3Store, keeps the contract of a store; and its faults are those it names."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from tests.support.cli import make_manifest
from tests.support.simulation.bucket import BucketClient, SimulatedBucket
from tests.support.store_contract import CHUNK_BYTES, KEY, BytesSource, StoreContract
from tierd.config.sections import ColdConfig, LimitsConfig
from tierd.errors import TierUnreachable
from tierd.format import layout
from tierd.format.ids import Rank, checkpoint_id
from tierd.format.manifest import FileEntry
from tierd.format.node_file import as_part
from tierd.s3.store import S3Store
from tierd.tiers.checkpoint_copy import copy_part
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.tier import Tier

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


async def test_a_listing_until_a_key_asks_for_no_page_after_it(bucket: SimulatedBucket, store: S3Store) -> None:
    keys = [f"run/a/{index}" for index in range(7)]
    for key in keys:
        bucket.write(f"tier/{key}", b"x")
    found = await store.list("run/a/", until="run/a/2")
    assert [stored.key for stored in found] == keys[:4]  # two pages of two


async def test_a_part_is_checked_without_a_listing_of_the_other_shards(
    bucket: SimulatedBucket, store: S3Store, tmp_path: Path
) -> None:
    checkpoint, world_size, ranks = checkpoint_id("run", 10, 1), 100, [40, 41]
    entries: list[FileEntry] = []
    hot = Tier("hot", DirectoryStore(tmp_path))
    for rank in range(world_size):
        name = layout.shard_name(Rank(rank), world_size)
        bucket.write(f"tier/{layout.file_key(checkpoint, name)}", b"shard")
        if rank in ranks:
            key = layout.file_key(checkpoint, name)
            entries.append(await hot.store.put(key, BytesSource(b"shard"), size_bytes=5, chunk_bytes=CHUNK_BYTES))
    whole = as_part(make_manifest(checkpoint, entries))
    part = msgspec.structs.replace(whole, world_size=world_size, ranks=ranks)
    listed: list[list[str]] = []
    bucket.on_listed = lambda node, prefix, keys: listed.append(list(keys))
    await copy_part(part, hot, Tier("cold", store), lambda: part)
    await hot.store.close()
    assert [len(keys) for keys in listed] == [10]  # ranks 40 to 49


async def test_a_server_may_ignore_conditions(bucket: SimulatedBucket) -> None:
    requests = BucketClient(ColdConfig(url="s3://simulated"), bucket, "node")._connect(signs_payload=False)
    bucket.ignores_conditions = True
    for content in (b"first", b"second"):
        requests.put_object(Bucket="simulated", Key="key", Body=content, IfNoneMatch="*")
    assert bucket.objects["key"] == b"second"
