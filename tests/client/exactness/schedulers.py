"""Learning rate schedulers and gradient scalers"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn, optim
from torch.optim import lr_scheduler as lrs

from tests.client.exactness.row import EXACT, Row
from tests.support.contents import Objects


class Warmup:
    """A callable object with state."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 0.5


def sequential(optimizer: Any) -> Any:
    return lrs.SequentialLR(optimizer, [lrs.ConstantLR(optimizer), lrs.ExponentialLR(optimizer, 0.9)], [2])


def chained(optimizer: Any) -> Any:
    return lrs.ChainedScheduler([lrs.LinearLR(optimizer), lrs.StepLR(optimizer, 2)])


def scaler(**options: Any) -> Any:
    return lambda optimizer: torch.amp.GradScaler("cpu", init_scale=4.0, **options)


ROWS = [
    Row("`LambdaLR` with a function", EXACT, lambda o: lrs.LambdaLR(o, lambda step: 0.9**step)),
    Row("`LambdaLR` with a callable object", EXACT, lambda o: lrs.LambdaLR(o, Warmup())),
    Row("`MultiplicativeLR`", EXACT, lambda o: lrs.MultiplicativeLR(o, lambda step: 0.9)),
    Row("`StepLR`", EXACT, lambda o: lrs.StepLR(o, 2)),
    Row("`MultiStepLR`", EXACT, lambda o: lrs.MultiStepLR(o, [1, 2, 2])),
    Row("`ConstantLR`", EXACT, lrs.ConstantLR),
    Row("`LinearLR`", EXACT, lrs.LinearLR),
    Row("`ExponentialLR`", EXACT, lambda o: lrs.ExponentialLR(o, 0.9)),
    Row("`PolynomialLR`", EXACT, lrs.PolynomialLR),
    Row("`CosineAnnealingLR`", EXACT, lambda o: lrs.CosineAnnealingLR(o, 9)),
    Row("`CosineAnnealingWarmRestarts`", EXACT, lambda o: lrs.CosineAnnealingWarmRestarts(o, 2)),
    Row("`CyclicLR`", EXACT, lambda o: lrs.CyclicLR(o, 0.1, 0.5)),
    Row("`CyclicLR` with a scale_fn", EXACT, lambda o: lrs.CyclicLR(o, 0.1, 0.5, scale_fn=lambda x: 0.5)),
    Row("`OneCycleLR`", EXACT, lambda o: lrs.OneCycleLR(o, 0.5, 20)),
    Row("`ReduceLROnPlateau`", EXACT, lrs.ReduceLROnPlateau),
    Row("`SequentialLR`", EXACT, sequential),
    Row("`ChainedScheduler`", EXACT, chained),
    Row("`SWALR`", EXACT, lambda o: optim.swa_utils.SWALR(o, 0.05)),
    Row("`GradScaler`", EXACT, scaler()),
    Row("`GradScaler` with a growth interval", EXACT, scaler(growth_interval=2)),
    Row("scheduler without state_dict", "has no state_dict and load_state_dict", lambda o: object()),
]


def build(row: Row, seed: int, rank: int) -> Objects:
    """The scheduler of the checkpoint has taken three steps, the other none."""
    torch.default_generator.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
    scheduler = row.make(optimizer)
    if isinstance(scheduler, torch.amp.GradScaler):
        for _ in range(0 if seed else 3):
            scheduler.scale(model(torch.ones(1, 2)).sum()).backward()
            scheduler.step(optimizer)
            scheduler.update(None if row.name.endswith("interval") else 8.0)
        return Objects(model=model, optimizer=optimizer, scaler=scheduler)
    for _ in range(0 if seed or row.outcome != EXACT else 3):
        optimizer.step()
        scheduler.step(*[1.0] if isinstance(scheduler, lrs.ReduceLROnPlateau) else [])
    return Objects(model=model, optimizer=optimizer, scheduler=scheduler)
