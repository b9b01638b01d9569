"""`tierd import`: makes a file of another format a checkpoint in the hot tier, as tierd's client writes one.

The checkpoint is built beside its place in the hot directory, read back, and moved there by one rename: a daemon never
sees an incomplete one. Needs no daemon; one that runs on this directory finds it at once.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from tierd.cli import daemon_http, options
from tierd.cli.console import duration, now, print_note, print_report, progress_bar, size
from tierd.cli.diff import parse_checkpoint
from tierd.cli.flat_import import open_flat
from tierd.cli.hot_commit import commit, new_checkpoint
from tierd.cli.import_format import ForeignFormat, format_of
from tierd.cli.import_template import open_template
from tierd.cli.log import check_key, record
from tierd.cli.opened_tiers import OpenedTiers, open_tiers
from tierd.cli.options import settings_of
from tierd.cli.safetensors_import import open_safetensors
from tierd.cli.torch_import import open_torch
from tierd.config.sections import Config
from tierd.errors import BadConfig, BadRequest, Corrupt, DaemonUnreachable, TargetNotEmpty
from tierd.format.audit import EventKind
from tierd.format.digest import preferred
from tierd.format.ids import HOT, CheckpointId, Run, check_run
from tierd.format.manifest import Manifest
from tierd.keys.key_file import keyring_of
from tierd.tiers.tier import Tier
from tierd.transfer.imported import ImportedState, imported_id
from tierd.transfer.verify import verify_files

MODULE = "module"  # the kind of a model's section in a state tree


class Imported(msgspec.Struct, kw_only=True):
    """What `tierd import --json` prints. `is_new`: False where the same was imported before, and nothing was done."""

    run: str
    step: int
    generation: int
    sequence: int
    path: str
    format: str
    tier: str
    size_bytes: int
    created_at: str
    seconds: float = 0.0
    is_new: bool
    is_dry_run: bool


async def import_(
    context: typer.Context,
    path: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="A file of torch.save, safetensors or flat, or the folder of a model."),
    ],
    run: Annotated[str, typer.Option("--run", metavar="RUN", help="The run that gets the checkpoint.")],
    step: Annotated[
        int | None,
        typer.Option("--step", metavar="N", min=0, help="Its step. A flat file of another step is refused."),
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(
            "--like",
            metavar="CHECKPOINT",
            help="[RUN/]STEP, latest or milestone:NAME: names the parameters in a flat file, or in a torch file's "
            "optimizer, and gives a flat file all that it lacks.",
        ),
    ] = None,
    generation: Annotated[
        int | None,
        typer.Option("--generation", metavar="G", min=1, help="Its generation; default: the newest of the run."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="KEY", help="For a torch file: the key of the model's state dict; the rest is extra."
        ),
    ] = None,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> int:
    """Make a file of another format a checkpoint that the training restores as one of its own."""
    name = check_run(run)
    settings = settings_of(context)
    config = settings.config()
    check_key(config)
    check_no_trainer(config, name)
    started_s = time.monotonic()
    async with open_tiers(settings) as tiers:
        code = tiers.check_reachable()
        async with _open(path.absolute(), name, like, step, model, tiers, config) as state:
            report = await import_state(state, path.absolute(), name, generation, tiers, config, is_dry_run=dry_run)
            is_dict = "model" not in state.trees[0] or state.trees[0]["model"]["kind"] != MODULE
    report.seconds = round(time.monotonic() - started_s, 6)
    print_report(report, as_json=json, text=sentence(report))
    if is_dict:
        print_note("tierd: DictState restores it; --model KEY makes the entry KEY the model of a TrainingState")
    return code


@asynccontextmanager
async def _open(
    path: Path, run: Run, like: str | None, step: int | None, model: str | None, tiers: OpenedTiers, config: Config
) -> AsyncGenerator[ImportedState, Any]:
    """The state in the file, by what the file is. With `like` and no `model` it is a flat file: its first bytes are a
    number, and may be those of any other format."""
    query = None if like is None else parse_checkpoint(like, None if "/" in like else run)
    if query is not None and model is None:
        async with open_flat(path, query, tiers, config) as state:
            if step not in (None, state.step):
                raise BadConfig(f"import {path} as step {step}: it is of step {state.step}", hint="leave --step out")
            yield state
        return
    format = format_of(path)
    if step is None:
        raise BadConfig(f"import {path}: a file of the format {format.value} does not say its step", hint="--step N")
    if format is ForeignFormat.safetensors and model is not None:
        raise BadConfig(f"import {path}: --model is for a file of torch.save", hint="all tensors here are the model's")
    if query is not None:
        async with (
            open_template(path, query, tiers, config) as template,
            open_torch(path, step, model, template) as state,
        ):
            yield state
        return
    opened = open_torch(path, step, model) if format is ForeignFormat.torch else open_safetensors(path, step)
    async with opened as state:
        yield state


def sentence(report: Imported) -> str:
    what = f"{report.path} ({report.format}) as {report.run} step {report.step} (generation {report.generation})"
    if not report.is_new:
        return f"imported before: {what}: the checkpoint has the same bytes"
    if report.is_dry_run:
        return f"would import {what} into hot: {size(report.size_bytes)}"
    return f"imported {what} into hot: {size(report.size_bytes)} in {duration(report.seconds)}, verified"


def check_no_trainer(config: Config, run: Run) -> None:
    """Raises BadRequest where trainers of the run are attached to the daemon of this hot directory, and
    DaemonUnreachable where that daemon does not answer."""
    try:
        status = daemon_http.find(config).status
    except DaemonUnreachable:
        if daemon_http.holder(config) is None:
            return
        raise
    report = status.find_run(run)
    if report is not None and report.ranks_attached:
        raise BadRequest(
            f"import into {run}: its training runs, {report.ranks_attached} ranks are attached",
            hint=f"`tierd stop --run {run}` first, or choose another run name",
        )


async def import_state(
    state: ImportedState,
    path: Path,
    run: Run,
    generation: int | None,
    tiers: OpenedTiers,
    config: Config,
    *,
    is_dry_run: bool,
) -> Imported:
    """Commits the state, unless the same was imported before. Raises TargetNotEmpty if other bytes are there."""
    limit = tiers.catalog.claims.generation_limit(run, now().timestamp())
    checkpoint = imported_id(tiers.catalog, run, state.step, generation, generation_max=limit)
    shards = state.shards(checkpoint)
    report = Imported(
        **msgspec.to_builtins(checkpoint),
        sequence=tiers.catalog.sequence_max(run) + 1,
        path=str(path),
        format=state.format,
        tier=HOT,
        size_bytes=sum(shard.size_bytes for shard in shards.values()),
        created_at=state.created_at,
        is_new=True,
        is_dry_run=is_dry_run,
    )
    if (entry := tiers.catalog.get(checkpoint)) is not None:
        with progress_bar(f"comparing step {checkpoint.step}", report.size_bytes) as progress:
            difference = await state.difference(entry.manifest, shards, progress=progress)
        if difference:
            raise TargetNotEmpty(
                f"import {path} as {checkpoint}: that checkpoint exists, and {difference}",
                hint=f"--generation {checkpoint.generation + 1} imports it as a step of a new timeline",
            )
        report.is_new, report.sequence = False, entry.manifest.sequence
    elif not is_dry_run:
        manifest = await _commit(state, checkpoint, tiers, config)
        report.sequence = manifest.sequence
        await record(config, EventKind.COMMITTED, checkpoint, HOT, reason=f"imported from {path}")
    return report


async def _commit(state: ImportedState, checkpoint: CheckpointId, tiers: OpenedTiers, config: Config) -> Manifest:
    keyring = keyring_of(config.security.key_file, to_sign=True)
    shards = state.shards(checkpoint)
    size_bytes = sum(shard.size_bytes for shard in shards.values())
    async with new_checkpoint(checkpoint, config, size_bytes=size_bytes) as (output, store):
        algorithm = "" if keyring is None else preferred()
        with progress_bar(f"step {checkpoint.step} into hot", size_bytes) as progress:
            files = await state.write(checkpoint, shards, store, algorithm=algorithm, progress=progress)
        with progress_bar("reading back", size_bytes) as progress:
            written = state.manifest(checkpoint, files, sequence=1)
            verification = await verify_files(Tier(HOT, store, limits=config.limits), written, progress=progress)
        if verification.problems:
            raise Corrupt(
                f"import {checkpoint}: what was written does not read back: {verification.sentences[0]}",
                hint="nothing was committed; docs/RUNBOOK.md#corrupt-chunk",
            )
        state.check_unchanged()
        return await commit(
            checkpoint, partial(state.manifest, checkpoint, files), tiers, config, keyring, output, store
        )
