"""A checkpoint whose parts overlap, so that their elements add up while some belong to no part, is never used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tierd_client.frameworks.dcp_contents import contents_of
from tierd_client.restore.load import read_headers
from tierd_client.restore.resume import open_directory
from tierd_client.state.stored_state import StoredState
from tierd_client.state.training_state import TrainingState

from tests.support.cli import make_house
from tests.support.state import commit, shard_of
from tierd.errors import Corrupt, Mismatch
from tierd.format.shard import parse_header
from tierd.format.whole import whole_tensors

# Rows 0 to 2, row 2 once more, and no row 3: 16 elements of a tensor of 4 x 4. The empty part gives it its 4 rows.
PARTS = [
    ("model.weight", torch.ones(3, 4), (0, 0)),
    ("model.weight", torch.ones(1, 4), (2, 0)),
    ("model.weight", torch.ones(0, 4), (4, 0)),
]


def overlapping(folder: Path) -> Path:
    return commit(folder, [shard_of([part], rank=rank) for rank, part in enumerate(PARTS)])


@pytest.mark.parametrize("format", ["safetensors", "torch", "dcp"])
def test_export_of_parts_that_overlap_is_exit_12_and_writes_nothing(tmp_path: Path, format: str) -> None:
    house = make_house(tmp_path)
    overlapping(house.hot)
    result = house.tierd("export", "--format", format, "--to", house.root / "out")
    assert result.exit_code == 12
    assert "model.weight: the shards contain parts of it that overlap" in result.stderr
    assert not (house.root / "out").exists()


def test_restore_of_parts_that_overlap_is_a_mismatch_and_changes_nothing(tmp_path: Path) -> None:
    folder = overlapping(tmp_path)
    model = torch.nn.Linear(4, 4, bias=False)
    before = model.weight.detach().clone()
    tree = {"model": {"kind": "module", "suffix": "", "value": {}}}
    with open_directory(str(folder)) as replica:
        _, tensors = read_headers(replica.files())
        with pytest.raises(Mismatch, match=r"model\.weight: the shards contain parts of it that overlap"):
            TrainingState(model=model, rng=False).plan_restore(StoredState(tree, tensors))
    assert torch.equal(model.weight, before)


def test_dcp_reads_nothing_from_parts_that_overlap(tmp_path: Path) -> None:
    with open_directory(str(overlapping(tmp_path))) as replica, pytest.raises(Corrupt, match="overlap"):
        contents_of(replica)


def test_parts_at_one_place_with_different_shapes_are_refused() -> None:
    parts = [("weight", torch.ones(4, 4), (0, 0)), ("weight", torch.ones(2, 4), (0, 0))]
    raws = {f"rank-{rank}": shard_of([part]) for rank, part in enumerate(parts)}
    shards = {name: parse_header(raw, len(raw), where=name) for name, raw in raws.items()}
    with pytest.raises(Corrupt, match="overlap"):
        whole_tensors(shards)
