"""The table of what comes back exactly: one row for each `Row(…)` in tests/client/exactness, which tests prove.

The rows are read as source text, so that the site needs neither torch nor the tests' requirements.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from generators.links import ROOT
from generators.tables import cell, table

FOLDER = ROOT / "tests/client/exactness"
SUBJECTS = ("models", "optimizers", "schedulers", "averages", "stateful", "values", "ranks")

INTRODUCTION = """\
# What is exact, what is refused

This page is generated from the rows of `tests/client/exactness`. `test_row` in `tests/client/state/test_exactness.py`
proves each of them. tierd restores what a snapshot accepts bit for bit, with the same Python types. It refuses all
else at the first snapshot, and the message names the entry.

- *exact*: the restore on that number of ranks gives back what was saved. `2→1` means that two ranks saved the
  checkpoint and one restores it.
- *refused*: the first snapshot, or the construction of `TrainingState`, raises an error with this text.
- *Mismatch*: the snapshot is taken, but the restore on that number of ranks raises `Mismatch` with this text, and
  changes nothing.

`test_random_state_is_exact_or_refused` checks the same for random combinations. [What stays exact](../RESUME.md) covers
whole trainings.
"""


def page() -> str:
    parts = [INTRODUCTION]
    for subject in SUBJECTS:
        tree = ast.parse((FOLDER / f"{subject}.py").read_text(encoding="utf-8"))
        title = (ast.get_docstring(tree) or "").partition("\n")[0].rstrip(".")
        cells = [[cell(name), *_outcomes(outcome, on_fewer)] for name, outcome, on_fewer in _rows(tree)]
        head = ["state", "1→1", "2→2", "2→1"]
        if subject == "ranks":  # a single rank differs from no other
            head, cells = [head[0], *head[2:]], [[row[0], *row[2:]] for row in cells]
        parts += [f"## {title}\n", table(head, cells), ""]
    return "\n".join(parts)


def rows() -> Iterator[tuple[str, str]]:
    """(subject, name) of each row."""
    for subject in SUBJECTS:
        tree = ast.parse((FOLDER / f"{subject}.py").read_text(encoding="utf-8"))
        yield from ((subject, name) for name, _, _ in _rows(tree))


def _rows(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """(name, outcome, message on fewer ranks) of each Row; the outcome is empty when it is exact."""
    constants = {
        target.id: str(node.value.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset)):
        if not isinstance(call.func, ast.Name) or call.func.id != "Row":
            continue
        texts = [
            argument.value if isinstance(argument, ast.Constant) else constants.get(ast.unparse(argument), "")
            for argument in call.args
        ]
        yield texts[0], texts[1], texts[3] if len(texts) > 3 else ""


def _outcomes(message: str, on_fewer: str) -> list[str]:
    if message:
        return [f"refused: {_quoted(message)}"] * 3
    return ["exact", "exact", f"Mismatch: {_quoted(on_fewer)}" if on_fewer else "exact"]


def _quoted(message: str) -> str:
    return f"“{cell(message)}”"
