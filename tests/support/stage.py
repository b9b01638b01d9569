"""A stage for incidents: a real daemon and trainer with a real Prometheus beside them, and the runbook.

Of each incident: `tierd status` and the alert name it, what docs/RUNBOOK.md says cures it, and no durable checkpoint is
lost.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from tests.support.bucket import Bucket
from tests.support.daemon import Daemon
from tests.support.prometheus import Prometheus, prometheus
from tests.support.runbook import Section
from tests.support.s3 import BUCKET
from tests.support.trainer import Trainer
from tests.support.waiting import wait_until
from tierd.status.alarm_rules import RECENT_S, alarms
from tierd.status.report import StatusReport

NAMED_WITHIN_S = 60.0
KEEP_ALL = "[lifecycle.hot]\nkeep_last = 100\n[lifecycle.cold]\nkeep_last = 100\n"
SOON = "request_timeout_s = 3.0\ncold_list_interval_s = 1.0\n"


class Stage:
    """A daemon, a trainer of the run "run", and what Prometheus says. `digests`: of the durable steps."""

    def __init__(self, daemon: Daemon, trainer: Trainer, observer: Prometheus, width: int) -> None:
        self.daemon = daemon
        self.trainer = trainer
        self._width = width
        self.prometheus = observer
        self.digests: dict[int, str] = {}

    def save(self, *, durable_in: str = "cold") -> int:
        """One more step, durable in that tier."""
        self.trainer.train(1)
        self.trainer.snapshot()
        if durable_in == "hot":
            self.trainer.wait_persisted()
        else:
            self.trainer.wait_replicated(durable_in)
        step = self.trainer.apply(step_of)
        self.digests[step] = self.trainer.digest()
        return step

    def assert_named(self, alert: str, *sentences: str) -> Section:
        """By `tierd status` in text and JSON, by its check, and by Prometheus. The section that it refers to."""
        alarm = wait_until(lambda: named(self.daemon).get(alert), f"the alarm {alert}", NAMED_WITHIN_S)
        # What disappeared is known a moment after the first sign that something did.
        wait_until(lambda: all(each in self.daemon.tierd("status").stdout for each in sentences), str(sentences))
        assert_shown(self.daemon, alarm, *sentences)
        self.prometheus.wait_firing(alert)
        return Section(alarm["runbook"])

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """A command of the runbook, as a person types it."""
        first, *words = shlex.split(command)
        if first == "tierd":
            return self.daemon.tierd(*words)
        return subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=False)

    def reload(self, section: Section) -> None:
        assert self.run(section.command("kill -HUP PID", PID=self.daemon.pid)).returncode == 0

    def edit(self, former: str, new: str) -> None:
        text = self.daemon.config.read_text()
        assert former in text
        self.daemon.config.write_text(text.replace(former, new))

    def assert_cured(self, *remembered: str) -> None:
        """Nothing is wrong any more. `remembered`: alarms about what has happened, which end ten minutes later."""

        lasting: set[str] = set()

        def is_cured() -> bool:
            report = msgspec.convert(self.daemon.status(), StatusReport)
            later = alarms(report, datetime.now(UTC) + timedelta(seconds=RECENT_S))
            lasting.clear()
            lasting.update((named(self.daemon).keys() - set(remembered)) | {alarm.alert for alarm in later})
            return not lasting

        try:
            wait_until(is_cured, "no alarm", NAMED_WITHIN_S)
        except AssertionError:
            raise AssertionError(f"alarms that last: {', '.join(sorted(lasting))}") from None
        if not remembered:
            assert self.daemon.tierd("status", "--check").returncode == 0

    def assert_nothing_lost(self) -> None:
        """Every step that was durable comes back bit for bit."""
        self.trainer.kill()
        with Trainer(seed=2, width=self._width) as reader:
            reader.connect(self.daemon.socket)
            for step, digest in self.digests.items():
                assert reader.restore(resume=step).step == step
                assert reader.digest() == digest, step


def step_of(training: Any) -> int:
    return training.step


def named(daemon: Daemon, *more: str) -> dict[str, Any]:
    """The alarms of `tierd status --json`, by alert."""
    return {alarm["alert"]: alarm for alarm in daemon.json("status", *more)["alarms"]}


def assert_shown(daemon: Daemon, alarm: Any, *sentences: str) -> None:
    shown = daemon.tierd("status")
    assert shown.returncode == 0
    assert f"docs/RUNBOOK.md#{alarm['runbook']}" in shown.stdout
    for sentence in sentences:  # the alarm may come before all of its details
        wait_until(lambda text=sentence: text in daemon.tierd("status").stdout, repr(sentence), NAMED_WITHIN_S)
    checked = daemon.tierd("status", "--check")
    assert checked.returncode == {"warning": 1, "critical": 2}[alarm["severity"]] or "CRITICAL" in checked.stdout
    assert f"docs/RUNBOOK.md#{alarm['runbook']}" in checked.stdout


@contextmanager
def staged(
    root: Path,
    *,
    cold: str = "",
    limits: str = SOON,
    more: str = KEEP_ALL,
    width: int = 16,
    is_empty: bool = False,
    **options: Any,
) -> Generator[Stage]:
    """With one checkpoint in hot and cold, unless `is_empty`. `cold`: further lines of [[cold]]; empty: a directory."""
    cold = cold or 'url = "file://cold"'
    with Daemon(root, cold=cold, more=limits + more, **options) as daemon, Trainer(width=width) as trainer:
        trainer.connect(daemon.socket)
        with prometheus(root / "prometheus", [daemon.url]) as observer:
            stage = Stage(daemon, trainer, observer, width)
            if not is_empty:
                stage.save()
            stage.assert_cured()
            yield stage


def bucket(served: Bucket, prefix: str = "deep") -> str:
    return f'url = "s3://{BUCKET}/{prefix}"\nendpoint_url = "{served.url}"'
