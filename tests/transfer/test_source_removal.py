"""The removal of what was adopted: nothing that has changed is deleted, and nobody sees a part."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.foreign import make_folder, write
from tierd.errors import NotFound, Transient
from tierd.transfer.source_removal import PREFIX, UNCOMPARED, remove_leftovers, remove_source
from tierd.transfer.source_tree import scan


def test_a_folder_and_a_file_are_removed_and_no_link_is_followed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    folder = make_folder(out / "checkpoint-5")
    (folder / "locked").chmod(0o755)
    (folder / "there").symlink_to("empty")
    kept = write(tmp_path / "kept")
    path = write(out / "epoch=3-step=5.ckpt")
    for each in (folder, path):
        remove_source(scan(each))
    assert os.listdir(out) == []
    (out / f"{PREFIX}link").symlink_to(tmp_path)
    remove_leftovers(out)
    assert os.listdir(out) == []
    assert kept.exists()


def test_what_has_changed_since_it_was_adopted_stays(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "out/checkpoint-5")
    tree = scan(folder)
    write(folder / "late")
    with pytest.raises(Transient, match="late"):
        remove_source(tree)
    assert (folder / "__0_0.distcp").exists()


@pytest.mark.parametrize("is_file", [False, True])
def test_what_is_written_just_before_the_rename_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_file: bool
) -> None:
    path = write(tmp_path / "out/step_5.bin") if is_file else make_folder(tmp_path / "out/checkpoint-5")
    written = path if is_file else path / "__0_0.distcp"
    tree, rename = scan(path), os.rename

    def late(*arguments: object, **options: object) -> None:
        monkeypatch.undo()
        written.write_bytes(b"saved again")
        rename(*arguments, **options)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(os, "rename", late)
    with pytest.raises(Transient, match="was written while"):
        remove_source(tree)
    assert os.listdir(tmp_path / "out") == [path.name]
    assert written.read_bytes() == b"saved again"


def test_what_is_gone_is_not_found_and_what_a_killed_removal_left_goes(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "out/checkpoint-5")
    (folder / "locked").chmod(0o755)
    tree = scan(folder)
    folder.rename(folder.with_name(PREFIX + folder.name))
    with pytest.raises(NotFound):
        remove_source(tree)
    remove_leftovers(folder.parent)
    assert os.listdir(folder.parent) == []


def test_what_gets_something_that_cannot_be_adopted_just_before_the_rename_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path / "out/checkpoint-5")
    tree, rename = scan(folder), os.rename

    def late(*arguments: object, **options: object) -> None:
        monkeypatch.undo()
        (folder / "data").symlink_to("/elsewhere")
        rename(*arguments, **options)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(os, "rename", late)
    with pytest.raises(Transient, match="was written while"):
        remove_source(tree)
    assert os.listdir(tmp_path / "out") == [folder.name]


@pytest.mark.parametrize("is_file", [False, True])
def test_what_was_not_compared_when_the_daemon_was_killed_gets_its_name_back(tmp_path: Path, *, is_file: bool) -> None:
    """The program may have written it just before it was renamed."""
    path = write(tmp_path / "out/step_5.bin") if is_file else make_folder(tmp_path / "out/checkpoint-5")
    path.rename(path.with_name(UNCOMPARED + path.name))
    remove_leftovers(path.parent)
    assert os.listdir(path.parent) == [path.name]


def test_what_was_not_compared_stays_where_the_program_has_saved_another_one(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "out/checkpoint-5")
    folder.rename(folder.with_name(UNCOMPARED + folder.name))
    make_folder(folder)
    remove_leftovers(folder.parent)
    assert sorted(os.listdir(folder.parent)) == [UNCOMPARED + folder.name, folder.name]
