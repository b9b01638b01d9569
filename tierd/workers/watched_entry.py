"""What a watcher remembers of an entry of its folder from one pass to the next."""

from __future__ import annotations

from dataclasses import dataclass

from tierd.lifecycle.watched import Listed
from tierd.transfer.source_tree import SourceTree


@dataclass(slots=True)
class WatchedEntry:
    """An entry of the folder as of the last pass. `key`: a number that changes when anything in the entry changes.
    `since_s`: when the entry was first seen with this key. `is_late`: newer checkpoints had been adopted before it was
    seen. `listed`: its files, read once it was unchanged for long enough. `is_done`: it was adopted or left alone, as
    of `step`; `note` says why it was left alone. `was_named`: the preset's file beside the checkpoints has named it.
    `tries`, `not_before_s`: how often its adoption failed, and when it is tried again."""

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
