"""Uploads that are slower than snapshots: an upload takes U, a snapshot comes every T. What does cold get?

The daemon, its stores and its upload cap are real; see daemon.py. As a program it prints a table:

    python -m tests.support.simulation.slow_uploads
"""

from __future__ import annotations

import asyncio
import math
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

from tests.support.simulation.bucket import SimulatedBucket
from tests.support.simulation.checker import COLD, BucketPlace, Checker, FolderPlace, Id, Policy, Violation
from tests.support.simulation.daemon import SimulatedDaemon, make_config
from tests.support.simulation.loop import SimulatedLoop
from tests.support.simulation.trainer import MILESTONE_STEPS, SHARD_BYTES, Job, SimulatedTrainer
from tests.support.simulation.world import isolated
from tierd.config.sections import ColdConfig, ColdPolicy, Config, LifecycleConfig, TierPolicy
from tierd.status.report import FailureReport

RATIOS = (0.5, 1.0, 2.0, 3.0, 3.7, 6.0, 10.0)
CHECKPOINTS = 61
INTERVAL_S = 60.0
RANKS = 2
CHECKPOINT_BYTES = RANKS * SHARD_BYTES
PREFIX = "tier/"
NODE = "node1"
KEEP_LAST = 3
MILESTONE = MILESTONE_STEPS  # the number of a checkpoint that the trainer marks


@dataclass
class Uploads:
    """What a simulation has shown. `committed_s`: when each checkpoint, by its number, was committed in cold, from the
    first snapshot on. `kept` and `in_hot`: the numbers of those in cold and in hot at the last snapshot. `hot_max`: the
    most checkpoints in hot at once. `given_up`: how many the daemon reports, by reason. `incidents`: newest first."""

    committed_s: dict[int, float] = field(default_factory=dict[int, float])
    kept: list[int] = field(default_factory=list[int])
    in_hot: list[int] = field(default_factory=list[int])
    hot_max: int = 0
    given_up: dict[str, int] = field(default_factory=dict[str, int])
    incidents: list[FailureReport] = field(default_factory=list[FailureReport])
    violation: Violation | None = None

    def gaps_s(self) -> list[float]:
        """The times from one commit to the next."""
        times = sorted(self.committed_s.values())
        return [later - earlier for earlier, later in pairwise(times)]


def simulate_uploads(
    ratio: float,
    keep_every: int,
    *,
    checkpoints: int = CHECKPOINTS,
    hot_disk_checkpoints: float = math.inf,
    kill_daemon_every_s: float = math.inf,
    bucket_fails_s: Sequence[tuple[float, float]] = (),
) -> Uploads:
    """`ratio`: U / T. `hot_disk_checkpoints`: so many fit on the hot disk. `bucket_fails_s`: from when until when the
    bucket cannot be reached."""
    with isolated(0) as root, _disk_of(root / NODE / "hot", hot_disk_checkpoints * CHECKPOINT_BYTES):
        return _simulate(root, _config(root, ratio, keep_every), checkpoints, kill_daemon_every_s, bucket_fails_s)


def _simulate(
    root: Path,
    config: Config,
    checkpoints: int,
    kill_daemon_every_s: float,
    bucket_fails_s: Sequence[tuple[float, float]],
) -> Uploads:
    """In a function of its own: `isolated` closes descriptors, and no object that has one may outlive it."""
    loop = SimulatedLoop(0)
    scene = _Scene(root, loop, config)
    try:
        loop.run_until_complete(scene.run(checkpoints, kill_daemon_every_s, bucket_fails_s))
        return scene.uploads
    finally:
        loop.is_stopped = False
        loop.after_job = lambda name, function: None
        scene.bucket.on_change = lambda key, before, now: None
        loop.unwind()


def _config(root: Path, ratio: float, keep_every: int) -> Config:
    config = make_config(root, NODE, "", cold_list_interval_s=600.0)
    cap_mib_s = CHECKPOINT_BYTES / (ratio * INTERVAL_S) / (1 << 20)
    return msgspec.structs.replace(
        config,
        cold=[ColdConfig(name=COLD, url=f"s3://simulated/{PREFIX}", max_upload_mib_s=cap_mib_s)],
        lifecycle=LifecycleConfig(
            hot=TierPolicy(keep_last=KEEP_LAST),
            cold=ColdPolicy(keep_last=KEEP_LAST, keep_every=keep_every),
        ),
        scrub=msgspec.structs.replace(config.scrub, interval_s=0.0),
        limits=msgspec.structs.replace(config.limits, reconcile_interval_s=10.0),
    )


class _Scene:
    def __init__(self, root: Path, loop: SimulatedLoop, config: Config) -> None:
        self.uploads = Uploads()
        self._loop = loop
        self._config = config
        self.bucket = SimulatedBucket(random.Random(1))
        self._checker = Checker(
            Policy(KEEP_LAST, KEEP_LAST, config.lifecycle.cold.keep_every), on_violation=lambda: None
        )
        self._checker.add_place(COLD, BucketPlace(self.bucket.objects, PREFIX))
        self._checker.add_place(NODE, FolderPlace(root / NODE / "hot"))
        self._daemon: SimulatedDaemon
        self._began_s = 0.0
        loop.latency_s = lambda name: (0.01, 0.001)
        loop.after_job = self._after_job
        self.bucket.on_change = self._object_changed

    async def run(
        self, checkpoints: int, kill_daemon_every_s: float, bucket_fails_s: Sequence[tuple[float, float]]
    ) -> None:
        self._start_daemon()
        job = Job(name="job", run="run", world_size=RANKS, interval_s=INTERVAL_S, every_steps=1)
        trainer = SimulatedTrainer(
            job, NODE, "job", self._checker, lambda: self._daemon, lambda: 0, lambda *words: None
        )
        trainer.start()
        self._began_s = self._loop.time() + INTERVAL_S
        for begin_s, end_s in bucket_fails_s:
            self._loop.call_later(begin_s, self._set_down, True)
            self._loop.call_later(end_s, self._set_down, False)
        killed_s = self._loop.time()
        while trainer.step < checkpoints:
            await asyncio.sleep(1.0)
            if self._loop.time() - killed_s >= kill_daemon_every_s:
                killed_s = self._loop.time()
                self._daemon.kill()
                self._start_daemon()
        await asyncio.sleep(1.0)
        trainer.kill()
        self.uploads.kept = sorted(checkpoint.step for checkpoint in self._checker.committed[COLD])
        self.uploads.in_hot = sorted(checkpoint.step for checkpoint in self._checker.committed[NODE])
        self.uploads.given_up = dict(self._daemon._context.copies[COLD].given_up)
        self.uploads.incidents = self._daemon._context.incidents.recent()
        self.uploads.violation = self._checker.violation

    def _start_daemon(self) -> None:
        self._daemon = SimulatedDaemon(self._config, self.bucket)
        self._daemon.start()

    def _set_down(self, is_down: bool) -> None:
        self.bucket.is_down = is_down

    def _after_job(self, name: str, function: str) -> None:
        if name == "tierd-directory":
            self._checker.observe(NODE, self._loop.time())
            self.uploads.hot_max = max(self.uploads.hot_max, len(self._checker.committed[NODE]))

    def _object_changed(self, key: str, before: bytes | None, content: bytes | None) -> None:
        former: set[Id] = set(self._checker.committed[COLD])
        self._checker.object_changed(key.removeprefix(PREFIX), content, self._loop.time(), NODE)
        for checkpoint in self._checker.committed[COLD].keys() - former:
            self.uploads.committed_s[checkpoint.step] = self._loop.time() - self._began_s


@contextmanager
def _disk_of(folder: Path, size_bytes: float) -> Iterator[None]:
    """`os.statvfs` reports a disk of this size that only holds what is in the folder."""
    statvfs = os.statvfs

    def measure(path: Any) -> Any:
        if math.isinf(size_bytes) or not str(path).startswith(str(folder)):
            return statvfs(path)
        used_bytes = 0
        for parent, _, names in os.walk(folder):
            for name in names:
                with suppress(FileNotFoundError):
                    used_bytes += os.path.getsize(os.path.join(parent, name))
        free_bytes = max(0, int(size_bytes - used_bytes))
        return os.statvfs_result((1, 1, int(size_bytes), free_bytes, free_bytes, 0, 0, 0, 0, 255))

    with patch.object(os, "statvfs", measure):
        yield


def main() -> None:
    print("| U / T | keep_every | commits in cold | in cold at the end | longest time between commits | most in hot |")
    print("|---|---|---|---|---|---|")
    for keep_every in (0, 10):
        for ratio in RATIOS:
            uploads = simulate_uploads(ratio, keep_every)
            gap = f"{max(uploads.gaps_s()) / INTERVAL_S:.1f} T" if len(uploads.committed_s) > 1 else ""
            kept = ", ".join(map(str, uploads.kept)) or "nothing"
            print(f"| {ratio:g} | {keep_every} | {len(uploads.committed_s)} | {kept} | {gap} | {uploads.hot_max} |")


if __name__ == "__main__":
    main()
