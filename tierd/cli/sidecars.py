"""`tierd sidecars`: the files that a run writes beside its checkpoints, as the tiers have them. Needs no daemon."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tierd.access import PRIVATE, Access
from tierd.cli import options
from tierd.cli.console import print_note, print_report, print_result, size, table
from tierd.cli.opened_tiers import OpenedTiers, open_tiers
from tierd.cli.options import settings_of
from tierd.errors import Corrupt, Foreign, NotFound, TierdError
from tierd.format.ids import Run, check_run
from tierd.format.sidecar import Segment, all_segments_prefix, branches, chain, parse_segment
from tierd.tiers.tier import Tier
from tierd.transfer.sidecar_output import PrefixDigests, write_sidecar

Key = tuple[Run, str, str, int]
"""Run, phase, file and version."""

Stored = dict[Key, dict[str, list[list[Segment]]]]
"""What the segments of each version of each file give, by tier: `branches`."""

_TRIES = 3  # a daemon may merge segments while they are read


class SidecarVersion(msgspec.Struct, kw_only=True):
    """One version of a file. `phase`: the milestone of the phase that it belongs to; empty: to all of the run.
    `size_bytes`: how much of it each tier has. `is_written`: it was written now; None: it was only listed. `others`:
    the names of other files with this name and version, which were written beside it. `of_versions`: how many were
    found of this file."""

    run: str
    phase: str
    file: str
    version: int
    size_bytes: dict[str, int]
    is_written: bool | None = None
    others: list[str] = []
    of_versions: int = 1


async def sidecars(
    context: typer.Context,
    run: options.RunName = None,
    phase: Annotated[
        str, typer.Option("--phase", metavar="MILESTONE", help="The files that `tierd pivot` archived for it.")
    ] = "",
    file: Annotated[str | None, typer.Option("--file", metavar="NAME", help="Only this file.")] = None,
    version: Annotated[
        int | None, typer.Option("--version", metavar="N", min=1, help="This version; default: the newest.")
    ] = None,
    into: Annotated[
        Path | None, typer.Option("--into", metavar="FOLDER", help="Write the files there; none is replaced.")
    ] = None,
    tier: options.TierName = None,
    place: options.From = None,
    json: options.Json = False,
) -> int:
    """List the files that runs keep beside their checkpoints, or write them to a folder."""
    settings = settings_of(context)
    options.check_one_place(place, tier)
    async with open_tiers(settings, place=place, only=tier) as tiers:
        code = tiers.check_reachable()
        searched = {check_run(run)} if run else set(tiers.catalog.runs())
        if not run and not place and (followed := settings.config().sidecars.run):
            searched.add(check_run(followed))  # it may have no checkpoint yet
        stored = await stored_sidecars(tiers, sorted(searched))
        stored = {
            key: found
            for key, found in stored.items()
            if file in (None, key[2])
            and version in (None, key[3])
            and (key[1] == phase or (into is None and not phase))
        }
        if into is None:
            found = [_report(key, by_tier) for key, by_tier in sorted(stored.items())]
            print_report(found, as_json=json, text=_print)
            return code
        runs = {key[0] for key in stored}
        if not runs:
            raise NotFound("no sidecar file matches", hint="`tierd sidecars` lists them")
        if len(runs) > 1:
            raise NotFound(f"{len(runs)} runs have sidecar files", hint="name one with --run")
        access = settings.config().access if place is None else PRIVATE
        written = await write_newest(tiers, stored, into, access)
        print_report(written, as_json=json, text=lambda reports: print_result(*written_lines(reports, into)))
        return code


async def write_newest(tiers: OpenedTiers, stored: Stored, into: Path, access: Access) -> list[SidecarVersion]:
    """Writes the newest version of each file into the folder. Raises TargetNotEmpty where other bytes are there."""
    newest = {key[:3]: max(other[3] for other in stored if other[:3] == key[:3]) for key in stored}
    written: list[SidecarVersion] = []
    for key in sorted(key for key in stored if newest[key[:3]] == key[3]):
        report = _report(key, stored[key])
        report.is_written, digests = await _write(tiers, key, stored[key], into / key[2], access)
        report.of_versions = sum(other[:3] == key[:3] for other in stored)
        report.others = await _write_others(tiers, key, stored[key], digests, into, access)
        written.append(report)
    return written


async def stored_sidecars(tiers: OpenedTiers, runs: list[Run]) -> Stored:
    """What the segments of each version of each file give, in each tier that answers."""
    left_out = tiers.absent | tiers.catalog.unlisted().keys()
    versions: Stored = {}
    for name, tier in tiers.by_name.items():
        if name in left_out:
            continue
        segments: dict[Key, list[Segment]] = {}
        for run in runs:
            for stored in await tier.store.list(all_segments_prefix(run)):
                if (segment := parse_segment(stored.key)) is not None:
                    segments.setdefault(_key_of(segment), []).append(segment)
        for key, of_version in segments.items():
            versions.setdefault(key, {})[name] = branches(of_version)
    return versions


async def _write(
    tiers: OpenedTiers, key: Key, by_tier: dict[str, list[list[Segment]]], target: Path, access: Access
) -> tuple[bool, dict[int, str]]:
    """Write the file from the tier that has most of it, or the next one if that fails. Return whether it was written,
    and its digests up to where other branches end. Raises the error of the last one."""
    error: TierdError = NotFound(f"read {key[2]}: no tier has it")
    ends = {leaf.end for found in by_tier.values() for path in found if (leaf := _leaf(path)) is not None}
    for name in sorted(by_tier, key=lambda name: -_end(by_tier[name])):
        if not by_tier[name]:
            continue  # no segment begins at 0
        try:
            return await _write_from(tiers.by_name[name], key, by_tier[name][0], target, access, ends)
        except (NotFound, Corrupt, Foreign) as failed:
            error = failed
            print_note(f"tierd: {failed}")
    raise error


async def _write_from(
    tier: Tier, key: Key, path: list[Segment], target: Path, access: Access, ends: Collection[int]
) -> tuple[bool, dict[int, str]]:
    for tries_left in reversed(range(_TRIES)):
        digests = PrefixDigests(ends)
        try:
            return await write_sidecar(tier, path, target, access, digests), digests.found
        except NotFound:
            if not tries_left:
                raise
            listed = [parse_segment(stored.key) for stored in await tier.store.list(all_segments_prefix(key[0]))]
            path = chain([each for each in listed if each is not None and _key_of(each) == key])
    raise AssertionError


async def _write_others(
    tiers: OpenedTiers,
    key: Key,
    by_tier: dict[str, list[list[Segment]]],
    digests: dict[int, str],
    into: Path,
    access: Access,
) -> list[str]:
    """Write what the version has besides the file with these `digests`, which two daemons may have copied under one
    name. The names that it has got."""
    others: dict[str, list[tuple[Tier, list[Segment]]]] = {}
    for tier, found in by_tier.items():
        for path in found:
            leaf = _leaf(path)
            if leaf is not None and digests.get(leaf.end, leaf.after) != leaf.after:
                others.setdefault(f"{key[2]}.other-{leaf.after}", []).append((tiers.by_name[tier], path))
    for name, sources in others.items():
        error: TierdError | None = None
        for tier, path in sources:
            try:
                await write_sidecar(tier, path, into / name, access)
                break
            except (NotFound, Corrupt, Foreign) as failed:
                error = failed
                print_note(f"tierd: {failed}")
        else:
            assert error is not None
            raise error
    return sorted(others)


def _leaf(path: list[Segment]) -> Segment | None:
    """The last one that does not only close a document."""
    return next((each for each in reversed(path) if not each.is_tail), None)


def _key_of(segment: Segment) -> Key:
    return segment.run, segment.phase, segment.file, segment.version


def _end(found: list[list[Segment]]) -> int:
    return found[0][-1].end if found else 0


def _report(key: Key, by_tier: dict[str, list[list[Segment]]]) -> SidecarVersion:
    sizes = {name: _end(found) for name, found in by_tier.items()}
    return SidecarVersion(run=key[0], phase=key[1], file=key[2], version=key[3], size_bytes=sizes)


def _print(found: list[SidecarVersion]) -> None:
    if not found:
        print_note("no sidecar files; those of a run without checkpoints: --run RUN")
        return
    rows = [
        [
            each.run,
            each.phase or "-",
            each.file,
            str(each.version),
            ", ".join(f"{name} {size(n)}" for name, n in each.size_bytes.items()),
        ]
        for each in found
    ]
    table(["RUN", "PHASE", "FILE", "VERSION", "SIZE"], rows, right=("VERSION",))


def written_lines(written: list[SidecarVersion], into: Path) -> list[str]:
    """What `write_newest` has done, in words."""
    lines: list[str] = []
    for each in written:
        newest = f", the newest of {each.of_versions}" if each.of_versions > 1 else ""
        detail = f"version {each.version}{newest}, {size(max(each.size_bytes.values()))}"
        what = "written" if each.is_written else "is there already"
        lines.append(f"{into / each.file}: {what} ({detail})")
        lines += [f"{into / name}: another file of this name in version {each.version}" for name in each.others]
    return lines
