"""The table of PyTorch's tests of DCP that pass with TierdWriter and TierdReader, from the list that the tests keep."""

from __future__ import annotations

import runpy
from typing import Any

from generators.links import ROOT
from generators.tables import cell, code, table

SOURCE = ROOT / "tests/client/frameworks/upstream.py"

INTRODUCTION = """\
# PyTorch's tests of DCP

This page is generated from `tests/client/frameworks/upstream.py`. PyTorch tests DCP with its own file storage, in
[test/distributed/checkpoint](https://github.com/pytorch/pytorch/tree/main/test/distributed/checkpoint). The tests that
apply are written again with `TierdWriter` and `TierdReader` in the place of `FileSystemWriter` and `FileSystemReader`,
on CPUs with 1, 2 and 4 ranks. They pass with torch {release}: `make test` and `make test-long` run them. A test applies
when it saves or loads through a storage that tierd can replace. Of some tests only a part applies: the last column
names what is left out.

**{covered} tests of PyTorch apply, and pass.**

"""


def page() -> str:
    source = runpy.run_path(str(SOURCE))
    files: tuple[Any, ...] = source["FILES"]
    covered = sum(len(file.covered) for file in files)
    rows = [
        [
            code(file.name),
            f"{len(file.covered)}",
            cell("; ".join(f"{name}: {reason}" for name, reason in file.excluded.items())),
        ]
        for file in files
    ]
    head = ["file of PyTorch", "tests that apply and pass", "what is excluded, and why"]
    return INTRODUCTION.format(release=source["RELEASE"], covered=covered) + table(head, rows) + "\n"
