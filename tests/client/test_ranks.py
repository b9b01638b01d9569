"""The rank of a process among others, and the exchanges among ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tierd_client.ranks
import torch.distributed as dist
from tierd_client import BadConfig, Full, Transient
from tierd_client.ranks import BROADCAST_BYTES, find_ranks

from tests.support.trainer import Training, joined, refusals, together


def test_single_process_needs_no_process_group() -> None:
    ranks = find_ranks(None, None, {})
    assert (ranks.rank, ranks.world_size) == (0, 1)
    assert ranks.maximum([3, 1]) == [3, 1]
    assert ranks.broadcast(b"content") == b"content"
    assert ranks.gather(b"mine") == [b"mine"]
    assert ranks.run_on_all(lambda: 5) == 5
    assert ranks.run_and_maximum(lambda: (5, [3, True]), if_failed=[0, 0]) == (5, [3, 1])
    assert ranks.run_and_broadcast(lambda: 5, b"content") == (5, b"content")
    ranks.raise_on_all(None)
    with pytest.raises(Full):
        ranks.raise_on_all(Full("no room"))
    ranks.close()


@pytest.mark.parametrize(
    ("rank", "world_size", "environ", "said"),
    [
        (None, None, {"RANK": "0", "WORLD_SIZE": "2"}, "rank 0 of 2: torch.distributed is not initialized"),
        (None, None, {"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 of 2"),
        (None, None, {"RANK": "-1"}, "rank -1 of 1"),
        (None, None, {"RANK": "first"}, "$RANK is 'first'"),
        (None, None, {"WORLD_SIZE": "2.5"}, "$WORLD_SIZE is '2.5'"),
        (1, None, {"WORLD_SIZE": "2"}, "rank 1 of 2"),
        (None, 3, {"RANK": "2"}, "rank 2 of 3"),
        (0, 0, {}, "rank 0 of 0"),
    ],
)
def test_impossible_rank_or_world_size_is_refused(
    rank: int | None, world_size: int | None, environ: dict[str, str], said: str
) -> None:
    with pytest.raises(BadConfig) as caught:
        find_ranks(rank, world_size, environ)
    assert said in caught.value.message


def test_empty_environment_variable_counts_as_unset() -> None:
    assert find_ranks(None, None, {"RANK": "", "WORLD_SIZE": ""}).world_size == 1


# ── several processes; functions with a leading underscore run in a trainer ──


def _exchange(training: Training) -> list[Any]:
    rank, ranks = dist.get_rank(), find_ranks(None, None, {})
    return [
        ranks.maximum([rank, -rank]),
        ranks.broadcast(b"from the first" if rank == 0 else b""),
        ranks.broadcast(b""),
        ranks.gather(b"x" * rank),
        ranks.run_on_all(lambda: rank * 10),
        ranks.run_and_maximum(lambda: (rank * 10, [rank, -rank]), if_failed=[0, 0]),
        ranks.run_and_broadcast(lambda: rank * 10, b"from the first" if rank == 0 else b""),
    ]


def _broadcast_sizes(training: Training) -> list[bool]:
    """Whether contents around the size of one exchange arrive as they are."""
    ranks, sizes = find_ranks(None, None, {}), [0, 1, *range(BROADCAST_BYTES - 10, BROADCAST_BYTES + 2), 50_000]
    contents = [bytes(number % 251 for number in range(size)) for size in sizes]
    received = [ranks.broadcast(content if ranks.rank == 0 else b"ignored") for content in contents]
    with_work = [ranks.run_and_broadcast(lambda: None, content if ranks.rank == 0 else b"") for content in contents]
    return [received == contents, [content for _, content in with_work] == contents]


def _maxima_of_one_number(training: Training) -> list[list[int]]:
    """On the path around the ring, and on the path through rank 0."""
    ranks, former = find_ranks(None, None, {}), tierd_client.ranks.RING_RANKS_MAX
    around_ring = [ranks.maximum([value]) for value in (ranks.rank, -1 - ranks.rank)]
    tierd_client.ranks.RING_RANKS_MAX = 2
    try:
        return around_ring + [ranks.maximum([value]) for value in (ranks.rank, -1 - ranks.rank)]
    finally:
        tierd_client.ranks.RING_RANKS_MAX = former


def _fail_on_one(training: Training, exchange: str) -> None:
    def work() -> None:
        if dist.get_rank() == 1:
            raise Full("no room", hint="make some")

    ranks = find_ranks(None, None, {})
    if exchange == "broadcast":
        ranks.run_and_broadcast(work, b"content")
    elif exchange == "maximum":
        ranks.run_and_maximum(lambda: (work(), [3, 5]), if_failed=[0, 0])
    else:
        ranks.run_on_all(work)


class _NoTextError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


UNSHOWABLE = {
    "no text": (_NoTextError(), "rank 1: _NoTextError: its text cannot be shown"),
    "no UTF-8": (ValueError("bad \udcff name"), "rank 1: ValueError: bad \\udcff name"),
    "no UTF-8 in ours": (Full("bad \udcff name"), "rank 1: bad \\udcff name"),
}


def _fail_without_showable_text(training: Training, which: str) -> str:
    def work() -> None:
        if dist.get_rank() == 1:
            raise UNSHOWABLE[which][0]

    try:
        find_ranks(None, None, {}).run_on_all(work)
    except Exception as error:
        return "own" if error is UNSHOWABLE[which][0] else str(error)
    return "nothing"


def _descriptors_left(training: Training) -> int:
    for _ in range(3):
        find_ranks(None, None, {}).close()
    before = training.descriptors()
    for _ in range(5):
        find_ranks(None, None, {}).close()
    return training.descriptors() - before


def _find_ranks(training: Training) -> None:
    training.ranks = find_ranks(None, None, {})


def _wait_for_the_others(training: Training, count: int = 1) -> None:
    try:
        training.ranks.maximum([0] * count)
    except Transient as error:
        training.error = error  # so that it lives on, with its traceback, as in an `except` clause
        raise


def test_three_ranks_exchange_values_and_errors(tmp_path: Path) -> None:
    with joined(tmp_path, 3) as trainers:
        gathered = [b"", b"x", b"xx"]
        assert together(trainers, "apply", _exchange) == [
            [[2, 0], b"from the first", b"", gathered, rank * 10, (rank * 10, [2, 0]), (rank * 10, b"from the first")]
            for rank in range(3)
        ]
        assert together(trainers, "apply", _maxima_of_one_number) == [[[2], [-1], [2], [-1]]] * 3

        assert all(map(all, together(trainers, "apply", _broadcast_sizes)))
        for exchange in ("plain", "broadcast", "maximum"):
            errors = refusals(trainers, "apply", _fail_on_one, exchange)
            assert [str(error) for error in errors] == [
                "rank 1: no room (hint: make some)",
                "no room (hint: make some)",
                "rank 1: no room (hint: make some)",
            ]
            assert {type(error) for error in errors} == {Full}
        for which, (_, shown) in UNSHOWABLE.items():
            assert together(trainers, "apply", _fail_without_showable_text, which) == [shown, "own", shown]
        assert together(trainers, "apply", _descriptors_left) == [0, 0, 0]

        together(trainers, "apply", _find_ranks)
        for trainer in trainers[1:]:
            trainer.begin("apply", _wait_for_the_others)
        trainers[0].kill()
        for trainer in trainers[1:]:
            with pytest.raises(Transient, match="exchange with the other ranks"):
                trainer.end()


@pytest.mark.parametrize("killed", [0, 2])
@pytest.mark.parametrize("count", [1, 2])  # around a ring, and through rank 0
def test_dead_rank_ends_the_exchange_of_all_while_those_that_catch_the_error_live_on(
    tmp_path: Path, killed: int, count: int
) -> None:
    with joined(tmp_path, 4) as trainers:
        together(trainers, "apply", _find_ranks)
        survivors = [trainer for trainer in trainers if trainer is not trainers[killed]]
        for trainer in survivors:
            trainer.begin("apply", _wait_for_the_others, count)
        trainers[killed].kill()
        for trainer in survivors:
            with pytest.raises(Transient, match="exchange with the other ranks"):
                trainer.end()
        errors = refusals(survivors, "apply", _wait_for_the_others, count)
        assert {(type(error), error.message) for error in errors} == {
            (Transient, "exchange with the other ranks: an earlier one failed")
        }
