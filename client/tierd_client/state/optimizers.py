"""Optimizers by the names of their parameters: state and hyperparameters, bit for bit, in any order of groups.

A walk of our own: torch's get_optimizer_state_dict takes an optimizer step when the state is empty, and
load_state_dict casts moments to the parameter's dtype. Names are those of get_optimizer_state_dict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from tierd.errors import Corrupt, Unsupported
from tierd_client.state.encoding import Collector, Json
from tierd_client.state.restore_plan import RestorePlan
from tierd_client.state.tensors import clean_names


class GroupTree(msgspec.Struct):
    params: list[str]
    options: Json


class OptimizerTree(msgspec.Struct):
    """One optimizer in the state tree. `foreign`: parameters that the model does not hold, saved here."""

    defaults: list[str]
    foreign: list[str]
    groups: list[GroupTree]
    state: dict[str, Json]


class OptimizersSection:
    """One optimizer, or several. Names begin with `optimizer.`, or `optimizer.<index>.` for several."""

    kind = "optimizers"

    def __init__(
        self, optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], model: torch.nn.Module
    ) -> None:
        self._model = model
        several = list(optimizers) if isinstance(optimizers, Sequence) else [optimizers]
        if len(several) == 1:
            self._named = [("optimizer", several[0])]
        else:
            self._named = [(f"optimizer.{index}", one) for index, one in enumerate(several)]

    def capture(self, into: Collector) -> Json:
        names = _parameter_names(self._model)
        return [_capture(optimizer, prefix, names, into) for prefix, optimizer in self._named]

    def plan(self, saved: Json, suffix: str, plan: RestorePlan) -> None:
        try:
            trees = msgspec.convert(saved, list[OptimizerTree])
        except msgspec.ValidationError as error:
            raise Corrupt(f"read the optimizer in the state tree: {error}") from error
        if len(trees) != len(self._named):
            plan.differ(f"optimizer: checkpoint {len(trees)}, now {len(self._named)}")
            return
        names = _parameter_names(self._model)
        for found, (prefix, optimizer) in zip(trees, self._named, strict=True):
            _Planning(optimizer, prefix, names, plan).plan(found)


Names = Mapping[int, str]
"""Names of parameters by their id(): torch hashes a tensor by that too, but far more slowly."""


def _parameter_names(model: torch.nn.Module) -> dict[int, str]:
    """A tied parameter has its first name, as in get_optimizer_state_dict."""
    raw = dict(model.named_parameters())
    clean = clean_names(raw)
    return {id(parameter): clean[name] for name, parameter in raw.items()}


def _with_foreign(
    optimizer: torch.optim.Optimizer, names: Names
) -> tuple[dict[int, str], dict[str, torch.Tensor], list[str]]:
    """(every parameter's name, every parameter by its name, the names of those that the model does not hold)."""
    all_names: dict[int, str] = {}
    parameters: dict[str, torch.Tensor] = {}
    foreign: list[str] = []
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            name = names.get(id(parameter))
            if name is None:
                name = f"param.{group_index}.{index}"
                foreign.append(name)
            all_names[id(parameter)] = name
            parameters[name] = parameter
    return all_names, parameters, foreign


def _capture(optimizer: torch.optim.Optimizer, prefix: str, names: Names, into: Collector) -> Json:
    all_names, parameters, foreign = _with_foreign(optimizer, names)
    groups: list[Json] = []
    for index, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key != "params"}
        params = [all_names[id(parameter)] for parameter in group["params"]]
        groups.append({"params": params, "options": into.encode(options, f"{prefix}.param_groups.{index}")})
    for name in foreign:
        into.add(f"{prefix}.{name}", parameters[name])
    state: dict[str, Json] = {}
    for parameter, entries in optimizer.state.items():
        name = all_names.get(id(parameter))
        if name is None:
            raise Unsupported(
                f"capture {prefix}.state: it has an entry for {type(parameter).__qualname__} "
                "that is no parameter of its groups"
            )
        state[name] = into.encode(entries, f"{prefix}.state.{name}", home=parameter.device)
    return {"defaults": sorted(optimizer.defaults), "foreign": foreign, "groups": groups, "state": state}


class _Planning:
    """Fits one saved optimizer to a live one."""

    def __init__(self, optimizer: torch.optim.Optimizer, prefix: str, names: Names, plan: RestorePlan) -> None:
        self._optimizer = optimizer
        self._prefix = prefix
        self._names, self._parameters, self._foreign = _with_foreign(optimizer, names)
        self._plan = plan

    def plan(self, saved: OptimizerTree) -> None:
        if not self._is_same_kind(saved):
            return
        parameters = self._parameters
        for name in self._foreign:
            self._plan.place(f"{self._prefix}.{name}", parameters[name])
        groups = [self._plan_group(index, group) for index, group in enumerate(saved.groups)]
        state = {
            parameters[name]: self._plan_state(name, parameters[name], saved.state[name])
            for name in saved.state
            if name in parameters
        }
        self._plan.then(lambda: self._install(groups, state))

    def _is_same_kind(self, saved: OptimizerTree) -> bool:
        """Same parameters in the same groups, and hyperparameters that another torch version could have had."""
        live_groups = self._optimizer.param_groups
        if len(saved.groups) != len(live_groups):
            self._plan.differ(f"{self._prefix}.param_groups: checkpoint {len(saved.groups)}, now {len(live_groups)}")
            return False
        same = True
        for index, (group, live) in enumerate(zip(saved.groups, live_groups, strict=True)):
            now = {self._names[id(parameter)] for parameter in live["params"]}
            where = f"{self._prefix}.param_groups[{index}]"
            for name in sorted(set(group.params) - now):
                self._plan.differ(f"{where}: {name} is in the checkpoint, not in the group now")
            for name in sorted(now - set(group.params)):
                self._plan.differ(f"{where}: {name} is not in the checkpoint's group")
            same = same and now == set(group.params)
        # A newer torch adds hyperparameters and an older one lacks some; both at once is another optimizer.
        lost = sorted(set(saved.defaults) - set(self._optimizer.defaults))
        gained = sorted(set(self._optimizer.defaults) - set(saved.defaults))
        if lost and gained:
            self._plan.differ(f"{self._prefix}: the checkpoint's has {', '.join(lost)}, now {', '.join(gained)}")
        return same and not (lost and gained)

    def _plan_group(self, index: int, saved: GroupTree) -> dict[str, Any]:
        live = Collector()
        now = {key: value for key, value in self._optimizer.param_groups[index].items() if key != "params"}
        live.encode(now, f"{self._prefix}.param_groups.{index}")
        return self._plan.decode(saved.options, live=live.live)

    def _plan_state(self, name: str, parameter: torch.Tensor, saved: Json) -> dict[str, Any]:
        """In place where the optimizer has state by now; else new tensors, laid out as the parameter is."""
        path = f"{self._prefix}.state.{name}"
        live = Collector()
        live.encode(self._optimizer.state.get(parameter, {}), path)

        def new(stored: str, mark: str) -> torch.Tensor:
            if stored == f"{path}.step" and mark == "home":
                return self._plan.new(stored, self._step_device(parameter))
            return self._plan.new(stored, self._plan.device(mark, parameter.device), like=parameter)

        return self._plan.decode(saved, live=live.live, is_strict=True, new=new)

    def _step_device(self, parameter: torch.Tensor) -> torch.device:
        """torch keeps step counts on the CPU unless the optimizer must read them on the device."""
        for group in self._optimizer.param_groups:
            if any(one is parameter for one in group["params"]):
                on_device = group.get("capturable") or group.get("fused")
                return parameter.device if on_device else torch.device("cpu")
        return torch.device("cpu")

    def _install(self, groups: list[dict[str, Any]], state: dict[torch.Tensor, dict[str, Any]]) -> None:
        for live, saved in zip(self._optimizer.param_groups, groups, strict=True):
            live.update(saved)
        self._optimizer.state.clear()
        self._optimizer.state.update(state)
