"""Keys: their forms, and no key leads out of its tier."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.errors import BadRequest
from tierd.format import layout
from tierd.format.ids import Generation, Rank, Run, checkpoint_id
from tierd.tiers.store import is_key

ID = checkpoint_id("run42", 18_000, 3)


def test_keys_have_the_specified_form() -> None:
    assert layout.manifest_key(ID) == "run42/000000018000-g0003/manifest.json"
    assert layout.file_key(ID, layout.shard_name(Rank(3), 8)) == (
        "run42/000000018000-g0003/rank-00003-of-00008.safetensors"
    )
    assert layout.milestone_file("best") == "milestone-best.json"
    assert layout.generation_key(Run("run42"), Generation(3)) == "run42/generation-0003.json"


def test_parsed_keys_give_what_they_were_made_from() -> None:
    for name in (layout.MANIFEST, layout.shard_name(Rank(3), 8), "milestone-best.json"):
        key = layout.file_key(ID, name)
        assert is_key(key)
        assert layout.parse_key(key) == ID
    assert layout.milestone_of("milestone-best.json") == "best"
    assert layout.parse_generation_key(layout.generation_key(Run("run42"), Generation(12_345))) == ("run42", 12_345)


@pytest.mark.parametrize(
    "key",
    ["", "run42", "run42/000000018000-g0003", "run42/latest/manifest.json", ".hidden/000000018000-g0003/manifest.json",
     "run42/000000018000-g0003/deeper/manifest.json", "/run42/000000018000-g0003/manifest.json",
     "../000000018000-g0003/manifest.json"],
)  # fmt: skip
def test_another_key_is_not_a_checkpoints_file(key: str) -> None:
    assert layout.parse_key(key) is None


@pytest.mark.parametrize(
    "key", ["run42", "run42/generation-3.json", "a/b/generation-0003.json", "../generation-0003.json"]
)
def test_another_key_is_not_a_generation_marker(key: str) -> None:
    assert layout.parse_generation_key(key) is None


@pytest.mark.parametrize("milestone", ["", ".", "../x", "a/b", "a b", "x" * 65, "best\n", "é"])
def test_an_invalid_name_of_a_milestone_is_refused(milestone: str) -> None:
    with pytest.raises(BadRequest, match="cannot name a milestone"):
        layout.milestone_file(milestone)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", ".hidden", "a\0b", "x.partial", "x" * 256, "a\n"])
def test_a_name_with_a_separator_a_leading_dot_or_a_control_character_is_not_safe(name: str) -> None:
    assert not layout.is_safe_file_name(name)


@given(st.text(max_size=40))
def test_no_valid_key_has_an_empty_or_dot_component(text: str) -> None:
    if is_key(text):
        assert not any(part in ("", ".", "..") for part in text.split("/"))
        assert "\0" not in text
