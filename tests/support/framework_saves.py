"""Checkpoints as frameworks lay them out and in the order in which they write them, by a writer that can be killed.

The orders are those of transformers 5 (Trainer._save_checkpoint), lightning 2.6, accelerate 1.15
(save_accelerator_state), torch.distributed.checkpoint.FileSystemWriter, and DeepSpeed (save_checkpoint). The killed
writer stops before any of its file operations; a write has several.
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

PIECE_BYTES = 32


def archive(size_bytes: int = 300) -> bytes:
    """As torch.save writes one: a zip archive, stored, without a comment."""
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as file:
        file.writestr("archive/data.pkl", b"x" * size_bytes)
        file.writestr("archive/data/0", b"PK\x05\x06" * 5)
    return raw.getvalue()


def safetensors(values: int = 16) -> bytes:
    header = json.dumps({"weight": {"dtype": "F32", "shape": [values], "data_offsets": [0, 4 * values]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4 * values)


def state(step: int) -> bytes:
    return json.dumps({"global_step": step, "log_history": [{"loss": float("nan")}]}).encode()


class Killed(Exception):
    pass


class Writer:
    """Is killed before its operation number `dies_at`; -1: never. `done`: how many it has done."""

    def __init__(self, dies_at: int = -1) -> None:
        self.done, self._dies_at = 0, dies_at

    def _step(self) -> None:
        if self.done == self._dies_at:
            raise Killed
        self.done += 1

    def write(self, path: Path, content: bytes) -> None:
        """As most frameworks: opens and truncates the file, then writes."""
        self._step()
        with path.open("wb", buffering=0) as file:
            for begin in range(0, len(content), PIECE_BYTES):
                self._step()
                file.write(content[begin : begin + PIECE_BYTES])

    def mkdir(self, path: Path) -> Path:
        self._step()
        path.mkdir(exist_ok=True)
        return path

    def rename(self, path: Path, to: Path) -> None:
        self._step()
        path.rename(to)

    def delete(self, path: Path) -> None:
        """As shutil.rmtree, in no certain order."""
        if path.is_dir():
            for each in sorted(path.iterdir()):
                self.delete(each)
            self._step()
            path.rmdir()
        else:
            self._step()
            path.unlink()


def save_hf(root: Path, step: int, writer: Writer) -> Path:
    folder = writer.mkdir(root / f"checkpoint-{step}")
    writer.write(folder / "config.json", b"{}")
    writer.write(folder / "model.safetensors", safetensors())
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        writer.write(folder / name, archive(800))
    writer.write(folder / "trainer_state.json", state(step))
    return folder


def save_lightning(root: Path, step: int, writer: Writer) -> Path:
    path = root / f"epoch=3-step={step}.ckpt"
    writer.write(path, archive(3500))
    return path


def save_accelerate(root: Path, step: int, writer: Writer) -> Path:
    folder = writer.mkdir(root / f"checkpoint_{step}")
    writer.write(folder / "model.safetensors", safetensors())
    for name in ("optimizer.bin", "scheduler.bin", "sampler.bin", "random_states_0.pkl", "custom_checkpoint_0.pkl"):
        writer.write(folder / name, archive(400))
    return folder


def save_dcp(root: Path, step: int, writer: Writer) -> Path:
    folder = writer.mkdir(root / f"step-{step}")
    for rank in range(4):
        writer.write(folder / f"__{rank}_0.distcp", archive(600))
    writer.write(folder / ".metadata.tmp", b"pickled" * 40)
    writer.rename(folder / ".metadata.tmp", folder / ".metadata")
    return folder


def save_deepspeed(root: Path, step: int, writer: Writer) -> Path:
    folder = writer.mkdir(root / f"global_step{step}")
    for rank in range(4):
        writer.write(folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", archive(600))
    writer.write(folder / "mp_rank_00_model_states.pt", archive(600))
    writer.write(root / "latest", folder.name.encode())
    return folder


def save_deepspeed_on(roots: Sequence[Path], step: int, *, model: bytes = b"") -> list[Path]:
    """Each node into its own folder, with `use_node_local_storage`: its part of the optimizer, the same model as the
    others, or with `model` another one on the last node, and `latest`."""
    same = archive(600)
    folders: list[Path] = []
    for node, root in enumerate(roots):
        folder = root / f"global_step{step}"
        folder.mkdir(exist_ok=True)
        for rank in (2 * node, 2 * node + 1):
            path = folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            path.write_bytes(archive(600 + rank))
            path.chmod(0o640)
        is_other = model and root is roots[-1]
        (folder / "mp_rank_00_model_states.pt").write_bytes(model if is_other else same)
        (folder / f"empty-{node}").mkdir(exist_ok=True)
        folders.append(folder)
    for folder in folders:
        (folder.parent / "latest").write_text(folder.name)
    return folders


def save_dcp_on(roots: Sequence[Path], step: int) -> list[Path]:
    """Each node into its own folder; the coordinator, on the first node, writes .metadata last."""
    folders: list[Path] = []
    for node, root in enumerate(roots):
        folder = root / f"step-{step}"
        folder.mkdir(exist_ok=True)
        (folder / f"__{node}_0.distcp").write_bytes(archive(600 + node))
        folders.append(folder)
    (folders[0] / ".metadata.tmp").write_bytes(b"pickled" * 40)
    (folders[0] / ".metadata.tmp").rename(folders[0] / ".metadata")
    return folders


def save_gpt_simple(root: Path, step: int, writer: Writer) -> Path:
    folder = writer.mkdir(root / f"checkpoint-{step}-shutdown")
    writer.write(writer.mkdir(folder / "model") / "model.safetensors", safetensors())
    writer.write(writer.mkdir(folder / "rng") / "rank-0.pt", archive(600))
    for name in ("optimizer.bin", "scheduler.bin"):
        writer.write(folder / name, archive(700))
    writer.write(folder / "trainer_state.json", state(step))
    return folder


def save_step_bin(root: Path, step: int, writer: Writer) -> Path:
    path = root / f"step_{step:06d}.bin"
    writer.write(path, struct.pack("<ii", step, 300) + bytes(12 * 300))
    return path


SAVES: dict[str, Callable[[Path, int, Writer], Path]] = {
    "hf-trainer": save_hf,
    "lightning": save_lightning,
    "accelerate": save_accelerate,
    "dcp": save_dcp,
    "deepspeed": save_deepspeed,
    "gpt-simple": save_gpt_simple,
    "step-bin": save_step_bin,
}
