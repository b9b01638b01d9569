"""Gives torchtitan the CPU as its device: its Trainer requires a GPU. Import this before any of its modules."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils

device: Any = types.ModuleType("cpu_as_gpu")
vars(device).update(vars(torch.cpu))
device.current_device = lambda: 0
device.empty_cache = lambda: None
device.get_device_name = lambda *_: "CPU"
device.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=1 << 30)
device.memory_stats = lambda *_: {}
device.reset_peak_memory_stats = lambda *_: None
device.set_device = lambda *_: None

utils.device_type, utils.device_module = "cpu", device
utils.get_local_device = lambda: torch.device("cpu")
if not hasattr(torch.distributed, "set_timeout"):  # torchtitan 0.3 is written for a torch later than 2.13
    torch.distributed.set_timeout = lambda *_: None  # pyright: ignore[reportAttributeAccessIssue]

_set_divide_factor = FSDPModule.set_gradient_divide_factor


def set_gradient_divide_factor(module: FSDPModule, factor: float) -> None:
    _set_divide_factor(module, factor)
    module.set_force_sum_reduction_for_comms(True)  # gloo has no other


FSDPModule.set_gradient_divide_factor = set_gradient_divide_factor
