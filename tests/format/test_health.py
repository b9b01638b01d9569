"""The marker of an examination."""

from __future__ import annotations

import msgspec

from tierd.format.health import MARKER_BYTES_MAX, TENSORS_LISTED_MAX, Diagnosis, NotFinite
from tierd.format.manifest import encode_marker


def test_a_decoded_marker_equals_the_encoded_diagnosis_and_its_size_is_bounded() -> None:
    longest = [NotFinite(tensor="x" * 256, nan=1 << 60, inf=1 << 60)] * TENSORS_LISTED_MAX
    diagnosis = Diagnosis(healthy=False, examined_at="now", tensors=50, not_finite=longest, digest="AAAAAAAAAAA=")
    assert msgspec.json.decode(encode_marker(diagnosis), type=Diagnosis) == diagnosis
    assert len(encode_marker(diagnosis)) < MARKER_BYTES_MAX


def test_a_diagnosis_as_text_names_the_first_tensors() -> None:
    tensors = [NotFinite(tensor=f"model.{name}", nan=1, inf=2) for name in "abcd"]
    assert str(Diagnosis(healthy=False, tensors=4, not_finite=tensors)) == (
        "4 tensors are not finite: model.a (1 NaN, 2 Inf), model.b (1 NaN, 2 Inf), model.c (1 NaN, 2 Inf) and 1 more"
    )
    one = Diagnosis(healthy=False, tensors=1, not_finite=tensors[:1])
    assert str(one) == "1 tensor is not finite: model.a (1 NaN, 2 Inf)"
    assert str(Diagnosis(healthy=True)) == "every number is finite"
