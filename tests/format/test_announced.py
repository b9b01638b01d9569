"""The head that node 0 announces: read as it was written, and refused where it contradicts itself."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tierd.errors import Corrupt, NewerFormat
from tierd.format.announced import Announced, decode_announced
from tierd.format.ids import checkpoint_id

CHECKPOINT = checkpoint_id("ds", 500, 2)
ANNOUNCED = Announced(
    format_version=1,
    run="ds",
    step=500,
    generation=2,
    sequence=3,
    parent=None,
    world_size=4,
    created_at="2026-01-02T03:04:05.678901+00:00",
    kind="adopted",
    metrics={},
    architecture_hash="",
    versions={"tierd": "0.1.0"},
    claim="0123456789abcdef" * 2,
)


def decoded(**changes: Any) -> Announced:
    raw = msgspec.json.encode(msgspec.to_builtins(ANNOUNCED) | changes)
    return decode_announced(raw, where="cold", expect=CHECKPOINT)


def test_a_head_is_read_as_it_was_written_also_when_it_is_signed() -> None:
    assert decode_announced(ANNOUNCED.encode(), where="cold", expect=CHECKPOINT) == ANNOUNCED
    assert decoded(signature="hmac-sha256:x:y") == ANNOUNCED


@pytest.mark.parametrize(
    "changes",
    [
        {"step": 501},
        {"generation": 3},
        {"run": "other"},
        {"kind": "snapshot"},
        {"claim": "short"},
        {"created_at": "yesterday"},
        {"sequence": 0},
        {"world_size": 0},
        {"world_size": 1 << 30},
        {"metrics": {"loss": "x"}},
        {"format_version": 0},
        {"versions": 3},
    ],
)
def test_a_head_that_contradicts_itself_is_corrupt(changes: dict[str, Any]) -> None:
    with pytest.raises(Corrupt, match="decode the head of ds/000000000500-g0002 in cold"):
        decoded(**changes)


def test_what_is_no_head_is_corrupt_and_a_later_version_is_named() -> None:
    for raw in (b"", b"{}", b"[" * 100_000, b"\xff"):
        with pytest.raises(Corrupt):
            decode_announced(raw, where="cold", expect=CHECKPOINT)
    with pytest.raises(NewerFormat):
        decoded(format_version=2)
