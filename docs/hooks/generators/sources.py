"""The source map: every module of tierd and of the client, with the first line of its docstring."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from generators.links import ROOT
from generators.tables import cell, table

INTRODUCTION = """\
# Source map

This page is generated: it shows the first docstring line of each module. [Where is it?](../where.md) answers common
questions with a path, and [Architecture](../ARCHITECTURE.md) explains how the modules work together.
"""


def page() -> str:
    folders: dict[str, list[tuple[str, str]]] = {}
    for path, line in first_lines():
        folder, _, name = path.rpartition("/")
        folders.setdefault(folder, []).append((name, line))
    parts = [INTRODUCTION]
    for folder, files in folders.items():
        own = [line for name, line in files if name == "__init__.py" and line]
        rows = [[f"`{name}`", cell(line)] for name, line in files if name != "__init__.py"]
        parts += [f"## {folder}\n", *(f"{line}\n" for line in own), table(["module", "what it is"], rows), ""]
    return "\n".join(parts)


def first_lines() -> Iterator[tuple[str, str]]:
    """(path in the repository, first docstring line) of each module; of a package, of its `__init__.py`."""
    for top in ("tierd", "client/tierd_client"):
        for path in sorted((ROOT / top).rglob("*.py"), key=lambda path: (path.parent.as_posix(), path.name)):
            if path.name != "__main__.py":
                yield path.relative_to(ROOT).as_posix(), first_line(path)


def first_line(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0].strip()
