"""`tierd pivot`: ends a phase of a run, so that the next start begins another one with the same weights and moments.

The run stops at the end of its step; that checkpoint becomes a milestone; the files of `[sidecars] reset` are archived
under the milestone in every tier and deleted in their folder. Each step is done only if the one before it is, and is
skipped if it was done before, so the command can be repeated after any failure.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tierd.cli import daemon_http, options
from tierd.cli.console import print_note, print_report, print_result, size
from tierd.cli.milestone import mark
from tierd.cli.opened_tiers import OpenedTiers, open_tiers
from tierd.cli.options import Settings, parse_query, settings_of
from tierd.cli.run_requests import stop_and_wait
from tierd.config.sections import Config
from tierd.errors import BadConfig, BadRequest, DaemonUnreachable, NotFound, Transient
from tierd.format import layout
from tierd.format.ids import CheckpointId, Run, check_run
from tierd.format.manifest import ADOPTED
from tierd.format.run_state import ENDED_WELL, RunState
from tierd.format.sidecar import Segment, is_file_name, parse_segment, segment_prefix
from tierd.tiers.pool import ThreadPool
from tierd.tiers.tree import fsync_path
from tierd.transfer.sidecar_copy import (
    FileChanged,
    FileState,
    SidecarCopy,
    check_readable,
    followed_files,
    matching,
    read_state,
    state_key,
)


class PivotReport(msgspec.Struct, kw_only=True):
    """`kind`: of the checkpoint. `archived`: the files that the milestone has now and the folder has no more, with
    their sizes in bytes."""

    run: str
    step: int
    generation: int
    kind: str
    milestone: str
    tiers: list[str]
    archived: dict[str, int]


async def pivot(
    context: typer.Context,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="The milestone that the phase ends with.")],
    run: Annotated[str, typer.Option("--run", metavar="RUN", help="The run; its trainers may be attached, or gone.")],
    wait_s: options.Wait = 300.0,
    json: options.Json = False,
) -> int:
    """End a phase of a run: stop it, make its checkpoint a milestone, and put the files of the phase away."""
    settings = settings_of(context)
    config = settings.config()
    layout.milestone_file(name)  # raises before anything is done
    chosen = check_run(run)
    folder = _folder(config, chosen)
    _check_files(config, folder)
    _stop(config, chosen, name, wait_s, marked=await _marked_before(settings, chosen, name))
    async with open_tiers(settings) as tiers:
        _check_reachable(tiers, chosen)
        checkpoint, names = await _milestone(settings, tiers, chosen, name)
        entry = tiers.catalog.get(checkpoint)
        kind = "" if entry is None else entry.manifest.kind
        archived = await _archive(tiers, chosen, name, folder, config) if folder is not None else {}
    report = PivotReport(
        run=run,
        step=checkpoint.step,
        generation=checkpoint.generation,
        kind=kind,
        milestone=name,
        tiers=names,
        archived=archived,
    )
    print_report(report, as_json=json, text=_print)
    return 0


def _folder(config: Config, run: Run) -> Path | None:
    """The folder with the files of the phase; None if the config names none."""
    sidecars = config.sidecars
    if not sidecars.reset:
        print_note("tierd: [sidecars] reset names no files, so none is archived")
        return None
    if sidecars.run != run:
        raise BadConfig(
            f"pivot {run}: the files of [sidecars] are those of {sidecars.run}",
            hint="name that run, or the config of the daemon that follows this one",
        )
    return Path(sidecars.path)


def _check_files(config: Config, folder: Path | None) -> None:
    """Raises BadRequest for a file that cannot be archived, before anything is done."""
    if folder is None:
        return
    kept = set(followed_files(folder, config.sidecars.keep))
    for file in followed_files(folder, config.sidecars.reset):
        if file in kept:
            raise BadRequest(
                f"pivot: {file} fits both [sidecars] keep and reset",
                hint="the files of keep are never deleted: make the patterns narrower; nothing was done",
            )
        if not is_file_name(file):
            raise BadRequest(
                f"pivot: {file} cannot be part of a key, so it cannot be archived",
                hint="rename it: letters, digits, '.', '_' and '-', at most 120 of them; nothing was done",
            )
        try:
            check_readable(folder / file)
        except NotFound:  # deleted since it was listed
            continue
        except BadRequest as error:
            hint = "make the patterns of [sidecars] reset narrower, or move it away; nothing was done"
            raise BadRequest(f"pivot: {error.message}", hint=hint) from error


def _check_reachable(tiers: OpenedTiers, run: Run) -> None:
    """Raises Transient unless all tiers were listed."""
    if tiers.check_reachable():
        raise Transient(
            f"pivot {run}: a tier cannot be listed, so the files of the phase would not be safe there",
            hint="repeat the command when it answers: what was done stays done",
        )


async def _marked_before(settings: Settings, run: Run, name: str) -> CheckpointId | None:
    """The checkpoint that ends the phase, if this command was killed or has failed after it was marked."""
    async with open_tiers(settings) as tiers:
        _check_reachable(tiers, run)
        marked = _marked(tiers, run, name)
        if marked is not None:
            _check_newest(tiers, marked, name)
        return marked


def _marked(tiers: OpenedTiers, run: Run, name: str) -> CheckpointId | None:
    """The newest checkpoint with the milestone."""
    found = [entry.id for entry in tiers.catalog.entries(run) if name in entry.all_milestones]
    return found[0] if found else None  # newest first


def _check_newest(tiers: OpenedTiers, marked: CheckpointId, name: str) -> None:
    """Raises BadRequest if the run has gone on since: then the files are not those of the phase that the checkpoint
    ends."""
    run = marked.run
    if (newest := tiers.catalog.generation_max(run)) > marked.generation:
        raise BadRequest(
            f"pivot {run}: generation {newest} has begun since {marked} became the milestone {name}",
            hint="its files of [sidecars] reset are those of the next phase, and stay; choose another name to end that",
        )
    for entry in tiers.catalog.entries(run):
        if entry.is_whole and entry.healthy is not False and entry.id.recency > marked.recency:
            raise BadRequest(
                f"pivot {run}: {name} is a milestone already, and {entry.id} is newer than its checkpoint {marked}",
                hint="choose another name; nothing was done",
            )


def _stop(config: Config, run: Run, name: str, wait_s: float, *, marked: CheckpointId | None) -> None:
    """Nothing is done if no trainer is attached, or the phase has ended. Raises BadRequest if it has a milestone of
    this name and goes on: it was not this command that set it."""
    try:
        report = daemon_http.find(config).status.find_run(run)
    except DaemonUnreachable as error:
        if marked is not None:
            return
        raise DaemonUnreachable(
            f"pivot {run}: {error.message}",
            hint="start the daemon: without it, nobody knows whether trainers still write",
        ) from error
    if report is None or report.state != RunState.RUNNING:
        if marked is None:
            print_note(f"tierd: {run} has no trainer here: its newest checkpoint ends the phase")
        return
    if marked is not None:
        raise BadRequest(
            f"pivot {run}: {marked} is the milestone {name} already, and the run goes on",
            hint="choose another name; nothing was done",
        )
    _, ended = stop_and_wait(config, run, wait_s=wait_s, is_silent=True)
    if ended.state not in ENDED_WELL:
        why = f": {ended.reason}" if ended.reason else ""
        raise BadRequest(f"pivot {run}: the run is {ended.state}, not stopped{why}", hint="`tierd status` says more")


async def _milestone(settings: Settings, tiers: OpenedTiers, run: Run, name: str) -> tuple[CheckpointId, list[str]]:
    """The checkpoint that ends the phase, which is marked unless it was before, and the tiers that have the mark.
    Raises BadRequest if the files in the folder may not be those of this checkpoint: a later generation has begun."""
    marked = _marked(tiers, run, name)
    if marked is None:
        latest = parse_query(run, "latest", None)
        checkpoint, _ = await mark(settings, tiers, latest, name, dry_run=True)
        if (entry := tiers.catalog.get(checkpoint)) is not None and entry.manifest.is_adopted:
            print_note(f"tierd: another program wrote {checkpoint}: tierd cannot see whether it still runs")
        if (newest := tiers.catalog.generation_max(run)) > checkpoint.generation:
            raise BadRequest(
                f"pivot {run}: generation {newest} has begun and has no checkpoint: it may have changed the files",
                hint="start the run again, and repeat when it has trained a step: it stops with a snapshot, which ends "
                "the phase",
            )
        checkpoint, names = await mark(settings, tiers, latest, name, dry_run=False)
    else:
        checkpoint, names = marked, _tiers_with(tiers, marked, name)
    _check_newest(tiers, checkpoint, name)
    return checkpoint, names


def _tiers_with(tiers: OpenedTiers, checkpoint: CheckpointId, milestone: str) -> list[str]:
    entry = tiers.catalog.get(checkpoint)
    return [] if entry is None else [tier for tier, names in entry.milestones.items() if milestone in names]


async def _archive(tiers: OpenedTiers, run: Run, name: str, folder: Path, config: Config) -> dict[str, int]:
    """Archive the files of the phase in every tier, then delete those that have not changed since. Their sizes."""
    pool = ThreadPool(1, "tierd-pivot", where=str(folder))
    archived: dict[str, int] = {}
    try:
        for file in await pool.query(followed_files, folder, config.sidecars.reset):
            try:
                state = await _archive_file(pool, tiers, run, name, folder / file)
                await pool.run(_remove, state)
            except FileChanged as error:
                raise Transient(
                    f"pivot {run}: {folder / file} is still written",
                    hint="which program writes it? Stop it, and repeat",
                ) from error
            archived[file] = state.size
        await pool.run(_sync, folder)
    finally:
        pool.close()
    return archived


async def _archive_file(pool: ThreadPool, tiers: OpenedTiers, run: Run, name: str, path: Path) -> FileState:
    stored: dict[str, list[Segment]] = {}
    for tier in tiers.by_name.values():
        found = [parse_segment(each.key) for each in await tier.store.list(segment_prefix(run, name))]
        stored[tier.name] = [each for each in found if each is not None and each.file == path.name]
    state = await pool.query(read_state, path, {at for each in stored.values() for at in SidecarCopy.offsets(each)})
    version = _version(list(stored.values()), state)
    for tier in tiers.by_name.values():
        own = [each for each in stored[tier.name] if each.version == version]
        await SidecarCopy(pool, tier, run, path.name, version, own, phase=name).run(state)
    return state


def _version(stored: list[list[Segment]], state: FileState) -> int:
    """The one that a tier has begun of this file; otherwise a new one."""
    versions = sorted({segment.version for segments in stored for segment in segments}, reverse=True)
    for version in versions:
        own = [[segment for segment in segments if segment.version == version] for segments in stored]
        if all(len(matching(each, state)) == len(each) for each in own):
            return version
    return max(versions, default=0) + 1


def _remove(state: FileState) -> None:
    """Blocks. Raises FileChanged if it is not the file that was archived any more."""
    try:
        if state_key(os.lstat(state.path)) != state.key:
            raise FileChanged(state.path)
        os.unlink(state.path)
    except FileNotFoundError:
        return
    except OSError as error:
        message = f"delete {state.path}, which is archived: {error.strerror}"
        raise BadRequest(message, hint="delete it by hand, before the next phase begins") from error


def _sync(folder: Path) -> None:
    """Blocks. A power loss after the report must not bring the files back: the next phase would begin with them."""
    try:
        fsync_path(folder.resolve())
    except FileNotFoundError:
        return
    except OSError as error:
        raise Transient(f"fsync {folder}: {error.strerror}", hint="check the disk, and repeat the command") from error


def _print(report: PivotReport) -> None:
    where = ", ".join(report.tiers)
    print_result(f"{report.run} step {report.step} (generation {report.generation}) is {report.milestone} in {where}")
    for file, size_bytes in report.archived.items():
        what = f"archived {file} ({size(size_bytes)})" if size_bytes else f"{file} is empty: nothing to archive,"
        print_result(f"{what} and deleted it in its folder")
    if report.kind == ADOPTED:
        print_result(f"another program writes {report.run}: its next start begins where that program resumes")
    else:
        print_result(f"the next start of {report.run} begins a new phase from there")
