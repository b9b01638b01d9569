"""The table of PyTorch's tests of DCP names tests that exist, and names all of them."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.client.frameworks.upstream import FILES, FURTHER_TESTS

HERE = Path(__file__).parent


def test_table_names_each_test_of_the_rewritten_files() -> None:
    defined = {
        node.name
        for name in ("test_dcp_upstream.py", "test_dcp_upstream_sharded.py")
        for node in ast.parse((HERE / name).read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    listed = {test for file in FILES for tests in file.covered.values() for test in tests}
    assert listed | set(FURTHER_TESTS) == defined


def test_each_file_has_a_covered_test_or_a_reason() -> None:
    assert all(file.covered or file.excluded for file in FILES)
    assert len({file.name for file in FILES}) == len(FILES)
