"""The chain of the audit trail: which changes of its lines the check finds, and what it says of them."""

from __future__ import annotations

import pytest

from tierd.format.audit import Event, check, digest, encode, tail_of
from tierd.format.signature import Keyring, new_key

KEYRING = Keyring([new_key()])


def make_lines(count: int, keyring: Keyring | None = None, *, first: int = 1, previous: str = "") -> list[bytes]:
    lines: list[bytes] = []
    for sequence in range(first, first + count):
        at = f"2026-01-01T00:00:{sequence:02d}+00:00"
        event = Event(
            sequence=sequence, at=at, action="evicted", by="daemon", uid=1, pid=2, node="n", previous=previous, run="a"
        )
        lines.append(encode(event, keyring))
        previous = digest(lines[-1])
    return lines


@pytest.mark.parametrize("keyring", [None, KEYRING], ids=["plain", "signed"])
class TestChain:
    def test_a_whole_chain_has_no_problem(self, keyring: Keyring | None) -> None:
        chain = check([(1, b"".join(make_lines(5, keyring)))], keyring)
        assert (len(chain.events), chain.problem, chain.notes) == (5, "", [])

    def test_a_changed_line_is_found(self, keyring: Keyring | None) -> None:
        lines = make_lines(5, keyring)
        lines[2] = lines[2].replace(b'"uid":1', b'"uid":7')
        problem = check([(1, b"".join(lines))], keyring).problem
        assert ("line 3" if keyring else "line 4") in problem
        assert ("signature" if keyring else "that line was changed") in problem

    def test_a_removed_line_is_found(self, keyring: Keyring | None) -> None:
        lines = make_lines(5, keyring)
        del lines[2]
        assert "line 3: event 4, expected 3" in check([(1, b"".join(lines))], keyring).problem

    def test_lines_in_another_order_are_found(self, keyring: Keyring | None) -> None:
        lines = make_lines(5, keyring)
        lines[1], lines[2] = lines[2], lines[1]
        assert "line 2: event 3, expected 2" in check([(1, b"".join(lines))], keyring).problem

    def test_a_missing_end_is_not_found(self, keyring: Keyring | None) -> None:
        """The daemon's log says where the trail ended: docs/FORMAT.md."""
        assert check([(1, b"".join(make_lines(5, keyring)[:3]))], keyring).problem == ""

    def test_an_incomplete_last_line_is_noted(self, keyring: Keyring | None) -> None:
        chain = check([(1, b"".join(make_lines(5, keyring))[:-9])], keyring)
        assert (len(chain.events), chain.problem) == (4, "")
        assert "the last line is not complete" in chain.notes[0]

    def test_a_line_that_is_no_event_is_found(self, keyring: Keyring | None) -> None:
        lines = make_lines(3, keyring)
        lines[1] = b"\x00\xff\r{}\n"
        assert "line 2: it is no event" in check([(1, b"".join(lines))], keyring).problem

    def test_the_chain_continues_across_files(self, keyring: Keyring | None) -> None:
        lines = make_lines(6, keyring)
        files = [(1, b"".join(lines[:3])), (4, b"".join(lines[3:]))]
        assert (len(check(files, keyring).events), check(files, keyring).problem) == (6, "")
        lines[2] = make_lines(1, keyring, first=3, previous="")[0]
        assert check([(1, b"".join(lines[:3])), files[1]], keyring).problem

    def test_a_missing_file_is_found(self, keyring: Keyring | None) -> None:
        lines = make_lines(6, keyring)
        files = [(number, lines[number - 1]) for number in range(1, 7)]
        assert "expected the file of event 3" in check(files[:2] + files[3:], keyring).problem
        assert "only 2 of 4 exist" in check(files[4:], keyring).problem

    def test_of_a_rotated_trail_the_older_events_are_noted_as_absent(self, keyring: Keyring | None) -> None:
        files = [(number, line) for number, line in enumerate(make_lines(6, keyring), start=1)]
        chain = check(files[2:], keyring)
        assert chain.problem == ""
        assert "events before 3 are not here" in chain.notes[0]


def test_without_a_key_a_chain_that_was_computed_again_is_not_found() -> None:
    lines = make_lines(2) + make_lines(3, first=3, previous=digest(make_lines(2)[-1]))
    assert check([(1, b"".join(lines))], None).problem == ""


def test_a_chain_that_another_key_signed_is_found() -> None:
    problem = check([(1, b"".join(make_lines(3, Keyring([new_key()]))))], KEYRING).problem
    assert "no event is signed by a key of the key file" in problem


def test_a_chain_without_signatures_is_found_where_there_is_a_key() -> None:
    assert "no event is signed" in check([(1, b"".join(make_lines(3)))], KEYRING).problem


def test_events_from_before_the_key_are_noted_and_unsigned_ones_after_it_are_found() -> None:
    old = make_lines(2)
    signed = make_lines(2, KEYRING, first=3, previous=digest(old[-1]))
    chain = check([(1, b"".join(old + signed))], KEYRING)
    assert (chain.problem, len(chain.notes)) == ("", 1)
    forged = make_lines(1, first=5, previous=digest(signed[-1]))
    assert "line 5" in check([(1, b"".join(old + signed + forged))], KEYRING).problem


def test_signed_events_that_cannot_be_checked_are_noted() -> None:
    assert "3 events are signed" in check([(1, b"".join(make_lines(3, KEYRING)))], None).notes[0]


def test_the_tail_is_after_the_last_whole_line() -> None:
    lines = make_lines(3)
    tail = tail_of(b"".join(lines) + b'{"sequ', first=1)
    assert (tail.sequence, tail.previous, tail.torn_bytes) == (3, digest(lines[-1]), 6)
    assert tail_of(b"", first=1).sequence == 0
    garbage = tail_of(b"".join(lines) + b"garbage\n", first=1)
    assert (garbage.sequence, garbage.previous) == (4, digest(b"garbage\n"))


def test_text_from_outside_is_printed_on_one_line() -> None:
    event = Event(
        sequence=1, at="", action="x\x1b[2J", by="t\n", uid=1, pid=2, node="", previous="", run="r\ru", reason="\x07"
    )
    assert event.sentence().isprintable()
