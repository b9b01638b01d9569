"""A manifest that is too large, or lies about sizes, is one unreadable checkpoint and costs no memory or disk space."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.cli import House, folder_of, make_checkpoint, make_house, make_manifest
from tests.support.daemon import Daemon
from tests.support.wire_peer import Peer
from tierd.catalog.catalog import Catalog
from tierd.catalog.listing import refresh
from tierd.config.sections import LimitsConfig
from tierd.errors import Corrupt, TierdError, Unsupported
from tierd.format import wire
from tierd.format.ids import CheckpointId, checkpoint_id
from tierd.format.manifest import Manifest, file_entry
from tierd.format.signature import new_key, parse_keys
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.tier import Tier

MIB = 1 << 20


@pytest.fixture
def house(tmp_path: Path) -> House:
    return make_house(tmp_path)


def forge(root: Path, *, size_bytes: int, step: int = 500, run: str = "forged", chunk_bytes: int = 4096) -> Manifest:
    """A committed checkpoint with a valid manifest of about `size_bytes` bytes and a sparse shard."""
    numbers = random.Random(step)
    chunks = [numbers.getrandbits(64) for _ in range(size_bytes // 20)]
    entry = file_entry("rank-00000-of-00001.safetensors", len(chunks) * chunk_bytes, chunk_bytes, chunks)
    manifest = make_manifest(checkpoint_id(run, step, 1), [entry])
    folder = folder_of(root, manifest)
    folder.mkdir(parents=True)
    with (folder / entry.name).open("wb") as shard:
        shard.truncate(entry.size_bytes)
    (folder / "manifest.json").write_bytes(manifest.encode())
    return manifest


def listed(root: Path, **limits: int) -> tuple[Catalog, Tier]:
    async def list_it() -> tuple[Catalog, Tier]:
        tier = Tier("hot", DirectoryStore(root), limits=LimitsConfig(**limits))
        catalog = Catalog(["hot"])
        await refresh(catalog, tier)
        await tier.store.close()
        return catalog, tier

    return asyncio.run(list_it())


def unreadable(catalog: Catalog) -> dict[CheckpointId, str]:
    return {checkpoint: why for (_, checkpoint), why in catalog.unreadable().items()}


def test_a_manifest_above_the_limit_is_one_unreadable_checkpoint_with_the_key_that_says_so(house: House) -> None:
    good = make_checkpoint(house.hot)
    forged = forge(house.hot, size_bytes=2 * MIB)
    catalog, _ = listed(house.hot, manifest_mib_max=1)
    assert [entry.id for entry in catalog.entries()] == [good.id]
    (why,) = unreadable(catalog).values()
    assert f"{forged.id} in hot: its manifest of " in why
    assert "limits.manifest_mib_max is 1" in why


def test_large_manifests_displace_no_small_one_from_the_memory_of_all(house: House) -> None:
    small = [make_checkpoint(house.hot, step=step, sequence=step) for step in (1, 2, 3)]
    large = [forge(house.hot, size_bytes=MIB // 2, step=step) for step in range(1000, 1004)]
    path = folder_of(house.hot, large[0]) / "manifest.json"
    path.write_bytes(path.read_bytes().ljust(MIB))  # the same JSON with spaces: alone, it takes all of the memory
    catalog, _ = listed(house.hot, manifests_mib_max=1)
    assert {manifest.id for manifest in small} <= {entry.id for entry in catalog.entries()}
    refused = unreadable(catalog)
    assert len(catalog.entries()) + len(refused) == len(small) + len(large)
    assert set(refused) < {manifest.id for manifest in large}
    assert len(refused) >= 3
    assert all("limits.manifests_mib_max" in why for why in refused.values())


def test_manifests_in_another_tier_count_and_replicas_of_them_do_not(house: House) -> None:
    forge(house.hot, size_bytes=MIB // 2)
    forge(house.cold, size_bytes=MIB // 2)
    forge(house.cold, size_bytes=MIB // 2, run="other")

    async def list_both() -> Catalog:
        catalog = Catalog(["hot", "cold"])
        for name, root in (("hot", house.hot), ("cold", house.cold)):
            tier = Tier(name, DirectoryStore(root), limits=LimitsConfig(manifests_mib_max=1))
            await refresh(catalog, tier)
            await tier.store.close()
        return catalog

    catalog = asyncio.run(list_both())
    assert [sorted(entry.tiers) for entry in catalog.entries(catalog.runs()[0])] == [["cold", "hot"]]
    assert [checkpoint.run for checkpoint in unreadable(catalog)] == ["other"]


def test_a_manifest_that_is_replaced_by_a_larger_one_after_its_listing_is_not_read(house: House) -> None:
    manifest = make_checkpoint(house.hot)

    async def read() -> object:
        tier = Tier("hot", DirectoryStore(house.hot))
        path = folder_of(house.hot, manifest) / "manifest.json"
        size_bytes = path.stat().st_size
        path.write_bytes(path.read_bytes().ljust(MIB))  # the same JSON with spaces
        (error,) = await tier.manifests([manifest.id], size_max=size_bytes)
        await tier.store.close()
        return error

    assert isinstance(asyncio.run(read()), Corrupt)


def test_the_event_loop_goes_on_while_a_large_manifest_is_checked(house: House) -> None:
    forge(house.hot, size_bytes=4 * MIB)

    async def count_ticks() -> tuple[int, float, float]:
        tier = Tier("hot", DirectoryStore(house.hot))
        catalog = Catalog(["hot"])
        ticks, longest_s = 0, 0.0
        listing = asyncio.create_task(refresh(catalog, tier))
        began_s = last_s = time.monotonic()
        while not listing.done():
            await asyncio.sleep(0.001)
            longest_s = max(longest_s, time.monotonic() - last_s)
            last_s = time.monotonic()
            ticks += 1
        await tier.store.close()
        assert len(catalog.entries()) == 1
        return ticks, longest_s, last_s - began_s

    ticks, longest_s, in_all_s = asyncio.run(count_ticks())
    assert ticks > 20
    assert longest_s < in_all_s / 2, "one call blocked the loop for most of the time"


def test_a_checkpoint_with_a_manifest_above_the_limit_is_not_committed(house: House) -> None:
    chunks = [1] * (2 * MIB // 20)
    entry = file_entry("rank-00000-of-00001.safetensors", len(chunks) * 4096, 4096, chunks)

    async def commit() -> None:
        tier = Tier("hot", DirectoryStore(house.hot), limits=LimitsConfig(manifest_mib_max=1))
        try:
            await tier.commit(make_manifest(checkpoint_id("run", 1, 1), [entry]))
        finally:
            await tier.store.close()

    with pytest.raises(Unsupported, match="its manifest has"):
        asyncio.run(commit())
    assert list(house.hot.rglob("manifest.json")) == []


def refusal_of_a_find(peer: Peer) -> wire.Refused:
    find = wire.Find(request=1, step=500, generation=1, milestone=None, tier="cold", exclude=[], allow_unhealthy=True)
    peer.send(find)
    answer = wire.decode_to_client(peer.socket.recv(wire.MESSAGE_BYTES_MAX))
    while isinstance(answer, wire.Progress):
        answer = wire.decode_to_client(peer.socket.recv(wire.MESSAGE_BYTES_MAX))
    assert isinstance(answer, wire.Refused), answer
    return answer


def allocated_bytes(root: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in root.rglob("*") if path.is_file())


def test_a_shard_that_is_smaller_than_its_manifest_says_reserves_no_space(tmp_path: Path) -> None:
    """The forged manifest and shard agree when the tier is listed; the shard is replaced before it is fetched."""
    with Daemon(tmp_path) as daemon, Peer(daemon.socket) as peer:
        manifest = forge(daemon.cold, size_bytes=40 * 20, run="run", chunk_bytes=64 * MIB)
        assert manifest.size_bytes > 2 << 30
        peer.greet("run")  # lists the run
        os.truncate(folder_of(daemon.cold, manifest) / manifest.files[0].name, 100)
        assert "is missing or has another size" in refusal_of_a_find(peer).message
        assert allocated_bytes(daemon.hot) < MIB


def test_a_fetch_without_one_valid_chunk_leaves_no_reserved_space(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon, Peer(daemon.socket) as peer:
        forge(daemon.cold, size_bytes=200 * 20, run="run", chunk_bytes=64 << 10)  # 13 MB of zeros, other checksums
        peer.greet("run")
        assert refusal_of_a_find(peer).kind == "corrupt"
        assert allocated_bytes(daemon.hot) < MIB


# ── with a key ──


async def test_manifests_that_nobody_signed_halt_nothing_and_take_no_memory_from_signed_ones(tmp_path: Path) -> None:
    """Whoever can write to a bucket can put small and large ones there."""
    keyring = parse_keys(new_key().line, where="test")
    limits = LimitsConfig(manifest_mib_max=1, manifests_mib_max=1)
    for step in range(1, 11):
        forge(tmp_path, size_bytes=MIB // 5, step=step)
    forge(tmp_path, size_bytes=2 * MIB, step=20)
    signed = []
    for step in (100, 101, 102):
        manifest = forge(tmp_path, size_bytes=2 * MIB // 5, step=step, run="run")
        signed.append(keyring.sign_manifest(manifest))
        (folder_of(tmp_path, manifest) / "manifest.json").write_bytes(signed[-1].encode())
    tier, catalog = Tier("cold", DirectoryStore(tmp_path), limits=limits, keyring=keyring), Catalog(["hot", "cold"])
    await refresh(catalog, tier)
    assert len(catalog.foreign()) == 11
    assert {entry.id for entry in catalog.entries()} < {manifest.id for manifest in signed}
    assert len(catalog.entries()) == 2
    (why,) = unreadable(catalog).values()
    assert "limits.manifests_mib_max" in why, "a signed one that exceeds the limit is genuine, and halts deletions"
    await tier.store.close()


async def test_foreign_manifest_is_read_again_only_when_it_has_changed(tmp_path: Path) -> None:
    keyring = parse_keys(new_key().line, where="test")
    first, second = [forge(tmp_path, size_bytes=1000, step=step) for step in (1, 2)]
    tier, catalog = Tier("cold", DirectoryStore(tmp_path), keyring=keyring), Catalog(["hot", "cold"])
    read: list[str] = []
    real = tier.store.get_many

    async def get_many(keys: Sequence[str], *, size_max: int) -> Sequence[bytes | TierdError]:
        read.extend(keys)
        return await real(keys, size_max=size_max)

    tier.store.get_many = get_many  # type: ignore[method-assign]
    await refresh(catalog, tier)
    assert len(read) == 2
    await refresh(catalog, tier)
    assert len(read) == 2
    assert len(catalog.foreign()) == 2
    (folder_of(tmp_path, second) / "manifest.json").write_bytes(keyring.sign_manifest(second).encode())
    await refresh(catalog, tier)
    assert len(read) == 3
    assert [entry.id for entry in catalog.entries()] == [second.id]
    assert tier.foreign.keys() == {first.id}
    shutil.rmtree(folder_of(tmp_path, first))
    await refresh(catalog, tier)
    assert not tier.foreign
    await tier.store.close()
