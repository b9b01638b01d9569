"""Optimizers by the names of their parameters: state and hyperparameters, bit for bit, in any order of groups.

Does not use torch's state dicts: get_optimizer_state_dict takes an optimizer step when the state is empty, and
load_state_dict casts moments to the parameter's dtype. Names are those of get_optimizer_state_dict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import torch

from tierd.errors import Corrupt, Unsupported
from tierd_client.state.encoding import Collector, Json
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


class OptimizersSection:
    """One or several optimizers. Tensor names begin with `optimizer.`, or `optimizer.<index>.` if there are several."""

    kind: ClassVar[str] = "optimizers"

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], model: torch.nn.Module) -> None:
        self._model = model
        prefixes = ["optimizer"] if len(optimizers) == 1 else [f"optimizer.{i}" for i in range(len(optimizers))]
        self._optimizers = list(zip(prefixes, optimizers, strict=True))

    def capture(self, into: Collector) -> Json:
        names = _parameter_names(self._model)
        return [_capture(optimizer, prefix, names, into) for prefix, optimizer in self._optimizers]

    def plan(self, saved: Json, suffix: str, plan: RestorePlan) -> None:
        try:
            trees = msgspec.convert(saved, list[OptimizerTree])
        except msgspec.ValidationError as error:
            raise Corrupt(f"read the optimizer in the state tree: {error}") from error
        if len(trees) != len(self._optimizers):
            plan.add_difference(f"optimizer: checkpoint {len(trees)}, now {len(self._optimizers)}")
            return
        names = _parameter_names(self._model)
        for tree, (prefix, optimizer) in zip(trees, self._optimizers, strict=True):
            _OptimizerRestore(optimizer, prefix, _name_parameters(optimizer, names), plan).plan_tree(tree)


def _parameter_names(model: torch.nn.Module) -> dict[int, str]:
    """Names by id(parameter): torch hashes a tensor by its id too, but far more slowly.

    A tied parameter has its first name, as in get_optimizer_state_dict.
    """
    raw = dict(model.named_parameters())
    clean = clean_names(raw)
    return {id(parameter): clean[name] for name, parameter in raw.items()}


@dataclass(frozen=True, slots=True)
class _Parameters:
    """The parameters of one optimizer: `names` by id(), tensors `by_name`. `foreign` names are not in the model."""

    names: dict[int, str]
    by_name: dict[str, torch.Tensor]
    foreign: list[str]


def _name_parameters(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> _Parameters:
    all_names: dict[int, str] = {}
    by_name: dict[str, torch.Tensor] = {}
    foreign: list[str] = []
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            name = names.get(id(parameter))
            if name is None:
                name = f"param.{group_index}.{index}"
                foreign.append(name)
            all_names[id(parameter)] = name
            by_name[name] = parameter
    return _Parameters(all_names, by_name, foreign)


def _capture(optimizer: torch.optim.Optimizer, prefix: str, names: Mapping[int, str], into: Collector) -> Json:
    parameters = _name_parameters(optimizer, names)
    groups: list[Json] = []
    for index, group in enumerate(optimizer.param_groups):
        params = [parameters.names[id(parameter)] for parameter in group["params"]]
        groups.append({"params": params, "options": into.encode(_options(group), f"{prefix}.param_groups.{index}")})
    for name in parameters.foreign:
        into.add(f"{prefix}.{name}", parameters.by_name[name])
    state: dict[str, Json] = {}
    for parameter, entries in optimizer.state.items():
        name = parameters.names.get(id(parameter))
        if name is None:
            raise Unsupported(
                f"capture {prefix}.state: it has an entry for a {type(parameter).__qualname__} "
                "that is not a parameter in its groups"
            )
        state[name] = into.encode(entries, f"{prefix}.state.{name}", home=parameter.device)
    return {"defaults": sorted(optimizer.defaults), "foreign": parameters.foreign, "groups": groups, "state": state}


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


@dataclass(frozen=True, slots=True)
class _OptimizerRestore:
    """Plans the restore of one optimizer."""

    optimizer: torch.optim.Optimizer
    prefix: str
    parameters: _Parameters
    plan: RestorePlan

    def plan_tree(self, saved: OptimizerTree) -> None:
        if not self._is_same_kind(saved):
            return
        by_name = self.parameters.by_name
        for name in self.parameters.foreign:
            self.plan.read_into(f"{self.prefix}.{name}", by_name[name])
        groups = [self._plan_group(index, group) for index, group in enumerate(saved.groups)]
        state = {
            by_name[name]: self._plan_state(name, by_name[name], entries)
            for name, entries in saved.state.items()
            if name in by_name
        }
        self.plan.on_finish(self.prefix, lambda: self._install(groups, state))

    def _is_same_kind(self, saved: OptimizerTree) -> bool:
        """Whether the groups have the same parameters, and the hyperparameters are those of one kind of optimizer."""
        live_groups = self.optimizer.param_groups
        if len(saved.groups) != len(live_groups):
            counts = f"checkpoint {len(saved.groups)}, now {len(live_groups)}"
            self.plan.add_difference(f"{self.prefix}.param_groups: {counts}")
            return False
        is_same = True
        for index, (group, live) in enumerate(zip(saved.groups, live_groups, strict=True)):
            then, now = set(group.params), {self.parameters.names[id(parameter)] for parameter in live["params"]}
            path = f"{self.prefix}.param_groups[{index}]"
            for name in sorted(then - now):
                self.plan.add_difference(f"{path}: {name} is in the checkpoint, not in the group now")
            for name in sorted(now - then):
                self.plan.add_difference(f"{path}: {name} is not in the checkpoint's group")
            is_same = is_same and now == then
        # Newer torch versions only add hyperparameters. Where both sides have extra ones, the optimizers differ.
        removed = sorted(set(saved.defaults) - set(self.optimizer.defaults))
        added = sorted(set(self.optimizer.defaults) - set(saved.defaults))
        if removed and added:
            self.plan.add_difference(
                f"{self.prefix}: the checkpoint's has {', '.join(removed)}, now {', '.join(added)}"
            )
            return False
        return is_same

    def _plan_group(self, index: int, saved: GroupTree) -> dict[str, Any]:
        collector = Collector()
        collector.encode(_options(self.optimizer.param_groups[index]), f"{self.prefix}.param_groups.{index}")
        return self.plan.decode(saved.options, live=collector.live)

    def _plan_state(self, name: str, parameter: torch.Tensor, saved: Json) -> dict[str, Any]:
        """In place where the optimizer has state already. New tensors have the layout of the parameter."""
        path = f"{self.prefix}.state.{name}"
        collector = Collector()
        collector.encode(self.optimizer.state.get(parameter, {}), path)

        def new(stored_name: str, device: str) -> torch.Tensor:
            if stored_name == f"{path}.step" and device == "home":
                return self.plan.read_new(stored_name, self._step_device(parameter))
            return self.plan.read_new(stored_name, self.plan.device(device, parameter.device), like=parameter)

        return self.plan.decode(saved, live=collector.live, is_strict=True, new=new)

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
