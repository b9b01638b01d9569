"""Adopts the checkpoints that a framework writes into a folder, when they are complete. One worker for each [[watch]].

A pass lists the folder and scans the checkpoints that may be new. A checkpoint is adopted when its preset says that it
is complete and nothing in it has changed for quiet_s. It is not adopted if anything in it changes while it is copied.
With inotify a change starts a pass; without inotify the folder is polled. A problem with one checkpoint is reported in
the status and the log, and does not stop the adoption of others.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tierd.catalog.entry import NOT_LISTED_YET
from tierd.config.sections import WatchConfig
from tierd.context import DaemonContext
from tierd.errors import Full, NotFound, TargetNotEmpty, TierdError, TierUnreachable, Transient
from tierd.format.ids import Run, check_run
from tierd.format.text import printable
from tierd.lifecycle.watched import Listed, Verdicts, beside_name, is_name, judge, misfit, preset_of
from tierd.status.folder_reports import WatchReport
from tierd.tiers.pool import ThreadPool
from tierd.transfer.adoption import THREADS, adopted_id, was_saved_again
from tierd.transfer.atomic_output import clear_abandoned
from tierd.transfer.source_removal import remove_leftovers, remove_source
from tierd.transfer.source_tree import SourceTree
from tierd.transfer.watched_folder import Names, listed, names, read_beside, scan_entry, tree_key
from tierd.workers.adopter import Adopter, AnnouncedPart
from tierd.workers.announcements import Announcements
from tierd.workers.folder_events import EventSource
from tierd.workers.hot_space import MakeRoom
from tierd.workers.stored_checkpoints import StoredCheckpoints
from tierd.workers.watch_claim import WatchClaim
from tierd.workers.watch_state import ScanOrder, WatchedEntry, WatchFindings, lines, shown

log = logging.getLogger("tierd")

SLOW_INTERVAL_S = 60.0  # between passes with inotify, for changes that it has not reported
WRITTEN_SLACK_S = 1.0  # between the clock of this machine and the times of files that were just written


class Watcher:
    name = "watch"
    is_urgent = True

    def __init__(
        self, context: DaemonContext, watch: WatchConfig, make_room: MakeRoom, *, on_change: Callable[[], None]
    ) -> None:
        """`on_change`: called on the event loop when a pass should start."""
        self._context, self._watch = context, watch
        self.run: Run = check_run(watch.run)
        self.claim = WatchClaim(context, self.run, watch.path, is_node_0=watch.nodes > 1)
        self.interval_s = self._poll_s = context.config.limits.reconcile_interval_s
        self._path, self._preset = Path(watch.path), preset_of(watch)
        timeout_s = context.config.limits.directory_timeout_s
        self._pool = ThreadPool(THREADS, "tierd-watch", where=watch.path, timeout_s=timeout_s)
        self._adopter = Adopter(context, self._pool, make_room)
        self._events = EventSource(self._path, self._pool, on_change, context.monotonic_s)
        self._on_change, self._passed_s = on_change, -math.inf  # when the last pass that has ended began
        self._was_there: bool | None = None
        self._seen: dict[str, WatchedEntry] = {}
        self._complete_s: dict[str, float] = {}  # not adopted yet: since when each is complete
        self._findings = WatchFindings(context, self.run, self._path)
        self._verdicts = Verdicts()
        self._changing: set[str] = set()  # in the last pass
        self._parts = Announcements(context, watch, self.claim) if watch.nodes > 1 else None
        self._stored = StoredCheckpoints(context, watch, apart_s=self._parts.apart_s if self._parts else 0.0)
        self._holder, self._has_cleared = "", False
        self._adopted, self._newest = 0, -1
        self._order = ScanOrder()
        self._listed_s: float | None = None  # when the folder was listed in the last pass
        context.metrics.begin_watch(self.run)

    # ── one pass ──

    async def run_once(self) -> bool:
        """Returns True even if a checkpoint could not be adopted, because each one has its own backoff."""
        started_s = self._context.monotonic_s()
        self._findings.begin_pass()
        if self._was_there and not self._in_progress():
            self._stored.settled()
        if not self._has_cleared:
            await self._clear_leftovers()
        try:
            await self._events.begin_pass()
            listing = await self._pool.query(names, self._path)
            self._events.follow(listing.key)
            await self._scan(listing)
        except TierdError as error:
            await self._forget_folder(error)
        else:
            self._was_there = True
            await self._adopt_complete()
            if self._watch.source == "remove":
                await self._remove_sources()
        self._findings.record()
        self._set_lag()
        self.interval_s, self._passed_s = self._next_s(), started_s
        return True

    def unfinished(self, since_s: float) -> list[str]:
        """The checkpoints that were written before `since_s`, are or will be complete, and are not adopted yet."""
        if self._passed_s < since_s:
            self._on_change()
            return [str(self._path)]
        return [] if self._holder else sorted(self._in_progress())

    def _in_progress(self) -> set[str]:
        """The checkpoints that are or will be complete, and are not adopted yet."""
        complete = (name for name, seen in self._seen.items() if name in self._complete_s and not seen.is_refused)
        return {*complete, *self._verdicts.quiet, *self._changing}

    async def close(self) -> None:
        await self._events.stop()
        self._pool.close()

    async def _clear_leftovers(self) -> None:
        """Delete what killed processes left: incomplete adoptions in hot, and incomplete deletions in the folder."""
        hot = self._context.hot_store
        with suppress(OSError, TierdError):
            for name in await hot.pool.run(clear_abandoned, hot.root / self.run, {self.run}.issuperset):
                log.info("deleted %s/%s from hot: the adoption that wrote it was killed", self.run, name)
        if self._watch.source == "remove":
            with suppress(TierdError):
                await self._pool.run(remove_leftovers, self._path)
        self._has_cleared = True

    async def _forget_folder(self, error: TierdError) -> None:
        await self._events.stop()
        self._findings.problems[""] = error
        if isinstance(error, NotFound) and self._was_there is not False:
            log.log(logging.WARNING if self._was_there else logging.INFO, "%s", error)
        self._was_there = False
        self._verdicts = Verdicts()
        self._seen.clear()
        self._complete_s.clear()

    # ── scan ──

    async def _scan(self, listing: Names) -> None:
        """Scan the listed checkpoints: which are complete, which are not and why, and which cannot be read."""
        preset, now_s = self._preset, self._context.monotonic_s()
        for name in [name for name in self._seen if name not in listing.folders]:
            self._gone(name)
        steps = [name for name, is_folder in listing.folders.items() if is_name(name, preset, is_folder=is_folder)]
        self._note_others(listing, steps)
        ready: list[Listed] = []
        unready: dict[str, str] = {}
        changing: set[str] = set()
        for name in self._to_scan(steps):
            try:
                entry = await self._scan_entry(name, now_s)
            except TierUnreachable:
                raise
            except TierdError as error:
                self._seen.pop(name, None)
                if isinstance(error, Transient) and name not in self._changing:
                    changing.add(name)  # it is being written or deleted
                else:
                    self._findings.problems[name] = error
                continue
            if isinstance(entry, Listed):
                ready.append(entry)
            elif entry:
                unready[name] = entry
        self._changing = changing
        beside = await self._pool.query(read_beside, self._path, preset.beside) if preset.beside else (b"", 0.0)
        if (last := self._seen.get(beside_name(beside[0]))) is not None:
            last.was_named = True
        verdicts = judge(
            ready,
            preset,
            quiet_s=self._watch.quiet_s,
            beside=beside,
            named_before=[name for name, seen in self._seen.items() if seen.was_named],
            former=await self._stored.newest_files() if preset.alike and ready else (),
        )
        verdicts.waiting.update(unready)
        verdicts.quiet.update(name for name in unready if now_s - self._seen[name].since_s < self._watch.quiet_s)
        self._verdicts, self._listed_s = verdicts, now_s
        # Complete checkpoints that are being written again are not among them.
        self._complete_s = {name: self._complete_s.get(name, now_s) for name in verdicts.complete}

    def _to_scan(self, names: list[str]) -> list[str]:
        """The names of checkpoints that may be new, and of adopted ones that may have been saved again."""
        chosen = self._order.choose(
            {name: self._preset.step_of(name) for name in names},
            done=[name for name in names if name in self._seen and self._seen[name].is_done],
            stuck=self._verdicts.waiting.keys() - self._verdicts.quiet,
            newest=max((entry.id.step for entry in self._stored.entries()), default=-1),
        )
        if left := self._order.left:
            self._findings.notes.append(
                f"not scanned yet: the {left} with the highest steps, of {len(names)} checkpoints"
            )
        return chosen

    async def _scan_entry(self, name: str, now_s: float) -> Listed | str:
        """The entry's files, or why it cannot be judged yet; "" if there is nothing to do. Raises as `scan_entry`."""
        tree = await self._pool.query(scan_entry, self._path / name)
        if tree is None:
            return ""
        key, seen = tree_key(tree), self._seen.get(name)
        if seen is None or seen.key != key:
            was_adopted = seen is not None and seen.is_adopted
            is_late = self._stored.has_newer(tree) and not self._was_just_written(tree, now_s)
            seen = self._seen[name] = WatchedEntry(key, now_s, tree, is_late, is_adopted=was_adopted)
        if seen.is_done:
            return ""
        if not tree.files:
            return "there is no file in it yet"
        if now_s - seen.since_s < self._watch.quiet_s:
            return f"it must be unchanged for {self._watch.quiet_s:g} s first"
        if seen.listed is None:
            seen.listed = await self._pool.query(lambda: listed(tree, self._preset, unchanged_s=self._watch.quiet_s))
        return seen.listed

    def _was_just_written(self, tree: SourceTree, now_s: float) -> bool:
        """Whether the tree was written since the last pass. If older trees have later times, the clock was set back."""
        age_s = self._context.now().timestamp() - tree.modified_ns / 1e9
        return self._listed_s is not None and 0 <= age_s <= now_s - self._listed_s + WRITTEN_SLACK_S

    def _gone(self, name: str) -> None:
        """Forget an entry that the framework has deleted or renamed."""
        del self._seen[name]
        if self._complete_s.pop(name, None) is not None and not self._holder:
            self._findings.count_missed(name)

    def _note_others(self, listing: Names, steps: list[str]) -> None:
        """Note the names that are not checkpoints. Report a problem if only another preset fits the names."""
        others = sorted({*listing.folders} - {*steps} - {self._preset.beside})
        links = [name for name in listing.links if is_name(name, self._preset, is_folder=self._preset.is_folder)]
        if links:
            self._findings.notes.append(f"not adopted, because they are links: {shown(links)}")
        if not steps and (error := misfit(f"watch {self._path}", listing.folders, self._preset)):
            self._findings.problems[""] = error
        elif others:
            self._findings.notes.append(f"not checkpoints: {shown(others)}")
        if listing.is_cut:
            self._findings.problems[""] = Transient(
                f"watch {self._path}: it has more than {len(listing.folders)} entries, and the rest is not scanned",
                hint="let the framework delete old checkpoints, or give each run a folder of its own",
            )

    # ── adoption ──

    async def _adopt_complete(self) -> None:
        """Adopt each complete checkpoint, oldest first: the framework deletes them in this order."""
        catalog = self._context.catalog
        if not self._verdicts.complete or NOT_LISTED_YET in catalog.unlisted().values():
            return
        try:
            adopted_id(catalog, self.run, None, is_lenient=True)
        except TierdError as error:  # the checkpoints of the run are not known, or tierd's client writes the run
            self._findings.problems[""] = error
            return
        for name, step in self._verdicts.complete.items():
            seen, now_s = self._seen[name], self._context.monotonic_s()
            if now_s < seen.not_before_s:
                self._findings.problems[name] = Transient(self._findings.former(name), hint="it is tried again")
                continue
            try:
                await self._adopt_or_skip(name, step, seen)
            except TierdError as error:
                if isinstance(error, NotFound) and not await self._pool.query((self._path / name).exists):
                    self._gone(name)
                    continue
                self._findings.problems[name] = error
                seen.failed(error, now_s, self._context.config.limits)
                if isinstance(error, Full):
                    return  # a newer one must not be adopted before it
            if self._holder:
                return

    async def _adopt_or_skip(self, name: str, step: int, seen: WatchedEntry) -> None:
        assert seen.tree is not None
        tree, generation_min, seen.step = seen.tree, self._stored.generation_min(step, seen.tree), step
        entries = self._stored.entries()
        former = next((entry for entry in entries if entry.id.step == step), None)
        if former is not None:
            stored = await self._stored.tree(former)
            if await self._stored.is_same(former, tree):
                return self._done(name, seen)
            if stored.name != tree.name and former is entries[0]:
                return self._done(name, seen, note=f"{name} is not adopted: {stored.name} of the same step was")
            if stored.name == tree.name and not was_saved_again(stored, tree, self._preset.marker):
                also = f"; `tierd adopt --generation {former.id.generation + 1}` adopts this too"
                raise TargetNotEmpty(
                    f"adopt {tree.path}: something in it was written after it was adopted as {former.id}",
                    hint="that one is kept" + ("" if self._parts else also),
                )
            generation_min = max(generation_min, former.id.generation + 1)
        if seen.is_late:
            return self._done(name, seen, note=f"{name} is not adopted: newer ones were adopted before")
        if self._parts is not None:
            return await self._adopt_part(self._parts, name, step, seen, generation_min)
        known = [entry.id for entry in entries]
        standing = await self.claim.standing(generation_min=generation_min)
        self._holder = standing.holder
        if self._holder or any(entry.id not in known and entry.id.step == step for entry in self._stored.entries()):
            return None  # in the second case the former holder has adopted it; the next pass compares the two
        checkpoint = adopted_id(self._context.catalog, self.run, step, standing.generation, is_lenient=True)
        await self._adopter.adopt(tree.path, seen.key, checkpoint)
        if entries and generation_min > entries[0].id.generation:
            log.warning("watch %s: %s begins a new generation, because training has gone back", self._path, name)
        return self._has_adopted(name, step, seen)

    async def _adopt_part(
        self, parts: Announcements, name: str, step: int, seen: WatchedEntry, generation_min: int
    ) -> None:
        """Adopt this node's part of a checkpoint that each node writes into a folder of its own."""
        assert seen.tree is not None
        steps = self._verdicts.complete.values()
        announced = await parts.head(step, seen.tree, generation_min=generation_min, waiting=steps)
        if isinstance(announced, str):
            self._verdicts.waiting[name] = announced
            if self._stored.has_newer(seen.tree):  # the save was probably killed: do not wait for the other nodes
                self._complete_s.pop(name, None)
            return
        await self._adopter.adopt(seen.tree.path, seen.key, announced.id, AnnouncedPart(announced, parts.node))
        parts.forget(step)
        self._has_adopted(name, step, seen)

    def _has_adopted(self, name: str, step: int, seen: WatchedEntry) -> None:
        self._context.metrics.watched_total.labels(self.run, "adopted").inc()
        self._adopted, self._newest = self._adopted + 1, step
        self._done(name, seen)

    def _done(self, name: str, seen: WatchedEntry, *, note: str = "") -> None:
        """Mark the entry as adopted, or, with a note, as not to be adopted."""
        seen.is_done, seen.is_adopted, seen.note, seen.tries, seen.listed = True, not note, note, 0, None
        self._complete_s.pop(name, None)
        if self._watch.source == "keep":
            seen.tree = None

    # ── removal ──

    async def _remove_sources(self) -> None:
        """Delete adopted checkpoints that every tier has which keeps them. Keep the newest, those whose replica was
        lost or is foreign, and all of them while a replica cannot be read."""
        step_of = {name: seen.step for name, seen in self._seen.items() if seen.is_adopted and seen.is_done}
        adopted, steps = sorted(step_of, key=step_of.__getitem__), self._stored.needed_steps(step_of.values())
        if not adopted or self._holder or steps is None:
            return
        trees = {name: tree for name in adopted if (tree := self._seen[name].tree) is not None}
        kept = {adopted[-1], max(trees, key=lambda name: trees[name].modified_ns, default=adopted[-1])}
        is_newest_held = any(entry.id.step in {step_of[name] for name in kept} for entry in self._stored.entries())
        for name, tree in trees.items():
            if not is_newest_held or step_of[name] in steps or name in kept:
                continue
            try:
                await self._pool.run(remove_source, tree)
            except NotFound:
                continue
            except TierdError as error:
                self._findings.problems[name] = error
                continue
            log.info("deleted %s, which was adopted", tree.path)
            del self._seen[name]

    # ── metrics and status ──

    def _set_lag(self) -> None:
        lag_s = max((self._context.monotonic_s() - since_s for since_s in self._complete_s.values()), default=0.0)
        self._context.metrics.watch_lag_seconds.labels(self.run).set(0.0 if self._holder else round(lag_s, 3))

    def _next_s(self) -> float:
        """Seconds until the next pass, unless an event starts one earlier."""
        now_s, usual_s = self._context.monotonic_s(), self._poll_s
        if self._was_there and not self._events.polled_because:
            usual_s = max(usual_s, SLOW_INTERVAL_S)
        if self._complete_s or self._events.is_in_doubt or self._order.left:
            usual_s = self._poll_s
        if self._verdicts.quiet or self._changing:
            usual_s = min(usual_s, self._watch.quiet_s)
        retries_s = [self._seen[name].not_before_s - now_s for name in self._complete_s if self._seen[name].tries]
        return max(0.05, min([usual_s, *retries_s]))

    def report(self) -> WatchReport:
        """For the status."""
        return WatchReport(
            path=printable(self._watch.path),
            run=self.run,
            preset=self._preset.name,
            is_there=bool(self._was_there),
            polled_because=printable(self._events.polled_because),
            holder=printable(self._holder),
            adopted=self._adopted,
            pending=len(self._complete_s),
            newest_step=self._newest if self._newest >= 0 else None,
            waiting=lines([f"{name}: {why}" for name, why in sorted(self._verdicts.waiting.items())]),
            notes=lines([*self._findings.note_lines(), *(seen.note for seen in self._seen.values() if seen.note)]),
            problems=self._findings.problem_lines(),
            nodes=self._watch.nodes,
            node=max(self._watch.node, 0),
        )
