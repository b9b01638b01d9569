"""Which checkpoints in a watched folder are complete: a writer that is killed anywhere leaves none that is torn."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tierd.lifecycle.watched import PRESETS, Listed, Preset, Verdicts, fitting, judge

NOW_S = 4e9  # long after every write
Write = Callable[[Path, bytes], None]


def archive(size_bytes: int = 300) -> bytes:
    """As torch.save writes one: a zip archive, stored, without a comment."""
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as file:
        file.writestr("archive/data.pkl", b"x" * size_bytes)
        file.writestr("archive/data/0", b"PK\x05\x06" * 20)
    return raw.getvalue()


def save_hf(root: Path, step: int, write: Write) -> str:
    folder = root / f"checkpoint-{step}"
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        write(folder / name, archive(90))
    write(folder / "trainer_state.json", json.dumps({"global_step": step, "log_history": [{"loss": 0.5}]}).encode())
    return folder.name


def save_lightning(root: Path, step: int, write: Write) -> str:
    path = root / f"epoch=3-step={step}.ckpt"
    write(path, archive(900))
    return path.name


def save_dcp(root: Path, step: int, write: Write) -> str:
    folder = root / f"step-{step}"
    folder.mkdir(exist_ok=True)
    for rank in range(4):
        write(folder / f"__{rank}_0.distcp", archive(150))
    write(folder / ".metadata.tmp", b"pickled" * 20)
    (folder / ".metadata.tmp").rename(folder / ".metadata")
    return folder.name


def save_deepspeed(root: Path, step: int, write: Write) -> str:
    folder = root / f"global_step{step}"
    folder.mkdir(exist_ok=True)
    for rank in range(4):
        write(folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", archive(150))
    write(folder / "mp_rank_00_model_states.pt", archive(150))
    write(root / "latest", folder.name.encode())
    return folder.name


SAVES = {"hf-trainer": save_hf, "lightning": save_lightning, "dcp": save_dcp, "deepspeed": save_deepspeed}


def listed(root: Path, preset: Preset) -> list[Listed]:
    found: list[Listed] = []
    for path in root.iterdir():
        files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
        marker = path / preset.marker if preset.marker else path
        found.append(
            Listed(
                name=path.name,
                is_folder=path.is_dir(),
                modified_s=max((file.stat().st_mtime for file in files), default=0.0),
                files=frozenset(str(file.relative_to(root)) for file in files),
                marker=marker.read_bytes() if marker.is_file() else None,
                marker_modified_s=marker.stat().st_mtime if marker.is_file() else 0.0,
            )
        )
    return found


def judged(root: Path, preset: Preset, *, now_s: float = NOW_S) -> Verdicts:
    beside = root / preset.beside
    content = (beside.read_bytes(), beside.stat().st_mtime) if preset.beside and beside.exists() else (b"", 0.0)
    return judge(listed(root, preset), preset, now_s=now_s, quiet_s=5.0, beside=content)


class Killed(Exception):
    pass


class Writer:
    """Writes in pieces of 16 bytes, and is killed before piece number `dies_at`."""

    def __init__(self, dies_at: int) -> None:
        self.pieces, self._dies_at = 0, dies_at

    def __call__(self, path: Path, content: bytes) -> None:
        with path.open("wb", buffering=0) as file:
            for begin in range(0, len(content), 16):
                if self.pieces == self._dies_at:
                    raise Killed
                self.pieces += 1
                file.write(content[begin : begin + 16])


@pytest.mark.parametrize("name", SAVES)
def test_a_writer_killed_at_every_point_of_its_save_leaves_nothing_complete(tmp_path: Path, name: str) -> None:
    preset, save = PRESETS[name], SAVES[name]
    (tmp_path / "whole").mkdir()
    whole = Writer(-1)
    done = save(tmp_path / "whole", 200, whole)
    assert judged(tmp_path / "whole", preset).complete == {done: 200}
    expected = {path.relative_to(tmp_path / "whole"): path.read_bytes() for path in _files(tmp_path / "whole")}
    root = tmp_path / "killed"
    root.mkdir()
    former = save(root, 100, Writer(-1))
    assert whole.pieces >= 60
    for dies_at in range(whole.pieces):
        with pytest.raises(Killed):
            save(root, 200, Writer(dies_at))
        complete = judged(root, preset).complete
        if done in complete:  # its last bytes may be beyond what a checkpoint needs, as the end of `latest`
            found = {path.relative_to(root): path.read_bytes() for path in _files(root)}
            assert all(found[path] == raw for path, raw in expected.items()), f"torn at piece {dies_at}"
        else:
            assert former in complete or name == "deepspeed", "a save that fails hides no former checkpoint"
        _clear(root, done)


@pytest.mark.parametrize("name", ["hf-trainer", "dcp", "deepspeed"])
def test_a_writer_killed_while_it_saves_over_a_former_checkpoint_leaves_nothing_complete(
    tmp_path: Path, name: str
) -> None:
    preset, save, whole = PRESETS[name], SAVES[name], Writer(-1)
    done = save(tmp_path, 200, whole)
    for dies_at in range(0, whole.pieces - 1, 3):
        for file in _files(tmp_path):  # a marker that the former save has left is old
            os.utime(file, (1e9, 1e9))
        with pytest.raises(Killed):
            save(tmp_path, 200, Writer(dies_at + 1))
        if done in judged(tmp_path, preset).complete:
            last = tmp_path / preset.beside if preset.beside else tmp_path / done / preset.marker
            assert last.stat().st_mtime > 1e9, f"torn at piece {dies_at}"


def _files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def _clear(root: Path, name: str) -> None:
    path = root / name
    for file in _files(path) if path.is_dir() else [path] * path.exists():
        file.unlink()


@pytest.mark.parametrize("name", SAVES)
def test_a_checkpoint_waits_until_nothing_was_written_for_a_while(tmp_path: Path, name: str) -> None:
    done = SAVES[name](tmp_path, 7, Writer(-1))
    written_s = max(file.stat().st_mtime for file in _files(tmp_path))
    assert "ago" in judged(tmp_path, PRESETS[name], now_s=written_s + 4.9).waiting[done]
    assert judged(tmp_path, PRESETS[name], now_s=written_s + 5.1).complete == {done: 7}


def test_names_that_are_no_steps_are_told_and_a_fitting_preset_is_named(tmp_path: Path) -> None:
    save_dcp(tmp_path, 5, Writer(-1))
    (tmp_path / "runs").mkdir()
    (tmp_path / f"checkpoint-{'9' * 13}").mkdir()
    verdicts = judged(tmp_path, PRESETS["hf-trainer"])
    assert verdicts.complete == {}
    assert sorted(verdicts.other) == [f"checkpoint-{'9' * 13}", "runs", "step-5"]
    assert fitting({path.name: path.is_dir() for path in tmp_path.iterdir()}) == ["dcp"]
