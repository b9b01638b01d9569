"""Node files, and the manifest that is assembled from them: the same bytes whoever does it and in whatever order."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.errors import Corrupt, NewerFormat
from tierd.format import layout, manifest
from tierd.format.ids import Rank, checkpoint_id
from tierd.format.manifest import FileEntry, Head, file_entry
from tierd.format.node_file import (
    NodeFile,
    assemble,
    decode_node_file,
    milestones,
    missing_ranks,
    other_ranks_text,
    ranks_text,
    verdict,
)

CHECKPOINT = checkpoint_id("run42", 120, 3)
CLAIM = "0123456789abcdef" * 2
HEAD = Head(
    format_version=1,
    run=CHECKPOINT.run,
    step=CHECKPOINT.step,
    generation=CHECKPOINT.generation,
    sequence=12,
    parent=checkpoint_id("run42", 110, 2),
    world_size=4,
    created_at="2026-01-02T03:04:05.678+00:00",
    kind="snapshot",
    metrics={"loss": 0.5},
    architecture_hash="ab" * 32,
    versions={"tierd": "0.1.0", "torch": "2.13.0"},
)


def shard(rank: int, world_size: int) -> FileEntry:
    return file_entry(layout.shard_name(Rank(rank), world_size), 10 + rank, 4096, [1000 + rank])


def node_file(*ranks: int, head: Head = HEAD, **changes: Any) -> NodeFile:
    fields: dict[str, Any] = {name: getattr(head, name) for name in head.__struct_fields__}
    fields |= {"claim": CLAIM, "ranks": list(ranks), "is_healthy": True, "milestone": ""}
    fields |= {"files": [shard(rank, head.world_size) for rank in ranks]}
    return NodeFile(**fields | changes)


def decoded(raw: bytes, name: str) -> NodeFile:
    return decode_node_file(raw, name=name, where="cold", expect=CHECKPOINT)


def test_a_node_file_is_decoded_as_it_was_encoded() -> None:
    part = node_file(2, 3, is_healthy=None, milestone="best")
    assert part.name == "node-00002-of-00004.json"
    assert decoded(part.encode(), part.name) == part
    assert b'"healthy": null' in part.encode()
    assert part.encode().endswith(b"}\n")


def test_the_manifest_has_the_head_and_the_files_of_all_nodes_in_order_of_rank() -> None:
    assembled = assemble([node_file(1, 3), node_file(0, 2)])
    assert [entry.name for entry in assembled.files] == [layout.shard_name(Rank(rank), 4) for rank in range(4)]
    assert {name: getattr(assembled, name) for name in Head.__struct_fields__} == msgspec.structs.asdict(HEAD)
    assert manifest.decode(assembled.encode(), where="cold", expect=CHECKPOINT) == assembled


@given(st.integers(1, 24).flatmap(lambda world: st.permutations(range(world))), st.data())
def test_any_node_assembles_the_same_bytes_from_any_division_into_nodes(ranks: list[int], data: st.DataObject) -> None:
    head = msgspec.structs.replace(HEAD, world_size=len(ranks))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(ranks) - 1)))) if len(ranks) > 1 else []
    nodes = [ranks[first:end] for first, end in itertools.pairwise([0, *cuts, len(ranks)])]
    parts = [node_file(*sorted(node), head=head) for node in nodes]
    whole = assemble([node_file(*range(len(ranks)), head=head)])
    assert assemble(parts).encode() == whole.encode()
    assert assemble(data.draw(st.permutations(parts))).encode() == whole.encode()
    without = data.draw(st.sampled_from(parts))
    if len(parts) > 1:
        rest = [part for part in parts if part is not without]
        assert missing_ranks(rest) == without.ranks
        with pytest.raises(Corrupt, match="no node file"):
            assemble(rest)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (node_file(2, 3, claim="f" * 32), "two starts of the run hold this generation"),
        (node_file(2, 3, head=msgspec.structs.replace(HEAD, sequence=13)), "differ in sequence"),
        (node_file(2, 3, head=msgspec.structs.replace(HEAD, metrics={})), "differ in metrics"),
        (node_file(1, 2, 3), "rank 1 is in node-00001-of-00004.json and in another node file"),
        (node_file(2), "1 rank has no node file: 3"),
        (node_file(2, 3, head=msgspec.structs.replace(HEAD, world_size=5)), "differ in world_size"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(other: NodeFile, reason: str) -> None:
    for parts in itertools.permutations([node_file(0, 1), other]):
        with pytest.raises(Corrupt, match=reason):
            assemble(parts)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ranks": []}, "not ascending"),
        ({"ranks": [3, 2]}, "not ascending"),
        ({"ranks": [2, 2]}, "not ascending"),
        ({"ranks": [2, 4]}, "ranks 2 to 4 of world size 4"),
        ({"ranks": [-1, 2]}, "ranks -1 to 2"),
        ({"ranks": [2]}, "not the shards of its ranks"),
        ({"files": [shard(3, 4), shard(2, 4)]}, "not the shards of its ranks"),
        ({"files": [shard(2, 8), shard(3, 8)]}, "not the shards of its ranks"),
        ({"claim": ""}, "claim"),
        ({"claim": "g" * 32}, "claim"),
        ({"milestone": "../best"}, "milestone"),
        ({"ranks": [0, 1], "files": [shard(0, 4), shard(1, 4)]}, "its name should be node-00000-of-00004.json"),
        ({"step": 121}, "in the folder of"),
        ({"world_size": 0}, "world size 0"),
    ],
)
def test_a_forged_node_file_is_refused(changes: dict[str, Any], reason: str) -> None:
    part = node_file(2, 3)
    with pytest.raises(Corrupt, match=reason):
        decoded(msgspec.structs.replace(part, **changes).encode(), part.name)


def test_a_node_file_with_a_wrong_checksum_or_of_a_later_version_is_refused() -> None:
    part = node_file(2, 3)
    wrong = msgspec.structs.replace(part.files[0], crc64nvme="AAAAAAAAAAA=")
    with pytest.raises(Corrupt, match="do not combine"):
        decoded(msgspec.structs.replace(part, files=[wrong, part.files[1]]).encode(), part.name)
    with pytest.raises(NewerFormat):
        decoded(msgspec.structs.replace(part, format_version=2).encode(), part.name)


@pytest.mark.parametrize(
    ("verdicts", "whole"),
    [([True, True], True), ([True, False], False), ([None, False], False), ([True, None], None), ([None, None], None)],
)
def test_one_unhealthy_part_makes_the_checkpoint_unhealthy(verdicts: list[bool | None], whole: bool | None) -> None:
    parts = [node_file(rank, is_healthy=each) for rank, each in enumerate(verdicts)]
    assert verdict(parts) is whole


def test_the_milestones_of_the_parts_are_those_of_the_checkpoint() -> None:
    assert milestones([node_file(0, milestone="best"), node_file(1), node_file(2, milestone="best")]) == ["best"]


def test_a_node_file_is_neither_a_shard_nor_a_marker() -> None:
    assert layout.parse_node_file("node-00002-of-00004.json") == (2, 4)
    for name in ("node-2-of-4.json", "node-00002-of-00004.json.partial", "node-0000002-of-00004.json"):
        assert layout.parse_node_file(name) is None
    assert layout.is_ours("node-00002-of-00004.json")
    assert not layout.is_marker("node-00002-of-00004.json")


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([3], "3"),
        ([0, 1, 2], "0-2"),
        ([0, 1, 4, 6, 7], "0-1, 4, 6-7"),
        (list(range(0, 40, 2)), "0, 2, 4, 6, 8, 10, 12, 14, … (20 ranks)"),
    ],
)
def test_ranks_are_shown_as_ranges_and_bounded(ranks: list[int], expected: str) -> None:
    assert ranks_text(ranks) == expected


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([3], "0-2"),
        ([0, 1, 2, 3], ""),
        ([1, 2], "0, 3"),
        ([], "0-3"),
    ],
)
def test_the_other_ranks_of_four_are_shown_as_ranges(ranks: list[int], expected: str) -> None:
    assert other_ranks_text(ranks, 4) == expected


@pytest.mark.parametrize(
    "name", ["rank-2-of-4.safetensors", "rank-00002-of-00004.json", "rank-0000002-of-00004.safetensors"]
)
def test_no_other_name_is_that_of_a_shard(name: str) -> None:
    assert layout.parse_shard(name) is None
    assert layout.parse_shard(layout.shard_name(Rank(2), 4)) == (2, 4)


def adopted_part(node: int, **changes: Any) -> NodeFile:
    head = msgspec.structs.replace(HEAD, kind="adopted")
    names = (f"part-{node:05d}-adopted.json", f"part-{node:05d}-00001-model.pt")
    files = [file_entry(name, 10 + node, 4096, [node]) for name in names]
    return node_file(node, head=head, **{"files": files} | changes)


def test_what_nodes_have_adopted_is_assembled_in_order_of_the_nodes() -> None:
    parts = [adopted_part(node) for node in (2, 0, 3, 1)]
    for part in parts:
        assert decoded(part.encode(), part.name) == part
        assert part.extent == f"only the part of node {part.ranks[0]} of 4 nodes"
    assembled = assemble(parts)
    assert [entry.name for entry in assembled.files] == [
        name for node in range(4) for name in (f"part-{node:05d}-adopted.json", f"part-{node:05d}-00001-model.pt")
    ]
    assert manifest.decode(assembled.encode(), where="cold", expect=CHECKPOINT) == assembled
    assert all(part.contradiction(assembled) == "" for part in parts)
    with pytest.raises(Corrupt, match="1 rank has no node file: 1"):
        assemble(parts[:-1])


@pytest.mark.parametrize(
    "changes",
    [
        {"ranks": [1, 2]},
        {"files": adopted_part(2).files},
        {"files": adopted_part(1).files[1:]},
        {"files": [*adopted_part(1).files, file_entry("00001-x", 0, 4096, [])]},
        {"files": [*adopted_part(1).files, file_entry("part-00001-../x", 0, 4096, [])]},
        {"files": []},
        {"kind": "snapshot"},
        {"claim": "x" * 32},
    ],
)
def test_a_part_with_files_that_its_node_cannot_have_adopted_is_corrupt(changes: dict[str, Any]) -> None:
    part = adopted_part(1, **changes)
    with pytest.raises(Corrupt):
        decoded(part.encode(), part.name)
