"""The kinds of state that a training consists of. Each section encodes itself as tensor names and JSON.

`capture` walks live objects and copies nothing. `plan` adds to a RestorePlan which stored tensors are read where and
what is installed afterwards; it changes nothing. Optimizers have a file of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol, TypeGuard

import msgspec
import torch

from tierd.errors import Mismatch, Unsupported
from tierd.format.tagged import Place
from tierd_client.log import log
from tierd_client.state import rng, torchdata
from tierd_client.state.encoding import Collector, Json, live_tensors
from tierd_client.state.per_rank import PerRankTree
from tierd_client.state.restore_plan import RestorePlan
from tierd_client.state.tensors import clean_names, local_part


class Stateful(Protocol):
    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def is_stateful(value: object) -> TypeGuard[Stateful]:
    is_class = isinstance(value, type)  # a class has the methods of its objects, but no state
    return (
        not is_class
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


class SectionTree(msgspec.Struct):
    """One section in the state tree. `suffix` ends the names of its tensors."""

    kind: str
    suffix: str
    value: Json
    is_part: bool = False
    """Other ranks hold tensors of this section that this rank lacks, as with pipeline stages."""
    per_rank: PerRankTree | None = None


class Section(Protocol):
    """One named part of the state. `kind` is stored in the checkpoint: a section restores only its own kind."""

    kind: ClassVar[str]

    def capture(self, into: Collector) -> Json: ...
    def plan(self, saved: Json, suffix: str, plan: RestorePlan) -> None: ...


@dataclass(frozen=True, slots=True)
class ModuleSection:
    """An nn.Module by the semantics of its state_dict: persistent buffers, tied names, extra state.

    Tensors that share the module's memory are restored in place. The others go through load_state_dict.
    """

    module: torch.nn.Module
    prefix: str
    kind: ClassVar[str] = "module"

    def capture(self, into: Collector) -> Json:
        buffers = {name for name, _ in self.module.named_buffers(remove_duplicate=False)}
        return capture_state_dict(self.module.state_dict(), self.prefix, into, buffers)

    def plan(self, saved: Json, suffix: str, plan: RestorePlan) -> None:
        state = self.module.state_dict()
        names = clean_names(state)
        storages = {_storage(tensor) for tensor in (*self.module.parameters(), *self.module.buffers())}
        to_load: dict[str, Any] = {}
        objects: dict[str, Callable[[], Any]] = {}
        for raw_name, value in state.items():
            name = f"{self.prefix}.{names[raw_name]}"
            if _is_object(raw_name, value):
                if (make_value := plan.read_object(name)) is not None:
                    objects[raw_name] = make_value
            elif _storage(value) in storages:
                plan.read_entry(name, value)
            elif plan.read_entry(name, new := plan.new_like(value)):
                to_load[raw_name] = new
        for raw_name in _ignored_entries(self.module, [*to_load, *objects]):
            plan.differences.append(
                f"{self.prefix}.{raw_name}: state_dict returns it, load_state_dict does not take it"
            )
        if to_load or objects:
            plan.on_finish(self.prefix, partial(self._load, to_load, objects))

    def _load(self, tensors: dict[str, torch.Tensor], objects: dict[str, Callable[[], Any]]) -> None:
        state: dict[str, Any] = tensors | {name: make() for name, make in objects.items()}
        unexpected = self.module.load_state_dict(state, strict=False).unexpected_keys
        if unexpected:
            raise Mismatch(
                f"restore {self.prefix}: load_state_dict ignored {', '.join(unexpected)}",
                hint="the state is half restored; the module must load every entry that its state_dict returns",
            )


def capture_state_dict(
    state: Mapping[str, Any], prefix: str, into: Collector, buffers: Collection[str] = ()
) -> dict[str, Json]:
    """Collects the tensors of a module's state dict. Returns its other entries, which are the value of its section."""
    names = clean_names(state)
    objects: dict[str, Json] = {}
    for raw_name, value in state.items():
        path = f"{prefix}.{names[raw_name]}"
        if _is_object(raw_name, value):
            objects[names[raw_name]] = into.encode(value, path)
        elif into.add(path, value, is_buffer=raw_name in buffers) not in (path, path + into.suffix):
            raise Unsupported(
                f"capture {path}: another entry of the state has this name", hint="rename the other entry"
            )
    return objects


def _is_object(raw_name: str, value: object) -> bool:
    """Whether the entry is not a tensor, or is extra state: only set_extra_state knows how to restore that."""
    return raw_name == "_extra_state" or raw_name.endswith("._extra_state") or not isinstance(value, torch.Tensor)


def _ignored_entries(module: torch.nn.Module, entries: Collection[str]) -> list[str]:
    """The `entries` of the module's state dict that no parameter, buffer or code of a submodule takes on loading."""
    if not entries:  # as of most modules: walking through a large one takes milliseconds
        return []
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    names |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    modules = dict(module.named_modules(remove_duplicate=False))

    def has_own_code(owner: torch.nn.Module | None) -> bool:
        return owner is not None and (
            type(owner)._load_from_state_dict is not torch.nn.Module._load_from_state_dict  # pyright: ignore[reportPrivateUsage]
            or type(owner).load_state_dict is not torch.nn.Module.load_state_dict
            or bool(owner._load_state_dict_pre_hooks)  # pyright: ignore[reportPrivateUsage]
        )

    def is_taken(entry: str) -> bool:
        parents = entry.split(".")[:-1]
        paths = [".".join(parents[:depth]) for depth in range(len(parents) + 1)]
        return entry in names or any(has_own_code(modules.get(path)) for path in paths)

    def takes_extra_state(path: str) -> bool:
        owner = modules.get(path)
        return owner is None or type(owner).set_extra_state is not torch.nn.Module.set_extra_state

    return [
        name
        for name in entries
        if not (is_taken(name) or (name.endswith("_extra_state") and takes_extra_state(name.rpartition(".")[0])))
    ]


def _storage(tensor: torch.Tensor) -> int:
    return local_part(tensor).untyped_storage().data_ptr()


@dataclass(frozen=True, slots=True)
class StatefulSection:
    """Any object with state_dict and load_state_dict, which gets new tensors at a restore."""

    owner: Stateful
    prefix: str
    kind: ClassVar[str] = "stateful"

    def capture(self, into: Collector) -> Json:
        state = self.owner.state_dict()
        if isinstance(self.owner, torch.utils.data.DataLoader):
            torchdata.check_loader_state(self.prefix, state)
        return into.encode(state, self.prefix)

    def plan(self, saved: Json, suffix: str, plan: RestorePlan) -> None:
        if (why := _other_groups(self.owner, saved)) is not None:
            plan.mismatch(self.prefix, why)
            return
        make_state = plan.decode_at(saved, Place(self.prefix, None))
        is_empty = saved in ({}, {"$ordered": []})
        if is_empty and self.owner.state_dict():  # for example a GradScaler that was disabled
            log.warning("restore: %s is empty in the checkpoint, it starts fresh", self.prefix)
            return
        if not is_empty and isinstance(self.owner, torch.amp.GradScaler) and not self.owner.is_enabled():
            log.warning("restore: %s is disabled now, its state in the checkpoint is ignored", self.prefix)
        plan.on_finish(self.prefix, lambda: self._load(make_state()))

    def _load(self, state: Any) -> None:
        self.owner.load_state_dict(state)
        if isinstance(self.owner, torch.utils.data.DataLoader):
            torchdata.begin_iterator(self.owner, state)

    def plan_from_all_ranks(self, saved: Sequence[Json], plan: RestorePlan) -> bool:
        """Plans to give the owner the states of all ranks that saved the checkpoint. False if it cannot take them."""
        load_state_dicts: Any = getattr(self.owner, "load_state_dicts", None)
        if not callable(load_state_dicts):
            return False
        states = [plan.decode_at(state, Place(self.prefix, None)) for state in saved]
        plan.on_finish(self.prefix, lambda: load_state_dicts([make_state() for make_state in states]))
        return True


def _other_groups(owner: object, saved: Json) -> str | None:
    """Why a scheduler cannot take the saved state: the numbers of parameter groups or of schedulers differ. None if it
    can."""
    if not isinstance(owner, torch.optim.lr_scheduler.LRScheduler) or not isinstance(saved, dict):
        return None
    counted = {"base_lrs": "parameter groups", "min_lrs": "parameter groups", "_schedulers": "schedulers"}
    for key, noun in counted.items():
        stored, live = saved.get(key), getattr(owner, key, None)
        if not isinstance(stored, list) or not isinstance(live, list | tuple):
            continue
        if len(stored) != len(live):
            return f"checkpoint {len(stored)} {noun}, now {len(live)}"
        for scheduler, state in zip(live, stored, strict=True):  # does nothing for learning rates
            if (why := _other_groups(scheduler, state)) is not None:
                return why
    return None


@dataclass(frozen=True, slots=True)
class ValueSection:
    """A plain value under a key of a dict, restored by assignment. Tensors that fit are restored in place."""

    holder: dict[str, Any]
    key: str
    prefix: str
    kind: ClassVar[str] = "value"

    def capture(self, into: Collector) -> Json:
        return into.encode(self.holder[self.key], self.prefix)

    def plan(self, saved: Json, suffix: str, plan: RestorePlan) -> None:
        live = self.holder.get(self.key)
        tensors = live_tensors(live, self.prefix, suffix, plan.objects)
        make_value = plan.decode_at(saved, Place(self.prefix, live), live=tensors)
        plan.on_finish(self.prefix, lambda: self.holder.__setitem__(self.key, make_value()))


@dataclass(frozen=True, slots=True)
class TensorsSection:
    """A plain dict of tensors, restored in place: names, shapes and dtypes must agree."""

    tensors: dict[Any, Any]
    prefix: str
    kind: ClassVar[str] = "tensors"

    def capture(self, into: Collector) -> Json:
        return into.encode(self.tensors, self.prefix)

    def plan(self, saved: Json, suffix: str, plan: RestorePlan) -> None:
        if not plan.filter.is_exact:
            self._plan_entries(plan)
            return
        plan.take_section(self.prefix)
        live = live_tensors(self.tensors, self.prefix, suffix, plan.objects)
        value: dict[str, Any] = plan.decode(saved, live=live, is_strict=True, place=Place(self.prefix, None))
        for key in self.tensors.keys() - value.keys():
            plan.differences.append(f"{self.prefix}.{key}: not in the checkpoint")
        for key in value.keys() - self.tensors.keys():
            plan.differences.append(f"{self.prefix}.{key}: in the checkpoint, not in the {self.prefix}")
        plan.on_finish(self.prefix, partial(self.tensors.update, value))

    def _plan_entries(self, plan: RestorePlan) -> None:
        for key, value in self.tensors.items():
            name = entry_of_key(self.prefix, key)
            if isinstance(value, torch.Tensor):
                plan.read_entry(name, value)
            elif (make_value := plan.read_object(name, value)) is not None:
                plan.on_finish(name, partial(self._set, key, make_value))

    def _set(self, key: object, make_value: Callable[[], Any]) -> None:
        self.tensors[key] = make_value()


def entry_of_key(section_name: str, key: object) -> str:
    """The entry of an item of a dict. A key that is not a string is written in brackets, so that 0 and "0" differ."""
    is_plain = isinstance(key, str) and not key.startswith("[")
    return f"{section_name}.{key}" if is_plain else f"{section_name}.[{key!r}]"


@dataclass(frozen=True, slots=True)
class RngSection:
    """The random number generators. Restored last, because other sections may draw numbers.

    Once CUDA is initialised, also those of the current CUDA device and of the devices where `model` has parameters.
    """

    model: torch.nn.Module
    kind: ClassVar[str] = "rng"

    def capture(self, into: Collector) -> Json:
        return into.encode(rng.capture(parameter.device for parameter in self.model.parameters()), "rng")

    def plan(self, saved: Json, suffix: str, plan: RestorePlan) -> None:
        state = plan.decode(saved)
        devices = (parameter.device for parameter in self.model.parameters())
        plan.on_finish("rng", partial(rng.restore, state, devices))
