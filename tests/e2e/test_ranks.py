"""Several ranks on one machine write one checkpoint, which is committed when all have sealed, or not at all."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tierd_client
from safetensors import safe_open
from tierd_client import BadConfig, Mismatch, SlotsBusy, Stale, Transient, Unsupported
from tierd_client.slots.slot_pool import SlotPool

from tests.support.daemon import Daemon
from tests.support.trainer import Trainer, Training, joined, refusals, together


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path) as daemon:
        yield daemon


@contextmanager
def ranks(daemon: Daemon, world_size: int, *, seed: int = 1, **options: Any) -> Generator[list[Trainer]]:
    """Connected ranks of one run."""
    with joined(daemon.root, world_size, seed=seed) as trainers:
        found = together(trainers, "connect", daemon.socket, **options)
        assert len(set(found)) == 1, found
        yield trainers


def kill(trainers: list[Trainer]) -> None:
    for trainer in trainers:
        trainer.kill()


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_ranks_write_each_tensor_once_and_resume_bit_for_bit(daemon: Daemon, world_size: int) -> None:
    with ranks(daemon, world_size) as first:
        assert together(first, "restore") == [None] * world_size
        together(first, "train", 3)
        together(first, "durable")
        digests = together(first, "digest")
        losses = together(first, "train", 3)
        kill(first)

    names: Counter[str] = Counter()
    for shard in daemon.folder(3).glob("*.safetensors"):
        with safe_open(str(shard), "pt") as file:
            names.update(file.keys())
            assert len(list(file.keys())) > 1, "the work is shared"
    assert set(names.values()) == {1}
    assert "model.0.weight" in names, "no wrapper's prefix"
    assert len(set(digests)) == world_size, "each rank has randomness of its own"

    with ranks(daemon, world_size, seed=2) as second:
        found = together(second, "restore")
        assert [(one.step, one.tier) for one in found] == [(3, "memory")] * world_size
        assert together(second, "digest") == digests
        assert together(second, "train", 3) == losses


def _fail_next_capture(training: Training, error: Exception) -> None:
    capture = training.state.capture

    def fail(rank: int, world_size: int) -> Any:
        training.state.capture = capture
        raise error

    training.state.capture = fail


def _due(training: Training) -> bool:
    return training.client.due(training.step)


def test_capture_that_fails_on_one_rank_fails_on_all_or_only_delays_the_slots(daemon: Daemon) -> None:
    with ranks(daemon, 3) as trainers:
        together(trainers, "restore")
        together(trainers, "train", 1)
        trainers[1].apply(_fail_next_capture, ValueError("the user's own"))
        assert len(set(together(trainers, "apply", _due))) == 1, "the slots are made by the first snapshot instead"
        for broken in (0, 2):
            trainers[broken].apply(_fail_next_capture, Unsupported("the state cannot be read"))
            errors = refusals(trainers, "snapshot")
            assert all("the state cannot be read" in str(error) for error in errors)
        together(trainers, "durable")


def test_a_rank_killed_before_it_sealed_leaves_the_older_checkpoint(daemon: Daemon) -> None:
    with ranks(daemon, 2) as first:
        together(first, "train", 2)
        together(first, "durable")
        digests = together(first, "digest")
        together(first, "train", 1)
        for trainer in first:
            trainer.apply(_hold_before_seal)
        first[0].apply(_release_seal)
        for trainer in first:
            trainer.begin("snapshot")
        first[0].end()
        assert daemon.status()["slots"]["sealed"] == 1
        kill(first)

    assert daemon.steps("hot") == [2]
    with ranks(daemon, 2, seed=2) as second:
        assert [one.step for one in together(second, "restore")] == [2, 2]
        assert together(second, "digest") == digests
        together(second, "train", 1)
        together(second, "durable")
        assert daemon.newest("hot") == 3


def test_a_rank_that_dies_raises_an_error_on_the_others(daemon: Daemon) -> None:
    with ranks(daemon, 2) as trainers:
        together(trainers, "train", 1)
        trainers[1].kill()
        with pytest.raises(Transient, match="exchange with the other ranks"):
            trainers[0].snapshot()


def test_rank_local_state_is_refused_by_another_number_of_ranks_and_nothing_changes(
    daemon: Daemon,
) -> None:
    with ranks(daemon, 2) as first:
        together(first, "train", 1)
        together(first, "durable")
        kill(first)

    with Trainer(extra={"rank": 0}) as alone:
        alone.connect(daemon.socket)
        before = alone.digest()
        with pytest.raises(Mismatch, match=r"extra\.rank: it differs between the 2 ranks .* give it load_state_dicts"):
            alone.restore()
        assert alone.digest() == before
    with Trainer() as alone:
        alone.connect(daemon.socket)
        assert alone.restore().step == 1


def test_without_a_process_group_the_error_names_the_call_that_is_missing(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BadConfig, match=r"torch\.distributed is not initialized") as caught:
        tierd_client.connect("run", socket=daemon.socket)
    assert "init_process_group" in caught.value.hint


def test_all_ranks_skip_a_step_when_one_has_no_slot(daemon: Daemon) -> None:
    with ranks(daemon, 2, when_busy="skip") as trainers:
        together(trainers, "train", 1)
        together(trainers, "durable")
        trainers[1].apply(_hide_slots)
        together(trainers, "train", 1)
        assert [type(error) for error in refusals(trainers, "snapshot")] == [SlotsBusy, SlotsBusy]

        trainers[1].apply(_show_slots)
        together(trainers, "train", 1)
        together(trainers, "durable")
        assert daemon.steps("hot") == [1, 3]
        assert daemon.metric('tierd_snapshots_total{outcome="skipped",run="run"}') == 1


def test_state_that_one_rank_cannot_save_is_an_error_on_all_and_the_next_snapshot_works(daemon: Daemon) -> None:
    with ranks(daemon, 2) as trainers:
        together(trainers, "train", 1)
        trainers[1].apply(_put_in_extra, "lock")
        errors = refusals(trainers, "snapshot")
        assert [type(error) for error in errors] == [Unsupported, Unsupported]
        assert "extra.lock" in str(errors[0])
        assert "rank 1" in str(errors[0])

        trainers[1].apply(_take_from_extra, "lock")
        together(trainers, "train", 1)
        together(trainers, "durable")
        assert daemon.steps("hot") == [2]


def test_a_newer_start_fences_every_rank_of_the_older_one(daemon: Daemon) -> None:
    with ranks(daemon, 2) as older, ranks(daemon, 2) as newer:
        together(newer, "train", 1)
        together(newer, "durable")
        together(older, "train", 1)
        assert [type(error) for error in refusals(older, "snapshot")] == [Stale, Stale]


def test_resuming_from_an_older_step_creates_one_new_generation_for_all_ranks(daemon: Daemon) -> None:
    with ranks(daemon, 2) as trainers:
        digests = []
        for _ in range(2):
            together(trainers, "train", 1)
            together(trainers, "durable")
            digests.append(together(trainers, "digest"))
        assert [one.step for one in together(trainers, "restore", resume=1)] == [1, 1]

        assert together(trainers, "generation") == [2, 2]
        assert together(trainers, "digest") == digests[0]
        together(trainers, "train", 1)
        together(trainers, "durable")
        assert [row["generation"] for row in daemon.get("/api/v1/checkpoints")] == [2, 1, 1]


def test_all_ranks_take_the_next_replica_when_one_finds_damage(daemon: Daemon) -> None:
    with ranks(daemon, 2) as first:
        together(first, "train", 1)
        together(first, "durable")
        together(first, "wait_replicated")
        digests = together(first, "digest")
        kill(first)
    daemon.kill()
    shard = daemon.folder(1) / "rank-00001-of-00002.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    daemon.start()

    with ranks(daemon, 2, seed=2) as second:
        found = together(second, "restore")
        assert [(one.step, one.tier) for one in found] == [(1, "cold")] * 2
        assert together(second, "digest") == digests


# ── run in a trainer ──


def _hold_before_seal(training: Training) -> None:
    """Stops the process before it sends that its snapshot is sealed, for a kill at that instant."""
    training.seal = SlotPool.seal
    SlotPool.seal = lambda pool, sealed: signal.raise_signal(signal.SIGSTOP)


def _release_seal(training: Training) -> None:
    SlotPool.seal = training.seal


def _hide_slots(training: Training) -> None:
    training.take = SlotPool.take
    SlotPool.take = lambda pool, step, wait_s, *, is_last=False: None


def _show_slots(training: Training) -> None:
    SlotPool.take = training.take


def _put_in_extra(training: Training, name: str) -> None:
    training.extra[name] = open  # a function cannot be saved


def _take_from_extra(training: Training, name: str) -> None:
    del training.extra[name]
