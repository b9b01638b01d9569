"""Reports for the status about folders outside the tiers in which a training writes: watched folders and sidecars."""

from __future__ import annotations

import msgspec


class WatchReport(msgspec.Struct, kw_only=True):
    """A folder whose checkpoints are adopted. `polled_because`: empty where inotify reports changes. `holder`: the node
    whose daemon adopts; empty: this one. `adopted`: the number since the daemon's start. `pending`: the number that is
    complete and not adopted yet. `waiting`: why others are not complete. `notes`: other entries, and checkpoints that
    were missed. `problems`: what prevents an adoption. `nodes`: how many nodes adopt one checkpoint together, each from
    a folder of its own; `node`: the number of this one."""

    path: str
    run: str
    preset: str
    is_there: bool
    polled_because: str = ""
    holder: str = ""
    adopted: int = 0
    pending: int = 0
    newest_step: int | None = None
    waiting: list[str] = []
    notes: list[str] = []
    problems: list[str] = []
    nodes: int = 1
    node: int = 0


class SidecarReport(msgspec.Struct, kw_only=True):
    """The files of `sidecars.keep`. `behind_s`: age of the oldest change that a tier may lack. `rewritten`: by file,
    how often its copied bytes have changed since the daemon's start. `problems`: what prevents a copy."""

    path: str
    run: str
    files: int
    size_bytes: int
    behind_s: float
    rewritten: dict[str, int] = {}
    problems: list[str] = []
