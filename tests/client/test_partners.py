"""Every node's part has one copy on another node, in another domain where that can be; every node keeps one copy."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tierd_client.partners import find_partner, partners

from tests.support.wire_peer import welcome
from tierd.format import wire
from tierd.format.peers import NodeAddress, PeerAddress


def test_two_halves_keep_the_copies_of_each_other() -> None:
    assert partners(dict.fromkeys([0, 8, 16, 24], "")) == {0: 16, 8: 24, 16: 0, 24: 8}


def test_of_an_odd_number_of_nodes_three_form_a_ring() -> None:
    assert partners(dict.fromkeys([0, 8, 16], "")) == {0: 8, 8: 16, 16: 0}
    assert partners(dict.fromkeys(range(5), "")) == {0: 3, 3: 0, 1: 2, 2: 4, 4: 1}


def test_one_node_has_no_partner() -> None:
    assert partners({0: "rack"}) == {}
    assert partners({}) == {}


def test_partners_are_in_other_racks() -> None:
    domains = {0: "a", 8: "b", 16: "a", 24: "b", 32: "c", 40: "c"}
    assert all(domains[node] != domains[keeper] for node, keeper in partners(domains).items())


@given(st.dictionaries(st.integers(0, 1 << 20), st.sampled_from("abcd"), min_size=2, max_size=40))
def test_each_node_keeps_one_copy_of_another(domains: dict[int, str]) -> None:
    keeps = partners(domains)
    assert set(keeps) == set(keeps.values()) == set(domains)
    assert all(node != keeper for node, keeper in keeps.items())
    assert keeps == partners(dict(reversed(domains.items())))  # whatever the order in which a rank knows them
    if len(domains) % 2 == 0:
        assert all(keeps[keeper] == node for node, keeper in keeps.items())
    if max(Counter(domains.values()).values()) <= len(domains) // 2:
        assert all(domains[node] != domains[keeper] for node, keeper in keeps.items())


def test_seven_nodes_in_three_racks_have_their_copies_in_another_rack() -> None:
    domains = dict(zip(range(7), "aabbccc", strict=True))
    assert all(domains[node] != domains[keeper] for node, keeper in partners(domains).items())


class Gathering:
    """The ranks of a training, of which this is one: `gather` returns what all have. The first call collects."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.rank = 0
        self.sent: dict[int, bytes] = {}

    def gather(self, own: bytes) -> list[bytes]:
        self.sent[self.rank] = own
        return [self.sent.get(rank, b"") for rank in range(self.world_size)]


def found_partners(welcomes: dict[int, wire.Welcome], world_size: int) -> list[wire.Partner | None]:
    """By node. `welcomes`: by the lowest rank of each node."""
    lowest = sorted(welcomes)
    ranks: Any = Gathering(world_size)
    found: list[wire.Partner | None] = []
    for _ in range(2):  # in the second round each rank knows what the others have sent
        found.clear()
        for first, end in zip(lowest, [*lowest[1:], world_size], strict=True):
            ranks.rank = first
            node = wire.NodeRanks(ranks=list(range(first, end)), lowest=lowest)
            partner, roster = find_partner(ranks, node, welcomes[first])
            assert len(roster) <= len(welcomes)
            found.append(partner)
    return found


def welcome_of(
    lowest: int, domain: str = "", *, has_peer: bool = True, lifecycle: str = "", fingerprint: str = ""
) -> wire.Welcome:
    peer = PeerAddress(address=f"10.0.0.{lowest}:9465", token="ab", fingerprint=fingerprint) if has_peer else None
    return msgspec.structs.replace(welcome(), peer=peer, domain=domain, lifecycle=lifecycle)


def test_each_node_is_told_whose_parts_it_copies() -> None:
    found = found_partners({lowest: welcome_of(lowest) for lowest in (0, 2, 4, 6)}, 8)
    assert [partner and partner.peer.address for partner in found] == [f"10.0.0.{n}:9465" for n in (4, 6, 0, 2)]
    assert [partner and partner.node_file for partner in found] == [
        f"node-{lowest:05d}-of-00008.json" for lowest in (4, 6, 0, 2)
    ]


def test_every_node_is_told_where_all_nodes_are() -> None:
    ranks: Any = Gathering(4)
    rosters: list[list[NodeAddress]] = []
    for ranks.rank in (0, 2, 0, 2):  # the first two have not heard of each other
        node = wire.NodeRanks(ranks=[ranks.rank, ranks.rank + 1], lowest=[0, 2])
        rosters.append(find_partner(ranks, node, welcome_of(ranks.rank, has_peer=ranks.rank > 0))[1])
    assert rosters[2] == rosters[3]
    assert [(each.ranks, each.peer and each.peer.address) for each in rosters[3]] == [
        ([0, 1], None),
        ([2, 3], "10.0.0.2:9465"),
    ]


def test_nodes_that_serve_nothing_have_no_partner_and_a_warning_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tierd_client"):
        welcomes = {0: welcome_of(0), 1: welcome_of(1, has_peer=False), 2: welcome_of(2)}
        found = found_partners(welcomes, 3)
    assert [partner and partner.node_file for partner in found] == [
        "node-00002-of-00003.json",
        None,
        "node-00000-of-00003.json",
    ]
    assert "1 of 3 nodes have no peers.listen" in caplog.text


def test_a_domain_with_more_than_half_of_the_nodes_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tierd_client"):
        found_partners({lowest: welcome_of(lowest, "one" if lowest < 3 else "two") for lowest in range(4)}, 4)
    assert "3 of 4 nodes are in domain one" in caplog.text


def test_another_lifecycle_than_that_of_rank_0_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tierd_client"):
        lifecycles = {0: "one", 1: "one", 2: "other", 3: ""}  # the daemon of rank 3 tells nothing of it
        found = found_partners({n: welcome_of(n, has_peer=n > 1, lifecycle=each) for n, each in lifecycles.items()}, 4)
    assert [partner and partner.lifecycle for partner in found] == [None, None, "", "other"]
    assert "of 1 of 4 nodes differs from that of rank 0's node" in caplog.text
    assert "the nodes of ranks 2" in caplog.text


def test_nodes_without_tls_are_named_where_others_have_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tierd_client"):
        found = found_partners({n: welcome_of(n, fingerprint="cd" * 32 if n else "") for n in range(3)}, 3)
        assert [partner and bool(partner.peer.fingerprint) for partner in found] == [True, False, True]
        assert "1 of 3 nodes have no peers.tls" in caplog.text
        assert caplog.text.rstrip().endswith("the nodes of ranks 0")
        caplog.clear()
        found_partners({n: welcome_of(n, fingerprint="cd" * 32) for n in range(3)}, 3)
        assert "peers.tls" not in caplog.text


def test_nodes_without_peers_are_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tierd_client"):
        assert found_partners({lowest: welcome_of(lowest, has_peer=False) for lowest in (0, 1)}, 2) == [None, None]
    assert not caplog.records
