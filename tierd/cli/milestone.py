"""`tierd milestone`: marks a checkpoint as exempt from retention, in every tier that holds it whole. Needs no daemon.

It is the same on every node: whoever deletes in a cold tier looks for marks after the manifest is gone.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from tierd.catalog.listing import files_of
from tierd.catalog.selectable import selectable_replicas
from tierd.cli import options
from tierd.cli.console import now, print_report
from tierd.cli.log import check_key, record
from tierd.cli.opened_tiers import OpenedTiers, open_tiers
from tierd.cli.options import Settings, parse_query, settings_of
from tierd.errors import BadConfig, Incomplete, NotFound
from tierd.format import layout
from tierd.format.audit import Action
from tierd.format.ids import CheckpointId
from tierd.lifecycle.selection import CheckpointQuery, select

_INCOMPLETE_HINT = (
    "mark it on any node once a cold tier has it whole: `tierd status` says which ranks' parts it waits for; "
    "`tierd snapshot --milestone NAME`, from any node, takes one that all nodes send first"
)


async def milestone(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Letters, digits, dots, dashes, underscores.")],
    step: options.StepName,
    run: options.RunName = None,
    generation: options.GenerationNumber = None,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> int:
    """Keep a checkpoint forever, under a name."""
    query = parse_query(run, step, generation)
    async with open_tiers(settings_of(context)) as tiers:
        code = tiers.check_reachable()
        checkpoint, names = await mark(settings_of(context), tiers, query, name, dry_run=dry_run)
    marked = f"{'would mark' if dry_run else 'marked'} {checkpoint.run} step {checkpoint.step}"
    text = f"{marked} (generation {checkpoint.generation}) as {name} in {', '.join(names)}"
    report = msgspec.to_builtins(checkpoint) | {"milestone": name, "tiers": names, "is_dry_run": dry_run}
    print_report(report, as_json=json, text=text)
    return code


async def mark(
    settings: Settings, tiers: OpenedTiers, query: CheckpointQuery, name: str, *, dry_run: bool
) -> tuple[CheckpointId, list[str]]:
    """Marks the selected checkpoint in every tier that has it whole. (The checkpoint, those tiers.)"""
    config = settings.config()
    check_key(config)
    try:
        chosen = select(query, selectable_replicas(tiers.catalog)).candidate
    except Incomplete as error:
        # A mark on one node's part would hold nothing: each node sends and deletes its parts by what it knows.
        raise Incomplete(f"mark as {name}: {error.message}", hint=_INCOMPLETE_HINT) from error
    entry = tiers.catalog.get(chosen.id)
    if entry is not None and entry.manifest.signature is not msgspec.UNSET and not config.security.key_file:
        raise BadConfig(
            f"mark {chosen.id}: it is signed, and no key is configured here to sign the marker",
            hint="set [security] key_file or $TIERD_KEY_FILE: daemons with a key ignore an unsigned marker",
        )
    layout.milestone_file(name)  # refuses a bad name before the first marker is written
    marked_at = now().isoformat(timespec="milliseconds")
    names: list[str] = []
    for tier in (tiers.by_name[tier] for tier in chosen.tiers):
        if not dry_run:
            await tier.mark_milestone(chosen.id, name, marked_at)
            # A daemon may have deleted the replica since it was listed.
            names_now = (await files_of(tier, chosen.id)).keys()
            if layout.MANIFEST not in names_now or layout.GONE in names_now:
                await tier.store.delete([layout.file_key(chosen.id, layout.milestone_file(name))])
                continue
            await record(config, Action.MARKED, chosen.id, tier.name, reason=f"milestone {name}")
        names.append(tier.name)
    if not names:
        raise NotFound(f"mark {chosen.id} as {name}: it has just been deleted", hint="choose another: `tierd ls`")
    return chosen.id, names
