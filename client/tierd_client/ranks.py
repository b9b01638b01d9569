"""What the ranks of a run tell each other: small numbers and bytes over torch.distributed, on the CPU, no pickle.

A run of one process needs none of it, and every call is then free. A gloo group of our own keeps us out of the
training's NCCL streams.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar, cast

import msgspec
import torch
import torch.distributed as dist

from tierd.errors import BadConfig, TierdError, Transient, Unsupported, from_kind

T = TypeVar("T")

APART_TIMEOUT = timedelta(days=1)  # ranks that wait there hold up nobody; a peer that dies ends the wait at once
LOOK_MIN_S, LOOK_MAX_S = 0.001, 0.05


class Ranks:
    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._thread = threading.get_ident()
        self._groups = [_new_group()] if world_size > 1 else []
        self._apart = _new_group(timeout=APART_TIMEOUT) if world_size > 1 else None
        # All meet once: a rank that left at once would break the connections that others are still making.
        self.maximum([0])
        self.maximum_apart([0], lambda: False)

    def allow_thread(self) -> None:
        """All ranks, before one thread beside the one that made this begins to exchange, over a group of its own:
        ranks must not come to one group with what two threads do, in an order of their own."""
        if len(self._groups) == 1:
            self._groups.append(_new_group())
            with _exchanging():
                dist.barrier(group=self._groups[1])  # as above

    @property
    def _group(self) -> dist.ProcessGroup | None:
        """The group of the calling thread."""
        if not self._groups:
            return None
        return self._groups[0] if threading.get_ident() == self._thread else self._groups[-1]

    def together(self, work: Callable[[], T]) -> T:
        """What `work` returns here, once it has gone well on every rank. Else all raise: the own error, or the one
        of the lowest rank that has one. So no rank goes on alone into an exchange that the others never join."""
        result: T | None = None
        error: TierdError | None = None
        try:
            result = work()
        except TierdError as raised:
            if self._group is None:
                raise
            error = raised
        self.agree(error)
        return cast("T", result)

    def maximum(self, values: Sequence[int]) -> list[int]:
        """Element by element the highest that any rank gave."""
        if self._group is None:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64)
        with _exchanging():
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        return [int(value) for value in tensor]

    def maximum_apart(self, values: Sequence[int], is_over: Callable[[], bool]) -> list[int]:
        """As `maximum`, on one other thread than the training's. Raises Transient when a rank has gone, or it
        `is_over` before all have come."""
        if self._apart is None:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64)
        pause_s = LOOK_MIN_S
        with _exchanging():
            work = cast("dist.Work", dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._apart, async_op=True))
            # Looking, not waiting in there: a thread that the interpreter's end finds inside gloo aborts the process.
            while not work.is_completed():
                if is_over():
                    raise Transient("meet the other ranks: it is over here")
                time.sleep(pause_s)
                pause_s = min(LOOK_MAX_S, pause_s * 1.5)
            work.wait()
        return [int(value) for value in tensor]

    def from_first(self, content: bytes | None) -> bytes | None:
        """What rank 0 gave; the others give nothing."""
        if self._group is None:
            return content
        length = torch.tensor([-1 if content is None else len(content)], dtype=torch.int64)
        with _exchanging():
            dist.broadcast(length, 0, group=self._group)
            if int(length) < 0:
                return None
            buffer = torch.empty(int(length), dtype=torch.uint8)
            if self.rank == 0 and content:
                buffer.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
            dist.broadcast(buffer, 0, group=self._group)
        return bytes(buffer.numpy())

    def gather(self, content: bytes) -> list[bytes]:
        """What every rank gave, by rank."""
        if self._group is None:
            return [content]
        longest = self.maximum([len(content)])[0]
        # One shape for all: the length, then the content padded to the longest.
        mine = torch.zeros(8 + longest, dtype=torch.uint8)
        framed = len(content).to_bytes(8, "little") + content
        mine[: len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        with _exchanging():
            dist.all_gather(everyone, mine, group=self._group)
        raws = [bytes(one.numpy()) for one in everyone]
        return [raw[8 : 8 + int.from_bytes(raw[:8], "little")] for raw in raws]

    def close(self) -> None:
        """Give the groups back, unless the training has taken torch.distributed down before."""
        groups, self._groups = self._groups, []
        for group in groups:
            _destroy(group)
        self.leave_apart()

    def leave_apart(self) -> None:
        """Whoever waits in `maximum_apart` for this rank gets Transient."""
        group, self._apart = self._apart, None
        _destroy(group)

    def agree(self, error: TierdError | None) -> None:
        """All ranks return, or all raise: the own error, or the one of the lowest rank that has one."""
        if not self.maximum([error is not None])[0]:
            return
        told = self.gather(b"" if error is None else msgspec.json.encode((error.kind, error.message, error.hint)))
        if error is not None:
            raise error
        for rank, raw in enumerate(told):
            if raw:
                kind, message, hint = msgspec.json.decode(raw, type=tuple[str, str, str])
                raise from_kind(kind, f"rank {rank}: {message}", hint)


def _new_group(timeout: timedelta | None = None) -> dist.ProcessGroup:
    return cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=timeout))


def _destroy(group: dist.ProcessGroup | None) -> None:
    if group is not None and dist.is_initialized():
        with contextlib.suppress(RuntimeError, ValueError):
            dist.destroy_process_group(group)


@contextlib.contextmanager
def _exchanging() -> Generator[None]:
    """Gloo says that a peer has gone by a RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        raise Transient(
            f"exchange with the other ranks: {str(error).splitlines()[0]}", hint="has one of them died?"
        ) from error


def find_ranks(rank: int | None, world_size: int | None, environ: Mapping[str, str]) -> Ranks:
    """This process among its peers: the arguments, else torch.distributed, else the launcher's environment.

    Raises BadConfig when there are peers and no way to speak to them, Unsupported when they span nodes.
    """
    is_initialized = dist.is_available() and dist.is_initialized()
    if rank is None:
        rank = dist.get_rank() if is_initialized else _number(environ, "RANK", 0)
    if world_size is None:
        world_size = dist.get_world_size() if is_initialized else _number(environ, "WORLD_SIZE", 1)
    if not 0 <= rank < world_size:
        raise BadConfig(f"connect as rank {rank} of {world_size}", hint="check rank and world_size, or $RANK")
    if world_size > 1 and not is_initialized:
        raise BadConfig(
            f"connect as rank {rank} of {world_size}: torch.distributed is not initialized",
            hint="call torch.distributed.init_process_group() before tierd_client.connect()",
        )
    if world_size > 1 and (rank, world_size) != (dist.get_rank(), dist.get_world_size()):
        raise BadConfig(
            f"connect as rank {rank} of {world_size}: torch.distributed says rank {dist.get_rank()} of "
            f"{dist.get_world_size()}",
            hint="leave rank and world_size out",
        )
    if _number(environ, "LOCAL_WORLD_SIZE", world_size) < world_size:
        raise Unsupported(
            f"connect as rank {rank} of {world_size}: the ranks span several nodes",
            hint="this version commits the ranks of one node; run one tierd run per node, or wait for the next",
        )
    return Ranks(rank, world_size)


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise BadConfig(f"connect: ${name} is {text!r}, expected a number") from None
