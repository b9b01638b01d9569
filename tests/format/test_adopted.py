"""The tree of an adopted checkpoint: hostile bytes lead nowhere, and names of other programs become names in a tier."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tierd.errors import Corrupt, NewerFormat, Unsupported
from tierd.format import layout
from tierd.format.adopted import (
    TREE_FILE,
    AdoptedTree,
    TreeEntry,
    decode_tree,
    leads_out,
    merged,
    new_tree,
    nodes_of,
    stored_name,
    tree_file,
)
from tierd.format.manifest import ADOPTED, Manifest, file_entry

ENTRIES = [
    TreeEntry(path="a", kind="folder", mode=0o755),
    TreeEntry(path="a/b.bin", kind="file", mode=0o644, modified_ns=5, stored_as="00001-b.bin"),
    TreeEntry(path="c", kind="link", target="a/b.bin"),
]


def manifest(*names: str) -> Manifest:
    return Manifest(
        format_version=1,
        run="hf",
        step=5,
        generation=1,
        sequence=1,
        parent=None,
        world_size=1,
        created_at="",
        kind=ADOPTED,
        metrics={},
        architecture_hash="",
        versions={},
        files=[file_entry(name, 0, 4096, []) for name in names],
    )


MANIFEST = manifest(TREE_FILE, "00001-b.bin")


def encoded(**changes: Any) -> bytes:
    tree = new_tree(name="checkpoint-5", is_file=False, mode=0o755, entries=ENTRIES)
    return msgspec.json.encode(msgspec.to_builtins(tree) | changes)


def test_a_tree_is_read_as_it_was_written() -> None:
    tree = new_tree(name="checkpoint-5", is_file=False, mode=0o40755, entries=ENTRIES)
    assert decode_tree(tree.encode(), MANIFEST, where="hot") == tree
    assert tree.mode == 0o755


def entry(index: int, **changes: Any) -> dict[str, Any]:
    entries = msgspec.to_builtins(ENTRIES)
    entries[index] |= changes
    return {"entries": entries}


@pytest.mark.parametrize(
    "changes",
    [
        *(entry(1, path=path) for path in ("../b", "/b", "a//b", "a/../../b", "a/./b", "", "a\0b", "x/b", "c", "a")),
        *(entry(2, target=target) for target in ("/etc/passwd", "..", "../x", "a/../../x", "", "a/../..", "a//b")),
        entry(0, mode=0o4755),
        entry(1, mode=-1),
        entry(1, modified_ns=-1),
        entry(1, modified_ns=1 << 63),
        entry(1, stored_as="00002-b.bin"),
        entry(1, stored_as="../../x"),
        entry(1, kind="socket"),
        {"mode": 0o1777},
        {"is_file": True},
        {"entries": msgspec.to_builtins(ENTRIES[1:])},
        {"entries": msgspec.to_builtins([*ENTRIES, ENTRIES[1]])},
        {"format_version": 0.5},
        {"format_version": 0},
    ],
)
def test_a_tree_that_leads_out_or_contradicts_itself_is_corrupt(changes: dict[str, Any]) -> None:
    with pytest.raises(Corrupt):
        decode_tree(encoded(**changes), MANIFEST, where="hot")


def test_a_newer_tree_is_refused_as_newer() -> None:
    with pytest.raises(NewerFormat):
        decode_tree(encoded(format_version=2, entries=5), MANIFEST, where="hot")


@pytest.mark.parametrize(
    ("path", "target", "leads"),
    [
        ("a", "b", False),
        ("d/a", "../b", False),
        ("d/a", "..", False),
        ("d/e/a", "../../b/c", False),
        ("a", "..", True),
        ("d/a", "../../b", True),
        ("a", "b/../..", True),
        ("a", "/b", True),
    ],
)
def test_a_link_may_go_up_only_first_and_only_to_the_top(path: str, target: str, leads: bool) -> None:
    assert leads_out(path, target) is leads


@pytest.mark.parametrize("name", ["model.safetensors", ".metadata", "x.partial", "naïve ☃", "manifest.json", "x" * 255])
def test_every_name_has_a_stored_name_that_is_a_file_of_a_checkpoint(name: str) -> None:
    stored = stored_name(7, f"folder/{name}")
    assert layout.is_safe_file_name(stored)
    assert not layout.is_ours(stored)
    assert stored.startswith("00007-")


def of_nodes(*contents: int, names: tuple[str, ...] = ("same.pt",)) -> Manifest:
    """Each node has files with these names, whose bytes are the same where `contents` is."""
    entries = [
        file_entry(stored_name(index, name, node), 9, 4096, [content])
        for node, content in enumerate(contents)
        for index, name in enumerate(names, start=1)
    ]
    trees = [file_entry(tree_file(node), 9, 4096, [node]) for node in range(len(contents))]
    return msgspec.structs.replace(manifest(), world_size=len(contents), files=[*trees, *entries])


def tree_of(node: int, *more: TreeEntry, name: str = "same.pt", mode: int = 0o755, **changes: Any) -> AdoptedTree:
    file = TreeEntry(path=name, kind="file", mode=0o644, modified_ns=node, stored_as=stored_name(1, name, node))
    entries = sorted([msgspec.structs.replace(file, **changes), *more], key=lambda entry: entry.path)
    return new_tree(name="global_step5", is_file=False, mode=mode, entries=entries)


def test_the_tree_of_each_node_names_its_own_files() -> None:
    whole = of_nodes(7, 7)
    assert nodes_of(whole) == [0, 1]
    assert nodes_of(MANIFEST) == [None]
    part = msgspec.structs.replace(whole, files=[each for each in whole.files if "00001-adopted" in each.name])
    assert nodes_of(part) == [1]
    tree = tree_of(1)
    assert decode_tree(tree.encode(), whole, where="cold", node=1) == tree
    with pytest.raises(Corrupt, match=r"decode part-00000-adopted\.json"):
        decode_tree(tree.encode(), whole, where="cold", node=0)


def test_trees_are_merged_and_what_all_have_is_there_once_with_the_latest_time() -> None:
    whole = of_nodes(7, 7)
    alone = TreeEntry(path="empty", kind="folder", mode=0o700)
    tree = merged({1: tree_of(1, alone), 0: tree_of(0)}, whole)
    assert [(entry.path, entry.modified_ns, entry.stored_as) for entry in tree.entries] == [
        ("empty", 0, ""),
        ("same.pt", 1, "part-00000-00001-same.pt"),
    ]
    only = tree_of(1)
    assert merged({1: only}, whole) == only


LINK = TreeEntry(path="l", kind="link", target="a")


@pytest.mark.parametrize(
    ("other", "contents", "path"),
    [
        (tree_of(1), (7, 8), "same.pt"),
        (tree_of(1, mode=0o700), (7, 7), "."),
        (tree_of(1, kind="folder", stored_as=""), (7, 7), "same.pt"),
        (msgspec.structs.replace(tree_of(1), entries=[LINK]), (7, 7), ""),
        (
            msgspec.structs.replace(tree_of(1), entries=[msgspec.structs.replace(LINK, path="same.pt")]),
            (7, 7),
            "same.pt",
        ),
    ],
)
def test_what_differs_between_nodes_is_refused_by_name(
    other: AdoptedTree, contents: tuple[int, int], path: str
) -> None:
    whole = of_nodes(*contents)
    if not path:
        assert [entry.path for entry in merged({0: tree_of(0), 1: other}, whole).entries] == ["l", "same.pt"]
        return
    with pytest.raises(Unsupported) as caught:
        merged({0: tree_of(0), 1: other}, whole)
    assert f"they differ in {path} (nodes 0 and 1)" in caught.value.message
    assert "--node N" in caught.value.hint


def test_a_mode_that_differs_is_refused_and_many_paths_are_cut_short() -> None:
    names = tuple(f"{number}.pt" for number in range(9))
    whole = of_nodes(7, 8, names=names)
    trees = {
        node: new_tree(
            name="x",
            is_file=False,
            mode=0o755,
            entries=[
                TreeEntry(path=name, kind="file", mode=0o644, stored_as=stored_name(index, name, node))
                for index, name in enumerate(names, start=1)
            ],
        )
        for node in (0, 1)
    }
    with pytest.raises(Unsupported, match=r"4\.pt \(nodes 0 and 1\) and 4 more"):
        merged(trees, whole)
    entry = msgspec.structs.replace(tree_of(1).entries[0], mode=0o600)
    other = msgspec.structs.replace(tree_of(1), entries=[entry])
    with pytest.raises(Unsupported, match=r"same\.pt"):
        merged({0: tree_of(0), 1: other}, of_nodes(7, 7))
