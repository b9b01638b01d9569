"""Optimizers"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn, optim

from tests.client.exactness.row import EXACT, Row
from tests.support.contents import Objects


class OwnStateDict(optim.SGD):
    """Returns from state_dict what `.state` does not hold."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": 1}


class Consolidated(optim.SGD):
    """Its state_dict works only after a call of another method."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("call consolidate_state_dict first")


class Lookahead(optim.SGD):
    """Holds another optimizer."""

    def __init__(self, parameters: Any) -> None:
        parameters = list(parameters)
        super().__init__(parameters, lr=0.1)
        self.inner = optim.Adam(parameters)


def zero(parameters: Any) -> optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # it warns of torch.jit

    return ZeroRedundancyOptimizer(parameters, optim.SGD, lr=0.1)


def with_attribute(parameters: Any) -> optim.Optimizer:
    optimizer = optim.SGD(parameters, lr=0.1)
    optimizer.slow = torch.zeros(3)  # type: ignore[attr-defined]
    return optimizer


def with_state_of_no_parameter(parameters: Any) -> optim.Optimizer:
    optimizer = optim.SGD(parameters, lr=0.1)
    optimizer.state["step"] = {"count": torch.ones(1)}  # type: ignore[index]
    return optimizer


def with_option(value: Any) -> Any:
    return lambda parameters: optim.SGD([{"params": list(parameters), "option": value}], lr=0.1)


def groups(parameters: Any) -> optim.Optimizer:
    first, *others = parameters
    return optim.AdamW([{"params": [first], "lr": 0.5}, {"params": others, "weight_decay": 0.0}])


def foreign(parameters: Any) -> optim.Optimizer:
    return optim.Adam([nn.Parameter(torch.ones(3)), *parameters])


def several(parameters: Any) -> list[optim.Optimizer]:
    first, *others = parameters
    return [optim.SGD([first], lr=0.1, momentum=0.9), optim.Adam(others)]


def matrices(parameters: Any) -> list[torch.Tensor]:
    return [parameter for parameter in parameters if parameter.dim() == 2]


ROWS = [
    Row("`SGD`", EXACT, lambda p: optim.SGD(p, lr=0.1)),
    Row("`SGD` with momentum", EXACT, lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)),
    Row("`Adam`", EXACT, optim.Adam),
    Row("`Adam` with amsgrad", EXACT, lambda p: optim.Adam(p, amsgrad=True)),
    Row("`Adam`, fused", EXACT, lambda p: optim.Adam(p, fused=True)),
    Row("`Adam`, foreach", EXACT, lambda p: optim.Adam(p, foreach=True)),
    Row("`Adam` with a tensor as learning rate", EXACT, lambda p: optim.Adam(p, lr=torch.tensor(0.1), foreach=False)),
    Row("`AdamW`", EXACT, optim.AdamW),
    Row("`Adadelta`", EXACT, optim.Adadelta),
    Row("`Adafactor`", EXACT, optim.Adafactor),
    Row("`Adagrad`", EXACT, lambda p: optim.Adagrad(p, initial_accumulator_value=0.5)),
    Row("`Adamax`", EXACT, optim.Adamax),
    Row("`ASGD`", EXACT, optim.ASGD),
    Row("`LBFGS`", EXACT, lambda p: optim.LBFGS(p, max_iter=3)),
    Row("`Muon`", EXACT, lambda p: optim.Muon(matrices(p))),
    Row("`NAdam`", EXACT, optim.NAdam),
    Row("`RAdam`", EXACT, optim.RAdam),
    Row("`RMSprop`, centered, with momentum", EXACT, lambda p: optim.RMSprop(p, centered=True, momentum=0.9)),
    Row("`Rprop`", EXACT, optim.Rprop),
    Row("`SparseAdam`", EXACT, lambda p: optim.SparseAdam(list(p))),
    Row("with maximize, or differentiable", EXACT, lambda p: optim.Adam(p, maximize=True)),
    Row("with named parameters", EXACT, lambda p: optim.AdamW([(str(i), each) for i, each in enumerate(p)])),
    Row("with parameter groups", EXACT, groups),
    Row("over some of the parameters", EXACT, lambda p: optim.Adam(list(p)[:1])),
    Row("over parameters that are not in the model", EXACT, foreign),
    Row("a list of optimizers", EXACT, several),
    Row(
        "options of any type of value in a group", EXACT, with_option({"schedule": (1, [2.5]), "scale": torch.ones(2)})
    ),
    Row(
        "a function as an option of a group",
        "optimizer.param_groups.0.option: builtins.function has no safe form",
        with_option(lambda: 1),
    ),
    Row(
        "state for something that is no parameter",
        "it has an entry for a str that is not a parameter",
        with_state_of_no_parameter,
    ),
    Row("a tensor in an attribute", "keeps a tensor of shape [3] in .slow", with_attribute),
    Row("another optimizer in an attribute (Lookahead, SAM)", "keeps a Adam in .inner", Lookahead),
    Row("a state_dict that returns more", "OwnStateDict.state_dict() returns slow", lambda p: OwnStateDict(p, lr=0.1)),
    Row(
        "a state_dict that works only after another call",
        "raised RuntimeError: call consolidate_state_dict first",
        lambda p: Consolidated(p, lr=0.1),
    ),
    Row(
        "`ZeroRedundancyOptimizer`",
        "each rank of a ZeroRedundancyOptimizer has another part of the state",
        zero,
    ),
    Row("a dict of optimizers", "is no torch.optim.Optimizer", lambda p: {"main": optim.Adam(p)}),
]


def build(row: Row, seed: int, rank: int) -> Objects:
    """The optimizer of the checkpoint has taken two steps, the other none."""
    torch.default_generator.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = row.make(model.parameters())
    made: Sequence[Any] = optimizer if isinstance(optimizer, list) else [optimizer]
    for _ in range(2 if seed == 0 and row.outcome == EXACT else 0):
        for each in made:
            step(each)
    if seed == 0:
        return Objects(model=model, optimizer=optimizer)
    for each in made:
        for group in each.param_groups:
            group["lr"] = group["lr"] * 2
    return Objects(model=model, optimizer=optimizer)


def step(optimizer: optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = torch.randn_like(parameter)
            parameter.grad = gradient.to_sparse() if isinstance(optimizer, optim.SparseAdam) else gradient
    optimizer.step(lambda: torch.rand(()))
