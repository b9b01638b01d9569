"""What may be copied while training goes on, and what keeps it unchanged until it has been copied.

Forward and backward read parameters and optimizer state; `Optimizer.step` changes them, and runs our hook first.
Whoever changes them besides is seen by torch's version counters, which in-place operations advance **when they are
done**: so they are compared on the thread that trains, where no operation is half-way at that moment.
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

DEFERRED_BYTES_MIN = LARGE_BYTES  # what is smaller, in host memory, is copied sooner than it is handed to a thread

# A step that runs hooks is this wrapper; older versions of torch take it away when torch.compile is first used.
_runs_hooks_code = Optimizer.profile_hook_step(lambda: None).__code__


class Guard:
    """Calls `before_step` before any optimizer of this process changes a tensor, on the thread that steps it."""

    def __init__(self, before_step: Callable[[], None]) -> None:
        self._before_step = before_step
        self._pid = os.getpid()
        # Of all optimizers: another one may step the same parameters. Never traced, for it waits.
        hook: Any = torch.compiler.disable(self._on_step)
        self._hook = register_optimizer_step_pre_hook(hook)

    def _on_step(self, optimizer: Optimizer, arguments: Any, options: Any) -> None:
        if os.getpid() == self._pid:  # a forked child has none of the threads that copy, and memory of its own
            self._before_step()

    def close(self) -> None:
        self._hook.remove()


class Watch:
    """Tensors as they are now: (name, the live object, what is copied of it)."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
        # A DTensor counts its own changes, its local part counts those made past it, an alias may count for itself.
        counters = [(name, (live, _local(live), copied)) for name, live, copied in tensors]
        self._seen = [(name, several, _changes(several)) for name, several in counters]

    def changed(self) -> list[str]:
        """Names of those that an in-place operation has changed since. What goes through `.data`, `numpy()` or a bare
        address advances no counter."""
        return [name for name, several, before in self._seen if _changes(several) != before]


def _changes(several: Iterable[torch.Tensor]) -> int:
    return sum(one._version for one in several)  # each only grows


def deferrable(captured: Captured, optimizers: Iterable[Optimizer]) -> dict[str, torch.Tensor]:
    """Names of the captured tensors that only a step of these optimizers changes, each with the live object. They must
    be guarded."""
    by_address = {_local(live).data_ptr(): live for one in optimizers for live in _tensors(one)}
    found: dict[str, torch.Tensor] = {}
    for one in captured.tensors:
        if not _is_worth_it(one.tensor):
            continue
        live = by_address.get(one.tensor.data_ptr())  # no two devices share an address
        # A part of a guarded tensor is not worth a thought; one that holds more than it is not guarded as a whole.
        if live is not None and _local(live).nbytes == one.tensor.nbytes:
            found[one.name] = live
    return found


def is_guarded(optimizer: Optimizer) -> bool:
    """Whether every change that the optimizer makes is announced to a step pre-hook."""
    if any(group.get("capturable") for group in optimizer.param_groups):
        return False  # its step may be part of a CUDA graph, and a graph that is replayed runs no hook
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


def _is_worth_it(tensor: torch.Tensor) -> bool:
    is_large = tensor.nbytes >= DEFERRED_BYTES_MIN and tensor.is_cpu
    return (is_large or tensor.is_cuda) and not tensor.is_inference()  # which has no version counter
