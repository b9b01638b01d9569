"""Examination: which checkpoints, the markers, and failures."""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tierd_client.state.training_state import TrainingState
from torch import nn

from tests.support.rooms import RUN, Rooms, rooms_at
from tests.support.state import stage
from tierd.config.sections import HealthConfig
from tierd.errors import Transient
from tierd.format import wire
from tierd.format.health import Diagnosis
from tierd.format.ids import checkpoint_id
from tierd.format.node_file import NodeFile
from tierd.health import examiner as examiner_module
from tierd.health.examiner import Examiner
from tierd.workers.reaper import Reaper
from tierd.workers.write_through import WriteThrough

REAL_PYTHON = sys.executable

pytestmark = pytest.mark.usefixtures("forked_python")


@pytest.fixture
async def rooms(tmp_path: Path) -> AsyncIterator[Rooms]:
    async with rooms_at(tmp_path, cold=("cold",)) as rooms:
        yield rooms


def examiner(rooms: Rooms) -> Examiner:
    return Examiner(rooms.context)


def shard(weight: float, *, lr: float = 0.1) -> bytes:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, weight)
    nn.init.constant_(model.bias, weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return stage(TrainingState(model=model, optimizer=optimizer, rng=False))


def markers(rooms: Rooms, tier: str, step: int) -> list[str]:
    folder = rooms.folder(tier, checkpoint_id(RUN, step, 1))
    return sorted(path.name for path in folder.glob("*healthy.json"))


async def test_a_snapshot_is_examined_in_memory_and_marked_after_its_commit(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", REAL_PYTHON)  # as in operation
    snapshot_set = rooms.seal(1, [shard(math.nan)])
    worker = examiner(rooms)
    assert await worker.run_once()
    assert snapshot_set.diagnosis is not None
    assert not snapshot_set.diagnosis.healthy
    assert worker.diagnosis(snapshot_set.id) is False
    assert "model.bias (2 NaN, 0 Inf)" in rooms.incidents.recent()[0].message
    await rooms.persister().run_once()
    assert markers(rooms, "hot", 1) == []
    assert await worker.run_once()
    assert markers(rooms, "hot", 1) == ["unhealthy.json"]
    assert rooms.count("tierd_examinations_total", run=RUN, verdict="unhealthy") == 1
    diagnosis = await rooms.hot.diagnosis(snapshot_set.id, is_healthy=False)
    assert [tensor.tensor for tensor in diagnosis.not_finite] == ["model.bias", "model.weight"]


async def test_an_unexamined_checkpoint_in_hot_is_examined_once(rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
    rooms.seal(1, [shard(1.0), shard(1.0)])
    await rooms.persister().run_once()
    rooms.seal(2, [shard(2.0), shard(2.0)])
    await rooms.persister().run_once()  # this frees the slots of step 1
    assert rooms.memory.find(checkpoint_id(RUN, 1, 1)) is None
    worker = examiner(rooms)
    assert await worker.run_once()
    assert markers(rooms, "hot", 1) == markers(rooms, "hot", 2) == ["healthy.json"]

    async def never(*_: object) -> Diagnosis:
        raise AssertionError("examined again")

    monkeypatch.setattr(examiner_module, "examine_files", never)
    await rooms.look()
    assert await examiner(rooms).run_once(), "its markers have the verdict"
    assert rooms.catalog.get(checkpoint_id(RUN, 1, 1)).healthy is True  # type: ignore[union-attr]


async def test_the_hot_file_is_examined_if_the_slot_is_released_meanwhile(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot_set = rooms.seal(1, [shard(1.0)])
    await rooms.persister().run_once()
    real = examiner_module.examine_files
    sources: list[str] = []

    async def overwritten(checkpoint: object, files: list[tuple[int, int]]) -> Diagnosis:
        if not sources:
            rooms.seal(2, [shard(2.0)])
            list(rooms.memory.release(RUN))
            snapshot_set.snapshots.clear()
            sources.append("slot")
            return Diagnosis(healthy=False, tensors=1)  # of overwritten bytes
        sources.append("file")
        return await real(checkpoint, files)  # type: ignore[arg-type]

    monkeypatch.setattr(examiner_module, "examine_files", overwritten)
    await examiner(rooms).examine(snapshot_set.id)
    assert sources == ["slot", "file"]
    assert markers(rooms, "hot", 1) == ["healthy.json"]


async def test_flipped_bits_on_the_disk_are_corrupt_and_give_no_verdict(rooms: Rooms) -> None:
    snapshot_set = rooms.seal(1, [shard(1.0)])
    await rooms.persister().run_once()
    path = next(rooms.folder("hot", snapshot_set.id).glob("*.safetensors"))
    raw = bytearray(path.read_bytes())
    raw[-8:] = b"\xff" * 8  # NaN
    path.write_bytes(raw)
    rooms.seal(2, [shard(2.0)])
    list(rooms.memory.release(RUN))
    assert rooms.memory.find(snapshot_set.id) is None
    await examiner(rooms).examine(snapshot_set.id)
    assert markers(rooms, "hot", 1) == []
    assert [incident.kind for incident in rooms.incidents.recent()] == ["corrupt"]
    assert rooms.count("tierd_examinations_total", run=RUN, verdict="failed") == 1


async def test_a_checkpoint_that_cannot_be_examined_is_recorded_once(rooms: Rooms) -> None:
    await rooms.commit("hot", step=100)  # its files are not valid shards
    await rooms.look()
    worker = examiner(rooms)
    assert await worker.run_once()
    assert await worker.run_once()
    assert rooms.count("tierd_examinations_total", run=RUN, verdict="failed") == 1
    assert [incident.kind for incident in rooms.incidents.recent()] == ["corrupt"]


async def test_an_examination_whose_process_dies_or_hangs_is_retried(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot_set = rooms.seal(1, [shard(1.0)])
    worker = examiner(rooms)
    with monkeypatch.context() as patch:
        patch.setattr(examiner_module, "PROGRAM", "tierd.no_such_program")
        assert not await worker.run_once()
    assert "ended with code 1" in rooms.incidents.recent()[0].message
    with monkeypatch.context() as patch:
        patch.setattr(examiner_module, "TIMEOUT_MIN_S", 0.0)
        patch.setattr(examiner_module, "RATE_MIN_BYTES_S", 1e12)
        with pytest.raises(Transient, match="no answer"):
            await worker.examine(snapshot_set.id)
    assert await worker.run_once()
    assert snapshot_set.diagnosis is not None
    assert snapshot_set.diagnosis.healthy


async def test_the_wait_for_a_verdict_is_bounded(rooms: Rooms) -> None:
    snapshot_set = rooms.seal(1, [shard(math.nan)])
    worker = examiner(rooms)
    assert await worker.is_healthy(snapshot_set.id, wait_s=0.0) is None
    verdicts = await asyncio.gather(*(worker.is_healthy(snapshot_set.id, wait_s=60.0) for _ in range(4)))
    assert verdicts == [False] * 4
    assert rooms.count("tierd_examinations_total", run=RUN, verdict="unhealthy") == 1, "one examination for all callers"


async def test_a_checkpoint_whose_marker_is_not_written_yet_is_not_examined_again(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        rooms.seal(step, [shard(float(step))])
        await rooms.persister().run_once()
    first = checkpoint_id(RUN, 1, 1)
    assert rooms.memory.find(first) is None, "it is examined in hot"
    worker = examiner(rooms)
    examined: list[object] = []

    async def examine(checkpoint: object, _: object) -> Diagnosis:
        examined.append(checkpoint)
        return Diagnosis(healthy=False)

    monkeypatch.setattr(examiner_module, "examine_files", examine)
    async with rooms.context.lock(first):  # as held by a deletion, which a marker waits for
        verdicts = [await worker.is_healthy(first, wait_s=0.1) for _ in range(2)]
    assert verdicts == [False, False]
    assert markers(rooms, "hot", 1) == []
    assert await worker.run_once()
    assert markers(rooms, "hot", 1) == ["unhealthy.json"]
    assert examined.count(first) == 1
    assert rooms.count("tierd_examinations_total", run=RUN, verdict="unhealthy") == 2, "one of each checkpoint"


async def test_the_verdict_is_copied_to_cold_and_back_to_hot(rooms: Rooms) -> None:
    rooms.seal(1, [shard(1.0)])
    await rooms.persister().run_once()
    replicator = rooms.replicator()
    await rooms.look()
    assert await replicator.run_once(), "copied before it was examined"
    assert markers(rooms, "cold", 1) == []
    await examiner(rooms).run_once()
    assert await replicator.run_once()
    assert markers(rooms, "cold", 1) == ["healthy.json"]
    (rooms.folder("hot", checkpoint_id(RUN, 1, 1)) / "healthy.json").unlink()
    await rooms.look()
    assert await examiner(rooms).run_once()
    assert markers(rooms, "hot", 1) == ["healthy.json"]
    assert rooms.count("tierd_examinations_total", run=RUN, verdict="healthy") == 1


async def test_equal_weights_at_two_steps_are_stale_unless_the_learning_rate_is_0(rooms: Rooms) -> None:
    worker = examiner(rooms)
    for step, raw in enumerate((shard(1.0), shard(1.0), shard(2.0), shard(3.0, lr=0.0), shard(3.0, lr=0.0)), start=1):
        rooms.seal(step, [raw])
        await worker.run_once()
    assert rooms.count("tierd_stale_snapshots_total", run=RUN) == 1
    assert "steps 1 and 2 have the same weights" in rooms.incidents.recent()[0].message
    assert rooms.count("tierd_examinations_total", run=RUN, verdict="healthy") == 5


async def test_no_marker_is_left_of_a_checkpoint_that_is_deleted_while_it_is_examined(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3, 4):
        rooms.seal(step, [shard(1.0)])
        await rooms.persister().run_once()
    await rooms.look()
    await rooms.replicator().run_once()
    oldest = checkpoint_id(RUN, 1, 1)
    is_deleting = asyncio.Event()
    delete = rooms.hot_store.delete

    async def examine(*_: object) -> Diagnosis:
        await is_deleting.wait()
        return Diagnosis(healthy=True)

    async def delete_slowly(keys: list[str]) -> None:
        await delete(keys)
        is_deleting.set()
        await asyncio.wait({examining}, timeout=0.5)  # an examiner that does not wait for the deletion ends first

    monkeypatch.setattr(examiner_module, "examine_files", examine)
    monkeypatch.setattr(rooms.hot_store, "delete", delete_slowly)
    examining = asyncio.ensure_future(examiner(rooms).examine(oldest))
    await asyncio.sleep(0)
    assert await Reaper(rooms.context).run_once()
    await examining
    assert not rooms.folder("hot", oldest).exists()


async def test_a_checkpoint_that_is_only_in_cold_gets_its_marker_there(rooms: Rooms) -> None:
    """Hot had no space for it, so the replicator has no marker to copy."""
    snapshot_set = rooms.seal(1, [shard(math.nan)])
    snapshot_set.refused_by.add("hot")
    await rooms.look()
    assert await WriteThrough(rooms.context).run_once()
    assert markers(rooms, "cold", 1) == []
    assert await examiner(rooms).run_once()
    assert markers(rooms, "cold", 1) == ["unhealthy.json"]
    assert rooms.catalog.get(snapshot_set.id).healthy is False  # type: ignore[union-attr]


async def test_a_python_that_the_daemons_user_may_not_run_is_an_incident(
    rooms: Rooms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms.seal(1, [shard(1.0)])
    python = tmp_path / "python"
    python.write_text("of another user")
    worker = examiner(rooms)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(python))
        assert not await worker.run_once()
    incident = rooms.incidents.recent()[0]
    assert f"start {python}: Permission denied" in incident.message
    assert f"user {os.geteuid()}" in incident.hint
    assert await worker.run_once(), "it is tried again"


NODE = wire.NodeRanks(ranks=[1], lowest=[0, 1], claim="ab" * 16, base=0)


def told(rooms: Rooms) -> list[tuple[int, bool | None]]:
    messages = [each for each in rooms.sent if isinstance(each, wire.Persisted)]
    return [(message.step, message.is_healthy) for message in messages]


async def test_trainers_over_several_nodes_are_told_of_the_verdict_on_their_part(tmp_path: Path) -> None:
    async with rooms_at(tmp_path, health=HealthConfig()) as rooms:
        await rooms.list_tiers()
        worker = examiner(rooms)
        rooms.seal(1, [shard(math.nan)], node=NODE, world_size=2, number=1)
        await rooms.persister().run_once()
        assert told(rooms) == [(1, None)]
        assert await worker.run_once()
        assert told(rooms)[1:] == [(1, False)]
        rooms.seal(2, [shard(1.0)], node=NODE, world_size=2, number=2)
        assert await worker.run_once()  # in memory, before it is durable
        assert told(rooms)[2:] == []
        await rooms.persister().run_once()
        assert told(rooms)[2:] == [(2, True)]
        persisted = rooms.context.persisted(checkpoint_id(RUN, 1, 1))  # a trainer that asks again
        assert persisted.is_healthy is False


async def test_without_examinations_nobody_waits_for_a_verdict(tmp_path: Path) -> None:
    async with rooms_at(tmp_path, health=HealthConfig(examine=False)) as rooms:
        await rooms.list_tiers()
        rooms.seal(1, [b"state"], node=NODE, world_size=2, number=1)
        await rooms.persister().run_once()
        assert told(rooms) == [(1, True)]


async def test_a_verdict_that_comes_during_a_copy_from_memory_reaches_the_cold_tier(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer snapshot is complete when the copy ends, so the slots are released at once."""
    await rooms.look()
    snapshot_set = rooms.seal(1, [shard(math.nan)])
    snapshot_set.refused_by.add("hot")
    worker, real_put = examiner(rooms), rooms.cold["cold"].store.put

    async def put(*arguments: Any, **options: Any) -> Any:
        await worker.run_once()
        assert snapshot_set.diagnosis is not None
        rooms.seal(2, [shard(1.0)])
        return await real_put(*arguments, **options)

    monkeypatch.setattr(rooms.cold["cold"].store, "put", put)
    assert await WriteThrough(rooms.context).run_once()
    list(rooms.memory.release(RUN))
    await worker.run_once()
    assert markers(rooms, "cold", 1) == ["unhealthy.json"]
    entry = rooms.catalog.get(checkpoint_id(RUN, 1, 1))
    assert entry is not None
    assert entry.healthy is False


async def test_a_verdict_that_comes_during_a_copy_of_a_part_from_memory_is_in_its_node_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node file is never replaced."""
    async with rooms_at(tmp_path, cold=("cold",), health=HealthConfig()) as rooms:
        await rooms.look()
        snapshot_set = rooms.seal(1, [shard(math.nan)], node=NODE, world_size=2, number=1)
        snapshot_set.refused_by.add("hot")
        worker, real_put = examiner(rooms), rooms.cold["cold"].store.put

        async def put(*arguments: Any, **options: Any) -> Any:
            await worker.run_once()
            return await real_put(*arguments, **options)

        monkeypatch.setattr(rooms.cold["cold"].store, "put", put)
        assert await WriteThrough(rooms.context).run_once()
        (path,) = rooms.folder("cold", snapshot_set.id).glob("node-*.json")
        assert msgspec.json.decode(path.read_bytes(), type=NodeFile).is_healthy is False
