"""The daemon is killed, hangs or is absent: training continues, every wait ends, and nothing committed is lost."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tierd_client
import torch
from tierd_client import DaemonUnreachable, SlotsBusy, Transient

from tests.support.daemon import Daemon
from tests.support.trainer import Trainer
from tests.support.waiting import wait_until

LARGE = 400_000  # width: 150 MB of state, which takes long enough to write


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path) as daemon:
        yield daemon


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    with Trainer() as trainer:
        yield trainer


def restart(daemon: Daemon) -> None:
    daemon.kill()
    daemon.start()


def sequences(daemon: Daemon, tier: str = "hot") -> dict[int, int]:
    """Step by sequence number."""
    manifests = [json.loads(path.read_bytes()) for path in (daemon.root / tier).glob("run/*/manifest.json")]
    return {one["sequence"]: one["step"] for one in manifests}


def test_daemon_killed_while_persisting_lists_nothing_partial_and_receives_the_snapshot_again(daemon: Daemon) -> None:
    with Trainer(width=LARGE) as trainer:
        trainer.connect(daemon.socket)
        for step in range(1, 100):
            trainer.train(1)
            trainer.snapshot()
            wait_until(lambda step=step: list(daemon.hot.glob(f"run/{step:012d}-g*")), "the persister to start")
            daemon.signal(signal.SIGSTOP)
            if not (daemon.folder(step) / "manifest.json").exists():
                break
            daemon.signal(signal.SIGCONT)  # too late: try again with the next snapshot
            trainer.wait_persisted()
        daemon.kill()

        assert step not in [row["step"] for row in daemon.json("ls", str(daemon.hot))]
        trainer.train(2)
        daemon.start()
        trainer.wait_persisted()

        assert daemon.newest("hot") == step
        assert daemon.tierd("verify", "--tier", "hot").returncode == 0


def test_daemon_killed_while_idle_does_not_disturb_training(daemon: Daemon, trainer: Trainer) -> None:
    trainer.connect(daemon.socket)
    trainer.train(1)
    trainer.durable()
    restart(daemon)

    for _ in range(3):
        trainer.train(1)
        trainer.durable()

    wait_until(lambda: daemon.steps("hot") == [2, 3, 4], "the oldest to be evicted")
    assert trainer.generation() == 1


def test_new_trainer_restores_from_hot_after_the_daemon_was_killed(daemon: Daemon, trainer: Trainer) -> None:
    trainer.connect(daemon.socket)
    trainer.train(3)
    trainer.durable()
    digest = trainer.digest()
    trainer.kill()
    restart(daemon)

    with Trainer(seed=2) as second:
        assert second.connect(daemon.socket) == 2
        found = second.restore()
        assert (found.step, found.tier) == (3, "hot")
        assert second.digest() == digest


@pytest.mark.usefixtures("checkpoints_examined")
def test_newest_committed_checkpoint_is_restored_after_trainer_and_daemon_were_killed(
    daemon: Daemon, trainer: Trainer
) -> None:
    trainer.connect(daemon.socket)
    trainer.train(3)
    trainer.durable()
    digest = trainer.digest()
    daemon.kill()
    trainer.train(3)
    trainer.snapshot()  # staged, but no daemon accepted it
    trainer.kill()
    daemon.start()

    with Trainer(seed=2) as second:
        second.connect(daemon.socket)
        assert second.restore().step == 3
        assert second.digest() == digest


def test_restarted_daemon_receives_in_order_the_snapshots_staged_while_it_was_dead(
    daemon: Daemon, trainer: Trainer
) -> None:
    trainer.connect(daemon.socket, slots=3, slot_wait_s=0.3)
    trainer.train(1)
    trainer.durable()
    daemon.kill()

    for _ in range(2):
        trainer.train(1)
        trainer.snapshot()
    for _ in range(3):  # no slot is free, and none can become free
        trainer.train(1)
        with pytest.raises(DaemonUnreachable, match="is not connected"):
            trainer.snapshot()

    daemon.start()
    trainer.wait_persisted()
    assert sequences(daemon) == {1: 1, 2: 2, 3: 3}
    trainer.train(1)
    trainer.durable()
    assert daemon.newest("hot") == 7


def test_closing_the_client_waits_until_a_restarted_daemon_has_the_accepted_snapshot(
    daemon: Daemon, trainer: Trainer
) -> None:
    trainer.connect(daemon.socket)
    trainer.train(1)
    trainer.snapshot()
    daemon.kill()
    trainer.begin("close")  # waits until a daemon has accepted the snapshot
    daemon.start()
    trainer.end()

    wait_until(lambda: daemon.steps("hot") == [1], "the snapshot to be committed")


def test_hung_daemon_costs_a_bounded_wait_and_a_typed_error(daemon: Daemon, trainer: Trainer) -> None:
    trainer.connect(daemon.socket, slot_wait_s=0.3)
    trainer.train(1)
    trainer.durable()
    daemon.signal(signal.SIGSTOP)
    trainer.train(1)
    trainer.snapshot()
    with pytest.raises(Transient, match=r"step 2 in hot: not there after 0\.1 s"):
        trainer.wait_persisted(0.1)
    trainer.train(1)
    began = time.monotonic()
    with pytest.raises(SlotsBusy, match=r"no slot free after 0.3 s"):
        trainer.snapshot()
    assert time.monotonic() - began >= 0.3

    daemon.signal(signal.SIGCONT)
    trainer.wait_persisted()
    trainer.train(1)
    trainer.durable()
    assert daemon.steps("hot") == [1, 2, 4]
    assert daemon.metric('tierd_snapshots_total{outcome="skipped",run="run"}') == 1


def test_daemon_that_hangs_for_long_costs_one_short_wait_until_it_answers(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierd_client.slots.slot_pool.SILENCE_S", 0.1)
    slot_wait_s, refused = 5.0, range(3, 8)
    client = tierd_client.connect("run", socket=daemon.socket, slot_wait_s=slot_wait_s)
    model = tierd_client.TrainingState(model=torch.nn.Linear(2, 2))
    client.snapshot(1, model).wait_persisted(30)
    daemon.signal(signal.SIGSTOP)
    shot = client.snapshot(2, model)

    began = time.monotonic()
    for step in refused:
        with pytest.raises(DaemonUnreachable, match="has not answered for more than"):
            client.snapshot(step, model)
    assert time.monotonic() - began < slot_wait_s  # all of them together, and each of them before
    with pytest.raises(DaemonUnreachable, match="has not answered for more than"):
        shot.wait_persisted(0.2)

    daemon.signal(signal.SIGCONT)
    shot.wait_persisted(30)
    client.snapshot(8, model).wait_persisted(30)
    assert daemon.metric("tierd_snapshot_stall_seconds_count") == 3 + len(refused)
    client.close()


def test_absent_daemon_is_reported_with_its_socket(tmp_path: Path) -> None:
    with pytest.raises(DaemonUnreachable, match=r"nowhere.sock: No such file") as caught:
        tierd_client.connect("run", socket=str(tmp_path / "nowhere.sock"))
    assert "tierd serve" in caught.value.hint


def test_restore_fails_when_the_daemon_dies_during_the_request(daemon: Daemon, trainer: Trainer) -> None:
    trainer.connect(daemon.socket)
    daemon.signal(signal.SIGSTOP)
    trainer.begin("restore")
    daemon.kill()

    with pytest.raises(DaemonUnreachable):
        trainer.end()
    with pytest.raises(DaemonUnreachable):
        trainer.restore()


def test_daemon_persists_sealed_snapshots_before_sigterm_ends_it(daemon: Daemon) -> None:
    with Trainer(width=LARGE) as trainer:
        trainer.connect(daemon.socket)
        trainer.train(1)
        trainer.snapshot()
        wait_until(lambda: daemon.status()["slots"]["free"] < 2, "the snapshot to be accepted")
        assert daemon.stop() == 0

    assert [row["step"] for row in daemon.json("ls", str(daemon.hot))] == [1]
