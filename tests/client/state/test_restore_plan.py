"""Differences between checkpoint and state are detected before a byte changes, and listed."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tierd_client.state.stored_state import StoredState
from tierd_client.state.training_state import TrainingState

from tests.support.state import Files, Loader, Training, assert_same, plan, restore, small_net, stage
from tierd.errors import Corrupt, Mismatch, NotFound, TierdError, TierUnreachable


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    opened = Files(tmp_path)
    yield opened
    opened.close()


def test_mismatch_lists_what_differs_and_changes_nothing(files: Files) -> None:
    def build(classes: int, *, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
        return torch.nn.ModuleDict({"body": torch.nn.Linear(3, 64).to(dtype), "head": torch.nn.Linear(64, classes)})

    raw = stage(TrainingState(model=build(10)))
    other = build(12, dtype=torch.bfloat16)
    other["new"] = torch.nn.Linear(1, 1)
    del other["body"].bias
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(Mismatch) as caught:
        plan(TrainingState(model=other), files.on_disk(raw))
    message = caught.value.message
    assert "model.head.weight: checkpoint F32 [10, 64], model F32 [12, 64]" in message
    assert "model.body.weight: checkpoint F32 [64, 3], model BF16 [64, 3]" in message
    assert "model.new.weight: not in the checkpoint" in message
    assert "model.body.bias: in the checkpoint, not in the model" in message
    assert "in 6 places" in message
    assert_same(other.state_dict(), before)


def test_mismatch_shows_twenty_differences_and_counts_the_rest(files: Files) -> None:
    raw = stage(TrainingState(model=torch.nn.Linear(2, 2)))
    with pytest.raises(Mismatch) as caught:
        plan(TrainingState(model=torch.nn.Sequential(*[torch.nn.Linear(1, 1) for _ in range(15)])), files.on_disk(raw))
    assert caught.value.message.count("\n") == 21
    assert "… and 12 more" in caught.value.message


def test_sections_that_only_one_side_has_are_named_in_warnings(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    training = Training.fresh()
    training.train(1)
    raw = stage(TrainingState(model=training.model, scheduler=training.scheduler))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with caplog.at_level(logging.WARNING):
        restore(TrainingState(model=Training.fresh(1).model, scaler=scaler), [files.on_disk(raw)])
    assert "the checkpoint has no scaler" in caplog.text
    assert "the checkpoint has scheduler, which this state lacks" in caplog.text
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("tree", [None, [], {"model": 1}, {"model": {"kind": 1}}])
def test_malformed_state_tree_is_corrupt(tree: object) -> None:
    with pytest.raises(Corrupt):
        TrainingState(model=small_net()).plan_restore(StoredState(tree, {}))


@pytest.mark.parametrize("kind", [Corrupt, NotFound, TierUnreachable])
def test_error_while_the_state_is_installed_blames_no_replica(files: Files, kind: type[TierdError]) -> None:
    """For errors of these kinds the client tries the next replica."""

    class Refusing(Loader):
        def load_state_dict(self, state: object) -> None:
            raise kind("the user's code refuses it")

    raw = stage(TrainingState(model=small_net(), scheduler=Loader()))
    with pytest.raises(TierdError, match="restore scheduler: the user's code refuses it") as caught:
        restore(TrainingState(model=small_net(), scheduler=Refusing()), [files.on_disk(raw)])
    assert type(caught.value) is TierdError
    assert "half restored" in caught.value.hint
