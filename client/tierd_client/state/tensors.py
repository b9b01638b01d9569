"""Tensors as a shard sees them: a name, a safetensors dtype, the part that this rank holds of a global tensor.

What has no place in a shard (meta, sparse, quantized tensors, subclasses that hide their bytes) is refused by
name. A DTensor counts as its local part with its offset. Nothing here copies.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeGuard

import msgspec
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tierd.errors import Unsupported
from tierd.format import checksum

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

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

SAMPLE_ELEMENTS = 64

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types whose tensors are no more than they seem."""


class CapturedTensor(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The part of a named tensor that this rank holds: bytes to stage, or the destination of a restore.

    `tensor` is local and live, in any strides, of `dtype` (safetensors' name) and `shape`; `saved_offsets` is where it
    begins in `global_shape`. `is_distributed`: a DTensor, which says itself what other ranks hold of it. `is_buffer`:
    of a module; ranks may have different ones.
    """

    name: str
    tensor: torch.Tensor
    dtype: str
    shape: tuple[int, ...]
    saved_offsets: tuple[int, ...]
    global_shape: tuple[int, ...]
    is_distributed: bool = False
    is_buffer: bool = False

    @property
    def size_bytes(self) -> int:
        return self.tensor.nbytes

    @property
    def is_whole(self) -> bool:
        return self.shape == self.global_shape

    @property
    def key(self) -> str:
        """Same key, same bytes: the name, and for a part of a tensor where it begins."""
        return self.name if self.is_whole else f"{self.name}{list(self.saved_offsets)}"


def captured(name: str, tensor: torch.Tensor, *, is_buffer: bool = False) -> CapturedTensor:
    """The captured form of a live tensor. Raises Unsupported, naming it, when it has no place in a shard."""
    # Nearly all are plain, there may be very many, and training waits: of those nothing is asked twice.
    dtype = DTYPE_NAMES.get(tensor.dtype)
    if type(tensor) not in PLAIN or dtype is None or tensor.layout is not torch.strided or tensor.is_meta:
        if is_dtensor(tensor):
            return _captured_dtensor(name, tensor, is_buffer=is_buffer)
        dtype = _dtype(name, tensor)
    shape = tuple(tensor.shape)
    local = tensor.detach() if tensor.requires_grad else tensor
    return CapturedTensor(name, local, dtype, shape, (0,) * len(shape), shape, False, is_buffer)


def _captured_dtensor(name: str, tensor: DTensor, *, is_buffer: bool) -> CapturedTensor:
    if any(placement.is_partial() for placement in tensor.placements):
        raise Unsupported(f"capture {name}: a DTensor with pending sums", hint="redistribute it to Shard or Replicate")
    local = local_part(tensor)
    dtype, shape = _dtype(name, local), tuple(local.shape)
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise Unsupported(f"capture {name}: a DTensor on a mesh that this rank is no part of")
    box = _box(tensor.shape, tuple(mesh.shape), tuple(coordinate), tensor.placements)
    if box is None:
        raise Unsupported(
            f"capture {name}: a DTensor placed {tensor.placements}, so that this rank holds it in pieces",
            hint="a shard has room for one piece of a tensor: shard another dimension, or order the mesh otherwise",
        )
    begins, sizes = box
    if sizes != shape:
        raise Unsupported(
            f"capture {name}: a DTensor whose local part is {list(shape)}, its placements {tensor.placements} "
            f"say {list(sizes)}",
            hint="make its dimensions divisible by the mesh",
        )
    return CapturedTensor(name, local, dtype, shape, begins, tuple(tensor.shape), True, is_buffer)


Ranges = list[tuple[int, int]]


@functools.lru_cache(maxsize=1 << 14)  # a state has thousands of DTensors, of few shapes, and asks at each snapshot
def _box(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Placement, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(where it begins, its shape) of the part of a tensor of `shape` that the rank at `coordinate` of the mesh holds.
    None: it holds several.

    torch's compute_local_shape_and_global_offset says only where the first begins. FSDP over tensor parallel shards a
    dimension twice, the inner one first: its _StridedShard cuts into `split_factor` pieces and takes a part of each.
    """
    found: list[Ranges] = [[(0, size)] for size in shape]
    for count, index, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if placement.is_replicate():
            continue
        dim: int = placement.dim  # pyright: ignore[reportAttributeAccessIssue]
        factor: int = getattr(placement, "split_factor", 1)
        whole, found[dim] = found[dim], []
        for piece in range(factor):
            for begin, end in _chunk(_chunk(whole, factor, piece), count, index):
                _append(found[dim], begin, end)
    if any(len(ranges) > 1 for ranges in found):
        return None
    # A part without elements lies at the end, as torch has it.
    box = [ranges[0] if ranges else (size, size) for ranges, size in zip(found, shape, strict=True)]
    return tuple(begin for begin, _ in box), tuple(end - begin for begin, end in box)


def _chunk(ranges: Ranges, count: int, index: int) -> Ranges:
    """The part `index` of `count`, as torch.chunk cuts: all parts of one size, but the last ones smaller or empty."""
    size = -(-sum(end - begin for begin, end in ranges) // count)
    found: Ranges = []
    at = 0
    for begin, end in ranges:
        low, high = max(index * size, at), min((index + 1) * size, at + end - begin)
        if low < high:
            _append(found, begin + low - at, begin + high - at)
        at += end - begin
    return found


def _append(ranges: Ranges, begin: int, end: int) -> None:
    """To the last one, where that ends at `begin`."""
    if ranges and ranges[-1][1] == begin:
        ranges[-1] = (ranges[-1][0], end)
    else:
        ranges.append((begin, end))


def is_dtensor(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    if type(tensor) in PLAIN:
        return False
    # Never imported for the question: that takes 0.6 s, and where there is a DTensor it is there already.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, sharing its memory."""
    if is_dtensor(tensor):
        return tensor._local_tensor.detach()  # pyright: ignore[reportPrivateUsage]
    return tensor.detach()


def _dtype(name: str, tensor: torch.Tensor) -> str:
    """safetensors' name of it. Raises Unsupported for what has no place in a shard."""
    if tensor.is_meta:
        raise Unsupported(f"capture {name}: a meta tensor has no bytes", hint="materialise the model first")
    if tensor.layout != torch.strided or tensor.is_quantized or _hides_its_bytes(tensor):
        raise Unsupported(
            f"capture {name}: a {type(tensor).__qualname__} of layout {tensor.layout} and dtype {tensor.dtype} "
            "is no plain dense tensor",
            hint="sparse, quantized and wrapper tensors have no place in a safetensors file: keep their dense parts",
        )
    if tensor.dtype not in DTYPE_NAMES:
        raise Unsupported(f"capture {name}: dtype {tensor.dtype} has no place in a safetensors file")
    return DTYPE_NAMES[tensor.dtype]


def _hides_its_bytes(tensor: torch.Tensor) -> bool:
    return type(tensor) not in PLAIN and is_traceable_wrapper_subclass(tensor)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, as flat uint8 sharing its memory."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def sample_of(tensor: torch.Tensor) -> int:
    """CRC64NVME of a few elements, spread evenly: tensors with different ones differ, at the cost of a glance."""
    flat = tensor.detach().reshape(-1)
    picked = flat[:: max(1, flat.numel() // SAMPLE_ELEMENTS)].cpu().resolve_conj().resolve_neg().contiguous()
    return checksum.crc64nvme(as_bytes(picked).numpy().data)


def contiguous_strides(shape: Sequence[int]) -> list[int]:
    """In elements, of a tensor of this shape in C order."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * max(shape[axis], 1)
    return strides


def clean_names(names: Iterable[str]) -> dict[str, str]:
    """Each name without the parts that wrappers add. Where two would become one, both stay as they are."""
    names = list(names)
    together = "\n".join(names)
    if not any(part in together for part in WRAPPERS):
        return dict(zip(names, names, strict=True))
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
