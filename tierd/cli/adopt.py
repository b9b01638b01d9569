"""`tierd adopt`: makes a folder or file that another program wrote a checkpoint in the hot tier. Needs no daemon.

The checkpoint is built beside its place in the hot directory and moved there by one rename, so a daemon never sees an
incomplete one. A daemon that runs on this directory finds it at once, and copies and deletes it by the policy.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
import typer

from tierd.cli import options
from tierd.cli.adopt_history import adopt_history, history_preset
from tierd.cli.console import duration, now, print_note, print_report, size
from tierd.cli.hot_commit import adopt_tree, existing
from tierd.cli.log import check_key, record
from tierd.cli.opened_tiers import open_tiers
from tierd.cli.options import settings_of
from tierd.cold_tier import cold_of_bucket
from tierd.config.sections import ColdConfig, Config
from tierd.errors import BadConfig
from tierd.format.audit import EventKind
from tierd.format.ids import HOT, check_run
from tierd.keys.key_file import keyring_of
from tierd.lifecycle.watched import PRESETS, fitting
from tierd.tiers.pool import ThreadPool
from tierd.transfer import adoption
from tierd.transfer.adoption import FolderAdoption, adopted_id, check_one_node, scan_settled
from tierd.transfer.history_source import FolderHistory, HistorySource
from tierd.transfer.source_tree import SourceTree


class Adopted(msgspec.Struct, kw_only=True):
    """The output of `tierd adopt --json`. `size_bytes`: of all `files`; `cloned_bytes` of them share blocks with the
    source. `is_new`: False if it was adopted before and nothing was done."""

    run: str
    step: int
    generation: int
    sequence: int
    path: str
    tier: str
    files: int
    size_bytes: int
    cloned_bytes: int = 0
    created_at: str
    seconds: float = 0.0
    is_new: bool
    is_dry_run: bool


async def adopt(
    context: typer.Context,
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="A complete checkpoint, a folder or file; with --preset or --pattern the folder or s3:// URL of many.",
        ),
    ],
    run: Annotated[
        str,
        typer.Option("--run", metavar="RUN", help="The name of the run: one of its own, that no tierd client writes."),
    ],
    step: Annotated[int | None, typer.Option("--step", metavar="N", min=0, help="Its step.")] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            "--preset", metavar="NAME", help=f"Take all checkpoints in PATH, as written by: {', '.join(PRESETS)}."
        ),
    ] = None,
    pattern: Annotated[
        str,
        typer.Option(
            "--pattern",
            metavar="GLOB",
            help="Take all with such a name: a glob with {step} where the number is; for folders a slash at its end.",
        ),
    ] = "",
    marker: Annotated[
        str,
        typer.Option(
            "--marker", metavar="NAME", help="With --preset or --pattern: the file in a folder that is written last."
        ),
    ] = "",
    settled: Annotated[
        bool,
        typer.Option("--settled", help="With --preset or --pattern: no program writes there any more; ignore times."),
    ] = False,
    generation: Annotated[
        int | None,
        typer.Option("--generation", metavar="G", min=1, help="Its generation; default: the newest of the run."),
    ] = None,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> int:
    """Take checkpoints that another program wrote, as opaque bytes: checksummed, copied and deleted by the policy."""
    name = check_run(run)
    config = settings_of(context).config()
    check_key(config)
    is_history = preset is not None or bool(pattern)
    if (step is None) != is_history:
        both = "" if step is None else ", not both"
        raise BadConfig(
            f"adopt needs --step N for one checkpoint, or --preset NAME or --pattern GLOB for all in a folder{both}"
        )
    chosen = history_preset(preset or "", pattern, marker, is_settled=settled) if is_history else None
    if path.startswith("s3://"):
        if chosen is None:
            raise BadConfig(
                f"adopt {path}: --step is for a folder here", hint="--preset or --pattern takes all below it"
            )
        source_url = _bucket_settings(path, config)
        how = {"is_settled": settled, "is_dry_run": dry_run, "as_json": json}
        async with open_tiers(settings_of(context)) as tiers, _bucket_history(source_url, config) as bucket:
            code = tiers.check_reachable()
            return await adopt_history(bucket, name, chosen, generation, tiers, config, **how) or code
    source = _resolved(path)
    _check_outside_tiers(source, config)
    started_s = time.monotonic()
    pool = ThreadPool(adoption.THREADS, "tierd-adopt", where=str(source), timeout_s=config.limits.directory_timeout_s)
    try:
        async with open_tiers(settings_of(context)) as tiers:
            code = tiers.check_reachable()
            if chosen is not None:
                how = {"is_settled": settled, "is_dry_run": dry_run, "as_json": json}
                folder = FolderHistory(source, pool)
                return await adopt_history(folder, name, chosen, generation, tiers, config, **how) or code
            assert step is not None
            limit = tiers.catalog.claims.generation_limit(name, now().timestamp())
            checkpoint = adopted_id(tiers.catalog, name, step, generation, generation_max=limit)
            check_one_node(tiers.catalog, name)
            tree = await scan_settled(source, pool, now)
            if held := _checkpoints_in(tree):
                print_note(f"tierd: {source} as a whole becomes one checkpoint; {held}")
            report = Adopted(
                **msgspec.to_builtins(checkpoint),
                sequence=tiers.catalog.sequence_max(name) + 1,
                path=str(source),
                tier=HOT,
                files=len(tree.files),
                size_bytes=tree.size_bytes,
                created_at=tree.created_at,
                is_new=True,
                is_dry_run=dry_run,
            )
            if (former := await existing(tiers, checkpoint, tree)) is not None:
                report.is_new, report.sequence = False, former.sequence
            elif not dry_run:
                keyring = keyring_of(config.security.key_file, to_sign=True)
                manifest, report.cloned_bytes = await adopt_tree(
                    tiers, config, keyring, checkpoint, FolderAdoption(tree, pool=pool)
                )
                report.sequence = manifest.sequence
                await record(config, EventKind.COMMITTED, checkpoint, HOT, reason=f"adopted from {source}")
    finally:
        pool.close()
    report.seconds = round(time.monotonic() - started_s, 6)
    print_report(report, as_json=json, text=_sentence(report))
    return code


def _resolved(path: str) -> Path:
    try:
        return Path(path).absolute().resolve()
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: before Python 3.13
        raise BadConfig(f"adopt {path}: {error}", hint="is it a link to itself?") from error


def _checkpoints_in(tree: SourceTree) -> str:
    """If the folder seems to hold several checkpoints, which ones, and the option that adopts each; else empty."""
    names = {entry.path: entry.kind == "folder" for entry in tree.entries if "/" not in entry.path}
    if tree.is_file or fitting({tree.name: True}) or not (presets := fitting(names)):
        return ""  # a checkpoint may hold one of another framework: checkpoint-500/global_step500
    first = next(name for name in sorted(names) if fitting({name: names[name]}))
    return f"in it is {first}: --preset {presets[0]} takes each such checkpoint with its own step"


def _sentence(report: Adopted) -> str:
    what = f"{report.path} as {report.run} step {report.step} (generation {report.generation})"
    held = f"{report.files} file{'' if report.files == 1 else 's'}, {size(report.size_bytes)}"
    if not report.is_new:
        return f"adopted before: {what}: nothing has changed there since"
    if report.is_dry_run:
        return f"would adopt {what} in hot: {held}"
    how = "copied"
    if report.cloned_bytes:
        is_all = report.cloned_bytes == report.size_bytes
        how = "shared with the source" if is_all else f"{size(report.cloned_bytes)} of it shared with the source"
    return f"adopted {what} in hot: {held} in {duration(report.seconds)}, {how}"


def _check_outside_tiers(source: Path, config: Config) -> None:
    """Raises BadConfig if a tier is inside the source, or the source is inside a tier."""
    for root in (root.resolve() for root in config.directories.values()):
        if source.is_relative_to(root) or root.is_relative_to(source):
            raise BadConfig(
                f"adopt {source}: the tier at {root} is {'around' if source.is_relative_to(root) else 'in'} it",
                hint="give the folder of one checkpoint, outside of the tiers",
            )


def _bucket_settings(url: str, config: Config) -> ColdConfig:
    """Those of a cold tier in the same bucket, else boto3's defaults. Raises BadConfig if the URL is not
    s3://bucket/prefix, or overlaps a tier."""
    parts = urlsplit(url)
    if not parts.netloc or parts.query or parts.fragment:
        raise BadConfig(f"adopt {url}: expected s3://bucket/prefix")
    place = f"{parts.netloc}/{parts.path.strip('/')}/".replace("//", "/")
    for other in (cold.url for cold in config.cold if cold.url.startswith("s3://")):
        tier = f"{urlsplit(other).netloc}/{urlsplit(other).path.strip('/')}/".replace("//", "/")
        if place.startswith(tier) or tier.startswith(place):
            raise BadConfig(
                f"adopt {url}: the tier at {other} is {'around' if place.startswith(tier) else 'in'} it",
                hint="give a prefix outside of the tiers",
            )
    return cold_of_bucket(url, config)


@asynccontextmanager
async def _bucket_history(cold: ColdConfig, config: Config) -> AsyncGenerator[HistorySource, Any]:
    # Imported here, so that boto3 (0.3 s, 30 MB) is loaded only where a bucket is named.
    from tierd.s3.foreign_objects import ForeignObjects
    from tierd.transfer.bucket_history import BucketHistory

    objects = ForeignObjects(cold, config.limits)
    try:
        yield BucketHistory(objects)
    finally:
        await objects.close()
