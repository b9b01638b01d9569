"""A replica as a trainer reads it: the manifest and the open files of one checkpoint in one tier.

Which replica that is, all ranks agree on in attempts.py.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Protocol, TypeVar

from tierd.descriptors import close_all, closed_on_error
from tierd.errors import Corrupt, NotFound, TierdError
from tierd.format import layout, manifest, wire
from tierd.format.bitmap import pack_indexes
from tierd.format.ids import AUTO, MEMORY, CheckpointId, Rank
from tierd.format.manifest import Manifest
from tierd.format.shard import Shard
from tierd_client.log import log
from tierd_client.restore.load import ReadPlan, SourceFile, read_headers
from tierd_client.session import DaemonSession
from tierd_client.state.encoding import Json
from tierd_client.state.rank_local import RankLocal
from tierd_client.state.restore_filter import EXACT, RestoreFilter
from tierd_client.state.restore_plan import RestorePlan
from tierd_client.state.restore_report import RestoreReport
from tierd_client.state.stored_state import StoredState
from tierd_client.state.tensors import CapturedTensor
from tierd_client.state.training_state import State, parse_tree

Handed = TypeVar("Handed", bound=Manifest)
Handed_co = TypeVar("Handed_co", bound=Manifest, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRequest:
    """Which checkpoint to restore, in the fields of wire.Find. By default the newest one, from the nearest tier."""

    step: int | None = None
    generation: int | None = None
    milestone: str | None = None
    tier: str = AUTO
    allow_unhealthy: bool = False

    @classmethod
    def exactly(cls, checkpoint: CheckpointId, tier: str) -> RestoreRequest:
        """For a checkpoint that was chosen already. Whether it is healthy was decided then."""
        return cls(step=checkpoint.step, generation=checkpoint.generation, tier=tier, allow_unhealthy=True)

    @property
    def is_any(self) -> bool:
        """Whether any checkpoint would do. Only then may training start fresh when there is none."""
        return self == RestoreRequest(allow_unhealthy=self.allow_unhealthy)


@contextmanager
def _without_collections() -> Generator[None]:
    """Turns Python's garbage collector off while a plan is made. A plan has many small objects, all in use: the
    collector would run often and free nothing. A restore of 20,000 tensors takes 1.6 times as long with it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(slots=True)
class Replica(AbstractContextManager["Replica"]):
    """Closes its files at the end of its `with` block.

    `session` is set when the daemon has fetched only the headers from a cold tier: `read` then requests the chunks that
    it needs, with the same `excluded` replicas. `fetch_failed`: that request failed; the daemon has recorded why.
    `report`: what `read_into_state` has restored. `may_change`: it is in the memory of another run, whose trainers may
    write into its slots while they are read.
    """

    tier: str
    manifest: Manifest
    descriptors: list[int]
    session: DaemonSession | None = None
    excluded: Sequence[str] = ()
    fetch_failed: bool = False
    report: RestoreReport | None = None
    may_change: bool = False

    def __exit__(self, *_: object) -> None:
        close_all(self.descriptors)
        self.descriptors.clear()

    def files(self) -> list[SourceFile]:
        """The replica's shards, open until the `with` block ends. Raises Corrupt when a file is too short."""
        return [
            SourceFile(f"{self.manifest.id}/{entry.name} in {self.tier}", descriptor, entry, may_change=self.may_change)
            for entry, descriptor in zip(self.manifest.files, self.descriptors, strict=True)
        ]

    def read(
        self, files: Sequence[SourceFile], requested: Iterable[CapturedTensor], *, is_verified: bool = True
    ) -> None:
        """Fills the requested tensors from `files`, which are this replica's, after fetching the chunks they are in.

        Raises Corrupt, the daemon's error when it cannot fetch those chunks, or NotFound when only another node has
        them.
        """
        with _without_collections():
            reads = ReadPlan(files, requested)
        self._prepare(files, reads.chunks)
        reads.run(is_verified=is_verified)

    def _prepare(self, files: Sequence[SourceFile], chunks: Sequence[Sequence[int]]) -> None:
        """Makes these chunks of `files` readable."""
        if self.session is not None and any(chunks):
            self._fetch(self.session, chunks)

    def _fetch(self, session: DaemonSession, chunks: Sequence[Sequence[int]]) -> None:
        try:
            request = RestoreRequest.exactly(self.manifest.id, self.tier)
            fetched = find_replica(session, request, self.excluded, chunks)
        except TierdError as error:
            self.fetch_failed = True
            log.error("tierd: %s", error.message)
            raise
        with fetched:
            if fetched.manifest != self.manifest:
                raise NotFound(f"read {self.manifest.id} from {self.tier}: another checkpoint has replaced it")
            for descriptor, fetched_descriptor in zip(self.descriptors, fetched.descriptors, strict=True):
                os.dup2(fetched_descriptor, descriptor, inheritable=False)

    def read_into_state(self, state: State, rank: int, world_size: int, filter: RestoreFilter = EXACT) -> None:
        """Restores what `filter` selects into `state`. Raises Mismatch with nothing changed, or Corrupt with the state
        half changed."""
        files = self.files()
        plan = self._plan(files, state, rank, world_size, filter)
        plan.run(partial(self.read, files))
        self.report = plan.report

    @_without_collections()
    def _plan(
        self, files: Sequence[SourceFile], state: State, rank: int, world_size: int, filter: RestoreFilter
    ) -> RestorePlan:
        """How `files` are restored into `state`. Raises as `read_into_state`, with nothing changed."""
        shards, available = read_headers(files)
        saved_world_size = self.manifest.world_size
        rank_local = None
        if saved_world_size == world_size:
            tree = self._tree(shards, rank)
        else:
            rank_trees = [self._tree(shards, saved_rank) for saved_rank in range(saved_world_size)]
            rank_local = RankLocal(list(map(parse_tree, rank_trees)), rank, available, partial(self.read, files))
            tree = rank_trees[0]
            if rank == 0:
                log.warning(
                    "tierd: %d ranks restore %s, which %d ranks saved%s",
                    world_size,
                    self.manifest.id,
                    saved_world_size,
                    "; new ranks get random numbers of their own" if world_size > saved_world_size else "",
                )
        return state.plan_restore(StoredState(tree, available, rank_local), filter=filter)

    def _tree(self, shards: Mapping[str, Shard], rank: int) -> Json:
        """The state tree that `rank` saved."""
        shard = shards.get(layout.shard_name(Rank(rank), self.manifest.world_size))
        if shard is None or "state" not in shard.tierd:
            raise Corrupt(f"restore {self.manifest.id} from {self.tier}: it has no state of rank {rank}")
        return shard.tierd["state"]


def find_replica(
    session: DaemonSession, request: RestoreRequest, excluded: Sequence[str], chunks: Sequence[Sequence[int]] = ()
) -> Replica:
    """Asks the daemon for a replica. `excluded`: bad replicas, as "<checkpoint name>@<tier>". `chunks`: for each file
    the indexes of the chunks that are needed besides the headers; from a cold tier only these are fetched."""
    packed = [pack_indexes(indexes) for indexes in chunks]
    message = wire.Find(
        request=0,
        exclude=list(excluded),
        chunks=packed if sum(map(len, packed)) <= wire.CHUNKS_BYTES_MAX else None,
        **asdict(request),
    )
    answer, found, descriptors = hand_over(session, message, manifest.decode)
    return Replica(
        answer.tier,
        found,
        descriptors,
        session if answer.is_part else None,
        tuple(excluded),
        may_change=answer.tier == MEMORY and session.hello.rank is None,
    )


class Decode(Protocol[Handed_co]):
    """Decodes a manifest or a node file. `where` says in messages where it is."""

    def __call__(self, raw: bytes, /, *, where: str) -> Handed_co: ...


def hand_over(
    session: DaemonSession, message: wire.Find, decode: Decode[Handed]
) -> tuple[wire.FoundReplica, Handed, list[int]]:
    """The daemon's answer, the manifest or node file, and the descriptors of its files, which the caller closes."""
    answer, descriptors = session.find(message)
    with closed_on_error(descriptors):
        with open(descriptors.pop(0), "rb") as file:
            found = decode(file.read(), where=f"the manifest that the daemon handed over from {answer.tier}")
        if len(found.files) != len(descriptors):
            raise Corrupt(
                f"take over {found.id} from {answer.tier}: {len(descriptors)} descriptors, expected {len(found.files)}"
            )
    return answer, found, descriptors
