"""A simulated GPU: streams, each of which runs its work in order, and events between them.

Nothing is computed when it is queued. Whoever waits has it done, in any order that the events allow: so a wait that is
missing somewhere shows, sooner or later, as bytes of another time. Tensors are those of the CPU.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("cuda", 0)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.is_done = True  # like an event that was never recorded

    def record(self, stream: Stream) -> None:
        self.is_done = False
        stream.queue.append(self.reached)

    def reached(self) -> bool:
        self.is_done = True
        return True

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.gpu.work_until(lambda: self.is_done)


class Stream:
    """Its queue holds steps that return whether they ran: one that waits for an event does not run yet."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.queue: deque[Callable[[], bool]] = deque()
        gpu.streams.append(self)

    def wait_event(self, event: Event) -> None:
        self.queue.append(lambda: event.is_done)

    def wait_stream(self, other: Stream) -> None:
        event = Event(self.gpu)
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        self.gpu.work_until(lambda: not self.queue)


class Gpu(TorchDispatchMode):
    """Inside `with`, in-place work is queued on the current stream."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.streams: list[Stream] = []
        self.current = Stream(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        match func.name():
            case "aten::fill_.Scalar":
                self._queue([args[0]], [args[1]])
                return args[0]
            case "aten::_foreach_copy_":
                self._queue(args[0], [one.numpy() for one in args[1]])
                return None
            case _:
                return func(*args, **(kwargs or {}))

    def _queue(self, to: list[torch.Tensor], values: list[Any]) -> None:
        """Writes through numpy later, while torch's version counters advance now, as for tensors on a GPU."""
        arrays = [one.numpy() for one in to]

        def work() -> bool:
            for array, value in zip(arrays, values, strict=True):
                array[...] = value
            return True

        self.current.queue.append(work)

    def work(self, steps: int) -> None:
        """Runs up to that many steps of randomly chosen streams."""
        for _ in range(steps):
            if not self._take_one():
                return

    def work_until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            assert self._take_one(), "the streams wait for each other"

    def _take_one(self) -> bool:
        ready = [stream for stream in self.streams if stream.queue]
        self.random.shuffle(ready)
        for stream in ready:
            if stream.queue[0]():
                stream.queue.popleft()
                return True
        return False

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@contextmanager
def gpu_that_draws_lots(seed: int) -> Iterator[Gpu]:
    """Replaces the streams and events of torch.cuda by those of this GPU."""
    gpu = Gpu(seed)
    with pytest.MonkeyPatch.context() as patch, gpu:
        patch.setattr(torch.cuda, "Stream", lambda device: Stream(gpu))
        patch.setattr(torch.cuda, "Event", lambda: Event(gpu))
        patch.setattr(torch.cuda, "current_stream", lambda device: gpu.current)
        patch.setattr(torch.cuda, "stream", gpu.on)
        yield gpu


class Runtime:
    """The part of the CUDA runtime that page-locks memory. It returns the status `refuses_with`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.refuses_with = 0
        self.calls: list[tuple[str, ...]] = []
        self.locked: dict[int, int] = {}
        self._device: torch.device | None = None
        patch.setattr(torch.cuda, "cudart", lambda: self)
        patch.setattr(torch.cuda, "device", self._on)
        patch.setattr(torch.cuda, "synchronize", lambda: self.calls.append(("synchronize", str(self._device))))

    @contextmanager
    def _on(self, device: torch.device) -> Iterator[None]:
        self._device = device
        yield
        self._device = None

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        self.calls.append(("register", str(self._device)))
        if not self.refuses_with:
            self.locked[address] = size_bytes
        return self.refuses_with

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", str(self._device)))
        del self.locked[address]
        return 0
