"""Records in a file of the hot directory which runs have trainers here, so that the next daemon expects them.

If the trainers of a recorded run do not attach to the next daemon in time, the run is `lost`, as if they had been
killed under that daemon. The bad end of a run stays known over a restart for ENDED_RECENT_S. No decision about a
checkpoint depends on the file: one that cannot be read is ignored, and one that cannot be written stops no trainer.
"""

from __future__ import annotations

import logging
import os
import stat
from contextlib import suppress
from pathlib import Path

import msgspec

from tierd.context import DaemonContext
from tierd.errors import UNDECODABLE, TierdError, TierUnreachable
from tierd.format import layout
from tierd.format.ids import Generation, Run, is_run
from tierd.format.node_file import ranks_text
from tierd.format.run_state import ENDED_BADLY, RunState
from tierd.format.text import parse_time, printable
from tierd.memory.outcomes import ENDED_RECENT_S, RUNS_MAX
from tierd.tiers.tree import translated

log = logging.getLogger("tierd")

# A client tries to reconnect every 4 s or sooner: this allows several attempts on a busy node.
RECONNECT_GRACE_S = 30.0
# After a reboot, the scheduler must take the node back and start the job again.
REBOOT_GRACE_S = 600.0
TEXT_CHARS_MAX = 200
_BYTES_MAX = 4 << 20  # RUNS_MAX records are shorter
_BOOT_ID = "/proc/sys/kernel/random/boot_id"  # random(4)


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `ranks`: its ranks on this node, as text. `state`: `running`, or its outcome. `since`: when the state
    began, in ISO 8601. `boot`: the boot id of the machine at that time."""

    run: str
    generation: int
    ranks: str = ""
    state: str
    reason: str = ""
    since: str
    boot: str = ""


class _File(msgspec.Struct, frozen=True, kw_only=True):
    runs: list[_Record]
    format_version: int = 1


class AttachedRuns:
    name = "wire"
    interval_s = 2.0  # the end of the grace time comes without an event
    is_urgent = False

    def __init__(self, context: DaemonContext) -> None:
        self._context = context
        self._outcomes = context.memory.outcomes
        self._path = context.config.hot_path / layout.ATTACHED_RUNS
        self._boot = ""
        self._awaited: dict[Run, _Record] = {}  # runs of the former daemon, until their trainers attach or are lost
        self._records: dict[Run, _Record] = {}  # as of the last pass
        self._written: list[_Record] | None = None  # the content of the file; None if it is unreadable or unknown
        self._started_s: float | None = None
        self._is_warned = False

    async def run_once(self) -> bool:
        """Always succeeds. A failed read or write is logged once."""
        if self._started_s is None:
            await self._load()
            # The grace time starts now: while hot hangs, no trainer can claim its generation there.
            self._started_s = self._context.monotonic_s()
        self._give_up_awaited()
        self._forget_what_others_continue()
        self._records = {Run(record.run): record for record in (*self._awaited.values(), *self._of_outcomes())}
        records = list(self._records.values())
        if records != self._written:
            await self._write(records)
        return True

    # ── of the former daemon ──

    async def _load(self) -> None:
        try:
            self._boot = await self._context.hot_store.pool.query(_boot)
            with translated("open it", missing=TierUnreachable):
                raw = await self._context.hot_store.pool.query(_read, self._path)
            self._written = msgspec.json.decode(raw, type=_File).runs if raw is not None else []
        except (TierdError, *UNDECODABLE) as error:
            text = "read %s: %s; it is ignored: runs of the former daemon that are lost or ended badly are not reported"
            log.warning(text, self._path, error)
        for record in (self._written or [])[:RUNS_MAX]:
            if is_run(record.run):
                self._take(record)

    def _take(self, record: _Record) -> None:
        run, age_s = Run(record.run), self._age_s(record)
        if record.state == RunState.RUNNING:
            self._awaited[run] = record
        elif record.state in ENDED_BADLY and age_s is not None and age_s < ENDED_RECENT_S:
            self._restore(record, age_s)

    def _age_s(self, record: _Record) -> float | None:
        """None if it has no time, or one in the future: it would stay forever."""
        since = parse_time(record.since)
        age_s = -1.0 if since is None else (self._context.now() - since).total_seconds()
        return age_s if age_s >= 0 else None

    def _restore(self, record: _Record, age_s: float) -> None:
        run, reason = Run(record.run), printable(record.reason, TEXT_CHARS_MAX)
        ended_s = self._context.monotonic_s() - age_s
        generation, outcome = Generation(record.generation), RunState(record.state)
        if self._outcomes.restore(run, generation, outcome, reason, ended_s=ended_s):
            self._records[run] = record

    def _give_up_awaited(self) -> None:
        """Runs whose trainers have attached again are not awaited any more. Runs whose grace time is over are lost."""
        assert self._started_s is not None
        waited_s = self._context.monotonic_s() - self._started_s
        for run, record in list(self._awaited.items()):
            if self._outcomes.state(run) is not None:
                del self._awaited[run]
            elif waited_s >= (RECONNECT_GRACE_S if record.boot == self._boot else REBOOT_GRACE_S):
                del self._awaited[run]
                if not self._context.is_continued_elsewhere(run, record.generation):
                    self._lose(record)

    def _lose(self, record: _Record) -> None:
        noun = "rank" if record.ranks.isdigit() else "ranks"
        ranks = f"{noun} {printable(record.ranks, TEXT_CHARS_MAX)}" if record.ranks else "they"
        why = "killed, stopped by SIGSTOP, refused, or ended while no daemon ran"
        reason = f"{ranks} did not attach again after a restart of the daemon: {why}"
        lost = msgspec.structs.replace(record, state=RunState.LOST, reason=reason, since=self._context.timestamp())
        log.warning("%s: %s", record.run, reason)
        self._restore(lost, 0.0)

    def _forget_what_others_continue(self) -> None:
        for run, generation in self._outcomes.restored():
            if self._context.is_continued_elsewhere(run, generation):
                self._outcomes.forget(run)

    # ── of this one ──

    def _of_outcomes(self) -> list[_Record]:
        """The records of the runs that have trainers, and of those that ended badly within ENDED_RECENT_S."""
        now_s, records = self._context.monotonic_s(), list[_Record]()
        for run, generation, ranks in self._outcomes.all_ranks():
            state, reason = self._outcomes.state(run) or ("", "")
            ended_s = self._outcomes.ended_s(run)
            is_recent = ended_s is None or now_s - ended_s < ENDED_RECENT_S
            former = self._records.get(run)
            if not is_recent or state not in (RunState.RUNNING, *ENDED_BADLY):
                continue
            record = _Record(
                run=run,
                generation=generation,
                ranks=ranks_text(ranks)[:TEXT_CHARS_MAX] if ranks else former.ranks if former is not None else "",
                state=state,
                reason=reason[:TEXT_CHARS_MAX],
                since=former.since if former is not None else "",
                boot=self._boot,
            )
            is_same = former is not None and (former.generation, former.state) == (generation, state)
            records.append(record if is_same else msgspec.structs.replace(record, since=self._context.timestamp()))
        return records

    async def _write(self, records: list[_Record]) -> None:
        content = msgspec.json.encode(_File(runs=records)) + b"\n"
        try:
            with translated(f"write {self._path}", missing=TierUnreachable):
                # Two writes at a time would use the same temporary file.
                self._context.hot_store.pool.check_settled()
                await self._context.hot_store.pool.run(_replace, self._path, content)
        except TierdError as error:
            if not self._is_warned:
                log.warning("%s; a restart of this daemon would not know which runs have trainers", error)
            self._is_warned = True
            return
        self._written, self._is_warned = records, False


def _boot() -> str:
    """The kernel's random id of this boot of the machine; empty where it cannot be read."""
    with suppress(OSError):
        return Path(_BOOT_ID).read_text().strip()
    return ""


def _read(path: Path) -> bytes | None:
    """None where there is no file. Raises OSError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb") as file:
        stat_result = os.fstat(fd)
        if (
            not stat.S_ISREG(stat_result.st_mode)
            or stat_result.st_size > _BYTES_MAX
            or stat_result.st_uid != os.geteuid()
        ):
            raise OSError(f"it is not a file of this user, or has more than {_BYTES_MAX} bytes")
        return file.read(_BYTES_MAX)


def _replace(path: Path, content: bytes) -> None:
    """Replace the file once the new content is on the disk. Only one daemon uses the hot directory, so the temporary
    file always has the same name, and a leftover of a killed daemon is removed. The folder is not synced: after a loss
    of power the former content may be back, and then a run that has ended since is reported as lost. Raises OSError."""
    new = path.with_name(layout.ATTACHED_RUNS_NEW)
    with suppress(FileNotFoundError):
        os.unlink(new)
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(fd)
    os.replace(new, path)
