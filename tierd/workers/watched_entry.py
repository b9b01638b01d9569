"""The state of one entry of a watched folder, which the watcher keeps from one pass to the next."""

from __future__ import annotations

from dataclasses import dataclass

from tierd.backoff import backoff_s
from tierd.config.sections import LimitsConfig
from tierd.errors import Full, TierdError, Transient
from tierd.lifecycle.watched import Listed
from tierd.transfer.source_tree import SourceTree


@dataclass(slots=True)
class WatchedEntry:
    """An entry of the folder as of the last pass.

    `key`: a number that changes when anything in the entry changes. `since_s`: when the entry was first seen with this
    key. `is_late`: newer checkpoints had been adopted before it was first seen. `listed`: its files, read once it was
    unchanged for long enough. `is_done`: it was adopted as `step`, or will not be adopted, and `note` says why.
    `was_named`: the preset's file beside the checkpoints has named it. `tries`: how often its adoption has failed;
    `not_before_s`: when it is tried again. `is_refused`: the last failure cannot pass without a person."""

    key: int
    since_s: float
    tree: SourceTree | None
    is_late: bool
    listed: Listed | None = None
    is_done: bool = False
    is_adopted: bool = False
    step: int = 0
    was_named: bool = False
    note: str = ""
    tries: int = 0
    not_before_s: float = 0.0
    is_refused: bool = False

    def failed(self, error: TierdError, now_s: float, limits: LimitsConfig) -> None:
        self.tries += 1
        self.not_before_s = now_s + backoff_s(self.tries, min_s=limits.retry_min_s, max_s=limits.retry_max_s)
        self.is_refused = not isinstance(error, (Transient, Full))
