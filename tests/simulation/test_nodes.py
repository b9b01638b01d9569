"""Several nodes under simulated time and injected faults: no seed breaks a promise, and a broken daemon is caught.

A failure names its seed: `python -m tests.support.simulation.seeds SEED --scenario "several nodes" --shrink`.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

import pytest

from tests.support.simulation.nodes_world import place, simulate
from tests.support.simulation.schedule import SEVERAL_NODES, make_nodes_schedule
from tests.support.simulation.seeds import SeedOutcome, run_program, run_seeds
from tierd.format.ids import HOT, CheckpointId
from tierd.format.node_file import NodeFile
from tierd.memory.snapshot_set import SnapshotSet
from tierd.tiers import checkpoint_copy
from tierd.tiers.tier import Tier
from tierd.workers.committer import Committer
from tierd.workers.leftovers import Leftovers
from tierd.workers.reaper import Reaper

SEEDS = range(5, 6)  # one that takes less time than most
SEEDS_LONG = int(os.environ.get("TIERD_SIMULATION_SEEDS", "20000")) // 20
SEEDS_OF_SIXTEEN = int(os.environ.get("TIERD_SIMULATION_SEEDS", "20000")) // 4
MUTATED_SEEDS = range(12)
LONG = ("nobody clears leftovers", "each node counts for itself", "nobody commits")  # take most of the time

pytestmark = pytest.mark.timeout(600)


def unexpected(outcomes: list[SeedOutcome]) -> list[str]:
    return [str(outcome) for outcome in outcomes if outcome.kind]


def test_no_seed_over_several_nodes_breaks_a_promise() -> None:
    outcomes = run_seeds(SEEDS.start, len(SEEDS), scenario=SEVERAL_NODES)
    assert len(outcomes) == len(SEEDS)
    assert unexpected(outcomes) == []


@pytest.mark.long
@pytest.mark.timeout(0)
def test_no_seed_of_many_over_several_nodes_breaks_a_promise() -> None:
    outcomes = run_seeds(0, SEEDS_LONG, scenario=SEVERAL_NODES, processes=os.cpu_count() or 1)
    assert unexpected(outcomes) == []


@pytest.mark.long
@pytest.mark.timeout(0)
def test_no_seed_over_sixteen_nodes_breaks_a_promise() -> None:
    processes = os.cpu_count() or 1
    outcomes = run_seeds(0, SEEDS_OF_SIXTEEN, scenario=SEVERAL_NODES, nodes=16, processes=processes)
    assert len(outcomes) == SEEDS_OF_SIXTEEN
    assert unexpected(outcomes) == []


@pytest.mark.long
def test_sixteen_nodes_commit() -> None:
    outcome = simulate(make_nodes_schedule(1, nodes=16))
    assert outcome.violation is None
    assert any("put" in line and line.endswith("manifest.json") for line in outcome.trace)


@pytest.mark.long
def test_a_seed_over_several_nodes_replays_exactly() -> None:
    traces = [run_program("3", "--scenario", SEVERAL_NODES) for _ in range(2)]
    first, second = ([line for line in trace.splitlines() if ".tierd-tier-" not in line] for trace in traces)
    assert first == second
    assert any("manifest.json" in line for line in first)


def test_ranks_are_placed_two_on_a_node() -> None:
    nodes = ["a", "b", "c", "d"]
    placements = [place(choice / 20, nodes, 3) for choice in range(20)]
    assert all(len(ranks) == 6 and {ranks.count(node) for node in set(ranks)} == {2} for ranks in placements)
    assert len({tuple(ranks) for ranks in placements}) > 3


# ── daemons that are broken on purpose ──


async def commit_nothing_in_hot(tier: Tier, *arguments: Any, **options: Any) -> Any:
    return None if tier.name == HOT else await commit(tier, *arguments, **options)


async def node_file_first(part: NodeFile, source: Tier, target: Tier, make: Any, **options: Any) -> None:
    await target.store.put_bytes(part.key, make().encode(), if_absent=True)
    await copy_part(part, source, target, make, **options)


def nothing_is_missing(node_files: Collection[NodeFile]) -> list[int]:
    return []


def number_own_way(snapshot_set: SnapshotSet) -> NodeFile:
    assert snapshot_set.node is not None
    own = {"sequence": 100 + snapshot_set.node.ranks[0]}
    part = make_node_file(snapshot_set)
    return NodeFile(**{name: getattr(part, name) for name in part.__struct_fields__ if name != "signature"} | own)


async def evict_all(reaper: Reaper) -> bool:
    for manifest in reaper._catalog.manifests_in(HOT):
        await reaper._context.hot.delete(manifest.id)
        reaper._catalog.drop(manifest.id, HOT)
    return True


async def pass_without_work(worker: object) -> bool:
    return True


async def delete_without_tombstone(tier: Tier, checkpoint: CheckpointId, **options: Any) -> bool:
    """The shards first, too."""
    prefix = f"{checkpoint.run}/{checkpoint.name}/"
    keys = sorted((stored.key for stored in await tier.store.list(prefix)), reverse=True)
    for key in keys:
        await tier.store.delete([key])
    return True


commit = Tier.commit
copy_part = checkpoint_copy.copy_part
make_node_file = SnapshotSet.make_node_file

MUTATIONS: dict[str, tuple[object, str, object, set[str]]] = {
    "hot commits nothing": (
        Tier,
        "commit",
        commit_nothing_in_hot,
        {"Persisted was said and nothing was committed"},
    ),
    "the node file is sent first": (
        "tierd.workers.replicator",
        "copy_part",
        node_file_first,
        {"a node file in cold without whole files"},
    ),
    "one part is enough": (
        "tierd.workers.committer",
        "missing_ranks",
        nothing_is_missing,
        {"an unexpected exception in a daemon", "a commit of bytes that were no snapshot", "cold lacks what it keeps"},
    ),
    "each node counts for itself": (SnapshotSet, "make_node_file", number_own_way, {"cold lacks what it keeps"}),
    "nobody commits": (Committer, "run_once", pass_without_work, {"cold lacks what it keeps"}),
    "nobody clears leftovers": (Leftovers, "clear", pass_without_work, {"leftovers stay in cold"}),
    "parts are deleted at once": (Reaper, "run_once", evict_all, {"hot deleted a part that its policy keeps"}),
    "shards are deleted first": (
        Tier,
        "delete",
        delete_without_tombstone,
        {"a file of a committed checkpoint was deleted", "a file of a part was changed"},
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "defect", [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in MUTATIONS]
)
def test_a_daemon_is_caught_that_breaks_a_promise_over_several_nodes(
    defect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, broken, kinds = MUTATIONS[defect]
    if isinstance(owner, str):
        monkeypatch.setattr(f"{owner}.{name}", broken)
    else:
        monkeypatch.setattr(owner, name, broken)
    if broken is nothing_is_missing:  # what assembles the manifest asks it too
        monkeypatch.setattr("tierd.format.node_file.missing_ranks", broken)
    for seed in MUTATED_SEEDS:
        violation = simulate(make_nodes_schedule(seed, nodes=2)).violation
        if violation is not None:
            assert violation.kind in kinds
            return
    pytest.fail("no seed has shown it")
