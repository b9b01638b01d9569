"""`tierd sidecars`: the files that a run writes beside its checkpoints, as the tiers have them. Needs no daemon."""

from __future__ import annotations

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
from tierd.format.sidecar import Segment, chain, parse_segment, segment_prefix
from tierd.tiers.tier import Tier
from tierd.transfer.sidecar_output import write_sidecar

Key = tuple[Run, str, int]
"""Run, file and version."""

_TRIES = 3  # a daemon may merge segments while they are read


class SidecarVersion(msgspec.Struct, kw_only=True):
    """One version of a file. `size_bytes`: how much of it each tier has. `is_written`: it was written now; None: it was
    only listed."""

    run: str
    file: str
    version: int
    size_bytes: dict[str, int]
    is_written: bool | None = None


async def sidecars(
    context: typer.Context,
    run: options.RunName = None,
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
        stored = await _list(tiers, [check_run(run)] if run else sorted(tiers.catalog.runs()))
        if file is not None or version is not None:
            wanted = {key for key in stored if file in (None, key[1]) and version in (None, key[2])}
            stored = {key: found for key, found in stored.items() if key in wanted}
        if into is None:
            found = [_report(key, by_tier) for key, by_tier in sorted(stored.items())]
            print_report(found, as_json=json, text=_print)
            return code
        runs = {key[0] for key in stored}
        if not runs:
            raise NotFound("no sidecar file matches", hint="`tierd sidecars` lists them")
        if len(runs) > 1:
            raise NotFound(f"{len(runs)} runs have sidecar files", hint="name one with --run")
        newest = {key[:2]: max(other[2] for other in stored if other[:2] == key[:2]) for key in stored}
        access = settings.config().access if place is None else PRIVATE
        written: list[SidecarVersion] = []
        for key in sorted(key for key in stored if newest[key[:2]] == key[2]):
            report = _report(key, stored[key])
            report.is_written = await _write(tiers, key, stored[key], into / key[1], access)
            written.append(report)
        print_report(written, as_json=json, text=lambda reports: _print_written(reports, into))
        return code


async def _list(tiers: OpenedTiers, runs: list[Run]) -> dict[Key, dict[str, list[Segment]]]:
    """The chain of each version of each file, in each tier that answers."""
    left_out = tiers.absent | tiers.catalog.unlisted().keys()
    found: dict[Key, dict[str, list[Segment]]] = {}
    for name, tier in tiers.by_name.items():
        if name in left_out:
            continue
        segments: dict[Key, list[Segment]] = {}
        for run in runs:
            for stored in await tier.store.list(segment_prefix(run)):
                if (segment := parse_segment(stored.key)) is not None:
                    segments.setdefault((segment.run, segment.file, segment.version), []).append(segment)
        for key, each in segments.items():
            found.setdefault(key, {})[name] = chain(each)
    return found


async def _write(tiers: OpenedTiers, key: Key, by_tier: dict[str, list[Segment]], target: Path, access: Access) -> bool:
    """From the tier that has most of it; from the next one if that fails. Raises the error of the last one."""
    error: TierdError = NotFound(f"read {key[1]}: no tier has it")
    for name in sorted(by_tier, key=lambda name: -_end(by_tier[name])):
        try:
            return await _write_from(tiers.by_name[name], key, by_tier[name], target, access)
        except (NotFound, Corrupt, Foreign) as failed:
            error = failed
            print_note(f"tierd: {failed}")
    raise error


async def _write_from(tier: Tier, key: Key, path: list[Segment], target: Path, access: Access) -> bool:
    for tries_left in reversed(range(_TRIES)):
        try:
            return await write_sidecar(tier, path, target, access)
        except NotFound:
            if not tries_left:
                raise
            listed = [parse_segment(stored.key) for stored in await tier.store.list(segment_prefix(key[0]))]
            path = chain([each for each in listed if each and (each.run, each.file, each.version) == key])
    raise AssertionError


def _end(path: list[Segment]) -> int:
    return path[-1].end if path else 0


def _report(key: Key, by_tier: dict[str, list[Segment]]) -> SidecarVersion:
    sizes = {name: _end(path) for name, path in by_tier.items()}
    return SidecarVersion(run=key[0], file=key[1], version=key[2], size_bytes=sizes)


def _print(found: list[SidecarVersion]) -> None:
    if not found:
        print_note("no sidecar files: [sidecars] in the config names some")
        return
    rows = [
        [each.run, each.file, str(each.version), ", ".join(f"{name} {size(n)}" for name, n in each.size_bytes.items())]
        for each in found
    ]
    table(["RUN", "FILE", "VERSION", "SIZE"], rows, right=("VERSION",))


def _print_written(written: list[SidecarVersion], into: Path) -> None:
    for each in written:
        about = f"version {each.version}, {size(max(each.size_bytes.values()))}"
        what = "written" if each.is_written else "is there already"
        print_result(f"{into / each.file}: {what} ({about})")
