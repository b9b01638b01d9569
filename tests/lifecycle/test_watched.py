"""Which checkpoints in a watched folder are complete: a writer that is killed anywhere leaves none that is torn."""

from __future__ import annotations

import os
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from tests.support.foreign import contents
from tests.support.framework_saves import (
    SAVES,
    Killed,
    Writer,
    archive,
    safetensors,
    save_accelerate,
    save_dcp,
    save_deepspeed,
    save_gpt_simple,
    save_hf,
    save_step_bin,
    state,
)
from tierd.config.sections import WatchConfig
from tierd.lifecycle.watched import PRESETS, Preset, Verdicts, Whole, judge, misfit, preset_of
from tierd.transfer.source_tree import scan
from tierd.transfer.watched_folder import listed, names, read_beside

OLD = (1e9, 1e9)


def judged(root: Path, preset: Preset, *, unchanged_s: float = 60.0, quiet_s: float = 5.0) -> Verdicts:
    trees = [scan(root / name, may_be_empty=True) for name in sorted(names(root).folders)]
    found = [listed(tree, preset, unchanged_s=unchanged_s) for tree in trees]
    return judge(found, preset, quiet_s=quiet_s, beside=read_beside(root, preset.beside) if preset.beside else (b"", 0))


def watch_of(**keys: object) -> WatchConfig:
    return WatchConfig(path="out", run="run", **keys)  # pyright: ignore[reportArgumentType]


def is_whole(found: Path, whole: Path) -> bool:
    """All bytes of the checkpoint are there; only times differ."""
    if whole.is_file():
        return found.read_bytes() == whole.read_bytes()
    return {path: entry[:2] for path, entry in contents(found).items()} == {
        path: entry[:2] for path, entry in contents(whole).items()
    }


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long) if name in ("accelerate", "gpt-simple") else name for name in SAVES],
)
def test_a_writer_killed_at_every_point_of_its_save_leaves_nothing_complete(tmp_path: Path, name: str) -> None:
    preset, save = PRESETS[name], SAVES[name]
    (tmp_path / "whole").mkdir()
    writer = Writer()
    whole = save(tmp_path / "whole", 200, writer)
    assert judged(tmp_path / "whole", preset).complete == {whole.name: 200}
    assert writer.done >= 100
    root = tmp_path / "killed"
    root.mkdir()
    former = save(root, 100, Writer())
    for dies_at in range(writer.done):
        with pytest.raises(Killed):
            save(root, 200, Writer(dies_at))
        complete = judged(root, preset).complete
        if whole.name in complete:  # a name or JSON may be whole before its last bytes, which are a line break
            assert is_whole(root / whole.name, whole), f"torn at operation {dies_at}"
        else:
            assert former.name in complete or name == "deepspeed", "a save that fails hides no former checkpoint"
        if (root / whole.name).exists():
            Writer().delete(root / whole.name)


@pytest.mark.parametrize("name", [name for name in SAVES if name not in ("lightning", "step-bin")])
def test_a_rotation_killed_at_every_point_leaves_nothing_complete(tmp_path: Path, name: str) -> None:
    preset, save = PRESETS[name], SAVES[name]
    folder, writer = save(tmp_path, 200, Writer()), Writer()
    count = sum(1 for _ in folder.rglob("*"))
    for dies_at in range(1, count + 1):
        for path in folder.rglob("*"):  # the save was a while ago
            os.utime(path, OLD)
        with pytest.raises(Killed):
            Writer(dies_at).delete(folder)
        assert judged(tmp_path, preset).complete == {}, f"torn at deletion {dies_at}"
        writer.delete(folder)
        save(tmp_path, 200, Writer())


@pytest.mark.parametrize("name", ["hf-trainer", "dcp", "deepspeed", "gpt-simple"])
def test_a_writer_killed_while_it_saves_over_a_former_checkpoint_leaves_nothing_complete(
    tmp_path: Path, name: str
) -> None:
    preset, save, writer = PRESETS[name], SAVES[name], Writer()
    done = save(tmp_path, 200, writer)
    for dies_at in range(3, writer.done, 3):
        for path in tmp_path.rglob("*"):  # a marker that the former save has left is old
            os.utime(path, OLD)
        with pytest.raises(Killed):
            save(tmp_path, 200, Writer(dies_at))
        if done.name in judged(tmp_path, preset).complete:
            last = tmp_path / preset.beside if preset.beside else done / preset.marker
            assert last.stat().st_mtime > OLD[0], f"torn at operation {dies_at}"


@pytest.mark.parametrize("name", SAVES)
def test_a_checkpoint_waits_until_nothing_has_changed_for_a_while(tmp_path: Path, name: str) -> None:
    done = SAVES[name](tmp_path, 7, Writer())
    verdicts = judged(tmp_path, PRESETS[name], unchanged_s=4.9)
    assert "unchanged" in verdicts.waiting[done.name]
    assert verdicts.quiet == {done.name}
    assert judged(tmp_path, PRESETS[name], unchanged_s=5.0).complete == {done.name: 7}


def test_names_that_are_no_steps_are_told_and_a_fitting_preset_is_named(tmp_path: Path) -> None:
    save_dcp(tmp_path, 5, Writer())
    (tmp_path / "runs").mkdir()
    (tmp_path / f"checkpoint-{'9' * 13}").mkdir()
    verdicts = judged(tmp_path, PRESETS["hf-trainer"])
    assert verdicts.complete == {}
    assert sorted(verdicts.other) == [f"checkpoint-{'9' * 13}", "runs", "step-5"]
    error = misfit("watch out", names(tmp_path).folders, PRESETS["hf-trainer"])
    assert error is not None
    assert "there is step-5" in error.message
    assert 'preset = "dcp" or preset = "torchtitan"' in error.hint
    assert misfit("out", {"runs": True}, PRESETS["dcp"]) is None


def test_a_shard_of_another_rank_that_is_cut_keeps_a_checkpoint_from_being_complete(tmp_path: Path) -> None:
    folder = save_hf(tmp_path, 7, Writer())
    for name, content in (
        ("rng_state_1.pth", archive()[:-1]),
        ("extra.safetensors", safetensors()[:-1]),
        ("x.pt", b""),
    ):
        (folder / name).write_bytes(content)
        assert judged(tmp_path, PRESETS["hf-trainer"]).waiting == {folder.name: f"{name} is not whole"}
        (folder / name).write_bytes(archive() if name != "extra.safetensors" else safetensors())
    assert judged(tmp_path, PRESETS["hf-trainer"]).complete == {folder.name: 7}


def test_accelerate_writes_registered_objects_last_as_other_checkpoints_show(tmp_path: Path) -> None:
    save_accelerate(tmp_path, 1, Writer())
    folder = save_accelerate(tmp_path, 2, Writer())
    (folder / "custom_checkpoint_0.pkl").unlink()
    assert "custom_checkpoint_0.pkl is not there yet" in judged(tmp_path, PRESETS["accelerate"]).waiting[folder.name]


def test_deepspeed_has_no_other_checkpoint_than_latest_names(tmp_path: Path) -> None:
    save_deepspeed(tmp_path, 1, Writer())
    save_deepspeed(tmp_path, 2, Writer())
    verdicts = judged(tmp_path, PRESETS["deepspeed"])
    assert verdicts.complete == {"global_step2": 2}
    assert verdicts.waiting == {"global_step1": "latest does not name it"}


def test_gpt_simple_takes_the_step_of_final_from_its_state_and_needs_every_part(tmp_path: Path) -> None:
    folder = save_gpt_simple(tmp_path, 7, Writer()).rename(tmp_path / "final")
    assert judged(tmp_path, PRESETS["gpt-simple"]).complete == {"final": 7}
    (folder / "trainer_state.json").write_bytes(b'{"loss": 1}')
    assert judged(tmp_path, PRESETS["gpt-simple"]).waiting == {"final": "trainer_state.json names no step"}
    (folder / "trainer_state.json").write_bytes(state(7))
    (folder / "rng/rank-0.pt").rename(folder / "rank-0.pt")
    assert judged(tmp_path, PRESETS["gpt-simple"]).waiting == {"final": "rng/ is not there yet"}


def test_a_flat_file_of_another_step_or_size_than_its_header_says_is_not_complete(tmp_path: Path) -> None:
    path = save_step_bin(tmp_path, 7, Writer())
    path.rename(tmp_path / "step_000008.bin")
    save_step_bin(tmp_path, 9, Writer())
    with (tmp_path / "step_000009.bin").open("ab") as file:
        file.write(b"x")
    waiting = judged(tmp_path, PRESETS["step-bin"]).waiting
    assert "is of step 7" in waiting["step_000008.bin"]
    assert "its header says 3608" in waiting["step_000009.bin"]


@pytest.mark.parametrize(
    ("pattern", "name", "step"),
    [
        ("ckpt-{step}.pt", "ckpt-0012.pt", 12),
        ("*_{step}/", "model_v2_77", 77),
        ("*{step}.pt", "a123.pt", 123),
        ("it?{step}*", "it-5-loss=0.3", 5),
        ("step.{step}", "stepX5", None),
        ("*-{step}.pt", "a\nb-5.pt", 5),
        ("ckpt-{step}/", "ckpt-5/x", None),
    ],
)
def test_a_pattern_finds_the_whole_number(pattern: str, name: str, step: int | None) -> None:
    preset = preset_of(watch_of(pattern=pattern, renamed=pattern.endswith("/")))
    match = preset.pattern.fullmatch(name)
    assert (match and int(match["step"])) == step
    assert preset.is_folder == pattern.endswith("/")


def test_files_of_a_pattern_are_complete_as_their_format_says_or_when_they_are_renamed(tmp_path: Path) -> None:
    contents_of = {
        "a-1": archive(),
        "a-2": archive()[:-1],
        "a-3.safetensors": safetensors(),
        "a-4": b"unknown",
        "a-5": b"",
    }
    for name, content in contents_of.items():
        (tmp_path / name).write_bytes(content)
    verdicts = judged(tmp_path, preset_of(watch_of(pattern="a-{step}*")))
    assert verdicts.complete == {"a-1": 1, "a-3.safetensors": 3}
    assert "renamed = true" in verdicts.waiting["a-4"]
    assert verdicts.waiting["a-2"] == "a-2 is not whole"
    renamed = judged(tmp_path, preset_of(watch_of(pattern="a-{step}*", renamed=True)))
    assert sorted(renamed.complete.values()) == [1, 2, 3, 4, 5]


def test_a_folder_that_is_renamed_into_place_is_complete_until_a_file_in_it_is_deleted(tmp_path: Path) -> None:
    preset = preset_of(watch_of(pattern="a-{step}/", renamed=True))
    for step in (1, 2):
        folder = tmp_path / f"tmp-{step}"
        (folder / "deep").mkdir(parents=True)
        for name in ("weights.pt", "deep/more"):
            (folder / name).write_bytes(archive())
        folder.rename(tmp_path / f"a-{step}")
    assert judged(tmp_path, preset).complete == {"a-1": 1, "a-2": 2}
    for path in tmp_path.rglob("*"):
        os.utime(path, OLD)
    (tmp_path / "a-2/deep/more").unlink()
    verdicts = judged(tmp_path, preset)
    assert (verdicts.complete, list(verdicts.waiting)) == ({"a-1": 1}, ["a-2"])


def test_folders_of_a_pattern_are_complete_when_their_marker_is_there(tmp_path: Path) -> None:
    preset = preset_of(watch_of(pattern="it{step}/", marker="DONE"))
    (tmp_path / "it5").mkdir()
    (tmp_path / "it5/weights").write_bytes(b"w")
    assert judged(tmp_path, preset).waiting == {"it5": "DONE is not there yet"}
    (tmp_path / "it5/DONE").touch()
    assert judged(tmp_path, preset).complete == {"it5": 5}
    own = preset_of(watch_of(preset="accelerate", marker="custom_checkpoint_0.pkl"))
    save_accelerate(tmp_path, 2, Writer())
    assert judged(tmp_path, own).complete == {"checkpoint_2": 2}
    (tmp_path / "checkpoint_2/custom_checkpoint_0.pkl").unlink()
    assert judged(tmp_path, own).complete == {}


def test_every_preset_can_be_named_in_a_config() -> None:
    assert set(get_args(get_type_hints(WatchConfig)["preset"])) == {"", *PRESETS}


@pytest.mark.parametrize("name", ["dcp", "torchtitan"])
def test_of_dcp_the_other_nodes_have_no_last_file_unless_the_config_names_one(name: str) -> None:
    first, other = (preset_of(watch_of(preset=name, nodes=4, node=node)) for node in (0, 3))
    assert (first.marker, first.whole) == (".metadata", Whole.PRESENT)
    assert (other.marker, other.whole) == ("", Whole.ANNOUNCED)
    assert preset_of(watch_of(preset=name, nodes=4, node=3, marker="DONE")).marker == "DONE"
    assert preset_of(watch_of(preset="deepspeed", nodes=4, node=3)) == PRESETS["deepspeed"]
