"""The part of the status that is about folders outside of the tiers, in which a training writes."""

from __future__ import annotations

import msgspec


class WatchReport(msgspec.Struct, kw_only=True):
    """A folder whose checkpoints are adopted. `polled_because`: empty where inotify reports changes. `holder`: the node
    whose daemon adopts; empty: this one. `adopted`: since the daemon's start. `pending`: complete ones that are not
    adopted yet. `waiting`: why others are not complete. `notes`: what else was seen, and what was missed. `problems`:
    what keeps something from being adopted. `nodes`: how many nodes adopt one checkpoint together, each from a folder
    of its own; `node`: which this is."""

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
    """The files of `sidecars.keep`. `behind_s`: how long the oldest change of one waits to be in all tiers.
    `rewritten`: how often the past of a file has changed since the daemon's start, by its name. `problems`: what keeps
    something from being copied."""

    path: str
    run: str
    files: int
    size_bytes: int
    behind_s: float
    rewritten: dict[str, int] = {}
    problems: list[str] = []
