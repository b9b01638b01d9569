"""`tierd milestone --remove`: retention counts the checkpoint again, in all tiers, and nothing brings the mark back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli import House, folder_of, make_checkpoint, make_house
from tests.support.daemon import Daemon
from tests.support.trainer import Trainer
from tests.support.waiting import wait_until
from tierd.errors import BadConfig, NotFound
from tierd.format.signature import Keyring, new_key


@pytest.fixture
def house(tmp_path: Path) -> House:
    return make_house(tmp_path)


def removals(*tiers: Path) -> list[str]:
    return [path.name for tier in tiers for path in sorted(tier.rglob("removed-*"))]


def test_a_removed_milestone_is_one_in_no_tier(house: House) -> None:
    make_checkpoint(house.hot, house.cold, step=100, milestones=("best", "other"))
    removed = house.json("milestone", "--run", "run42", "best", "--remove")
    assert (removed["step"], removed["tiers"], removed["is_removed"]) == (100, ["hot", "cold"], True)
    assert removals(house.hot, house.cold) == ["removed-milestone-best.json"] * 2
    assert house.json("show", "run42", "100")["milestones"] == ["other"]
    assert house.tierd("show", "run42", "milestone:best").exit_code == NotFound.exit_code
    again = house.tierd("milestone", "--remove", "best")
    assert again.stdout == "removed the milestone best of run42 step 100 (generation 1) in hot, cold\n"


def test_a_removal_in_one_tier_counts_for_all(house: House) -> None:
    """The other one could not be reached, or a daemon's copy has brought the marker there since."""
    manifest = make_checkpoint(house.hot, house.cold, step=100, milestones=("best",))
    house.json("milestone", "best", "--remove")
    (folder_of(house.hot, manifest) / "removed-milestone-best.json").unlink()
    assert house.json("ls", house.hot)[0]["milestone"] == "best"
    assert house.json("show", "run42", "100")["milestones"] == []
    house.json("milestone", "best", "--remove")
    assert house.json("ls", house.hot)[0]["milestone"] is None


def test_a_removal_is_for_good_and_another_name_marks_again(house: House) -> None:
    make_checkpoint(house.hot, step=100, milestones=("best",))
    house.json("milestone", "best", "--remove")
    refused = house.tierd("milestone", "--step", "100", "best")
    assert (refused.exit_code, "was removed from it, which is for good" in refused.stderr) == (
        BadConfig.exit_code,
        True,
    )
    house.json("milestone", "--step", "100", "best-2")
    assert house.json("show", "run42", "100")["milestones"] == ["best-2"]


def test_what_to_remove_must_be_one(house: House) -> None:
    make_checkpoint(house.hot, step=100, milestones=("best",))
    make_checkpoint(house.hot, step=200, sequence=2, milestones=("best",))
    assert "100-g0001" in (several := house.tierd("milestone", "best", "--remove")).stderr
    assert several.exit_code == BadConfig.exit_code
    missing = house.tierd("milestone", "bets", "--remove")
    assert (missing.exit_code, "milestones: best" in missing.stderr) == (NotFound.exit_code, True)
    assert house.tierd("milestone", "../best", "--remove").exit_code == 2
    assert house.tierd("milestone", "best").exit_code == BadConfig.exit_code
    planned = house.tierd("milestone", "best", "--remove", "--step", "100", "--dry-run")
    assert planned.stdout == "would remove the milestone best of run42 step 100 (generation 1) in hot\n"
    assert removals(house.hot) == []
    house.json("milestone", "best", "--remove", "--step", "100")
    assert house.json("show", "run42", "milestone:best")["manifest"]["step"] == 200
    assert house.json("milestone", "best", "--remove")["step"] == 200, "the one that still has it"


def test_the_removal_of_a_signed_milestone_needs_the_key(house: House) -> None:
    manifest = make_checkpoint(house.hot, milestones=("best",))
    path = folder_of(house.hot, manifest) / "manifest.json"
    path.write_bytes(Keyring([new_key()]).sign_manifest(manifest).encode())
    assert "no key is configured" in house.tierd("milestone", "best", "--remove").stderr
    assert removals(house.hot) == []


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    more = "[lifecycle.hot]\nkeep_last = 1\nmilestones = true\n[lifecycle.cold]\nkeep_last = 1\n"
    with Daemon(tmp_path, more=more) as daemon:
        yield daemon


def test_the_daemon_deletes_what_is_no_milestone_any_more(daemon: Daemon) -> None:
    """It had copied the mark to cold, and holds it in its memory when it is removed."""

    def places(step: int) -> list[str]:
        tiers = {"hot": daemon.hot, "cold": daemon.cold}
        return [name for name, tier in tiers.items() if list(tier.glob(f"*/{step:012d}-g*/manifest.json"))]

    with Trainer() as trainer:
        trainer.connect(daemon.socket, "kept")
        trainer.train(1)
        trainer.durable()
        assert daemon.tierd("milestone", "--run", "kept", "--step", "1", "best").returncode == 0
        for step in (2, 3):
            trainer.train(1)
            trainer.durable()
            wait_until(lambda at=step: places(at) == ["hot", "cold"], "the copy")  # type: ignore[misc]
        wait_until(lambda: list(daemon.cold.rglob("milestone-best.json")), "the mark in cold")
        assert places(1) == ["hot", "cold"]
        assert daemon.tierd("milestone", "--run", "kept", "--remove", "best").returncode == 0
        wait_until(lambda: "hot" not in places(1), "the eviction")
        daemon.stop()
        daemon.start()  # it lists cold, as every 10 minutes
        wait_until(lambda: places(1) == [], "the deletion")
        assert places(3) == ["hot", "cold"]
