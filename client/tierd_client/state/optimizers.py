"""Optimizers by the names of their parameters: state and hyperparameters, bit for bit, in any order of groups.

Does not use torch's state dicts: get_optimizer_state_dict takes an optimizer step when the state is empty, and
load_state_dict casts moments to the parameter's dtype. Names are those of get_optimizer_state_dict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import msgspec
import torch

from tierd.errors import Corrupt, Unsupported
from tierd_client.state.encoding import Collector, Json, live_tensors
from tierd_client.state.restore_plan import RestorePlan
from tierd_client.state.tensors import clean_names

CPU = torch.device("cpu")


class GroupTree(msgspec.Struct):
    params: list[str]
    options: Json


class OptimizerTree(msgspec.Struct):
    """One optimizer in the state tree. `foreign` names parameters that are not in the model, stored here."""

    defaults: list[str]
    foreign: list[str]
    groups: list[GroupTree]
    state: dict[str, Json]


@dataclass(frozen=True, slots=True)
class OptimizersSection:
    """One or several optimizers. Tensor names begin with `optimizer.`, or `optimizer.<index>.` if there are several."""

    optimizers: Sequence[torch.optim.Optimizer]
    model: torch.nn.Module
    kind: ClassVar[str] = "optimizers"

    def capture(self, into: Collector) -> Json:
        return [optimizer.capture(into) for optimizer in self._named()]

    def plan(self, saved: Json, suffix: str, plan: RestorePlan) -> None:
        try:
            trees = msgspec.convert(saved, list[OptimizerTree])
        except msgspec.ValidationError as error:
            raise Corrupt(f"read the optimizer in the state tree: {error}") from error
        if len(trees) != len(self.optimizers):
            plan.differences.append(f"optimizer: checkpoint {len(trees)}, now {len(self.optimizers)}")
            return
        for tree, optimizer in zip(trees, self._named(), strict=True):
            optimizer.plan(tree, plan)

    def _named(self) -> list[_NamedOptimizer]:
        raw = dict(self.model.named_parameters())  # a tied parameter has its first name, as in get_optimizer_state_dict
        clean = clean_names(raw)
        names = {id(parameter): clean[name] for name, parameter in raw.items()}
        prefixes = prefixes_of("optimizer", len(self.optimizers))
        return [_NamedOptimizer(*named, names) for named in zip(self.optimizers, prefixes, strict=True)]


def prefixes_of(name: str, count: int) -> list[str]:
    """What the tensor names of each of `count` optimizers begin with."""
    return [name] if count == 1 else [f"{name}.{index}" for index in range(count)]


class _NamedOptimizer:
    """One optimizer and the names of its parameters: `names` by id(), since torch hashes a tensor by its id too, but
    far more slowly; tensors `by_name`. `foreign` names are not in the model. `options` of the groups: all but params.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, prefix: str, model_names: Mapping[int, str]) -> None:
        self.optimizer = optimizer
        self.prefix = prefix
        self.names: dict[int, str] = {}
        self.by_name: dict[str, torch.Tensor] = {}
        self.foreign: list[str] = []
        self.options: list[dict[str, Any]] = []
        taken = frozenset(model_names.values())
        for group_index, group in enumerate(optimizer.param_groups):
            # `param_names` are in the order of `params`, which may differ from the checkpoint's.
            self.options.append({key: value for key, value in group.items() if key not in ("params", "param_names")})
            for index, parameter in enumerate(group["params"]):
                name = model_names.get(id(parameter))
                if name is None:
                    name = f"param.{group_index}.{index}"
                    while name in taken:
                        name = f"_{name}"
                    self.foreign.append(name)
                self.names[id(parameter)] = name
                self.by_name[name] = parameter

    def capture(self, into: Collector) -> Json:
        groups: list[Json] = []
        for index, (group, options) in enumerate(zip(self.optimizer.param_groups, self.options, strict=True)):
            params = [self.names[id(parameter)] for parameter in group["params"]]
            groups.append({"params": params, "options": into.encode(options, f"{self.prefix}.param_groups.{index}")})
        for name in self.foreign:
            into.add(f"{self.prefix}.{name}", self.by_name[name])
        state: dict[str, Json] = {}
        for parameter, entries in self.optimizer.state.items():
            name = self.names.get(id(parameter))
            if name is None:
                raise Unsupported(
                    f"capture {self.prefix}.state: it has an entry for a {type(parameter).__qualname__} "
                    "that is not a parameter in its groups"
                )
            state[name] = into.encode(entries, f"{self.prefix}.state.{name}", home=parameter.device)
        return {"defaults": sorted(self.optimizer.defaults), "foreign": self.foreign, "groups": groups, "state": state}

    def plan(self, saved: OptimizerTree, plan: RestorePlan) -> None:
        if not self._is_same_kind(saved, plan):
            return
        for name in self.foreign:
            plan.read_into(f"{self.prefix}.{name}", self.by_name[name])
        groups: list[dict[str, Any]] = []
        for index, (group, options) in enumerate(zip(saved.groups, self.options, strict=True)):
            live = live_tensors(options, f"{self.prefix}.param_groups.{index}")
            groups.append(plan.decode(group.options, live=live))
        state = {
            parameter: self._plan_state(name, parameter, entries, plan)
            for name, entries in saved.state.items()
            if (parameter := self.by_name.get(name)) is not None
        }
        plan.on_finish(self.prefix, partial(self._install, groups, state))

    def _is_same_kind(self, saved: OptimizerTree, plan: RestorePlan) -> bool:
        """Whether the groups have the same parameters, and the hyperparameters are those of one kind of optimizer."""
        live_groups = self.optimizer.param_groups
        if len(saved.groups) != len(live_groups):
            counts = f"checkpoint {len(saved.groups)}, now {len(live_groups)}"
            plan.differences.append(f"{self.prefix}.param_groups: {counts}")
            return False
        is_same = True
        for index, (group, live) in enumerate(zip(saved.groups, live_groups, strict=True)):
            then, now = set(group.params), {self.names[id(parameter)] for parameter in live["params"]}
            path = f"{self.prefix}.param_groups[{index}]"
            for name in sorted(then - now):
                plan.differences.append(f"{path}: {name} is in the checkpoint, not in the group now")
            for name in sorted(now - then):
                plan.differences.append(f"{path}: {name} is not in the checkpoint's group")
            is_same = is_same and now == then
        # Newer torch versions only add hyperparameters. Where both sides have extra ones, the optimizers differ.
        removed = sorted(set(saved.defaults) - set(self.optimizer.defaults))
        added = sorted(set(self.optimizer.defaults) - set(saved.defaults))
        if removed and added:
            plan.differences.append(f"{self.prefix}: the checkpoint's has {', '.join(removed)}, now {', '.join(added)}")
            return False
        return is_same

    def _plan_state(self, name: str, parameter: torch.Tensor, saved: Json, plan: RestorePlan) -> dict[str, Any]:
        """In place where the optimizer has state already. New tensors have the layout of the parameter."""
        path = f"{self.prefix}.state.{name}"

        def new(stored_name: str, device: str) -> torch.Tensor:
            if stored_name == f"{path}.step" and device == "home":
                return plan.read_new(stored_name, self._step_device(parameter))
            return plan.read_new(stored_name, plan.device(device, parameter.device), like=parameter)

        live = live_tensors(self.optimizer.state.get(parameter, {}), path)
        return plan.decode(saved, live=live, is_strict=True, new=new)

    def _step_device(self, parameter: torch.Tensor) -> torch.device:
        """torch keeps step counts on the CPU unless the optimizer must read them on the device."""
        for group in self.optimizer.param_groups:
            if any(member is parameter for member in group["params"]):
                return parameter.device if group.get("capturable") or group.get("fused") else CPU
        return CPU

    def _install(self, groups: list[dict[str, Any]], state: dict[torch.Tensor, dict[str, Any]]) -> None:
        for live, saved in zip(self.optimizer.param_groups, groups, strict=True):
            live.update(saved)
        self.optimizer.state.clear()
        self.optimizer.state.update(state)
