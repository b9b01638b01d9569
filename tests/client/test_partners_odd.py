"""An odd number of nodes: no domain that has at most half of them takes a part and its copy with it."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from tierd_client.partners import partners


def test_seven_nodes_in_three_racks_have_their_copies_in_another_rack() -> None:
    domains = dict(zip(range(7), "aabbccc", strict=True))
    assert all(domains[node] != domains[keeper] for node, keeper in partners(domains).items())


@given(st.dictionaries(st.integers(0, 1 << 20), st.sampled_from("abcd"), min_size=3, max_size=41))
def test_partners_are_in_other_domains_unless_one_has_more_than_half(domains: dict[int, str]) -> None:
    keeps = partners(domains)
    if max(Counter(domains.values()).values()) <= len(domains) // 2:
        assert all(domains[node] != domains[keeper] for node, keeper in keeps.items())
