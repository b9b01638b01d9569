"""Every node's part has one copy on another node, in another domain where that can be; every node keeps one copy."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from tierd_client.partners import partners


def test_two_halves_keep_the_copies_of_each_other() -> None:
    assert partners(dict.fromkeys([0, 8, 16, 24], "")) == {0: 16, 8: 24, 16: 0, 24: 8}


def test_the_last_three_of_an_odd_number_form_a_ring() -> None:
    assert partners(dict.fromkeys([0, 8, 16], "")) == {0: 8, 8: 16, 16: 0}
    assert partners(dict.fromkeys(range(5), "")) == {0: 1, 1: 0, 2: 3, 3: 4, 4: 2}


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
