"""Copies a captured state into a slot, in its final byte format: device to slot, once, at the speed of memory.

The layout and the views of the slot are made once and kept while names, shapes and dtypes stay. The header is
written last.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

import torch

from tierd.format.shard import HeaderOverflow, Layout, TensorSpec, plan_layout
from tierd_client.copying import Copier, copy_each
from tierd_client.slots import Slot
from tierd_client.state import Captured
from tierd_client.tensors import DTYPES, CapturedTensor, from_bytes

PREFAULT_WAIT_S = 60.0  # memory that takes longer is being swapped: then the copy may as well fault it in


class Stager:
    """One rank's way into its slots."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._signature: list[object] = []
        self._order: list[int] = []
        self._views: weakref.WeakKeyDictionary[Slot, _Views] = weakref.WeakKeyDictionary()
        self._copier = Copier()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def plan(self, captured: Captured, owned: Collection[str] | None, metadata: dict[str, Any]) -> Layout:
        """The layout for what this rank writes (all, when `owned` is None): a slot needs its `size_bytes`.

        The same one as before unless names, shapes, dtypes or offsets have changed.
        """
        tensors = _mine(captured, owned)
        signature = [(t.name, t.tensor.dtype, t.tensor.shape, t.saved_offsets) for t in tensors]
        if self._layout is not None and signature == self._signature:
            return self._layout
        return self._replan(tensors, signature, metadata)

    def stage(self, captured: Captured, owned: Collection[str] | None, slot: Slot, metadata: dict[str, Any]) -> int:
        """Writes the shard into the slot; its size in bytes. Returns when the bytes are there.

        Grows the slot when it is too small, or when the metadata has outgrown its area. Raises Full when there
        is no memory for that, Unsupported when the header would pass 100 MB.
        """
        layout = self.plan(captured, owned, metadata)
        tensors = _mine(captured, owned)
        try:
            header = layout.encode_header(metadata)
        except HeaderOverflow:
            layout = self._replan(tensors, self._signature, metadata)
            header = layout.encode_header(metadata)
        slot.grow(layout.size_bytes)
        # Touching pages that are not there yet would be no faster, and a SIGBUS where memory is short.
        slot.wait_prefaulted(PREFAULT_WAIT_S)
        self._copy(self._destinations(slot, layout), [tensors[index].tensor for index in self._order], slot)
        slot.view[: len(header)] = header
        return layout.size_bytes

    def _replan(self, tensors: list[CapturedTensor], signature: list[Any], metadata: dict[str, Any]) -> Layout:
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

    def _copy(self, destinations: list[torch.Tensor], sources: list[torch.Tensor], slot: Slot) -> None:
        """Device by device; the GPUs first, as their copies run by themselves."""
        by_device: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for destination, source in zip(destinations, sources, strict=True):
            to, from_ = by_device.setdefault(source.device, ([], []))
            to.append(destination)
            from_.append(source)
        events = [
            self._copy_from_cuda(device, *pairs, slot) for device, pairs in by_device.items() if device.type == "cuda"
        ]
        for device, (to, from_) in by_device.items():
            if device.type == "cpu":
                self._copier.copy(to, from_)
            elif device.type != "cuda":
                copy_each(to, from_)
        for event in events:
            event.synchronize()

    def _copy_from_cuda(
        self, device: torch.device, to: list[torch.Tensor], from_: list[torch.Tensor], slot: Slot
    ) -> torch.cuda.Event:
        """Copies on a stream of its own, behind all work queued so far. The event says when the bytes are there."""
        slot.pin()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            copy_each(to, from_, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return event


class _Views:
    """The tensors of a layout, as views of a slot's mapping."""

    def __init__(self, mapping: torch.Tensor, layout: Layout) -> None:
        self.mapping = mapping
        self.layout = layout
        self.tensors = [
            from_bytes(mapping[entry.offset : entry.offset + entry.size_bytes], DTYPES[entry.dtype], entry.shape)
            for entry in layout.tensors
        ]


def _mine(captured: Captured, owned: Collection[str] | None) -> list[CapturedTensor]:
    return captured.tensors if owned is None else [tensor for tensor in captured.tensors if tensor.key in owned]
