"""`tierd verify`, `milestone`, `lifecycle`, `version`; and errors and exit codes of all verbs."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

import tierd
from tests.support.cli import House, flip_a_bit, folder_of, make_checkpoint, make_house
from tierd.cli import options
from tierd.cli.app import VERBS, called, config_first, make_app
from tierd.errors import NotFound
from tierd.format.ids import CheckpointId
from tierd.format.signature import Keyring, new_key
from tierd.tiers.tier import Tier


@pytest.fixture
def house(tmp_path: Path) -> House:
    return make_house(tmp_path)


# ── verify ──


def test_verify_reads_every_replica(house: House) -> None:
    make_checkpoint(house.hot, house.cold, step=100)
    make_checkpoint(house.hot, step=200)

    result = house.tierd("verify")

    assert result.exit_code == 0
    assert result.stdout == "3 of 3 replicas are whole: 120 kB verified\n"
    assert len(house.json("verify", "--tier", "cold")) == 1
    assert len(house.json("verify", "--step", "200")) == 1
    assert [one["step"] for one in house.json("verify", "--step", "latest")] == [200]


def test_verify_finds_a_flipped_bit_and_names_file_and_chunk(house: House) -> None:
    manifest = make_checkpoint(house.hot, house.cold)
    flip_a_bit(folder_of(house.cold, manifest) / manifest.files[1].name)

    result = house.tierd("verify")

    assert result.exit_code == 12
    assert "rank-00001-of-00002.safetensors in cold" in result.stdout
    assert "chunk 1 of 3" in result.stdout
    assert "1 of 2 replicas are whole" in result.stdout
    assert house.tierd("verify", "--tier", "hot").exit_code == 0


def test_verify_finds_a_missing_file_a_short_file_and_a_truncated_manifest(house: House) -> None:
    missing, short, truncated = (make_checkpoint(house.hot, step=step) for step in (1, 2, 3))
    (folder_of(house.hot, missing) / missing.files[0].name).unlink()
    with open(folder_of(house.hot, short) / short.files[0].name, "r+b") as file:
        file.truncate(100)
    path = folder_of(house.hot, truncated) / "manifest.json"
    path.write_bytes(path.read_bytes()[:100])

    result = house.tierd("verify", "--json")

    assert result.exit_code == 12
    found = {one["step"]: one["problems"] for one in msgspec.json.decode(result.stdout)}
    assert "missing" in found[1][0]
    assert "100 bytes, expected 20000" in found[2][0]
    assert "manifest" in found[3][0]


def test_verify_of_a_later_format_is_exit_3(house: House) -> None:
    make_checkpoint(house.hot, step=100)
    manifest = make_checkpoint(house.hot, step=200)
    path = folder_of(house.hot, manifest) / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"format_version": 1', b'"format_version": 9'))

    result = house.tierd("verify")

    assert result.exit_code == 3
    assert "format version 9" in result.stderr


def test_verify_of_nothing_is_exit_10(house: House) -> None:
    make_checkpoint(house.hot)

    assert house.tierd("verify", "--step", "7").exit_code == 10
    assert house.tierd("verify", "--tier", "cold").exit_code == 10


# ── milestone ──


def test_milestone_is_marked_in_every_tier_that_holds_the_checkpoint(house: House) -> None:
    make_checkpoint(house.hot, house.cold, step=100)
    make_checkpoint(house.hot, step=200)

    marked = house.json("milestone", "--run", "run42", "--step", "100", "release-1.0")

    assert marked["tiers"] == ["hot", "cold"]
    assert house.json("ls", house.hot)[1]["milestone"] == "release-1.0"
    assert house.json("ls", house.cold)[0]["milestone"] == "release-1.0"
    assert house.json("show", "run42", "milestone:release-1.0")["manifest"]["step"] == 100


@pytest.mark.parametrize("meanwhile", [Tier.delete, Tier.bury], ids=["deleted", "a daemon ended before it deleted"])
def test_milestone_is_not_reported_of_a_checkpoint_that_is_deleted_meanwhile(
    house: House, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[Tier, CheckpointId], Awaitable[object]]
) -> None:
    """A daemon writes the tombstone before it deletes the manifest, and may end between the two."""
    manifest = make_checkpoint(house.cold, step=100)
    real_mark = Tier.mark_milestone

    async def delete_and_mark(tier: Tier, *arguments: str) -> None:
        await meanwhile(tier, manifest.id)
        await real_mark(tier, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Tier, "mark_milestone", delete_and_mark)
    result = house.tierd("milestone", "--step", "100", "best")
    assert result.exit_code == NotFound.exit_code
    assert "it has just been deleted" in result.stderr
    assert list(house.cold.rglob("milestone-*")) == []


def test_milestone_of_a_signed_checkpoint_needs_the_key(house: House) -> None:
    """Daemons with a key would ignore a marker without a signature."""
    manifest = make_checkpoint(house.hot)
    path = folder_of(house.hot, manifest) / "manifest.json"
    path.write_bytes(Keyring([new_key()]).sign_manifest(manifest).encode())
    result = house.tierd("milestone", "--step", "100", "best")
    assert (result.exit_code, "it is signed, and no key is configured" in result.stderr) == (2, True)
    assert list(house.hot.rglob("milestone-*")) == []


def test_milestone_dry_run_marks_nothing(house: House) -> None:
    make_checkpoint(house.hot, step=100)

    result = house.tierd("milestone", "--step", "latest", "best", "--dry-run")

    assert result.exit_code == 0
    assert result.stdout == "would mark run42 step 100 (generation 1) as best in hot\n"
    assert house.json("ls")[0]["milestone"] is None


def test_milestone_with_a_bad_name_is_exit_2_and_of_an_unknown_step_exit_10(house: House) -> None:
    make_checkpoint(house.hot, step=100)

    assert house.tierd("milestone", "--step", "100", "../best").exit_code == 2
    assert house.tierd("milestone", "--step", "7", "best").exit_code == 10


# ── lifecycle ──


def test_lifecycle_prints_the_plan_and_changes_nothing(house: House) -> None:
    for step in range(1, 6):
        make_checkpoint(house.hot, step=step, sequence=step)
    make_checkpoint(house.cold, step=1)
    make_checkpoint(house.cold, step=2, sequence=2)

    planned = house.json("lifecycle")["planned"]

    copies = [one["step"] for one in planned if one["action"] == "replicate"]
    assert sorted(copies) == [3, 4, 5]
    assert all(one["tier"] == "cold" for one in planned if one["action"] == "replicate")
    assert {one["action"] for one in planned} <= {"replicate", "evict", "expire"}
    assert len(house.json("ls")) == 5
    assert "has a checkpoint of run nope" in house.tierd("lifecycle", "--run", "nope").stderr


def test_lifecycle_explain_prints_why_replicas_are_kept(house: House) -> None:
    make_checkpoint(house.hot, house.cold, step=10, sequence=10, milestones=("best",))

    assert house.json("lifecycle")["planned"] == []
    explained = house.json("lifecycle", "--explain")["planned"]
    reasons = {one["tier"]: (one["action"], one["reason"]) for one in explained}
    assert reasons == {"hot": ("keep", "last 3"), "cold": ("keep", "milestone best")}


def test_lifecycle_forecasts_what_each_tier_will_hold_and_cost(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.config.write_text('[hot]\npath = "hot"\n[[cold]]\nurl = "file://cold"\nprice_per_gib_month = 1e6\n')
    for number in range(3):
        created_at = f"2026-01-01T0{number}:00:00+00:00"
        make_checkpoint(house.hot, house.cold, step=number + 1, sequence=number + 1, created_at=created_at)
    make_checkpoint(house.hot, run="other")

    forecasts = {(one["run"], one["tier"]): one for one in house.json("lifecycle")["forecast"]}
    printed = house.tierd("lifecycle", "--explain", "--run", "run42")

    cold = forecasts["run42", "cold"]
    assert (cold["interval_s"], forecasts["other", "hot"]["interval_s"]) == (3600, None)
    assert cold["steady_cost"] == pytest.approx(3 * 40_000 / (1 << 30) * 1e6)
    assert cold["growth_cost"] == pytest.approx(72 * 40_000 / (1 << 30) * 1e6)
    assert forecasts["run42", "hot"]["steady_cost"] is None
    lines = [line.split() for line in printed.stdout.splitlines()]
    assert lines[-2][:8] == ["hot", "run42", "1", "h", "0", "min", "120", "kB"], "three of 40 kB, in decimal units"
    assert lines[-1][-2:] == ["112", "2,682"], "the steady cost, and what each month adds"


def test_lifecycle_reports_that_an_unreadable_manifest_halts_deletion(house: House) -> None:
    for step in range(1, 6):
        broken = make_checkpoint(house.hot, house.cold, step=step, sequence=step)
    path = folder_of(house.hot, broken) / "manifest.json"
    path.write_bytes(path.read_bytes()[:50])

    result = house.tierd("lifecycle")

    assert "deletion is halted" in result.stderr
    assert "evict" not in result.stdout or "hot" not in result.stdout


# ── what all verbs have in common ──


def test_version_as_text_and_as_json(house: House) -> None:
    assert house.tierd("version").stdout.startswith(f"tierd {tierd.__version__} ")
    assert house.json("version")["version"] == tierd.__version__
    assert house.tierd("--version").stdout == house.tierd("version").stdout


def test_unknown_config_key_is_exit_2_and_named(house: House) -> None:
    house.config.write_text("[hot]\npaht = 'x'\n")

    result = house.tierd("ls")

    assert result.exit_code == 2
    assert "paht" in result.stderr
    assert "hint:" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    "arguments", [["frobnicate"], ["ls", "--frobnicate"], ["restore"], ["--config", "nowhere.toml", "ls"]]
)
def test_wrong_usage_is_exit_2_without_a_traceback(arguments: list[str]) -> None:
    result = CliRunner().invoke(make_app(), arguments)

    assert result.exit_code == 2
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["ls", "--json"], ["ls"]),
        (["--config", "ls", "show", "--step", "5"], ["show"]),
        (["--config=status", "--traceback", "restore", "ls"], ["restore"]),
        (["frobnicate"], list(VERBS)),
        (["--config"], list(VERBS)),
        (["-h"], list(VERBS)),
        ([], list(VERBS)),
    ],
)
def test_called_finds_the_verb_among_the_arguments(arguments: list[str], expected: list[str]) -> None:
    assert called(arguments) == expected


def test_verb_imports_no_other_verb() -> None:
    """Least of all the daemon, which shares its node with a trainer for weeks."""
    code = "import sys; from tierd.cli.app import make_app; make_app(['serve']); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "tierd.cli.serve" in loaded
    assert not {"tierd.cli.restore", "tierd.cli.export", "tierd.daemon", "boto3", "awscrt"} & set(loaded)


def test_bug_is_one_line_and_exit_1_with_a_traceback_on_request(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("one by zero")

    monkeypatch.setattr(options.Settings, "config", broken)

    result = house.tierd("ls")
    assert result.exit_code == 1
    assert result.stderr.startswith("tierd: ZeroDivisionError: one by zero\n")
    assert "TIERD_TRACEBACK=1" in result.stderr
    assert "Traceback" not in result.stderr

    monkeypatch.setenv("TIERD_TRACEBACK", "1")
    assert "Traceback" in house.tierd("ls").stderr


INTERRUPTED_IN_A_CALLBACK = """
import asyncio, os, sys, typer, weakref
import tierd.cli.app, tierd.cli.ls

class Thing: pass

async def ls(context: typer.Context):
    def callback(reference):
        os.kill(os.getpid(), {number})
        for _ in range(1000):  # the handler runs between two bytecodes
            pass
    thing = Thing()
    reference = weakref.ref(thing, callback)
    del thing
    await asyncio.sleep(20)
    return 0

tierd.cli.ls.ls = ls
sys.argv = ["tierd", "ls"]
tierd.cli.app.main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_that_arrives_in_a_callback_of_a_weak_reference_is_not_lost(number: signal.Signals) -> None:
    program = INTERRUPTED_IN_A_CALLBACK.format(number=int(number))
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (128 + number, "")


def test_second_daemon_on_one_directory_is_exit_11(house: House) -> None:
    import fcntl
    import os

    priority = os.getpriority(os.PRIO_PROCESS, 0)
    descriptor = os.open(house.hot / ".tierd.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        result = house.tierd("serve")
    finally:
        os.close(descriptor)

    assert result.exit_code == 11
    assert "held by" in result.stderr
    assert os.getpriority(os.PRIO_PROCESS, 0) == priority, "nothing is changed"


@pytest.mark.parametrize("arguments", [["version", "--config", "tierd.toml"], ["version", "--config=tierd.toml"]])
def test_config_option_may_follow_the_verb(arguments: list[str]) -> None:
    assert config_first(arguments)[-1] == "version"
    assert config_first(["ls", "--", "--config"]) == ["ls", "--", "--config"]
