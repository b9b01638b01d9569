"""Verified bytes are read into live tensors, from files and from memory; damage is detected and named."""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tierd_client import DictState
from tierd_client.restore import load as load_module
from tierd_client.restore.load import FileElsewhere, ReadPlan, SourceFile, read_headers
from tierd_client.state.stored_state import StoredState
from tierd_client.state.tensors import CapturedTensor, capture_tensor
from tierd_client.state.training_state import TrainingState
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.state import CHUNK_BYTES, Files, entry_of, restore, shard_of, stage
from tierd.errors import Corrupt, Mismatch, NewerFormat, Unsupported
from tierd.format.shard import header_length, plan_layout

PLACES = ["on_disk", "in_memory", "in_own_slot"]


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    opened = Files(tmp_path)
    yield opened
    opened.close()


def model_of(width: int = 200, fill: float | None = None) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, 3))
    if fill is not None:
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, fill)
    return model


def region(name: str, into: torch.Tensor, begin: tuple[int, ...], shape: tuple[int, ...]) -> CapturedTensor:
    """A request to read the region of the stored tensor that begins at `begin` into `into`."""
    return msgspec.structs.replace(capture_tensor(name, into), saved_offsets=begin, global_shape=shape)


# ── damage ──


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_flipped_byte_is_corrupt_naming_file_and_chunk(files: Files, place: str, chunk: int) -> None:
    raw = bytearray(stage(TrainingState(model=model_of())))
    good = bytes(raw)
    raw[min(chunk * CHUNK_BYTES + 60_000, len(raw) - 1)] ^= 1
    source = getattr(files, place)(bytes(raw))
    source.entry = entry_of(good)
    with pytest.raises(Corrupt, match=rf"read chunk {chunk} of rank-00000-of-00001\.safetensors: crc64nvme"):
        restore(TrainingState(model=model_of()), [source])


@pytest.mark.parametrize("place", PLACES)
def test_damage_outside_the_requested_tensors_is_not_read(files: Files, place: str) -> None:
    raw = bytearray(stage(TrainingState(model=model_of(), rng=False, extra={"z": torch.zeros(3 * CHUNK_BYTES)})))
    good = bytes(raw)
    at = good.rindex(bytes(CHUNK_BYTES))  # deep in extra.z
    raw[at] ^= 1
    source = getattr(files, place)(bytes(raw))
    source.entry = entry_of(good)
    shard = source.shard()
    unwanted = shard.tensors["extra.z"]
    assert unwanted.offset + CHUNK_BYTES < at < unwanted.offset + unwanted.size_bytes
    entry = shard.tensors["model.1.bias"]
    requested = capture_tensor(entry.name, torch.empty(3))
    assert ReadPlan([source], [requested]).run() <= 2 * CHUNK_BYTES


@pytest.mark.parametrize("place", PLACES)
def test_truncated_file_is_corrupt(files: Files, place: str) -> None:
    raw = stage(TrainingState(model=model_of()))
    source = files.on_disk(raw)
    os.truncate(files.folder / source.name, len(raw) - 1)
    with pytest.raises(Corrupt, match=f"{len(raw) - 1} bytes, expected {len(raw)}"):
        SourceFile(source.name, files.opened[-1], entry_of(raw))
    with pytest.raises(Corrupt, match="ends at byte"):  # truncated while it is being read
        restore(TrainingState(model=model_of()), [source])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"", Corrupt),
        (b"\0" * 4, Corrupt),
        (struct.pack("<Q", 1 << 40) + bytes(100), Corrupt),
        (struct.pack("<Q", 2) + b"{}", Corrupt),
    ],
)
def test_file_that_is_not_a_shard_is_corrupt_even_with_a_correct_checksum(
    files: Files, place: str, raw: bytes, error: type[Exception]
) -> None:
    with pytest.raises(error):
        read_headers([getattr(files, place)(raw)])


def test_shard_of_a_newer_format_version_is_refused(files: Files) -> None:
    layout = plan_layout([], {"format_version": 2})
    with pytest.raises(NewerFormat):
        read_headers([files.on_disk(layout.encode_header({"format_version": 2}))])


def test_error_in_one_chunk_stops_the_others(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    good = stage(TrainingState(model=model_of(600)))
    raw = bytearray(good)
    raw[CHUNK_BYTES + 9] ^= 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})  # memory is read by one thread then
    source = files.in_memory(bytes(raw))
    source.entry = entry_of(good)
    state = TrainingState(model=(model := model_of(600, fill=5.0)))
    shards, tensors = read_headers([source])
    plan = state.plan_restore(StoredState(shards[source.name].tierd["state"], tensors))
    with pytest.raises(Corrupt, match="chunk 1 "):
        ReadPlan([source], plan.destinations.values()).run()
    assert (model[0].weight == 5.0).any()


@pytest.mark.parametrize(
    ("places", "cores", "threads"),
    [
        (["in_memory"], 2, 2),
        (["in_memory"], 64, load_module.THREADS),
        (["in_memory", "elsewhere"], 2, 2),  # nothing of it is read
        (["on_disk"], 2, load_module.THREADS),
        (["in_memory", "on_disk"], 2, load_module.THREADS),
    ],
)
def test_mapped_memory_is_read_by_no_more_threads_than_cores(
    files: Files, monkeypatch: pytest.MonkeyPatch, places: list[str], cores: int, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    sources: list[SourceFile] = []
    for place in places:
        raw = shard_of([(place, torch.ones(8 * CHUNK_BYTES // 4), (0,))])
        header = raw[: header_length(raw[:8], len(raw), where="")]
        is_elsewhere = place == "elsewhere"
        sources.append(FileElsewhere(place, entry_of(raw), header) if is_elsewhere else getattr(files, place)(raw))
    all_there = threading.Barrier(threads + 1)  # broken by the last of the threads, or after a timeout
    reading: set[int] = set()
    read_chunk = SourceFile.read_chunk

    def count(source: SourceFile, index: int, scratch: torch.Tensor) -> Iterator[load_module.FileBlock]:
        reading.add(threading.get_ident())
        if len(reading) >= threads:
            all_there.abort()
        with contextlib.suppress(threading.BrokenBarrierError):
            all_there.wait(5)
        yield from read_chunk(source, index, scratch)

    into = [capture_tensor(place, torch.empty(8 * CHUNK_BYTES // 4)) for place in places if place != "elsewhere"]
    reads = ReadPlan(sources, into)
    monkeypatch.setattr(SourceFile, "read_chunk", count)
    assert reads.run() > 8 * CHUNK_BYTES
    assert len(reading) == threads
    assert all(torch.equal(tensor.tensor, torch.ones(8 * CHUNK_BYTES // 4)) for tensor in into)


@pytest.mark.parametrize("place", PLACES)
def test_memory_of_a_device_is_filled_block_by_block(files: Files, place: str) -> None:
    """By the code for devices, on memory of the host."""
    values = torch.arange(3 * CHUNK_BYTES // 4, dtype=torch.float32)
    source = getattr(files, place)(shard_of([("a", values, (0,)), ("b", values.flip(0), (0,))]))
    into = [capture_tensor(name, torch.zeros_like(values)) for name in ("a", "b")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_module, "BLOCK_BYTES", 1000)
        patch.setattr(torch.Tensor, "is_cpu", False)
        ReadPlan([source], into).run()
    assert torch.equal(into[0].tensor, values)
    assert torch.equal(into[1].tensor, values.flip(0))


def test_bytes_that_several_destinations_need_are_read_once_without_verification(files: Files) -> None:
    matrix = torch.arange(600.0).reshape(30, 20)
    source = files.on_disk(shard_of([("m", matrix, (0, 0))]))
    columns = [torch.zeros(30, 10), torch.zeros(30, 12)]
    requested = [region("m", columns[0], (0, 0), (30, 20)), region("m", columns[1], (0, 4), (30, 20))]
    ReadPlan([source], requested).run(is_verified=False)
    assert torch.equal(columns[0], matrix[:, :10])
    assert torch.equal(columns[1], matrix[:, 4:16])


# ── chunks, blocks and regions ──


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=6),
    chunk_bytes=st.integers(4096, 12_000),
    block_bytes=st.sampled_from([512, 1000, 4096, 1 << 20]),
    place=st.sampled_from(PLACES),
)
def test_tensors_are_restored_for_any_chunk_and_block_boundaries(
    files: Files, sizes: list[int], chunk_bytes: int, block_bytes: int, place: str
) -> None:
    model = torch.nn.ParameterList([torch.randn(size) for size in sizes])
    model.append(torch.nn.Parameter(torch.randn(50, 7).t()))
    other = torch.nn.ParameterList([torch.zeros(size) for size in sizes])
    other.append(torch.nn.Parameter(torch.zeros(50, 7).t()))
    raw = stage(TrainingState(model=model))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_module, "BLOCK_BYTES", block_bytes)
        restore(TrainingState(model=other), [getattr(files, place)(raw, chunk_bytes=chunk_bytes)])
    assert all(map(torch.equal, other, model))


def test_tensors_are_restored_from_several_files(files: Files) -> None:
    model, other = model_of(), model_of()
    state = TrainingState(model=model)
    shares = [{"model.0.weight", "model.1.bias"}, {"model.0.bias", "model.1.weight"}]
    opened = [
        files.on_disk(stage(state, rank=rank, world_size=2, owned=owned), f"rank-{rank:05d}-of-00002.safetensors")
        for rank, owned in enumerate(shares)
    ]
    restore(TrainingState(model=other), opened, rank=1)
    assert all(map(torch.equal, other.parameters(), model.parameters()))
    with pytest.raises(Mismatch, match=r"model\.1\.weight: not in the checkpoint"):
        restore(TrainingState(model=other), opened[:1])


REGIONS = st.tuples(*(st.tuples(st.integers(0, size - 1), st.integers(1, size)) for size in (30, 7, 5)))


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    regions=st.lists(REGIONS, min_size=1, max_size=5),
    is_strided=st.booleans(),
    chunk_bytes=st.integers(4096, 8000),
    block_bytes=st.sampled_from([512, 1000, 1 << 20]),
)
def test_overlapping_regions_of_one_tensor_are_restored(
    files: Files, regions: Any, is_strided: bool, chunk_bytes: int, block_bytes: int
) -> None:
    stored = torch.randn(30, 7, 5)
    raw = stage(DictState({"whole": stored, "scalar": torch.tensor(3.0)}))
    requested = {"scalar": region("scalar", torch.zeros(()), (), ())}
    for number, ranges in enumerate(regions):
        begin = tuple(low for low, _ in ranges)
        shape = tuple(min(low + length, size) - low for (low, length), size in zip(ranges, stored.shape, strict=True))
        into = torch.zeros(shape[::-1]).permute(2, 1, 0) if is_strided else torch.zeros(shape)
        requested[str(number)] = region("whole", into, begin, shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_module, "BLOCK_BYTES", block_bytes)
        ReadPlan([files.on_disk(raw, chunk_bytes=chunk_bytes)], requested.values()).run()
    assert requested.pop("scalar").tensor == 3.0
    for part in requested.values():
        box = tuple(slice(at, at + size) for at, size in zip(part.saved_offsets, part.shape, strict=True))
        assert torch.equal(part.tensor, stored[box])


def test_only_the_chunks_of_the_requested_rows_are_read(files: Files) -> None:
    rows = torch.arange(64.0 * CHUNK_BYTES / 4).view(64, -1)
    source = files.on_disk(stage(DictState({"rows": rows})))
    into = torch.zeros(2, rows.shape[1])
    assert ReadPlan([source], [region("rows", into, (40, 0), (2, rows.shape[1]))]).run() <= 3 * CHUNK_BYTES
    assert torch.equal(into, rows[40:42])


def test_read_plan_lists_exactly_the_chunks_that_it_reads(files: Files) -> None:
    rows = torch.arange(64.0 * CHUNK_BYTES / 4).view(64, -1)
    sources = [files.on_disk(stage(DictState({name: rows})), f"{name}.safetensors") for name in ("a", "b")]
    into = torch.zeros(2, rows.shape[1])
    reads = ReadPlan(sources, [region("b", into, (40, 0), (2, rows.shape[1]))])
    chunks_of_a, chunks_of_b = reads.chunks
    assert (into == 0).all()
    assert (chunks_of_a, len(chunks_of_b) * CHUNK_BYTES) == ([], reads.run())
    assert torch.equal(into, rows[40:42])


# ── sharded tensors ──


@pytest.fixture
def ranks() -> Iterator[Any]:
    """Makes this process one rank of several."""

    def become(rank: int, world_size: int) -> DeviceMesh:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        # A unique name: torch caches by mesh, and would take equal meshes of two ranks for the same.
        return init_device_mesh("cpu", (world_size,), mesh_dim_names=(f"rank_{rank}_of_{world_size}",))

    yield become
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _sharded(weight: torch.Tensor, mesh: DeviceMesh, dim: int = 0) -> torch.nn.Module:
    """A module whose weight is this rank's part of `weight`."""
    parts = list(weight.chunk(mesh.size(), dim))
    rank = mesh.get_rank()
    part = parts[rank] if rank < len(parts) else weight.narrow(dim, 0, 0)
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(
        DTensor.from_local(
            part.clone(), mesh, [Shard(dim)], run_check=False, shape=weight.shape, stride=weight.stride()
        )
    )
    return module


def _stage_all(files: Files, ranks: Any, weight: torch.Tensor, world_size: int, *, dim: int = 0) -> list[SourceFile]:
    opened: list[SourceFile] = []
    for rank in range(world_size):
        module = _sharded(weight, ranks(rank, world_size), dim)
        optimizer = torch.optim.AdamW(module.parameters())
        (parameter,) = module.parameters()
        mesh = parameter.device_mesh
        moment = DTensor.from_local(
            parameter.to_local().detach() * 2,
            mesh,
            [Shard(dim)],
            run_check=False,
            shape=weight.shape,
            stride=weight.stride(),
        )
        optimizer.state[parameter] = {"step": torch.tensor(7.0), "exp_avg": moment, "exp_avg_sq": moment}
        raw = stage(TrainingState(model=module, optimizer=optimizer), rank=rank, world_size=world_size)
        opened.append(files.on_disk(raw, f"rank-{rank:05d}-of-{world_size:05d}.safetensors"))
    return opened


def test_sharded_tensors_are_stored_with_their_offsets(files: Files, ranks: Any) -> None:
    weight = torch.randn(5, 3)
    _, tensors = read_headers(_stage_all(files, ranks, weight, 2))
    parts = tensors["model.weight"]
    assert sorted((part.saved_offsets, part.shape) for part in parts) == [((0, 0), (3, 3)), ((3, 0), (2, 3))]


@pytest.mark.parametrize("then", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_sharded_tensors_are_restored_onto_another_number_of_ranks(
    files: Files, ranks: Any, then: int, dim: int
) -> None:
    weight = torch.randn(5, 7)
    opened = _stage_all(files, ranks, weight, 2)
    for rank in range(then):
        module = _sharded(torch.zeros(5, 7), ranks(rank, then), dim)
        (parameter,) = module.parameters()
        optimizer = torch.optim.AdamW(module.parameters())
        restore(TrainingState(model=module, optimizer=optimizer, rng=False), opened)
        expected = _sharded(weight, parameter.device_mesh, dim).weight.to_local()
        moment = optimizer.state[parameter]["exp_avg"]
        assert isinstance(moment, DTensor)
        assert torch.equal(parameter.to_local(), expected)
        assert torch.equal(moment.to_local(), expected * 2)
        assert optimizer.state[parameter]["step"] == 7.0


@pytest.mark.parametrize("then", [1, 2, 3, 4, 8])
def test_only_the_chunks_with_this_ranks_rows_are_read(files: Files, ranks: Any, then: int) -> None:
    rows = 24 * 256
    opened = _stage_all(files, ranks, torch.randn(rows, 64), 2)
    size_bytes = 3 * rows * 64 * 4  # the weight and two moments
    total = sum(source.entry.size_bytes for source in opened)
    shards, tensors = read_headers(opened)
    for rank in range(then):
        module = _sharded(torch.zeros(rows, 64), ranks(rank, then))
        state = TrainingState(model=module, optimizer=torch.optim.AdamW(module.parameters()), rng=False)
        plan = state.plan_restore(StoredState(shards[opened[0].name].tierd["state"], tensors))
        read_bytes = ReadPlan(opened, plan.destinations.values()).run()
        spans = 3 * (2 if then in (1, 3) else 1)  # pieces of files that this rank's rows lie in
        assert size_bytes // then <= read_bytes <= min(total, size_bytes // then + (2 * spans + 1) * CHUNK_BYTES)


def test_sharded_tensor_with_a_missing_part_is_a_mismatch(files: Files, ranks: Any) -> None:
    opened = _stage_all(files, ranks, torch.randn(6, 3), 3)
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.zeros(6, 3))
    with pytest.raises(Mismatch, match=r"model\.weight: the shards contain 12 of its 18 elements"):
        restore(TrainingState(model=module), [opened[0], opened[2]])


@pytest.mark.filterwarnings("ignore")
def test_stock_pytorch_assembles_the_shards(files: Files, ranks: Any) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    weight = torch.randn(5, 3)
    _stage_all(files, ranks, weight, 3)
    torch.distributed.destroy_process_group()
    loaded = {"model.weight": torch.zeros(5, 3), "optimizer.state.weight.exp_avg": torch.zeros(5, 3)}
    dcp.load(loaded, storage_reader=HuggingFaceStorageReader(str(files.folder)), no_dist=True)
    assert torch.equal(loaded["model.weight"], weight)
    assert torch.equal(loaded["optimizer.state.weight.exp_avg"], weight * 2)


def test_replicated_dtensor_is_stored_as_one_tensor_under_its_name(ranks: Any) -> None:
    whole = DTensor.from_local(torch.ones(3), ranks(1, 2), [Replicate()], run_check=False)
    replicated = capture_tensor("model.weight", whole)
    assert (replicated.key, replicated.saved_offsets, replicated.shape) == ("model.weight", (0,), (3,))
    sharded = capture_tensor("model.weight", _sharded(torch.ones(4), ranks(1, 2)).weight)
    assert sharded.key == "model.weight[2]"


def test_dtensor_with_pending_sums_is_refused(ranks: Any) -> None:
    from torch.distributed.tensor import Partial

    with pytest.raises(Unsupported, match=r"model\.weight"):
        capture_tensor("model.weight", DTensor.from_local(torch.ones(3), ranks(0, 2), [Partial()], run_check=False))


def test_one_tensor_of_a_checkpoint_is_read_by_name(files: Files) -> None:
    source = files.in_memory(stage(TrainingState(model=model_of(fill=2.0))))
    into = torch.zeros(3)
    ReadPlan([source], [region("model.1.bias", into, (0,), (3,))]).run()
    assert into.tolist() == [2.0, 2.0, 2.0]
