"""The plan of a restore: which stored tensor is read into which live one, and what is installed afterwards.

It is complete before a byte changes: all differences between checkpoint and state are collected, then raised as one
Mismatch. `run` then reads the stored bytes into `destinations` and installs the rest. While it does, the live state is
half old and half new: after an error the restore must be repeated from another replica before training continues.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import torch

from tierd.errors import Mismatch, TierdError
from tierd.format.shard import TensorEntry
from tierd_client.state import encoding
from tierd_client.state.memory_ranges import MemoryRanges, can_hold
from tierd_client.state.restore_filter import EXACT, RestoreFilter, StoredEntries
from tierd_client.state.restore_report import RestoreReport
from tierd_client.state.tensors import (
    DTYPES,
    CapturedTensor,
    capture_tensor,
    describe,
    is_dtensor,
    local_part,
    spanned_shape,
)

DIFFERENCES_SHOWN = 20


Available = Mapping[str, Sequence[TensorEntry]]
"""The tensors of all shards by name, with one entry for each stored part."""

ReadTensors = Callable[[Iterable[CapturedTensor]], object]
"""Fills the given tensors with the checkpoint's bytes."""


class RestorePlan:
    """Filled by the sections of a state. `destinations` are the tensors to fill, by the stored name; `differences`
    has one sentence for each."""

    def __init__(
        self,
        available: Available,
        accelerator: torch.device,
        *,
        is_dry: bool = False,
        filter: RestoreFilter = EXACT,
        entries: StoredEntries | None = None,
    ) -> None:
        """`is_dry`: the plan is only checked, never run; it makes no tensor on an accelerator. `entries`: those of the
        checkpoint, for sections that `take` them."""
        self.destinations: dict[str, CapturedTensor] = {}
        self.available = available
        self._accelerator = accelerator
        self._is_dry = is_dry
        self._memory = MemoryRanges()
        self._used: set[str] = set()
        self.differences: list[str] = []
        self._installs: list[tuple[str, Callable[[], object]]] = []
        self.filter = filter
        self.report = RestoreReport()
        self._entries = entries or StoredEntries()
        self.sources = self._select()
        self._taken: set[str] = set()
        self._kept: set[str] = set()
        self._cast_copies: dict[object, torch.Tensor] = {}
        self._cast_memory = MemoryRanges()

    # ── entries ───────────────────────────────────────────────────────────────────────────────────────────

    def _select(self) -> dict[str, str]:
        """The stored entries that are asked for, by their names in the state."""
        entries = self._entries.tensors
        if self.filter.is_exact:
            return dict(zip(entries, entries, strict=True))
        sources: dict[str, str] = {}
        for entry in entries:
            if not self.filter.takes(entry):
                self.report.not_asked.append(entry)
                continue
            other = sources.setdefault(self.filter.destination(entry), entry)
            if other != entry:
                self.differences.append(f"rename: {other} and {entry} both become {self.filter.destination(entry)}")
        return sources

    def take(self, name: str) -> str | None:
        """The stored entry for the entry `name` of the state. None: that one stays as it is, as is reported."""
        if self.keep(name, name):
            return None
        if name in self.sources:
            self._taken.add(name)
            return self.sources[name]
        if self.filter.takes(name):
            self.miss(name)
        return None

    def keep(self, name: str, entry: str) -> bool:
        """Whether the entry `name` of the state stays as it is by request; `entry` is the one that it would get."""
        if not self.filter.keeps(name):
            return False
        self.report.kept.append(name)
        self._kept.add(entry)
        return True

    def keep_section(self, section: str) -> bool:
        """Whether all entries of a section stay as they are by request."""
        names = [name for name in self.sources if name.startswith(f"{section}.")]
        if not names or not all(map(self.filter.keeps, names)):
            return False
        return all(self.keep(name, name) for name in names)

    def use(self, name: str) -> None:
        """Marks an entry as restored by other means than `take`."""
        self._taken.add(name)

    def take_section(self, section: str) -> None:
        """All entries of a section that is restored as a whole."""
        self._taken.update(name for name in self.sources if name == section or name.startswith(f"{section}."))

    def has_source(self, section: str) -> bool:
        """Whether an entry of this section of the state is asked for and stored."""
        return section in self.sources or any(name.startswith(f"{section}.") for name in self.sources)

    def miss(self, name: str) -> None:
        """The checkpoint has no such entry."""
        if self.filter.strict:
            self.differences.append(f"{name}: not in the checkpoint")
        else:
            self.report.missing.append(name)

    def mismatch(self, name: str, why: str) -> None:
        """The stored entry does not fit."""
        if self.filter.strict:
            self.differences.append(f"{name}: {why}")
        else:
            self.report.mismatched[name] = why

    def read_entry(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether `tensor`, which is the entry `name` of the state, will be filled."""
        source = self.take(name)
        if source is None:
            return False
        stored_name = self._entries.tensors[source]
        if not stored_name:
            self.mismatch(name, "no tensor in the checkpoint, now it is one")
            return False
        stored = self._find_stored(stored_name)
        if stored is None:
            return False
        destination = capture_tensor(stored_name, tensor)
        live = destination.dtype, destination.global_shape
        if stored == live:
            self.add_destination(name, destination)
            return True
        dtype = DTYPES[stored[0]]
        are_floats = dtype.is_floating_point and tensor.dtype.is_floating_point
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
            if self._memory.holds(local) or self._cast_memory.holds(local):
                self.mismatch(name, "it shares memory with a tensor of another shape or dtype and cannot be cast")
                return False
            self._cast_memory.add(destination)
            self._cast_copies[place] = torch.empty_like(local, dtype=dtype)
            self.on_finish(name, partial(local.copy_, self._cast_copies[place]))
        self.add_destination(
            name, msgspec.structs.replace(destination, tensor=self._cast_copies[place], dtype=stored_dtype)
        )
        self.report.cast[name] = f"{stored_dtype} -> {destination.dtype}"
        return True

    def read_object(self, name: str, value: object = None) -> tuple[Any] | None:
        """What is stored for the entry `name` of the state, which is not a tensor, as a tuple of one; tensors in the
        live `value` are read in place. None: it stays as it is."""
        source = self.take(name)
        if source is None:
            return None
        if source not in self._entries.objects:
            self.mismatch(name, "a tensor in the checkpoint, now it is none")
            return None
        return (self.decode(self._entries.objects[source], live=encoding.live_tensors(value, source)),)

    def finish(self, strict_sections: Collection[str]) -> None:
        """Completes the report. Adds the differences of entries without a place in `strict_sections`, then checks."""
        report, optional = self.report, self._entries.optional
        for name, entry in self.sources.items():
            if name in self._taken and name not in report.mismatched:
                report.loaded.append(name)
                if name != entry:
                    report.renamed[entry] = name
            elif name not in self._taken and name not in self._kept and entry not in optional:
                section = next((section for section in strict_sections if name.startswith(f"{section}.")), "")
                if self.filter.strict and section:
                    self.differences.append(f"{name}: in the checkpoint, not in the {section.split('.')[0]}")
                else:
                    report.left_over.append(entry)
        tensors = {tensor.name: tensor for tensor in self.destinations.values()}.values()
        report.size_bytes = sum(math.prod(tensor.global_shape) * tensor.tensor.element_size() for tensor in tensors)
        if not self.filter.is_exact:
            # What another rank alone holds, as with pipeline stages, may be meant by a pattern.
            self.differences += self.filter.unused(self._entries.tensors, self.filter.keep if optional else report.kept)
            if not report.loaded and not self.differences and not optional:
                self.differences.append("nothing of the checkpoint would be loaded")
        self.check()

    # ── tensors and values ────────────────────────────────────────────────────────────────────────────────

    def read_into(self, name: str, tensor: torch.Tensor, *, must_fit: bool = True) -> bool:
        """Whether the stored tensor `name` will be read into `tensor`. If it is absent, that is a difference, and if
        it does not fit while it `must_fit`."""
        stored = self._find_stored(name)
        if stored is None:
            return False
        destination = capture_tensor(name, tensor)
        live = destination.dtype, destination.global_shape
        if stored == live:
            self.add_destination(name, destination)
        elif must_fit:
            self.differences.append(f"{name}: checkpoint {describe(*stored)}, {name.split('.')[0]} {describe(*live)}")
        return stored == live

    def add_destination(self, key: str, tensor: CapturedTensor) -> None:
        """Reads the stored bytes of `tensor.name` into it. `key` is unique among the destinations."""
        self.destinations[key] = tensor
        self._memory.add(tensor)

    def read_new(self, name: str, device: torch.device, like: torch.Tensor | None = None) -> torch.Tensor:
        """Reads the stored tensor `name` into a new one. It has the layout and sharding of `like` if the shapes are
        equal."""
        stored = self._find_stored(name)
        if stored is None:
            return torch.empty(0, device="cpu")
        dtype, shape = DTYPES[stored[0]], stored[1]
        if self._is_dry:
            return torch.empty(shape, dtype=dtype, device="cpu" if device.type == "cpu" else "meta")
        if like is not None and tuple(like.shape) == shape and (is_dtensor(like) or like.device == device):
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
    ) -> Any:
        """Decodes `value`. Its tensors are those of `live` where name, shape and dtype agree, else made by `new`.

        A live tensor that shares memory with another destination is replaced by a new one like it. `is_strict`: a live
        tensor that does not agree is a difference. Raises Corrupt when `value` is not an encoding.
        """

        def allocate(name: str, device: str) -> torch.Tensor:
            tensor = (live or {}).get(name)
            if tensor is not None and self._memory.holds(local_part(tensor)):
                tensor = self.new_like(tensor)
            if tensor is not None and (self.read_into(name, tensor, must_fit=is_strict) or is_strict):
                return tensor
            if new is not None:
                return new(name, device)
            return self.read_new(name, self.device(device, self._accelerator))

        return encoding.decode(value, allocate)

    def device(self, name: str, home: torch.device) -> torch.device:
        """The device for "home", "cpu" or "accelerator", as encoded in the state tree."""
        return {"home": home, "cpu": torch.device("cpu")}.get(name, self._accelerator)

    def on_finish(self, name: str, install: Callable[[], object]) -> None:
        """Calls `install` in `run`, after all bytes were read, in the order of these calls. `name`: of what it
        restores."""
        self._installs.append((name, install))

    # ── for the restore ───────────────────────────────────────────────────────────────────────────────────

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
        Raises TierdError, with the state half restored, when an object refuses its state.
        """
        self._check_shared_memory(read)
        read(self.destinations.values())
        with torch.no_grad():
            for name, install in self._installs:
                try:
                    install()
                except TierdError:
                    raise
                except Exception as error:  # of any kind: load_state_dict is the user's code
                    raise TierdError(
                        f"restore {name}: its load_state_dict raised {type(error).__qualname__}: {error}",
                        hint="the state is half restored: do not train with it; build it anew and restore again",
                    ) from error

    def _check_shared_memory(self, read: ReadTensors) -> None:
        shared = list(self._memory.shared())
        stored = [[_on_cpu(tensor) for tensor in tensors] for tensors in shared]
        if shared:
            read(tensor for tensors in stored for tensor in tensors)
        for tensors, values in zip(shared, stored, strict=True):
            if not can_hold(tensors, [value.tensor for value in values]):
                names = " and ".join(tensor.name for tensor in tensors)
                self.differences.append(f"{names} share memory, but the checkpoint has different values for them")
        self.check()

    def stored_form(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """(dtype, global shape) of a stored tensor, or None if there is none of that name."""
        return self._find_stored(name) if name in self.available else None

    def _find_stored(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """(dtype, global shape) of a stored tensor. None, with a difference, unless all its parts are stored."""
        is_first_use = name not in self._used
        self._used.add(name)
        entries = self.available.get(name, ())
        if not entries:
            if is_first_use:
                self.differences.append(f"{name}: not in the checkpoint")
            return None
        if len(entries) == 1 and not any(entries[0].saved_offsets):
            return entries[0].dtype, entries[0].shape  # most tensors are whole; the code below is ten times slower
        parts = {entry.saved_offsets: entry for entry in entries}  # several ranks may have stored the same part
        if len({(part.dtype, len(part.shape)) for part in parts.values()}) != 1:
            self.differences.append(f"{name}: its parts in the checkpoint disagree in dtype or dimensions")
            return None
        shape = spanned_shape((part.saved_offsets, part.shape) for part in parts.values())
        stored, expected = sum(math.prod(part.shape) for part in parts.values()), math.prod(shape)
        if stored != expected:
            if is_first_use:
                self.differences.append(f"{name}: the checkpoint holds {stored} of its {expected} elements")
            return None
        return entries[0].dtype, shape


def _on_cpu(tensor: CapturedTensor) -> CapturedTensor:
    """A new contiguous tensor on the CPU for the same stored bytes."""
    return msgspec.structs.replace(tensor, tensor=torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype], device="cpu"))
