"""Costs of a snapshot, an upload and a restore, counted and not timed: copies, bytes, system calls, requests.

These counts have no noise: when one grows, the code has changed.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import tierd_client
import torch

from tests.support.bucket import bucket_server
from tests.support.daemon import serving
from tests.support.rooms import rooms_at
from tests.support.s3 import BUCKET
from tests.support.s3_store import s3_store
from tests.support.store_contract import content
from tests.support.waiting import wait_until
from tests.support.wire_peer import Peer
from tierd.tiers.checkpoint_copy import copy_checkpoint
from tierd.tiers.tier import Tier

MIB = 1 << 20
PAYLOAD_BYTES = 128 * MIB
ALLOCATED_MAX = PAYLOAD_BYTES // 4  # far less than a copy, far more than the interpreter allocates meanwhile
PLAIN = "[health]\nexamine = false"


def allocated_bytes(pid: int) -> int:
    """The memory of the process, without the slots and files that it maps."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10


def mapped_slot_bytes() -> int:
    """The size of the slots that this process has mapped."""
    ranges = (line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if "tierd-slot" in line)
    return sum(int(end, 16) - int(begin, 16) for begin, _, end in (each.partition("-") for each in ranges))


def calls(pid: int) -> dict[str, int]:
    """proc_pid_io(5): bytes and calls of read and write, including those that the page cache serves."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


@contextmanager
def growth(pid: int) -> Iterator[Callable[[], int]]:
    """The largest growth of the allocated memory in bytes, sampled every 2 ms."""
    first = most = allocated_bytes(pid)
    is_over = threading.Event()

    def sample() -> None:
        nonlocal most
        while not is_over.wait(0.002):
            most = max(most, allocated_bytes(pid))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield lambda: most - first
    finally:
        is_over.set()
        thread.join()


def test_persisting_writes_each_byte_once_in_few_calls_and_allocates_no_payload(tmp_path: Path) -> None:
    with serving(tmp_path, more=PLAIN) as daemon, Peer(daemon.socket) as peer:
        peer.greet("run")
        shard = content(PAYLOAD_BYTES)
        for index in range(2):
            peer.attach(index, size_bytes=PAYLOAD_BYTES)
        peer.seal(0, 1, shard)
        wait_until(lambda: daemon.steps("hot", "run") == [1], "the first checkpoint, which warms up")
        before = calls(daemon.pid)
        with growth(daemon.pid) as grown:
            peer.seal(1, 2, shard)
            wait_until(lambda: daemon.steps("hot", "run") == [1, 2], "the second checkpoint")
        after = calls(daemon.pid)
        cost = {name: after[name] - before[name] for name in after}
        assert PAYLOAD_BYTES <= cost["wchar"] <= 1.01 * PAYLOAD_BYTES
        assert cost["rchar"] < 0.01 * PAYLOAD_BYTES, "written from the mapping, without a read"
        assert cost["syscw"] < 1000 * PAYLOAD_BYTES // (1 << 30), "16 MiB per call, and the answers to status requests"
        assert grown() < ALLOCATED_MAX


def test_snapshot_and_restore_allocate_no_payload(tmp_path: Path) -> None:
    """The state is copied into its slot and back without a buffer in between."""
    with serving(tmp_path, more=PLAIN) as daemon:
        model = torch.nn.Linear(PAYLOAD_BYTES // 4 // 1024, 1024, bias=False)
        state = tierd_client.TrainingState(model=model)
        client = tierd_client.connect("run", socket=str(daemon.socket))
        with client:
            for step in (1, 2):
                client.snapshot(step, state).wait_persisted(60)
            expected = model.weight.detach().clone()
            with growth(os.getpid()) as grown:
                client.snapshot(3, state).wait_persisted(60)
                assert grown() < ALLOCATED_MAX
            with torch.no_grad():
                model.weight.zero_()
            with growth(os.getpid()) as grown:
                found = client.restore(state)
                assert grown() < ALLOCATED_MAX
        assert found is not None
        assert (found.step, found.tier) == (3, "memory")
        assert torch.equal(model.weight, expected)


def test_first_snapshot_allocates_its_two_slots_and_nothing_else(tmp_path: Path) -> None:
    with serving(tmp_path, more=PLAIN) as daemon:
        state = tierd_client.TrainingState(model=torch.nn.Linear(PAYLOAD_BYTES // 4 // 1024, 1024, bias=False))
        client = tierd_client.connect("run", socket=str(daemon.socket))
        mapped_before = mapped_slot_bytes()
        with client, growth(os.getpid()) as grown, growth(daemon.pid) as grown_in_daemon:
            client.snapshot(1, state).wait_persisted(60)
            assert grown() < ALLOCATED_MAX
            assert grown_in_daemon() < ALLOCATED_MAX
            assert sum(daemon.status()["slots"].values()) == 2
            assert 2 * PAYLOAD_BYTES <= mapped_slot_bytes() - mapped_before <= 2.1 * PAYLOAD_BYTES


async def test_upload_sends_only_the_necessary_requests(tmp_path: Path) -> None:
    """Two shards of two parts: one request before each shard, and none afterwards, because the last answer has the
    checksum of the whole object. Before the commit one listing."""
    with bucket_server(part_bytes_min=MIB) as served:
        async with rooms_at(tmp_path) as rooms:
            store = s3_store(f"s3://{BUCKET}/deep", endpoint_url=served.url)
            manifest = await rooms.commit("hot", size_bytes=64 * MIB + 5)
            await copy_checkpoint(manifest, rooms.hot, Tier("cold", store))
            await store.close()
        size_bytes = sum(entry.size_bytes for entry in manifest.files)
        assert Counter(one.operation for one in served.seen) == {
            "get_object": 1,
            "head_object": 3,
            "list_multipart_uploads": 2,
            "create_multipart_upload": 2,
            "upload_part": 4,
            "complete_multipart_upload": 2,
            "list_objects_v2": 1,
            "put_object": 1,
        }
        assert size_bytes <= served.received_bytes() <= 1.001 * size_bytes
