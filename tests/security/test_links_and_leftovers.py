"""Another user who can write beside a target, or into a tier, leads no deletion and no write anywhere else.

A swap is made at the worst moment: just before the system call that would follow the link.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.cli import make_manifest
from tests.support.other_user import OTHER_UID, OtherUser, needs_root, open_folder
from tests.support.store_contract import CHUNK_BYTES, entry_of
from tierd.access import Access
from tierd.errors import TargetNotEmpty, TierdError, TierUnreachable
from tierd.format.ids import checkpoint_id
from tierd.tiers.cache import ManifestCache
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.tree import make_folder as make_folder_durably
from tierd.transfer.atomic_output import AtomicOutput, atomic_output
from tierd.transfer.partial_file import PartialFile, partial_name

pytestmark = needs_root
NAME = "x.12345678.partial"
ENTRY = entry_of(b"weights" * 1000, "shard")


@dataclass
class Machine:
    """`shared`: every user may write there. `closed`: root alone can reach it."""

    shared: Path
    closed: Path
    other: OtherUser

    def swap(self, folder: Path) -> Callable[[], object]:
        """The other user puts a link to `closed` in place of a folder."""
        return lambda: self.other.call(swap_for_link, str(folder), str(self.closed))


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    (closed / NAME).write_bytes(b"precious")
    with open_folder() as shared, OtherUser() as other:
        yield Machine(shared, closed, other)
    assert [(path.name, path.read_bytes()) for path in closed.iterdir()] == [(NAME, b"precious")]


@contextmanager
def just_before(function: str, act: Callable[[], object], *, name: str = NAME) -> Generator[None]:
    """Calls `act` before the first call of this function of `os` on a path that ends in `name`."""
    real = getattr(os, function)
    acts = [act]

    def call(path: Any, *arguments: Any, **options: Any) -> Any:
        if acts and os.fspath(path).endswith(name):
            acts.pop()()
        return real(path, *arguments, **options)

    with patch.object(os, function, call):
        yield
    assert not acts, f"os.{function} was not called"


# ── restore targets ──


def test_a_leftover_folder_of_another_user_is_not_adopted(machine: Machine) -> None:
    partial = machine.shared / "restored.partial"
    machine.other.call(make_marked_folder, str(partial), str(machine.closed))
    with (
        pytest.raises(TargetNotEmpty, match=f"the folder belongs to uid {OTHER_UID}"),
        atomic_output(machine.shared / "restored", size_bytes=1),
    ):
        pass
    assert (partial / "link").is_symlink()


def test_a_link_in_place_of_the_leftover_folder_is_not_followed(machine: Machine) -> None:
    (machine.closed / ".tierd-restore").touch()
    machine.other.call(os.symlink, str(machine.closed), str(machine.shared / "restored.partial"))
    with pytest.raises(TierdError, match="restored"), atomic_output(machine.shared / "restored", size_bytes=1):
        pass
    (machine.closed / ".tierd-restore").unlink()


def test_a_leftover_that_is_swapped_for_a_link_while_it_is_cleared_leads_nowhere(machine: Machine) -> None:
    leftover = machine.shared / "restored.partial"
    leftover.mkdir()
    (leftover / ".tierd-restore").touch()
    (leftover / NAME).touch()
    with (
        just_before("unlink", machine.swap(leftover)),
        pytest.raises(TierdError, match="write into"),
        atomic_output(machine.shared / "restored", size_bytes=1),
    ):
        raise OSError(5, "the restore fails")
    assert not (machine.shared / "restored").exists()


def test_what_is_restored_after_a_swap_goes_into_the_folder_that_was_opened(machine: Machine) -> None:
    target = machine.shared / "restored"

    async def restore(output: AtomicOutput) -> None:
        machine.swap(output.partial)()
        async with DirectoryStore(output.folder) as store:
            await store.put_bytes("run/x", b"restored")
        raise OSError(5, "the restore fails")

    with pytest.raises(TierdError, match="write into"), atomic_output(target, size_bytes=1) as output:
        asyncio.run(restore(output))
    assert not target.exists()


@pytest.mark.parametrize(("mode", "is_kept"), [(0o700, True), (0o777, False)])
def test_files_of_an_earlier_attempt_are_kept_only_if_nobody_else_could_write_them(
    machine: Machine, mode: int, is_kept: bool
) -> None:
    partial = machine.shared / "restored.partial"
    partial.mkdir()
    partial.chmod(mode)
    for name in (".tierd-restore", "shard"):
        (partial / name).touch()
    with atomic_output(machine.shared / "restored", size_bytes=1, keep=["shard"]) as output:
        assert (output.folder / "shard").exists() is is_kept
        assert output.folder.stat().st_mode & 0o777 == 0o700


def test_a_new_folder_above_a_target_that_is_swapped_for_a_link_leads_nowhere(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_and_swap(path: Path, access: Access) -> None:
        make_folder_durably(path, access)
        machine.swap(path)()

    monkeypatch.setattr("tierd.transfer.atomic_output.make_folder", make_and_swap)
    with (
        pytest.raises(TierdError, match="write into"),
        atomic_output(machine.shared / "new" / "restored", size_bytes=1),
    ):
        pass


# ── tiers ──


async def test_a_folder_that_is_swapped_for_a_link_while_a_tier_is_swept_leads_nowhere(machine: Machine) -> None:
    (machine.shared / "run").mkdir()
    (machine.shared / "run" / NAME).touch()
    async with DirectoryStore(machine.shared) as store:
        with just_before("unlink", machine.swap(machine.shared / "run")):
            assert await store.sweep_partials() == 1


async def test_a_folder_that_is_swapped_for_a_link_before_it_is_listed_leads_nowhere(machine: Machine) -> None:
    (machine.shared / "run").mkdir()
    async with DirectoryStore(machine.shared) as store:
        with just_before("open", machine.swap(machine.shared / "run"), name="run"):
            assert await store.sweep_partials() == 0


async def test_a_partial_file_of_another_user_is_not_swept(machine: Machine) -> None:
    machine.other.call(write, str(machine.shared / NAME))
    async with DirectoryStore(machine.shared) as store:
        assert await store.sweep_partials() == 0


@pytest.mark.parametrize("leftover", ["of another user", "link", "hard link", "open to others"])
def test_an_unfinished_download_is_continued_only_if_nobody_else_can_change_it(machine: Machine, leftover: str) -> None:
    store = DirectoryStore(machine.shared)
    folder, path = machine.shared / "run", machine.shared / "run" / partial_name(ENTRY)
    folder.mkdir()
    folder.chmod(0o777)
    precious = machine.shared / "precious"
    precious.write_bytes(b"precious")
    if leftover == "of another user":
        machine.other.call(write, str(path))
    elif leftover == "link":
        machine.other.call(os.symlink, str(precious), str(path))
    elif leftover == "hard link":  # the kernel's fs.protected_hardlinks may forbid it to the other user
        os.link(precious, path)
    else:
        path.write_bytes(b"bytes")
        path.chmod(0o666)
    file = PartialFile(store, "run/shard", ENTRY)
    assert not file.begin(True), "its content was taken over"
    assert (path.stat().st_uid, path.stat().st_nlink, path.stat().st_mode & 0o777) == (0, 1, 0o600)
    assert precious.read_bytes() == b"precious"


def test_a_download_of_this_user_is_continued(machine: Machine) -> None:
    store = DirectoryStore(machine.shared)
    assert not PartialFile(store, "run/shard", ENTRY).begin(True)
    assert PartialFile(store, "run/shard", ENTRY).begin(True)


def test_a_download_that_is_swapped_for_another_file_is_not_published(machine: Machine) -> None:
    store = DirectoryStore(machine.shared)
    (machine.shared / "run").mkdir()
    (machine.shared / "run").chmod(0o777)
    file = PartialFile(store, "run/shard", ENTRY)
    file.begin(True)
    machine.other.call(replace, str(machine.shared / "run" / partial_name(ENTRY)))
    for act in (file.make_durable, file.publish, lambda: file.write(0, memoryview(b"x" * CHUNK_BYTES), 1)):
        with pytest.raises(TierUnreachable, match="another process has put a file in place of"):
            act()
    assert not (machine.shared / "run" / "shard").exists()


async def test_a_cache_of_manifests_in_a_folder_of_another_user_is_not_used(machine: Machine) -> None:
    manifest = make_manifest(checkpoint_id("run", 1, 1), [ENTRY])
    fingerprints = {manifest.id: (1, '"etag"')}
    own, theirs = machine.shared / "own", machine.shared / "theirs"
    await ManifestCache(own, "s3://bucket").write({manifest.id: manifest}, fingerprints)
    assert await ManifestCache(own, "s3://bucket").read(fingerprints) == {manifest.id: manifest}
    machine.other.call(make_folder, str(theirs))
    await ManifestCache(theirs, "s3://bucket").write({manifest.id: manifest}, fingerprints)
    assert list(theirs.iterdir()) == []
    own.rename(theirs / "forged")
    os.chown(theirs / "forged", OTHER_UID, OTHER_UID)
    assert await ManifestCache(theirs / "forged", "s3://bucket").read(fingerprints) == {}


# ── what the other user does ──


def make_folder(path: str) -> None:
    os.mkdir(path)


def make_marked_folder(path: str, link_to: str) -> None:
    os.mkdir(path)
    write(f"{path}/.tierd-restore")
    os.symlink(link_to, f"{path}/link")


def swap_for_link(path: str, link_to: str) -> None:
    os.rename(path, f"{path}.moved")
    os.symlink(link_to, path)


def write(path: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    os.write(fd, b"bytes of another user")
    os.close(fd)


def replace(path: str) -> None:
    write(f"{path}.new")
    os.rename(f"{path}.new", path)
