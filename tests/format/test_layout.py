"""Keys are made and read in one place, and none leads out of its tier."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.errors import BadRequest
from tierd.format import layout
from tierd.format.ids import Generation, Rank, Run, checkpoint_id
from tierd.tiers.store import is_key

ID = checkpoint_id("run42", 18_000, 3)


def test_keys_are_as_specified() -> None:
    assert layout.manifest_key(ID) == "run42/000000018000-g0003/manifest.json"
    assert layout.file_key(ID, layout.shard_name(Rank(3), 8)) == (
        "run42/000000018000-g0003/rank-00003-of-00008.safetensors"
    )
    assert layout.milestone_key(ID, "best") == "run42/000000018000-g0003/milestone-best.json"
    assert layout.generation_key(Run("run42"), Generation(3)) == "run42/generation-0003.json"


def test_keys_are_read_back() -> None:
    for name in (layout.MANIFEST, layout.shard_name(Rank(3), 8), "milestone-best.json"):
        key = layout.file_key(ID, name)
        assert is_key(key)
        assert layout.parse_key(key) == (ID, name)
    assert layout.milestone_of("milestone-best.json") == "best"
    assert layout.parse_generation_key(layout.generation_key(Run("run42"), Generation(12_345))) == ("run42", 12_345)


@pytest.mark.parametrize(
    "key",
    ["", "run42", "run42/000000018000-g0003", "run42/latest/manifest.json", ".hidden/000000018000-g0003/manifest.json",
     "run42/000000018000-g0003/deeper/manifest.json", "/run42/000000018000-g0003/manifest.json",
     "../000000018000-g0003/manifest.json"],
)  # fmt: skip
def test_foreign_key_is_none_of_ours(key: str) -> None:
    assert layout.parse_key(key) is None


@pytest.mark.parametrize(
    "key", ["run42", "run42/generation-3.json", "a/b/generation-0003.json", "../generation-0003.json"]
)
def test_foreign_marker_claims_no_generation(key: str) -> None:
    assert layout.parse_generation_key(key) is None


@pytest.mark.parametrize("milestone", ["", ".", "../x", "a/b", "a b", "x" * 65, "best\n", "é"])
def test_milestone_that_could_lead_elsewhere_is_refused(milestone: str) -> None:
    with pytest.raises(BadRequest, match="cannot name a milestone"):
        layout.milestone_key(ID, milestone)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", ".hidden", "a\0b", "x.partial", "x" * 256, "a\n"])
def test_name_that_could_lead_elsewhere_is_not_safe(name: str) -> None:
    assert not layout.is_safe_file_name(name)


@given(st.text(max_size=40))
def test_no_text_is_a_key_that_climbs(text: str) -> None:
    if is_key(text):
        assert not any(part in ("", ".", "..") for part in text.split("/"))
        assert "\0" not in text
