"""The last snapshot of a run that stops, against a real daemon that is slow."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
import tierd_client
import torch
from tierd_client import SlotsBusy

from tests.support.daemon import Daemon, serving


def hang(daemon: Daemon, seconds: float) -> None:
    """The daemon answers nothing for this time, as on a machine that is very busy."""
    daemon.signal(signal.SIGSTOP)
    threading.Timer(seconds, daemon.signal, [signal.SIGCONT]).start()


@pytest.mark.parametrize("when_busy", ["wait", pytest.param("skip", marks=pytest.mark.long)])
def test_last_snapshot_waits_for_a_slot_as_long_as_the_grace_time_allows(tmp_path: Path, when_busy: str) -> None:
    model = tierd_client.TrainingState(model=torch.nn.Linear(2, 2))
    with serving(tmp_path) as daemon:
        options = {"when_busy": when_busy, "slot_wait_s": 0.1, "stop_grace_s": 30.0}
        client = tierd_client.connect("run", socket=daemon.socket, **options)
        with client:
            client.snapshot(1, model).wait_persisted(30)
            hang(daemon, 1.5)
            client.snapshot(2, model)
            with pytest.raises(SlotsBusy):
                client.snapshot(3, model)
            signal.raise_signal(signal.SIGTERM)
            assert client.stopping
            client.snapshot(4, model)
        assert daemon.newest("hot") == 4
        (run,) = daemon.status()["runs"]
        assert run["state"] == "stopped"
