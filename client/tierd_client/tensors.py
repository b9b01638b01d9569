"""Tensors as a shard sees them: a name, a safetensors dtype, the part that this rank holds of a global tensor.

What has no place in a shard (meta, sparse, quantized tensors, subclasses that hide their bytes) is refused by
name. A DTensor counts as its local part with its offset. Nothing here copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tierd.errors import Unsupported

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""torch dtypes by the names of https://github.com/huggingface/safetensors#format."""

DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}

WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Path parts that a wrapper (DDP, torch.compile, FSDP, activation checkpointing) puts into a parameter's name."""


@dataclass(frozen=True, slots=True)
class CapturedTensor:
    """The part of a named tensor that this rank holds: bytes to stage, or the destination of a restore.

    `tensor` is local and live, in any strides; `saved_offsets` is where it begins in `global_shape`.
    """

    name: str
    tensor: torch.Tensor
    saved_offsets: tuple[int, ...]
    global_shape: tuple[int, ...]

    @property
    def dtype(self) -> str:
        return DTYPE_NAMES[self.tensor.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def size_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    @property
    def is_whole(self) -> bool:
        return self.tensor.shape == self.global_shape

    @property
    def key(self) -> str:
        """Same key, same bytes: the name, and for a part of a tensor where it begins."""
        return self.name if self.is_whole else f"{self.name}{list(self.saved_offsets)}"


def captured(name: str, tensor: torch.Tensor) -> CapturedTensor:
    """The captured form of a live tensor. Raises Unsupported, naming it, when it has no place in a shard."""
    if is_dtensor(tensor):
        return _captured_dtensor(name, tensor)
    _check(name, tensor)
    shape = tuple(tensor.shape)
    return CapturedTensor(name, tensor.detach(), (0,) * len(shape), shape)


def _captured_dtensor(name: str, tensor: DTensor) -> CapturedTensor:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in tensor.placements):
        raise Unsupported(f"capture {name}: a DTensor with pending sums", hint="redistribute it to Shard or Replicate")
    local = local_part(tensor)
    _check(name, local)
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if tuple(shape) != tuple(local.shape):
        raise Unsupported(
            f"capture {name}: a DTensor whose local part is {list(local.shape)}, its placements say {list(shape)}",
            hint="strided sharding is not supported",
        )
    return CapturedTensor(name, local, tuple(offsets), tuple(tensor.shape))


def is_dtensor(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    if type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter:
        return False
    # Imported only by those who meet a subclass: it takes 0.6 s, and a DTensor means that it is there already.
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, sharing its memory."""
    if is_dtensor(tensor):
        return tensor._local_tensor.detach()  # pyright: ignore[reportPrivateUsage]
    return tensor.detach()


def _check(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_meta:
        raise Unsupported(f"capture {name}: a meta tensor has no bytes", hint="materialise the model first")
    if tensor.layout != torch.strided or tensor.is_quantized or is_traceable_wrapper_subclass(tensor):
        raise Unsupported(
            f"capture {name}: a {type(tensor).__qualname__} of layout {tensor.layout} and dtype {tensor.dtype} "
            "is no plain dense tensor",
            hint="sparse, quantized and wrapper tensors have no place in a safetensors file: keep their dense parts",
        )
    if tensor.dtype not in DTYPE_NAMES:
        raise Unsupported(f"capture {name}: dtype {tensor.dtype} has no place in a safetensors file")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, as flat uint8 sharing its memory."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def from_bytes(flat: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor whose bytes are `flat` (uint8, aligned to the element), sharing its memory."""
    return flat.view(dtype).view(shape)


def clean_names(names: Iterable[str]) -> dict[str, str]:
    """Each name without the parts that wrappers add. Where two would become one, both stay as they are."""
    cleaned = {name: ".".join(part for part in name.split(".") if part not in WRAPPERS) for name in names}
    seen: dict[str, int] = {}
    for clean in cleaned.values():
        seen[clean] = seen.get(clean, 0) + 1
    return {name: clean if clean and seen[clean] == 1 else name for name, clean in cleaned.items()}


def describe(dtype: str, shape: Iterable[int]) -> str:
    return f"{dtype} {list(shape)}"


def overlap(
    offsets: tuple[int, ...], shape: tuple[int, ...], other_offsets: tuple[int, ...], other_shape: tuple[int, ...]
) -> tuple[tuple[int, int], ...] | None:
    """Per dimension the global (begin, end) that two boxes share, or None when they share nothing."""
    ranges: list[tuple[int, int]] = []
    for begin, size, other_begin, other_size in zip(offsets, shape, other_offsets, other_shape, strict=True):
        low, high = max(begin, other_begin), min(begin + size, other_begin + other_size)
        if low >= high:
            return None
        ranges.append((low, high))
    return tuple(ranges)


def overlap_elements(
    offsets: tuple[int, ...], shape: tuple[int, ...], other_offsets: tuple[int, ...], other_shape: tuple[int, ...]
) -> int:
    shared = overlap(offsets, shape, other_offsets, other_shape)
    return 0 if shared is None else math.prod(high - low for low, high in shared)
