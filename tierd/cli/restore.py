"""`tierd restore`: one checkpoint out of any tier into a directory, every chunk verified.

Needs no daemon, except for the memory tier. What one replica cannot give comes from the next tier that has the
checkpoint. Of a checkpoint over several nodes, hot is what the nodes have together. The directory appears whole and
verified, or not at all. After an interruption the same command continues.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tierd.access import PRIVATE
from tierd.catalog.selectable import selectable_replicas
from tierd.cli import daemon_http, options
from tierd.cli.adopted_restore import PartsOutput, check_node
from tierd.cli.console import duration, print_note, print_report, size
from tierd.cli.node_replicas import find_on_nodes
from tierd.cli.opened_tiers import open_tiers
from tierd.cli.options import Settings, check_one_place, parse_query, settings_of
from tierd.cli.partial_restore import Subset, fetch_subset
from tierd.cli.replicas import Replicas
from tierd.cli.sidecar_restore import SidecarRestore
from tierd.config.sections import Config
from tierd.errors import BadConfig, DaemonUnreachable, TierdError, Unsupported
from tierd.format import layout
from tierd.format.health import Diagnosis
from tierd.format.ids import AUTO, MEMORY, CheckpointId, check_run
from tierd.format.manifest import Manifest, encode_marker
from tierd.lifecycle.selection import CheckpointQuery
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.readable_tier import ReadableTier
from tierd.tiers.tier import Tier
from tierd.transfer.adopted_output import AdoptedOutput
from tierd.transfer.adoption import read_tree
from tierd.transfer.atomic_output import AtomicOutput, atomic_output, check_target
from tierd.transfer.fetch import Fetch, partial_keys

Convert = Callable[[Path, Manifest, AtomicOutput], Awaitable[Path]]
"""(folder of the restored checkpoint, its manifest, where to work) → the durable file or folder to publish instead."""


class Restored(msgspec.Struct, kw_only=True):
    """What `tierd restore --json` prints. `kind`: "adopted" for the folder of another program, as it was. `tier`: the
    last that was read; `given_bytes`: what each tier gave.
    `resumed_bytes`: left by an earlier attempt. `passed_over`: tiers that could not give all of it, and why.
    `sidecars`: the files that the tiers have of those that the run writes beside its checkpoints. `node`: of several
    that adopted it together, the one whose folder it is; None: all of it."""

    run: str
    step: int
    generation: int
    kind: str
    tier: str
    to: str
    size_bytes: int
    seconds: float
    bytes_per_s: int
    is_verified: bool
    is_whole: bool
    given_bytes: dict[str, int]
    resumed_bytes: int
    passed_over: dict[str, str]
    sidecars: list[str] = []
    node: int | None = None


async def restore(
    context: typer.Context,
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="A new or empty directory.")],
    tier: options.SourceTier = AUTO,
    run: options.RunName = None,
    step: options.StepName = "latest",
    generation: options.GenerationNumber = None,
    place: options.From = None,
    allow_unhealthy: options.AllowUnhealthy = False,
    allow_unsigned: options.AllowUnsigned = False,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="GLOB", help="Only tensors whose names match, as 'model.*'; may be repeated."),
    ] = None,
    rank: Annotated[int | None, typer.Option("--rank", metavar="N", min=0, help="Only the shard of that rank.")] = None,
    node: Annotated[
        int | None,
        typer.Option(
            "--node", metavar="N", min=0, help="Only the folder of that node, of several that adopted it together."
        ),
    ] = None,
    sidecars: Annotated[
        Path | None,
        typer.Option(
            "--sidecars", metavar="FOLDER", help="Also write the files beside the run's checkpoints there, as new ones."
        ),
    ] = None,
    json: options.Json = False,
) -> int:
    """Copy a checkpoint, or a part of it, into a directory, verified."""
    target = resolve_target(to, tier, place)
    query = parse_query(run, step, generation, tier=place or tier, allow_unhealthy=allow_unhealthy)
    subset = Subset(only=tuple(only or ()), rank=rank) if only or rank is not None else None
    if allow_unsigned and query.step is None:
        raise BadConfig(
            "--allow-unsigned reads a checkpoint without checking its signature, so --step must name it",
            hint="give --run and the number of a step that you trust: --step N",
        )
    settings = settings_of(context)
    beside = SidecarRestore(into=sidecars, tier=None if tier in (AUTO, MEMORY) else tier, place=place)
    restored = await restore_to(
        target, settings, query, place, subset=subset, node=node, allow_unsigned=allow_unsigned, beside=beside
    )
    part = "a part" if node is None else f"the folder of node {node}"
    verb = "restored" if restored.is_whole else f"restored {part} of"
    resumed = f", {size(restored.resumed_bytes)} of it from an earlier attempt" if restored.resumed_bytes else ""
    text = (
        f"{verb} {restored.run} step {restored.step} (generation {restored.generation}) from "
        f"{' and '.join(restored.given_bytes) or restored.tier} to {restored.to}: {size(restored.size_bytes)} in "
        f"{duration(restored.seconds)}, {size(restored.bytes_per_s)}/s{resumed}, verified"
    )
    print_report(restored, as_json=json, text=text)
    beside.report(restored.run)
    return 0


def resolve_target(to: Path, tier: str, place: str | None) -> Path:
    """The absolute path of `--to`, which must be new or empty."""
    check_one_place(place, None if tier == AUTO else tier)
    target = to.absolute().parent.resolve() / to.absolute().name if not to.is_dir() else to.resolve()
    check_target(target)
    return target


async def restore_to(
    target: Path,
    settings: Settings,
    query: CheckpointQuery,
    place: str | None,
    *,
    convert: Convert | None = None,
    subset: Subset | None = None,
    node: int | None = None,
    allow_unsigned: bool = False,
    beside: SidecarRestore | None = None,
) -> Restored:
    """Write the selected checkpoint to the target, verified; or what `convert` makes of it, a subset, or the folder of
    one node.
    `beside`: what to do with the sidecar files of its run then."""
    config = None if place else settings.config()
    health: dict[CheckpointId, bool | None] = {}
    if config and query.tier in (AUTO, MEMORY):
        try:
            health = daemon_http.find(config).health_in_memory()
        except DaemonUnreachable:
            if query.tier == MEMORY:  # else nothing is in memory
                raise
    only = None if place or query.tier in (AUTO, MEMORY) else query.tier
    async with open_tiers(settings, place=place, only=only, allow_unsigned=allow_unsigned) as tiers:
        if query.tier != MEMORY:
            tiers.check_reachable()
        inventory = selectable_replicas(tiers.catalog, in_memory=health.keys(), health=health)
        by_name: Mapping[str, ReadableTier] = tiers.by_name
        async with AsyncExitStack() as stack:
            nodes = await find_on_nodes(query, inventory, tiers, config, stack) if config else None
            if nodes is not None:
                query, inventory, by_name = nodes.query, nodes.inventory, nodes.tiers
            replicas = await stack.enter_async_context(Replicas(query, inventory, by_name, config))
            is_whole = convert is None and subset is None and node is None
            is_own = config is not None and _is_own_place(replicas.chosen.id, target, config, is_whole=is_whole)
            try:
                restored = await _fetch(replicas, target, convert, subset, node, is_for_tier=is_own)
            except TierdError as error:
                raise (nodes.refusal(error) if nodes is not None else error) from error
        if beside is not None:
            restored.sidecars = await beside.run(
                tiers, check_run(restored.run), PRIVATE if config is None else config.access
            )
        return restored


def _is_own_place(checkpoint: CheckpointId, target: Path, config: Config, *, is_whole: bool) -> bool:
    """Whether the target is the checkpoint's own folder in a tier. Raises BadConfig where it is another place in a
    tier, or not for a whole checkpoint: a tier holds nothing else."""
    own = f"{checkpoint.run}/{checkpoint.name}"
    for root in (root.resolve() for root in config.directories.values()):
        if is_whole and target == root / own:
            return True
        if target.is_relative_to(root):
            raise BadConfig(
                f"write {checkpoint} into {target}: that is inside the tier at {root}, but not its place there",
                hint=f"--to {root / own}" if is_whole else "name a place outside of it",
            )
    return False


async def _fetch(
    replicas: Replicas,
    target: Path,
    convert: Convert | None,
    subset: Subset | None,
    node: int | None,
    *,
    is_for_tier: bool,
) -> Restored:
    nearest = await replicas.nearest()
    manifest = replicas.manifest
    checkpoint = replicas.chosen.id
    if manifest.is_adopted and (convert or subset):
        raise Unsupported(
            f"read tensors of {checkpoint}: another program wrote it, and tierd does not read its files",
            hint="`tierd restore` without --only, --rank and --format gives its folder back",
        )
    check_node(manifest, node)
    is_of_nodes = manifest.is_adopted and manifest.world_size > 1 and not is_for_tier
    adopted: AdoptedOutput | None = None
    started_s = time.monotonic()
    files = subset.files(manifest) if subset else [entry.name for entry in manifest.files]
    needed_bytes = 0 if subset or is_of_nodes else manifest.size_bytes * (2 if convert else 1)
    keep = partial_keys(manifest, files)
    with atomic_output(target, size_bytes=needed_bytes, keep=keep, access=replicas.access) as output:
        store = DirectoryStore(output.folder, access=output.access, url=f"file://{output.partial}")
        try:
            if subset:
                wanted_bytes, made = await fetch_subset(subset, manifest, files, replicas, store, output)
            elif is_of_nodes:
                parts = PartsOutput(manifest, node, replicas, store, output)
                adopted = await parts.fetch()
                wanted_bytes, made = parts.wanted_bytes, adopted.build()
            else:
                fetch = Fetch(manifest, store)
                await replicas.complete(fetch, output, f"step {checkpoint.step}")
                await fetch.finish()
                await _commit(replicas, Tier("restored", store))
                wanted_bytes, made = fetch.wanted_bytes, output.folder / checkpoint.run / checkpoint.name
                if manifest.is_adopted and not is_for_tier:
                    tree = await read_tree(Tier("restored", store), manifest)
                    adopted = AdoptedOutput(tree, made, output.folder / "adopted")
                    made = adopted.build()
            if convert:
                output.is_worth_keeping = False
                made = await convert(made, manifest, output)
            size_bytes = wanted_bytes if is_of_nodes else manifest.size_bytes
            if subset:
                size_bytes = sum(file.stat().st_size for file in made.iterdir())
            output.publish(made)
            if adopted is not None:
                adopted.finish(target)
        except BaseException:
            if output.is_worth_keeping:
                print_note(f"tierd: the fetched chunks stay in {output.partial}; the same command continues from them")
            raise
        finally:
            await store.close()
    seconds = time.monotonic() - started_s
    given_bytes = replicas.given_bytes
    return Restored(
        **msgspec.to_builtins(checkpoint),
        kind=manifest.kind,
        tier=list(given_bytes)[-1] if given_bytes else nearest.name,
        to=str(target),
        size_bytes=size_bytes,
        seconds=round(seconds, 6),
        bytes_per_s=round(sum(given_bytes.values()) / max(seconds, 1e-6)),
        is_verified=True,
        is_whole=subset is None and node is None,
        given_bytes=given_bytes,
        resumed_bytes=wanted_bytes - sum(given_bytes.values()),
        passed_over={name: error.message for name, error in replicas.passed_over.items()},
        node=node,
    )


async def _commit(replicas: Replicas, restored: Tier) -> None:
    """The markers and the manifest, byte for byte: a node that only restores has no key that signs."""
    chosen = replicas.chosen
    unsigned: dict[str, bytes] = {}  # what to write where no tier has the marker's bytes
    for name in sorted(chosen.milestones):
        content = {"milestone": name, "created_at": replicas.manifest.created_at}
        unsigned[layout.file_key(chosen.id, layout.milestone_file(name))] = encode_marker(content)
    if chosen.is_healthy is not None:  # the memory tier has verdicts, but no markers
        key = layout.diagnosis_key(chosen.id, is_healthy=chosen.is_healthy)
        unsigned[key] = encode_marker(Diagnosis(healthy=chosen.is_healthy))
    for key, content in unsigned.items():
        raw = await replicas.marker(key)
        if raw is None and replicas.has_key:
            print_note(f"tierd: restored without {key}: no tier has one that is signed")
        else:
            await restored.store.put_bytes(key, content if raw is None else raw)
    await restored.commit(replicas.manifest, raw=replicas.raw)
