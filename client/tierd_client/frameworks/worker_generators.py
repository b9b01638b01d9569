"""The generator states of a loader's workers, so that a resumed training draws the same numbers in them.

A worker writes its state after each batch into memory that it shares with the trainer. Batch i is read by worker
i modulo the number of workers, after batch i minus that number: the state that it left is the one to begin batch i
with. A resumed loader gives the first batches to other workers, and each takes over the state for its first batch.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import torch

from tierd.errors import Transient, Unsupported
from tierd_client.state import rng

ROW_BYTES = 16 << 10  # a state takes 10 KiB
LENGTH_BYTES = 4
STARTED = 0  # the row with a worker's state before its first batch; the other rows are used in turn
START_TIMEOUT_S = 60.0


class WorkerGenerators:
    """For one map-style loader with workers, and the iterators over it, one at a time.

    `read_ahead`: the number of batches that the trainer holds and has not trained on, at most.
    """

    def __init__(self, loader: Any, *, read_ahead: int) -> None:
        self._workers = int(loader.num_workers)
        self._is_persistent = bool(loader.persistent_workers)
        depth = loader.prefetch_factor + read_ahead // self._workers + 4
        self._rows = torch.zeros(self._workers, 1 + depth, ROW_BYTES, dtype=torch.uint8).share_memory_()
        self._start = _Start(loader.worker_init_fn, self._rows)
        loader.worker_init_fn = self._start
        loader.collate_fn = _Collate(loader.collate_fn, self._rows)

    def begin_epoch(self) -> None:
        """Before an iterator is made."""
        if not self._is_persistent:
            self._rows[:, :, :LENGTH_BYTES] = 0

    def repeat(self, states: list[bytes]) -> None:
        """Workers that start now begin with these states; with their own ones when there are none."""
        self._start.states = states

    def have_drawn(self) -> bool:
        """Whether a worker has drawn random numbers. Raises Unsupported when their order would be lost."""
        draws = any(_read(row) not in (b"", _read(rows[STARTED])) for rows in self._rows for row in rows[STARTED + 1 :])
        if draws and self._is_persistent:
            raise Unsupported(
                "save the random number generators of a loader's persistent workers, which draw numbers",
                hint="set dataloader_persistent_workers=False",
            )
        return draws

    def states(self, trained: int) -> list[bytes]:
        """The state before each of the next batches, one per worker, after `trained` batches of this iterator."""
        states: list[bytes] = []
        if self._is_persistent:  # they draw no numbers
            return states
        for batch in range(trained, trained + self._workers):
            turn, worker = divmod(batch, self._workers)
            row = STARTED + 1 + (turn - 1) % (self._rows.shape[1] - 1) if turn else STARTED
            states.append(self._wait(worker, row))
        return states

    def _wait(self, worker: int, row: int) -> bytes:
        """A row that is written now or as soon as the worker has started."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (state := _read(self._rows[worker, row])):
            if time.monotonic() > deadline:
                raise Transient(f"save the generators of a loader: worker {worker} did not start within 60 s")
            time.sleep(0.01)
        return state


class _Start:
    """The worker_init_fn."""

    def __init__(self, start: Any, rows: torch.Tensor) -> None:
        self.states: list[bytes] = []
        self._start = start
        self._rows = rows

    def __call__(self, worker: int) -> None:
        if self._start is not None:
            self._start(worker)
        if self.states:
            rng.restore(msgspec.msgpack.decode(self.states[worker]))
        _write(self._rows[worker, STARTED])


class _Collate:
    """The collate_fn, in a worker."""

    def __init__(self, collate: Any, rows: torch.Tensor) -> None:
        self._collate = collate
        self._rows = rows
        self._batches = 0

    def __call__(self, samples: Any) -> Any:
        batch = self._collate(samples)
        worker = torch.utils.data.get_worker_info()
        assert worker is not None, "it is called in a worker"
        _write(self._rows[worker.id, STARTED + 1 + self._batches % (self._rows.shape[1] - 1)])
        self._batches += 1
        return batch


def _write(row: torch.Tensor) -> None:
    state = msgspec.msgpack.encode(rng.capture())
    row[LENGTH_BYTES : LENGTH_BYTES + len(state)] = torch.frombuffer(bytearray(state), dtype=torch.uint8)
    length = bytearray(len(state).to_bytes(LENGTH_BYTES, "little"))
    row[:LENGTH_BYTES] = torch.frombuffer(length, dtype=torch.uint8)


def _read(row: torch.Tensor) -> bytes:
    length = int.from_bytes(row[:LENGTH_BYTES].numpy().tobytes(), "little")
    return row[LENGTH_BYTES : LENGTH_BYTES + length].numpy().tobytes()
