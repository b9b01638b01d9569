"""Runs smoke.py on the versions that pyproject.toml declares: `make test-versions`.

Lowest: each lower bound exactly, on the oldest Python. Newest: what pip resolves today, on each Python of 3.11 to 3.14
that is installed. Each environment gets the wheel, not the source tree, and is deleted afterwards: torch for CUDA is
several GB. `--keep` keeps them in .venv-versions, `--only lowest-3.11` runs one.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".venv-versions"
SMOKE = Path(__file__).with_name("smoke.py")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
READERS = ("safetensors",)  # tierd does not need it; the smoke test reads a checkpoint with it
PIP = ("-m", "pip", "install", "-qq", "--no-input", "--disable-pip-version-check")
SMOKE_TIMEOUT_S = 3600


@dataclass(frozen=True, kw_only=True)
class Environment:
    """`constraints`: exact versions, as lines of a pip constraints file; none for the newest."""

    name: str
    python: str
    constraints: tuple[str, ...] = ()


def lower_bounds() -> tuple[str, ...]:
    """`torch==2.6` for `torch>=2.6`, of each dependency and of the client extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = map(Requirement, [*project["dependencies"], *project["optional-dependencies"]["client"]])
    return tuple(
        f"{requirement.name}=={bound.version}"
        for requirement in declared
        for bound in requirement.specifier
        if bound.operator == ">="
    )


def find_python(version: str) -> str | None:
    """A Python of this version that runs, from PATH or from pyenv."""
    installed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    for candidate in [shutil.which(f"python{version}"), *map(str, installed)]:
        # A shim of pyenv is on PATH for versions that are not selected, and fails.
        if candidate and subprocess.run([candidate, "-c", ""], capture_output=True, check=False).returncode == 0:
            return candidate
    return None


def environments() -> list[Environment]:
    found = [(version, find_python(version)) for version in PYTHONS]
    for version, python in found:
        if python is None:
            print(f"Python {version} is not installed: skipped", flush=True)
    pythons = [(version, python) for version, python in found if python is not None]
    if not pythons:
        raise SystemExit(f"none of Python {', '.join(PYTHONS)} is installed")
    oldest, python = pythons[0]
    lowest = Environment(name=f"lowest-{oldest}", python=python, constraints=lower_bounds())
    return [lowest, *(Environment(name=f"newest-{version}", python=python) for version, python in pythons)]


def build_wheel() -> Path:
    folder = ENVIRONMENTS / "dist"
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "build", "--quiet", "--no-isolation", "--wheel", "--outdir", folder, ROOT)
    return next(folder.glob("*.whl"))


def check(environment: Environment, wheel: Path, s3_url: str, *, is_kept: bool) -> str:
    """Installs and runs the smoke test. Returns a line about the result; raises CalledProcessError if it fails."""
    folder = ENVIRONMENTS / environment.name
    python = folder / "bin" / "python"
    started_s = time.monotonic()
    try:
        if not python.exists():
            run(environment.python, "-m", "venv", folder)
        constraints = ENVIRONMENTS / f"{environment.name}.txt"
        constraints.write_text("".join(f"{line}\n" for line in environment.constraints))
        run(python, *PIP, "--upgrade", "-c", constraints, f"{wheel}[client]", *READERS)
        run(python, *PIP, "--force-reinstall", "--no-deps", wheel)  # the version number does not change with the code
        print(f"{environment.name}: {versions(python)}", flush=True)
        run_smoke(python, s3_url)
        return f"passed in {time.monotonic() - started_s:.0f} s"
    finally:
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)


def versions(python: Path) -> str:
    """What is installed of what tierd names."""
    names = [bound.partition("==")[0] for bound in lower_bounds()]
    program = f"from importlib.metadata import version\nprint(*(n + ' ' + version(n) for n in {names}), sep=', ')"
    return subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def run_smoke(python: Path, s3_url: str) -> None:
    command = [python, "-P", SMOKE, s3_url]
    process = subprocess.Popen(command, cwd=ENVIRONMENTS, start_new_session=True)
    try:
        code = process.wait(SMOKE_TIMEOUT_S)
    finally:
        # The whole group: a smoke test that is killed leaves its daemon and its trainer.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if code:
        raise subprocess.CalledProcessError(code, command)


def run(*command: str | Path) -> None:
    # Not in the source tree: what is installed is tested.
    subprocess.run(command, cwd=ENVIRONMENTS, check=True)


@contextmanager
def s3_server() -> Generator[str]:
    """moto's S3 on a free loopback port, from the environment that runs this program. Yields its URL."""
    command = [Path(sys.executable).with_name("moto_server"), "-H", "127.0.0.1", "-p", "0"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        url = next((match[0] for line in server.stderr if (match := re.search(r"http://127\.0\.0\.1:\d+", line))), "")
        if not url:
            raise SystemExit("moto_server ended before it listened")
        threading.Thread(target=server.stderr.read, daemon=True).start()  # a full pipe would stop the server
        yield url
    finally:
        server.kill()
        server.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the smoke test on the lowest and the newest versions.")
    parser.add_argument("--only", metavar="NAME", help="one environment, such as lowest-3.11 or newest-3.13")
    parser.add_argument("--keep", action="store_true", help="keep the environments in .venv-versions")
    options = parser.parse_args()
    ENVIRONMENTS.mkdir(exist_ok=True)
    chosen = [environment for environment in environments() if options.only in (None, environment.name)]
    if not chosen:
        raise SystemExit(f"there is no environment {options.only}")
    wheel = build_wheel()
    results: dict[str, str] = {}
    with s3_server() as url:
        for environment in chosen:
            try:
                results[environment.name] = check(environment, wheel, url, is_kept=options.keep)
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                results[environment.name] = f"FAILED: {error}"
            print(f"{environment.name}: {results[environment.name]}", flush=True)
    print("\n" + "\n".join(f"{name:<14}{result}" for name, result in results.items()))
    return any(result.startswith("FAILED") for result in results.values())


if __name__ == "__main__":
    sys.exit(main())
