"""Copies the files that a run appends to, such as a loss history, into every tier while they grow.

These files are the run's audit trail, so nothing of them is deleted. When bytes that were copied are gone from a file
or are different, their copy stays as a version of its own, an alarm reports it, and a new version begins. A program may
replace a file by deleting it and writing it again, so a change of copied bytes counts only after REWRITTEN_S. On shared
storage another daemon may have copied what this machine does not see yet: see OLD_VIEW_S.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tierd.backoff import backoff_s
from tierd.context import DaemonContext
from tierd.errors import BadRequest, Corrupt, NotFound, TierdError
from tierd.format.ids import Run, check_run
from tierd.format.sidecar import Segment, chain, is_file_name, parse_segment, segment_prefix
from tierd.format.text import printable
from tierd.status.folder_reports import SidecarReport
from tierd.tiers.pool import ThreadPool
from tierd.tiers.tier import Tier
from tierd.transfer.sidecar_copy import (
    FileChanged,
    FileState,
    OpenSidecar,
    SidecarCopy,
    followed_files,
    read_state,
    state_key,
)
from tierd.workers.former_sidecars import FormerSidecars
from tierd.workers.sidecar_versions import SidecarVersions
from tierd.workers.watch_state import SHOWN_MAX, lines

T = TypeVar("T")

POLL_S = 2.0
COPY_S = 5.0  # between two copies of one file
REWRITTEN_S = 3.0  # how long copied bytes must have been different in the file
# How long a file must have been only the beginning of what a tier has, and have got no longer. An NFS client writes
# after 30 s what a program has left unsynced, and another one believes a size for 60 s.
OLD_VIEW_S = 90.0
CHECK_S = 600.0  # how often a file that has not changed is compared with the tiers
KEPT_OPEN_S = 60.0  # how long a file that does not change stays open
COST_SHARE = 20  # reading a file takes at most a twentieth of the time
FILES_MAX = 100


@dataclass(slots=True)
class _Followed:
    """The state of one file.

    `key`: the file's `state_key` when all tiers had all of it. `version`: 0 until a tier was listed. `compared`: the
    tiers whose content was compared with the file since the daemon's start. `stored_bytes`, `stored_digest`: how much
    of this version is known to be in a tier, and the digest of it. `differs_since_s`: since when the file does not
    begin with these bytes. `changed_s`: since when a tier may lack something of the file. `read_s`: how long it took to
    read the file. `not_before_s`: the earliest time of the next read. `is_confirmed`: whether the tiers were listed
    since a segment was written: another daemon may have begun another file in this version meanwhile. `open_file`: the
    file as it was last read, if it began with the stored bytes: it has the rest of this version if the program renames
    or deletes the file.
    """

    key: tuple[int, ...] = ()
    version: int = 0
    compared: frozenset[str] = frozenset()
    stored_bytes: int = 0
    stored_digest: str = ""
    differs_since_s: float | None = None
    changed_s: float | None = None
    read_s: float = 0.0
    not_before_s: float = 0.0
    checked_s: float = 0.0
    size_bytes: int = 0
    is_confirmed: bool = True
    open_file: OpenSidecar | None = None

    def hold(self, open_file: OpenSidecar | None) -> None:
        if self.open_file is not None:
            self.open_file.close()
        self.open_file = open_file


class SidecarFollower:
    name = "sidecar"
    interval_s = POLL_S
    is_urgent = False

    def __init__(self, context: DaemonContext, *, rng: random.Random | None = None) -> None:
        config = context.config.sidecars
        self._context = context
        self._run: Run = check_run(config.run)
        self._path = Path(config.path)
        timeout_s = context.config.limits.directory_timeout_s
        self._pool = ThreadPool(2, "tierd-sidecar", where=config.path, timeout_s=timeout_s)
        self._files: dict[str, _Followed] = {}
        self._problems: dict[str, TierdError] = {}  # of the last pass; "" is the folder
        self._recorded: dict[str, str] = {}
        self._failures: dict[str, tuple[int, float]] = {}  # by tier: failures in a row, and when it is tried again
        self._rewritten: dict[str, int] = {}  # by file: how often it was rewritten since the daemon's start
        self._compared: frozenset[str] = frozenset()  # the tiers that were last compared with each other
        self._compared_s = -CHECK_S  # when they were compared
        self._passed_s = -math.inf  # when the last complete pass began
        self._former = FormerSidecars(context)
        self._versions = SidecarVersions(context, rng or random.Random())
        context.metrics.sidecar_lag_seconds.labels(self._run)
        context.metrics.sidecar_rewritten_total.labels(self._run)

    async def run_once(self) -> bool:
        """Copy the files that have changed. Always True: each file and each tier has its own backoff."""
        self._problems = {}
        now_s = self._context.monotonic_s()
        try:
            found = await self._pool.query(self._find)
        except TierdError as error:
            self._problems[""] = error
        else:
            due = [name for name, key in found.items() if self._is_due(name, key, now_s)]
            lost = [(name, each) for name, each in self._files.items() if name not in found]
            for _, each in lost:
                each.changed_s = None
            gone = [name for name, each in lost if each.open_file is not None]
            self._let_go(found, now_s)
            if due or gone or now_s - self._compared_s >= CHECK_S:
                await self._copy(due, gone, found.keys())
        self._record()
        self._context.metrics.sidecar_lag_seconds.labels(self._run).set(round(self._behind_s(), 3))
        self._passed_s = now_s
        return True

    async def close(self) -> None:
        for followed in self._files.values():
            followed.hold(None)
        self._pool.close()

    def unfinished(self, since_s: float) -> list[str]:
        """The files with content from before `since_s` that a tier may lack."""
        if self._passed_s < since_s:
            return [str(self._path)]
        return [name for name, each in self._files.items() if each.changed_s is not None]

    def report(self) -> SidecarReport:
        """For the status."""
        return SidecarReport(
            path=printable(str(self._path)),
            run=self._run,
            files=len(self._files),
            size_bytes=sum(file.size_bytes for file in self._files.values()),
            behind_s=round(self._behind_s(), 1),
            rewritten=dict(sorted(self._rewritten.items())),
            problems=lines([str(error) for error in self._problems.values()]),
        )

    # ── one pass ──

    def _find(self) -> dict[str, tuple[int, ...]]:
        """The files to follow, by name. Blocks. Raises TierdError when the folder cannot be listed."""
        found: dict[str, tuple[int, ...]] = {}
        for name in followed_files(self._path, self._context.config.sidecars.keep):
            if not is_file_name(name):
                if len(self._problems) < SHOWN_MAX:
                    hint = "rename it: letters, digits, '.', '_' and '-', at most 120 of them"
                    what = f"copy {self._path / name}: the name cannot be part of a key"
                    self._problems[name] = BadRequest(what, hint=hint)
            elif len(found) == FILES_MAX:
                hint = "name fewer files in sidecars.keep; the first ones by name are copied"
                self._problems[""] = BadRequest(f"copy from {self._path}: more than {FILES_MAX} files", hint=hint)
            else:
                try:
                    found[name] = state_key(os.lstat(self._path / name))
                except OSError:  # deleted since it was listed
                    continue
        return found

    def _is_due(self, name: str, key: tuple[int, ...], now_s: float) -> bool:
        followed = self._files.setdefault(name, _Followed())
        if key != followed.key and followed.changed_s is None:
            followed.changed_s = now_s
        is_other = key != followed.key or not followed.is_confirmed or now_s - followed.checked_s >= CHECK_S
        return is_other and now_s >= followed.not_before_s

    def _let_go(self, found: Mapping[str, tuple[int, ...]], now_s: float) -> None:
        """Close the files that do not change, so that their disk can be unmounted."""
        for name, key in found.items():
            followed = self._files[name]
            if key == followed.key and now_s - followed.checked_s >= KEPT_OPEN_S:
                followed.hold(None)

    async def _copy(self, names: list[str], gone: list[str], there: Collection[str]) -> None:
        """Copy these files of those that are `there`. `gone`: which were deleted or renamed since they were read."""
        stored = await self._list()
        if not stored:
            return
        for name in gone:
            try:
                await self._copy_rest(name, self._files[name], stored)
            except TierdError as error:  # its disk may be gone too
                self._problems[name] = error
                self._files[name].hold(None)
        for name in names:
            followed = self._files[name]
            try:
                await self._copy_file(name, followed, stored)
            except NotFound:  # the file was deleted; its copies stay
                followed.changed_s = None
            except FileChanged:
                pass  # the next pass reads it again
            except TierdError as error:
                self._problems[name] = error
            pause_s = POLL_S if followed.differs_since_s is not None else max(COPY_S, COST_SHARE * followed.read_s)
            followed.not_before_s = self._context.monotonic_s() + pause_s
        if stored.keys() != self._compared or self._context.monotonic_s() - self._compared_s >= CHECK_S:
            await self._complete(stored, there)

    async def _list(self) -> dict[str, list[Segment]]:
        """The segments of the run in each tier that answers."""
        stored: dict[str, list[Segment]] = {}
        for name, tier in self._context.tiers.items():

            async def segments(tier: Tier = tier) -> list[Segment]:
                await self._context.identities.check(tier)
                keys = [each.key for each in await tier.store.list(segment_prefix(self._run))]
                return [segment for key in keys if (segment := parse_segment(key)) is not None]

            found = await self._try(name, segments)
            if found is not None:
                stored[name] = found
        return stored

    async def _try(self, tier: str, function: Callable[[], Awaitable[T]]) -> T | None:
        """The function's result, or None if the tier fails now or is in its backoff."""
        failures, not_before_s = self._failures.get(tier, (0, 0.0))
        if self._context.monotonic_s() < not_before_s:
            return None
        try:
            result = await function()
        except TierdError as error:
            limits = self._context.config.limits
            pause_s = backoff_s(failures + 1, min_s=limits.retry_min_s, max_s=limits.retry_max_s)
            self._failures[tier] = failures + 1, self._context.monotonic_s() + pause_s
            self._problems[f"tier {tier}"] = error
            return None
        self._failures.pop(tier, None)
        return result

    async def _copy_file(self, name: str, followed: _Followed, stored: dict[str, list[Segment]]) -> None:
        of_file = {tier: [segment for segment in segments if segment.file == name] for tier, segments in stored.items()}
        newest = max((segment.version for segments in of_file.values() for segment in segments), default=0)
        # A tier that answers for the first time may have other bytes of the file, or a later version.
        not_compared = {tier: of_file[tier] for tier in of_file.keys() - followed.compared}
        newest_there = max((segment.version for segments in not_compared.values() for segment in segments), default=0)
        if newest_there > followed.version or not followed.version:
            followed.version, followed.stored_bytes, followed.stored_digest = max(newest_there, 1), 0, ""
        version = followed.version
        beginnings = {_reached(segments, version) for segments in not_compared.values()}
        beginnings.add((followed.stored_bytes, followed.stored_digest))
        of_version, later = _of_version(stored, name, version), _of_version(stored, name, newest)
        listed = [segment for found in (of_version, later) for segments in found.values() for segment in segments]
        offsets = {*(end for end, _ in beginnings), *SidecarCopy.offsets(listed)}
        started_s = self._context.monotonic_s()
        open_file = await self._pool.query(OpenSidecar, self._path / name, discard=OpenSidecar.close)
        try:
            state = await self._pool.query(read_state, self._path / name, offsets, open_file)
            followed.read_s = self._context.monotonic_s() - started_s
            differing = [end for end, digest in beginnings if end and not state.begins_with(end, digest)]
            is_shared = not differing and await self._versions.is_shared(of_version, state)
            if differing or is_shared:
                is_seen = followed.stored_bytes in differing  # by this daemon, in the file
                is_old_view = not is_seen and await self._versions.is_beginning(of_version, state)
                if not self._differs_for_long(followed, state, is_old_view=is_old_view):
                    return open_file.close()
                if differing and not await self._copy_rest(name, followed, stored):
                    return open_file.close()
                followed.version = await self._versions.next_version(version, newest, later, state, is_shared=is_shared)
                self._report(name, version, followed.version, state, max(differing) if differing else None)
                followed.stored_bytes, followed.stored_digest = 0, ""
                of_version = later if followed.version == newest else {tier: [] for tier in of_version}
        except BaseException:
            open_file.close()
            raise
        followed.hold(open_file)
        followed.differs_since_s = None
        followed.compared |= of_file.keys()
        followed.size_bytes = state.size
        written = {tier: await self._copy_to(tier, each, followed, state) for tier, each in of_version.items()}
        copied = {tier for tier, size_bytes in written.items() if size_bytes is not None}
        followed.is_confirmed = not any(written.values())
        if copied:
            followed.stored_bytes, followed.stored_digest = state.settled, state.digest(state.settled)
        if copied == self._context.tiers.keys():
            followed.key, followed.changed_s = state.key, None
            followed.checked_s = self._context.monotonic_s()

    async def _copy_rest(self, name: str, followed: _Followed, stored: dict[str, list[Segment]]) -> bool:
        """Copy what a renamed or deleted file has beyond its stored bytes. False if no tier has taken it."""
        if followed.open_file is None:
            return True
        of_version = _of_version(stored, name, followed.version)
        reached = {tier: _reached(segments, followed.version) for tier, segments in of_version.items()}
        offsets = {at for segments in of_version.values() for at in SidecarCopy.offsets(segments)}
        offsets.add(followed.stored_bytes)
        try:
            state = await self._pool.query(read_state, self._path / name, offsets, followed.open_file)
            if not followed.stored_bytes or state.begins_with(followed.stored_bytes, followed.stored_digest):
                of_version = {
                    tier: segments
                    for tier, segments in of_version.items()
                    if not reached[tier][0] or state.begins_with(*reached[tier])
                }
                copied = [await self._copy_to(tier, segments, followed, state) for tier, segments in of_version.items()]
                if copied and all(each is None for each in copied):
                    return False
        except FileChanged:
            return False
        followed.hold(None)
        return True

    async def _copy_to(self, tier: str, segments: list[Segment], followed: _Followed, state: FileState) -> int | None:
        """How many bytes were written. None if the tier has failed."""
        name = state.path.name
        copy = SidecarCopy(self._pool, self._context.tiers[tier], self._run, name, followed.version, segments)
        return await self._try(tier, lambda: copy.run(state))

    async def _complete(self, stored: dict[str, list[Segment]], there: Collection[str]) -> None:
        """Copy what one tier has of what is not followed any more to the cold tiers that lack it. The former versions
        of a file wait until its present one is listed, which may begin with their content."""
        known = {tier: {(each.file, each.version) for each in segments} for tier, segments in stored.items()}
        cold = [known[tier] for tier in known.keys() & self._context.cold.keys()]
        for name in [name for name, each in self._files.items() if name not in there and each.open_file is None]:
            del self._files[name]
        followed = {
            name: each.version if not each.size_bytes or all((name, each.version) in there for there in cold) else 0
            for name, each in self._files.items()
        }
        self._problems |= await self._former.complete(stored, followed)
        # What had to wait is looked at when a file is copied next.
        self._compared = frozenset(stored) if all(followed.values()) else frozenset()
        self._compared_s = self._context.monotonic_s()

    def _differs_for_long(self, followed: _Followed, state: FileState, *, is_old_view: bool) -> bool:
        """Whether the file has differed from its stored bytes for REWRITTEN_S, or may be an old view for OLD_VIEW_S."""
        now_s = self._context.monotonic_s()
        if followed.differs_since_s is None or (is_old_view and state.size > followed.size_bytes):
            followed.differs_since_s = now_s
        if is_old_view:
            followed.size_bytes, followed.changed_s = state.size, None  # the tier has all of it
        return now_s - followed.differs_since_s >= (OLD_VIEW_S if is_old_view else REWRITTEN_S)

    def _report(self, name: str, former: int, version: int, state: FileState, stored_bytes: int | None) -> None:
        """Raise the alarm. `stored_bytes`: how much of the former content was known to be in a tier; None where that is
        as it was, and another file came to it."""
        if stored_bytes is None:
            what = f"another daemon copies another file of this name: both are in version {former}"
            hint = f"this one goes on, whole, as version {version}: give the files of each node names of their own; "
        else:
            lost = state.size < stored_bytes
            changed = f"its first {stored_bytes} bytes are not what they were"
            what = f"it has {state.size} bytes, and had {stored_bytes}" if lost else changed
            hint = f"its former content stays as version {former}: `tierd sidecars --run {self._run}`; "
        error = Corrupt(f"copy {self._path / name}: {what}", hint=f"{hint}docs/RUNBOOK.md#sidecar-file-changed")
        self._rewritten[name] = self._rewritten.get(name, 0) + 1
        self._context.metrics.sidecar_rewritten_total.labels(self._run).inc()
        self._context.incidents.record(self.name, error)

    # ── metrics and status ──

    def _record(self) -> None:
        """Record each problem of this pass as a failure and in the log, once until it changes."""
        for name, error in self._problems.items():
            if self._recorded.get(name) != error.message:
                self._context.incidents.record(self.name, error)
        self._recorded = {name: error.message for name, error in self._problems.items()}

    def _behind_s(self) -> float:
        since_s = (file.changed_s for file in self._files.values() if file.changed_s is not None)
        return max((self._context.monotonic_s() - each for each in since_s), default=0.0)


def _of_version(stored: dict[str, list[Segment]], file: str, version: int) -> dict[str, list[Segment]]:
    """The segments of one version of a file in each tier."""
    return {
        tier: [segment for segment in segments if (segment.file, segment.version) == (file, version)]
        for tier, segments in stored.items()
    }


def _reached(segments: list[Segment], version: int) -> tuple[int, str]:
    """The number of bytes that the segments of a version cover without a hole, and the digest of these bytes."""
    path = chain([segment for segment in segments if segment.version == version and not segment.is_tail])
    return (path[-1].end, path[-1].after) if path else (0, "")
