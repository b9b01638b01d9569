"""The entries of a checkpoint: one for each tensor of a module, parameter of an optimizer, option and other section."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tierd_client.restore.load import read_headers
from tierd_client.state.stored_entries import stored_entries
from tierd_client.state.training_state import TrainingState, parse_tree
from torch import nn

from tests.support.state import Files, Loader, one_step, stage
from tierd.errors import Corrupt


def test_entries_of_per_rank_modules_have_no_rank_in_their_names(tmp_path: Path) -> None:
    files = Files(tmp_path)
    state = TrainingState(model=nn.Linear(2, 2), extra={"critic": nn.Linear(2, 1), "best": 1.0}, dataloader=Loader())
    shards = [
        files.on_disk(stage(state, rank=rank, world_size=2), f"rank-{rank:05d}-of-00002.safetensors") for rank in (0, 1)
    ]
    _, available = read_headers(shards)
    for rank, shard in enumerate(shards):
        entries = stored_entries(parse_tree(shard.shard().tierd["state"]), available, {}).tensors
        assert entries["extra.critic.weight"] == f"extra.critic.weight@{rank:05d}"
        assert entries["model.weight"] == "model.weight"
        assert not [name for name in entries if "@" in name]
        assert {"extra.best", "dataloader", "rng"} <= entries.keys()
    files.close()


def test_optimizer_has_an_entry_for_each_parameter_and_option(tmp_path: Path) -> None:
    files = Files(tmp_path)
    model, outside = nn.Linear(2, 2), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*model.parameters(), outside], lr=0.1, momentum=0.9)
    one_step(model, optimizer, lambda: model(torch.ones(1, 2)) * outside)
    shard = files.on_disk(stage(TrainingState(model=model, optimizer=optimizer, rng=False)))
    _, available = read_headers([shard])
    entries = stored_entries(parse_tree(shard.shard().tierd["state"]), available, {}).tensors
    names = {name for name in entries if name.startswith("optimizer.") and "param_groups" not in name}
    foreign = "param.0.2"
    states = {f"optimizer.state.{name}" for name in ("weight", "bias", foreign)}
    assert names == {*states, f"optimizer.{foreign}"}
    assert {"optimizer.param_groups.0.lr", "optimizer.param_groups.0.momentum"} <= entries.keys()
    files.close()


@pytest.mark.parametrize(
    "section",
    [
        {"kind": "module", "suffix": "", "value": 3},
        {"kind": "tensors", "suffix": "", "value": []},
        {"kind": "tensors", "suffix": "", "value": {"$ordered": [["w"]]}},
        {"kind": "tensors", "suffix": "", "value": {"$defaultdict": "w"}},
        {"kind": "optimizers", "suffix": "", "value": {}},
        {
            "kind": "optimizers",
            "suffix": "",
            "value": [{"defaults": [], "foreign": [], "state": {}, "groups": [{"params": [], "options": 1}]}],
        },
    ],
)
def test_malformed_section_is_corrupt(section: Any) -> None:
    with pytest.raises(Corrupt):
        stored_entries(parse_tree({"model": section}), {}, {})
