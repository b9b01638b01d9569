"""Passes calls between the nodes of a run: to a round of the agreement, and to interrupt all ranks at once.

A daemon calls the ranks of its own node only. So the lowest rank of each node writes such a call into the store of
torch.distributed, and about once a second looks for those of other nodes, which it has its own daemon repeat. It does
so on a thread of its own: if the store or a node dies, this thread ends or hangs, and nothing waits for it.

The store. Every rank of a job can reach the default store from the start, without an address or a port of ours. torch
has no public function that returns it; `_get_default_store` is the same from before 2.6 until 2.13. A store may be used
from several threads: TCPStore, FileStore and HashStore lock around each operation and release the GIL, and NCCL's
watchdog checks keys from its thread in the same way. `clone()`, which opens a connection of its own, exists only since
2.8 and is not used: an operation of the training on the store may wait for one of ours, which takes one network round
trip. Only `set` and `check` are used, because neither waits for another rank.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch.distributed as dist

from tierd_client.log import log

POLL_S = 1.0
CLOSE_TIMEOUT_S = 1.0
FORCE_TIMEOUT_S = 3.0  # for the other nodes to see it: the store may end with the process that is interrupted
FORCE_POLL_S = 0.05


class CallStore(Protocol):
    """What is used of a torch.distributed.Store."""

    def set(self, key: str, value: str, /) -> None: ...
    def check(self, keys: list[str], /) -> bool: ...


def open_store(run: str, generation: int) -> CallStore:
    """The part of the default store that the ranks of this run use in this generation."""
    default = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    return dist.PrefixStore(f"tierd/{run}/{generation}", default)  # pyright: ignore[reportPrivateImportUsage]


class NodeCalls:
    """`repeat` is called on the thread with the number of a round that another node was called to; `repeat_force` when
    another node's ranks are being interrupted. Calls before `start` are kept; a rank that is not the lowest of its node
    never starts it. `called` and `forced` never wait."""

    def __init__(self, repeat: Callable[[int], None], repeat_force: Callable[[], None]) -> None:
        self._repeat = repeat
        self._repeat_force = repeat_force
        self._lock = threading.Lock()
        self._rounds = 0  # that this node was called to
        self._is_forced = False
        self._has_forced = False  # this rank was the first to know
        self._is_over = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, store: CallStore, rank: int, lowest: Sequence[int]) -> None:
        """`lowest`: the lowest rank of each node, `rank` among them."""
        run = threading.Thread(target=self._run, args=(store, rank, lowest), name="tierd-node-calls", daemon=True)
        self._thread = run
        run.start()

    def called(self, number: int) -> None:
        """The daemon of this node calls to this round."""
        with self._lock:
            self._rounds = max(self._rounds, number + 1)
        self._wake.set()

    def forced(self) -> None:
        """The ranks of this node are being interrupted, and those of the other nodes are to be."""
        self._has_forced = self._is_forced = True
        self._wake.set()

    def on_attach(self) -> None:
        """The daemon may not have received what this rank had it repeat: repeat it. A past call does no harm."""
        if self._thread is not None:
            if self._rounds:
                self._repeat(self._rounds - 1)
            if self._is_forced:
                self._repeat_force()

    def close(self) -> None:
        self._is_over = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S + (FORCE_TIMEOUT_S if self._has_forced else 0.0))

    # ── the thread ──

    def _run(self, store: CallStore, rank: int, lowest: Sequence[int]) -> None:
        try:
            self._pass_on(store, rank)
            if self._has_forced:
                self._force(store, [other for other in lowest if other != rank])
        except (RuntimeError, ValueError, OSError) as error:  # of torch: the store, or the node that serves it, is gone
            if not self._is_over:
                why = str(error).partition("\n")[0]
                log.warning("tierd: requests to stop no longer pass between the nodes: %s", why)

    def _pass_on(self, store: CallStore, rank: int) -> None:
        """Run until the close, or until the other nodes must be interrupted."""
        written = 0
        while not (self._is_over or self._has_forced):
            self._wake.clear()
            while written < self._rounds:
                store.set(f"round-{written}", "")
                written += 1
            if store.check([f"round-{self._rounds}"]):
                number = self._rounds
                self.called(number)
                self._repeat(number)
                continue
            if not self._is_forced and store.check(["force"]):
                self._is_forced = True
                store.set(f"force-seen-{rank}", "")
                self._repeat_force()
            self._wake.wait(POLL_S)

    def _force(self, store: CallStore, others: Sequence[int]) -> None:
        """Returns when the other nodes have seen it, or after FORCE_TIMEOUT_S: this process may serve the store, and is
        about to end."""
        store.set("force", "")
        deadline_s = time.monotonic() + FORCE_TIMEOUT_S
        while not store.check([f"force-seen-{other}" for other in others]) and time.monotonic() < deadline_s:
            time.sleep(FORCE_POLL_S)
