"""The record of copies: facts for status and metrics."""

from __future__ import annotations

from tierd.copies import COPIES_REMEMBERED, CopyRecords, Reason
from tierd.metrics import GIVEN_UP_REASONS


def test_metric_has_a_label_for_each_reason() -> None:
    assert tuple(Reason) == GIVEN_UP_REASONS


def test_duration_of_a_copy_is_the_median_of_the_last_ones() -> None:
    records = CopyRecords()
    assert (records["cold"].copy_s, records["cold"].committed_at_s) == (None, None)
    for number in range(100):
        records.committed("cold", seconds=1000.0, at_s=float(number))
    for seconds in (5.0, *[6.0] * (COPIES_REMEMBERED - 2), 90.0):
        records.committed("cold", seconds=seconds, at_s=200.0)
    assert (records["cold"].copy_s, records["cold"].committed_at_s) == (6.0, 200.0)
    assert records["dr"].copy_s is None
