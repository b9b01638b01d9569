"""Storage classes of new objects, and errors for archived ones."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.bucket import Bucket, bucket_server
from tests.support.cli import House, make_checkpoint
from tests.support.s3 import BUCKET
from tests.support.s3_store import s3_store
from tests.support.store_contract import KEY, BytesSource, content, entry_of
from tierd.cold_tier import open_cold_tier
from tierd.config.sections import ColdConfig, LimitsConfig
from tierd.errors import TierUnreachable
from tierd.format.manifest import Manifest
from tierd.s3.store import S3Store
from tierd.tiers.checkpoint_copy import copy_checkpoint
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.tier import Tier

CHUNK_BYTES = 16 << 10


def store_at(url: str, storage_class: str = "", lasting: str = "") -> S3Store:
    return s3_store(
        f"s3://{BUCKET}/deep",
        endpoint_url=url,
        part_bytes_min=1024,
        retry_min_s=0.001,
        storage_class=storage_class,
        milestone_storage_class=lasting,
    )


async def put(store: S3Store, key: str = KEY, *, size_bytes: int = CHUNK_BYTES, is_lasting: bool = False) -> None:
    data = content(size_bytes)
    await store.put(
        key,
        BytesSource(data),
        size_bytes=size_bytes,
        chunk_bytes=CHUNK_BYTES,
        expect=entry_of(data, chunk_bytes=CHUNK_BYTES),
        is_lasting=is_lasting,
    )


def classes(served: Bucket) -> dict[str, str]:
    return {key.rpartition("/")[2]: stored.storage_class for key, stored in served.objects.items()}


@pytest.mark.parametrize(
    ("storage_class", "lasting", "expected"),
    [
        ("", "", ("", "")),
        ("STANDARD_IA", "", ("STANDARD_IA", "STANDARD_IA")),
        ("", "GLACIER_IR", ("", "GLACIER_IR")),
        ("STANDARD", "DEEP_ARCHIVE", ("STANDARD", "DEEP_ARCHIVE")),
    ],
)
@pytest.mark.parametrize("size_bytes", [100, 3 * CHUNK_BYTES + 7], ids=["put", "multipart"])
async def test_files_have_a_storage_class_and_small_objects_have_none(
    served: Bucket, storage_class: str, lasting: str, expected: tuple[str, str], size_bytes: int
) -> None:
    store = store_at(served.url, storage_class, lasting)
    await put(store, "run/churn", size_bytes=size_bytes)
    await put(store, "run/lasting", size_bytes=size_bytes, is_lasting=True)
    await store.put_bytes("run/manifest.json", b"{}")
    assert classes(served) == {"churn": expected[0], "lasting": expected[1], "manifest.json": ""}
    await store.close()


async def test_archived_object_is_reported_at_once_and_readable_after_its_restore(served: Bucket) -> None:
    store = store_at(served.url, lasting="GLACIER")
    await put(store, is_lasting=True)
    assert [one.key for one in await store.list()] == [KEY]
    served.seen.clear()
    with pytest.raises(TierUnreachable, match="it is archived: restore it with `aws s3api restore-object`") as told:
        await store.read(KEY, 0, memoryview(bytearray(CHUNK_BYTES)))
    assert told.value.exit_code == 14
    assert f"{KEY} in cold (s3://{BUCKET}/deep)" in told.value.message
    assert served.count("get_object") == 1, "no further attempt"
    served.thawed.add(f"deep/{KEY}")
    back = bytearray(CHUNK_BYTES)
    await store.read(KEY, 0, memoryview(back))
    assert back == content(CHUNK_BYTES)
    await store.close()


@pytest.mark.parametrize("keeps_checksums", [True, False], ids=["checksums", "etags"])
async def test_archived_object_is_not_sent_again(keeps_checksums: bool) -> None:
    """A HEAD is answered in every storage class."""
    with bucket_server(part_bytes_min=1024, keeps_checksums=keeps_checksums) as served:
        store = store_at(served.url, lasting="DEEP_ARCHIVE")
        for _ in range(2):
            await put(store, size_bytes=3 * CHUNK_BYTES, is_lasting=True)
        assert set(served.written.values()) == {1}
        await store.close()


async def test_unknown_storage_class_is_reported_with_the_config_keys(served: Bucket) -> None:
    store = store_at(served.url, "CHEAPEST")
    with pytest.raises(TierUnreachable, match="no such storage class") as told:
        await put(store)
    assert "storage_class" in told.value.hint
    assert served.count("put_object") == 1
    await store.close()


async def test_archived_object_of_another_server_is_reported_alike(moto: str) -> None:
    store = store_at(moto, lasting="GLACIER")
    await put(store, is_lasting=True)
    with pytest.raises(TierUnreachable, match="restore-object"):
        await store.read(KEY, 0, memoryview(bytearray(1)))
    await store.close()


# ── checkpoints ──


def cold_config(served: Bucket) -> ColdConfig:
    return ColdConfig(url=f"s3://{BUCKET}", endpoint_url=served.url, milestone_storage_class="GLACIER")


async def copied(root: Path, served: Bucket, manifest: Manifest, milestones: list[str]) -> None:
    hot = Tier("hot", DirectoryStore(root))
    cold = open_cold_tier(cold_config(served), LimitsConfig())
    await copy_checkpoint(manifest, hot, cold, milestones=milestones)
    for tier in (hot, cold):
        await tier.store.close()


@pytest.fixture
def archived(tmp_path: Path, served: Bucket) -> House:
    """A config whose only replica of step 200 is archived; step 100, not a milestone, is in cold too."""
    house = House(tmp_path)
    house.config.write_text(
        f'[hot]\npath = "empty"\n[[cold]]\nurl = "s3://{BUCKET}"\nendpoint_url = "{served.url}"\n'
        'milestone_storage_class = "GLACIER"\n'
    )
    for step, milestones in ((100, []), (200, ["best"])):
        asyncio.run(copied(house.hot, served, make_checkpoint(house.hot, step=step), milestones))
    return house


def test_shards_of_a_milestone_are_archived_and_its_markers_are_not(archived: House, served: Bucket) -> None:
    found = {key: stored.storage_class for key, stored in served.objects.items() if "000000000200" in key}
    by_name = {key.rpartition("/")[2]: one for key, one in found.items()}
    assert by_name == {
        "rank-00000-of-00002.safetensors": "GLACIER",
        "rank-00001-of-00002.safetensors": "GLACIER",
        "manifest.json": "",
        "milestone-best.json": "",
    }
    assert [row["step"] for row in archived.json("ls")] == [200, 100]


def test_restore_of_an_archived_checkpoint_says_what_to_do_first(archived: House, served: Bucket) -> None:
    target = archived.root / "restored"
    result = archived.tierd("restore", "--step", "200", "--to", target)
    assert result.exit_code == 14
    assert "it is archived: restore it with `aws s3api restore-object`" in result.stderr
    assert not target.exists()
    assert archived.tierd("restore", "--step", "100", "--to", target).exit_code == 0
    served.thawed |= set(served.objects)
    assert archived.tierd("restore", "--step", "200", "--to", archived.root / "thawed").exit_code == 0


@pytest.mark.parametrize(
    "verb", [("verify", "--deep"), pytest.param(("drill",), marks=pytest.mark.long)], ids=["verify", "drill"]
)
def test_verify_and_drill_report_an_archived_checkpoint_as_restore_does(archived: House, verb: tuple[str]) -> None:
    """Not as damaged: exit code 14 when it was the only one, 3 when others could be verified."""
    result = archived.tierd(*verb, "--step", "200")
    assert result.exit_code == 14
    assert "it is archived: restore it with `aws s3api restore-object`" in result.output
    if verb[0] == "verify":
        assert archived.tierd(*verb).exit_code == 3
        assert archived.tierd("verify").exit_code == 0, "a HEAD is answered"
    make_checkpoint(archived.root / "empty", step=200)
    assert archived.tierd(*verb, "--step", "200").exit_code == 3
