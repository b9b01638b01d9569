"""Patterns with `*` stand for names of entries; all other characters stand for themselves."""

from __future__ import annotations

import pytest
from tierd_client.state.name_patterns import matches


@pytest.mark.parametrize(
    ("pattern", "name", "is_matched"),
    [
        ("model.body", "model.body", True),
        ("model.body", "model.body.weight", True),
        ("model.body", "model.body2.weight", False),
        ("model.*.weight", "model.a.b.weight", True),
        ("model.*.weight", "model.weight", False),
        ("*.weight", "model.weight.x", False),
        ("*", "model\nbody", True),
        ("a[0]", "a[0]", True),
        ("a[0]", "a0", False),
        ("a*[0]", "ab[0]", True),
        ("a?", "ab", False),
        ("a*", "a*.b", True),
        ("a.b", "a-b", False),
    ],
)
def test_only_a_star_is_special_and_a_name_contains_what_is_below_it(
    pattern: str, name: str, *, is_matched: bool
) -> None:
    assert matches(name, pattern) == is_matched
