"""Finds the runs over several nodes that have left this node: parts or copies of them are here, and no trainer.

Their trainers run on other nodes now, or nowhere, so no newer part comes here and replaces the old ones. As soon as a
trainer comes back, its run does not count as left. While the hot tier cannot be listed, no further run counts as left.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial

from tierd.context import DaemonContext
from tierd.errors import TierdError
from tierd.format.ids import HOT, Run
from tierd.lifecycle.everywhere import left_since
from tierd.tiers.store import Store

# After a start of the daemon: longer than a reboot and the scheduler need until trainers attach again.
RESTART_S = 3600.0
_LONG_AGO = datetime.min.replace(tzinfo=UTC)


class LeftRuns:
    def __init__(self, context: DaemonContext) -> None:
        self._context = context
        self._started_s, self._started_at = context.monotonic_s(), context.now()
        self._seen_s: dict[Run, float] = {}  # when a trainer was here last, since the daemon's start
        self._newest: dict[Run, datetime] = {}  # when its newest file here was written, as last listed

    async def look(self) -> None:
        """Enter in the catalog which runs have left, and since when."""
        self.forget_present()
        held = self._held()
        self._seen_s = {run: at_s for run, at_s in self._seen_s.items() if run in held | self._present()}
        self._newest = {run: newest for run, newest in self._newest.items() if run in held}
        found: dict[Run, datetime] = {}
        for run in sorted(held - self._present()) if self._context.config.limits.left_run_grace_s else ():
            if (since := await self._left_since(run)) is not None:
                found[run] = since
        present = self._present()  # a trainer may have come meanwhile
        self._enter({run: since for run, since in found.items() if run not in present})

    def forget_present(self) -> None:
        """Runs that have trainers here now do not count as left any more. No I/O: call it right before a deletion."""
        present = self._present()
        self._seen_s |= dict.fromkeys(present, self._context.monotonic_s())
        self._enter({run: since for run, since in self._context.catalog.left.items() if run not in present})

    def _enter(self, left: dict[Run, datetime]) -> None:
        catalog = self._context.catalog
        if left != catalog.left:
            catalog.left = left
            catalog.changes += 1

    def _present(self) -> set[Run]:
        return {*self._context.memory.runs(), *self._context.watched_nodes}

    def _held(self) -> set[Run]:
        """The runs of which this node has parts, or copies of parts of another node."""
        in_hot = self._context.catalog.in_tier(HOT)
        held = {checkpoint.run for checkpoint, entry in in_hot.items() if entry.part is not None}
        copies = self._context.part_copies
        return held | set(copies.runs() if copies is not None else ())

    async def _left_since(self, run: Run) -> datetime | None:
        """As `lifecycle.everywhere.left_since`. Files are listed only where the answer depends on them."""
        context, seen_s = self._context, self._seen_s.get(run)
        elapsed_s = context.monotonic_s() - self._started_s
        judge = partial(
            left_since,
            # A wall clock that jumps forward makes no file older.
            now=min(context.now(), self._started_at + timedelta(seconds=elapsed_s)),
            absent_s=elapsed_s if seen_s is None else context.monotonic_s() - seen_s,
            was_seen=seen_s is not None,
            restart_s=RESTART_S,
            grace_s=context.config.limits.left_run_grace_s,
        )
        if judge(self._newest.get(run, _LONG_AGO)) is None:
            return None
        newest = context.catalog.left.get(run) or await self._newest_file(run)
        if newest is not None:
            self._newest[run] = newest
        return judge(newest)

    async def _newest_file(self, run: Run) -> datetime | None:
        """When the newest file of the run on this node was written; None if that is not known."""
        copies, written_at_s = self._context.part_copies, list[float]()
        stores: list[Store] = [self._context.hot_store, *([copies.store] if copies is not None else [])]
        try:
            for store in stores:
                written_at_s += [stored.written_at_s for stored in await store.list(f"{run}/")]
            return datetime.fromtimestamp(max(written_at_s), UTC) if written_at_s else None
        except (TierdError, OverflowError, OSError, ValueError):
            return None
