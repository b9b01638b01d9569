"""`tierd adopt s3://BUCKET/PREFIX --preset`: a history in a bucket is streamed into hot, once each, and comes back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.support.bucket import Bucket, Stored, bucket_server
from tests.support.cli import House, make_checkpoint, make_house
from tests.support.foreign import contents
from tests.support.framework_saves import SAVES, Writer
from tests.support.s3 import BUCKET, ENVIRONMENT
from tierd.format import checksum

URL = f"s3://{BUCKET}/old/out"
NOW = datetime.now(UTC)


@dataclass
class Uploaded:
    house: House
    bucket: Bucket

    def put(self, key: str, content: bytes, *, hours_ago: float = 2.0) -> None:
        etag = f'"{hashlib.md5(content).hexdigest()}"'
        self.bucket.objects[key] = Stored(content, etag, checksum.crc64nvme(content))
        self.bucket.modified[key] = (NOW - timedelta(hours=hours_ago)).replace(microsecond=0)

    def put_folder(self, folder: Path, prefix: str = "old/out") -> None:
        """As `aws s3 sync` uploads one: the files in any order, at about the same time."""
        for path in sorted(folder.rglob("*"), reverse=True):
            if path.is_file():
                self.put(f"{prefix}/{path.relative_to(folder)}", path.read_bytes())

    def adopt(self, *more: str) -> Any:
        done = self.house.tierd("adopt", URL, "--run", "old", "--json", *more)
        report = json.loads(done.stdout)
        assert done.exit_code == (3 if report["left"] else 0), done.stderr
        return report


@pytest.fixture
def uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Uploaded]:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with bucket_server() as bucket:
        cold = f'[[cold]]\nname = "bucket"\nurl = "s3://{BUCKET}/tierd"\nendpoint_url = "{bucket.url}"'
        yield Uploaded(make_house(tmp_path, more=cold), bucket)


# The two that differ most; test_adopt_history.py adopts what each of them writes.
SHORT = {"deepspeed", "step-bin"}


@pytest.mark.parametrize(
    "preset", [pytest.param(each, marks=() if each in SHORT else pytest.mark.long) for each in sorted(SAVES)]
)
def test_a_history_in_a_bucket_is_adopted_in_order_and_comes_back(
    uploaded: Uploaded, tmp_path: Path, preset: str
) -> None:
    (tmp_path / "out").mkdir()
    for step in (30, 10, 20):
        SAVES[preset](tmp_path / "out", step, Writer())
    uploaded.put_folder(tmp_path / "out")
    uploaded.put("old/out/runs/", b"")  # what a console makes for a folder
    before = dict(uploaded.bucket.objects)
    options = ("--preset", preset, "--settled")
    assert uploaded.adopt(*options, "--dry-run")["adopted"] == [10, 20, 30]
    report = uploaded.adopt(*options)
    assert (report["adopted"], report["path"], report["left"]) == ([10, 20, 30], URL, {})
    assert {key: each for key, each in uploaded.bucket.objects.items() if key in before} == before
    again = uploaded.adopt(*options)
    assert (again["adopted"], again["known"]) == ([], [10, 20, 30])

    name = next(path.name for path in (tmp_path / "out").iterdir() if "30" in path.name)
    is_folder = (tmp_path / "out" / name).is_dir()
    to = tmp_path / "back" / name if is_folder else tmp_path / "back"
    assert uploaded.house.tierd("restore", "--run", "old", "--step", "30", "--to", to).exit_code == 0
    there, here = contents(tmp_path / "back"), contents(tmp_path / "out")
    assert {path: here[path][1] for path in there if path} == {path: about[1] for path, about in there.items() if path}
    assert uploaded.house.tierd("verify", "--run", "old", "--deep").exit_code == 0


def test_what_is_not_complete_is_named_and_left(uploaded: Uploaded, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for step in (10, 20, 30, 40):
        SAVES["gpt-simple"](tmp_path / "out", step, Writer())
    uploaded.put_folder(tmp_path / "out")
    torn = next(key for key in uploaded.bucket.objects if "-20-" in key and key.endswith("optimizer.bin"))
    uploaded.put(torn, b"PK\x03\x04 torn")
    for key in [key for key in uploaded.bucket.objects if "-30-" in key and "/rng/" in key]:
        del uploaded.bucket.objects[key]
    late = next(key for key in uploaded.bucket.objects if "-40-" in key and "/model/" in key)
    uploaded.put(late, (tmp_path / "out" / late.removeprefix("old/out/")).read_bytes(), hours_ago=0.0)
    report = uploaded.adopt("--preset", "gpt-simple")
    assert report["adopted"] == [10]
    reasons = {name.removesuffix("-shutdown"): why for name, why in report["left"].items()}
    assert reasons["checkpoint-20"] == "optimizer.bin is not whole"
    assert reasons["checkpoint-30"] == "rng/ is not there yet"
    assert "written again after trainer_state.json" in reasons["checkpoint-40"]


@pytest.mark.parametrize(
    ("trigger", "message"),
    [("trainer_state.json", "was replaced or deleted meanwhile"), ("config.json", "while it was read")],
)
def test_an_object_that_changes_while_it_is_read_is_refused(
    uploaded: Uploaded, tmp_path: Path, trigger: str, message: str
) -> None:
    """Before it is read, or after."""
    (tmp_path / "out").mkdir()
    SAVES["hf-trainer"](tmp_path / "out", 10, Writer())
    uploaded.put_folder(tmp_path / "out")
    key = "old/out/checkpoint-10/optimizer.pt"

    def replace(operation: str, read: str) -> str:
        if operation == "get_object" and read.endswith(trigger):
            uploaded.bucket.script = lambda operation, key: ""
            stored = uploaded.bucket.objects[key]
            uploaded.put(key, stored.content[:-1] + b"x")
        return ""

    uploaded.bucket.script = replace
    report = uploaded.adopt("--preset", "hf-trainer", "--settled")
    assert report["adopted"] == []
    assert message in report["left"]["checkpoint-10"] or "was replaced" in report["left"]["checkpoint-10"]
    assert f"{URL}/checkpoint-10" in report["left"]["checkpoint-10"]
    assert not list((uploaded.house.hot / "old").glob("0*"))


def test_objects_without_a_time_are_refused_by_name(uploaded: Uploaded) -> None:
    """Their time of upload would be the checkpoint's time."""
    uploaded.put("old/out/step_10.bin", b"x")
    uploaded.bucket.lists_times = False
    report = uploaded.adopt("--pattern", "step_{step}.bin", "--settled")
    assert (report["adopted"], report["left"].keys()) == ([], {"step_10.bin"})
    assert "the server does not say when step_10.bin was written" in report["left"]["step_10.bin"]


@pytest.mark.parametrize(
    ("url", "more", "code", "message"),
    [
        (f"s3://{BUCKET}/tierd/old", ("--preset", "dcp"), 2, "is around it"),
        (f"s3://{BUCKET}", ("--preset", "dcp"), 2, "is in it"),
        ("s3://", ("--preset", "dcp"), 2, "expected s3://bucket/prefix"),
        (URL, ("--step", "5"), 2, "--step is for a folder here"),
        (f"{URL}/empty", ("--preset", "dcp"), 10, "no name there fits the preset dcp"),
    ],
)
def test_a_wrong_use_is_refused(uploaded: Uploaded, url: str, more: tuple[str, ...], code: int, message: str) -> None:
    done = uploaded.house.tierd("adopt", url, "--run", "old", *more)
    assert (done.exit_code, message in done.stderr) == (code, True), done.output


def test_names_that_no_folder_can_have_are_refused(uploaded: Uploaded) -> None:
    for key in ("step-5/.metadata", "step-5/../x", "step-6/.metadata", "step-6/a", "step-6/a/b"):
        uploaded.put(f"old/out/{key}", b"content")
    report = uploaded.adopt("--preset", "dcp", "--settled")
    assert report["adopted"] == []
    assert "is not a plain relative path" in report["left"]["step-5"]
    assert "a is an object, and a folder of others" in report["left"]["step-6"]


def test_another_prefix_of_the_bucket_of_a_cold_tier_is_read_with_its_settings(
    uploaded: Uploaded, tmp_path: Path
) -> None:
    """A former prefix in the same MinIO: `--from` finds it at the endpoint of the config, as `adopt` does."""
    make_checkpoint(tmp_path / "former", step=100)
    uploaded.put_folder(tmp_path / "former", "former")
    listed = uploaded.house.tierd("ls", f"s3://{BUCKET}/former", "--json")
    assert listed.exit_code == 0, listed.stderr
    assert [row["step"] for row in json.loads(listed.stdout)] == [100]
