from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from tests.support.kill import kill_when_stalled
from tests.support.s3 import BUCKET, faulty_proxy
from tests.support.store_contract import BytesSource, content, entry_of
from tierd.cold_tier import open_cold_tier
from tierd.config.sections import ColdConfig, LimitsConfig
from tierd.errors import Corrupt, NewerFormat, NotFound, TierdError, TierUnreachable, Unsupported
from tierd.format import layout
from tierd.format.claim import Claim
from tierd.format.health import Diagnosis
from tierd.format.ids import CheckpointId, Generation, Run, checkpoint_id
from tierd.format.manifest import FORMAT_VERSION, FileEntry, Manifest
from tierd.format.signature import Keyring, new_key
from tierd.tiers.checkpoint_copy import copy_checkpoint
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.tier import Tier
from tierd.transfer.verify import verify_files
from tierd.workers.recovery import clear_uncommitted

CHUNK_BYTES = 5 << 20
SHARDS = [content((5 << 20) + 4097), content(12345)]
ID = checkpoint_id("run42", 18000, 3)
TOMBSTONE = layout.file_key(ID, layout.GONE)


def manifest(checkpoint: CheckpointId = ID, **changes: object) -> Manifest:
    files = [
        entry_of(data, f"rank-{rank:05d}-of-{len(SHARDS):05d}.safetensors", CHUNK_BYTES)
        for rank, data in enumerate(SHARDS)
    ]
    found = Manifest(
        format_version=FORMAT_VERSION,
        run=checkpoint.run,
        step=checkpoint.step,
        generation=checkpoint.generation,
        sequence=1,
        parent=None,
        world_size=len(SHARDS),
        created_at="2026-01-01T00:00:00Z",
        kind="snapshot",
        metrics={"loss": 0.5},
        architecture_hash="0" * 16,
        versions={"tierd": "0"},
        files=files,
    )
    return msgspec.structs.replace(found, **changes)


async def persist(tier: Tier, made: Manifest) -> None:
    for entry, data in zip(made.files, SHARDS, strict=True):
        await tier.store.put(
            layout.file_key(made.id, entry.name),
            BytesSource(data),
            size_bytes=len(data),
            chunk_bytes=CHUNK_BYTES,
            expect=entry,
        )
    await tier.commit(made)


@pytest.fixture
async def hot(tmp_path: Path) -> AsyncIterator[Tier]:
    tier = Tier("hot", DirectoryStore(tmp_path / "hot"))
    yield tier
    await tier.store.close()


@pytest.fixture(params=["file", "s3"])
async def cold(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Tier]:
    if request.param == "file":
        tier = open_cold_tier(ColdConfig(url=f"file://{tmp_path / 'cold'}"), LimitsConfig())
    else:
        endpoint_url: str = request.getfixturevalue("moto")
        config = ColdConfig(url=f"s3://{BUCKET}/{uuid4().hex}", endpoint_url=endpoint_url)
        tier = open_cold_tier(config, LimitsConfig())
    yield tier
    await tier.store.close()


# ── the commit protocol ──


async def test_checkpoint_is_listed_once_its_manifest_exists(cold: Tier) -> None:
    made = manifest()
    for entry, data in zip(made.files, SHARDS, strict=True):
        key = layout.file_key(ID, entry.name)
        await cold.store.put(key, BytesSource(data), size_bytes=len(data), chunk_bytes=CHUNK_BYTES)
    before = await cold.listing()
    assert (before.committed, set(before.partial)) == (set(), {ID})
    with pytest.raises(NotFound):
        await cold.manifest(ID)
    await cold.commit(made)
    after = await cold.listing()
    assert (after.committed, set(after.partial)) == ({ID}, set())
    assert after.files[ID] == {entry.name: entry.size_bytes for entry in made.files} | {
        "manifest.json": len(made.encode())
    }
    assert await cold.manifest(ID) == made


async def test_second_commit_is_harmless_and_a_different_one_is_corrupt(cold: Tier) -> None:
    await cold.commit(manifest())
    await cold.commit(manifest())
    with pytest.raises(Corrupt, match="another checkpoint is committed"):
        await cold.commit(manifest(created_at="2026-01-01T00:00:01Z"))
    assert await cold.manifest(ID) == manifest()


async def test_concurrent_commits_under_one_name_commit_one_checkpoint(hot: Tier) -> None:
    rivals = [manifest(created_at=f"2026-01-01T00:00:{second:02d}Z") for second in range(16)]
    results = await asyncio.gather(*(hot.commit(rival) for rival in rivals), return_exceptions=True)
    assert [type(result) for result in results].count(Corrupt) == 15
    assert await hot.manifest(ID) == rivals[results.index(None)]


async def keys_in(tier: Tier) -> list[str]:
    return [stored.key for stored in await tier.store.list()]


async def test_delete_leaves_a_tombstone_and_can_be_repeated(cold: Tier) -> None:
    await persist(cold, manifest())
    await cold.mark_milestone(ID, "best", "2026-01-01T00:00:00Z")
    await cold.delete(ID)
    assert await keys_in(cold) == [TOMBSTONE]
    await cold.delete(ID)
    assert await keys_in(cold) == [TOMBSTONE]


async def test_a_tombstone_says_which_save_was_deleted(cold: Tier) -> None:
    """It differs between two starts that have claimed one generation. Older tombstones, and that of a checkpoint whose
    manifest cannot be read, do not say it."""
    other = manifest(created_at="2026-11-26T10:00:00.123+00:00")
    assert other.save_digest != manifest().save_digest
    await persist(cold, other)
    await cold.delete(ID)
    assert await cold.buried([ID]) == {ID: other.save_digest}
    for raw, said in [(b'{"deleted":true}', {ID: ""}), (b"{", {}), (b'{"x":' + b"[" * 60_000, {})]:
        await cold.store.delete([TOMBSTONE])
        await cold.store.put_bytes(TOMBSTONE, raw)
        assert await cold.buried([ID]) == said
    await cold.store.delete([TOMBSTONE])
    assert await cold.buried([ID]) == {}


async def test_delete_from_hot_removes_everything(hot: Tier) -> None:
    """Only one daemon writes there."""
    await persist(hot, manifest())
    await hot.delete(ID)
    assert await keys_in(hot) == []


async def test_a_manifest_that_another_daemon_writes_during_a_deletion_counts_for_nothing(
    hot: Tier, cold: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has found the files there, and they are deleted after its commit: the checkpoint would not be whole."""
    made = manifest()
    await persist(hot, made)
    await persist(cold, made)
    delete = cold.store.delete

    async def commit_meanwhile(keys: Sequence[str]) -> None:
        if layout.manifest_key(ID) not in keys:
            await cold.commit(made)
        await delete(keys)

    monkeypatch.setattr(cold.store, "delete", commit_meanwhile)
    assert await cold.delete(ID)
    assert layout.manifest_key(ID) in await keys_in(cold)
    listing = await cold.listing()
    assert (listing.committed, listing.gone) == (set(), {ID})
    monkeypatch.undo()
    await cold.store.delete([layout.manifest_key(ID)])
    assert not await copy_checkpoint(made, hot, cold)
    assert not (await cold.listing()).committed


async def test_a_deletion_that_the_store_refuses_leaves_the_checkpoint(
    cold: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    await persist(cold, manifest())

    async def refuse(keys: Sequence[str]) -> None:
        raise TierUnreachable("delete: access denied")

    monkeypatch.setattr(cold.store, "delete", refuse)
    with pytest.raises(TierUnreachable):
        await cold.delete(ID)
    assert (await cold.listing()).committed == {ID}


async def test_milestone_that_is_set_during_a_deletion_keeps_the_checkpoint(cold: Tier) -> None:
    """By another process, between the listing and the deletion of the manifest."""
    await persist(cold, manifest())
    _, raw = await cold.read_manifest(layout.manifest_key(ID))
    real_delete = cold.store.delete

    async def mark_and_delete(keys: Sequence[str]) -> None:
        cold.store.delete = real_delete  # type: ignore[method-assign]
        await cold.mark_milestone(ID, "best", "now")
        await real_delete(keys)

    cold.store.delete = mark_and_delete  # type: ignore[method-assign]
    assert not await cold.delete(ID)
    listing = await cold.listing()
    assert (listing.committed, listing.milestones(ID)) == ({ID}, {"best"})
    assert await cold.read_manifest(layout.manifest_key(ID)) == (manifest(), raw)
    assert ID not in cold.deleting


async def delete_until_the_manifest_is_put_back(cold: Tier) -> None:
    """A milestone is set during the deletion, and the daemon ends before it has deleted the tombstone."""
    real_delete = cold.store.delete

    async def delete(keys: Sequence[str]) -> None:
        if TOMBSTONE in keys:
            raise TierUnreachable("delete: no answer")
        if layout.manifest_key(ID) in keys:
            await cold.mark_milestone(ID, "best", "now")
        await real_delete(keys)

    cold.store.delete = delete  # type: ignore[method-assign]
    with pytest.raises(TierUnreachable, match="best was set while it was being deleted"):
        await cold.delete(ID)
    cold.store.delete = real_delete  # type: ignore[method-assign]
    assert (await cold.listing()).gone == {ID}


async def test_a_deletion_that_was_given_up_too_late_keeps_the_milestone_when_it_is_repeated(cold: Tier) -> None:
    await persist(cold, manifest())
    await delete_until_the_manifest_is_put_back(cold)
    assert not await cold.delete(ID)
    listing = await cold.listing()
    assert (listing.committed, listing.gone, listing.milestones(ID)) == ({ID}, set(), {"best"})
    assert ID not in cold.deleting


@pytest.mark.parametrize(
    "left",
    [
        "all",
        pytest.param("no milestone", marks=pytest.mark.long),
        pytest.param("not every shard", marks=pytest.mark.long),
        "no manifest",
        "a damaged manifest",
    ],
)
async def test_leftovers_of_a_deletion_are_deleted_unless_they_are_whole(cold: Tier, left: str) -> None:
    """A later daemon finds them, a day later."""
    made = manifest()
    await persist(cold, made)
    await delete_until_the_manifest_is_put_back(cold)
    cold.deleting.clear()
    manifest_key = layout.manifest_key(ID)
    removed = {
        "no milestone": layout.file_key(ID, layout.milestone_file("best")),
        "not every shard": layout.file_key(ID, made.files[1].name),
        "no manifest": manifest_key,
        "a damaged manifest": manifest_key,
    }
    if left != "all":
        await cold.store.delete([removed[left]])
    if left == "a damaged manifest":
        await cold.store.put_bytes(manifest_key, b"{}")
    assert await clear_uncommitted(cold, ID, written_before_s=time.time() - 60) == [], "it is too young"
    is_whole = left in ("all", "no milestone")
    assert bool(await clear_uncommitted(cold, ID)) != is_whole
    listing = await cold.listing()
    assert (listing.committed, listing.gone) == ({ID} if is_whole else set(), set())
    if not is_whole:
        assert await keys_in(cold) == []


async def test_checkpoint_whose_manifest_cannot_be_read_is_deleted(cold: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archived one, for example: a deletion needs no bytes of it."""
    await persist(cold, manifest())

    async def get_many(keys: Sequence[str], *, size_max: int) -> list[bytes | TierdError]:
        return [Unsupported("read: it is archived") for _ in keys]

    monkeypatch.setattr(cold.store, "get_many", get_many)
    assert await cold.delete(ID)
    assert await keys_in(cold) == [TOMBSTONE]


async def test_error_after_the_manifest_is_deleted_says_so_and_the_deletion_can_be_repeated(cold: Tier) -> None:
    await persist(cold, manifest())
    real_delete = cold.store.delete

    async def refuse_shards(keys: Sequence[str]) -> None:
        if layout.manifest_key(ID) not in keys:
            raise TierUnreachable("delete: no answer")
        await real_delete(keys[:1])

    cold.store.delete = refuse_shards  # type: ignore[method-assign]
    with pytest.raises(TierUnreachable, match=f"no answer; {ID} has no manifest in cold any more"):
        await cold.delete(ID)
    assert not (await cold.listing()).committed
    cold.store.delete = real_delete  # type: ignore[method-assign]
    assert await cold.delete(ID)
    assert await keys_in(cold) == [TOMBSTONE]


async def test_listing_has_milestones_and_generations_and_ignores_foreign_objects(cold: Tier) -> None:
    run, other = Run("run42"), Run("other")
    await persist(cold, manifest())
    await cold.mark_milestone(ID, "best", "2026-01-01T00:00:00Z")
    await cold.mark_milestone(ID, "v1.0", "2026-01-01T00:00:00Z")
    await cold.mark_milestone(ID, "best", "2026-01-01T00:00:09Z")
    assert await cold.claim_generation(run, Generation(4), Claim.new("a"))
    assert not await cold.claim_generation(run, Generation(4), Claim.new("b"))
    assert await cold.claim_generation(run, Generation(2), Claim.new("a"))
    assert await cold.claim_generation(other, Generation(1), Claim.new("a"))
    for key in ("README", "run42/notes.txt", "run42/000000000001-g1/x", "run42/000000018000-g0003/deeper/x"):
        await cold.store.put_bytes(key, b"foreign")
    found = await cold.listing()
    assert found.committed == {ID}
    assert not found.partial
    assert found.milestones(ID) == {"best", "v1.0"}
    assert found.milestones(checkpoint_id("run42", 1, 1)) == frozenset()
    assert found.generations == {run: 4, other: 1}


@pytest.mark.parametrize(
    "key",
    [
        "run42/000000000001-g99999999/manifest.json",
        "run42/generation-99999999.json",
        "run42/000000000001-g0009/note.txt",
    ],
)
async def test_a_foreign_object_does_not_use_up_the_generations(cold: Tier, key: str) -> None:
    await persist(cold, manifest())
    await cold.store.put_bytes(key, b"foreign")
    found = await cold.listing()
    assert found.generations == {"run42": ID.generation}
    assert ID in found.committed


async def test_claims_do_not_grow_without_a_bound(cold: Tier) -> None:
    run = Run("run42")
    for number in range(1, 41):
        assert await cold.claim_generation(run, Generation(number), Claim())
    assert not await cold.claim_generation(run, Generation(40), Claim())
    assert sorted(stored.key for stored in await cold.store.list()) == [
        f"run42/generation-{number:04d}.json" for number in range(25, 41)
    ]
    assert (await cold.listing()).generations == {run: 40}


async def test_checkpoint_of_a_later_generation_counts_as_a_claim(hot: Tier) -> None:
    await hot.commit(manifest(checkpoint_id("run42", 1, 7)))
    assert (await hot.listing()).generations == {"run42": 7}


async def test_error_of_an_unreadable_manifest_names_its_tier(hot: Tier) -> None:
    key = layout.manifest_key(ID)
    await hot.store.put_bytes(key, b"{}")
    with pytest.raises(Corrupt, match=r"run42/000000018000-g0003 in hot"):
        await hot.manifest(ID)
    await hot.store.put_bytes(key, b'{"format_version": 99}')
    with pytest.raises(NewerFormat):
        await hot.manifest(ID)
    assert (await hot.listing()).committed == {ID}


# ── copying ──


async def test_copy_has_the_same_bytes_in_every_file(hot: Tier, cold: Tier, tmp_path: Path) -> None:
    made = manifest()
    await persist(hot, made)
    written: list[int] = []
    await copy_checkpoint(made, hot, cold, milestones=["best"], progress=written.append)
    assert sum(written) == made.size_bytes
    assert (await cold.listing()).milestones(ID) == {"best"}

    back = Tier("back", DirectoryStore(tmp_path / "back"))
    await copy_checkpoint(made, cold, back)
    for name in [*(entry.name for entry in made.files), "manifest.json"]:
        key = layout.file_key(ID, name)
        assert (tmp_path / "hot" / key).read_bytes() == (tmp_path / "back" / key).read_bytes()
    assert (await verify_files(back, made)).sentences == []
    await back.store.close()


async def test_repeated_copy_adds_new_milestones(hot: Tier, cold: Tier) -> None:
    made = manifest()
    await persist(hot, made)
    await copy_checkpoint(made, hot, cold)
    written: list[int] = []
    await copy_checkpoint(made, hot, cold, milestones=["best"], progress=written.append)
    assert written == []
    assert (await cold.listing()).milestones(ID) == {"best"}


async def test_copy_of_a_checkpoint_that_the_target_has_deleted_commits_nothing(hot: Tier, cold: Tier) -> None:
    """Also where the manifest is still there: the daemon that was deleting it has ended in between."""
    made = manifest()
    await persist(hot, made)
    await persist(cold, made)
    await cold.bury(ID)
    assert not await copy_checkpoint(made, hot, cold, milestones=["best"])
    listing = await cold.listing()
    assert (listing.committed, listing.milestones(ID)) == (set(), set())


async def test_copy_ignores_a_tombstone_that_the_keyring_has_not_signed(hot: Tier, cold: Tier) -> None:
    made = manifest()
    await persist(hot, made)
    await cold.bury(ID)
    assert await copy_checkpoint(made, hot, replace(cold, keyring=Keyring([new_key()])))


async def test_copied_manifest_keeps_its_exact_bytes(hot: Tier, cold: Tier) -> None:
    """A field that a later minor version added must survive the copy."""
    made = manifest()
    await persist(hot, made)
    raw = made.encode().replace(b'"run":', b'"added_later": 1,\n "run":')
    await hot.store.put_bytes(layout.manifest_key(ID), raw)
    await copy_checkpoint(made, hot, cold)
    assert await cold.store.get_bytes(layout.manifest_key(ID), size_max=1 << 20) == raw


@pytest.mark.parametrize(("shard", "at"), [(0, 0), (0, (5 << 20) + 1), (1, 0)])
async def test_damaged_shard_is_never_copied(hot: Tier, cold: Tier, shard: int, at: int) -> None:
    """The error is raised alone, at any progress of the other shards, and no marker is written."""
    made = manifest()
    await persist(hot, made)
    damaged = made.files[shard]
    flip(hot, damaged.name, at)
    with pytest.raises(Corrupt, match=f"chunk {at // CHUNK_BYTES} of {len(damaged.chunks)}"):
        await copy_checkpoint(made, hot, cold, milestones=["best"])
    found = await cold.listing()
    assert found.committed == set()
    assert found.milestones(ID) == frozenset()
    assert damaged.name not in found.files.get(ID, {})
    flip(hot, damaged.name, at)
    await copy_checkpoint(made, hot, cold)
    assert (await verify_files(cold, made)).sentences == []


class Watched(DirectoryStore):
    """Records the order of its writes; its first shard ends after its second."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.written: list[str] = []
        self._second = asyncio.Event()

    async def put(self, key: str, *args: Any, **kwargs: Any) -> FileEntry:
        if "rank-00000" in key:
            await self._second.wait()
        entry = await super().put(key, *args, **kwargs)
        self.written.append(entry.name)
        if "rank-00001" in key:
            self._second.set()
        return entry

    async def put_bytes(self, key: str, content: bytes, *, if_absent: bool = False) -> bool:
        self.written.append(key.rpartition("/")[2])
        return await super().put_bytes(key, content, if_absent=if_absent)


async def test_copy_writes_shards_concurrently_then_markers_then_the_manifest(hot: Tier, tmp_path: Path) -> None:
    made = manifest()
    await persist(hot, made)
    store = Watched(tmp_path / "watched")
    async with asyncio.timeout(60):
        await copy_checkpoint(made, hot, Tier("cold", store), milestones=["best"], is_healthy=True)
    markers = [layout.file_key(ID, "milestone-best.json"), layout.diagnosis_key(ID, is_healthy=True)]
    assert store.written == [
        *(entry.name for entry in reversed(made.files)),
        *(key.rpartition("/")[2] for key in markers),
        layout.MANIFEST,
    ]
    await store.close()


class Deleting(DirectoryStore):
    """Another daemon deletes a shard after the copy has found all of them."""

    async def put(self, key: str, *args: Any, **kwargs: Any) -> FileEntry:
        if "rank-00001" in key:
            first = key.replace("rank-00001", "rank-00000")
            async with asyncio.timeout(60):
                while not self.found_first:
                    await asyncio.sleep(0.001)
            await self.delete([first])
        entry = await super().put(key, *args, **kwargs)
        self.found_first = True
        return entry

    found_first = False


async def test_copy_commits_nothing_when_a_file_is_deleted_meanwhile(hot: Tier, tmp_path: Path) -> None:
    made = manifest()
    await persist(hot, made)
    async with Deleting(tmp_path / "target") as deleting, DirectoryStore(tmp_path / "target") as plain:
        target = Tier("cold", plain)
        await copy_checkpoint(made, hot, target)
        await plain.delete([layout.manifest_key(ID)])
        with pytest.raises(TierUnreachable, match="is missing or has another size, and was there before"):
            await copy_checkpoint(made, hot, Tier("cold", deleting), milestones=["best"])
        assert ID not in (await target.listing()).committed
        await copy_checkpoint(made, hot, target)
        assert (await verify_files(target, made)).sentences == []


async def test_copy_never_replaces_another_checkpoint(hot: Tier, cold: Tier) -> None:
    await persist(hot, manifest())
    foreign = manifest(created_at="2025-01-01T00:00:00Z")
    await cold.commit(foreign)
    with pytest.raises(Corrupt, match="another checkpoint"):
        await copy_checkpoint(manifest(), hot, cold)
    assert await cold.manifest(ID) == foreign
    with pytest.raises(Corrupt, match="another checkpoint"):
        await copy_checkpoint(foreign, hot, cold)


COPY = """
import asyncio, sys
from pathlib import Path
from tierd.format.ids import checkpoint_id
from tierd.tiers.directory import DirectoryStore
from tierd.format.signature import Keyring, new_key
from tierd.tiers.checkpoint_copy import copy_checkpoint
from tierd.tiers.tier import Tier

async def stall():
    print("stalled", flush=True)
    await asyncio.Event().wait()

class Stalling(DirectoryStore):
    async def put(self, key, *args, **kwargs):
        if sys.argv[3] == "between shards" and "rank-00001" in key:
            while not [one for one in await self.list() if "rank-00000" in one.key]:
                await asyncio.sleep(0.01)
            await stall()
        return await super().put(key, *args, **kwargs)
    async def put_bytes(self, key, *args, **kwargs):
        if sys.argv[3] == "manifest" and key.endswith("manifest.json"):
            await stall()
        return await super().put_bytes(key, *args, **kwargs)

class StallingSource(DirectoryStore):
    shards = set()
    async def read(self, key, offset, buffer):
        if sys.argv[3] == "within both shards":
            self.shards.add(key)
            if len(self.shards) == 2:
                await stall()
            await asyncio.Event().wait()
        await super().read(key, offset, buffer)

async def main():
    hot, cold = Tier("hot", StallingSource(Path(sys.argv[1]))), Tier("cold", Stalling(Path(sys.argv[2])))
    made = await hot.manifest(checkpoint_id("run42", 18000, 3))
    await copy_checkpoint(made, hot, cold)

asyncio.run(main())
"""


@pytest.mark.parametrize("instant", ["within both shards", "between shards", "manifest"])
async def test_killed_before_the_manifest_leaves_nothing_restorable(hot: Tier, tmp_path: Path, instant: str) -> None:
    made = manifest()
    await persist(hot, made)
    target = tmp_path / "target"
    kill_when_stalled(COPY, str(tmp_path / "hot"), str(target), instant)
    store = DirectoryStore(target)
    cold = Tier("cold", store)
    left = await cold.listing()
    assert left.committed == set()
    assert set(left.partial) == (set() if instant == "within both shards" else {ID})
    # The next attempt succeeds.
    await copy_checkpoint(made, hot, cold)
    assert (await cold.listing()).committed == {ID}
    assert (await verify_files(cold, made)).sentences == []
    assert await store.sweep_partials() == (2 if instant == "within both shards" else 0)
    await store.close()


async def test_bit_flipped_on_the_way_from_s3_is_never_restored(moto: str, hot: Tier, tmp_path: Path) -> None:
    url = f"s3://{BUCKET}/{uuid4().hex}"
    made = manifest()
    await persist(hot, made)
    cold = open_cold_tier(ColdConfig(url=url, endpoint_url=moto), LimitsConfig())
    await copy_checkpoint(made, hot, cold)
    back = Tier("back", DirectoryStore(tmp_path / "back"))
    with faulty_proxy(moto, lambda method, path: "flip" if method == "GET" and "rank-" in path else "") as proxy:
        flipping = open_cold_tier(ColdConfig(url=url, endpoint_url=proxy), LimitsConfig())
        with pytest.raises(Corrupt, match="crc64nvme"):
            await copy_checkpoint(made, flipping, back)
        assert len((await verify_files(flipping, made)).sentences) == 2  # the first byte of each file
        await flipping.store.close()
    assert await back.store.list() == []
    await back.store.close()
    await cold.store.close()


# ── many ──


@pytest.mark.long
async def test_cost_of_a_listing_is_linear_in_its_length(hot: Tier, tmp_path: Path) -> None:
    """Ten times the checkpoints take about ten times the processor time."""
    root = tmp_path / "hot"
    seconds: dict[int, float] = {}
    for count in (300, 3_000):
        for step in range(len(seconds) * 300, count):
            folder = root / "run" / checkpoint_id("run", step, 1).name
            folder.mkdir(parents=True)
            (folder / "manifest.json").touch()
            (folder / "rank-00000-of-00001.safetensors").touch()
        tries: list[float] = []
        for _ in range(5):  # the best: other tests share the machine
            begin = time.process_time()
            found = await hot.listing()
            tries.append(time.process_time() - begin)
            assert len(found.committed) == count
        seconds[count] = min(tries)
    assert seconds[3_000] < 30 * seconds[300]


def path(tier: Tier, name: str) -> Path:
    assert isinstance(tier.store, DirectoryStore)
    return tier.store.root / layout.file_key(ID, name)


def flip(tier: Tier, name: str, at: int) -> None:
    with path(tier, name).open("r+b") as file:
        file.seek(at)
        old = file.read(1)
        file.seek(at)
        file.write(bytes([old[0] ^ 1]))


@pytest.mark.parametrize("raw", [b"", b"{}", b'{"healthy": "no"}', b"\xff", b"[" * 60_000, b" " * (64 << 10) + b"{}"])
async def test_marker_that_cannot_be_read_still_gives_the_verdict_of_its_name(tmp_path: Path, raw: bytes) -> None:
    tier = Tier("hot", DirectoryStore(tmp_path))
    await tier.store.put_bytes(layout.diagnosis_key(ID, is_healthy=False), raw)
    assert await tier.diagnosis(ID, is_healthy=False) == Diagnosis(healthy=False)
    await tier.store.close()
