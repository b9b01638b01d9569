"""Names and patterns of the entries that differ between ranks."""

from __future__ import annotations

import logging

import pytest
import torch
from tierd_client.state.per_rank import PerRankEntries
from tierd_client.state.training_state import TrainingState, architecture_of

from tests.support.state import one_step, small_net
from tierd.errors import BadConfig


@pytest.mark.parametrize(
    ("pattern", "path", "is_matched"),
    [
        ("model.experts", "model.experts.0.weight", True),
        ("model.experts", "model.experts2.weight", False),
        ("model.experts.*.weight", "model.experts.0.weight", True),
        ("model.experts.*.weight", "model.experts.0.bias", False),
        ("model.experts", "optimizer.state.experts.0.weight.exp_avg", True),
        ("model.experts.0.weight", "optimizer.1.state.experts.0.weight.step", True),
        ("model.experts.0.weight", "optimizer.state.experts.0.bias.step", False),
        ("ema", "ema.bn.mean", True),
        ("ema.list", "ema.list[0]", True),
        ("ema.list[0]", "ema.list[0]", True),
        ("ema.list[0]", "ema.list0", False),
        ("model.e?perts", "model.experts", False),
        ("model.e*[0]", "model.experts[0].weight", True),
        ("mean", "ema.bn.mean", False),
        ("*.mean", "ema.bn.mean", True),
    ],
)
def test_a_pattern_names_entries_what_is_below_them_and_the_moments_of_parameters(
    pattern: str, path: str, is_matched: bool
) -> None:
    assert PerRankEntries([pattern]).matches(path) == is_matched


@pytest.mark.parametrize("patterns", ["model.experts", [1]])
def test_what_is_no_list_of_names_is_refused(patterns: object) -> None:
    with pytest.raises(BadConfig, match="must be a list of strings"):
        TrainingState(model=small_net(), per_rank=patterns)  # type: ignore[arg-type]


def test_pattern_without_a_match_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    entries = PerRankEntries(["model.expert", "model.bn"])
    entries.matches("model.bn.mean")
    with caplog.at_level(logging.WARNING, logger="tierd_client"):
        entries.warn_unmatched()
        entries.warn_unmatched()
    assert [record.getMessage() for record in caplog.records] == [
        "tierd: per_rank=[…]: model.expert: no tensor of the state has such a name"
    ]


def test_stored_names_end_in_the_rank_and_the_architecture_does_not_depend_on_it() -> None:
    model = small_net()
    optimizer = torch.optim.Adam(model.parameters())
    one_step(model, optimizer, lambda: model(torch.ones(1, 3)))
    state = TrainingState(model=model, optimizer=optimizer, per_rank=["model.0"])
    captured = state.capture(1, 2)
    stored = {tensor.name for tensor in captured.tensors if tensor.name.endswith("@00001")}
    moments = {
        f"optimizer.state.0.{kind}.{key}" for kind in ("weight", "bias") for key in ("step", "exp_avg", "exp_avg_sq")
    }
    assert stored == {f"{name}@00001" for name in {"model.0.weight", "model.0.bias", *moments}}
    assert captured.tree["model"]["per_rank"] == {"suffix": "@00001", "names": ["model.0.weight", "model.0.bias"]}
    assert architecture_of(captured) == architecture_of(state.capture(0, 1))
