"""deploy/requirements.txt, with which the image is built: the versions of constraints.txt, complete and with hashes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LOCKED = ("requirements.txt", "requirements-build.txt")
CYCLONEDX = shutil.which("cyclonedx-py", path=f"{Path(sys.executable).parent}:{Path('/usr/bin')}")


def locked(name: str) -> dict[str, tuple[str, list[str]]]:
    """(version, hashes) by package."""
    text = (ROOT / "deploy" / name).read_text(encoding="utf-8").replace("\\\n", " ")
    found: dict[str, tuple[str, list[str]]] = {}
    for line in text.splitlines():
        requirement, *hashes = line.split("--hash=")
        parsed = Requirement(requirement.strip())
        version = str(parsed.specifier).removeprefix("==")
        found[canonicalize_name(parsed.name)] = version, [each.strip() for each in hashes]
    return found


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


@pytest.mark.parametrize("name", LOCKED)
def test_each_requirement_is_the_version_of_the_constraints_and_has_hashes(name: str) -> None:
    constraints = pinned()
    for package, (version, hashes) in locked(name).items():
        assert constraints.get(package) == version, f"{package}: run `make requirements`, or add it to constraints.txt"
        assert hashes
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", each) for each in hashes)


def test_what_the_daemon_depends_on_is_required() -> None:
    project = PROJECT["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["signing"]]
    assert {canonicalize_name(Requirement(each).name) for each in needed} <= locked("requirements.txt").keys()
    assert "torch" not in locked("requirements.txt")
    built = {canonicalize_name(Requirement(each).name) for each in PROJECT["build-system"]["requires"]}
    assert built <= locked("requirements-build.txt").keys()


@pytest.mark.parametrize("name", LOCKED)
def test_requirements_name_no_index(name: str) -> None:
    text = (ROOT / "deploy" / name).read_text(encoding="utf-8")
    assert not re.search(r"://|^--", text, re.MULTILINE)


def test_image_installs_nothing_without_a_hash() -> None:
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(r"pip (?:wheel|install)[^&\n]*", dockerfile)
    assert len(commands) == 4
    for command in commands:
        assert "--require-hashes" in command or "--no-deps" in command or "--no-index" in command, command


@pytest.mark.skipif(CYCLONEDX is None, reason="cyclonedx-bom makes it")
def test_sbom_names_every_component_with_its_version(tmp_path: Path) -> None:
    made = tmp_path / "sbom.json"
    command = [str(CYCLONEDX), "requirements", "--output-reproducible", "--pyproject", "pyproject.toml"]
    subprocess.run(
        [*command, "deploy/requirements.txt", "--output-file", str(made)], cwd=ROOT, check=True, capture_output=True
    )
    document = json.loads(made.read_text(encoding="utf-8"))
    assert document["bomFormat"] == "CycloneDX"
    named = {canonicalize_name(each["name"]): each["version"] for each in document["components"]}
    assert named == {package: version for package, (version, _) in locked("requirements.txt").items()}
