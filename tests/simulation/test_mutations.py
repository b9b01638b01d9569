"""Daemons that are broken on purpose: the simulation must notice each defect, and none in the same daemons unbroken."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.simulation.schedule import make_schedule
from tests.support.simulation.world import simulate
from tierd.format import layout
from tierd.format.ids import CheckpointId
from tierd.format.manifest import Manifest
from tierd.lifecycle.policy import HOT
from tierd.tiers import tier as tier_module
from tierd.tiers.tier import Tier
from tierd.workers.reaper import Reaper
from tierd.workers.replicator import Replicator

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


async def evict_all(reaper: Reaper) -> bool:
    for manifest in reaper._catalog.manifests_in(HOT):
        await reaper._context.hot.delete(manifest.id)
        reaper._catalog.drop(manifest.id, HOT)
    return True


async def pass_without_work(worker: object) -> bool:
    return True


copy_checkpoint = tier_module.copy_checkpoint
commit = Tier.commit

MUTATIONS: dict[str, tuple[object, str, object]] = {
    "Persisted was said and nothing was committed": (Tier, "commit", commit_nothing_in_hot),
    "a file of a committed checkpoint was deleted": (Tier, "delete", delete_shards_first),
    "a manifest without whole files": ("tierd.workers.replicator", "copy_checkpoint", commit_first),
    "a generation was claimed twice": (Tier, "claim_generation", claim_nothing),
    "hot deleted what its policy keeps": (Reaper, "run_once", evict_all),
    "hot keeps too much": (Reaper, "run_once", pass_without_work),
    "cold lacks what it keeps": (Replicator, "run_once", pass_without_work),
}


def kinds() -> set[str]:
    """The first promise that daemons on one node break; without the faults that show known defects, none."""
    found: set[str] = set()
    for seed in SEEDS:
        schedule = make_schedule(seed, "one node")
        faults = ("lose shard", "lose disk", "mark")
        schedule.events[:] = [event for event in schedule.events if event.action not in faults]
        violation = simulate(schedule).violation
        if violation is not None:
            found.add(violation.kind)
            break
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MUTATIONS)
def test_a_daemon_is_caught_that_breaks_the_promise(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, broken = MUTATIONS[kind]
    if isinstance(owner, str):
        monkeypatch.setattr(f"{owner}.{name}", broken)
    else:
        monkeypatch.setattr(owner, name, broken)
    assert kinds() == {kind}


@pytest.mark.filterwarnings("ignore")
def test_an_unbroken_daemon_is_not_caught() -> None:
    assert kinds() == set()
