"""The whole state of a training: model, optimizer, scheduler, scaler, EMA, data loader, RNG and extra values.

`capture` is a cheap walk that names the tensors and encodes the rest as tagged JSON; it copies no tensor.
`plan_restore` fits a checkpoint to the live objects and changes nothing; its plan then restores them in place.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import torch

from tierd.errors import BadConfig, Corrupt, TierdError, Unsupported
from tierd.format.manifest import architecture_hash
from tierd_client.log import log
from tierd_client.state.encoding import Collector, Json
from tierd_client.state.objects import Decode, Encode, Objects
from tierd_client.state.optimizers import OptimizersSection, list_optimizers
from tierd_client.state.ownership import HeldTensor
from tierd_client.state.per_rank import PerRankEntries
from tierd_client.state.rank_local import RankLocal
from tierd_client.state.restore_filter import EXACT, RestoreFilter
from tierd_client.state.restore_plan import RestorePlan
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
from tierd_client.state.stored_entries import stored_entries
from tierd_client.state.stored_state import StoredState
from tierd_client.state.tensors import CapturedTensor, sample_of

PER_RANK = ("dataloader", "extra.", "rng")
"""What the names of sections that differ between ranks begin with. With several ranks, the names of their tensors end
in @<rank>."""

HINTS = {
    "scheduler": "put several schedulers into extra, each under its own name",
    "scaler": "torch.amp.GradScaler has them",
    "dataloader": "ResumableLoader and DocumentLoader of tierd_client have them, and torchdata's StatefulDataLoader",
}


@dataclass(frozen=True, slots=True)
class Captured:
    """One rank's state at one instant: live tensors under their names, and the rest as JSON."""

    tensors: list[CapturedTensor]
    tree: Json

    def capture(self, rank: int, world_size: int) -> Captured:
        """It is a Capturable itself."""
        return self

    def held_tensors(self) -> list[HeldTensor]:
        """The input of `ownership.assign_owners` from this rank."""
        held: list[HeldTensor] = []
        for tensor in self.tensors:
            # Where several ranks hold a plain tensor, one writes it for all. Those that may differ have names per rank.
            must_be_equal = not tensor.is_buffer and not tensor.is_distributed
            sample = sample_of(tensor.tensor) if must_be_equal else None
            size_bytes = tensor.tensor.nbytes
            held.append(HeldTensor(key=tensor.key, size_bytes=size_bytes, sample=sample, is_buffer=tensor.is_buffer))
        return held


def architecture_of(captured: Captured) -> str:
    """The manifest's hash of the model. Without the suffix of names that are of one rank."""
    suffix = captured.tree.get("model", {}).get("per_rank", {}).get("suffix") or "\0"
    return architecture_hash(
        (tensor.name.removesuffix(suffix), tensor.torch_dtype or tensor.dtype, tensor.global_shape)
        for tensor in captured.tensors
    )


class Capturable(Protocol):
    """State that a Client can take snapshots of."""

    def capture(self, rank: int, world_size: int) -> Captured: ...


class State(Capturable, Protocol):
    """State that a Client can also restore into."""

    @property
    def is_stepped(self) -> bool: ...
    def plan_restore(
        self, stored: StoredState, *, is_dry: bool = False, filter: RestoreFilter = EXACT
    ) -> RestorePlan: ...


def capture_sections(
    sections: Mapping[str, Section],
    per_rank: Collection[str],
    rank: int,
    world_size: int,
    objects: Objects,
    entries: PerRankEntries | None = None,
) -> Captured:
    """Captures the sections in order. With several ranks, the tensors of the sections `per_rank`, and those that
    `entries` names in other sections, get names that end in @<rank>."""
    rank_suffix = f"@{rank:05d}" if world_size > 1 else ""
    into = Collector(objects=objects, per_rank=entries or None, rank_suffix=rank_suffix)
    tree: dict[str, Json] = {}
    for name, section in sections.items():
        into.suffix = rank_suffix if name in per_rank else ""
        into.per_rank_names = []
        try:
            value = section.capture(into)
        except TierdError:
            raise
        except Exception as error:  # of any kind: state_dict is the user's code
            raise Unsupported(
                f"capture {name}: its state_dict raised {type(error).__qualname__}: {error}",
                hint="state_dict must work on every rank at any time",
            ) from error
        tree[name] = {"kind": section.kind, "suffix": into.suffix, "value": value}
        if into.per_rank_names:
            tree[name]["per_rank"] = {"suffix": rank_suffix, "names": into.per_rank_names}
    return Captured(into.tensors, tree)


def parse_tree(tree: Json) -> dict[str, SectionTree]:
    """The sections of a rank's state tree by name. Raises Corrupt when `tree` is something else."""
    try:
        return msgspec.convert(tree, dict[str, SectionTree])
    except msgspec.ValidationError as error:
        raise Corrupt(f"read the state tree: {error}") from error


class TrainingState:
    """The objects whose state a snapshot captures and a restore changes, in place.

    `optimizer` may be a list. `scheduler`, `scaler`, `dataloader`: anything with state_dict and load_state_dict.
    `ema`: a module, a stateful object, or a dict of tensors, which are restored in place. `extra`: a dict of modules,
    stateful objects and plain values; values are restored by assignment into the same dict, tensors in place. `rng`:
    whether the random number generators of Python, numpy and torch belong to the state.

    Generators (torch.Generator, random.Random, numpy's) and dataclasses in `extra` are restored in place. Members of an
    Enum, dataclasses and named tuples need a live value of their class at the same place: no class is imported.

    `per_rank` names what differs between ranks on purpose outside of `extra`: experts, FP8 scales, statistics of
    BatchNorm. It lists names of tensors as in a checkpoint (`model.experts.0.weight`, `ema.amax`), or patterns of them
    with `*`. A name stands for all below it, that of a parameter for its optimizer state too. Each rank stores its own,
    a DTensor as its local part. They are restored on the same number of ranks; on another number only if all ranks
    saved the same bits, else it is a Mismatch.

    `encode` gets each value of a class that tierd does not know, and each Enum member, dataclass and named tuple. It
    returns (name, value that can be stored), or None to leave it to tierd. `decode` gets both, after the tensors in the
    value have been read, and returns what `encode` was given.

    Tensors have any shape, and any dtype of 4 bits to 16 bytes: floats, integers, bool, complex. Raises BadConfig when
    an argument cannot hold state.
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
        per_rank: Collection[str] = (),
        encode: Encode | None = None,
        decode: Decode | None = None,
    ) -> None:
        _check_model(model)
        self.optimizers = list_optimizers(optimizer)
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
        self._stateful = {"scheduler": scheduler, "scaler": scaler}
        self._ema = ema
        self._dataloader = dataloader
        self._extra = extra
        self._rng = rng
        self.position_entries = (*["dataloader"] * (dataloader is not None), *["rng"] * rng)
        """The entries that say which batches come next."""
        self.per_rank = PerRankEntries(per_rank)
        self._objects = Objects.of(encode, decode, from_live=True)

    @property
    def is_stepped(self) -> bool:
        """Whether every optimizer has state: before its first step the size of a snapshot is not known."""
        return all(len(optimizer.state) > 0 for optimizer in self.optimizers)

    def capture(self, rank: int, world_size: int) -> Captured:
        """The state as it is now, without copying a tensor. Raises Unsupported, naming what has no safe form."""
        sections = self._sections()
        per_rank = [name for name in sections if name.startswith(PER_RANK)]
        return capture_sections(sections, per_rank, rank, world_size, self._objects, self.per_rank)

    def plan_restore(self, stored: StoredState, *, is_dry: bool = False, filter: RestoreFilter = EXACT) -> RestorePlan:
        """How the checkpoint is restored into the live objects. Changes nothing: the caller then calls the plan's
        `run`, unless it `is_dry`. `filter` selects what is restored.

        Raises Mismatch, listing the differences, and Corrupt when the tree is not a state tree.
        """
        saved, available, rank_local = parse_tree(stored.tree), stored.available, stored.rank_local
        devices = {parameter.device for parameter in self._model.parameters() if not parameter.is_cpu}
        # For tensors that were saved from an accelerator and belong to no live object.
        accelerator = min(devices, key=str, default=torch.device("cpu"))
        live = self._sections()
        per_rank_names, difference = _per_rank_names(
            saved, rank_local, [name for name in live if name in saved], filter
        )
        entries = stored_entries(saved, available, per_rank_names)
        plan = RestorePlan(
            available,
            accelerator,
            is_dry=is_dry,
            filter=filter,
            entries=entries,
            objects=self._objects,
            per_rank_names=per_rank_names,
        )
        plan.differences += difference
        sections = live | self._values_only_in(saved, plan.sources)
        # Modules first: a value that shares their memory then gets a tensor of its own.
        modules = {name: section for name, section in sections.items() if isinstance(section, ModuleSection)}
        for name, section in (modules | sections).items():
            _plan_section(name, section, saved, plan, rank_local, is_live=name in live)
        if filter.is_exact and not saved.keys() & sections.keys():
            plan.differences.append(
                f"the checkpoint holds {', '.join(saved)}, the state {', '.join(sections)}: nothing in common"
            )
        for name in saved.keys() - sections.keys():
            if plan.has_source(name):
                log.warning("restore: the checkpoint has %s, which this state lacks: ignored", name)
        if rank_local is not None:
            for name, entry in plan.sources.items():
                if name != entry and entry.startswith(PER_RANK):
                    plan.differences.append(f"{entry}: {rank_local.difference}, so it cannot be renamed")
        kept = plan.report.kept
        is_scheduled = "scheduler" in live and "scheduler" in plan.sources and "scheduler" not in kept
        if is_scheduled and any(name.endswith(".lr") for name in kept):
            log.warning("restore: lr is kept and the scheduler is not: its next step may set the checkpoint's rate")
        plan.finish([name for name, section in sections.items() if isinstance(section, EntrySection)])
        return plan

    def _sections(self) -> dict[str, Section]:
        """All sections by name, in the order of capture and restore: the RNG last."""
        sections: dict[str, Section] = {"model": ModuleSection(self._model, "model")}
        if self.optimizers:
            sections["optimizer"] = OptimizersSection(self.optimizers, self._model)
        for name, owner in self._stateful.items():
            if owner is not None:
                sections[name] = StatefulSection(owner, name)
        if isinstance(self._ema, dict):
            sections["ema"] = TensorsSection(self._ema, "ema")
        elif self._ema is not None:
            sections["ema"] = _section(self._ema, "ema")
        if self._dataloader is not None:
            sections["dataloader"] = StatefulSection(self._dataloader, "dataloader")
        for key, value in (self._extra or {}).items():
            name = f"extra.{key}"
            is_object = is_stateful(value)
            sections[name] = _section(value, name) if is_object else ValueSection(self._extra or {}, key, name)
        if self._rng:
            sections["rng"] = RngSection(self._model)
        return sections

    def _values_only_in(self, saved: Mapping[str, SectionTree], sources: Mapping[str, str]) -> dict[str, Section]:
        """Sections for plain values that only the checkpoint has: they are added to `extra`."""
        if self._extra is None:
            return {}
        return {
            name: ValueSection(self._extra, key, name)
            for name, entry in sources.items()
            if (key := name.removeprefix("extra.")) != name
            and key not in self._extra
            and entry in saved
            and saved[entry].kind == ValueSection.kind
        }


def _per_rank_names(
    saved: Mapping[str, SectionTree], rank_local: RankLocal | None, sections: Sequence[str], filter: RestoreFilter
) -> tuple[dict[str, str], list[str]]:
    """(the stored names of the tensors of this rank that `per_rank` named, by their names in the state tree; why they
    cannot be restored)."""
    if rank_local is not None:
        return rank_local.per_rank_names(sections, filter)
    trees = [tree.per_rank for tree in saved.values() if tree.per_rank is not None]
    return {name: stored for tree in trees for name, stored in tree.stored_names().items()}, []


EntrySection = ModuleSection | TensorsSection | OptimizersSection
"""Sections that are restored entry by entry. Others are restored whole, or not at all."""


def _plan_section(
    name: str,
    section: Section,
    saved: Mapping[str, SectionTree],
    plan: RestorePlan,
    rank_local: RankLocal | None,
    *,
    is_live: bool,
) -> None:
    """Plans the restore of one section. `is_live`: the state has it, else only the checkpoint."""
    source: str | None = name
    is_whole = not isinstance(section, EntrySection)
    if is_whole and (name in plan.sources or plan.filter.keeps(name)):
        source = plan.take(name)
    elif not plan.has_source(name) and not plan.filter.takes(name):
        source = None
    if source is None:
        if isinstance(section, ValueSection):
            plan.protect(name, section.holder.get(section.key))
        return
    stored = saved.get(source)
    is_part = "model" in saved and saved["model"].is_part
    if stored is None and (is_whole or isinstance(section, OptimizersSection) or not plan.has_source(name)):
        log.warning("restore: the checkpoint has no %s, it stays as it is", name)
        plan.report.missing.append(name)
    elif stored is not None and stored.kind != section.kind and (is_whole or plan.filter.is_exact):
        plan.mismatch(name, f"checkpoint holds a {stored.kind}, now it is a {section.kind}")
    elif rank_local is not None and name.startswith(PER_RANK):
        rank_local.plan(name, section, plan, source=source, is_required=is_live)
    elif rank_local is not None and stored is not None and not is_part and not rank_local.is_shared(source):
        if not plan.keep_section(name):
            plan.mismatch(name, f"{rank_local.difference}: restore without it in the state")
    elif stored is not None:
        section.plan(stored.value, stored.suffix, plan)
    else:
        section.plan({}, "", plan)  # its entries have other names in the checkpoint


def _check_model(model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise BadConfig(
            f"TrainingState(model=…): {type(model).__qualname__} is no torch.nn.Module",
            hint="put several into a torch.nn.ModuleList or ModuleDict",
        )
    fsdp = sys.modules.get("torch.distributed.fsdp")  # imported wherever one exists
    if fsdp is not None and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules()):
        raise BadConfig(
            "TrainingState(model=…): FullyShardedDataParallel keeps parts as plain tensors, which look like replicas",
            hint="use torch.distributed.fsdp.fully_shard (FSDP2): its tensors know their place in the whole; "
            "docs/guides/migrate.md moves the state over",
        )


def _section(owner: torch.nn.Module | Stateful, prefix: str) -> Section:
    if isinstance(owner, torch.nn.Module):
        return ModuleSection(owner, prefix)
    return StatefulSection(owner, prefix)
