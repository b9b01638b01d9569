"""Random generators in extra continue where they were, in place, also where a sampler keeps a reference."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tierd_client.state.stored_state import StoredState
from tierd_client.state.training_state import TrainingState

from tests.support.state import Files, restore, small_net, stage
from tierd.errors import Mismatch, TierdError


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    opened = Files(tmp_path)
    yield opened
    opened.close()


def state_of(extra: dict[str, Any]) -> TrainingState:
    return TrainingState(model=small_net(), extra=extra, rng=False)


MAKERS: list[tuple[Callable[[int], Any], Callable[[Any], Any]]] = [
    (lambda seed: torch.Generator().manual_seed(seed), lambda generator: torch.randn(3, generator=generator).tolist()),
    (random.Random, lambda generator: (generator.gauss(), generator.random())),
    (np.random.default_rng, lambda generator: (generator.normal(), generator.spawn(1)[0].random())),
    (np.random.RandomState, lambda generator: (generator.normal(), generator.random())),
]


@pytest.mark.parametrize(("make", "draw"), MAKERS)
def test_generator_that_a_sampler_refers_to_continues(files: Files, make: Any, draw: Any) -> None:
    saved = make(1)
    draw(saved)
    raw = stage(state_of({"generator": saved}))
    expected = [draw(saved) for _ in range(5)]

    live = make(2)
    extra = {"generator": live}
    restore(state_of(extra), [files.on_disk(raw)])
    assert extra["generator"] is live
    assert [draw(live) for _ in range(5)] == expected


def test_generator_under_two_keys_stays_one_if_both_had_the_same_state(files: Files) -> None:
    shared, live = random.Random(1), random.Random(2)
    raw = stage(state_of({"a": shared, "b": shared, "c": random.Random(3)}))
    extra = {"a": live, "b": live, "c": live}
    restore(state_of(extra), [files.on_disk(raw)])
    assert extra["a"] is extra["b"] is live
    assert extra["c"].random() == random.Random(3).random()


@pytest.mark.parametrize(
    ("saved", "live", "message"),
    [
        (
            np.random.default_rng(1),
            np.random.Generator(np.random.MT19937(2)),
            "Generator of PCG64, now it is one of MT",
        ),
        (np.random.default_rng(1), random.Random(2), "holds a numpy.random.Generator, now it is a random.Random"),
        (random.Random(1), torch.Generator(), "holds a random.Random, now it is a torch.Generator"),
    ],
)
def test_live_generator_of_another_kind_is_a_mismatch(files: Files, saved: Any, live: Any, message: str) -> None:
    raw = stage(state_of({"generator": saved}))
    extra = {"generator": live}
    with pytest.raises(Mismatch, match=rf"extra\.generator: the checkpoint .*{message}"):
        restore(state_of(extra), [files.on_disk(raw)])
    assert extra["generator"] is live


def test_live_generator_is_not_changed_by_a_mismatch(files: Files) -> None:
    raw = stage(state_of({"generator": random.Random(1), "w": torch.ones(1)}))
    live = random.Random(2)
    broken = TrainingState(model=torch.nn.Linear(1, 1), extra={"generator": live}, rng=False)
    with pytest.raises(Mismatch):
        restore(broken, [files.on_disk(raw)])
    assert live.random() == random.Random(2).random()


def test_forged_state_of_a_generator_is_a_typed_error() -> None:
    state = state_of({"generator": random.Random(1)})
    tree: Any = state.capture(0, 1).tree
    tree["extra.generator"]["value"] = {"$generator": ["random.Random", {"version": 3, "words": 1, "gauss": None}]}
    available: dict[str, Any] = {}
    tree.pop("model")
    plan = state.plan_restore(StoredState(tree, available))
    with pytest.raises(TierdError, match=r"restore extra\.generator") as caught:
        plan.run(lambda tensors: None)
    assert type(caught.value) is TierdError
