"""`tierd verify --deep` and `--repair`; without these options see test_verbs.py."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.bucket import Bucket, bucket_server
from tests.support.cli import House, folder_of, make_checkpoint, make_house
from tests.support.damage import WAYS, flip, rot
from tests.support.s3 import BUCKET
from tierd.cold_tier import open_cold_tier
from tierd.config.sections import ColdConfig, LimitsConfig
from tierd.format import layout
from tierd.format.manifest import Manifest
from tierd.tiers.checkpoint_copy import copy_checkpoint
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.tier import Tier


@pytest.fixture
def house(tmp_path: Path) -> House:
    return make_house(tmp_path)


def rows(house: House, *arguments: str, exit_code: int = 0) -> dict[tuple[int, str], Any]:
    result = house.tierd("verify", *arguments, "--json")
    assert result.exit_code == exit_code, result.output
    return {(one["step"], one["tier"]): one for one in msgspec.json.decode(result.stdout)}


# ── repair ──


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tier", ["hot", "cold"])
def test_repair_replaces_a_damaged_file_and_names_the_source(house: House, tier: str, way: str) -> None:
    made = make_checkpoint(house.hot, house.cold)
    name = made.files[1].name
    WAYS[way](house.root / tier, made, name)
    assert house.tierd("verify").exit_code == 12

    result = house.tierd("verify", "--repair")

    other = {"hot": "cold", "cold": "hot"}[tier]
    assert result.exit_code == 0, result.output
    assert f"repaired: step 100 {name} in {tier}, from {other}\n" in result.stdout
    assert result.stdout.endswith("2 of 2 replicas are whole: 80 kB verified\n")
    assert house.tierd("verify").exit_code == 0


def test_repair_of_one_tier_reads_the_others_and_changes_none_of_them(house: House) -> None:
    made = make_checkpoint(house.hot, house.cold)
    flip(house.hot, made, made.files[0].name)
    flip(house.cold, made, made.files[1].name)

    found = rows(house, "--repair", "--tier", "hot")

    assert found[100, "hot"]["repaired"] == {made.files[0].name: "cold"}
    assert list(rows(house, exit_code=12)) == [(100, "hot"), (100, "cold")]
    assert rows(house, "--repair")[100, "cold"]["repaired"] == {made.files[1].name: "hot"}
    assert house.tierd("verify").exit_code == 0


def test_repair_of_a_file_damaged_everywhere_is_refused_and_changes_nothing(house: House) -> None:
    made = make_checkpoint(house.hot, house.cold)
    name = made.files[0].name
    flip(house.hot, made, name)
    flip(house.cold, made, name)
    before = {path: path.read_bytes() for path in house.root.rglob("*") if path.is_file()}

    result = house.tierd("verify", "--repair")

    assert result.exit_code == 12
    assert result.stdout.count("not repaired: ") == 2
    assert {path: path.read_bytes() for path in house.root.rglob("*") if path.is_file()} == before


def test_repair_does_not_choose_between_two_different_manifests(house: House) -> None:
    made = make_checkpoint(house.hot)
    make_checkpoint(house.cold, created_at="2020-01-01T00:00:00.000+00:00")
    found = rows(house, "--repair", exit_code=12)
    damaged = [one for one in found.values() if one["problems"]]
    assert [one["repaired"] for one in damaged] == [{}]
    assert "the manifest differs" in damaged[0]["problems"][0]
    assert made.created_at in (folder_of(house.hot, made) / layout.MANIFEST).read_text()


def test_repair_with_from_or_an_unknown_tier_is_exit_2(house: House) -> None:
    make_checkpoint(house.hot)
    assert house.tierd("verify", "--repair", "--from", house.hot).exit_code == 2
    assert house.tierd("verify", "--repair", "--tier", "dr").exit_code == 2
    assert house.tierd("verify", "--repair", "--tier", "cold").exit_code == 10


# ── buckets ──


@pytest.fixture(params=[True, False], ids=["checksums", "no checksums"])
def served(request: pytest.FixtureRequest) -> Iterator[Bucket]:
    with bucket_server(keeps_checksums=request.param) as found:
        yield found


@pytest.fixture
def with_bucket(tmp_path: Path, served: Bucket) -> tuple[House, Manifest]:
    """A checkpoint in hot and in a bucket."""
    more = f'[[cold]]\nname = "s3"\nurl = "s3://{BUCKET}/deep"\nendpoint_url = "{served.url}"'
    house = make_house(tmp_path, more=more)
    made = make_checkpoint(house.hot)

    async def send() -> None:
        config = ColdConfig(name="s3", url=f"s3://{BUCKET}/deep", endpoint_url=served.url)
        hot, cold = Tier("hot", DirectoryStore(house.hot)), open_cold_tier(config, LimitsConfig())
        await copy_checkpoint(made, hot, cold)
        for tier in (hot, cold):
            await tier.store.close()

    asyncio.run(send())
    return house, made


def test_verify_asks_a_bucket_for_checksums_and_reads_it_only_with_deep(
    with_bucket: tuple[House, Manifest], served: Bucket
) -> None:
    house, made = with_bucket
    result = house.tierd("verify")
    assert result.exit_code == 0
    if served.keeps_checksums:
        assert result.stdout.endswith("80 kB verified (1 read whole, 1 by the bucket's checksums)\n")
    else:
        assert result.stdout.endswith("80 kB verified (1 read whole, 1 size only)\n")
        assert "s3 keeps no checksums" in result.stderr
    weak = "checksum" if served.keeps_checksums else "size"
    assert [one["how"] for one in rows(house).values()] == ["deep", weak]
    shards = {f"deep/{layout.file_key(made.id, entry.name)}" for entry in made.files}
    assert not any(one.operation == "get_object" and one.key in shards for one in served.seen)

    rot(served, "deep", made, made.files[0].name, is_noticed=False)
    assert house.tierd("verify").exit_code == 0
    assert list(rows(house, "--deep", exit_code=12)[100, "s3"]["problems"][0:1]) != []


@pytest.mark.parametrize("is_noticed", [True, False])
def test_damaged_object_is_repaired_from_hot(
    with_bucket: tuple[House, Manifest], served: Bucket, is_noticed: bool
) -> None:
    house, made = with_bucket
    name = made.files[0].name
    rot(served, "deep", made, name, is_noticed=is_noticed)
    assert rows(house, "--deep", "--repair")[100, "s3"]["repaired"] == {name: "hot"}
    assert rows(house, "--deep")[100, "s3"]["is_whole"]


def test_hot_is_repaired_from_a_bucket(with_bucket: tuple[House, Manifest]) -> None:
    house, made = with_bucket
    flip(house.hot, made, made.files[1].name)
    assert rows(house, "--repair")[100, "hot"]["repaired"] == {made.files[1].name: "s3"}


def test_repair_from_an_unreachable_source_changes_nothing(with_bucket: tuple[House, Manifest], served: Bucket) -> None:
    house, made = with_bucket
    flip(house.hot, made, made.files[1].name)
    served.script = lambda operation, key: "AccessDenied"
    result = house.tierd("verify", "--repair", "--tier", "hot")
    assert result.exit_code == 12
    assert "not repaired: " in result.stdout
    served.script = lambda operation, key: ""
    assert house.tierd("verify", "--repair", "--tier", "hot").exit_code == 0
