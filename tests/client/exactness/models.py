"""Models, modules and wrappers"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_module, distribute_tensor
from torch.nn.utils import parametrizations, prune

from tests.client.exactness.row import EXACT, Row
from tests.client.exactness.values import Tagged, freed, newer_dtype
from tests.support.contents import Objects


class Tied(nn.Module):
    """An embedding and an output layer with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.output = nn.Linear(3, 5, bias=False)
        self.output.weight = self.embedding.weight


class Buffers(nn.Module):
    """A weight and buffers."""

    def __init__(self, **buffers: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        for name, value in buffers.items():
            self.register_buffer(name, value)


class ExtraState(nn.Module):
    """Extra state of any type."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


class Unsettable(nn.Module):
    """Extra state without set_extra_state."""

    def get_extra_state(self) -> Any:
        return 1


class Renaming(nn.Module):
    """A state_dict with an entry that load_state_dict does not take."""

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        return {"renamed": torch.ones(1)}


class Raising(nn.Linear):
    """A state_dict that raises."""

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        raise RuntimeError("not now")


def whole_and_views() -> nn.Module:
    whole = torch.randn(4, 3)
    return Buffers(whole=whole, rows=whole[1:3], column=whole[:, 1])


def of_dtype(dtype: torch.dtype) -> nn.Module:
    return nn.Linear(3, 2).to(dtype)


def parameter(tensor: torch.Tensor) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_parameter("other", nn.Parameter(tensor, requires_grad=False))
    return model


def pruned() -> nn.Module:
    return prune.random_unstructured(nn.Linear(4, 4), "weight", 0.5)


def compiled() -> nn.Module:
    return torch.compile(nn.Linear(3, 3), backend="eager")  # type: ignore[return-value]


def quantized() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(3, 3)), {nn.Linear})


def sharded(placement: Any, dtype: torch.dtype = torch.float32) -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))

    def shard(_: str, module: nn.Module, mesh: Any) -> None:
        for name, value in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(distribute_tensor(value, mesh, [placement])))

    return distribute_module(nn.Sequential(nn.Linear(4, 4, dtype=dtype)), mesh, shard)


def pending() -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    return Buffers(sums=DTensor.from_local(torch.ones(2), mesh, [Partial()]))


def module_dict(*names: str) -> Callable[[], nn.Module]:
    return lambda: nn.ModuleDict({name: nn.Linear(2, 2) for name in names})


ROWS = [
    Row("`Linear`, `Bilinear`", EXACT, lambda: nn.ModuleList([nn.Linear(3, 2), nn.Bilinear(2, 2, 2)])),
    Row(
        "convolutions",
        EXACT,
        lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.Conv3d(1, 2, 2), nn.ConvTranspose2d(2, 2, 2)),
    ),
    Row("`Conv2d` in channels_last", EXACT, lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)),
    Row("`BatchNorm` with its running statistics", EXACT, lambda: nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm2d(2))),
    Row("`SyncBatchNorm`", EXACT, lambda: nn.SyncBatchNorm(3)),
    Row(
        "`LayerNorm`, `GroupNorm`, `RMSNorm`",
        EXACT,
        lambda: nn.ModuleList([nn.LayerNorm(3), nn.GroupNorm(2, 4), nn.RMSNorm(3)]),
    ),
    Row(
        "`InstanceNorm` with running statistics",
        EXACT,
        lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
    ),
    Row(
        "`Embedding`, `EmbeddingBag`",
        EXACT,
        lambda: nn.ModuleList([nn.Embedding(5, 3, padding_idx=0), nn.EmbeddingBag(5, 3)]),
    ),
    Row("`RNN`, `GRU`", EXACT, lambda: nn.ModuleList([nn.RNN(2, 3), nn.GRU(2, 3, bidirectional=True)])),
    Row("`LSTM`, bidirectional, with projections", EXACT, lambda: nn.LSTM(2, 4, 2, bidirectional=True, proj_size=2)),
    Row("`MultiheadAttention`", EXACT, lambda: nn.MultiheadAttention(4, 2)),
    Row("`Transformer`", EXACT, lambda: nn.Transformer(4, 2, 1, 1, 8)),
    Row("`PReLU`", EXACT, nn.PReLU),
    Row("`AdaptiveLogSoftmaxWithLoss`", EXACT, lambda: nn.AdaptiveLogSoftmaxWithLoss(4, 10, [3, 6])),
    Row(
        "`ParameterList`, `ParameterDict`",
        EXACT,
        lambda: nn.ModuleList([nn.ParameterList([torch.ones(2)]), nn.ParameterDict({"a": torch.ones(2)})]),
    ),
    Row(
        "`ModuleDict` with names of any characters",
        EXACT,
        module_dict("a#2", "b@00001", "$tensor", "__metadata__", "ä"),
    ),
    Row("modules named as wrappers name theirs", EXACT, module_dict("module", "_orig_mod", "a")),
    Row("one module in several places", EXACT, lambda: nn.Sequential(*[nn.Linear(2, 2)] * 2)),
    Row("tied weights", EXACT, Tied),
    Row(
        "buffers of any dtype",
        EXACT,
        lambda: Buffers(count=torch.tensor(3), mask=torch.ones(2) > 0, bits=torch.ones(1).to(torch.uint16)),
    ),
    Row("buffers that share memory, and views of them", EXACT, whole_and_views),
    Row("buffers and parameters that are None", EXACT, lambda: Buffers(absent=None)),
    Row("empty parameters", EXACT, lambda: nn.ModuleList([nn.Linear(2, 2), parameter(torch.empty(0, 3))])),
    Row("parameters with strides", EXACT, lambda: parameter(torch.randn(4, 3).t())),
    Row("parameters of float64", EXACT, lambda: of_dtype(torch.float64)),
    Row(
        "parameters of float16 or bfloat16",
        EXACT,
        lambda: nn.ModuleList([of_dtype(torch.float16), of_dtype(torch.bfloat16)]),
    ),
    Row("parameters of float8", EXACT, lambda: parameter(torch.randn(3).to(torch.float8_e4m3fn))),
    Row("parameters of complex64", EXACT, lambda: of_dtype(torch.complex64)),
    Row("parameters of complex128", EXACT, lambda: of_dtype(torch.complex128)),
    Row(
        "buffer of float8_e8m0fnu",
        EXACT,
        lambda: Buffers(scale=torch.ones(3, dtype=newer_dtype("float8_e8m0fnu"))),
    ),
    Row(
        "DTensor of complex128",
        EXACT,
        lambda: sharded(Shard(0), torch.complex128),
    ),
    Row("frozen parameters", EXACT, lambda: nn.Linear(2, 2).requires_grad_(False)),
    Row(
        "parameters of a subclass of `torch.Tensor` with memory of its own",
        EXACT,
        lambda: parameter(torch.randn(2).as_subclass(Tagged)),
    ),
    Row("expanded buffer", "several elements share one memory location", lambda: Buffers(wide=torch.ones(1).expand(3))),
    Row("sparse buffer", "of layout torch.sparse_coo", lambda: Buffers(adjacency=torch.eye(3).to_sparse())),
    Row(
        "nested tensor as a buffer",
        "keep their dense parts",
        lambda: Buffers(rows=torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
    ),
    Row("buffer whose memory was freed", "the memory of this tensor was freed", lambda: Buffers(freed=freed())),
    Row("extra state of any type of value", EXACT, lambda: ExtraState({"scale": torch.rand(2), "name": ("a", 1)})),
    Row("extra state that is a tensor", EXACT, lambda: ExtraState(torch.rand(2))),
    Row(
        "extra state of a type without a form",
        "model._extra_state: builtins.object has no safe form",
        lambda: ExtraState(object()),
    ),
    Row(
        "extra state without set_extra_state",
        "model._extra_state: state_dict returns it, load_state_dict does not take it",
        Unsettable,
    ),
    Row("state_dict with an entry that load_state_dict ignores", "model.renamed: state_dict returns it", Renaming),
    Row("state_dict that raises", "capture model: its state_dict raised RuntimeError: not now", lambda: Raising(2, 2)),
    Row("lazy module before its first forward", "a lazy module has no shape yet", lambda: nn.LazyLinear(3)),
    Row("lazy module after it", EXACT, lambda: nn.Sequential(nn.LazyLinear(3))),
    Row("module on the meta device", "a meta tensor has no bytes", lambda: nn.Linear(2, 2, device="meta")),
    Row("dynamically quantized module", "safetensors cannot store", quantized),
    Row("`parametrizations.weight_norm`", EXACT, lambda: parametrizations.weight_norm(nn.Linear(3, 3))),
    Row("`parametrizations.spectral_norm`", EXACT, lambda: parametrizations.spectral_norm(nn.Linear(3, 3))),
    Row("`parametrizations.orthogonal`", EXACT, lambda: parametrizations.orthogonal(nn.Linear(3, 3))),
    Row("`nn.utils.weight_norm`, the old one", EXACT, lambda: nn.utils.weight_norm(nn.Linear(3, 3))),
    Row("`nn.utils.spectral_norm`, the old one", EXACT, lambda: nn.utils.spectral_norm(nn.Linear(3, 3))),
    Row("`nn.utils.prune`", EXACT, pruned),
    Row("`torch.compile`", EXACT, compiled),
    Row("`torch.jit.script`", EXACT, lambda: torch.jit.script(nn.Linear(3, 3))),
    Row("`DataParallel`", EXACT, lambda: nn.DataParallel(nn.Linear(3, 3))),
    Row(
        "`DistributedDataParallel`",
        EXACT,
        lambda: nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))),
    ),
    Row("`fully_shard` (FSDP2)", EXACT, lambda: fully_shard(nn.Sequential(nn.Linear(4, 4)))),
    Row("tensor parallel: DTensors with `Shard`", EXACT, lambda: sharded(Shard(0))),
    Row("DTensor with `Partial`", "a DTensor with pending sums", pending),
    Row(
        "`FullyShardedDataParallel` (FSDP1)",
        "use torch.distributed.fsdp.fully_shard (FSDP2)",
        lambda: FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")),
    ),
    Row("a list of modules", "put several into a torch.nn.ModuleList or ModuleDict", lambda: [nn.Linear(2, 2)]),
]


def build(row: Row, seed: int, rank: int) -> Objects:
    """With other bits in each tensor for each seed."""
    torch.default_generator.manual_seed(seed)  # of all devices, it would keep the stack of each call for later
    model = row.make()
    if row.name == "lazy module after it":
        model(torch.ones(1, 2))
    if row.outcome != EXACT:
        return Objects(model=model)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local.copy_(torch.randint(0, 2 if tensor.dtype is torch.bool else 100, tensor.shape).to(tensor.dtype))
    for module in model.modules():
        if isinstance(module, ExtraState) and seed:
            module.value = None
    return Objects(model=model)
