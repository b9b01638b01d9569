"""Former versions of sidecar files, and files that are gone, reach the cold tiers that lack them."""

from __future__ import annotations

from tests.support.rooms import RUN
from tests.workers.test_sidecar_versions import NAME, Nodes, content_of, nodes
from tierd.format.sidecar import branches, chain
from tierd.workers.former_sidecars import FormerSidecars

__all__ = ["nodes"]


async def test_a_former_version_of_another_file_reaches_a_tier_that_has_the_same_version(nodes: Nodes) -> None:
    """Written while cold did not answer, and gone before it did."""
    one, other = nodes.all
    one.file.write_bytes(b"one 1\none 2\n")
    await nodes.settle(one)
    await nodes.cold.store.delete([each.key for each in (await nodes.segments())[1]])
    one.file.unlink()
    other.file.write_bytes(b"other 1 is longer than that\n")
    await nodes.settle(other)
    await one.restart()
    await nodes.settle(one)
    found = [await content_of(nodes.cold, path) for path in branches((await nodes.segments())[1])]
    assert sorted(found) == [b"one 1\none 2\n", b"other 1 is longer than that\n"]


async def test_what_another_version_begins_with_is_not_copied(nodes: Nodes) -> None:
    one, other = nodes.all
    one.file.write_bytes(b"1\n2\n")
    await nodes.settle(one)
    await nodes.cold.store.delete([each.key for each in (await nodes.segments())[1]])
    other.file.write_bytes(b"other\n")
    await nodes.settle(other)
    with one.file.open("ab") as file:
        file.write(b"3\n")
    await nodes.settle(one, passes=8)
    assert one.file.read_bytes() in await nodes.contents()
    paths = branches((await nodes.segments())[1])
    assert [await content_of(nodes.cold, path) for path in paths] == [b"other\n"], (
        "version 1 of hot is in the later one"
    )


async def test_a_damaged_segment_is_named_and_not_copied(nodes: Nodes) -> None:
    rooms = nodes.all[0].rooms
    nodes.all[0].file.write_bytes(b"1\n2\n")
    await nodes.settle(nodes.all[0])
    (segment,) = chain((await nodes.segments(rooms.hot))[1])
    await nodes.cold.store.delete([segment.key])
    path = rooms.hot_store.root / segment.key
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    problems = await FormerSidecars(rooms.context).complete({"hot": [segment], "cold": []}, {})
    assert list(problems) == [f"{NAME} version 1 in cold"]
    assert segment.key in problems[f"{NAME} version 1 in cold"].message
    assert str(RUN) in segment.key
    assert await nodes.segments() == {}
