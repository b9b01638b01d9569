"""Inputs for the targets of fuzz.py that atheris finds by coverage: `make fuzz`.

`python -m tests.support.guided_fuzz TARGET SECONDS FOLDER` keeps inputs that reach new code in the folder, and a later
run continues with them. It stops at the first input that ends in anything but a typed error, takes longer than a
second, or needs more than 2 GiB. That input is written beside the folder; it belongs in tests/security/corpus/TARGET
then.
"""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path
from typing import Any

atheris: Any = importlib.import_module("atheris")  # only `make fuzz` installs it

with atheris.instrument_imports(include=["tierd"]):
    from tests.support.fuzz import TARGETS, run_one, seeds

MEMORY_MIB = 2048
INPUT_BYTES_MAX = 4096


def main(target: str, seconds: str, folder: str) -> None:
    logging.disable()
    Path(folder).mkdir(parents=True, exist_ok=True)
    for index, raw in enumerate(seeds(target)):
        Path(folder, f"seed-{index}").write_bytes(raw)
    options = [f"-max_total_time={seconds}", f"-rss_limit_mb={MEMORY_MIB}", f"-max_len={INPUT_BYTES_MAX}"]
    options += [f"-artifact_prefix={folder}-", "-verbosity=0", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *options, folder], lambda raw: run_one(target, raw))
    atheris.Fuzz()  # it ends the process


if __name__ == "__main__":
    if sys.argv[1:] == ["--list"]:
        print(*TARGETS)
    else:
        main(*sys.argv[1:])
