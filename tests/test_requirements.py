"""deploy/requirements.txt, with which the image is built: the versions of constraints.txt, complete and with hashes."""

from __future__ import annotations

import json
import os
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


def test_every_stage_of_the_image_is_built_on_the_base_image_of_the_argument() -> None:
    lines = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8").splitlines()
    bases = [line.split()[1] for line in lines if line.startswith("FROM ")]
    assert bases == ["${BASE_IMAGE}"] * 2
    assert any(re.fullmatch(r"ARG BASE_IMAGE=python:3\.\d+-slim(@sha256:[0-9a-f]{64})?", line) for line in lines)
    assert "make image" in (ROOT / "docs" / "guides" / "security.md").read_text(encoding="utf-8")


DOCKER = """#!/bin/sh
echo "$@" >> {log}
[ "$1" != buildx ] || {answer}
"""


@pytest.mark.parametrize(
    ("arguments", "answer", "base"),
    [
        ([], f"echo sha256:{'a' * 64}", f"python:3.12-slim@sha256:{'a' * 64}"),
        ([f"BASE_IMAGE=other@sha256:{'b' * 64}"], "exit 1", f"other@sha256:{'b' * 64}"),
        (["BASE_IMAGE=other:1"], "exit 1", None),
        ([], "exit 1", None),
    ],
)
def test_image_is_built_on_a_digest_or_not_at_all(
    arguments: list[str], answer: str, base: str | None, tmp_path: Path
) -> None:
    """With a script in place of docker."""
    log = tmp_path / "log"
    log.touch()
    docker = tmp_path / "docker"
    docker.write_text(DOCKER.format(log=log, answer=answer), encoding="utf-8")
    docker.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["make", "image", *arguments], cwd=ROOT, env=environ, capture_output=True, check=False)
    builds = [line for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("build ")]
    expected = [] if base is None else [f"build --build-arg BASE_IMAGE={base} -f deploy/Dockerfile -t tierd ."]
    assert builds == expected
    assert (done.returncode == 0) == (base is not None)


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
