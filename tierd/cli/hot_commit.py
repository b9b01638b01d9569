"""Commits a new checkpoint in the hot tier, for the commands that adopt and import.

The checkpoint is built beside its place in the hot directory and moved there by one rename, so a daemon never sees an
incomplete one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from tierd.catalog.identity import Identities
from tierd.catalog.new_checkpoints import refresh_new
from tierd.cli.console import progress_bar
from tierd.cli.opened_tiers import OpenedTiers
from tierd.config.sections import Config
from tierd.errors import LockHeld, TargetNotEmpty
from tierd.format.digest import preferred
from tierd.format.ids import HOT, CheckpointId
from tierd.format.manifest import Manifest
from tierd.format.signature import Keyring
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.run_lock import run_lock
from tierd.tiers.tier import Tier
from tierd.transfer.adoption import Adoption, is_same_tree, read_tree
from tierd.transfer.atomic_output import AtomicOutput, atomic_output
from tierd.transfer.source_tree import SourceTree


async def existing(tiers: OpenedTiers, checkpoint: CheckpointId, tree: SourceTree) -> Manifest | None:
    """The checkpoint, if it was adopted from these files before. Raises TargetNotEmpty if it was from other files."""
    entry = tiers.catalog.get(checkpoint)
    if entry is None:
        return None
    tier = next(tier for name, tier in tiers.by_name.items() if name in entry.tiers)
    if is_same_tree(await read_tree(tier, entry.manifest), entry.manifest, tree):
        return entry.manifest
    raise TargetNotEmpty(
        f"adopt {tree.where} as {checkpoint}: that was adopted before, from other files or before they were written",
        hint=f"--generation {checkpoint.generation + 1} adopts it as a step of a new timeline",
    )


async def adopt_tree(
    tiers: OpenedTiers, config: Config, keyring: Keyring | None, checkpoint: CheckpointId, attempt: Adoption
) -> tuple[Manifest, int]:
    """(the committed manifest, how many bytes share blocks with the source)."""
    async with new_checkpoint(checkpoint, config, size_bytes=0) as (output, store):
        if not await attempt.can_clone_into(output.descriptor):
            output.check_room(attempt.tree.size_bytes)
        algorithm = "" if keyring is None else preferred()
        with progress_bar(f"step {checkpoint.step} into hot", attempt.tree.size_bytes) as progress:
            await attempt.copy(checkpoint, store, algorithm=algorithm, progress=progress)
        make = partial(attempt.manifest, checkpoint)
        return await commit(checkpoint, make, tiers, config, keyring, output, store), attempt.cloned_bytes


@asynccontextmanager
async def new_checkpoint(
    checkpoint: CheckpointId, config: Config, *, size_bytes: int
) -> AsyncGenerator[tuple[AtomicOutput, DirectoryStore], Any]:
    """A store beside the place of the checkpoint in hot. Raises as `atomic_output`."""
    target = config.hot_path / checkpoint.run / checkpoint.name
    with atomic_output(target, size_bytes=size_bytes, access=config.access) as output:
        timeout_s, url = config.limits.directory_timeout_s, f"file://{output.partial}"
        async with DirectoryStore(output.folder, timeout_s=timeout_s, access=output.access, url=url) as store:
            yield output, store


async def commit(
    checkpoint: CheckpointId,
    make: Callable[..., Manifest],
    tiers: OpenedTiers,
    config: Config,
    keyring: Keyring | None,
    output: AtomicOutput,
    store: DirectoryStore,
) -> Manifest:
    """Move the checkpoint to its place. `make` gets the sequence. Raises LockHeld if another process was faster."""
    # Another command, or a daemon, may have committed other steps while this one was written.
    folder, identities = config.hot_path / checkpoint.run, Identities(config)
    async with run_lock(store.pool, folder):
        hot = tiers.by_name[HOT]
        await refresh_new(tiers.catalog, hot, checkpoint.run, identities, folder=folder, pool=store.pool)
        if tiers.catalog.get(checkpoint) is not None:
            raise LockHeld(f"commit {checkpoint} in hot: another process has just committed that step")
        manifest = make(sequence=tiers.catalog.sequence_max(checkpoint.run) + 1)
        if keyring is not None:
            manifest = keyring.sign_manifest(manifest)
        await Tier(HOT, store, limits=config.limits).commit(manifest)
        output.publish(output.folder / checkpoint.run / checkpoint.name)
    tiers.catalog.add(manifest, HOT)
    return manifest
