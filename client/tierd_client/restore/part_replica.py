"""A checkpoint over several nodes as one rank reads it: the shards of its node, and what its daemon reads from others.

Of the other nodes' shards it has the headers. Their chunks are fetched when they are to be read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tierd.descriptors import close_all
from tierd.errors import DaemonUnreachable, NotFound, TierdError, TierUnreachable, Transient
from tierd.format import wire
from tierd.format.bitmap import pack_indexes
from tierd.format.peers import PeerAddress
from tierd_client.log import log
from tierd_client.restore.load import FileElsewhere, SourceFile
from tierd_client.restore.replica import Replica
from tierd_client.session import DaemonSession


class PartElsewhere(NamedTuple):
    """The part of a checkpoint that another node has. `lowest_rank`: on that node now. `node_file`: its name.
    `headers`: of its files, by name."""

    lowest_rank: int
    node_file: str
    headers: Mapping[str, bytes]
    peer: PeerAddress | None


@dataclass(slots=True)
class PartReplica(Replica):
    """A checkpoint of which this rank's daemon has the shards with `descriptors`, those of its node. `elsewhere`: the
    parts of the other nodes, in the order in which they are read. `daemon`: this rank's, which reads from them.
    `fetched`: descriptors of their files."""

    elsewhere: list[PartElsewhere] = field(default_factory=list[PartElsewhere])
    daemon: DaemonSession | None = None
    fetched: dict[str, int] = field(default_factory=dict[str, int])

    def __exit__(self, *error: object) -> None:
        Replica.__exit__(self, *error)
        close_all(self.fetched.values())
        self.fetched.clear()

    def files(self) -> list[SourceFile]:
        descriptors = iter(self.descriptors)
        headers = {name: header for part in self.elsewhere for name, header in part.headers.items()}
        files: list[SourceFile] = []
        for entry in self.manifest.files:
            name = f"{self.manifest.id}/{entry.name}"
            header = headers.get(entry.name)
            if header is None:
                files.append(SourceFile(f"{name} in {self.tier}", next(descriptors), entry))
            else:
                files.append(FileElsewhere(f"{name} on another node", entry, header))
        return files

    def _prepare(self, files: Sequence[SourceFile], chunks: Sequence[Sequence[int]]) -> None:
        needed = {
            file.entry.name: (file, indexes)
            for file, indexes in zip(files, chunks, strict=True)
            if indexes and isinstance(file, FileElsewhere)
        }
        for part in self.elsewhere:
            if names := [name for name in part.headers if name in needed]:
                self._fetch_part(part, {name: needed[name] for name in names})

    def _fetch_part(self, part: PartElsewhere, needed: Mapping[str, tuple[FileElsewhere, Sequence[int]]]) -> None:
        if self.daemon is None or part.peer is None:
            raise NotFound(f"read {next(iter(needed.values()))[0].name}: only another node has it")
        message = wire.FindElsewhere(
            request=0,
            step=self.manifest.step,
            generation=self.manifest.generation,
            peer=part.peer,
            node_file=part.node_file,
            files=list(needed),
            chunks=[pack_indexes(indexes) for _, indexes in needed.values()],
        )
        try:
            _, descriptors = self.daemon.find(message)
        except TierdError as error:
            self.fetch_failed = True
            log.error("tierd: %s", error.message)
            if isinstance(error, Transient) and not isinstance(error, DaemonUnreachable | TierUnreachable):
                raise TierUnreachable(error.message, hint=error.hint) from error
            raise
        for (name, (file, _)), descriptor in zip(needed.items(), descriptors, strict=True):
            if (former := self.fetched.get(name)) is None:
                self.fetched[name] = descriptor
            else:  # other files of this replica may read from it
                os.dup2(descriptor, former, inheritable=False)
                os.close(descriptor)
            file.receive(self.fetched[name])
