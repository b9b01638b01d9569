"""Each durable step of the daemon has a failpoint, each is at one place, and they do what $TIERD_FAILPOINTS says."""

from __future__ import annotations

import ast
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.test_house import SOURCES, _dotted, refuse, tree_of
from tierd import failpoints
from tierd.errors import BadConfig
from tierd.failpoints import FAILPOINTS, VARIABLE, arm, failpoint

DURABLE_CALLS = {
    *(f"os.{name}" for name in ("fsync", "fdatasync", "sync", "rename", "renames", "replace", "link", "symlink")),
    *(f"os.{name}" for name in ("unlink", "remove", "rmdir", "removedirs", "truncate", "ftruncate")),
    *(f"shutil.{name}" for name in ("rmtree", "move", "copy", "copy2", "copyfile", "copytree")),
    *(".unlink", ".rename", ".rmdir", ".write_text", ".write_bytes"),  # of pathlib.Path
    "tierd.tiers.tree.fsync_path",
    "fsync_path",
    "mmap.mmap",
    *(f"tierd.format.wire.{message}" for message in ("Welcome", "Accepted", "Persisted", "Replicated")),
}
DURABLE_REQUESTS = {
    "put_object",
    "create_multipart_upload",
    "upload_part",
    "complete_multipart_upload",
    "abort_multipart_upload",
    "delete_object",
    "delete_objects",
}

WITHOUT: dict[tuple[str, str], str] = {
    ("tierd/tiers/tree.py", "fsync_path"): "its callers have failpoints",
    ("tierd/tiers/tree.py", "Tree.sync_folders"): "repeats fsyncs of a former daemon",
    ("tierd/tiers/tree.py", "_sync_parent"): "repeats an fsync of a former daemon",
    ("tierd/transfer/memory_file.py", "MemoryFile.begin"): "memory, which ends with the daemon",
    ("tierd/tiers/direct_io.py", "page_aligned"): "a buffer, which nobody shares",
    ("tierd/tiers/tree.py", "Tree.continue_file"): "removes what is not ours and holds nothing of ours",
    ("tierd/tiers/tree.py", "Tree.remove_if_empty"): "an empty folder is as good as none",
    ("tierd/tiers/lock.py", "Lock.describe"): "describes the holder of the lock; the kernel holds the lock itself",
    ("tierd/api/packets.py", "open_listener"): "the socket of a dead daemon has no state",
    ("tierd/daemon.py", "_unlink"): "its own socket, which has no state",
    ("tierd/workers/write_through.py", "WriteThrough._write_to"): "the next daemon says it again: persist.answer",
    ("tierd/health/examiner.py", "Examiner._tell_trainers"): "the next daemon examines it and says it again",
    ("tierd/context.py", "DaemonContext.persisted"): "only makes the message: persist.answer, trainer.answer",
    ("tierd/keys/key_file.py", "make_key_file"): "a command: an incomplete key file is refused",
    ("tierd/workers/attached_runs.py", "_replace"): "decides nothing about checkpoints",
    ("tierd/audit.py", "*"): "says what happened and decides nothing: a torn line is cut off by the next append",
    ("tierd/cli/demo.py", "*"): "a command: its folder is its own",
    ("tierd/cli/demo_nodes.py", "*"): "the same",
    ("tierd/cli/cadence.py", "cadence"): "a command: the plot that a person asked for",
    (
        "tierd/transfer/adopted_output.py",
        "*",
    ): "below the temporary folder of an atomic output, which is published whole",
    ("tierd/cli/pivot.py", "_remove"): "a command: the file is archived, and the command can be repeated",
    ("tierd/cli/pivot.py", "_sync"): "the same",
    ("tierd/transfer/source_removal.py", "*"): "it is renamed first, and the next start deletes what is left",
    ("tierd/transfer/atomic_output.py", "*"): "commands only: tests/transfer/test_atomic_output.py kills them",
    ("tierd/tiers/probe.py", "write_rate"): "`tierd doctor`, which writes a temporary file of its own",
    ("tierd/s3/probe.py", "*"): "`tierd doctor`, which writes objects of its own",
}
"""(file, function) without a failpoint, or (file, "*"), and why none is needed."""


def functions(path: str) -> Iterator[tuple[str, list[ast.Call]]]:
    """Each function with the calls in its own body, without those of the functions in it."""

    def visit(node: ast.AST, name: str, calls: list[ast.Call]) -> Iterator[tuple[str, list[ast.Call]]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call):
                calls.append(child)
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                own: list[ast.Call] = calls if isinstance(child, ast.ClassDef) else []
                inner = child.name if name == "<module>" else f"{name}.{child.name}"
                yield from visit(child, inner, own)
                if own is not calls:
                    yield inner, own
            else:
                yield from visit(child, name, calls)

    of_module: list[ast.Call] = []
    yield from visit(tree_of(path), "<module>", of_module)
    yield "<module>", of_module


def imported_names(path: str) -> dict[str, str]:
    names: dict[str, str] = {}
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def called(call: ast.Call, names: dict[str, str]) -> str:
    if isinstance(call.func, ast.Name):
        return names.get(call.func.id, call.func.id)
    return _dotted(call.func, names) if isinstance(call.func, ast.Attribute) else ""


def is_durable(call: ast.Call, name: str) -> bool:
    texts = {argument.value for argument in call.args if isinstance(argument, ast.Constant)}
    return name in DURABLE_CALLS or bool(texts & DURABLE_REQUESTS)


def failpoint_of(call: ast.Call, name: str) -> str | None:
    """The failpoint that a call reaches; it must be written out, so that it can be searched for."""
    if name != "tierd.failpoints.failpoint":
        return None
    (argument,) = call.args
    assert isinstance(argument, ast.Constant)
    return str(argument.value)


DAEMON = [path for path in SOURCES if path.startswith("tierd/")]


def test_every_durable_step_has_a_failpoint() -> None:
    findings: list[str] = []
    needed: set[tuple[str, str]] = set()
    for path in DAEMON:
        names = imported_names(path)
        for function, calls in functions(path):
            durable = [call for call in calls if is_durable(call, called(call, names))]
            if not durable or any(failpoint_of(call, called(call, names)) for call in calls):
                continue
            for key in ((path, function), (path, "*")):
                if key in WITHOUT:
                    needed.add(key)
                    break
            else:
                findings += [f"{path}:{call.lineno} {called(call, names)} in {function}" for call in durable]
    refuse(findings, "durable steps without a failpoint in the same function:")
    assert WITHOUT.keys() == needed, "remove these from WITHOUT"


def test_each_failpoint_is_at_one_place() -> None:
    places: list[str] = []
    for path in DAEMON:
        names = imported_names(path)
        reached = [failpoint_of(call, called(call, names)) for _, calls in functions(path) for call in calls]
        places += [name for name in reached if name is not None]
    assert sorted(places) == sorted(FAILPOINTS)
    assert len(FAILPOINTS) >= 24


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("import os\ndef f(): os.rename(a, b)", True),
        ("from os import fsync\ndef f(): fsync(1)", True),
        ("def f(): path.unlink()", True),
        ("def f(): requests.request('complete_multipart_upload')", True),
        ("from tierd.format import wire\ndef f(): wire.Persisted()", True),
        ("import os\nfrom tierd.failpoints import failpoint\ndef f():\n failpoint('x')\n os.rename(a, b)", False),
        ("import os\nfrom tierd.failpoints import failpoint\ndef f():\n failpoint('x')\n def g(): os.fsync(1)", True),
        ("def f(): text.replace(a, b)", False),
    ],
)
def test_the_search_for_durable_steps_finds_them(source: str, is_found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tree_of.cache_clear()
    monkeypatch.setattr("tests.test_failpoints.tree_of", lambda path: ast.parse(path))
    names = imported_names(source)
    unprotected = [
        function
        for function, calls in functions(source)
        if any(is_durable(call, called(call, names)) for call in calls)
        and not any(failpoint_of(call, called(call, names)) for call in calls)
    ]
    assert bool(unprotected) is is_found


# ── what they do ──


@pytest.fixture(autouse=True)
def disarmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "_armed", {})


def test_without_the_variable_nothing_is_armed() -> None:
    arm({})
    for name in FAILPOINTS:
        failpoint(name)
    assert failpoints._armed == {}


def test_an_error_is_raised_at_the_given_hit_only() -> None:
    arm({VARIABLE: "file.sync=ENOSPC@2"})
    failpoint("file.sync")
    failpoint("file.link")
    with pytest.raises(OSError, match="No space left") as caught:
        failpoint("file.sync")
    assert caught.value.errno == errno.ENOSPC
    failpoint("file.sync")


def test_a_delay_sleeps_and_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    arm({VARIABLE: "file.sync=0.25@1 file.link=3@1"})
    failpoint("file.sync")
    failpoint("file.link")
    assert slept == [0.25, 3.0]


def test_a_kill_is_a_sigkill_of_this_process() -> None:
    reach = "failpoint('tier.commit')"
    code = f"from tierd.failpoints import arm, failpoint; arm(); {reach}; print('one'); {reach}"
    environ = {**os.environ, VARIABLE: "tier.commit=kill@2"}
    done = subprocess.run([sys.executable, "-uc", code], env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "one\n")


@pytest.mark.parametrize(
    "text", ["file.sink=kill@1", "file.sync", "file.sync=kill", "file.sync=kill@", "file.sync=EWHAT@1", "=kill@1"]
)
def test_what_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(BadConfig, match=VARIABLE):
        arm({VARIABLE: f"file.link=kill@1 {text}"})
