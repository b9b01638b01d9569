"""What a restore will do: which stored tensor goes into which live one, and what is installed after the bytes.

Made before a single byte changes: everything that does not fit is gathered, then raised as one Mismatch. The
bytes are read into `destinations`, then `finish` installs the rest. Until `finish` returns, the live state is
half old and half new: a restore that raises must be repeated, from another replica, before training goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from tierd.errors import Mismatch
from tierd_client.state import encoding
from tierd_client.state.tensors import DTYPES, CapturedTensor, captured, describe, is_dtensor, overlap_elements

DIFFERENCES_SHOWN = 20


class StoredTensor(Protocol):
    """A tensor, or a part of one, as the header of a shard lists it."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def saved_offsets(self) -> tuple[int, ...]: ...


Available = Mapping[str, Sequence[StoredTensor]]
"""All shards' tensors by name: one entry for each part that a shard holds."""


class RestorePlan:
    """Filled by the sections of a TrainingState, checked, then carried out by `restoring.load` and `finish`."""

    def __init__(self, available: Available, accelerator: torch.device) -> None:
        self.destinations: dict[str, CapturedTensor] = {}
        self.available = available
        self._accelerator = accelerator
        self._seen: set[str] = set()
        self._differences: list[str] = []
        self._installs: list[Callable[[], None]] = []

    # ── for the sections ──────────────────────────────────────────────────────────────────────────────────

    def stored_name(self, path: str, suffix: str) -> str:
        """How the tensor of a section that differs per rank was stored: a part of a DTensor has no suffix."""
        return path + suffix if path + suffix in self.available else path

    def place(self, name: str, tensor: torch.Tensor) -> None:
        """The stored tensor `name` goes into `tensor`. Notes a difference when it is absent or does not fit."""
        stored = self._stored(name)
        if stored is None:
            return
        dtype, shape = stored
        wanted = captured(name, tensor)
        if (dtype, shape) != (wanted.dtype, wanted.global_shape):
            here, live = describe(dtype, shape), describe(wanted.dtype, wanted.global_shape)
            self.differ(f"{name}: checkpoint {here}, {name.split('.')[0]} {live}")
            return
        self.destinations[name] = wanted

    def new(self, name: str, device: torch.device, like: torch.Tensor | None = None) -> torch.Tensor:
        """A new tensor that the stored one goes into, laid out and sharded as `like` when that has its shape."""
        stored = self._stored(name)
        if stored is None:
            return torch.empty(0)
        dtype, shape = DTYPES[stored[0]], stored[1]
        if like is not None and tuple(like.shape) == shape and (is_dtensor(like) or like.device == device):
            made = torch.empty_like(like, dtype=dtype, requires_grad=False)
        else:
            made = torch.empty(shape, dtype=dtype, device=device)
        self.place(name, made)
        return made

    def decode(
        self,
        value: encoding.Json,
        *,
        live: Mapping[str, torch.Tensor] | None = None,
        is_strict: bool = False,
        new: encoding.Allocate | None = None,
    ) -> Any:
        """A value from its encoding. Its tensors are those of `live` where name, shape and dtype agree, else `new`.

        `is_strict`: a live tensor that does not agree is a difference.
        """

        def allocate(name: str, mark: str) -> torch.Tensor:
            mine = (live or {}).get(name)
            if mine is not None and (is_strict or self._fits(name, mine)):
                self.place(name, mine)
                return mine
            if new is not None:
                return new(name, mark)
            return self.new(name, self.device(mark, self._accelerator))

        return encoding.decode(value, allocate)

    def device(self, mark: str, home: torch.device) -> torch.device:
        """The device that a mark in the tree stands for."""
        return {"home": home, "cpu": torch.device("cpu")}.get(mark, self._accelerator)

    def differ(self, difference: str) -> None:
        self._differences.append(difference)

    def expect_no_more(self, prefix: str, suffix: str) -> None:
        """Notes every stored tensor below `prefix` that nobody asked for."""
        for name in self.available:
            if name.startswith(prefix) and name.endswith(suffix) and name not in self._seen:
                self.differ(f"{name}: in the checkpoint, not in the {prefix.split('.')[0]}")

    def then(self, install: Callable[[], None]) -> None:
        """`install` runs in `finish`, in the order of these calls, when all bytes are in place."""
        self._installs.append(install)

    # ── for the restore ───────────────────────────────────────────────────────────────────────────────────

    def check(self) -> None:
        """Raises Mismatch, listing what differs, unless everything fits."""
        count = len(self._differences)
        if not count:
            return
        shown = "\n  ".join(self._differences[:DIFFERENCES_SHOWN])
        more = f"\n  … and {count - DIFFERENCES_SHOWN} more" if count > DIFFERENCES_SHOWN else ""
        raise Mismatch(
            f"restore: the checkpoint differs from the state in {count} places; nothing was changed\n  {shown}{more}",
            hint="build the model and the optimizer as they were when the checkpoint was taken",
        )

    def finish(self) -> None:
        """Installs what is no bytes: optimizer state, schedulers, loaders, values, and last the RNG."""
        with torch.no_grad():
            for install in self._installs:
                install()

    def _fits(self, name: str, tensor: torch.Tensor) -> bool:
        stored = self._stored(name)
        if stored is None:
            return False
        wanted = captured(name, tensor)
        return stored == (wanted.dtype, wanted.global_shape)

    def _stored(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """(dtype, global shape) of a stored tensor whose parts are all there; else None, and a difference is noted."""
        first = name not in self._seen
        self._seen.add(name)
        found = self.available.get(name, ())
        if not found:
            if first:
                self.differ(f"{name}: not in the checkpoint")
            return None
        if len(found) == 1 and not any(found[0].saved_offsets):
            return found[0].dtype, found[0].shape  # most are whole: what follows comes to the same, ten times as slowly
        parts = {part.saved_offsets: part for part in found}
        ndim = len(next(iter(parts)))
        if len({(part.dtype, len(part.shape)) for part in parts.values()}) != 1:
            self.differ(f"{name}: its parts in the checkpoint disagree")
            return None
        ends = [tuple(map(sum, zip(part.saved_offsets, part.shape, strict=True))) for part in parts.values()]
        shape = tuple(max(end[axis] for end in ends) for axis in range(ndim))
        held = sum(overlap_elements(part.saved_offsets, part.shape, (0,) * ndim, shape) for part in parts.values())
        if held != math.prod(shape):
            if first:
                self.differ(f"{name}: the checkpoint holds {held} of its {math.prod(shape)} elements")
            return None
        return next(iter(parts.values())).dtype, shape
