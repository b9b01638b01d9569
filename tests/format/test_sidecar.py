"""Names, chains and objects of the segments of sidecar files."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.errors import Corrupt, Foreign
from tierd.format.ids import Run
from tierd.format.sidecar import (
    Segment,
    chain,
    decode_segment,
    encode_segment,
    is_file_name,
    parse_segment,
    short,
    unsettled_bytes,
)
from tierd.format.signature import Keyring, new_key

RUN = Run("run")
FILE = bytes(range(100))


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def segment(begin: int, end: int, content: bytes = FILE, *, is_tail: bool = False) -> Segment:
    before, after = short(digest(content[:begin])), short(digest(content[:end]))
    return Segment(RUN, ".loss.json", 1, begin, end, before, after, is_tail)


@given(st.integers(0, 10**14), st.integers(1, 10**6), st.booleans())
def test_a_key_names_its_segment(begin: int, size: int, is_tail: bool) -> None:
    made = Segment(RUN, ".loss.json", 3, begin, begin + size, "a" * 16, "b" * 16, is_tail)
    assert parse_segment(made.key) == made


@pytest.mark.parametrize(
    "key",
    [
        "run/sidecars/file-a-v0001-000000000000000-000000000000000-" + "a" * 16 + "-" + "b" * 16 + ".seg",  # empty
        "run/sidecars/file-..-v0001-000000000000000-000000000000001-" + "a" * 16 + "-" + "b" * 16 + ".seg",
        "run/sidecars/file-a-v00001-000000000000000-000000000000001-" + "a" * 16 + "-" + "b" * 16 + ".seg",
        "../sidecars/file-a-v0001-000000000000000-000000000000001-" + "a" * 16 + "-" + "b" * 16 + ".seg",
        "run/sidecars/notes.txt",
    ],
)
def test_other_keys_name_none(key: str) -> None:
    assert parse_segment(key) is None


@pytest.mark.parametrize("name", ["..", ".", "a b", "ä", "a/b", "", "x" * 121])
def test_names_that_cannot_be_part_of_a_key(name: str) -> None:
    assert not is_file_name(name)


@given(st.sets(st.integers(1, 99)), st.randoms())
def test_a_chain_covers_the_file_once(cut: set[int], random: object) -> None:
    edges = [0, *sorted(cut), 100]
    parts = [segment(begin, end) for begin, end in pairwise(edges)]
    random.shuffle(parts)  # type: ignore[attr-defined]
    found = chain(parts)
    assert [(each.begin, each.end) for each in found] == list(pairwise(edges))


def test_a_chain_takes_merged_segments_and_leaves_out_what_does_not_fit() -> None:
    other = FILE[:20] + b"x" * 80
    parts = [segment(0, 20), segment(20, 30), segment(0, 30), segment(30, 60), segment(20, 90, other), segment(70, 100)]
    found = chain(parts)
    assert found[-1] == segment(20, 90, other), "what reaches furthest"
    assert (found[0].begin, [each.end for each in found]) == (0, [20, 90])
    assert chain([segment(10, 20)]) == []


def test_a_chain_ends_with_the_tail_that_fits() -> None:
    parts = [segment(0, 50), segment(20, 23, is_tail=True), segment(50, 53, is_tail=True)]
    assert [each.end for each in chain(parts)] == [50, 53]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"[1, 2]", 1),
        (b"[1, 2]\n", 2),
        (b'{\n "loss": [\n  1\n ]\n}\n', 6),
        (b'{"loss": 1}\n{"loss": 2}\n', 0),  # lines of JSON
        (b"1\n2\n3\n", 0),
        (b"step 3 loss 2.0", 0),
        (b"", 0),
        (b"\n\n\n", 0),
    ],
)
def test_what_only_closes_a_document_is_not_settled(content: bytes, expected: int) -> None:
    assert unsettled_bytes(content) == expected


@pytest.mark.parametrize("keyring", [None, Keyring([new_key()])])
def test_an_object_gives_its_bytes_back(keyring: Keyring | None) -> None:
    made = segment(20, 60)
    raw = encode_segment(made, FILE[20:60], before=digest(FILE[:20]), after=digest(FILE[:60]), keyring=keyring)
    assert decode_segment(made, raw, keyring=keyring, where="cold") == (FILE[20:60], digest(FILE[:60]))
    with pytest.raises(Corrupt, match="39 bytes, expected 40"):
        decode_segment(made, raw[:-1], keyring=keyring, where="cold")
    with pytest.raises((Corrupt, Foreign)):
        decode_segment(segment(20, 61), raw, keyring=keyring, where="cold")
    with pytest.raises((Corrupt, Foreign)):
        decode_segment(made, b"no header", keyring=keyring, where="cold")


def test_an_object_that_the_keyring_has_not_signed_is_refused() -> None:
    made = segment(0, 60)
    about = {"before": digest(b""), "after": digest(FILE[:60])}
    for keyring in (None, Keyring([new_key()])):
        raw = encode_segment(made, FILE[:60], keyring=keyring, **about)
        with pytest.raises(Foreign):
            decode_segment(made, raw, keyring=Keyring([new_key()]), where="cold")
