"""Adoption: what changes while it is read is refused, and what was adopted does not change later."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.support.foreign import contents, make_folder, write
from tests.support.other_user import OtherUser, needs_root
from tests.support.rooms import Rooms, rooms_at
from tierd import failpoints
from tierd.errors import Corrupt, NotFound, TierdError, Transient
from tierd.format import adopted, layout
from tierd.format.ids import checkpoint_id
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.pool import ThreadPool
from tierd.tiers.tier import Tier
from tierd.transfer.adoption import FolderAdoption, is_same_tree, read_tree, scan_settled
from tierd.transfer.source_tree import scan

CHECKPOINT = checkpoint_id("hf", 500, 1)
LATER = timedelta(seconds=10)


@pytest.fixture
async def pool() -> AsyncIterator[ThreadPool]:
    pool = ThreadPool(4, "adopt", timeout_s=30)
    yield pool
    pool.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "out/checkpoint-500")


def later() -> datetime:
    """A clock that is so far ahead that nothing was written just now."""
    return datetime.now(UTC) + LATER


async def adopt(folder: Path, root: Path, pool: ThreadPool, meanwhile: Callable[[], object] = lambda: None) -> Tier:
    """`meanwhile`: called once, when the first file was read."""
    acts = iter([meanwhile])
    attempt = FolderAdoption(await scan_settled(folder, pool, later), pool=pool)
    async with DirectoryStore(root) as store:
        tier = Tier("hot", store)
        await attempt.copy(CHECKPOINT, store, progress=lambda size_bytes: next(acts, lambda: None)())
        await tier.commit(attempt.manifest(CHECKPOINT, sequence=1))
        manifest = await tier.manifest(CHECKPOINT)
        assert is_same_tree(await read_tree(tier, manifest), manifest, attempt.tree)
    return tier


def rewrite(path: Path) -> None:
    """In place, to the same size."""
    with path.open("r+b") as file:
        file.write(b"x")


def replace(path: Path) -> None:
    new = path.with_name("new")
    shutil.copy2(path, new)  # with the same time of modification
    os.replace(new, path)


CHANGES: dict[str, Callable[[Path], object]] = {
    "rewritten": lambda folder: rewrite(folder / "__0_0.distcp"),
    "grown": lambda folder: os.truncate(folder / "__0_0.distcp", 80_000),
    "cut": lambda folder: os.truncate(folder / "__0_0.distcp", 8),
    "replaced": lambda folder: replace(folder / "__0_0.distcp"),
    "deleted": lambda folder: os.unlink(folder / ".metadata"),
    "file made": lambda folder: write(folder / "late"),
    "folder made": lambda folder: (folder / "late").mkdir(),
    "mode": lambda folder: (folder / ".metadata").chmod(0o644),
    "link": lambda folder: ((folder / "latest").unlink(), (folder / "latest").symlink_to("empty")),
    "gone": lambda folder: os.rename(folder, folder.with_name("other")),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_what_changes_while_it_is_read_is_refused_and_not_committed(
    folder: Path, tmp_path: Path, pool: ThreadPool, change: str
) -> None:
    with pytest.raises((Transient, NotFound), match=r"adopt .*checkpoint-500"):
        await adopt(folder, tmp_path / "hot", pool, lambda: CHANGES[change](folder))
    assert not list((tmp_path / "hot").rglob("manifest.json"))


async def test_a_file_that_is_written_in_place_later_does_not_change_the_checkpoint(
    folder: Path, tmp_path: Path, pool: ThreadPool
) -> None:
    before = contents(folder)["__0_0.distcp"][1]
    await adopt(folder, tmp_path / "hot", pool)
    rewrite(folder / "__0_0.distcp")
    stored = next((tmp_path / "hot/hf").glob("*/*__0_0.distcp"))
    assert stored.read_bytes() == before
    assert stored.stat().st_nlink == 1


def test_a_scan_waits_until_a_write_would_show_and_no_longer(folder: Path) -> None:
    """Two writes within one tick of the kernel's clock have the same time of modification."""
    write(folder / "new")
    tree = scan(folder)
    written_s = tree.modified_ns / 1e9
    assert 0 < tree.unsettled_s(written_s) <= 0.11
    assert tree.unsettled_s(written_s + 0.11) == 0
    assert tree.unsettled_s(written_s - 3600) == 2, "a clock that is ahead delays by 2 s at most"
    os.utime(folder / "new", ns=(10**18, 10**18))
    tree = scan(folder / "new")
    assert tree.unsettled_s(1e9 + 0.5) == 1.5, "a file system that stores whole seconds"
    assert tree.created_at == "2001-09-09T01:46:40.000000+00:00"


async def test_a_full_disk_is_named_and_nothing_is_committed(folder: Path, tmp_path: Path, pool: ThreadPool) -> None:
    failpoints.arm({"TIERD_FAILPOINTS": "file.write=ENOSPC@2"})
    try:
        with pytest.raises(TierdError) as raised:
            await adopt(folder, tmp_path / "hot", pool)
    finally:
        failpoints._armed.clear()  # pyright: ignore[reportPrivateUsage]
    assert raised.value.exit_code == 16
    assert not list((tmp_path / "hot").rglob("manifest.json"))


async def test_a_tree_that_a_manifest_does_not_list_is_corrupt(rooms: Rooms) -> None:
    manifest = await rooms.commit("hot")
    with pytest.raises((Corrupt, NotFound)):
        await read_tree(rooms.hot, manifest)


@pytest.fixture
async def rooms(tmp_path: Path) -> AsyncIterator[Rooms]:
    async with rooms_at(tmp_path) as found:
        yield found


@needs_root
def test_what_this_user_may_not_read_is_refused_by_name() -> None:
    with tempfile.TemporaryDirectory() as top, OtherUser() as other:
        os.chmod(top, 0o755)
        folder = make_folder(Path(top) / "checkpoint-500")
        folder.chmod(0o755)
        assert other.call(_adopt_as_other, str(folder)) == f"adopt {folder}/.metadata: Permission denied"


def _adopt_as_other(folder: str) -> str:
    from tierd.transfer.source_tree import OpenEntry

    try:
        tree = scan(Path(folder))
        for entry in tree.files:
            OpenEntry(tree, entry).close()
    except TierdError as error:
        return error.message.partition(" (")[0]
    return "readable"


def test_stored_names_are_names_of_a_checkpoint(folder: Path) -> None:
    names = [entry.stored_as for entry in scan(folder).stored().files]
    assert len(set(names)) == len(names)
    assert all(layout.is_safe_file_name(name) and not layout.is_ours(name) for name in [*names, adopted.TREE_FILE])
