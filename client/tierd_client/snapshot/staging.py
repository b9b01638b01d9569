"""Copies a captured state into a slot, in its final byte format: device to slot, once, at the speed of memory.

The layout and the views of the slot are made once and kept while names, shapes and dtypes stay. The header is
written last. Tensors that may be copied later are copied by threads and by streams of their own, while training
goes on.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Collection, Mapping
from concurrent.futures import Future, wait
from typing import Any

import torch

from tierd.errors import Torn
from tierd.format.shard import DTYPE_BYTES, HeaderOverflow, Layout, TensorSpec, plan_layout
from tierd_client.snapshot.copying import Copier, copy_each
from tierd_client.snapshot.guards import Watch
from tierd_client.snapshot.slot import Slot
from tierd_client.state.tensors import DTYPES, CapturedTensor, contiguous_strides
from tierd_client.state.training_state import Captured

_CPU = torch.device("cpu")
NAMES_MAX = 5  # of the tensors that a message lists
PREFAULT_WAIT_S = 60.0  # memory that takes longer is being swapped: then the copy may as well fault it in


class Stager:
    """One rank's way into its slots."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._signature: list[list[Any]] = []
        self._order: list[int] = []
        self._views: weakref.WeakKeyDictionary[Slot, _Views] = weakref.WeakKeyDictionary()
        self._copier = Copier()
        self._streams = Streams()

    def plan(self, captured: Captured, owned: Collection[str] | None, metadata: dict[str, Any]) -> Layout:
        """The layout for what this rank writes (all, when `owned` is None): a slot needs its `size_bytes`.

        The same one as before unless names, shapes, dtypes or offsets have changed.
        """
        tensors = _mine(captured, owned)
        signature = [
            [one.name for one in tensors],
            [one.dtype for one in tensors],
            [one.shape for one in tensors],
            [one.saved_offsets for one in tensors],
        ]
        if self._layout is not None and signature == self._signature:
            return self._layout
        return self._replan(tensors, signature, metadata)

    def stage(self, captured: Captured, owned: Collection[str] | None, slot: Slot, metadata: dict[str, Any]) -> int:
        """Writes the shard into the slot; its size in bytes. Returns when the bytes are there. Raises as `begin`."""
        staging = self.begin(captured, owned, slot, metadata, {})
        staging.finish()
        return staging.size_bytes

    def begin(
        self,
        captured: Captured,
        owned: Collection[str] | None,
        slot: Slot,
        metadata: dict[str, Any],
        deferrable: Mapping[str, torch.Tensor],
    ) -> Staging:
        """Copies all but `deferrable`: names, each with the live object whose memory it is. Those may change only
        after `Staging.release`.

        Grows the slot when it is too small, or when the metadata has outgrown its area. Raises Full when there
        is no memory for that, Unsupported when the header would pass 100 MB.
        """
        tensors = _mine(captured, owned)
        layout = self.plan(captured, owned, metadata)
        try:
            return self._begin(tensors, layout, slot, metadata, deferrable)
        except HeaderOverflow:
            layout = self._replan(tensors, self._signature, metadata)
            return self._begin(tensors, layout, slot, metadata, deferrable)

    def _begin(
        self,
        tensors: list[CapturedTensor],
        layout: Layout,
        slot: Slot,
        metadata: dict[str, Any],
        deferrable: Mapping[str, torch.Tensor],
    ) -> Staging:
        """Raises HeaderOverflow: then the slot is as good as untouched."""
        self._streams.drain()
        slot.grow(layout.size_bytes)
        # Touching pages that are not there yet would be no faster, and a SIGBUS where memory is short.
        slot.wait_prefaulted(PREFAULT_WAIT_S)
        now: ByDevice = defaultdict(lambda: ([], []))
        later: ByDevice = defaultdict(lambda: ([], []))
        watched: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        for to, index in zip(self._destinations(slot, layout), self._order, strict=True):
            one = tensors[index]
            tensor = one.tensor
            live = deferrable.get(one.name)
            if live is None and tensor.is_cpu:
                destinations, sources = now[_CPU]  # there is a "cpu:0" too
            else:
                tensor = tensor.detach()  # keeps the memory, whatever becomes of the live object before it is copied
                destinations, sources = (now if live is None else later)[_CPU if tensor.is_cpu else tensor.device]
            if live is not None:
                watched.append((one.name, live, tensor))
            destinations.append(to)
            sources.append(tensor)
        gpus = [device for device in (*now, *later) if device.type == "cuda"]
        if gpus:
            slot.pin(gpus[0])
        staging = Staging(slot.tensor, layout, metadata, later, Watch(watched), self._copier, self._streams)
        staging.copy(now)
        return staging

    def _replan(self, tensors: list[CapturedTensor], signature: list[list[Any]], metadata: dict[str, Any]) -> Layout:
        specs = [TensorSpec(name=t.name, dtype=t.dtype, shape=t.shape, saved_offsets=t.saved_offsets) for t in tensors]
        self._layout = plan_layout(specs, metadata)
        index = {spec.name: number for number, spec in enumerate(specs)}
        self._order = [index[entry.name] for entry in self._layout.tensors]
        self._signature = signature
        return self._layout

    def _destinations(self, slot: Slot, layout: Layout) -> list[torch.Tensor]:
        views = self._views.get(slot)
        if views is None or views.layout is not layout or views.mapping is not slot.tensor:
            views = self._views[slot] = _Views(slot.tensor, layout)
        return views.tensors


ByDevice = dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]]
"""(to, from) of the tensors on each device."""


class Staging:
    """One snapshot on its way into its slot. Everything here is done by the thread that trains; what it is interrupted
    in, it may call again."""

    def __init__(
        self,
        mapping: torch.Tensor,
        layout: Layout,
        metadata: dict[str, Any],
        later: ByDevice,
        watch: Watch,
        copier: Copier,
        streams: Streams,
    ) -> None:
        self.size_bytes = layout.size_bytes
        self._mapping = mapping
        self._layout = layout
        self._metadata = metadata
        self._header = b""
        self._later = later
        self._watch = watch
        self._copier = copier
        self._streams = streams
        self._jobs: list[Future[None]] = []
        self._copies: list[_CudaCopy] = []
        self._is_started = not later
        self._trouble: RuntimeError | None = None
        self.changed: list[str] | None = None
        """Names of tensors that were changed while they were being copied; None until training was let go."""

    @property
    def is_deferred(self) -> bool:
        return bool(self._later)

    def copy(self, tensors: ByDevice) -> None:
        """Returns when training may change them; the GPUs first, as their copies run by themselves. The header is made
        meanwhile. Raises HeaderOverflow."""
        for device, (to, from_) in tensors.items():
            if device.type == "cuda":
                self._copies.append(self._streams.copy(device, to, from_))
        self._copier.copy(*tensors.get(_CPU, ([], [])), meanwhile=self._encode_header)
        for device, (to, from_) in tensors.items():
            if device.type not in ("cpu", "cuda"):
                copy_each(to, from_)
        for one in self._copies:
            one.hold_back()

    def _encode_header(self) -> None:
        self._header = self._layout.encode_header(self._metadata)

    def start(self) -> None:
        """Have the rest copied. What goes wrong in here, or interrupts it, spoils the snapshot, and `finish` knows."""
        try:
            for device, (to, from_) in self._later.items():
                if device.type == "cuda":
                    self._copies.append(self._streams.copy(device, to, from_))
                else:
                    self._copier.start(to, from_, self._jobs)
        except RuntimeError as error:  # no memory on the GPU to gather a strided tensor in, say
            self._trouble = error
        self._is_started = True

    def release(self) -> None:
        """Returns when training may change everything: threads have read what is in host memory, and what is queued for
        a GPU from now on waits there for its copy."""
        wait(self._jobs)
        for one in self._copies:
            one.hold_back()
        if self.changed is None:
            self.changed = self._watch.changed()

    @property
    def is_copied(self) -> bool:
        return all(one.done() for one in self._jobs) and all(one.is_done for one in self._copies)

    def finish(self) -> None:
        """Returns when the whole shard is in the slot. Raises Torn when it would not be what was captured, torch's
        RuntimeError when a copy went wrong."""
        self.release()
        for one in self._copies:
            one.wait()
        for one in self._jobs:
            one.result()
        if self._trouble is not None:
            raise self._trouble
        if not self._is_started:
            raise Torn("copy the state: it was interrupted before all of it was being copied")
        if self.changed:
            raise Torn(
                f"copy the state: {_listed(self.changed)} changed in place before the copy was done",
                hint='call client.wait_staged() before such a change, or use staging="sync"',
            )
        self._mapping.numpy().data[: len(self._header)] = self._header


class Streams:
    """A stream of its own for each GPU, so that copies run beside the computation."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def copy(self, device: torch.device, to: list[torch.Tensor], from_: list[torch.Tensor]) -> _CudaCopy:
        """Behind all work queued so far."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            copy_each(to, from_, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return _CudaCopy(device, event, from_)

    def drain(self) -> None:
        """Until nothing is being copied: what a broken-off snapshot had queued must not reach a slot's next one."""
        for stream in self._streams.values():
            stream.synchronize()


class _CudaCopy:
    """`from_` is kept: its memory must not be given to others while the copy runs."""

    def __init__(self, device: torch.device, event: torch.cuda.Event, from_: list[torch.Tensor]) -> None:
        self._device = device
        self._event = event
        self._from = from_

    @property
    def is_done(self) -> bool:
        return self._event.query()

    def hold_back(self) -> None:
        """Work that is queued from now on waits on the GPU for the copy; the caller does not."""
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def wait(self) -> None:
        self._event.synchronize()


def _listed(names: list[str]) -> str:
    return ", ".join(names[:NAMES_MAX]) + (f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else "")


class _Views:
    """The tensors of a layout, as views of a slot's mapping."""

    def __init__(self, mapping: torch.Tensor, layout: Layout) -> None:
        self.mapping = mapping
        self.layout = layout
        typed = {entry.dtype: mapping.view(DTYPES[entry.dtype]) for entry in layout.tensors}
        self.tensors = [
            # One call for each: there may be very many, and the first snapshot into a slot waits for them.
            typed[entry.dtype].as_strided(
                entry.shape, contiguous_strides(entry.shape), entry.offset // DTYPE_BYTES[entry.dtype]
            )
            for entry in layout.tensors
        ]


def _mine(captured: Captured, owned: Collection[str] | None) -> list[CapturedTensor]:
    return captured.tensors if owned is None else [tensor for tensor in captured.tensors if tensor.key in owned]
