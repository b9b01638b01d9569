"""Checks at the first snapshot that a checkpoint of a state would restore all of it.

The plan of a restore is made against the state itself: what it refuses, no restart could restore either. Optimizers
are searched for state that `optimizer.state` and `param_groups` do not show.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tierd.errors import Mismatch, Unsupported
from tierd.format.shard import TensorEntry
from tierd_client.state.dict_state import DictState
from tierd_client.state.stored_state import StoredState
from tierd_client.state.tensors import CapturedTensor, local_part
from tierd_client.state.training_state import Capturable, Captured, TrainingState

DEPTH_MAX = 4  # of the containers in an optimizer's attributes that are searched for tensors


def check_restorable(state: Capturable, captured: Captured) -> None:
    """Raises Unsupported when a checkpoint of `captured` would not restore `state`, with the reason.

    Changes nothing. Of a state that is neither a TrainingState nor a DictState, only the memory of its tensors is
    checked.
    """
    for tensor in captured.tensors:
        _check_memory(tensor)
    if isinstance(state, TrainingState):
        state.per_rank.warn_unmatched()
        for optimizer in state.optimizers:
            _check_optimizer(optimizer, state.optimizers, captured)
    if isinstance(state, TrainingState | DictState):
        available = {
            tensor.name: [
                TensorEntry(
                    name=tensor.name,
                    dtype=tensor.dtype,
                    shape=tensor.global_shape,
                    saved_offsets=(0,) * len(tensor.global_shape),
                    torch_dtype=tensor.torch_dtype,
                    offset=0,
                )
            ]
            for tensor in captured.tensors
        }
        try:
            state.plan_restore(StoredState(captured.tree, available), is_dry=True)
        except Mismatch as error:
            differences = error.message.partition("\n")[2]
            raise Unsupported(
                f"check that a checkpoint of this state can be restored: it cannot\n{differences}",
                hint="rename or remove these entries; see docs/RESUME.md",
            ) from error


def _check_memory(captured: CapturedTensor) -> None:
    """Raises Unsupported for a tensor whose storage is too small: to copy from its address would end the process."""
    tensor = captured.tensor
    if not tensor.numel():
        return
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed_bytes = (tensor.storage_offset() + last + 1) * tensor.element_size()
    if tensor.untyped_storage().nbytes() < needed_bytes:
        raise Unsupported(
            f"capture {captured.name}: the memory of this tensor was freed "
            f"({tensor.untyped_storage().nbytes()} bytes, its shape needs {needed_bytes})",
            hint="take the snapshot where its storage is in place, or leave it out of the state",
        )


def _check_optimizer(
    optimizer: torch.optim.Optimizer, optimizers: Sequence[torch.optim.Optimizer], captured: Captured
) -> None:
    """Raises Unsupported when the optimizer has state that a snapshot of its `.state` would miss."""
    kind = type(optimizer).__qualname__
    for name, value in vars(optimizer).items():
        if not isinstance(value, torch.optim.Optimizer):
            continue
        if value.state is not optimizer.state and not any(value is other for other in optimizers):
            raise Unsupported(
                f"capture the optimizer: the {kind} keeps a {type(value).__qualname__} in .{name}, "
                "with state of its own",
                hint=f"pass both: TrainingState(optimizer=[optimizer, optimizer.{name}], …)",
            )
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        _check_own_state_dict(optimizer, kind)
    captured_memory = {tensor.tensor.untyped_storage().data_ptr() for tensor in captured.tensors}
    for name, value in vars(optimizer).items():
        if name in ("state", "param_groups"):
            continue
        for tensor in _tensors(value):
            if tensor.numel() and local_part(tensor).untyped_storage().data_ptr() not in captured_memory:
                raise Unsupported(
                    f"capture the optimizer: the {kind} keeps a tensor of shape {list(tensor.shape)} in .{name}, "
                    "which is not in its .state",
                    hint=f'store it beside the optimizer: extra={{"optimizer.{name}": optimizer.{name}}}',
                )


def _check_own_state_dict(optimizer: torch.optim.Optimizer, kind: str) -> None:
    """An optimizer with a state_dict of its own may return more than a snapshot captures."""
    hint = 'store it by its own methods instead: TrainingState(optimizer=None, extra={"optimizer": optimizer}, …)'
    try:
        state = optimizer.state_dict()
    except Exception as error:  # of any kind: it is the optimizer's code
        raise Unsupported(
            f"capture the optimizer: {kind}.state_dict() raised {type(error).__qualname__}: {error}",
            hint="use an optimizer whose state_dict works on every rank at any time",
        ) from error
    known = {id(tensor) for tensor in _tensors([dict(optimizer.state), optimizer.param_groups])}
    others = sorted(map(str, state.keys() - {"state", "param_groups"}))
    if others or any(id(tensor) not in known for tensor in _tensors(state)):
        what = ", ".join(others) or "tensors that are not in its .state"
        raise Unsupported(f"capture the optimizer: {kind}.state_dict() returns {what}", hint=hint)


def _tensors(value: object, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < DEPTH_MAX and isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item, depth + 1)
    elif depth < DEPTH_MAX and isinstance(value, list | tuple | set):
        for item in value:
            yield from _tensors(item, depth + 1)
