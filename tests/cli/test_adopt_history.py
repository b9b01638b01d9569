"""`tierd adopt --preset`: a whole folder of checkpoints, oldest first, once each, also after a kill."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import House, make_house
from tests.support.foreign import contents
from tests.support.framework_saves import SAVES, Writer, archive, save_dcp, save_hf
from tests.support.processes import ENVIRONMENT, ForkedProcess, run_tierd
from tests.support.waiting import wait_until
from tierd.catalog import new_checkpoints
from tierd.cli import adopt_history
from tierd.tiers.tier import Tier
from tierd.tiers.tier_listing import Listing
from tierd.transfer import watched_folder


@pytest.fixture
def house(tmp_path: Path) -> House:
    return make_house(tmp_path)


def aged(folder: Path, *, hours: float = 1.0) -> None:
    """As if everything in it had been written some time ago, each file at the time that it has in the others' order."""
    for path in sorted(folder.rglob("*"), reverse=True):
        about = path.lstat()
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns - int(hours * 3600e9)), follow_symlinks=False)


def history(folder: Path, preset: str, *steps: int) -> None:
    folder.mkdir(exist_ok=True)
    for step in steps:
        SAVES[preset](folder, step, Writer())
    aged(folder)


def adopted(house: House, folder: Path, preset: str, *more: str) -> Any:
    done = house.tierd("adopt", folder, "--run", "old", "--preset", preset, "--json", *more)
    report = json.loads(done.stdout)
    assert done.exit_code == (3 if report["left"] else 0), done.stderr
    return report


def sequences(house: House) -> dict[int, int]:
    """By step, as the manifests have them."""
    manifests = [json.loads(path.read_text()) for path in committed(house)]
    return {manifest["step"]: manifest["sequence"] for manifest in manifests}


def committed(house: House) -> list[Path]:
    return sorted((house.root / "hot/old").glob("0*-g0001/manifest.json"))


@pytest.mark.parametrize("preset", sorted(SAVES))
def test_a_folder_of_checkpoints_is_adopted_in_order_and_comes_back(house: House, tmp_path: Path, preset: str) -> None:
    folder = tmp_path / "out"
    history(folder, preset, 30, 10, 20)
    before = contents(folder)
    settled = ["--settled"] if preset == "deepspeed" else []  # `latest` names only the newest
    planned = adopted(house, folder, preset, "--dry-run", *settled)
    assert (planned["adopted"], committed(house)) == ([10, 20, 30], [])
    assert adopted(house, folder, preset, *settled)["adopted"] == [10, 20, 30]
    assert sequences(house) == {10: 1, 20: 2, 30: 3}
    again = adopted(house, folder, preset, *settled)
    assert (again["adopted"], again["known"]) == ([], [10, 20, 30])
    assert contents(folder) == before, "nothing of the framework's was touched"
    newest = next(name for name in os.listdir(folder) if "30" in name)
    to = house.root / "back" / newest if (folder / newest).is_dir() else house.root / "back"
    assert house.tierd("restore", "--run", "old", "--step", "30", "--to", to).exit_code == 0
    restored = {path: about for path, about in contents(house.root / "back").items() if path}
    assert restored.items() <= before.items()
    assert any("30" in path for path in restored)


def test_a_pattern_adopts_what_no_preset_fits(house: House, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    for step in (10, 20, 30):
        save_dcp(folder, step, Writer()).rename(folder / str(step))
        (folder / f"weights_{step}.pt").write_bytes(archive())
    (folder / "20/.metadata").unlink()
    (folder / "weights_30.pt").write_bytes(archive()[:-3])
    aged(folder)

    def adopt(run: str, *more: str) -> Any:
        return json.loads(house.tierd("adopt", folder, "--run", run, "--json", *more).stdout)

    folders = adopt("folders", "--pattern", "{step}/", "--marker", ".metadata")
    assert (folders["adopted"], list(folders["left"])) == ([10, 30], ["20"])
    assert adopt("settled", "--pattern", "{step}/", "--settled")["adopted"] == [10, 20, 30]
    files = adopt("files", "--pattern", "weights_{step}.pt")
    assert (files["adopted"], list(files["left"])) == ([10, 20], ["weights_30.pt"])
    (folder / "raw_10.dat").write_bytes(b"of a format that does not show its end")
    assert "does not show whether it is whole" in adopt("raw", "--pattern", "raw_{step}.dat")["left"]["raw_10.dat"]
    assert adopt("raw", "--pattern", "raw_{step}.dat", "--settled")["adopted"] == [10]
    assert list(adopt("torn", "--pattern", "weights_{step}.pt", "--settled")["left"]) == ["weights_30.pt"]
    assert house.tierd("restore", "--run", "files", "--step", "20", "--to", tmp_path / "back").exit_code == 0
    assert (tmp_path / "back/weights_20.pt").read_bytes() == (folder / "weights_20.pt").read_bytes()


@pytest.mark.long
def test_a_command_that_is_killed_goes_on_where_it_was(house: House, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    history(folder, "hf-trainer", *range(10, 210, 10))
    arguments = ["--config", str(house.config), "adopt", str(folder), "--run", "old", "--preset", "hf-trainer"]
    for least in (2, 7):
        process = ForkedProcess(run_tierd, arguments, ENVIRONMENT, str(tmp_path / f"{least}.log"))
        wait_until(lambda least=least: len(committed(house)) >= least, "some checkpoints")
        process.kill()
        process.wait()
    assert len(committed(house)) < 20
    report = adopted(house, folder, "hf-trainer")
    assert sorted(report["adopted"] + report["known"]) == list(range(10, 210, 10))
    assert report["left"] == {}
    assert sequences(house) == {10 * n: n for n in range(1, 21)}
    assert not list((house.root / "hot/old").glob("*.partial"))


def test_what_is_not_complete_is_named_and_left(house: House, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    history(folder, "hf-trainer", 10, 20, 30)
    (folder / "checkpoint-20/trainer_state.json").write_text("{")
    aged(folder)
    os.symlink(folder / "checkpoint-10", folder / "checkpoint-40")
    (folder / "checkpoint-50").mkdir()
    save_hf(folder, 60, Writer())  # a moment ago
    done = house.tierd("adopt", folder, "--run", "old", "--preset", "hf-trainer")
    assert done.exit_code == 3
    for name, why in (
        ("20", "trainer_state.json is not whole"),
        ("40", "it is a link"),
        ("50", "no file in it"),
        ("60", "unchanged for 10 s"),
    ):
        assert any(f"checkpoint-{name}: " in line and why in line for line in done.stderr.splitlines()), done.stderr
    assert [path.parent.name for path in committed(house)] == ["000000000010-g0001", "000000000030-g0001"]
    aged(folder)
    assert adopted(house, folder, "hf-trainer")["adopted"] == [60]


def test_a_second_name_of_a_step_is_named_as_such(house: House, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    history(folder, "hf-trainer", 10, 20)
    for step in (10, 20):
        shutil.copytree(folder / f"checkpoint-{step}", folder / f"checkpoint-0{step}")
    other = folder / "checkpoint-010/optimizer.pt"
    other.write_bytes(archive(90))
    os.utime(other, (1e9, 1e9))
    aged(folder)
    report = adopted(house, folder, "hf-trainer")
    assert (report["adopted"], report["known"]) == ([10, 20], [20])
    ((name, why),) = report["left"].items()
    assert name in ("checkpoint-10", "checkpoint-010")
    assert "that was adopted before, from other files" in why


def test_the_run_is_not_listed_again_for_each_checkpoint(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, count = tmp_path / "out", 24
    history(folder, "step-bin", *range(10, 10 * (count + 1), 10))
    listed: list[int] = []
    real = Tier.listing

    async def listing(tier: Tier, prefix: str = "", **options: Any) -> Listing:
        found = await real(tier, prefix, **options)
        listed.append(len(found.files))
        return found

    monkeypatch.setattr(Tier, "listing", listing)
    assert len(adopted(house, folder, "step-bin")["adopted"]) == count
    assert sum(listed) <= 5 * count, "the cost of a history must not grow with the square of its length"
    assert sequences(house) == {10 * number: number for number in range(1, count + 1)}


@pytest.mark.parametrize("one_by_one", [2, 16])
def test_what_another_command_adopts_meanwhile_is_counted(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_by_one: int
) -> None:
    """Each gets a sequence of its own, also where the other one adopts many at once."""
    history(tmp_path / "out", "step-bin", 10, 20)
    others = [100, 110, 120]
    monkeypatch.setattr(new_checkpoints, "ONE_BY_ONE_MAX", one_by_one)
    history(tmp_path / "others", "step-bin", *others)
    real, is_first = adopt_history.adopt_tree, [True]

    async def adopt_tree(*args: Any) -> Any:
        if is_first:
            is_first.clear()
            arguments = ["adopt", str(tmp_path / "others"), "--run", "old", "--preset", "step-bin"]
            arguments = ["--config", str(house.config), *arguments]
            process = ForkedProcess(run_tierd, arguments, ENVIRONMENT, str(tmp_path / "log"))
            assert await asyncio.to_thread(process.wait) == 0
        return await real(*args)

    monkeypatch.setattr(adopt_history, "adopt_tree", adopt_tree)
    adopted(house, tmp_path / "out", "step-bin")
    assert sorted(sequences(house).values()) == list(range(1, len(others) + 3))


def test_a_folder_with_more_than_can_be_listed_is_refused(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history(tmp_path / "out", "step-bin", 10, 20, 30)
    monkeypatch.setattr(watched_folder, "NAMES_MAX", 2)
    done = house.tierd("adopt", tmp_path / "out", "--run", "old", "--preset", "step-bin")
    assert (done.exit_code, "entries" in done.stderr) == (2, True), done.output
    assert committed(house) == []


def test_what_expired_or_is_older_than_the_newest_is_not_adopted_again(house: House, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    history(folder, "hf-trainer", 10, 20)
    adopted(house, folder, "hf-trainer")
    shutil.rmtree(house.root / "hot/old/000000000010-g0001")
    report = adopted(house, folder, "hf-trainer")
    assert (report["adopted"], report["known"]) == ([], [20])
    assert "step 20 was adopted before" in report["left"]["checkpoint-10"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "--step N for one checkpoint, or --preset NAME or --pattern GLOB"),
        (["--preset", "hf-trainer", "--step", "1"], "or --pattern GLOB for all in a folder, not both"),
        (["--preset", "none"], "there is no preset 'none'"),
        (["--preset", "lightning"], "this would fit: --preset hf-trainer or --preset gpt-simple"),
        (["--pattern", "ckpt-{step}.pt"], "out: no name there fits the pattern ckpt-{step}.pt; there is checkpoint-10"),
        (["--preset", "dcp", "--pattern", "step-{step}/"], "a preset or a pattern, one of the two"),
        (["--pattern", "step-*/"], "--pattern 'step-*/': expected {step} once, where the number is"),
        (["--pattern", "step-{step}/"], "expected the file that is written last"),
        (["--pattern", "a/step-{step}.pt"], "expected the name of a file"),
        (["--pattern", "step-{step}.pt", "--marker", "x"], "a path in a checkpoint that is a folder"),
    ],
)
def test_a_wrong_use_is_refused(house: House, tmp_path: Path, arguments: list[str], expected: str) -> None:
    history(tmp_path / "out", "hf-trainer", 10)
    refused = house.tierd("adopt", tmp_path / "out", "--run", "old", *arguments)
    assert refused.exit_code == 2, refused.stderr
    assert expected in refused.stderr


def test_an_empty_folder_is_refused(house: House, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    refused = house.tierd("adopt", tmp_path / "out", "--run", "old", "--preset", "hf-trainer")
    assert refused.exit_code != 0
    assert "no name there fits the preset hf-trainer" in refused.stderr


def test_what_the_policy_does_not_keep_is_said_before_the_sources_are_deleted(tmp_path: Path) -> None:
    """Hot keeps three and cold keeps two: of these, all that cold keeps are among the three."""
    house = make_house(tmp_path, more="[lifecycle.hot]\nkeep_last = 3\n[lifecycle.cold]\nkeep_last = 2\nkeep_every = 0")
    history(tmp_path / "out", "hf-trainer", *range(10, 60, 10))
    done = house.tierd("adopt", tmp_path / "out", "--run", "old", "--preset", "hf-trainer")
    assert done.exit_code == 0, done.output
    assert "the policy keeps 3 of 5 checkpoints: a daemon deletes 2 checkpoints, step 10 to 20 from" in done.stderr
    again = house.tierd("adopt", tmp_path / "out", "--run", "old", "--preset", "hf-trainer")
    assert "the policy keeps" not in again.stderr, "nothing is new"
