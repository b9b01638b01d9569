"""The folder of another program, built from stored files: modes, links, and folders that their owner may not write."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tests.support.foreign import contents, make_folder
from tierd.transfer.adopted_output import AdoptedOutput
from tierd.transfer.source_tree import scan


@pytest.mark.parametrize("mode", [0o750, 0o555])
def test_built_folder_equals_the_adopted_one(tmp_path: Path, mode: int) -> None:
    folder = make_folder(tmp_path / "checkpoint-5")
    folder.chmod(mode)
    tree = scan(folder).stored()
    stored = tmp_path / "stored"
    stored.mkdir()
    for entry in tree.files:
        (stored / entry.stored_as).write_bytes((folder / entry.path).read_bytes())
    output = AdoptedOutput(tree, stored, tmp_path / "built")
    built = output.build()
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o700 == 0o700 for path in (built, built / "locked"))
    output.finish(built.rename(tmp_path / "published"))
    assert contents(tmp_path / "published") == contents(folder)
    assert not list(stored.iterdir())
