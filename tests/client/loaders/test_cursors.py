"""Cursors merge in any order, and sharing them out loses and repeats nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tierd_client.loaders.cursors import FileCursor, merge, share_out


@st.composite
def file_cursors(draw: st.DrawFn) -> FileCursor:
    size = draw(st.integers(0, 1000))
    return FileCursor(size, draw(st.integers(0, 2)), draw(st.integers(0, 9)), draw(st.integers(0, size)))


CURSORS = st.dictionaries(st.sampled_from("abcdefgh"), file_cursors())


@given(CURSORS, st.integers(1, 6), st.integers(0, 2))
def test_shares_merge_into_the_original_cursor(cursor: dict[str, FileCursor], readers: int, epoch: int) -> None:
    shares = share_out(cursor, readers, epoch=epoch)
    assert len(shares) == readers
    assert sum(len(share) for share in shares) == len(cursor), "each file has one reader"
    assert merge(shares) == merge(reversed(shares)) == cursor


@given(CURSORS, CURSORS, CURSORS)
def test_merge_is_commutative_associative_and_idempotent(
    a: dict[str, FileCursor], b: dict[str, FileCursor], c: dict[str, FileCursor]
) -> None:
    def positions(cursor: dict[str, FileCursor]) -> dict[str, tuple[int, int]]:
        return {path: (at.passes, at.documents) for path, at in cursor.items()}

    assert positions(merge([merge([a, b]), c])) == positions(merge([c, merge([b, a])]))
    assert merge([a, a]) == a


def test_merge_keeps_the_furthest_cursor_of_each_file() -> None:
    early, late, next_pass = FileCursor(9, 0, 2, 4), FileCursor(9, 0, 3, 6), FileCursor(9, 1)
    assert merge([{"a": late, "b": next_pass}, {"a": early, "b": late}]) == {"a": late, "b": next_pass}


@given(st.lists(st.integers(1, 1000), min_size=1), st.integers(1, 6))
def test_shares_differ_by_at_most_one_file(sizes: list[int], readers: int) -> None:
    shares = share_out({str(n): FileCursor(size) for n, size in enumerate(sizes)}, readers)
    sizes_bytes = [sum(at.size_bytes for at in share.values()) for share in shares]
    assert max(sizes_bytes) - min(sizes_bytes) <= max(sizes)


def test_remaining_bytes_are_spread_evenly_before_finished_files() -> None:
    cursor = {"a": FileCursor(100, 0, 9, 90), "b": FileCursor(10), "c": FileCursor(50, 1), "d": FileCursor(50, 1)}
    shares = share_out(cursor, 2)
    assert [sum(at.remaining_bytes(0) for at in share.values()) for share in shares] == [10, 10]
    assert [set(share) for share in shares] == [{"a"}, {"b", "c", "d"}]
