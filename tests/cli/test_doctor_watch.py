"""What `tierd doctor` says of a watched folder."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tests.support.cli import make_house


def test_a_watched_folder_is_checked_before_the_daemon_runs(tmp_path: Path) -> None:
    house = make_house(tmp_path, more='[[watch]]\npath = "out"\nrun = "hf"\npreset = "hf-trainer"')

    def watch() -> tuple[str, str, str]:
        found = msgspec.json.decode(house.tierd("doctor", "--json").stdout)
        (one,) = [one for one in found if one["about"] == "watch"]
        return one["verdict"], one["message"], one["hint"]

    verdict, message, _ = watch()
    assert (verdict, "does not exist yet" in message) == ("note", True)
    (tmp_path / "out/step-5").mkdir(parents=True)
    verdict, message, hint = watch()
    assert (verdict, "there is step-5" in message) == ("problem", True)
    assert 'preset = "dcp"' in hint
    (tmp_path / "out/step-5").rename(tmp_path / "out/runs")
    assert watch()[:2] == ("note", f"{tmp_path}/out has no checkpoint yet, such as checkpoint-500/")
    (tmp_path / "out/checkpoint-5").mkdir()
    assert watch()[0] == "ok"
    (tmp_path / "out/checkpoint-5").rmdir()
    (tmp_path / "out/runs").rmdir()
    (tmp_path / "out").rmdir()
    (tmp_path / "out").write_text("")
    verdict, message, _ = watch()
    assert (verdict, "Not a directory" in message) == ("problem", True)


def test_a_checkpoint_in_place_of_the_folder_that_holds_it_is_a_problem(tmp_path: Path) -> None:
    house = make_house(tmp_path, more='[[watch]]\npath = "out/checkpoint-5"\nrun = "hf"\npreset = "hf-trainer"')
    (tmp_path / "out/checkpoint-5").mkdir(parents=True)
    (tmp_path / "out/checkpoint-5/weights").write_text("1")
    found = msgspec.json.decode(house.tierd("doctor", "--json").stdout)
    (one,) = [one for one in found if one["about"] == "watch"]
    assert (one["verdict"], one["hint"]) == (
        "problem",
        f"the path of their folder is {tmp_path}/out",
    )
