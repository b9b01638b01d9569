"""Over several nodes only the daemon of rank 0 lists the cold tier; the others look at what they hold."""

from __future__ import annotations

import random
import re
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from tests.support.rooms import RUN
from tests.workers.test_committer import WORLD_SIZE, Node, Nodes, id_of, nodes
from tierd.catalog import held
from tierd.catalog.decisions import decisions, pending
from tierd.config.sections import ColdPolicy, LifecycleConfig, TierPolicy
from tierd.errors import TierUnreachable
from tierd.format import layout
from tierd.format.claim import Claim
from tierd.format.health import Diagnosis
from tierd.format.ids import HOT, Generation, checkpoint_id
from tierd.lifecycle.policy import deletions
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.store import StoredObject
from tierd.tiers.tier import Tier
from tierd.workers.fresh_replica import whole_files
from tierd.workers.leftovers import Leftovers
from tierd.workers.lister import WAITING_MAX, WHOLE_S
from tierd.workers.lookout import Lookout
from tierd.workers.reaper import Reaper
from tierd.workers.scrubber import Scrubber

__all__ = ["nodes"]


class Listings:
    """The prefixes that were listed in the cold tiers since the last call of `take`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.prefixes: list[str] = []
        real = DirectoryStore.list

        async def listed(store: DirectoryStore, prefix: str = "", *, until: str = "") -> list[StoredObject]:
            self.prefixes.append(prefix)
            return [each for each in await real(store, prefix) if not until or each.key <= until]

        monkeypatch.setattr(DirectoryStore, "list", listed)

    def take(self) -> list[str]:
        prefixes, self.prefixes = self.prefixes, []
        return prefixes


@pytest.fixture
def listings(monkeypatch: pytest.MonkeyPatch) -> Listings:
    return Listings(monkeypatch)


@pytest.fixture
async def committed(nodes: Nodes, listings: Listings) -> Nodes:
    """Steps 10 and 20 are in the cold tier, and every node has listed it."""
    for step in (10, 20):
        for node in nodes.nodes:
            await node.send(step, number=step // 10)
    await nodes.wait(60)
    for node in nodes.nodes:
        await list_cold(node)
        assert known(node) == [10, 20]
    listings.take()
    return nodes


@pytest.fixture(params=["one page", "several pages"])
def pages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of a checkpoint fit into one page of a listing, or they do not."""
    if request.param == "several pages":
        monkeypatch.setattr(held, "PAGE_FILES", 0)


def known(node: Node) -> list[int]:
    """The steps that the node knows to be in the cold tier."""
    return sorted(checkpoint.step for checkpoint in node.rooms.catalog.in_tier("cold"))


async def delete_in_hot(node: Node, step: int) -> None:
    await node.rooms.hot.delete(id_of(step))
    node.rooms.catalog.drop(id_of(step), HOT)


async def list_cold(node: Node) -> None:
    assert await node.rooms.listers["cold"].run_once()


async def test_home_lists_the_tier_and_another_node_what_it_holds(committed: Nodes, listings: Listings) -> None:
    home, other, _ = committed.nodes
    await list_cold(home)
    assert listings.take() == [""]
    await list_cold(other)
    looked = {layout.checkpoint_prefix(id_of(step)) for step in (10, 20)}
    looked |= {layout.generation_prefix(RUN), layout.TIER_MARKERS}
    assert {*listings.take()} == looked
    assert known(other) == [10, 20]


async def test_an_old_run_on_one_node_does_not_make_that_node_list_the_tier(
    committed: Nodes, listings: Listings
) -> None:
    """Each node may have had a short test run, whose last checkpoint stays in hot. Home deletes what it has in cold."""
    home, other, _ = committed.nodes
    for step in (1, 2):
        await other.rooms.commit("hot", "cold", run="test", step=step, sequence=step)
    lifecycle = LifecycleConfig(hot=TierPolicy(keep_last=1), cold=ColdPolicy(keep_last=1, keep_every=0))
    for node in (home, other):
        node.rooms.context.reload(msgspec.structs.replace(node.rooms.config, lifecycle=lifecycle))
    await other.rooms.list_tiers("hot")
    listings.take()
    await list_cold(other)
    assert "" not in (looked := listings.take())
    assert {layout.generation_prefix("test"), layout.checkpoint_prefix(checkpoint_id("test", 2, 1))} <= {*looked}
    await list_cold(home)
    assert "" in listings.take()
    await Reaper(home.rooms.context).run_once()
    assert other.rooms.steps("cold", "test") == [2]
    await list_cold(other)
    await Reaper(other.rooms.context).run_once()
    assert other.rooms.steps("hot", "test") == [2]
    assert other.rooms.incidents.recent() == []
    await Scrubber(other.rooms.context, other.rooms.cold["cold"]).run_once()
    assert scrubbed(other) == 1, "hot has what repairs it"


async def test_another_node_lists_the_tier_once_a_day(committed: Nodes, listings: Listings) -> None:
    other = committed.nodes[1]
    committed.now_s += WHOLE_S
    await list_cold(other)
    assert "" in listings.take()


async def test_a_node_lists_the_tier_when_a_person_or_a_worker_asks(committed: Nodes, listings: Listings) -> None:
    other = committed.nodes[1]
    other.rooms.listers["cold"].must_list = True
    await list_cold(other)
    assert "" in listings.take()


@pytest.mark.usefixtures("pages")
async def test_a_look_finds_a_milestone_and_a_verdict(committed: Nodes, listings: Listings) -> None:
    home, other, _ = committed.nodes
    cold = home.rooms.cold["cold"]
    await cold.mark_milestone(id_of(10), "best", "now")
    await cold.mark_milestone(id_of(20), "worse", "now")
    await cold.unmark_milestone(id_of(20), "worse", "now")
    await cold.mark_diagnosis(id_of(20), Diagnosis(healthy=False))
    await list_cold(other)
    assert "" not in listings.take()
    first, second = (other.rooms.catalog.get(id_of(step)) for step in (10, 20))
    assert first is not None
    assert second is not None
    assert first.all_milestones == {"best"}
    assert (second.all_milestones, second.healthy) == (frozenset(), False)


async def test_a_look_finds_a_checkpoint_that_others_have_committed(nodes: Nodes, listings: Listings) -> None:
    home, second, third = nodes.nodes
    await third.persist(10)
    await third.rooms.listers["cold"].run_once()
    for node in (home, second):
        await node.send(10)
    await third.rooms.replicator().run_once()
    await nodes.wait(60, home, second)
    assert known(third) == []
    await list_cold(third)
    assert known(third) == [10]


@pytest.mark.usefixtures("pages")
async def test_a_look_at_a_new_checkpoint_lists_its_folder_once(committed: Nodes, listings: Listings) -> None:
    """At 2,048 nodes the folder has 19 pages, and every node looks at each new checkpoint."""
    home, other, _ = committed.nodes
    for node in committed.nodes:
        await node.send(30, number=3)
    await committed.wait(90)
    await home.rooms.cold["cold"].mark_diagnosis(id_of(30), Diagnosis(healthy=True))
    listings.take()
    await list_cold(other)
    assert "" not in (looked := listings.take())
    assert looked.count(layout.checkpoint_prefix(id_of(30))) == 1
    assert (entry := other.rooms.catalog.get(id_of(30))) is not None
    assert entry.healthy
    assert id_of(30) in other.rooms.catalog.tiers["cold"].fingerprints


@pytest.mark.usefixtures("pages")
async def test_a_look_finds_that_home_has_deleted_a_checkpoint(committed: Nodes, listings: Listings) -> None:
    home, other, _ = committed.nodes
    assert await home.rooms.cold["cold"].delete(id_of(10))
    await list_cold(other)
    assert "" not in listings.take()
    assert known(other) == [20]
    assert other.rooms.incidents.recent() == []
    await list_cold(other)
    assert layout.checkpoint_prefix(id_of(10)) in listings.take(), "a later commit would be found"


async def test_a_part_is_sent_again_after_the_tombstone_was_cleared(committed: Nodes) -> None:
    """As by home, where the policy selects the checkpoint again."""
    home, other, _ = committed.nodes
    cold = home.rooms.cold["cold"]
    assert await cold.delete(id_of(20))
    await list_cold(other)
    assert pending(other.rooms.catalog, other.rooms.config, "cold") == []
    await cold.store.delete([layout.file_key(id_of(20), layout.GONE)])
    await list_cold(other)
    assert pending(other.rooms.catalog, other.rooms.config, "cold") == [id_of(20)]
    assert await other.rooms.replicator().run_once()
    assert (other.rooms.folder("cold", id_of(20)) / layout.node_file_name(other.ranks[0], WORLD_SIZE)).exists()


async def test_a_part_is_not_sent_again_where_others_have_newer_checkpoints(committed: Nodes) -> None:
    """The run trains on other nodes now. This node has seen nothing of that when a tombstone is cleared."""
    home, other, _ = committed.nodes
    cold = home.rooms.cold["cold"]
    lifecycle = LifecycleConfig(hot=TierPolicy(keep_last=1), cold=ColdPolicy(keep_last=1, keep_every=0))
    other.rooms.context.reload(msgspec.structs.replace(other.rooms.config, lifecycle=lifecycle))
    assert await cold.delete(id_of(20))
    await list_cold(other)
    assert await home.rooms.context.claim(cold, RUN, Generation(2), Claim.new("another"))
    await home.rooms.commit("cold", step=30, generation=2, sequence=11)
    await cold.store.delete([layout.file_key(id_of(20), layout.GONE)])
    await list_cold(other)
    assert pending(other.rooms.catalog, other.rooms.config, "cold") == []


async def test_a_checkpoint_that_is_gone_without_a_tombstone_is_reported_as_lost(
    committed: Nodes, tmp_path: Path, listings: Listings
) -> None:
    other = committed.nodes[1]
    for path in (tmp_path / "cold" / RUN / id_of(10).name).iterdir():
        path.unlink()
    await list_cold(other)
    assert "" in listings.take()
    assert known(other) == [20]
    assert [each.kind for each in other.rooms.incidents.recent()] == ["lost"]


@pytest.mark.parametrize("how", ["brought back", "deleted by home"])
async def test_a_look_ends_the_report_of_a_loss(committed: Nodes, tmp_path: Path, how: str) -> None:
    """A person restores it from another version of its objects, or home has cleared away what was left."""
    home, other, _ = committed.nodes
    folder = tmp_path / "cold" / RUN / id_of(10).name
    await delete_in_hot(other, 10)
    other.rooms.listers["cold"].must_list = True
    folder.rename(tmp_path / "away")
    await list_cold(other)
    assert other.rooms.listers["cold"].lost == [id_of(10)]
    if how == "brought back":
        (tmp_path / "away").rename(folder)
    else:
        await home.rooms.cold["cold"].bury(id_of(10))
    await list_cold(other)
    assert other.rooms.listers["cold"].lost == []
    assert known(other) == ([10, 20] if how == "brought back" else [20])


async def test_a_deletion_that_this_node_did_not_expect_is_no_loss(
    committed: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A milestone was removed. The node lists the tier as late as it may, and home clears tombstones after a day."""
    monkeypatch.setattr(random, "uniform", lambda least, most: most)
    home, other, _ = committed.nodes
    began = datetime.now(UTC)
    for node in (home, other):
        node.rooms.context.now = lambda: began + timedelta(seconds=committed.now_s)
    cold = home.rooms.cold["cold"]
    await cold.mark_milestone(id_of(10), "best", "now")
    await delete_in_hot(other, 10)
    other.rooms.listers["cold"].must_list = True
    await list_cold(other)
    began -= timedelta(seconds=committed.now_s)
    await cold.unmark_milestone(id_of(10), "best", "now")
    assert await cold.delete(id_of(10))
    leftovers = Leftovers(home.rooms.context, cold)
    committed.now_s += 300
    for _ in range(26):
        committed.now_s += 3600
        await list_cold(home)
        await leftovers.clear()
        await list_cold(other)
    assert not home.rooms.folder("cold", id_of(10)).exists()
    assert known(other) == [20]
    assert other.rooms.incidents.recent() == []


async def test_a_checkpoint_without_a_shard_is_unreadable_on_every_node(
    committed: Nodes, tmp_path: Path, listings: Listings
) -> None:
    other = committed.nodes[1]
    next((tmp_path / "cold" / RUN / id_of(10).name).glob("*.safetensors")).unlink()
    await list_cold(other)
    assert "" in listings.take()
    assert ("cold", id_of(10)) in other.rooms.catalog.unreadable()


async def test_a_manifest_that_was_replaced_is_unreadable_after_a_look(
    committed: Nodes, tmp_path: Path, listings: Listings
) -> None:
    """A manifest that this node has committed and not read is read first."""
    other = committed.nodes[1]
    path = tmp_path / "cold" / RUN / id_of(10).name / layout.MANIFEST
    other.rooms.catalog.tiers["cold"].fingerprints.pop(id_of(10))
    await list_cold(other)
    assert "" not in listings.take()
    assert id_of(10) in other.rooms.catalog.tiers["cold"].fingerprints
    changed, count = re.subn(rb'("step":\s*)10', rb"\g<1>11", path.read_bytes())
    assert count
    path.write_bytes(changed + b" ")
    await list_cold(other)
    assert "" in listings.take()
    assert ("cold", id_of(10)) in other.rooms.catalog.unreadable()
    assert known(other) == [20]
    await list_cold(other)
    assert "" not in listings.take(), "one unreadable checkpoint does not make every node list the tier"


@pytest.mark.parametrize("how", ["mended", "deleted by a person", "deleted by home"])
@pytest.mark.parametrize("is_in_hot", [True, False])
async def test_a_look_finds_that_an_unreadable_checkpoint_was_put_right(
    committed: Nodes, tmp_path: Path, *, is_in_hot: bool, how: str
) -> None:
    """Until then nothing of the run goes from hot, because nobody knows what cold has of it."""
    home, other, _ = committed.nodes
    folder = tmp_path / "cold" / RUN / id_of(10).name
    content = (folder / layout.MANIFEST).read_bytes()
    if not is_in_hot:
        await delete_in_hot(other, 10)
    (folder / layout.MANIFEST).write_bytes(b"{")
    other.rooms.listers["cold"].must_list = True
    await list_cold(other)
    assert other.rooms.catalog.known_cold(RUN) == set()
    if how == "deleted by a person":
        shutil.rmtree(folder)
    else:
        (folder / layout.MANIFEST).write_bytes(content)
    if how == "deleted by home":
        assert await home.rooms.cold["cold"].delete(id_of(10))
    await list_cold(other)
    assert other.rooms.catalog.known_cold(RUN) == {"cold"}
    assert known(other) == ([10, 20] if how == "mended" else [20])


async def test_what_home_cannot_delete_costs_no_more_requests_with_each_checkpoint(
    committed: Nodes, listings: Listings
) -> None:
    """The bucket retains it, or home is down."""
    home, other, _ = committed.nodes
    lifecycle = LifecycleConfig(hot=TierPolicy(keep_last=1), cold=ColdPolicy(keep_last=1, keep_every=0))
    other.rooms.context.reload(msgspec.structs.replace(other.rooms.config, lifecycle=lifecycle))
    for step in range(100, 100 + 2 * WAITING_MAX):
        await home.rooms.commit("cold", run="another", step=step, sequence=step)
    other.rooms.listers["cold"].must_list = True
    await list_cold(other)
    listings.take()
    await list_cold(other)
    looked = listings.take()
    assert WAITING_MAX <= len(looked) < WAITING_MAX + 10
    for step in range(100, 100 + WAITING_MAX):
        assert await home.rooms.cold["cold"].delete(checkpoint_id("another", step, 1))
    await list_cold(other)
    assert known(other) == [10, 20, *range(100 + WAITING_MAX, 100 + 2 * WAITING_MAX)]


async def test_a_look_finds_a_later_start_of_the_run(committed: Nodes, listings: Listings) -> None:
    home, other, _ = committed.nodes
    assert await home.rooms.context.claim(home.rooms.cold["cold"], RUN, Generation(2), Claim.new("another"))
    await list_cold(other)
    assert "" not in listings.take()
    assert other.rooms.catalog.generation_max(RUN) == 2


async def test_a_node_whose_hot_tier_is_empty_finds_a_later_start_of_its_run(
    committed: Nodes, listings: Listings
) -> None:
    """Its hot disk was full from the start, or was lost."""
    home, other, _ = committed.nodes
    for step in (10, 20):
        await delete_in_hot(other, step)
    assert await home.rooms.context.claim(home.rooms.cold["cold"], RUN, Generation(2), Claim.new("another"))
    await list_cold(other)
    assert "" not in listings.take()
    assert other.rooms.catalog.generation_max(RUN) == 2


async def test_a_tier_that_answers_again_is_known_after_a_look(
    committed: Nodes, listings: Listings, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = committed.nodes[1]
    with monkeypatch.context() as patched:

        async def fail(*_: object, **__: object) -> None:
            raise TierUnreachable("list cold: no answer")

        patched.setattr(Tier, "listing", fail)
        with pytest.raises(TierUnreachable):
            await other.rooms.listers["cold"].run_once()
        assert "no answer" in other.rooms.catalog.unlisted()["cold"]
    listings.take()
    await list_cold(other)
    assert "" not in listings.take()
    assert other.rooms.catalog.unlisted() == {}


async def test_a_tier_that_was_down_is_not_listed_by_every_node_when_it_answers(
    committed: Nodes, listings: Listings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,048 nodes would list it at the same time."""
    other = committed.nodes[1]
    entry = other.rooms.catalog.get(id_of(20))
    assert entry is not None
    lookout = Lookout(other.rooms.context, other.rooms.cold["cold"])
    with monkeypatch.context() as patched:

        async def fail(*_: object, **__: object) -> None:
            raise TierUnreachable("no answer")

        for call in ("list", "stored_checksum"):
            patched.setattr(DirectoryStore, call, fail)
        assert await lookout.run_once()
        assert await whole_files(other.rooms.context, entry, "cold", set(), action="evict", worker="reap") is None
        assert other.rooms.events.count(("relist", "cold")) == 2
        for _ in range(2):
            with pytest.raises(TierUnreachable):
                await other.rooms.listers["cold"].run_once()
    listings.take()
    await list_cold(other)
    assert "" not in listings.take()
    assert other.rooms.catalog.unlisted() == {}


async def test_a_look_finds_that_the_manifest_of_the_newest_is_gone(committed: Nodes, listings: Listings) -> None:
    home, other, _ = committed.nodes
    assert await home.rooms.cold["cold"].delete(id_of(20))
    assert await Lookout(other.rooms.context, other.rooms.cold["cold"]).run_once()
    assert ("relist", "cold") in other.rooms.events
    await list_cold(other)
    assert "" not in listings.take()
    assert known(other) == [10]


@pytest.mark.usefixtures("pages")
async def test_a_missing_shard_of_the_newest_has_the_tier_listed_on_every_node(
    committed: Nodes, tmp_path: Path, listings: Listings
) -> None:
    other = committed.nodes[1]
    for shard in (tmp_path / "cold" / RUN / id_of(20).name).glob("*.safetensors"):
        shard.unlink()
    lookout = Lookout(other.rooms.context, other.rooms.cold["cold"])
    for _ in range(2):
        assert await lookout.run_once()
    await list_cold(other)
    assert "" in listings.take()
    assert ("cold", id_of(20)) in other.rooms.catalog.unreadable()


async def test_a_node_that_becomes_home_deletes_in_cold_only_after_a_listing(
    committed: Nodes, listings: Listings, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = committed.nodes[1]
    await list_cold(other)
    monkeypatch.setattr(type(other.rooms.context), "is_home", lambda context, run: True)
    policy = ColdPolicy(keep_last=1, keep_every=0)
    lifecycle = LifecycleConfig(hot=TierPolicy(keep_last=1), cold=policy)
    other.rooms.context.reload(msgspec.structs.replace(other.rooms.config, lifecycle=lifecycle))
    planned = deletions(decisions(other.rooms.catalog, other.rooms.config, with_kept=False))
    assert ("cold", id_of(10)) in {(each.tier, each.checkpoint) for each in planned}
    await Reaper(other.rooms.context).run_once()
    assert known(other) == [10, 20]
    await list_cold(other)
    assert listings.take().count("") == 1
    await Reaper(other.rooms.context).run_once()
    assert known(other) == [20]


async def test_a_checkpoint_of_another_run_that_is_not_the_newest_any_more_has_no_tier_listed(
    committed: Nodes,
) -> None:
    """Of that run this node has nothing, and learns about it from a listing once a day."""
    home, other, _ = committed.nodes
    first, second = [checkpoint_id("another", step, 1) for step in (1, 2)]
    await home.rooms.commit("cold", run="another", step=first.step)
    for node in (home, other):
        node.rooms.listers["cold"].must_list = True
        await list_cold(node)
    await home.rooms.commit("cold", run="another", step=second.step, sequence=2)
    assert await home.rooms.cold["cold"].delete(first)
    lookouts = [Lookout(node.rooms.context, node.rooms.cold["cold"]) for node in (home, other)]
    for lookout in lookouts:
        for _ in range(4):
            assert await lookout.run_once()
    assert [node.rooms.events.count(("relist", "cold")) for node in (home, other)] == [1, 0]


async def test_only_home_verifies_what_is_in_cold(committed: Nodes) -> None:
    """Also of a run that is on none of its nodes."""
    home, other, _ = committed.nodes
    await home.rooms.commit("cold", run="another")
    for node in (home, other):
        node.rooms.listers["cold"].must_list = True
        await list_cold(node)
        scrubber = Scrubber(node.rooms.context, node.rooms.cold["cold"])
        for _ in range(4):
            await scrubber.run_once()
            committed.now_s += node.rooms.config.scrub.interval_s / 3
    assert (scrubbed(home), scrubbed(other)) == (4, 0)


async def test_a_node_that_is_home_no_more_ends_its_round_of_verifications(committed: Nodes) -> None:
    home, other, _ = committed.nodes
    scrubber = Scrubber(home.rooms.context, home.rooms.cold["cold"])
    await scrubber.run_once()
    assert await other.rooms.context.claim(other.rooms.cold["cold"], RUN, Generation(2), Claim.new("another"))
    home.rooms.catalog.saw_generation(RUN, Generation(2))
    committed.now_s += home.rooms.config.scrub.interval_s
    await scrubber.run_once()
    assert scrubbed(home) == 1


async def test_only_home_repairs_what_a_listing_shows_to_be_damaged(committed: Nodes, tmp_path: Path) -> None:
    """Every node would read and write the same file."""
    home, other, _ = committed.nodes
    next((tmp_path / "cold" / RUN / id_of(10).name).glob("*.safetensors")).unlink()
    for node in (home, other):
        node.rooms.listers["cold"].must_list = True
        await list_cold(node)
        assert ("cold", id_of(10)) in node.rooms.catalog.unreadable()
        await Scrubber(node.rooms.context, node.rooms.cold["cold"]).run_once()
    failures = [node.rooms.count("tierd_verify_failures_total", tier="cold") for node in (home, other)]
    assert failures == [1, 0]


def scrubbed(node: Node) -> int:
    counter = "tierd_scrubbed_checkpoints_total"
    counts = [node.rooms.count(counter, tier="cold", proof=proof) for proof in ("deep", "checksum", "size")]
    return sum(int(count or 0) for count in counts)
