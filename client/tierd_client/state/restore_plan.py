"""The plan of a restore: which stored tensor is read into which live one, and what is installed afterwards.

It is complete before a byte changes: all differences between checkpoint and state are collected, then raised as one
Mismatch. `run` then reads the stored bytes into `destinations` and installs the rest. While it does, the live state is
half old and half new: after an error the restore must be repeated from another replica before training continues.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import msgspec
import torch

from tierd.errors import Corrupt, Mismatch, NotFound, TierdError, TierUnreachable
from tierd.format.boxes import cover_problem, spanned_shape
from tierd.format.shard import TensorEntry
from tierd.format.tagged import Parts, Place, Rebuild
from tierd_client.state import encoding
from tierd_client.state.entry_selection import EntrySelection
from tierd_client.state.memory_ranges import MemoryRanges, can_hold
from tierd_client.state.objects import HALF_RESTORED, Objects, Rebuilder
from tierd_client.state.restore_filter import EXACT, RestoreFilter, StoredEntries
from tierd_client.state.tensors import (
    DTYPES,
    VIEWED,
    CapturedTensor,
    capture_tensor,
    describe,
    has_memory,
    is_dtensor,
    local_part,
)

DIFFERENCES_SHOWN = 20


Available = Mapping[str, Sequence[TensorEntry]]
"""The tensors of all shards by name, with one entry for each stored part."""


class ReadTensors(Protocol):
    """Fills the given tensors with the checkpoint's bytes, whose checksums are compared if `is_verified`."""

    def __call__(self, requested: Iterable[CapturedTensor], /, *, is_verified: bool = True) -> object: ...


class RestorePlan(EntrySelection):
    """Filled by the sections of a state. `destinations` are the tensors to fill, by the name of the stored tensor; if
    it fills several, the others are by (name, number). `differences` has one sentence for each difference."""

    def __init__(
        self,
        available: Available,
        accelerator: torch.device,
        *,
        is_dry: bool = False,
        objects: Objects | None = None,
        rebuild: Rebuild | None = None,
        filter: RestoreFilter = EXACT,
        entries: StoredEntries | None = None,
        per_rank_names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`is_dry`: the plan is only checked, never run; it makes no tensor on an accelerator. `objects`: how the state
        stores values of the user's classes. `rebuild` makes them in `decode`, which otherwise refuses them. `entries`:
        those of the checkpoint, for sections that `take` them. `per_rank_names`: of tensors that differ by rank, the
        name in the shards by the name in the state tree."""
        super().__init__(entries or StoredEntries(), filter)
        self.destinations: dict[str | tuple[str, int], CapturedTensor] = {}
        self.available = available
        self._per_rank_names = per_rank_names
        self._accelerator = accelerator
        self._is_dry = is_dry
        self._memory = MemoryRanges()
        self._used: set[str] = set()
        self._cover_problems: dict[str, str] = {}
        self.objects = objects or Objects(from_live=False)
        self._rebuilder = Rebuilder(self.objects, self.differences, accelerator)
        self._rebuild = rebuild or self._refuse_object
        self._installs: list[tuple[str, Callable[[], object]]] = []
        self._cast_copies: dict[object, torch.Tensor] = {}
        self._cast_memory = MemoryRanges()
        self._kept_tensors: list[tuple[str, torch.Tensor]] = []

    # ── entries ───────────────────────────────────────────────────────────────────────────────────────────

    def read_entry(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether `tensor`, which is the entry `name` of the state, will be filled."""
        source = self.take(name)
        if source is None:
            self.protect(name, tensor)
            return False
        if not self._entries.tensors[source]:
            self.mismatch(name, "no tensor in the checkpoint, now it is one")
            return False
        destination = self._destination(self._entries.tensors[source], tensor)
        stored = self._find_stored(destination.name)
        if stored is None:
            return False
        live = destination.dtype, destination.global_shape, destination.torch_dtype
        if stored == live:
            if cast := self._cast_memory.overlapped(destination.tensor):
                self._refuse_shared(name, cast[0])
                return False
            self.add_destination(destination)
            return True
        are_floats = (
            DTYPES[stored[0]].is_floating_point and tensor.dtype.is_floating_point and stored[2] == live[2] == ""
        )
        if stored[1] != live[1] or not are_floats or not self.filter.casts(name):
            self.mismatch(name, f"checkpoint {describe(*stored)}, {name.split('.')[0]} {describe(*live)}")
            return False
        return self._read_cast(name, destination, stored[0])

    def _read_cast(self, name: str, destination: CapturedTensor, stored_dtype: str) -> bool:
        """As `read_entry`, for a tensor of another dtype: reads it into a copy, which is then converted."""
        local, dtype = destination.tensor, DTYPES[stored_dtype]
        # Tied tensors get one copy, so that different values for them are found before anything is written.
        place = local.device, local.data_ptr(), destination.shape, local.stride(), dtype
        copy = self._cast_copies.get(place)
        if copy is None:
            if shared := self._memory.overlapped(local) or self._cast_memory.overlapped(local):
                self._refuse_shared(name, shared[0])
                return False
            self._cast_memory.add(destination)
            self._cast_copies[place] = torch.empty_like(local, dtype=dtype)
            self.on_finish(name, partial(local.copy_, self._cast_copies[place]))
        self.add_destination(msgspec.structs.replace(destination, tensor=self._cast_copies[place], dtype=stored_dtype))
        self.report.cast[name] = f"{stored_dtype} -> {destination.dtype}"
        return True

    def _refuse_shared(self, name: str, other: CapturedTensor) -> None:
        self.differences.append(
            f"{name}: it shares memory with the tensor that gets {other.name}; to cast them, both must have the same "
            "shape and address here and the same dtype in the checkpoint"
        )

    def protect(self, name: str, value: object) -> None:
        """If the entry `name` is kept by request, refuses to restore what shares memory with a tensor in its value."""
        if self.filter.keeps(name):
            is_tensor = isinstance(value, torch.Tensor)
            live = [value] if is_tensor else encoding.live_tensors(value, name, objects=self.objects).values()
            self._kept_tensors += [(name, local) for tensor in live if has_memory(local := local_part(tensor))]

    def read_object(self, name: str, value: object = None) -> Callable[[], Any] | None:
        """Plans to restore the entry `name` of the state, which is not a tensor. Returns the function that makes its
        value once the tensors were read; None if it stays as it is. Tensors in the live `value` are read in place."""
        source = self.take(name)
        if source is None:
            self.protect(name, value)
            return None
        if source not in self._entries.objects:
            self.mismatch(name, "a tensor in the checkpoint, now it is none")
            return None
        live = encoding.live_tensors(value, self._entries.paths.get(source, source), objects=self.objects)
        return self.decode_at(self._entries.objects[source], Place(name, None), live=live)

    # ── tensors and values ────────────────────────────────────────────────────────────────────────────────

    def read_into(self, name: str, tensor: torch.Tensor, *, must_fit: bool = True) -> bool:
        """Whether the stored tensor `name` will be read into `tensor`. Adds a difference if it is not stored, or if it
        `must_fit` and does not."""
        destination = self._destination(name, tensor)
        stored = self._find_stored(destination.name)
        if stored is None:
            return False
        live = destination.dtype, destination.global_shape, destination.torch_dtype
        if stored == live:
            self.add_destination(destination)
        elif must_fit:
            self.differences.append(f"{name}: checkpoint {describe(*stored)}, {name.split('.')[0]} {describe(*live)}")
        return stored == live

    def _destination(self, name: str, tensor: torch.Tensor) -> CapturedTensor:
        """`tensor`, or its own part, by the stored name."""
        return capture_tensor(self._per_rank_names.get(name, name), self.own_part(name, tensor))

    def own_part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, or its local part if the stored tensor `name` differs by rank."""
        return local_part(tensor) if name in self._per_rank_names else tensor

    def add_destination(self, tensor: CapturedTensor) -> None:
        """Reads the stored bytes of `tensor.name` into it. One stored tensor may have several destinations."""
        count = len(self.destinations)
        self.destinations[(tensor.name, count) if tensor.name in self.destinations else tensor.name] = tensor
        assert len(self.destinations) == count + 1
        self._memory.add(tensor)

    def read_new(self, name: str, device: torch.device, like: torch.Tensor | None = None) -> torch.Tensor:
        """The new tensor that the stored tensor `name` will be read into. If `like` has its shape, and is a DTensor or
        on `device`, the new one has the layout and sharding of `like`."""
        stored = self._find_stored(self._per_rank_names.get(name, name))
        if stored is None:
            return torch.empty(0, device="cpu")
        form = _torch_form(*stored)
        if form is None:
            self.differences.append(f"{name}: of {stored[2]}, which this version of torch lacks")
            return torch.empty(0, device="cpu")
        dtype, shape = form
        if self._is_dry:
            return torch.empty(shape, dtype=dtype, device="cpu" if device.type == "cpu" else "meta")
        like_shape = () if like is None else self.own_part(name, like).shape
        if like is not None and tuple(like_shape) == shape and (is_dtensor(like) or like.device == device):
            tensor = torch.empty_like(like, dtype=dtype, requires_grad=False)
        else:
            tensor = torch.empty(shape, dtype=dtype, device=device)
        self.read_into(name, tensor)
        return tensor

    def new_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A new tensor of the same kind, to read into. A dry plan needs none."""
        return tensor if self._is_dry else torch.empty_like(tensor, requires_grad=False)

    def decode(
        self,
        value: encoding.Json,
        *,
        live: Mapping[str, torch.Tensor] | None = None,
        is_strict: bool = False,
        new: encoding.Allocate | None = None,
        rebuild: Rebuild | None = None,
        place: Place | None = None,
        allocated: dict[str, torch.Tensor] | None = None,
    ) -> Any:
        """Decodes `value`. Its tensors are those of `live` where name, shape and dtype agree, else made by `new`.

        A live tensor that shares memory with another destination is replaced by a new one like it. `is_strict`: a live
        tensor that does not agree is a difference. `allocated` receives the tensors by name. Raises Corrupt when
        `value` is not an encoding.
        """

        def allocate(name: str, device: str) -> torch.Tensor:
            tensor = find(name, device)
            if allocated is not None:
                allocated[name] = tensor
            return tensor

        def find(name: str, device: str) -> torch.Tensor:
            tensor = (live or {}).get(name)
            if tensor is not None and self._is_filled(local_part(tensor)):
                tensor = self.new_like(tensor)
            if tensor is not None and (self.read_into(name, tensor, must_fit=is_strict) or is_strict):
                return tensor
            if new is not None:
                return new(name, device)
            return self.read_new(name, self.device(device, self._accelerator))

        return encoding.decode(value, allocate, rebuild or self._rebuild, place or Place("the state", None))

    def _is_filled(self, tensor: torch.Tensor) -> bool:
        """Whether a destination, or a tensor that is cast, shares memory with `tensor`."""
        return self._memory.holds(tensor) or self._cast_memory.holds(tensor)

    def decode_at(
        self, value: encoding.Json, place: Place, *, live: Mapping[str, torch.Tensor] | None = None
    ) -> Callable[[], Any]:
        """As `decode`, for a value that may hold values of the user's classes. Returns a function that makes it when
        the tensors were read: only then it can be passed to the user's code, and live values may change."""
        tensors: dict[str, torch.Tensor] = {}
        rebuilt: list[str] = []

        def check(parts: Parts, place: Place) -> None:
            rebuilt.append(place.path)
            self._rebuilder.check(parts, place)

        planned = self.decode(value, live=live, rebuild=check, place=place, allocated=tensors)
        if not rebuilt:
            return lambda: planned
        return lambda: encoding.decode(value, lambda name, _: tensors[name], self._rebuilder.rebuild, place)

    def _refuse_object(self, parts: Parts, place: Place) -> None:
        self.differences.append(f"{place.path}: a {parts.name} can be restored only in extra and state_dicts")

    def device(self, name: str, home: torch.device) -> torch.device:
        """The device for "home", "cpu" or "accelerator", as encoded in the state tree."""
        return {"home": home, "cpu": torch.device("cpu")}.get(name, self._accelerator)

    def on_finish(self, name: str, install: Callable[[], object]) -> None:
        """Calls `install` in `run`, after all bytes were read, in the order of these calls. `name`: of what it
        restores."""
        self._installs.append((name, install))

    # ── for the restore ───────────────────────────────────────────────────────────────────────────────────

    def finish(self, strict_sections: Collection[str]) -> None:
        """Completes the plan and its report. Stored entries of `strict_sections` must have a place. Raises Mismatch."""
        self.complete_report(strict_sections)
        for name, kept in self._kept_tensors:
            for other in self._memory.overlapped(kept) or self._cast_memory.overlapped(kept):
                self.differences.append(f"keep: {name} shares memory with a tensor that gets {other.name}: keep both")
        tensors = {tensor.name: tensor for tensor in self.destinations.values()}.values()
        self.report.size_bytes = sum(
            math.prod(tensor.global_shape) * tensor.tensor.element_size() for tensor in tensors
        )
        self.check()

    def check(self) -> None:
        """Raises Mismatch, listing the differences, if there are any."""
        count = len(self.differences)
        if not count:
            return
        places = "1 place" if count == 1 else f"{count} places"
        shown = "\n  ".join(self.differences[:DIFFERENCES_SHOWN])
        more = f"\n  … and {count - DIFFERENCES_SHOWN} more" if count > DIFFERENCES_SHOWN else ""
        raise Mismatch(
            f"restore: the checkpoint differs from the state in {places}; nothing was changed\n  {shown}{more}",
            hint="build the model and the optimizer as they were when the checkpoint was taken; "
            "to restore only a part of it: docs/guides/fine-tune.md",
        )

    def run(self, read: ReadTensors) -> None:
        """Reads all tensor bytes, then installs the rest: optimizer state, schedulers, loaders, values, last the RNG.

        Raises Mismatch, with nothing changed, when tensors that share memory have different values in the checkpoint.
        Raises Corrupt when a chunk is damaged. Raises TierdError, with the state half restored, when an object refuses
        its state or a value cannot be made: never Corrupt, because all replicas hold the same values.
        """
        self._check_shared_memory(read)
        read(self.destinations.values())
        with torch.no_grad():
            for name, install in self._installs:
                try:
                    install()
                except (Corrupt, NotFound, TierUnreachable) as error:  # these would blame the replica
                    raise TierdError(f"restore {name}: {error.message}", hint=HALF_RESTORED) from error
                except TierdError:
                    raise
                except Exception as error:  # of any kind: load_state_dict is the user's code
                    raise TierdError(
                        f"restore {name}: its load_state_dict raised {type(error).__qualname__}: {error}",
                        hint=HALF_RESTORED,
                    ) from error

    def _check_shared_memory(self, read: ReadTensors) -> None:
        shared = list(self._memory.shared())
        stored = [[_on_cpu(tensor) for tensor in tensors] for tensors in shared]
        if shared:  # tied weights, most often: their chunks are verified when they are read into the state
            read([tensor for tensors in stored for tensor in tensors], is_verified=False)
        for tensors, values in zip(shared, stored, strict=True):
            if not can_hold(tensors, [value.tensor for value in values]):
                read(values)  # raises Corrupt if it is damaged bytes that differ
                names = " and ".join(tensor.name for tensor in tensors)
                self.differences.append(f"{names} share memory, but the checkpoint has different values for them")
        self.check()

    def stored_form(self, name: str) -> tuple[torch.dtype, tuple[int, ...]] | None:
        """(dtype, global shape) of a stored tensor, or None if there is none of that name that torch can hold."""
        stored_name = self._per_rank_names.get(name, name)
        stored = self._find_stored(stored_name) if stored_name in self.available else None
        return None if stored is None else _torch_form(*stored)

    def _find_stored(self, name: str) -> tuple[str, tuple[int, ...], str] | None:
        """(dtype, global shape, torch dtype) of a stored tensor. None, with a difference, unless all its parts are
        stored."""
        is_first_use = name not in self._used
        self._used.add(name)
        entries = self.available.get(name, ())
        if not entries:
            if is_first_use:
                self.differences.append(f"{name}: not in the checkpoint")
            return None
        if len(entries) == 1 and not any(entries[0].saved_offsets):
            # Most tensors are whole; the code below is ten times slower.
            return entries[0].dtype, entries[0].shape, entries[0].torch_dtype
        if len({(part.dtype, len(part.shape), part.torch_dtype) for part in entries}) != 1:
            self.differences.append(f"{name}: its parts in the checkpoint disagree in dtype or dimensions")
            return None
        boxes = [(part.saved_offsets, part.shape) for part in entries]
        shape = spanned_shape(boxes)
        if name not in self._cover_problems:
            self._cover_problems[name] = cover_problem(boxes, shape)
        if problem := self._cover_problems[name]:
            if is_first_use:
                self.differences.append(f"{name}: the shards {problem}")
            return None
        return entries[0].dtype, shape, entries[0].torch_dtype


def _torch_form(dtype: str, shape: tuple[int, ...], torch_dtype: str) -> tuple[torch.dtype, tuple[int, ...]] | None:
    """(dtype, shape) in torch of what a shard stores, or None if this version of torch has no such dtype."""
    if not torch_dtype:
        return DTYPES[dtype], shape
    viewed = VIEWED.get(torch_dtype)
    return None if viewed is None else (viewed, shape[:-1] if viewed.is_complex else shape)


def _on_cpu(tensor: CapturedTensor) -> CapturedTensor:
    """A new contiguous tensor on the CPU for the same stored bytes."""
    return msgspec.structs.replace(tensor, tensor=torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype], device="cpu"))
