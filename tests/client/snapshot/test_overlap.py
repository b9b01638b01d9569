"""Snapshots that are copied while training goes on: what is committed is the state at the call, or nothing is."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import tierd_client
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tierd_client import Shot, TierdError, Torn, TrainingState
from tierd_client.snapshot.copying import Copier
from tierd_client.snapshot.guards import DEFERRED_BYTES_MIN
from torch.optim import optimizer

from tests.support.daemon import Daemon
from tests.support.waiting import DEADLINE_S, wait_until

WIDTH = 128  # a weight of 64 KiB: large enough to be copied later


class GatedCopier(Copier):
    """A slow copy: nothing is read before the gate of that copy opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def start(self, to: Sequence[torch.Tensor], from_: Sequence[torch.Tensor], running: list[Future[None]]) -> None:
        gate = self.gate = threading.Event()

        def work() -> None:
            assert gate.wait(DEADLINE_S)
            self.copy(to, from_)

        running.append(self._pool.submit(work))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    more = "[lifecycle.hot]\nkeep_last = 1000\n"
    with Daemon(tmp_path_factory.mktemp("daemon"), more=more) as daemon:
        yield daemon


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    return re.sub(r"\W+", "-", request.node.name)[:100]


class Lab:
    """A training in this process whose copies wait at a gate until somebody waits for them, or opens it."""

    def __init__(self, daemon: Daemon, run: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.daemon, self.run = daemon, run
        self.model = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.ema = torch.optim.swa_utils.AveragedModel(self.model)
        self.state = TrainingState(model=self.model, optimizer=self.optimizer, ema=self.ema)
        self.client = tierd_client.connect(run, socket=daemon.socket, **{"staging": "overlap", **options})
        self.copier = GatedCopier()
        self.stager._copier = self.copier
        self.expected: dict[int, dict[str, torch.Tensor]] = {}
        self.train()

    @property
    def stager(self) -> Any:
        return self.client._taker._stager

    @property
    def is_under_way(self) -> bool:
        return self.client._taker.underway.slot is not None

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.copier.gate.set()
        self.client.close()

    def backward(self) -> None:
        self.model(torch.randn(8, WIDTH)).square().mean().backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ema.update_parameters(self.model)

    def train(self) -> None:
        self.backward()
        self.step()

    def snapshot(self, step: int) -> Shot:
        """And what it must hold, if it becomes a checkpoint."""
        self.expected[step] = {one.name: one.tensor.clone() for one in self.state.capture(0, 1).tensors}
        return self.client.snapshot(step, self.state)

    def when_waited_for(self) -> None:
        """The gate opens while somebody waits at it."""
        threading.Timer(0.02, self.copier.gate.set).start()

    def steps(self) -> list[int]:
        rows = self.daemon.get(f"/api/v1/checkpoints?run={self.run}")
        return sorted(row["step"] for row in rows if "hot" in row["tiers"])

    def check(self, step: int) -> None:
        """Bit for bit what was captured."""
        found = load_file(self.daemon.folder(step, run=self.run) / "rank-00000-of-00001.safetensors")
        assert found.keys() == self.expected[step].keys()
        for name, tensor in self.expected[step].items():
            assert torch.equal(_bits(found[name]), _bits(tensor)), name


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.fixture
def lab(daemon: Daemon, run: str) -> Iterator[Lab]:
    with Lab(daemon, run) as lab:
        yield lab


# ── what is guarded ──


def test_a_step_of_the_optimizer_waits_for_the_copy_and_the_shard_holds_what_was_before(lab: Lab) -> None:
    shot = lab.snapshot(1)
    assert lab.is_under_way
    lab.backward()
    before = lab.model[0].weight.clone()
    seen: list[bool] = []
    opened = threading.Timer(
        0.05, lambda: (seen.append(torch.equal(lab.model[0].weight, before)), lab.copier.gate.set())
    )
    opened.start()
    lab.step()

    assert seen == [True], "the step has waited"
    assert shot.guard_wait_s > 0.01
    assert not lab.is_under_way
    assert not torch.equal(lab.model[0].weight, before)
    shot.wait_persisted(DEADLINE_S)
    lab.check(1)


def test_what_a_forward_changes_is_copied_before_the_call_returns(lab: Lab) -> None:
    mean = lab.model[1].running_mean.clone()
    shot = lab.snapshot(1)
    lab.backward()
    assert not torch.equal(lab.model[1].running_mean, mean)
    lab.ema.update_parameters(lab.model)
    torch.rand(100)
    lab.when_waited_for()
    shot.wait_persisted(DEADLINE_S)
    lab.check(1)


def test_another_optimizer_of_the_same_parameters_waits_too(lab: Lab) -> None:
    other = torch.optim.SGD(lab.model.parameters(), lr=1.0)
    shot = lab.snapshot(1)
    lab.backward()
    lab.when_waited_for()
    other.step()
    shot.wait_persisted(DEADLINE_S)
    lab.check(1)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}])
def test_optimizers_that_advance_no_version_counter_wait_all_the_same(lab: Lab, options: dict[str, bool]) -> None:
    lab.optimizer = torch.optim.AdamW(lab.model.parameters(), **options)
    lab.state = TrainingState(model=lab.model, optimizer=lab.optimizer)
    lab.train()
    shot = lab.snapshot(1)
    lab.backward()
    lab.when_waited_for()
    lab.step()
    shot.wait_persisted(DEADLINE_S)
    lab.check(1)


def test_under_a_grad_scaler_and_accelerate_it_is_still_the_inner_step(lab: Lab) -> None:
    from accelerate import Accelerator

    prepared = Accelerator(cpu=True).prepare(lab.optimizer)
    scaler = torch.amp.GradScaler("cpu")
    lab.state = TrainingState(model=lab.model, optimizer=prepared, scaler=scaler)
    shot = lab.snapshot(1)
    assert lab.is_under_way
    scaler.scale(lab.model(torch.randn(8, WIDTH)).square().mean()).backward()
    lab.when_waited_for()
    scaler.step(prepared)
    scaler.update()
    shot.wait_persisted(DEADLINE_S)
    lab.check(1)


def test_the_next_snapshot_and_the_close_wait_for_the_copy_before(lab: Lab) -> None:
    first = lab.snapshot(1)
    lab.when_waited_for()
    lab.snapshot(2)
    first.wait_persisted(DEADLINE_S)
    lab.when_waited_for()
    lab.client.close()
    wait_until(lambda: lab.steps() == [1, 2], "both")
    for step in (1, 2):
        lab.check(step)


def test_due_hands_over_what_is_copied_and_waits_for_nothing(lab: Lab) -> None:
    shot = lab.snapshot(1)
    lab.client.due(1)
    assert lab.is_under_way
    lab.copier.gate.set()
    for job in lab.client._taker.underway._copy.staging._jobs:
        job.result(DEADLINE_S)
    lab.client.due(2)
    assert not lab.is_under_way
    shot.wait_persisted(DEADLINE_S)


def test_a_restore_waits_until_nothing_reads_what_it_overwrites(lab: Lab) -> None:
    lab.snapshot(1)
    lab.when_waited_for()
    lab.train()
    shot = lab.snapshot(2)
    lab.when_waited_for()
    assert lab.client.restore(lab.state, resume=1) is not None
    shot.wait_persisted(DEADLINE_S)
    lab.check(2)
    assert torch.equal(lab.model[0].weight, lab.expected[1]["model.0.weight"])


def test_the_optimizer_may_load_other_state_for_that_changes_nothing_in_place(lab: Lab) -> None:
    loaded = copy.deepcopy(lab.optimizer.state_dict())
    moment = lab.optimizer.state[lab.model[0].weight]["exp_avg"]
    assert moment.nbytes >= DEFERRED_BYTES_MIN
    shot = lab.snapshot(1)
    moment.data = torch.zeros(WIDTH, WIDTH)  # as offloading does; what it had is still being read
    lab.optimizer.load_state_dict(loaded)
    lab.model[0].weight.data = torch.zeros(WIDTH, WIDTH)
    lab.when_waited_for()
    shot.wait_persisted(DEADLINE_S)
    lab.check(1)


# ── what is not, and is seen ──


def surgery(lab: Lab) -> None:
    with torch.no_grad():
        lab.model[0].weight.clamp_(-0.01, 0.01)


def moments(lab: Lab) -> None:
    lab.optimizer.state[lab.model[0].weight]["exp_avg"].zero_()


def load(lab: Lab) -> None:
    lab.model.load_state_dict({name: torch.zeros_like(value) for name, value in lab.model.state_dict().items()})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (surgery, r"model\.0\.weight"),
        (moments, r"optimizer\.state\.0\.weight\.exp_avg"),
        (load, r"model\.0\.weight, model\.2\.weight"),
    ],
)
def test_a_change_in_place_by_the_user_makes_the_snapshot_fail_and_the_next_one_is_whole(
    lab: Lab, change: Callable[[Lab], None], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    shot = lab.snapshot(1)
    change(lab)
    lab.when_waited_for()
    lab.train()
    with pytest.raises(Torn, match=rf"snapshot step 1 of .*{named} changed in place") as caught:
        shot.wait_persisted(DEADLINE_S)
    assert "wait_staged" in caught.value.hint
    assert "changed in place" in caplog.text
    assert lab.daemon.metric(f'tierd_snapshots_total{{outcome="failed",run="{lab.run}"}}') == 1

    shot = lab.snapshot(2)
    change(lab)  # it is copied at once by now
    lab.when_waited_for()
    shot.wait_persisted(DEADLINE_S)
    assert lab.steps() == [2]
    lab.check(2)
    slots = lab.client._held._held.values()
    assert sorted(one.use.value for one in slots) == ["free", "sealed"]


def test_a_layer_that_changes_its_weight_in_forward_costs_one_snapshot_and_no_more(lab: Lab) -> None:
    class Bag(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(WIDTH, WIDTH, max_norm=0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.embedding(x.abs().long() % WIDTH)

    lab.model = torch.nn.Sequential(Bag(), torch.nn.Flatten())
    lab.optimizer = torch.optim.AdamW(lab.model.parameters(), lr=10.0)
    lab.state = TrainingState(model=lab.model, optimizer=lab.optimizer)
    lab.ema = torch.optim.swa_utils.AveragedModel(lab.model)
    lab.train()
    for step in (1, 2):
        shot = lab.snapshot(step)
        lab.when_waited_for()
        lab.train()
        with pytest.raises(Torn) if step == 1 else contextlib.nullcontext():
            shot.wait_persisted(DEADLINE_S)
    assert lab.steps() == [2]
    lab.check(2)


def test_an_optimizer_whose_step_may_run_no_hook_is_copied_at_once_and_that_is_said_once(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    for group in lab.optimizer.param_groups:
        group["capturable"] = True
    for step in (1, 2):
        shot = lab.snapshot(step)
        assert not lab.is_under_way
        with torch.no_grad():
            lab.model[0].weight.data.zero_()
        shot.wait_persisted(DEADLINE_S)
        lab.check(step)
    assert caplog.text.count("may step without running step hooks") == 1


def test_hooks_that_are_taken_away_in_the_middle_cost_that_snapshot(lab: Lab) -> None:
    class Hooked(torch.optim.AdamW):
        pass

    lab.optimizer = Hooked(lab.model.parameters(), fused=True)
    lab.state = TrainingState(model=lab.model, optimizer=lab.optimizer)
    lab.train()
    shot = lab.snapshot(1)
    Hooked.step = torch.optim.AdamW.step.__wrapped__  # as older versions of torch did at the first torch.compile
    lab.train()
    lab.when_waited_for()
    with pytest.raises(Torn, match="stopped running step hooks"):
        shot.wait_persisted(DEADLINE_S)
    lab.snapshot(2)
    assert not lab.is_under_way


def test_a_copy_that_goes_wrong_fails_the_shot_and_not_the_training(lab: Lab) -> None:
    class Broken(Copier):
        def start(self, to: Any, from_: Any, running: list[Future[None]]) -> None:
            running.append(self._pool.submit(self._fail))

        def _fail(self) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    lab.stager._copier = Broken()
    shot = lab.snapshot(1)
    lab.train()
    with pytest.raises(TierdError, match="copy the state: CUDA error"):
        shot.wait_persisted(DEADLINE_S)
    lab.stager._copier = Copier()
    lab.snapshot(2).wait_persisted(DEADLINE_S)
    assert lab.steps() == [2]


def test_a_copy_that_goes_wrong_in_the_call_is_an_error_of_ours_and_the_next_snapshot_works(lab: Lab) -> None:
    class Full(Copier):
        def copy(self, *_: Any, **__: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

    lab.stager._copier = Full()
    with pytest.raises(TierdError, match=r"snapshot step 1 of .*: copy the state: CUDA out of memory"):
        lab.client.snapshot(1, lab.state)
    lab.stager._copier = Copier()
    lab.snapshot(2).wait_persisted(DEADLINE_S)
    assert lab.steps() == [2]


class GpuCopy:
    """Stands for a GPU that is still copying: what is decided about one is decided on the host."""

    def __init__(self) -> None:
        self.is_done = False
        self.held_back = 0

    def hold_back(self) -> None:
        self.held_back += 1

    def wait(self) -> None:
        self.is_done = True


def test_while_a_gpu_copies_the_step_waits_there_and_what_it_changes_tears_nothing(lab: Lab) -> None:
    shot = lab.snapshot(1)
    gpu = GpuCopy()
    lab.client._taker.underway._copy.staging._copies.append(gpu)
    lab.copier.gate.set()
    lab.train()
    assert gpu.held_back == 1, "before the step, by the stream"
    assert lab.is_under_way, "the host went on"
    lab.train()
    assert not lab.client.due(1)
    assert lab.is_under_way
    gpu.is_done = True
    lab.client.due(2)
    assert not lab.is_under_way
    shot.wait_persisted(DEADLINE_S)
    lab.check(1)


def test_a_change_before_the_step_is_seen_though_the_gpu_is_not_done(lab: Lab) -> None:
    shot = lab.snapshot(1)
    lab.client._taker.underway._copy.staging._copies.append(GpuCopy())
    lab.copier.gate.set()
    surgery(lab)
    lab.train()
    with pytest.raises(Torn):
        shot.wait_persisted(DEADLINE_S)


# ── interruptions ──


def test_an_interrupt_while_a_step_waits_changes_nothing_and_the_next_step_goes_on(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    shot = lab.snapshot(1)
    lab.backward()
    before = lab.model[0].weight.clone()
    staging = lab.client._taker.underway._copy.staging

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(staging, "release", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lab.step()
        with pytest.raises(KeyboardInterrupt):
            lab.client.snapshot(2, lab.state)
    assert torch.equal(lab.model[0].weight, before)
    assert lab.is_under_way, "its slot was not given to others"
    lab.when_waited_for()
    lab.step()
    shot.wait_persisted(DEADLINE_S)
    lab.check(1)


def test_an_interrupt_before_all_is_being_copied_costs_that_snapshot(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(lab.copier, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lab.client.snapshot(1, lab.state)
    lab.train()
    shot = lab.snapshot(2)
    lab.when_waited_for()
    shot.wait_persisted(DEADLINE_S)
    assert lab.steps() == [2]
    assert lab.daemon.status()["slots"]["filling"] == 0


def test_in_a_forked_child_optimizers_wait_for_nobody(lab: Lab) -> None:
    lab.snapshot(1)
    lab.backward()
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            for hook in optimizer._global_optimizer_pre_hooks.values():  # no step: OpenMP does not survive a fork
                hook(lab.optimizer, (), {})
            lab.client.close()
            code = 0
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_after_the_close_optimizers_are_as_they_were(lab: Lab) -> None:
    lab.snapshot(1)
    assert optimizer._global_optimizer_pre_hooks
    lab.copier.gate.set()
    lab.client.close()
    assert not optimizer._global_optimizer_pre_hooks
    lab.train()


def test_another_thread_that_waits_for_the_shot_leaves_the_verdict_to_the_one_that_trains(lab: Lab) -> None:
    shot = lab.snapshot(1)
    lab.copier.gate.set()
    waiting = threading.Thread(target=shot.wait_persisted, args=(DEADLINE_S,))
    waiting.start()
    for job in lab.client._taker.underway._copy.staging._jobs:
        job.result(DEADLINE_S)
    assert lab.is_under_way
    lab.train()
    waiting.join(DEADLINE_S)
    assert shot.is_persisted


# ── all at once ──

ACTS = st.sampled_from(
    ["backward", "step", "snapshot", "snapshot", "clamp", "moments", "rebind", "load", "copied", "due"]
)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(acts=st.lists(ACTS, min_size=3, max_size=14))
def test_whatever_happens_between_what_is_committed_is_the_state_at_the_call(daemon: Daemon, acts: list[str]) -> None:
    shots: dict[int, Shot] = {}
    touched: set[int] = set()  # those that a change of the user's may have torn
    with Lab(daemon, f"property-{threading.get_ident()}-{os.urandom(4).hex()}") as lab:
        for number, act in enumerate(acts, start=1):
            if lab.is_under_way and act in ("clamp", "moments"):
                touched.add(max(shots))
            match act:
                case "backward":
                    lab.backward()
                case "step":
                    lab.when_waited_for()
                    lab.step()
                case "snapshot":
                    lab.copier.gate.set()
                    shots[number] = lab.snapshot(number)
                case "clamp":
                    surgery(lab)
                case "moments":
                    moments(lab)
                case "rebind":
                    lab.model[2].weight.data = torch.randn(WIDTH, WIDTH)
                case "load":
                    lab.optimizer.load_state_dict(copy.deepcopy(lab.optimizer.state_dict()))
                case "copied":
                    lab.copier.gate.set()
                case _:
                    lab.client.due(number)
        lab.copier.gate.set()
        torn: set[int] = set()
        for number, shot in shots.items():
            try:
                shot.wait_persisted(DEADLINE_S)
            except Torn:
                torn.add(number)
        assert torn <= touched
        assert lab.steps() == sorted(shots.keys() - torn)
        for number in shots.keys() - torn:
            lab.check(number)
