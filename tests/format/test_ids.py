"""Names of runs and checkpoints, and the order of checkpoints."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.errors import BadRequest
from tierd.format.ids import GENERATION_MAX, STEP_MAX, Run, check_run, checkpoint_id, is_run, parse_name


@given(st.integers(0, STEP_MAX), st.integers(1, GENERATION_MAX))
def test_a_parsed_name_gives_the_checkpoint_id(step: int, generation: int) -> None:
    checkpoint = checkpoint_id("run42", step, generation)
    assert parse_name(checkpoint.run, checkpoint.name) == checkpoint


def test_names_have_the_specified_form() -> None:
    assert checkpoint_id("run42", 18_000, 3).name == "000000018000-g0003"
    assert str(checkpoint_id("run42", 18_000, 12_345)) == "run42/000000018000-g12345"


@pytest.mark.parametrize(
    "name",
    ["", "latest", "18000-g0003", "000000018000", "000000018000-g3", "000000018000-g00003", "000000018000-g0000",
     "000000018000-g0003 ", "000000018000-g0003\n", "٠٠٠٠٠٠٠١٨٠٠٠-g0003", "-00000018000-g0003"],
)  # fmt: skip
def test_another_folder_name_is_not_a_checkpoint(name: str) -> None:
    assert parse_name(Run("run42"), name) is None


@pytest.mark.parametrize("run", ["gpt-124m", "a", "A.b_c-9", "x" * 128])
def test_a_valid_name_of_a_run_is_accepted(run: str) -> None:
    assert check_run(run) == run


@pytest.mark.parametrize("run", ["", ".", "..", ".hidden", "-x", "a/b", "a\\b", "a b", "a\0", "a\n", "é", "x" * 129])
def test_an_invalid_name_of_a_run_is_refused(run: str) -> None:
    assert not is_run(run)
    with pytest.raises(BadRequest, match="cannot name a run"):
        check_run(run)


@pytest.mark.parametrize(("step", "generation"), [(-1, 1), (STEP_MAX + 1, 1), (0, 0), (0, GENERATION_MAX + 1)])
def test_a_step_or_generation_out_of_range_is_refused(step: int, generation: int) -> None:
    with pytest.raises(BadRequest, match="is not between"):
        checkpoint_id("run42", step, generation)


def test_the_newest_checkpoint_has_the_newest_step_of_the_newest_generation() -> None:
    ids = [checkpoint_id("run42", step, generation) for step, generation in ((900, 1), (500, 2), (600, 2))]
    assert max(ids, key=lambda checkpoint: checkpoint.recency).name == "000000000600-g0002"
