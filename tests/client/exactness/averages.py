"""Averages of the model (`ema`)"""

from __future__ import annotations

import collections
import copy
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.client.exactness.row import EXACT, Row
from tests.support.contents import Objects
from tests.support.random_values import Stateful


def updated(average: Any, model: nn.Module) -> Any:
    average.update_parameters(model)
    return average


def clones(model: nn.Module) -> dict[str, Any]:
    return {name: tensor + 1 for name, tensor in model.state_dict().items()}


ROWS = [
    Row("`AveragedModel`", EXACT, lambda m: updated(AveragedModel(m), m)),
    Row("`AveragedModel` with buffers", EXACT, lambda m: updated(AveragedModel(m, use_buffers=True), m)),
    Row(
        "`AveragedModel` of an EMA",
        EXACT,
        lambda m: updated(AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9)), m),
    ),
    Row("a copy of the model", EXACT, copy.deepcopy),
    Row("the model itself", EXACT, lambda m: m),
    Row("a dict of tensors", EXACT, clones),
    Row("a dict of tensors that share the model's memory", EXACT, lambda m: dict(m.state_dict())),
    Row("an OrderedDict", EXACT, lambda m: collections.OrderedDict(clones(m))),
    Row("a dict with other values beside the tensors", EXACT, lambda m: {"decay": 0.9, "shadow": clones(m)}),
    Row(
        "an object with state_dict and load_state_dict", EXACT, lambda m: Stateful({"shadow": clones(m), "updates": 3})
    ),
    Row(
        "a list of tensors",
        "TrainingState(ema=…): list is no module, stateful object or dict",
        lambda m: [torch.ones(2)],
    ),
    Row("a dict with a function", "ema.decay: builtins.function has no safe form", lambda m: {"decay": lambda: 1}),
]


def build(row: Row, seed: int, rank: int) -> Objects:
    torch.default_generator.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    return Objects(model=model, ema=row.make(model))
