"""The cache of manifests saves requests, and is used only where the bucket's listing agrees with it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import pytest

from tests.support.cli import make_manifest
from tests.support.rooms import RUN
from tierd.format import layout
from tierd.format.ids import CheckpointId, Rank, checkpoint_id
from tierd.format.manifest import Manifest, file_entry
from tierd.format.signature import new_key, parse_keys
from tierd.tiers import cache
from tierd.tiers.cache import ManifestCache

PLACE = "s3://bucket/prefix"


def made(step: int) -> Manifest:
    name = layout.shard_name(Rank(0), 1)
    return make_manifest(checkpoint_id(RUN, step, 1), [file_entry(name, 10, 4096, [step])], sequence=step)


MANIFESTS = {manifest.id: manifest for manifest in map(made, (100, 200, 300))}
FINGERPRINTS = {one: (manifest.sequence, f'"{one.name}"') for one, manifest in MANIFESTS.items()}


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    """A folder with a cache of all MANIFESTS."""
    folder = tmp_path / "home" / "tierd"
    await ManifestCache(folder, PLACE).write(MANIFESTS, FINGERPRINTS)
    return folder


def file_of(folder: Path) -> Path:
    [name] = os.listdir(folder)
    return folder / name


async def read(folder: Path, fingerprints: dict[CheckpointId, tuple[int, str]] = FINGERPRINTS) -> list[int]:
    """The steps in the cache; asserts that each manifest is the one that was written."""
    found = await ManifestCache(folder, PLACE).read(fingerprints)
    assert all(manifest == MANIFESTS[one] for one, manifest in found.items())
    return sorted(one.step for one in found)


async def test_cache_returns_what_was_written_and_only_its_owner_can_read_it(folder: Path) -> None:
    assert await read(folder) == [100, 200, 300]
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700


@pytest.mark.parametrize("other", [(100, '"another"'), (101, '"000000000100-g0001"'), (100, "")])
async def test_manifest_with_another_size_or_etag_is_not_returned(folder: Path, other: tuple[int, str]) -> None:
    assert await read(folder, FINGERPRINTS | {checkpoint_id(RUN, 100, 1): other}) == [200, 300]


async def test_manifests_that_are_no_longer_listed_are_dropped(folder: Path) -> None:
    left = {one: manifest for one, manifest in MANIFESTS.items() if one.step > 100}
    await ManifestCache(folder, PLACE).write(left, FINGERPRINTS)
    assert await read(folder) == [200, 300]


async def test_each_bucket_has_its_own_cache(folder: Path) -> None:
    await ManifestCache(folder, "s3://another").write({}, {})
    assert await ManifestCache(folder, "s3://another").read(FINGERPRINTS) == {}
    assert await read(folder) == [100, 200, 300]


async def test_manifests_without_an_etag_are_not_cached(tmp_path: Path) -> None:
    fingerprints = {one: (size_bytes, "") for one, (size_bytes, _) in FINGERPRINTS.items()}
    await ManifestCache(tmp_path, PLACE).write(MANIFESTS, fingerprints)
    assert await read(tmp_path, fingerprints) == []


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"null",
        b"[[1]]",
        b'[["run42/000000000100-g0001/",100,"\\"000000000100-g0001\\"",{}]]',
        b"[" * 100_000,
    ],
    ids=["empty", "cut", "null", "other", "no manifest", "deep"],
)
async def test_damaged_cache_is_ignored_and_replaced(folder: Path, raw: bytes) -> None:
    path = file_of(folder)
    path.write_bytes(raw)
    assert await read(folder) == []
    await ManifestCache(folder, PLACE).write(MANIFESTS, FINGERPRINTS)
    assert await read(folder) == [100, 200, 300]


async def test_manifest_of_another_checkpoint_is_ignored(folder: Path) -> None:
    """Its step differs from that of the folder it is cached for."""
    path = file_of(folder)
    kept = msgspec.json.decode(path.read_bytes())
    kept[0][3], kept[1][3] = kept[1][3], kept[0][3]
    path.write_bytes(msgspec.json.encode(kept))
    assert await read(folder) == [100]


async def test_with_a_key_only_what_it_signed_is_returned(folder: Path) -> None:
    """The cache may be older than the key."""
    keyring, other = (parse_keys(new_key().line, where="test") for _ in range(2))
    [first, second, third] = MANIFESTS.values()
    signed = {first.id: keyring.sign_manifest(first), second.id: other.sign_manifest(second), third.id: third}
    await ManifestCache(folder, PLACE).write(signed, FINGERPRINTS)
    assert await ManifestCache(folder, PLACE).read(FINGERPRINTS, keyring) == {first.id: signed[first.id]}


async def test_no_link_leads_out_of_the_folder(folder: Path, tmp_path: Path) -> None:
    path = file_of(folder)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert await read(folder) == []


async def test_cache_over_its_limit_keeps_the_newest_manifests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "CACHE_BYTES_MAX", 1000)
    await ManifestCache(tmp_path, PLACE).write(MANIFESTS, FINGERPRINTS)
    assert await read(tmp_path) == [200, 300]
    assert os.stat(file_of(tmp_path)).st_size <= 1000


async def test_cache_that_cannot_be_written_raises_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        await ManifestCache(folder, PLACE).write(MANIFESTS, FINGERPRINTS)
        assert await ManifestCache(folder, PLACE).read(FINGERPRINTS) == {}


async def test_partial_file_of_a_killed_writer_is_swept(folder: Path) -> None:
    (folder / "manifests-0badcafe.json.partial").write_bytes(b"half")
    await ManifestCache(folder, PLACE).write(MANIFESTS, FINGERPRINTS)
    assert len(os.listdir(folder)) == 1
