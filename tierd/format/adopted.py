"""The tree of an adopted checkpoint: the files, folders and links that another program wrote, and how they are stored.

It is the file `adopted.json` beside the stored files, and one of the manifest's files. Decoding checks that no path and
no link leads out of the tree, and that the tree and the manifest name the same files. Of a checkpoint over several
nodes each node has a tree of its own, and all its stored files have the node's prefix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from tierd.errors import Unsupported
from tierd.format import layout
from tierd.format.manifest import FileEntry, Manifest, decode_versioned
from tierd.format.text import listed

FORMAT_VERSION = 1
TREE_FILE = "adopted.json"
TREE_BYTES_MAX = 64 << 20
ENTRIES_MAX = 1 << 17
PATH_BYTES_MAX = 2048
DEPTH_MAX = 64
MODIFIED_NS_MAX = (1 << 63) - 1  # the year 2262
MODE_MASK = 0o777  # no set-user-ID: a bucket must not be able to ask for it
_STORED_CHARS_MAX = 150


class TreeEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`path`: from the top, with '/'. Of a file `stored_as`, the name of the manifest's file with its bytes, and
    `modified_ns`, in Unix time; of a link its `target`."""

    path: str
    kind: Literal["folder", "file", "link"]
    mode: int = 0
    modified_ns: int = 0
    stored_as: str = ""
    target: str = ""


class AdoptedTree(msgspec.Struct, frozen=True, kw_only=True):
    """`name`: what the adopted folder or file was called. `is_file`: it was one file, the only entry. `mode`: of the
    folder. `entries`: sorted by path, so that a folder comes before what is in it."""

    format_version: int
    name: str
    is_file: bool
    mode: int
    entries: list[TreeEntry]

    @property
    def files(self) -> list[TreeEntry]:
        return [entry for entry in self.entries if entry.kind == "file"]

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


def tree_file(node: int | None) -> str:
    """The name of the tree of a node; None: of the only one."""
    return TREE_FILE if node is None else layout.part_prefix(node) + TREE_FILE


def nodes_of(manifest: Manifest) -> list[int | None]:
    """What `decode_tree` takes for each tree of an adopted checkpoint, or of a node's part of one."""
    if manifest.world_size == 1:
        return [None]
    names = {entry.name for entry in manifest.files}
    return [node for node in range(manifest.world_size) if tree_file(node) in names]


def decode_tree(raw: bytes, manifest: Manifest, *, where: str, node: int | None = None) -> AdoptedTree:
    """`node`: of several, whose tree it is. Raises NewerFormat for a later version, Corrupt for any other violation of
    the format."""
    return decode_versioned(
        raw,
        AdoptedTree,
        lambda tree: _check(tree, manifest, node),
        version_max=FORMAT_VERSION,
        action=f"decode {tree_file(node)} of {manifest.id} in {where}",
        hint="docs/FORMAT.md#adopted-checkpoints",
    )


def _check(tree: AdoptedTree, manifest: Manifest, node: int | None) -> None:
    """Raises ValueError for the first violation."""
    if len(tree.entries) > ENTRIES_MAX:
        raise ValueError(f"{len(tree.entries)} entries")
    if tree.mode & ~MODE_MASK:
        raise ValueError(f"mode {tree.mode:o}")
    if tree.is_file and [(entry.path, entry.kind) for entry in tree.entries] != [(tree.name, "file")]:
        raise ValueError("a single file has other entries")
    kinds: dict[str, str] = {"": "folder"}
    for entry in tree.entries:
        if problem := path_problem(entry.path):
            raise ValueError(f"path {entry.path[:80]!r} {problem}")
        if entry.path in kinds or kinds.get(parent_of(entry.path)) != "folder":
            raise ValueError(f"path {entry.path[:80]!r} occurs twice, or its folder does not come before it")
        if entry.mode & ~MODE_MASK or not 0 <= entry.modified_ns <= MODIFIED_NS_MAX:
            raise ValueError(f"{entry.path[:80]!r} has mode {entry.mode:o}, time {entry.modified_ns}")
        if entry.kind == "link" and leads_out(entry.path, entry.target):
            raise ValueError(f"link {entry.path[:80]!r} leads out of the tree")
        kinds[entry.path] = entry.kind
    stored = [entry.stored_as for entry in tree.files]
    prefix = "" if node is None else layout.part_prefix(node)
    listed = [entry.name for entry in manifest.files if entry.name.startswith(prefix)]
    if sorted([tree_file(node), *stored]) != sorted(listed):
        raise ValueError("its files are not those of the manifest")


def parent_of(path: str) -> str:
    return path.rpartition("/")[0]


def path_problem(path: str) -> str:
    """Why a path cannot be in a tree; empty if it can. What other programs call their files is not restricted more."""
    names = path.split("/")
    if any(name in ("", ".", "..") or "\0" in name for name in names):
        return "is not a plain relative path"
    try:
        size_bytes = len(path.encode())
    except UnicodeEncodeError:
        return "is not UTF-8"
    if size_bytes > PATH_BYTES_MAX or len(names) > DEPTH_MAX:
        return f"has more than {PATH_BYTES_MAX} bytes or {DEPTH_MAX} parts"
    return ""


def leads_out(path: str, target: str) -> bool:
    """Whether a link at `path` to `target` may lead out of the tree, or cannot be stored. '..' counts only at the
    beginning, where no other link can come before it."""
    names = target.split("/")
    ups = 0
    while ups < len(names) and names[ups] == "..":
        ups += 1
    rest = names[ups:]
    if ups > path.count("/") or not target:
        return True
    return bool(rest) and bool(path_problem("/".join(rest)))


def stored_name(index: int, path: str, node: int | None = None) -> str:
    """The name in a tier of a file of the tree. `node` and `index` make it unique; the rest is for people."""
    shown = re.sub(r"[^A-Za-z0-9._-]", "-", path.rpartition("/")[2])[:_STORED_CHARS_MAX]
    prefix = "" if node is None else layout.part_prefix(node)
    return f"{prefix}{index:05d}-{shown}" + ("-" if shown.endswith(".partial") else "")


def new_tree(*, name: str, is_file: bool, mode: int, entries: Sequence[TreeEntry]) -> AdoptedTree:
    return AdoptedTree(
        format_version=FORMAT_VERSION, name=name, is_file=is_file, mode=mode & MODE_MASK, entries=list(entries)
    )


def merged(trees: Mapping[int, AdoptedTree], manifest: Manifest) -> AdoptedTree:
    """One tree with what each node has, by its number. What several have is stored once, with the latest time.

    Raises Unsupported where two nodes have different things under one path.
    """
    files = {entry.name: entry for entry in manifest.files}
    kept: dict[str, tuple[int, TreeEntry]] = {}
    conflicts: dict[str, tuple[int, int]] = {}
    first = min(trees)
    for node, tree in sorted(trees.items()):
        if tree.mode != trees[first].mode:
            conflicts.setdefault(".", (first, node))
        for entry in tree.entries:
            other_node, other = kept.setdefault(entry.path, (node, entry))
            if not _is_same(entry, other, files):
                conflicts.setdefault(entry.path, (other_node, node))
            elif entry.modified_ns > other.modified_ns:
                newer = msgspec.structs.replace(other, modified_ns=entry.modified_ns)
                kept[entry.path] = (other_node, newer)
    if conflicts:
        named = [
            f"{ascii(path)[1:-1]} (nodes {node} and {other_node})" for path, (node, other_node) in conflicts.items()
        ]
        raise Unsupported(
            f"merge the folders of the {len(trees)} nodes of {manifest.id}: they differ in {listed(named)}",
            hint="--node N restores the folder of one node as it was",
        )
    entries = sorted((entry for _, entry in kept.values()), key=lambda entry: entry.path.split("/"))
    return msgspec.structs.replace(trees[first], entries=entries)


def _is_same(entry: TreeEntry, other: TreeEntry, files: Mapping[str, FileEntry]) -> bool:
    """Whether two entries of one path have the same kind, mode and bytes."""
    if (entry.kind, entry.mode, entry.target) != (other.kind, other.mode, other.target):
        return False
    if entry.kind != "file":
        return True
    stored = files[entry.stored_as]
    return msgspec.structs.replace(stored, name=other.stored_as) == files[other.stored_as]
