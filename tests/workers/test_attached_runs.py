"""The record of the runs with trainers: what a new daemon says of those that the former one had."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.support.rooms import RUN, Rooms, rooms_at
from tierd.api.gauges import refresh_gauges
from tierd.api.operator import Operator
from tierd.format import layout
from tierd.format.ids import Generation, Rank, Run
from tierd.format.run_state import RunState
from tierd.memory.outcomes import ENDED_RECENT_S
from tierd.status.report import StatusReport
from tierd.workers import attached_runs as module
from tierd.workers.attached_runs import REBOOT_GRACE_S, RECONNECT_GRACE_S, AttachedRuns

NOW = datetime(2026, 6, 1, tzinfo=UTC)


class Life:
    """One daemon after another on the same directories, with one clock."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now_s = 1000.0
        self.wall_s = 0.0
        (root / "hot").mkdir()
        self.file = root / "hot" / layout.ATTACHED_RUNS
        self.rooms: Rooms
        self.runs: AttachedRuns
        self._stack: Any = None

    async def daemon(self) -> None:
        """A new daemon; the former one was killed."""
        await self.end()
        clocks = {"monotonic_s": lambda: self.now_s, "now": lambda: NOW + timedelta(seconds=self.now_s + self.wall_s)}
        self._stack = rooms_at(self.root, clocks=clocks)
        self.rooms = await self._stack.__aenter__()
        self.runs = AttachedRuns(self.rooms.context)
        await self.step()

    async def end(self) -> None:
        if self._stack is not None:
            await self._stack.__aexit__(None, None, None)

    async def step(self, seconds: float = 0.0) -> None:
        self.now_s += seconds
        await self.runs.run_once()

    def attach(self, run: Run = RUN, generation: int = 1, ranks: int = 2) -> None:
        for rank in range(ranks):
            self.rooms.memory.enter(run, Generation(generation), Rank(rank), ranks)

    def leave(self, outcome: str | None, run: Run = RUN, ranks: int = 2) -> None:
        for rank in range(ranks):
            if outcome is not None:
                self.rooms.memory.outcomes.rank_exited(run, Rank(rank), RunState(outcome), "its reason")
            self.rooms.memory.leave(run, Rank(rank), now_s=self.now_s)

    def state(self, run: Run = RUN) -> str | None:
        state = self.rooms.memory.outcomes.state(run)
        return state and state[0]

    def kept(self) -> list[dict[str, Any]]:
        return json.loads(self.file.read_bytes())["runs"]

    async def status(self) -> StatusReport:
        return await Operator(self.rooms.context, self.rooms.listers, pid=1).status()


@pytest.fixture
async def life(tmp_path: Path) -> AsyncIterator[Life]:
    life = Life(tmp_path)
    await life.daemon()
    yield life
    await life.end()


async def test_a_run_whose_trainers_do_not_attach_again_is_lost_after_the_grace_time(life: Life) -> None:
    life.attach()
    await life.step()
    (kept,) = life.kept()
    assert (kept["run"], kept["generation"], kept["ranks"], kept["state"]) == (RUN, 1, "0-1", "running")
    assert kept["since"] == "2026-06-01T00:16:40.000+00:00"
    await life.daemon()
    await life.step(RECONNECT_GRACE_S - 1)
    assert life.state() is None
    await life.step(1)
    reason = (
        "ranks 0-1 did not attach again after a restart of the daemon: killed, stopped by SIGSTOP, refused, or ended "
        "while no daemon ran"
    )
    assert life.rooms.memory.outcomes.state(RUN) == ("lost", reason)


async def test_a_lost_run_has_the_status_alarm_and_metric_of_a_killed_one(life: Life) -> None:
    life.attach()
    await life.rooms.commit("hot", step=100)
    await life.step()
    await life.daemon()
    await life.rooms.look()
    await life.step(RECONNECT_GRACE_S)
    await life.step(5)
    status = await life.status()
    (run,) = status.runs
    assert (run.run, run.state, run.ended_age_s) == (RUN, "lost", 5.0)
    (alarm,) = [alarm for alarm in status.alarms if alarm.alert == "TierdRunEnded"]
    assert alarm.message.startswith("run42 does not train: its trainers are lost: ranks 0-1 did not attach again")
    assert "The same command continues at step 100, from hot" in alarm.message
    refresh_gauges(life.rooms.context, status, lambda run: None)
    assert 'tierd_run_state{run="run42",state="lost"} 1.0' in life.rooms.metrics.render()[0].decode()


async def test_a_lost_run_without_a_checkpoint_has_a_metric_too(life: Life) -> None:
    assert await life.rooms.hot.claim_generation(RUN, Generation(1), life.rooms.context.new_claim())
    life.attach()
    await life.step()
    await life.daemon()
    await life.rooms.look()
    await life.step(RECONNECT_GRACE_S)
    refresh_gauges(life.rooms.context, await life.status(), lambda run: None)
    assert 'tierd_run_state{run="run42",state="lost"} 1.0' in life.rooms.metrics.render()[0].decode()


async def test_after_a_reboot_the_scheduler_has_time_to_start_the_job(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    life.attach()
    await life.step()
    monkeypatch.setattr(module, "_boot", lambda: "another")
    await life.daemon()
    await life.step(REBOOT_GRACE_S - 1)
    assert life.state() is None
    await life.daemon()  # killed in the grace time: it begins again
    await life.step(REBOOT_GRACE_S - 1)
    assert life.state() is None
    await life.step(1)
    assert life.state() == "lost"


@pytest.mark.parametrize("waited_s", [0.0, RECONNECT_GRACE_S])
async def test_trainers_that_attach_again_are_running_and_end_as_they_say(life: Life, waited_s: float) -> None:
    life.attach()
    await life.step()
    await life.daemon()
    await life.step(waited_s)
    life.attach()
    assert life.state() == "running"
    await life.step(RECONNECT_GRACE_S)
    assert [kept["state"] for kept in life.kept()] == ["running"]
    life.leave("finished")
    await life.step()
    assert life.state() == "finished"
    assert life.kept() == []
    await life.daemon()
    await life.step(REBOOT_GRACE_S)
    assert life.state() is None


@pytest.mark.parametrize(
    ("outcome", "state"), [("finished", None), ("stopped", None), ("halted", "halted"), ("failed", "failed")]
)
async def test_after_a_restart_only_a_bad_end_is_named(life: Life, outcome: str, state: str | None) -> None:
    life.attach()
    await life.step()
    life.leave(outcome)
    await life.step()
    await life.daemon()
    assert life.state() == state, "at once"
    if state is not None:
        assert life.rooms.memory.outcomes.state(RUN) == (state, "its reason")


async def test_the_grace_time_begins_when_the_record_was_read(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hot directory that hangs at the start keeps the trainers out too: each claims its generation there."""
    life.attach()
    await life.step()
    read = module._read  # pyright: ignore[reportPrivateUsage]

    def slow(path: Path) -> bytes | None:
        life.now_s += RECONNECT_GRACE_S
        return read(path)

    monkeypatch.setattr(module, "_read", slow)
    await life.daemon()
    assert life.state() is None
    await life.step(RECONNECT_GRACE_S)
    assert life.state() == "lost"


async def test_a_run_that_was_killed_stays_lost_over_restarts_for_a_day_and_no_longer(life: Life) -> None:
    life.attach()
    await life.step()
    await life.daemon()
    await life.step(RECONNECT_GRACE_S)
    for _ in range(3):
        await life.step(ENDED_RECENT_S / 4)
        await life.daemon()
        assert life.state() == "lost"
        (run,) = (await life.status()).runs or [None]
        assert run is None or run.ended_age_s is not None
    await life.step(ENDED_RECENT_S / 4)
    assert life.kept() == []
    await life.daemon()
    await life.step(REBOOT_GRACE_S)
    assert life.state() is None


async def test_a_clock_that_was_set_back_keeps_no_alarm_for_ever(life: Life) -> None:
    life.attach()
    await life.step()
    life.leave(None)
    await life.step()
    assert [kept["state"] for kept in life.kept()] == ["lost"]
    life.wall_s = -1e6
    await life.daemon()
    assert life.state() is None
    assert life.kept() == []


@pytest.mark.parametrize("is_known_before", [True, False])
async def test_a_run_that_another_node_continues_is_not_lost_here(life: Life, is_known_before: bool) -> None:
    life.attach()
    await life.step()
    await life.daemon()

    async def claim_elsewhere() -> None:
        life.rooms.catalog.saw_generation(RUN, Generation(2))
        life.rooms.catalog.claims.saw(RUN, [2], "cold", is_here=False)

    if is_known_before:
        await claim_elsewhere()
    await life.step(RECONNECT_GRACE_S)
    assert life.state() == (None if is_known_before else "lost")
    await claim_elsewhere()
    await life.step()
    assert life.state() is None
    assert life.kept() == []


async def test_a_start_here_that_was_killed_before_it_attached_leaves_the_run_lost(life: Life) -> None:
    life.attach()
    await life.step()
    await life.daemon()
    life.rooms.catalog.saw_generation(RUN, Generation(2))
    life.rooms.catalog.claims.saw(RUN, [2], "hot", is_here=True)
    await life.step(RECONNECT_GRACE_S)
    assert life.state() == "lost"


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"",
        b"\xff\x00",
        b'{"runs": 3}',
        b"[" * 100_000,
        b'{"runs": [{"run": "run42", "generation": "x", "state": "running", "since": ""}]}',
        b" " * ((4 << 20) + 1),
    ],
)
async def test_a_damaged_file_is_left_out_with_one_warning_and_replaced(
    life: Life, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    life.file.write_bytes(content)
    caplog.clear()
    await life.daemon()
    await life.step(RECONNECT_GRACE_S)
    (warning,) = [record for record in caplog.records if "it is ignored" in record.getMessage()]
    assert str(life.file) in warning.getMessage()
    assert life.kept() == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"run": "../evil"},
        {"state": "finished"},
        {"state": "sleeping"},
        {"state": "lost", "since": "yesterday"},
        {"state": "lost", "since": "2126-06-01"},
    ],
)
async def test_a_record_that_makes_no_sense_is_left_out(life: Life, wrong: dict[str, str]) -> None:
    record = {"run": RUN, "generation": 1, "state": "running", "since": "2026-06-01T00:00:00+00:00"}
    life.file.write_text(json.dumps({"runs": [{**record, **wrong}]}))
    await life.daemon()
    await life.step(REBOOT_GRACE_S)
    assert life.rooms.memory.outcomes.restored() == []


async def test_a_link_or_a_folder_in_its_place_is_not_followed(
    life: Life, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "other"
    other.write_bytes(b'{"runs": []}')
    with suppress(FileNotFoundError):
        life.file.unlink()
    life.file.symlink_to(other)
    await life.daemon()
    assert "it is ignored" in caplog.text
    life.attach()
    await life.step()
    assert other.read_bytes() == b'{"runs": []}'
    assert life.file.is_file()
    assert not life.file.is_symlink()


async def test_the_file_is_private_and_no_checkpoint(life: Life) -> None:
    old = os.umask(0)
    life.attach()
    await life.step()
    os.umask(old)
    assert stat.S_IMODE(life.file.stat().st_mode) == 0o600
    assert await life.rooms.hot_store.list() == []
    await life.rooms.look()
    assert life.rooms.catalog.entries() == []


async def test_without_trainers_nothing_is_written(life: Life) -> None:
    await life.step(REBOOT_GRACE_S)
    assert not life.file.exists()


async def test_a_disk_that_takes_nothing_is_named_once_and_the_record_follows(
    life: Life, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", refuse)
        life.attach()
        for _ in range(3):
            assert await life.runs.run_once()
    assert len([record for record in caplog.records if "which runs have trainers" in record.getMessage()]) == 1
    await life.step()
    assert len(life.kept()) == 1


def refuse(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("killed_at", ["fsync", "replace"])
async def test_killed_while_it_writes_leaves_the_former_record_and_ends_by_itself(
    life: Life, monkeypatch: pytest.MonkeyPatch, killed_at: str
) -> None:
    """Here that the run has finished is not written, so it is named as lost: for a day, or until it starts again."""
    life.attach()
    await life.step()
    life.leave("finished")
    with monkeypatch.context() as killed:
        killed.setattr(os, killed_at, refuse)
        await life.runs.run_once()
    assert [kept["state"] for kept in life.kept()] == ["running"]
    await life.daemon()
    await life.step(RECONNECT_GRACE_S)
    assert life.state() == "lost"
    await life.step(ENDED_RECENT_S)
    assert life.kept() == []
    assert not [alarm for alarm in (await life.status()).alarms if alarm.alert == "TierdRunEnded"]


async def test_changes_wake_the_record(life: Life) -> None:
    changes: list[str] = []
    life.rooms.memory.outcomes.on_change = lambda: changes.append("")
    life.attach(ranks=1)
    assert len(changes) == 1
    life.leave("finished", ranks=1)
    assert len(changes) == 2
