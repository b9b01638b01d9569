"""Daemons that are broken on purpose: the simulation must notice each defect, and none in the same daemons unbroken."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.support.simulation.schedule import make_schedule
from tests.support.simulation.world import simulate
from tierd.catalog.listing import next_sequence
from tierd.format import layout
from tierd.format.ids import HOT, CheckpointId
from tierd.format.manifest import Manifest
from tierd.tiers import checkpoint_copy
from tierd.tiers.tier import Tier
from tierd.workers.reaper import Reaper
from tierd.workers.replicator import Replicator
from tierd.workers.restorer import Restorer
from tierd.workers.write_through import WriteThrough

SEEDS = range(30)


async def commit_nothing_in_hot(tier: Tier, *arguments: Any, **options: Any) -> Any:
    return None if tier.name == HOT else await commit(tier, *arguments, **options)


async def delete_shards_first(tier: Tier, checkpoint: CheckpointId, **options: object) -> bool:
    keys = {stored.key for stored in await tier.store.list(layout.checkpoint_prefix(checkpoint))}
    for key in sorted(keys, key=lambda key: key.endswith(layout.MANIFEST)):
        await tier.store.delete([key])
    return True


async def commit_first(manifest: Manifest, source: Tier, target: Tier, **options: Any) -> None:
    await target.commit(manifest, raw=await source.manifest_bytes(manifest))
    await copy_checkpoint(manifest, source, target, **options)


async def claim_nothing(tier: Tier, *claim: object) -> bool:
    return True


async def claim_in_hot_alone(tier: Tier, *claim: Any) -> bool:
    return tier.name != HOT or await claim_generation(tier, *claim)


async def trust_old_listings(restorer: object, run: object) -> dict[str, str]:
    return {}


async def evict_all(reaper: Reaper) -> bool:
    for manifest in reaper._catalog.manifests_in(HOT):
        await reaper._context.hot.delete(manifest.id)
        reaper._catalog.drop(manifest.id, HOT)
    return True


async def evict_unchecked(reaper: Reaper, need_bytes: int) -> int:
    await evict_all(reaper)
    return need_bytes


async def commit_another_manifest(tier: Tier, manifest: Manifest, **options: Any) -> Any:
    if tier.name == HOT:
        return await commit(tier, manifest, **options)
    return await commit(tier, msgspec.structs.replace(manifest, sequence=manifest.sequence + 1))


async def give_the_highest_sequence_again(*arguments: Any, **options: Any) -> int:
    return max(await next_sequence(*arguments, **options) - 1, 1)


async def pass_without_work(worker: object) -> bool:
    return True


async def copy_nothing(replicator: Replicator) -> bool:
    await replicator._find_former_copy()
    return True


copy_checkpoint = checkpoint_copy.copy_checkpoint
commit = Tier.commit
claim_generation = Tier.claim_generation

MUTATIONS: dict[str, tuple[object, str, object]] = {
    "Persisted was said and nothing was committed": (Tier, "commit", commit_nothing_in_hot),
    "a file of a committed checkpoint was deleted": (Tier, "delete", delete_shards_first),
    "a manifest without whole files": ("tierd.workers.replicator", "copy_checkpoint", commit_first),
    "a generation was claimed twice": (Tier, "claim_generation", claim_nothing),
    "hot deleted what its policy keeps": (Reaper, "run_once", evict_all),
    "hot keeps too much": (Reaper, "run_once", pass_without_work),
    "cold lacks what it keeps": (Replicator, "run_once", copy_nothing),
}

MUTATIONS_OF_FULL_DISKS: dict[str, tuple[object, str, object]] = {
    "a full disk stopped durability": (WriteThrough, "run_once", pass_without_work),
    "hot deleted a checkpoint before its cold copy": (Reaper, "make_room", evict_unchecked),
    "a checkpoint has two manifests": (Tier, "commit", commit_another_manifest),
    "a sequence was given twice": ("tierd.workers.persister", "next_sequence", give_the_highest_sequence_again),
}


MUTATIONS_OF_NODES: dict[str, tuple[object, str, object, set[str]]] = {
    "shared run": (Tier, "claim_generation", claim_in_hot_alone, {"a generation was claimed twice"}),
    "moves": (
        Restorer,
        "list_run",
        trust_old_listings,
        {"a restore gave an older checkpoint", "a restore found nothing", "a generation was claimed twice"},
    ),
}
"""By scenario, with several nodes."""


def kinds(scenario: str = "one node") -> set[str]:
    """The first promise that daemons break; without the faults that show known defects, none."""
    found: set[str] = set()
    for seed in SEEDS:
        schedule = make_schedule(seed, scenario)
        faults = ("lose shard", "lose disk", "mark")
        schedule.events[:] = [event for event in schedule.events if event.action not in faults]
        violation = simulate(schedule).violation
        if violation is not None:
            found.add(violation.kind)
            break
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind", [pytest.param(each, marks=pytest.mark.long if "twice" in each else ()) for each in MUTATIONS]
)
def test_a_daemon_is_caught_that_breaks_the_promise(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replace(monkeypatch, *MUTATIONS[kind])
    assert kinds() == {kind}


def replace(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, broken: object) -> None:
    """`owner`: an object, or the name of a module."""
    if isinstance(owner, str):
        monkeypatch.setattr(f"{owner}.{name}", broken)
    else:
        monkeypatch.setattr(owner, name, broken)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("a full disk stopped durability", marks=pytest.mark.long),
        pytest.param("hot deleted a checkpoint before its cold copy", marks=pytest.mark.long),
        "a checkpoint has two manifests",
        "a sequence was given twice",
    ],
)
def test_a_daemon_is_caught_that_does_not_survive_a_full_disk(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replace(monkeypatch, *MUTATIONS_OF_FULL_DISKS[kind])
    assert kinds("full disk") == {kind}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scenario", MUTATIONS_OF_NODES)
def test_a_daemon_is_caught_that_forgets_the_other_nodes(scenario: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, broken, broken_promises = MUTATIONS_OF_NODES[scenario]
    monkeypatch.setattr(owner, name, broken)
    found = kinds(scenario)
    assert found
    assert found <= broken_promises


@pytest.mark.long  # tests/simulation/test_seeds.py runs more of the same seeds
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scenario", ["one node", *MUTATIONS_OF_NODES])
def test_an_unbroken_daemon_is_not_caught(scenario: str) -> None:
    assert kinds(scenario) == set()
