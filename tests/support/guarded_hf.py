"""A Hugging Face training with bad rows, run by `Forks("guarded_hf", …)`; options and lines as guarded_lightning."""

from __future__ import annotations

import builtins
from typing import Any

import torch
from tierd_client import LossRule
from tierd_client.frameworks.transformers import TierdCallback
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from tests.support.forks import write
from tests.support.guarded_lightning import ROWS


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def forward(self, row: torch.Tensor, is_bad: torch.Tensor) -> dict[str, torch.Tensor]:
        output = self.net(torch.sin(row[:, None] * torch.linspace(1, 2, 4)))
        loss = output.square().mean() * torch.where(is_bad.any(), float("nan"), 1.0)
        return {"loss": loss, "logits": output}


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    def __init__(self, bad: list[int]) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"row": torch.tensor(float(index)), "is_bad": torch.tensor(index in self.bad)}


class InOrder(Trainer):
    options: dict[str, Any]

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    def training_step(self, model: Any, inputs: Any, *more: Any) -> torch.Tensor:
        step = self.state.global_step + 1
        if [step] == (raises := self.options.get("raises", []))[:1]:
            raise getattr(builtins, raises[1])("as the test wants it")
        row = int(inputs["row"][0])
        loss = super().training_step(model, inputs, *more)
        write(self.options["lines"], step=step, row=row, loss=loss.item())
        return loss


class Writing(TrainerCallback):
    def __init__(self, lines: str) -> None:
        self.lines = lines

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            write(self.lines, logged=state.global_step, value=float(logs["loss"]))


def main(options: dict[str, Any]) -> object:
    set_seed(1)
    callbacks: list[Any] = [Writing(options["lines"])]
    callback = None
    if options["socket"]:
        guard = LossRule(**options["guard"]) if "guard" in options else None
        callback = TierdCallback("guarded", guard=guard, socket=options["socket"], every_steps=3)
        callbacks.append(callback)
    args = TrainingArguments(
        output_dir=options["output"],
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        num_train_epochs=options.get("epochs", 2),
        max_steps=options.get("max_steps", -1),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=options.get("accumulate", 1),
        logging_steps=2,
        learning_rate=0.02,
        max_grad_norm=options.get("max_grad_norm", 0.0),
        save_strategy="no",
        dataloader_drop_last=False,
    )
    trainer = InOrder(model=Net(), args=args, train_dataset=Rows(options.get("bad", [])), callbacks=callbacks)
    trainer.options = options
    result = trainer.train(resume_from_checkpoint=callback.resume_point(trainer) if callback else None)
    states = [*trainer.model.state_dict().values()]
    states += [each for state in trainer.optimizer.state.values() for each in state.values()]
    is_finite = all(bool(torch.isfinite(each).all()) for each in states)
    history = [entry["step"] for entry in trainer.state.log_history if "loss" in entry]
    write(
        options["lines"],
        end=trainer.state.global_step,
        is_finite=is_finite,
        rate=trainer.lr_scheduler.get_last_lr()[0],
        train_loss=result.training_loss,
        history=history,
    )
    return trainer
