"""Two daemons copy different files of one run and name: both files stay, each as it is, and a person is told."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest

from tests.support.rooms import RUN, Rooms, rooms_at
from tierd.config.sections import ColdConfig
from tierd.format.sidecar import (
    EMPTY,
    VERSION_MAX,
    Segment,
    branches,
    chain,
    encode_segment,
    parse_segment,
    segment_prefix,
    short,
)
from tierd.format.signature import Keyring, new_key
from tierd.tiers.tier import Tier
from tierd.transfer.sidecar_output import verified_segments
from tierd.workers.sidecar_follower import REWRITTEN_S, SidecarFollower

NAME = "log.jsonl"


class Node:
    """A daemon with a hot tier and a folder of its own. All have one cold tier."""

    def __init__(self, rooms: Rooms, folder: Path, number: int) -> None:
        folder.mkdir()
        self.file, self.number = folder / NAME, number
        sidecars = msgspec.structs.replace(rooms.config.sidecars, path=str(folder), run=RUN, keep=[NAME])
        rooms.config = msgspec.structs.replace(rooms.config, sidecars=sidecars)
        self.rooms = rooms
        self.worker = SidecarFollower(rooms.context, rng=random.Random(number))

    async def restart(self) -> None:
        await self.worker.close()
        self.worker = SidecarFollower(self.rooms.context, rng=random.Random(self.number))

    @property
    def incidents(self) -> str:
        return "\n".join(each.message for each in self.rooms.incidents.recent())


class Nodes:
    def __init__(self) -> None:
        self.now_s = 1000.0
        self.all: list[Node] = []

    async def settle(self, *nodes: Node, passes: int = 4) -> None:
        for _ in range(passes):
            self.now_s += 2 * REWRITTEN_S
            for node in nodes or self.all:
                assert await node.worker.run_once()

    @property
    def cold(self) -> Tier:
        return self.all[0].rooms.cold["cold"]

    async def segments(self, tier: Tier | None = None) -> dict[int, list[Segment]]:
        keys = [each.key for each in await (tier or self.cold).store.list(segment_prefix(RUN))]
        found: dict[int, list[Segment]] = {}
        for segment in filter(None, map(parse_segment, keys)):
            found.setdefault(segment.version, []).append(segment)
        return found

    async def contents(self, tier: Tier | None = None) -> list[bytes]:
        """The longest content of each version."""
        paths = [chain(each) for each in (await self.segments(tier)).values()]
        return [await content_of(tier or self.cold, path) for path in paths]


async def content_of(tier: Tier, path: list[Segment]) -> bytes:
    return b"".join([content async for _, _, content in verified_segments(tier, path)])


@pytest.fixture(params=[None, Keyring([new_key()])], ids=["", "signed"])
async def nodes(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Nodes]:
    nodes = Nodes()
    cold = (ColdConfig(name="cold", url=f"file://{tmp_path / 'cold'}"),)
    async with AsyncExitStack() as stack:
        for number in range(2):
            clocks = {"monotonic_s": lambda: nodes.now_s}
            opened = rooms_at(tmp_path / f"{number}", keyring=request.param, clocks=clocks, cold=cold)
            nodes.all.append(Node(await stack.enter_async_context(opened), tmp_path / f"out-{number}", number))
        yield nodes
        for node in nodes.all:
            await node.worker.close()


async def both_begin(nodes: Nodes) -> None:
    """At one time, so that no listing shows the other's file."""
    one, other = nodes.all
    one.file.write_bytes(b"one 1\none 2\n")
    other.file.write_bytes(b"other 1\n")
    nodes.now_s += 2 * REWRITTEN_S
    listed = asyncio.Barrier(2)
    for node in nodes.all:
        tier = node.rooms.cold["cold"]
        real_list, is_first = tier.store.list, [True]

        async def together(prefix, *args, real_list=real_list, is_first=is_first, **options):  # type: ignore[no-untyped-def]
            found = await real_list(prefix, *args, **options)
            if is_first and prefix.endswith("/sidecars/"):
                is_first.clear()
                await listed.wait()
            return found

        tier.store.list = together  # type: ignore[method-assign]
    await asyncio.gather(*(node.worker.run_once() for node in nodes.all))
    assert {version: len(branches(each)) for version, each in (await nodes.segments()).items()} == {1: 2}


async def test_files_that_begin_at_one_time_both_stay_and_a_person_is_told(nodes: Nodes) -> None:
    await both_begin(nodes)
    await nodes.settle()
    for node in nodes.all:
        assert node.file.read_bytes() in await nodes.contents()
        assert node.worker.report().rewritten == {NAME: 1}
        assert "another daemon copies another file of this name: both are in version 1" in node.incidents
        with node.file.open("ab") as file:
            file.write(b"more\n")
    await nodes.settle()
    for node in nodes.all:
        assert node.file.read_bytes() in await nodes.contents()
        assert node.file.read_bytes() in await nodes.contents(node.rooms.hot)
        assert node.worker.report().rewritten == {NAME: 1}, "each has a version of its own now"


async def test_what_another_daemon_needs_of_a_common_beginning_is_not_deleted(nodes: Nodes) -> None:
    """The run moves to another machine with its file, while the first daemon still sends. Then that machine is lost."""
    one, other = nodes.all
    one.file.write_bytes(b"1\n2\n")
    await nodes.settle(one)
    other.file.write_bytes(one.file.read_bytes())
    await nodes.settle(other)
    with one.file.open("ab") as file:
        file.write(b"3\n")
    await nodes.settle(one)
    with other.file.open("ab") as file:
        file.write(b"as long as what is merged\n")
    await nodes.settle(other)
    contents = await nodes.contents()
    assert one.file.read_bytes() in contents
    assert other.file.read_bytes() in contents
    assert "both are in version 1" in other.incidents
    assert one.incidents == ""


async def test_a_segment_that_is_needed_since_the_listing_is_not_deleted(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = nodes.all
    one.file.write_bytes(b"1\n2\n")
    await nodes.settle(one)
    other.file.write_bytes(b"1\n2\n3 of the other\n")
    store, real_put = other.rooms.cold["cold"].store, other.rooms.cold["cold"].store.put_bytes

    async def put_bytes(key: str, content: bytes, *, if_absent: bool = False) -> bool:
        if not one.file.read_bytes().endswith(b"3\n"):
            one.file.write_bytes(b"1\n2\n3\n")
            await nodes.settle(one, passes=1)
        return await real_put(key, content, if_absent=if_absent)

    with monkeypatch.context() as patch:
        patch.setattr(store, "put_bytes", put_bytes)
        await nodes.settle(other, passes=1)
    found = [await content_of(nodes.cold, path) for path in branches((await nodes.segments())[1])]
    assert one.file.read_bytes() in found, "the first machine may be lost at this moment"


async def test_two_daemons_that_see_one_changed_past_go_on_in_one_version(nodes: Nodes) -> None:
    one, other = nodes.all
    one.file.write_bytes(b"1\n2\n")
    other.file.hardlink_to(one.file)
    await nodes.settle()
    one.file.write_bytes(b"a\nb\n")
    await nodes.settle()
    assert (await nodes.segments()).keys() == {1, 2}
    assert sorted(await nodes.contents()) == [b"1\n2\n", b"a\nb\n"]


async def test_a_view_that_is_older_than_what_another_daemon_has_copied_begins_no_version(nodes: Nodes) -> None:
    """Over NFS, a machine may see what another one writes half a minute later."""
    one, other = nodes.all
    lines = [b"%d\n" % step for step in range(40)]
    for step in range(len(lines)):
        one.file.write_bytes(b"".join(lines[: step + 1]))
        await nodes.settle(one, passes=1)
        other.file.write_bytes(b"".join(lines[: max(step - 5, 0)]))
        await nodes.settle(other, passes=1)
    other.file.write_bytes(one.file.read_bytes())
    await nodes.settle()
    assert [node.worker.report().rewritten for node in nodes.all] == [{}, {}]
    assert await nodes.contents() == [b"".join(lines)]


async def test_a_view_that_stays_older_is_another_file(nodes: Nodes) -> None:
    one, other = nodes.all
    one.file.write_bytes(b"1\n2\n3\n")
    await nodes.settle(one)
    other.file.write_bytes(b"1\n2\n")
    await nodes.settle(other)
    assert other.worker.report().rewritten == {}
    await nodes.settle(other, passes=20)
    assert other.worker.report().rewritten == {NAME: 1}
    assert sorted(await nodes.contents()) == [b"1\n2\n", b"1\n2\n3\n"]


async def test_a_version_that_no_other_can_follow_is_a_problem_and_no_silent_loss(nodes: Nodes) -> None:
    """Whoever may write into the bucket can put it there."""
    one = nodes.all[0]
    forged = Segment(RUN, NAME, VERSION_MAX, 0, 2, short(EMPTY), "0" * 16)
    raw = encode_segment(forged, b"x\n", before=EMPTY, after="0" * 64, keyring=None)
    await nodes.cold.store.put_bytes(forged.key, raw, if_absent=True)
    one.file.write_bytes(b"1\n2\n")
    await nodes.settle(one)
    (problem,) = one.worker.report().problems
    assert f"a tier has version {VERSION_MAX} of it" in problem
    assert all(parse_segment(each.key) for each in await nodes.cold.store.list(segment_prefix(RUN)))
    await nodes.cold.store.delete([forged.key])
    await one.restart()
    await nodes.settle(one)
    assert one.file.read_bytes() in await nodes.contents()


async def test_what_is_not_signed_begins_no_version(nodes: Nodes) -> None:
    one = nodes.all[0]
    one.file.write_bytes(b"1\n2\n")
    await nodes.settle(one)
    forged = Segment(RUN, NAME, 1, 0, 2, chain((await nodes.segments())[1])[0].before, "0" * 16)
    raw = encode_segment(forged, b"x\n", before=forged.before * 4, after=forged.after * 4, keyring=None)
    await nodes.cold.store.put_bytes(forged.key, raw, if_absent=True)
    one.file.write_bytes(b"1\n2\n3\n")
    await nodes.settle(one)
    is_signed = nodes.cold.keyring is not None
    assert one.worker.report().rewritten == ({} if is_signed else {NAME: 1})
    assert one.file.read_bytes() in await nodes.contents()
