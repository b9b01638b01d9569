"""A training on a GPU, and the state that its checkpoint is compared with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tierd_client import TrainingState

DEVICE = torch.device("cuda", 0)
WIDTH = 2048  # with Adam's moments 200 MB, whose copy takes longer than the next step
OPTIMIZERS: dict[str, dict[str, Any]] = {"foreach": {"foreach": True}, "fused": {"fused": True}}

needs_cuda = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Training:
    """Linear layers with BatchNorm, whose buffers forward changes, and dropout, which uses the generator of the GPU."""

    def __init__(
        self,
        *,
        width: int = WIDTH,
        seed: int = 0,
        options: dict[str, Any] | None = None,
        is_scaled: bool = False,
        compiled: dict[str, Any] | None = None,
        devices: tuple[torch.device, ...] = (DEVICE,),
    ) -> None:
        torch.manual_seed(seed)
        layers = [
            torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.1))
            for _ in range(4)
        ]
        self.homes = [devices[index % len(devices)] for index in range(len(layers))]
        for layer, home in zip(layers, self.homes, strict=True):
            layer.to(home)
        self.model = torch.nn.ModuleList(layers)
        self.run = self.forward if compiled is None else torch.compile(self.forward, **compiled)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, **(options or {"fused": True}))
        self.scaler = torch.amp.GradScaler("cuda") if is_scaled else None
        self.x = torch.randn(64, width, device=self.homes[0])
        self.state = TrainingState(model=self.model, optimizer=self.optimizer, scaler=self.scaler)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, home in zip(self.model, self.homes, strict=True):
            x = layer(x.to(home))
        return x.square().mean()

    def train(self, steps: int) -> list[float]:
        """The losses, read at the end so that nothing waits for the GPU in between."""
        losses: list[torch.Tensor] = []
        for _ in range(steps):
            if self.scaler is None:
                loss = self.run(self.x)
                loss.backward()
                self.optimizer.step()
            else:
                with torch.autocast("cuda", torch.float16):
                    loss = self.run(self.x)
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
            self.optimizer.zero_grad()
            losses.append(loss.detach().clone())
        return [loss.item() for loss in losses]

    def now(self) -> dict[str, torch.Tensor]:
        """A copy of every tensor of the state at this point of the current stream."""
        return {one.name: one.tensor.clone() for one in self.state.capture(0, 1).tensors}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    wrong = [name for name, tensor in expected.items() if not torch.equal(found[name].cpu(), tensor.cpu())]
    assert not wrong
