"""One command runs every benchmark and writes the page. The sizes are tiny, so the figures mean nothing."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("path", sorted((ROOT / "bench").glob("*.py")), ids=lambda path: path.stem)
def test_a_benchmark_imports_from_tierd_what_is_there(path: Path) -> None:
    """Some import inside of functions, which run only in `make bench`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("tierd", "tierd_client"):
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                assert hasattr(module, alias.name) or importlib.util.find_spec(f"{node.module}.{alias.name}"), (
                    alias.name
                )


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_benchmark_runs_and_the_page_has_its_results(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    page = docs / "PERFORMANCE.md"
    page.write_text((ROOT / "docs/PERFORMANCE.md").read_text())
    command = [sys.executable, ROOT / "bench/all.py", "--tiny", "--docs", docs, "--dir", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    collected = json.loads((docs / "performance.json").read_text())
    assert {name: one["failed"] for name, one in collected.items() if one["failed"]} == {}
    ways = {line["way"] for line in collected["snapshot"]["facts"] if "way" in line}
    assert {"limit: memory copy", "torch.save", "tierd", "tierd, 2 ranks"} <= ways
    assert all(one["told"] in page.read_text() for one in collected.values())
    assert (docs / "performance.svg").read_text().startswith("<svg")


def test_the_requests_of_nodes_are_counted() -> None:
    """This benchmark calls functions of tierd which no other program calls in this way."""
    command = [sys.executable, ROOT / "bench/node_requests.py", "--nodes", "--simulated", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    counted = json.loads(done.stdout)
    assert counted["requests"]["put_object"] == 3 * 8 + 3 + 1  # shards, node files, the manifest


@pytest.mark.long
def test_a_benchmark_that_fails_is_reported_and_the_page_is_written(tmp_path: Path) -> None:
    page = tmp_path / "PERFORMANCE.md"
    page.write_text((ROOT / "docs/PERFORMANCE.md").read_text())
    command = [
        sys.executable,
        ROOT / "bench/all.py",
        "--only",
        "cold",
        "--docs",
        tmp_path,
        "--dir",
        tmp_path / "absent",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "exit code 1" in json.loads((tmp_path / "performance.json").read_text())["cold"]["failed"]
    assert "Left out: " in page.read_text()
    assert "not measured" in page.read_text()
