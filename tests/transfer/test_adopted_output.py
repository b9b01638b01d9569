"""The folder of another program, built from stored files: modes, links, and folders that their owner may not write."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.support.foreign import contents, make_folder
from tierd.transfer.adopted_output import AdoptedOutput
from tierd.transfer.source_tree import scan


def build(folder: Path, here: Path) -> AdoptedOutput:
    tree = scan(folder).stored()
    stored = here / "stored"
    stored.mkdir()
    for entry in tree.files:
        (stored / entry.stored_as).write_bytes((folder / entry.path).read_bytes())
    output = AdoptedOutput(tree, stored, here / "built")
    output.build()
    return output


@pytest.mark.parametrize("mode", [0o750, 0o555])
def test_built_folder_equals_the_adopted_one(tmp_path: Path, mode: int) -> None:
    folder = make_folder(tmp_path / "checkpoint-5")
    folder.chmod(mode)
    output, built = build(folder, tmp_path), tmp_path / "built"
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o700 == 0o700 for path in (built, built / "locked"))
    output.finish(built.rename(tmp_path / "published"))
    assert contents(tmp_path / "published") == contents(folder)
    assert not list((tmp_path / "stored").iterdir())


def test_a_watch_takes_the_built_folder_for_complete(tmp_path: Path) -> None:
    """The folders are not newer than the files, as if something had been deleted since the save."""
    folder = make_folder(tmp_path / "checkpoint-5")
    for path in folder.rglob("*"):
        os.utime(path, (1.5e9, 1.5e9), follow_symlinks=False)
    output, built = build(folder, tmp_path), tmp_path / "built"
    output.finish(built.rename(tmp_path / "published"))
    tree = scan(tmp_path / "published")
    assert tree.folders_changed_ns == tree.modified_ns == 1_500_000_000 * 10**9


@pytest.mark.parametrize("swapped", ["the target", "a folder in it"])
def test_a_folder_that_is_swapped_after_it_was_published_gives_no_other_folder_its_mode(
    tmp_path: Path, swapped: str
) -> None:
    """Another user can write where the target is. The mode is the other user's choice: of a folder that root adopted,
    or, without a key, of a bucket."""
    source = make_folder(tmp_path / "checkpoint-5")
    (source / "locked").chmod(0o577)
    output = build(source, tmp_path)
    closed = tmp_path / "closed"
    (closed / "locked").mkdir(parents=True, mode=0o700)
    (closed / "locked").chmod(0o700)
    published = (tmp_path / "built").rename(tmp_path / "published")
    if swapped == "the target":
        published.rename(tmp_path / "moved")
        published.symlink_to(closed)
    else:
        (published / "locked").rename(tmp_path / "moved")
        (closed / "locked").rename(published / "locked")
        closed = published
    with pytest.raises(OSError, match="another process has put a folder in place of"):
        output.finish(published)
    assert stat.S_IMODE(os.stat(closed / "locked").st_mode) == 0o700
