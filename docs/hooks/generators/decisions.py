"""The index of decisions, from the heads of their files: number, title, status and date.

A decision begins with `# 12. Title`. Before its first section stand `Status: ...` and `Date: YYYY-MM-DD`, on lines of
their own or on one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from generators.links import ROOT
from generators.tables import cell, table

FOLDER = ROOT / "docs/decisions"

INTRODUCTION = """\
# Decisions

Each page gives the context of one decision, what was decided, and what follows from it. A decision that no longer holds
stays here, and its status names the one that replaced it. This table is generated from the pages.
"""


@dataclass(frozen=True, slots=True)
class Decision:
    """The head of one page. `status` and `date` are empty where the page does not give them."""

    file: str
    number: int
    title: str
    status: str
    date: str


def page() -> str:
    found = [read(path) for path in sorted(FOLDER.glob("[0-9]*.md"))]
    rows = [
        # Hyphens that do not break keep the date on one line.
        [str(one.number), f"[{cell(one.title)}]({one.file})", cell(one.status), one.date.replace("-", "&#8209;")]
        for one in found
    ]
    return "\n".join([INTRODUCTION, table(["number", "title", "status", "date"], rows), ""])


def read(path: Path) -> Decision:
    """Raises ValueError when the page does not begin as a decision does."""
    head, _, _ = path.read_text(encoding="utf-8").partition("\n## ")
    title = re.match(r"# (\d+)\. (.+)", head)
    if title is None:
        raise ValueError(f"read {path}: expected a first line as '# 12. Title'")
    status = re.search(r"\bstatus:?\W*([\w-][^\n·*|,;]*)", head, re.IGNORECASE)
    date = re.search(r"\b\d{4}-\d\d-\d\d\b", head)
    return Decision(
        path.name,
        int(title[1]),
        title[2].strip(),
        status[1].strip().rstrip(".") if status else "",
        date[0] if date else "",
    )
