"""The full state, piece by piece: a run resumed without one piece differs, and with all pieces it does not.

A run is interrupted in the middle of an epoch and resumed in fresh objects that were built from another seed.
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tierd_client import DocumentLoader, Mismatch, ResumableLoader, ResumableSampler, TrainingState
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.support.datasets import Augmented, write_documents
from tests.support.state import Files, assert_same, one_step, restore, small_net, stage
from tierd.errors import Unsupported

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),  # torch's workers, from Python 3.12 on
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # more workers than cores
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata calls it
]

LENGTH, BATCH_SIZE = 22, 4  # six batches in an epoch, the last of them short
INTERRUPTED, RESUMED = 13, 24  # in the third epoch; for four epochs more
AT_AN_END = 12  # after the last batch of the second epoch, with its `for` not left yet


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    opened = Files(tmp_path)
    yield opened
    opened.close()


# ── the loaders ──

Batches = Callable[[int], Iterator[torch.Tensor]]
"""The remaining batches of an epoch: rows of (number of the sample, ...)."""


class _Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, 0, 0, 0], dtype=torch.float64)


def _sampler(seed: int) -> ResumableSampler:
    return ResumableSampler(LENGTH, batch_size=BATCH_SIZE, seed=seed)


def _torchdata(seed: int, workers: int) -> tuple[Any, Batches]:
    loader = StatefulDataLoader(_Numbers(), batch_size=BATCH_SIZE, shuffle=True, num_workers=workers)
    return loader, lambda _: iter(loader)


def _plain(seed: int, workers: int) -> tuple[Any, Batches]:
    sampler = _sampler(seed)
    loader = DataLoader(_Numbers(), batch_sampler=sampler, num_workers=workers, generator=torch.Generator())

    def batches(epoch: int) -> Iterator[torch.Tensor]:
        sampler.set_epoch(epoch)
        for batch in loader:
            sampler.advance()
            yield batch

    return sampler, batches


def _resumable(seed: int, workers: int) -> tuple[Any, Batches]:
    loader = ResumableLoader(Augmented(LENGTH), _sampler(seed), num_workers=workers)
    return loader, lambda _: iter(loader)


def _rows(documents: list[Any]) -> torch.Tensor:
    return torch.tensor(
        [[document["id"], random.random(), np.random.random(), torch.rand(())] for document in documents]
    )


def _documents(seed: int, workers: int, *, paths: list[str]) -> tuple[Any, Batches]:
    loader = DocumentLoader(paths, batch_size=BATCH_SIZE, num_workers=workers, collate=_rows, seed=seed)
    return loader, lambda _: iter(loader)


@functools.cache
def _paths(folder: Path) -> list[str]:
    return write_documents(folder, [7, 3, 8, 4])


LOADERS: dict[str, Callable[..., tuple[Any, Batches]]] = {
    "torchdata's StatefulDataLoader": _torchdata,
    "torch's DataLoader, ResumableSampler": _plain,
    "ResumableLoader": _resumable,
    "DocumentLoader": _documents,
}


# ── the training ──


class Training:
    """A training whose behaviour depends on every piece of its state. Each piece affects one column of its rows."""

    def __init__(self, loader: str, workers: int, seed: int, paths: list[str]) -> None:
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        body = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3))
        head = torch.nn.Linear(16, 4)
        self.model = torch.nn.Sequential(body, head)
        self.optimizers = [
            torch.optim.AdamW(body.parameters(), lr=0.01),
            torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9),
        ]
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(self.optimizers[0], 9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=5)
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.swa = AveragedModel(self.model)
        self.swa_scheduler = SWALR(self.optimizers[1], 0.02, anneal_epochs=30)
        self.extra: dict[str, Any] = {"epoch": 0, "step": 0, "best": float("inf"), "recent": [1.0]}
        self.extra |= {"swa": self.swa, "swa_scheduler": self.swa_scheduler}
        more = {"paths": paths} if loader == "DocumentLoader" else {}
        self.dataloader, self._batches = LOADERS[loader](seed, workers, **more)

    def state(self) -> TrainingState:
        return TrainingState(
            model=self.model,
            optimizer=self.optimizers,
            scheduler=self.scheduler,
            scaler=self.scaler,
            ema=self.ema,
            dataloader=self.dataloader,
            extra=self.extra,
        )

    def train(self, steps: int, *, snapshot_at: int = 0) -> tuple[list[dict[str, Any]], bytes]:
        """A row of observations for each step, and the shard of a snapshot that was taken within the loop."""
        rows: list[dict[str, Any]] = []
        raw = b""
        while True:
            for batch in self._batches(self.extra["epoch"]):
                rows.append(self._step(batch))
                if len(rows) == snapshot_at:
                    raw = stage(self.state())
                if len(rows) == steps:
                    return rows, raw
            self.extra["epoch"] += 1

    def _step(self, batch: torch.Tensor) -> dict[str, Any]:
        self.extra["step"] += 1
        if self.extra["step"] == 7:  # what a person changes by hand in the middle of a run
            self.optimizers[0].param_groups[0]["weight_decay"] = 0.3
        inputs = torch.sin(batch.float() * 1.7) + np.random.normal() * 0.1
        inputs = inputs if random.random() < 0.5 else -inputs
        loss = (self.model(inputs) - 1.0).square().mean()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        limit = 2 * sum(self.extra["recent"]) / len(self.extra["recent"])
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.swa_scheduler.step()
        self.ema.update_parameters(self.model)
        self.swa.update_parameters(self.model)
        is_best = loss.item() < self.extra["best"]
        self.extra["best"] = min(self.extra["best"], loss.item())
        self.extra["recent"] = [*self.extra["recent"], norm.item()][-4:]
        return {
            "epoch": self.extra["epoch"],
            "step": self.extra["step"],
            "samples": batch[:, 0].tolist(),
            "loss": loss.item(),
            "evaluated": self._evaluate(self.model),
            "EMA evaluated": self._evaluate(self.ema),
            "SWA evaluated": self._evaluate(self.swa),
            "lr": self.optimizers[0].param_groups[0]["lr"],
            "SWA lr": self.optimizers[1].param_groups[0]["lr"],
            "weight decay": self.optimizers[0].param_groups[0]["weight_decay"],
            "scale": self.scaler.get_scale(),
            "clipped to": limit,
            "is best": is_best,
        }

    @staticmethod
    def _evaluate(model: torch.nn.Module) -> float:
        model.eval()
        with torch.no_grad():
            loss = model(torch.linspace(-1, 1, 12).reshape(3, 4)).square().mean().item()
        model.train()
        return loss


# ── the pieces: how to read one from a fresh training, and how to put it back ──


def _tensors(find: Callable[[Training], Any]) -> tuple[Callable[[Training], Any], Callable[[Training, Any], None]]:
    def put(training: Training, values: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for tensor, value in zip(find(training), values, strict=True):
                tensor.copy_(value)

    return lambda training: [tensor.detach().clone() for tensor in find(training)], put


def _stateful(find: Callable[[Training], Any]) -> tuple[Callable[[Training], Any], Callable[[Training, Any], None]]:
    return (
        lambda training: copy.deepcopy(find(training).state_dict()),
        lambda training, state: find(training).load_state_dict(state),
    )


def _value(*keys: str) -> tuple[Callable[[Training], Any], Callable[[Training, Any], None]]:
    return (
        lambda training: {key: training.extra[key] for key in keys},
        lambda training, values: training.extra.update(values),
    )


def _put_moments(training: Training, states: list[dict[Any, Any]]) -> None:
    for optimizer, state in zip(training.optimizers, states, strict=True):
        optimizer.state.clear()
        optimizer.state.update(state)


def _put_groups(training: Training, groups: list[dict[str, Any]]) -> None:
    for optimizer, options in zip(training.optimizers, groups, strict=True):
        optimizer.param_groups[0].update(options)


def _options(training: Training) -> list[dict[str, Any]]:
    groups = [optimizer.param_groups[0] for optimizer in training.optimizers]
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


PIECES: dict[str, tuple[str, Callable[[Training], Any], Callable[[Training, Any], None]]] = {
    # piece: (the column that differs without it, how to read it from a fresh training, how to put it back)
    "model parameters": ("loss", *_tensors(lambda t: t.model.parameters())),
    "model buffers": ("evaluated", *_tensors(lambda t: t.model.buffers())),
    "optimizer moments": ("loss", lambda t: [dict(o.state) for o in t.optimizers], _put_moments),
    "optimizer param groups": ("weight decay", _options, _put_groups),
    "LR scheduler": ("lr", *_stateful(lambda t: t.scheduler)),
    "GradScaler": ("scale", *_stateful(lambda t: t.scaler)),
    "EMA weights": ("EMA evaluated", *_stateful(lambda t: t.ema)),
    "SWA weights": ("SWA evaluated", *_stateful(lambda t: t.swa)),
    "SWALR": ("SWA lr", *_stateful(lambda t: t.swa_scheduler)),
    "epoch and global step": ("step", *_value("epoch", "step")),
    "best metric so far": ("is best", *_value("best")),
    "extra": ("clipped to", *_value("recent")),
    "RNG of Python": ("loss", lambda _: random.getstate(), lambda _, state: random.setstate(state)),
    "RNG of numpy": ("loss", lambda _: np.random.get_state(), lambda _, state: np.random.set_state(state)),
    "RNG of torch": ("loss", lambda _: torch.get_rng_state(), lambda _, state: torch.set_rng_state(state)),
}


@functools.cache
def _undisturbed(
    loader: str, workers: int, folder: Path, interrupted: int = INTERRUPTED
) -> tuple[list[dict[str, Any]], bytes]:
    """The rows after the interruption in an uninterrupted run, and the snapshot of an identical interrupted one."""
    whole = Training(loader, workers, seed=1, paths=_paths(folder))
    rows, _ = whole.train(interrupted + RESUMED)
    training = Training(loader, workers, seed=1, paths=_paths(folder))
    before, raw = training.train(interrupted, snapshot_at=interrupted)
    assert before == rows[:interrupted]
    return rows[interrupted:], raw


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("documents")


def _fresh(loader: str, workers: int, folder: Path) -> Training:
    return Training(loader, workers, seed=2, paths=_paths(folder))


WITH_WORKERS = ("torchdata's StatefulDataLoader",)
"""Those that `make test` runs with processes as workers, too."""


@pytest.mark.parametrize(
    ("loader", "workers", "interrupted"),
    [
        *((loader, 0, step) for loader in LOADERS for step in (INTERRUPTED, AT_AN_END)),
        *((loader, 2, INTERRUPTED) for loader in WITH_WORKERS),
        *(pytest.param(loader, 2, AT_AN_END, marks=pytest.mark.long) for loader in WITH_WORKERS),
        *(
            pytest.param(loader, 2, step, marks=pytest.mark.long)
            for loader in LOADERS
            if loader not in WITH_WORKERS
            for step in (INTERRUPTED, AT_AN_END)
        ),
    ],
)
def test_run_resumed_with_its_whole_state_does_not_differ(
    files: Files, folder: Path, loader: str, workers: int, interrupted: int
) -> None:
    expected, raw = _undisturbed(loader, workers, folder, interrupted)
    resumed = _fresh(loader, workers, folder)
    restore(resumed.state(), [files.on_disk(raw)])
    assert resumed.train(RESUMED)[0] == expected


@pytest.mark.parametrize("piece", PIECES)
def test_run_resumed_without_one_piece_of_state_differs(files: Files, folder: Path, piece: str) -> None:
    column, read_piece, put = PIECES[piece]
    expected, raw = _undisturbed("ResumableLoader", 0, folder)
    resumed = _fresh("ResumableLoader", 0, folder)
    fresh = read_piece(resumed)
    restore(resumed.state(), [files.in_memory(raw)])
    put(resumed, fresh)
    assert _column(resumed.train(RESUMED)[0], column) != _column(expected, column)


@pytest.mark.parametrize("loader", LOADERS)
def test_run_resumed_without_the_loaders_position_reads_other_samples(files: Files, folder: Path, loader: str) -> None:
    expected, raw = _undisturbed(loader, 0, folder)
    resumed = _fresh(loader, 0, folder)
    live, resumed.dataloader = resumed.dataloader, None
    restore(resumed.state(), [files.in_memory(raw)])
    resumed.dataloader = live
    assert _column(resumed.train(RESUMED)[0], "samples") != _column(expected, "samples")


def _column(rows: list[dict[str, Any]], name: str) -> list[Any]:
    return [row[name] for row in rows]


# ── models in wrappers, frozen and tied ──


@pytest.fixture
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


WRAPPERS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "plain": lambda model: model,
    "DDP": torch.nn.parallel.DistributedDataParallel,
    "compile": lambda model: torch.compile(model, backend="eager"),
    "compile of DDP": lambda model: torch.compile(torch.nn.parallel.DistributedDataParallel(model), backend="eager"),
}


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(
            before, after, marks=() if "plain" in (before, after) or before == "compile of DDP" else pytest.mark.long
        )
        for before in WRAPPERS
        for after in WRAPPERS
    ],
)
def test_model_saved_in_any_wrapper_is_restored_into_any_other(files: Files, before: str, after: str) -> None:
    def build(wrapper: str) -> tuple[torch.nn.Module, torch.optim.Optimizer, TrainingState]:
        model = small_net()
        wrapped = WRAPPERS[wrapper](model)
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1)
        return model, optimizer, TrainingState(model=wrapped, optimizer=optimizer)

    model, optimizer, state = build(before)
    one_step(model, optimizer, lambda: model(torch.ones(2, 3)))
    assert {tensor.name for tensor in state.capture(0, 1).tensors} >= {"model.0.weight", "optimizer.state.0.bias.step"}
    other, fresh, resumed = build(after)
    restore(resumed, [files.on_disk(stage(state))])
    assert_same(other.state_dict(), model.state_dict())
    assert_same(fresh.state_dict(), optimizer.state_dict())


def test_training_continues_identically_with_frozen_and_tied_parameters(files: Files) -> None:
    def build(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(
            torch.nn.Embedding(7, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 7, bias=False)
        )
        model[3].weight = model[0].weight
        model[1].requires_grad_(False)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        for _ in range(20):
            one_step(model, optimizer, lambda: model(torch.arange(7)))
        return [parameter.tolist() for parameter in model.parameters()]

    model, optimizer = build(1)
    train(model, optimizer)
    raw = stage(TrainingState(model=model, optimizer=optimizer))
    expected = train(model, optimizer)
    other, fresh = build(2)
    restore(TrainingState(model=other, optimizer=fresh), [files.on_disk(raw)])
    assert not any(parameter.requires_grad for parameter in other[1].parameters())
    assert other[3].weight is other[0].weight
    assert not any(parameter in fresh.state for parameter in other[1].parameters())
    assert train(other, fresh) == expected


def test_another_architecture_is_refused_listing_every_tensor_that_differs(files: Files) -> None:
    raw = stage(TrainingState(model=small_net()))
    other = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Linear(6, 2), torch.nn.Linear(2, 2))
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(Mismatch) as refused:
        restore(TrainingState(model=other), [files.on_disk(raw)])
    for difference in (
        "model.0.weight: checkpoint F32 [5, 3], model F32 [6, 3]",
        "model.0.bias: checkpoint F32 [5], model F32 [6]",
        "model.1.weight: checkpoint F32 [2, 5], model F32 [2, 6]",
        "model.2.weight: not in the checkpoint",
        "model.2.bias: not in the checkpoint",
    ):
        assert difference in str(refused.value)
    assert_same(other.state_dict(), before)


# ── mixed precision came or went ──


@pytest.mark.parametrize(
    ("saved", "live", "message"),
    [
        (None, True, "the checkpoint has no scaler, it stays as it is"),
        (False, True, "scaler is empty in the checkpoint, it starts fresh"),
        (True, None, "the checkpoint has scaler, which this state lacks: ignored"),
        (True, False, "scaler is disabled now, its state in the checkpoint is ignored"),
    ],
)
def test_scaler_that_only_one_side_has_starts_fresh_or_is_ignored_and_is_logged(
    files: Files, caplog: pytest.LogCaptureFixture, saved: bool | None, live: bool | None, message: str
) -> None:
    def state(is_enabled: bool | None) -> tuple[TrainingState, Any]:
        scaler = None if is_enabled is None else torch.amp.GradScaler("cpu", init_scale=32.0, enabled=is_enabled)
        return TrainingState(model=small_net(), scaler=scaler), scaler

    before, _ = state(saved)
    after, scaler = state(live)
    expected = None if scaler is None else scaler.state_dict()
    restore(after, [files.on_disk(stage(before))])
    assert message in caplog.text
    assert expected == (None if scaler is None else scaler.state_dict())


class _Stream(torch.utils.data.IterableDataset[int]):
    """It keeps no position."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(64))


def test_stream_without_a_state_goes_on_after_every_resume(files: Files) -> None:
    batches: list[list[int]] = []
    raw: bytes | None = None
    for start in range(4):
        loader: Any = StatefulDataLoader(_Stream(), batch_size=2)
        state = TrainingState(model=small_net(), dataloader=loader, rng=False)
        if raw is not None:
            restore(state, [files.on_disk(raw, f"{start}.safetensors")])
        batches += [batch.tolist() for batch in itertools.islice(loader, 3)]
        raw = stage(state)
    assert batches == [[2 * index, 2 * index + 1] for index in range(12)]


def test_stream_without_a_state_is_refused_where_workers_read_it() -> None:
    loader: Any = StatefulDataLoader(_Stream(), batch_size=2, num_workers=2, multiprocessing_context="fork")
    next(iter(loader))
    with pytest.raises(Unsupported, match="capture dataloader: workers read a stream that keeps no position"):
        stage(TrainingState(model=small_net(), dataloader=loader))
