"""A directory appears whole or not at all. cli/test_restore.py tests how `tierd restore` uses it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierd.errors import LockHeld, TargetNotEmpty
from tierd.transfer.atomic_output import atomic_output


def build(partial: Path) -> Path:
    built = partial / "built"
    built.mkdir()
    (built / "shard").write_bytes(b"bytes")
    return built


def test_output_appears_at_once_and_leaves_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "new" / "restored"
    with atomic_output(target, size_bytes=10) as found:
        built = build(found.partial)
        assert not target.exists()
        found.publish(built)
    assert (target / "shard").read_bytes() == b"bytes"
    assert [one.name for one in target.parent.iterdir()] == ["restored"]


def test_failed_restore_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "new" / "restored"

    def break_off() -> None:
        with atomic_output(target, size_bytes=10) as found:
            build(found.partial)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        break_off()
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_a_killed_restore_are_replaced_but_not_foreign_files(tmp_path: Path) -> None:
    partial = tmp_path / "restored.partial"
    partial.mkdir()
    (partial / "somebody's").touch()
    with pytest.raises(TargetNotEmpty), atomic_output(tmp_path / "restored", size_bytes=1):
        pass
    (partial / ".tierd-restore").touch()
    with atomic_output(tmp_path / "restored", size_bytes=1) as found:
        found.publish(build(found.partial))
    assert (tmp_path / "restored" / "shard").exists()
    assert not partial.exists()


def test_second_restore_to_the_same_target_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "restored"
    with atomic_output(target, size_bytes=1), pytest.raises(LockHeld), atomic_output(target, size_bytes=1):
        pass
