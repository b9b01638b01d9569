"""Random training states: trees of modules, optimizers, schedulers, averages, values, and memory that they share."""

from __future__ import annotations

import collections
import copy
from typing import Any

import torch

from tests.support.contents import Objects
from tests.support.random_values import DTYPES, KEYS, Source, Stateful

OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"momentum": 0.9}), ("SGD", {}), ("Adam", {"amsgrad": True}), ("AdamW", {}), ("Adam", {}),
    ("AdamW", {"fused": True}), ("RMSprop", {"centered": True}), ("Adagrad", {}), ("Adadelta", {}), ("Adamax", {}),
    ("NAdam", {}), ("RAdam", {}), ("Rprop", {}), ("ASGD", {}), ("Adafactor", {}), ("LBFGS", {}),
]  # fmt: skip
NAMES = ("a", "b", "param", "module", "weight", "net", "a#2", "b@00001", "$tensor", "__metadata__", "ä", "0")


class Unbuildable(Exception):
    """torch cannot build or copy these objects, so there is no state to take a snapshot of."""


class Leaf(torch.nn.Module):
    """Parameters and buffers of any dtype, shape and layout."""

    def __init__(self, source: Source, refused: float) -> None:
        super().__init__()
        for name in source.structure.sample(NAMES, source.structure.randrange(1, 4)):
            tensor = source.tensor(refused=refused).detach()
            kind = source.structure.randrange(4)
            if kind < 2:
                self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
            else:
                self.register_buffer(name, tensor, persistent=kind == 2)
        if source.chance(0.2):
            self.register_buffer(
                "view", next((p for p in self.parameters() if p.dim()), torch.ones(3)).detach()[..., :1]
            )


class WithExtraState(torch.nn.Module):
    """A module with extra state of any type."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, 2))
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


def random_module(source: Source, refused: float, depth: int = 0) -> torch.nn.Module:
    """A tree of modules, some with tied parameters, shared buffers, extra state or a wrapper."""
    kind = source.structure.randrange(13 if depth < 2 else 9)
    torch.manual_seed(source.content.randrange(1 << 30))
    if kind < 3:
        return torch.nn.Linear(source.structure.randrange(1, 5), source.structure.randrange(1, 5))
    if kind == 3:
        return torch.nn.BatchNorm1d(3)
    if kind == 4:
        return torch.nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
    if kind == 5:
        return torch.nn.LSTM(2, 3)
    if kind == 6:
        return WithExtraState(source.value(1, refused=refused))
    if kind == 7:
        return torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 3))
    if kind == 8:
        return Leaf(source, refused)
    children = [random_module(source, refused, depth + 1) for _ in range(source.structure.randrange(1, 4))]
    if kind == 9:
        names = source.structure.sample(NAMES, len(children))
        return torch.nn.ModuleDict(dict(zip(names, children, strict=True)))
    if kind == 10:
        tied = torch.nn.Linear(3, 3)
        other = torch.nn.Linear(3, 3)
        other.weight = tied.weight
        other.register_buffer("shared", tied.bias.detach())
        return torch.nn.Sequential(tied, other, tied, *children)
    if kind == 11:
        return torch.optim.swa_utils.AveragedModel(children[0])
    return torch.nn.Sequential(*children)


def random_optimizers(source: Source, model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Up to three optimizers, over parameters of the model and others, most of them after a step."""
    trainable = [p for p in model.parameters() if p.requires_grad and p.numel()]
    made: list[torch.optim.Optimizer] = []
    for _ in range(source.structure.choice([0, 1, 1, 1, 2, 3])):
        own = source.structure.sample(trainable, source.structure.randrange(len(trainable) + 1))
        if source.chance(0.2) or not own:
            own.append(torch.nn.Parameter(source.bytes_of(torch.int8, (2, 2)).float()))  # not in the model
        name, options = source.structure.choice(OPTIMIZERS)
        cut = source.structure.randrange(len(own)) if name != "LBFGS" else 0
        groups = [{"params": part, "lr": 0.1 + i} for i, part in enumerate([own[:cut], own[cut:]]) if part]
        try:
            optimizer = getattr(torch.optim, name)(groups if len(groups) > 1 else own, **options)
        except (ValueError, RuntimeError):  # not for parameters of these dtypes
            continue
        if source.chance(0.9):
            _step(source, optimizer, own)
        if source.chance(0.1):
            optimizer.param_groups[0]["extra"] = source.value(2, refused=0.02)
        if source.chance(0.1):
            optimizer.state[own[0]]["more"] = source.value(1, refused=0.02)
        made.append(optimizer)
    return made


def _step(source: Source, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = source.bytes_of(torch.int8, tuple(parameter.shape)).to(parameter.dtype) / 100
    optimizer.step(lambda: torch.tensor(source.content.random()))
    optimizer.zero_grad()


def random_scheduler(source: Source, optimizer: torch.optim.Optimizer) -> Any:
    schedulers = torch.optim.lr_scheduler
    made = [
        lambda: schedulers.StepLR(optimizer, 2),
        lambda: schedulers.CosineAnnealingLR(optimizer, 9),
        lambda: schedulers.LambdaLR(optimizer, lambda step: 0.9**step),
        lambda: schedulers.MultiStepLR(optimizer, [1, 4]),
        lambda: schedulers.OneCycleLR(optimizer, 0.1, 50, cycle_momentum=False),
        lambda: schedulers.ReduceLROnPlateau(optimizer),
        lambda: schedulers.SequentialLR(
            optimizer, [schedulers.ConstantLR(optimizer), schedulers.ExponentialLR(optimizer, 0.9)], [2]
        ),
    ]
    scheduler = source.structure.choice(made)()
    for _ in range(source.content.randrange(4)):
        scheduler.step(1.0) if isinstance(scheduler, schedulers.ReduceLROnPlateau) else scheduler.step()
    return scheduler


def random_ema(source: Source, model: torch.nn.Module) -> Any:
    """An average in one of the forms that a TrainingState takes."""
    tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    match source.structure.randrange(8):
        case 0:
            return torch.optim.swa_utils.AveragedModel(model)
        case 1:
            return copy.deepcopy(tensors)
        case 2:
            return tensors  # shares the model's memory
        case 3:
            return Stateful({"decay": source.content.random(), "shadow": [*copy.deepcopy(tensors).values()]})
        case 4:
            return {"decay": 0.9, "shadow": {"a": source.tensor(refused=0.02)}, source.key(): source.tensor()}
        case _:
            return None


def random_objects(structure: int, content: int) -> Objects:
    """The objects of one state: `structure` decides what they are, `content` what they hold.

    Raises Unbuildable when torch does not support a tensor of the state in one of its modules.
    """
    try:
        return _random_objects(structure, content)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise Unbuildable from error


def _random_objects(structure: int, content: int) -> Objects:
    source = Source(structure, content)
    refused = source.structure.choice([0.0, 0.0, 0.0, 0.02, 0.15])
    count = source.structure.randrange(6)
    extra: dict[str, Any] = {key: _entry(source, refused) for key in source.structure.sample(KEYS, count)}
    if source.chance(0.2):
        return Objects(extra=extra)
    model = random_module(source, refused)
    optimizers = random_optimizers(source, model)
    objects = Objects(model=model, extra=extra)
    objects.optimizer = optimizers[0] if len(optimizers) == 1 else optimizers or None
    if optimizers and source.chance(0.4):
        objects.scheduler = random_scheduler(source, optimizers[0])
    objects.ema = random_ema(source, model)
    if source.chance(0.2):
        objects.dataloader = Stateful({"at": source.content.randrange(9), "more": source.value(1, refused=refused)})
    if source.chance(0.2):
        objects.scaler = torch.amp.GradScaler("cpu", init_scale=float(2 ** source.content.randrange(9)))
    _share(source, objects)
    return objects


def _entry(source: Source, refused: float) -> Any:
    kind = source.structure.randrange(12)
    if kind == 0:
        return random_module(source, refused)
    if kind == 1:
        return Stateful(source.value(refused=refused))
    return source.value(refused=refused)


def _share(source: Source, objects: Objects) -> None:
    """Lets some entries of `extra` share memory with each other, with the model or with an optimizer."""
    assert objects.model is not None
    for key in [key for key, value in objects.extra.items() if isinstance(value, torch.Tensor)]:
        kind = source.structure.randrange(8)
        parameters = list(objects.model.parameters())
        if kind == 0 and parameters:
            objects.extra[key] = source.structure.choice(parameters)
        elif kind == 1 and parameters:
            objects.extra[key] = source.structure.choice(parameters).detach().reshape(-1)[:2]
        elif kind == 2:
            objects.extra["twice"] = [objects.extra[key], {"again": objects.extra[key]}]


def scramble(objects: Objects, seed: int) -> None:
    """Changes the values of live objects in place, and replaces or removes values of `extra`."""
    source = Source(seed, seed)
    modules = [each for each in (objects.model, objects.ema) if isinstance(each, torch.nn.Module)]
    tensors = [value for module in modules for value in (*module.parameters(), *module.buffers())]
    optimizers = objects.optimizer if isinstance(objects.optimizer, list) else [objects.optimizer]
    for optimizer in optimizers if objects.optimizer is not None else []:
        tensors += [value for state in optimizer.state.values() for value in state.values()]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.5
    tensors += [*objects.ema.values()] if isinstance(objects.ema, dict) else []
    with torch.no_grad():
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.dtype in DTYPES and not tensor.is_nested:
                tensor.copy_(source.bytes_of(tensor.dtype, tuple(tensor.shape)))
    for key, value in list(objects.extra.items()):
        if hasattr(value, "state_dict"):
            continue
        match source.structure.randrange(4):
            case 0:
                objects.extra[key] = source.value(refused=0)
            case 1:
                del objects.extra[key]
            case 2 if isinstance(value, torch.Tensor) and value.dtype in DTYPES:
                with torch.no_grad():
                    value.copy_(source.bytes_of(value.dtype, tuple(value.shape)))
            case _:
                pass


def share_memory(objects: Objects, seed: int) -> None:
    """Makes live objects share memory that they did not share when the checkpoint was taken."""
    source = Source(seed, seed)
    for module in (objects.model, *objects.extra.values()):
        if not isinstance(module, torch.nn.Module):
            continue
        owners = [(m, n, p) for m in module.modules() for n, p in m.named_parameters(recurse=False)]
        for owner, name, parameter in owners:
            same = [p for _, _, p in owners if p.shape == parameter.shape and p.dtype == parameter.dtype]
            if len(same) > 1 and source.chance(0.5):
                setattr(owner, name, same[0])
    tensors = [(key, value) for key, value in objects.extra.items() if isinstance(value, torch.Tensor)]
    weights = [] if objects.model is None else list(objects.model.parameters())
    for key, tensor in tensors:
        same = [other for _, other in tensors] + [weight.detach() for weight in weights]
        objects.extra[key] = source.structure.choice(
            [each for each in same if each.shape == tensor.shape and each.dtype == tensor.dtype]
        )
    if isinstance(objects.ema, dict) and objects.model is not None:
        objects.ema.update({k: v for k, v in objects.model.state_dict().items() if k in objects.ema})


def differing_rank(objects: Objects, seed: int) -> None:
    """Changes a value of `extra` as a rank's own value may differ from that of another rank: type, sign, or order."""
    source = Source(seed, seed)
    for key, value in list(objects.extra.items()):
        if isinstance(value, bool | int | float) and source.chance(0.5):
            objects.extra[key] = {0: False, 1: True}.get(value, 0.0) if source.chance(0.5) else 1.0
        elif isinstance(value, collections.OrderedDict) and source.chance(0.5):
            objects.extra[key] = collections.OrderedDict(reversed(value.items()))
        elif isinstance(value, torch.Tensor) and source.chance(0.2):
            objects.extra[key] = value.detach().clone() if value.layout is torch.strided else value
