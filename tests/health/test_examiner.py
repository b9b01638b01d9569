"""Who is examined, what becomes of the verdict, and what a look that goes wrong costs: nothing but another look."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from tierd_client.state.training_state import TrainingState
from torch import nn

from tests.support.rooms import RUN, Rooms, rooms_at
from tests.support.state import stage
from tierd.errors import Transient
from tierd.format.health import Examined
from tierd.format.ids import checkpoint_id
from tierd.health import examiner as examiner_module
from tierd.health.examiner import Examiner


@pytest.fixture
async def rooms(tmp_path: Path) -> AsyncIterator[Rooms]:
    async with rooms_at(tmp_path, cold=("cold",)) as found:
        yield found


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


async def test_a_snapshot_is_judged_in_memory_and_marked_once_it_is_committed(rooms: Rooms) -> None:
    one = rooms.seal(1, [shard(math.nan)])
    worker = examiner(rooms)
    assert await worker.run_once()
    assert one.diagnosis is not None
    assert not one.diagnosis.healthy
    assert worker.diagnosis(one.id) is False
    assert "model.bias (2 NaN, 0 Inf)" in rooms.incidents.recent()[0]["message"]
    await rooms.persister().run_once()
    assert markers(rooms, "hot", 1) == []
    assert await worker.run_once()
    assert markers(rooms, "hot", 1) == ["unhealthy.json"]
    assert rooms.count("tierd_examinations_total", run=RUN, verdict="unhealthy") == 1
    diagnosis = await rooms.hot.diagnosis(one.id, is_healthy=False)
    assert [found.tensor for found in diagnosis.not_finite] == ["model.bias", "model.weight"]


async def test_what_lies_in_hot_unexamined_is_looked_at_there_and_only_once(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms.seal(1, [shard(1.0), shard(1.0)])
    await rooms.persister().run_once()
    rooms.seal(2, [shard(2.0), shard(2.0)])
    await rooms.persister().run_once()  # and the slots of step 1 are free again
    assert rooms.memory.find(checkpoint_id(RUN, 1, 1)) is None
    worker = examiner(rooms)
    assert await worker.run_once()
    assert markers(rooms, "hot", 1) == markers(rooms, "hot", 2) == ["healthy.json"]

    async def never(*_: object) -> Examined:
        raise AssertionError("looked at again")

    monkeypatch.setattr(examiner_module, "_run_program", never)
    await rooms.look()
    assert await examiner(rooms).run_once(), "its markers say it to any later daemon"
    assert rooms.catalog.get(checkpoint_id(RUN, 1, 1)).healthy is True  # type: ignore[union-attr]


async def test_a_slot_that_is_given_back_while_it_is_read_leaves_the_verdict_to_the_file(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = rooms.seal(1, [shard(1.0)])
    await rooms.persister().run_once()
    real = examiner_module._run_program
    sources: list[str] = []

    async def overwritten(checkpoint: object, files: list[tuple[int, int]]) -> Examined:
        if not sources:
            rooms.seal(2, [shard(2.0)])
            list(rooms.memory.release(RUN))
            one.snapshots.clear()
            sources.append("slot")
            return Examined(tensors=1)  # numbers of half a snapshot
        sources.append("file")
        return await real(checkpoint, files)  # type: ignore[arg-type]

    monkeypatch.setattr(examiner_module, "_run_program", overwritten)
    await examiner(rooms).examine(one.id)
    assert sources == ["slot", "file"]
    assert markers(rooms, "hot", 1) == ["healthy.json"]


async def test_bits_that_flipped_on_the_disk_are_damage_and_no_verdict(rooms: Rooms) -> None:
    one = rooms.seal(1, [shard(1.0)])
    await rooms.persister().run_once()
    path = next(rooms.folder("hot", one.id).glob("*.safetensors"))
    raw = bytearray(path.read_bytes())
    raw[-8:] = b"\xff" * 8  # NaN, as torch reads it
    path.write_bytes(raw)
    rooms.seal(2, [shard(2.0)])
    list(rooms.memory.release(RUN))
    assert rooms.memory.find(one.id) is None
    await examiner(rooms).examine(one.id)
    assert markers(rooms, "hot", 1) == []
    assert [found["kind"] for found in rooms.incidents.recent()] == ["corrupt"]
    assert rooms.count("tierd_examinations_total", run=RUN, verdict="failed") == 1


async def test_what_can_never_be_looked_at_is_told_once(rooms: Rooms) -> None:
    await rooms.commit("hot", step=100)  # its bytes are no shard
    await rooms.look()
    worker = examiner(rooms)
    assert await worker.run_once()
    assert await worker.run_once()
    assert rooms.count("tierd_examinations_total", run=RUN, verdict="failed") == 1
    assert [one["kind"] for one in rooms.incidents.recent()] == ["corrupt"]


async def test_a_process_that_dies_or_hangs_is_tried_again(rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
    one = rooms.seal(1, [shard(1.0)])
    worker = examiner(rooms)
    monkeypatch.setattr(examiner_module, "PROGRAM", "tierd.no_such_program")
    assert not await worker.run_once()
    assert "ended with code 1" in rooms.incidents.recent()[0]["message"]
    monkeypatch.undo()
    monkeypatch.setattr(examiner_module, "TIMEOUT_MIN_S", 0.0)
    monkeypatch.setattr(examiner_module, "RATE_MIN_BYTES_S", 1e12)
    with pytest.raises(Transient, match="no answer"):
        await worker.examine(one.id)
    monkeypatch.undo()
    assert await worker.run_once()
    assert one.diagnosis is not None
    assert one.diagnosis.healthy


async def test_a_trainer_waits_for_a_verdict_no_longer_than_it_may(rooms: Rooms) -> None:
    one = rooms.seal(1, [shard(math.nan)])
    worker = examiner(rooms)
    assert await worker.is_healthy(one.id, wait_s=0.0) is None
    asked = await asyncio.gather(*(worker.is_healthy(one.id, wait_s=60.0) for _ in range(4)))
    assert asked == [False] * 4
    assert rooms.count("tierd_examinations_total", run=RUN, verdict="unhealthy") == 1, "one look for all"


async def test_the_verdict_goes_along_to_cold_and_comes_back(rooms: Rooms) -> None:
    rooms.seal(1, [shard(1.0)])
    await rooms.persister().run_once()
    replicator = rooms.replicator()
    await rooms.look()
    assert await replicator.run_once(), "copied before it was judged"
    assert markers(rooms, "cold", 1) == []
    await examiner(rooms).run_once()
    assert await replicator.run_once()
    assert markers(rooms, "cold", 1) == ["healthy.json"]
    (rooms.folder("hot", checkpoint_id(RUN, 1, 1)) / "healthy.json").unlink()
    await rooms.look()
    assert await examiner(rooms).run_once()
    assert markers(rooms, "hot", 1) == ["healthy.json"]
    assert rooms.count("tierd_examinations_total", run=RUN, verdict="healthy") == 1


async def test_the_same_weights_at_two_steps_raise_an_alarm_unless_nothing_was_to_be_learnt(rooms: Rooms) -> None:
    worker = examiner(rooms)
    for step, raw in enumerate((shard(1.0), shard(1.0), shard(2.0), shard(3.0, lr=0.0), shard(3.0, lr=0.0)), start=1):
        rooms.seal(step, [raw])
        await worker.run_once()
    assert rooms.count("tierd_stale_snapshots_total", run=RUN) == 1
    assert "steps 1 and 2 have the same weights" in rooms.incidents.recent()[0]["message"]
    assert rooms.count("tierd_examinations_total", run=RUN, verdict="healthy") == 5
