"""Which tensors may be copied while training goes on, and what detects that they were changed meanwhile.

Forward and backward read parameters and optimizer state; `Optimizer.step` changes them, and runs our hook first. Any
other change advances torch's version counters, which in-place operations do **when they are done**: the counters are
therefore compared on the training thread, where no operation is half done at that moment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tierd_client.snapshot.copying import LARGE_BYTES
from tierd_client.state.tensors import is_dtensor, local_part
from tierd_client.state.training_state import Captured

DEFERRED_BYTES_MIN = LARGE_BYTES  # in host memory; below, handing the copy to a thread costs more than the copy

# A step that runs hooks is this wrapper; older versions of torch take it away when torch.compile is first used.
_runs_hooks_code = Optimizer.profile_hook_step(lambda: None).__code__


class Guard:
    """Calls `before_step` before any optimizer of this process changes a tensor, on the thread that steps it."""

    def __init__(self, before_step: Callable[[], None]) -> None:
        self._before_step = before_step
        self._pid = os.getpid()
        # For all optimizers: another one may step the same parameters. Never traced by torch.compile, since it waits.
        hook: Any = torch.compiler.disable(self._on_step)
        self._hook = register_optimizer_step_pre_hook(hook)

    def _on_step(self, optimizer: Optimizer, arguments: Any, options: Any) -> None:
        if os.getpid() == self._pid:  # a forked child has no threads that copy, and its own memory
            self._before_step()

    def close(self) -> None:
        self._hook.remove()


class Watch:
    """Records version counters now. `tensors`: (name, live tensor, the part of it that is copied)."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
        # A DTensor counts its own changes, its local part counts those that bypass it, an alias may count for itself.
        counted = [(name, (live, _local(live), copied)) for name, live, copied in tensors]
        self._counts = [(name, aliases, _changes(aliases)) for name, aliases in counted]

    def changed(self) -> list[str]:
        """Names of the tensors that an in-place operation has changed since. Changes through `.data`, `numpy()` or a
        bare address advance no counter and are not detected."""
        return [name for name, aliases, count in self._counts if _changes(aliases) != count]


def _changes(aliases: Iterable[torch.Tensor]) -> int:
    return sum(tensor._version for tensor in aliases)  # counters only increase: an equal sum means no change


def deferrable(captured: Captured, optimizers: Iterable[Optimizer]) -> dict[str, torch.Tensor]:
    """Names of the captured tensors that only a step of these guarded optimizers changes, each with the live tensor."""
    guarded = {_local(live).data_ptr(): live for optimizer in optimizers for live in _tensors(optimizer)}
    deferred: dict[str, torch.Tensor] = {}
    for source in captured.tensors:
        tensor = source.tensor
        is_large = tensor.nbytes >= DEFERRED_BYTES_MIN and tensor.is_cpu
        if not (is_large or tensor.is_cuda) or tensor.is_inference():  # an inference tensor has no version counter
            continue
        live = guarded.get(tensor.data_ptr())  # no two devices share an address
        # Defer only tensors that are exactly one guarded tensor's memory.
        if live is not None and _local(live).nbytes == tensor.nbytes:
            deferred[source.name] = live
    return deferred


def is_guarded(optimizer: Optimizer) -> bool:
    """Whether a step pre-hook runs before every change that the optimizer makes."""
    if any(group.get("capturable") for group in optimizer.param_groups):
        return False  # its step may be part of a CUDA graph, and the replay of a graph runs no hook
    if getattr(type(optimizer).step, "__code__", None) is _runs_hooks_code:
        return True
    inner = getattr(optimizer, "optimizer", None)  # as in accelerate's AcceleratedOptimizer
    return isinstance(inner, Optimizer) and inner is not optimizer and is_guarded(inner)


def _tensors(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    for entries in optimizer.state.values():
        yield from (value for value in entries.values() if isinstance(value, torch.Tensor))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return local_part(tensor) if is_dtensor(tensor) else tensor
