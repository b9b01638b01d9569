"""The check of memory limits before slots are allocated, with limits from made cgroup trees."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import tierd_client
import torch
import torch.distributed as dist
from tierd_client.ranks import Ranks, find_ranks
from tierd_client.snapshot import snapshotter
from tierd_client.snapshot.memory_check import check_memory

from tests.support.cgroup import make_v1, make_v2
from tests.support.daemon import serving
from tests.support.trainer import Training, joined, refusals, together
from tierd.cgroup import memory_limit
from tierd.errors import Full

MB = 1_000_000


def test_single_rank_without_a_limit_or_with_enough_memory_passes(tmp_path: Path) -> None:
    ranks = Ranks(0, 1)
    check_memory(ranks, 1 << 50, None)
    make_v2(tmp_path, {"/": (800 * MB, 300 * MB)})
    check_memory(ranks, 500 * MB, memory_limit(tmp_path))
    with pytest.raises(Full) as caught:
        check_memory(ranks, 501 * MB, memory_limit(tmp_path))
    said = "they need 501 MB more shared memory, and 500 MB are free of the memory limit of 800 MB"
    assert said in caught.value.message
    assert f"of {tmp_path}/sys/fs/cgroup" in caught.value.message
    assert "raise the container's memory limit by 1 MB" in caught.value.hint


def _check(training: Training, root: Path, size_bytes: int) -> None:
    ranks = find_ranks(None, None, {})
    check_memory(ranks, size_bytes, memory_limit(root))


def _check_on_node_of_its_own(training: Training, root: Path, size_bytes: int) -> None:
    check_memory(find_ranks(None, None, {}), size_bytes, memory_limit(root), node=dist.get_rank())


def _check_own(training: Training, root: Path, size_bytes: int) -> None:
    _check(training, root / str(dist.get_rank()), size_bytes)


def test_ranks_of_one_cgroup_share_its_limit_and_all_ranks_raise(tmp_path: Path) -> None:
    make_v1(tmp_path / "shared", {"/": (800 * MB, 300 * MB)})
    for rank in range(2):
        make_v2(tmp_path / str(rank), {"/": (800 * MB, 300 * MB)})
    with joined(tmp_path, 2) as trainers:
        together(trainers, "apply", _check, tmp_path / "shared", 250 * MB)
        for error in refusals(trainers, "apply", _check, tmp_path / "shared", 251 * MB):
            assert "the slots of the 2 ranks of this cgroup: they need 502 MB more shared memory, and 500 MB" in str(
                error
            )

        # The cgroups of two nodes that were started alike have the same device and inode.
        together(trainers, "apply", _check_on_node_of_its_own, tmp_path / "shared", 251 * MB)

        together(trainers, "apply", _check_own, tmp_path, 500 * MB)

        make_v2(tmp_path / "1", {"/": (800 * MB, 400 * MB)})
        first, second = refusals(trainers, "apply", _check_own, tmp_path, 500 * MB)
        assert "the slots of this rank" in str(second)
        assert str(first).startswith("rank 1: allocate the slots")


def test_snapshot_beyond_the_limit_raises_full_and_allocates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checked again when the state grows, as it does when the optimizer makes its moments in the first step."""
    make_v2(tmp_path, {"/": (100 * MB, 40 * MB)})
    monkeypatch.setattr(snapshotter, "memory_limit", partial(memory_limit, tmp_path))
    model = torch.nn.Linear(1024, 4096, bias=False)  # 16.8 MB; with the moments of Adam 50.3 MB
    optimizer = torch.optim.Adam(model.parameters())
    state = tierd_client.TrainingState(model=model, optimizer=optimizer)
    with serving(tmp_path / "daemon") as daemon, tierd_client.connect("run", socket=str(daemon.socket)) as client:
        client.snapshot(1, state).wait_persisted(60)
        model.weight.grad = torch.zeros_like(model.weight)
        optimizer.step()
        with pytest.raises(Full, match="they need 63 MB more shared memory, and 60 MB are free"):
            client.snapshot(2, state)
        before = daemon.status()["slots"]
        assert sum(before.values()) == 2
        make_v2(tmp_path, {"/": (200 * MB, 40 * MB)})
        client.snapshot(3, state).wait_persisted(60)
        assert daemon.steps("hot", "run") == [1, 3]


def test_a_refused_first_snapshot_makes_no_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_v2(tmp_path, {"/": (100 * MB, 80 * MB)})
    monkeypatch.setattr(snapshotter, "memory_limit", partial(memory_limit, tmp_path))
    state = tierd_client.TrainingState(model=torch.nn.Linear(1024, 4096, bias=False))
    with serving(tmp_path / "daemon") as daemon, tierd_client.connect("run", socket=str(daemon.socket)) as client:
        for step in (1, 2):
            with pytest.raises(Full, match="memory limit of 100 MB"):
                client.snapshot(step, state)
        assert sum(daemon.status()["slots"].values()) == 0
