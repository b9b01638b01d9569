"""The kinds of state that a TrainingState is made of: each turns itself into names and JSON, and back.

`capture` walks live objects and copies nothing. `plan` says where stored bytes go and what is installed after
them, and changes nothing. Optimizers have a file of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeGuard

import msgspec
import torch

from tierd_client.state import rng
from tierd_client.state.encoding import Collector, Json
from tierd_client.state.restore_plan import RestorePlan
from tierd_client.state.tensors import clean_names, local_part

logger = logging.getLogger(__name__)


class Stateful(Protocol):
    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def is_stateful(value: object) -> TypeGuard[Stateful]:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


class Shared(Protocol):
    """A stateful object, a data loader say, that can go on from what any number of ranks had come to."""

    def load_state_dicts(self, states: Sequence[Any], /) -> Any: ...


def is_shared(value: object) -> TypeGuard[Shared]:
    return callable(getattr(value, "load_state_dicts", None))


class SectionTree(msgspec.Struct):
    """One section in the state tree. `suffix` ends the names of its tensors."""

    kind: str
    suffix: str
    value: Json


class Section(Protocol):
    """One named part of the state. `kind` goes into the checkpoint: a section restores only its own kind."""

    kind: str

    def capture(self, into: Collector) -> Json: ...
    def plan(self, saved: Json, suffix: str, plan: RestorePlan) -> None: ...


class ModuleSection:
    """An nn.Module by the semantics of its state_dict: persistent buffers, tied names, extra state.

    Restored in place; what state_dict gives as a copy goes through load_state_dict.
    """

    kind = "module"

    def __init__(self, module: torch.nn.Module, prefix: str) -> None:
        self._module = module
        self._prefix = prefix

    def capture(self, into: Collector) -> Json:
        state = self._module.state_dict()
        names = clean_names(state)
        buffers = {name for name, _ in self._module.named_buffers(remove_duplicate=False)}
        objects: dict[str, Json] = {}
        for raw, value in state.items():
            path = f"{self._prefix}.{names[raw]}"
            if _is_object(raw, value):
                objects[names[raw]] = into.encode(value, path)
            else:
                into.add(path, value, is_buffer=raw in buffers)
        return objects

    def plan(self, saved: Json, suffix: str, plan: RestorePlan) -> None:
        state = self._module.state_dict()
        names = clean_names(state)
        held = [*self._module.parameters(), *self._module.buffers()]
        storages = {_storage(tensor) for tensor in held}
        copies: dict[str, torch.Tensor] = {}
        objects: dict[str, Any] = {}
        for raw, value in state.items():
            name = plan.stored_name(f"{self._prefix}.{names[raw]}", suffix)
            if _is_object(raw, value):
                if names[raw] in saved:
                    objects[raw] = plan.decode(saved[names[raw]])
                else:
                    plan.differ(f"{name}: not in the checkpoint")
            elif _storage(value) in storages:
                plan.place(name, value)
            else:
                copies[raw] = torch.empty_like(value)
                plan.place(name, copies[raw])
        for name in set(saved) - set(names.values()):
            plan.differ(f"{self._prefix}.{name}: in the checkpoint, not in the {self._prefix}")
        plan.expect_no_more(f"{self._prefix}.", suffix)
        if copies or objects:
            plan.then(lambda: self._load(copies | objects))

    def _load(self, entries: dict[str, Any]) -> None:
        self._module.load_state_dict(entries, strict=False)


def _is_object(raw: str, value: object) -> bool:
    """What is no tensor, or came from get_extra_state: only set_extra_state knows where that belongs."""
    return raw == "_extra_state" or raw.endswith("._extra_state") or not isinstance(value, torch.Tensor)


def _storage(tensor: torch.Tensor) -> int:
    return local_part(tensor).untyped_storage().data_ptr()


class StatefulSection:
    """Anything with state_dict and load_state_dict. Its tensors are new ones; it takes from them what it needs."""

    kind = "stateful"

    def __init__(self, owner: Stateful, prefix: str) -> None:
        self._owner = owner
        self._prefix = prefix

    def capture(self, into: Collector) -> Json:
        return into.encode(self._owner.state_dict(), self._prefix)

    def plan(self, saved: Json, suffix: str, plan: RestorePlan) -> None:
        state = plan.decode(saved)
        if state == {} and self._owner.state_dict():  # a GradScaler that was disabled, say
            logger.warning("restore: %s is empty in the checkpoint, it starts fresh", self._prefix)
            return
        if state and isinstance(self._owner, torch.amp.GradScaler) and not self._owner.is_enabled():
            logger.warning("restore: %s is disabled now, what the checkpoint has of it is left out", self._prefix)
        plan.then(lambda: self._load(state))

    def _load(self, state: Any) -> None:
        self._owner.load_state_dict(state)
        if isinstance(self._owner, torch.utils.data.DataLoader):
            # torchdata's draws a seed from the global generator when it makes its iterator. To ask for its state has
            # it made now, before the generators are restored.
            self._owner.state_dict()

    def plan_shared(self, saved: Sequence[Json], plan: RestorePlan) -> bool:
        """Its owner gets the states of all ranks that saved the checkpoint, in order. False: it has no way to."""
        owner = self._owner
        if not is_shared(owner):
            return False
        states = [plan.decode(one) for one in saved]
        plan.then(lambda: owner.load_state_dicts(states))
        return True


class ValueSection:
    """A plain value under a key of somebody's dict. Restored by assigning it there; tensors that fit, in place."""

    kind = "value"

    def __init__(self, holder: dict[str, Any], key: str, prefix: str) -> None:
        self._holder = holder
        self._key = key
        self._prefix = prefix

    def capture(self, into: Collector) -> Json:
        return into.encode(self._holder[self._key], self._prefix)

    def plan(self, saved: Json, suffix: str, plan: RestorePlan) -> None:
        live = _live(self._holder.get(self._key), self._prefix, suffix)
        value = plan.decode(saved, live=live)
        plan.then(lambda: self._holder.__setitem__(self._key, value))


class TensorsSection:
    """A plain dict of tensors, restored in place: names, shapes and dtypes must agree."""

    kind = "tensors"

    def __init__(self, tensors: dict[str, Any], prefix: str) -> None:
        self._tensors = tensors
        self._prefix = prefix

    def capture(self, into: Collector) -> Json:
        return into.encode(self._tensors, self._prefix)

    def plan(self, saved: Json, suffix: str, plan: RestorePlan) -> None:
        live = _live(self._tensors, self._prefix, suffix)
        value: dict[str, Any] = plan.decode(saved, live=live, is_strict=True)
        for key in self._tensors.keys() - value.keys():
            plan.differ(f"{self._prefix}.{key}: not in the checkpoint")
        for key in value.keys() - self._tensors.keys():
            plan.differ(f"{self._prefix}.{key}: in the checkpoint, not in the {self._prefix}")
        plan.then(lambda: self._tensors.update(value))


def _live(value: object, prefix: str, suffix: str) -> dict[str, torch.Tensor]:
    found = Collector()
    found.suffix = suffix
    found.encode(value, prefix)
    return found.live


class RngSection:
    """The random number generators. Planned last, so that it is restored last: others draw numbers."""

    kind = "rng"

    def __init__(self, devices: Callable[[], Iterable[torch.device]]) -> None:
        """`devices`: where the state lives, gone through only once CUDA is in use."""
        self._devices = devices

    def capture(self, into: Collector) -> Json:
        return into.encode(rng.capture(self._devices()), "rng")

    def plan(self, saved: Json, suffix: str, plan: RestorePlan) -> None:
        state = plan.decode(saved)
        plan.then(lambda: rng.restore(state, self._devices()))

    def plan_new(self, seed: bytes, plan: RestorePlan) -> None:
        plan.then(lambda: rng.seed_all(seed))
