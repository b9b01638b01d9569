"""Random number generators: Python's, numpy's global one, torch's on the CPU and on the CUDA devices in use.

Captured as bytes, restored after everything else. Never initialises CUDA.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import struct
from collections.abc import Generator, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from tierd.errors import Corrupt, Unsupported
from tierd_client.log import log

_TWISTER = struct.Struct("<625I")  # the 624 words of Mersenne Twister and the position in them


def capture(devices: Iterable[torch.device] = ()) -> dict[str, Any]:
    """The states of all generators, as bytes, numbers and dicts. `devices`: where the training state lives.

    Raises Unsupported when numpy's global generator is not a Mersenne Twister.
    """
    numpy: dict[str, Any] = np.random.get_state(legacy=False)  # pyright: ignore[reportAssignmentType]
    if numpy["bit_generator"] != "MT19937":
        raise Unsupported(f"capture rng.numpy: bit generator {numpy['bit_generator']}, only MT19937 is supported")
    return {
        "python": python_state(random.getstate()),
        "numpy": {
            "key": numpy["state"]["key"].astype("<u4").tobytes(),
            "pos": int(numpy["state"]["pos"]),
            "has_gauss": int(numpy["has_gauss"]),
            "gauss": float(numpy["gauss"]),
        },
        "torch": torch.get_rng_state().numpy().tobytes(),
        "cuda": [torch.cuda.get_rng_state(device).numpy().tobytes() for device in _cuda_devices(devices)],
    }


def restore(saved: dict[str, Any], devices: Iterable[torch.device] = ()) -> None:
    """Restores what `capture` returned. Raises Corrupt when `saved` is something else."""
    try:
        random.setstate(python_tuple(saved["python"]))
        numpy = saved["numpy"]
        key = np.frombuffer(numpy["key"], dtype="<u4")
        np.random.set_state(("MT19937", key, numpy["pos"], numpy["has_gauss"], numpy["gauss"]))
        torch.set_rng_state(state_tensor(saved["torch"]))
        gpus = _cuda_devices(devices)
        if len(gpus) != len(saved["cuda"]):
            log.warning(
                "tierd: the checkpoint has the generators of %d CUDA devices, %d are in use: not all are restored",
                len(saved["cuda"]),
                len(gpus),
            )
        for device, state in zip(gpus, saved["cuda"], strict=False):
            torch.cuda.set_rng_state(state_tensor(state), device)
    except (KeyError, TypeError, ValueError, struct.error, RuntimeError) as error:
        raise Corrupt(f"restore rng: {error!r}") from error


def python_state(state: tuple[Any, ...]) -> dict[str, Any]:
    """What `getstate` of a generator of Python returned, as bytes and numbers."""
    version, words, gauss = state
    return {"version": version, "words": _TWISTER.pack(*words), "gauss": gauss}


def python_tuple(saved: Mapping[str, Any]) -> tuple[Any, ...]:
    """The inverse of `python_state`, for `setstate`."""
    return saved["version"], _TWISTER.unpack(saved["words"]), saved["gauss"]


def state_tensor(state: bytes) -> torch.Tensor:
    """The state of a torch generator, as a uint8 tensor for its set_state."""
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def seed_of(*parts: int | str) -> int:
    """A seed of 63 bits that depends on all `parts` and is the same in every process and version."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1


@contextlib.contextmanager
def temporary_seed(seed: int) -> Generator[None]:
    """Inside, the generators on the CPU start from `seed`. Afterwards their previous states are restored."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed([seed & 0xFFFF_FFFF, seed >> 32])
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every GPU too
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)


def seed_all(seed: bytes) -> None:
    """Seeds every generator, CUDA's too. `seed`: 8 bytes or more, a multiple of 4."""
    random.seed(seed)
    np.random.seed(np.frombuffer(seed, dtype="<u4"))
    torch.manual_seed(int.from_bytes(seed[:8], "little") >> 1)  # below 2**63; CUDA takes it when initialised


def _cuda_devices(devices: Iterable[torch.device]) -> list[torch.device]:
    """The CUDA devices among `devices` and the current one, in order. Empty before the program uses CUDA."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return []
    current = torch.cuda.current_device()
    indexes = {current if str(device) == "cuda" else device.index for device in devices if device.type == "cuda"}
    return [torch.device("cuda", index) for index in sorted(indexes | {current})]
