"""Rules about the source itself: import floors, which files may use an external facility, names, and file sizes.

A door lists the files that may use a facility, each with its reason. To allow another file, add it here. A file that
no longer uses the facility must be removed from the list.
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
from prometheus_client import CollectorRegistry

from tierd import metrics

ROOT = Path(__file__).parents[1]
SOURCES = {
    path.relative_to(ROOT).as_posix(): path
    for folder in ("tierd", "client")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
TESTS = {path.relative_to(ROOT / "tests").as_posix(): path for path in sorted((ROOT / "tests").rglob("test_*.py"))}
LINES_MAX = 500  # a file near 400 lines usually has two subjects


# ── doors ──


@dataclass(frozen=True, kw_only=True)
class Door:
    """`modules`: imports of them or of their submodules. `names`: dotted names, or `.method` of any object."""

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
            "tierd/tiers/new_file.py": "a put: written, fsynced, renamed",
            "tierd/tiers/tree.py": "new folders and deletions",
            "tierd/keys/key_file.py": "a new key file",
            "tierd/audit.py": "events of the audit trail",
            "tierd/workers/attached_runs.py": "the record of runs with trainers",
            "tierd/transfer/atomic_output.py": "a restored directory appears by one rename",
            "tierd/transfer/partial_file.py": "what is fetched over several lives",
            "tierd/transfer/adopted_output.py": "the folder of another program",
            "tierd/transfer/source_removal.py": "what was adopted, where the config says so",
            "tierd/tiers/probe.py": "a temporary file, to measure the disk",
        },
    ),
    "file system changes": Door(
        names=frozenset(
            {
                *(
                    "os.mkdir",
                    "os.makedirs",
                    "os.unlink",
                    "os.remove",
                    "os.rmdir",
                    "os.removedirs",
                    "os.link",
                    "os.symlink",
                ),
                *("os.write", "os.writev", "os.pwrite", "os.pwritev", "os.truncate", "os.ftruncate", "os.mknod"),
                *(
                    ".mkdir",
                    ".touch",
                    ".unlink",
                    ".rmdir",
                    ".symlink_to",
                    ".hardlink_to",
                    ".write_bytes",
                    ".write_text",
                ),
                *("shutil.rmtree", "shutil.move", "shutil.copy", "shutil.copyfile", "shutil.copytree"),
            }
        ),
        files={
            "tierd/keys/key_file.py": "a new key file",
            "tierd/audit.py": "appends to the audit trail, and rotates it",
            "tierd/workers/attached_runs.py": "the record of runs with trainers",
            "tierd/tiers/new_file.py": "a put",
            "tierd/tiers/tree.py": "folders and deletions",
            "tierd/tiers/directory.py": "removes what killed puts left",
            "tierd/tiers/direct_io.py": "writes of a put or a fetch",
            "tierd/tiers/lock.py": "describes the holder of a lock",
            "tierd/tiers/cache.py": "makes the folder of a cache",
            "tierd/transfer/atomic_output.py": "a restored directory",
            "tierd/transfer/partial_file.py": "a fetch",
            "tierd/transfer/memory_file.py": "a fetch into a memfd",
            "tierd/transfer/adopted_output.py": "the folder of another program",
            "tierd/transfer/source_removal.py": "what was adopted, where the config says so",
            "tierd/api/packets.py": "the socket and its folder",
            "tierd/daemon.py": "removes its socket",
            "tierd/descriptors.py": "content is sent in a memfd",
            "tierd/cli/cadence.py": "the plot that a person asked for",
            "tierd/cli/pivot.py": "deletes the files of a phase that it has archived",
            "tierd/cli/demo.py": "the demo's own folder",
            "tierd/cli/demo_nodes.py": "the same",
            "tierd/cli/demo_run.py": "the same",
            "client/tierd_client/slots/slot.py": "the size of a memfd",
            "client/tierd_client/stopping/requests.py": "removes the stop file",
            "client/tierd_client/examples/train_gpt.py": "the example's own files",
        },
    ),
    "metrics": Door(modules=frozenset({"prometheus_client"}), files={"tierd/metrics.py": "declares all metrics"}),
    "HTTP": Door(
        modules=frozenset({"aiohttp"}),
        files={
            "tierd/api/operator.py": "the routes",
            "tierd/api/web_pages.py": "the routes of the status pages",
            "tierd/api/http_server.py": "opens and closes it",
            "tierd/api/port_occupant.py": "asks what has its port",
            "tierd/api/peer_parts.py": "the route for other nodes",
            "tierd/tiers/peer_store.py": "reads from other nodes",
        },
    ),
    "sockets": Door(
        modules=frozenset({"socket"}),
        files={
            "tierd/api/packets.py": "the trainers' socket",
            "tierd/api/trainer.py": "accepts on it",
            "tierd/api/operator_socket.py": "the CLI's side of it",
            "tierd/config/file.py": "gethostname only",
            "tierd/systemd.py": "sd_notify",
            "tierd/cli/demo_nodes.py": "a free port for torch.distributed",
            "tierd/peer.py": "the user at the other end",
            "tierd/s3/client.py": "cuts a connection that makes no progress",
            "tierd/descriptors.py": "passes descriptors with a packet",
            "client/tierd_client/session.py": "the trainer's side",
        },
    ),
    "mapped memory": Door(
        modules=frozenset({"mmap"}),
        names=frozenset({"os.memfd_create"}),
        files={
            "tierd/memory/slot.py": "the slots of trainers",
            "tierd/tiers/direct_io.py": "buffers aligned for O_DIRECT",
            "tierd/descriptors.py": "a manifest is sent in a memfd",
            "tierd/transfer/memory_file.py": "what hot does not take is fetched into a memfd",
            "tierd/keys/peer_certificate.py": "ssl reads the private key from a file",
            "client/tierd_client/slots/slot.py": "creates the slots",
        },
    ),
    "directory events": Door(modules=frozenset({"watchdog"}), files={"tierd/tiers/watch.py": "inotify"}),
    "signals": Door(
        modules=frozenset({"signal"}),
        files={
            "tierd/daemon.py": "SIGTERM drains, SIGHUP reloads the config",
            "tierd/failpoints.py": "SIGKILL at a failpoint of a test",
            "tierd/cli/app.py": "SIGTERM ends a command like Ctrl-C",
            "tierd/health/finiteness.py": "its process ends with the daemon",
            "tierd/cli/torch_import.py": "the name of the signal that ended torch's process",
            "client/tierd_client/stopping/requests.py": "a stop request becomes client.stopping",
        },
    ),
    "tasks": Door(
        names=frozenset({"asyncio.TaskGroup", "asyncio.ensure_future", ".create_task"}),
        files={
            "tierd/daemon.py": "the daemon's TaskGroup",
            "tierd/api/trainer.py": "the tasks of one connection",
            "tierd/api/http_server.py": "the TLS handshake of one connection",
            "tierd/tiers/node_parts.py": "asks many nodes at once",
            "tierd/workers/roster_reader.py": "one answer for all who ask",
            "tierd/tiers/pool.py": "the pieces of one copy",
            "tierd/transfer/drill.py": "a thread that goes on after a cancellation",
            "tierd/workers/write_through.py": "the copies of one snapshot to the cold tiers",
            "tierd/workers/part_copier.py": "a copy that ends when the trainers tell another partner",
        },
    ),
    "event loops": Door(
        names=frozenset({"asyncio.run", "asyncio.new_event_loop", "asyncio.Runner"}),
        files={
            "tierd/daemon.py": "serve",
            "tierd/cli/app.py": "the verbs that are coroutines",
        },
    ),
    "the environment": Door(
        names=frozenset({"os.environ", "os.getenv", "os.putenv", "os.environb"}),
        files={
            "tierd/config/file.py": "TIERD_CONFIG, and what systemd passes to a service",
            "tierd/config/environment.py": "TIERD_SECTION_KEY",
            "tierd/failpoints.py": "which failpoints a test has armed",
            "client/tierd_client/connection.py": "TIERD_SOCKET and the like, and what launchers set for a rank",
            "client/tierd_client/frameworks/transformers.py": "TIERD_RESUME may be a path",
            "client/tierd_client/examples/train_gpt.py": "CUBLAS_WORKSPACE_CONFIG, for deterministic CUDA",
            "tierd/cli/demo_run.py": "its processes do not inherit TIERD_ settings",
        },
    ),
    "the wall clock": Door(
        names=frozenset({"time.time", "time.time_ns", "datetime.datetime.now", "datetime.datetime.utcnow"}),
        files={
            "tierd/context.py": "the clock that workers are given",
            "tierd/catalog/listing.py": "minutes since 1970 bound what a forged generation may be",
            "tierd/cli/console.py": "hands `now` to the verbs",
            "client/tierd_client/snapshot/snapshotter.py": "created_at of a snapshot",
            "client/tierd_client/connection.py": "how much time there is until a deadline",
            "client/tierd_client/stopping/requests.py": "how much is left of it",
        },
    ),
    "other processes": Door(
        modules=frozenset({"subprocess", "multiprocessing"}),
        names=frozenset({"asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell"}),
        files={
            "tierd/cli/demo_run.py": "runs trainers and daemons",
            "tierd/cli/export.py": "torch writes its own formats",
            "tierd/cli/torch_import.py": "torch reads its own formats",
            "tierd/health/examiner.py": "counts NaN in a separate process",
        },
    ),
    "numpy": Door(
        modules=frozenset({"numpy"}),
        files={path: "the client" for path in SOURCES if path.startswith("client/")}
        | {
            "tierd/health/finiteness.py": "counts NaN in a separate process",
            "tierd/cli/tensor_numbers.py": "compares two tensors; only `tierd diff` imports it",
        },
    ),
    "the terminal": Door(
        modules=frozenset({"typer", "click", "rich"}),
        files={path: "a command" for path in SOURCES if path.startswith("tierd/cli/")},
    ),
}
ROOM_DOORS = {"the terminal", "numpy"}  # all files of a room: not every file must use it

NEVER = {
    "pickle": "executes code from bytes",
    "_pickle": "executes code from bytes",
    "cloudpickle": "executes code from bytes",
    "dill": "executes code from bytes",
    "marshal": "has no stable format",
    "shelve": "is pickle in a file",
    "torch.load": "unpickles",
    "torch.save": "pickles",
    "sqlite3": "manifests and listings are the only record",
}


EXCEPT = {
    "client/tierd_client/export.py": "torch.save",  # for other tools, requested by name: decision 30
    "client/tierd_client/torch_import.py": "torch.load",  # weights_only, in a process of its own: decision 71
}


@functools.cache
def tree_of(path: str) -> ast.Module:
    return ast.parse(SOURCES[path].read_text(encoding="utf-8"), path)


@functools.cache
def uses(path: str) -> tuple[tuple[str, int], ...]:
    """(dotted name, line) of every import and every attribute, with import aliases resolved."""
    return tuple(_uses(tree_of(path)))


def _uses(tree: ast.Module) -> Iterator[tuple[str, int]]:
    known: dict[str, str] = {}
    attributes: list[ast.Attribute] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                known[alias.asname or top] = alias.name if alias.asname else top
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}", node.lineno
        elif isinstance(node, ast.Attribute):
            attributes.append(node)
    for node in attributes:
        yield _dotted(node, known), node.lineno


def _dotted(node: ast.Attribute, known: Mapping[str, str]) -> str:
    """`os.path.join` for an attribute of an import; `.join` for a method of any other object."""
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
    is_method = any(name.endswith(method) for method in door.names if method.startswith("."))
    return in_module or name in door.names or is_method


def refuse(findings: list[str], why: str) -> None:
    """Fail with one finding per line; pytest would cut off a long list."""
    if findings:
        pytest.fail("\n".join([why, *(f"  {finding}" for finding in findings)]), pytrace=False)


@pytest.mark.parametrize("name", DOORS)
def test_an_external_facility_is_used_only_by_the_files_of_its_door(name: str) -> None:
    door = DOORS[name]
    findings = [
        f"{path}:{line} uses {used}"
        for path in SOURCES
        if path not in door.files
        for used, line in uses(path)
        if passes(door, used)
    ]
    refuse(findings, f"{name}: only {', '.join(door.files)} may use it, not:")


@pytest.mark.parametrize("name", [name for name in DOORS if name not in ROOM_DOORS])
def test_every_file_of_a_door_uses_it(name: str) -> None:
    door = DOORS[name]
    unused = [
        path for path in door.files if path not in SOURCES or not any(passes(door, used) for used, _ in uses(path))
    ]
    refuse(unused, f"{name}: remove these files from its door:")


@pytest.mark.parametrize("banned", NEVER)
def test_a_banned_module_is_never_used(banned: str) -> None:
    door = Door(modules=frozenset({banned}))
    findings = [
        f"{path}:{line}"
        for path in SOURCES
        for used, line in uses(path)
        if passes(door, used) and EXCEPT.get(path) != banned
    ]
    refuse(findings, f"{banned} {NEVER[banned]}:")


TRANSFER_MANAGER = re.compile(
    r"(s3transfer|boto3\.s3)\b|\b(TransferConfig|S3Transfer|(upload|download)_(file|fileobj))$"
)


def test_the_transfer_manager_of_boto3_is_never_used() -> None:
    """On GPU nodes it uses another client, which ignores endpoint_url and has buffers of up to 24 GiB."""
    named = [(path, used, line) for path in SOURCES for used, line in uses(path)]
    named += [
        (path, node.value, node.lineno)
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)  # an operation may be named in a string
    ]
    refuse(
        [f"{path}:{line} {used}" for path, used, line in named if TRANSFER_MANAGER.search(used)],
        "use tierd's own uploads:",
    )
    assert TRANSFER_MANAGER.search("boto3.s3.transfer.TransferConfig")
    assert TRANSFER_MANAGER.search(".upload_file")


def test_import_aliases_are_resolved() -> None:
    source = (
        "import os as o\nfrom datetime import datetime as d\nfrom os import replace\no.fsync(1)\nd.now()\nx.y.rename(z)"
    )
    names = {name for name, _ in _uses(ast.parse(source))}
    assert {"os.fsync", "datetime.datetime.now", "os.replace", ".rename"} <= names


# ── imports: the contracts of [tool.importlinter] are checked by `make lint` ──


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("tierd.daemon", ["torch", "numpy", "typer", "tierd_client"]),
        ("tierd.cli", ["torch", "numpy", "tierd_client", "boto3"]),
        ("tierd.format.wire", ["torch", "boto3", "aiohttp", "asyncio"]),
        (
            "tierd_client.frameworks",  # imports tierd_client
            [
                *("boto3", "botocore", "aiohttp", "typer", "prometheus_client", "tierd.config", "tierd.tiers"),
                *("transformers", "accelerate", "lightning", "torchdata"),
            ],
        ),
    ],
)
def test_importing_a_module_does_not_import_unneeded_ones(module: str, unwanted: list[str]) -> None:
    done = run([sys.executable, "-c", f"import {module}, sys; print(*sorted(set({unwanted!r}) & set(sys.modules)))"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'client'}"}
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=100, check=False)


# ── names and sizes ──

BANNED_FILES = {"utils", "common", "helpers", "core", "base", "misc", "manager", "handler", "data", "info", "process"}


def test_no_file_has_a_vague_name() -> None:
    named = {path: {*Path(path).parts[:-1], Path(path).stem} for path in SOURCES}
    named |= {f"tests/{name}": {Path(name).stem.removeprefix("test_")} for name in TESTS}
    assert [path for path, words in named.items() if words & BANNED_FILES] == []


def test_no_function_or_class_has_a_vague_name() -> None:
    findings = [
        f"{path}:{node.lineno} {node.name}"
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and re.match(r"_*do_|.*_impl$|.*(Manager|Handler|Helper|Utils?|Info)$", node.name)
    ]
    refuse(findings, "vague names:")


SAME_NAME = {"TierdCallback": "users import it from the room of their framework, Lightning or Transformers"}


def test_no_two_public_classes_have_the_same_name() -> None:
    """Else a reader, and a search, confuses them. Those in SAME_NAME each have a reason."""
    places: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(f"{path}:{node.lineno}")
    several = {name: where for name, where in places.items() if len(where) > 1}
    refuse([f"{name}: {', '.join(several[name])}" for name in sorted(several.keys() - SAME_NAME.keys())], "rename one:")
    assert SAME_NAME.keys() <= several.keys(), "remove from SAME_NAME what has one place only"


@pytest.mark.parametrize("path", SOURCES)
def test_a_file_has_a_short_docstring_and_is_not_too_long(path: str) -> None:
    docstring = ast.get_docstring(tree_of(path))
    assert docstring, "a file begins with a docstring"
    assert len(docstring.splitlines()) <= 12, "the docstring of a file has at most 12 lines"
    lines = len(SOURCES[path].read_text(encoding="utf-8").splitlines())
    assert lines <= LINES_MAX, f"{lines} lines: split it by subject"


def test_folders_are_at_most_two_levels_deep() -> None:
    deep = [path for path in SOURCES if len(Path(path.removeprefix("client/")).parts) > 3]
    assert deep == []


# ── tests mirror the code ──

TESTED_THROUGH: dict[str, str] = {
    "tierd/api/gauges.py": "api/test_operator.py",
    "tierd/web/pages.py": "api/test_web_pages.py",
    "client/tierd_client/connection.py": "client/test_client.py",
    "client/tierd_client/generation.py": "client/test_client.py",
    "client/tierd_client/log.py": "client/test_session.py",
    "tierd/api/admission.py": "api/test_trainer.py",
    "tierd/cli/peer_checks.py": "cli/test_doctor.py",
    "tierd/memory/snapshot_set.py": "memory/test_tier.py",
    "tierd/workers/hot_space.py": "workers/test_persister.py",
    "tierd/workers/adopter.py": "workers/test_watcher.py",
    "tierd/workers/stored_checkpoints.py": "workers/test_watcher.py",
    "tierd/workers/part_files.py": "api/test_peer_parts.py",
    "client/tierd_client/examples/train_gpt.py": "test_train_gpt.py",
    "client/tierd_client/snapshot/snapshotter.py": "client/test_client.py",
    "client/tierd_client/frameworks/dcp_contents.py": "client/frameworks/test_dcp.py",
    "client/tierd_client/state/entry_selection.py": "client/state/test_partial_restore.py",
    "client/tierd_client/state/torchdata.py": "client/state/test_full_state.py",
    "tierd/catalog/claims.py": "security/test_signatures.py",
    "tierd/tiers/tier_listing.py": "tiers/test_tier.py",
    "tierd/cold_tier.py": "tiers/test_tier.py",
    "tierd/tiers/new_file.py": "tiers/test_directory.py",
    "tierd/tiers/tree.py": "tiers/test_directory.py",
    # The commands are tested as users run them, in a process.
    "tierd/cli/demo_run.py": "cli/test_demo.py",
    "tierd/cli/console.py": "cli/test_ls.py",
    "tierd/cli/memory_store.py": "cli/test_serve.py",
    "tierd/cli/key.py": "security/test_bucket_writer.py",
    "tierd/cli/lifecycle.py": "cli/test_verbs.py",
    "tierd/cli/milestone.py": "cli/test_verbs.py",
    "tierd/cli/opened_tiers.py": "cli/test_ls.py",
    "tierd/cli/partial_restore.py": "cli/test_restore_cold.py",
    "tierd/transfer/assembled.py": "cli/test_export.py",
    "tierd/transfer/imported.py": "cli/test_flat_import.py",
    "tierd/transfer/foreign_file.py": "cli/test_safetensors_import.py",
    "tierd/cli/import_format.py": "cli/test_safetensors_import.py",
    "tierd/format/plain_safetensors.py": "cli/test_safetensors_import.py",
    "tierd/cli/replicas.py": "cli/test_restore.py",
    "tierd/cli/show.py": "cli/test_verbs.py",
    "tierd/cli/run_requests.py": "cli/test_stop.py",
    "tierd/cli/status.py": "cli/test_ls.py",
    "tierd/config/watches.py": "config/test_file.py",
    "tierd/config/reload.py": "e2e/test_cold_settings.py",
    "tierd/workers/drain.py": "test_daemon.py",
    "tierd/daemon_process.py": "test_daemon.py",
    "tierd/cli/sidecars.py": "e2e/test_sidecars.py",
    "tierd/cli/pivot.py": "e2e/test_pivot.py",
    "tierd/cli/hot_commit.py": "cli/test_adopt.py",
    "tierd/s3/foreign_objects.py": "cli/test_adopt_bucket.py",
    "tierd/transfer/bucket_history.py": "cli/test_adopt_bucket.py",
    "tierd/transfer/history_source.py": "cli/test_adopt_history.py",
    "tierd/status/lifecycle_report.py": "cli/test_verbs.py",
    "tierd/memory/run_memory.py": "memory/test_tier.py",
}
"""Modules without a test file at the mirrored path that no test imports: the test file that exercises each."""


def imported_by_tests() -> set[str]:
    names: set[str] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        for node in _statements(ast.parse(path.read_text(encoding="utf-8"))):
            for name in _imported(node):
                names.add(name)
                names.add(name.rpartition(".")[0])
    return names


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """All statements. No expressions, which hold most nodes and no import."""
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        yield node
        for field_name in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, field_name, None)
            left += inner if isinstance(inner, list) else []


def mirrored(path: str) -> str:
    """Its test file: tierd/s3/upload.py → s3/test_upload.py, client/tierd_client/x.py → client/test_x.py."""
    parts = Path(path).parts
    room = ("client", *parts[2:-1]) if parts[0] == "client" else parts[1:-1]
    return "/".join((*room, f"test_{parts[-1]}"))


def test_every_module_has_its_tests() -> None:
    """A test file at the mirrored path, a test that imports it, or a line in TESTED_THROUGH."""
    imported = imported_by_tests()
    missing: list[str] = []
    for path in SOURCES:
        parts = Path(path).with_suffix("").parts
        module = ".".join(parts[1:] if parts[0] == "client" else parts)
        names = {mirrored(path), TESTED_THROUGH.get(path, "")}
        if not (parts[-1].startswith("__") or names & set(TESTS) or module in imported):
            missing.append(path)
    refuse(missing, "no test file of that name, and no test imports it:")


def test_the_list_of_modules_tested_through_others_is_correct() -> None:
    assert [path for path, name in TESTED_THROUGH.items() if path not in SOURCES or name not in TESTS] == []


# ── references ──


PRESET = {
    "outcome": metrics.SNAPSHOT_OUTCOMES,
    "direction": metrics.DIRECTIONS + metrics.PEER_DIRECTIONS,
    "stage": metrics.STAGES,
}


def test_every_label_value_that_the_code_writes_begins_at_zero() -> None:
    """If a series appeared with its first failure, no alert would see that failure."""
    strange: list[str] = []
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                for label, value in label_values(node):
                    if value not in PRESET[label]:
                        strange.append(f"{path}:{node.lineno} {label}={value!r}")
    refuse(strange, "add it to the constants of tierd/metrics.py:")


def test_every_metric_is_in_a_test_that_moves_it() -> None:
    """tests/test_metrics.py only declares them."""
    paths = [path for path in (ROOT / "tests").rglob("*.py") if path.name not in ("test_metrics.py", "test_house.py")]
    seen = set(re.findall(r"\btierd_(\w+)", "\n".join(path.read_text() for path in paths)))
    names = [name for name in vars(metrics.Metrics(CollectorRegistry())) if name != "registry"]
    still = [name for name in names if not seen & {name, f"{name}_count", f"{name}_sum", f"{name}_bucket"}]
    refuse(still, "no test looks at it: write one in which it changes:")


def label_values(call: ast.Call) -> Iterator[tuple[str, str]]:
    """The label values in `.labels(outcome="x")` and `incidents.record("stage", …)`."""
    assert isinstance(call.func, ast.Attribute)
    if call.func.attr == "labels":
        for keyword in call.keywords:
            if keyword.arg in PRESET and isinstance(keyword.value, ast.Constant):
                yield keyword.arg, str(keyword.value.value)
    if call.func.attr == "record" and call.args and isinstance(call.args[0], ast.Constant):
        yield "stage", str(call.args[0].value)
