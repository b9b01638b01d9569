"""A real daemon is killed in the middle of an upload or of a fetch, and continues it when it is restarted."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from tests.support.bucket import Bucket, bucket_server
from tests.support.cli import make_checkpoint, make_manifest
from tests.support.daemon import serving
from tests.support.s3 import BUCKET
from tests.support.store_contract import BytesSource, content
from tests.support.waiting import DEADLINE_S, wait_until
from tests.support.wire_peer import Peer
from tierd.format import layout, wire
from tierd.format.ids import Rank, checkpoint_id
from tierd.format.manifest import Manifest
from tierd.tiers.directory import BUFFERS, DirectoryStore
from tierd.tiers.tier import Tier

CHUNK_BYTES = 5 << 20  # the smallest part that S3 takes
PARTS = 8
SIZE_BYTES = PARTS * CHUNK_BYTES - 1
NAME = "rank-00000-of-00001.safetensors"


def make_hot(root: Path, *, world_size: int = 1, size_bytes: int = SIZE_BYTES) -> Manifest:
    """One committed checkpoint in the hot tier; by default one shard of 40 MiB in 8 parts."""
    checkpoint = checkpoint_id("run42", 100, 1)

    async def write() -> Manifest:
        tier = Tier("hot", DirectoryStore(root / "hot"))
        shard = BytesSource(content(size_bytes))
        entries = [
            await tier.store.put(
                layout.file_key(checkpoint, layout.shard_name(Rank(rank), world_size)),
                shard,
                size_bytes=size_bytes,
                chunk_bytes=CHUNK_BYTES,
            )
            for rank in range(world_size)
        ]
        manifest = make_manifest(checkpoint, entries)
        await tier.commit(manifest)
        await tier.store.close()
        return manifest

    return asyncio.run(write())


def cold(served: Bucket) -> str:
    return f'[[cold]]\nname = "cold"\nurl = "s3://{BUCKET}/deep"\nendpoint_url = "{served.url}"'


def committed(served: Bucket) -> list[str]:
    """The keys of objects of checkpoints. The copy begins with the claim of the generation."""
    return [key for key in served.checkpoint_keys() if "/generation-" not in key]


def object_key(manifest: Manifest, name: str) -> str:
    return f"deep/{layout.file_key(manifest.id, name)}"


@pytest.mark.parametrize(
    "keeps_checksums", [pytest.param(True, id="checksums"), pytest.param(False, id="etags", marks=pytest.mark.long)]
)
def test_daemon_killed_halfway_through_an_upload_continues_it(tmp_path: Path, keeps_checksums: bool) -> None:
    manifest = make_hot(tmp_path)
    with bucket_server(keeps_checksums=keeps_checksums) as served:
        served.script = lambda operation, key: (
            "hold" if operation == "upload_part" and served.received_bytes() >= SIZE_BYTES / 2 else ""
        )
        with serving(tmp_path, more=cold(served)) as first:
            assert served.held.wait(DEADLINE_S)
            first.kill()
        finished = {one.key: len(one.parts) for one in served.uploads.values()}
        assert PARTS // 2 <= finished[object_key(manifest, NAME)] < PARTS
        assert committed(served) == []

        served.script = lambda operation, key: ""
        with serving(tmp_path, more=cold(served)) as second:
            wait_until(lambda: second.steps("cold", "run42") == [100], "the restarted daemon to commit")

        assert served.objects[object_key(manifest, NAME)].content == content(SIZE_BYTES)
        assert served.objects[object_key(manifest, layout.MANIFEST)].content == manifest.encode()
        done = sum(one.operation == "upload_part" and one.status == 200 for one in served.seen)
        assert done == PARTS, "no finished part is sent twice"
        in_flight_bytes = 4 * CHUNK_BYTES  # limits.parts_in_flight: those are lost with the daemon
        assert served.received_bytes() <= SIZE_BYTES + in_flight_bytes + CHUNK_BYTES // 10
        assert served.uploads == {}


@pytest.mark.parametrize(
    "keeps_checksums", [pytest.param(True, id="checksums"), pytest.param(False, id="etags", marks=pytest.mark.long)]
)
@pytest.mark.long
def test_daemon_killed_while_it_uploads_several_shards_continues_each(tmp_path: Path, keeps_checksums: bool) -> None:
    """Of each of three shards with two parts, one part has arrived and the server holds the other."""
    manifest = make_hot(tmp_path, world_size=3, size_bytes=2 * CHUNK_BYTES)
    parts: Counter[str] = Counter()

    def hold_the_second_part(operation: str, key: str) -> str:
        parts[key] += operation == "upload_part"
        return "hold" if operation == "upload_part" and parts[key] == 2 else ""

    with bucket_server(keeps_checksums=keeps_checksums) as served:
        served.script = hold_the_second_part
        with serving(tmp_path, more=cold(served)) as first:
            wait_until(lambda: served.faults()["hold"] == 3, "each shard to be held")
            wait_until(lambda: all(one.parts for one in served.uploads.values()), "the first parts to be there")
            first.kill()
        assert committed(served) == []
        assert [len(one.parts) for one in served.uploads.values()] == [1, 1, 1]

        served.script = lambda operation, key: ""
        with serving(tmp_path, more=cold(served)) as second:
            wait_until(lambda: second.steps("cold", "run42") == [100], "the restarted daemon to commit")

        done = [one for one in served.seen if one.status == 200]
        assert sum(one.operation == "upload_part" for one in done) == 6, "no finished part is sent twice"
        assert served.count("create_multipart_upload") == 3
        written = [one.key for one in done if one.operation in ("complete_multipart_upload", "put_object")]
        shards = {object_key(manifest, one.name) for one in manifest.files}
        assert shards <= set(written[: written.index(object_key(manifest, layout.MANIFEST))])
        assert {served.objects[key].content for key in shards} == {content(2 * CHUNK_BYTES)}


def test_daemon_killed_halfway_through_a_fetch_continues_it_at_the_next_request(tmp_path: Path) -> None:
    manifest = make_checkpoint(tmp_path / "made", world_size=24, size_bytes=1 << 20)
    find = wire.Find(request=1, step=None, generation=None, milestone=None, tier="auto", exclude=[])
    with bucket_server() as served:
        served.fill(tmp_path / "made", "deep")
        served.script = lambda operation, key: (
            "hold" if key.endswith(".safetensors") and Path(key).name >= "rank-00013" else ""
        )
        with serving(tmp_path, more=cold(served)) as first, Peer(first.socket) as trainer:
            trainer.greet(manifest.run)
            trainer.send(find)
            wait_until(lambda: served.faults()["hold"] == BUFFERS, "all fetches to be held")
            first.kill()
        sent_bytes = served.sent["get_object"]
        assert manifest.size_bytes / 2 <= sent_bytes < manifest.size_bytes
        assert not list((tmp_path / "hot").rglob("*.safetensors"))

        served.script = lambda operation, key: ""
        with serving(tmp_path, more=cold(served)) as second, Peer(second.socket) as trainer:
            trainer.greet(manifest.run)
            trainer.find()
            _, *shards = trainer.take_files()
            assert second.steps("hot", "run42") == [100]

        assert served.sent["get_object"] <= 1.1 * manifest.size_bytes
        for entry, shard in zip(manifest.files, shards, strict=True):
            assert shard == (tmp_path / "made" / layout.file_key(manifest.id, entry.name)).read_bytes()
        assert not list((tmp_path / "hot").rglob("*.partial"))
