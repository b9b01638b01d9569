"""Exponential backoff with jitter."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.backoff import backoff_s


@given(failures=st.integers(1, 10_000), min_s=st.floats(0.001, 10))
def test_pause_doubles_with_jitter_up_to_the_maximum(failures: int, min_s: float) -> None:
    ceiling = min(20.0, min_s * 2.0 ** min(failures - 1, 32))
    assert ceiling / 2 <= backoff_s(failures, min_s=min_s, max_s=20.0) <= ceiling


@pytest.mark.parametrize("failures", [1, 2, 10, 1000, 10**9])
def test_any_number_of_failures_stays_within_the_bounds(failures: int) -> None:
    assert 0.5 <= backoff_s(failures, min_s=1.0, max_s=8.0) <= 8.0
