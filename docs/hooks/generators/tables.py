"""Markdown tables, and the text of one cell."""

from __future__ import annotations

import re
from collections.abc import Iterable


def cell(text: str) -> str:
    """The text on one line, with what would end a cell escaped."""
    return " ".join(text.split()).replace("|", "\\|")


def code(text: str) -> str:
    return f"`{cell(text)}`" if text else ""


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(head)
    lines = [names, ["---"] * len(names), *(list(row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def sentence(text: str) -> str:
    """The text with a full stop, and with a capital letter unless its first word is a name from the code."""
    text = text.strip()
    if not text:
        return ""
    first = text.split()[0]
    return (text if re.search(r"[._(=$/]", first) else text[0].upper() + text[1:]) + (
        "" if text[-1] in ".!?:…" else "."
    )
