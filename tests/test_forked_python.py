"""The program of tests/support/warm_python.py does what a new Python would do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("forked_python")


def test_streams_arguments_folder_umask_and_exit_code_are_those_of_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "json.tool", "--compact", "-", "made.json"]
    done = subprocess.run(command, input="[1, 2]", text=True, cwd=tmp_path, umask=0o077, timeout=60, check=True)
    assert (tmp_path / "made.json").read_text() == "[1,2]\n"
    assert (tmp_path / "made.json").stat().st_mode & 0o777 == 0o600
    done = subprocess.run([*command[:-1]], input="[1, ", text=True, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Expecting value" in done.stderr


def test_descriptors_that_are_passed_have_their_numbers() -> None:
    reader, writer = os.pipe()
    os.write(writer, b'{"passed": 1}')
    os.close(writer)
    command = [sys.executable, "-m", "json.tool", "--compact", f"/proc/self/fd/{reader}"]
    done = subprocess.run(command, capture_output=True, text=True, pass_fds=[reader], timeout=60, check=True)
    os.close(reader)
    assert done.stdout == '{"passed":1}\n'


def test_process_ends_when_the_program_is_killed() -> None:
    def is_unread() -> bool:
        try:
            os.write(process.stdin.fileno(), b" ")  # pyright: ignore[reportOptionalMemberAccess]
        except BrokenPipeError:
            return True
        return False

    with subprocess.Popen([sys.executable, "-m", "json.tool"], stdin=subprocess.PIPE) as process:
        assert not is_unread()
        process.kill()
        process.wait()
        wait_until(is_unread, "the process that reads to end")
