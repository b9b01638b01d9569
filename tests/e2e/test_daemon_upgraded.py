"""A daemon of another version takes over under a running trainer: it serves it, or says what it refuses."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
import tierd_client
import torch
from tierd_client import Client, DaemonUnreachable, Transient

from tests.support.daemon import Daemon, serving
from tests.support.processes import run_tierd
from tests.support.waiting import DEADLINE_S, wait_until
from tierd.format import wire

NEXT, AFTER_NEXT = wire.PROTOCOL_VERSION + 1, wire.PROTOCOL_VERSION + 2
SENTENCE = rf"speaks protocol {wire.PROTOCOL_VERSION}, this daemon .* speaks {NEXT} and {AFTER_NEXT}"


def of_protocol(root: Path, version: int, *, cold: str = "") -> Daemon:
    daemon = Daemon(root, cold=cold)
    daemon.run_with(partial(run_of_protocol, version=version))
    return daemon


def run_of_protocol(arguments: list[str], environ: Mapping[str, str], log: str, *, version: int) -> None:
    """The `tierd` command of another protocol."""
    wire.PROTOCOL_VERSION = version
    wire.PROTOCOLS_SPOKEN = range(version - 1, version + 1)
    run_tierd(arguments, environ, log)


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """A trainer with a durable snapshot of step 1, whose daemon has ended."""
    monkeypatch.setattr("tierd_client.client.CLOSE_TIMEOUT_S", 0.1)
    with serving(tmp_path) as daemon:
        client = tierd_client.connect("run", socket=daemon.socket, slot_wait_s=0.3, stop_grace_s=0.1)
        client.snapshot(1, MODEL).wait_persisted(DEADLINE_S)
        assert daemon.stop() == 0
    yield client
    client._close(wire.Goodbye(), 0.0)


MODEL = tierd_client.TrainingState(model=torch.nn.Linear(2, 2))


def wait_refused(client: Client) -> None:
    wait_until(lambda: client._generation.session.refusal is not None, "the daemon to refuse the trainer")


def test_daemon_of_the_next_protocol_serves_a_trainer_of_the_previous(tmp_path: Path, client: Client) -> None:
    with of_protocol(tmp_path, NEXT) as daemon:
        client.snapshot(2, MODEL).wait_persisted(DEADLINE_S)
        assert daemon.steps("hot") == [1, 2]
        assert client._generation.session.welcome.protocol == wire.PROTOCOL_VERSION
        client.close()


def test_every_snapshot_reports_that_the_daemon_refuses_the_protocol_of_the_trainer(
    tmp_path: Path, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with of_protocol(tmp_path, AFTER_NEXT):
        wait_refused(client)
        caplog.clear()
        shot = client.snapshot(2, MODEL)
        assert "step 2 stays in this process" in caplog.text
        assert "is not connected" not in caplog.text
        for step in (3, 4):
            with pytest.raises(DaemonUnreachable, match=SENTENCE) as caught:
                client.snapshot(step, MODEL)
        assert "serve" not in caught.value.hint
        assert "start the trainer again" in caught.value.hint
        with pytest.raises(DaemonUnreachable, match=SENTENCE):
            shot.wait_persisted(0.1)

    with serving(tmp_path) as daemon:  # the former version again: the snapshot that waited is not lost
        shot.wait_persisted(DEADLINE_S)
        assert daemon.steps("hot") == [1, 2]
        client.close()


@pytest.mark.long
def test_refusal_is_logged_once_and_not_at_each_attempt(
    tmp_path: Path, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with of_protocol(tmp_path, AFTER_NEXT) as daemon:
        wait_refused(client)
        refusals = 'tierd_failures_total{kind="bad_request",stage="wire"}'
        wait_until(lambda: daemon.metric(refusals) >= 3, "further attempts")
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "this daemon" in errors[0].getMessage()


@pytest.mark.parametrize("leave", [Client.stop, Client.close])
def test_last_snapshot_that_a_daemon_of_another_protocol_refuses_is_an_error_at_the_end(
    tmp_path: Path, client: Client, leave: Callable[[Client], None]
) -> None:
    with of_protocol(tmp_path, AFTER_NEXT):
        wait_refused(client)
        client.snapshot(2, MODEL)
        with pytest.raises(DaemonUnreachable, match=f"leave run: the last snapshot is lost.*{SENTENCE}"):
            leave(client)


def test_error_of_the_loop_is_raised_before_that_of_the_last_snapshot(tmp_path: Path, client: Client) -> None:
    with of_protocol(tmp_path, AFTER_NEXT):
        wait_refused(client)
        client.snapshot(2, MODEL)
        client.stop(ZeroDivisionError())  # raises nothing: `with client:` goes on with the error of the loop


def test_durable_last_snapshot_is_no_error_although_the_daemon_refuses_the_protocol(
    tmp_path: Path, client: Client
) -> None:
    with of_protocol(tmp_path, AFTER_NEXT):
        wait_refused(client)
        client.close()


def test_stopped_run_says_why_its_last_snapshot_is_not_durable(tmp_path: Path, client: Client) -> None:
    with of_protocol(tmp_path, AFTER_NEXT):
        wait_refused(client)
        client.start()
        signal.raise_signal(signal.SIGTERM)
        client.due(2)
        assert client.stopping
        client.snapshot(2, MODEL)
        with pytest.raises(Transient, match=f"stop at step 2: the last snapshot was not durable.*{SENTENCE}"):
            client.stop()
