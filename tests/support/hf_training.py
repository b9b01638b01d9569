"""A Hugging Face training as a user writes it, run by `Forks("hf_training", …)`.

A tiny GPT-2 with dropout, shuffled and randomly masked data, gradient accumulation, evaluation and early stopping. The
loss of each step is a line in a file, written before the next step begins.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
from collections.abc import Iterator
from typing import Any

import torch
from tierd_client.frameworks.transformers import TierdCallback
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_callback import ExportableState

from tests.support.contents import frozen
from tests.support.forks import write

TOKENS = 32
DURATIONS = ("_runtime", "_per_second", "_time")  # how the names of logs that depend on the clock end


def timeless(logs: dict[str, Any]) -> dict[str, Any]:
    """What Trainer logs, without durations."""
    return {name: value for name, value in logs.items() if not name.endswith(DURATIONS)}


def digest(value: Any) -> str:
    """Of a tensor or a state_dict, over all bits."""
    return hashlib.sha256(repr(frozen(value)).encode()).hexdigest()


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int, first: int) -> None:
        generator = torch.Generator().manual_seed(first)
        self._tokens = torch.randint(1, TOKENS, (count, 8), generator=generator)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._tokens[index]}


class Augmented(Sentences):
    """Draws random numbers when a sample is read."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = super().__getitem__(index)["input_ids"]
        tokens = torch.where(torch.rand(tokens.shape) < 0.2, random.randrange(TOKENS), tokens)
        return {"input_ids": tokens, "labels": tokens}


class Stream(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """The same sentences without a length, in a fixed order."""

    def __init__(self, sentences: Sentences) -> None:
        self._sentences = sentences

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (self._sentences[index] for index in range(len(self._sentences)))


def masked(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A collator that draws random numbers, as for masked language models."""
    batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    hidden = torch.rand(batch["input_ids"].shape) < 0.2
    return {**batch, "input_ids": batch["input_ids"].masked_fill(hidden, 0)}


def guessed(prediction: Any) -> dict[str, float]:
    """The share of next tokens that the model guesses."""
    return {"guessed": float((prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]).mean())}


class Losses(Trainer):
    """Records the loss of each micro-batch."""

    lines: str

    def training_step(self, *arguments: Any, **more: Any) -> torch.Tensor:
        loss = super().training_step(*arguments, **more)
        write(self.lines, step=self.state.global_step + 1, loss=loss.item())
        return loss


class Watching(TrainerCallback, ExportableState):
    """Records what Trainer logs, and sends signals to this process or the daemon as the test requires."""

    def __init__(self, lines: str = "", options: Any = None, notes: Any = None) -> None:
        self._lines = lines
        self._options = options
        self._notes = notes
        self.evaluations = 0

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"evaluations": self.evaluations}}

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.evaluations += 1

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._signal("step begins", state)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._signal("gradients", state)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._notes["steps"] += 1
        if state.global_step % self._options.get("epoch_steps", sys.maxsize) == 0:
            control.should_epoch_stop = True
        self._signal("step ends", state)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        write(self._lines, resumed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        write(self._lines, step=state.global_step, logs=timeless(logs))

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called in the middle of the step after `global_step`."""
        self._signal("", state)

    def _signal(self, instant: str, state: Any) -> None:
        """`options["signals"]`: (step, signal, process or 0 for this one, instant or nothing for the middle)."""
        for step, number, pid, *at in self._options.get("signals", []):
            if step == state.global_step and instant == "".join(at):
                os.kill(pid or os.getpid(), getattr(signal, number))


def config() -> GPT2Config:
    return GPT2Config(
        vocab_size=TOKENS,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
    )


def report(options: dict[str, Any], trainer: Trainer, result: Any, **more: object) -> None:
    """Writes all that train() leaves behind, as the last line."""
    write(
        options["lines"],
        end=trainer.state.global_step,
        train_loss=result.training_loss,
        metrics=timeless(result.metrics),
        weights=digest(trainer.model.state_dict()),
        optimizer=digest(trainer.optimizer.state_dict()["state"]),
        best=trainer.state.best_metric,
        history=[timeless(entry) for entry in trainer.state.log_history],
        **more,
    )


def main(options: dict[str, Any]) -> object:
    torch.use_deterministic_algorithms(True)
    lines = options["lines"]
    set_seed(options.get("seed", 1))
    args = TrainingArguments(**{
        "output_dir": options["output"], "report_to": [], "disable_tqdm": True, "use_cpu": True, "num_train_epochs": 4,
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "logging_steps": 3,
        "eval_strategy": "steps", "eval_steps": 4, "learning_rate": 3e-3, "lr_scheduler_type": "cosine",
        "warmup_steps": 5, "metric_for_best_model": "eval_loss", "greater_is_better": False, "save_strategy": "no",
        **options.get("args", {}),
    })  # fmt: skip
    early = EarlyStoppingCallback(early_stopping_patience=options.get("patience", 50))
    notes = {"steps": 0}  # further state of the user
    callback = TierdCallback(
        run=options.get("own_run", "hf"), socket=options["socket"], extra=notes, **options.get("connect", {})
    )
    ours = [callback] if options["socket"] else []
    streams = options.get("streams", False)
    sentences = (Augmented if options.get("draws") else Sentences)(options.get("samples", 77), 1)
    watching = Watching(lines, options, notes)
    trainer = Losses(
        model=GPT2LMHeadModel(config()),
        args=args,
        train_dataset=Stream(sentences) if streams else sentences,
        eval_dataset=Sentences(12, 2),
        data_collator=masked if options.get("masked", not streams) else default_data_collator,
        compute_metrics=guessed if options.get("metrics") else None,
        callbacks=[early, *ours, watching],
    )
    trainer.lines = lines
    point = callback.resume_point(trainer, **options.get("which", {})) if ours and options.get("asks", True) else None
    first = options.get("first")  # Trainer's own checkpoint
    result = trainer.train(resume_from_checkpoint=(point or first) if options.get("listens", True) else None)
    report(
        options,
        trainer,
        result,
        stopped=callback.stopped,
        notes=notes,
        evaluations=watching.evaluations,
        patience=early.early_stopping_patience_counter,
    )
    return trainer
