"""States to save and to restore: a model with its Adam moments, of any size and in three shapes. The same arguments
give the same bytes in every process, and so does every change.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rounds import MIB, ROOT

sys.path[:0] = [str(ROOT), str(ROOT / "client"), str(ROOT / "examples")]

from train_gpt import GPT, Shape, build_optimizer  # noqa: E402  # pyright: ignore[reportMissingImports]

MANY_PARAMETERS = 5000  # with two moments and a step each: 20,000 tensors
LARGE_PARAMETERS = 1


@dataclass(frozen=True)
class State:
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that the state dicts hold, none twice."""
        moments = [tensor for entry in self.optimizer.state.values() for tensor in entry.values()]
        return [parameter.detach() for parameter in self.model.parameters()] + moments

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def dicts(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def change(self) -> None:
        """Every tensor, as training would, and needing no gradients."""
        torch._foreach_add_(self.tensors, 1e-3)


WIDTHS = {2048: 1024, 300: 768, 100: 512, 0: 256}
"""MiB of state from which on a GPT is as wide: GPT-2's medium and small, and smaller ones with as few layers."""


def gpt(mib: int) -> torch.nn.Module:
    width = next(width for least, width in WIDTHS.items() if mib >= least)
    layer_bytes = 12 * width * width * 4 * 3
    return GPT(Shape(layers=max(1, round(mib * MIB / layer_bytes)), heads=8, width=width))


def parameters(count: int, mib: int) -> torch.nn.Module:
    length = mib * MIB // (4 * 3 * count)
    return torch.nn.ParameterList([torch.nn.Parameter(torch.randn(length)) for _ in range(count)])


SHAPES: dict[str, Callable[[int], torch.nn.Module]] = {
    "gpt": gpt,
    "many": lambda mib: parameters(MANY_PARAMETERS, mib),
    "large": lambda mib: parameters(LARGE_PARAMETERS, mib),
}


def build_state(mib: int, shape: str = "gpt") -> State:
    """Of about `mib` in all."""
    torch.manual_seed(0)
    model = SHAPES[shape](mib)
    optimizer = build_optimizer(model, 1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return State(model, optimizer)
