from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.cgroup import make_v2
from tierd.cgroup import memory_limit
from tierd.tiers import probe
from tierd.tiers.probe import filesystem_of, is_same_disk, probe_directory, probe_memory, probe_space

MOUNTS = """21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
22 21 0:5 / /dev/shm rw,nosuid - tmpfs tmpfs rw
23 21 0:40 / /data\\040sets rw - nfs4 server:/x rw
24 21 259:1 / /nvme rw - xfs /dev/nvme0n1 rw
25 24 0:50 / /nvme rw - overlay overlay rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/nvmes/x", "ext4"),
        ("/dev/shm/tierd", "tmpfs"),
        ("/data sets/tierd", "nfs4"),
        ("/nvme/tierd", "overlay"),
    ],
)
def test_filesystem_is_that_of_the_nearest_mount_and_the_last_on_its_point(path: str, kind: str) -> None:
    assert filesystem_of(Path(path), MOUNTS) == kind


def verdicts(path: Path) -> dict[str, str]:
    return {one.check: one.verdict for one in probe_directory("hot", path, is_hot=True)}


@pytest.mark.parametrize("kind", ["tmpfs", "overlay", "nfs4", "fuse.sshfs"])
def test_memory_container_and_network_filesystems_are_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"21 1 8:1 / / rw - {kind} x rw\n")
    monkeypatch.setattr(probe, "_MOUNTS", mounts)
    assert verdicts(tmp_path)["filesystem"] == "warning"
    mounts.write_text("21 1 8:1 / / rw - xfs x rw\n")
    assert verdicts(tmp_path)["filesystem"] == "ok"


def test_a_mount_point_that_is_not_utf_8_does_not_stop_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_bytes(b"30 1 8:1 / / rw - ext4 /dev/sda1 rw\n31 30 8:2 / /m\xe9dia rw - xfs /dev/sdb1 rw\n")
    monkeypatch.setattr(probe, "_MOUNTS", mounts)
    found = [advice for advice in probe_directory("hot", tmp_path, is_hot=True) if advice.check == "filesystem"]
    assert [advice.verdict for advice in found] == ["ok"]


def test_probe_creates_nothing(tmp_path: Path) -> None:
    found = verdicts(tmp_path / "not" / "yet")
    assert found["directory"] == "ok", "its parent can be written"
    assert list(tmp_path.iterdir()) == []


def test_directory_that_cannot_be_written_is_a_problem() -> None:
    """Root cannot write it either."""
    (found,) = probe_directory("hot", Path("/proc/self"), is_hot=True)
    assert found.verdict == "problem"
    assert "cannot be written" in found.message


def test_free_space_is_compared_with_the_checkpoints_that_the_lifecycle_keeps(tmp_path: Path) -> None:
    room = os.statvfs(tmp_path)
    free_bytes = room.f_bavail * room.f_frsize

    def verdict(checkpoint_bytes: int, used_bytes: int = 0) -> tuple[str, int]:
        sizes = {"checkpoint_bytes": checkpoint_bytes, "used_bytes": used_bytes, "room_bytes": 2 * checkpoint_bytes}
        found = probe_space(tmp_path, keep_last=3, **sizes)
        return found.verdict, found.exit_code if found.verdict == "problem" else 0

    assert verdict(0) == ("note", 0)
    assert verdict(free_bytes // 100) == ("ok", 0)
    assert verdict(free_bytes // 2) == ("warning", 0)
    assert verdict(free_bytes // 2, used_bytes=2 * free_bytes) == ("ok", 0)
    assert verdict(2 * free_bytes) == ("problem", 16)


@pytest.mark.parametrize(
    ("checkpoint_bytes", "verdict", "said"),
    [
        (4_000_000_000, "ok", "a run needs 8 GB for its slots"),
        (4_000_000_001, "note", "the memory limit here is 8 GB"),
        (0, "note", "a run needs 2 times its state for slots"),
    ],
)
def test_slots_are_compared_with_the_memory_limit(
    tmp_path: Path, checkpoint_bytes: int, verdict: str, said: str
) -> None:
    make_v2(tmp_path, {"/": (8_000_000_000, 7_000_000_000)})
    found = probe_memory(memory_limit(tmp_path), checkpoint_bytes=checkpoint_bytes, slots=2)
    assert (found.check, found.verdict) == ("memory", verdict)
    assert said in found.message
    assert probe_memory(None, checkpoint_bytes=checkpoint_bytes, slots=2).verdict == "ok"


def test_same_disk_is_detected_before_the_directories_exist(tmp_path: Path) -> None:
    assert is_same_disk(tmp_path / "hot", tmp_path / "cold")
    assert not is_same_disk(tmp_path, Path("/proc"))
