"""A training with Lightning as a user writes it, run by `Forks("lightning_training", …)`.

Batch norm, dropout, shuffled data with noise, epoch metrics of `log` and torchmetrics, a plateau scheduler, validation
and early stopping; or manual optimization with two optimizers. What is trained, logged and validated is a line in a
file. The training kills itself after `kill_at` lines.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from tierd_client.frameworks.lightning import TierdCallback
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import MeanMetric, MetricCollection, MinMaxMetric
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, BinaryPrecision

from tests.support.forks import write
from tests.support.killed_runs import Lines, digest

BATCHES = 7


class Rows(Dataset[torch.Tensor]):
    """Draws from the same generators as the training."""

    def __init__(self, size: int = 4 * BATCHES) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.sin(torch.arange(6.0) + index) + 0.1 * torch.randn(6)


class Stream(IterableDataset[torch.Tensor]):
    """A dataset without a length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        rows = Rows()
        yield from (rows[index] for index in torch.randperm(len(rows)).tolist())


class StatefulStream(IterableDataset[torch.Tensor]):
    """A stream that keeps its position, as torchdata's loader wants it."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.given = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        rows = Rows()
        if not self.order:
            self.order, self.given = torch.randperm(len(rows)).tolist(), 0
        while self.given < len(self.order):
            self.given += 1
            yield rows[self.order[self.given - 1]]
        self.order = []

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self.order), "given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.given = list(state["order"]), state["given"]


class LinesLogger(Logger):
    def __init__(self, lines: Lines) -> None:
        super().__init__()
        self.lines = lines

    name = "lines"
    version = 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.lines(logged=metrics, at=step)

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


class Net(lightning.LightningModule):
    def __init__(self, lines: Lines, options: dict[str, Any]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.GELU(), nn.Linear(8, 1))
        self.accuracies = MetricCollection([BinaryAccuracy(), BinaryPrecision()])
        self.auroc = BinaryAUROC()
        self.range = MinMaxMetric(MeanMetric())
        self.by_hand = MeanMetric()
        self.val_auroc = BinaryAUROC()
        self.lines, self.options = lines, options

    def answer(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits, target = self.net(batch).squeeze(1), (batch.sum(1) > 0).long()
        return nn.functional.binary_cross_entropy_with_logits(logits, target.float()), logits.sigmoid(), target

    def on_train_start(self) -> None:
        self.log("begun_at", float(self.current_epoch), on_epoch=True)

    def on_train_epoch_start(self) -> None:
        self.log("epoch_began_at", float(self.global_step))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss, probabilities, target = self.answer(batch)
        sync = ranks() > 1
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=sync)
        self.log("highest", loss, reduce_fx="max", on_step=False, on_epoch=True, sync_dist=sync)
        self.log("total", loss, reduce_fx=torch.sum, on_step=False, on_epoch=True, sync_dist=sync)
        if batch_idx % 3 == 1:
            self.log("rare", loss, on_step=True, on_epoch=True, batch_size=batch_idx, sync_dist=sync)
        self.accuracies.update(probabilities, target)
        self.log_dict(self.accuracies, on_step=False, on_epoch=True)
        self.auroc(probabilities, target)
        self.log("auroc", self.auroc, on_step=True, on_epoch=True)
        self.range.update(loss.detach())
        self.by_hand.update(loss.detach())
        rates = [group["lr"] for optimizer in self.trainer.optimizers for group in optimizer.param_groups]
        self.lines(loss=loss.item(), step=self.global_step, batch=batch_idx, rates=rates)
        return loss

    def on_train_epoch_end(self) -> None:
        ranges = {name: value.item() for name, value in self.range.compute().items()}
        self.lines(epoch=self.current_epoch, ranges=ranges, by_hand=self.by_hand.compute().item())
        self.by_hand.reset()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        loss, probabilities, target = self.answer(batch)
        self.val_auroc.update(probabilities, target)
        sync = ranks() > 1
        self.log("val_loss", loss, on_step=True, on_epoch=True, sync_dist=sync)
        if not self.trainer.sanity_checking:
            self.lines(validated=loss.item(), step=self.global_step)

    def on_validation_epoch_end(self) -> None:
        self.log("val_auroc", self.val_auroc)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.options.get("rate", 0.05))
        plateau = {"mode": "min", "factor": 0.5, "patience": 0}
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **plateau)
        config = {"scheduler": scheduler, "monitor": "loss_epoch", "interval": "epoch"}
        if monitor := self.options.get("monitor"):
            config |= {"monitor": monitor, "interval": "step", "frequency": 2}
        return {"optimizer": optimizer, "lr_scheduler": config}


class ManualNet(Net):
    """A generator and a discriminator. The second one's gradients are accumulated over two batches."""

    def __init__(self, lines: Lines, options: dict[str, Any]) -> None:
        super().__init__(lines, options)
        self.automatic_optimization = False
        self.maker = nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.2))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        made = self.maker(torch.randn(len(batch), 3))
        loss = -self.net(made).mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        judged, probabilities, target = self.answer(batch)
        self.manual_backward(judged + self.net(made.detach()).mean())
        if batch_idx % 2 == 1:
            second.step()
            second.zero_grad()
        self.untoggle_optimizer(second)
        self.auroc(probabilities, target)
        self.log("auroc", self.auroc, on_step=False, on_epoch=True)
        self.log_dict({"made": loss, "judged": judged}, on_step=True, on_epoch=True, sync_dist=ranks() > 1)
        self.range.update(judged.detach())
        self.by_hand.update(judged.detach())
        rates = [group["lr"] for optimizer in self.trainer.optimizers for group in optimizer.param_groups]
        self.lines(made=loss.item(), judged=judged.item(), step=self.global_step, rates=rates)

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        for scheduler in self.lr_schedulers():
            scheduler.step(self.trainer.callback_metrics["judged_epoch"])

    def configure_optimizers(self) -> Any:
        optimizers = [
            torch.optim.Adam(self.maker.parameters(), lr=0.05),
            torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9),
        ]
        plateau: Any = torch.optim.lr_scheduler.ReduceLROnPlateau
        return optimizers, [plateau(optimizer, factor=0.5, patience=0) for optimizer in optimizers]


def ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def loader(kind: str) -> Any:
    if kind == "stateful":
        return StatefulDataLoader(Rows(), batch_size=4, shuffle=True)
    if kind == "stream":
        return DataLoader(Stream(), batch_size=4)
    if kind == "stateful-stream":
        return StatefulDataLoader(StatefulStream(), batch_size=4)
    if kind == "torchdata-stream":
        return StatefulDataLoader(Stream(), batch_size=4)
    return DataLoader(Rows(), batch_size=4, shuffle=True)


def main(options: dict[str, Any]) -> object:
    """`make`: "automatic" or "manual". `data`: the loader. `stop_early`, `accumulate`, `trainer`: of the Trainer."""
    lightning.seed_everything(options.get("seed", 1), verbose=False)
    lines = Lines(options["lines"], options.get("kill_at"))
    net = (ManualNet if options.get("make") == "manual" else Net)(lines, options)
    callbacks: list[Any] = []
    callback = None
    if options["socket"]:
        callback = TierdCallback("lightning", socket=options["socket"], every_steps=options["every"])
        callbacks.append(callback)
    if options.get("stop_early"):
        callbacks.append(EarlyStopping("val_loss", patience=options["stop_early"]))
    if options.get("accumulate"):
        callbacks.append(GradientAccumulationScheduler({0: 1, 1: options["accumulate"]}))
    if options.get("folder"):
        callbacks.append(ModelCheckpoint(options["folder"], monitor="val_loss"))
    trainer = lightning.Trainer(
        accelerator="cpu",
        callbacks=callbacks,
        logger=LinesLogger(lines),
        devices=ranks(),
        strategy=options.get("strategy", "ddp") if ranks() > 1 else "auto",
        log_every_n_steps=2,
        **dict.fromkeys(("enable_progress_bar", "enable_model_summary"), False),
        **{
            "max_epochs": 4,
            "enable_checkpointing": bool(options.get("folder")),
            "use_distributed_sampler": ranks() > 1,
            **options.get("trainer", {}),
        },
    )
    trainer.fit(net, loader(options.get("data", "plain")), DataLoader(Rows(8), batch_size=4))
    if callback:
        write(options["lines"], resumed=callback.found.step if callback.found else 0)
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    write(options["lines"], weights=digest(net), step=trainer.global_step, metrics=metrics)
    return net, trainer
