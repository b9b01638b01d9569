"""A real daemon is killed in the middle of an upload or of a fetch, or shown a bucket that is wrong."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from tests.support.bucket import Bucket, bucket_server
from tests.support.cli import make_checkpoint, make_manifest
from tests.support.daemon import Daemon, serving
from tests.support.s3 import BUCKET, SECRET_KEY
from tests.support.store_contract import content
from tests.support.waiting import wait_until
from tests.support.wire_peer import Peer
from tierd.format import layout, wire
from tierd.format.ids import Rank, checkpoint_id
from tierd.format.manifest import Manifest
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.tier import Tier

CHUNK_BYTES = 5 << 20  # the smallest part that S3 takes
SIZE_BYTES = 32 * CHUNK_BYTES - 1
NAME = "rank-00000-of-00001.safetensors"


def make_hot(root: Path, *, world_size: int = 1, size_bytes: int = SIZE_BYTES) -> Manifest:
    """One committed checkpoint; of one shard, 160 MiB in 32 parts, where nothing else is said."""
    checkpoint = checkpoint_id("run42", 100, 1)

    async def write() -> Manifest:
        tier = Tier("hot", DirectoryStore(root / "hot"))
        shard = memoryview(content(size_bytes))
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


def cold(served: Bucket, *, bucket: str = BUCKET) -> str:
    return f'[[cold]]\nname = "cold"\nurl = "s3://{bucket}/deep"\nendpoint_url = "{served.url}"'


def object_key(manifest: Manifest, name: str) -> str:
    return f"deep/{layout.file_key(manifest.id, name)}"


@pytest.mark.parametrize("keeps_checksums", [True, False], ids=["checksums", "etags"])
def test_killed_at_half_of_an_upload_it_goes_on_where_it_was(tmp_path: Path, keeps_checksums: bool) -> None:
    manifest = make_hot(tmp_path)
    with bucket_server(keeps_checksums=keeps_checksums) as served:
        served.script = lambda operation, key: (
            "hold" if operation == "upload_part" and served.received_bytes() >= SIZE_BYTES / 2 else ""
        )
        with serving(tmp_path, more=cold(served)) as first:
            assert served.held.wait(30)
            first.kill()
        finished = {one.key: len(one.parts) for one in served.uploads.values()}
        assert 16 <= finished[object_key(manifest, NAME)] < 32
        assert served.objects == {}

        served.script = lambda operation, key: ""
        with serving(tmp_path, more=cold(served)) as second:
            wait_until(lambda: second.steps("cold", "run42") == [100], "the second life to commit")

        assert served.objects[object_key(manifest, NAME)].content == content(SIZE_BYTES)
        assert served.objects[object_key(manifest, layout.MANIFEST)].content == manifest.encode()
        done = sum(one.operation == "upload_part" and one.status == 200 for one in served.seen)
        assert done == 32, "no finished part is sent twice"
        assert served.received_bytes() <= 1.1 * SIZE_BYTES
        assert served.uploads == {}


@pytest.mark.parametrize("keeps_checksums", [True, False], ids=["checksums", "etags"])
def test_killed_with_several_shards_on_their_way_it_goes_on_with_each(tmp_path: Path, keeps_checksums: bool) -> None:
    """Of three shards of two parts each has one, and is held at the other."""
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
        assert served.objects == {}
        assert [len(one.parts) for one in served.uploads.values()] == [1, 1, 1]

        served.script = lambda operation, key: ""
        with serving(tmp_path, more=cold(served)) as second:
            wait_until(lambda: second.steps("cold", "run42") == [100], "the second life to commit")

        done = [one for one in served.seen if one.status == 200]
        assert sum(one.operation == "upload_part" for one in done) == 6, "no finished part is sent twice"
        assert served.count("create_multipart_upload") == 3
        written = [one.key for one in done if one.operation in ("complete_multipart_upload", "put_object")]
        shards = {object_key(manifest, one.name) for one in manifest.files}
        assert shards <= set(written[: written.index(object_key(manifest, layout.MANIFEST))])
        assert {served.objects[key].content for key in shards} == {content(2 * CHUNK_BYTES)}


def test_killed_at_half_of_a_fetch_it_goes_on_when_the_trainer_asks_again(tmp_path: Path) -> None:
    manifest = make_checkpoint(tmp_path / "made", world_size=24, size_bytes=4 << 20)
    find = wire.Find(request=1, step=None, generation=None, milestone=None, tier="auto", exclude=[])
    with bucket_server() as served:
        served.fill(tmp_path / "made", "deep")
        served.script = lambda operation, key: (
            "hold" if key.endswith(".safetensors") and served.sent["get_object"] >= manifest.size_bytes / 2 else ""
        )
        with serving(tmp_path, more=cold(served)) as first, Peer(first.socket) as trainer:
            trainer.greet(manifest.run)
            trainer.send(find)
            wait_until(lambda: served.faults()["hold"] == 4, "all that is under way to be held")
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


def told(daemon: Daemon, sentence: str) -> None:
    """In the log, and in the status."""
    daemon.wait_log(sentence)
    wait_until(lambda: any(sentence in one["message"] for one in daemon.status()["failures"]), sentence)


def test_wrong_bucket_or_key_is_told_at_start_in_one_sentence(tmp_path: Path) -> None:
    make_hot(tmp_path)
    with bucket_server() as served:
        with serving(tmp_path, more=cold(served, bucket="nobodys")) as daemon:
            told(daemon, "there is no such bucket (NoSuchBucket)")
        with serving(tmp_path, more=cold(served), environ={"AWS_ACCESS_KEY_ID": "wrong"}) as daemon:
            told(daemon, "S3 does not know this access key (InvalidAccessKeyId)")
            assert SECRET_KEY not in daemon.log
        served.script = lambda operation, key: "PermanentRedirect"
        with serving(tmp_path, more=cold(served)) as daemon:
            told(daemon, "the bucket is in another region, eu-west-1 (PermanentRedirect)")
            served.script = lambda operation, key: ""
            wait_until(lambda: daemon.steps("cold", "run42") == [100], "it to go on by itself")
