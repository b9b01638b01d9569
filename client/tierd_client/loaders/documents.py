"""Batches of documents from files, read by workers, that resume on any number of ranks and workers.

Each batch carries the cursors of its files. They count when the batch is delivered to training, not when a worker has
read ahead. The unit that is shared out is a file: a single large file has one reader.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tierd.errors import BadConfig, Corrupt, Mismatch
from tierd_client.loaders.cursors import Cursor, FileCursor, merge, share_out
from tierd_client.loaders.loader import unchanged
from tierd_client.loaders.sampler import find_rank
from tierd_client.log import log
from tierd_client.state import rng

Read = Callable[[str], Iterable[Any]]
Collate = Callable[[list[Any]], Any]


class ReaderState(msgspec.Struct, frozen=True):
    """One rank's state. `workers`: each worker's files and positions. `turn`: the worker that reads the next batch.

    files, names: the number of files of all ranks together, and the sha256 of their names.
    """

    seed: int
    epoch: int
    turn: int
    files: int
    names: str
    workers: list[dict[str, FileCursor]]


class DocumentLoader:
    """Lists of `batch_size` documents of `files`, or what `collate` makes of each. A worker's last one may be shorter.

    A document is a non-blank line: decoded JSON in a file that ends in .jsonl, otherwise text. With `read` it is
    whatever read(path) yields, the same each time; a resume then reads the consumed documents again and skips them.

    A `for` over it is one pass over this rank's files, or the rest of it. Files stay with their rank until the number
    of ranks changes, and have another order in each pass unless `shuffle` is false. Documents keep the order of their
    file. The ranks' numbers of batches differ: train by steps if all ranks must do the same number.

    num_workers: processes of this rank; 0 reads in the training process. options: further ones of torch's DataLoader.
    rank, world_size: default to those of torch.distributed, which must be initialized before.
    In `collate` the global generators of Python, numpy and torch (CPU) start from a seed of the batch.
    Raises BadConfig when a file does not exist or is listed twice, and for an invalid number; Corrupt, while reading,
    when a line cannot be decoded.
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
        self._rank, self._world_size = find_rank(rank, world_size)
        self._options = options
        self._restores = 0
        self.epoch = 0
        """The pass of the next batch."""
        self._turn = 0
        self._workers = self._share_of_rank({path: FileCursor(_size(path)) for path in self._files})

    def __iter__(self) -> Iterator[Any]:
        while True:
            restores = self._restores
            for worker, cursor, batch in self._batches():
                self._workers[worker].update(cursor)
                self._turn = (worker + 1) % len(self._workers)
                yield batch
                if self._restores != restores:  # continue at the restored position
                    break
            else:
                for files in self._workers:
                    files.update({path: position.finished(self.epoch) for path, position in files.items()})
                self.epoch += 1
                self._turn = 0
                return

    def state_dict(self) -> dict[str, Any]:
        """How far this rank's workers have consumed each of their files."""
        state = ReaderState(self._seed, self.epoch, self._turn, len(self._files), _digest(self._files), self._workers)
        return msgspec.to_builtins(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue on as many ranks as before. Raises Mismatch when a file or the list of files has changed since."""
        (saved,) = self._restore([state])
        if len(saved.workers) == len(self._workers):
            self._workers, self._turn = saved.workers, saved.turn
        else:
            self._workers, self._turn = self._share_among_workers(merge(saved.workers)), 0

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Take the states of all ranks of another world size, and divide the rest of the pass again. Raises as
        load_state_dict."""
        saved = self._restore(states)
        self._workers, self._turn = self._share_of_rank(_merge_ranks(saved)), 0

    def _restore(self, states: Sequence[dict[str, Any]]) -> list[ReaderState]:
        """Checks the states of all given ranks, and restores seed and pass."""
        try:
            saved = msgspec.convert(states, list[ReaderState])
        except msgspec.ValidationError as error:
            raise Mismatch(f"restore the documents: the state is not a DocumentLoader's: {error}") from error
        self._check_files(_merge_ranks(saved), saved[0])
        self._seed = saved[0].seed
        # The files of a rank that is a pass ahead are finished in this pass: nobody reads them in it.
        self.epoch = min(state.epoch for state in saved)
        self._restores += 1
        return saved

    def _check_files(self, cursor: Cursor, saved: ReaderState) -> None:
        """Raises Mismatch unless the files are those of the checkpoint."""
        files = set(self._files)
        for path, position in cursor.items():
            if path not in files:
                raise Mismatch(f"restore the documents: {path} is not among the files now", hint=_SAME_FILES)
            if (size_bytes := _size(path)) != position.size_bytes:
                raise Mismatch(
                    f"restore the documents: {path} had {position.size_bytes} bytes, now {size_bytes}", hint=_SAME_FILES
                )
        if saved.names != _digest(self._files):
            raise Mismatch(
                f"restore the documents: {saved.files} files then, {len(files)} now, with other names", hint=_SAME_FILES
            )

    def _share_of_rank(self, cursor: Cursor) -> list[dict[str, FileCursor]]:
        """This rank's files, for each of its workers."""
        if len(cursor) < self._world_size and self._rank == 0:
            log.warning("documents: %d files for %d ranks, some have nothing to read", len(cursor), self._world_size)
        return self._share_among_workers(share_out(cursor, self._world_size, epoch=self.epoch)[self._rank])

    def _share_among_workers(self, cursor: Cursor) -> list[dict[str, FileCursor]]:
        workers = max(1, self._num_workers)
        if 0 < len(cursor) < workers:
            log.warning("documents: %d files for %d workers, some have nothing to read", len(cursor), workers)
        return share_out(cursor, workers, epoch=self.epoch)

    def _batches(self) -> Iterable[tuple[int, Cursor, Any]]:
        """The rest of the pass. torch takes a batch of each worker in turn, starting with its first."""
        count = len(self._workers)
        workers = [(self._turn + index) % count for index in range(count)]
        reader = _PassReader(
            [(worker, self._in_order(self._workers[worker])) for worker in workers],
            epoch=self.epoch,
            seed=self._seed,
            batch_size=self._batch_size,
            read=self._read,
            collate=self._collate,
        )
        # A generator for the seeds of workers: without it each start draws one from the global generator.
        generator = torch.Generator().manual_seed(rng.seed_of(self._seed, self.epoch, "workers"))
        return DataLoader(
            reader, batch_size=None, num_workers=self._num_workers, generator=generator, collate_fn=unchanged,
            **self._options,
        )  # fmt: skip

    def _in_order(self, cursor: Cursor) -> dict[str, FileCursor]:
        if self._shuffle:
            paths = sorted(cursor, key=lambda path: rng.seed_of(self._seed, self.epoch, path))
        else:
            paths = [path for path in self._files if path in cursor]
        return {path: cursor[path] for path in paths}


_SAME_FILES = "a pass can only continue with the files that it began with, under the same paths"


def _merge_ranks(states: Sequence[ReaderState]) -> Cursor:
    return merge(files for state in states for files in state.workers)


@dataclass(eq=False)
class _PassReader(IterableDataset[Any]):
    """Reads one rank's share of one pass. `shares`: (worker, its files in order) for each of torch's worker ids."""

    shares: list[tuple[int, dict[str, FileCursor]]]
    epoch: int
    seed: int
    batch_size: int
    read: Read | None
    collate: Collate | None

    def __iter__(self) -> Iterator[tuple[int, Cursor, Any]]:
        """Yields (worker, positions of its files after the batch, batch)."""
        process = get_worker_info()
        worker, files = self.shares[process.id if process else 0]
        rows = self._documents(files)
        while batch := list(itertools.islice(rows, self.batch_size)):
            path, position, _ = batch[0]
            documents: Any = [document for _, _, document in batch]
            if self.collate:
                with rng.temporary_seed(rng.seed_of(self.seed, self.epoch, path, position.passes, position.documents)):
                    documents = self.collate(documents)
            yield worker, {path: position for path, position, _ in batch}, documents

    def _documents(self, files: Cursor) -> Iterator[tuple[str, FileCursor, Any]]:
        """Yields (path, position after the document, document)."""
        for path, begin in files.items():
            if begin.passes > self.epoch:
                continue
            count = begin.documents
            rows: Iterator[tuple[Any, int]]  # (document, the byte after it), from the position on
            if self.read is None:
                rows = _lines(path, begin)
            else:
                rows = ((document, 0) for document in itertools.islice(self.read(path), count, None))
            for row, next_row in itertools.pairwise(itertools.chain(rows, [None])):
                assert row is not None
                document, offset = row
                count += 1
                is_last = next_row is None
                middle = FileCursor(begin.size_bytes, begin.passes, count, offset)
                yield path, begin.finished(self.epoch) if is_last else middle, document


def _lines(path: str, begin: FileCursor) -> Iterator[tuple[Any, int]]:
    offset, number = begin.offset, begin.documents
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
