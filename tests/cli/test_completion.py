"""Completion in a shell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def completed(words: str) -> list[str]:
    environ = os.environ | {
        "_TIERD_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    tierd = Path(sys.executable).parent / "tierd"
    done = subprocess.run([tierd], env=environ, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.split()


def test_verbs_and_options_are_completed() -> None:
    assert completed("tierd mil") == ["milestone"]
    assert "--generation" in completed("tierd restore --gen")
