"""A Lightning training with bad rows, run by `Forks("guarded_lightning", …)`.

`options["bad"]`: rows of the data that make the loss NaN, `bad_steps`: steps that do so once. `raises`: (step, name of
the error) of an error in training_step. The row and the loss of each batch are a line in a file.
"""

from __future__ import annotations

import builtins
import os
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tierd_client import LossRule
from tierd_client.frameworks.lightning import TierdCallback
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import MeanMetric

from tests.support.forks import write

ROWS = 16


class Net(lightning.LightningModule):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        self.register_buffer("average", torch.zeros(8, 4))
        self.mean = MeanMetric()
        self.options = options
        self.automatic_optimization = not options.get("manual", False)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if [self.global_step + 1] == (raises := self.options.get("raises", []))[:1]:
            raise getattr(builtins, raises[1])("as the test wants it")
        row = int(batch[0, 0])
        inputs = torch.cat([torch.sin(batch + shift) for shift in (0.0, 1.0)]).expand(2, 4)
        loss = self.net(inputs * torch.linspace(1, 2, 4)).square().mean()
        is_bad_step = self.global_step + 1 in self.options.get("bad_steps", [])
        if is_bad_step:
            self.options["bad_steps"].remove(self.global_step + 1)  # once
        if is_bad_step or row in self.options.get("bad", []):
            loss = loss * float("nan")
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=self.trainer.world_size > 1)
        self.mean.update(loss.detach())
        write(self.options["lines"], step=self.global_step + 1, row=row, loss=loss.item())
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.lerp_(self.net[0].weight.detach(), 0.1)

    def on_train_epoch_end(self) -> None:
        mean = float(self.trainer.callback_metrics["loss_epoch"])
        write(self.options["lines"], epoch=self.current_epoch, mean=mean, by_hand=float(self.mean.compute()))
        self.mean.reset()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            write(self.options["lines"], validated=float(self.net(torch.ones(2, 4)).sum()), at=self.global_step)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main(options: dict[str, Any]) -> object:
    lightning.seed_everything(1, verbose=False)
    rows = torch.arange(float(ROWS))[:, None]
    callbacks: list[Any] = []
    if options["socket"]:
        guard = LossRule(**options["guard"]) if "guard" in options else None
        callbacks.append(TierdCallback("guarded", guard=guard, socket=options["socket"], every_steps=3))
    if "files" in options:
        callbacks.append(ModelCheckpoint(options["files"], monitor="loss", save_top_k=2, every_n_train_steps=1))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = lightning.Trainer(
        max_epochs=options.get("epochs", 2),
        max_steps=options.get("max_steps", -1),
        accumulate_grad_batches=options.get("accumulate", 1),
        val_check_interval=4,
        callbacks=callbacks,
        accelerator="cpu",
        devices=world,
        strategy="ddp" if world > 1 else "auto",
        use_distributed_sampler=False,
        enable_checkpointing="files" in options,
        **dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False),
    )
    module = Net(options)
    rank = int(os.environ.get("RANK", "0"))
    sampler = DistributedSampler(rows, world, rank, shuffle=False)  # type: ignore[arg-type]
    trainer.fit(module, DataLoader(rows, batch_size=1, sampler=sampler), DataLoader(rows[:1], batch_size=1))
    states = [*module.state_dict().values()]
    states += [each for state in trainer.optimizers[0].state.values() for each in state.values()]
    is_finite = all(bool(torch.isfinite(each).all()) for each in states)
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    write(options["lines"], end=trainer.global_step, is_finite=is_finite, rate=rate)
    return trainer
