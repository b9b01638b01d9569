"""`tierd restore` says which files the run writes beside its checkpoints, or gives them back; it replaces none."""

from __future__ import annotations

import hashlib
from hashlib import sha256
from pathlib import Path

import pytest

from tests.support.cli import House, flip_a_bit, make_checkpoint, make_house
from tests.support.foreign import make_folder
from tierd.format.ids import Run
from tierd.format.sidecar import Segment, encode_segment, short


@pytest.fixture
def house(tmp_path: Path) -> House:
    house = make_house(tmp_path)
    make_checkpoint(house.hot, house.cold)
    return house


def put(root: Path, name: str, content: bytes, *, version: int = 1, phase: str = "") -> Path:
    """The whole file as one segment of a tier."""
    before, after = hashlib.sha256(b"").hexdigest(), hashlib.sha256(content).hexdigest()
    segment = Segment(Run("run42"), name, version, 0, len(content), short(before), short(after), phase=phase)
    path = root / segment.key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_segment(segment, content, before=before, after=after, keyring=None))
    return path


def test_a_restore_names_the_files_and_the_command_that_gives_them_back(house: House, tmp_path: Path) -> None:
    put(house.cold, ".loss.json", b"1\n2\n")
    put(house.hot, "log.jsonl", b"3\n")
    put(house.hot, ".samples.json", b"4\n", phase="phase-1")
    done = house.tierd("restore", "--to", tmp_path / "a")
    assert done.exit_code == 0, done.stderr
    assert done.stderr.splitlines() == [
        "tierd: run42 has files beside its checkpoints: .loss.json, log.jsonl; "
        "`tierd sidecars --run run42 --into FOLDER` gives them back, and replaces none"
    ]
    assert house.tierd("sidecars", "--run", "run42", "--into", tmp_path / "out").exit_code == 0
    assert (tmp_path / "out/.loss.json").read_bytes() == b"1\n2\n"

    assert house.json("restore", "--to", tmp_path / "b")["sidecars"] == [".loss.json", "log.jsonl"]
    limited = house.tierd("restore", "--tier", "cold", "--to", tmp_path / "c")
    assert "checkpoints: .loss.json; `tierd sidecars --run run42 --tier cold --into" in limited.stderr
    placed = house.tierd("restore", "--from", str(house.cold), "--to", tmp_path / "d")
    assert f"checkpoints: .loss.json; `tierd sidecars --run run42 --from {house.cold} --into" in placed.stderr


def test_a_run_without_such_files_says_nothing(house: House, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "out/checkpoint-5")
    house.json("adopt", folder, "--run", "hf", "--step", "5")
    put(house.hot, "log.jsonl", b"3\n")  # of another run
    done = house.tierd("restore", "--run", "hf", "--to", tmp_path / "a")
    assert (done.exit_code, done.stderr) == (0, "")
    assert house.json("restore", "--run", "hf", "--to", tmp_path / "b")["sidecars"] == []


def test_the_option_writes_the_newest_version_of_each_and_replaces_none(house: House, tmp_path: Path) -> None:
    put(house.hot, ".loss.json", b"old\n")
    put(house.cold, ".loss.json", b"new\n", version=2)
    out = tmp_path / "out"
    done = house.tierd("restore", "--to", tmp_path / "a", "--sidecars", out)
    assert done.exit_code == 0, done.stderr
    assert (out / ".loss.json").read_bytes() == b"new\n"
    assert f"{out / '.loss.json'}: written (version 2" in done.stderr

    done = house.tierd("restore", "--to", tmp_path / "b", "--sidecars", out)
    assert (done.exit_code, "is there already" in done.stderr) == (0, True), done.stderr
    (out / ".loss.json").write_bytes(b"newer\n")
    done = house.tierd("restore", "--to", tmp_path / "c", "--sidecars", out)
    assert done.exit_code == 15
    assert "it exists with other bytes" in done.stderr
    assert "restored run42 step 100" in done.stdout, "the checkpoint was restored before"
    assert (tmp_path / "c/manifest.json").is_file()
    assert (out / ".loss.json").read_bytes() == b"newer\n"


def test_a_second_file_in_a_version_is_written_beside_the_first(house: House, tmp_path: Path) -> None:
    """Two daemons have copied different files under one name, and one of them was killed before it noticed."""
    put(house.cold, "log.jsonl", b"one 1\none 2\n")
    put(house.cold, "log.jsonl", b"one 1\n")  # merged since, and not deleted
    put(house.cold, "log.jsonl", b"other 1\n")
    put(house.hot, "log.jsonl", b"third\n")
    out = tmp_path / "out"
    (report,) = house.json("sidecars", "--run", "run42", "--into", out)
    names = {f"log.jsonl.other-{sha256(each).hexdigest()[:16]}": each for each in (b"other 1\n", b"third\n")}
    assert report["others"] == sorted(names)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {"log.jsonl": b"one 1\none 2\n", **names}
    assert house.json("sidecars", "--run", "run42", "--into", out)[0]["is_written"] is False


def test_a_damaged_file_fails_the_option_and_not_the_restore(house: House, tmp_path: Path) -> None:
    flip_a_bit(put(house.hot, ".loss.json", b"1\n2\n" * 50))
    assert house.tierd("restore", "--to", tmp_path / "a").exit_code == 0
    done = house.tierd("restore", "--to", tmp_path / "b", "--sidecars", tmp_path / "out")
    assert done.exit_code == 12, done.stderr
    assert (tmp_path / "b/manifest.json").is_file()
    assert not (tmp_path / "out/.loss.json").exists()


def test_files_of_a_run_without_checkpoints_are_listed(tmp_path: Path) -> None:
    house = make_house(tmp_path, more='[sidecars]\npath = "out"\nrun = "run42"\nkeep = [".loss.json"]')
    assert "of a run without checkpoints: --run RUN" in house.tierd("sidecars").stderr
    put(house.cold, ".loss.json", b"1\n2\n")
    assert [each["file"] for each in house.json("sidecars")] == [".loss.json"]
    assert house.json("sidecars", "--from", str(house.cold)) == []
    assert len(house.json("sidecars", "--from", str(house.cold), "--run", "run42")) == 1
