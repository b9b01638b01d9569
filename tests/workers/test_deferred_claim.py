"""A claim that a cold tier could not take is made before the first copy there, or the trainers are fenced."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from tests.support.rooms import RUN, Rooms, rooms_at
from tierd.errors import TierdError, TierUnreachable
from tierd.format import layout, wire
from tierd.format.claim import Claim
from tierd.format.ids import Generation, Rank, Run, checkpoint_id
from tierd.format.manifest import encode_marker
from tierd.tiers.tier import Tier
from tierd.workers.deferred_claim import confirm_claim

FIRST = Generation(1)
HERE, ELSEWHERE = Claim.new("here"), Claim.new("elsewhere")


@pytest.fixture
async def rooms(tmp_path: Path) -> AsyncIterator[Rooms]:
    """A run that was claimed in hot while cold could not be reached, and two of its checkpoints."""
    async with rooms_at(tmp_path) as rooms:
        await rooms.hot.claim_generation(Run(RUN), FIRST, HERE)
        for step in (100, 200):
            await rooms.commit("hot", step=step)
        await rooms.look()
        yield rooms


async def test_the_claim_is_made_in_cold_before_the_first_copy(rooms: Rooms) -> None:
    assert await rooms.replicator().run_once()
    assert await rooms.cold["cold"].claim(Run(RUN), FIRST) == HERE
    assert rooms.steps("cold") == [200, 100]


async def test_a_claim_whose_answer_was_lost_is_confirmed(rooms: Rooms) -> None:
    assert await rooms.cold["cold"].claim_generation(Run(RUN), FIRST, HERE)
    assert await rooms.replicator().run_once()
    assert rooms.steps("cold") == [200, 100]


async def test_nothing_is_copied_into_a_generation_of_another_start(rooms: Rooms) -> None:
    assert await rooms.cold["cold"].claim_generation(Run(RUN), FIRST, ELSEWHERE)
    rooms.memory.enter(Run(RUN), FIRST, Rank(0), 1)
    assert not await rooms.replicator().run_once()
    assert await rooms.cold["cold"].claim(Run(RUN), FIRST) == ELSEWHERE
    assert (rooms.steps("hot"), rooms.steps("cold")) == ([200, 100], [])
    assert {(incident.stage, incident.kind) for incident in rooms.incidents.recent()} == {("replicate", "stale")}
    assert wire.Fenced(generation=2) in rooms.sent
    assert rooms.count("tierd_fenced_total") == 1
    assert rooms.catalog.generation_max(Run(RUN)) == 2, "a trainer of generation 1 that reconnects is refused"


async def test_trainers_count_as_fenced_also_after_a_newer_generation_was_seen_and_once_for_all_tiers(
    rooms: Rooms,
) -> None:
    assert await rooms.cold["cold"].claim_generation(Run(RUN), FIRST, ELSEWHERE)
    rooms.memory.enter(Run(RUN), FIRST, Rank(0), 1)
    rooms.catalog.saw_generation(Run(RUN), 2)
    for _ in range(2):
        assert not await rooms.replicator().run_once()
    assert wire.Fenced(generation=2) in rooms.sent
    assert rooms.count("tierd_fenced_total") == 1
    assert not rooms.context.fence(Run(RUN), FIRST, by=Generation(3)), "another tier says it, too"
    assert rooms.count("tierd_fenced_total") == 1


async def test_a_start_of_this_hot_tier_that_was_killed_while_it_claimed_fences_nobody(rooms: Rooms) -> None:
    """It claimed in cold, not yet in hot. After it, cold could not be reached, and the next start got its number."""
    ours, killed = Claim.new("here", "identity of hot"), Claim.new("here", "identity of hot")
    assert await rooms.hot.claim_generation(Run(RUN), Generation(2), ours)
    assert await rooms.cold["cold"].claim_generation(Run(RUN), Generation(2), killed)
    await rooms.commit("hot", step=300, generation=2)
    await rooms.look()
    rooms.memory.enter(Run(RUN), Generation(2), Rank(0), 1)
    assert await rooms.replicator().run_once()
    assert rooms.steps("cold") == [300, 200, 100]
    assert not any(isinstance(message, wire.Fenced) for message in rooms.sent)


async def test_a_claim_in_hot_that_could_not_be_read_for_a_moment_fences_nobody(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot went from memory to cold while the hot disk had errors, and the claim in cold was another one: what
    was in hot never reached cold."""
    context, cold, second = rooms.context, rooms.cold["cold"], Generation(2)
    await context.identities.begin(context.tiers)
    assert await context.claim(rooms.hot, Run(RUN), second, context.new_claim())
    rooms.memory.enter(Run(RUN), second, Rank(0), 1)
    await rooms.commit("hot", step=300, generation=2)
    await rooms.look()

    async def fail(keys: Sequence[str], *, size_max: int) -> list[bytes | TierdError]:
        return [TierUnreachable("read: Input/output error") for _ in keys]

    with monkeypatch.context() as broken:
        broken.setattr(rooms.hot.store, "get_many", fail)
        await confirm_claim(context, cold, checkpoint_id(RUN, 300, 2))
    cold.claimed.clear()  # as after a restart
    assert await rooms.replicator().run_once()
    assert rooms.steps("cold") == [300, 200, 100]
    assert not any(isinstance(message, wire.Fenced) for message in rooms.sent)


@pytest.mark.parametrize(("node", "hot"), [("here", "another disk"), ("elsewhere", "identity of hot"), ("here", "")])
async def test_a_start_of_another_hot_tier_fences(rooms: Rooms, node: str, hot: str) -> None:
    """The node's former disk, a copy of its disk, and a daemon of an older version."""
    ours = Claim.new("here", "identity of hot" if hot else "")
    assert await rooms.hot.claim_generation(Run(RUN), Generation(2), ours)
    assert await rooms.cold["cold"].claim_generation(Run(RUN), Generation(2), Claim.new(node, hot))
    await rooms.commit("hot", step=300, generation=2)
    await rooms.look()
    rooms.memory.enter(Run(RUN), Generation(2), Rank(0), 1)
    assert not await rooms.replicator().run_once()
    assert wire.Fenced(generation=3) in rooms.sent


async def test_trainers_of_a_later_generation_are_not_fenced(rooms: Rooms) -> None:
    assert await rooms.cold["cold"].claim_generation(Run(RUN), FIRST, ELSEWHERE)
    rooms.memory.enter(Run(RUN), Generation(2), Rank(0), 1)
    assert not await rooms.replicator().run_once()
    assert rooms.sent == []


async def test_what_was_restored_from_another_nodes_start_is_copied(rooms: Rooms) -> None:
    """Its generation was not claimed through this hot tier."""
    await rooms.commit("hot", step=300, generation=2)
    await rooms.look()
    assert await rooms.cold["cold"].claim_generation(Run(RUN), Generation(2), ELSEWHERE)
    assert await rooms.replicator().run_once()
    assert checkpoint_id(RUN, 300, 2) in {manifest.id for manifest in rooms.catalog.manifests_in("cold")}


async def test_a_claim_that_another_start_has_overwritten_is_noticed(rooms: Rooms) -> None:
    """Both claimed at once, and the server ignores If-None-Match."""
    assert await rooms.cold["cold"].claim_generation(Run(RUN), FIRST, HERE)
    await rooms.cold["cold"].store.put_bytes(layout.generation_key(Run(RUN), FIRST), encode_marker(ELSEWHERE))
    assert not await rooms.replicator().run_once()
    assert rooms.steps("cold") == []


async def test_a_file_that_is_no_claim_fences_nobody(rooms: Rooms) -> None:
    await rooms.cold["cold"].store.put_bytes(layout.generation_key(Run(RUN), FIRST), b"damaged")
    assert await rooms.replicator().run_once()
    assert rooms.steps("cold") == [200, 100]


async def test_requests_are_made_once_per_generation(rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
    claims: list[Generation] = []
    claim_generation = Tier.claim_generation

    async def count(tier: Tier, run: Run, generation: Generation, claim: Claim) -> bool:
        claims.append(generation)
        return await claim_generation(tier, run, generation, claim)

    monkeypatch.setattr(Tier, "claim_generation", count)
    assert await rooms.replicator().run_once()
    assert (rooms.steps("cold"), claims) == ([200, 100], [1])


async def test_markers_of_older_versions_are_not_compared(rooms: Rooms) -> None:
    older = Claim(node="here", claimed_by="0.1")
    assert await rooms.hot.claim_generation(Run(RUN), Generation(2), older)
    assert await rooms.cold["cold"].claim_generation(Run(RUN), Generation(2), Claim(node="here", claimed_by="0.1"))
    await rooms.commit("hot", step=300, generation=2)
    await rooms.look()
    assert await rooms.replicator().run_once()
    assert rooms.steps("cold") == [300, 200, 100]
