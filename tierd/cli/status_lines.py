"""The nodes of a run, and the folders that the daemon reads from, as `tierd status` prints them."""

from __future__ import annotations

from collections.abc import Sequence

from tierd.cli.console import duration, print_result, size, table
from tierd.format.node_file import ranks_text
from tierd.format.text import counted
from tierd.status.folder_reports import SidecarReport, WatchReport
from tierd.status.node_reports import NewestPart, NodeReport

ROWS_MAX = 16  # of more nodes, only those that something is wrong with
RANKS_CHARS_MAX = 14


def print_roster(roster: Sequence[NodeReport]) -> None:
    unknown = [node for node in roster if node.problem]
    silent, unserved = [node for node in unknown if node.address], [node for node in unknown if not node.address]
    steps = [node.persisted for node in roster if node.persisted is not None]
    newest = max(steps, key=lambda part: (part.generation, part.step), default=None)
    print_result(f"  nodes      {len(roster) - len(unknown)} of {len(roster)} answer")
    shown = roster
    if len(roster) > ROWS_MAX:
        shown = [node for node in roster if node.problem or node.lacks_part or node.lacks_copy or node.is_here][
            :ROWS_MAX
        ]
    table(
        ["  RANKS", "PERSISTED", "COPY", "COPY LAG", "ADDRESS"],
        [
            [
                f"  {_short(ranks_text(node.ranks))}",
                ("no answer" if node.address else "unknown") if node.problem else _step(node.persisted),
                "" if node.problem else _step(node.copied),
                "" if node.copy_lag_s is None else duration(node.copy_lag_s),
                (node.address or "none") + (" (here)" if node.is_here else ""),
            ]
            for node in shown
        ],
        right=("PERSISTED", "COPY", "COPY LAG"),
    )
    if len(shown) < len(roster):
        print_result(f"  … and {len(roster) - len(shown)} more nodes: --json has all")
    for node in silent[:ROWS_MAX]:
        print_result(f"  NO ANSWER from ranks {_short(ranks_text(node.ranks))}: {node.problem}")
    if unserved:
        ranks = ranks_text(sorted(rank for node in unserved for rank in node.ranks))
        print_result(f"  not asked, because peers.listen is not set there: ranks {_short(ranks)}")
    if newest is not None:
        _print_lacking(f"step {newest.step}", [node for node in roster if node.lacks_part])
        _print_lacking(f"the copy of step {newest.step}", [node for node in roster if node.lacks_copy])


def _print_lacking(what: str, nodes: Sequence[NodeReport]) -> None:
    if nodes:
        print_result(
            f"  {what} is missing on the nodes of ranks {ranks_text(sorted(r for n in nodes for r in n.ranks))}"
        )


def _step(part: NewestPart | None) -> str:
    return "none" if part is None else str(part.step)


def _short(text: str) -> str:
    return text if len(text) <= RANKS_CHARS_MAX else f"{text[: RANKS_CHARS_MAX - 1]}…"


def print_watch(watch: WatchReport) -> None:
    node = f", node {watch.node} of {watch.nodes}" if watch.nodes > 1 else ""
    what = f"watch {watch.path} ({watch.preset}) for {watch.run}{node}"
    parts = [f"{what}: {watch.adopted} adopted since the daemon's start"]
    parts += [] if watch.newest_step is None else [f"the newest of step {watch.newest_step}"]
    parts += [f"{watch.pending} complete and not adopted yet"] if watch.pending else []
    parts += [f"polled: {watch.polled_because}"] if watch.is_there and watch.polled_because else []
    parts += [f"{watch.holder} adopts from it"] if watch.holder else []
    print_result("; ".join(parts))
    for problem in watch.problems:
        print_result(f"  NOT ADOPTED: {problem}")
    for line in (*watch.waiting, *watch.notes):
        print_result(f"  {line}")


def print_sidecars(sidecars: SidecarReport) -> None:
    behind = f"; the oldest change waits {duration(sidecars.behind_s)}" if sidecars.behind_s else ""
    amount = f"{counted(sidecars.files, 'file')}, {size(sidecars.size_bytes)}"
    print_result(f"sidecar files in {sidecars.path} for {sidecars.run}: {amount}{behind}")
    for problem in sidecars.problems:
        print_result(f"  NOT COPIED: {problem}")
