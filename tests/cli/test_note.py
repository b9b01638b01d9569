"""Notes and tags: written to every tier that answers, read without a daemon, and older than nothing they say."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.cli import House, make_checkpoint, make_house
from tests.support.rooms import RUN, rooms_at
from tierd.format.note import TEXT_CHARS_MAX
from tierd.format.signature import Keyring, new_key


@pytest.fixture
def house(tmp_path: Path) -> House:
    house = make_house(tmp_path)
    make_checkpoint(house.hot, house.cold, step=100)
    make_checkpoint(house.hot, house.cold, step=200, sequence=2)
    return house


def note(house: House, *words: str) -> str:
    result = house.tierd("note", "--run", "run42", *words)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_note_and_its_tags_are_shown_until_a_later_note_removes_a_tag(house: House) -> None:
    said = note(house, "--step", "100", "--tag", "paper", "--tag", "bad-lr", "loss was 3.1 here\nlook at lr")
    assert said.endswith("in hot, cold; its tags: bad-lr, paper\n")
    note(house, "--step", "latest", "the last one")
    note(house, "--step", "100", "--untag", "bad-lr")

    shown = house.json("show", "run42", "100")
    assert shown["tags"] == ["paper"]
    assert [(each["text"], each["added"], each["removed"]) for each in shown["notes"]] == [
        ("loss was 3.1 here\nlook at lr", ["paper", "bad-lr"], []),
        ("", [], ["bad-lr"]),
    ]
    newest, older = house.json("notes")
    assert (newest["step"], newest["tags"], older["step"]) == (200, [], 100)
    assert [each["step"] for each in house.json("notes", "--run", "run42", "--tag", "paper")] == [100]
    assert house.json("notes", "--tag", "bad-lr") == []
    lines = house.tierd("notes").stdout.splitlines()
    assert len(lines) == 1 + 3, "a newline in a text begins no line of the table"
    assert "+paper" in house.tierd("show", "run42", "100").stdout


def test_notes_outlive_their_checkpoint_and_the_loss_of_hot(house: House) -> None:
    note(house, "--step", "100", "--tag", "paper", "kept")
    shutil.rmtree(house.cold / "run42" / "000000000100-g0001")
    shutil.rmtree(house.hot)
    (noted,) = house.json("notes", "--from", str(house.cold))
    assert (noted["step"], noted["tiers"], noted["tags"], noted["notes"][0]["text"]) == (100, [], ["paper"], "kept")


def test_the_next_note_brings_the_older_ones_to_a_tier_that_did_not_answer(house: House) -> None:
    shutil.move(house.cold, house.root / "away")
    result = house.tierd("note", "--run", "run42", "--step", "100", "--tag", "paper")
    assert " in hot;" in result.stdout
    assert "cold" in result.stderr
    shutil.rmtree(house.cold, ignore_errors=True)
    shutil.move(house.root / "away", house.cold)
    note(house, "--step", "100", "and again")
    (noted,) = house.json("notes", "--from", str(house.cold))
    assert (noted["tags"], len(noted["notes"])) == (["paper"], 2)


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("--step", "100"), 2, "the note is empty"),
        (("--step", "100", "x" * (TEXT_CHARS_MAX + 1)), 2, f"more than {TEXT_CHARS_MAX}"),
        (("--step", "100", "--tag", "a/b"), 2, "'a/b' cannot be a tag"),
        (("--step", "100", "\udcff"), 2, "is no UTF-8"),
        (("--step", "999", "lost"), 10, "there is none"),
    ],
)
def test_a_bad_note_is_refused_and_nothing_is_written(
    house: House, words: tuple[str, ...], code: int, text: str
) -> None:
    result = house.tierd("note", "--run", "run42", *words)
    assert (result.exit_code, text in result.stderr) == (code, True), result.output
    assert not (house.hot / "run42" / "notes").exists()


def test_garbage_among_the_notes_is_reported_and_left_out(house: House) -> None:
    note(house, "--step", "100", "good")
    folder = house.hot / "run42" / "notes"
    (folder / "000000000100-g0001-0000000000001-0badcafe.json").write_text("{")
    (folder / "readme.txt").write_text("not a note")
    result = house.tierd("notes", "--json")
    assert result.exit_code == 0
    assert "left out: decode run42/notes/000000000100-g0001-0000000000001-0badcafe.json in hot" in result.stderr
    assert [each["text"] for each in house.json("show", "run42", "100")["notes"]] == ["good"]


async def test_a_listing_and_the_lifecycle_ignore_notes(tmp_path: Path) -> None:
    """They are no checkpoints, and no leftovers of one."""
    async with rooms_at(tmp_path, keyring=Keyring([new_key()])) as rooms:
        made = await rooms.commit("hot", "cold")
        for tier in rooms.tiers.values():
            await tier.put_marker(f"{RUN}/notes/{made.id.name}-0000000000001-0badcafe.json", b"{}\n")
        await rooms.look()
        listing = await rooms.cold["cold"].listing()
        assert (listing.committed, listing.partial, listing.foreign) == ({made.id}, {}, {})
