"""The whole state of a training: model, optimizer, scheduler, scaler, EMA, data loader, RNG and whatever else.

`capture` is a cheap walk that gives names to tensors and turns the rest into tagged JSON, copying nothing.
`plan_restore` fits a checkpoint to the live objects and changes nothing; its plan then restores them in place.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import torch

from tierd.errors import BadConfig, Corrupt
from tierd_client.state.encoding import Collector, Json
from tierd_client.state.optimizers import OptimizersSection
from tierd_client.state.ownership import HeldTensor
from tierd_client.state.rank_local import RankLocal
from tierd_client.state.restore_plan import Available, RestorePlan
from tierd_client.state.sections import (
    ModuleSection,
    RngSection,
    Section,
    SectionTree,
    Stateful,
    StatefulSection,
    TensorsSection,
    ValueSection,
    is_stateful,
)
from tierd_client.state.tensors import CapturedTensor, sample_of

logger = logging.getLogger(__name__)

PER_RANK = ("dataloader", "extra", "rng")
"""Sections that differ between ranks: their tensors' names end in @<rank> when there are several."""


HINTS = {
    "scheduler": "several schedulers go into extra, each under a name of its own",
    "scaler": "torch.amp.GradScaler has them",
    "dataloader": "ResumableLoader and DocumentLoader of tierd_client have them, and torchdata's StatefulDataLoader",
}


def must_agree(tensor: CapturedTensor) -> bool:
    """Whether ranks that have a tensor of this name must have the very same one: the model's plain parameters."""
    return tensor.name.startswith("model.") and not tensor.is_buffer and not tensor.is_distributed


def is_per_rank(section: str) -> bool:
    return section.split(".")[0] in PER_RANK


@dataclass(frozen=True, slots=True)
class Captured:
    """One rank's state at one instant: live tensors under their names, and the rest as JSON."""

    tensors: list[CapturedTensor]
    tree: Json

    def sizes(self) -> list[tuple[str, int]]:
        """(key, size in bytes) of every tensor: while they stay the same, so does who writes what."""
        return [(tensor.key, tensor.size_bytes) for tensor in self.tensors]

    def held(self) -> list[HeldTensor]:
        """What `ownership.owner_of` wants from each rank."""
        return [
            HeldTensor(
                key=one.key,
                size_bytes=one.size_bytes,
                sample=sample_of(one.tensor) if must_agree(one) else None,
                is_buffer=one.is_buffer,
            )
            for one in self.tensors
        ]


def parse_tree(tree: Json) -> dict[str, SectionTree]:
    """Raises Corrupt when it is none of ours."""
    try:
        return msgspec.convert(tree, dict[str, SectionTree])
    except msgspec.ValidationError as error:
        raise Corrupt(f"read the state tree: {error}") from error


class Capturable(Protocol):
    """What a Client takes snapshots of."""

    def capture(self, rank: int, world_size: int) -> Captured: ...


class State(Capturable, Protocol):
    """What a Client restores into as well."""

    @property
    def is_stepped(self) -> bool: ...
    def plan_restore(self, tree: Json, available: Available, local: RankLocal | None = None) -> RestorePlan: ...


class TrainingState:
    """What a checkpoint holds, and what a restore changes.

    `optimizer` may be a list. `scheduler`, `scaler`, `dataloader`: anything with state_dict and load_state_dict.
    `ema`: a module, a stateful object, or a dict of tensors (restored in place). `extra`: a dict of modules,
    stateful objects and plain values; values are restored by assigning into the same dict, tensors in place.
    Raises BadConfig when an argument cannot hold state.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        ema: torch.nn.Module | Stateful | dict[str, Any] | None = None,
        dataloader: Stateful | None = None,
        extra: dict[str, Any] | None = None,
        rng: bool = True,
    ) -> None:
        for name, owner in (("scheduler", scheduler), ("scaler", scaler), ("dataloader", dataloader)):
            if owner is not None and not is_stateful(owner):
                raise BadConfig(
                    f"TrainingState({name}=…): {type(owner).__qualname__} has no state_dict and load_state_dict",
                    hint=HINTS[name],
                )
        if ema is not None and not isinstance(ema, dict) and not is_stateful(ema):
            raise BadConfig(f"TrainingState(ema=…): {type(ema).__qualname__} is no module, stateful object or dict")
        if extra is not None and not all(isinstance(key, str) for key in extra):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BadConfig("TrainingState(extra=…): its keys must be strings: they name entries of the checkpoint")
        self._model = model
        self._optimizer = optimizer
        self._stateful = {"scheduler": scheduler, "scaler": scaler}
        self._ema = ema
        self._dataloader = dataloader
        self._extra = extra
        self._rng = rng

    @property
    def is_stepped(self) -> bool:
        """Whether every optimizer has its state: before the first step there are no moments to make room for."""
        return all(len(one.state) > 0 for one in self.optimizers)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers as a list; empty without one."""
        if self._optimizer is None:
            return []
        return [self._optimizer] if isinstance(self._optimizer, torch.optim.Optimizer) else list(self._optimizer)

    def capture(self, rank: int, world_size: int) -> Captured:
        """The state as it is now, without copying a byte. Raises Unsupported, naming what has no safe form."""
        into = Collector()
        tree: dict[str, Json] = {}
        for name, section in self._sections().items():
            into.suffix = f"@{rank:05d}" if world_size > 1 and is_per_rank(name) else ""
            tree[name] = {"kind": section.kind, "suffix": into.suffix, "value": section.capture(into)}
        return Captured(into.tensors, tree)

    def plan_restore(self, tree: Json, available: Available, local: RankLocal | None = None) -> RestorePlan:
        """How the checkpoint with this rank's `tree` and all shards' tensors goes into the live objects.

        `local`: for another number of ranks than saved it; then any rank's `tree` will do for what they share.
        Changes nothing. Raises Mismatch, listing what differs; Corrupt when `tree` is none of ours. Afterwards
        the caller reads the bytes into `destinations`, then calls `finish`.
        """
        saved = parse_tree(tree)
        plan = RestorePlan(available, self._accelerator())
        held = self._sections()
        sections = held | self._values_only_in(saved)
        for name, section in sections.items():
            if name not in saved:
                logger.warning("restore: the checkpoint has no %s, it stays as it is", name)
            elif saved[name].kind != section.kind:
                plan.differ(f"{name}: checkpoint holds a {saved[name].kind}, now it is a {section.kind}")
            elif local is not None and is_per_rank(name):
                local.plan(name, section, plan, is_wanted=name in held)
            else:
                section.plan(saved[name].value, saved[name].suffix, plan)
        if not saved.keys() & sections.keys():
            plan.differ(f"the checkpoint holds {', '.join(saved)}, the state {', '.join(sections)}: nothing in common")
        for name in saved.keys() - sections.keys():
            logger.warning("restore: the checkpoint has %s, which this state lacks: left out", name)
        plan.check()
        return plan

    def _sections(self) -> dict[str, Section]:
        """All sections by name, in the order in which they are captured and restored: the RNG last."""
        found: dict[str, Section] = {"model": ModuleSection(self._model, "model")}
        if self._optimizer is not None:
            found["optimizer"] = OptimizersSection(self._optimizer, self._model)
        for name, owner in self._stateful.items():
            if owner is not None:
                found[name] = StatefulSection(owner, name)
        if isinstance(self._ema, dict):
            found["ema"] = TensorsSection(self._ema, "ema")
        elif self._ema is not None:
            found["ema"] = _section(self._ema, "ema")
        if self._dataloader is not None:
            found["dataloader"] = StatefulSection(self._dataloader, "dataloader")
        for key, value in (self._extra or {}).items():
            name = f"extra.{key}"
            if is_stateful(value):
                found[name] = _section(value, name)
            else:
                found[name] = ValueSection(self._extra or {}, key, name)
        if self._rng:
            found["rng"] = RngSection(self._devices)
        return found

    def _values_only_in(self, saved: dict[str, SectionTree]) -> dict[str, Section]:
        """Plain values of the checkpoint that `extra` does not hold yet: they can be restored nonetheless."""
        if self._extra is None:
            return {}
        keys = [name.removeprefix("extra.") for name in saved if name.startswith("extra.")]
        return {
            f"extra.{key}": ValueSection(self._extra, key, f"extra.{key}")
            for key in keys
            if key not in self._extra and saved[f"extra.{key}"].kind == ValueSection.kind
        }

    def _devices(self) -> Iterator[torch.device]:
        return (parameter.device for parameter in self._model.parameters())

    def _accelerator(self) -> torch.device:
        """Where a tensor that lived on an accelerator goes when nothing else says it."""
        found = sorted({device for device in self._devices() if device.type != "cpu"}, key=str)
        return found[0] if found else torch.device("cpu")


def _section(owner: torch.nn.Module | Stateful, prefix: str) -> Section:
    if isinstance(owner, torch.nn.Module):
        return ModuleSection(owner, prefix)
    return StatefulSection(owner, prefix)


def architecture_hash(captured: Captured) -> str:
    """sha256, in hex, of the names, dtypes and global shapes of the model's tensors: the same model, the same hash."""
    model = sorted(
        (tensor.name, tensor.dtype, tensor.global_shape)
        for tensor in captured.tensors
        if tensor.name.startswith("model.")
    )
    return hashlib.sha256(json.dumps(model, separators=(",", ":")).encode()).hexdigest()
