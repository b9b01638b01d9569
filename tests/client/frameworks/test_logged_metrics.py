"""The metrics of an epoch, captured in one Lightning training and restored in another."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import lightning
import pytest
import torch
from tierd_client import Mismatch, Unsupported
from tierd_client.frameworks import logged_metrics
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, Metric, MetricTracker

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Net(lightning.LightningModule):
    """Logs the numbers of its batches, and calls `after` at the end of each batch."""

    def __init__(self, after: Callable[[Any, int], None], **metrics: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.metrics = nn.ModuleDict(metrics)
        self.after = after

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        value = batch.mean()
        for reduction in ("mean", "sum", "min", max, torch.max):
            name = reduction if isinstance(reduction, str) else f"{reduction.__module__}.{reduction.__name__}"
            self.log(name, value, reduce_fx=reduction, on_step=False, on_epoch=True)
        if batch_idx == 0:
            self.log("first", value, on_epoch=True)
        for name, metric in self.metrics.items():
            metric.update(value)
            if isinstance(metric, Metric):
                self.log(f"metric.{name}", metric, on_step=False, on_epoch=True)
        return self.weight.sum() + value

    def on_train_batch_end(self, outputs: Any, batch: torch.Tensor, batch_idx: int) -> None:
        self.after(self.trainer, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(numbers: list[float], after: Callable[[Any, int], None], **metrics: nn.Module) -> dict[str, float]:
    """One epoch. Returns the metrics at its end."""
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        **dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False),
    )
    trainer.fit(Net(after, **metrics), DataLoader(torch.tensor(numbers, dtype=torch.float32), batch_size=2))
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


def test_epoch_that_was_restored_ends_with_the_metrics_of_all_its_batches() -> None:
    saved: list[dict[str, Any]] = []

    def save(trainer: Any, batch: int) -> None:
        if batch == 1:
            saved.append(deepcopy(logged_metrics.capture(trainer)))  # training goes on in the same tensors

    def load(trainer: Any, batch: int) -> None:
        if batch == 0:
            logged_metrics.restore(trainer, saved[0])

    whole = fit([5, 1, 2, 8, 3, 9], save, loss=MeanMetric())
    # The first batch here stands for what the hooks at the start of a training log: the restore replaces it.
    assert fit([70, 70, 3, 9], load, loss=MeanMetric()) == whole
    assert whole["builtins.max"] == whole["torch.max"] == 6
    assert (whole["first"], whole["metric.loss"]) == (3, pytest.approx(14 / 3))


def test_metric_that_the_module_lacks_now_is_named() -> None:
    def move(trainer: Any, batch: int) -> None:
        saved = logged_metrics.capture(trainer)
        saved["torchmetrics"]["metrics.gone"] = {}
        logged_metrics.restore(trainer, saved)

    with pytest.raises(Mismatch, match=r"metrics\.gone"):
        fit([1, 2], move, loss=MeanMetric())


def test_tracker_of_metrics_is_refused_by_name() -> None:
    tracker = MetricTracker(MeanMetric(), maximize=False)
    tracker.increment()
    with pytest.raises(Unsupported, match=r"metrics\.tracker: a MetricTracker"):
        fit([1, 2], lambda trainer, _: logged_metrics.capture(trainer) and None, tracker=tracker)
