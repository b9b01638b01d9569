"""Sections of docs/RUNBOOK.md as a test follows them: a command is run only if the section has it."""

from __future__ import annotations

import re
from pathlib import Path

RUNBOOK = Path(__file__).parents[2] / "docs" / "RUNBOOK.md"
_CODE = re.compile(r"`([^`]+)`")
_PLACEHOLDER = re.compile(r"\b(RUN|N|STEP|TIER|PID|HOT|DIR|POD)\b")


class Section:
    """The section that an alarm names."""

    def __init__(self, anchor: str) -> None:
        sections = re.split(r"^## ", RUNBOOK.read_text(encoding="utf-8"), flags=re.MULTILINE)
        by_anchor = {
            re.sub(r"[^a-z0-9 ]", "", each.partition("\n")[0].lower()).replace(" ", "-"): each for each in sections
        }
        self.anchor = anchor
        self.text = " ".join(by_anchor[anchor].split())

    def command(self, code: str, **values: object) -> str:
        """A command of the section, as it is written there, with its placeholders replaced: RUN="run"."""
        assert code in _CODE.findall(self.text), f"docs/RUNBOOK.md#{self.anchor} does not say `{code}`"
        for name, value in values.items():
            assert re.search(rf"\b{name}\b", code), f"no {name} in `{code}`"
            code = re.sub(rf"\b{name}\b", str(value), code)
        assert not _PLACEHOLDER.search(code), f"a placeholder is left in `{code}`"
        return code

    def next(self, anchor: str) -> Section:
        """Another section to which this one refers."""
        assert f"(#{anchor})" in self.text, f"docs/RUNBOOK.md#{self.anchor} does not refer to #{anchor}"
        return Section(anchor)

    def says(self, sentence: str) -> None:
        """For a step that is no command."""
        assert sentence in self.text, f"docs/RUNBOOK.md#{self.anchor} does not say {sentence!r}"
