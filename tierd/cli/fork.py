"""`tierd fork`: a new run that begins at a checkpoint of another one, by reference: no byte is copied.

The checkpoint becomes a milestone that names the fork, so it does not expire while the fork may need it. The training
of the new run reads it by that milestone until it has checkpoints of its own.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from tierd.catalog.selectable import selectable_replicas
from tierd.cli import options
from tierd.cli.console import print_report, print_result
from tierd.cli.milestone import keeps_milestones, mark
from tierd.cli.opened_tiers import open_tiers
from tierd.cli.options import parse_query, settings_of
from tierd.errors import BadConfig, TargetNotEmpty, Unsupported
from tierd.format.ids import check_run
from tierd.format.layout import MILESTONE_CHARS_MAX
from tierd.lifecycle.selection import select


async def fork(
    context: typer.Context,
    new_run: Annotated[str, typer.Option("--as", metavar="RUN", help="The new run, which has no checkpoint yet.")],
    step: options.StepName,
    run: options.RunName = None,
    generation: options.GenerationNumber = None,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> int:
    """Begin a new run at a checkpoint of another one, which is then kept. Copies nothing."""
    child = check_run(new_run)
    query = parse_query(run, step, generation, allow_unhealthy=False)
    name = milestone_of(child)
    if not keeps_milestones(settings_of(context).config()):
        raise BadConfig(
            f"fork as {child}: no tier keeps milestones, so the checkpoint would expire while the fork needs it",
            hint="set milestones = true in [lifecycle.cold]",
        )
    async with open_tiers(settings_of(context)) as tiers:
        code = tiers.check_reachable()
        chosen = select(query, selectable_replicas(tiers.catalog)).candidate.id
        if chosen.run == child:
            raise BadConfig(f"fork {chosen} as {child}: that is the same run", hint="give the fork another name")
        if existing := tiers.catalog.entries(child):
            raise TargetNotEmpty(
                f"fork {chosen} as {child}: that run has checkpoints, the newest is {existing[0].id}",
                hint="choose a name that no run has: `tierd runs`",
            )
        of_run = tiers.catalog.entries(chosen.run)
        if others := [each.id for each in of_run if name in each.all_milestones and each.id != chosen]:
            raise TargetNotEmpty(
                f"fork {chosen} as {child}: the milestone {name} is of {others[0]}, and the training would begin there",
                hint="give the fork another name",
            )
        entry = tiers.catalog.get(chosen)
        if entry is not None and entry.manifest.is_adopted:
            raise Unsupported(
                f"fork {chosen} as {child}: another program wrote it, and tierd's client cannot read it",
                hint=f"tierd milestone --step {chosen.step} {name} keeps it; tierd restore gives its folder back",
            )
        checkpoint, names = await mark(settings_of(context), tiers, query, name, dry_run=dry_run)
    resume = f"run:{checkpoint.run}@milestone:{name}"
    verb = "would fork" if dry_run else "forked"
    lines = (
        f"{verb} {checkpoint} as {child}: kept as milestone {name} in {', '.join(names)}",
        f"start the training of {child} with TIERD_RESUME={resume}; it counts while {child} has no checkpoint",
    )
    report = msgspec.to_builtins(checkpoint)
    report |= {"fork": child, "milestone": name, "resume": resume, "tiers": names, "is_dry_run": dry_run}
    print_report(report, as_json=json, text=lambda _: print_result(*lines))
    return code


def milestone_of(run: str) -> str:
    """The milestone that keeps the first checkpoint of a fork."""
    return f"fork-{run}"[:MILESTONE_CHARS_MAX]
