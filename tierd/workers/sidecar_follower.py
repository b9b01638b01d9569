"""Copies the files that a run appends to, such as a loss history, into every tier while they grow.

They are the run's audit trail, so nothing of them is deleted. When a file has lost bytes that it had, or has other
ones, its former content stays as a version of its own, an alarm says so, and a new version begins. A program may
replace a file by deleting it and writing it anew, so a change of the past counts when it has lasted for a while.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable
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
from tierd.transfer.sidecar_copy import FileChanged, FileState, SidecarCopy, followed_files, read_state, state_key

T = TypeVar("T")

log = logging.getLogger("tierd")

POLL_S = 2.0
COPY_S = 5.0  # between two copies of one file
REWRITTEN_S = 3.0  # for so long, the past of a file must have been different
CHECK_S = 600.0  # how often a file that has not changed is compared with the tiers
COST_SHARE = 20  # reading a file takes at most one part in this many of the time
FILES_MAX = 100


@dataclass(slots=True)
class _Followed:
    """`key`: of the file's stat when all tiers had all of it. `version`: 0 until a tier was listed. `compared`: the
    tiers whose content was compared with the file since the start. `stored_bytes`, `stored_digest`: how much of this
    version is known to be in a tier, and its digest. `differs_since_s`: since when the file does not begin with that.
    `changed_s`: since when it has something that a tier may lack. `read_s`: how long reading it took. `not_before_s`:
    when it is read next at the earliest."""

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


class SidecarFollower:
    name = "sidecar"
    interval_s = POLL_S
    is_urgent = False

    def __init__(self, context: DaemonContext) -> None:
        config = context.config.sidecars
        self._context = context
        self._run: Run = check_run(config.run)
        self._path = Path(config.path)
        timeout_s = 2 * context.config.limits.request_timeout_s
        self._pool = ThreadPool(2, "tierd-sidecar", where=config.path, timeout_s=timeout_s)
        self._files: dict[str, _Followed] = {}
        self._problems: dict[str, TierdError] = {}  # of the last pass; "" is the folder
        self._recorded: dict[str, str] = {}
        self._failures: dict[str, tuple[int, float]] = {}  # by tier: how often in a row, and not before
        self._rewritten: dict[str, int] = {}  # by file, since the start
        context.metrics.sidecar_lag_seconds.labels(self._run)
        context.metrics.sidecar_rewritten_total.labels(self._run)

    async def run_once(self) -> bool:
        """Copy the files that have changed. Returns True even if a file or a tier has a problem: each has its own
        backoff."""
        self._problems = {}
        now_s = self._context.monotonic_s()
        try:
            found = await self._pool.query(self._find)
        except TierdError as error:
            self._problems[""] = error
        else:
            due = [name for name, key in found.items() if self._is_due(name, key, now_s)]
            if due:
                await self._copy(due)
        self._record()
        self._set_lag()
        return True

    async def close(self) -> None:
        self._pool.close()

    def report(self) -> SidecarReport:
        """For the status."""
        now_s = self._context.monotonic_s()
        behind = [now_s - each.changed_s for each in self._files.values() if each.changed_s is not None]
        return SidecarReport(
            path=printable(str(self._path)),
            run=self._run,
            files=len(self._files),
            size_bytes=sum(each.size_bytes for each in self._files.values()),
            behind_s=round(max(behind, default=0.0), 1),
            rewritten=dict(sorted(self._rewritten.items())),
            problems=[printable(str(error)) for error in self._problems.values()],
        )

    # ── one pass ──

    def _find(self) -> dict[str, tuple[int, ...]]:
        """The files to follow, by name. Blocks. Raises TierdError when the folder cannot be listed."""
        found: dict[str, tuple[int, ...]] = {}
        for name in followed_files(self._path, self._context.config.sidecars.keep):
            if not is_file_name(name):
                hint = "rename it: letters, digits, '.', '_' and '-', at most 120 of them"
                self._problems[name] = BadRequest(
                    f"copy {self._path / name}: the name cannot be part of a key", hint=hint
                )
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
        is_other = key != followed.key or now_s - followed.checked_s >= CHECK_S
        return is_other and now_s >= followed.not_before_s

    async def _copy(self, names: list[str]) -> None:
        stored = await self._list()
        if not stored:
            return
        for name in names:
            followed = self._files[name]
            try:
                await self._copy_file(name, followed, stored)
            except NotFound:  # deleted: what the tiers have stays
                followed.changed_s = None
            except FileChanged:
                pass  # it is read again
            except TierdError as error:
                self._problems[name] = error
            pause_s = POLL_S if followed.differs_since_s is not None else max(COPY_S, COST_SHARE * followed.read_s)
            followed.not_before_s = self._context.monotonic_s() + pause_s

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
        """None if the tier has failed: now, or a moment ago."""
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
        of_file = {tier: [each for each in segments if each.file == name] for tier, segments in stored.items()}
        newest = max((each.version for segments in of_file.values() for each in segments), default=0)
        # A tier that did not answer before may have another past of the file, or a later version.
        not_compared = {tier: of_file[tier] for tier in of_file.keys() - followed.compared}
        newest_there = max((each.version for segments in not_compared.values() for each in segments), default=0)
        if newest_there > followed.version or not followed.version:
            followed.version, followed.stored_bytes, followed.stored_digest = max(newest_there, 1), 0, ""
        version = followed.version
        beginnings = {_reached(segments, version) for segments in not_compared.values()}
        beginnings.add((followed.stored_bytes, followed.stored_digest))
        of_version = {tier: [each for each in found if each.version == version] for tier, found in of_file.items()}
        offsets = {
            *(end for end, _ in beginnings),
            *(at for segments in of_version.values() for at in SidecarCopy.offsets(segments)),
        }
        began_s = self._context.monotonic_s()
        state = await self._pool.query(read_state, self._path / name, offsets)
        followed.read_s = self._context.monotonic_s() - began_s
        differing = [end for end, digest in beginnings if end and not state.begins_with(end, digest)]
        if differing:
            if not self._is_rewritten(name, followed, state, max(differing)):
                return
            followed.version = max(newest, version) + 1
            followed.stored_bytes, followed.stored_digest = 0, ""
            of_version = {tier: [] for tier in of_version}
        followed.differs_since_s = None
        followed.compared |= of_file.keys()
        followed.size_bytes = state.size
        copied: set[str] = set()
        for tier, segments in of_version.items():
            copy = SidecarCopy(self._pool, self._context.tiers[tier], self._run, name, followed.version, segments)
            if await self._try(tier, lambda copy=copy: copy.run(state)) is not None:
                copied.add(tier)
        if copied:
            followed.stored_bytes, followed.stored_digest = state.settled, state.digest(state.settled)
        if copied == self._context.tiers.keys():
            followed.key, followed.changed_s = state.key, None
            followed.checked_s = self._context.monotonic_s()

    def _is_rewritten(self, name: str, followed: _Followed, state: FileState, stored_bytes: int) -> bool:
        """Whether the file has not begun with its stored content for long enough; then this raises the alarm.
        `stored_bytes`: how much of its former content is known to be in a tier."""
        now_s = self._context.monotonic_s()
        if followed.differs_since_s is None:
            followed.differs_since_s = now_s
        if now_s - followed.differs_since_s < REWRITTEN_S:
            return False
        if state.size < stored_bytes:
            what = f"it has {state.size} bytes, and had {stored_bytes}"
        else:
            what = f"its first {stored_bytes} bytes are not what they were"
        error = Corrupt(
            f"copy {self._path / name}: {what}",
            hint=f"its former content stays as version {followed.version}: `tierd sidecars --run {self._run}`; "
            "docs/RUNBOOK.md#sidecar-file-changed",
        )
        self._rewritten[name] = self._rewritten.get(name, 0) + 1
        self._context.metrics.sidecar_rewritten_total.labels(self._run).inc()
        self._context.incidents.record(self.name, error)
        return True

    # ── metrics and status ──

    def _record(self) -> None:
        """The problems of this pass, in the log and the failures, once until they change."""
        for name, error in self._problems.items():
            if self._recorded.get(name) != error.message:
                self._context.incidents.record(self.name, error)
        self._recorded = {name: error.message for name, error in self._problems.items()}

    def _set_lag(self) -> None:
        now_s = self._context.monotonic_s()
        behind = [now_s - each.changed_s for each in self._files.values() if each.changed_s is not None]
        self._context.metrics.sidecar_lag_seconds.labels(self._run).set(round(max(behind, default=0.0), 3))


def _reached(segments: list[Segment], version: int) -> tuple[int, str]:
    """How far the segments of a version reach, and the digest up to there."""
    path = chain([each for each in segments if each.version == version and not each.is_tail])
    return (path[-1].end, path[-1].after) if path else (0, "")
