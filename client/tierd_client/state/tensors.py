"""Tensors as a shard stores them: a name, a safetensors dtype, and the part of a global tensor that this rank holds.

Tensors that safetensors cannot store (meta, sparse, quantized, wrapper subclasses) are refused by name. A DTensor is
stored as its local part with its offset in the global tensor. Nothing here copies tensor data.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeGuard

import msgspec
import torch
from torch.nn.parameter import is_lazy
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
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
"""safetensors' names of torch dtypes, see https://github.com/huggingface/safetensors#format."""

DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}

_STORED_AS = {
    "complex128": torch.float64,
    "complex32": torch.float16,
    "float8_e8m0fnu": torch.uint8,
    "float4_e2m1fn_x2": torch.uint8,
}
VIEWED: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _STORED_AS if hasattr(torch, name)}
"""torch's dtypes that safetensors lacks, by name. A complex tensor is stored as `torch.view_as_real` of it: real and
imaginary parts in one more dimension, of 2. The others are stored as their bytes, in the same shape."""

_VIEWED_NAMES = {dtype: name for name, dtype in VIEWED.items()}

WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Path components that wrappers (DDP, torch.compile, FSDP, activation checkpointing) add to a parameter's name."""

SAMPLE_ELEMENTS = 64

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types that are never DTensors or other wrapper subclasses."""


class CapturedTensor(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The part of a named tensor that this rank holds: the source of a snapshot, or the destination of a restore.

    `tensor` is the live local tensor, with any strides. `dtype` is safetensors' name of its dtype. `saved_offsets` is
    the position of its first element in the global tensor, one number per dimension. `is_distributed`: it is the local
    part of a DTensor on a mesh of all ranks. `is_buffer`: it is a buffer of a module, which may differ between ranks.
    `torch_dtype`: the name of the live tensor's dtype if it is in VIEWED; all else describes the view of it that is
    stored.
    """

    name: str
    tensor: torch.Tensor
    dtype: str
    shape: tuple[int, ...]
    saved_offsets: tuple[int, ...]
    global_shape: tuple[int, ...]
    is_distributed: bool = False
    is_buffer: bool = False
    torch_dtype: str = ""

    @property
    def key(self) -> str:
        """The name, and for a part of a tensor its offsets. Ranks with the same key hold the same bytes."""
        return self.name if self.shape == self.global_shape else f"{self.name}{list(self.saved_offsets)}"


def capture_tensor(name: str, tensor: torch.Tensor, *, is_buffer: bool = False) -> CapturedTensor:
    """The captured form of a live tensor. Raises Unsupported, naming the tensor, when a shard cannot store it."""
    # A hot path: training waits while thousands of plain tensors pass through here. One test tells them apart.
    dtype = DTYPE_NAMES.get(tensor.dtype)
    is_plain = type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_nested
    if not is_plain or dtype is None or tensor.is_meta:
        if is_dtensor(tensor):
            return _capture_dtensor(name, tensor, is_buffer=is_buffer)
        dtype = _dtype_name(name, tensor)
        if viewed := _VIEWED_NAMES.get(tensor.dtype):
            captured = capture_tensor(name, _stored_view(name, tensor.detach()), is_buffer=is_buffer)
            return msgspec.structs.replace(captured, torch_dtype=viewed)
    if not tensor.is_contiguous():
        _check_separate_elements(name, tensor)
    shape = tuple(tensor.shape)
    local = tensor.detach() if tensor.requires_grad else tensor
    return CapturedTensor(name, local, dtype, shape, (0,) * len(shape), shape, False, is_buffer)


def _capture_dtensor(name: str, tensor: DTensor, *, is_buffer: bool) -> CapturedTensor:
    if any(placement.is_partial() for placement in tensor.placements):
        raise Unsupported(f"capture {name}: a DTensor with pending sums", hint="redistribute it to Shard or Replicate")
    local = local_part(tensor)
    dtype, shape = _dtype_name(name, local), tuple(local.shape)
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise Unsupported(f"capture {name}: a DTensor on a mesh that this rank does not belong to")
    box = _local_box(tensor.shape, tuple(mesh.shape), tuple(coordinate), tensor.placements)
    if box is None:
        raise Unsupported(
            f"capture {name}: a DTensor placed {tensor.placements}: this rank holds several separate pieces of it",
            hint="a shard stores one piece of a tensor: shard another dimension, or change the order of the mesh",
        )
    offsets, sizes = box
    if sizes != shape:
        raise Unsupported(
            f"capture {name}: a DTensor whose local part is {list(shape)}, its placements {tensor.placements} "
            f"say {list(sizes)}",
            hint="make its dimensions divisible by the mesh",
        )
    viewed, global_shape = _VIEWED_NAMES.get(local.dtype, ""), tuple(tensor.shape)
    if viewed:
        local = _stored_view(name, local)
        parts = tuple(local.shape[len(shape) :])  # (2,) of a complex tensor
        shape, offsets, global_shape = shape + parts, offsets + (0,) * len(parts), global_shape + parts
    # On a mesh of some ranks only, another mesh may hold a DTensor of this name: its copy, or an expert of its own.
    has_all_ranks = mesh.size() == torch.distributed.get_world_size()
    return CapturedTensor(name, local, dtype, shape, offsets, global_shape, has_all_ranks, is_buffer, viewed)


def _stored_view(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """What is stored of a tensor whose dtype is in VIEWED, in the same memory."""
    if not tensor.is_complex():
        return tensor.view(torch.uint8)
    if tensor.is_conj() or tensor.is_neg():
        raise Unsupported(
            f"capture {name}: a conjugated view of {tensor.dtype}", hint="store tensor.resolve_conj().resolve_neg()"
        )
    return torch.view_as_real(tensor)


@functools.lru_cache(maxsize=1 << 14)  # a state has thousands of DTensors of few shapes, captured at each snapshot
def _local_box(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Placement, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(offsets, shape) of the part of a tensor of `shape` that the rank at `coordinate` of the mesh holds. None when
    that rank holds several separate pieces.

    torch's compute_local_shape_and_global_offset gives only the offset of the first piece. FSDP over tensor parallel
    shards a dimension twice: _StridedShard cuts it into `split_factor` pieces and takes a part of each.
    """
    ranges_of = [[range(size)] for size in shape]  # by dimension
    for count, index, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if placement.is_replicate():
            continue
        dim: int = placement.dim  # pyright: ignore[reportAttributeAccessIssue]
        factor: int = getattr(placement, "split_factor", 1)
        pieces = [_chunk(ranges_of[dim], factor, piece) for piece in range(factor)]
        ranges_of[dim] = [part for piece in pieces for part in _chunk(piece, count, index)]
    if any(part.stop != following.start for ranges in ranges_of for part, following in itertools.pairwise(ranges)):
        return None
    # torch places an empty part at the end of its dimension.
    begins = [ranges[0].start if ranges else size for ranges, size in zip(ranges_of, shape, strict=True)]
    return tuple(begins), tuple(sum(map(len, ranges)) for ranges in ranges_of)


def _chunk(ranges: list[range], count: int, index: int) -> list[range]:
    """Chunk `index` of `count`, cut as torch.chunk cuts: equal sizes, but the last chunks may be smaller or empty."""
    size = -(-sum(map(len, ranges)) // count)
    begin = index * size  # relative to the next range
    chunk: list[range] = []
    for positions in ranges:
        if part := positions[max(begin, 0) : max(begin + size, 0)]:
            chunk.append(part)
        begin -= len(positions)
    return chunk


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether `capture_tensor` takes a tensor of a type in PLAIN for certain. False also for some that it takes."""
    return (
        tensor.dtype in DTYPE_NAMES
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_meta
        and tensor.is_contiguous()
    )


def is_dtensor(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    if type(tensor) in PLAIN:
        return False
    # Not imported here: the import takes 0.6 s, and a DTensor exists only where the module is loaded already.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, sharing its memory."""
    if is_dtensor(tensor):
        return tensor._local_tensor.detach()  # pyright: ignore[reportPrivateUsage]
    return tensor.detach() if tensor.requires_grad else tensor


def _dtype_name(name: str, tensor: torch.Tensor) -> str:
    """safetensors' name of the dtype. Raises Unsupported for a tensor that a shard cannot store."""
    if is_lazy(tensor):
        raise Unsupported(f"capture {name}: a lazy module has no shape yet", hint="run one forward pass first")
    if tensor.is_meta:
        raise Unsupported(f"capture {name}: a meta tensor has no bytes", hint="materialise the model first")
    is_subclass = type(tensor) not in PLAIN
    # A wrapper has no memory of its own: to copy from its address would end the process.
    is_wrapper = is_subclass and (is_traceable_wrapper_subclass(tensor) or not has_memory(tensor))
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or is_wrapper:
        raise Unsupported(
            f"capture {name}: a {type(tensor).__qualname__} of layout {tensor.layout} and dtype {tensor.dtype} "
            "is not a plain dense tensor",
            hint="safetensors cannot store sparse, quantized, nested and wrapper tensors: keep their dense parts",
        )
    dtype = _STORED_AS.get(_VIEWED_NAMES.get(tensor.dtype, ""), tensor.dtype)
    if dtype not in DTYPE_NAMES:
        raise Unsupported(f"capture {name}: safetensors has no dtype for {tensor.dtype}")
    return DTYPE_NAMES[dtype]


def _check_separate_elements(name: str, tensor: torch.Tensor) -> None:
    """Raises Unsupported for an expanded or overlapping tensor: a restore could not write its elements one by one."""
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < extent:
            raise Unsupported(
                f"capture {name}: several elements share one memory location "
                f"(shape {list(tensor.shape)}, strides {list(tensor.stride())})",
                hint="store tensor.contiguous() there instead",
            )
        extent += (size - 1) * stride


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor has memory of its own: a wrapper, a sparse and a meta tensor have none."""
    try:
        return tensor.data_ptr() != 0 or not tensor.numel()
    except RuntimeError:  # torch's answer for a tensor without storage
        return False


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, as a flat uint8 tensor that shares its memory."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))  # reshape keeps the stride of a single element
    return flat.view(torch.uint8)


def sample_of(tensor: torch.Tensor) -> int:
    """CRC64NVME of at most 127 evenly spaced elements: a cheap way to see that two tensors differ."""
    flat = tensor.detach().reshape(-1)
    elements = flat[:: max(1, flat.numel() // SAMPLE_ELEMENTS)].cpu().resolve_conj().resolve_neg().contiguous()
    return checksum.crc64nvme(as_bytes(elements).numpy().data)


def contiguous_strides(shape: Sequence[int]) -> list[int]:
    """Strides, in elements, of a tensor of this shape in C order."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * max(shape[axis], 1)
    return strides


def clean_names(names: Iterable[str]) -> dict[str, str]:
    """Each name without the components that wrappers add. Names that would become equal stay as they are."""
    names = list(names)
    joined = "\n".join(names)
    if not any(wrapper in joined for wrapper in WRAPPERS):
        return dict(zip(names, names, strict=True))
    cleaned = {name: ".".join(part for part in name.split(".") if part not in WRAPPERS) for name in names}
    counts = Counter(cleaned.values())
    return {name: clean if clean and counts[clean] == 1 else name for name, clean in cleaned.items()}


def describe(dtype: str, shape: Iterable[int], torch_dtype: str = "") -> str:
    return f"{dtype} {list(shape)}" + (f" of {torch_dtype}" if torch_dtype else "")


def overlap(
    offsets: tuple[int, ...], shape: tuple[int, ...], other_offsets: tuple[int, ...], other_shape: tuple[int, ...]
) -> tuple[tuple[int, int], ...] | None:
    """The global (begin, end) per dimension that two boxes share, or None when they share no element."""
    ranges: list[tuple[int, int]] = []
    for begin, size, other_begin, other_size in zip(offsets, shape, other_offsets, other_shape, strict=True):
        low, high = max(begin, other_begin), min(begin + size, other_begin + other_size)
        if low >= high:
            return None
        ranges.append((low, high))
    return tuple(ranges)
