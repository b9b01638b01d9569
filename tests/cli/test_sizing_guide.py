"""docs/guides/sizing.md: its command prints what the page shows, and its formulas give the same numbers."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.bucket import bucket_server
from tests.support.rooms import rooms_at
from tests.support.s3 import ACCESS_KEY, BUCKET, SECRET_KEY
from tests.support.s3_store import s3_store
from tierd.cli import forecast_checks
from tierd.cli.app import called, make_app
from tierd.config.sections import Config
from tierd.format.checksum import CHUNK_BYTES
from tierd.tiers.checkpoint_copy import copy_checkpoint
from tierd.tiers.tier import Tier

GUIDE = (Path(__file__).parents[2] / "docs/guides/sizing.md").read_text(encoding="utf-8")
STATE_BYTES, INTERVAL_S, MONTH_S = 14e9, 600, 30 * 86400
MEASURED = re.compile(r"; [\d.]+ .B are free.*|(?<=/tierd) takes .*")  # differs between machines


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)
    return found


def sentences(lines: list[str]) -> list[str]:
    """Without the verdict, which depends on the disk, and without hints."""
    return [MEASURED.sub("", line[9:]) for line in lines if "hint:" not in line]


def test_the_command_prints_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command, *shown = block("console").splitlines()
    with bucket_server() as served:
        text = block("toml").replace("s3://bucket/prefix", f"s3://{BUCKET}/prefix").replace("/nvme", f"{tmp_path}/nvme")
        cold = f'endpoint_url = "{served.url}"\n[lifecycle.hot]'
        (tmp_path / "tierd.toml").write_text(text.replace("[lifecycle.hot]", cold))
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(forecast_checks, "MEASURED_BYTES", 1 << 20)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        program, *arguments = shlex.split(command.removeprefix("$ "))
        assert program == "tierd"
        printed = CliRunner().invoke(make_app(called(arguments)), arguments).stdout
    lines = printed.replace(str(tmp_path / "nvme"), "/nvme").replace(str(tmp_path), "/nvme/tierd").splitlines()
    assert sentences(lines)[-len(shown) :] == sentences(shown)


def test_the_numbers_of_the_formulas_are_those_of_the_command() -> None:
    shown = block("console")
    for number, unit in (
        ((3 + 2) * STATE_BYTES / 1e9, "GB"),
        ((3 + 6) * STATE_BYTES / 1e9, "GB"),
        (STATE_BYTES / (100 * INTERVAL_S) * MONTH_S / 1e9, "GB"),
        (STATE_BYTES / INTERVAL_S / 1e6, "MB/s"),
    ):
        assert f"{number:.3g} {unit}" in shown
        assert f"{number:.3g} {unit}" in GUIDE.replace(shown, "")
    assert f"{(3 + 6) * STATE_BYTES / 2**30 * 0.023:.3g} a month" in shown
    assert f"{Config().snapshot.slots * STATE_BYTES / 1e9:g} GB" in GUIDE
    parts = math.ceil(STATE_BYTES / 8 / CHUNK_BYTES)
    assert f"8 × {parts} + {3 * 8} + 2 = {8 * parts + 3 * 8 + 2}" in GUIDE


async def test_a_copy_takes_the_requests_that_the_page_says(tmp_path: Path) -> None:
    with bucket_server(part_bytes_min=1 << 20) as served:
        async with rooms_at(tmp_path) as rooms:
            store = s3_store(f"s3://{BUCKET}/deep", endpoint_url=served.url)
            manifest = await rooms.commit("hot", size_bytes=CHUNK_BYTES + 5)
            await copy_checkpoint(manifest, rooms.hot, Tier("cold", store))
            await store.close()
        billed = [one for one in served.seen if not one.operation.startswith(("get_", "head_"))]
    parts = sum(math.ceil(entry.size_bytes / CHUNK_BYTES) for entry in manifest.files)
    assert len(billed) == parts + 3 * len(manifest.files) + 2
