"""The memory limit of the cgroup of this process: that of its container, its Slurm step or its systemd unit.

Where a limit is exceeded no call fails: the kernel kills a process of the cgroup. Whoever allocates much must therefore
compare with the limit first. Reads cgroup v2 and v1: cgroups(7), Documentation/admin-guide/cgroup-v2.rst of the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60  # v1 has no word for it, but a number near 2^63


@dataclass(frozen=True, slots=True, kw_only=True)
class _Version:
    """The names of one version's files."""

    limit: str
    usage: str
    swap_limit: str
    swap_usage: str
    reclaimable: frozenset[str]
    """Lines of memory.stat, of the cgroup and those below it: caches that the kernel drops before it kills. Shared
    memory is not among them."""


_V2 = _Version(
    limit="memory.max",
    usage="memory.current",
    swap_limit="memory.swap.max",
    swap_usage="memory.swap.current",
    reclaimable=frozenset({"inactive_file", "active_file", "slab_reclaimable"}),
)
_V1 = _Version(
    limit="memory.limit_in_bytes",
    usage="memory.usage_in_bytes",
    swap_limit="memory.memsw.limit_in_bytes",  # memory and swap together
    swap_usage="memory.memsw.usage_in_bytes",
    reclaimable=frozenset({"total_inactive_file", "total_active_file"}),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """`path`: the cgroup's directory. `identity` is the same in all processes that share the limit, whatever their
    containers call it. `used_bytes`: without caches. `swap_bytes`: of free swap that the cgroup may use."""

    path: Path
    identity: tuple[int, int]
    limit_bytes: int
    used_bytes: int
    swap_bytes: int

    @property
    def free_bytes(self) -> int:
        return max(self.limit_bytes - self.used_bytes, 0) + self.swap_bytes


def memory_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """Of this process's cgroup and those above it, the limit with the least free memory. None without a limit.

    `root`: the directory that has proc and sys.
    """
    limits = [limit for folder, version in _cgroups(root) if (limit := _read(folder, version, root)) is not None]
    return min(limits, key=lambda limit: limit.free_bytes, default=None)


def available_bytes(root: Path = Path("/")) -> int:
    """The memory that may be allocated: what the kernel calls available, within the limit of the cgroup. 0 where the
    kernel does not say."""
    try:
        meminfo = (root / "proc/meminfo").read_text()
        available = int(meminfo.partition("MemAvailable:")[2].split()[0]) << 10
    except (OSError, ValueError, IndexError):
        return 0
    limit = memory_limit(root)
    return available if limit is None else min(available, limit.free_bytes)


def _cgroups(root: Path) -> list[tuple[Path, _Version]]:
    """The directories that may have a limit, the own one first. In a container the path of the own cgroup may be that
    on the host, which is not mounted; then the mounted root is the container's own."""
    mounted = root / "sys/fs/cgroup"
    found: list[tuple[Path, _Version]] = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if "memory" in controllers.split(","):
            top, version = mounted / "memory", _V1
        elif line.startswith("0::"):
            top, version = mounted, _V2
        else:
            continue
        # ".." means outside of this cgroup namespace.
        parts = [] if ".." in path.split("/") else [part for part in path.split("/") if part]
        found += [(top.joinpath(*parts[:depth]), version) for depth in range(len(parts), -1, -1)]
    return found


def _read(folder: Path, version: _Version, root: Path) -> MemoryLimit | None:
    """None without a limit, without the memory controller, and where the files cannot be read."""
    try:
        limit_bytes = _number(folder / version.limit)
        if limit_bytes >= _UNLIMITED:
            return None
        used_bytes = _number(folder / version.usage)
        fields = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        reclaimable_bytes = sum(int(size) for name, size in fields if name in version.reclaimable)
        status = folder.stat()
    except (OSError, ValueError):
        return None
    return MemoryLimit(
        path=folder,
        identity=(status.st_dev, status.st_ino),
        limit_bytes=limit_bytes,
        used_bytes=max(used_bytes - reclaimable_bytes, 0),
        swap_bytes=_swap_bytes(folder, version, root),
    )


def _swap_bytes(folder: Path, version: _Version, root: Path) -> int:
    """Where the cgroup's own bound of swap cannot be read, all free swap of the machine counts."""
    try:
        meminfo = (root / "proc/meminfo").read_text()
        free_bytes = int(meminfo.partition("SwapFree:")[2].split()[0]) << 10
    except (OSError, ValueError, IndexError):
        return 0
    try:
        allowed_bytes = _number(folder / version.swap_limit) - _number(folder / version.swap_usage)
    except (OSError, ValueError):
        return free_bytes
    return max(min(free_bytes, allowed_bytes), 0)


def _number(path: Path) -> int:
    text = path.read_text().strip()
    return _UNLIMITED if text == "max" else int(text)
