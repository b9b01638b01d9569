"""The exchanges among the ranks of a run: small numbers and bytes over torch.distributed, on the CPU, without pickle.

With one process every call returns at once. The groups are gloo groups of our own, apart from the training's NCCL
streams.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar, cast

import msgspec
import torch
import torch.distributed as dist

from tierd.errors import BadConfig, TierdError, Transient, from_kind

T = TypeVar("T")

BACKGROUND_TIMEOUT = timedelta(days=1)  # a wait there delays no training, and ends at once when a peer dies
CPU = torch.device("cpu")  # named in every tensor, because a program can set another default device
BROADCAST_BYTES = 1024  # of the first exchange of a broadcast
# gloo's `all_reduce` sends a short tensor in pieces around a ring of all ranks, twice. For one number and up to this
# many ranks it was faster than a gather to rank 0 and a broadcast, for five numbers slower (on one host, two cores).
RING_RANKS_MAX = 16
POLL_MIN_S, POLL_MAX_S = 0.001, 0.05


class Ranks:
    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._thread = threading.get_ident()
        # None: an exchange over it has failed.
        self._groups: list[dist.ProcessGroup | None] = [_new_group()] if world_size > 1 else []
        self._background = _new_group(timeout=BACKGROUND_TIMEOUT) if world_size > 1 else None
        # A barrier: if a rank left now, it would break connections that other ranks are still opening.
        self.maximum([0])
        self.background_maximum([0], lambda: False)

    def allow_thread(self) -> None:
        """All ranks. From now on one thread beside the one that constructed this may exchange too, over a group of its
        own: in one group, the collectives of two threads could come in a different order on each rank."""
        if len(self._groups) == 1:
            self._groups.append(_new_group())
            with _exchanging():
                dist.barrier(group=self._groups[1])  # as in __init__

    @property
    def _group(self) -> dist.ProcessGroup:
        """The group of the calling thread."""
        group = self._groups[self._index]
        if group is None:
            raise Transient("exchange with the other ranks: an earlier one failed", hint="has one of them died?")
        return group

    @property
    def _index(self) -> int:
        return 0 if threading.get_ident() == self._thread else -1

    @contextlib.contextmanager
    def _exchanging(self) -> Generator[None]:
        """As the function, and closes the group's connections here after a failure. Some ranks wait for this one, not
        for the peer that has gone: without the close they would hang if this rank caught the error and went on."""
        groups, index = self._groups, self._index
        try:
            with _exchanging():
                yield
        except Transient as error:
            if error.__cause__ is not None:
                # The last reference to the group keeps its connections open: that may be a local of a frame of torch.
                traceback.clear_frames(error.__cause__.__traceback__)
            _destroy(groups[index])
            groups[index] = None
            raise

    def run_on_all(self, work: Callable[[], T]) -> T:
        """What `work` returns here, once it has succeeded on every rank. Else all raise as `raise_on_all` does, so that
        no rank waits alone in the next exchange."""
        return self.run_and_maximum(lambda: (work(), []), [])[0]

    def run_and_maximum(
        self, work: Callable[[], tuple[T, Sequence[int]]], if_failed: Sequence[int]
    ) -> tuple[T, list[int]]:
        """Like `run_on_all`, and also the `maximum` of the numbers that `work` returns, in one exchange. All ranks have
        equally many. `if_failed`: what a rank sends if its `work` raises: as many numbers, of any value."""
        if not self._groups:
            result, values = work()
            return result, list(values)
        outcome, error = _outcome(work)
        result, values = outcome or (None, if_failed)
        has_failed, *maxima = self.maximum([error is not None, *values])
        if has_failed:
            self._raise_first(error)
        return cast("T", result), maxima

    def run_and_broadcast(self, work: Callable[[], T], content: bytes) -> tuple[T, bytes]:
        """Like `run_on_all`, and also rank 0's `content`, which its `work` does not change, in one exchange."""
        if not self._groups:
            return work(), content
        result, error = _outcome(work)
        frame = self._frame(content)
        with self._exchanging():
            frame[-1] = self._maximum_on_first(torch.tensor([error is not None], dtype=torch.uint8, device=CPU))[0]
            dist.broadcast(frame, 0, group=self._group)
        if frame[-1]:
            self._raise_first(error)
        return cast("T", result), self._whole(content, frame)

    def raise_on_all(self, error: Exception | None) -> None:
        """Returns on all ranks when none has an error. Else every rank raises: its own error, or that of the lowest
        rank that has one, as a TierdError."""
        if self.maximum([error is not None])[0]:
            self._raise_first(error)

    def _raise_first(self, error: Exception | None) -> None:
        errors = self.gather(b"" if error is None else _encode_error(error))
        if error is not None:
            raise error
        for rank, raw in enumerate(errors):
            if raw:
                kind, message, hint = msgspec.json.decode(raw, type=tuple[str, str, str])
                raise from_kind(kind, f"rank {rank}: {message}", hint)

    def maximum(self, values: Sequence[int]) -> list[int]:
        """The maximum over the ranks, element by element."""
        if not self._groups:
            return list(values)
        highest = torch.tensor(values, dtype=torch.int64, device=CPU)
        with self._exchanging():
            if len(values) == 1 and self.world_size <= RING_RANKS_MAX:
                dist.all_reduce(highest, dist.ReduceOp.MAX, group=self._group)
            else:
                highest = self._maximum_on_first(highest)
                dist.broadcast(highest, 0, group=self._group)
        return highest.tolist()

    def _maximum_on_first(self, own: torch.Tensor) -> torch.Tensor:
        """On rank 0 the maximum over the ranks, element by element; elsewhere `own`. The caller broadcasts it."""
        by_rank = own.new_empty((self.world_size if self.rank == 0 else 0, len(own)))
        dist.gather(own, list(by_rank) or None, 0, group=self._group)
        return by_rank.amax(0) if self.rank == 0 else own

    def background_maximum(self, values: Sequence[int], is_over: Callable[[], bool]) -> list[int]:
        """As `maximum`, for one thread that is not the training's. Raises Transient when a rank has gone, or when
        `is_over()` becomes true before all ranks have joined."""
        if self._background is None:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64, device=CPU)
        pause_s = POLL_MIN_S
        with _exchanging():
            work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._background, async_op=True)
            work = cast("dist.Work", work)
            # Poll, as a thread that is inside gloo when the interpreter exits aborts the process.
            while not work.is_completed():
                if is_over():
                    raise Transient("exchange with the other ranks: the client was closed meanwhile")
                time.sleep(pause_s)
                pause_s = min(POLL_MAX_S, pause_s * 1.5)
            work.wait()
        return [int(value) for value in tensor]

    def broadcast(self, content: bytes) -> bytes:
        """Rank 0's `content`, on every rank. What the other ranks pass is ignored."""
        if not self._groups:
            return content
        frame = self._frame(content)
        with self._exchanging():
            dist.broadcast(frame, 0, group=self._group)
        return self._whole(content, frame)

    def _frame(self, content: bytes) -> torch.Tensor:
        """The first exchange of a broadcast: on rank 0 the length and what fits beside it, so that short contents need
        no second one. The last byte is free."""
        frame = torch.zeros(BROADCAST_BYTES + 1, dtype=torch.uint8, device=CPU)
        if self.rank == 0:
            first = len(content).to_bytes(8, "little") + content[: BROADCAST_BYTES - 8]
            frame[: len(first)] = torch.frombuffer(bytearray(first), dtype=torch.uint8)
        return frame

    def _whole(self, content: bytes, frame: torch.Tensor) -> bytes:
        """What begins with rank 0's frame. A second exchange if it is longer."""
        raw = bytes(frame.numpy())
        length, raw = int.from_bytes(raw[:8], "little"), raw[8:BROADCAST_BYTES]
        if length <= len(raw):
            return raw[:length]
        rest = torch.empty(length - len(raw), dtype=torch.uint8, device=CPU)
        if self.rank == 0:
            rest.copy_(torch.frombuffer(bytearray(content[len(raw) :]), dtype=torch.uint8))
        with self._exchanging():
            dist.broadcast(rest, 0, group=self._group)
        return raw + bytes(rest.numpy())

    def gather(self, content: bytes) -> list[bytes]:
        """The `content` of every rank, in rank order."""
        if not self._groups:
            return [content]
        longest = self.maximum([len(content)])[0]
        # One shape for all: the length, then the content padded to the longest.
        padded = torch.zeros(8 + longest, dtype=torch.uint8, device=CPU)
        framed = len(content).to_bytes(8, "little") + content
        padded[: len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        gathered = [torch.empty_like(padded) for _ in range(self.world_size)]
        with self._exchanging():
            dist.all_gather(gathered, padded, group=self._group)
        raws = [bytes(tensor.numpy()) for tensor in gathered]
        return [raw[8 : 8 + int.from_bytes(raw[:8], "little")] for raw in raws]

    def close(self) -> None:
        """Destroy the groups, unless the training has destroyed torch.distributed before."""
        groups, self._groups = self._groups, []
        for group in groups:
            _destroy(group)
        self.close_background()

    def close_background(self) -> None:
        """A rank that waits in `background_maximum` for this one gets Transient."""
        group, self._background = self._background, None
        _destroy(group)


def _outcome(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as raised:  # of any kind: the state is the user's, with code of its own
        return None, raised


def _encode_error(error: Exception) -> bytes:
    """Raises nothing, whatever the error is: the other ranks wait for what is returned."""
    if isinstance(error, TierdError):
        texts = error.kind, error.message, error.hint
    else:
        try:
            text = str(error)
        except Exception:
            text = "its text cannot be shown"
        texts = "", f"{type(error).__qualname__}: {text}", ""
    return msgspec.json.encode([text.encode(errors="backslashreplace").decode() for text in texts])


def _new_group(timeout: timedelta | None = None) -> dist.ProcessGroup:
    return cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=timeout))


def _destroy(group: dist.ProcessGroup | None) -> None:
    if group is not None and dist.is_initialized():
        with contextlib.suppress(RuntimeError, ValueError):
            dist.destroy_process_group(group)


@contextlib.contextmanager
def _exchanging() -> Generator[None]:
    """Gloo raises RuntimeError when a peer has gone."""
    try:
        yield
    except RuntimeError as error:
        raise Transient(
            f"exchange with the other ranks: {str(error).splitlines()[0]}", hint="has one of them died?"
        ) from error


def find_ranks(rank: int | None, world_size: int | None, environ: Mapping[str, str]) -> Ranks:
    """Rank and world size from the arguments, else from torch.distributed, else from the launcher's environment.

    Raises BadConfig when there are several ranks without torch.distributed.
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
    return Ranks(rank, world_size)


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise BadConfig(f"connect: ${name} is {text!r}, expected a number") from None
