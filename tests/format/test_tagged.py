"""Tagged JSON: a round trip keeps types, and forged JSON raises an error."""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.errors import Corrupt, TierdError, Unsupported
from tierd.format import tagged


def round_trip(value: object) -> Any:
    return tagged.decode(json.loads(json.dumps(tagged.encode(value, "state"), allow_nan=False)))


def same(actual: object, expected: object) -> bool:
    """Whether they are equal, with the same types and order; NaN equals NaN."""
    if type(actual) is not type(expected):
        return False
    if isinstance(expected, deque | defaultdict | Decimal):
        return repr(actual) == repr(expected)
    if isinstance(expected, float) and isinstance(actual, float):
        return repr(actual) == repr(expected)
    if isinstance(expected, complex) and isinstance(actual, complex):
        return same(actual.real, expected.real) and same(actual.imag, expected.imag)
    if isinstance(expected, dict) and isinstance(actual, dict):
        pairs = zip(actual.items(), expected.items(), strict=True)
        return len(actual) == len(expected) and all(
            same(a, b) for first, second in pairs for a, b in zip(first, second, strict=True)
        )
    if isinstance(expected, list | tuple) and isinstance(actual, list | tuple):
        return len(actual) == len(expected) and all(map(same, actual, expected))
    return actual == expected


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers()
keys = st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.tuples(st.integers(), st.text())
values = st.recursive(
    scalars | st.frozensets(st.integers()) | st.sets(st.text()),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
    ),
    max_leaves=20,
)


@given(values)
def test_a_decoded_value_has_the_same_types_and_order(value: object) -> None:
    assert same(round_trip(value), value)


@given(st.dictionaries(st.integers(), st.integers()).map(Counter))
def test_a_counter_is_decoded_as_a_counter(value: Counter[int]) -> None:
    assert same(round_trip(value), value)


@pytest.mark.parametrize(
    "value",
    [
        {"$tuple": [1]},
        {"$float": "nan"},
        {"$": 1, "$x": {"$bytes": ""}},
        {1: "int", "1": "str"},
        {"": {}},
        [[], (), {}, set(), b""],
        {"a": math.nan, "b": -0.0, "c": math.inf},
        10**400,
        "\ud800 lone surrogate",
        bytearray(b"\0\xff"),
        Path("/a/b c"),
        Decimal("1.50"),
        Decimal("NaN"),
        date(2026, 1, 2),
        datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=timezone(timedelta(hours=5, minutes=30))),
        datetime(2026, 1, 2),
        time(3, 4),
        timedelta(days=-1, microseconds=7),
        {"a": [deque([1, (2,)], maxlen=5), deque()]},
        defaultdict(list, {("k", 1): [1.0]}),
        defaultdict(None, {"x": 1}),
    ],
)
def test_edge_cases_and_values_that_look_like_tags_are_decoded_unchanged(value: object) -> None:
    assert same(round_trip(value), value)


def test_a_set_always_gives_the_same_bytes() -> None:
    assert tagged.encode({"b", "a", "c"}, "x") == tagged.encode({"c", "b", "a"}, "x") == {"$set": ["a", "b", "c"]}


class _Point(NamedTuple):
    x: int


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, object()]}, "state.a[1]"),
        ({1: {"b": len}}, "state[1].b"),
        (_Point(1), "state"),
        (defaultdict(lambda: 1), "state"),
        (datetime(2026, 1, 1, tzinfo=ZoneInfo("Europe/Berlin")), "state"),
        (PurePosixPath("a"), "state"),
        ({"kind": int}, "state.kind"),
    ],
)
def test_a_value_without_a_safe_form_is_refused_with_its_path(value: object, path: str) -> None:
    with pytest.raises(Unsupported) as refused:
        tagged.encode(value, "state")
    assert refused.value.message.startswith(f"encode {path}: ")


def test_a_cycle_is_refused() -> None:
    cycle: list[object] = []
    cycle.append(cycle)
    with pytest.raises(Unsupported, match="nested deeper"):
        tagged.encode(cycle, "state")


def test_lists_that_hold_a_list_twice_on_many_levels_are_refused_and_a_list_that_many_share_is_not() -> None:
    value: list[Any] = [1]
    for _ in range(60):
        value = [value, value]
    with pytest.raises(Unsupported, match=r"encode state\[0\]\[0\].*would repeat more than 500000 values"):
        tagged.encode({"a": value}["a"], "state")
    betas = (0.9, 0.999)
    assert round_trip([betas] * 10_000) == [betas] * 10_000


def test_leaf_is_called_before_other_encodings_and_unleaf_for_unknown_tags() -> None:
    encoded = tagged.encode(
        {"x": [3 + 0j]}, "s", lambda value, path: {"$mine": path} if isinstance(value, complex) else None
    )
    assert encoded == {"x": [{"$mine": "s.x[0]"}]}
    assert tagged.decode(encoded, lambda tag, content: (tag, content)) == {"x": [("$mine", "s.x[0]")]}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    *("$tuple", "$float", "$complex", "$bytes", "$set", "$frozenset", "$dict", "$counter", "$x", "a"),
                    *("$deque", "$defaultdict", "$timedelta", "$datetime", "$decimal", "$path", "$bytearray"),
                ]
            ),
            inner,
            max_size=2,
        )
    ),
    max_leaves=15,
)


@given(json_values)
def test_forged_json_gives_a_value_or_a_tierd_error(value: object) -> None:
    with contextlib.suppress(TierdError):
        tagged.decode(value)


@pytest.mark.parametrize(
    "value",
    [
        {"$float": "1e"},
        {"$bytes": "!"},
        {"$dict": [[1]]},
        {"$dict": [[[1], 2]]},
        {"$set": [{"a": 1}]},
        {"$complex": []},
        {"$eval": "1"},
        {"$tuple": None},
        {"$complex": {"a": "b"}},
    ],
)
def test_an_invalid_tag_is_corrupt(value: object) -> None:
    with pytest.raises(Corrupt):
        tagged.decode(value)


def test_json_that_is_nested_too_deeply_is_corrupt() -> None:
    deep: Any = 1
    for _ in range(900):
        deep = [deep]
    with pytest.raises(Corrupt, match="nested deeper"):
        tagged.decode(deep)
