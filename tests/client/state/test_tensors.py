"""The part of a tensor that a rank holds on any mesh, and the sample that distinguishes tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tierd_client.state.tensors import as_bytes, capture_tensor, sample_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tierd.errors import Unsupported


@pytest.fixture
def ranks() -> Iterator[Any]:
    """Yields the part of a tensor that each rank of a mesh holds."""

    def parts(whole: torch.Tensor, mesh_shape: Sequence[int], placements: Sequence[Any]) -> Iterator[DTensor]:
        count = torch.Size(mesh_shape).numel()
        for rank in range(count):
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=count)
            # Unique names: torch caches by mesh, and would take equal meshes of two ranks for the same.
            names = tuple(f"d{dim}_r{rank}" for dim in range(len(mesh_shape)))
            mesh = init_device_mesh("cpu", tuple(mesh_shape), mesh_dim_names=names)
            yield distribute_tensor(whole, mesh, list(placements), src_data_rank=None)

    yield parts
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


placed = st.sampled_from([Replicate(), Shard(0), Shard(1)])


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.tuples(st.integers(0, 9), st.integers(1, 9)),
    mesh=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    data=st.data(),
)
def test_parts_of_all_ranks_cover_the_tensor_on_any_mesh(
    ranks: Any, shape: tuple[int, int], mesh: list[int], data: st.DataObject
) -> None:
    placements = data.draw(st.lists(placed, min_size=len(mesh), max_size=len(mesh)))
    whole = torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape)
    gathered = torch.full(shape, -1.0)
    for part in ranks(whole, mesh, placements):
        captured = capture_tensor("w", part)
        assert captured.is_distributed
        assert captured.global_shape == shape
        gathered[tuple(slice(at, at + n) for at, n in zip(captured.saved_offsets, captured.shape, strict=True))] = (
            captured.tensor
        )
    assert torch.equal(gathered, whole)


@pytest.mark.parametrize("rows", [8, 30, 5, 3, 1])
def test_dimension_sharded_by_fsdp_and_tensor_parallel_is_one_piece_on_each_rank(ranks: Any, rows: int) -> None:
    """fully_shard over a ColwiseParallel weight: sharded by the inner dimension of the mesh first."""
    whole = torch.arange(rows * 2.0).reshape(rows, 2)
    gathered = torch.full_like(whole, -1.0)
    for part in ranks(whole, [2, 2], [_StridedShard(0, split_factor=2), Shard(0)]):
        captured = capture_tensor("w", part)
        begin = captured.saved_offsets[0]
        gathered[begin : begin + captured.shape[0]] = captured.tensor
    assert torch.equal(gathered, whole)


def test_parts_of_complex_numbers_are_stored_with_their_offsets_in_one_more_dimension(ranks: Any) -> None:
    whole = torch.randn(5, 3, dtype=torch.complex128)
    gathered = torch.zeros(5, 3, 2, dtype=torch.float64)
    for part in ranks(whole, [2], [Shard(0)]):
        captured = capture_tensor("w", part)
        assert (captured.dtype, captured.torch_dtype, captured.global_shape) == ("F64", "complex128", (5, 3, 2))
        begin = captured.saved_offsets[0]
        gathered[begin : begin + captured.shape[0]] = captured.tensor
    assert torch.equal(torch.view_as_complex(gathered), whole)


def test_part_in_several_pieces_is_refused(ranks: Any) -> None:
    for part in ranks(torch.zeros(8, 2), [2], [_StridedShard(0, split_factor=2)]):
        with pytest.raises(Unsupported, match=r"capture model\.w: .* holds several separate pieces"):
            capture_tensor("model.w", part)


def test_part_whose_shape_contradicts_its_placements_is_refused(ranks: Any) -> None:
    (part, _) = ranks(torch.zeros(8, 2), [2], [Shard(0)])
    odd = DTensor.from_local(
        torch.zeros(3, 2), part.device_mesh, [Shard(0)], run_check=False, shape=(8, 2), stride=(2, 1)
    )
    with pytest.raises(Unsupported, match=r"local part is \[3, 2\].* say \[4, 2\]"):
        capture_tensor("w", odd)


# ── samples ──


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(50, 70),
        torch.randn(50, 70).t(),
        torch.randn(3, dtype=torch.bfloat16),
        torch.tensor(1.5),
        torch.zeros(0),
        torch.randn(9, dtype=torch.complex64).conj(),
        torch.tensor([True, False]),
    ],
)
def test_equal_tensors_have_equal_samples_and_different_ones_do_not(tensor: torch.Tensor) -> None:
    assert sample_of(tensor) == sample_of(tensor.clone())
    other = ~tensor if tensor.dtype == torch.bool else tensor + 1
    assert (sample_of(tensor) == sample_of(other)) == (tensor.numel() == 0)


def test_bytes_of_one_element_do_not_depend_on_its_stride() -> None:
    single = torch.arange(4.0)[::4]
    assert single.stride() == (4,)
    assert as_bytes(single).tolist() == [0, 0, 0, 0]
    assert sample_of(single) == sample_of(torch.zeros(1))
