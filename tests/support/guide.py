"""Sections of docs/guides as a test follows them: every command of a section is run as it is written there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

from typer.testing import CliRunner

from tierd.cli.app import called, make_app

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
PLACEHOLDER = re.compile(r"\b(RUN|STEP|FOLDER|DIR|HOT|BUCKET|PREFIX|NEW|AT|TIME|NEWNAME|KEY|FILE)\b")


class Section:
    """`title`: of the section, or "" for what is above the first one. `values`: of the placeholders."""

    def __init__(self, page: str, title: str, environ: dict[str, str], **values: object) -> None:
        text = "## \n" + (GUIDES / f"{page}.md").read_text(encoding="utf-8")
        (self._text,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
        found = re.findall(r"^```sh\n(.*?)^```$", self._text, re.DOTALL | re.MULTILINE)
        self._left = [line.partition("   #")[0].rstrip() for block in found for line in block.splitlines()]
        self._environ = {**os.environ, **environ}
        self.values = {name: str(value) for name, value in values.items()}

    def run_next(self, beginning: str, *, expected: int = 0) -> str:
        """The next command of a block. Its output."""
        command = self._left.pop(0)
        assert command.startswith(beginning)
        return self._run(command, expected)

    def run_in_prose(self, command: str) -> str:
        assert f"`{command}`" in self._text
        return self._run(command, 0)

    def replaces(self, beginning: str) -> None:
        """The next command is one that a test does in another way."""
        assert self._left.pop(0).startswith(beginning)

    def assert_done(self) -> None:
        assert self._left == []

    def _run(self, command: str, expected: int) -> str:
        command = PLACEHOLDER.sub(lambda match: self.values[match[0]], command)
        program, *words = shlex.split(command)
        if program == "tierd":
            result = CliRunner().invoke(make_app(called(words)), words, env=self._environ)
            code, output = result.exit_code, result.output
        else:
            done = subprocess.run(
                ["bash", "-c", command], env=self._environ, capture_output=True, text=True, timeout=120, check=False
            )
            code, output = done.returncode, done.stdout + done.stderr
        assert code == expected, f"{command}: {output}"
        return output
