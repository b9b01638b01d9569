"""Batches of documents out of files, read by workers, with a place that any number of ranks and workers can take over.

Each batch brings from its worker the cursors of the files that it is made of; they count when the batch is delivered
to training, not when a worker has read ahead. A file is the unit that is shared out: a single large one has one reader.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tierd.errors import BadConfig, Corrupt, Mismatch
from tierd_client.loaders.cursors import Cursor, FileCursor, merge, share_out
from tierd_client.loaders.sampler import place_of
from tierd_client.state import rng

logger = logging.getLogger(__name__)

Read = Callable[[str], Iterable[Any]]
Collate = Callable[[list[Any]], Any]


class ReaderState(msgspec.Struct, frozen=True):
    """Of one rank. `workers`: the files of each, and how far it is in them; `turn`: whose batch comes next.

    files, names: how many files all ranks have together, and the sha256 of their names.
    """

    seed: int
    epoch: int
    turn: int
    files: int
    names: str
    workers: list[dict[str, FileCursor]]


class DocumentLoader:
    """Lists of `batch_size` documents of `files`, or what `collate` makes of each. The last of a worker may be shorter.

    A document is a line that is not blank: decoded JSON in a file that ends in .jsonl, else text. With `read` it is
    whatever read(path) yields, the same each time; a resume then skips what was consumed by reading it again.

    A `for` over it is one pass over this rank's files, or what remains of it. Files keep their rank until the number
    of ranks changes, and come in another order in each pass unless `shuffle` is false; documents stay in the order of
    their file. Ranks do not have equally many batches: train by steps where they must go together.

    num_workers: processes of this rank; 0 reads in the training process. options: more of torch's DataLoader.
    rank, world_size: of torch.distributed, which must be initialized before, unless given.
    In `collate` the global generators of Python, numpy and torch (CPU) begin from a seed of the batch.
    Raises BadConfig when a file is not there, or listed twice.
    """

    def __init__(
        self,
        files: Sequence[str | os.PathLike[str]],
        *,
        batch_size: int,
        num_workers: int = 0,
        read: Read | None = None,
        collate: Collate | None = None,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        **options: Any,
    ) -> None:
        if batch_size < 1 or num_workers < 0:
            raise BadConfig(f"read documents in batches of {batch_size} with {num_workers} workers")
        self._files = [os.fspath(path) for path in files]
        if not self._files or len(set(self._files)) != len(self._files):
            raise BadConfig(f"read documents: {len(self._files)} files, {len(set(self._files))} different ones")
        self._batch_size = batch_size
        self._num_workers = num_workers
        self._read = read
        self._collate = collate
        self._shuffle = shuffle
        self._seed = seed
        self._rank, self._world_size = place_of(rank, world_size)
        self._options = options
        self._moves = 0
        self._epoch = 0
        self._turn = 0
        self._workers = self._share({path: FileCursor(_size(path)) for path in self._files})

    @property
    def epoch(self) -> int:
        """The pass that the next batch belongs to."""
        return self._epoch

    def __iter__(self) -> Iterator[Any]:
        while True:
            moves = self._moves
            for worker, read, batch in self._batches():
                self._workers[worker].update(read)
                self._turn = (worker + 1) % len(self._workers)
                yield batch
                if self._moves != moves:  # restored meanwhile: on from there
                    break
            else:
                self._workers = [{path: at.finished(self._epoch) for path, at in one.items()} for one in self._workers]
                self._epoch += 1
                self._turn = 0
                return

    def state_dict(self) -> dict[str, Any]:
        state = ReaderState(self._seed, self._epoch, self._turn, len(self._files), _digest(self._files), self._workers)
        return msgspec.to_builtins(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """On as many ranks as before. Raises Mismatch when a file has changed since, or the list of files has."""
        (saved,) = self._take([state])
        if len(saved.workers) == len(self._workers):
            self._workers, self._turn = saved.workers, saved.turn
        else:
            self._workers, self._turn = self._share_among_workers(merge(saved.workers)), 0

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """From all ranks of another world size: what remains of the pass is shared out anew."""
        saved = self._take(states)
        self._workers, self._turn = self._share(merge(worker for one in saved for worker in one.workers)), 0

    def _take(self, states: Sequence[dict[str, Any]]) -> list[ReaderState]:
        try:
            saved = msgspec.convert(states, list[ReaderState])
        except msgspec.ValidationError as error:
            raise Mismatch(f"restore the documents: their state in the checkpoint is none: {error}") from error
        self._check(merge(worker for one in saved for worker in one.workers), saved[0])
        self._seed = saved[0].seed
        # A rank that was a pass ahead has files that are done with this one: nobody reads them in it.
        self._epoch = min(one.epoch for one in saved)
        self._moves += 1
        return saved

    def _check(self, cursor: Cursor, saved: ReaderState) -> None:
        """The files are those that the checkpoint knows."""
        now = set(self._files)
        for path, at in cursor.items():
            if path not in now:
                raise Mismatch(f"restore the documents: {path} is not among the files now", hint=_SAME_FILES)
            if (size_bytes := _size(path)) != at.size_bytes:
                raise Mismatch(
                    f"restore the documents: {path} had {at.size_bytes} bytes, now {size_bytes}", hint=_SAME_FILES
                )
        if saved.names != _digest(self._files):
            raise Mismatch(
                f"restore the documents: {saved.files} files then, {len(now)} now, of other names", hint=_SAME_FILES
            )

    def _share(self, cursor: Cursor) -> list[dict[str, FileCursor]]:
        if len(cursor) < self._world_size and self._rank == 0:
            logger.warning("documents: %d files for %d ranks, some have nothing to read", len(cursor), self._world_size)
        mine = share_out(cursor, self._world_size, epoch=self._epoch)[self._rank]
        return self._share_among_workers(mine)

    def _share_among_workers(self, cursor: Cursor) -> list[dict[str, FileCursor]]:
        workers = max(1, self._num_workers)
        if 0 < len(cursor) < workers:
            logger.warning("documents: %d files for %d workers, some have nothing to read", len(cursor), workers)
        return share_out(cursor, workers, epoch=self._epoch)

    def _batches(self) -> Iterable[tuple[int, Cursor, Any]]:
        """What remains of the pass. torch takes a batch of each worker in turn and begins with its first."""
        count = len(self._workers)
        in_turn = [(self._turn + place) % count for place in range(count)]
        share = _Share(
            [(worker, self._in_order(self._workers[worker])) for worker in in_turn],
            epoch=self._epoch,
            seed=self._seed,
            batch_size=self._batch_size,
            read=self._read,
            collate=self._collate,
        )
        # A generator for the seeds of workers: else each start draws one from the global generator.
        generator = torch.Generator().manual_seed(rng.seed_of(self._seed, self._epoch, "workers"))
        return DataLoader(
            share, batch_size=None, num_workers=self._num_workers, generator=generator, collate_fn=_unchanged,
            **self._options,
        )  # fmt: skip

    def _in_order(self, cursor: Cursor) -> dict[str, FileCursor]:
        if self._shuffle:
            paths = sorted(cursor, key=lambda path: rng.seed_of(self._seed, self._epoch, path))
        else:
            paths = [path for path in self._files if path in cursor]
        return {path: cursor[path] for path in paths}


_SAME_FILES = "a pass goes on only with the files that it began with, under the same paths"


class _Share(IterableDataset[Any]):
    """What the workers of one rank read in one pass: (worker, files in their order), by the place that torch gives."""

    def __init__(
        self,
        shares: list[tuple[int, dict[str, FileCursor]]],
        *,
        epoch: int,
        seed: int,
        batch_size: int,
        read: Read | None,
        collate: Collate | None,
    ) -> None:
        self._shares = shares
        self._epoch = epoch
        self._seed = seed
        self._batch_size = batch_size
        self._read = read
        self._collate = collate

    def __iter__(self) -> Iterator[tuple[int, Cursor, Any]]:
        """(worker, where its files are behind the batch, batch)."""
        process = get_worker_info()
        worker, files = self._shares[process.id if process else 0]
        found = self._documents(files)
        while rows := list(itertools.islice(found, self._batch_size)):
            path, at, _ = rows[0]
            documents: Any = [document for _, _, document in rows]
            if self._collate:
                with rng.temporary_seed(rng.seed_of(self._seed, self._epoch, path, at.passes, at.documents)):
                    documents = self._collate(documents)
            yield worker, {path: at for path, at, _ in rows}, documents

    def _documents(self, files: Cursor) -> Iterator[tuple[str, FileCursor, Any]]:
        """(path, where the file is behind the document, document)."""
        for path, at in files.items():
            if at.passes > self._epoch:
                continue
            count = at.documents
            rows = itertools.chain(self._rows(path, at), [None])
            for row, following in itertools.pairwise(rows):
                assert row is not None
                document, offset = row
                count += 1
                is_last = following is None
                behind = at.finished(self._epoch) if is_last else FileCursor(at.size_bytes, at.passes, count, offset)
                yield path, behind, document

    def _rows(self, path: str, at: FileCursor) -> Iterator[tuple[Any, int]]:
        """(document, the byte behind it) of what remains."""
        if self._read is None:
            return _lines(path, at)
        return ((document, 0) for document in itertools.islice(self._read(path), at.documents, None))


def _lines(path: str, at: FileCursor) -> Iterator[tuple[Any, int]]:
    offset, number = at.offset, at.documents
    with open(path, "rb") as file:
        file.seek(offset)
        for line in file:
            offset += len(line)
            if not line.strip():
                continue
            number += 1
            try:
                yield json.loads(line) if path.endswith(".jsonl") else line.decode().rstrip("\r\n"), offset
            except ValueError as error:
                raise Corrupt(f"read document {number} of {path}: {error}") from error


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError as error:
        raise BadConfig(f"read documents of {path}: {error.strerror}") from error


def _digest(paths: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(sorted(paths)).encode()).hexdigest()


def _unchanged(batch: Any) -> Any:
    return batch
