"""Copies checkpoints into a bucket and back while requests of every kind fail in every way, by a seed.

At the end nothing is lost, nothing is committed twice, no byte differs, and nothing is left over. A seed that ever
fails belongs into FOUND for good.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

import pytest

from tests.support.bucket import Bucket, bucket_server
from tests.support.cli import CHUNK_BYTES, assert_same_files, folder_of, make_checkpoint
from tests.support.rooms import RUN, Rooms, rooms_at
from tests.support.s3 import BUCKET
from tests.support.s3_store import s3_store
from tierd.catalog.decisions import pending
from tierd.catalog.listing import refresh
from tierd.config.sections import ColdPolicy, LifecycleConfig
from tierd.errors import TierdError, TierUnreachable
from tierd.format import layout
from tierd.format.ids import Generation, Rank, checkpoint_id
from tierd.format.manifest import Manifest
from tierd.tiers.checkpoint_copy import copy_checkpoint
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.tier import Tier

T = TypeVar("T")

FAULT_RATE = 0.25
ROUND = 4  # checkpoints
TRIES_MAX = 400  # passes of a round; a worker has no such limit

ANYWHERE = [
    *("SlowDown", "ServiceUnavailable", "InternalError", "TooManyRequests", "RequestTimeout", "RequestTimeTooSkewed"),
    *("reset", "lose") * 3,
]
RARE = ["silence", "ExpiredToken"]  # they take time
BY_OPERATION = {
    "put_object": ["garble", "garble", "PreconditionFailed", "ConditionalRequestConflict"],
    "upload_part": ["garble", "garble", "NoSuchUpload"],
    "complete_multipart_upload": ["error-in-200", "error-in-200", "NoSuchUpload"],
    "get_object": ["flip", "flip", "flip", "cut", "cut", "drip"],
    "list_objects_v2": ["cut"],
    "list_parts": ["cut", "NoSuchUpload"],
}


class Seeded:
    """A script that makes one request in four fail. `unseen`: faults that this server would not notice."""

    def __init__(self, seed: int, *, unseen: frozenset[str]) -> None:
        self._random = random.Random(seed)
        self._unseen = unseen

    def __call__(self, operation: str, key: str) -> str:
        if self._random.random() >= FAULT_RATE:
            return ""
        if self._random.random() < 0.03:
            return self._random.choice(RARE)
        faults = [*ANYWHERE, *BY_OPERATION.get(operation, ()) * 3]
        return self._random.choice([one for one in faults if one not in self._unseen])


async def at_last(attempt: Callable[[], Awaitable[T]]) -> T:
    """Repeats a pass until it succeeds, as a worker does. Only errors of tierd may be raised."""
    for _ in range(TRIES_MAX - 1):
        try:
            return await attempt()
        except TierdError:
            continue
    return await attempt()


class Battle:
    def __init__(self, root: Path, served: Bucket, rooms: Rooms) -> None:
        self.root = root
        self.served = served
        self.rooms = rooms
        self.store = s3_store(
            f"s3://{BUCKET}/deep",
            endpoint_url=served.url,
            part_bytes_min=4096,
            retry_min_s=0.0005,
            request_timeout_s=0.5,
        )
        self.cold = rooms.cold["cold"] = Tier("cold", self.store)
        self.replicator = rooms.replicator()

    async def replicate(self, manifests: list[Manifest]) -> None:
        """From hot to cold, until the catalog and the pass agree that everything is copied."""
        await refresh(self.rooms.catalog, self.rooms.hot)

        async def is_through() -> bool:
            await refresh(self.rooms.catalog, self.cold)
            known = self.rooms.catalog.tiers["cold"]
            # A manifest that was altered on its way is unreadable until the next listing, and is not copied again.
            is_whole = known.is_known and not known.unreadable
            has_copied = await self.replicator.run_once()
            return has_copied and is_whole and not pending(self.rooms.catalog, self.rooms.config, "cold")

        for _ in range(TRIES_MAX):
            if await at_last(is_through):
                break
        held = {manifest.id for manifest in self.rooms.catalog.manifests_in("cold")}
        assert held >= {manifest.id for manifest in manifests}

    async def restore(self, manifest: Manifest) -> None:
        """From cold into a directory; asserts that every file is that in hot."""
        store = DirectoryStore(self.root / "restored")
        await at_last(lambda: copy_checkpoint(manifest, self.cold, Tier("restored", store)))
        await store.close()
        assert_same_files(folder_of(self.root / "hot", manifest), folder_of(self.root / "restored", manifest))

    async def delete(self, manifest: Manifest) -> None:
        await at_last(lambda: self.cold.delete(manifest.id))
        self.rooms.catalog.drop(manifest.id, "cold")
        await self.rooms.hot.delete(manifest.id)
        self.rooms.catalog.drop(manifest.id, "hot")

    def check(self, kept: list[Manifest], deleted: list[Manifest]) -> None:
        """Asserts what the bucket has, and every write that it received."""
        files = {
            f"deep/{path.relative_to(self.root / 'hot')}": path.read_bytes()
            for manifest in kept
            for path in folder_of(self.root / "hot", manifest).iterdir()
        }
        found = {key: stored.content for key, stored in self.served.objects.items()}
        claims = [key for key in found if "/generation-" in key]  # a copy begins with the claim of the generation
        tombstones = {f"deep/{layout.file_key(manifest.id, layout.GONE)}" for manifest in deleted}
        assert {key: found[key] for key in found.keys() - claims - tombstones} == files, "lost, or left over"
        assert tombstones <= found.keys()
        for manifest in [*kept, *deleted]:
            key = f"deep/{layout.manifest_key(manifest.id)}"
            writes = [count for (one, _), count in self.served.written.items() if one == key]
            assert len(writes) == 1, f"{key} was committed with other bytes"
            assert writes == [1] or not self.served.honours_conditions, f"{key} was committed twice"
        if self.served.keeps_checksums:
            garbled = [one for one in self.served.seen if one.fault == "garble" and one.received_bytes]
            assert {one.status for one in garbled} <= {400}, "a flipped bit got in"


async def battle(root: Path, seed: int, faults: int, **manners: bool) -> None:
    print(f"seed {seed}")
    unseen = frozenset() if manners.get("keeps_checksums", True) else frozenset({"garble"})
    lifecycle = LifecycleConfig(cold=ColdPolicy(keep_last=1_000_000))
    kept: list[Manifest] = []
    deleted: list[Manifest] = []
    with bucket_server(part_bytes_min=4096, page=3, **manners) as served:
        async with rooms_at(root, lifecycle=lifecycle) as rooms:
            it = Battle(root, served, rooms)
            script = Seeded(seed, unseen=unseen)
            while sum(served.faults().values()) < faults:
                served.script = lambda operation, key: ""
                step = len(kept) + len(deleted)
                fresh = [await committed(rooms, step + index) for index in range(1, ROUND + 1)]
                served.script = script
                await it.replicate(fresh)
                for manifest in fresh[:2]:
                    await it.restore(manifest)
                await it.delete(fresh[0])
                deleted.append(fresh[0])
                kept += fresh[1:]
            served.script = lambda operation, key: ""
            it.check(kept, deleted)
            # Uploads whose creation was answered to a request that failed.
            served.now = lambda: datetime.now(UTC) + timedelta(days=2)
            while await it.store.remove_unfinished(lambda key: True, grace_s=24 * 3600.0):
                pass
            assert served.uploads == {}
            await it.store.close()
    print(served.faults().most_common())


async def committed(rooms: Rooms, step: int) -> Manifest:
    """In hot: two shards, of one part and of three or four parts."""
    root = rooms.config.hot_path
    return await asyncio.to_thread(
        make_checkpoint, root, run=RUN, step=step, sequence=step, size_bytes=CHUNK_BYTES * (1 + step % 4) + step
    )


async def test_faults_lose_nothing(tmp_path: Path) -> None:
    await battle(tmp_path, 1, 100)


@pytest.mark.long
async def test_server_that_checks_nothing_loses_nothing(tmp_path: Path) -> None:
    await battle(tmp_path, 3, 60, keeps_checksums=False, honours_conditions=False)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(100, 108))
@pytest.mark.parametrize("checks", [True, False], ids=["strict", "lax"])
async def test_twenty_thousand_faults_lose_nothing(tmp_path: Path, seed: int, checks: bool) -> None:
    await battle(tmp_path, seed, 1250, keeps_checksums=checks, honours_conditions=checks)


async def test_replicator_aborts_abandoned_uploads_of_its_runs(tmp_path: Path) -> None:
    """After a day. Not uploads of another node's run, nor of a checkpoint that is to be copied."""
    with bucket_server(part_bytes_min=4096) as served:
        async with rooms_at(tmp_path) as rooms:
            it = Battle(tmp_path, served, rooms)
            wanted = await committed(rooms, 900)
            await refresh(rooms.catalog, rooms.hot)
            await refresh(rooms.catalog, it.cold)
            rooms.memory.enter(RUN, Generation(1), Rank(0), 1)
            old = datetime.now(UTC) - timedelta(hours=25)
            for run, step, begun in [
                (RUN, 1, old),
                ("another-run", 1, old),
                (RUN, 2, datetime.now(UTC)),
                (RUN, 900, old),
            ]:
                key = layout.file_key(checkpoint_id(run, step, 1), wanted.files[0].name)
                made = await it.store.requests.request(
                    "create_multipart_upload", "begin", Key=it.store.requests.prefix + key
                )
                served.uploads[made["UploadId"]].initiated = begun
            served.script = lambda operation, key: "AccessDenied" if operation in ("put_object", "upload_part") else ""
            with pytest.raises(TierUnreachable, match="access denied"):
                await it.replicator.run_once()
            left = {tuple(one.key.split("/")[1:3]) for one in served.uploads.values()}
            assert left == {
                ("another-run", "000000000001-g0001"),
                (RUN, "000000000002-g0001"),
                (RUN, "000000000900-g0001"),
            }
            assert made["UploadId"] in served.uploads, "the upload that is needed continues"
            await it.store.close()
