"""`tierd milestone`: exempts a checkpoint from retention, in every tier that holds it whole, or ends that.

Needs no daemon. It is the same on every node: whoever deletes in a cold tier looks for marks after the manifest is
gone.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from tierd.catalog.entry import Entry
from tierd.catalog.listing import files_of
from tierd.catalog.selectable import selectable_replicas
from tierd.cli import options
from tierd.cli.console import print_note, print_report, timestamp
from tierd.cli.log import check_key, record
from tierd.cli.opened_tiers import OpenedTiers, open_tiers
from tierd.cli.options import Settings, parse_query, settings_of
from tierd.config.sections import Config
from tierd.errors import BadConfig, Incomplete, NotFound
from tierd.format import layout
from tierd.format.audit import EventKind
from tierd.format.ids import CheckpointId, check_run
from tierd.format.text import listed
from tierd.lifecycle.selection import LISTED_MAX, CheckpointQuery, select

_INCOMPLETE_HINT = (
    "mark it on any node once a cold tier has it whole: `tierd status` says which ranks' parts it waits for; "
    "`tierd snapshot --milestone NAME`, from any node, takes one that all nodes send first"
)


async def milestone(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Letters, digits, dots, dashes, underscores.")],
    step: Annotated[
        str, typer.Option("--step", metavar="STEP", help="A number, latest, or milestone:NAME; not needed to remove.")
    ] = "",
    run: options.RunName = None,
    generation: options.GenerationNumber = None,
    remove: Annotated[bool, typer.Option("--remove", help="End this milestone of the checkpoint, for good.")] = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> int:
    """Keep a checkpoint forever, under a name; with --remove, no longer."""
    if not (step or remove):
        raise BadConfig(f"mark as {name}: which checkpoint?", hint="--step STEP; `tierd ls` shows them")
    query = parse_query(run, step or "latest", generation)
    settings = settings_of(context)
    async with open_tiers(settings) as tiers:
        code = tiers.check_reachable()
        if remove:
            checkpoint, names = await unmark(settings, tiers, query if step else None, run, name, dry_run=dry_run)
        else:
            checkpoint, names = await mark(settings, tiers, query, name, dry_run=dry_run)
    done = f"{'remove' if remove else 'mark'}"
    done = f"would {done}" if dry_run else f"{done.removesuffix('e')}ed"
    where = f"in {', '.join(names)}"
    text = f"{done} {checkpoint.run} step {checkpoint.step} (generation {checkpoint.generation}) as {name} {where}"
    if remove:
        of = f"{checkpoint.run} step {checkpoint.step} (generation {checkpoint.generation})"
        text = f"{done} the milestone {name} of {of} {where}"
    report = msgspec.to_builtins(checkpoint) | {"milestone": name, "tiers": names, "is_dry_run": dry_run}
    print_report(report | {"is_removed": remove}, as_json=json, text=text)
    return code


async def unmark(
    settings: Settings,
    tiers: OpenedTiers,
    query: CheckpointQuery | None,
    run: str | None,
    name: str,
    *,
    dry_run: bool,
) -> tuple[CheckpointId, list[str]]:
    """Removes a milestone in every tier that has its checkpoint. Without a `query`, of the one that has that name."""
    config = settings.config()
    check_key(config)
    removal, of_run = layout.removal(name), None if run is None else check_run(run)
    layout.removed_milestone_file(name)  # refuses a bad name
    marked = [entry for entry in tiers.catalog.entries(of_run) if entry.all_marks & {name, removal}]
    if query is not None:
        chosen = select(query, selectable_replicas(tiers.catalog)).candidate.id
        marked = [entry for entry in marked if entry.id == chosen]
    elif any(name in entry.all_milestones for entry in marked):  # others had it: a repeated command may mean those
        marked = [entry for entry in marked if name in entry.all_milestones]
    if not marked:
        names = sorted({each for entry in tiers.catalog.entries(of_run) for each in entry.all_milestones})
        hint = f"milestones: {listed(names, LISTED_MAX)}" if names else "`tierd ls` shows milestones"
        raise NotFound(f"remove the milestone {name}: no checkpoint has it", hint=hint)
    if len(marked) > 1:
        raise BadConfig(
            f"remove the milestone {name}: {listed([entry.id for entry in marked], LISTED_MAX)} have it",
            hint="--run, --step and --generation choose",
        )
    (entry,) = marked
    check_signable(entry, config, f"remove the milestone {name} of {entry.id}")
    names = []
    removed_at = timestamp()
    for tier in (tiers.by_name[tier] for tier in tiers.catalog.tiers if tier in entry.tiers):
        if not dry_run:
            await tier.unmark_milestone(entry.id, name, removed_at)
            # A daemon may have deleted the replica since it was listed.
            files = await files_of(tier, entry.id)
            if layout.GONE in files or not (layout.MANIFEST in files or layout.node_files(files)):
                await tier.store.delete([layout.file_key(entry.id, layout.removed_milestone_file(name))])
                continue
            await record(config, EventKind.UNMARKED, entry.id, tier.name, reason=f"milestone {name}")
        names.append(tier.name)
    if not names:
        raise NotFound(f"remove the milestone {name}: {entry.id} has just been deleted", hint="nothing is left to do")
    return entry.id, names


def check_signable(entry: Entry, config: Config, doing: str) -> None:
    if entry.manifest.signature is not msgspec.UNSET and not config.security.key_file:
        raise BadConfig(
            f"{doing}: it is signed, and no key is configured here to sign the marker",
            hint="set [security] key_file or $TIERD_KEY_FILE: daemons with a key ignore an unsigned marker",
        )


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
    if entry is not None:
        check_signable(entry, config, f"mark {chosen.id}")
        if layout.removal(name) in entry.all_marks:
            raise BadConfig(
                f"mark {chosen.id} as {name}: this milestone was removed from it, which is for good",
                hint="give it another name",
            )
    layout.milestone_file(name)  # refuses a bad name before the first marker is written
    if not keeps_milestones(config):
        print_note("tierd: no tier keeps milestones: milestones = false in every [lifecycle] section of the config")
    marked_at = timestamp()
    names: list[str] = []
    for tier in (tiers.by_name[tier] for tier in chosen.tiers):
        if not dry_run:
            await tier.mark_milestone(chosen.id, name, marked_at)
            # A daemon may have deleted the replica since it was listed.
            names_now = (await files_of(tier, chosen.id)).keys()
            if layout.MANIFEST not in names_now or layout.GONE in names_now:
                await tier.store.delete([layout.file_key(chosen.id, layout.milestone_file(name))])
                continue
            await record(config, EventKind.MARKED, chosen.id, tier.name, reason=f"milestone {name}")
        names.append(tier.name)
    if not names:
        raise NotFound(f"mark {chosen.id} as {name}: it has just been deleted", hint="choose another: `tierd ls`")
    return chosen.id, names


def keeps_milestones(config: Config) -> bool:
    """Whether the policy of a tier keeps them."""
    lifecycle = config.lifecycle
    cold = [config.own_policies.get(each.name, lifecycle.cold) for each in config.cold] or [lifecycle.cold]
    return any(policy.milestones for policy in (lifecycle.hot, *cold))
