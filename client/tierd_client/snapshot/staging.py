"""Copies a captured state into a slot, in the byte format of a shard.

The layout and the views of the slot are kept while names, shapes and dtypes stay the same. The header is written last.
Tensors that may be copied later are copied by threads and by CUDA streams of their own, while training goes on.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import torch

from tierd.errors import Torn
from tierd.format.shard import DTYPE_BYTES, HeaderOverflow, Layout, TensorSpec, plan_layout
from tierd.format.text import listed
from tierd_client.slots.slot import Slot
from tierd_client.snapshot.copying import Copier, copy_each
from tierd_client.snapshot.guards import Watch
from tierd_client.state.tensors import DTYPES, contiguous_strides
from tierd_client.state.training_state import Captured

_CPU = torch.device("cpu")
PREFAULT_WAIT_S = 60.0  # memory that takes longer is being swapped: the copy itself faults in the rest

ByDevice = dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]]
"""(to, from) of the tensors on each device."""


class Stager:
    """Copies one rank's snapshots."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._signature: list[list[Any]] = []
        self._order: list[int] = []
        self._views: weakref.WeakKeyDictionary[Slot, tuple[Layout, torch.Tensor, list[torch.Tensor]]]
        self._views = weakref.WeakKeyDictionary()
        self._copier = Copier()
        self._streams = Streams()

    def plan(self, captured: Captured, metadata: dict[str, Any]) -> Layout:
        """The layout of the captured tensors, all of which this rank writes. A slot needs its `size_bytes`.

        The same object as before unless names, shapes, dtypes or offsets have changed.
        """
        tensors = captured.tensors
        signature = [
            [tensor.name for tensor in tensors],
            [tensor.dtype for tensor in tensors],
            [tensor.shape for tensor in tensors],
            [tensor.saved_offsets for tensor in tensors],
            [tensor.torch_dtype for tensor in tensors],
        ]
        if self._layout is None or signature != self._signature:
            specs = [
                TensorSpec(
                    name=t.name, dtype=t.dtype, shape=t.shape, saved_offsets=t.saved_offsets, torch_dtype=t.torch_dtype
                )
                for t in tensors
            ]
            self._layout = plan_layout(specs, metadata)
            index = {spec.name: number for number, spec in enumerate(specs)}
            self._order = [index[entry.name] for entry in self._layout.tensors]
            self._signature = signature
        return self._layout

    def begin(
        self, captured: Captured, slot: Slot, metadata: dict[str, Any], deferrable: Mapping[str, torch.Tensor]
    ) -> Staging:
        """Copies all tensors but `deferrable`: names, each with the live tensor of that memory. Those may change only
        after `Staging.release`.

        Grows the slot when it is too small, and the header's area when the metadata no longer fits. Raises Full when
        there is no memory for that, Unsupported when the header would exceed 100 MB.
        """
        layout = self.plan(captured, metadata)
        self._streams.synchronize()
        slot.grow(layout.size_bytes)
        # Touching pages before that would be no faster, and a SIGBUS where memory is short.
        slot.wait_prefaulted(PREFAULT_WAIT_S)
        now: ByDevice = defaultdict(lambda: ([], []))
        later: ByDevice = defaultdict(lambda: ([], []))
        watched: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        for to, index in zip(self._destinations(slot, layout), self._order, strict=True):
            captured_tensor = captured.tensors[index]
            tensor, name = captured_tensor.tensor, captured_tensor.name
            live = deferrable.get(name)
            if live is None and tensor.is_cpu:
                destinations, sources = now[_CPU]  # one key for "cpu" and "cpu:0"
            else:
                tensor = tensor.detach()  # keeps the memory if the live tensor gets other memory before the copy
                destinations, sources = (now if live is None else later)[_CPU if tensor.is_cpu else tensor.device]
            if live is not None:
                watched.append((name, live, tensor))
            destinations.append(to)
            sources.append(tensor)
        gpus = [device for device in (*now, *later) if device.type == "cuda"]
        if gpus:
            slot.pin(gpus[0])
        staging = Staging(slot.tensor, layout, metadata, later, Watch(watched), self._copier, self._streams)
        try:
            staging.copy(now)
        except HeaderOverflow:
            self._layout = None  # a new plan has room for this header
            return self.begin(captured, slot, metadata, deferrable)
        return staging

    def _destinations(self, slot: Slot, layout: Layout) -> list[torch.Tensor]:
        """The tensors of the layout, as views of the slot's mapping."""
        mapping = slot.tensor
        views = self._views.get(slot)
        if views is None or views[0] is not layout or views[1] is not mapping:
            typed = {entry.dtype: mapping.view(DTYPES[entry.dtype]) for entry in layout.tensors}
            tensors = [
                # One call per tensor: there may be many, and the first snapshot into a slot waits for them.
                typed[entry.dtype].as_strided(
                    entry.shape, contiguous_strides(entry.shape), entry.offset // DTYPE_BYTES[entry.dtype]
                )
                for entry in layout.tensors
            ]
            views = self._views[slot] = layout, mapping, tensors
        return views[2]


@dataclass(eq=False, slots=True)
class Staging:
    """One snapshot being copied into its slot. All methods run on the training thread; a call that an interrupt ended
    may be repeated. `deferred`: the tensors that `start` copies, while training goes on."""

    mapping: torch.Tensor
    layout: Layout
    metadata: dict[str, Any]
    deferred: ByDevice
    watch: Watch
    copier: Copier
    streams: Streams
    changed: list[str] | None = None
    """Names of tensors that were changed while they were being copied; None before `release`."""
    _header: bytes = b""
    _jobs: list[Future[None]] = field(default_factory=list[Future[None]])
    _copies: list[_CudaCopy] = field(default_factory=list["_CudaCopy"])
    _is_started: bool = False
    _error: RuntimeError | None = None

    def copy(self, tensors: ByDevice) -> None:
        """Returns when training may change them. Copies from GPUs are queued first and run meanwhile; the header is
        encoded meanwhile. Raises HeaderOverflow."""
        for device, (to, from_) in tensors.items():
            if device.type == "cuda":
                self._copies.append(self.streams.copy(device, to, from_))
        self.copier.copy(*tensors.get(_CPU, ([], [])), meanwhile=self._encode_header)
        for device, (to, from_) in tensors.items():
            if device.type not in ("cpu", "cuda"):
                copy_each(to, from_)
        for copy in self._copies:
            copy.hold_back()

    def _encode_header(self) -> None:
        self._header = self.layout.encode_header(self.metadata)

    def start(self) -> None:
        """Start to copy the deferred tensors. An error or an interrupt in here fails the snapshot in `finish`."""
        try:
            for device, (to, from_) in self.deferred.items():
                if device.type == "cuda":
                    self._copies.append(self.streams.copy(device, to, from_))
                else:
                    self.copier.start(to, from_, self._jobs)
        except RuntimeError as error:  # for example no memory on the GPU to gather a strided tensor in
            self._error = error
        self._is_started = True

    def release(self) -> None:
        """Returns when training may change everything: host memory has been copied, and work that is queued on a GPU
        from now on waits there for its copy."""
        wait(self._jobs)
        for copy in self._copies:
            copy.hold_back()
        if self.changed is None:
            self.changed = self.watch.changed()

    @property
    def is_copied(self) -> bool:
        return all(job.done() for job in self._jobs) and all(copy.is_done for copy in self._copies)

    def finish(self) -> None:
        """Returns when the whole shard is in the slot. Raises Torn when it is not the state that was captured, and
        torch's RuntimeError when a copy failed."""
        self.release()
        for copy in self._copies:
            copy.wait()
        for job in self._jobs:
            job.result()
        if self._error is not None:
            raise self._error
        if self.deferred and not self._is_started:
            raise Torn("copy the state: it was interrupted before every copy was started")
        if self.changed:
            raise Torn(
                f"copy the state: {listed(self.changed)} changed in place before the copy was done",
                hint='call client.wait_staged() before such a change, or use staging="sync"',
            )
        self.mapping.numpy().data[: len(self._header)] = self._header


class Streams:
    """One CUDA stream for each GPU, so that copies run beside the computation."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def copy(self, device: torch.device, to: list[torch.Tensor], from_: list[torch.Tensor]) -> _CudaCopy:
        """Queue a copy behind all work that is queued on the current stream."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            copy_each(to, from_, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return _CudaCopy(device, event, from_)

    def synchronize(self) -> None:
        """Wait for all copies: one of an interrupted snapshot must not write into a slot that is used again."""
        for stream in self._streams.values():
            stream.synchronize()


@dataclass(frozen=True, slots=True)
class _CudaCopy:
    """`sources` keeps their memory from being reused while the copy runs."""

    device: torch.device
    event: torch.cuda.Event
    sources: list[torch.Tensor]

    @property
    def is_done(self) -> bool:
        return self.event.query()

    def hold_back(self) -> None:
        """Work that is queued from now on waits on the GPU for the copy; the caller does not."""
        torch.cuda.current_stream(self.device).wait_event(self.event)

    def wait(self) -> None:
        self.event.synchronize()
