"""The house itself: floors, one door per outside thing, names, and the promises that only the source can show.

Each door says who may pass and why. To open one wider, add the file here with its reason; an allowance that
nothing uses any more fails too.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tierd import metrics

ROOT = Path(__file__).parents[1]
SOURCES = {
    path.relative_to(ROOT).as_posix(): path
    for folder in ("tierd", "client")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
TESTS = {path.relative_to(ROOT / "tests").as_posix(): path for path in sorted((ROOT / "tests").rglob("test_*.py"))}
LINES_MAX = 500  # near 400 a second noun has usually appeared


# ── doors ──


@dataclass(frozen=True, kw_only=True)
class Door:
    """`modules`: imports of them or of anything below. `names`: dotted names, or `.method` on any object."""

    modules: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    files: Mapping[str, str] = field(default_factory=dict[str, str])


DOORS = {
    "S3": Door(
        modules=frozenset({"boto3", "botocore", "s3transfer"}),
        files={"tierd/s3/client.py": "one attempt of a request"},
    ),
    "durable file system changes": Door(
        names=frozenset({"os.fsync", "os.fdatasync", "os.sync", "os.rename", "os.renames", "os.replace", ".rename"}),
        files={
            "tierd/tiers/directory.py": "the store",
            "tierd/transfer/atomic_output.py": "a restored directory appears by one rename",
            "tierd/transfer/partial_file.py": "what is fetched over several lives",
        },
    ),
    "metrics": Door(modules=frozenset({"prometheus_client"}), files={"tierd/metrics.py": "declares them all"}),
    "HTTP server": Door(
        modules=frozenset({"aiohttp"}),
        files={"tierd/api/operator.py": "the routes", "tierd/daemon.py": "opens and closes it"},
    ),
    "sockets": Door(
        modules=frozenset({"socket"}),
        files={
            "tierd/api/packets.py": "the trainers' socket",
            "tierd/api/trainer.py": "accepts on it",
            "tierd/api/operator_socket.py": "the CLI's side of it",
            "tierd/config.py": "gethostname only",
            "tierd/daemon.py": "sd_notify",
            "tierd/s3/client.py": "cuts a connection that makes no progress",
            "client/tierd_client/session.py": "the trainer's side",
        },
    ),
    "memory that is mapped": Door(
        modules=frozenset({"mmap"}),
        names=frozenset({"os.memfd_create"}),
        files={
            "tierd/memory/slot.py": "the slots of trainers",
            "tierd/tiers/direct_io.py": "buffers aligned for O_DIRECT",
            "tierd/api/handover.py": "a manifest's bytes travel as a descriptor",
            "client/tierd_client/snapshot/slot.py": "makes the slots",
        },
    ),
    "the watch on a directory": Door(
        modules=frozenset({"watchdog"}), files={"tierd/tiers/watch.py": "a hint from the kernel"}
    ),
    "signals": Door(
        modules=frozenset({"signal"}),
        files={
            "tierd/daemon.py": "SIGTERM drains, SIGHUP reads the config anew",
            "tierd/cli/app.py": "SIGTERM ends a verb as Ctrl-C does",
            "tierd/health/program.py": "it ends with the daemon",
            "client/tierd_client/stopping/requests.py": "a stop request becomes client.stopping",
        },
    ),
    "tasks": Door(
        names=frozenset({"asyncio.TaskGroup", "asyncio.ensure_future", ".create_task"}),
        files={
            "tierd/daemon.py": "the one TaskGroup that lasts",
            "tierd/api/trainer.py": "what one conversation starts ends with it",
            "tierd/tiers/pool.py": "the pieces of one copy end with it",
        },
    ),
    "event loops": Door(
        names=frozenset({"asyncio.run", "asyncio.new_event_loop", "asyncio.Runner"}),
        files={
            "tierd/daemon.py": "serve",
            "tierd/cli/doctor.py": "a verb that looks at tiers itself",
            "tierd/cli/drill.py": "a verb that looks at tiers itself",
            "tierd/cli/export.py": "a verb that looks at tiers itself",
            "tierd/cli/lifecycle.py": "a verb that looks at tiers itself",
            "tierd/cli/ls.py": "a verb that looks at tiers itself",
            "tierd/cli/milestone.py": "a verb that looks at tiers itself",
            "tierd/cli/restore.py": "a verb that looks at tiers itself",
            "tierd/cli/show.py": "a verb that looks at tiers itself",
            "tierd/cli/status.py": "a verb that looks at tiers itself",
            "tierd/cli/verify.py": "a verb that looks at tiers itself",
        },
    ),
    "the environment": Door(
        names=frozenset({"os.environ", "os.getenv", "os.putenv", "os.environb"}),
        files={
            "tierd/config.py": "TIERD_SECTION_KEY, and systemd's NOTIFY_SOCKET",
            "client/tierd_client/client.py": "TIERD_SOCKET and the like, and what launchers set for a rank",
            "client/tierd_client/frameworks/transformers.py": "TIERD_RESUME may be a path",
        },
    ),
    "the wall clock": Door(
        names=frozenset({"time.time", "time.time_ns", "datetime.datetime.now", "datetime.datetime.utcnow"}),
        files={
            "tierd/daemon.py": "hands `now` to the rooms",
            "tierd/cli/console.py": "ages, for people",
            "tierd/cli/doctor.py": "compared with a bucket's clock",
            "tierd/cli/milestone.py": "when a marker was set",
            "client/tierd_client/snapshot/snapshotter.py": "created_at of a snapshot",
            "client/tierd_client/client.py": "how much time there is until a deadline",
            "client/tierd_client/stopping/requests.py": "how much is left of it",
        },
    ),
    "other processes": Door(
        modules=frozenset({"subprocess", "multiprocessing"}),
        names=frozenset({"asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell"}),
        files={
            "tierd/cli/demo.py": "it runs real ones",
            "tierd/cli/export.py": "torch writes its own formats",
            "tierd/health/examiner.py": "the look for NaN is a process of its own",
        },
    ),
    "numpy": Door(
        modules=frozenset({"numpy"}),
        files={path: "the client" for path in SOURCES if path.startswith("client/")}
        | {"tierd/health/program.py": "looks for NaN, in a process of its own"},
    ),
    "the terminal": Door(
        modules=frozenset({"typer", "click", "rich"}),
        files={path: "an operator's verb" for path in SOURCES if path.startswith("tierd/cli/")},
    ),
}
LOOSE = {"the terminal", "numpy"}  # a room, not a list: not every file of it must use it

NEVER = {
    "pickle": "runs code from bytes",
    "_pickle": "runs code from bytes",
    "cloudpickle": "runs code from bytes",
    "dill": "runs code from bytes",
    "marshal": "is a format of no one version",
    "shelve": "is pickle in a file",
    "torch.load": "unpickles",
    "torch.save": "pickles",
    "sqlite3": "manifests and listings are the truth",
}


EXCEPT = {"client/tierd_client/export.py": "torch.save"}  # a file for other tools, on somebody's word: decision 30


@functools.cache
def tree_of(path: str) -> ast.Module:
    return ast.parse(SOURCES[path].read_text(encoding="utf-8"), path)


@functools.cache
def uses(path: str) -> tuple[tuple[str, int], ...]:
    """(dotted name, line) of every import and of every attribute, import aliases resolved."""
    return tuple(_uses(tree_of(path)))


def _uses(tree: ast.Module) -> Iterator[tuple[str, int]]:
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                known[one.asname or one.name.partition(".")[0]] = one.name if one.asname else one.name.partition(".")[0]
                yield one.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for one in node.names:
                known[one.asname or one.name] = f"{node.module}.{one.name}"
                yield f"{node.module}.{one.name}", node.lineno
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield _dotted(node, known), node.lineno


def _dotted(node: ast.Attribute, known: Mapping[str, str]) -> str:
    """`os.path.join` for what was imported; `.join` for a method of anything else."""
    parts = [node.attr]
    inner = node.value
    while isinstance(inner, ast.Attribute):
        parts.append(inner.attr)
        inner = inner.value
    if isinstance(inner, ast.Name) and inner.id in known:
        return ".".join([known[inner.id], *reversed(parts)])
    return f".{node.attr}"


def passes(door: Door, name: str) -> bool:
    in_module = any(name == module or name.startswith(module + ".") for module in door.modules)
    methods = {one for one in door.names if one.startswith(".")}
    is_method = any(name.endswith(one) for one in methods)
    return in_module or name in door.names or is_method


def refuse(found: list[str], why: str) -> None:
    """Fails with one finding a line, so that nothing of the list is cut off."""
    if found:
        pytest.fail("\n".join([why, *(f"  {one}" for one in found)]), pytrace=False)


@pytest.mark.parametrize("name", DOORS)
def test_outside_thing_has_one_door(name: str) -> None:
    door = DOORS[name]
    found = [
        f"{path}:{line} uses {used}"
        for path in SOURCES
        if path not in door.files
        for used, line in uses(path)
        if passes(door, used)
    ]
    refuse(found, f"the door for {name} is {', '.join(door.files)}, not:")


@pytest.mark.parametrize("name", [name for name in DOORS if name not in LOOSE])
def test_no_door_is_open_for_a_file_that_does_not_use_it(name: str) -> None:
    door = DOORS[name]
    unused = [
        path for path in door.files if path not in SOURCES or not any(passes(door, used) for used, _ in uses(path))
    ]
    refuse(unused, f"take out of the door for {name}:")


@pytest.mark.parametrize("banned", NEVER)
def test_never_used_anywhere(banned: str) -> None:
    door = Door(modules=frozenset({banned}))
    found = [
        f"{path}:{line}"
        for path in SOURCES
        for used, line in uses(path)
        if passes(door, used) and EXCEPT.get(path) != banned
    ]
    refuse(found, f"{banned} {NEVER[banned]}:")


TRANSFER_MANAGER = re.compile(
    r"(s3transfer|boto3\.s3)\b|\b(TransferConfig|S3Transfer|(upload|download)_(file|fileobj))$"
)


def test_the_transfer_manager_of_boto3_is_never_used() -> None:
    """On GPU nodes it takes another client by itself: one that ignores endpoint_url, with buffers of up to 24 GiB."""
    named = [(path, used, line) for path in SOURCES for used, line in uses(path)]
    named += [
        (path, node.value, node.lineno)
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)  # an operation may be named by a string
    ]
    refuse([f"{path}:{line} {used}" for path, used, line in named if TRANSFER_MANAGER.search(used)], "use our own:")
    assert TRANSFER_MANAGER.search("boto3.s3.transfer.TransferConfig")
    assert TRANSFER_MANAGER.search(".upload_file")


def test_checks_see_through_aliases() -> None:
    source = (
        "import os as o\nfrom datetime import datetime as d\nfrom os import replace\no.fsync(1)\nd.now()\nx.y.rename(z)"
    )
    found = {name for name, _ in _uses(ast.parse(source))}
    assert {"os.fsync", "datetime.datetime.now", "os.replace", ".rename"} <= found


# ── imports: the contracts of [tool.importlinter] are checked by `make lint` ──


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("tierd.daemon", ["torch", "numpy", "typer", "tierd_client"]),
        ("tierd.cli", ["torch", "numpy", "tierd_client", "boto3"]),
        ("tierd.format.wire", ["torch", "boto3", "aiohttp", "asyncio"]),
        ("tierd_client", ["boto3", "botocore", "aiohttp", "typer", "prometheus_client", "tierd.config", "tierd.tiers"]),
        ("tierd_client.frameworks", ["transformers", "accelerate", "lightning", "torchdata"]),
    ],
)
def test_importing_brings_no_more_than_it_needs(module: str, unwanted: list[str]) -> None:
    done = run([sys.executable, "-c", f"import {module}, sys; print(*sorted(set({unwanted!r}) & set(sys.modules)))"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'client'}"}
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=100, check=False)


# ── names and shapes ──

BANNED_FILES = {"utils", "common", "helpers", "core", "base", "misc", "manager", "handler", "data", "info", "process"}


def test_no_file_has_a_name_that_says_nothing() -> None:
    named = {path: {*Path(path).parts[:-1], Path(path).stem} for path in SOURCES}
    named |= {f"tests/{name}": {Path(name).stem.removeprefix("test_")} for name in TESTS}
    assert [path for path, words in named.items() if words & BANNED_FILES] == []


def test_no_function_or_class_has_a_name_that_says_nothing() -> None:
    found = [
        f"{path}:{node.lineno} {node.name}"
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and re.match(r"_*do_|.*_impl$|.*(Manager|Handler|Helper|Utils?|Info)$", node.name)
    ]
    refuse(found, "names that say nothing:")


@pytest.mark.parametrize("path", SOURCES)
def test_file_says_what_it_is_and_holds_one_noun(path: str) -> None:
    docstring = ast.get_docstring(tree_of(path))
    assert docstring, "a file opens with what it is, what it promises, what it leaves to others"
    assert len(docstring.splitlines()) <= 12, "the docstring of a file is a few lines"
    lines = len(SOURCES[path].read_text(encoding="utf-8").splitlines())
    assert lines <= LINES_MAX, f"{lines} lines: is there a second noun in it?"


def test_rooms_are_two_levels_deep_at_most() -> None:
    deep = [path for path in SOURCES if len(Path(path.removeprefix("client/")).parts) > 3]
    assert deep == []


# ── tests mirror the code ──

TESTED_THROUGH: dict[str, str] = {
    "client/tierd_client/generation.py": "client/test_client.py",
    "tierd/cold_tier.py": "tiers/test_tier.py",
    # The verbs are tested as people run them, in a process.
    "tierd/cli/selection.py": "cli/test_restore.py",
    "tierd/cli/console.py": "cli/test_ls.py",
    "tierd/cli/memory_store.py": "cli/test_serve.py",
    "tierd/cli/lifecycle.py": "cli/test_verbs.py",
    "tierd/cli/milestone.py": "cli/test_verbs.py",
    "tierd/cli/options.py": "cli/test_verbs.py",
    "tierd/cli/partial_restore.py": "cli/test_restore_cold.py",
    "tierd/cli/replicas.py": "cli/test_restore.py",
    "tierd/cli/show.py": "cli/test_verbs.py",
    "tierd/cli/snapshot.py": "cli/test_stop.py",
    "tierd/cli/status.py": "cli/test_ls.py",
    "tierd/cli/version.py": "cli/test_verbs.py",
    "tierd/tiers/advice.py": "cli/test_doctor.py",
}
"""A module with no test file at its mirrored place and that no test imports: the test file that exercises it."""


def imported_by_tests() -> set[str]:
    found: set[str] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        for name, _ in _uses(ast.parse(path.read_text(encoding="utf-8"))):
            found.add(name)
            found.add(name.rpartition(".")[0])
    return found


def mirrored(path: str) -> str:
    """Where its test file is: tierd/s3/upload.py → s3/test_upload.py, client/tierd_client/x.py → client/test_x.py."""
    parts = Path(path).parts
    room = ("client", *parts[2:-1]) if parts[0] == "client" else parts[1:-1]
    return "/".join((*room, f"test_{parts[-1]}"))


def test_every_module_has_its_tests() -> None:
    """A test file at its mirrored place, or a test that imports it, or a line in TESTED_THROUGH."""
    imported = imported_by_tests()
    missing: list[str] = []
    for path in SOURCES:
        parts = Path(path).with_suffix("").parts
        module = ".".join(parts[1:] if parts[0] == "client" else parts)
        names = {mirrored(path), TESTED_THROUGH.get(path, "")}
        if not (parts[-1].startswith("__") or names & set(TESTS) or module in imported):
            missing.append(path)
    refuse(missing, "no test file of that name, and no test imports it:")


def test_list_of_modules_tested_through_others_is_true() -> None:
    assert [path for path, name in TESTED_THROUGH.items() if path not in SOURCES or name not in TESTS] == []


# ── what the source promises elsewhere ──


PRESET = {"outcome": metrics.SNAPSHOT_OUTCOMES, "direction": metrics.DIRECTIONS, "stage": metrics.STAGES}


def test_every_label_value_that_the_code_writes_begins_at_zero() -> None:
    """A series that appears with its first failure is one whose first failure no alert sees."""
    strange: list[str] = []
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                for label, value in label_values(node):
                    if value not in PRESET[label]:
                        strange.append(f"{path}:{node.lineno} {label}={value!r}")
    refuse(strange, "add it to the constants of tierd/metrics.py:")


def label_values(call: ast.Call) -> Iterator[tuple[str, str]]:
    """What `.labels(outcome="x")` and `incidents.record("stage", …)` write."""
    assert isinstance(call.func, ast.Attribute)
    if call.func.attr == "labels":
        for keyword in call.keywords:
            if keyword.arg in PRESET and isinstance(keyword.value, ast.Constant):
                yield keyword.arg, str(keyword.value.value)
    if call.func.attr == "record" and call.args and isinstance(call.args[0], ast.Constant):
        yield "stage", str(call.args[0].value)
