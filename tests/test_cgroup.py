"""The memory limit of a cgroup, read from trees of files as cgroup v1 and v2 have them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cgroup import UNLIMITED_V1, make_v1, make_v2
from tests.support.daemon import serving
from tests.support.waiting import wait_until
from tierd.cgroup import available_bytes, memory_limit

Make = Callable[..., None]
GB = 1_000_000_000
MIB = 1 << 20


def test_v2_limit_of_the_own_cgroup(tmp_path: Path) -> None:
    make_v2(tmp_path, {"/pod/trainer": (8 * GB, 3 * GB)})
    limit = memory_limit(tmp_path)
    assert limit is not None
    assert (limit.limit_bytes, limit.used_bytes, limit.free_bytes) == (8 * GB, 3 * GB, 5 * GB)
    assert limit.path == tmp_path / "sys/fs/cgroup/pod/trainer"


def test_v1_limit_of_the_own_cgroup(tmp_path: Path) -> None:
    make_v1(tmp_path, {"/docker/x": (8 * GB, 3 * GB)})
    limit = memory_limit(tmp_path)
    assert limit is not None
    assert (limit.limit_bytes, limit.used_bytes, limit.free_bytes) == (8 * GB, 3 * GB, 5 * GB)


@pytest.mark.parametrize("make", [make_v1, make_v2])
def test_of_several_limits_up_to_the_root_the_one_with_the_least_free_memory_counts(tmp_path: Path, make: Make) -> None:
    make(tmp_path, {"/pod": (10 * GB, 9 * GB), "/pod/trainer": (8 * GB, 3 * GB)})
    limit = memory_limit(tmp_path)
    assert limit is not None
    assert (limit.path.name, limit.free_bytes) == ("pod", GB)


@pytest.mark.parametrize("make", [make_v1, make_v2])
def test_a_container_whose_own_path_is_not_mounted_has_the_limit_of_the_root(tmp_path: Path, make: Make) -> None:
    make(tmp_path, {"/": (8 * GB, 3 * GB)}, own="/docker/of-the-host")
    limit = memory_limit(tmp_path)
    assert limit is not None
    assert limit.free_bytes == 5 * GB


@pytest.mark.parametrize("make", [make_v1, make_v2])
def test_a_path_outside_of_the_mounted_tree_is_not_followed(tmp_path: Path, make: Make) -> None:
    make(tmp_path, {"/": (8 * GB, 3 * GB)}, own="/../../../../../secret")
    limit = memory_limit(tmp_path)
    assert limit is not None
    assert limit.path.is_relative_to(tmp_path / "sys/fs/cgroup")


@pytest.mark.parametrize("make", [make_v1, make_v2])
def test_page_cache_of_files_counts_as_free_because_the_kernel_drops_it_first(tmp_path: Path, make: Make) -> None:
    """A trainer that reads a large data set has a full cgroup, and is in no danger."""
    make(tmp_path, {"/": (8 * GB, 8 * GB)}, cached_bytes=6 * GB)
    limit = memory_limit(tmp_path)
    assert limit is not None
    assert (limit.used_bytes, limit.free_bytes) == (2 * GB, 6 * GB)


@pytest.mark.parametrize("make", [make_v1, make_v2])
def test_free_swap_that_the_cgroup_may_use_counts_as_free(tmp_path: Path, make: Make) -> None:
    make(tmp_path, {"/": (8 * GB, 8 * GB)}, swap_bytes=4 * GB, swap_free_kib=1_000_000)
    limit = memory_limit(tmp_path)
    assert limit is not None
    assert limit.free_bytes == 1_024_000_000


@pytest.mark.parametrize("make", [make_v1, make_v2])
def test_without_a_limit_there_is_none(tmp_path: Path, make: Make) -> None:
    make(tmp_path, {"/pod": (None, GB)})
    assert memory_limit(tmp_path) is None


@pytest.mark.parametrize("files", [{}, {"proc/self/cgroup": "0::/\n"}, {"proc/self/cgroup": "no cgroup file\n"}])
def test_a_machine_without_cgroups_has_no_limit(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory_limit(tmp_path) is None


def test_damaged_files_are_skipped(tmp_path: Path) -> None:
    make_v2(tmp_path, {"/": (8 * GB, 3 * GB), "/pod": (GB, GB)})
    (tmp_path / "sys/fs/cgroup/pod/memory.current").write_text("not a number")
    limit = memory_limit(tmp_path)
    assert limit is not None
    assert limit.path == tmp_path / "sys/fs/cgroup"


def test_processes_of_one_cgroup_have_the_same_identity_and_others_another(tmp_path: Path) -> None:
    make_v2(tmp_path, {"/a": (8 * GB, GB)})
    first, second = memory_limit(tmp_path), memory_limit(tmp_path)
    make_v2(tmp_path, {"/b": (8 * GB, GB)})
    other = memory_limit(tmp_path)
    assert first is not None
    assert second is not None
    assert other is not None
    assert first.identity == second.identity != other.identity


def test_this_machine_can_be_read() -> None:
    limit = memory_limit()
    assert limit is None or 0 < limit.limit_bytes < UNLIMITED_V1


IN_CGROUP = """
import os, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
import torch
import tierd_client
from tests.support.daemon import serving
from tierd.errors import Full
if __name__ == "__main__":
    model = torch.nn.Linear(8192, 16384, bias=False)  # 0.5 GB, 1 GB of slots
    with serving(Path(sys.argv[2])) as daemon:
        with tierd_client.connect("run", socket=str(daemon.socket)) as client:
            try:
                client.snapshot(1, tierd_client.TrainingState(model=model))
            except Full as error:
                print(error)
"""


def test_first_snapshot_beyond_the_limit_of_a_real_cgroup_is_refused_and_not_killed(tmp_path: Path) -> None:
    """Needs $TIERD_TEST_CGROUP: a cgroup with a memory controller in which this user may create others."""
    parent = os.environ.get("TIERD_TEST_CGROUP")
    if not parent:
        pytest.skip("$TIERD_TEST_CGROUP names no cgroup in which the test may create another")
    folder = Path(parent, f"tierd-test-{os.getpid()}")
    folder.mkdir()
    try:
        is_v2 = (folder / "memory.max").exists()
        (folder / ("memory.max" if is_v2 else "memory.limit_in_bytes")).write_text(str(1536 * MIB))
        command = [sys.executable, "-c", IN_CGROUP, str(folder), str(tmp_path)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert result.returncode == 0, result.stderr
        assert "memory limit" in result.stdout
    finally:
        wait_until(lambda: not (folder / "cgroup.procs").read_text(), "the processes in the cgroup to end")
        folder.rmdir()


IN_POD = """
import os, signal, sys
from pathlib import Path
import torch
import tierd_client
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
model = torch.nn.Linear(4096, 8192, bias=False)  # 128 MiB
client = tierd_client.connect("run", socket=sys.argv[2])
client.snapshot(1, tierd_client.TrainingState(model=model)).wait_persisted(60)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_slots_count_for_the_container_that_filled_them_and_after_its_end_for_its_pod(tmp_path: Path) -> None:
    """As docs/guides/kubernetes.md says. Needs $TIERD_TEST_CGROUP, as above. The daemon is outside of the pod, so what
    counts there are the slots."""
    parent = os.environ.get("TIERD_TEST_CGROUP")
    if not parent:
        pytest.skip("$TIERD_TEST_CGROUP names no cgroup in which the test may create another")
    pod = Path(parent, f"tierd-test-{os.getpid()}")
    container = pod / "trainer"
    pod.mkdir()
    if (pod / "cgroup.subtree_control").exists():
        (pod / "cgroup.subtree_control").write_text("+memory")
    container.mkdir()
    usage = "memory.current" if (pod / "memory.current").exists() else "memory.usage_in_bytes"
    try:
        with serving(tmp_path) as daemon:
            command = [sys.executable, "-c", IN_POD, str(container), daemon.socket]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            assert ended.returncode == -signal.SIGKILL, ended.stderr
            assert int((container / usage).read_text()) > 128 * MIB
            container.rmdir()
            assert int((pod / usage).read_text()) > 128 * MIB, "the snapshot that the daemon keeps"
        wait_until(lambda: int((pod / usage).read_text()) < 64 * MIB, "the memory to be given back with the daemon")
    finally:
        if container.exists():
            container.rmdir()
        pod.rmdir()


def test_available_memory_is_what_the_kernel_says_within_the_limit_of_the_cgroup(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) == 0, "not known"
    make_v2(tmp_path, {"/pod/trainer": (8 * GB, 3 * GB)})
    (tmp_path / "proc/meminfo").write_text("MemTotal: 64000000 kB\nMemAvailable: 2000000 kB\nSwapFree: 0 kB\n")
    assert available_bytes(tmp_path) == 2_000_000 << 10
    (tmp_path / "proc/meminfo").write_text("MemTotal: 64000000 kB\nMemAvailable: 32000000 kB\nSwapFree: 0 kB\n")
    assert available_bytes(tmp_path) == 5 * GB
