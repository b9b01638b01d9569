"""`tierd adopt`: the folder of another program comes back byte for byte, or the command says why it cannot."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.cli import House, flip_a_bit, make_checkpoint, make_house
from tests.support.daemon import Daemon
from tests.support.foreign import contents, make_folder, write
from tests.support.processes import ENVIRONMENT, ForkedProcess, run_tierd
from tests.support.state import Training, assert_same
from tests.support.waiting import wait_until
from tests.support.wire_peer import Peer
from tierd.format import wire
from tierd.transfer.adoption import FolderAdoption


@pytest.fixture
def house(tmp_path: Path) -> House:
    return make_house(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "out/checkpoint-500")


def adopt(house: House, path: Path, *more: str, step: int = 500) -> dict[str, object]:
    return house.json("adopt", path, "--run", "hf", "--step", str(step), *more)


def test_a_folder_comes_back_byte_for_byte_with_modes_links_and_empty_folders(house: House, folder: Path) -> None:
    before = contents(folder)
    adopted = adopt(house, folder)
    assert (adopted["run"], adopted["step"], adopted["generation"], adopted["sequence"]) == ("hf", 500, 1, 1)
    assert (adopted["files"], adopted["is_new"]) == (9, True)
    assert contents(folder) == before, "the source was changed"

    restored = house.json("restore", "--to", house.root / "back")
    assert (restored["kind"], restored["is_verified"]) == ("adopted", True)
    assert contents(house.root / "back") == before
    assert not list(house.root.glob("*.partial"))


def test_a_single_file_comes_back_under_its_name(house: House, tmp_path: Path) -> None:
    path = write(tmp_path / "lightning/epoch=3-step=40.ckpt", 100_000, mode=0o640)
    adopt(house, path, step=40)
    assert house.tierd("restore", "--to", house.root / "back").exit_code == 0
    assert contents(house.root / "back")[path.name] == contents(path.parent)[path.name]
    assert os.listdir(house.root / "back") == [path.name]


def test_a_path_that_is_no_utf_8_is_printed(house: House, tmp_path: Path) -> None:
    folder = Path(os.fsdecode(bytes(tmp_path) + b"/\xff"))
    folder.mkdir()
    write(tmp_path / "5.bin").rename(folder / "5.bin")
    adopted = house.json("adopt", folder / "5.bin", "--run", "hf", "--step", "5")
    assert adopted["path"].endswith("\\udcff/5.bin")


def test_a_folder_of_gpt_simple_comes_back_byte_for_byte_and_its_model_is_imported(
    house: House, tmp_path: Path
) -> None:
    training = Training.fresh()
    training.train(3)
    folder = tmp_path / "out/checkpoint-500-shutdown"
    (folder / "model").mkdir(parents=True)
    (folder / "rng").mkdir(mode=0o700)
    save_file(training.model.state_dict(), folder / "model/model.safetensors", metadata={"format": "pt"})
    torch.save(training.optimizer.state_dict(), folder / "optimizer.bin")
    torch.save(training.scheduler.state_dict(), folder / "scheduler.bin")
    torch.save({"torch": torch.get_rng_state()}, folder / "rng/rank-00000.pt")
    (folder / "trainer_state.json").write_text('{"global_step": 500, "log_history": [{"loss": NaN}]}\n')
    before = contents(folder)
    assert house.json("adopt", folder, "--run", "gpt", "--step", "500")["files"] == 5
    imported = house.json("import", folder / "model", "--run", "weights", "--step", "500")
    shutil.rmtree(folder)
    assert house.tierd("restore", "--run", "gpt", "--step", "500", "--to", folder).exit_code == 0
    assert contents(folder) == before
    fresh = Training.fresh(seed=2)
    fresh.model.load_state_dict(load_file(folder / "model/model.safetensors"))
    fresh.optimizer.load_state_dict(torch.load(folder / "optimizer.bin", weights_only=True))
    assert_same(fresh.optimizer.state_dict(), training.optimizer.state_dict())
    assert_same(fresh.model.state_dict(), training.model.state_dict())
    again = house.json("import", folder / "model", "--run", "weights", "--step", "500")
    assert (again["is_new"], again["size_bytes"]) == (False, imported["size_bytes"])


def test_an_adopted_checkpoint_is_listed_verified_drilled_and_shown_as_any_other(house: House, folder: Path) -> None:
    adopt(house, folder)
    assert [(row["step"], row["tiers"]) for row in house.json("ls")] == [(500, ["hot"])]
    assert house.tierd("verify", "--deep").exit_code == 0
    assert house.tierd("drill", "--tier", "hot").exit_code == 0
    assert "kind          adopted" in house.tierd("show", "hf").stdout
    stored = next((house.hot / "hf").glob("*/00002-*distcp"))
    flip_a_bit(stored)
    assert house.tierd("verify", "--deep").exit_code == 12
    assert house.tierd("restore", "--to", house.root / "back").exit_code == 12
    assert not (house.root / "back").exists()


def test_a_restore_into_its_own_place_in_a_tier_keeps_the_form_of_the_tier(house: House, folder: Path) -> None:
    adopt(house, folder)
    own = house.cold / "hf/000000000500-g0001"
    assert house.tierd("restore", "--to", own).exit_code == 0
    shutil.rmtree(house.hot)
    assert house.tierd("restore", "--tier", "cold", "--to", house.root / "back").exit_code == 0
    assert contents(house.root / "back") == contents(folder)


def test_commands_that_read_tensors_refuse_an_adopted_checkpoint(house: House, folder: Path) -> None:
    adopt(house, folder)
    for command in (
        ["export", "--format", "safetensors"],
        ["restore", "--only", "model.*"],
        ["restore", "--rank", "0"],
    ):
        result = house.tierd(*command, "--to", house.root / "back")
        assert result.exit_code == 2
        assert "another program wrote it" in result.stderr
        assert not (house.root / "back").exists()


def test_a_folder_of_checkpoints_that_is_adopted_as_one_is_noted(house: House, folder: Path) -> None:
    result = house.tierd("adopt", folder.parent, "--run", "hf", "--step", "5")
    assert result.exit_code == 0, result.output
    assert "in it is checkpoint-500: --preset hf-trainer takes each such checkpoint" in result.stderr
    (folder / "global_step500").mkdir()  # as Trainer with DeepSpeed writes
    assert "--preset" not in house.tierd("adopt", folder, "--run", "hf", "--step", "500").stderr


def test_dry_run_writes_nothing(house: House, folder: Path) -> None:
    assert adopt(house, folder, "--dry-run")["is_dry_run"] is True
    assert os.listdir(house.hot) == []


def test_adopting_again_does_nothing_and_other_bytes_under_the_step_are_refused(house: House, folder: Path) -> None:
    adopt(house, folder)
    again = adopt(house, folder)
    assert (again["is_new"], again["sequence"]) == (False, 1)
    write(folder / "__0_0.distcp", 70_001)
    result = house.tierd("adopt", folder, "--run", "hf", "--step", "500")
    assert result.exit_code == 15
    assert "--generation 2" in result.stderr
    assert adopt(house, folder, "--generation", "2")["sequence"] == 2
    assert [row["generation"] for row in house.json("ls")] == [2, 1]
    assert adopt(house, write(folder.parent / "late.bin"), step=9)["generation"] == 2


def test_adopt_refuses_a_run_of_tierds_client(house: House, folder: Path) -> None:
    make_checkpoint(house.cold, run="hf", step=100)
    result = house.tierd("adopt", folder, "--run", "hf", "--step", "500")
    assert result.exit_code == 2
    assert "tierd's client writes that run" in result.stderr


def test_adopt_is_refused_while_the_checkpoints_of_the_run_are_unknown(house: House, folder: Path) -> None:
    write(house.cold / "hf/000000000100-g0001/manifest.json")
    result = house.tierd("adopt", folder, "--run", "hf", "--step", "500")
    assert result.exit_code == 14
    assert "the checkpoints of the run are not all known" in result.stderr
    assert os.listdir(house.hot) == []


def outside_link(folder: Path) -> None:
    (folder / "weights").symlink_to("../../elsewhere")


def absolute_link(folder: Path) -> None:
    (folder / "weights").symlink_to("/etc/hostname")


def link_through_a_link(folder: Path) -> None:
    (folder / "here").symlink_to("empty")
    (folder / "weights").symlink_to("here/../../..")


def pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe")


def listener(folder: Path) -> None:
    here = os.getcwd()
    os.chdir(folder)  # the name of a socket has 107 bytes at most
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind("socket")
    finally:
        os.chdir(here)


def not_utf8(folder: Path) -> None:
    (Path(os.fsdecode(os.fsencode(folder) + b"/\xff"))).touch()


@pytest.mark.parametrize("spoil", [outside_link, absolute_link, link_through_a_link, pipe, listener, not_utf8])
def test_what_a_checkpoint_cannot_hold_is_refused_by_name(
    house: House, folder: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(folder)
    result = house.tierd("adopt", folder, "--run", "hf", "--step", "500")
    assert result.exit_code == 2, result.output
    assert any(name in result.stderr for name in ("weights", "pipe", "socket", "\\udcff"))
    assert os.listdir(house.hot) == []


def test_a_missing_path_an_empty_folder_and_a_folder_around_a_tier_are_refused(house: House, tmp_path: Path) -> None:
    (tmp_path / "empty/inner").mkdir(parents=True)
    for path, code in ((tmp_path / "none", 10), (tmp_path / "empty", 2), (house.root, 2), (house.hot, 2)):
        assert house.tierd("adopt", path, "--run", "hf", "--step", "1").exit_code == code, path
    assert house.tierd("adopt", tmp_path, "--run", "../x", "--step", "1").exit_code == 2
    assert house.tierd("adopt", "a\0b", "--run", "hf", "--step", "1").exit_code == 2
    (tmp_path / "loop").symlink_to("loop")
    result = house.tierd("adopt", tmp_path / "loop", "--run", "hf", "--step", "1")
    assert (result.exit_code, "this is a bug" in result.stderr) == (2, False)
    assert os.listdir(house.hot) == []


def test_a_generation_that_no_run_can_have_reached_is_refused(house: House, folder: Path) -> None:
    """A tier counts such a checkpoint as foreign: no command would show it."""
    result = house.tierd("adopt", folder, "--run", "hf", "--step", "500", "--generation", "99999999")
    assert result.exit_code == 2
    assert "generation 99999999" in result.stderr
    assert os.listdir(house.hot) == []


def test_adopted_checkpoint_is_signed_and_refused_when_altered(tmp_path: Path) -> None:
    house = make_house(tmp_path)
    assert house.tierd("key", "new", house.root / "key").exit_code == 0
    house.config.write_text(house.config.read_text() + f'\n[security]\nkey_file = "{house.root / "key"}"\n')
    folder = make_folder(tmp_path / "out/checkpoint-500")
    adopt(house, folder)
    manifest = next((house.hot / "hf").glob("*/manifest.json"))
    assert '"digest"' in manifest.read_text()
    assert house.tierd("restore", "--to", house.root / "back").exit_code == 0
    assert contents(house.root / "back") == contents(folder)
    manifest.write_text(manifest.read_text().replace('"sequence": 1', '"sequence": 2'))
    assert house.tierd("restore", "--to", house.root / "other").exit_code != 0


@pytest.mark.usefixtures("checkpoints_examined")
@pytest.mark.long
def test_beside_a_running_daemon_it_is_found_copied_to_cold_and_refused_to_a_trainer(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "out/checkpoint-500")
    with Daemon(tmp_path / "house", more="cold_list_interval_s = 600") as daemon:
        assert daemon.tierd("adopt", folder, "--run", "hf", "--step", "500").returncode == 0
        wait_until(lambda: daemon.steps("cold") == [500], "the copy in cold")
        assert not daemon.status()["failures"], daemon.status()["failures"]
        assert "examine" not in daemon.log
        with Peer(daemon.socket) as peer:
            peer.greet("hf")
            find = wire.Find(request=7, step=None, generation=None, milestone=None, tier="auto", exclude=[])
            peer.send(find)
            answer = peer.answer()
        assert answer is not None
        assert "it is adopted" in answer.message
        assert "tierd restore --run hf --step 500" in answer.hint
        shutil.rmtree(daemon.hot / "hf")
        restored = daemon.tierd("restore", "--tier", "cold", "--run", "hf", "--to", tmp_path / "back")
    assert restored.returncode == 0, restored.stderr
    assert contents(tmp_path / "back") == contents(folder)


def test_a_step_that_a_daemon_commits_meanwhile_is_refused_by_name(
    house: House, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that watches the folder writes into the place itself."""
    (tmp_path / "daemon").mkdir()
    daemon = make_house(tmp_path / "daemon")
    assert daemon.tierd("adopt", folder, "--run", "hf", "--step", "5").exit_code == 0
    check_unchanged = FolderAdoption.check_unchanged

    async def commit_meanwhile(self: FolderAdoption) -> None:
        await check_unchanged(self)
        shutil.copytree(daemon.hot / "hf", house.hot / "hf", dirs_exist_ok=True)

    monkeypatch.setattr(FolderAdoption, "check_unchanged", commit_meanwhile)
    result = house.tierd("adopt", folder, "--run", "hf", "--step", "5")
    assert (result.exit_code, "another process has just committed that step" in result.stderr) == (11, True)


def test_two_adoptions_at_once_take_different_sequences_and_one_step_is_adopted_once(tmp_path: Path) -> None:
    house = make_house(tmp_path)
    folders = [make_folder(tmp_path / f"out/checkpoint-{step}") for step in (500, 600)]
    adopt(house, make_folder(tmp_path / "out/checkpoint-400"), step=400)
    run = house.hot / "hf"
    held = os.open(run, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)  # as another adoption that is committing
    commands: list[ForkedProcess] = []
    try:
        for folder, step in [(folders[0], 500), (folders[1], 600)]:
            arguments = ["--config", str(house.config), "adopt", str(folder), "--run", "hf", "--step", str(step)]
            commands.append(ForkedProcess(run_tierd, arguments, ENVIRONMENT, str(tmp_path / f"{step}.log")))
        wait_until(lambda: len(list(run.glob("*.partial/hf/*/adopted.json"))) == 2, "both to have copied")
        again = house.tierd("adopt", folders[0], "--run", "hf", "--step", "500")
        assert again.exit_code == 11, "the same step is being adopted"
        assert not [path for path in run.glob("*/manifest.json") if "0400" not in path.parent.name]
        os.close(held)
        held = -1
        assert [command.wait() for command in commands] == [0, 0], (tmp_path / "500.log").read_text()
    finally:
        if held >= 0:
            os.close(held)
        for command in commands:
            command.kill()
    manifests = [json.loads(path.read_bytes()) for path in run.glob("*/manifest.json")]
    assert sorted(manifest["sequence"] for manifest in manifests) == [1, 2, 3]
