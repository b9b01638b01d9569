"""The daemon of each node checks the claim of a run over several nodes, and needs no cold tier to know it again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.rooms import RUN, Rooms, rooms_at
from tierd.api import node_ranks as module
from tierd.api.node_ranks import check_node_ranks, confirm_node_claim, decode_roster
from tierd.errors import BadConfig, BadRequest, Stale
from tierd.format.claim import Claim
from tierd.format.ids import GENERATION_SEEN_MAX, Generation
from tierd.format.node_messages import NodeRanks
from tierd.format.signature import Keyring, new_key
from tierd.tiers.tier import Tier

FIRST = Generation(1)
BITS = "0123456789abcdef" * 2


async def confirm(rooms: Rooms, bits: str = BITS) -> None:
    await confirm_node_claim(rooms.context, RUN, FIRST, bits)


async def claim_in_cold(rooms: Rooms, bits: str = BITS) -> None:
    assert await rooms.cold["cold"].claim_generation(RUN, FIRST, Claim(node="other", claim=bits))


def hang_cold(rooms: Rooms) -> None:
    async def hang(*arguments: Any, **options: Any) -> list[bytes]:
        await asyncio.Event().wait()
        return []

    for tier in rooms.cold.values():
        tier.store.get_many = hang  # type: ignore[method-assign]


async def test_claim_in_cold_is_noted_in_hot(tmp_path: Path) -> None:
    async with rooms_at(tmp_path) as rooms:
        await claim_in_cold(rooms)
        await confirm(rooms)
        noted = await rooms.hot.claim(RUN, FIRST)
        assert noted is not None
        assert noted.claim == BITS


async def test_ranks_that_come_back_wait_for_no_cold_tier(tmp_path: Path) -> None:
    async with rooms_at(tmp_path) as rooms:
        await claim_in_cold(rooms)
        await confirm(rooms)
        hang_cold(rooms)
        async with asyncio.timeout(5):
            await confirm(rooms)


async def test_cold_tier_that_does_not_answer_delays_the_first_join_for_a_limited_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COLD_TIMEOUT_S", 0.05)
    async with rooms_at(tmp_path) as rooms:
        hang_cold(rooms)
        async with asyncio.timeout(5):
            await confirm(rooms)


async def test_cold_tier_without_the_claim_is_not_that_of_the_other_nodes(tmp_path: Path) -> None:
    async with rooms_at(tmp_path) as rooms:
        with pytest.raises(BadConfig, match="cold of this node has no claim of it"):
            await confirm(rooms)


@pytest.mark.parametrize("who", ["rank 0", "this node", "both"])
async def test_node_with_another_key_than_that_of_rank_0_is_refused_by_that_name(tmp_path: Path, who: str) -> None:
    """What it commits, the others would not read."""
    own = None if who == "rank 0" else Keyring([new_key()])
    others = None if who == "this node" else Keyring([new_key()])
    async with rooms_at(tmp_path, keyring=own) as rooms:
        cold = rooms.cold["cold"]
        home = Tier("cold", cold.store, keyring=others)
        assert await home.claim_generation(RUN, FIRST, Claim(node="home", claim=BITS))
        said = "its claim in cold is signed, and this node has no key" if own is None else "check the signature of "
        with pytest.raises(BadConfig, match=said) as caught:
            await confirm(rooms)
        assert "the same security.key_file" in caught.value.hint
        assert await rooms.hot.claim(RUN, FIRST) is None


async def test_claim_of_another_start_is_stale(tmp_path: Path) -> None:
    async with rooms_at(tmp_path) as rooms:
        await claim_in_cold(rooms, BITS[::-1])
        with pytest.raises(Stale, match="another start has claimed it in cold"):
            await confirm(rooms)


async def test_claim_of_another_start_in_hot_is_stale(tmp_path: Path) -> None:
    async with rooms_at(tmp_path) as rooms:
        await claim_in_cold(rooms)
        assert await rooms.hot.claim_generation(RUN, FIRST, Claim(node="here", claim=BITS[::-1]))
        with pytest.raises(Stale, match="another start has claimed it in hot"):
            await confirm(rooms)


@pytest.mark.parametrize(
    ("node", "said"),
    [
        (NodeRanks(ranks=[], lowest=[0, 2]), "`ranks` are not ascending"),
        (NodeRanks(ranks=[3, 2], lowest=[0, 2]), "`ranks` are not ascending"),
        (NodeRanks(ranks=[2, 4], lowest=[0, 2]), "`ranks` are not ascending ranks below 4"),
        (NodeRanks(ranks=[2, 3], lowest=[0, 0, 2]), "`lowest` are not ascending"),
        (NodeRanks(ranks=[3], lowest=[0, 3]), "rank 2 is not on one of several nodes"),
        (NodeRanks(ranks=[2, 3], lowest=[0, 3]), "rank 2 is not on one of several nodes"),
        (NodeRanks(ranks=[2, 3], lowest=[1, 2]), "rank 2 is not on one of several nodes"),
        (NodeRanks(ranks=[0, 1, 2, 3], lowest=[0]), "rank 2 is not on one of several nodes"),
        (NodeRanks(ranks=[2, 3], lowest=[0, 2], claim="../x"), "claim '../x'"),
        (NodeRanks(ranks=[2, 3], lowest=[0, 2], claim=BITS, base=-1), "base -1"),
    ],
)
def test_impossible_division_into_nodes_is_refused(node: NodeRanks, said: str) -> None:
    with pytest.raises(BadRequest) as caught:
        check_node_ranks(node, 2, 4, "join")
    assert said in caught.value.message


def test_division_into_nodes_in_any_order_is_taken() -> None:
    check_node_ranks(NodeRanks(ranks=[1, 3], lowest=[0, 1], claim=BITS), 3, 4, "join")


async def test_a_node_that_missed_some_starts_may_join_the_newest(tmp_path: Path) -> None:
    third = Generation(3)
    async with rooms_at(tmp_path) as rooms:
        claims, now_s = rooms.catalog.claims, rooms.context.now().timestamp()
        await claim_in_cold(rooms)
        await confirm(rooms)
        assert await rooms.cold["cold"].claim_generation(RUN, third, Claim(node="home", claim=BITS))
        await confirm_node_claim(rooms.context, RUN, third, BITS)
        assert claims.joined_limit(RUN, rooms.catalog.generation_max(RUN), now_s) >= third


async def test_a_generation_beyond_any_count_of_starts_is_not_noted(tmp_path: Path) -> None:
    async with rooms_at(tmp_path) as rooms:
        far = Generation(GENERATION_SEEN_MAX)
        assert await rooms.cold["cold"].claim_generation(RUN, far, Claim(node="home", claim=BITS))
        with pytest.raises(BadRequest, match="not between 1 and"):
            await confirm_node_claim(rooms.context, RUN, far, BITS)
        assert await rooms.hot.claim(RUN, far) is None


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ("", "truncated"),
        ("[" * 100_000, "take the nodes"),
        ('[{"ranks": [0, 4]}]', "others than its 4 ranks, or one twice"),
        ('[{"ranks": [0]}, {"ranks": [0]}]', "one twice"),
        ('[{"ranks": [-1]}]', "others than its 4 ranks"),
        ('[{"ranks": []}]', "not ascending"),
        ('[{"ranks": [1, 0]}]', "not ascending"),
        ('[{"ranks": [0], "peer": {"address": "10.0.0.1/x:80", "token": "ab"}}]', "not host:port"),
        ('[{"ranks": [0], "peer": {"address": "10.0.0.1:80", "token": "ab\\r\\nHost: x"}}]', "no token"),
    ],
)
def test_impossible_nodes_are_refused(raw: str, said: str) -> None:
    with pytest.raises(BadRequest) as caught:
        decode_roster(raw.encode(), RUN, 4)
    assert said in str(caught.value).lower()
