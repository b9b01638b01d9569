"""The client against a real daemon: what it refuses, which checkpoint it restores, and that nothing leaks."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tierd_client
import torch
from tierd_client import (
    BadConfig,
    BadRequest,
    Client,
    Corrupt,
    Full,
    Mismatch,
    NotFound,
    Stale,
    TierdError,
    TrainingState,
    Unsupported,
)
from tierd_client.session import DaemonSession
from tierd_client.slots.slot_pool import SlotPool
from tierd_client.snapshot.staging import Stager

from tests.support.daemon import Daemon, serving
from tests.support.processes import ENVIRONMENT
from tests.support.small_disk import small_disk
from tests.support.waiting import DEADLINE_S, wait_until


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Shared by the tests that leave it intact: each uses a run of its own."""
    with Daemon(tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    return re.sub(r"\W+", "-", request.node.name)[:100]


class Lab:
    """A training in this process, with a client of the shared daemon."""

    def __init__(self, daemon: Daemon, run: str, *, width: int = 4, **options: Any) -> None:
        self.daemon = daemon
        self.run = run
        self.model = torch.nn.Linear(width, width)
        self.extra: dict[str, Any] = {"epoch": 0}
        self.state = TrainingState(model=self.model, extra=self.extra)
        self.client = tierd_client.connect(run, socket=daemon.socket, **options)

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def set(self, step: int) -> None:
        """The state of that step."""
        with torch.no_grad():
            self.model.weight.fill_(step)
        self.extra["epoch"] = step

    def durable(self, step: int, **more: Any) -> None:
        self.set(step)
        self.client.snapshot(step, self.state, **more).wait_persisted(DEADLINE_S)

    def restore(self, **which: Any) -> tuple[int, int, str]:
        """(step, generation, tier), and the state is checked to be that step's."""
        self.set(-1)
        found = self.client.restore(self.state, **which)
        assert found is not None
        assert bool((self.model.weight == found.step).all())
        assert self.extra["epoch"] == found.step
        return found.step, found.generation, found.tier

    def rows(self) -> list[Any]:
        return self.daemon.get(f"/api/v1/checkpoints?run={self.run}")


@pytest.fixture
def lab(daemon: Daemon, run: str) -> Iterator[Lab]:
    with Lab(daemon, run) as lab:
        yield lab


# ── bad input ──


@pytest.mark.parametrize("name", ["", "a/b", "../a", ".hidden", "a" * 129, "é"])
def test_run_name_that_is_not_a_path_component_is_refused(daemon: Daemon, name: str) -> None:
    with pytest.raises(BadRequest, match="cannot name a run"):
        tierd_client.connect(name, socket=daemon.socket)


@pytest.mark.parametrize("options", [{"slots": 1}, {"slots": 17}, {"when_busy": "panic"}, {"rank": 1}, {"rank": -1}])
def test_invalid_options_are_refused_before_connecting(daemon: Daemon, run: str, options: dict[str, Any]) -> None:
    with pytest.raises(BadConfig, match="connect"):
        tierd_client.connect(run, socket=daemon.socket, **options)


def test_unsupported_value_is_named_by_its_path_and_the_next_snapshot_works(lab: Lab) -> None:
    lab.extra["callbacks"] = [{"on_end": lambda: None}]
    with pytest.raises(Unsupported, match=r"extra\.callbacks.*on_end"):
        lab.client.snapshot(1, lab.state)

    del lab.extra["callbacks"]
    lab.durable(1)
    assert lab.daemon.metric(f'tierd_snapshots_total{{outcome="failed",run="{lab.run}"}}') == 1


def test_unsupported_state_raises_in_snapshot_and_not_in_due(lab: Lab) -> None:
    lab.extra["file"] = sys.stdout
    assert lab.client.restore(lab.state) is None
    assert lab.client.due(100)
    with pytest.raises(Unsupported):
        lab.client.snapshot(1, lab.state)


@pytest.mark.parametrize(
    ("step", "more", "said"),
    [
        (5, {"milestone": "best"}, "step 5 was taken before it"),
        (4, {}, "step 5 was taken before it"),
        (-1, {}, "step -1 is not between"),
        (10**12, {}, "is not between"),
        (6, {"milestone": "../x"}, "cannot name a milestone"),
        (6, {"milestone": ""}, "cannot name a milestone"),
        (6, {"metrics": {"loss": "low"}}, "metrics 'loss'"),
        (6, {"metrics": {"loss": 10**400}}, "metrics 'loss'"),
        (7.0, {}, "step 7.0: a step is a whole number"),
        ("7", {}, "step '7'"),
        (True, {}, "step True"),
        (torch.ones(2), {}, "a step is a whole number"),
        (6, {"metrics": {"loss": None, 3: 1.0}}, "metrics 'loss', 3"),
        (6, {"metrics": {"loss": torch.zeros(2)}}, "metrics 'loss'"),
        (6, {"metrics": {"\ud800": 1.0}}, "metrics"),
        (6, {"metrics": {f"é{n}" * 20: 1.0 for n in range(2000)}}, "more than 32768"),
    ],
)
def test_snapshot_with_invalid_arguments_changes_nothing(lab: Lab, step: int, more: dict[str, Any], said: str) -> None:
    lab.durable(5)
    with pytest.raises(BadRequest, match=said):
        lab.client.snapshot(step, lab.state, **more)
    lab.durable(6, metrics={"loss": 1.5})
    assert [row["step"] for row in lab.rows()] == [6, 5]


def test_second_snapshot_of_a_step_is_the_first_one(lab: Lab) -> None:
    lab.durable(5)
    shot = lab.client.snapshot(6, lab.state)
    assert lab.client.snapshot(6, lab.state) is shot
    shot.wait_persisted(30)
    assert [row["step"] for row in lab.rows()] == [6, 5]


def test_metrics_that_are_not_finite_are_restored_exactly(lab: Lab) -> None:
    lab.durable(1, metrics={"a": math.nan, "b": -math.inf, "c": torch.tensor(0.5), "d": True, "e": 1e308})
    found = lab.client.restore(lab.state)
    assert found is not None
    assert math.isnan(found.metrics["a"])
    assert {name: found.metrics[name] for name in "bcde"} == {"b": -math.inf, "c": 0.5, "d": 1.0, "e": 1e308}


def test_mismatched_architecture_is_refused_with_a_list_and_the_model_is_unchanged(lab: Lab) -> None:
    lab.durable(1)
    other = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 4))
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(Mismatch, match=r"(?s)nothing was changed.*model\.0\.weight: not in the checkpoint") as caught:
        lab.client.restore(TrainingState(model=other))
    assert "model.weight" in caught.value.message
    assert all(torch.equal(before[name], tensor) for name, tensor in other.state_dict().items())


def test_closed_client_raises_bad_request(lab: Lab) -> None:
    shot = lab.client.snapshot(1, lab.state)
    lab.client.close()
    lab.client.close()
    with pytest.raises(BadRequest, match="its client was closed"):
        lab.client.snapshot(2, lab.state)
    with pytest.raises(BadRequest, match="its client was closed"):
        lab.client.restore(lab.state)
    with contextlib.suppress(BadRequest):  # it may have become durable before the close
        shot.wait_persisted(0.1)


# ── which checkpoint ──


def test_restore_of_an_empty_run_returns_none_and_of_a_named_checkpoint_raises_not_found(lab: Lab) -> None:
    assert lab.client.restore(lab.state) is None
    for which in ({"resume": 1}, {"generation": 1}, {"milestone": "best"}, {"tier": "hot"}, {"tier": "memory"}):
        with pytest.raises(NotFound):
            lab.client.restore(lab.state, **which)
    with pytest.raises(TierdError, match="nowhere"):
        lab.client.restore(lab.state, tier="nowhere")


def test_checkpoint_is_chosen_by_step_milestone_generation_or_tier(lab: Lab) -> None:
    for step in (1, 2, 3):
        lab.durable(step, milestone="best" if step == 2 else None)
    wait_until(lambda: all("cold" in row["tiers"] for row in lab.rows()), "the copies")

    assert lab.restore() == (3, 1, "memory")
    assert lab.restore(resume=1) == (1, 1, "hot")
    assert lab.restore(milestone="best") == (2, 1, "hot")
    assert lab.restore(generation=1) == (3, 1, "memory")
    assert lab.restore(tier="hot") == (3, 1, "hot")
    assert lab.restore(tier="cold") == (3, 1, "cold")
    assert lab.restore(resume=1, tier="cold") == (1, 1, "cold")
    with pytest.raises(NotFound, match="step 1"):
        lab.client.restore(lab.state, resume=1, tier="memory")


def test_restore_after_a_snapshot_begins_a_generation_whose_steps_are_the_newest(lab: Lab) -> None:
    for step in (1, 2, 3):
        lab.durable(step)
    assert lab.restore(resume=1) == (1, 1, "hot")
    assert lab.client.generation == 2
    lab.durable(2)

    assert [(row["step"], row["generation"]) for row in lab.rows()][:2] == [(2, 2), (3, 1)]
    shown = lab.daemon.get(f"/api/v1/checkpoints/{lab.run}/000000000002-g0002")["manifest"]
    assert shown["parent"] == {"run": lab.run, "step": 1, "generation": 1}
    assert lab.restore()[:2] == (2, 2)
    assert lab.restore(resume=3)[:2] == (3, 1)


def test_restore_does_not_lose_the_snapshot_that_was_just_taken(lab: Lab) -> None:
    lab.durable(1)
    shot = lab.client.snapshot(2, lab.state)
    lab.client.restore(lab.state, resume=1)
    shot.wait_persisted(DEADLINE_S)
    assert {row["step"] for row in lab.rows()} == {1, 2}


# ── fencing ──


def test_older_trainer_gets_stale_and_shares_no_slots_with_the_newer(daemon: Daemon, run: str) -> None:
    with Lab(daemon, run) as older, contextlib.ExitStack() as stack:
        older.durable(1)
        older.set(2)
        shot = older.client.snapshot(2, older.state)
        newer = stack.enter_context(Lab(daemon, run))
        assert newer.client.generation == 2

        steps = itertools.count(3)  # a step that was taken is not taken again
        with pytest.raises(Stale, match="generation 2 has taken over"):
            wait_until(lambda: older.client.snapshot(next(steps), older.state) and False, "Stale")
        with pytest.raises(Stale):
            older.client.restore(older.state)
        with contextlib.suppress(Stale):  # it may have become durable before
            shot.wait_persisted(DEADLINE_S)
        assert newer.restore()[0] == 2, "a snapshot that was sealed before stays restorable"
        newer.durable(3)
        assert not _memory(newer.client) & _memory(older.client)
        assert [(row["step"], row["generation"]) for row in newer.rows()][:1] == [(3, 2)]


def _memory(client: Client) -> set[int]:
    """The inodes of the slots."""
    pool = client._generation.pool
    return {os.fstat(pool.slot(index).fd).st_ino for index in range(len(pool))}


# ── damage ──


@pytest.fixture
def own_daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path) as daemon:
        yield daemon


def replicate_three(daemon: Daemon) -> None:
    with Lab(daemon, "run") as lab:
        for step in (1, 2, 3):
            lab.durable(step)
        wait_until(lambda: daemon.steps("cold") == [1, 2, 3], "the copies")
    daemon.kill()  # and the memory tier with it


def flip_last_bit(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def test_flipped_bit_in_the_newest_hot_shard_is_counted_and_the_cold_replica_restored(
    own_daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    replicate_three(own_daemon)
    flip_last_bit(own_daemon.folder(3) / "rank-00000-of-00001.safetensors")
    own_daemon.start()

    with Lab(own_daemon, "run") as lab:
        assert lab.restore() == (3, 1, "cold")
        assert own_daemon.metric('tierd_verify_failures_total{tier="hot"}') == 1
        assert "trying the next replica" in caplog.text


def test_older_checkpoint_is_restored_when_every_replica_of_the_newest_is_damaged(own_daemon: Daemon) -> None:
    replicate_three(own_daemon)
    for tier in ("hot", "cold"):
        flip_last_bit(own_daemon.folder(3, tier=tier) / "rank-00000-of-00001.safetensors")
    own_daemon.start()

    with Lab(own_daemon, "run") as lab:
        assert lab.restore() == (2, 1, "hot")
        with pytest.raises(Corrupt):
            lab.client.restore(lab.state, resume=3)


@pytest.mark.parametrize("tiers", [["hot"], ["hot", "cold"]])
def test_unreadable_manifest_is_passed_over_and_reported(
    own_daemon: Daemon, tiers: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    replicate_three(own_daemon)
    for tier in tiers:
        manifest = own_daemon.folder(3, tier=tier) / "manifest.json"
        raw = manifest.read_bytes()
        manifest.write_bytes(raw[: len(raw) // 2])
    own_daemon.start()

    with Lab(own_daemon, "run") as lab:
        assert lab.restore() == ((3, 1, "cold") if tiers == ["hot"] else (2, 1, "hot"))
        assert "a replica was passed over" in caplog.text
        assert any("unreadable_manifest" in reason for reason in own_daemon.status()["halted"])
        lab.durable(4)


def test_full_disk_fails_the_wait_and_the_snapshot_is_persisted_once_there_is_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "hot", size_mib=4) as small:
        filler = small / "filler"
        with serving(tmp_path) as daemon, Lab(daemon, "run", width=512) as lab:  # a megabyte
            lab.durable(1)
            filler.write_bytes(bytes(2 << 20))
            shot = lab.client.snapshot(2, lab.state)
            with pytest.raises(Full):
                shot.wait_persisted(0.5)
            assert any(failure["kind"] == "full" for failure in daemon.status()["failures"])
            assert [row["step"] for row in lab.rows() if "hot" in row["tiers"]] == [1]

            filler.unlink()
            shot.wait_persisted(DEADLINE_S)
            lab.durable(3)


def test_wait_ends_when_a_snapshot_is_durable_in_cold_because_hot_is_full(tmp_path: Path) -> None:
    with small_disk(tmp_path / "hot", size_mib=4) as small:
        (small / "filler").write_bytes(bytes(7 << 19))
        with Daemon(tmp_path) as daemon, Lab(daemon, "run", width=512) as lab:  # a megabyte
            for step in (1, 2, 3, 4):
                lab.durable(step)
            lab.set(5)
            shot = lab.client.snapshot(5, lab.state)
            shot.wait_replicated("cold", DEADLINE_S)
            assert shot.is_persisted
            with pytest.raises(TierdError):
                shot.wait_replicated("hot", 0.1)
            assert {tier for row in lab.rows() for tier in row["tiers"]} == {"memory", "cold"}
            assert lab.restore() == (5, 1, "memory")


# ── interruptions ──


def test_interrupted_snapshot_is_lost_and_its_slot_is_free_again(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.durable(1)
    for number, (owner, method) in enumerate(((SlotPool, "take"), (Stager, "begin")), start=2):
        real = getattr(owner, method)

        def interrupted(*arguments: Any, real: Any = real, **options: Any) -> Any:
            real(*arguments, **options)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(owner, method, interrupted)
            for _ in range(3):
                with pytest.raises(KeyboardInterrupt):
                    lab.client.snapshot(number * 10, lab.state)
        lab.durable(number * 10 + 1)
    assert lab.daemon.status()["slots"]["filling"] == 0


def test_interrupt_while_a_snapshot_is_sent_does_not_lose_it(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.durable(1)
    send = DaemonSession.send

    def interrupted(session: DaemonSession, message: Any, descriptors: Any = ()) -> None:
        if type(message).__name__ == "Sealed":
            raise KeyboardInterrupt
        send(session, message, descriptors)

    with monkeypatch.context() as patch:
        patch.setattr(DaemonSession, "send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lab.client.snapshot(2, lab.state)
    lab.durable(3)
    assert [row["step"] for row in lab.rows()] == [3, 2, 1]


def test_forked_child_can_neither_use_nor_close_the_client(lab: Lab) -> None:
    lab.durable(1)
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            lab.client.close()
            try:
                lab.client.snapshot(2, lab.state)
            except BadRequest as error:
                code = 0 if "belongs to process" in error.message else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    lab.durable(3)


def test_script_that_ends_without_close_hands_its_last_snapshot_over(daemon: Daemon, run: str) -> None:
    script = f"""
import tierd_client, torch
client = tierd_client.connect({run!r}, socket={daemon.socket!r})
client.snapshot(7, tierd_client.TrainingState(model=torch.nn.Linear(2, 2)))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    wait_until(lambda: daemon.get(f"/api/v1/checkpoints?run={run}"), "the checkpoint")


def test_sigterm_is_handled_inside_with_and_the_former_handler_restored_afterwards(daemon: Daemon, run: str) -> None:
    former = signal.getsignal(signal.SIGTERM)
    with tierd_client.connect(run, socket=daemon.socket) as client:
        assert not client.stopping
        signal.raise_signal(signal.SIGTERM)
        assert client.stopping
    assert signal.getsignal(signal.SIGTERM) is former


# ── leaks ──


@pytest.mark.long
@pytest.mark.parametrize("snapshots", [15, 50])
def test_hundred_snapshots_and_restores_leak_no_descriptors_and_no_memory(lab: Lab, snapshots: int) -> None:
    """Twice that many."""
    daemon = lab.daemon

    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{daemon.pid}/fd"))

    def work(begin: int) -> None:
        for step in range(begin, begin + snapshots):
            lab.durable(step)
        for tier in ("memory", "hot", "auto"):
            lab.restore(tier=tier)
        with contextlib.suppress(Mismatch):
            lab.client.restore(TrainingState(model=torch.nn.Linear(3, 3)))
        gc.collect()

    work(1)
    before = count()
    resident = [_resident_bytes(pid) for pid in (daemon.pid, os.getpid())]
    work(1000)
    wait_until(
        lambda: all(now <= was + 2 for now, was in zip(count(), before, strict=True)), "descriptors to be closed"
    )
    for pid, was in zip((daemon.pid, os.getpid()), resident, strict=True):
        assert _resident_bytes(pid) - was < 16 << 20


def test_repeated_connect_and_close_leaks_nothing(daemon: Daemon, run: str) -> None:
    def once() -> None:
        with Lab(daemon, run) as lab:
            lab.client.restore(lab.state)
            lab.durable(1)

    once()
    gc.collect()
    before = len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{daemon.pid}/fd")), threading.active_count()
    for _ in range(10):
        once()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before[0]
    assert threading.active_count() <= before[2]
    wait_until(lambda: len(os.listdir(f"/proc/{daemon.pid}/fd")) <= before[1] + 6, "the daemon to close them")


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
