"""The scrub: pace, damage, repair."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.bucket import bucket_server
from tests.support.daemon import serving
from tests.support.damage import cut, flip, lose, rot
from tests.support.rooms import Rooms, rooms_at
from tests.support.s3 import BUCKET
from tests.support.s3_store import s3_store
from tests.support.waiting import wait_until
from tierd.catalog.decisions import HaltReason, decisions, halted
from tierd.catalog.listing import refresh, refresh_run
from tierd.config.sections import LimitsConfig, ScrubConfig
from tierd.errors import TierUnreachable
from tierd.format.manifest import Manifest
from tierd.lifecycle.policy import deletions
from tierd.tiers.checkpoint_copy import copy_checkpoint
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.tier import Tier
from tierd.transfer.verify import verify_files
from tierd.workers.scrubber import Scrubber

INTERVAL_S = 1000.0


@pytest.fixture
async def rooms(tmp_path: Path) -> AsyncIterator[Rooms]:
    async with rooms_at(tmp_path) as rooms:
        yield rooms


class Scrub:
    """A scrubber of one tier, and its clock."""

    def __init__(self, rooms: Rooms, tier: Tier, *others: Tier, **config: Any) -> None:
        self.now_s = 0.0
        self.tier = tier.name
        self.rooms = rooms
        tiers = {**rooms.tiers, tier.name: tier, **{other.name: other for other in others}}
        scrub = ScrubConfig(**{"interval_s": INTERVAL_S, "deep_share": 0.0, "max_read_mib_s": 0.0} | config)
        context = replace(
            rooms.context,
            config=msgspec.structs.replace(rooms.config, scrub=scrub, limits=LimitsConfig()),
            hot=tiers.pop("hot"),
            cold=tiers,
            monotonic_s=lambda: self.now_s,
        )
        self.worker = Scrubber(context, tier)

    @property
    def relisted(self) -> int:
        return self.rooms.events.count(("relist", self.tier))

    async def at(self, now_s: float) -> None:
        self.now_s = now_s
        assert await self.worker.run_once()

    def count(self, proof: str) -> float | None:
        return self.rooms.count("tierd_scrubbed_checkpoints_total", tier=self.tier, proof=proof)

    def damaged(self) -> list[int]:
        return [checkpoint.step for checkpoint in self.rooms.catalog.tiers[self.tier].damaged]


async def is_undamaged(tier: Tier, manifest: Manifest) -> bool:
    return not (await verify_files(tier, manifest)).problems


# ── pace ──


async def test_every_replica_is_checked_once_per_interval_evenly_spread(rooms: Rooms) -> None:
    for step in range(1, 5):
        await rooms.commit("hot", step=step, sequence=step)
    scrub = Scrub(rooms, rooms.hot)
    await scrub.at(0.0)
    assert scrub.count("size") == 0  # the tier is not listed yet
    await rooms.look()
    seen: list[float | None] = []
    for now_s in (1.0, 1.0, 240.0, 252.0, 600.0, 752.0, 900.0, 1002.0, 1252.0):
        await scrub.at(now_s)
        seen.append(scrub.count("size"))
    assert seen == [1, 1, 1, 2, 3, 4, 4, 5, 6]


async def test_deep_share_is_read_completely_and_counted(rooms: Rooms) -> None:
    made = await rooms.commit("hot")
    await rooms.look()
    scrub = Scrub(rooms, rooms.hot, deep_share=1.0)
    await scrub.at(0.0)
    assert scrub.count("deep") == 1
    assert rooms.count("tierd_bytes_total", tier="hot", direction="read") == made.size_bytes


# ── damage and repair ──


@pytest.mark.parametrize("tier", ["hot", "cold"])
async def test_a_damaged_replica_is_recorded_and_repaired_and_counts_again(
    rooms: Rooms, tmp_path: Path, tier: str
) -> None:
    made = await rooms.commit("hot", "cold", milestones=("best",))
    await rooms.look()
    flip(tmp_path / tier, made, made.files[0].name)
    scrub = Scrub(rooms, rooms.tiers[tier], deep_share=1.0)
    await scrub.at(0.0)
    assert rooms.count("tierd_verify_failures_total", tier=tier) == 1
    assert rooms.count("tierd_repaired_files_total", tier=tier) == 1
    assert rooms.count("tierd_failures_total", stage="scrub", kind="corrupt") == 1
    assert "chunk 0 of 1" in rooms.incidents.recent()[0].message
    assert await is_undamaged(rooms.tiers[tier], made)
    assert (scrub.damaged(), scrub.relisted) == ([], 1)

    await refresh(rooms.catalog, rooms.tiers[tier])
    entry = rooms.catalog.get(made.id)
    assert entry is not None
    assert entry.tiers == {"hot", "cold"}
    assert entry.milestones[tier] == {"best"}
    assert halted(rooms.catalog) == []


@pytest.mark.parametrize("damage", [lose, cut])
async def test_damage_that_a_listing_shows_is_repaired_by_the_next_pass(
    rooms: Rooms, tmp_path: Path, damage: Any
) -> None:
    made = await rooms.commit("hot", "cold")
    damage(tmp_path / "cold", made, made.files[0].name)
    await rooms.look()
    assert halted(rooms.catalog)[0].reason is HaltReason.UNREADABLE_MANIFEST
    scrub = Scrub(rooms, rooms.cold["cold"])
    await scrub.at(0.0)
    assert await is_undamaged(rooms.cold["cold"], made)
    await rooms.look()
    assert halted(rooms.catalog) == []


async def test_a_replica_that_cannot_be_repaired_does_not_count_and_halts_deletion(
    rooms: Rooms, tmp_path: Path
) -> None:
    """last_replica: the policy would delete two of five in hot, but their cold replicas are damaged."""
    for step in range(1, 6):
        made = await rooms.commit("hot", "cold", step=step, sequence=step * 10)
        flip(tmp_path / "cold", made, made.files[0].name)
    await rooms.look()
    assert [action.tier for action in deletions(decisions(rooms.catalog, rooms.config))] == ["hot", "hot"]
    scrub = Scrub(rooms, rooms.cold["cold"], deep_share=1.0, repair=False)
    await scrub.at(0.0)
    (first,) = scrub.damaged()
    assert deletions(decisions(rooms.catalog, rooms.config)) == []
    assert str(halted(rooms.catalog)[0]).startswith("damaged_replica: run42/")
    await scrub.at(INTERVAL_S - 1)
    assert len(scrub.damaged()) == 5
    assert rooms.count("tierd_verify_failures_total", tier="cold") == 5  # each is recorded once
    await rooms.look()  # a listing shows no damage, and does not end it
    assert len(scrub.damaged()) == 5
    assert deletions(decisions(rooms.catalog, rooms.config)) == []

    damaged = rooms.catalog.tiers["cold"].damaged
    await rooms.cold["cold"].delete(next(checkpoint for checkpoint in damaged if checkpoint.step == first))
    await rooms.look()
    assert len(scrub.damaged()) == 4


async def test_a_listing_of_the_run_before_a_restore_does_not_end_known_damage(rooms: Rooms, tmp_path: Path) -> None:
    """last_replica: hot would then give up the only good replica of two checkpoints."""
    for step in range(1, 6):
        made = await rooms.commit("hot", "cold", step=step, sequence=step * 10)
        flip(tmp_path / "cold", made, made.files[0].name)
    await rooms.look()
    scrub = Scrub(rooms, rooms.cold["cold"], deep_share=1.0, repair=False)
    await scrub.at(0.0)
    await scrub.at(INTERVAL_S - 1)
    assert len(scrub.damaged()) == 5
    await refresh_run(rooms.catalog, rooms.cold["cold"], made.id.run, rooms.context.identities)
    assert len(scrub.damaged()) == 5
    assert not rooms.catalog.in_tier("cold")
    assert deletions(decisions(rooms.catalog, rooms.config)) == []


async def test_a_file_that_is_damaged_in_every_tier_is_retried_once_per_interval(rooms: Rooms, tmp_path: Path) -> None:
    made = await rooms.commit("hot", "cold")
    name = made.files[0].name
    path = rooms.folder("hot", made.id) / name
    undamaged = path.read_bytes()
    for root in (tmp_path / "hot", tmp_path / "cold"):
        flip(root, made, name)
    await rooms.look()
    scrub = Scrub(rooms, rooms.cold["cold"], deep_share=1.0)
    for now_s in (0.0, 10.0, INTERVAL_S - 1):
        await scrub.at(now_s)
    assert rooms.count("tierd_failures_total", stage="scrub", kind="corrupt") == 2  # found, and not repaired
    assert scrub.damaged() == [100]
    path.write_bytes(undamaged)
    await scrub.at(INTERVAL_S)
    assert scrub.damaged() == []
    assert await is_undamaged(rooms.cold["cold"], made)


async def test_repair_is_retried_soon_when_a_source_was_unreachable(rooms: Rooms, tmp_path: Path) -> None:
    made = await rooms.commit("hot")
    await rooms.look()
    flip(tmp_path / "hot", made, made.files[0].name)
    away = Tier("dr", DirectoryStore(tmp_path / "dr", create=False))
    scrub = Scrub(rooms, rooms.hot, away, deep_share=1.0)
    await scrub.at(0.0)
    assert scrub.damaged() == [100]
    reachable = Tier("dr", DirectoryStore(tmp_path / "dr"))
    await rooms.commit("cold")
    await copy_checkpoint(made, rooms.cold["cold"], reachable)
    await rooms.cold["cold"].delete(made.id)
    await scrub.at(LimitsConfig().retry_max_s)
    assert scrub.damaged() == []
    for tier in (away, reachable):
        await tier.store.close()


async def test_a_replica_that_the_disk_could_not_read_is_verified_again_soon(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fails for a moment: until then the only replica is not restored and not copied."""
    await rooms.commit("hot")
    await rooms.look()
    scrub = Scrub(rooms, rooms.hot, deep_share=1.0)
    retry_s = LimitsConfig().retry_max_s

    async def read(*_: object) -> None:
        raise TierUnreachable("read: Input/output error") from OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(rooms.hot.store, "read", read)
        for now_s in (0.0, retry_s, 2 * retry_s):
            await scrub.at(now_s)
    assert scrub.damaged() == [100]
    assert rooms.count("tierd_failures_total", stage="scrub", kind="corrupt") == 2  # found, and not repaired
    await scrub.at(3 * retry_s)
    assert (scrub.damaged(), scrub.relisted) == ([], 1)


async def test_repair_is_retried_soon_when_the_tier_was_unreachable(rooms: Rooms, tmp_path: Path) -> None:
    made = await rooms.commit("hot", "cold")
    lose(tmp_path / "cold", made, made.files[0].name)
    await rooms.look()

    class Away(DirectoryStore):
        is_away = True

        async def get_bytes(self, key: str, *, size_max: int) -> bytes:
            if self.is_away:
                raise TierUnreachable("away")
            return await super().get_bytes(key, size_max=size_max)

    store = Away(tmp_path / "cold")
    scrub = Scrub(rooms, Tier("cold", store))
    with pytest.raises(TierUnreachable):
        await scrub.at(0.0)
    store.is_away = False
    await scrub.at(LimitsConfig().retry_max_s)
    assert await is_undamaged(rooms.cold["cold"], made)
    await store.close()


async def test_a_replica_that_was_repaired_by_others_counts_again(rooms: Rooms, tmp_path: Path) -> None:
    made = await rooms.commit("hot")
    await rooms.look()
    flip(tmp_path / "hot", made, made.files[0].name)
    scrub = Scrub(rooms, rooms.hot, deep_share=1.0)
    await scrub.at(0.0)
    assert scrub.damaged() == [100]
    flip(tmp_path / "hot", made, made.files[0].name)  # the same bit again: undamaged
    await scrub.at(INTERVAL_S)
    assert (scrub.damaged(), scrub.relisted) == ([], 1)


async def test_a_bucket_is_checked_by_its_checksums_and_repaired(rooms: Rooms) -> None:
    with bucket_server() as served:
        cold = Tier("cold", s3_store(f"s3://{BUCKET}/deep", endpoint_url=served.url))
        made = await rooms.commit("hot")
        await copy_checkpoint(made, rooms.hot, cold)
        for tier in (rooms.hot, cold):
            await refresh(rooms.catalog, tier)
        scrub = Scrub(rooms, cold)
        await scrub.at(0.0)
        assert scrub.count("checksum") == 1
        rot(served, "deep", made, made.files[1].name, is_noticed=True)
        await scrub.at(INTERVAL_S)
        assert rooms.count("tierd_repaired_files_total", tier="cold") == 1
        assert await is_undamaged(cold, made)
        await cold.store.close()


# ── in the daemon ──


def test_the_daemon_repairs_damage_and_reports_it(tmp_path: Path) -> None:
    from tests.support.cli import make_checkpoint

    (tmp_path / "hot").mkdir()
    made = make_checkpoint(tmp_path / "hot", tmp_path / "cold", run="gpt")
    flip(tmp_path / "hot", made, made.files[0].name)
    flip(tmp_path / "cold", made, made.files[1].name)
    more = '[[cold]]\nname = "cold"\nurl = "file://cold"\n[health]\nexamine = false'
    environ = {"TIERD_SCRUB_INTERVAL_S": "0.2", "TIERD_SCRUB_DEEP_SHARE": "1"}
    with serving(tmp_path, more=more, environ=environ) as daemon:
        for tier in ("hot", "cold"):
            wait_until(lambda tier=tier: daemon.metric(f'tierd_repaired_files_total{{tier="{tier}"}}') == 1, tier)
        wait_until(lambda: daemon.status()["halted"] == [], "the replicas to count again")
        assert daemon.steps("hot", "gpt") == daemon.steps("cold", "gpt") == [100]
        assert {failure["stage"] for failure in daemon.status()["failures"]} == {"scrub"}
        assert daemon.metric('tierd_damaged_checkpoints{tier="hot"}') == 0
