"""A small training, and its state as bytes: capture and stage it as a shard, open shards, restore from them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tierd_client.restore.load import ReadPlan, SourceFile, read_headers
from tierd_client.slots.slot import Slot
from tierd_client.snapshot.staging import Stager, Staging
from tierd_client.state.restore_filter import EXACT, RestoreFilter
from tierd_client.state.restore_report import RestoreReport
from tierd_client.state.stored_state import StoredState
from tierd_client.state.tensors import DTYPE_NAMES, as_bytes
from tierd_client.state.training_state import Capturable, Captured, State, TrainingState

from tests.support.cli import make_manifest
from tierd.format import checksum
from tierd.format.ids import checkpoint_id
from tierd.format.manifest import FileEntry, file_entry
from tierd.format.shard import FORMAT_VERSION, TensorSpec, plan_layout

CHUNK_BYTES = 1 << 16


def metadata(tree: Any, *, step: int = 5, rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "run": "run",
        "step": step,
        "generation": 1,
        "rank": rank,
        "world_size": world_size,
        "state": tree,
    }


def shard_of(parts: list[tuple[str, torch.Tensor, tuple[int, ...]]], tree: Any = None, *, rank: int = 0) -> bytes:
    """A shard with these parts of tensors: (name, part, offsets of the part in the whole tensor)."""
    names = {name: tensor.contiguous() for name, tensor, _ in parts}
    specs = [
        TensorSpec(name=name, dtype=DTYPE_NAMES[tensor.dtype], shape=tuple(tensor.shape), saved_offsets=at)
        for name, tensor, at in parts
    ]
    tierd = metadata(tree or {}, rank=rank)
    layout = plan_layout(specs, tierd)
    return layout.encode_header(tierd) + b"".join(as_bytes(names[entry.name]).numpy().data for entry in layout.tensors)


def commit(root: Path, raws: list[bytes], *, run: str = "run", step: int = 5, chunk_bytes: int = CHUNK_BYTES) -> Path:
    """Writes the shards as a committed checkpoint of the tier at `root`. Returns its folder."""
    checkpoint = checkpoint_id(run, step, 1)
    names = [f"rank-{rank:05d}-of-{len(raws):05d}.safetensors" for rank in range(len(raws))]
    files = [entry_of(raw, name, chunk_bytes) for name, raw in zip(names, raws, strict=True)]
    manifest = make_manifest(checkpoint, files)
    folder = root / checkpoint.run / checkpoint.name
    folder.mkdir(parents=True)
    for entry, raw in zip(files, raws, strict=True):
        (folder / entry.name).write_bytes(raw)
    (folder / "manifest.json").write_bytes(manifest.encode())
    return folder


def stage(state: Capturable, *, rank: int = 0, world_size: int = 1, owned: set[str] | None = None) -> bytes:
    """The shard that one rank writes."""
    captured = state.capture(rank, world_size)
    if owned is not None:
        captured = Captured([tensor for tensor in captured.tensors if tensor.key in owned], captured.tree)
    tierd = metadata(captured.tree, rank=rank, world_size=world_size)
    stager = Stager()
    slot = Slot.create(stager.plan(captured, tierd).size_bytes)
    try:
        return stage_into(slot, stager, captured, tierd)
    finally:
        slot.close()


def stage_into(slot: Slot, stager: Stager, captured: Captured, metadata: dict[str, Any]) -> bytes:
    """Copy all of it during the call. The bytes of the shard."""
    staging = stager.begin(captured, slot, metadata, {})
    staging.finish()
    return staged_bytes(slot, staging)


def staged_bytes(slot: Slot, staging: Staging) -> bytes:
    return bytes(slot.tensor.numpy().data[: staging.layout.size_bytes])


def entry_of(raw: bytes, name: str = "rank-00000-of-00001.safetensors", chunk_bytes: int = CHUNK_BYTES) -> FileEntry:
    chunks = [checksum.crc64nvme(raw[at : at + size]) for at, size in checksum.chunk_ranges(len(raw), chunk_bytes)]
    return file_entry(name, len(raw), chunk_bytes, chunks)


@dataclass
class Files:
    """Shards in files or in sealed memory, opened as for a restore."""

    folder: Path
    opened: list[int] = field(default_factory=list[int])
    slots: list[Slot] = field(default_factory=list[Slot])

    def on_disk(self, raw: bytes, name: str = "rank-00000-of-00001.safetensors", **entry: Any) -> SourceFile:
        (self.folder / name).write_bytes(raw)
        self.opened.append(os.open(self.folder / name, os.O_RDONLY))
        return SourceFile(name, self.opened[-1], entry_of(raw, name, **entry))

    def in_memory(self, raw: bytes, name: str = "rank-00000-of-00001.safetensors", **entry: Any) -> SourceFile:
        """As a slot of another process."""
        self._fill_slot(raw).close()
        return SourceFile(name, self.opened[-1], entry_of(raw, name, **entry))

    def in_own_slot(self, raw: bytes, name: str = "rank-00000-of-00001.safetensors", **entry: Any) -> SourceFile:
        """As a slot that was adopted from a killed trainer."""
        self.slots.append(self._fill_slot(raw))
        return SourceFile(name, self.opened[-1], entry_of(raw, name, **entry))

    def _fill_slot(self, raw: bytes) -> Slot:
        slot = Slot.create(len(raw))
        slot.tensor.numpy().data[: len(raw)] = raw
        self.opened.append(os.dup(slot.fd))
        return slot

    def close(self) -> None:
        for slot in self.slots:
            slot.close()
        for descriptor in self.opened:
            os.close(descriptor)


def restore(state: State, files: list[SourceFile], *, rank: int = 0, filter: RestoreFilter = EXACT) -> RestoreReport:
    shards, tensors = read_headers(files)
    tree = next(shard.tierd["state"] for shard in shards.values() if shard.tierd["rank"] == rank)
    plan = state.plan_restore(StoredState(tree, tensors), filter=filter)
    plan.run(lambda tensors, *, is_verified=True: ReadPlan(files, tensors).run(is_verified=is_verified))
    return plan.report


@dataclass
class Training:
    """Dropout, AdamW, a scheduler and an EMA, on numbers drawn from the global generators."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    ema: torch.optim.swa_utils.AveragedModel
    extra: dict[str, Any]

    @classmethod
    def fresh(cls, seed: int = 0) -> Training:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 4)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[3, 7], gamma=0.5)
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average)
        return cls(model, optimizer, scheduler, ema, {"seen": 0})

    def state(self) -> TrainingState:
        return TrainingState(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, ema=self.ema, extra=self.extra
        )

    def train(self, steps: int) -> list[float]:
        losses: list[float] = []
        for _ in range(steps):
            loss = self.model(torch.randn(16, 8)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.ema.update_parameters(self.model)
            self.extra["seen"] += 16
            losses.append(loss.item())
        return losses


def one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, forward: Callable[[], torch.Tensor]) -> None:
    forward().float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Every leaf of nested dicts and lists, with its path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]")
    else:
        yield path, value


def assert_same(actual: object, expected: object) -> None:
    """The same paths, types, dtypes, and bits."""
    actual_leaves, expected_leaves = dict(leaves(actual)), dict(leaves(expected))
    assert actual_leaves.keys() == expected_leaves.keys()
    for path, value in expected_leaves.items():
        other = actual_leaves[path]
        assert type(other) is type(value), path
        if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
            assert other.dtype == value.dtype, path
            assert other.shape == value.shape, path
            assert torch.equal(_bits(other), _bits(value)), path
        else:
            assert other == value, path


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def small_net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))


class Loader:
    """A data loader with a settable state."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def names(state: TrainingState) -> set[str]:
    return {tensor.name for tensor in state.capture(0, 1).tensors}


def plan(state: TrainingState, source: SourceFile) -> None:
    """Plans the restore of the shard into the state, without reading it."""
    state.plan_restore(StoredState(source.shard().tierd["state"], read_headers([source])[1]))


def of_bfloat16() -> TrainingState:
    model = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    return TrainingState(model=model, optimizer=optimizer)
