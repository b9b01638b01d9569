"""Which checkpoint is restored from the nodes: the newest that their parts cover, and never half of one."""

from __future__ import annotations

import random
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tierd_client.restore.node_choice import (
    NodeInventory,
    PartsSource,
    choose_parts,
    newest_whole,
    used_copies,
    used_part,
    with_whole_as_parts,
)

from tierd.format.ids import CheckpointId, checkpoint_id
from tierd.format.node_messages import HeldCheckpoint
from tierd.format.peers import PeerAddress

RUN = "run"


def at(step: int, generation: int = 1) -> CheckpointId:
    return checkpoint_id(RUN, step, generation)


def part(
    step: int,
    ranks: list[int],
    *part_in: str,
    generation: int = 1,
    world_size: int = 4,
    head: str = "a",
    healthy: bool | None = None,
) -> HeldCheckpoint:
    return HeldCheckpoint(
        step=step,
        generation=generation,
        world_size=world_size,
        part_in=list(part_in or ("hot",)),
        ranks=ranks,
        head_digest=head,
        healthy=healthy,
    )


def whole(step: int, *tiers: str, healthy: bool | None = None) -> HeldCheckpoint:
    return HeldCheckpoint(step=step, generation=1, world_size=4, whole_in=list(tiers), healthy=healthy)


def two(first: list[HeldCheckpoint], second: list[HeldCheckpoint]) -> list[NodeInventory]:
    """Ranks 0 and 1 on one node, 2 and 3 on the other."""
    return [NodeInventory(ranks=[0, 1], checkpoints=first), NodeInventory(ranks=[2, 3], checkpoints=second)]


def test_the_newest_that_is_covered_comes_first_and_from_memory_where_it_is_there() -> None:
    nodes = two(
        [part(7, [0, 1], "memory"), part(5, [0, 1], "memory", "hot"), part(3, [0, 1])],
        [part(5, [2, 3], "hot"), part(3, [2, 3])],
    )
    source, passed_over = choose_parts(nodes, RUN)
    assert source == PartsSource(at(5), "memory")
    assert [each.checkpoint for each in passed_over] == [at(7)]
    assert "no node has the part with ranks 2-3 of 4" in passed_over[0].reason


def test_a_newer_generation_is_newer_than_a_higher_step() -> None:
    nodes = two(
        [part(9, [0, 1]), part(4, [0, 1], generation=2)],
        [part(9, [2, 3]), part(4, [2, 3], generation=2)],
    )
    assert choose_parts(nodes, RUN)[0] == PartsSource(at(4, 2), "hot")


def test_sources_that_failed_are_followed_by_the_next_tier_and_then_by_the_next_checkpoint() -> None:
    both = [part(5, [0, 1], "memory", "hot"), part(3, [0, 1])], [part(5, [2, 3], "memory", "hot"), part(3, [2, 3])]
    failed: list[tuple[CheckpointId, str]] = []
    seen: list[tuple[int, str]] = []
    while (source := choose_parts(two(*both), RUN, failed=failed)[0]) is not None:
        seen.append((source.checkpoint.step, source.tier))
        failed.append((source.checkpoint, source.tier))
    assert seen == [(5, "memory"), (5, "hot"), (3, "hot")]


def test_hot_is_no_source_of_its_own_where_a_node_has_its_part_in_memory_only() -> None:
    nodes = two([part(5, [0, 1], "memory")], [part(5, [2, 3], "memory", "hot")])
    assert choose_parts(nodes, RUN)[0] == PartsSource(at(5), "memory")
    assert choose_parts(nodes, RUN, tier="hot")[0] is None


def test_nan_on_one_node_makes_the_whole_checkpoint_unhealthy() -> None:
    nodes = two([part(5, [0, 1], healthy=True), part(3, [0, 1])], [part(5, [2, 3], healthy=False), part(3, [2, 3])])
    source, passed_over = choose_parts(nodes, RUN)
    assert source == PartsSource(at(3), "hot")
    assert [(each.checkpoint, each.is_unhealthy) for each in passed_over] == [(at(5), True)]
    assert choose_parts(nodes, RUN, allow_unhealthy=True)[0] == PartsSource(at(5), "hot")
    assert choose_parts(nodes, RUN, unhealthy=[at(3)])[0] is None


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (part(5, [2, 3], head="b"), "different starts"),
        (part(5, [3]), "the part with rank 2 of 4"),
        (part(5, [1, 2, 3]), "two nodes have the part of one rank"),
    ],
)
def test_parts_that_do_not_make_one_checkpoint_are_passed_over(second: HeldCheckpoint, why: str) -> None:
    source, (passed_over,) = choose_parts(two([part(5, [0, 1])], [second]), RUN)
    assert (source, passed_over.is_covered) == (None, False)
    assert why in passed_over.reason


def test_ranks_that_were_placed_elsewhere_are_named() -> None:
    source, (passed_over,) = choose_parts(two([part(5, [0, 2])], [part(5, [1, 3])]), RUN)
    assert (source, passed_over.is_covered) == (None, True)
    assert "another node has the part with ranks 1-2" in passed_over.reason
    fewer = [NodeInventory(ranks=[0], checkpoints=[part(5, [0, 1])]), two([], [part(5, [2, 3])])[1]]
    assert "now there are 3" in choose_parts(fewer, RUN)[1][0].reason


def test_nodes_that_read_from_each_other_restore_whatever_they_have_together() -> None:
    def nodes(*peers: PeerAddress | None) -> list[NodeInventory]:
        held = [part(5, [0, 2])], [], [part(5, [1, 3])]
        placed = [0], [1, 2], [3]
        return [
            NodeInventory(ranks=ranks, checkpoints=checkpoints, peer=peer)
            for ranks, checkpoints, peer in zip(placed, held, peers, strict=True)
        ]

    peer = PeerAddress(address="gpu-7:9465", token="")
    assert choose_parts(nodes(peer, peer, peer), RUN)[0] == PartsSource(at(5), "hot")
    source, (passed_over,) = choose_parts(nodes(peer, None, peer), RUN)
    assert (source, passed_over.is_covered) == (None, True)


def test_the_newest_whole_one_is_that_of_rank_0_and_healthy() -> None:
    nodes = two(
        [whole(9, "cold"), whole(7, "dr"), whole(5, "cold")], [whole(11, "cold"), part(9, [2, 3], healthy=False)]
    )
    assert newest_whole(nodes, RUN) == at(7)
    assert newest_whole(nodes, RUN, allow_unhealthy=True) == at(9)
    assert newest_whole(nodes, RUN, tier="cold") == at(5)
    assert newest_whole(nodes, RUN, failed=[(at(7), "dr")]) == at(5)
    assert newest_whole(two([], []), RUN) is None


@st.composite
def worlds(draw: st.DrawFn) -> list[NodeInventory]:
    """Up to four nodes with some parts each; ranks are placed as they were saved, or not."""
    world_size = draw(st.integers(2, 6))
    ranks = draw(st.permutations(range(world_size)))
    cuts = sorted({0, *draw(st.lists(st.integers(1, world_size - 1), min_size=1, max_size=3)), world_size})
    saved = [sorted(ranks[begin:end]) for begin, end in pairwise(cuts)]
    placed = draw(st.sampled_from([saved, saved[::-1]]))
    nodes: list[NodeInventory] = []
    for here, had in zip(placed, saved, strict=True):
        held = [
            part(
                step,
                had,
                *draw(st.sampled_from([("hot",), ("memory",), ("memory", "hot")])),
                world_size=world_size,
                head=draw(st.sampled_from(["a", "a", "a", "b"])),
                healthy=draw(st.sampled_from([None, True, True, False])),
            )
            for step in range(1, 5)
            if draw(st.integers(0, 3))
        ]
        nodes.append(NodeInventory(ranks=here, checkpoints=held))
    return sorted(nodes, key=lambda node: node.ranks)


def is_restorable(nodes: list[NodeInventory], step: int, tier: str) -> bool:
    """By a plain reading of the rule: each node has, of one checkpoint, exactly the shards of its own ranks."""
    held = [next((each for each in node.checkpoints if each.step == step), None) for node in nodes]
    return (
        all(
            each is not None
            and each.ranks == node.ranks
            and each.healthy is not False
            and (tier == "memory" or "hot" in each.part_in)
            for node, each in zip(nodes, held, strict=True)
        )
        and len({each.head_digest for each in held if each is not None}) == 1
    )


@given(worlds(), st.randoms(use_true_random=False))
def test_the_choice_is_the_newest_that_every_rank_can_read(nodes: list[NodeInventory], shuffle: random.Random) -> None:
    source, passed_over = choose_parts(nodes, RUN)
    restorable = [step for step in range(1, 5) if is_restorable(nodes, step, "memory")]
    assert (source.checkpoint.step if source else None) == max(restorable, default=None)
    if source is not None:
        assert is_restorable(nodes, source.checkpoint.step, source.tier)
        assert all(each.checkpoint.recency > source.checkpoint.recency for each in passed_over)
    known = {held.step for node in nodes for held in node.checkpoints}
    newer = {step for step in known if source is None or step > source.checkpoint.step}
    assert {each.checkpoint.step for each in passed_over} == newer  # none is passed over without a word
    shuffled = [
        NodeInventory(ranks=node.ranks, checkpoints=shuffle.sample(node.checkpoints, len(node.checkpoints)))
        for node in nodes
    ]
    shuffle.shuffle(shuffled)
    assert choose_parts(shuffled, RUN) == (source, passed_over)  # whatever the order of the answers


@given(worlds())
def test_each_failure_leads_to_another_source_until_none_is_left(nodes: list[NodeInventory]) -> None:
    failed: list[tuple[CheckpointId, str]] = []
    while (source := choose_parts(nodes, RUN, failed=failed)[0]) is not None:
        assert (source.checkpoint, source.tier) not in failed
        assert not failed or source.checkpoint.recency <= failed[-1][0].recency
        failed.append((source.checkpoint, source.tier))
    assert len(failed) <= 8


PEER = PeerAddress(address="10.0.0.1:9465", token="ab")


def with_copies(
    first: list[HeldCheckpoint], second: list[HeldCheckpoint], copies: list[HeldCheckpoint]
) -> list[NodeInventory]:
    """The first node keeps the copies."""
    return [
        NodeInventory(ranks=[0, 1], checkpoints=first, copies=copies, peer=PEER),
        NodeInventory(ranks=[2, 3], checkpoints=second, peer=PEER),
    ]


def test_a_copy_takes_the_place_of_a_part_that_is_lost() -> None:
    nodes = with_copies([part(5, [0, 1])], [], [part(5, [2, 3])])
    assert choose_parts(nodes, RUN)[0] == PartsSource(at(5), "hot")
    assert used_copies(nodes, at(5), "hot") == {0: part(5, [2, 3])}


def test_the_part_of_the_node_itself_comes_before_its_copy() -> None:
    nodes = with_copies([part(5, [0, 1])], [part(5, [2, 3], "memory", "hot")], [part(5, [2, 3])])
    assert choose_parts(nodes, RUN)[0] == PartsSource(at(5), "memory")
    assert used_copies(nodes, at(5), "hot") == {}


def test_where_a_part_cannot_be_read_its_copy_is_the_next_source() -> None:
    first, second = [part(5, [0, 1]), part(3, [0, 1])], [part(5, [2, 3]), part(3, [2, 3])]
    nodes = with_copies(first, second, [part(5, [2, 3])])
    failed = [(at(5), "hot")]
    for tier in ("auto", "hot"):
        assert choose_parts(nodes, RUN, tier=tier, failed=failed)[0] == PartsSource(at(5), "peer")
    assert used_copies(nodes, at(5), "peer") == {0: part(5, [2, 3])}
    assert used_part(nodes[1], nodes, at(5), "peer") is None
    assert used_part(nodes[0], nodes, at(5), "peer") == part(5, [0, 1])  # it has no copy
    assert used_part(nodes[1], nodes, at(5), "hot") == part(5, [2, 3])
    assert choose_parts(nodes, RUN, failed=[*failed, (at(5), "peer")])[0] == PartsSource(at(3), "hot")


def test_a_copy_of_another_start_is_no_source_where_a_part_cannot_be_read() -> None:
    nodes = with_copies([part(5, [0, 1])], [part(5, [2, 3])], [part(5, [2, 3], head="b")])
    assert choose_parts(nodes, RUN)[0] == PartsSource(at(5), "hot")
    assert choose_parts(nodes, RUN, failed=[(at(5), "hot")])[0] is None


def test_a_copy_of_another_start_of_the_run_covers_nothing() -> None:
    nodes = with_copies([part(5, [0, 1])], [], [part(5, [2, 3], head="b")])
    found, passed_over = choose_parts(nodes, RUN)
    assert found is None
    assert "different starts" in passed_over[0].reason


def test_a_copy_that_holds_nan_makes_the_checkpoint_unhealthy() -> None:
    nodes = with_copies([part(5, [0, 1])], [], [part(5, [2, 3], healthy=False)])
    assert choose_parts(nodes, RUN)[0] is None
    assert choose_parts(nodes, RUN, allow_unhealthy=True)[0] == PartsSource(at(5), "hot")


def test_copies_are_of_no_use_where_a_node_cannot_be_read() -> None:
    nodes = with_copies([part(5, [0, 1])], [], [part(5, [2, 3])])
    nodes[1] = NodeInventory(ranks=[2, 3], checkpoints=[])
    assert choose_parts(nodes, RUN)[0] is None
    assert used_copies(nodes, at(5), "hot") == {}


def test_what_one_node_has_whole_the_others_read_from_there() -> None:
    """A start on one node has saved it, and now there are two. Rank 0 may be on either."""
    held = [whole(5, "memory", "hot", "cold"), whole(3, "cold")]
    for first, second, has_it in (held, [whole(3, "cold")], 0), ([whole(3, "cold")], held, 1):
        nodes = with_whole_as_parts(with_copies(first, second, []), RUN)
        assert choose_parts(nodes, RUN) == (PartsSource(at(5), "memory"), [])
        assert choose_parts(nodes, RUN, failed=[(at(5), "memory")])[0] == PartsSource(at(5), "hot")
        parts = [used_part(node, nodes, at(5), "memory") for node in nodes]
        assert [part.ranks if part is not None else [] for part in parts] == [
            [0, 1, 2, 3] * (1 - has_it),
            [0, 1, 2, 3] * has_it,
        ]


def test_a_whole_checkpoint_is_read_from_one_node_only_where_that_is_needed() -> None:
    parts = [part(5, [0, 1])], [part(5, [2, 3])]
    for nodes in (
        with_copies([whole(5, "hot")], [whole(5, "hot")], []),  # each reads its own
        with_copies(*parts, []),
        with_copies([whole(5, "cold")], [], []),
        two([whole(5, "hot")], []),  # they do not read from each other
        [NodeInventory(ranks=[0, 1, 2, 3], checkpoints=[whole(5, "hot")], peer=PEER)],
    ):
        assert with_whole_as_parts(nodes, RUN) == nodes
    nodes = with_copies([msgspec.structs.replace(parts[0][0], whole_in=["memory"])], parts[1], [])
    assert with_whole_as_parts(nodes, RUN) == nodes  # the parts cover it


def test_parts_that_cover_nothing_give_way_to_a_whole_one() -> None:
    nodes = with_copies([part(5, [0, 1])], [whole(5, "hot")], [part(5, [0, 1], head="b")])
    changed = with_whole_as_parts(nodes, RUN)
    assert choose_parts(changed, RUN) == (PartsSource(at(5), "hot"), [])
    assert used_part(changed[0], changed, at(5), "hot") is None
    assert used_copies(changed, at(5), "hot") == {}
