"""A real training beside a real daemon, which throttles its writes while steps are slower."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tierd_client
import torch
from tierd_client import BadRequest, Client, DictState

from tests.support.daemon import Daemon, serving
from tests.support.waiting import DEADLINE_S, wait_until
from tests.support.wire_peer import Peer
from tierd.format import wire

RUN = "run42"
LIMIT = 'tierd_write_limit_bytes_per_second{tier="cold"}'
SLOWDOWN = f'tierd_step_slowdown_ratio{{run="{RUN}"}}'
# With this cap the upload lasts longer than the test.
COLD = """
    [[cold]]
    url = "file://cold"
    max_upload_mib_s = 0.25
    """
USUAL_S, SLOW_S = 0.02, 0.2


class Training:
    """Steps of `step_s` seconds in a thread."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.step_s = USUAL_S
        self.wants_snapshot = threading.Event()
        self.state = DictState({"weights": torch.zeros(12 << 20)})
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._train)

    def __enter__(self) -> Training:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _train(self) -> None:
        step = 0
        while not self._is_over.is_set():
            step += 1
            time.sleep(self.step_s)
            if self.client.due(step) or self.wants_snapshot.is_set():
                self.wants_snapshot.clear()
                self.client.snapshot(step, self.state)

    def snapshot(self, daemon: Daemon, count: int) -> None:
        """Takes a snapshot and waits until the hot tier has `count`."""
        self.wants_snapshot.set()
        wait_until(lambda: len(daemon.steps("hot", RUN)) == count, f"for snapshot {count}")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with serving(tmp_path, more=COLD) as found:
        yield found


def test_daemon_runs_at_a_lower_cpu_priority_than_training(tmp_path: Path) -> None:
    daemon = serving(tmp_path)
    del daemon._environ["TIERD_DAEMON_NICE"]  # of the other tests
    with daemon:
        threads = [int(one) for one in os.listdir(f"/proc/{daemon.pid}/task")]
        least = max(10, os.getpriority(os.PRIO_PROCESS, 0))
        assert {os.getpriority(os.PRIO_PROCESS, one) for one in threads} == {least}


@pytest.mark.long
def test_slower_steps_throttle_an_upload_until_somebody_waits_for_it(daemon: Daemon) -> None:
    client = tierd_client.connect(RUN, socket=str(daemon.socket), every_steps=0, signals={})
    with Training(client) as training:
        wait_until(lambda: not math.isnan(daemon.metric(SLOWDOWN)), "the usual step time to be known")
        training.snapshot(daemon, 1)
        training.snapshot(daemon, 2)  # now the daemon knows their interval
        training.step_s = SLOW_S
        wait_until(lambda: daemon.metric(SLOWDOWN) > 1, "the daemon to know that steps are slower")
        wait_until(lambda: daemon.metric(LIMIT) > 0, "the upload to be throttled")
        with Peer(daemon.socket) as operator:
            operator.greet(RUN, rank=None)
            operator.send(wire.Request(request=1, kind="stop", milestone=None))
            operator.hear(wire.Agreed)
            assert math.isnan(daemon.metric(LIMIT)), "not while an operator waits"
            assert client.stopping
        wait_until(lambda: daemon.metric(LIMIT) > 0, "the throttle to return")
    shot = client.snapshot(1 << 20, training.state)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(shot.wait_replicated)
        wait_until(lambda: math.isnan(daemon.metric(LIMIT)), "the throttle to end because the trainer waits")
        assert not waiting.done()
        client.close()
        with pytest.raises(BadRequest, match="closed"):
            waiting.result(DEADLINE_S)
