"""`tierd restore`: writes the right checkpoint, whole and verified, or nothing, with the right exit code."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import time
from pathlib import Path

import msgspec
import pytest

from tests.support.cli import (
    CHUNK_BYTES,
    House,
    assert_same_files,
    flip_a_bit,
    folder_of,
    make_checkpoint,
    make_house,
    make_zeros,
)
from tests.support.s3 import BUCKET, rclone_server


@pytest.fixture
def house(tmp_path: Path) -> House:
    return make_house(tmp_path)


def nothing_at(target: Path) -> bool:
    return not target.exists() and not target.with_name(target.name + ".partial").exists()


def test_restore_copies_the_newest_checkpoint_byte_for_byte_from_hot(house: House) -> None:
    make_checkpoint(house.hot, step=100)
    newest = make_checkpoint(house.hot, house.cold, step=200, sequence=2)
    target = house.root / "restored"

    result = house.tierd("restore", "--to", target)

    assert result.exit_code == 0, result.output
    assert_same_files(folder_of(house.hot, newest), target)
    assert result.stdout.startswith("restored run42 step 200 (generation 1) from hot")
    assert result.stdout.rstrip().endswith("verified")
    assert len(result.stdout.splitlines()) == 1


def test_restore_json_names_checkpoint_tier_and_bytes(house: House) -> None:
    make_checkpoint(house.cold, step=300)

    found = house.json("restore", "--tier", "cold", "--to", house.root / "restored")

    assert found["run"] == "run42"
    assert (found["step"], found["generation"], found["tier"]) == (300, 1, "cold")
    assert found["size_bytes"] == 40_000
    assert found["is_verified"] is True
    assert found["passed_over"] == {}


def test_restore_takes_the_newest_generation_first(house: House) -> None:
    make_checkpoint(house.hot, step=900, generation=1)
    make_checkpoint(house.hot, step=500, generation=2)

    assert house.json("restore", "--to", house.root / "a")["step"] == 500
    assert house.json("restore", "--generation", "1", "--to", house.root / "b")["step"] == 900


def test_restore_takes_a_named_step_or_milestone(house: House) -> None:
    make_checkpoint(house.cold, step=100, milestones=("best",))
    make_checkpoint(house.cold, step=200)
    target = house.root / "b"

    assert house.json("restore", "--step", "100", "--to", house.root / "a")["step"] == 100
    assert house.json("restore", "--step", "milestone:best", "--to", target)["step"] == 100
    assert (target / "milestone-best.json").is_file()


def test_restore_reports_a_flipped_bit_in_hot_and_reads_that_chunk_from_cold(house: House) -> None:
    manifest = make_checkpoint(house.hot, house.cold, step=100)
    flip_a_bit(folder_of(house.hot, manifest) / manifest.files[1].name)
    target = house.root / "restored"

    result = house.tierd("restore", "--to", target, "--json")

    assert result.exit_code == 0, result.output
    assert "hot cannot give all of run42/000000000100-g0001" in result.stderr
    restored = msgspec.json.decode(result.stdout)
    assert (restored["tier"], restored["given_bytes"]) == ("cold", {"hot": 40_000 - CHUNK_BYTES, "cold": CHUNK_BYTES})
    assert "chunk 1 of 3" in restored["passed_over"]["hot"]
    assert_same_files(folder_of(house.cold, manifest), target)


def test_a_restore_from_a_damaged_tier_alone_says_why_once(house: House) -> None:
    manifest = make_checkpoint(house.hot, house.cold, step=100)
    flip_a_bit(folder_of(house.hot, manifest) / manifest.files[1].name)

    result = house.tierd("restore", "--tier", "hot", "--to", house.root / "restored")

    assert result.exit_code == 12
    assert result.stderr.count("chunk 1 of 3: crc64nvme") == 1, result.stderr


def test_chunks_damaged_in_different_tiers_are_each_read_from_the_other(house: House) -> None:
    manifest = make_checkpoint(house.hot, house.cold, step=100)
    flip_a_bit(folder_of(house.hot, manifest) / manifest.files[1].name)
    flip_a_bit(folder_of(house.cold, manifest) / manifest.files[0].name)
    target = house.root / "restored"

    result = house.tierd("restore", "--to", target)

    assert result.exit_code == 0, result.output
    assert "from hot and cold to" in result.stdout
    for number, root in ((0, house.hot), (1, house.cold)):
        name = manifest.files[number].name
        assert (target / name).read_bytes() == (folder_of(root, manifest) / name).read_bytes()


def test_replica_with_a_different_manifest_is_not_read(house: House) -> None:
    manifest = make_checkpoint(house.hot, step=100)
    make_checkpoint(house.cold, step=100, created_at="2025-02-02T00:00:00.000+00:00")
    flip_a_bit(folder_of(house.hot, manifest) / manifest.files[1].name)

    result = house.tierd("restore", "--to", house.root / "restored")

    assert result.exit_code == 12
    assert not (house.root / "restored").exists()


def test_chunk_damaged_in_every_replica_is_exit_12_and_the_good_chunks_are_kept_for_the_next_attempt(
    house: House,
) -> None:
    manifest = make_checkpoint(house.hot, house.cold, step=100)
    for root in (house.hot, house.cold):
        flip_a_bit(folder_of(root, manifest) / manifest.files[0].name)
    target = house.root / "restored"

    result = house.tierd("restore", "--to", target)

    assert result.exit_code == 12
    assert "no replica gives 8.19 kB of 40 kB: read" in result.stderr
    assert f"stay in {target}.partial" in result.stderr
    assert result.stdout == ""
    assert not target.exists()
    assert house.tierd("ls", f"{target}.partial").stdout.splitlines()[1:] == []

    make_checkpoint(house.root / "usb-disk", step=100)
    mended = house.json("restore", "--from", house.root / "usb-disk", "--to", target)

    assert mended["given_bytes"] == {str(house.root / "usb-disk"): CHUNK_BYTES}
    assert mended["resumed_bytes"] == 40_000 - CHUNK_BYTES
    assert_same_files(folder_of(house.root / "usb-disk", manifest), target)
    assert not target.with_name("restored.partial").exists()


def test_truncated_manifest_of_the_named_step_is_exit_12(house: House) -> None:
    manifest = make_checkpoint(house.hot, step=100)
    path = folder_of(house.hot, manifest) / "manifest.json"
    path.write_bytes(path.read_bytes()[:100])

    result = house.tierd("restore", "--step", "100", "--run", "run42", "--to", house.root / "restored")

    assert result.exit_code == 12
    assert "manifest" in result.stderr
    assert nothing_at(house.root / "restored")


def test_truncated_manifest_of_the_newest_is_reported_and_the_older_checkpoint_restored(house: House) -> None:
    make_checkpoint(house.hot, step=100)
    newest = make_checkpoint(house.hot, step=200)
    path = folder_of(house.hot, newest) / "manifest.json"
    path.write_bytes(path.read_bytes()[:100])

    result = house.tierd("restore", "--to", house.root / "restored")

    assert result.exit_code == 0
    assert "restored run42 step 100" in result.stdout
    assert "passed over" in result.stderr
    assert "000000000200-g0001" in result.stderr


def test_manifest_of_a_later_format_is_exit_1_and_names_the_version(house: House) -> None:
    manifest = make_checkpoint(house.hot, step=100)
    path = folder_of(house.hot, manifest) / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"format_version": 1', b'"format_version": 9'))

    result = house.tierd("restore", "--step", "100", "--run", "run42", "--to", house.root / "restored")

    assert result.exit_code == 1
    assert "format version 9" in result.stderr
    assert "upgrade tierd" in result.stderr


def test_restore_of_a_replica_without_a_shard_reads_the_next_tier(house: House) -> None:
    manifest = make_checkpoint(house.hot, house.cold, step=100)
    (folder_of(house.hot, manifest) / manifest.files[0].name).unlink()

    result = house.tierd("restore", "--to", house.root / "restored")

    assert result.exit_code == 0, result.output
    assert "from cold" in result.stdout
    assert "is missing" in result.stderr


def test_restore_of_an_unknown_step_is_exit_10_and_lists_steps(house: House) -> None:
    make_checkpoint(house.hot, step=100)

    result = house.tierd("restore", "--step", "7", "--to", house.root / "restored")

    assert result.exit_code == 10
    assert "100 (generation 1)" in result.stderr
    assert "Traceback" not in result.stderr


def test_restore_from_empty_tiers_is_exit_10(house: House) -> None:
    assert house.tierd("restore", "--to", house.root / "restored").exit_code == 10


def test_restore_without_run_is_exit_2_if_there_are_several_and_lists_them(house: House) -> None:
    make_checkpoint(house.hot, run="gpt-a")
    make_checkpoint(house.cold, run="gpt-b")

    result = house.tierd("restore", "--to", house.root / "restored")

    assert result.exit_code == 2
    assert "gpt-a, gpt-b" in result.stderr
    assert house.json("restore", "--run", "gpt-b", "--to", house.root / "restored")["run"] == "gpt-b"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tier", "glacier"],
        ["--step", "soon"],
        ["--from", "/nowhere/at/all"],
        ["--run", "../etc"],
        ["--generation", "0"],
    ],
)
def test_restore_with_a_wrong_argument_is_exit_2(house: House, arguments: list[str]) -> None:
    make_checkpoint(house.hot)

    result = house.tierd("restore", *arguments, "--to", house.root / "restored")

    assert result.exit_code == 2
    assert nothing_at(house.root / "restored")


def test_restore_into_a_directory_with_files_is_exit_15_and_changes_nothing(house: House) -> None:
    make_checkpoint(house.hot)
    target = house.root / "full"
    target.mkdir()
    (target / "thesis.tex").write_text("years of work")

    result = house.tierd("restore", "--to", target)

    assert result.exit_code == 15
    assert "thesis.tex" in result.stderr
    assert (target / "thesis.tex").read_text() == "years of work"


def test_restore_leaves_a_foreign_partial_folder_alone(house: House) -> None:
    make_checkpoint(house.hot)
    foreign = house.root / "restored.partial"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work")

    assert house.tierd("restore", "--to", house.root / "restored").exit_code == 15
    assert (foreign / "thesis.tex").read_text() == "years of work"


def test_restore_into_an_empty_directory_or_a_link_to_one(house: House) -> None:
    manifest = make_checkpoint(house.hot)
    empty = house.root / "empty"
    empty.mkdir()
    link = house.root / "link"
    link.symlink_to(empty)

    assert house.tierd("restore", "--to", link).exit_code == 0
    assert_same_files(folder_of(house.hot, manifest), empty)


def test_restore_without_space_is_exit_16_before_anything_is_written(house: House) -> None:
    free = shutil.disk_usage(house.root).free
    make_zeros(house.hot, step=100, size_bytes=2 * free, chunk_bytes=5 << 30)

    result = house.tierd("restore", "--to", house.root / "restored")

    assert result.exit_code == 16
    assert "are free" in result.stderr
    assert nothing_at(house.root / "restored")


def test_second_restore_into_the_same_directory_is_exit_11(house: House) -> None:
    make_checkpoint(house.hot)
    partial = house.root / "restored.partial"
    partial.mkdir()
    descriptor = os.open(partial, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        assert house.tierd("restore", "--to", house.root / "restored").exit_code == 11
    finally:
        os.close(descriptor)


def test_restore_from_memory_without_a_daemon_is_exit_13(house: House) -> None:
    make_checkpoint(house.hot)

    result = house.tierd("restore", "--tier", "memory", "--to", house.root / "restored")

    assert result.exit_code == 13
    assert "tierd serve" in result.stderr


def test_checkpoint_restored_into_its_own_folder_in_hot_is_listed_again(house: House) -> None:
    manifest = make_checkpoint(house.cold, step=400, milestones=("best",))
    shutil.rmtree(house.hot)
    target = folder_of(house.hot, manifest)

    assert house.json("restore", "--tier", "cold", "--to", target)["step"] == 400

    assert house.json("ls")[0]["tiers"] == ["hot", "cold"]
    assert house.json("ls", house.hot)[0]["milestone"] == "best"
    assert house.tierd("verify").exit_code == 0
    assert sorted(one.name for one in target.parent.iterdir()) == [manifest.id.name]


def test_restore_into_a_tier_is_refused_except_into_the_checkpoints_own_folder(house: House) -> None:
    make_checkpoint(house.cold, step=400)

    result = house.tierd("restore", "--to", house.hot / "run42" / "000000000500-g0001")

    assert result.exit_code == 2
    assert "000000000400-g0001" in result.stderr
    assert house.tierd("restore", "--to", house.hot).exit_code == 2


def test_restore_from_a_directory_given_by_its_path(house: House) -> None:
    manifest = make_checkpoint(house.root / "usb-disk", step=100)
    target = house.root / "restored"

    found = house.json("restore", "--from", house.root / "usb-disk", "--to", target)

    assert found["tier"] == str(house.root / "usb-disk")
    assert_same_files(folder_of(house.root / "usb-disk", manifest), target)


def test_bucket_is_listed_verified_and_restored_from(tmp_path: Path) -> None:
    manifest = make_checkpoint(tmp_path / "s3" / BUCKET / "prefix", step=100, milestones=("best",))
    url = f"s3://{BUCKET}/prefix"
    with rclone_server(tmp_path / "s3") as endpoint:
        house = make_house(
            tmp_path, more=f'[[cold]]\nname = "dr"\nurl = "{url}"\nregion = "us-east-1"\nendpoint_url = "{endpoint}"'
        )

        restored = house.json("restore", "--tier", "dr", "--to", tmp_path / "restored")
        listed = house.json("ls", url)
        verified = house.tierd("verify", "--tier", "dr")
        auto = house.json("restore", "--from", url, "--to", tmp_path / "again")

    assert (restored["tier"], auto["tier"]) == ("dr", url)
    assert listed[0]["milestone"] == "best"
    assert verified.exit_code == 0, verified.output
    for target in (tmp_path / "restored", tmp_path / "again"):
        assert_same_files(folder_of(tmp_path / "s3" / BUCKET / "prefix", manifest), target)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_restore_killed_halfway_leaves_nothing_that_looks_complete(house: House, signum: signal.Signals) -> None:
    make_zeros(house.hot, step=100, size_bytes=512 << 20)
    target = house.root / "restored"
    partial = house.root / "restored.partial"
    for _ in range(10):
        process = house.start("restore", "--to", target)
        deadline = time.monotonic() + 60
        while not list(partial.glob("run42/*/*")) and process.poll() is None and time.monotonic() < deadline:
            os.sched_yield()
        process.send_signal(signum)
        out, err = process.communicate(timeout=120)
        if process.returncode != 0:
            break
        shutil.rmtree(target)  # on a busy machine it may finish before the signal: try again
    else:
        pytest.fail("ten restores in a row ignored the signal or finished before it")

    assert not target.exists()
    assert out == ""
    assert "Traceback" not in err
    if signum is signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
        assert not list(partial.glob("**/manifest.json"))
        # A restore of another checkpoint replaces what is left.
        make_zeros(house.root / "small", step=7, size_bytes=4096)
        assert house.json("restore", "--from", house.root / "small", "--to", target)["step"] == 7
        assert not partial.exists()
    else:
        assert process.returncode == 128 + signum
        assert not list(partial.glob("**/manifest.json"))
        assert partial.exists() == ("the same command continues from them" in err)
