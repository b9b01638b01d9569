"""A replica as a trainer gets it: a checkpoint's manifest and its open files, from one tier.

Rank 0 chooses and all ranks take the same one; a damaged one is passed by, and the next one tried, by all together.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType

import msgspec

from tierd.errors import Corrupt, NotFound, TierdError, TierUnreachable
from tierd.format import layout, manifest, wire
from tierd.format.ids import Rank
from tierd.format.manifest import Manifest
from tierd.format.shard import Shard
from tierd_client.ranks import Ranks
from tierd_client.restore.load import SourceFile, index_tensors, load, read_headers
from tierd_client.session import DaemonSession
from tierd_client.state.encoding import Json
from tierd_client.state.rank_local import RankLocal
from tierd_client.state.tensors import CapturedTensor
from tierd_client.state.training_state import State, parse_tree

log = logging.getLogger("tierd_client")


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRequest:
    """Which checkpoint a trainer asks for. With nothing given: the newest, from the nearest tier."""

    step: int | None = None
    generation: int | None = None
    milestone: str | None = None
    tier: str = "auto"
    allow_unhealthy: bool = False

    @property
    def is_any(self) -> bool:
        """Whether anything would do. Only then does finding nothing mean to start fresh."""
        return self == RestoreRequest(allow_unhealthy=self.allow_unhealthy)


@dataclass(slots=True)
class Replica:
    """Closes its files at the end of its `with` block. `ask_more`: given where only the headers have come; asks for the
    same replica with these chunks. `is_refused`: that was answered with an error, which the daemon has recorded."""

    tier: str
    manifest: Manifest
    descriptors: list[int]
    ask_more: Callable[[Sequence[Sequence[int]]], Replica] | None = None
    is_refused: bool = False

    @property
    def name(self) -> str:
        return f"{self.manifest.id.name}@{self.tier}"

    def __enter__(self) -> Replica:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())

    def files(self) -> list[SourceFile]:
        """Its shards, open while the `with` block lasts. Raises Corrupt when one is too short."""
        return [
            SourceFile(f"{self.manifest.id}/{entry.name} in {self.tier}", descriptor, entry)
            for entry, descriptor in zip(self.manifest.files, self.descriptors, strict=True)
        ]

    def read(self, files: Sequence[SourceFile], wanted: Mapping[str, CapturedTensor]) -> None:
        """Fill the wanted tensors from `files`, which are this replica's: `restoring.load`, once all they take is here.

        Raises Corrupt, or what the daemon answers when it cannot bring that."""
        load(files, wanted, bring=self._bring)

    def _bring(self, chunks: Sequence[Sequence[int]]) -> None:
        if self.ask_more is None or not any(chunks):
            return
        try:
            more = self.ask_more(chunks)
        except TierdError as error:
            self.is_refused = True
            log.error("tierd: %s", error.message)
            raise
        with more:
            if more.manifest != self.manifest:
                raise NotFound(f"go on with {self.manifest.id} from {self.tier}: another one has taken its place")
            for mine, other in zip(self.descriptors, more.descriptors, strict=True):
                os.dup2(other, mine, inheritable=False)

    def load(self, state: State, rank: int, world_size: int) -> None:
        """Read it into `state`. Raises Mismatch with nothing changed, or Corrupt with the state half changed."""
        found = self.manifest
        files = self.files()
        shards = read_headers(files)
        available = index_tensors(shards)
        by_name = {file.entry.name: shards[file.name] for file in files}
        local = None
        if found.world_size == world_size:
            tree = self._tree(by_name, rank)
        else:
            trees = [self._tree(by_name, saved) for saved in range(found.world_size)]
            local = RankLocal([parse_tree(one) for one in trees], rank, available, partial(self.read, files))
            tree = trees[0]
            if rank == 0:
                new = "; new ranks draw random numbers of their own" if world_size > found.world_size else ""
                log.warning("tierd: %d ranks restore %s, which %d saved%s", world_size, found.id, found.world_size, new)
        plan = state.plan_restore(tree, available, local)
        self.read(files, plan.destinations)
        plan.finish()

    def _tree(self, shards: Mapping[str, Shard], rank: int) -> Json:
        """The state tree of a rank that saved it."""
        shard = shards.get(layout.shard_name(Rank(rank), self.manifest.world_size))
        if shard is None or "state" not in shard.tierd:
            raise Corrupt(f"restore {self.manifest.id} from {self.tier}: it has no state of rank {rank}")
        return shard.tierd["state"]


def restore(
    session: DaemonSession,
    ranks: Ranks,
    wanted: RestoreRequest,
    take: Callable[[Replica], None],
    *,
    on_corrupt: Callable[[Replica, Corrupt], None],
) -> Replica:
    """Has `take` read the newest replica that every rank can read, and returns it, closed.

    Raises what the daemon answers: NotFound when there is none, Corrupt when all have been tried.
    """
    bad: list[str] = []
    while True:
        first = _choose(session, ranks, wanted, bad)
        name, exactly = _tell(ranks, first)
        passed_by: TierdError | None = None
        final: TierdError | None = None
        replica = first
        try:
            replica = replica or _find(session, exactly, bad)
            with replica:
                take(replica)
        except Corrupt as error:
            passed_by = error
            if replica is not None and not replica.is_refused:
                on_corrupt(replica, error)
        except (NotFound, TierUnreachable) as error:
            passed_by = error  # what rank 0 has just seen is out of this rank's reach
        except TierdError as error:
            final = error
        ranks.raise_on_all(final)
        is_bad = ranks.maximum([passed_by is not None])[0]
        if replica is not None and not is_bad:
            return replica
        bad.append(name)


def _choose(session: DaemonSession, ranks: Ranks, wanted: RestoreRequest, bad: Sequence[str]) -> Replica | None:
    """On rank 0; None on the others."""
    return ranks.run_on_all(lambda: _find(session, wanted, bad) if ranks.rank == 0 else None)


def _tell(ranks: Ranks, first: Replica | None) -> tuple[str, RestoreRequest]:
    """The name of what rank 0 has chosen, and how to ask for it."""
    raw = b"" if first is None else msgspec.json.encode((first.name, _exactly(first)))
    # Rank 0 has decided: the others take what it took.
    return msgspec.json.decode(ranks.broadcast(raw) or b"", type=tuple[str, RestoreRequest])


def _find(
    session: DaemonSession, wanted: RestoreRequest, exclude: Sequence[str], chunks: Sequence[Sequence[int]] = ()
) -> Replica:
    """`exclude`: replicas found bad, as "<checkpoint name>@<tier>". `chunks`: those of each file that must be here, and
    the headers; of a replica in a cold tier no more may be fetched."""
    packed = [wire.pack_indexes(some) for some in chunks]

    def message(number: int) -> wire.Find:
        return wire.Find(
            request=number,
            step=wanted.step,
            generation=wanted.generation,
            milestone=wanted.milestone,
            tier=wanted.tier,
            exclude=list(exclude),
            allow_unhealthy=wanted.allow_unhealthy,
            chunks=packed if sum(map(len, packed)) <= wire.CHUNKS_BYTES_MAX else None,
        )

    told, descriptors = session.find(message)
    try:
        with open(descriptors.pop(0), "rb") as file:
            found = manifest.decode(file.read(), where=f"the manifest that the daemon handed over from {told.tier}")
        if len(found.files) != len(descriptors):
            raise Corrupt(
                f"take over {found.id} from {told.tier}: {len(descriptors)} descriptors of {len(found.files)}"
            )
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    replica = Replica(told.tier, found, descriptors)
    if told.is_part:
        replica.ask_more = partial(_find, session, _exactly(replica), tuple(exclude))
    return replica


def _exactly(replica: Replica) -> RestoreRequest:
    """To ask for what was chosen already."""
    found = replica.manifest
    return RestoreRequest(step=found.step, generation=found.generation, tier=replica.tier, allow_unhealthy=True)
