"""Thousands of checkpoints in a bucket: a machine reads each manifest once, and after that only lists."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.support.bucket import Bucket, Stored, bucket_server
from tests.support.cli import House, make_manifest
from tests.support.daemon import serving
from tests.support.s3 import BUCKET
from tests.support.waiting import wait_until
from tierd.config.sections import LimitsConfig
from tierd.format import checksum, layout
from tierd.format.ids import Rank, checkpoint_id
from tierd.format.manifest import file_entry

SHARD = b"0123456789"
NAME = layout.shard_name(Rank(0), 1)
# A listing has two objects of each checkpoint. Both sizes need the same number of pages.
SIZES = [pytest.param((100, 10), id="100"), pytest.param((10_000, 1000), id="10000", marks=pytest.mark.long)]
PAGES = 20
PATIENCE_S = 300.0
HELD = 'tierd_checkpoints{run="run42",tier="cold"}'


def stored(content: bytes) -> Stored:
    return Stored(content, f'"{hashlib.md5(content).hexdigest()}"', checksum.crc64nvme(content))


def fill(served: Bucket, steps: range) -> None:
    """Adds committed checkpoints."""
    shard = stored(SHARD)
    for step in steps:
        checkpoint = checkpoint_id("run42", step, 1)
        manifest = make_manifest(checkpoint, [file_entry(NAME, len(SHARD), 4096, [shard.crc64nvme])], sequence=step + 1)
        served.objects[f"deep/{layout.file_key(checkpoint, NAME)}"] = shard
        served.objects[f"deep/{layout.manifest_key(checkpoint)}"] = stored(manifest.encode())


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[Bucket]:
    count, page = request.param
    with bucket_server(page=page) as served:
        fill(served, range(count))
        yield served


def requests(served: Bucket, since: int) -> Counter[str]:
    """Requests by operation, after the first `since`."""
    return Counter(one.operation for one in served.seen[since:])


def cold(served: Bucket) -> str:
    """A policy that keeps everything, so that a lifecycle pass deletes nothing."""
    return f"""
    cold_list_interval_s = {len(served.objects) / 4000 + 0.1}
    [lifecycle.cold]
    keep_last = 1000000
    [[cold]]
    name = "cold"
    url = "s3://{BUCKET}/deep"
    endpoint_url = "{served.url}"
    """


@pytest.mark.parametrize("served", SIZES, indirect=True)
@pytest.mark.timeout(600)
def test_daemon_reads_each_manifest_once_and_after_that_only_lists(tmp_path: Path, served: Bucket) -> None:
    count = len(served.objects) // 2
    began: Counter[str] = Counter()
    at_once: list[int] = []

    def watch(operation: str, key: str) -> str:
        began[operation] += 1
        if operation == "get_object" and began[operation] % 50 == 0:
            at_once.append(began[operation] - requests(served, 0)[operation])
        return ""

    def listings(since: int) -> int:
        """Complete listings."""
        return requests(served, since)["list_objects_v2"] // PAGES

    served.script = watch
    with serving(tmp_path, more=cold(served)) as daemon:
        wait_until(lambda: listings(0) >= 2, "two listings", PATIENCE_S)
        assert daemon.metric(HELD) == count
        assert requests(served, 0)["get_object"] == count
        assert max(at_once) <= LimitsConfig().parts_in_flight
        since = len(served.seen)
        wait_until(lambda: listings(since) >= 3, "three more listings", PATIENCE_S)
        found = requests(served, since)
        assert set(found) <= {"list_objects_v2", "list_multipart_uploads"}, "only listings"
        assert len(daemon.steps("cold", "run42")) == count, "none was deleted"

        fill(served, range(count, count + 1))
        wait_until(lambda: daemon.metric(HELD) == count + 1, "the new checkpoint", PATIENCE_S)
        assert requests(served, since)["get_object"] == 1
        daemon.kill()

    since = len(served.seen)
    with serving(tmp_path, more=cold(served)) as daemon:
        wait_until(lambda: daemon.metric(HELD) == count + 1, "the restarted daemon", PATIENCE_S)
        assert requests(served, since)["get_object"] == 1, "the last one, which the cache lacks"


@pytest.mark.parametrize("served", SIZES, indirect=True)
@pytest.mark.timeout(600)
@pytest.mark.long
def test_commands_without_a_daemon_read_each_manifest_once_and_after_that_only_list(
    tmp_path: Path, served: Bucket
) -> None:
    count = len(served.objects) // 2
    house = House(tmp_path)
    house.config.write_text(f'[daemon]\nlisten = "127.0.0.1:0"\n[limits]\n{cold(served)}')

    assert [row["step"] for row in house.json("ls")] == list(reversed(range(count)))
    assert requests(served, 0) == {"list_objects_v2": PAGES, "get_object": count}

    for verb in (["ls"], ["lifecycle"], ["ls", f"s3://{BUCKET}/deep"]):
        since = len(served.seen)
        assert len(house.json(*verb)) >= 0
        assert requests(served, since) == {"list_objects_v2": PAGES}, verb

    # New manifests are read, and so is one that has changed without changing its length.
    fill(served, range(count, count + 3))
    key = f"deep/{layout.manifest_key(checkpoint_id('run42', 7, 1))}"
    served.objects[key] = stored(served.objects[key].content.replace(b"2.5", b"7.5"))
    since = len(served.seen)
    rows = house.json("ls")
    assert requests(served, since)["get_object"] == 4
    assert len(rows) == count + 3
    assert next(row["metrics"] for row in rows if row["step"] == 7) == {"loss": 7.5}


def test_commands_work_without_a_writable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    house = House(tmp_path)
    with bucket_server() as served:
        fill(served, range(70))
        house.config.write_text(f'[daemon]\nlisten = "127.0.0.1:0"\n[limits]\n{cold(served)}')
        for _ in range(2):
            since = len(served.seen)
            assert len(msgspec.json.decode(house.tierd("ls", "--json").stdout)) == 70
            assert requests(served, since)["get_object"] == 70
