"""Objects under Object Lock are reported as retained, deleted later, and block nothing else."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import boto3.session
import msgspec
import pytest

from tests.support.bucket import Bucket
from tests.support.rooms import RUN, Rooms, rooms_at
from tests.support.s3 import ACCESS_KEY, BUCKET, SECRET_KEY
from tests.support.s3_store import s3_store
from tests.support.store_contract import KEY, BytesSource, content
from tierd.config.sections import ColdPolicy, LifecycleConfig, TierPolicy
from tierd.errors import Retained, TierUnreachable
from tierd.format import layout
from tierd.format.ids import Generation, Rank, checkpoint_id
from tierd.s3.store import S3Store
from tierd.tiers.tier import Tier
from tierd.workers import retentions
from tierd.workers.reaper import Reaper

LATER = datetime.now(UTC) + timedelta(days=30)


def store_at(url: str) -> S3Store:
    return s3_store(f"s3://{BUCKET}", endpoint_url=url, part_bytes_min=1024, retry_min_s=0.001)


# ── the store ──


@pytest.mark.parametrize(
    ("until", "said"),
    [(LATER, f"until {LATER:%Y-%m-%d %H:%M} UTC"), (None, "as long as its legal hold")],
    ids=["retention", "legal hold"],  # the time of day is no part of a test's name
)
@pytest.mark.parametrize("keys", [["run/a"], ["run/b", "run/a", "run/c"]], ids=["one", "in a batch"])
async def test_delete_of_a_locked_object_raises_retained(
    served: Bucket, until: datetime | None, said: str, keys: list[str]
) -> None:
    store = store_at(served.url)
    for key in keys:
        await store.put_bytes(key, b"x")
    served.locked["run/a"] = until
    with pytest.raises(Retained, match="retained by Object Lock") as told:
        await store.delete(keys)
    assert said in told.value.message
    assert "run/a" in told.value.message
    remaining_s = (until - datetime.now(UTC)).total_seconds() if until else float("inf")
    assert told.value.remaining_s == pytest.approx(remaining_s, abs=600)
    assert list(served.objects) == ["run/a"], "the unlocked object is deleted"
    await store.close()


async def test_access_denied_without_a_lock_is_not_retained(served: Bucket) -> None:
    store = store_at(served.url)
    await store.put_bytes("run/a", b"x")
    served.script = lambda operation, key: "AccessDenied" if operation == "delete_object" else ""
    with pytest.raises(TierUnreachable, match="access denied"):
        await store.delete(["run/a"])
    served.script = lambda operation, key: "AccessDenied"  # not even a HEAD
    with pytest.raises(TierUnreachable, match="access denied"):
        await store.delete(["run/a"])
    await store.close()


@pytest.mark.parametrize("mode", ["GOVERNANCE", pytest.param("COMPLIANCE", marks=pytest.mark.long)])
async def test_versioned_bucket_with_object_lock_lists_no_deleted_objects(moto: str, mode: str) -> None:
    """A delete without a version only adds a delete marker: it is not refused, and frees nothing. Without the
    markers the objects are back."""
    bucket = f"locked-{mode.lower()}"
    session = boto3.session.Session(aws_access_key_id=ACCESS_KEY, aws_secret_access_key=SECRET_KEY)
    client: Any = session.client("s3", endpoint_url=moto, region_name="us-east-1")
    client.create_bucket(Bucket=bucket, ObjectLockEnabledForBucket=True)
    rule = {"DefaultRetention": {"Mode": mode, "Days": 1}}
    client.put_object_lock_configuration(
        Bucket=bucket, ObjectLockConfiguration={"ObjectLockEnabled": "Enabled", "Rule": rule}
    )
    store = s3_store(f"s3://{bucket}", endpoint_url=moto, retry_min_s=0.001)
    data = content(6 << 20)  # in two parts
    # Not a single PUT: moto requires x-amz-sdk-checksum-algorithm for it, AWS does not.
    for _ in range(2):
        for key in (KEY, KEY + "-2"):
            await store.put(key, BytesSource(data), size_bytes=len(data), chunk_bytes=5 << 20)
        await store.delete([KEY, KEY + "-2"])
        assert await store.list() == []
    await store.delete([KEY, KEY + "-2"])
    versions = client.list_object_versions(Bucket=bucket)
    assert len(versions["Versions"]) == 4
    for marker in versions["DeleteMarkers"]:
        client.delete_object(Bucket=bucket, Key=marker["Key"], VersionId=marker["VersionId"])
    assert sorted(stored.key for stored in await store.list()) == [KEY, KEY + "-2"]
    client.close()
    await store.close()


# ── the workers ──


class House:
    """Rooms whose cold tier is a bucket."""

    def __init__(self, rooms: Rooms, served: Bucket) -> None:
        self.rooms, self.served = rooms, served
        rooms.cold["cold"] = rooms.tiers["cold"] = Tier("cold", store_at(served.url))
        self.reaper = Reaper(rooms.context)

    def key(self, step: int, name: str) -> str:
        return layout.file_key(checkpoint_id(RUN, step, 1), name)

    def steps(self) -> list[int]:
        return sorted(int(key.split("/")[1][:12]) for key in self.served.objects if key.endswith("/manifest.json"))

    def told(self) -> list[tuple[str, str, int]]:
        return [(one.stage, one.kind, one.step) for one in self.rooms.incidents.recent()]


@pytest.fixture
async def house(tmp_path: Path, served: Bucket) -> Any:
    """Five checkpoints in hot and in the bucket; cold keeps the newest."""
    keep_one = LifecycleConfig(hot=TierPolicy(keep_last=1), cold=ColdPolicy(keep_last=1, keep_every=0))
    async with rooms_at(tmp_path, lifecycle=keep_one) as rooms:
        found = House(rooms, served)
        for number in range(1, 6):
            await rooms.commit("hot", "cold", step=number * 100, sequence=number)
        await rooms.look()
        yield found


async def test_retained_checkpoint_blocks_no_other_and_is_not_tried_repeatedly(house: House) -> None:
    house.served.locked[house.key(100, layout.MANIFEST)] = LATER
    assert await house.reaper.run_once()
    assert house.steps() == [100, 500], "only the locked one stays"
    assert house.told() == [("reap", "retained", 100)]
    names = [key for key in house.served.objects if "000000000100" in key]
    assert len(names) == 3, "the deletion is refused at the manifest, so the checkpoint is whole"
    house.served.seen.clear()
    for number in (6, 7):
        await house.rooms.commit("hot", "cold", step=number * 100, sequence=number)
        await house.rooms.look()
        assert await house.reaper.run_once()
    assert house.steps() == [100, 700]
    assert [
        one.key for one in house.served.seen if one.operation == "delete_object" and "000000000100" in one.key
    ] == []
    assert len(house.told()) == 1


async def test_retained_checkpoint_is_deleted_after_its_retention(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run has ended and nothing else wakes the reaper."""
    monkeypatch.setattr(retentions, "RETENTION_S_MAX", 0.0)
    house.served.locked[house.key(100, layout.MANIFEST)] = LATER
    assert await house.reaper.run_once()
    assert house.steps() == [100, 500]
    house.served.now = lambda: LATER
    assert await house.reaper.run_once()
    assert house.steps() == [500]


async def test_retained_leftovers_do_not_stop_replication(house: House) -> None:
    """The manifest is deleted, a marker is locked: the marker stays, and new checkpoints are copied."""
    rooms = house.rooms
    await rooms.cold["cold"].mark_milestone(checkpoint_id(RUN, 100, 1), "best", "now")
    house.served.locked[house.key(100, "milestone-best.json")] = LATER
    with pytest.raises(Retained):
        await rooms.cold["cold"].delete(checkpoint_id(RUN, 100, 1))
    await rooms.commit("hot", step=600, sequence=6)
    await rooms.hot.delete(checkpoint_id(RUN, 100, 1))
    house.served.modified = dict.fromkeys(house.served.objects, datetime.now(UTC) - timedelta(days=2))
    rooms.memory.enter(RUN, Generation(1), Rank(0), 1)
    limits = msgspec.structs.replace(rooms.config.limits, cold_list_interval_s=0.0)
    rooms.config = msgspec.structs.replace(rooms.config, limits=limits)
    await rooms.look()
    replicator = rooms.replicator()
    assert await replicator.run_once()
    assert 600 in house.steps()
    assert house.told() == [("replicate", "retained", 100)]
    left = [key for key in house.served.objects if "000000000100" in key]
    assert set(left) == {house.key(100, "gone.json"), house.key(100, "milestone-best.json")}
    await rooms.commit("hot", step=700, sequence=7)
    await rooms.look()
    assert await replicator.run_once()
    assert len(house.told()) == 1
