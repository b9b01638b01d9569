"""The manifest: golden bytes and forged bytes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierd.errors import Corrupt, NewerFormat, TierdError
from tierd.format import checksum, manifest
from tierd.format.ids import checkpoint_id
from tierd.format.manifest import Manifest, file_entry

GOLDEN = Path(__file__).parents[1] / "golden" / "golden" / "000000000005-g0003"
SHARD = "rank-00000-of-00001.safetensors"


def golden() -> Manifest:
    raw = (GOLDEN / SHARD).read_bytes()
    chunks = [checksum.crc64nvme(raw[at : at + size]) for at, size in checksum.chunk_ranges(len(raw), 4096)]
    return Manifest(
        format_version=1,
        run="golden",
        step=5,
        generation=3,
        sequence=7,
        parent=checkpoint_id("golden", 4, 2),
        world_size=1,
        created_at="2026-01-02T03:04:05.678+00:00",
        kind="snapshot",
        metrics={"loss": 0.5, "bad": "nan"},
        architecture_hash="ab" * 32,
        versions={"tierd": "0.1.0", "torch": "2.13.0"},
        files=[file_entry(SHARD, len(raw), 4096, chunks)],
    )


def test_an_encoded_manifest_equals_the_golden_bytes() -> None:
    assert golden().encode() == (GOLDEN / "manifest.json").read_bytes()


def test_the_golden_manifest_is_decoded() -> None:
    decoded = manifest.decode((GOLDEN / "manifest.json").read_bytes(), where="golden", expect=golden().id)
    assert decoded == golden()
    assert str(decoded.id) == "golden/000000000005-g0003"
    assert decoded.size_bytes == (GOLDEN / SHARD).stat().st_size


def _crc64nvme_bit_by_bit(raw: bytes) -> int:
    """The definition: https://reveng.sourceforge.io/crc-catalogue/17plus.htm#crc.cat.crc-64-nvme."""
    crc = (1 << 64) - 1
    for byte in raw:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x9A6C9329AC4BC9B5 if crc & 1 else 0)
    return crc ^ ((1 << 64) - 1)


def test_the_golden_checksum_is_crc64nvme_by_definition() -> None:
    raw = (GOLDEN / SHARD).read_bytes()
    assert checksum.decode(golden().files[0].crc64nvme) == _crc64nvme_bit_by_bit(raw)
    assert _crc64nvme_bit_by_bit(b"123456789") == 0xAE8B14860A799888  # the catalogue's check value


# ── forged bytes ──

names = st.from_regex(r"[a-z][a-z0-9.]{0,10}", fullmatch=True).filter(lambda name: not name.endswith(".partial"))


@settings(deadline=None)
@given(
    st.integers(0, 10**12 - 1),
    st.integers(1, 10**8 - 1),
    st.dictionaries(names, st.binary(max_size=9000), min_size=1, max_size=3),
    st.dictionaries(st.text(max_size=5), st.floats(), max_size=3),
)
def test_a_decoded_manifest_equals_the_encoded_one(
    step: int, generation: int, files: dict[str, bytes], metrics: dict[str, float]
) -> None:
    original = msgspec.structs.replace(
        golden(),
        step=step,
        generation=generation,
        metrics=manifest.plain_metrics(metrics),
        files=[
            file_entry(
                name,
                len(raw),
                4096,
                [checksum.crc64nvme(raw[at : at + size]) for at, size in checksum.chunk_ranges(len(raw), 4096)],
            )
            for name, raw in files.items()
        ],
    )
    assert manifest.decode(original.encode(), where="a test", expect=original.id) == original


FORGERIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "parent folder": lambda m: m["files"][0].update(name="../evil"),
    "absolute path": lambda m: m["files"][0].update(name="/etc/passwd"),
    "hidden file": lambda m: m["files"][0].update(name=".tierd.lock"),
    "partial file": lambda m: m["files"][0].update(name="x.partial"),
    "the manifest itself": lambda m: m["files"][0].update(name="manifest.json"),
    "nul": lambda m: m["files"][0].update(name="a\0b"),
    "newline": lambda m: m["files"][0].update(name="a\n"),
    "name of 300 letters": lambda m: m["files"][0].update(name="a" * 300),
    "same file twice": lambda m: m["files"].append(m["files"][0]),
    "no files": lambda m: m.update(files=[]),
    "negative size": lambda m: m["files"][0].update(size_bytes=-1),
    "huge size": lambda m: m["files"][0].update(size_bytes=1 << 62),
    "tiny chunks": lambda m: m["files"][0].update(chunk_bytes=1),
    "no chunks": lambda m: m["files"][0].update(chunk_bytes=0),
    "chunk missing": lambda m: m["files"][0]["chunks"].pop(),
    "chunk changed": lambda m: m["files"][0]["chunks"].reverse(),
    "file checksum changed": lambda m: m["files"][0].update(crc64nvme="AAAAAAAAAAA="),
    "checksum is not base64": lambda m: m["files"][0].update(crc64nvme="!"),
    "step negative": lambda m: m.update(step=-1),
    "step too large": lambda m: m.update(step=10**12),
    "generation zero": lambda m: m.update(generation=0),
    "sequence zero": lambda m: m.update(sequence=0),
    "run leaves its folder": lambda m: m.update(run="../x"),
    "world size zero": lambda m: m.update(world_size=0),
    "world size too large": lambda m: m.update(world_size=1 << 40),
    "version zero": lambda m: m.update(format_version=0),
    "version is text": lambda m: m.update(format_version="1"),
    "field missing": lambda m: m.pop("created_at"),
    "metrics are objects": lambda m: m.update(metrics={"loss": {}}),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_manifest_is_corrupt(name: str) -> None:
    forged = json.loads(golden().encode())
    FORGERIES[name](forged)
    with pytest.raises(Corrupt, match="forged"):
        manifest.decode(json.dumps(forged).encode(), where="forged")


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, golden().encode()[:-40]])
def test_bytes_that_are_not_a_manifest_are_corrupt(raw: bytes) -> None:
    with pytest.raises(Corrupt):
        manifest.decode(raw, where="forged")


def test_a_manifest_that_is_too_large_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(Corrupt, match="more than"):
        manifest.decode(bytes(manifest.MANIFEST_BYTES_MAX + 1), where="forged")


def test_the_manifest_of_another_checkpoint_is_corrupt() -> None:
    with pytest.raises(Corrupt, match="but in the folder of"):
        manifest.decode(golden().encode(), where="moved", expect=checkpoint_id("golden", 6, 3))


def test_a_later_version_of_a_manifest_is_refused_with_any_content() -> None:
    with pytest.raises(NewerFormat, match="version 2"):
        manifest.decode(b'{"format_version": 2, "surprise": true}', where="later")


def test_unknown_fields_of_the_same_version_are_ignored() -> None:
    later = json.loads(golden().encode()) | {"added_later": 1}
    assert manifest.decode(json.dumps(later).encode(), where="later") == golden()


@settings(deadline=None)
@given(st.data())
def test_flipped_bytes_give_a_manifest_or_a_tierd_error(data: st.DataObject) -> None:
    raw = bytearray(golden().encode())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(TierdError):
        manifest.decode(bytes(raw), where="flipped")


def test_a_metric_that_is_not_a_number_is_refused() -> None:
    texts = msgspec.structs.replace(golden(), metrics={"note": "best so far"})
    with pytest.raises(Corrupt, match="not a number"):
        manifest.decode(texts.encode(), where="texts")


@pytest.mark.parametrize("name", ["manifest.json", "milestone-best.json"])
def test_a_shard_with_the_name_of_a_manifest_or_marker_is_refused(name: str) -> None:
    disguised = msgspec.structs.replace(golden(), files=[msgspec.structs.replace(golden().files[0], name=name)])
    with pytest.raises(Corrupt, match="file name"):
        manifest.decode(disguised.encode(), where="disguised")


@pytest.mark.parametrize(
    ("created_at", "utc"),
    [
        ("2026-01-02T03:04:05.678+00:00", "2026-01-02T03:04:05.678000+00:00"),
        ("2026-01-01T01:00:00+02:00", "2025-12-31T23:00:00+00:00"),
        ("2026-01-01T01:00:00", "2026-01-01T01:00:00+00:00"),
        ("0001-01-01T00:00:00+23:59", None),
        ("", None),
        ("soon", None),
    ],
)
def test_the_creation_time_is_in_utc_or_none(created_at: str, utc: str | None) -> None:
    created = msgspec.structs.replace(golden(), created_at=created_at).created
    assert (created and created.isoformat()) == utc
