"""`tierd runs`: every run in the tiers, and with --tree which checkpoint each generation went on from.

Reads the tiers themselves, without a daemon: what is only in memory is not shown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer

from tierd.catalog.entry import Entry
from tierd.cli import options
from tierd.cli.console import age, print_note, print_report, print_result, size, table
from tierd.cli.opened_tiers import open_tiers
from tierd.cli.options import settings_of
from tierd.lifecycle.selection import CheckpointQuery


class GenerationRow(msgspec.Struct, kw_only=True):
    """One start of a training, as far as its checkpoints still exist. `parent`: the checkpoint that it went on from;
    None: from scratch. `milestones`: by their step."""

    generation: int
    parent: str | None
    checkpoints: int
    first_step: int
    last_step: int
    milestones: dict[str, int]


class RunRow(msgspec.Struct, kw_only=True):
    """`size_bytes`: of each checkpoint once, however many tiers have it. `kind`: "adopted" for those of another
    program. `generations`: newest first."""

    run: str
    kind: str
    newest_step: int
    created_at: str
    checkpoints: int
    size_bytes: int
    tiers: list[str]
    generations: list[GenerationRow]


async def runs(
    context: typer.Context,
    place: Annotated[
        str | None, typer.Argument(metavar="PLACE", help="A directory or s3:// URL: listed without a config.")
    ] = None,
    tree: Annotated[
        bool, typer.Option("--tree", help="Also print each generation and the checkpoint that it went on from.")
    ] = False,
    json: options.Json = False,
) -> int:
    """List runs: their newest step, size and tiers; with --tree their generations."""
    async with open_tiers(settings_of(context), place=place) as tiers:
        code = tiers.check_reachable()
        tiers.report_unreadable(CheckpointQuery())
        by_run: dict[str, list[Entry]] = defaultdict(list)
        for entry in tiers.catalog.entries():
            by_run[entry.id.run].append(entry)
        rows = [_row(entries, list(tiers.by_name)) for entries in by_run.values()]
    print_report(rows, as_json=json, text=lambda each: _print(each, shows_tree=tree))
    return code


def _row(entries: Sequence[Entry], tiers: Sequence[str]) -> RunRow:
    """`entries`: of one run, newest first."""
    newest = entries[0]
    by_generation: dict[int, list[Entry]] = defaultdict(list)
    for entry in entries:
        by_generation[entry.id.generation].append(entry)
    return RunRow(
        run=newest.id.run,
        kind=newest.manifest.kind,
        newest_step=newest.id.step,
        created_at=newest.manifest.created_at,
        checkpoints=len(entries),
        size_bytes=sum(entry.manifest.size_bytes for entry in entries),
        tiers=[name for name in tiers if any(name in entry.tiers for entry in entries)],
        generations=[_generation(group) for group in by_generation.values()],
    )


def _generation(entries: Sequence[Entry]) -> GenerationRow:
    parent = entries[-1].manifest.parent
    return GenerationRow(
        generation=entries[0].id.generation,
        parent=None if parent is None else str(parent),
        checkpoints=len(entries),
        first_step=entries[-1].id.step,
        last_step=entries[0].id.step,
        milestones={name: entry.id.step for entry in reversed(entries) for name in sorted(entry.all_milestones)},
    )


def _print(rows: list[RunRow], *, shows_tree: bool) -> None:
    if not rows:
        print_note("no runs in any tier that could be listed")
        return
    cells = [
        [
            row.run,
            str(row.newest_step),
            str(len(row.generations)),
            str(row.checkpoints),
            ",".join(row.tiers),
            size(row.size_bytes),
            age(row.created_at),
            row.kind,
        ]
        for row in rows
    ]
    heads = ["RUN", "NEWEST STEP", "GENERATIONS", "CHECKPOINTS", "TIERS", "SIZE", "AGE", "KIND"]
    table(heads, cells, right=("NEWEST STEP", "GENERATIONS", "CHECKPOINTS", "SIZE", "AGE"))
    for row in rows if shows_tree else ():
        print_result("", row.run)
        oldest_first = sorted(row.generations, key=lambda each: each.generation)
        for number, generation in enumerate(oldest_first):
            branch = "└─" if number == len(oldest_first) - 1 else "├─"
            steps = f"step {generation.first_step}"
            if generation.last_step != generation.first_step:
                steps = f"steps {generation.first_step} to {generation.last_step}"
            marks = "".join(f", milestone {name} at {step}" for name, step in generation.milestones.items())
            origin = generation.parent or "scratch"
            count = f"generation {generation.generation}: {generation.checkpoints} in {steps}"
            print_result(f"{branch} {count}, from {origin}{marks}")
