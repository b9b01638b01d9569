"""Which checkpoint and replica a restore uses: one table, for the pure function, the daemon's restorer and the CLI."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.cli import House, flip_a_bit, folder_of, make_checkpoint, make_house
from tests.support.rooms import RUN, Rooms, rooms_at
from tests.workers.test_restorer import find_with, restorer
from tierd.descriptors import close_all
from tierd.errors import BadConfig, Corrupt, Foreign, NewerFormat, NotFound, TierdError, TierUnreachable, Unhealthy
from tierd.format import layout
from tierd.format.ids import CheckpointId, Run, checkpoint_id
from tierd.lifecycle.selection import (
    Candidate,
    CheckpointQuery,
    SelectableReplicas,
    Selected,
    UnreadableReplica,
    select,
    select_each,
)
from tierd.tiers.store import StoredObject

TIERS = ("hot", "cold", "dr")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """`good`, `damaged` (wrong bytes), `torn` (unreadable manifest), `newer` (a later tierd's manifest): the tiers that
    hold such a replica of it."""

    step: int
    generation: int = 1
    good: str = ""
    damaged: str = ""
    torn: str = ""
    newer: str = ""
    milestones: tuple[str, ...] = ()
    is_healthy: bool | None = None

    @property
    def id(self) -> CheckpointId:
        return checkpoint_id(RUN, self.step, self.generation)

    @property
    def tiers(self) -> set[str]:
        return set(f"{self.good} {self.damaged} {self.torn} {self.newer}".split())


Outcome = tuple[int, int, str] | type[TierdError]


@dataclass(frozen=True, kw_only=True)
class Case:
    """`outcome`: (step, generation, tier) that is restored, or what is raised. `operator`: for `tierd restore`, if it
    differs from a trainer's: an operator decides whether an older checkpoint will do. `reported`: the steps of the
    checkpoints that are named as passed over."""

    tiers: tuple[Checkpoint, ...]
    query: Mapping[str, Any] = field(default_factory=dict[str, Any])
    unlisted: tuple[str, ...] = ()
    outcome: Outcome
    operator: Outcome | None = None
    reported: tuple[int, ...] = ()


GOOD_100 = Checkpoint(step=100, good="hot")
CASES = {
    "newest step": Case(tiers=(GOOD_100, Checkpoint(step=200, good="hot")), outcome=(200, 1, "hot")),
    "nearest tier": Case(tiers=(Checkpoint(step=100, good="hot cold dr"),), outcome=(100, 1, "hot")),
    "newest generation before newest step": Case(
        tiers=(Checkpoint(step=900, good="hot"), Checkpoint(step=500, generation=2, good="cold")),
        outcome=(500, 2, "cold"),
    ),
    "named generation": Case(
        tiers=(Checkpoint(step=900, good="hot"), Checkpoint(step=500, generation=2, good="cold")),
        query={"generation": 1},
        outcome=(900, 1, "hot"),
    ),
    "named step": Case(
        tiers=(GOOD_100, Checkpoint(step=200, good="hot")), query={"step": 100}, outcome=(100, 1, "hot")
    ),
    "named step of the newest generation": Case(
        tiers=(Checkpoint(step=500, good="hot"), Checkpoint(step=500, generation=2, good="cold")),
        query={"step": 500},
        outcome=(500, 2, "cold"),
    ),
    "newest with the named milestone": Case(
        tiers=(
            Checkpoint(step=100, good="hot", milestones=("best",)),
            Checkpoint(step=200, good="hot", milestones=("best",)),
            Checkpoint(step=300, good="hot"),
        ),
        query={"milestone": "best"},
        outcome=(200, 1, "hot"),
    ),
    "named tier": Case(
        tiers=(Checkpoint(step=100, good="hot cold"), Checkpoint(step=200, good="hot")),
        query={"tier": "cold"},
        outcome=(100, 1, "cold"),
    ),
    # Replicas that cannot be read.
    "damaged replica: next tier": Case(
        tiers=(Checkpoint(step=100, damaged="hot", good="cold"),), outcome=(100, 1, "cold"), reported=(100,)
    ),
    "damaged replica in the only allowed tier": Case(
        tiers=(Checkpoint(step=100, damaged="hot", good="cold"),), query={"tier": "hot"}, outcome=Corrupt
    ),
    "every replica of the newest damaged": Case(
        tiers=(GOOD_100, Checkpoint(step=200, damaged="hot cold")),
        outcome=(100, 1, "hot"),
        operator=Corrupt,
        reported=(200,),
    ),
    "every replica of the named step damaged": Case(
        tiers=(Checkpoint(step=200, good="hot"), Checkpoint(step=200, generation=2, damaged="hot cold")),
        query={"step": 200},
        outcome=Corrupt,
    ),
    "every replica of the newest named milestone damaged": Case(
        tiers=(
            Checkpoint(step=100, good="hot", milestones=("best",)),
            Checkpoint(step=200, damaged="hot", milestones=("best",)),
        ),
        query={"milestone": "best"},
        outcome=Corrupt,
    ),
    "every replica of every checkpoint damaged": Case(
        tiers=(Checkpoint(step=100, damaged="hot"), Checkpoint(step=200, damaged="cold")), outcome=Corrupt
    ),
    # Health.
    "newest unhealthy": Case(
        tiers=(GOOD_100, Checkpoint(step=200, good="hot", is_healthy=False)), outcome=(100, 1, "hot"), reported=(200,)
    ),
    "newest unhealthy and allowed": Case(
        tiers=(GOOD_100, Checkpoint(step=200, good="hot", is_healthy=False)),
        query={"allow_unhealthy": True},
        outcome=(200, 1, "hot"),
    ),
    "all unhealthy": Case(
        tiers=(
            Checkpoint(step=100, good="hot", is_healthy=False),
            Checkpoint(step=200, good="hot", is_healthy=False),
        ),
        outcome=Unhealthy,
    ),
    "named step unhealthy": Case(
        tiers=(GOOD_100, Checkpoint(step=200, good="hot", is_healthy=False)), query={"step": 200}, outcome=Unhealthy
    ),
    "newest named milestone unhealthy": Case(
        tiers=(
            Checkpoint(step=100, good="hot", milestones=("best",)),
            Checkpoint(step=200, good="hot", milestones=("best",), is_healthy=False),
        ),
        query={"milestone": "best"},
        outcome=Unhealthy,
    ),
    # Unreadable manifests.
    "newest unreadable": Case(
        tiers=(GOOD_100, Checkpoint(step=200, torn="hot")), outcome=(100, 1, "hot"), reported=(200,)
    ),
    "older one unreadable": Case(
        tiers=(Checkpoint(step=100, torn="hot"), Checkpoint(step=200, good="cold")), outcome=(200, 1, "cold")
    ),
    "unreadable in hot, readable in cold": Case(
        tiers=(Checkpoint(step=100, torn="hot", good="cold"),), outcome=(100, 1, "cold"), reported=(100,)
    ),
    "only one unreadable": Case(tiers=(Checkpoint(step=100, torn="hot"),), outcome=Corrupt),
    "named step unreadable": Case(
        tiers=(GOOD_100, Checkpoint(step=200, torn="hot")), query={"step": 200}, outcome=Corrupt
    ),
    "older step named": Case(
        tiers=(GOOD_100, Checkpoint(step=200, torn="hot")), query={"step": 100}, outcome=(100, 1, "hot")
    ),
    # Manifests of a later format.
    "newest of a later format": Case(tiers=(GOOD_100, Checkpoint(step=200, newer="hot")), outcome=NewerFormat),
    "newest of a later format, in another tier": Case(
        tiers=(GOOD_100, Checkpoint(step=200, newer="cold")), outcome=NewerFormat
    ),
    "newest of a later format, not in the named tier": Case(
        tiers=(GOOD_100, Checkpoint(step=200, newer="cold")), query={"tier": "hot"}, outcome=(100, 1, "hot")
    ),
    "newest of a later format, older step named": Case(
        tiers=(GOOD_100, Checkpoint(step=200, newer="hot")), query={"step": 100}, outcome=(100, 1, "hot")
    ),
    "newest of a later format, older generation named": Case(
        tiers=(GOOD_100, Checkpoint(step=50, generation=2, newer="hot")),
        query={"generation": 1},
        outcome=(100, 1, "hot"),
    ),
    "older one of a later format": Case(
        tiers=(Checkpoint(step=100, newer="hot"), Checkpoint(step=200, good="cold")), outcome=(200, 1, "cold")
    ),
    "only one of a later format": Case(tiers=(Checkpoint(step=100, newer="hot"),), outcome=NewerFormat),
    "named step of a later format": Case(
        tiers=(GOOD_100, Checkpoint(step=200, newer="hot")), query={"step": 200}, outcome=NewerFormat
    ),
    # Nothing there, and tiers that cannot be listed.
    "nothing": Case(tiers=(), outcome=NotFound),
    "no such step": Case(tiers=(GOOD_100,), query={"step": 7}, outcome=NotFound),
    "no such generation": Case(tiers=(GOOD_100,), query={"generation": 7}, outcome=NotFound),
    "no such milestone": Case(tiers=(GOOD_100,), query={"milestone": "best"}, outcome=NotFound),
    "not in the named tier": Case(tiers=(GOOD_100,), query={"tier": "cold"}, outcome=NotFound),
    "nothing, and a tier not listed": Case(tiers=(), unlisted=("dr",), outcome=TierUnreachable),
    "nothing in the named tier, which is not listed": Case(
        tiers=(GOOD_100,), unlisted=("dr",), query={"tier": "dr"}, outcome=TierUnreachable
    ),
    "nothing in the named tier, another one not listed": Case(
        tiers=(GOOD_100,), unlisted=("dr",), query={"tier": "cold"}, outcome=NotFound
    ),
    "found, and another tier not listed": Case(tiers=(GOOD_100,), unlisted=("dr",), outcome=(100, 1, "hot")),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def inventory_of(case: Case) -> SelectableReplicas:
    candidates = [
        Candidate(
            id=one.id,
            milestones=frozenset(one.milestones),
            tiers=tuple(tier for tier in TIERS if tier in f"{one.good} {one.damaged}".split()),
            is_healthy=one.is_healthy,
        )
        for one in case.tiers
        if one.good or one.damaged
    ]
    unreadable = [
        UnreadableReplica(id=one.id, tier=tier, reason=f"{one.id} in {tier}", is_newer_format=tier in one.newer)
        for one in case.tiers
        for tier in f"{one.torn} {one.newer}".split()
    ]
    return SelectableReplicas(
        candidates=candidates, unreadable=unreadable, unlisted=dict.fromkeys(case.unlisted, "503")
    )


def reported_steps(case: Case, text: str) -> tuple[int, ...]:
    return tuple(one.step for one in case.tiers if str(one.id) in text)


@pytest.mark.parametrize("is_trainer", [True, False], ids=["trainer", "operator"])
@cases
def test_select_agrees_with_the_table(case: Case, is_trainer: bool) -> None:
    query = CheckpointQuery(run=RUN, allow_older=is_trainer, **case.query)
    expected = case.outcome if is_trainer else case.operator or case.outcome
    if not isinstance(expected, tuple):
        with pytest.raises(expected):
            select_undamaged(case, query)
        return
    selected = select_undamaged(case, query)
    assert (selected.candidate.id.step, selected.candidate.id.generation, selected.tier) == expected
    assert reported_steps(case, " ".join(selected.passed_over)) == case.reported


def select_undamaged(case: Case, query: CheckpointQuery) -> Selected:
    """The first selected replica that is not damaged."""
    damaged = {(one.id, tier) for one in case.tiers for tier in one.damaged.split()}
    failed: dict[tuple[CheckpointId, str], TierdError | None] = {}
    while True:
        selected = select(query, inventory_of(case), failed)
        replica = (selected.candidate.id, selected.tier)
        if replica not in damaged:
            return selected
        failed[replica] = Corrupt(f"read {selected.candidate.id} in {selected.tier}")


# ── the daemon and the CLI on the same tiers ──


def make_tiers(case: Case, house: House) -> None:
    """Real checkpoints, damaged as the case says."""
    for sequence, one in enumerate(case.tiers, 1):
        roots = {tier: house.root / tier for tier in one.tiers}
        manifest = make_checkpoint(
            *roots.values(),
            step=one.step,
            generation=one.generation,
            sequence=sequence,
            milestones=one.milestones,
        )
        for tier, root in roots.items():
            folder = folder_of(root, manifest)
            if one.is_healthy is False:
                (folder / layout.UNHEALTHY).write_text('{"healthy": false}\n')
            if tier in one.torn:
                (folder / layout.MANIFEST).write_text("{")
            if tier in one.newer:
                later = msgspec.structs.replace(manifest, format_version=9)
                (folder / layout.MANIFEST).write_bytes(later.encode())
            if tier in one.damaged:
                flip_a_bit(folder / manifest.files[0].name)


def exclusions(case: Case) -> list[str]:
    """What a trainer reports when it has read the damaged hot replicas: the daemon hands these over unread."""
    return [f"{one.id.name}@hot" for one in case.tiers if "hot" in one.damaged.split()]


@cases
def test_restorer_agrees_with_the_table(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiers(case, make_house(tmp_path))

    async def refuse(prefix: str = "") -> list[StoredObject]:
        raise TierUnreachable("503")

    async def find(rooms: Rooms) -> tuple[Outcome, str]:
        await rooms.look()
        for tier in case.unlisted:
            rooms.catalog.listing_failed(tier, "503")
            monkeypatch.setattr(rooms.tiers[tier].store, "list", refuse)
        try:
            found = await find_with(restorer(rooms), exclude=exclusions(case), **case.query)
        except TierdError as error:
            return type(error), ""
        close_all(found.descriptors)
        failures = [failure.message for failure in rooms.incidents.recent()]
        return (found.manifest.step, found.manifest.generation, found.tier), " ".join([*found.passed_over, *failures])

    async def run() -> tuple[Outcome, str]:
        async with rooms_at(tmp_path, cold=("cold", "dr")) as rooms:
            return await find(rooms)

    outcome, text = asyncio.run(run())
    assert outcome == case.outcome
    excluded = {one.step for one in case.tiers if "hot" in one.damaged.split()}
    if isinstance(outcome, tuple):
        assert set(reported_steps(case, text)) | excluded == set(case.reported) | excluded


@cases
def test_tierd_restore_agrees_with_the_table(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    url = "s3://bucket/prefix" if case.unlisted else "file://dr"
    endpoint = '\nendpoint_url = "http://127.0.0.1:9"\n[limits]\nrequest_timeout_s = 1' if case.unlisted else ""
    house = make_house(tmp_path, more=f'[[cold]]\nname = "dr"\nurl = "{url}"{endpoint}')
    make_tiers(case, house)
    step = f"milestone:{case.query['milestone']}" if "milestone" in case.query else case.query.get("step", "latest")
    arguments = ["--run", RUN, "--step", str(step), "--tier", case.query.get("tier", "auto")]
    arguments += ["--generation", str(case.query["generation"])] if "generation" in case.query else []
    arguments += ["--allow-unhealthy"] if "allow_unhealthy" in case.query else []

    result = house.tierd("restore", *arguments, "--to", tmp_path / "restored", "--json")

    expected = case.operator or case.outcome
    if isinstance(expected, tuple):
        assert result.exit_code == 0, result.output
        restored = msgspec.json.decode(result.stdout)
        assert (restored["step"], restored["generation"], restored["tier"]) == expected
        assert reported_steps(case, result.stderr) == case.reported
    else:
        assert result.exit_code == expected.exit_code, result.output


# ── what the table cannot show ──


def test_gravest_error_is_raised_whatever_failed_last() -> None:
    inventory = SelectableReplicas(
        candidates=[Candidate(id=checkpoint_id(RUN, 1, 1), milestones=frozenset(), tiers=TIERS)]
    )
    errors: dict[str, TierdError] = {"hot": NotFound("gone"), "cold": Corrupt("bad"), "dr": TierUnreachable("503")}
    failed = {(checkpoint_id(RUN, 1, 1), tier): error for tier, error in errors.items()}
    with pytest.raises(Corrupt, match="bad"):
        select(CheckpointQuery(run=RUN), inventory, failed)
    failed[checkpoint_id(RUN, 1, 1), "cold"] = NotFound("gone")
    with pytest.raises(TierUnreachable, match="503"):
        select(CheckpointQuery(run=RUN), inventory, failed)


def test_replica_that_failed_and_is_no_longer_listed_is_not_answered_with_not_found() -> None:
    """A trainer starts from scratch on NotFound."""
    empty = SelectableReplicas(candidates=[])
    with pytest.raises(TierUnreachable, match="503"):
        select(CheckpointQuery(run=RUN), empty, {(checkpoint_id(RUN, 1, 1), "cold"): TierUnreachable("503")})
    with pytest.raises(Corrupt, match="in hot is damaged"):
        select(CheckpointQuery(run=RUN), empty, {(checkpoint_id(RUN, 1, 1), "hot"): None})


def test_query_without_a_run_needs_one_run_only() -> None:
    one, other = (
        Candidate(id=checkpoint_id(run, 1, 1), milestones=frozenset(), tiers=("hot",)) for run in (RUN, "other")
    )
    assert select(CheckpointQuery(), SelectableReplicas(candidates=[one])).candidate is one
    with pytest.raises(BadConfig, match="there are 2 runs") as caught:
        select(CheckpointQuery(), SelectableReplicas(candidates=[one, other]))
    assert f"other, {RUN}" in caught.value.hint
    assert select(CheckpointQuery(run=Run("other")), SelectableReplicas(candidates=[one, other])).candidate is other


def test_selection_reads_the_inventory_once_however_many_replicas_fail() -> None:
    class Candidates(list[Candidate]):
        read_count = 0

        def __iter__(self) -> Iterator[Candidate]:
            self.read_count += 1
            return super().__iter__()

    candidates = Candidates(
        Candidate(id=checkpoint_id(RUN, step, 1), milestones=frozenset(), tiers=TIERS) for step in range(200)
    )
    failed: dict[tuple[CheckpointId, str], TierdError | None] = {}
    selections = select_each(
        CheckpointQuery(run=RUN, allow_older=True), SelectableReplicas(candidates=candidates), failed
    )

    def fail_each() -> None:
        for selected in selections:
            failed[selected.candidate.id, selected.tier] = Corrupt("damaged")

    with pytest.raises(Corrupt):
        fail_each()
    assert len(failed) == 200 * len(TIERS)
    assert candidates.read_count <= 3


# ── foreign checkpoints ──


def with_foreign(tier: str, *, step: int = 200) -> SelectableReplicas:
    foreign = UnreadableReplica(id=checkpoint_id(RUN, step, 1), tier=tier, reason="it is not signed")
    return replace(inventory_of(Case(tiers=(GOOD_100,), outcome=NotFound)), foreign=[foreign])


@pytest.mark.parametrize("is_trainer", [True, False])
def test_newer_foreign_checkpoint_in_hot_is_refused_by_name(*, is_trainer: bool) -> None:
    """Only this node writes to hot: an older checkpoint would lose its work in silence."""
    with pytest.raises(Foreign, match="000000000200-g0001") as refused:
        select(CheckpointQuery(run=RUN, allow_older=is_trainer), with_foreign("hot"))
    assert "tierd key sign run42" in (refused.value.hint or "")
    assert "older step" in (refused.value.hint or "")


def test_newer_foreign_checkpoint_in_cold_is_passed_over_and_named() -> None:
    """Else a writer to a bucket could stop every restore."""
    selected = select(CheckpointQuery(run=RUN), with_foreign("cold"))
    assert (selected.candidate.id.step, selected.passed_over) == (100, ["it is not signed"])


def test_older_step_is_selected_by_name_beside_a_foreign_one_in_hot() -> None:
    assert select(CheckpointQuery(run=RUN, step=100), with_foreign("hot")).candidate.id.step == 100
    assert select(CheckpointQuery(run=RUN), with_foreign("hot", step=50)).candidate.id.step == 100
