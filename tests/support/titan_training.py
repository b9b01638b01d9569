"""A training by torchtitan's own Trainer, for tests: a small Llama 3 on random tokens.

`python -m tests.support.titan_training FOLDER STEPS CHECKPOINT`: the last argument is JSON, the options of
TierdCheckpointer.Config, or of torchtitan's own manager where they have no `run`. The environment says which rank
this is, as torchrun would.

Each rank appends the loss of each step to FOLDER/losses-RANK.jsonl, and at the end a hash of its weights.
"""

# ruff: isort: skip_file
# cpu_as_gpu is imported before torchtitan.

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset

from tests.support import cpu_as_gpu  # noqa: F401
from tierd_client.frameworks.torchtitan import TierdCheckpointer
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

LENGTH = 16


class Tokens(IterableDataset[Any]):
    """Tokens from the global generator: their values depend on its state. The count of samples is this dataset's."""

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.given += 1
            tokens = torch.randint(0, 1000, (LENGTH + 1,)) + self.given
            yield {"input": tokens[:-1]}, tokens[1:]

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


class TokenLoader(ParallelAwareDataloader):
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(self, config: Any, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **more: Any) -> None:
        every = more["snapshot_every_n_steps"] or 1
        super().__init__(Tokens(), dp_rank, dp_world_size, batch_size=local_batch_size, snapshot_every_n_steps=every)


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *_: Any, **__: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        raise NotImplementedError


class LossLog(MetricsProcessor):
    """Appends the losses to a file, as they were computed."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        path: str = ""

    def __init__(self, config: Any, **more: Any) -> None:
        super().__init__(config, **more)
        self.path = config.path

    def log(self, step: int, global_avg_loss: float, *arguments: Any, **more: Any) -> None:
        super().log(step, global_avg_loss, *arguments, **more)
        write(self.path, step=step, loss=float(global_avg_loss).hex())


def write(path: str, **facts: Any) -> None:
    with Path(path).open("a") as file:
        file.write(json.dumps(facts) + "\n")


def main(folder: str, steps: str, checkpoint: str) -> None:
    options = json.loads(checkpoint)
    manager = TierdCheckpointer if "run" in options else CheckpointManager
    spec: Any = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    path = f"{folder}/losses-{os.environ['RANK']}.jsonl"
    trainer: Any = Trainer.Config(
        model_spec=spec,
        dump_folder=folder,
        loss=CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size),
        metrics=LossLog.Config(log_freq=1, path=path),
        tokenizer=NoTokenizer.Config(),
        dataloader=TokenLoader.Config(),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(local_batch_size=2, seq_len=LENGTH, disable_cuda_graphs=True, steps=int(steps)),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),  # the others need a torch later than 2.13
        debug=DebugConfig(seed=1, deterministic=True),
        checkpoint=manager.Config(**options),
    ).build()
    try:
        trainer.train()
        digest = hashlib.sha256()
        for name, weight in sorted(trainer.checkpointer.states["model"].state_dict().items()):
            local = weight.to_local() if hasattr(weight, "to_local") else weight
            digest.update(name.encode() + local.detach().numpy().tobytes())
        write(path, step=trainer.step, weights=digest.hexdigest())
    finally:
        trainer.close()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
