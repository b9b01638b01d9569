"""Objects with state_dict and load_state_dict, in `extra`"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from tests.client.exactness.row import EXACT, Row
from tests.support.contents import Objects
from tests.support.random_values import Stateful


class Raising(Stateful):
    """A state_dict that raises."""

    def state_dict(self) -> Any:
        raise KeyError("position")


ROWS = [
    Row("state that is a dict", EXACT, lambda: Stateful({"position": 3, "order": torch.arange(4)})),
    Row("state that is a tensor", EXACT, lambda: Stateful(torch.rand(3))),
    Row("state that is an array", EXACT, lambda: Stateful(np.arange(3.0))),
    Row("state that is a number or a tuple", EXACT, lambda: Stateful((1, 2.5, None))),
    Row("a module", EXACT, lambda: nn.Linear(2, 2)),
    Row("an optimizer", EXACT, lambda: torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.5)),
    Row(
        "a scheduler",
        EXACT,
        lambda: torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5), 7),
    ),
    Row("a list of such objects", "Stateful has no safe form", lambda: [Stateful(1)]),
    Row(
        "state with a value without a form",
        "extra.object.a: builtins.object has no safe form",
        lambda: Stateful({"a": object()}),
    ),
    Row(
        "a state_dict that raises",
        "capture extra.object: its state_dict raised KeyError: 'position'",
        lambda: Raising(1),
    ),
]


def build(row: Row, seed: int, rank: int) -> Objects:
    torch.default_generator.manual_seed(seed)
    value = row.make()
    if seed and isinstance(value, Stateful):
        value.value = "another"
    if seed and isinstance(value, torch.optim.Optimizer):
        value.param_groups[0]["lr"] = 9.0
    if seed and isinstance(value, torch.optim.lr_scheduler.StepLR):
        value.step_size = 1
    return Objects(model=nn.Linear(2, 2), extra={"object": value})
