"""What went wrong lately, told in one place: the log, the failure counter, and the list that status shows.

`honest`: whoever answers an error records it here, so that log, metrics and status cannot disagree.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable
from typing import Any

from tierd.errors import TierdError
from tierd.format.ids import CheckpointId
from tierd.metrics import Metrics

log = logging.getLogger("tierd")

LISTED_MAX = 20


class Incidents:
    def __init__(self, metrics: Metrics, now: Callable[[], str]) -> None:
        self._metrics = metrics
        self._now = now
        self._recent: collections.deque[dict[str, Any]] = collections.deque(maxlen=LISTED_MAX)

    def record(self, stage: str, error: Exception, checkpoint: CheckpointId | None = None) -> None:
        """`stage` is the worker or door where it happened: stage, persist, replicate, reap, list, restore, wire."""
        is_ours = isinstance(error, TierdError)
        kind = error.kind if is_ours else "bug"
        self._metrics.failures_total.labels(stage=stage, kind=kind).inc()
        self._recent.appendleft(
            {
                "at": self._now(),
                "run": checkpoint.run if checkpoint else None,
                "step": checkpoint.step if checkpoint else None,
                "stage": stage,
                "kind": kind,
                # A file name may hold bytes that are no text: no answer may fail for that.
                "message": (error.message if is_ours else repr(error)).encode("utf-8", "backslashreplace").decode(),
                "hint": error.hint if is_ours else "a bug in tierd: please report it with the log",
            }
        )
        # A bug comes with its traceback; an error of ours says what there is to say.
        log.warning("%s: %s", stage, error, exc_info=None if is_ours else error)

    def recent(self) -> list[dict[str, Any]]:
        """Newest first."""
        return list(self._recent)
