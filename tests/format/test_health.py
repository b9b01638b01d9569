"""The marker of an examination: what it says survives, and what somebody else wrote there is not believed."""

from __future__ import annotations

import pytest

from tierd.errors import Corrupt
from tierd.format.health import MARKER_BYTES_MAX, TENSORS_LISTED_MAX, Diagnosis, NotFinite, decode, encode


def test_what_was_found_comes_back() -> None:
    worst = [NotFinite(tensor="x" * 256, nan=1 << 60, inf=1 << 60)] * TENSORS_LISTED_MAX
    one = Diagnosis(healthy=False, examined_at="now", tensors=50, not_finite=worst, digest="AAAAAAAAAAA=")
    assert decode(encode(one), where="x") == one
    assert len(encode(one)) < MARKER_BYTES_MAX


@pytest.mark.parametrize("raw", [b"", b"{}", b'{"healthy": "no"}', b"\xff", b"[" * 100_000])
def test_anything_else_is_damage(raw: bytes) -> None:
    with pytest.raises(Corrupt, match="marker of step 5"):
        decode(raw, where="in the marker of step 5")


def test_it_says_in_a_sentence_what_is_wrong() -> None:
    three = [NotFinite(tensor=f"model.{name}", nan=1, inf=2) for name in "abcd"]
    assert str(Diagnosis(healthy=False, tensors=4, not_finite=three)) == (
        "4 tensors are not finite: model.a (1 NaN, 2 Inf), model.b (1 NaN, 2 Inf), model.c (1 NaN, 2 Inf) and 1 more"
    )
    assert str(Diagnosis(healthy=True)) == "every number is finite"
