"""State that is not a tensor, as tagged JSON, with references to the tensors and arrays that are stored as tensors.

{"$tensor": name}                              on the device where its owner lives
{"$tensor": {"name": n, "device": "cpu"}}      or "accelerator", or "home" where a key for the kind of tensor follows:
                                               "parameter": true, "requires_grad": true
{"$ndarray": {"name": n, "dtype": "<f8"}}      with "shape" too where it is stored as plain bytes
{"$scalar": ["<f8", base64]}  {"$dtype": "bfloat16"}  {"$device": "cuda:0"}  {"$size": [2, 3]}
"""

from __future__ import annotations

import base64
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tierd.errors import Corrupt, Unsupported
from tierd.format import tagged
from tierd_client.state.objects import Objects
from tierd_client.state.per_rank import PerRankEntries
from tierd_client.state.tensors import PLAIN, CapturedTensor, capture_tensor, is_dense, is_dtensor, local_part

Json = tagged.Json

_ARRAY_KINDS = frozenset("biufcSUmM")  # numpy kinds whose bytes are their value: no objects, no structs


@dataclass(slots=True)
class Collector:
    """Collects tensors under unique names while sections encode themselves as JSON.

    `tensors` are the captured tensors in the order they were added, `live` the original objects by name. `suffix` is
    appended to tensor names in a section that differs per rank, except to DTensors: each rank holds a part of the same
    tensor. Without `objects`, values of the user's classes and generators are refused.

    With several ranks, the tensors that `per_rank` names are stored under a name that ends in `rank_suffix`, a DTensor
    as this rank's local part. `per_rank_names` lists their names in one section, without the suffix.
    """

    suffix: str = ""
    objects: Objects | None = None
    per_rank: PerRankEntries | None = None
    rank_suffix: str = ""
    tensors: list[CapturedTensor] = field(default_factory=list[CapturedTensor])
    live: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    per_rank_names: list[str] = field(default_factory=list[str])

    def add(self, path: str, tensor: torch.Tensor, *, is_buffer: bool = False) -> str:
        """Adds `tensor`; returns its name in the state tree. Raises Unsupported when a shard cannot store it."""
        has_suffix = bool(self.suffix) and not is_dtensor(tensor)
        name = path + self.suffix if has_suffix else path
        if name in self.live:  # {"a.b": x, "a": {"b": y}} has the same path twice
            name = next(free for n in range(2, 1 << 30) if (free := f"{name}#{n}") not in self.live)
        stored_name, stored = name, tensor
        if self.per_rank is not None and not has_suffix and self.per_rank.matches(path) and self.rank_suffix:
            stored_name, stored = name + self.rank_suffix, local_part(tensor)
            self.per_rank_names.append(name)
        self.tensors.append(capture_tensor(stored_name, stored, is_buffer=is_buffer))
        self.live[name] = tensor
        return name

    def encode(self, value: object, path: str, home: torch.device | None = None) -> Json:
        """`value` as tagged JSON. Tensors on the device `home` follow their owner's device when they are restored.

        Raises Unsupported, naming the path, for a value that has no safe form.
        """
        if type(value) is dict and _has_only_tensors(value):
            # Same result as below, but faster: optimizers have thousands of these dicts, and training waits.
            return {key: _reference(self.add(f"{path}.{key}", tensor), tensor, home) for key, tensor in value.items()}

        def leaf(value: object, path: str) -> Json | None:
            if isinstance(value, torch.Tensor):
                if type(value) not in PLAIN and not is_dtensor(value):
                    raise Unsupported(
                        f"encode {path}: a {type(value).__qualname__} would be restored as a plain tensor",
                        hint="store tensor.as_subclass(torch.Tensor), and what else it has",
                    )
                return _reference(self.add(path, value), value, home)
            if isinstance(value, np.ndarray):
                if type(value) is not np.ndarray:
                    raise Unsupported(
                        f"encode {path}: a {type(value).__qualname__} would be restored as a plain array",
                        hint="store np.asarray(array), and what else it has, such as a mask",
                    )
                return self._encode_array(value, path)
            if isinstance(value, np.generic):
                raw = value.encode("utf-32-le", "surrogatepass") if isinstance(value, np.str_) else value.tobytes()
                dtype = "<U" if isinstance(value, np.str_) else _dtype_name(value.dtype, path)
                return {"$scalar": [dtype, base64.b64encode(raw).decode("ascii")]}
            if isinstance(value, torch.Size):
                return {"$size": list(value)}
            if isinstance(value, torch.dtype):
                return {"$dtype": str(value).removeprefix("torch.")}
            if isinstance(value, torch.device):
                return {"$device": str(value)}
            return None

        return tagged.encode(value, path, leaf, self.objects.split if self.objects is not None else None)

    def _encode_array(self, array: np.ndarray[Any, Any], path: str) -> Json:
        dtype = _dtype_name(array.dtype, path)
        copy = np.array(array, order="C")  # the array may be read-only, and may change during staging
        try:
            return {"$ndarray": {"name": self.add(path, torch.from_numpy(copy)), "dtype": dtype}}
        except (TypeError, ValueError, Unsupported):  # torch or safetensors lacks this dtype: store plain bytes
            raw = torch.frombuffer(bytearray(copy.tobytes() or b"\0"), dtype=torch.uint8)
            return {"$ndarray": {"name": self.add(path, raw), "dtype": dtype, "shape": list(array.shape)}}


def live_tensors(value: object, path: str, suffix: str = "", objects: Objects | None = None) -> dict[str, torch.Tensor]:
    """The tensors in `value` by the names under which they would be stored."""
    if not suffix and type(value) is dict and _has_only_tensors(value) and all(map(is_dense, value.values())):
        return {f"{path}.{key}": tensor for key, tensor in value.items()}
    collector = Collector(suffix, objects)
    collector.encode(value, path)
    return collector.live


def _has_only_tensors(value: dict[Any, Any]) -> bool:
    """Whether a dict has plain tensors by plain keys, as an optimizer has for each parameter."""
    # The types of the keys first: a member of a StrEnum equals its string, and would be found in the cache.
    keys = tuple(value)
    return PLAIN.issuperset(map(type, value.values())) and _STR.issuperset(map(type, keys)) and _are_plain_keys(keys)


_STR = frozenset({str})
_are_plain_keys = functools.lru_cache(maxsize=64)(tagged.are_plain_keys)


def _reference(name: str, tensor: torch.Tensor, home: torch.device | None) -> Json:
    device = tensor.device
    if device == home and not tensor.requires_grad and type(tensor) is torch.Tensor:
        return {"$tensor": name}  # the short path of nearly all tensors: training waits for thousands of them
    kind: dict[str, bool] = {}
    if type(tensor) is torch.nn.Parameter:
        kind["parameter"] = True
    if tensor.requires_grad and tensor.is_leaf:
        kind["requires_grad"] = True
    if device == home:
        return {"$tensor": {"name": name, "device": "home", **kind} if kind else name}
    return {"$tensor": {"name": name, "device": "cpu" if device.type == "cpu" else "accelerator", **kind}}


def _dtype_name(dtype: np.dtype[Any], path: str) -> str:
    if dtype.kind not in _ARRAY_KINDS:
        raise Unsupported(
            f"encode {path}: numpy dtype {dtype} has no safe form in a checkpoint",
            hint="object and structured arrays are refused; keep their fields as plain arrays",
        )
    if dtype.char in "gG":
        raise Unsupported(
            f"encode {path}: numpy dtype {dtype} has another form on other processors", hint="store it as float64"
        )
    return dtype.str


Allocate = Callable[[str, str], torch.Tensor]
"""(name, "home", "cpu" or "accelerator") → the tensor that the stored bytes will be read into."""


def decode(value: Json, allocate: Allocate, rebuild: tagged.Rebuild, place: tagged.Place) -> Any:
    """The inverse of `Collector.encode`. Tensors and arrays are filled later, when the stored bytes are read.
    `rebuild` makes the values that `Objects` has split; `place`: where the value goes.

    Raises Corrupt when `value` is not what `encode` writes.
    """

    def unleaf(tag: str, content: Json) -> object:
        match tag:
            case "$tensor" if isinstance(content, str):
                return _of_kind(allocate(content, "home"), False, False)
            case "$tensor":
                tensor = allocate(str(content["name"]), str(content["device"]))
                return _of_kind(tensor, content.get("parameter") is True, content.get("requires_grad") is True)
            case "$ndarray":
                flat = allocate(str(content["name"]), "cpu").numpy()
                return _array(flat, _parse_dtype(content["dtype"]), content.get("shape"))
            case "$scalar":
                return _scalar(base64.b64decode(content[1], validate=True), _parse_dtype(content[0]))
            case "$dtype" if isinstance(dtype := getattr(torch, str(content), None), torch.dtype):
                return dtype
            case "$size":
                return torch.Size(content)
            case "$device":
                return torch.device(str(content))
            case _:
                raise ValueError(f"unknown tag {tag!r}")

    try:
        return tagged.decode(value, unleaf, rebuild, place)
    except (KeyError, AttributeError, IndexError, RuntimeError) as error:
        raise Corrupt(f"decode the state tree: {error!r}") from error


def _of_kind(tensor: torch.Tensor, is_parameter: bool, requires_grad: bool) -> torch.Tensor:
    """The tensor, or one of the kind that was saved in the same memory. A live tensor is never changed here."""
    is_same = (type(tensor) is torch.nn.Parameter) == is_parameter and tensor.requires_grad == requires_grad
    if is_same or type(tensor) not in PLAIN:
        return tensor
    if is_parameter:
        return torch.nn.Parameter(tensor.detach(), requires_grad=requires_grad)
    return tensor.detach().requires_grad_(requires_grad)


def _scalar(raw: bytes, dtype: np.dtype[Any]) -> np.generic:
    if dtype.kind == "U":  # an array would lose null characters at the end, and has none of no characters
        return np.str_(raw.decode("utf-32-le", "surrogatepass"))
    if dtype.kind == "S":
        return np.bytes_(raw)
    return np.frombuffer(raw, dtype=dtype)[0]


def _array(flat: np.ndarray[Any, Any], dtype: np.dtype[Any], shape: list[int] | None) -> np.ndarray[Any, Any]:
    if shape is None:
        if flat.dtype != dtype:
            raise ValueError(f"array of {flat.dtype}, expected {dtype}")
        return flat
    return flat[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def _parse_dtype(text: Json) -> np.dtype[Any]:
    dtype = np.dtype(str(text))
    if dtype.kind not in _ARRAY_KINDS:
        raise ValueError(f"numpy dtype {text!r}")
    return dtype
