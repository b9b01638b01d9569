"""The sdist and the wheel: contents, metadata, reproducibility, and what an installed package says without torch.

Builds a copy of the files that git tracks, with the installed build backend and without a network.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from email.message import Message
from email.parser import BytesParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import tierd

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NAME = f"tierd-{tierd.__version__}"
EPOCH_S = "1700000000"


def tracked_files() -> list[str]:
    """Paths relative to ROOT: all that git tracks, or, in an unpacked sdist, all that is there."""
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "-z"]
        listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return [name for name in listing.split("\0") if name and os.path.lexists(ROOT / name)]
    return [
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*")
        if not path.is_dir() and not {"__pycache__", ".venv"} & set(path.parts)
    ]


def build(folder: Path) -> Path:
    """A sdist of the tracked files, and a wheel of that sdist. Returns the folder that holds both."""
    for name in tracked_files():
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / "source" / name, follow_symlinks=False)
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        str(folder / "dist"),
        str(folder / "source"),
    ]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": EPOCH_S}
    built = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder / "dist"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("packaging"))


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return next(dist.glob("*.whl"))


@pytest.fixture(scope="module")
def sdist(dist: Path) -> Path:
    return next(dist.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """The Python of an environment with the wheel and its dependencies but without torch."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    packages = next((folder / "lib").glob("python*/site-packages"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    for entry in (entry for path in sys.path if path.endswith("site-packages") for entry in Path(path).iterdir()):
        is_left_out = entry.name.startswith("torch") or entry.suffix == ".pth" or (packages / entry.name).exists()
        if not is_left_out:
            (packages / entry.name).symlink_to(entry)
    return python


def wheel_names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return BytesParser().parsebytes(archive.read(f"{NAME}.dist-info/METADATA"))


# ── contents ──


def test_wheel_holds_the_two_packages_and_nothing_else(wheel: Path) -> None:
    sources = {
        name.removeprefix("client/") for name in tracked_files() if name.startswith(("tierd/", "client/tierd_client/"))
    }
    names = wheel_names(wheel)
    assert {name for name in names if not name.startswith(f"{NAME}.dist-info/")} == sources
    assert {"tierd/py.typed", "tierd_client/py.typed"} <= names
    assert [name for name in names if "test" in name] == []


def test_wheel_holds_the_example_that_the_demo_runs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = archive.read("tierd_client/examples/train_gpt.py")
    assert packed == (ROOT / "examples" / "train_gpt.py").read_bytes()


def test_sdist_holds_every_tracked_file(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.removeprefix(f"{NAME}/") for name in archive.getnames()}
    assert names == {*tracked_files(), "PKG-INFO"}


@pytest.mark.long
def test_two_builds_give_the_same_bytes(dist: Path, tmp_path: Path) -> None:
    again = build(tmp_path)
    assert {path.name: path.read_bytes() for path in again.iterdir()} == {
        path.name: path.read_bytes() for path in dist.iterdir()
    }


# ── metadata ──


def test_metadata_is_that_of_the_project(wheel: Path) -> None:
    fields = metadata(wheel)
    assert fields["Name"] == "tierd"
    assert fields["Version"] == tierd.__version__
    assert fields["Requires-Python"] == PROJECT["requires-python"]
    assert fields["License-Expression"] == "Apache-2.0"
    assert fields["License-File"] == "LICENSE"
    assert fields["Author"] == PROJECT["authors"][0]["name"]
    assert fields["Description-Content-Type"] == "text/markdown"
    assert set(fields.get_all("Classifier", [])) == set(PROJECT["classifiers"])
    required = {str(Requirement(text)) for text in fields.get_all("Requires-Dist", []) if "extra ==" not in text}
    assert required == {str(Requirement(text)) for text in PROJECT["dependencies"]}


def test_wheel_has_the_entry_point(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(f"{NAME}.dist-info/entry_points.txt").decode().split("\n")[:2] == [
            "[console_scripts]",
            "tierd = tierd.cli:main",
        ]


def test_every_dependency_declares_a_lower_bound() -> None:
    declared = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["client"]]
    bounds = {text: [one.operator for one in Requirement(text).specifier] for text in declared}
    assert {text: operators for text, operators in bounds.items() if operators != [">="]} == {}


def test_constraints_pin_what_the_extras_name() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {Requirement(line).name.replace("_", "-") for line in lines if line and not line.startswith("#")}
    extras = PROJECT["optional-dependencies"]
    named = {Requirement(text).name for text in [*PROJECT["dependencies"], *extras["client"], *extras["test"]]}
    assert named - pinned == {"tierd"}


# ── installed, without torch ──


def run(python: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [python, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=100, check=False
    )


def test_command_runs_from_the_wheel_without_torch(installed: Path, tmp_path: Path) -> None:
    result = run(installed, "-m", "tierd", "--version", cwd=tmp_path)
    assert result.stdout.startswith(f"tierd {tierd.__version__} "), result.stderr
    where = run(installed, "-c", "import tierd; print(tierd.__file__)", cwd=tmp_path)
    assert where.stdout.startswith(str(installed.parents[1]))


def test_importing_the_client_without_torch_says_what_to_install(installed: Path, tmp_path: Path) -> None:
    result = run(installed, "-c", "import tierd_client", cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        "ImportError: tierd_client needs torch (hint: pip install 'tierd[client]')"
    )


def test_demo_without_torch_says_what_to_install(installed: Path, tmp_path: Path) -> None:
    result = run(installed, "-m", "tierd", "demo", cwd=tmp_path)
    assert result.returncode == 2
    assert "torch cannot be imported here" in result.stderr
    assert "hint: pip install 'tierd[client]'" in result.stderr
    assert list(tmp_path.iterdir()) == []
