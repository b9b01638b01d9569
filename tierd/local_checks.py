"""Checks this machine for `tierd doctor`: disks, limits, the clock and the socket. They need no bucket and take < 1 s.

The daemon makes these checks at its start too, in a thread, and logs what is wrong. They never delay or end it.
"""

from __future__ import annotations

import logging
import os
import resource
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path

from tierd.access import others_can_write
from tierd.catalog.catalog import Catalog
from tierd.cgroup import memory_limit
from tierd.cold_tier import exposed
from tierd.config.sections import ColdConfig, Config
from tierd.format.ids import HOT
from tierd.format.manifest import Manifest
from tierd.format.text import duration, size
from tierd.lifecycle.policy import CheckpointView
from tierd.lifecycle.pressure import room_for_next
from tierd.tiers.probe import Advice, is_same_disk, probe_directory, probe_memory, probe_space

log = logging.getLogger("tierd")

DESCRIPTORS_MIN = 4096  # two for each slot and each connection
AHEAD_WARNED_S = 60.0  # of the clock, as for the clock of a bucket's server
_GPU = Path("/dev/nvidiactl")


def start_checks(config: Config, catalog: Catalog, now: datetime) -> None:
    """Log each finding, from a thread of its own, because a directory whose server is down may never answer."""
    manifests, views = catalog.manifests_in(HOT), catalog.views()
    checks: list[Callable[[], Iterable[Advice]]] = [
        lambda: no_cold(config),
        lambda: sizes(config, manifests),
        limits,
        lambda: clock(views, now),
        lambda: [socket(config)],
        lambda: probe_directory(HOT, config.hot_path, is_hot=True),
        lambda: [advice for cold in config.cold for advice in same_disk(cold, config)],  # may hang, so late
        lambda: exposed(config),
    ]
    threading.Thread(target=_log_findings, args=(checks,), name="tierd-start-checks", daemon=True).start()


def _log_findings(checks: Iterable[Callable[[], Iterable[Advice]]]) -> None:
    for check in checks:
        try:
            for advice in check():
                if advice.verdict in ("warning", "problem"):
                    log.warning("doctor, %s: %s (hint: %s)", advice.about, advice.message, advice.hint)
        except (OSError, ValueError) as error:
            log.warning("doctor: a check at the start could not be made: %s", error)


def no_cold(config: Config) -> Iterator[Advice]:
    if not config.cold:
        message = "there is no cold tier: the loss of this node's disk loses every checkpoint"
        yield Advice("config", "config", "warning", message, "add [[cold]] with the url of a bucket")


def same_disk(cold: ColdConfig, config: Config) -> Iterator[Advice]:
    if (path := cold.directory) is not None and is_same_disk(path, config.hot_path):
        message = f"{path} is on the same filesystem as hot: one dead disk takes both"
        yield Advice("disk", cold.name, "warning", message, "set its url to another disk, or to a bucket")


def sizes(config: Config, manifests: Sequence[Manifest]) -> list[Advice]:
    """The checks that depend on the size of a checkpoint: space in hot, and memory for the slots."""
    newest_by_run = {each.run: each for each in sorted(manifests, key=lambda manifest: manifest.id.recency)}
    largest = max(newest_by_run.values(), key=lambda manifest: manifest.size_bytes, default=None)
    checkpoint_bytes = largest.size_bytes if largest is not None else 0
    space = probe_space(
        config.hot_path,
        checkpoint_bytes=checkpoint_bytes,
        used_bytes=sum(each.size_bytes for each in manifests if largest and each.run == largest.run),
        keep_last=config.lifecycle.hot.keep_last,
        room_bytes=room_for_next(manifest.size_bytes for manifest in manifests),
    )
    return [space, probe_memory(memory_limit(), checkpoint_bytes=checkpoint_bytes, slots=config.snapshot.slots)]


def clock(views: Iterable[CheckpointView], now: datetime) -> Iterator[Advice]:
    """Whether a checkpoint has a time in the future. Ages, rules by time and the forecast would be wrong."""
    times = [(view.created_at, view.id) for view in views if view.created_at is not None]
    newest_at, checkpoint = max(times, key=lambda pair: pair[0], default=(now, None))
    if (ahead_s := (newest_at - now).total_seconds()) > AHEAD_WARNED_S:
        message = f"{checkpoint} was saved {duration(ahead_s)} after the time of this machine's clock"
        hint = "synchronize the clocks of this machine and of the one that saved it: chronyc tracking"
        yield Advice("clock", "machine", "warning", message, hint)


def limits() -> Iterator[Advice]:
    _, descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors != resource.RLIM_INFINITY and descriptors < DESCRIPTORS_MIN:
        message = f"this user may open {descriptors} files; a node with many ranks needs {DESCRIPTORS_MIN}"
        hint = "raise LimitNOFILE in the unit, or nofile in limits.conf"
        yield Advice("files", "machine", "warning", message, hint)
    memory, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if _GPU.exists() and memory != resource.RLIM_INFINITY:
        message = (
            f"memlock is {memory} bytes: pinning the slots of a trainer on this GPU may be refused, and copies are slow"
        )
        yield Advice("memlock", "machine", "note", message, "ulimit -l unlimited where the trainer starts")


def memlock(config: Config, state_bytes: int) -> Iterator[Advice]:
    """Only a note: the trainer may have another limit, and NVIDIA's driver pins memory without checking the limit
    (kernel-open/nvidia/os-mlock.c calls get_user_pages)."""
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    slots_bytes = config.snapshot.slots * state_bytes
    if _GPU.exists() and limit_bytes != resource.RLIM_INFINITY and limit_bytes < slots_bytes:
        message = f"memlock is {size(limit_bytes)}, and the slots of such a run are {size(slots_bytes)}"
        yield Advice("memlock", "machine", "note", message, "ulimit -l unlimited where the trainer starts")


def socket(config: Config) -> Advice:
    """Whether the daemon can create its socket, and trainers will trust it."""
    folder = config.socket_path.parent
    if not folder.exists():
        return Advice("socket", "socket", "note", f"{folder} does not exist yet; `tierd serve` makes it, if it may")
    if not os.access(folder, os.W_OK | os.X_OK):
        message = f"{folder} cannot be written: no socket can be made there"
        hint = "give it to the daemon's user, or set daemon.socket to a path of its own"
        return Advice("socket", "socket", "problem", message, hint)
    stat_result = folder.stat()
    if others_can_write(stat_result) and not stat_result.st_mode & stat.S_ISVTX:
        message = f"other users can replace the socket, because they can write in {folder}: trainers refuse it"
        return Advice("socket", "socket", "problem", message, f"chmod go-w {folder}, or set daemon.socket")
    return Advice("socket", "socket", "ok", f"{folder} can be written")
