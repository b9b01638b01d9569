"""Text for people: lists of names, and times."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from tierd.format.text import listed, parse_time, time_text


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], ""),
        (["a", "b"], "a, b"),
        (["a", "b", "c", "d", "e"], "a, b, c, d, e"),
        (["a", "b", "c", "d", "e", "f", "g"], "a, b, c, d, e and 2 more"),
    ],
)
def test_a_list_of_names_says_how_many_more_there_are(names: list[str], expected: str) -> None:
    assert listed(names) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-01-31T12:00:00", datetime(2026, 1, 31, 12, tzinfo=UTC)),
        ("2026-01-31T12:00:00+02:00", datetime(2026, 1, 31, 10, tzinfo=UTC)),
        ("yesterday", None),
        ("0001-01-01T00:00:00+14:00", None),
    ],
)
def test_a_time_is_in_utc_and_any_other_text_is_none(text: str, expected: datetime | None) -> None:
    assert parse_time(text) == expected


def test_a_time_that_no_calendar_has_is_1970() -> None:
    assert time_text(981_173_106_000_007_000) == "2001-02-03T04:05:06.000007+00:00"
    assert time_text(10**30) == "1970-01-01T00:00:00.000000+00:00"
