"""A pytest plugin that imports tierd with edits of its source, and notes how each test ended.

It shows that a test of an attack fails without the defence. The edits reach the processes that tests fork, because
their server imports this module first. Processes that are a Python of their own are not edited. Without EDITS in the
environment the plugin only notes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import types
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest

ROOT = Path(__file__).parents[2]
EDITS, OUTCOMES = "EDITS_OF_SOURCE", "OUTCOMES_OF_TESTS"
DEADLINE = ("tests/support/waiting.py", "DEADLINE_S = 120.0", "DEADLINE_S = 12.0")


@dataclass(frozen=True, slots=True)
class Edit:
    """In the file `path` of the repository, `old`, which must be there exactly once, becomes `new`."""

    path: str
    old: str
    new: str

    def apply(self, source: str) -> str:
        assert source.count(self.old) == 1, f"{self.path}: {source.count(self.old)} times there: {self.old}"
        return source.replace(self.old, self.new)


class Outcome(msgspec.Struct, frozen=True):
    """How one phase of a test ended. `error` and `message`: of the exception, if there was one."""

    test: str
    when: str
    outcome: str
    error: str = ""
    message: str = ""


def run_tests(tests: Sequence[str], folder: Path, edits: Sequence[Edit] = (), *, stop_at_first: bool) -> list[Outcome]:
    """Runs tests by their ids in a pytest of its own, with the edits."""
    for edit in edits:
        edit.apply((ROOT / edit.path).read_text())
    outcomes = folder / "outcomes"
    changes = [[edit.path, edit.old, edit.new] for edit in edits]
    environ = {**os.environ, EDITS: json.dumps(changes), OUTCOMES: str(outcomes)}
    with TemporaryDirectory() as short:  # not below `folder`: the path of a socket has at most 107 bytes
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", __name__, f"--basetemp={short}/t"]
        command = [sys.executable, "-m", "pytest", *options, *(["-x"] if stop_at_first else []), *tests]
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert outcomes.exists(), f"no test began:\n{done.stdout}\n{done.stderr}"
    return [msgspec.json.decode(line, type=Outcome) for line in outcomes.read_bytes().splitlines()]


# ── in the pytest that runs them, and in the server of its processes ──


class _EditedSource(SourceFileLoader):
    """Compiles a module from its edited source, and neither reads nor writes a file of bytecode."""

    def __init__(self, name: str, path: str, edits: Sequence[Edit]) -> None:
        super().__init__(name, path)
        self._edits = edits

    def get_code(self, fullname: str) -> types.CodeType:
        source = Path(self.path).read_text()
        for edit in self._edits:
            source = edit.apply(source)
        return compile(source, self.path, "exec", dont_inherit=True)


class _EditedModules:
    def __init__(self, edits: Sequence[Edit]) -> None:
        self._edits = edits

    def find_spec(self, name: str, path: Any = None, target: object = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.origin is None:
            return None
        edits = [edit for edit in self._edits if str(ROOT / edit.path) == spec.origin]
        if not edits:
            return None
        return importlib.util.spec_from_file_location(name, spec.origin, loader=_EditedSource(name, spec.origin, edits))


def _edit_imports() -> None:
    edits = [Edit(*edit) for edit in json.loads(os.environ[EDITS])]
    assert not [name for name in sys.modules if name.split(".")[0] in ("tierd", "tierd_client")]
    sys.meta_path.insert(0, _EditedModules(edits))


if EDITS in os.environ:
    _edit_imports()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Before the first process: its server imports this module, and then what the tests import. Processes of another
    user can import nothing themselves, because Python may be in a folder that is closed to them."""
    from tests.support import processes

    modules = {
        item.module.__name__: item.module
        for item in session.items
        if isinstance(item, pytest.Function) and item.module is not None
    }
    is_all_needed = any(hasattr(module, "OtherUser") for module in modules.values())
    preloaded = ["tests.support.preloaded"] if is_all_needed else ["tierd.cli.app", "tierd.daemon"]
    processes.context.set_forkserver_preload([__name__, *preloaded, *modules])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    error = call.excinfo
    name, message = ("", "") if error is None else (error.typename, str(error.value)[:4000])
    outcome = Outcome(report.nodeid, report.when or "", report.outcome, name, message)
    with open(os.environ[OUTCOMES], "ab") as file:
        file.write(msgspec.json.encode(outcome) + b"\n")
    return report
