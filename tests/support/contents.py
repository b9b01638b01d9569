"""The objects of a training, and what they hold as plain values that are equal only if all types and all bits are."""

from __future__ import annotations

import collections
import dataclasses
import os
import random
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tierd_client.restore.replica import Replica
from tierd_client.state.completeness import check_restorable
from tierd_client.state.dict_state import DictState
from tierd_client.state.ownership import assign_owners
from tierd_client.state.training_state import TrainingState
from torch.distributed.tensor import DTensor

from tests.support.cli import make_manifest
from tests.support.state import Files, stage
from tierd.format import layout
from tierd.format.ids import Rank, checkpoint_id


@dataclass
class Objects:
    """The arguments of a TrainingState without generators, or of a DictState when there is no model."""

    model: torch.nn.Module | None = None
    optimizer: Any = None
    scheduler: Any = None
    scaler: Any = None
    ema: Any = None
    dataloader: Any = None
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """encode, decode and per_rank."""

    def state(self) -> TrainingState | DictState:
        if self.model is None:
            return DictState(self.extra, **self.options)
        return TrainingState(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            ema=self.ema,
            dataloader=self.dataloader,
            extra=self.extra,
            rng=False,
            **self.options,
        )

    def contents(self) -> dict[str, object]:
        """What each section of the state holds, read without tierd's code."""
        sections = {
            "model": self.model,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "ema": self.ema,
            "dataloader": self.dataloader,
            **{f"extra.{key}": value for key, value in self.extra.items()},
        }
        contents = {name: frozen_object(value) for name, value in sections.items()}
        for index, optimizer in enumerate(_optimizers(self.optimizer)):
            contents[f"optimizer.{index}"] = _frozen_optimizer(optimizer)
        return contents


def _optimizers(optimizer: Any) -> Sequence[torch.optim.Optimizer]:
    return [] if optimizer is None else optimizer if isinstance(optimizer, list) else [optimizer]


def frozen_object(value: Any) -> object:
    """As `frozen`; of a module or a stateful object what its state_dict returns."""
    if not isinstance(value, type) and hasattr(value, "state_dict"):
        return type(value).__qualname__, frozen(value.state_dict())
    return frozen(value)


def _frozen_optimizer(optimizer: torch.optim.Optimizer) -> object:
    groups = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        parameters = [(frozen(parameter), frozen(optimizer.state.get(parameter))) for parameter in group["params"]]
        groups.append((sorted((key, frozen(value)) for key, value in options.items()), parameters))
    return len(optimizer.state), groups


def frozen(value: Any) -> object:
    """A value that can be compared and hashed, of the type and the bits of `value`."""
    kind = type(value)
    if isinstance(value, DTensor):
        return DTensor, frozen(value.to_local())
    if isinstance(value, torch.Tensor):
        is_trained = value.requires_grad and value.is_leaf  # autograd's history is no part of a state
        shape = () if value.is_nested else tuple(value.shape)
        return kind, value.dtype, shape, is_trained, tensor_bytes(value)
    if isinstance(value, np.str_ | np.bytes_):  # their dtype shows how they were made
        return kind, value.item()
    if isinstance(value, np.ndarray | np.generic):
        return kind, value.dtype.str, value.shape, value.tobytes()
    if kind is float:
        return kind, struct.pack("<d", value)
    if kind is complex:
        return kind, struct.pack("<dd", value.real, value.imag)
    if isinstance(value, Mapping):
        factory = value.default_factory if isinstance(value, collections.defaultdict) else None
        items = tuple((frozen(key), frozen(item)) for key, item in value.items())
        return (dict if isinstance(value, collections.OrderedDict) else kind), factory, items
    if isinstance(value, set | frozenset):
        return kind, tuple(sorted(map(frozen, value), key=repr))
    if isinstance(value, collections.deque):
        return kind, value.maxlen, tuple(map(frozen, value))
    if isinstance(value, list | tuple):
        return kind, tuple(map(frozen, value))
    if hasattr(value, "state_dict") and not isinstance(value, type):
        return frozen_object(value)
    if isinstance(value, torch.Generator):
        return kind, value.device, tensor_bytes(value.get_state())
    if isinstance(value, random.Random):
        return kind, value.getstate()
    if isinstance(value, np.random.Generator):
        return kind, repr(value.bit_generator.state), repr(value.bit_generator.seed_seq)
    if isinstance(value, np.random.RandomState):
        return kind, repr(value.get_state())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return kind, tuple(
            (field.name, frozen(getattr(value, field.name, None))) for field in dataclasses.fields(value)
        )
    return kind, value if kind is int else repr(value)


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        return str(tensor.shape if not tensor.is_nested else "").encode()
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        return b"freed"
    plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg().reshape(-1)
    return (
        plain.clone(memory_format=torch.contiguous_format)
        .as_strided(plain.shape, (1,))
        .view(torch.uint8)
        .numpy()
        .tobytes()
    )


def difference(actual: dict[str, object], expected: dict[str, object]) -> str:
    """The names of the sections that differ, with the begin of their contents. Empty when all are equal."""
    return "\n".join(
        f"{name}: {_shown(actual.get(name))}\n  expected {_shown(content)}"
        for name, content in expected.items()
        if actual.get(name) != content
    )


def _shown(content: object) -> str:
    try:
        return str(content)[:1000]
    except ValueError:  # an integer of too many digits
        return "an integer"


def checkpoint(files: Files, states: Sequence[Objects]) -> Replica:
    """The checkpoint that ranks with these objects write, after the checks of a first snapshot."""
    count = len(states)
    live = [objects.state() for objects in states]
    captured = [state.capture(rank, count) for rank, state in enumerate(live)]
    for state, each in zip(live, captured, strict=True):
        check_restorable(state, each)
    owned: list[set[str] | None] = [None]
    if count > 1:
        owned = [*assign_owners([each.held_tensors() for each in captured])]
    entries = []
    opened = len(files.opened)
    for rank, each in enumerate(captured):
        name = layout.shard_name(Rank(rank), count)
        raw = stage(each, rank=rank, world_size=count, owned=owned[rank])
        entries.append(files.on_disk(raw, name).entry)
    descriptors = [os.dup(descriptor) for descriptor in files.opened[opened:]]
    return Replica("hot", make_manifest(checkpoint_id("run", 5, 1), entries), descriptors)
