"""A rank reads the shards of its own node; what only another node has is refused before a byte changes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest
import torch
from tierd_client import NotFound
from tierd_client.restore.load import FileElsewhere, read_headers
from tierd_client.restore.part_replica import PartElsewhere, PartReplica
from tierd_client.state.tensors import capture_tensor

from tests.support.cli import make_manifest
from tests.support.state import entry_of, shard_of
from tierd.format.ids import checkpoint_id
from tierd.format.shard import header_length

HERE, ELSEWHERE = "rank-00001-of-00002.safetensors", "rank-00000-of-00002.safetensors"


@pytest.fixture
def replica() -> Iterator[PartReplica]:
    """Of two ranks, the second is on this node. Both have stored `both`, with other values."""
    here = shard_of([("both", torch.ones(3), (0,)), ("here", torch.full((3,), 2.0), (0,))], rank=1)
    elsewhere = shard_of([("both", torch.zeros(3), (0,)), ("elsewhere", torch.ones(3), (0,))])
    manifest = make_manifest(checkpoint_id("run", 5, 1), [entry_of(elsewhere, ELSEWHERE), entry_of(here, HERE)])
    descriptor = os.memfd_create("shard")
    os.pwrite(descriptor, here, 0)
    header = elsewhere[: header_length(elsewhere[:8], len(elsewhere), where="")]
    part = PartElsewhere(0, "node-00000-of-00002.json", {ELSEWHERE: header}, None)
    with PartReplica("hot", manifest, [descriptor], elsewhere=[part]) as replica:
        yield replica


def test_headers_of_all_nodes_are_known(replica: PartReplica) -> None:
    files = replica.files()
    assert [file.is_here for file in files] == [False, True]
    shards, tensors = read_headers(files)
    assert list(shards) == [ELSEWHERE, HERE]
    assert {name: len(parts) for name, parts in tensors.items()} == {"both": 2, "here": 1, "elsewhere": 1}


def test_tensor_that_several_nodes_have_is_read_here(replica: PartReplica) -> None:
    both, here = torch.zeros(3), torch.zeros(3)
    replica.read(replica.files(), [capture_tensor("both", both), capture_tensor("here", here)])
    assert (both.tolist(), here.tolist()) == ([1.0] * 3, [2.0] * 3)


def test_tensor_that_only_another_node_has_is_refused_before_a_byte_changes(replica: PartReplica) -> None:
    both, elsewhere = torch.full((3,), 9.0), torch.zeros(3)
    with pytest.raises(NotFound, match=f"{re.escape(ELSEWHERE)} on another node"):
        replica.read(replica.files(), [capture_tensor("both", both), capture_tensor("elsewhere", elsewhere)])
    assert both.tolist() == [9.0] * 3
    file = replica.files()[0]
    assert isinstance(file, FileElsewhere)
    with pytest.raises(NotFound):
        list(file.read_chunk(0, torch.empty(0)))
