"""Nodes that adopt one checkpoint together, each from its own folder: node 0 announces it, and all parts agree."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from tests.support.bucket import bucket_server
from tests.support.foreign import contents
from tests.support.framework_saves import archive, save_dcp_on, save_deepspeed_on
from tests.support.rooms import Rooms, rooms_at
from tests.support.s3 import BUCKET, ENVIRONMENT
from tests.support.s3_store import s3_store
from tierd.catalog.decisions import decisions
from tierd.config.sections import ColdConfig, ColdPolicy, DaemonConfig, LifecycleConfig, TierPolicy, WatchConfig
from tierd.errors import TierUnreachable
from tierd.format import layout
from tierd.format.adopted import merged
from tierd.format.ids import HOT, CheckpointId, Run, checkpoint_id
from tierd.format.manifest import ADOPTED, Manifest
from tierd.format.signature import Keyring, new_key
from tierd.lifecycle.policy import Action
from tierd.status.node_reports import awaited_report
from tierd.tiers.tier import Tier
from tierd.transfer.adopted_output import AdoptedOutput
from tierd.transfer.adoption import read_tree
from tierd.workers import announcements, watch_claim
from tierd.workers.adopter import Adopter
from tierd.workers.committer import LIST_MAX_S, Committer
from tierd.workers.hot_space import no_room
from tierd.workers.lister import Lister
from tierd.workers.reaper import Reaper
from tierd.workers.watch_claim import BEAT_S
from tierd.workers.watcher import Watcher

RUN = Run("ds")
QUIET_S = 10.0
SPREAD_S = announcements.SPREAD * QUIET_S


class Node:
    """A daemon's watcher, replicator and committer."""

    def __init__(self, rooms: Rooms, watch: WatchConfig) -> None:
        self.rooms, self.watch, self.number = rooms, watch, watch.node
        self.out = Path(watch.path)
        self.out.mkdir(exist_ok=True)
        rooms.context.watched_nodes[RUN] = watch.node
        self.restart()

    def restart(self, **changes: object) -> None:
        watch = msgspec.structs.replace(self.watch, **changes)
        self.watcher = Watcher(self.rooms.context, watch, no_room, on_change=lambda: None)
        self.committer = Committer(self.rooms.context, self.rooms.cold["cold"], rng=random.Random(self.number))
        self.replicator = self.rooms.replicator()

    @property
    def parts(self) -> dict[int, tuple[int, int, str]]:
        """By step: generation, sequence, and the claim of the parts in hot."""
        parts = [entry.part for entry in reversed(self.rooms.catalog.entries(RUN)) if entry.part is not None]
        assert all(part.ranks == [self.number] and part.kind == ADOPTED for part in parts)
        return {part.step: (part.generation, part.sequence, part.claim) for part in parts}

    @property
    def waiting(self) -> str:
        return "\n".join(self.watcher.report().waiting)

    @property
    def problems(self) -> str:
        return "\n".join(self.watcher.report().problems)


class Nodes:
    def __init__(self) -> None:
        self.now_s = 1000.0
        self.ahead_s = 10.0  # nothing was written just now
        self.nodes: list[Node] = []

    def now(self) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=self.ahead_s)

    @property
    def outs(self) -> list[Path]:
        return [node.out for node in self.nodes]

    @property
    def cold(self) -> Tier:
        return self.nodes[0].rooms.cold["cold"]

    async def look(self, *nodes: Node, after_s: float = QUIET_S + 1) -> None:
        """Passes that see what is new, and when nothing has changed for so long."""
        for node in nodes or self.nodes:
            await node.watcher.run_once()
        self.now_s += after_s
        for node in nodes or self.nodes:
            await node.watcher.run_once()

    async def send(self, *nodes: Node) -> None:
        """Copy what is in hot, and commit what is complete."""
        for node in nodes or self.nodes:
            assert await node.replicator.run_once()
        for node in nodes or self.nodes:
            await node.committer.run_once()
        self.now_s += 10
        for node in nodes or self.nodes:
            await node.committer.run_once()

    async def committed(self) -> list[tuple[int, int, int]]:
        """(step, generation, sequence) of what is whole in cold."""
        listing = await self.cold.listing(f"{RUN}/")
        manifests = [await self.cold.manifest(checkpoint) for checkpoint in listing.committed]
        return sorted((each.step, each.generation, each.sequence) for each in manifests)

    async def given_back(self, checkpoint: CheckpointId, root: Path, node: int | None = None) -> Path:
        """What `tierd restore` makes of the files in cold."""
        manifest = await self.cold.manifest(checkpoint)
        numbers = range(len(self.nodes)) if node is None else [node]
        trees = {number: await read_tree(self.cold, manifest, number) for number in numbers}
        shutil.copytree(self.nodes[0].rooms.folder("cold", checkpoint), root / "stored")
        return await asyncio.to_thread(AdoptedOutput(merged(trees, manifest), root / "stored", root / "built").build)


@asynccontextmanager
async def made(
    root: Path,
    count: int,
    *,
    preset: str,
    keyring: Keyring | None = None,
    lifecycle: LifecycleConfig | None = None,
    cold: Sequence[str] = ("cold",),
) -> AsyncGenerator[Nodes]:
    nodes = Nodes()
    tiers = tuple(ColdConfig(name=name, url=f"file://{root / name}") for name in cold)
    async with AsyncExitStack() as stack:
        for number in range(count):
            clocks = {"monotonic_s": lambda: nodes.now_s, "now": nodes.now}
            daemon = DaemonConfig(node=f"host-{number}")
            policy = lifecycle or LifecycleConfig()
            opened = rooms_at(
                root / f"{number}", keyring=keyring, clocks=clocks, cold=tiers, daemon=daemon, lifecycle=policy
            )
            rooms = await stack.enter_async_context(opened)
            await rooms.list_tiers()
            path = str(root / f"out-{number}")
            watch = WatchConfig(
                path=path,
                run=RUN,
                preset=preset,  # pyright: ignore[reportArgumentType]
                quiet_s=QUIET_S,
                nodes=count,
                node=number,
            )
            nodes.nodes.append(Node(rooms, watch))
        yield nodes
        for node in nodes.nodes:
            await node.watcher.close()


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Nodes]:
    async with made(tmp_path, 3, preset="deepspeed") as found:
        yield found


def shift(folders: Sequence[Path], seconds: float) -> None:
    """As if all had been written so much later."""
    paths = [each for folder in folders for each in [*folder.rglob("*"), folder, folder.parent / "latest"]]
    for path in [path for path in paths if path.exists()]:
        about = path.stat()
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns + int(seconds * 1e9)))


async def test_the_parts_of_all_nodes_agree_and_become_one_checkpoint(nodes: Nodes, tmp_path: Path) -> None:
    folders = save_deepspeed_on(nodes.outs, 10)
    before = [contents(folder) for folder in folders]
    await nodes.look()
    (first, *others) = [node.parts for node in nodes.nodes]
    assert first.keys() == {10}
    assert first[10][:2] == (1, 1)
    assert others == [first, first]
    assert [contents(folder) for folder in folders] == before, "nothing of the framework's is touched"
    assert await nodes.committed() == []
    await nodes.send()
    assert await nodes.committed() == [(10, 1, 1)]
    manifest = await nodes.cold.manifest(checkpoint_id(RUN, 10, 1))
    assert type(manifest) is Manifest
    assert (manifest.kind, manifest.world_size) == (ADOPTED, 3)
    for number, content in enumerate(before):
        built = await nodes.given_back(manifest.id, tmp_path / f"back-{number}", number)
        assert contents(built) == content
    built = await nodes.given_back(manifest.id, tmp_path / "back")
    assert {path for folder in before for path in folder} == contents(built).keys()
    for content in before:
        for path, (mode, raw, _) in content.items():
            assert contents(built)[path][:2] == (mode, raw)


async def test_a_node_adopts_nothing_before_node_0_has_announced_it(nodes: Nodes) -> None:
    home, other, _ = nodes.nodes
    save_deepspeed_on(nodes.outs, 10)
    await nodes.look(other)
    assert other.parts == {}
    assert "global_step10: node 0 has not announced step 10 yet: its daemon must run" in other.waiting
    assert other.problems == ""
    await nodes.look(home)
    await nodes.look(other)
    assert other.parts == home.parts != {}


async def test_a_node_without_its_part_keeps_the_checkpoint_from_counting(nodes: Nodes) -> None:
    home, other, late = nodes.nodes
    save_deepspeed_on(nodes.outs, 10)
    await nodes.look(home, other)
    await nodes.send(home, other)
    for _ in range(3):
        nodes.now_s += LIST_MAX_S
        await nodes.send(home, other)
    assert await nodes.committed() == []
    assert home.rooms.catalog.awaited == {"cold": {RUN: (checkpoint_id(RUN, 10, 1), [2])}}
    assert other.rooms.catalog.awaited == home.rooms.catalog.awaited
    assert awaited_report(home.rooms.catalog, RUN, nodes.now())["cold"].whose == "node 2 of 3"
    await home.rooms.list_tiers()
    (sent,) = home.rooms.catalog.sent().values()
    assert str(sent) == "the parts of 2 of 3 nodes, without nodes 2"
    await nodes.look(late)
    await nodes.send()
    nodes.now_s += LIST_MAX_S  # home looks less often the longer it waits
    await nodes.send()
    assert await nodes.committed() == [(10, 1, 1)]


async def test_another_node_commits_when_the_daemon_of_node_0_is_gone(nodes: Nodes) -> None:
    home, other, late = nodes.nodes
    save_deepspeed_on(nodes.outs, 10)
    await nodes.look()
    assert await home.replicator.run_once()
    await nodes.send(other, late)
    for _ in range(200):
        nodes.now_s += 1
        await other.committer.run_once()
    assert await nodes.committed() == [(10, 1, 1)]


async def test_a_new_node_0_commits_what_the_lost_nodes_have_sent(nodes: Nodes) -> None:
    save_deepspeed_on(nodes.outs, 10)
    await nodes.look()
    for node in nodes.nodes:
        assert await node.replicator.run_once()
    home = nodes.nodes[0]
    await home.rooms.hot.delete(checkpoint_id(RUN, 10, 1))
    await home.watcher.close()
    home.restart()
    await home.rooms.list_tiers()
    assert home.parts == {}
    await home.committer.run_once()
    assert await nodes.committed() == [(10, 1, 1)]


async def test_the_parts_meet_in_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with bucket_server() as served:
        async with made(tmp_path, 2, preset="dcp") as nodes:
            for node in nodes.nodes:
                await node.rooms.cold["cold"].store.close()
                store = s3_store(f"s3://{BUCKET}/runs", endpoint_url=served.url)
                node.rooms.cold["cold"] = Tier("cold", store)
                node.rooms.listers["cold"] = Lister(node.rooms.context, node.rooms.cold["cold"], 10.0)
                node.restart()
                await node.rooms.list_tiers()
            folders = save_dcp_on(nodes.outs, 10)
            await nodes.look()
            await nodes.look()
            await nodes.send()
            assert await nodes.committed() == [(10, 1, 1)]
            manifest = await nodes.cold.manifest(checkpoint_id(RUN, 10, 1))
            assert sum(entry.name.endswith("distcp") for entry in manifest.files) == len(folders)


async def test_of_dcp_the_announcement_shows_that_the_files_of_a_node_are_complete(tmp_path: Path) -> None:
    async with made(tmp_path, 2, preset="dcp") as nodes:
        home, other = nodes.nodes
        folders = save_dcp_on(nodes.outs, 10)
        (folders[0] / ".metadata").rename(folders[0] / ".metadata.tmp")
        await nodes.look()
        assert home.parts == other.parts == {}
        assert ".metadata is not there yet" in home.waiting
        assert "node 0 has not announced step 10 yet" in other.waiting
        (folders[0] / ".metadata.tmp").rename(folders[0] / ".metadata")
        shift(folders[1:], -1000)  # a slow node was the last of all
        await nodes.look()
        await nodes.look()
        await nodes.send()
        assert await nodes.committed() == [(10, 1, 1)]
        folders = save_dcp_on(nodes.outs, 20)
        shift(folders[1:], QUIET_S + 5)
        nodes.ahead_s += QUIET_S + 5
        await nodes.look()
        await nodes.look()
        assert list(other.parts) == [10]
        assert "15 s later than on node 0, so it may be another save of step 20" in other.waiting


def dcp_operations(outs: Sequence[Path], step: int) -> list[Callable[[], object]]:
    """What the ranks of two nodes and the coordinator do in a save, in an order in which it may happen."""
    first, second = (out / f"step-{step}" for out in outs)
    whole = archive(600)

    def write(path: Path, content: bytes) -> Callable[[], object]:
        return lambda: path.write_bytes(content)

    return [
        lambda: second.mkdir(exist_ok=True),
        write(second / "__2_0.distcp", whole[:300]),
        lambda: first.mkdir(exist_ok=True),
        write(first / "__0_0.distcp", whole),
        write(second / "__2_0.distcp", whole),
        write(second / "__3_0.distcp", whole[:300]),
        write(first / "__1_0.distcp", whole),
        write(second / "__3_0.distcp", whole),
        write(first / ".metadata.tmp", b"pickled"),
        lambda: (first / ".metadata.tmp").rename(first / ".metadata"),
    ]


@pytest.mark.parametrize("is_saved_over", [False, pytest.param(True, marks=pytest.mark.long)])
async def test_of_dcp_no_node_adopts_a_part_of_a_save_that_was_killed(tmp_path: Path, is_saved_over: bool) -> None:
    async with made(tmp_path, 2, preset="dcp") as nodes:
        count = len(dcp_operations(nodes.outs, 1))
        for step in range(1, count + 1):
            if is_saved_over:
                for act in dcp_operations(nodes.outs, step):
                    act()
                shift([out / f"step-{step}" for out in nodes.outs], -100)
                await nodes.look()
                await nodes.look()
                assert [node.parts[step][0] for node in nodes.nodes] == [1, 1]
            for act in dcp_operations(nodes.outs, step)[:step]:
                act()
            await nodes.look()
            await nodes.look()
            is_whole = step == count
            for node in nodes.nodes:
                if is_saved_over:
                    assert node.parts[step][0] == (2 if is_whole else 1)
                else:
                    assert (step in node.parts) == is_whole


async def test_of_deepspeed_each_node_needs_latest(nodes: Nodes) -> None:
    save_deepspeed_on(nodes.outs, 10)
    other = nodes.nodes[1]
    (other.out / "latest").unlink()
    await nodes.look()
    await nodes.look(other)
    assert other.parts == {}
    assert "global_step10: latest does not name it" in other.waiting


async def test_a_step_that_is_saved_again_is_in_a_new_generation_on_all_nodes(nodes: Nodes) -> None:
    home, other, late = nodes.nodes
    save_deepspeed_on(nodes.outs, 10)
    await nodes.look(home, other)
    await nodes.send(home, other)
    shift(save_deepspeed_on(nodes.outs, 10), SPREAD_S + 30)  # the training has gone back
    nodes.ahead_s += SPREAD_S + 30
    await nodes.look(other)
    assert "step 10 was saved again here, and node 0 has not announced the new save yet" in other.waiting
    await nodes.look(late)
    assert late.parts == {}, "this is another save than the one that node 0 has announced"
    assert "s later than on node 0, so it may be another save of step 10" in late.waiting
    await nodes.look(home)
    nodes.now_s += 60
    await nodes.look()
    await nodes.send()
    assert [node.parts[10][:2] for node in nodes.nodes] == [(2, 2)] * 3
    assert await nodes.committed() == [(10, 2, 2)]
    assert [node.problems for node in nodes.nodes] == ["", "", ""]


async def test_a_lower_step_after_a_higher_one_is_in_a_new_generation_on_all_nodes(nodes: Nodes) -> None:
    save_deepspeed_on(nodes.outs, 20)
    await nodes.look()
    await nodes.send()
    shift(save_deepspeed_on(nodes.outs, 10), SPREAD_S + 30)  # the training has gone back
    nodes.ahead_s += SPREAD_S + 30
    await nodes.look()
    await nodes.send()
    assert [node.parts[10][:2] for node in nodes.nodes] == [(2, 2)] * 3
    assert await nodes.committed() == [(10, 2, 2), (20, 1, 1)]
    assert [node.problems for node in nodes.nodes] == ["", "", ""]


@pytest.mark.parametrize("seconds", [-SPREAD_S - 5, SPREAD_S + 5])
async def test_a_part_that_was_written_at_another_time_is_not_taken_for_the_same_save(
    nodes: Nodes, seconds: float
) -> None:
    folders = save_deepspeed_on(nodes.outs, 10)
    shift(folders[1:2], seconds)
    nodes.ahead_s += 2 * SPREAD_S
    await nodes.look()
    await nodes.look()
    assert [list(node.parts) for node in nodes.nodes] == [[10], [], [10]]
    for _ in range(5):  # also while it is not looked for again
        await nodes.nodes[1].watcher.run_once()
        assert f"65 s {'later' if seconds > 0 else 'earlier'} than on node 0" in nodes.nodes[1].waiting
    assert "within 6 times quiet_s, 60 s" in nodes.nodes[1].waiting


async def test_killed_after_the_announcement_node_0_goes_on_with_the_same_head(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, other, _ = nodes.nodes
    save_deepspeed_on(nodes.outs, 10)

    async def dies(*_: object) -> None:
        raise TierUnreachable("killed")

    with monkeypatch.context() as killed:
        killed.setattr(Adopter, "adopt", dies)
        await nodes.look(home)
    assert home.parts == {}
    await nodes.look(*nodes.nodes[1:])
    assert other.parts[10][:2] == (1, 1)
    home.restart()
    await nodes.look()
    assert home.parts == other.parts
    await nodes.send()
    assert await nodes.committed() == [(10, 1, 1)]


async def test_another_save_is_never_adopted_under_the_head_of_the_one_before(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, other, _ = nodes.nodes
    save_deepspeed_on(nodes.outs, 10)

    async def dies(*_: object) -> None:
        raise TierUnreachable("killed")

    with monkeypatch.context() as killed:
        killed.setattr(Adopter, "adopt", dies)
        await nodes.look(home)
    await nodes.look(other)
    assert other.parts[10][0] == 1
    home.restart()
    shift(save_deepspeed_on(nodes.outs, 10), 5)  # at once, as a short training may
    await nodes.look()
    nodes.now_s += 60
    await nodes.look()
    assert [node.parts[10][0] for node in nodes.nodes] == [2, 2, 2]
    await nodes.send()
    assert await nodes.committed() == [(10, 2, 1)]


async def test_nodes_with_different_numbers_are_named(nodes: Nodes) -> None:
    other = nodes.nodes[1]
    other.restart(nodes=4)
    save_deepspeed_on(nodes.outs, 10)
    await nodes.look()
    assert other.parts == {}
    assert "node 0 has announced ds/000000000010-g0001 of 3 nodes, and watch.nodes is 4 here" in other.problems


async def test_two_nodes_with_one_number_are_named_and_nothing_is_committed(nodes: Nodes) -> None:
    home, second, third = nodes.nodes
    third.number = 1
    third.restart(node=1)
    save_deepspeed_on(nodes.outs, 10)
    await nodes.look()
    await nodes.send(home, second)
    assert not await third.replicator.run_once()
    (incident,) = third.rooms.incidents.recent()
    assert "part-00001-" in incident.message
    for _ in range(3):
        nodes.now_s += LIST_MAX_S
        await nodes.send(home, second)
    assert await nodes.committed() == []


async def test_the_daemon_that_was_started_last_as_node_0_is_node_0(nodes: Nodes) -> None:
    former, home, other = nodes.nodes
    save_deepspeed_on(nodes.outs, 10)
    await nodes.look(former, other)
    home.number = 0
    home.restart(node=0)
    shift(save_deepspeed_on(nodes.outs, 20), 1)
    await nodes.look(home)
    assert home.parts[20][0] == 2
    nodes.now_s += BEAT_S
    await nodes.look(former)
    assert list(former.parts) == [10]
    assert "global_step20: host-1 is node 0 of ds since generation 2" in former.waiting
    await nodes.look(other)
    assert {step: part[0] for step, part in other.parts.items()} == {10: 1, 20: 2}


async def test_without_a_cold_tier_nothing_is_announced_and_it_is_a_problem(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, other, _ = nodes.nodes
    save_deepspeed_on(nodes.outs, 10)

    async def fails(*_: object, **__: object) -> None:
        raise TierUnreachable("list cold: no answer")

    with monkeypatch.context() as broken:
        for node in nodes.nodes:
            broken.setattr(type(node.rooms.cold["cold"].store), "list", fails)
            await nodes.look(node)
            assert node.parts == {}
            assert "no answer" in node.problems
    nodes.now_s += 400
    await nodes.look()
    await nodes.look()
    assert other.parts == home.parts != {}
    assert [node.problems for node in nodes.nodes] == ["", "", ""]


async def test_a_cold_tier_that_does_not_answer_in_time_is_named(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    save_deepspeed_on(nodes.outs, 10)

    async def hangs(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(announcements, "TIMEOUT_S", 0.01)
    monkeypatch.setattr(watch_claim, "TIMEOUT_S", 0.01)
    for node in nodes.nodes[:2]:
        await node.watcher.run_once()
    nodes.now_s += QUIET_S + 1
    monkeypatch.setattr(Tier, "listing", hangs)
    for node in nodes.nodes[:2]:
        await node.watcher.run_once()
        assert node.parts == {}
        assert "no answer" in node.problems


async def test_nothing_is_announced_where_another_place_is_mounted(nodes: Nodes, tmp_path: Path) -> None:
    save_deepspeed_on(nodes.outs, 10)
    home = nodes.nodes[0]
    (tmp_path / "cold").rename(tmp_path / "unmounted")
    (tmp_path / "cold").mkdir()
    await nodes.look(home)
    assert home.parts == {}
    assert "announce ds/000000000010-g0001 to the other nodes: cold:" in home.problems
    assert not list((tmp_path / "cold").rglob("head.json"))


async def test_a_node_looks_seldom_for_what_node_0_does_not_announce(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = nodes.nodes[1]
    asked: list[str] = []
    listing = Tier.listing

    async def counted(tier: Tier, prefix: str = "", **keys: str) -> object:
        asked.append(prefix)
        return await listing(tier, prefix, **keys)

    save_deepspeed_on(nodes.outs, 10)
    monkeypatch.setattr(Tier, "listing", counted)
    for _ in range(100):
        await nodes.look(other, after_s=10)
    assert 15 < asked.count("ds/000000000010-g") < 60


@pytest.mark.parametrize("is_signed", [False, True])
async def test_a_forged_head_leads_no_node_into_another_generation(tmp_path: Path, is_signed: bool) -> None:
    keyring = Keyring([new_key()]) if is_signed else None
    async with made(tmp_path, 2, preset="deepspeed", keyring=keyring) as nodes:
        save_deepspeed_on(nodes.outs, 10)
        await nodes.look(nodes.nodes[0])
        true = checkpoint_id(RUN, 10, 1)
        raw = await nodes.cold.store.get_bytes(layout.file_key(true, layout.HEAD), size_max=1 << 16)
        forged = checkpoint_id(RUN, 10, 2 if is_signed else 40_000_000)
        content = msgspec.json.decode(raw) | {"generation": forged.generation}
        await nodes.cold.store.put_bytes(layout.file_key(forged, layout.HEAD), msgspec.json.encode(content))
        await nodes.look(nodes.nodes[1])
        assert nodes.nodes[1].parts == nodes.nodes[0].parts
        await nodes.send()
        assert await nodes.committed() == [(10, 1, 1)]


async def test_a_head_that_cannot_be_read_is_a_problem(nodes: Nodes) -> None:
    save_deepspeed_on(nodes.outs, 10)
    key = layout.file_key(checkpoint_id(RUN, 10, 1), layout.HEAD)
    await nodes.cold.store.put_bytes(key, b"{}")
    await nodes.look()
    assert [node.parts for node in nodes.nodes] == [{}, {}, {}]
    assert all("decode the head of ds/000000000010-g0001 in cold" in node.problems for node in nodes.nodes)


async def test_heads_of_other_saves_lead_node_0_only_a_few_generations_further(nodes: Nodes) -> None:
    save_deepspeed_on(nodes.outs, 10)
    home = nodes.nodes[0]
    for generation in range(1, 20):
        await nodes.cold.bury(checkpoint_id(RUN, 10, generation))
    await nodes.look(home)
    assert home.parts == {}
    assert "a cold tier has other saves of it up to generation 8" in home.problems


async def test_what_was_deleted_in_cold_is_announced_in_the_next_generation(nodes: Nodes) -> None:
    await nodes.cold.bury(checkpoint_id(RUN, 10, 1))
    save_deepspeed_on(nodes.outs, 10)
    await nodes.look()
    assert [node.parts[10][:2] for node in nodes.nodes] == [(2, 1)] * 3


async def test_a_restart_and_empty_disks_adopt_nothing_twice(nodes: Nodes, tmp_path: Path) -> None:
    for step in (10, 20):
        save_deepspeed_on(nodes.outs, step)
        await nodes.look()
        await nodes.send()
    for node in nodes.nodes:
        await node.watcher.close()
        node.restart()
    await nodes.look()
    assert [list(node.parts) for node in nodes.nodes] == [[10, 20]] * 3
    whole = await nodes.given_back(checkpoint_id(RUN, 20, 1), tmp_path / "back")
    for node in nodes.nodes:
        shutil.rmtree(node.out / "global_step20")
        shutil.copytree(whole, node.out / "global_step20")
        for checkpoint in (checkpoint_id(RUN, 10, 1), checkpoint_id(RUN, 20, 1)):
            await node.rooms.hot.delete(checkpoint)
        await node.rooms.list_tiers()
        await node.watcher.close()
        node.restart()
    await nodes.look()
    assert [node.parts for node in nodes.nodes] == [{}, {}, {}]
    assert [node.problems for node in nodes.nodes] == ["", "", ""]
    save_deepspeed_on(nodes.outs, 30)
    await nodes.look()
    await nodes.send()
    assert await nodes.committed() == [(10, 1, 1), (20, 1, 2), (30, 1, 3)]


async def test_what_never_became_whole_is_deleted_by_node_0_alone_and_leaves_hot_by_the_policy(tmp_path: Path) -> None:
    policy = LifecycleConfig(hot=TierPolicy(keep_last=1))
    async with made(tmp_path, 2, preset="deepspeed", lifecycle=policy) as nodes:
        home, other = nodes.nodes
        save_deepspeed_on(nodes.outs, 10)
        await nodes.look(home)
        await nodes.send(home)
        for step in (20, 30):
            shutil.rmtree(other.out, ignore_errors=True)
            other.out.mkdir()
            save_deepspeed_on(nodes.outs, step)
            await nodes.look()
            await nodes.send()
        assert [step for step, _, _ in await nodes.committed()] == [20, 30]
        lost = checkpoint_id(RUN, 10, 1)

        async def sweep(*swept: Node) -> set[str]:
            for node in swept:
                await node.rooms.list_tiers()
                node.replicator = node.rooms.replicator()
                assert await node.replicator.run_once()
            listing = await nodes.cold.listing(layout.checkpoint_prefix(lost))
            return set(listing.files.get(lost, ()))

        make_old(home.rooms.folder("cold", lost))
        assert layout.GONE not in await sweep(other)
        assert layout.GONE in await sweep(home)
        make_old(home.rooms.folder("cold", lost))
        assert await sweep(home) == set()
        (decision,) = [
            each
            for each in decisions(home.rooms.catalog, home.rooms.config)
            if (each.checkpoint, each.tier) == (lost, HOT)
        ]
        assert decision.action in (Action.EVICT, Action.EXPIRE)


def make_old(folder: Path) -> None:
    for path in folder.iterdir():
        os.utime(path, (1e9, 1e9))


async def test_a_source_is_removed_on_each_node_when_the_whole_is_in_cold(nodes: Nodes) -> None:
    for node in nodes.nodes:
        node.restart(source="remove")
    late = nodes.nodes[2]
    for step in (10, 20, 30):
        save_deepspeed_on(nodes.outs, step)
        await nodes.look(*nodes.nodes[:2])
        if step != 20:
            await nodes.look(late)
            await nodes.send()
    await nodes.look()
    assert [step for step, _, _ in await nodes.committed()] == [10, 30]
    for node in nodes.nodes[:2]:
        assert sorted(path.name for path in node.out.iterdir()) == ["global_step20", "global_step30", "latest"]


async def test_only_node_0_deletes_in_cold(nodes: Nodes) -> None:
    assert [node.rooms.context.is_home(RUN) for node in nodes.nodes] == [True, False, False]


async def test_what_the_policies_keep_is_deleted_in_hot_by_each_node_and_in_cold_by_node_0(tmp_path: Path) -> None:
    policy = LifecycleConfig(hot=TierPolicy(keep_last=1), cold=ColdPolicy(keep_last=2, keep_every=0))
    async with made(tmp_path, 2, preset="deepspeed", lifecycle=policy) as nodes:
        for step in (10, 20, 30):
            save_deepspeed_on(nodes.outs, step)
            await nodes.look()
            await nodes.send()
        home, other = nodes.nodes
        assert await Reaper(other.rooms.context).run_once()
        assert list(other.parts) == [30]
        assert [step for step, _, _ in await nodes.committed()] == [10, 20, 30]
        assert await Reaper(home.rooms.context).run_once()
        assert list(home.parts) == [30]
        assert [step for step, _, _ in await nodes.committed()] == [20, 30]
        for node in nodes.nodes:
            await node.rooms.list_tiers()
            assert not node.rooms.incidents.recent()
        await nodes.look()
        assert [list(node.parts) for node in nodes.nodes] == [[30], [30]]
