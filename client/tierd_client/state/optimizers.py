"""Optimizers by the names of their parameters: state and hyperparameters, bit for bit, in any order of groups.

Does not use torch's state dicts: get_optimizer_state_dict takes an optimizer step when the state is empty, and
load_state_dict casts moments to the parameter's dtype. Names are those of get_optimizer_state_dict.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import msgspec
import torch

from tierd.errors import BadConfig, Corrupt, Unsupported
from tierd_client.state.encoding import Collector, Json, live_tensors
from tierd_client.state.restore_plan import RestorePlan
from tierd_client.state.tensors import DTYPE_NAMES, clean_names

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
        if plan.keep_section("optimizer"):
            return
        if len(trees) != len(self.optimizers):
            plan.mismatch("optimizer", f"checkpoint {len(trees)}, now {len(self.optimizers)}")
            return
        if plan.filter.is_exact:
            plan.take_section("optimizer")
        for tree, optimizer in zip(trees, self._named(), strict=True):
            if plan.filter.is_exact:
                optimizer.plan(tree, plan)
            else:
                optimizer.plan_entries(tree, plan)

    def _named(self) -> list[_NamedOptimizer]:
        raw = dict(self.model.named_parameters())  # a tied parameter has its first name, as in get_optimizer_state_dict
        clean = clean_names(raw)
        names = {id(parameter): clean[name] for name, parameter in raw.items()}
        prefixes = prefixes_of("optimizer", len(self.optimizers))
        return [_NamedOptimizer(*named, names) for named in zip(self.optimizers, prefixes, strict=True)]


def list_optimizers(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
) -> list[torch.optim.Optimizer]:
    """The optimizers of a `TrainingState`. Raises BadConfig for an object that is not an optimizer, and for a
    ZeroRedundancyOptimizer."""
    optimizers = [] if optimizer is None else list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    for candidate in optimizers:
        if not isinstance(candidate, torch.optim.Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BadConfig(
                f"TrainingState(optimizer=…): {type(candidate).__qualname__} is no torch.optim.Optimizer",
                hint="pass one optimizer or a list; an engine that wraps them, such as DeepSpeed's, writes checkpoints "
                "of its own",
            )
        zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")  # imported wherever one exists
        if zero is not None and isinstance(candidate, zero.ZeroRedundancyOptimizer):
            raise BadConfig(
                "TrainingState(optimizer=…): each rank of a ZeroRedundancyOptimizer has another part of the state, and "
                "nothing in it says which",
                hint="use the optimizer that it was made with, or FSDP2; docs/guides/migrate.md moves its state over",
            )
    return optimizers


def prefixes_of(name: str, count: int) -> list[str]:
    """What the tensor names of each of `count` optimizers begin with."""
    return [name] if count == 1 else [f"{name}.{index}" for index in range(count)]


class _NamedOptimizer:
    """One optimizer and the names of its parameters. `names`: by the id() of the parameter, because torch takes far
    longer to hash a tensor. `by_name`: the parameters. `foreign`: the names of those that are not in the model.
    `options`: of each group, all but its parameters and their names.
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

    def plan_entries(self, saved: OptimizerTree, plan: RestorePlan) -> None:
        """As `plan`, for a filter that does not take everything: entry by entry, and the rest stays as it is."""
        if plan.keep_section(self.prefix):
            return
        if (why := self._other_kind(saved)) is not None:
            plan.mismatch(self.prefix, why)
            return
        stored_groups = [
            GroupTree(params=[plan.filter.parameter(name) for name in group.params], options=group.options)
            for group in saved.groups
        ]
        options: list[dict[str, Any]] = []
        groups = f"{self.prefix}.param_groups"
        if plan.has_source(groups) and not plan.keep_section(groups):
            if plan.filter.strict and not self._has_same_groups(stored_groups, plan):
                return
            options = [self._plan_options(index, stored_groups, plan) for index in range(len(self.options))]
        for name in self.foreign:
            plan.read_entry(f"{self.prefix}.{name}", self.by_name[name])
        known = {plan.filter.parameter(name): name for group in saved.groups for name in group.params}
        state: dict[torch.Tensor, dict[str, Any]] = {}
        cast: dict[torch.Tensor, torch.dtype] = {}
        for name, parameter in self.by_name.items():
            entry = f"{self.prefix}.state.{name}"
            if entry not in plan.sources and name in known and not plan.filter.keeps(entry):
                is_asked = plan.filter.takes(f"{self.prefix}.state.{known[name]}")
                if is_asked and self.optimizer.state.get(parameter):  # the checkpoint's optimizer had none of it
                    state[parameter] = {}
                    plan.report.cleared.append(entry)
                continue
            if (source := plan.take(entry)) is None:
                continue
            stored_name = source.removeprefix(f"{self.prefix}.state.")
            if (why := self._misfit(stored_name, parameter, entry, plan)) is not None:
                plan.mismatch(entry, why)
                continue
            if entry in plan.report.cast:
                cast[parameter] = parameter.dtype
            state[parameter] = self._plan_state(
                stored_name, parameter, saved.state[stored_name], plan, is_new=parameter in cast
            )
        plan.on_finish(self.prefix, partial(self._install_entries, options, state, cast))

    def _misfit(self, stored_name: str, parameter: torch.Tensor, entry: str, plan: RestorePlan) -> str | None:
        """Why the parameter cannot take the state of the stored one. Reports a cast."""
        names = (f"model.{stored_name}", f"{self.prefix}.{stored_name}")
        forms = ((name, form) for name in names if (form := plan.stored_form(name)) is not None)
        name, (dtype, shape) = next(forms, ("", (parameter.dtype, tuple(parameter.shape))))
        live_shape = tuple(plan.own_part(name, parameter).shape)
        if shape != live_shape:
            return f"checkpoint {list(shape)}, now {list(live_shape)}"
        if dtype == parameter.dtype:
            return None
        dtypes = [DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch.")) for dtype in (dtype, parameter.dtype)]
        if not (plan.filter.casts(entry) and dtype.is_floating_point and parameter.dtype.is_floating_point):
            return f"its parameter is {dtypes[0]} in the checkpoint, now {dtypes[1]}"
        plan.report.cast[entry] = " -> ".join(dtypes)
        return None

    def _plan_options(self, index: int, stored_groups: Sequence[GroupTree], plan: RestorePlan) -> dict[str, Any]:
        """The options that a group takes: those of the stored group that had its parameters."""
        path = f"{self.prefix}.param_groups.{index}"
        members = {self.names[id(parameter)] for parameter in self.optimizer.param_groups[index]["params"]}
        origins = [origin for origin, group in enumerate(stored_groups) if members.intersection(group.params)]
        if not origins:
            plan.miss(path)
            return {}
        first = origins[0]
        stored = stored_groups[first].options
        if any(stored_groups[origin].options != stored for origin in origins):
            groups = ", ".join(map(str, origins))
            plan.mismatch(path, f"its parameters were in the groups {groups}, which have different options")
            return {}
        asked: dict[str, Json] = {}
        for key, value in stored.items():
            entry = f"{self.prefix}.param_groups.{first}.{key}"
            if entry in plan.sources and not plan.keep(f"{path}.{key}", entry):
                plan.use(entry)
                asked[key] = value
        return plan.decode(asked, live=live_tensors(self.options[index], f"{self.prefix}.param_groups.{first}"))

    def _is_same_kind(self, saved: OptimizerTree, plan: RestorePlan) -> bool:
        is_same = self._has_same_groups(saved.groups, plan)
        if (why := self._other_kind(saved)) is not None:
            plan.differences.append(f"{self.prefix}: {why}")
        return is_same and why is None

    def _other_kind(self, saved: OptimizerTree) -> str | None:
        """Why the hyperparameters are not those of one kind of optimizer."""
        # Newer torch versions only add hyperparameters. Where both sides have extra ones, the optimizers differ.
        removed = sorted(set(saved.defaults) - set(self.optimizer.defaults))
        added = sorted(set(self.optimizer.defaults) - set(saved.defaults))
        return f"the checkpoint's has {', '.join(removed)}, now {', '.join(added)}" if removed and added else None

    def _has_same_groups(self, stored_groups: Sequence[GroupTree], plan: RestorePlan) -> bool:
        """Whether the groups have the same parameters. Adds the differences."""
        live_groups = self.optimizer.param_groups
        if len(stored_groups) != len(live_groups):
            counts = f"checkpoint {len(stored_groups)}, now {len(live_groups)}"
            plan.differences.append(f"{self.prefix}.param_groups: {counts}")
            return False
        is_same = True
        for index, (group, live) in enumerate(zip(stored_groups, live_groups, strict=True)):
            then, now = set(group.params), {self.names[id(parameter)] for parameter in live["params"]}
            path = f"{self.prefix}.param_groups[{index}]"
            for name in sorted(then - now):
                plan.differences.append(f"{path}: {name} is in the checkpoint, not in the group now")
            for name in sorted(now - then):
                plan.differences.append(f"{path}: {name} is not in the checkpoint's group")
            is_same = is_same and now == then
        return is_same

    def _plan_state(
        self, name: str, parameter: torch.Tensor, saved: Json, plan: RestorePlan, *, is_new: bool = False
    ) -> dict[str, Any]:
        """The state of one parameter. `name`: the parameter's name in the checkpoint. The tensors that the optimizer
        has for it already are filled in place, unless `is_new`; a new one gets the parameter's layout if it has its
        shape."""
        path = f"{self.prefix}.state.{name}"

        def new(stored_name: str, device: str) -> torch.Tensor:
            if stored_name == f"{path}.step" and device == "home":
                return plan.read_new(stored_name, self._step_device(parameter))
            return plan.read_new(stored_name, plan.device(device, parameter.device), like=parameter)

        live = {} if is_new else live_tensors(self.optimizer.state.get(parameter, {}), path)
        return plan.decode(saved, live=live, is_strict=plan.filter.strict, new=new)

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

    def _install_entries(
        self,
        options: Sequence[dict[str, Any]],
        state: Mapping[torch.Tensor, dict[str, Any]],
        cast: Mapping[torch.Tensor, torch.dtype],
    ) -> None:
        for live, saved in zip(self.optimizer.param_groups, options, strict=False):
            live.update(saved)
        for parameter, entries in state.items():
            if not entries:
                self.optimizer.state.pop(parameter, None)
                continue
            dtype = cast.get(parameter)
            self.optimizer.state[parameter] = {
                # As Optimizer.load_state_dict casts: moments to the parameter's dtype, never the step count.
                key: value.to(dtype) if dtype and key != "step" and _is_float(value) else value
                for key, value in entries.items()
            }


def _is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
