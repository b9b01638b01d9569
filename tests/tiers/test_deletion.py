"""Deletions in a cold tier that meet another daemon, a milestone, or a request that fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import pytest

from tests.support.s3 import BUCKET
from tests.tiers.test_tier import ID, TOMBSTONE, keys_in, manifest, persist
from tierd.cold_tier import open_cold_tier
from tierd.config.sections import ColdConfig, LimitsConfig
from tierd.errors import NotFound, TierUnreachable
from tierd.format import layout
from tierd.tiers.tier import Tier

MANIFEST_KEY = layout.manifest_key(ID)
Opener = Callable[[], Tier]


@pytest.fixture(params=["file", "s3"])
async def open_tier(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Opener]:
    """Opens the same cold tier again, as another daemon does."""
    if request.param == "file":
        config = ColdConfig(url=f"file://{tmp_path / 'cold'}")
    else:
        config = ColdConfig(url=f"s3://{BUCKET}/{uuid4().hex}", endpoint_url=request.getfixturevalue("moto"))
    opened: list[Tier] = []

    def open_again() -> Tier:
        opened.append(open_cold_tier(config, LimitsConfig()))
        return opened[-1]

    yield open_again
    for tier in opened:
        await tier.store.close()


class Pause:
    """Holds back one deletion of a tier's store: that of the manifest, or the one after it, of the shards."""

    def __init__(self, tier: Tier, *, at_manifest: bool) -> None:
        self.begun, self.may_go_on = asyncio.Event(), asyncio.Event()
        delete = tier.store.delete

        async def held_back(keys: Sequence[str]) -> None:
            if (MANIFEST_KEY in keys) == at_manifest and TOMBSTONE not in keys:
                self.begun.set()
                await self.may_go_on.wait()
            await delete(keys)

        tier.store.delete = held_back  # type: ignore[method-assign]


async def check_listed_and_whole(tier: Tier) -> None:
    listing = await tier.listing()
    for checkpoint in listing.committed:
        assert manifest(checkpoint).missing_file(listing.files[checkpoint]) == ""


@pytest.mark.parametrize("is_marked", [True, False])
async def test_two_daemons_that_delete_one_checkpoint_never_list_a_part_of_it(
    open_tier: Opener, *, is_marked: bool
) -> None:
    """`tierd reap` may run twice at once. A milestone is set when one has seen that there is none, and the other has
    not looked yet."""
    first, second = open_tier(), open_tier()
    await persist(first, manifest())
    late, shards = Pause(second, at_manifest=True), Pause(first, at_manifest=False)
    deletions = [asyncio.create_task(second.delete(ID))]
    await late.begun.wait()
    deletions.append(asyncio.create_task(first.delete(ID)))
    await shards.begun.wait()
    if is_marked:
        await first.mark_milestone(ID, "best", "now")
    late.may_go_on.set()
    with suppress(NotFound):  # the other one deletes it
        assert not await deletions[0], "it says that it has deleted it"
    await check_listed_and_whole(open_tier())
    shards.may_go_on.set()
    assert await deletions[1]
    await check_listed_and_whole(open_tier())
    assert not (await first.listing()).committed
    assert not first.deleting
    assert not second.deleting


async def fail_once(tier: Tier, failing: str) -> None:
    """A deletion during which a milestone is set and one request fails."""
    store = tier.store
    delete, put_bytes = store.delete, store.put_bytes

    async def delete_and_fail(keys: Sequence[str]) -> None:
        if MANIFEST_KEY in keys:
            await tier.mark_milestone(ID, "best", "now")
        await delete(keys)
        if MANIFEST_KEY in keys and failing == "answer":
            raise TierUnreachable("delete: no answer")

    async def put_or_fail(key: str, content: bytes, *, if_absent: bool = False) -> bool:
        if (failing, key) in (("tombstone", TOMBSTONE), ("manifest", MANIFEST_KEY)):
            raise TierUnreachable("write: no answer")
        return await put_bytes(key, content, if_absent=if_absent)

    store.delete, store.put_bytes = delete_and_fail, put_or_fail  # type: ignore[method-assign]
    with pytest.raises(TierUnreachable, match="no answer"):
        await tier.delete(ID)
    store.delete, store.put_bytes = delete, put_bytes  # type: ignore[method-assign]


@pytest.mark.parametrize("failing", ["answer", "tombstone", "manifest"])
async def test_a_milestone_that_was_set_during_a_deletion_survives_a_request_that_fails(
    open_tier: Opener, failing: str
) -> None:
    """Whoever has set it was told that it is set: the manifest was there. A dead NFS server, for example, may answer
    minutes later."""
    cold = open_tier()
    await persist(cold, manifest())
    await fail_once(cold, failing)
    assert not (await cold.listing()).committed
    assert not await cold.delete(ID)
    listing = await open_tier().listing()
    assert (listing.committed, listing.gone, listing.milestones(ID)) == ({ID}, set(), {"best"})
    assert not cold.deleting


async def test_a_deletion_whose_tombstone_had_no_answer_ends_when_it_is_repeated(open_tier: Opener) -> None:
    """The tombstone is there, and it is its own."""
    cold = open_tier()
    await persist(cold, manifest())
    put_bytes = cold.store.put_bytes

    async def lose_answer(key: str, content: bytes, *, if_absent: bool = False) -> bool:
        await put_bytes(key, content, if_absent=if_absent)
        raise TierUnreachable("write: no answer")

    cold.store.put_bytes = lose_answer  # type: ignore[method-assign]
    with pytest.raises(TierUnreachable):
        await cold.delete(ID)
    cold.store.put_bytes = put_bytes  # type: ignore[method-assign]
    assert await cold.delete(ID)
    assert await keys_in(cold) == [TOMBSTONE]


async def test_a_milestone_is_not_put_back_when_shards_are_deleted_already(open_tier: Opener) -> None:
    cold = open_tier()
    await persist(cold, manifest())
    delete = cold.store.delete

    async def delete_one_shard(keys: Sequence[str]) -> None:
        await delete(keys[:1])
        if MANIFEST_KEY not in keys:
            raise TierUnreachable("delete: no answer")

    cold.store.delete = delete_one_shard  # type: ignore[method-assign]
    with pytest.raises(TierUnreachable):
        await cold.delete(ID)
    cold.store.delete = delete  # type: ignore[method-assign]
    await cold.mark_milestone(ID, "best", "now")
    assert await cold.delete(ID)
    assert await keys_in(cold) == [TOMBSTONE]
