"""The documentation site: everything public is documented, examples fit the code, and the strict build passes."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tierd_client

from generators import api, cli, config, metrics, pages, sources

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MARKDOWN = sorted([ROOT / "README.md", *DOCS.rglob("*.md")])
README_LINES_MAX = 150
FIRST_LINE_CHARS_MAX = 120
QUESTIONS_MIN = 20

needs_mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("mkdocstrings") is None, reason="the docs extra is not installed: pip install -e '.[docs]'"
)


def fail_with(findings: list[str]) -> None:
    if findings:
        pytest.fail("\n".join(sorted(set(findings))), pytrace=False)


def test_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").count("\n")
    assert lines <= README_LINES_MAX


# ── the reference ──


def test_every_option_key_and_metric_has_a_description() -> None:
    fail_with([*cli.undocumented(), *config.undocumented(), *metrics.undocumented()])


@needs_mkdocs
def test_everything_public_is_in_the_api_reference_with_a_docstring() -> None:
    fail_with(api.problems({page: (DOCS / page).read_text(encoding="utf-8") for page in api.PAGES}))


@needs_mkdocs
@pytest.mark.long
def test_a_public_name_that_is_left_out_of_the_reference_is_found() -> None:
    texts = {page: (DOCS / page).read_text(encoding="utf-8") for page in api.PAGES}
    texts["reference/client.md"] = texts["reference/client.md"].replace(
        "::: tierd_client.Shot\n", "::: tierd_client.Shoot\n"
    )
    assert sorted(api.problems(texts)) == [
        "tierd_client.Shoot is in the reference, and the code does not have it",
        "tierd_client.Shot is public, and no page of the reference shows it",
    ]


def test_the_command_line_reference_shows_commands_options_and_exit_codes() -> None:
    text = cli.page()
    assert "## tierd restore" in text
    assert "| `--tier TIER` | `auto` |" in text
    assert re.search(r"^\| 12 \| `Corrupt`", text, re.MULTILINE)


def test_the_config_reference_shows_each_key_with_its_default() -> None:
    text = config.page()
    for key in config.every_key():
        assert f"| `{key.name}` | {key.kind.replace('|', chr(92) + '|')} | `{key.default}` |" in text
    assert "## lifecycle.cold" in text


def test_the_metrics_reference_links_each_alert_to_the_runbook() -> None:
    text = metrics.page()
    assert "| `tierd_snapshots_total` | counter | `run` `outcome` |" in text
    alerts = re.findall(r"^\| `(Tierd\w+)` \|.*\| (.*) \|$", text, re.MULTILINE)
    assert alerts
    fail_with([name for name, advice in alerts if not advice.startswith("[")])


# ── the source map ──


def test_the_first_line_of_each_module_is_one_sentence() -> None:
    """The source map shows nothing else of a module."""
    findings: list[str] = []
    for path, line in sources.first_lines():
        is_package = path.endswith("__init__.py")
        if not (line.endswith((".", "?")) and len(line) <= FIRST_LINE_CHARS_MAX) and not (is_package and not line):
            findings.append(f"{path}: {line!r}: expected one sentence, at most {FIRST_LINE_CHARS_MAX} characters")
    fail_with(findings)


def test_every_module_is_in_the_source_map() -> None:
    text = sources.page()
    folders = {section.partition("\n")[0]: section for section in text.split("\n## ")[1:]}
    for top in ("tierd", "client/tierd_client"):
        for path in (ROOT / top).rglob("*.py"):
            if not path.name.startswith("__"):
                assert f"| `{path.name}` |" in folders[path.parent.relative_to(ROOT).as_posix()]


# ── docs/where.md ──


def test_each_question_of_a_newcomer_leads_to_a_definition() -> None:
    text = (DOCS / "where.md").read_text(encoding="utf-8")
    answers = re.findall(r"^\| (.+\?) \| `([^`]+)` \| `([^`]+)` \|$", text, re.MULTILINE)
    assert len(answers) >= QUESTIONS_MIN
    findings: list[str] = []
    for question, path, name in answers:
        file = ROOT / path
        if not file.is_file():
            findings.append(f"{question} {path} does not exist")
        elif name not in definitions(file):
            findings.append(f"{question} {path} does not define {name}")
    fail_with(findings)


def definitions(path: Path) -> set[str]:
    """The functions, classes, methods and constants of a module; a method as `Class.method`."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
            names |= {f"{node.name}.{method.name}" for method in methods}
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


# ── Python examples ──


def examples() -> Iterator[tuple[str, ast.Module]]:
    """(page and number, syntax tree) of each Python block. Raises SyntaxError for a block that is no Python."""
    for path in MARKDOWN:
        blocks = re.findall(r"^```python\n(.*?)^```$", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        for number, block in enumerate(blocks, start=1):
            where = f"{path.relative_to(ROOT).as_posix()}, block {number}"
            yield where, ast.parse(block, filename=where)


def test_every_import_of_an_example_exists() -> None:
    findings: list[str] = []
    for where, tree in examples():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tierd"):
                file = ROOT / "client" / f"{(node.module or '').replace('.', '/')}.py"
                known = definitions(file) if file.is_file() else set()
                findings += [f"{where}: {node.module} has no {one.name}" for one in node.names if one.name not in known]
    fail_with(findings)


def test_every_call_of_an_example_fits_the_client() -> None:
    """`tierd_client.X(...)`, and methods of `client`, `shot`, `sampler`: they exist and take these keywords."""
    owners: dict[str, Any] = {
        "tierd_client": tierd_client,
        "client": tierd_client.Client,
        "shot": tierd_client.Shot,
        "sampler": tierd_client.ResumableSampler,
    }
    findings: list[str] = []
    for where, tree in examples():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in owners:
                owner = owners[node.value.id]
                fields = getattr(owner, "__annotations__", {})
                if not hasattr(owner, node.attr) and node.attr not in fields:
                    findings.append(f"{where}: {node.value.id} has no {node.attr}")
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                findings += [f"{where}: {problem}" for problem in call_problems(node, node.func, owners)]
    fail_with(findings)


def call_problems(call: ast.Call, function: ast.Attribute, owners: Mapping[str, Any]) -> Iterator[str]:
    if not isinstance(function.value, ast.Name) or function.value.id not in owners:
        return
    called = getattr(owners[function.value.id], function.attr, None)
    if called is None:
        return  # reported as an attribute
    parameters = inspect.signature(called).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for keyword in call.keywords:
        if keyword.arg is not None and keyword.arg not in parameters:
            yield f"{ast.unparse(function)} takes no {keyword.arg}"


# ── the build ──


def build(config_file: Path, to: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config_file)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "NO_COLOR": "1"}
    return subprocess.run(
        [*command, "--site-dir", str(to)], cwd=ROOT, env=environment, text=True, capture_output=True, timeout=240
    )


@pytest.mark.long
@needs_mkdocs
def test_the_strict_build_passes_and_its_pages_load_nothing_from_other_hosts(tmp_path: Path) -> None:
    built = build(ROOT / "mkdocs.yml", tmp_path / "site")
    assert built.returncode == 0, built.stderr
    loads = re.compile(r"<(?:script|img|iframe)[^>]*\ssrc=[\"']?https?:|<link[^>]*\shref=[\"']?https?:")
    built_pages = {path.relative_to(tmp_path / "site").as_posix(): path for path in tmp_path.rglob("*.html")}
    assert {page.replace(".md", ".html") for page in pages.PAGES} <= built_pages.keys()
    fail_with([page for page, path in built_pages.items() if loads.search(path.read_text(encoding="utf-8"))])


@pytest.mark.long
@needs_mkdocs
def test_a_broken_link_and_a_broken_anchor_fail_the_build(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("mkdocs.yml", "README.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, copy / name)
    for name in ("docs", "deploy", "bench", "grafana", "tierd", "client", "tests/client"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "docs/where.md").open("a", encoding="utf-8") as page:
        page.write("\n[no page](nowhere.md) [no section](tutorial.md#nowhere)\n")
    built = build(copy / "mkdocs.yml", tmp_path / "site")
    assert built.returncode != 0
    assert "'nowhere.md'" in built.stderr
    assert "#nowhere" in built.stderr
