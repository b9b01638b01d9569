"""Tells the format of a file or folder for `tierd import` by its first bytes and its names. Reads nothing else."""

from __future__ import annotations

import os
from contextlib import closing
from enum import StrEnum
from pathlib import Path

from tierd.errors import NotFound, Unsupported
from tierd.transfer.foreign_file import ForeignFile


class ForeignFormat(StrEnum):
    safetensors = "safetensors"
    torch = "torch"


_JSON_AT = 8  # a safetensors file begins with the length of its header, and the header with a brace
TORCH_BEGINNINGS = (b"PK\3\4", b"\x80\2")  # a zip archive, or of torch before 1.6 a pickle
_BY_SUFFIX = {
    ".safetensors": ForeignFormat.safetensors,
    ".pt": ForeignFormat.torch,
    ".pth": ForeignFormat.torch,
    ".ckpt": ForeignFormat.torch,
}  # for files whose first bytes are damaged


def format_of(path: Path) -> ForeignFormat:
    """Raises NotFound, BadConfig when it is not a regular file, and Unsupported for a format that tierd cannot read."""
    try:
        is_folder = path.is_dir()
    except OSError as error:  # such as a name that is too long
        raise NotFound(f"import {path}: {error.strerror}") from error
    if is_folder:
        return _format_of_folder(path)
    with closing(ForeignFile(path)) as file:
        head = file.read(_JSON_AT + 1, 0)
    if head[_JSON_AT:] == b"{":
        return ForeignFormat.safetensors
    if head.startswith(TORCH_BEGINNINGS):
        return ForeignFormat.torch
    if (by_suffix := _BY_SUFFIX.get(path.suffix)) is not None:
        return by_suffix
    raise Unsupported(
        f"import {path}: it is neither a file of torch.save nor a safetensors file",
        hint="a flat file needs --like; `tierd adopt` takes any file as it is",
    )


def _format_of_folder(path: Path) -> ForeignFormat:
    try:
        names = os.listdir(path)
    except OSError as error:
        raise NotFound(f"import {path}: {error.strerror}") from error
    if ".metadata" in names:
        raise Unsupported(
            f"import {path}: it is a folder of torch.distributed.checkpoint, whose index is a pickle that no reader of "
            "torch opens without running it",
            hint="python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE.pt, where you trust the "
            "folder; then import FILE.pt",
        )
    if any(name.endswith(".safetensors") for name in names):
        return ForeignFormat.safetensors
    raise Unsupported(
        f"import {path}: it has no safetensors file",
        hint="`tierd adopt` takes any folder as it is",
    )
