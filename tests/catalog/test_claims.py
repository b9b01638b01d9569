"""Claims: which checkpoints of a run another daemon has written or someone has forged, and which numbers are free."""

from __future__ import annotations

import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.rooms import RUN, Rooms, rooms_at
from tests.support.wire_peer import HELLO
from tierd.api.admission import CLAIM_ATTEMPTS_MAX, Admission
from tierd.api.packets import PacketConnection
from tierd.api.quotas import Quotas
from tierd.catalog.claims import Claims
from tierd.catalog.decisions import HaltReason, halted, pending, waiting
from tierd.errors import TierUnreachable
from tierd.format import layout
from tierd.format.claim import Claim
from tierd.format.ids import GENERATION_JUMP_MAX, HOT, CheckpointId, Generation, Rank, checkpoint_id
from tierd.format.signature import new_key, parse_keys
from tierd.workers.reaper import Reaper
from tierd.workers.restorer import Restorer
from tierd.workers.write_through import WriteThrough

KEYRING = parse_keys(new_key().line, where="test")
NOW_S = 1.8e9


@pytest.fixture
async def rooms(tmp_path: Path) -> AsyncIterator[Rooms]:
    async with rooms_at(tmp_path) as rooms:
        yield rooms


@pytest.fixture(params=[None, KEYRING], ids=["without a key", "with a key"])
async def signed_or_not(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Rooms]:
    async with rooms_at(tmp_path, keyring=request.param) as rooms:
        yield rooms


def kinds(rooms: Rooms) -> list[str]:
    return [incident.kind for incident in rooms.incidents.recent()]


async def claim_here(rooms: Rooms, generation: int = 1) -> None:
    """As an admission does."""
    start = Claim.new("here")
    for tier in (*rooms.cold.values(), rooms.hot):
        assert await rooms.context.claim(tier, RUN, Generation(generation), start)


async def persist(rooms: Rooms, *steps: int, generation: int = 1) -> list[CheckpointId]:
    """Checkpoints that this daemon has committed in hot and copied to cold."""
    written: list[CheckpointId] = []
    for step in steps:
        written.append(rooms.seal(step, generation=generation).id)
        assert await rooms.persister().run_once()
        await rooms.list_tiers("cold")
        await rooms.replicator().run_once()
    return written


async def commit_elsewhere(rooms: Rooms, step: int, generation: int = 1) -> None:
    """A checkpoint in cold that a daemon with the same keys has copied there."""
    manifest = await rooms.commit("cold", step=step, generation=generation, sequence=step)
    if (keyring := rooms.context.keyring) is not None:
        path = rooms.folder("cold", manifest.id) / layout.MANIFEST
        path.write_bytes(keyring.sign_manifest(manifest).encode())


# ── a generation that two daemons hold ──


async def test_newer_checkpoint_of_the_own_generation_halts_deletions_in_cold(signed_or_not: Rooms) -> None:
    rooms = signed_or_not
    await claim_here(rooms)
    await persist(rooms, 1, 2, 3)
    await commit_elsewhere(rooms, 9)
    await persist(rooms, 4, 5)
    await rooms.list_tiers()
    await Reaper(rooms.context).run_once()
    assert rooms.steps("cold") == [9, 5, 4, 3, 2, 1]
    assert rooms.steps("hot") == [5, 4, 3], "only this daemon writes there"
    (halt,) = halted(rooms.catalog)
    assert (halt.reason, halt.tier, halt.run) == (HaltReason.SHARED_GENERATION, "cold", RUN)
    assert "another node may hold the same generation, or it is forged" in halt.message
    await rooms.list_tiers()
    assert kinds(rooms) == ["foreign"], "it is reported once"


async def test_signed_checkpoint_of_another_node_is_in_no_doubt(tmp_path: Path) -> None:
    async with rooms_at(tmp_path, keyring=KEYRING) as rooms:
        await claim_here(rooms)
        await persist(rooms, 1, 2, 3)
        await commit_elsewhere(rooms, 9)
        for step in (10, 11):
            await commit_elsewhere(rooms, step, generation=2)
        await rooms.list_tiers()
        assert not rooms.catalog.foreign()
        assert [view.id.step for view in rooms.catalog.views() if view.foreign] == []
        assert [halt.reason for halt in halted(rooms.catalog)] == [HaltReason.SHARED_GENERATION]


async def test_deletions_go_on_when_this_node_has_passed_the_other_one(signed_or_not: Rooms) -> None:
    rooms = signed_or_not
    await claim_here(rooms)
    await persist(rooms, 1, 2, 3)
    await commit_elsewhere(rooms, 4)
    await rooms.list_tiers()
    assert halted(rooms.catalog)
    await persist(rooms, 5, 6)
    await rooms.list_tiers()
    await Reaper(rooms.context).run_once()
    assert not halted(rooms.catalog)
    assert rooms.steps("cold") == [6, 5, 4]


async def test_former_generation_of_this_node_halts_nothing(rooms: Rooms) -> None:
    await claim_here(rooms, 1)
    await persist(rooms, 1)
    await claim_here(rooms, 2)
    await persist(rooms, 2, generation=2)
    await commit_elsewhere(rooms, 9)
    await rooms.list_tiers()
    assert not halted(rooms.catalog)
    assert [key for _, key in rooms.catalog.foreign()] == ["run42/000000000009-g0001/manifest.json"]


async def test_copy_of_a_former_generation_is_not_doubted_after_a_restart(tmp_path: Path) -> None:
    """Hot holds an older checkpoint of that generation, which still waits for cold, and not the newest."""
    async with rooms_at(tmp_path) as rooms:
        await claim_here(rooms, 1)
        await persist(rooms, 1, 2, 3)
        await claim_here(rooms, 2)
        await persist(rooms, 4, 5, generation=2)
        for step in (2, 3):
            shutil.rmtree(rooms.folder("hot", checkpoint_id(RUN, step, 1)))
    async with rooms_at(tmp_path) as rooms:
        await commit_elsewhere(rooms, 9)
        await rooms.list_tiers()
        assert {3, 2} < {*rooms.steps("cold")}
        assert [key for _, key in rooms.catalog.foreign()] == ["run42/000000000009-g0001/manifest.json"]


async def test_checkpoint_that_was_fetched_from_another_node_is_not_of_this_one(rooms: Rooms) -> None:
    """Hot has an older checkpoint of a generation that another node runs."""
    await claim_here(rooms, 2)
    assert await rooms.cold["cold"].claim_generation(RUN, Generation(1), Claim.new("other"))
    await rooms.commit("hot", "cold", step=5)
    await commit_elsewhere(rooms, 9)
    await rooms.list_tiers()
    assert not rooms.catalog.foreign()
    assert not halted(rooms.catalog)


async def test_number_that_another_daemon_has_in_cold_is_not_claimed_in_hot(rooms: Rooms) -> None:
    """Else this daemon would take that generation for its own after a restart."""
    await rooms.list_tiers()
    assert await rooms.cold["cold"].claim_generation(RUN, Generation(1), Claim.new("other"))
    assert not await admission(rooms)._claim_in(  # pyright: ignore[reportPrivateUsage]
        [rooms.cold["cold"]], RUN, Generation(1), Claim.new("here"), spans_nodes=False
    )
    assert (await rooms.hot.listing()).claims == {}


# ── what another daemon does that does not doubt ──


@pytest.fixture
async def doubting(rooms: Rooms) -> Rooms:
    """This node holds generation 1. In cold are four checkpoints of a generation that no tier has a claim of."""
    await claim_here(rooms)
    await persist(rooms, 1, 2, 3)
    for step in (11, 12, 13, 14):
        await commit_elsewhere(rooms, step, generation=2)
    await rooms.list_tiers()
    assert len(rooms.catalog.foreign()) == 4
    return rooms


async def test_replica_that_a_daemon_without_the_doubt_deletes_is_neither_lost_nor_copied_again(
    doubting: Rooms,
) -> None:
    rooms = doubting
    await rooms.cold["cold"].delete(checkpoint_id(RUN, 2, 1))
    for _ in range(2):
        await rooms.list_tiers()
        await rooms.replicator().run_once()
        await Reaper(rooms.context).run_once()
        assert pending(rooms.catalog, rooms.config, "cold") == []
        assert waiting(rooms.catalog, rooms.config) == {"cold": []}
    assert "lost" not in kinds(rooms)
    assert 2 not in rooms.steps("cold")
    assert rooms.steps("hot") == [3, 2, 1], "what is in doubt is never a reason to delete"


async def test_replica_that_is_in_doubt_and_disappears_is_not_lost(doubting: Rooms) -> None:
    for step in (11, 14):
        await doubting.cold["cold"].delete(checkpoint_id(RUN, step, 2))
    await doubting.list_tiers()
    assert "lost" not in kinds(doubting)


async def test_replica_that_every_policy_keeps_is_lost_and_copied_again(doubting: Rooms) -> None:
    """The newest of generation 1, which generation 2 has not passed, were it genuine."""
    rooms = doubting
    await persist(rooms, 20)
    shutil.rmtree(rooms.folder("cold", checkpoint_id(RUN, 20, 1)))
    await rooms.list_tiers()
    assert kinds(rooms)[0] == "lost"
    await rooms.replicator().run_once()
    assert 20 in rooms.steps("cold")


async def test_replica_is_lost_and_copied_again_when_the_doubtful_ones_are_gone(doubting: Rooms) -> None:
    rooms = doubting
    shutil.rmtree(rooms.folder("cold", checkpoint_id(RUN, 2, 1)))
    await rooms.list_tiers()
    for step in (11, 12, 13, 14):
        await rooms.cold["cold"].delete(checkpoint_id(RUN, step, 2))
    await rooms.list_tiers()
    await rooms.replicator().run_once()
    assert rooms.steps("cold") == [3, 2, 1]


@pytest.mark.parametrize("is_written_through", [False, True])
async def test_copy_to_a_tier_without_the_claim_begins_with_it(rooms: Rooms, *, is_written_through: bool) -> None:
    """A tier that could not be reached at the start of the generation. Other daemons would doubt the checkpoint."""
    assert await rooms.context.claim(rooms.hot, RUN, Generation(7), Claim.new("here"))
    await rooms.list_tiers()
    if is_written_through:
        rooms.seal(1, generation=7).refused_by.add("hot")
        assert await WriteThrough(rooms.context).run_once()
    else:
        await persist(rooms, 1, generation=7)
    listing = await rooms.cold["cold"].listing()
    assert (rooms.steps("cold"), listing.claims) == ([1], {RUN: {7}})


# ── the number of a new generation ──


def admission(rooms: Rooms) -> Admission:
    async def judge(checkpoint: object) -> bool | None:
        return None

    clock = rooms.context.monotonic_s
    quotas = Quotas(rooms.context.config.limits, rooms.memory, has_checkpoint=lambda run: False, now_s=clock)
    return Admission(rooms.context, Restorer(rooms.context, judge), {}, quotas)


async def claim(rooms: Rooms) -> int:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        connection = PacketConnection(ours)
        return (await admission(rooms)._claim(connection, RUN, Rank(0), HELLO))[0]  # pyright: ignore[reportPrivateUsage]


def forge_claims(rooms: Rooms, *generations: int) -> None:
    folder = rooms.folder("cold", checkpoint_id(RUN, 1, 1)).parent
    folder.mkdir(parents=True, exist_ok=True)
    for generation in generations:
        (folder / layout.generation_key(RUN, Generation(generation)).rpartition("/")[2]).write_bytes(b"{}\n")


async def test_forged_claims_do_not_block_a_start(signed_or_not: Rooms) -> None:
    rooms = signed_or_not
    forge_claims(rooms, *range(1, 501))
    await rooms.list_tiers()
    tried = 0
    real = rooms.cold["cold"].store.put_bytes

    async def put_bytes(key: str, content: bytes, *, if_absent: bool = False) -> bool:
        nonlocal tried
        tried += layout.parse_generation_key(key) is not None
        return await real(key, content, if_absent=if_absent)

    rooms.cold["cold"].store.put_bytes = put_bytes  # type: ignore[method-assign]
    assert (await claim(rooms), tried) == (501, 1)


@pytest.mark.parametrize("generation", [89_999_999, 90_000_000, 99_999_999])
async def test_a_forged_claim_of_a_high_generation_uses_up_no_numbers(signed_or_not: Rooms, generation: int) -> None:
    forge_claims(signed_or_not, generation)
    await signed_or_not.list_tiers()
    assert await claim(signed_or_not) == 1


async def test_new_generation_is_above_unsigned_ones_from_before_the_key(tmp_path: Path) -> None:
    async with rooms_at(tmp_path) as unsigned:
        await claim_here(unsigned, 5)
        await persist(unsigned, 1, generation=6)
    async with rooms_at(tmp_path, keyring=KEYRING) as rooms:
        await rooms.list_tiers()
        assert rooms.catalog.generation_max(RUN) == 0, "they count for nothing else"
        assert await claim(rooms) == 7


async def test_start_ends_with_an_error_when_every_number_is_taken_meanwhile(rooms: Rooms) -> None:
    await rooms.list_tiers()
    tried: list[int] = []

    async def claim_generation(generation: int) -> None:
        forge_claims(rooms, generation)
        tried.append(generation)

    real = rooms.cold["cold"].store.put_bytes

    async def put_bytes(key: str, content: bytes, *, if_absent: bool = False) -> bool:
        if claimed := layout.parse_generation_key(key):
            await claim_generation(claimed[1])
        return await real(key, content, if_absent=if_absent)

    rooms.cold["cold"].store.put_bytes = put_bytes  # type: ignore[method-assign]
    with pytest.raises(TierUnreachable, match="is taken"):
        await claim(rooms)
    assert tried == list(range(1, CLAIM_ATTEMPTS_MAX + 1))


def test_jumps_of_a_thousand_do_not_add_up() -> None:
    """Each of 60,000 jumps would be a claim of this daemon, and the limit moves with it: no number would be left."""
    claims, number = Claims(), 0
    for _ in range(3):
        limit = claims.generation_limit(RUN, NOW_S)
        claims.saw_names(RUN, [limit - 1], "cold")  # a bucket writer's
        number = claims.next_free(RUN, claims.least_above(limit, NOW_S), NOW_S)  # a trainer's
        claims.saw(RUN, [number], HOT, is_here=True)
    assert number <= int(NOW_S / 60) + GENERATION_JUMP_MAX + 3


def test_free_number_is_above_all_names_up_to_the_limit_and_no_name_of_a_file() -> None:
    claims = Claims()
    limit = claims.generation_limit(RUN, NOW_S)
    claims.saw_names(RUN, range(1, 100_001), "cold")
    claims.saw_names(RUN, [3, limit + 5, 89_999_999], "dr")
    assert claims.next_free(RUN, 1, NOW_S) == 100_001
    assert claims.next_free(RUN, 200_000, NOW_S) == 200_000
    claims.saw_names(RUN, range(limit - 1, limit + 5), "cold")
    assert claims.next_free(RUN, 1, NOW_S) == limit + 6
    claims.forget(RUN)
    assert claims.next_free(RUN, 1, NOW_S) == 1


async def test_signed_generation_counts_however_high_it_is(tmp_path: Path) -> None:
    """Forged names may have led a daemon with the key to it."""
    async with rooms_at(tmp_path, keyring=KEYRING) as rooms:
        assert await rooms.cold["cold"].claim_generation(RUN, Generation(60_000_000), Claim.new("other"))
        forge_claims(rooms, 60_000_001)
        await rooms.list_tiers()
        assert rooms.catalog.generation_max(RUN) == 60_000_000
        assert [key for _, key in rooms.catalog.foreign()] == ["run42/generation-60000001.json"]
