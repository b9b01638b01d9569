"""`tierd adopt FOLDER` with --preset or --pattern: adopts every complete checkpoint in a folder of a framework.

It adopts the oldest first and commits each before it begins the next, so a command that was killed can be repeated. A
checkpoint that is not complete, cannot be read, or is older than one adopted before is reported and not adopted.
"""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress
from dataclasses import replace

import msgspec

from tierd.catalog.decisions import decisions
from tierd.catalog.identity import Identities
from tierd.catalog.listing import refresh_run
from tierd.cli.console import duration, now, print_note, print_report, print_result, size
from tierd.cli.hot_commit import adopt_tree, existing
from tierd.cli.log import record
from tierd.cli.opened_tiers import PARTIAL, OpenedTiers
from tierd.config.sections import Config, WatchConfig
from tierd.config.watches import watch_mistakes
from tierd.errors import BadConfig, Full, NotFound, TargetNotEmpty, TierdError
from tierd.format import audit
from tierd.format.ids import HOT, Run
from tierd.keys.key_file import keyring_of
from tierd.lifecycle.policy import Action
from tierd.lifecycle.watched import PRESETS, Listed, Preset, Verdicts, is_name, judge, misfit, nothing_fits, preset_of
from tierd.transfer.adoption import adopted_id, check_one_node
from tierd.transfer.atomic_output import clear_abandoned
from tierd.transfer.history_source import HistorySource
from tierd.transfer.source_tree import SourceTree

QUIET_S = 10.0  # what was written less long ago may not be complete


class History(msgspec.Struct, kw_only=True):
    """The output of `tierd adopt --preset --json`. `adopted`: the steps that were adopted now; `known`: those that were
    adopted before. `left`: by name, why the others were not adopted."""

    run: str
    path: str
    preset: str
    generation: int
    adopted: list[int] = []
    known: list[int] = []
    left: dict[str, str] = {}
    size_bytes: int = 0
    cloned_bytes: int = 0
    seconds: float = 0.0
    is_dry_run: bool


def history_preset(name: str, pattern: str, marker: str, *, is_settled: bool) -> Preset:
    """The preset of this name, or one for the pattern. Raises BadConfig if there is no such preset or the pattern is
    invalid. Without a marker, `--settled` must say that no program writes there."""
    if name and name not in PRESETS:
        raise BadConfig(f"there is no preset {name!r}", hint=f"one of {', '.join(sorted(PRESETS))}")
    renamed = is_settled and pattern.endswith("/") and not marker
    watch = WatchConfig(preset=name, pattern=pattern, marker=marker, renamed=renamed)  # pyright: ignore[reportArgumentType]
    for key, value, expected in watch_mistakes(watch):
        hint = "--marker names it; or --settled: no program writes there" if key == "marker" else ""
        raise BadConfig(f"--{key} {value!r}: expected {expected}", hint=hint)
    return preset_of(watch)


async def adopt_history(
    source: HistorySource,
    run: Run,
    preset: Preset,
    generation: int | None,
    tiers: OpenedTiers,
    config: Config,
    *,
    is_settled: bool,
    is_dry_run: bool,
    as_json: bool,
) -> int:
    """Returns the exit code: PARTIAL if something was not adopted. `is_settled`: no program writes there any more, so
    only the files themselves count, and not their times. Raises Full, and NotFound if there is no checkpoint."""
    started_s = time.monotonic()
    limit = tiers.catalog.claims.generation_limit(run, now().timestamp())
    any_id = adopted_id(tiers.catalog, run, 0, generation, generation_max=limit)
    check_one_node(tiers.catalog, run)
    report = History(run=run, path=source.name, preset=preset.name, generation=any_id.generation, is_dry_run=is_dry_run)
    trees, verdicts = await _judge(source, preset, report, is_settled=is_settled)
    report.left |= verdicts.waiting
    steps = sorted(verdicts.complete.items(), key=lambda item: item[1])
    newest = max((entry.id.step for entry in tiers.catalog.entries(run)), default=-1)
    if not is_dry_run:
        with suppress(OSError):  # what a killed command has left
            await asyncio.to_thread(clear_abandoned, config.hot_path / run, {run}.issuperset)
    for name, step in steps:
        try:
            await _adopt_one(source, trees[name], step, newest, tiers, config, report)
        except Full as error:
            raise Full(
                f"{error.message}; {len(report.adopted)} of {len(steps)} checkpoints were adopted",
                hint="free space there, or let a daemon with cold tiers evict some; then repeat: it goes on from there",
            ) from error
        except TierdError as error:
            report.left[name] = error.message
    report.seconds = round(time.monotonic() - started_s, 6)
    print_report(report, as_json=as_json, text=_print)
    if report.adopted and not is_dry_run:
        await refresh_run(tiers.catalog, tiers.by_name[HOT], run, Identities(config))
        _note_expiring(tiers, config, report)
    return PARTIAL if report.left else 0


async def _judge(
    source: HistorySource, preset: Preset, report: History, *, is_settled: bool
) -> tuple[dict[str, SourceTree], Verdicts]:
    found = await source.names()
    fitting = [name for name, is_folder in found.items() if is_name(name, preset, is_folder=is_folder)]
    links = [name for name in source.links if is_name(name, preset, is_folder=preset.is_folder)]
    report.left |= dict.fromkeys(links, "it is a link, which is not followed")
    if not fitting and not links:
        raise misfit(f"adopt {source.name}", found, preset, hint="--preset {}") or NotFound(
            f"adopt {source.name}: {nothing_fits(preset)}",
            hint="--step N adopts a single folder or file",
        )
    trees: dict[str, SourceTree] = {}
    ready: list[Listed] = []
    for name in sorted(fitting, key=preset.step_of):
        try:
            tree = await source.tree(name)
            if tree is None:
                continue
            if not tree.files:
                report.left[name] = "there is no file in it"
                continue
            changed_s = max(tree.modified_ns, tree.folders_changed_ns) / 1e9
            unchanged_s = math.inf if is_settled else now().timestamp() - changed_s
            entry = await source.listed(tree, preset, unchanged_s=unchanged_s)
            if is_settled and not entry.is_folder and entry.is_whole is None:
                entry = replace(entry, is_whole=True)  # its format does not show it, and nobody writes there
            ready.append(entry)
            trees[name] = tree
        except TierdError as error:
            report.left[name] = error.message
    beside = await source.beside(preset.beside) if preset.beside else (b"", 0.0)
    quiet_s = math.inf if is_settled else QUIET_S
    return trees, judge(ready, preset, quiet_s=quiet_s, beside=beside, named_before=list(trees) if is_settled else ())


async def _adopt_one(
    source: HistorySource,
    tree: SourceTree,
    step: int,
    newest: int,
    tiers: OpenedTiers,
    config: Config,
    report: History,
) -> None:
    """`newest`: the step of the run's newest checkpoint before this command; -1 if there is none."""
    run = Run(report.run)
    checkpoint = adopted_id(tiers.catalog, run, step, report.generation)
    try:
        if await existing(tiers, checkpoint, tree):
            report.known.append(step)
            return
    except TargetNotEmpty as error:
        raise TierdError(error.message) from error
    if step < newest:
        raise TierdError(f"step {newest} was adopted before, so this one was too, and has expired, or it is late")
    report.size_bytes += tree.size_bytes
    if not report.is_dry_run:
        keyring = keyring_of(config.security.key_file, to_sign=True)
        _, cloned_bytes = await adopt_tree(tiers, config, keyring, checkpoint, source.adoption(tree))
        report.cloned_bytes += cloned_bytes
        await record(
            config, audit.EventKind.COMMITTED, checkpoint, HOT, reason=f"adopted from {source.name}/{tree.name}"
        )
    report.adopted.append(step)


def _note_expiring(tiers: OpenedTiers, config: Config, report: History) -> None:
    """Report which checkpoints the policy does not keep: the user may be about to delete the sources."""
    here = {*report.adopted, *report.known}
    expiring = sorted(
        int(decision.checkpoint.step)
        for decision in decisions(tiers.catalog, config)
        if decision.action is Action.EXPIRE
        and decision.checkpoint.run == report.run
        and decision.checkpoint.step in here
    )
    if expiring:
        print_note(
            f"tierd: the policy keeps {len(here) - len(expiring)} of {len(here)} checkpoints: a daemon deletes "
            f"{_steps(expiring).removesuffix(',')} from the tiers. To keep all, set keep_last or keep_every in "
            "[lifecycle.hot] or [lifecycle.cold] before it starts; `tierd lifecycle --explain` shows the plan"
        )


def _print(report: History) -> None:
    where = f"{report.run} (generation {report.generation})"
    verb = "would adopt" if report.is_dry_run else "adopted"
    took = "" if report.is_dry_run else f" in {duration(report.seconds)}"
    print_result(f"{verb} {_steps(report.adopted)} from {report.path} as {where}: {size(report.size_bytes)}{took}")
    if report.known:
        print_result(f"adopted before, and unchanged: {_steps(report.known)}")
    for name, why in report.left.items():
        print_note(f"tierd: left alone: {name}: {why}")


def _steps(steps: list[int]) -> str:
    if not steps:
        return "no checkpoint"
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} checkpoints, step {steps[0]} to {steps[-1]},"
