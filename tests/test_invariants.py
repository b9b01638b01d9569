"""Daemons that break an invariant of docs/ARCHITECTURE.md on purpose: a test of that invariant fails for each of them.

For invariants whose batteries have no mutations of their own; docs/RELIABILITY.md has the table of all.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.catalog import test_identity
from tests.memory import test_tier as test_memory
from tests.security import test_config_owner
from tests.support.rooms import Rooms, rooms_at
from tests.tiers import test_directory, test_pool, test_tier
from tests.workers import test_reaper
from tierd.catalog.catalog import Catalog
from tierd.catalog.identity import Identities
from tierd.config import file as config_file
from tierd.lifecycle import policy
from tierd.lifecycle.policy import Action
from tierd.memory.tier import MemoryTier
from tierd.tiers import tree
from tierd.tiers.chunks import ChunkSums
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.pool import Buffers, page_aligned
from tierd.tiers.tier import Tier

Failed = pytest.fail.Exception  # also of `pytest.raises`, when nothing is raised
entry_of_sums, policy_deletions = ChunkSums.entry, policy.deletions


# ── broken on purpose ──


def copy_without_a_comparison(sums: ChunkSums, name: str, expect: object = None, action: str = "") -> Any:
    return entry_of_sums(sums, name, None, action)


def accept_every_generation(memory: MemoryTier, run: Any, generation: object, action: str) -> Any:
    return memory._runs[run]


def trust_a_tier_that_cannot_be_listed(*_: object) -> None:
    pass


async def accept_every_place(*_: object) -> None:
    pass


@asynccontextmanager
async def allocate_without_a_limit(buffers: Buffers, size_bytes: int) -> AsyncGenerator[memoryview]:
    yield page_aligned(size_bytes)


def delete_more_than_is_shown(decided: Any) -> Any:
    return [decision for decision in policy_deletions(decided) if decision.action is not Action.EVICT]


# ── tests of the invariants ──


@asynccontextmanager
async def rooms_with_checkpoints(root: Path) -> AsyncGenerator[Rooms]:
    """As the fixture of tests/workers/test_reaper.py."""
    async with rooms_at(root) as rooms:
        for number, step in enumerate(test_reaper.STEPS):
            await rooms.commit("hot", "cold", step=step, sequence=number + 1)
        await rooms.look()
        yield rooms


async def copy_of_a_damaged_shard(root: Path) -> None:
    async with DirectoryStore(root / "hot") as hot, DirectoryStore(root / "cold") as cold:
        await test_tier.test_damaged_shard_is_never_copied(Tier("hot", hot), Tier("cold", cold), 0, 0)


async def calls_of_a_stale_generation(root: Path) -> None:
    test_memory.test_a_stale_generation_is_refused_in_every_call(MemoryTier())


async def links_out_of_the_root(root: Path) -> None:
    async with DirectoryStore(root / "root") as store:
        await test_directory.test_no_link_leads_out_of_the_root(store, root)


async def buffers_in_use(root: Path) -> None:
    await test_pool.test_buffers_are_limited_in_number_and_reused()


async def config_of_everybody(root: Path) -> None:
    test_config_owner.test_a_config_that_others_can_write_is_refused_by_name(root, 0o666, True)


async def deletions_without_a_listing(root: Path) -> None:
    async with rooms_with_checkpoints(root) as rooms:
        await test_reaper.test_nothing_is_deleted_while_hot_cannot_be_listed(rooms)


async def deletions_and_decisions(root: Path) -> None:
    async with rooms_with_checkpoints(root) as rooms:
        await test_reaper.test_deletions_are_those_among_the_decisions(rooms)


@dataclass(frozen=True)
class Mutation:
    owner: object
    name: str
    broken: object
    battery: Callable[[Path], Coroutine[Any, Any, None]]


MUTATIONS = {
    "same_bytes": Mutation(ChunkSums, "entry", copy_without_a_comparison, copy_of_a_damaged_shard),
    "halt, not guess": Mutation(
        Catalog, "listing_failed", trust_a_tier_that_cannot_be_listed, deletions_without_a_listing
    ),
    "fenced": Mutation(MemoryTier, "_current", accept_every_generation, calls_of_a_stale_generation),
    "identified": Mutation(
        Identities,
        "_check",
        accept_every_place,
        test_identity.test_cold_that_is_hot_under_another_name_evicts_nothing_from_hot,
    ),
    "bounded": Mutation(Buffers, "borrow", allocate_without_a_limit, buffers_in_use),
    "harmless input": Mutation(tree, "NO_LINK", tree.NO_LINK & ~os.O_NOFOLLOW, links_out_of_the_root),
    "trusted": Mutation(config_file, "others_can_write", lambda about: False, config_of_everybody),
    "honest": Mutation(policy, "deletions", delete_more_than_is_shown, deletions_and_decisions),
}


@pytest.mark.filterwarnings("ignore")  # a test that fails early leaves coroutines that were never awaited
@pytest.mark.parametrize("invariant", MUTATIONS)
def test_a_daemon_is_caught_that_breaks_the_invariant(
    invariant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation = MUTATIONS[invariant]
    for daemon in ("unbroken", "broken"):
        (tmp_path / daemon).mkdir()
    asyncio.run(mutation.battery(tmp_path / "unbroken"))
    monkeypatch.setattr(mutation.owner, mutation.name, mutation.broken)
    with pytest.raises((AssertionError, Failed)):
        asyncio.run(mutation.battery(tmp_path / "broken"))
