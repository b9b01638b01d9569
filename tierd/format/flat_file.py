"""The flat file of a training: step, number of parameters n, then n weights, n values of m and n of v.

    int32 step | int32 n | n × float32 weights | n × float32 m | n × float32 v        little-endian, 8 + 12 × n bytes

m and v are Adam's `exp_avg` and `exp_avg_sq`. The file names no parameters: they follow each other in the order in
which the optimizer holds them, each in C order, or as a list of names says.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tierd.errors import Corrupt, Unsupported
from tierd.format.tagged import Json
from tierd.format.text import listed
from tierd.format.whole import AssembledFile, WholeTensor, whole_in

HEADER = struct.Struct("<ii")
INT32_MAX = (1 << 31) - 1
ITEM_BYTES = 4
ARRAYS = 3  # weights, m and v
MOMENTS = ("exp_avg", "exp_avg_sq")


def size_of(parameters: int) -> int:
    """The size of a flat file, in bytes."""
    return HEADER.size + ARRAYS * ITEM_BYTES * parameters


def parse_header(head: bytes, size_bytes: int, *, where: str) -> tuple[int, int]:
    """(step, number of parameters) of a file of this size, from its first 8 bytes. Raises Corrupt."""
    if len(head) < HEADER.size:
        raise Corrupt(f"read {where}: {size_bytes} bytes, less than the header of a flat file")
    step, parameters = HEADER.unpack_from(head)
    if parameters < 0:
        raise Corrupt(f"read {where}: its header says {parameters} parameters; a flat file has at most {INT32_MAX}")
    if step < 0:
        raise Corrupt(f"read {where}: its header says step {step}")
    expected = size_of(parameters)
    if size_bytes != expected:
        raise Corrupt(
            f"read {where}: it has {size_bytes} bytes, its header says {expected}, for {parameters} parameters",
            hint="was it copied whole?",
        )
    return step, parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """The names of a parameter's tensors in a checkpoint."""

    name: str
    weight: str
    m: str
    v: str
    step: str = ""


class _Group(msgspec.Struct):
    params: list[str]


class _Optimizer(msgspec.Struct):
    groups: list[_Group]


def parameters_of(
    tree: Mapping[str, Json], shapes: Mapping[str, tuple[int, ...]], names: Sequence[str] = (), *, where: str
) -> list[Parameter]:
    """The parameters of a checkpoint in the order of the flat file: that of `names`; without these, the order in which
    the optimizer's groups hold them. `tree`: the state tree of a rank. `shapes`: of all tensors, by name. Raises
    Unsupported where the checkpoint has no such parameters."""
    try:
        optimizers = msgspec.convert(_section(tree, "optimizer", "optimizers"), list[_Optimizer])
    except msgspec.ValidationError as error:
        raise Corrupt(f"read the optimizer of {where}: {error}") from error
    if not optimizers:
        raise Unsupported(
            f"read {where} as a flat file: it has no optimizer whose parameters are named",
            hint="a snapshot of TrainingState(model=…, optimizer=…) has one",
        )
    prefixes = {
        name: prefix
        for index, optimizer in enumerate(optimizers)
        for prefix in ["optimizer" if len(optimizers) == 1 else f"optimizer.{index}"]
        for group in optimizer.groups
        for name in group.params
    }
    if unknown := [name for name in names if name not in prefixes]:
        raise Unsupported(
            f"read {where} as a flat file: its optimizer has no parameter {unknown[0]}",
            hint=f"its parameters are {listed([*prefixes])}",
        )
    if names and (left_out := [name for name in prefixes if name not in set(names)]):
        raise Unsupported(
            f"read {where} as a flat file: the list of names lacks {left_out[0]}, which the optimizer has",
            hint="name every parameter once, in the order of the file",
        )
    return [_parameter(name, prefixes[name], shapes, where) for name in names or prefixes]


def _section(tree: Mapping[str, Json], name: str, kind: str) -> Any:
    section = tree.get(name)
    return section.get("value") if isinstance(section, dict) and section.get("kind") == kind else []


def _parameter(name: str, prefix: str, shapes: Mapping[str, tuple[int, ...]], where: str) -> Parameter:
    weight = f"model.{name}" if f"model.{name}" in shapes else f"{prefix}.{name}"
    m, v = (f"{prefix}.state.{name}.{moment}" for moment in MOMENTS)
    for tensor in (weight, m, v):
        if tensor not in shapes:
            raise Unsupported(
                f"read {where} as a flat file: it has no tensor {tensor}",
                hint="a flat file has weights and both of Adam's moments of every parameter of the optimizer",
            )
        if shapes[tensor] != shapes[weight]:
            raise Unsupported(
                f"read {where} as a flat file: {tensor} has the shape {list(shapes[tensor])}, and its parameter "
                f"{list(shapes[weight])}",
                hint="another optimizer than Adam?",
            )
    step = f"{prefix}.state.{name}.step"
    return Parameter(name=name, weight=weight, m=m, v=v, step=step if step in shapes else "")


def tensors_in(
    file: str, count: int, parameters: Sequence[Parameter], tensors: Mapping[str, WholeTensor], *, where: str
) -> list[WholeTensor]:
    """Weights, m and v in a flat file with `count` parameters. `tensors`: those of a checkpoint of the same training,
    which say the shapes. Raises Unsupported where one is not float32, or their elements are not `count`."""
    found: list[WholeTensor] = []
    offset = HEADER.size
    for which in ("weight", "m", "v"):
        begin = offset
        for parameter in parameters:
            like = tensors[getattr(parameter, which)]
            if like.dtype != "F32":
                raise Unsupported(
                    f"import {where}: {like.name} is {like.dtype} in the checkpoint that --like names; a flat file "
                    "holds float32 only"
                )
            tensor = whole_in(file, like.name, "F32", like.shape, offset)
            offset += tensor.size_bytes
            found.append(tensor)
        if (named := (offset - begin) // ITEM_BYTES) != count:
            raise Unsupported(
                f"import {where}: it has {count} parameters, and the checkpoint that --like names has {named}",
                hint="--like names a checkpoint of the same model and optimizer",
            )
    return found


def assemble(
    tensors: Mapping[str, WholeTensor], parameters: Sequence[Parameter], step: int, *, where: str
) -> AssembledFile:
    """The flat file of these parameters, to be filled from the shards. Raises Unsupported for what it cannot hold."""
    ordered = [tensors[getattr(parameter, which)] for which in ("weight", "m", "v") for parameter in parameters]
    for tensor in ordered:
        if tensor.dtype != "F32":
            raise Unsupported(
                f"export {where}: {tensor.name} is {tensor.dtype}; a flat file holds float32 only",
                hint="export as safetensors, torch or dcp",
            )
    count = sum(tensor.size_bytes for tensor in ordered[: len(parameters)]) // ITEM_BYTES
    if count > INT32_MAX:
        raise Unsupported(
            f"export {where}: {count} parameters; a flat file has at most {INT32_MAX}",
            hint="export as safetensors, torch or dcp",
        )
    if step > INT32_MAX:
        raise Unsupported(f"export {where}: a flat file has at most step {INT32_MAX}")
    return AssembledFile(HEADER.pack(step, count), ordered)
