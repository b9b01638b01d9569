"""`tierd note` and `tierd notes`: texts and tags that people give to checkpoints. They need no daemon.

A note is written to every tier that answers. Each new note of a checkpoint also brings the older ones to the tiers that
lack them.
"""

from __future__ import annotations

import getpass
import os
import secrets
from functools import partial
from typing import Annotated

import msgspec
import typer

from tierd.catalog.selectable import selectable_replicas
from tierd.cli import options
from tierd.cli.console import age, now, print_note, print_report, table
from tierd.cli.log import check_key
from tierd.cli.opened_tiers import OpenedTiers, open_tiers
from tierd.cli.options import parse_query, settings_of
from tierd.errors import Corrupt, Foreign, NotFound
from tierd.format import note as notes_format
from tierd.format.ids import CheckpointId, Run, check_run
from tierd.format.manifest import encode_marker
from tierd.format.note import Note
from tierd.lifecycle.selection import select
from tierd.tiers.pool import for_each
from tierd.tiers.tier import Tier

READS_AT_ONCE = 8
NOTES_MAX = 10_000  # of a run, the newest: more are not read


class NotedCheckpoint(msgspec.Struct, kw_only=True):
    """`tiers`: those that still have the checkpoint whole. `notes`: the oldest first."""

    run: str
    step: int
    generation: int
    tiers: list[str]
    tags: list[str]
    notes: list[Note]


async def note(
    context: typer.Context,
    step: options.StepName,
    text: Annotated[str, typer.Argument(metavar="[TEXT]", help="What to remember.")] = "",
    run: options.RunName = None,
    generation: options.GenerationNumber = None,
    tag: Annotated[list[str] | None, typer.Option("--tag", metavar="NAME", help="Add a tag; may be repeated.")] = None,
    untag: Annotated[
        list[str] | None, typer.Option("--untag", metavar="NAME", help="Remove a tag; may be repeated.")
    ] = None,
    json: options.Json = False,
) -> int:
    """Write a note on a checkpoint, or tag it. Unlike a milestone, neither keeps it."""
    settings = settings_of(context)
    config = settings.config()
    query = parse_query(run, step, generation)
    written = now()
    made = Note(
        text=text,
        added=tag or [],
        removed=untag or [],
        author=_user(),
        created_at=written.isoformat(timespec="milliseconds"),
    )
    notes_format.check(made)
    check_key(config)
    async with open_tiers(settings) as tiers:
        code = tiers.check_reachable()
        checkpoint = select(query, selectable_replicas(tiers.catalog)).candidate.id
        found = await _read(tiers, checkpoint.run, only=checkpoint)
        written_ms = int(written.timestamp() * 1000)
        found[notes_format.note_key(checkpoint, written_ms=written_ms, token=secrets.token_hex(4))] = made
        answering = _answering(tiers)
        for tier in answering:
            for key, each in found.items():
                await tier.put_marker(key, encode_marker(each))
        report = _noted(tiers, checkpoint, list(found.values()))
    names = ", ".join(tier.name for tier in answering)
    sentence = f"noted {checkpoint} in {names}; its tags: {', '.join(report.tags) or 'none'}"
    print_report(report, as_json=json, text=sentence)
    return code


async def notes(
    context: typer.Context,
    run: options.OnlyRun = None,
    tag: Annotated[str | None, typer.Option("--tag", metavar="NAME", help="Only checkpoints with this tag.")] = None,
    place: options.From = None,
    json: options.Json = False,
) -> int:
    """List notes and tags, also those of checkpoints that no longer exist."""
    only_run = None if run is None else check_run(run)
    reports: list[NotedCheckpoint] = []
    async with open_tiers(settings_of(context), place=place) as tiers:
        code = tiers.check_reachable()
        for each in [only_run] if only_run else sorted(tiers.catalog.runs()):
            by_checkpoint: dict[CheckpointId, list[Note]] = {}
            for key, found in (await _read(tiers, each)).items():
                by_checkpoint.setdefault(_checkpoint_of(key), []).append(found)
            newest_first = sorted(by_checkpoint, key=lambda checkpoint: checkpoint.recency, reverse=True)
            reports += [_noted(tiers, checkpoint, by_checkpoint[checkpoint]) for checkpoint in newest_first]
    print_report([report for report in reports if tag is None or tag in report.tags], as_json=json, text=_print)
    return code


async def notes_of(tiers: OpenedTiers, checkpoint: CheckpointId) -> NotedCheckpoint:
    """The notes of one checkpoint, in the tiers that answer."""
    return _noted(tiers, checkpoint, list((await _read(tiers, checkpoint.run, only=checkpoint)).values()))


async def _read(tiers: OpenedTiers, run: Run, *, only: CheckpointId | None = None) -> dict[str, Note]:
    """The notes of a run, or of one checkpoint, by key, the oldest first. Those that cannot be read are reported and
    left out."""
    notes: dict[str, Note] = {}

    async def read(tier: Tier, key: str) -> None:
        try:
            notes[key] = notes_format.decode(await tier.marker_bytes(key), key=key, where=tier.name)
        except NotFound:
            pass  # deleted since it was listed
        except (Foreign, Corrupt) as error:
            print_note(f"tierd: left out: {error.message}")

    for tier in _answering(tiers):
        keys = [stored.key for stored in await tier.store.list(notes_format.note_prefix(run))]
        parsed_keys = {key: parsed for key in keys if (parsed := notes_format.parse_note_key(key)) is not None}
        unread = [
            key for key, (checkpoint, _) in parsed_keys.items() if key not in notes and only in (None, checkpoint)
        ]
        newest = sorted(unread, key=lambda key: parsed_keys[key][1])[-NOTES_MAX:]
        await for_each(READS_AT_ONCE, newest, partial(read, tier))
    return {key: notes[key] for key in sorted(notes, key=notes_format.order)}


def _answering(tiers: OpenedTiers) -> list[Tier]:
    left_out = tiers.absent | tiers.catalog.unlisted().keys()
    return [tier for name, tier in tiers.by_name.items() if name not in left_out]


def _checkpoint_of(key: str) -> CheckpointId:
    parsed = notes_format.parse_note_key(key)
    assert parsed is not None, key
    return parsed[0]


def _noted(tiers: OpenedTiers, checkpoint: CheckpointId, notes: list[Note]) -> NotedCheckpoint:
    entry = tiers.catalog.get(checkpoint)
    return NotedCheckpoint(
        run=checkpoint.run,
        step=checkpoint.step,
        generation=checkpoint.generation,
        tiers=[] if entry is None else [name for name in tiers.by_name if name in entry.tiers],
        tags=notes_format.tags(notes),
        notes=notes,
    )


def note_line(note: Note) -> str:
    changes = [*(f"+{tag}" for tag in note.added), *(f"-{tag}" for tag in note.removed)]
    return " ".join([f"{age(note.created_at)} ago, {note.author}:", *changes, *([note.text] if note.text else [])])


def _print(reports: list[NotedCheckpoint]) -> None:
    if not reports:
        print_note("no notes: `tierd note --step STEP TEXT` writes one")
        return
    rows: list[list[str]] = []
    for report in reports:
        cells = [
            report.run,
            str(report.step),
            str(report.generation),
            ",".join(report.tiers) or "deleted",
            ",".join(report.tags),
        ]
        rows += [[*cells, note_line(note)] for note in report.notes]
    table(["RUN", "STEP", "GEN", "TIERS", "TAGS", "NOTE"], rows, right=("STEP", "GEN"))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may have a user without a name
        return str(os.getuid())
