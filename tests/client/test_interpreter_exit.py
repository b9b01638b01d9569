"""`Client.close()` may be called by a destructor while the interpreter exits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.daemon import Daemon

SCRIPT = """
import os, sys
import tierd_client
import tierd_client.client, tierd.format.wire

class Owner:
    def __init__(self):
        self.client = tierd_client.connect("run", socket=sys.argv[1])

    def __del__(self, write=os.write):  # sys.stderr is gone by then
        try:
            self.client.close()
            write(1, b"closed")
        except BaseException as error:
            write(1, repr(error).encode())

# The modules stay in memory, so Python sets their globals to None; then it clears `sys`.
sys.kept = [tierd_client.client, tierd.format.wire, Owner()]
"""


def test_close_in_a_destructor_after_the_modules_were_cleared_raises_nothing(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        command = [sys.executable, "-c", SCRIPT, daemon.socket]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "closed", "")
