"""Trainings without tierd, run by `Forks("watched_training", …)`: their frameworks write their own checkpoints.

The loss of each step is a line in a file. `options["pace"]`: after a save, the training waits until the daemon has
adopted it, because such a small training would outrun any daemon. It kills itself when step `kill_at` begins.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from tests.support.forks import write
from tests.support.waiting import wait_until

STEPS = 40
SAVED_EVERY = 2


def pause(options: dict[str, Any], step: int) -> None:
    if options["pace"] and step and step % SAVED_EVERY == 0:
        manifest = Path(options["pace"], f"{step:012d}-g0001", "manifest.json")
        wait_until(manifest.exists, f"the adoption of step {step}")


def begin(options: dict[str, Any], step: int) -> None:
    if step == options["kill_at"]:
        os.kill(os.getpid(), signal.SIGKILL)


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(4 * STEPS, 6, generator=generator)
    return inputs, inputs.sum(1, keepdim=True).sin()


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 1))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.layers(inputs), labels)}


class Paced(TrainerCallback):
    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        begin(self._options, state.global_step + 1)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            write(self._options["lines"], step=state.global_step, loss=logs["loss"])

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        pause(self._options, state.global_step)


def hugging_face(options: dict[str, Any]) -> object:
    inputs, labels = rows()
    set_seed(1)
    args = TrainingArguments(
        output_dir=options["output"],
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        logging_steps=1,
        learning_rate=1e-2,
        save_strategy="steps",
        save_steps=SAVED_EVERY,
        save_total_limit=2,
    )
    trainer = Trainer(
        model=Net(dropout=0.2),
        args=args,
        train_dataset=[{"inputs": one, "labels": label} for one, label in zip(inputs, labels, strict=True)],  # pyright: ignore[reportArgumentType]
        callbacks=[Paced(options)],
    )
    trainer.train(resume_from_checkpoint=options["resume"] or None)
    return trainer


class Module(lightning.LightningModule):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.net, self._options = Net(dropout=0.0), options  # Lightning saves no random state

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        step = self.global_step + 1
        pause(self._options, step - 1)
        begin(self._options, step)
        loss = self.net(*batch)["loss"]
        write(self._options["lines"], step=step, loss=loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def pytorch_lightning(options: dict[str, Any]) -> object:
    set_seed(1)
    module = Module(options)
    saving = ModelCheckpoint(
        options["output"], "{step}", monitor="step", mode="max", save_top_k=2, every_n_train_steps=SAVED_EVERY
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        callbacks=[saving],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # An epoch is as long as the time between saves: Lightning begins the data of an epoch again.
    loader = DataLoader(TensorDataset(*(values[: 4 * SAVED_EVERY] for values in rows())), batch_size=4)
    trainer.fit(module, loader, ckpt_path=options["resume"] or None, weights_only=False)
    return trainer


def main(options: dict[str, Any]) -> object:
    torch.use_deterministic_algorithms(True)
    return {"hf-trainer": hugging_face, "lightning": pytorch_lightning}[options["preset"]](options)
