"""What differs between two ranks"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.client.exactness.models import ExtraState
from tests.client.exactness.row import EXACT, Row
from tests.support.contents import Objects
from tests.support.random_values import Stateful

DIFFERS = "it differs between the 2 ranks that saved the checkpoint"


class Reshardable(Stateful):
    """Takes the states of all ranks."""

    def load_state_dicts(self, states: list[Any]) -> None:
        self.value = states[0]


ROWS = [
    Row("a number in `extra`", EXACT, lambda rank: {"extra": {"seen": rank}}, DIFFERS),
    Row(
        "a number in `extra` of another type: 1, 1.0 and True",
        EXACT,
        lambda rank: {"extra": {"seen": [1, True][rank]}},
        DIFFERS,
    ),
    Row("the sign of zero in `extra`", EXACT, lambda rank: {"extra": {"seen": [0.0, -0.0][rank]}}, DIFFERS),
    Row("a tensor in `extra`", EXACT, lambda rank: {"extra": {"seen": torch.full((2,), float(rank))}}, DIFFERS),
    Row("a module in `extra`", EXACT, lambda rank: {"extra": {"critic": filled(nn.Linear(2, 2), rank)}}, DIFFERS),
    Row(
        "the position of a data loader",
        EXACT,
        lambda rank: {"dataloader": Stateful({"at": rank})},
        "give it load_state_dicts",
    ),
    Row("equal positions of a data loader", EXACT, lambda rank: {"dataloader": Stateful({"at": 3})}),
    Row(
        "a data loader with load_state_dicts, equal positions",
        EXACT,
        lambda rank: {"dataloader": Reshardable({"at": 3})},
    ),
    Row(
        "a number in the state of a scheduler",
        EXACT,
        lambda rank: {"scheduler": Stateful({"best": float(rank)})},
        DIFFERS,
    ),
    Row(
        "a tensor in the state of a scheduler",
        "scheduler.best to a rank: ranks 0 and 1 hold different tensors",
        lambda rank: {"scheduler": Stateful({"best": torch.tensor(float(rank))})},
    ),
    Row(
        "the scale of a gradient scaler",
        EXACT,
        lambda rank: {"scaler": torch.amp.GradScaler("cpu", init_scale=2.0 ** (rank + 1))},
        DIFFERS,
    ),
    Row("the learning rate", EXACT, lambda rank: {"lr": 0.5 + rank}, DIFFERS),
    Row("weights", "ranks 0 and 1 hold different tensors", lambda rank: {"model": filled(nn.Linear(2, 2), rank)}),
    Row(
        "shapes of weights",
        "ranks 0 and 1 hold different tensors",
        lambda rank: {"model": nn.Linear(2, 2 + rank, bias=False)},
    ),
    Row(
        "an average",
        "ranks 0 and 1 hold different tensors",
        lambda rank: {"ema": {"weight": torch.full((2,), float(rank))}},
    ),
    Row(
        "an average that is a module",
        "ranks 0 and 1 hold different tensors",
        lambda rank: {"ema": filled(nn.Linear(2, 2), rank)},
    ),
    Row(
        "weights with their moments, named in `per_rank`",
        EXACT,
        lambda rank: {"model": filled(nn.Linear(2, 2), rank), "options": {"per_rank": ["model.weight", "model.b*"]}},
        DIFFERS,
    ),
    Row(
        "equal weights, named in `per_rank`",
        EXACT,
        lambda rank: {"model": filled(nn.Linear(2, 2), 5), "options": {"per_rank": ["model"]}},
    ),
    Row(
        "statistics of BatchNorm, named in `per_rank`",
        EXACT,
        lambda rank: {"model": statistics(rank), "options": {"per_rank": ["model.*running_*"]}},
        DIFFERS,
    ),
    Row(
        "an average, named in `per_rank`",
        EXACT,
        lambda rank: {"ema": {"weight": torch.full((2,), float(rank))}, "options": {"per_rank": ["ema.weight"]}},
        DIFFERS,
    ),
    Row(
        "an average that is a module, named in `per_rank`",
        EXACT,
        lambda rank: {"ema": filled(nn.Linear(2, 2), rank), "options": {"per_rank": ["ema"]}},
        DIFFERS,
    ),
    Row(
        "a tensor in the state of a scheduler, named in `per_rank`",
        EXACT,
        lambda rank: {
            "scheduler": Stateful({"best": torch.tensor(float(rank))}),
            "options": {"per_rank": ["scheduler.*"]},
        },
        DIFFERS,
    ),
    Row("extra state of the model", EXACT, lambda rank: {"model": ExtraState({"amax": rank})}, DIFFERS),
]


def filled(module: nn.Module, value: float) -> nn.Module:
    for parameter in module.parameters():
        nn.init.constant_(parameter, value)
    return module


def statistics(rank: int) -> nn.Module:
    norm = nn.BatchNorm1d(2)
    norm(torch.arange(6.0).reshape(3, 2) * (rank + 1))
    return norm


def build(row: Row, seed: int, rank: int) -> Objects:
    torch.default_generator.manual_seed(seed)
    parts = row.make(rank)
    model = parts.pop("model", None) or nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=parts.pop("lr", 0.1)) if list(model.parameters()) else None
    if seed and "options" in parts:
        for tensor in model.state_dict().values():
            tensor.fill_(77)
    if row.name.startswith("weights with their moments"):
        optimizer = torch.optim.Adam(model.parameters())
        sum((rank + seed + 1) * parameter.sum() for parameter in model.parameters()).backward()
        optimizer.step()
    if seed:
        for value in parts.values():
            if isinstance(value, Stateful):
                value.value = "another"
    if hasattr(model, "value") and seed:
        model.value = "another"
    return Objects(model=model, optimizer=optimizer, **parts)
