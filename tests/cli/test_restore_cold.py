"""`tierd restore` from buckets: continues after a kill, goes on with the next tier, and reads no more than needed."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors import safe_open

from tests.support.bucket import Bucket, bucket_server
from tests.support.cli import House, assert_same_files, flip_a_bit, make_checkpoint, make_house
from tests.support.s3 import BUCKET
from tests.support.state import commit, shard_of
from tests.support.waiting import wait_until
from tierd.cli import opened_tiers
from tierd.tiers.directory import BUFFERS

CHUNK_BYTES = 1 << 20


@pytest.fixture
def buckets(tmp_path: Path) -> Iterator[tuple[House, Bucket, Bucket]]:
    """A house whose cold tiers are `near` and `far`, two buckets."""
    with ExitStack() as stack:
        near, far = (stack.enter_context(bucket_server()) for _ in range(2))
        house = make_house(tmp_path, more="".join(cold(*at) for at in (("near", near), ("far", far))))
        yield house, near, far


def cold(name: str, served: Bucket) -> str:
    return f'[[cold]]\nname = "{name}"\nurl = "s3://{BUCKET}/deep"\nendpoint_url = "{served.url}"\n'


def is_shard(key: str) -> bool:
    return key.endswith(".safetensors")


def shards(*sizes: int) -> list[bytes]:
    """Valid shards, each with that many tensors of 1 MiB."""
    generator = torch.Generator().manual_seed(1)
    return [
        shard_of(
            [
                (f"model.{rank}.{index:02d}", torch.randn(1 << 18, generator=generator), (rank << 18,))
                for index in range(size)
            ],
            rank=rank,
        )
        for rank, size in enumerate(sizes)
    ]


def written_bytes(pid: int) -> int:
    """By write calls of the process."""
    counts = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(counts["wchar"])


@pytest.mark.parametrize(
    "is_flipped", [pytest.param(False, id="as it was", marks=pytest.mark.long), pytest.param(True, id="a bit flipped")]
)
def test_killed_restore_is_continued_by_the_same_command(
    buckets: tuple[House, Bucket, Bucket], is_flipped: bool
) -> None:
    house, near, _ = buckets
    source = commit(house.root / "made", shards(*[8] * 11, 0), chunk_bytes=CHUNK_BYTES)
    near.fill(house.root / "made", "deep")
    size_bytes = sum(path.stat().st_size for path in source.iterdir())
    near.script = lambda operation, key: "hold" if is_shard(key) and Path(key).name >= "rank-00006" else ""
    target = house.root / "restored"

    first = house.start("restore", "--tier", "near", "--to", target)
    wait_until(lambda: near.faults()["hold"] == BUFFERS, "all that is under way to be held")
    sent_bytes = near.sent["get_object"]
    kept_bytes = sent_bytes - CHUNK_BYTES - (1 << 20)  # all but one chunk and the manifest
    wait_until(lambda: written_bytes(first.pid) >= kept_bytes, "what has arrived to be written")
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=60)
    assert size_bytes / 2 <= sent_bytes < size_bytes
    assert not target.exists()
    assert not list(house.root.rglob("restored.partial/**/*.safetensors")), "no file has its final name"

    if is_flipped:
        (arrived,) = (house.root / "restored.partial").rglob("rank-00000*.partial")
        raw = bytearray(arrived.read_bytes())
        raw[5 * CHUNK_BYTES] ^= 1
        arrived.write_bytes(raw)
    near.script = lambda operation, key: ""
    restored = house.json("restore", "--tier", "near", "--to", target)

    assert_same_files(source, target)
    assert near.sent["get_object"] <= 1.1 * size_bytes
    assert restored["resumed_bytes"] >= kept_bytes
    assert restored["given_bytes"]["near"] + restored["resumed_bytes"] == restored["size_bytes"]
    assert not (house.root / "restored.partial").exists()


@pytest.mark.long
def test_restore_reads_the_rest_from_the_next_tier_when_one_goes_away(buckets: tuple[House, Bucket, Bucket]) -> None:
    house, near, far = buckets
    source = commit(house.root / "made", shards(*[8] * 11), chunk_bytes=CHUNK_BYTES)
    for one in (near, far):
        one.fill(house.root / "made", "deep")
    near.script = lambda operation, key: "AccessDenied" if is_shard(key) and near.sent["get_object"] >= 45 << 20 else ""

    restored = house.json("restore", "--to", house.root / "restored")

    assert_same_files(source, house.root / "restored")
    assert restored["tier"] == "far"
    assert "access denied" in restored["passed_over"]["near"]
    assert restored["given_bytes"]["near"] > 0
    assert restored["given_bytes"]["near"] + restored["given_bytes"]["far"] == restored["size_bytes"]
    assert far.sent["get_object"] < restored["given_bytes"]["far"] + CHUNK_BYTES, "only what was missing"


def test_restore_without_any_reachable_tier_is_exit_14_and_is_continued_later(
    buckets: tuple[House, Bucket, Bucket],
) -> None:
    house, near, _ = buckets
    source = commit(house.root / "made", shards(*[8] * 11), chunk_bytes=CHUNK_BYTES)
    near.fill(house.root / "made", "deep")
    near.script = lambda operation, key: "AccessDenied" if is_shard(key) and near.sent["get_object"] >= 45 << 20 else ""

    failed = house.tierd("restore", "--to", house.root / "restored")
    assert failed.exit_code == 14
    assert "no replica gives" in failed.stderr
    assert "the same command continues from them" in failed.stderr
    assert not (house.root / "restored").exists()
    near.script = lambda operation, key: ""
    restored = house.json("restore", "--to", house.root / "restored")

    assert restored["resumed_bytes"] > 0
    assert_same_files(source, house.root / "restored")


# ── a part ──


def is_silent(served: Bucket) -> None:
    served.script = lambda operation, key: "silence"


@pytest.mark.long
def test_silent_bucket_is_given_up_and_the_other_tiers_are_shown(
    buckets: tuple[House, Bucket, Bucket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the limit, three attempts of a minute each delay every answer."""
    monkeypatch.setattr(opened_tiers, "SILENCE_S", 2.0)
    monkeypatch.setattr(opened_tiers, "NOTE_AFTER_S", 0.1)
    house, near, far = buckets
    make_checkpoint(house.hot, step=100)
    commit(house.root / "made", shards(1), chunk_bytes=CHUNK_BYTES)
    far.fill(house.root / "made", "deep")
    is_silent(near)

    listed = house.tierd("ls")
    assert listed.exit_code == 3
    assert "waiting for near, which has not answered yet: s3://" in listed.stderr
    assert "near is left out, it cannot be listed: list s3://checkpoints/deep: no answer for 2 s" in listed.stderr
    assert [line.split()[3] for line in listed.stdout.splitlines()[1:]] == ["far", "hot"]

    shown = house.tierd("status")
    assert shown.exit_code == 13
    assert "near" in shown.stdout
    assert "NOT REACHABLE: list s3://checkpoints/deep: no answer" in shown.stdout
    assert "get it back" in shown.stdout

    refused = house.tierd("restore", "--tier", "near", "--to", house.root / "restored")
    assert refused.exit_code == 14
    assert "no answer for 2 s" in refused.stderr
    assert house.tierd("restore", "--run", "run42", "--to", house.root / "restored").exit_code == 0


def test_slow_bucket_that_answers_is_listed_whole(
    buckets: tuple[House, Bucket, Bucket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is for silence: a listing of many pages may take minutes."""
    monkeypatch.setattr(opened_tiers, "SILENCE_S", 1.5)
    house, near, _ = buckets
    commit(house.root / "made", shards(1, 1, 1), chunk_bytes=CHUNK_BYTES)
    near.fill(house.root / "made", "deep")
    near.page = 1
    near.script = lambda operation, key: time.sleep(0.35) or ""
    assert [row["tiers"] for row in house.json("ls", "--tier", "near")] == [["near"]]


def test_restore_of_one_rank_reads_only_its_shard(buckets: tuple[House, Bucket, Bucket]) -> None:
    house, near, _ = buckets
    source = commit(house.root / "made", shards(3, 5, 3), chunk_bytes=CHUNK_BYTES)
    near.fill(house.root / "made", "deep")
    name = "rank-00001-of-00003.safetensors"

    restored = house.json("restore", "--rank", "1", "--to", house.root / "restored")

    assert [one.name for one in (house.root / "restored").iterdir()] == [name]
    assert (house.root / "restored" / name).read_bytes() == (source / name).read_bytes()
    assert (restored["is_whole"], restored["size_bytes"]) == (False, (source / name).stat().st_size)
    manifest_bytes = 2 * (source / "manifest.json").stat().st_size
    assert near.sent["get_object"] == restored["size_bytes"] + manifest_bytes, (
        "the listing and the restore each read the manifest"
    )
    assert house.json("ls", house.root / "restored") == []


def test_restore_of_some_tensors_reads_only_their_chunks(
    buckets: tuple[House, Bucket, Bucket],
) -> None:
    house, near, _ = buckets
    source = commit(house.root / "made", shards(20, 30), chunk_bytes=CHUNK_BYTES)
    near.fill(house.root / "made", "deep")
    target = house.root / "restored"

    restored = house.json("restore", "--only", "model.1.0[2-3]", "--only", "model.1.17", "--to", target)

    name = "rank-00001-of-00002.safetensors"
    assert [one.name for one in target.iterdir()] == [name]
    with safe_open(str(target / name), "pt") as chosen, safe_open(str(source / name), "pt") as whole:
        assert sorted(chosen.keys()) == ["model.1.02", "model.1.03", "model.1.17"]
        for tensor in list(chosen.keys()):
            assert torch.equal(chosen.get_tensor(tensor), whole.get_tensor(tensor))
        about = msgspec.json.decode(chosen.metadata()["tierd"])
        assert (about["rank"], about["state"]) == (1, {})
        sharding = msgspec.json.decode(chosen.metadata()["DCP_SHARDING_INFO"])
        assert sharding["model.1.17"] == {"saved_offsets": [1 << 18]}
    # One header chunk of each shard; two chunks for a single tensor; three for two adjacent ones.
    assert restored["given_bytes"] == {"near": (1 + 1 + 3 + 2) * CHUNK_BYTES}
    assert near.sent["get_object"] < 8 * CHUNK_BYTES
    assert (restored["is_whole"], restored["resumed_bytes"]) == (False, 0)
    assert not target.with_name("restored.partial").exists()


def test_partial_restore_of_an_unknown_rank_or_tensor_is_exit_10_with_a_reason(house_with_one: House) -> None:
    for arguments, sentence in (
        (["--rank", "7"], "rank 7"),
        (["--only", "modle.*"], "no tensor has such a name"),
        (["--rank", "0", "--only", "model.1.*"], "as in 'model.*'"),
    ):
        result = house_with_one.tierd("restore", *arguments, "--to", house_with_one.root / "restored")
        assert result.exit_code == 10
        assert sentence in result.stderr
        assert not list(house_with_one.root.glob("restored*")), arguments
        assert "the same command continues" not in result.stderr


def test_a_refusal_keeps_what_an_earlier_attempt_has_fetched(house_with_one: House) -> None:
    house, target = house_with_one, house_with_one.root / "restored"
    (shard,) = house.cold.rglob("rank-00000*.safetensors")
    content = shard.read_bytes()
    flip_a_bit(shard)
    assert house.tierd("restore", "--only", "model.*", "--to", target).exit_code == 12
    assert house.tierd("restore", "--only", "modle.*", "--to", target).exit_code == 10
    assert target.with_name("restored.partial").exists()
    shard.write_bytes(content)
    assert house.json("restore", "--only", "model.*", "--to", target)["resumed_bytes"] > 2 * CHUNK_BYTES


def test_partial_restore_into_a_tier_is_refused(house_with_one: House) -> None:
    own = house_with_one.hot / "run" / "000000000005-g0001"
    result = house_with_one.tierd("restore", "--rank", "0", "--tier", "cold", "--to", own)
    assert result.exit_code == 2
    assert "inside the tier" in result.stderr


@pytest.fixture
def house_with_one(tmp_path: Path) -> House:
    house = make_house(tmp_path)
    commit(house.cold, shards(2, 2), chunk_bytes=CHUNK_BYTES)
    return house


# ── what is seen meanwhile ──


@pytest.mark.usefixtures("forked_python")
def test_progress_is_shown_on_a_terminal_and_not_on_a_pipe(tmp_path: Path) -> None:
    house = make_house(tmp_path)
    make_checkpoint(house.cold, size_bytes=8 << 20)
    command = [sys.executable, "-m", "tierd", "--config", str(house.config), "restore", "--to"]
    piped = subprocess.run([*command, str(tmp_path / "piped")], capture_output=True, timeout=120, check=True)
    assert piped.stderr == b""

    leader, follower = pty.openpty()
    shown: list[bytes] = []

    def read_terminal() -> None:
        while True:
            try:
                some = os.read(leader, 1 << 16)
            except OSError:  # the other end is closed
                return
            shown.append(some)

    watcher = threading.Thread(target=read_terminal)
    watcher.start()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    try:
        subprocess.run(
            [*command, str(tmp_path / "seen")],
            stdout=subprocess.PIPE,
            stderr=follower,
            env=environ,
            timeout=120,
            check=True,
        )
    finally:
        os.close(follower)
        watcher.join(60)
        os.close(leader)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", b"".join(shown).decode())
    assert "step 100 from cold" in text
    assert re.search(r"[0-9.]+ [kMG]B/s", text)
    assert re.search(r"\d:\d\d:\d\d", text), "the time left"
