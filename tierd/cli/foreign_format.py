"""Which format a file or folder has that `tierd import` gets, from its first bytes and names. Reads no more of it."""

from __future__ import annotations

import os
from contextlib import closing
from enum import StrEnum
from pathlib import Path

from tierd.errors import NotFound, Unsupported
from tierd.transfer.foreign_file import ForeignFile


class Format(StrEnum):
    safetensors = "safetensors"


_JSON_AT = 8  # a safetensors file begins with the length of its header, and the header with a brace
_BY_SUFFIX = {".safetensors": Format.safetensors}


def format_of(path: Path) -> Format:
    """Raises NotFound, BadConfig where it is no regular file, and Unsupported for a format that tierd does not read."""
    if path.is_dir():
        return _format_of_folder(path)
    with closing(ForeignFile(path)) as file:
        head = file.read(_JSON_AT + 1, 0)
    if head[_JSON_AT:] == b"{":
        return Format.safetensors
    if (by_suffix := _BY_SUFFIX.get(path.suffix)) is not None:
        return by_suffix
    raise Unsupported(
        f"import {path}: it is no safetensors file",
        hint="a flat file needs --like; `tierd adopt` takes any file as it is",
    )


def _format_of_folder(path: Path) -> Format:
    try:
        names = os.listdir(path)
    except OSError as error:
        raise NotFound(f"import {path}: {error.strerror}") from error
    if any(name.endswith(".safetensors") for name in names):
        return Format.safetensors
    raise Unsupported(
        f"import {path}: it has no safetensors file",
        hint="`tierd adopt` takes any folder as it is",
    )
