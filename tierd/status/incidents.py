"""Records failures in one place: the log, the failure counter, and the list of recent failures in the status.
A failure that repeats is one entry there, with the number of times.

`honest`: every error that is handled is recorded here, so log, metrics and status agree.
"""

from __future__ import annotations

import collections
import logging
import re
from collections.abc import Callable

from tierd.errors import TierdError
from tierd.format.ids import CheckpointId
from tierd.format.text import printable
from tierd.metrics import Metrics
from tierd.status.report import FailureReport

log = logging.getLogger("tierd")

LISTED_MAX = 20
_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?")
_EACH_COUNTS = ("corrupt", "foreign", "lost", "given_up", "bug")


class Incidents:
    def __init__(self, metrics: Metrics, now: Callable[[], str]) -> None:
        self._metrics = metrics
        self._now = now
        self._recent: collections.deque[FailureReport] = collections.deque(maxlen=LISTED_MAX)

    def record(self, stage: str, error: Exception, checkpoint: CheckpointId | None = None) -> None:
        """`stage`: one of metrics.STAGES."""
        is_expected = isinstance(error, TierdError)
        kind = error.kind if is_expected else "bug"
        self._metrics.failures_total.labels(stage=stage, kind=kind).inc()
        # A message may contain a file name that is not valid UTF-8; the status must still be encodable.
        message = printable(error.message if is_expected else repr(error))
        at = first_at = self._now()
        count = 1
        if (former := self._former(stage, kind, message)) is not None:
            self._recent.remove(former)
            first_at, count = former.first_at, former.count + 1
        self._recent.appendleft(
            FailureReport(
                at=at,
                first_at=first_at,
                count=count,
                run=checkpoint.run if checkpoint else None,
                step=checkpoint.step if checkpoint else None,
                stage=stage,
                kind=kind,
                message=message,
                hint=printable(error.hint) if is_expected else "a bug in tierd: please report it with the log",
            )
        )
        log.warning("%s: %s", stage, error, exc_info=None if is_expected else error)

    def _former(self, stage: str, kind: str, message: str) -> FailureReport | None:
        """The last failure that is a repetition of this one. Of attempts that are made again, only numbers differ, such
        as the step; what was found damaged or lost is another thing each time."""
        text = message if kind in _EACH_COUNTS else _NUMBER.sub("#", message)
        for former in self._recent:
            of_former = former.message if kind in _EACH_COUNTS else _NUMBER.sub("#", former.message)
            if (former.stage, former.kind, of_former) == (stage, kind, text):
                return former
        return None

    def recent(self) -> list[FailureReport]:
        """Newest first."""
        return list(self._recent)
