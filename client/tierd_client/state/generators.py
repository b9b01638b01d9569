"""Random generators as values: torch.Generator, random.Random, numpy's Generator and RandomState.

`state_of` describes one with plain values, `restore` gives that state to a generator, in place: samplers keep a
reference to theirs. The global generators belong to rng.py.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tierd.errors import Unsupported
from tierd_client.state import rng

_BIT_GENERATORS = {
    kind.__name__: kind
    for kind in (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64)
}

Generator = torch.Generator | random.Random | np.random.Generator | np.random.RandomState

KINDS: dict[type, str] = {
    torch.Generator: "torch.Generator",
    random.Random: "random.Random",
    np.random.Generator: "numpy.random.Generator",
    np.random.RandomState: "numpy.random.RandomState",
}
"""The types of generators, without their subclasses, and their names in a checkpoint."""


def state_of(generator: object, path: str) -> dict[str, Any] | None:
    """The state as numbers, bytes, lists and dicts. None when `generator` is of another type.

    Raises Unsupported for a generator of numpy with a bit generator or a seed sequence of the user's.
    """
    if type(generator) not in KINDS:
        return None
    match generator:
        case torch.Generator():
            return {"device": generator.device.type, "state": generator.get_state().numpy().tobytes()}
        case random.Random():
            return rng.python_state(generator.getstate())
        case np.random.Generator():
            source = generator.bit_generator
            seeds = source.seed_seq
            is_known = type(source) is _BIT_GENERATORS.get(type(source).__name__)
            if not is_known or type(seeds) is not np.random.SeedSequence:
                raise Unsupported(
                    f"encode {path}: a numpy.random.Generator of {type(source).__qualname__} and "
                    f"{type(seeds).__qualname__}",
                    hint="use a bit generator of numpy, made from a number or a SeedSequence",
                )
            return {"bits": _plain(source.state), "seeds": _plain(seeds.state)}
        case np.random.RandomState():
            state: Any = generator.get_state(legacy=False)
            if state["bit_generator"] != "MT19937":
                raise Unsupported(f"encode {path}: a RandomState of {state['bit_generator']}", hint="use MT19937")
            return _plain(state)
        case _:
            return None


def difference(kind: str, saved: Mapping[str, Any], live: object, device: torch.device) -> str:
    """Why `restore` could not give the state to `live`, or to a new generator if `live` is not one; empty if it could.
    A live generator is never replaced by one of another kind, because a sampler may refer to it."""
    if kind not in KINDS.values():
        return f"the checkpoint holds a {kind}, which this version does not know"
    if type(live) in KINDS and KINDS[type(live)] != kind:
        return f"the checkpoint holds a {kind}, now it is a {KINDS[type(live)]}"
    if kind == "torch.Generator":
        homes = (live.device.type,) if isinstance(live, torch.Generator) else (device.type, "cpu")
        if saved.get("device") not in homes:
            return f"the checkpoint holds a torch.Generator of {saved.get('device')}, now it is one of {homes[0]}"
    if kind == "numpy.random.Generator":
        then = saved["bits"]["bit_generator"]
        now = type(live.bit_generator).__name__ if isinstance(live, np.random.Generator) else then
        if then not in _BIT_GENERATORS or now != then:
            return f"the checkpoint holds a numpy.random.Generator of {then}, now it is one of {now}"
    return ""


def restore(kind: str, saved: Mapping[str, Any], live: object, device: torch.device) -> Generator:
    """Gives the state to `live` if it is a generator of this kind, else to a new one. Returns that generator.

    `device`: of a new torch.Generator that was not on the CPU.
    """
    is_same = KINDS.get(type(live)) == kind
    match kind:
        case "torch.Generator":
            home = torch.device("cpu") if saved["device"] == "cpu" else device
            is_same = is_same and isinstance(live, torch.Generator) and live.device.type == saved["device"]
            generator: Any = live if is_same else torch.Generator(home)
            generator.set_state(rng.state_tensor(saved["state"]))
        case "random.Random":
            generator = live if is_same else random.Random()
            generator.setstate(rng.python_tuple(saved))
        case "numpy.random.Generator":
            source = _BIT_GENERATORS[saved["bits"]["bit_generator"]]
            is_same = is_same and isinstance(live, np.random.Generator) and type(live.bit_generator) is source
            generator = live if is_same else np.random.Generator(source(0))
            bits = generator.bit_generator
            if isinstance(bits.__reduce__()[2], tuple):
                bits.__setstate__((saved["bits"], np.random.SeedSequence(**saved["seeds"])))
            else:  # numpy 1.26 cannot replace the seeds, which only spawn() uses
                bits.state = saved["bits"]
        case _:
            generator = live if is_same else np.random.RandomState(0)
            generator.set_state(dict(saved))
    return generator


def _plain(state: Any) -> Any:
    """A state of numpy without arrays and numpy's numbers."""
    if isinstance(state, Mapping):
        return {key: _plain(value) for key, value in state.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(state, np.ndarray | np.generic):
        return state.tolist()
    if isinstance(state, list | tuple):
        return [_plain(item) for item in state]  # pyright: ignore[reportUnknownVariableType]
    return state
