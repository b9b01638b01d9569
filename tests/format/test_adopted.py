"""The tree of an adopted checkpoint: hostile bytes lead nowhere, and names of other programs become names in a tier."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tierd.errors import Corrupt, NewerFormat
from tierd.format import layout
from tierd.format.adopted import TREE_FILE, TreeEntry, decode_tree, leads_out, new_tree, stored_name
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
