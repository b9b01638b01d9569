"""The tree of an adopted checkpoint: the files, folders and links that another program wrote, and how they are stored.

It is the file `adopted.json` beside the stored files, and one of the manifest's files. Decoding checks that no path and
no link leads out of the tree, and that the tree and the manifest name the same files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from tierd.errors import Corrupt, NewerFormat
from tierd.format.manifest import Manifest

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


class _Version(msgspec.Struct):
    format_version: int


def decode_tree(raw: bytes, manifest: Manifest, *, where: str) -> AdoptedTree:
    """Raises NewerFormat for a later version, Corrupt for any other violation of the format."""
    action = f"decode {TREE_FILE} of {manifest.id} in {where}"
    try:
        version = msgspec.json.decode(raw, type=_Version).format_version
        if version > FORMAT_VERSION:
            message = f"{action}: format version {version}, this tierd reads up to {FORMAT_VERSION}"
            raise NewerFormat(message, hint="upgrade tierd")
        tree = msgspec.json.decode(raw, type=AdoptedTree)
        _check(tree, manifest)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Corrupt(f"{action}: {error}", hint="docs/FORMAT.md#adopted-checkpoints") from error
    return tree


def _check(tree: AdoptedTree, manifest: Manifest) -> None:
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
    if sorted([TREE_FILE, *stored]) != sorted(entry.name for entry in manifest.files):
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


def stored_name(index: int, path: str) -> str:
    """The name in a tier of a file of the tree. `index` makes it unique; the rest is for people."""
    shown = re.sub(r"[^A-Za-z0-9._-]", "-", path.rpartition("/")[2])[:_STORED_CHARS_MAX]
    return f"{index:05d}-{shown}" + ("-" if shown.endswith(".partial") else "")


def new_tree(*, name: str, is_file: bool, mode: int, entries: Sequence[TreeEntry]) -> AdoptedTree:
    return AdoptedTree(
        format_version=FORMAT_VERSION, name=name, is_file=is_file, mode=mode & MODE_MASK, entries=list(entries)
    )
