"""Records failures in one place: the log, the failure counter, and the list of recent failures in the status.

`honest`: every error that is handled is recorded here, so log, metrics and status agree.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable
from typing import Any

from tierd.errors import TierdError
from tierd.format.ids import CheckpointId
from tierd.format.text import printable
from tierd.metrics import Metrics

log = logging.getLogger("tierd")

LISTED_MAX = 20


class Incidents:
    def __init__(self, metrics: Metrics, now: Callable[[], str]) -> None:
        self._metrics = metrics
        self._now = now
        self._recent: collections.deque[dict[str, Any]] = collections.deque(maxlen=LISTED_MAX)

    def record(self, stage: str, error: Exception, checkpoint: CheckpointId | None = None) -> None:
        """`stage`: one of metrics.STAGES."""
        is_expected = isinstance(error, TierdError)
        kind = error.kind if is_expected else "bug"
        self._metrics.failures_total.labels(stage=stage, kind=kind).inc()
        self._recent.appendleft(
            {
                "at": self._now(),
                "run": checkpoint.run if checkpoint else None,
                "step": checkpoint.step if checkpoint else None,
                "stage": stage,
                "kind": kind,
                # A message may contain a file name that is not valid UTF-8; the status must still be encodable.
                "message": printable(error.message if is_expected else repr(error)),
                "hint": printable(error.hint) if is_expected else "a bug in tierd: please report it with the log",
            }
        )
        log.warning("%s: %s", stage, error, exc_info=None if is_expected else error)

    def recent(self) -> list[dict[str, Any]]:
        """Newest first."""
        return list(self._recent)
