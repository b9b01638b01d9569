"""Trees of files as the kernel shows the memory controller of cgroup v1 and v2, for `memory_limit`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

UNLIMITED_V1 = 9223372036854771712  # LONG_MAX, rounded down to a page


def make_v2(
    root: Path,
    groups: Mapping[str, tuple[int | None, int]],
    *,
    own: str | None = None,
    cached_bytes: int = 0,
    swap_bytes: int = 0,
    swap_free_kib: int = 0,
) -> None:
    """`groups`: the limit (None: unlimited) and the usage in bytes of each cgroup that is mounted. This process is in
    `own`, by default the last of them."""
    _make_proc(root, f"0::{own or list(groups)[-1]}\n", swap_free_kib)
    for path, (limit, usage) in groups.items():
        folder = root / "sys/fs/cgroup" / path.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text("max\n" if limit is None else f"{limit}\n")
        (folder / "memory.current").write_text(f"{usage}\n")
        (folder / "memory.swap.max").write_text(f"{swap_bytes}\n")
        (folder / "memory.swap.current").write_text("0\n")
        (folder / "memory.stat").write_text(
            f"anon 1000\nfile {cached_bytes}\nshmem 0\ninactive_anon 1000\n"
            f"inactive_file {cached_bytes // 2}\nactive_file {cached_bytes // 2}\nslab_reclaimable 0\n"
        )


def make_v1(
    root: Path,
    groups: Mapping[str, tuple[int | None, int]],
    *,
    own: str | None = None,
    cached_bytes: int = 0,
    swap_bytes: int = 0,
    swap_free_kib: int = 0,
) -> None:
    path = own or list(groups)[-1]
    _make_proc(root, f"9:name=systemd:/\n8:pids:{path}\n4:memory:{path}\n1:cpu:/\n0::/\n", swap_free_kib)
    (root / "sys/fs/cgroup/unified").mkdir(parents=True, exist_ok=True)
    for name, (limit, usage) in groups.items():
        folder = root / "sys/fs/cgroup/memory" / name.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        bound = UNLIMITED_V1 if limit is None else limit
        (folder / "memory.limit_in_bytes").write_text(f"{bound}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{usage}\n")
        (folder / "memory.memsw.limit_in_bytes").write_text(f"{bound + swap_bytes}\n")
        (folder / "memory.memsw.usage_in_bytes").write_text(f"{usage}\n")
        (folder / "memory.stat").write_text(
            f"cache {cached_bytes}\ninactive_file 5\nactive_file 5\nhierarchical_memory_limit {bound}\n"
            f"total_inactive_file {cached_bytes // 2}\ntotal_active_file {cached_bytes // 2}\n"
        )


def _make_proc(root: Path, cgroup: str, swap_free_kib: int) -> None:
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    (root / "proc/meminfo").write_text(f"MemTotal: 16000000 kB\nSwapFree: {swap_free_kib} kB\n")
