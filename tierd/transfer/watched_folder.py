"""Reads a folder in which a framework writes checkpoints: names, times, and whether files are complete.

Changes nothing there, follows no link and loads no pickle. All reads are bounded. All calls block.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import cast

from tierd.errors import BadRequest, NotFound, Transient, Unsupported
from tierd.format.flat_file import HEADER
from tierd.format.shard import HEADER_BYTES_MAX
from tierd.lifecycle.watched import ZIP_TAIL_BYTES, Listed, Preset, Whole, is_zip_end
from tierd.tiers.tree import FOLDER, NO_LINK, closing_fd
from tierd.transfer.source_tree import OpenEntry, SourceEntry, SourceTree, scan

NAMES_MAX = 100_000  # in the folder; the rest is not scanned
MARKER_BYTES_MAX = 256 << 20  # trainer_state.json has all that a training has logged
BESIDE_BYTES_MAX = 4096
CHECKED = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".safetensors")
_SIZE = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Names:
    """The names of the entries of a folder. `folders`: whether each entry is a folder, without links. `is_cut`: there
    are more than NAMES_MAX, and the rest is left out."""

    folders: dict[str, bool]
    links: list[str]
    is_cut: bool

    @property
    def key(self) -> int:
        return hash((frozenset(self.folders.items()), frozenset(self.links)))


def names(path: Path) -> Names:
    """List the folder. Raises NotFound, BadRequest when this user may not read it, or Transient."""
    try:
        with closing_fd(os.open(path, FOLDER)) as folder, os.scandir(folder) as entries:
            found = list(islice(entries, NAMES_MAX + 1))
            kept = found[:NAMES_MAX]
            links = [entry.name for entry in kept if entry.is_symlink()]
            folders = {entry.name: entry.is_dir(follow_symlinks=False) for entry in kept if not entry.is_symlink()}
    except FileNotFoundError as error:
        raise NotFound(f"watch {path}: it does not exist", hint="the training may make it later") from error
    except (PermissionError, NotADirectoryError) as error:
        hint = f"user {os.geteuid()}, who runs the daemon, must be able to list it"
        raise BadRequest(f"watch {path}: {error.strerror}", hint=hint) from error
    except OSError as error:
        raise Transient(f"watch {path}: {error.strerror or error}", hint="check the disk: dmesg, mount, df") from error
    return Names(folders, links, len(found) > NAMES_MAX)


def read_beside(folder: Path, name: str) -> tuple[bytes, float]:
    """The content of a small file and when it was written; `(b"", 0.0)` if it cannot be read."""
    try:
        with closing_fd(os.open(folder / name, os.O_RDONLY | os.O_NONBLOCK | NO_LINK)) as fd:
            stat_result = os.fstat(fd)
            if not stat.S_ISREG(stat_result.st_mode):
                return b"", 0.0
            return os.read(fd, BESIDE_BYTES_MAX), stat_result.st_mtime
    except OSError:
        return b"", 0.0


def scan_entry(path: Path) -> SourceTree | None:
    """The tree, or None if it was just deleted. Raises as `scan`."""
    try:
        return scan(path, may_be_empty=True)
    except NotFound:
        return None


def tree_key(tree: SourceTree) -> int:
    """A number that changes when anything in the tree changes."""
    return hash((tree, tree.folders_changed_ns))


ReadRange = Callable[[SourceEntry, int, int], bytes]
"""(file, offset, length) → the bytes there."""


def listed(tree: SourceTree, preset: Preset, *, unchanged_s: float, read: ReadRange | None = None) -> Listed:
    """The facts that decide whether a checkpoint is complete. `read`: reads its files; None: they are in the file
    system. Raises what `OpenEntry` and `read` raise."""
    read = read or partial(_read, tree)
    by_path = {entry.path: entry for entry in tree.files}
    marker = by_path.get(tree.name if tree.is_file else preset.marker)
    name = tree.path.name
    modified_s, folder_modified_s = tree.modified_ns / 1e9, tree.folders_changed_ns / 1e9
    content = _marker(tree, marker, preset, read) if marker is not None else None
    marker_modified_s = marker.modified_ns / 1e9 if marker is not None else 0.0
    if not tree.is_file and not preset.marker:  # the folder was renamed into place, or a file beside it names it
        content, marker_modified_s = b"", modified_s
    can_tell = marker is not None and preset.whole in (Whole.ZIP, Whole.FORMAT)
    if tree.is_file:
        (entry,) = tree.files
        return Listed(
            name=name,
            is_folder=False,
            modified_s=modified_s,
            unchanged_s=unchanged_s,
            marker=content,
            marker_modified_s=marker_modified_s,
            head=read(entry, 0, min(HEADER.size, entry.size_bytes)),
            size_bytes=entry.size_bytes,
            is_whole=is_whole(entry, read) if can_tell else None,
        )
    return Listed(
        name=name,
        is_folder=True,
        modified_s=modified_s,
        unchanged_s=unchanged_s,
        folder_modified_s=folder_modified_s,
        files=frozenset(by_path),
        marker=content,
        marker_modified_s=marker_modified_s,
        is_whole=is_whole(marker, read) if marker is not None and can_tell else None,
        cut=tuple(
            entry.path for entry in tree.files if entry.path.endswith(CHECKED) and is_whole(entry, read) is False
        ),
    )


def _marker(tree: SourceTree, entry: SourceEntry, preset: Preset, read: ReadRange) -> bytes:
    """The step in the marker, as JSON; empty if the marker is not complete JSON."""
    if preset.whole is not Whole.JSON:
        return b""
    if entry.size_bytes > MARKER_BYTES_MAX:
        raise Unsupported(
            f"adopt {tree.where}: {entry.path} has {entry.size_bytes} bytes, more than {MARKER_BYTES_MAX}"
        )
    try:
        state = json.loads(read(entry, 0, entry.size_bytes))
    except (ValueError, RecursionError):
        return b""
    if not isinstance(state, dict):
        return b""
    values = cast("dict[str, object]", state)
    return json.dumps(
        {key: values[key] for key in ("global_step", "step") if isinstance(values.get(key), int)}
    ).encode()


def is_whole(entry: SourceEntry, read: ReadRange) -> bool | None:
    """Whether a zip archive, as torch.save writes it, or a safetensors file is complete. None for other formats."""
    if not entry.size_bytes:
        return False
    head = read(entry, 0, min(_SIZE.size, entry.size_bytes))
    if entry.path.endswith(".safetensors"):
        return _is_whole_safetensors(entry, head, read)
    if head.startswith(b"PK\x03\x04"):
        length = min(ZIP_TAIL_BYTES, entry.size_bytes)
        return is_zip_end(read(entry, entry.size_bytes - length, length), entry.size_bytes)
    return None


def _is_whole_safetensors(entry: SourceEntry, head: bytes, read: ReadRange) -> bool:
    """https://huggingface.co/docs/safetensors: u64 length of the header, the header, then the tensors without holes."""
    if len(head) < _SIZE.size:
        return False
    (length,) = _SIZE.unpack(head)
    if length > min(HEADER_BYTES_MAX, entry.size_bytes - _SIZE.size):
        return False
    try:
        header = json.loads(read(entry, _SIZE.size, length))
        ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        return entry.size_bytes == _SIZE.size + length + max(ends, default=0)
    except (ValueError, RecursionError, KeyError, IndexError, TypeError, AttributeError):
        return False


def _read(tree: SourceTree, entry: SourceEntry, offset: int, length: int) -> bytes:
    content = bytearray(length)
    file = OpenEntry(tree, entry)
    try:
        file.read(offset, memoryview(content))
    finally:
        file.close()
    return bytes(content)
