"""Accelerate: the whole state of what accelerator.prepare() has prepared, as one TrainingState.

model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
state = training_state(accelerator)
found = client.restore(state)
for epoch in range(loader.iteration, epochs):
    for batch in loader:  # continues in the middle of the epoch

It has what accelerator.save_state() saves, and the exact position in the data. Take snapshots where
accelerator.sync_gradients is true: gradients that are still being accumulated are not part of a checkpoint.
"""

from __future__ import annotations

from collections import ChainMap
from typing import Any, cast

import torch
from accelerate import Accelerator, DistributedType
from accelerate.data_loader import DataLoaderShard, SeedableRandomSampler, get_sampler

from tierd.errors import BadConfig, BadRequest, Unsupported
from tierd_client.frameworks.read_ahead import ReadAhead
from tierd_client.state import rng, torchdata
from tierd_client.state.sections import Stateful, is_stateful
from tierd_client.state.training_state import TrainingState

SHARDED = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM, DistributedType.XLA)


def training_state(
    accelerator: Accelerator,
    *,
    dataloader: Stateful | None = None,
    ema: torch.nn.Module | Stateful | dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
) -> TrainingState:
    """The state of everything that was prepared, or registered by accelerator.register_for_checkpointing().

    Several models are stored as one: `model.0.…`, `model.1.…`. `dataloader`: an object that keeps the position in the
    data, used instead of the prepared loaders. `ema`, `extra`: as in TrainingState.

    Raises BadConfig when there is no model yet, when the prepared loaders cannot keep their exact position, or when a
    key of `extra` is taken; Unsupported for DeepSpeed, FSDP, Megatron-LM and XLA.
    """
    if accelerator.distributed_type in SHARDED:
        raise Unsupported(
            f"checkpoint an Accelerator of {accelerator.distributed_type}: it shards its state in a format of its own",
            hint="one process and DDP work; for FSDP2 call fully_shard yourself and use tierd_client.TrainingState",
        )
    private: Any = accelerator
    models: list[torch.nn.Module] = private._models
    if not models:
        raise BadConfig("training_state(accelerator): it has no model yet", hint="call it after accelerator.prepare()")
    loaders = [dataloader] if dataloader is not None else [_Position(each, private) for each in private._dataloaders]
    added: dict[str, Stateful] = {"accelerator": _Accumulation(private)}
    added |= {f"scheduler_{index}": scheduler for index, scheduler in enumerate(private._schedulers) if index}
    added |= {f"dataloader_{index}": loader for index, loader in enumerate(loaders) if index}
    added |= {f"registered_{index}": registered for index, registered in enumerate(private._custom_objects)}
    values = {} if extra is None else extra
    if taken := added.keys() & values.keys():
        raise BadConfig(f"training_state(extra=…): {', '.join(sorted(taken))} is taken", hint="give it another name")
    return TrainingState(
        model=models[0] if len(models) == 1 else torch.nn.ModuleList(models),
        optimizer=[prepared.optimizer for prepared in private._optimizers] or None,
        scheduler=next(iter(private._schedulers), None),
        scaler=private.scaler,
        ema=ema,
        dataloader=next(iter(loaders), None),
        # A restore assigns values into the first of the two: the caller's own dict.
        extra=cast("dict[str, Any]", ChainMap(values, cast("dict[str, Any]", added))),
    )


class _Accumulation:
    """How many batches the gradients hold. Accelerate counts batches over the whole training."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        if not self._accelerator.sync_gradients:
            raise BadRequest(
                f"snapshot after batch {self._accelerator.step}: the gradients of "
                f"{self._accelerator.gradient_accumulation_steps} batches are being accumulated, and are not stored",
                hint="take it where accelerator.sync_gradients is true",
            )
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._accelerator.step = state["step"]


class _Position:
    """The position of a prepared loader: the epoch, the batch, and the order of the samples."""

    def __init__(self, loader: Any, accelerator: Any) -> None:
        hint = "Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True, %s))"
        if not isinstance(loader, DataLoaderShard):
            raise BadConfig(
                f"training_state(accelerator): a {type(loader).__name__} does not keep its position exactly",
                hint=hint % "dispatch_batches=False",
            )
        if not loader.use_stateful_dataloader:
            raise BadConfig(
                "training_state(accelerator): a prepared loader does not keep its position",
                hint=hint % "use_seedable_sampler=True" + ", or give dataloader=… that does",
            )
        is_stream = isinstance(loader.dataset, torch.utils.data.IterableDataset)
        if is_stream and loader.num_workers > 0 and not is_stateful(loader.dataset):
            raise BadConfig(
                f"training_state(accelerator): workers read {type(loader.dataset).__name__}, a stream without a state",
                hint="use num_workers=0, or give dataloader=… that keeps its position",
            )
        self._sampler: Any = get_sampler(loader)
        self._is_seeded = isinstance(self._sampler, SeedableRandomSampler)
        if isinstance(self._sampler, torch.utils.data.RandomSampler) and not self._is_seeded:
            raise BadConfig(
                "training_state(accelerator): a prepared loader shuffles in an order that cannot be reproduced",
                hint=hint % "use_seedable_sampler=True",
            )
        self._loader: Any = loader
        self._ahead = ReadAhead([accelerator.device])
        if loader.num_workers == 0:
            # Accelerate has made an iterator already, for a first state. Make a new one, without drawing numbers.
            before = rng.capture([accelerator.device])
            inner: Any = loader.base_dataloader
            self._ahead.watch(inner)
            inner.load_state_dict(inner.state_dict())
            inner.state_dict()
            rng.restore(before, [accelerator.device])

    def state_dict(self) -> dict[str, Any]:
        loader = self._loader
        # After the last batch Accelerate counts the epoch as finished only when the loop asks for another batch.
        is_iterating = any(reference is loader for reference in loader.gradient_state.dataloader_references)
        self._ahead.keep(0 if loader.end_of_dataloader else 1)  # it reads one batch ahead
        return {
            "iteration": loader.iteration + (loader.end_of_dataloader and is_iterating),
            "seed": self._sampler.initial_seed if self._is_seeded else None,
            "loader": loader.state_dict(),
            "ahead": self._ahead.states(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        loader = self._loader
        loader.iteration = state["iteration"]
        if self._is_seeded:
            self._sampler.initial_seed = state["seed"]
        loader.set_epoch(state["iteration"])  # a stream may be read again to its position, in the order of this epoch
        loader.load_state_dict(state["loader"])
        torchdata.begin_iterator(loader.base_dataloader, state["loader"])
        loader.dl_state_dict = state["loader"]
        self._ahead.repeat(state["ahead"])
