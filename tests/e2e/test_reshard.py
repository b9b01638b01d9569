"""Ranks on several nodes restore a checkpoint that is only in buckets: each node fetches what its own ranks need."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from tierd_client import DaemonUnreachable
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support.bucket import Bucket, bucket_server
from tests.support.daemon import Daemon
from tests.support.s3 import BUCKET, ENVIRONMENT
from tests.support.topology import Bits, every, gathered, one_of, restored, train
from tests.support.trainer import Trainer, Training, together
from tests.support.waiting import DEADLINE_S, wait_until
from tierd.format import checksum, layout
from tierd.format.manifest import Manifest, decode, file_entry

pytestmark = pytest.mark.long

CHUNK_BYTES = 64 << 10
MANIFEST_READS_BYTES = 256 << 10  # an upper bound for reads other than of shards


def arrange(training: Training, rank: int, world_size: int, rendezvous: str) -> None:
    """Makes this process a rank of an FSDP2 training with a state of 6 MB in equal parts."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    torch.manual_seed(1)
    training.net = torch.nn.Sequential(torch.nn.Linear(16, 1024), torch.nn.Linear(1024, 480), torch.nn.Linear(480, 5))
    training.model = training.net
    fully_shard(training.net, mesh=init_device_mesh("cpu", (world_size,)))
    training.share = (rank, world_size)
    training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-2)
    training.scheduler = torch.optim.lr_scheduler.LambdaLR(training.optimizer, lambda step: 1 / (1 + step))
    training.state = training._state()


@contextmanager
def ranks_on(daemons: list[Daemon], world_size: int) -> Generator[list[Trainer]]:
    """Connected ranks of one run, equally many on each node, killed at the end."""
    with ExitStack() as stack:
        trainers = [stack.enter_context(Trainer()) for _ in range(world_size)]
        rendezvous = str(daemons[0].root / f"rendezvous-{trainers[0].pid}")
        for rank, trainer in enumerate(trainers):
            trainer.begin("apply", arrange, rank, world_size, rendezvous)
        for trainer in trainers:
            trainer.end()
        for rank, trainer in enumerate(trainers):
            trainer.begin("connect", daemons[rank * len(daemons) // world_size].socket)
        for trainer in trainers:
            trainer.end()
        yield trainers


class Saved:
    """A checkpoint of four ranks: its manifest with small chunks, its files below `root`, and the gathered state."""

    def __init__(self, root: Path) -> None:
        with Daemon(root) as daemon, ranks_on([daemon], 4) as trainers:
            every(trainers, train, 2)
            together(trainers, "durable")
            together(trainers, "wait_replicated")
            self.state: Bits = one_of(every(trainers, gathered))
        self.root = root / "cold"
        (path,) = self.root.glob("run/*/manifest.json")
        self.folder = path.parent
        self.manifest: Manifest = _in_small_chunks(path)

    @property
    def half_bytes(self) -> int:
        """At most what half of the ranks need: their parts, headers, and tensors that one rank wrote for all."""
        return self.manifest.size_bytes // 2 + 10 * CHUNK_BYTES


def _in_small_chunks(path: Path) -> Manifest:
    """Rewrites the manifest for the same bytes in small chunks."""
    manifest = decode(path.read_bytes(), where="")
    entries = []
    for file in manifest.files:
        raw = (path.parent / file.name).read_bytes()
        ranges = checksum.chunk_ranges(len(raw), CHUNK_BYTES)
        sums = [checksum.crc64nvme(raw[begin : begin + length]) for begin, length in ranges]
        entries.append(file_entry(file.name, len(raw), CHUNK_BYTES, sums))
    manifest = msgspec.structs.replace(manifest, files=entries)
    path.write_bytes(manifest.encode())
    return manifest


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def served(saved: Saved) -> Iterator[list[Bucket]]:
    """Two buckets with the checkpoint."""
    with bucket_server() as cold, bucket_server() as dr:
        for bucket in (cold, dr):
            bucket.fill(saved.root, "deep")
        yield [cold, dr]


def node(root: Path, cold: Bucket, dr: Bucket | None = None) -> Daemon:
    """A node that has never seen the run, not started yet."""
    more = "" if dr is None else f'[[cold]]\nname = "dr"\nurl = "s3://{BUCKET}/deep"\nendpoint_url = "{dr.url}"\n'
    return Daemon(root, cold=f'url = "s3://{BUCKET}/deep"\nendpoint_url = "{cold.url}"', more=more, environ=ENVIRONMENT)


def read_bytes(daemon: Daemon, tier: str = "cold") -> float:
    return daemon.metric(f'tierd_bytes_total{{direction="read",tier="{tier}"}}')


def partial_files(daemon: Daemon) -> list[Path]:
    return [path for path in daemon.hot.rglob("*") if ".safetensors" in path.name]


def has_come(daemon: Daemon, shard: Path) -> bool:
    """Whether the partial file has the whole shard."""
    raw = shard.read_bytes()
    return any(
        path.read_bytes()[: len(raw)] == raw for path in partial_files(daemon) if path.name.startswith(shard.name)
    )


def test_each_of_two_nodes_fetches_only_the_half_that_its_ranks_need(
    tmp_path: Path, saved: Saved, served: list[Bucket]
) -> None:
    with (
        node(tmp_path / "a", served[0]) as a,
        node(tmp_path / "b", served[1]) as b,
        ranks_on([a, b], 2) as trainers,
    ):
        assert restored(trainers) == (2, "cold")
        assert one_of(every(trainers, gathered)) == saved.state
        for daemon, bucket in ((a, served[0]), (b, served[1])):
            assert saved.manifest.size_bytes * 0.45 < read_bytes(daemon) <= saved.half_bytes
            assert bucket.sent["get_object"] <= saved.half_bytes + MANIFEST_READS_BYTES
            assert saved.half_bytes + MANIFEST_READS_BYTES < 0.75 * saved.manifest.size_bytes
            assert daemon.steps("hot") == [], "a part of a checkpoint is not a replica"
            wait_until(lambda daemon=daemon: not partial_files(daemon), "the partial files to be deleted")
        every(trainers, train, 1)


def test_ranks_of_one_node_fetch_each_chunk_once_and_create_a_hot_replica(
    tmp_path: Path, saved: Saved, served: list[Bucket]
) -> None:
    for name, world_size in (("a", 4), ("b", 2)):
        with node(tmp_path / name, served[0]) as daemon, ranks_on([daemon], world_size) as trainers:
            assert restored(trainers) == (2, "cold")
            assert one_of(every(trainers, gathered)) == saved.state
            assert read_bytes(daemon) == saved.manifest.size_bytes
            assert daemon.steps("hot") == [2]
            for file in saved.manifest.files:
                assert (daemon.folder(2) / file.name).read_bytes() == (saved.folder / file.name).read_bytes()


def test_node_killed_during_its_fetch_continues_after_a_restart(
    tmp_path: Path, saved: Saved, served: list[Bucket]
) -> None:
    bucket, (*_, third, last) = served[1], saved.manifest.files

    def hold(operation: str, key: str) -> str:
        """Holds the last shard, after its header."""
        return (
            "hold"
            if key.endswith(last.name) and any(request.key.endswith(last.name) for request in bucket.seen)
            else ""
        )

    bucket.script = hold
    with node(tmp_path / "a", served[0]) as a, node(tmp_path / "b", served[1]) as b:
        with ranks_on([a, b], 2) as trainers:
            for trainer in trainers:
                trainer.begin("restore")
            assert bucket.held.wait(DEADLINE_S)
            wait_until(lambda: has_come(b, saved.folder / third.name), "the other shard")
            b.kill()
            with pytest.raises(DaemonUnreachable):
                trainers[1].end()
        assert not list(b.hot.rglob("*.safetensors")), "a partial shard has no final name"
        bucket.script = lambda operation, key: ""
        b.start()
        with ranks_on([a, b], 2) as trainers:
            assert restored(trainers) == (2, "cold")
            assert one_of(every(trainers, gathered)) == saved.state
        for bucket in served:
            assert bucket.sent["get_object"] <= saved.half_bytes + MANIFEST_READS_BYTES, "in both lives"


def test_damaged_chunk_in_one_bucket_is_fetched_from_the_other_and_reported(
    tmp_path: Path, saved: Saved, served: list[Bucket]
) -> None:
    bad = saved.manifest.files[1]
    key = f"deep/{layout.file_key(saved.manifest.id, bad.name)}"
    content = bytearray(served[0].objects[key].content)
    content[len(content) // 2] ^= 1
    served[0].objects[key] = replace(served[0].objects[key], content=bytes(content))
    with node(tmp_path / "a", *served) as a, node(tmp_path / "b", *served) as b, ranks_on([a, b], 2) as trainers:
        assert restored(trainers) == (2, "dr")
        assert one_of(every(trainers, gathered)) == saved.state
        assert read_bytes(a, "dr") == CHUNK_BYTES, "only the chunk that is damaged in the nearer bucket"
        assert read_bytes(b, "dr") == 0
        assert a.metric('tierd_verify_failures_total{tier="cold"}') == 1
        failures: list[Any] = a.status()["failures"]
        assert any(bad.name in failure["message"] and failure["kind"] == "corrupt" for failure in failures)
