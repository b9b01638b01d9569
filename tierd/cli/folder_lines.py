"""The folders that the daemon reads from, as `tierd status` prints them: watched ones, and that of sidecar files."""

from __future__ import annotations

from tierd.cli.console import duration, print_result, size
from tierd.format.text import counted
from tierd.status.folder_reports import SidecarReport, WatchReport


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
