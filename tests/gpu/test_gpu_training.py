"""A training on a GPU with a real daemon: killed, restored, and going on with the same losses, bit for bit."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tierd_client
import torch
from safetensors.torch import load_file
from tierd_client import Torn, TrainingState

from tests.support.cuda import DEVICE, OPTIMIZERS, Training, assert_same, needs_cuda
from tests.support.daemon import Daemon
from tests.support.kill import kill_when_stalled
from tests.support.state import Files, restore, stage
from tests.support.waiting import DEADLINE_S

pytestmark = needs_cuda

WIDTH = 512
MODES = ["sync", "overlap"]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("daemon"), more="[lifecycle.hot]\nkeep_last = 1000\n") as daemon:
        yield daemon


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    return re.sub(r"\W+", "-", request.node.name)[:100]


def committed(daemon: Daemon, run: str, step: int) -> dict[str, torch.Tensor]:
    [shard] = (daemon.hot / run).glob(f"{step:012d}-*/*.safetensors")
    return load_file(shard)


KINDS: dict[str, dict[str, Any]] = {
    **{name: {"options": options} for name, options in OPTIMIZERS.items()},
    "capturable": {"options": {"capturable": True}},
    "scaled": {"is_scaled": True},
    "compiled": {"compiled": {}},
    "in graphs": {"compiled": {"mode": "reduce-overhead"}},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_from_its_checkpoint_with_the_same_losses(daemon: Daemon, run: str, kind: str, mode: str) -> None:
    if "compiled" in KINDS[kind]:
        pytest.importorskip("triton")
    training = Training(width=WIDTH, **KINDS[kind])
    with tierd_client.connect(run, socket=daemon.socket, staging=mode) as client:
        assert client.restore(training.state) is None
        training.train(4)
        expected = training.now()
        shot = client.snapshot(4, training.state)
        losses = training.train(6)
        shot.wait_persisted(DEADLINE_S)
    assert_same(committed(daemon, run, 4), expected)

    resumed = Training(width=WIDTH, seed=1, **KINDS[kind])
    with tierd_client.connect(run, socket=daemon.socket, staging=mode) as client:
        found = client.restore(resumed.state)
        assert found is not None
        assert found.step == 4
        assert_same(resumed.now(), expected)
        resumed.x.copy_(training.x)
        assert resumed.train(6) == losses


def test_a_change_in_place_that_no_step_makes_gives_the_snapshot_up(daemon: Daemon, run: str) -> None:
    training = Training()
    with tierd_client.connect(run, socket=daemon.socket, staging="overlap") as client:
        client.restore(training.state)
        training.train(1)
        shot = client.snapshot(1, training.state)
        with torch.no_grad():
            next(training.model.parameters()).mul_(2)
        training.train(1)
        with pytest.raises(Torn):
            shot.wait_persisted(DEADLINE_S)
        expected = training.now()
        client.snapshot(2, training.state).wait_persisted(DEADLINE_S)
    assert_same(committed(daemon, run, 2), expected)


KILLED = """
import sys, time
sys.path[:0] = {paths!r}
import tierd_client
from tests.support.cuda import Training
training = Training(width={width})
client = tierd_client.connect({run!r}, socket={socket!r}, staging={mode!r})
client.restore(training.state)
training.train(3)
shot = client.snapshot(3, training.state)
training.train(3)
shot.wait_persisted()
if {mode!r} == "overlap":
    client.snapshot(6, training.state)
print("stalled", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("mode", MODES)
def test_killed_in_the_middle_it_comes_back_from_memory(daemon: Daemon, run: str, mode: str) -> None:
    """In "overlap", in the middle of a copy: what is only half in its slot is not restored."""
    paths = [str(Path(__file__).parents[2]), *sys.path]
    kill_when_stalled(KILLED.format(paths=paths, width=WIDTH, run=run, socket=daemon.socket, mode=mode))
    uninterrupted = Training(width=WIDTH)
    uninterrupted.train(3)
    expected = uninterrupted.now()
    losses = uninterrupted.train(3)
    training = Training(width=WIDTH, seed=1)
    training.x.copy_(uninterrupted.x)
    with tierd_client.connect(run, socket=daemon.socket, staging=mode) as client:
        found = client.restore(training.state)
        assert found is not None
        assert (found.step, found.tier) == (3, "memory")
        assert_same(training.now(), expected)
        assert training.train(3) == losses
        training.train(1)
        expected = training.now()
        client.snapshot(7, training.state).wait_persisted(DEADLINE_S)
    assert_same(committed(daemon, run, 7), expected)


# ── without a daemon ──


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    made = Files(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("place", ["in_memory", "on_disk"])
def test_restored_onto_a_gpu(files: Files, place: str) -> None:
    def model_of() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(300, 500), torch.nn.Linear(500, 7))

    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    raw = stage(TrainingState(model=model, optimizer=optimizer))
    other = model_of().to(DEVICE)
    fresh = torch.optim.AdamW(other.parameters())
    restore(TrainingState(model=other, optimizer=fresh), [getattr(files, place)(raw)])
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine.cpu(), theirs)
        assert fresh.state[mine]["exp_avg"].device == mine.device
        assert fresh.state[mine]["step"].device.type == "cpu"
        assert torch.equal(fresh.state[mine]["exp_avg"].cpu(), optimizer.state[theirs]["exp_avg"])


def test_what_other_streams_still_do_to_a_destination_does_not_reach_the_restored_bytes(files: Files) -> None:
    source = torch.nn.Linear(1024, 1024)
    raw = stage(TrainingState(model=source))
    model = torch.nn.Linear(1024, 1024, device=DEVICE)
    with torch.cuda.stream(torch.cuda.Stream(DEVICE)), torch.no_grad():
        for _ in range(2000):
            model.weight.fill_(0)
        restore(TrainingState(model=model), [files.in_memory(raw)])
    torch.cuda.synchronize()
    assert torch.equal(model.weight.cpu(), source.weight)


@pytest.mark.parametrize("is_whole", [True, False])
def test_the_generator_of_a_gpu_comes_back_and_its_absence_shows(files: Files, is_whole: bool) -> None:
    def training(seed: int) -> tuple[TrainingState, Callable[[], list[float]]]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)).to(DEVICE)
        return TrainingState(model=model), lambda: [
            model(torch.ones(4, 8, device=DEVICE)).sum().item() for _ in range(20)
        ]

    state, losses = training(1)
    losses()
    raw = stage(state)
    expected = losses()
    resumed, losses = training(2)
    fresh = torch.cuda.get_rng_state()
    restore(resumed, [files.on_disk(raw)])
    if not is_whole:
        torch.cuda.set_rng_state(fresh)
    assert (losses() == expected) == is_whole
