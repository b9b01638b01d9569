"""Wrong orders of file operations: a loss of power must show each, by the promise that it breaks."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.simulation.test_power_loss import EVERY
from tests.support.power_loss import scenarios
from tests.support.power_loss.explorer import explorer_at
from tests.support.power_loss.file_calls import FileCalls, Tree
from tests.support.power_loss.promises import HOT, Id, Policy, contents_of
from tests.support.power_loss.scenarios import (
    GENERATION,
    HOT_ALONE,
    RUN,
    TWO_TIERS,
    Daemon,
    Scenario,
    changes_of,
    killed,
    record,
    run_simulated,
)
from tests.support.power_loss.volatile_disk import VolatileDisk
from tierd.format import layout
from tierd.format.ids import CheckpointId, checkpoint_id
from tierd.format.manifest import Manifest
from tierd.tiers import lock, tree
from tierd.tiers.checkpoint_copy import copy_file
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.new_file import NewFile
from tierd.tiers.tier import Tier
from tierd.transfer import atomic_output
from tierd.transfer.verify import Verification, verify_replica
from tierd.workers import replicator

Patch = pytest.MonkeyPatch


@pytest.fixture
def memory() -> Iterator[Path]:
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="power-loss-", dir=shared if shared.is_dir() else None))
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    yield folder
    logging.disable(level)
    shutil.rmtree(folder, ignore_errors=True)


def violations(scenario: Scenario, memory: Path, policy: Policy = TWO_TIERS, *, every: int = EVERY) -> list[str]:
    """Of the first operation after which a promise is broken. Stops there. `every`: as `make test` explores."""
    recording = record(scenario, memory / "machine", policy)
    with explorer_at(memory / "explorer", policy, every=every) as explorer:
        explorer.explore(recording.log, recording.base, stops=True)
        return explorer.violations


# ── wrong variants of production code ──


def no_folder_fsync(patch: Patch) -> None:
    """No fsync of any folder."""
    fsync = FileCalls.fsync

    def skip_folders(calls: FileCalls, fd: int) -> None:
        if not os.path.isdir(f"/proc/self/fd/{fd}"):
            fsync(calls, fd)

    patch.setattr(FileCalls, "fsync", skip_folders)


def no_fsync_after_the_link(patch: Patch) -> None:
    """The manifest's name is not synced."""
    durable_commit = NewFile.commit

    def commit(file: NewFile, *, if_absent: bool = False) -> bool:
        if file._name != layout.MANIFEST:
            return durable_commit(file, if_absent=if_absent)
        os.ftruncate(file._fd, file._size_bytes)
        os.fsync(file._fd)
        return file._link()

    patch.setattr(NewFile, "commit", commit)


def link_before_fsync(patch: Patch) -> None:
    """The file gets its name before its bytes are on the disk."""

    def commit(file: NewFile, *, if_absent: bool = False) -> bool:
        os.ftruncate(file._fd, file._size_bytes)
        is_new = not if_absent or file._link()
        os.fsync(file._folder)
        os.fsync(file._fd)
        return is_new

    patch.setattr(NewFile, "commit", commit)


def no_fsync_of_the_file(patch: Patch) -> None:
    def commit(file: NewFile, *, if_absent: bool = False) -> bool:
        os.ftruncate(file._fd, file._size_bytes)
        is_new = not if_absent or file._link()
        os.fsync(file._folder)
        return is_new

    patch.setattr(NewFile, "commit", commit)


def manifest_first(patch: Patch) -> None:
    """The copy to cold commits before the shards are there."""

    async def commit_first(manifest: Manifest, source: Tier, target: Tier, **options: Any) -> None:
        await target.commit(manifest, raw=await source.manifest_bytes(manifest))
        for entry in manifest.files:
            await copy_file(manifest.id, entry, source, target)

    patch.setattr(replicator, "copy_checkpoint", commit_first)


def told_before_the_commit(patch: Patch) -> None:
    """`Persisted` is sent before the last fsync."""
    commit = Tier.commit

    async def told_first(tier: Tier, manifest: Manifest, **options: Any) -> None:
        if tier.name == HOT:
            Told.calls.mark("told", ("", Id(RUN, manifest.generation, manifest.step)))
        await commit(tier, manifest, **options)

    class Told:
        calls: FileCalls

    start = Daemon.start

    async def remember(daemon: Daemon) -> None:
        Told.calls = daemon._calls
        await start(daemon)

    patch.setattr(Daemon, "start", remember)
    patch.setattr(Tier, "commit", told_first)


def shards_deleted_first(patch: Patch) -> None:
    async def delete(
        tier: Tier, checkpoint: CheckpointId, *, confirm: Callable[[Collection[str]], bool] = lambda names: True
    ) -> bool:
        prefix = layout.checkpoint_prefix(checkpoint)
        keys = [stored.key for stored in await tier.store.list(prefix)]
        if not confirm({key.removeprefix(prefix) for key in keys}):
            return False
        await tier.store.delete(sorted(keys, key=lambda key: key.endswith(layout.MANIFEST)))
        return True

    patch.setattr(Tier, "delete", delete)


def manifest_deleted_without_fsync(patch: Patch) -> None:
    """The folder is synced once, after all files of a checkpoint are deleted."""

    def delete(self: tree.Tree, keys: Sequence[str]) -> None:
        for key in keys:
            with suppress(FileNotFoundError):
                folder, name = self.open_folder(key, create=False)
                with tree.closing_fd(folder), suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)
        if any(layout.MANIFEST in key for key in keys):
            return
        for parent in {key.rpartition("/")[0] for key in keys}:
            self._sync_or_remove(parent)

    patch.setattr(tree.Tree, "delete", delete)


def hot_directory_made_without_fsync(patch: Patch) -> None:
    """As the lock made it once."""
    patch.setattr(lock, "make_folder", lambda path, access: path.mkdir(parents=True, exist_ok=True))
    patch.setattr(tree, "_sync_parent", lambda folder: None)


def parents_of_a_target_made_without_fsync(patch: Patch) -> None:
    """As `tierd restore --to` made them once."""
    patch.setattr(atomic_output, "make_folder", lambda path, access: path.mkdir(parents=True, exist_ok=True))


def listed_is_taken_for_durable(patch: Patch) -> None:
    """As a daemon once relied on what a killed one had committed without its last fsync."""

    async def nothing(store: DirectoryStore, keys: Sequence[str]) -> None:
        return

    patch.setattr(DirectoryStore, "make_durable", nothing)


MUTATIONS: dict[str, tuple[Callable[[Patch], None], Scenario, str]] = {
    "no folder is synced": (no_folder_fsync, scenarios.first_start, "commit_last"),
    "the name of a manifest is not synced": (no_fsync_after_the_link, scenarios.first_start, "durable"),
    "renamed before fsync": (link_before_fsync, scenarios.first_start, "commit_last"),
    "a file is not synced": (no_fsync_of_the_file, scenarios.first_start, "commit_last"),
    "manifest first": (manifest_first, scenarios.one_more, "commit_last"),
    "told before the last fsync": (told_before_the_commit, scenarios.one_more, "durable"),
    "shards are deleted before the manifest": (shards_deleted_first, scenarios.one_more, "commit_last"),
    "the deletion of a manifest is not synced": (manifest_deleted_without_fsync, scenarios.one_more, "commit_last"),
    "the hot directory is not synced": (hot_directory_made_without_fsync, scenarios.first_start, "durable"),
    "the parents of a target are not synced": (
        parents_of_a_target_made_without_fsync,
        scenarios.restore,
        "durable",
    ),
}


WIDER = "no folder is synced"  # what three others break one by one
LONG = (WIDER, "manifest first", "a file is not synced")  # take most of the time


@pytest.mark.parametrize(
    "mutation", [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in MUTATIONS]
)
def test_a_wrong_order_is_caught(mutation: str, memory: Path, monkeypatch: Patch) -> None:
    apply, scenario, promise = MUTATIONS[mutation]
    apply(monkeypatch)
    # With fewer states, that mutation breaks another promise first.
    found = violations(scenario, memory, every=1 if mutation == WIDER else EVERY)
    assert found
    assert promise in found[0]


@pytest.mark.parametrize("tier", ["hot", pytest.param("cold", marks=pytest.mark.long)])
def test_relying_on_what_a_killed_daemon_did_not_sync_is_caught(tier: str, memory: Path, monkeypatch: Patch) -> None:
    """The daemon is killed between the link of a manifest and the fsync of its folder. The next one lists the
    checkpoint and deletes an older replica."""
    policy = HOT_ALONE if tier == HOT else TWO_TIERS
    calls = changes_of(scenarios.life, memory / "machine", policy)
    is_link = ("link", f"{tier}/{Id(RUN, GENERATION, 30 if tier == HOT else 10).folder}/manifest.json")
    scenario = killed(calls.index(is_link) + 1)
    listed_is_taken_for_durable(monkeypatch)
    found = violations(scenario, memory, policy)
    assert found
    assert "durable" in found[0] or "last_replica" in found[0]


def test_torn_bytes_are_noticed_when_someone_asks(memory: Path, monkeypatch: Patch) -> None:
    """Where the files of a checkpoint were never synced, a verification finds each torn replica, and no other."""
    no_fsync_of_the_file(monkeypatch)
    recording = record(scenarios.first_start, memory / "machine")
    disk = VolatileDisk(recording.base)
    for operation in recording.log:
        disk.apply(operation)
    verdicts: set[bool] = set()
    for number, tree_left in enumerate(disk.states()):
        root = memory / str(number)
        write_tree(root, tree_left)
        contents = contents_of(tree_left)
        for tier, checkpoint in (*contents.whole, *contents.broken):
            verification = run_simulated(verify_in(root / tier, checkpoint))
            assert bool(verification.problems) == ((tier, checkpoint) in contents.broken), verification
            verdicts.add(bool(verification.problems))
        shutil.rmtree(root)
    assert verdicts == {True, False}


async def verify_in(root: Path, checkpoint: Id) -> Verification:
    async with DirectoryStore(root) as store:
        named = checkpoint_id(checkpoint.run, checkpoint.step, checkpoint.generation)
        verification = await verify_replica(Tier(HOT, store), named)
        assert verification is not None
        return verification


def write_tree(root: Path, contents: Tree) -> None:
    root.mkdir()
    for path, content in sorted(contents.items()):
        if content is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(content)
