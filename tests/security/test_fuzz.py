"""Any bytes from outside end in a value or a typed error: within a second, and in little memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fuzz import CORPUS, TARGETS, TOKENS, run_one, seeds
from tests.support.processes import ENVIRONMENT

EXAMPLES = 40  # of each target
LONG_INPUTS = 110_000  # of each target: more than a million in all
LONG_BATCHES = 4


def edited(target: str) -> st.SearchStrategy[bytes]:
    """Valid input whose pieces are replaced, which hypothesis shrinks to the smallest that fails."""

    @st.composite
    def edit(draw: st.DrawFn) -> bytes:
        raw = draw(st.sampled_from(seeds(target)))
        for _ in range(draw(st.integers(0, 4))):
            begin = draw(st.integers(0, len(raw)))
            end = min(len(raw), begin + draw(st.integers(0, 20)))
            raw = raw[:begin] + draw(st.binary(max_size=12) | st.sampled_from(TOKENS)) + raw[end:]
        return raw

    return st.binary(max_size=300) | edit()


@pytest.mark.parametrize("target", TARGETS)
def test_any_input_ends_in_a_typed_error(target: str) -> None:
    @settings(max_examples=EXAMPLES)
    @given(edited(target))
    def check(raw: bytes) -> None:
        run_one(target, raw)

    check()


@pytest.mark.parametrize("target", TARGETS)
def test_every_input_of_the_corpus_ends_in_a_typed_error(target: str) -> None:
    for raw in seeds(target):
        run_one(target, raw)


def test_every_folder_of_the_corpus_is_one_of_a_target() -> None:
    assert {folder.name for folder in CORPUS.iterdir()} <= TARGETS.keys()


@pytest.mark.long
@pytest.mark.parametrize("batch", range(LONG_BATCHES))
@pytest.mark.parametrize("target", TARGETS)
def test_a_million_mutated_inputs_end_in_typed_errors_in_little_memory(target: str, batch: int) -> None:
    count = LONG_INPUTS // LONG_BATCHES
    command = [sys.executable, "-m", "tests.support.fuzz", target, "--count", str(count), "--first", str(batch * count)]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
