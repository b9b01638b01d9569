"""Measures the lag of the event loop, and writes the stacks of all threads to the log while a call blocks the loop.

A task on the loop runs every quarter of a second: it observes the lag and feeds systemd's watchdog. A blocked loop
feeds nothing, so systemd ends a daemon that stays blocked. A thread notices that the task does not run and dumps the
stacks, once per stall; when the loop runs again, the stall is recorded as a failure.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

from tierd.errors import Transient
from tierd.metrics import Metrics
from tierd.status.incidents import Incidents
from tierd.systemd import Systemd

log = logging.getLogger("tierd")

INTERVAL_S = 0.25
STUCK_S = 5.0  # trainers take a daemon for hung after 10 s without an answer


class LoopWatchdog:
    def __init__(self, metrics: Metrics, incidents: Incidents, systemd: Systemd) -> None:
        self._metrics = metrics
        self._incidents = incidents
        self._systemd = systemd
        self._beats = 0
        self._stuck_at = -1  # the beat after which the loop did not run

    async def run(self) -> None:
        """Observe the lag and feed systemd, until cancelled."""
        fed_s = -float("inf")
        with self._watching():
            while True:
                started_s = time.monotonic()
                if started_s - fed_s >= self._systemd.watchdog_s / 2 > 0:
                    self._systemd.notify("WATCHDOG=1")
                    fed_s = started_s
                await asyncio.sleep(INTERVAL_S)
                lag_s = max(time.monotonic() - started_s - INTERVAL_S, 0.0)
                self._metrics.event_loop_lag_seconds.observe(lag_s)
                was_stuck = self._stuck_at == self._beats
                self._beats += 1
                if was_stuck:
                    hint = "the log has the stacks of all threads; docs/RUNBOOK.md#loop-stuck"
                    error = Transient(f"run the event loop: a call blocked it for {lag_s:.1f} s", hint=hint)
                    self._incidents.record("loop", error)

    @contextmanager
    def _watching(self) -> Generator[None]:
        ended = threading.Event()
        thread = threading.Thread(target=self._watch, args=(ended,), name="tierd-loop-watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()

    def _watch(self, ended: threading.Event) -> None:
        """Counts its own rounds, not seconds: a stopped process or a suspended machine is no blocked loop."""
        rounds, beats = 0, self._beats
        while not ended.wait(INTERVAL_S):
            rounds = rounds + 1 if self._beats == beats else 0
            beats = self._beats
            if rounds * INTERVAL_S >= STUCK_S and self._stuck_at != beats:
                self._stuck_at = beats
                log.error("the event loop has not run for %.1f s; stacks of all threads follow", rounds * INTERVAL_S)
                faulthandler.dump_traceback(sys.stderr, all_threads=True)
