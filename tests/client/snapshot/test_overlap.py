"""Snapshots that are copied while training goes on: the state at the call is committed, or nothing is."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import tierd_client
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tierd_client import Shot, TierdError, Torn, TrainingState, Transient
from tierd_client.snapshot import staging as module
from tierd_client.snapshot.copying import Copier
from tierd_client.snapshot.guards import DEFERRED_BYTES_MIN
from tierd_client.snapshot.staging import Staging
from torch.optim import optimizer

from tests.support.daemon import Daemon
from tests.support.waiting import DEADLINE_S, wait_until

WIDTH = 128  # a weight of 64 KiB: large enough to be copied later


class GatedCopier(Copier):
    """Each deferred copy waits until its gate is opened, and raises `error`. A copy during the call raises
    `error_at_once`."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.deferred: list[Future[None]] = []
        self.error: RuntimeError | None = None
        self.error_at_once: RuntimeError | None = None

    def copy(self, *arguments: Any, **options: Any) -> None:
        if self.error_at_once is not None:
            raise self.error_at_once
        super().copy(*arguments, **options)

    def start(self, to: Sequence[torch.Tensor], from_: Sequence[torch.Tensor], running: list[Future[None]]) -> None:
        gate = self.gate = threading.Event()

        def work() -> None:
            assert gate.wait(DEADLINE_S)
            if self.error is not None:
                raise self.error
            self.copy(to, from_)

        self.deferred.append(self._pool.submit(work))
        running.append(self.deferred[-1])

    def finish(self) -> None:
        self.gate.set()
        self.deferred[-1].result(DEADLINE_S)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    more = "[lifecycle.hot]\nkeep_last = 1000\n"
    with Daemon(tmp_path_factory.mktemp("daemon"), more=more) as daemon:
        yield daemon


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    return re.sub(r"\W+", "-", request.node.name)[:100]


class Lab:
    """A training in this process whose deferred copies wait at a gate."""

    def __init__(self, daemon: Daemon, run: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.daemon, self.run = daemon, run
        self.model = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.ema = torch.optim.swa_utils.AveragedModel(self.model)
        self.state = TrainingState(model=self.model, optimizer=self.optimizer, ema=self.ema)
        self.copier = GatedCopier()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "Copier", lambda: self.copier)
            self.client = tierd_client.connect(run, socket=daemon.socket, **{"staging": "overlap", **options})
        self.expected: dict[int, dict[str, torch.Tensor]] = {}
        self.train()

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
        """Also remembers what the checkpoint must hold."""
        self.expected[step] = {captured.name: captured.tensor.clone() for captured in self.state.capture(0, 1).tensors}
        return self.client.snapshot(step, self.state)

    def filling(self) -> int:
        """Slots that the daemon knows to be filling: one from snapshot() until its copy is handed over."""
        return self.daemon.status()["slots"]["filling"]

    def wait_on_another_thread(self, shot: Shot) -> None:
        """A wait that cannot hand the copy over."""
        waiting = threading.Thread(target=shot.wait_persisted, args=(DEADLINE_S,))
        waiting.start()
        waiting.join(DEADLINE_S)
        assert shot.is_persisted

    def open_gate_soon(self) -> None:
        """The gate opens while the training waits for the copy."""
        threading.Timer(0.02, self.copier.gate.set).start()

    def steps(self) -> list[int]:
        rows = self.daemon.get(f"/api/v1/checkpoints?run={self.run}")
        return sorted(row["step"] for row in rows if "hot" in row["tiers"])

    def check(self, step: int) -> None:
        """The checkpoint holds what was captured, bit for bit."""
        stored = load_file(self.daemon.folder(step, run=self.run) / "rank-00000-of-00001.safetensors")
        assert stored.keys() == self.expected[step].keys()
        for name, tensor in self.expected[step].items():
            assert torch.equal(_bits(stored[name]), _bits(tensor)), name


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.fixture
def lab(daemon: Daemon, run: str) -> Iterator[Lab]:
    with Lab(daemon, run) as lab:
        yield lab


# ── guarded changes ──


def test_optimizer_step_waits_for_the_copy_and_the_shard_holds_the_state_before_it(lab: Lab) -> None:
    shot = lab.snapshot(1)
    lab.backward()
    before = lab.model[0].weight.clone()
    unchanged: list[bool] = []
    opened = threading.Timer(
        0.05, lambda: (unchanged.append(torch.equal(lab.model[0].weight, before)), lab.copier.gate.set())
    )
    opened.start()
    lab.step()

    assert unchanged == [True], "the step waited"
    assert shot.guard_wait_s > 0.01
    assert not torch.equal(lab.model[0].weight, before)
    shot.wait_persisted(DEADLINE_S)
    lab.check(1)


def test_tensors_that_forward_changes_are_copied_before_the_call_returns(lab: Lab) -> None:
    mean = lab.model[1].running_mean.clone()
    shot = lab.snapshot(1)
    lab.backward()
    assert not torch.equal(lab.model[1].running_mean, mean)
    lab.ema.update_parameters(lab.model)
    torch.rand(100)
    lab.open_gate_soon()
    shot.wait_persisted(DEADLINE_S)
    lab.check(1)


def test_another_optimizer_of_the_same_parameters_waits_too(lab: Lab) -> None:
    other = torch.optim.SGD(lab.model.parameters(), lr=1.0)
    shot = lab.snapshot(1)
    lab.backward()
    lab.open_gate_soon()
    other.step()
    shot.wait_persisted(DEADLINE_S)
    lab.check(1)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}])
def test_optimizers_that_advance_no_version_counter_wait_too(lab: Lab, options: dict[str, bool]) -> None:
    lab.optimizer = torch.optim.AdamW(lab.model.parameters(), **options)
    lab.state = TrainingState(model=lab.model, optimizer=lab.optimizer)
    lab.train()
    shot = lab.snapshot(1)
    lab.backward()
    lab.open_gate_soon()
    lab.step()
    shot.wait_persisted(DEADLINE_S)
    lab.check(1)


def test_step_through_a_grad_scaler_and_accelerate_waits_too(lab: Lab) -> None:
    from accelerate import Accelerator

    prepared = Accelerator(cpu=True).prepare(lab.optimizer)
    scaler = torch.amp.GradScaler("cpu")
    lab.state = TrainingState(model=lab.model, optimizer=prepared, scaler=scaler)
    shot = lab.snapshot(1)
    assert len(lab.copier.deferred) == 1
    scaler.scale(lab.model(torch.randn(8, WIDTH)).square().mean()).backward()
    lab.open_gate_soon()
    scaler.step(prepared)
    scaler.update()
    shot.wait_persisted(DEADLINE_S)
    lab.check(1)


def test_next_snapshot_and_close_wait_for_the_copy_before(lab: Lab) -> None:
    first = lab.snapshot(1)
    lab.open_gate_soon()
    lab.snapshot(2)
    first.wait_persisted(DEADLINE_S)
    lab.open_gate_soon()
    lab.client.close()
    wait_until(lambda: lab.steps() == [1, 2], "both")
    for step in (1, 2):
        lab.check(step)


def test_due_hands_over_a_finished_copy_and_never_waits(lab: Lab) -> None:
    shot = lab.snapshot(1)
    lab.client.due(1)
    assert not lab.copier.deferred[0].done(), "due() did not wait"
    lab.copier.finish()
    lab.client.due(2)
    lab.wait_on_another_thread(shot)


def test_restore_waits_for_the_copy_before_it_overwrites_the_state(lab: Lab) -> None:
    lab.snapshot(1)
    lab.open_gate_soon()
    lab.train()
    shot = lab.snapshot(2)
    lab.open_gate_soon()
    assert lab.client.restore(lab.state, resume=1) is not None
    shot.wait_persisted(DEADLINE_S)
    lab.check(2)
    assert torch.equal(lab.model[0].weight, lab.expected[1]["model.0.weight"])


def test_optimizer_may_load_state_during_the_copy_since_that_changes_nothing_in_place(lab: Lab) -> None:
    loaded = copy.deepcopy(lab.optimizer.state_dict())
    moment = lab.optimizer.state[lab.model[0].weight]["exp_avg"]
    assert moment.nbytes >= DEFERRED_BYTES_MIN
    shot = lab.snapshot(1)
    moment.data = torch.zeros(WIDTH, WIDTH)  # as offloading does; the former memory is still being read
    lab.optimizer.load_state_dict(loaded)
    lab.model[0].weight.data = torch.zeros(WIDTH, WIDTH)
    lab.open_gate_soon()
    shot.wait_persisted(DEADLINE_S)
    lab.check(1)


# ── changes that no guard prevents ──


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
def test_change_in_place_fails_the_snapshot_and_the_next_one_is_whole(
    lab: Lab, change: Callable[[Lab], None], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    shot = lab.snapshot(1)
    change(lab)
    lab.open_gate_soon()
    lab.train()
    with pytest.raises(Torn, match=rf"snapshot step 1 of .*{named} changed in place") as caught:
        shot.wait_persisted(DEADLINE_S)
    assert "wait_staged" in caught.value.hint
    assert "changed in place" in caplog.text
    assert lab.daemon.metric(f'tierd_snapshots_total{{outcome="failed",run="{lab.run}"}}') == 1

    shot = lab.snapshot(2)
    change(lab)  # from now on that tensor is copied during the call
    lab.open_gate_soon()
    shot.wait_persisted(DEADLINE_S)
    assert lab.steps() == [2]
    lab.check(2)
    assert lab.filling() == 0


def test_layer_that_changes_its_weight_in_forward_fails_one_snapshot_only(lab: Lab) -> None:
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
        lab.open_gate_soon()
        lab.train()
        with pytest.raises(Torn) if step == 1 else contextlib.nullcontext():
            shot.wait_persisted(DEADLINE_S)
    assert lab.steps() == [2]
    lab.check(2)


def test_state_of_an_optimizer_without_hooks_is_copied_during_the_call_with_one_warning(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    for group in lab.optimizer.param_groups:
        group["capturable"] = True
    for step in (1, 2):
        shot = lab.snapshot(step)
        assert not lab.copier.deferred
        with torch.no_grad():
            lab.model[0].weight.data.zero_()
        shot.wait_persisted(DEADLINE_S)
        lab.check(step)
    assert caplog.text.count("may step without running step hooks") == 1


def test_hooks_removed_during_the_copy_fail_that_snapshot(lab: Lab) -> None:
    class Hooked(torch.optim.AdamW):
        pass

    lab.optimizer = Hooked(lab.model.parameters(), fused=True)
    lab.state = TrainingState(model=lab.model, optimizer=lab.optimizer)
    lab.train()
    shot = lab.snapshot(1)
    Hooked.step = torch.optim.AdamW.step.__wrapped__  # as older versions of torch did at the first torch.compile
    lab.train()
    lab.open_gate_soon()
    with pytest.raises(Torn, match="stopped running step hooks"):
        shot.wait_persisted(DEADLINE_S)
    lab.snapshot(2)
    assert len(lab.copier.deferred) == 1, "the second snapshot was copied during the call"


def test_failed_copy_fails_the_shot_and_not_the_training(lab: Lab) -> None:
    lab.copier.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    shot = lab.snapshot(1)
    lab.open_gate_soon()
    lab.train()
    with pytest.raises(TierdError, match="copy the state: CUDA error"):
        shot.wait_persisted(DEADLINE_S)
    lab.copier.error = None
    shot = lab.snapshot(2)
    lab.copier.gate.set()
    shot.wait_persisted(DEADLINE_S)
    assert lab.steps() == [2]


def test_failed_copy_during_the_call_raises_tierd_error_and_the_next_snapshot_works(lab: Lab) -> None:
    lab.copier.error_at_once = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(TierdError, match=r"snapshot step 1 of .*: copy the state: CUDA out of memory"):
        lab.client.snapshot(1, lab.state)
    lab.copier.error_at_once = None
    shot = lab.snapshot(2)
    lab.copier.gate.set()
    shot.wait_persisted(DEADLINE_S)
    assert lab.steps() == [2]


class GpuCopy:
    """A copy that a GPU has not finished: the host decides what to do about it."""

    def __init__(self) -> None:
        self.is_done = False
        self.held_back = 0

    def hold_back(self) -> None:
        self.held_back += 1

    def wait(self) -> None:
        self.is_done = True


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> GpuCopy:
    """Part of each deferred copy."""
    gpu, start = GpuCopy(), Staging.start

    def with_gpu(staging: Staging) -> None:
        start(staging)
        staging._copies.append(gpu)

    monkeypatch.setattr(Staging, "start", with_gpu)
    return gpu


def test_step_waits_on_the_gpu_for_its_copy_and_changes_after_it_tear_nothing(lab: Lab, gpu: GpuCopy) -> None:
    shot = lab.snapshot(1)
    lab.copier.gate.set()
    lab.train()
    assert gpu.held_back == 1, "the stream waits before the step; the host went on"
    lab.train()
    assert not lab.client.due(1)
    assert lab.filling() == 1
    gpu.is_done = True
    lab.client.due(2)
    lab.wait_on_another_thread(shot)
    lab.check(1)


def test_change_before_the_step_is_detected_though_the_gpu_still_copies(lab: Lab, gpu: GpuCopy) -> None:
    shot = lab.snapshot(1)
    lab.copier.gate.set()
    surgery(lab)
    lab.train()
    with pytest.raises(Torn):
        shot.wait_persisted(DEADLINE_S)


# ── interruptions ──


def test_interrupt_while_a_step_waits_changes_nothing_and_the_next_step_waits_again(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    shot = lab.snapshot(1)
    lab.backward()
    before = lab.model[0].weight.clone()

    def interrupted(staging: Staging) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Staging, "release", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lab.step()
        with pytest.raises(KeyboardInterrupt):
            lab.client.snapshot(2, lab.state)
    assert torch.equal(lab.model[0].weight, before)
    assert lab.filling() == 1, "the slot of the copy is still taken"
    lab.open_gate_soon()
    lab.step()
    shot.wait_persisted(DEADLINE_S)
    lab.check(1)


def test_interrupt_before_every_copy_has_started_loses_that_snapshot(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(lab.copier, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lab.client.snapshot(1, lab.state)
    lab.train()
    shot = lab.snapshot(2)
    lab.open_gate_soon()
    shot.wait_persisted(DEADLINE_S)
    assert lab.steps() == [2]
    assert lab.filling() == 0


def test_optimizers_in_a_forked_child_do_not_wait(lab: Lab) -> None:
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


def test_close_removes_the_hooks_of_optimizers(lab: Lab) -> None:
    lab.snapshot(1)
    assert optimizer._global_optimizer_pre_hooks
    lab.copier.gate.set()
    lab.client.close()
    assert not optimizer._global_optimizer_pre_hooks
    lab.train()


def test_wait_on_another_thread_does_not_hand_the_copy_over(lab: Lab) -> None:
    shot = lab.snapshot(1)
    lab.copier.finish()
    waiting = threading.Thread(target=shot.wait_persisted, args=(DEADLINE_S,))
    waiting.start()
    waiting.join(0.2)
    assert lab.filling() == 1
    lab.train()
    waiting.join(DEADLINE_S)
    assert shot.is_persisted


def test_wait_on_another_thread_that_is_not_in_time_says_that_the_copy_is_not_sealed(lab: Lab) -> None:
    shot = lab.snapshot(1)
    lab.copier.finish()
    with (
        ThreadPoolExecutor(1) as pool,
        pytest.raises(Transient, match=r"another thread: .* has not sealed it") as caught,
    ):
        pool.submit(shot.wait_persisted, 0.1).result()
    assert "client.wait_staged()" in caught.value.hint
    lab.client.wait_staged()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(shot.wait_persisted, DEADLINE_S).result()


# ── any order of events ──

ACTS = st.sampled_from(
    ["backward", "step", "snapshot", "snapshot", "clamp", "moments", "rebind", "load", "copied", "due"]
)


@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(acts=st.lists(ACTS, min_size=3, max_size=14))
def test_committed_snapshot_is_the_state_at_the_call_under_any_order_of_events(daemon: Daemon, acts: list[str]) -> None:
    shots: dict[int, Shot] = {}
    copying: int | None = None  # the snapshot whose copy may be in progress
    touched: set[int] = set()  # snapshots that a change may have torn
    with Lab(daemon, f"property-{threading.get_ident()}-{os.urandom(4).hex()}") as lab:
        for number, act in enumerate(acts, start=1):
            if copying is not None and act in ("clamp", "moments"):
                touched.add(copying)
            match act:
                case "backward":
                    lab.backward()
                case "step":
                    lab.open_gate_soon()
                    lab.step()
                    copying = None
                case "snapshot":
                    lab.copier.gate.set()
                    shots[number], copying = lab.snapshot(number), number
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
                    is_copied = all(copy.done() for copy in lab.copier.deferred)
                    lab.client.due(number)
                    copying = None if is_copied else copying
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
