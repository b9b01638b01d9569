"""What the daemon says at its start of the machine, in the words of `tierd doctor`."""

from __future__ import annotations

import logging
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.support.cli import make_manifest
from tests.support.config import make_config
from tests.support.policy import view
from tests.support.waiting import wait_until
from tierd import local_checks
from tierd.catalog.catalog import Catalog
from tierd.format.ids import HOT, checkpoint_id
from tierd.format.manifest import FileEntry, Manifest
from tierd.local_checks import clock, memlock, start_checks

NOW = datetime(2026, 11, 27, 12, tzinfo=UTC)


def of_size(size_bytes: int, step: int = 10) -> Manifest:
    entry = FileEntry(name="rank-00000", size_bytes=size_bytes, crc64nvme="", chunk_bytes=size_bytes, chunks=[])
    return make_manifest(checkpoint_id("gpt", step, 1), [entry])


def logged(caplog: pytest.LogCaptureFixture, root: Path, *manifests: Manifest) -> list[str]:
    config = make_config(root)
    config.hot_path.mkdir(exist_ok=True)
    catalog = Catalog([HOT])
    for manifest in manifests:
        catalog.add(manifest, HOT)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "tierd"):
        start_checks(config, catalog, NOW)
        wait_until(lambda: "tierd-start-checks" not in {thread.name for thread in threading.enumerate()})
    return [record.getMessage() for record in caplog.records]


def test_a_disk_that_is_too_small_for_the_newest_checkpoint_is_a_line_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert not [line for line in logged(caplog, tmp_path, of_size(10)) if "are needed for" in line]
    (line,) = (line for line in logged(caplog, tmp_path, of_size(10**17)) if "are needed for" in line)
    assert line.startswith("doctor, hot: ")
    assert line.endswith("for 5 checkpoints in all (hint: docs/RUNBOOK.md#disk-full)")
    # The newest counts, not an old one of another size.
    assert not [line for line in logged(caplog, tmp_path, of_size(10**17), of_size(10, 20)) if "10 MB are" in line]


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied", "/nvme"), ValueError("a mount point that is not UTF-8")]
)
def test_a_check_that_fails_does_not_stop_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refused(*_: object) -> list[object]:
        raise error

    monkeypatch.setattr(local_checks, "sizes", refused)
    lines = logged(caplog, tmp_path)
    assert f"doctor: a check at the start could not be made: {error}" in lines
    assert any("is on the same filesystem as hot" in line for line in lines)


def test_a_checkpoint_from_the_future_shows_a_wrong_clock() -> None:
    ahead = NOW + timedelta(hours=2)
    assert not list(clock([view(1, at=NOW.replace(tzinfo=None).isoformat()), view(2)], NOW))
    (advice,) = clock([view(1, at=ahead.replace(tzinfo=None).isoformat())], NOW)
    assert advice.message == "gpt/000000000010-g0001 was saved 2 h 0 min after the time of this machine's clock"


def test_slots_beyond_memlock_are_named_where_there_is_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tmp_path)
    monkeypatch.setattr(local_checks, "_GPU", tmp_path)
    monkeypatch.setattr(local_checks.resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    assert not list(memlock(config, 1 << 20))
    (advice,) = memlock(config, 1 << 30)
    assert advice.verdict == "note", "the NVIDIA driver pins without regard to it: no warning at each start"
    assert "and the slots of such a run are 2.15 GB" in advice.message
