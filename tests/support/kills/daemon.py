"""A real daemon that ends at a failpoint, with small chunks, and on request broken on purpose."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.daemon import Daemon
from tests.support.processes import ForkedProcess, run_tierd
from tests.support.waiting import wait_until
from tierd.failpoints import VARIABLE

CHUNK_BYTES = 4096
JUMPING_CLOCK = "has a clock that jumps by days"


class Gone(Exception):
    """The daemon has ended, or has closed the connection."""


class KilledDaemon(Daemon):
    """`broken`: a name in BROKEN, or empty."""

    def __init__(self, root: Path, *, broken: str = "", **options: Any) -> None:
        super().__init__(root, **options)
        self._main = partial(run_small, broken=broken)

    def start_armed(self, failpoints: str = "") -> None:
        """Starts it and waits until it is ready. Raises Gone when it ends before."""
        self._environ[VARIABLE] = failpoints
        self.launch()
        process = self.process
        assert isinstance(process, ForkedProcess)
        wait_until(lambda: " serves " in self.log or process.poll() is not None, "the daemon to be ready")
        if process.poll() is not None:
            raise Gone

    def wait_killed(self) -> None:
        """Waits until it has ended, which must be by SIGKILL."""
        code = self.wait_exit()
        assert code == -signal.SIGKILL, f"the daemon ended with {code}:\n{self.log}"


def run_small(arguments: list[str], environ: Mapping[str, str], log: str, broken: str = "") -> None:
    """The `tierd` command, so that a shard of a few KiB has several chunks, parts and writes. Files that another node
    might be writing are cleared at once: there is no other node."""
    from tierd.format import checksum
    from tierd.memory import slot
    from tierd.s3.store import S3Store
    from tierd.tiers import directory
    from tierd.transfer import fetch
    from tierd.workers import leftovers

    checksum.CHUNK_BYTES = slot.CHUNK_BYTES = CHUNK_BYTES
    directory.WRITE_BYTES = directory.PIECE_BYTES = fetch.PIECE_BYTES = CHUNK_BYTES
    assert S3Store.__init__.__kwdefaults__
    S3Store.__init__.__kwdefaults__["part_bytes_min"] = CHUNK_BYTES
    leftovers.GRACE_S = 0.0
    if broken:
        BROKEN[broken]()
    run_tierd(arguments, environ, log)


# ── daemons that are broken on purpose ──


def _acknowledge_first() -> None:
    from tierd.format import wire
    from tierd.workers.persister import Persister

    persist = Persister._persist

    async def acknowledge(persister: Any, snapshot_set: Any) -> None:
        checkpoint = snapshot_set.id
        message = wire.Persisted(step=checkpoint.step, generation=checkpoint.generation, seconds=0.0)
        persister._context.notify.send(checkpoint.run, message)
        await asyncio.sleep(0)
        await persist(persister, snapshot_set)

    Persister._persist = acknowledge


def _replicate_manifest_first() -> None:
    from tierd.workers import replicator

    copy = replicator.copy_checkpoint

    async def commit_first(manifest: Any, source: Any, target: Any, **options: Any) -> None:
        raw = await source.manifest_bytes(manifest)
        await target.store.put_bytes(f"{manifest.id.run}/{manifest.id.name}/manifest.json", raw, if_absent=True)
        for entry in manifest.files:
            key = f"{manifest.id.run}/{manifest.id.name}/{entry.name}"
            sizes = {"size_bytes": entry.size_bytes, "chunk_bytes": entry.chunk_bytes}
            await target.store.put(key, source.store.source(key), expect=entry, **sizes)
        await copy(manifest, source, target, **options)

    replicator.copy_checkpoint = commit_first


def _delete_shards_first() -> None:
    from tierd.tiers.tier import Tier

    async def delete(tier: Any, checkpoint: Any, **options: object) -> bool:
        keys = {stored.key for stored in await tier.store.list(f"{checkpoint.run}/{checkpoint.name}/")}
        await tier.store.delete(sorted(keys, reverse=True))  # rank-… before manifest.json
        return True

    Tier.delete = delete


def _recover_nothing() -> None:
    from tierd import daemon
    from tierd.catalog.listing import enter_listing

    async def recover(catalog: Any, hot: Any, store: Any, *, now_s: float) -> None:
        await enter_listing(catalog, hot, await hot.listing(), since=catalog.changes)

    daemon.recover = recover


def _forget_sequences() -> None:
    from tierd.catalog.catalog import Catalog

    Catalog.sequence_max = lambda catalog, run: 0


def _claim_nothing() -> None:
    from tierd.api.admission import Admission

    async def claim(admission: Any, *arguments: Any, **options: Any) -> bool:
        return True

    Admission._claim_in = claim


def _evict_early() -> None:
    from tierd.failpoints import failpoint
    from tierd.workers.reaper import Reaper

    async def evict(reaper: Any) -> bool:
        held = sorted(reaper._catalog.manifests_in("hot"), key=lambda manifest: manifest.id.recency)
        # Without awaiting anything: otherwise newer checkpoints come meanwhile, and the policy allows the deletion.
        for manifest in reversed(held[:-1]):
            shutil.rmtree(os.path.join(reaper._context.hot_store.root, os.path.dirname(manifest.key)))
            reaper._catalog.drop(manifest.id, "hot")
            failpoint("delete.folder_sync")
        return True

    Reaper.run_once = evict


def _overwrite_in_place() -> None:
    from tierd.tiers.new_file import NewFile

    begin = NewFile.begin

    def begin_in_place(file: Any, *clone: Any) -> bool:
        is_cloned = begin(file, *clone)
        os.rename(file._temporary_name, file._name, src_dir_fd=file._folder, dst_dir_fd=file._folder)
        file._temporary_name = ""
        return is_cloned

    NewFile.begin = begin_in_place
    NewFile._link = lambda file: True


def _let_the_clock_jump() -> None:
    """Not broken: each look at the wall clock is up to 30 days wrong, in either direction."""
    from tierd import daemon
    from tierd.context import DaemonContext

    def wrong_now() -> datetime:
        return datetime.now(UTC) + timedelta(days=random.uniform(-30.0, 30.0))

    daemon.DaemonContext = partial(DaemonContext, now=wrong_now)


BROKEN: dict[str, Callable[[], None]] = {
    "acknowledges before the commit": _acknowledge_first,
    "writes the manifest of a copy first": _replicate_manifest_first,
    "deletes shards before the manifest": _delete_shards_first,
    "recovers nothing": _recover_nothing,
    "forgets sequences": _forget_sequences,
    "claims a generation in memory": _claim_nothing,
    "evicts what hot keeps": _evict_early,
    "writes under the final name": _overwrite_in_place,
    JUMPING_CLOCK: _let_the_clock_jump,
}
