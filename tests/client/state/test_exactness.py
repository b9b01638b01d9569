"""Each row of docs/reference/exactness.md: exact on every topology that it names, or refused at the first snapshot."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from generators import exactness
from tests.client.exactness import averages, models, optimizers, ranks, schedulers, stateful, values
from tests.client.exactness.row import EXACT, TOPOLOGIES, Row
from tests.support.contents import Objects, checkpoint, difference
from tests.support.state import Files
from tierd.errors import Mismatch, TierdError

SUBJECTS: list[Any] = [models, optimizers, schedulers, averages, stateful, values, ranks]
ROWS_MIN = 256
ALL = [(subject, row) for subject in SUBJECTS for row in subject.ROWS]
IDS = [
    f"{subject.__name__.rpartition('.')[2]}: {row.name.replace('`', '')}".encode("ascii", "replace")
    for subject, row in ALL
]


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    opened = Files(tmp_path)
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    """torch warns of much that is deprecated or a prototype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module", autouse=True)
def _process_group() -> Iterator[None]:
    """For wrappers and DTensors: a group of this process alone."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_there_are_enough_rows_with_different_names() -> None:
    assert len({(subject, row.name) for subject, row in ALL}) == len(ALL) >= ROWS_MIN


def test_the_page_shows_every_row_with_its_outcome() -> None:
    assert list(exactness.rows()) == [(subject.__name__.rpartition(".")[2], row.name) for subject, row in ALL]
    lines = exactness.page().splitlines()
    for _, row in ALL:
        (line,) = (line for line in lines if line.startswith(f"| {row.name} | "))
        outcomes = ["exact", "exact", row.refused_on_fewer or "exact"] if row.outcome == EXACT else [row.outcome] * 3
        shown = line.removeprefix(f"| {row.name} | ").removesuffix(" |").split(" | ")
        assert len(shown) == (2 if row in ranks.ROWS else 3)
        assert all(text in cell for text, cell in zip(outcomes[-len(shown) :], shown, strict=True)), line


@pytest.mark.parametrize(("subject", "row"), ALL, ids=[name.decode() for name in IDS])
def test_row(files: Files, subject: Any, row: Row) -> None:
    if row.outcome != EXACT:
        with pytest.raises(TierdError, match=re.escape(row.outcome)):
            checkpoint(files, [subject.build(row, 0, rank) for rank in range(2 if subject is ranks else 1)])
        return
    for then, now in TOPOLOGIES:
        saved: list[Objects] = [subject.build(row, 0, rank) for rank in range(then)]
        with checkpoint(files, saved) as replica:
            for rank in range(now):
                fresh: Objects = subject.build(row, 1, rank)
                expected = saved[rank].contents()
                before = fresh.contents()
                assert difference(before, expected), "the test could not fail: the fresh objects hold the same"
                if now < then and row.refused_on_fewer:
                    with pytest.raises(Mismatch, match=re.escape(row.refused_on_fewer)):
                        replica.read_into_state(fresh.state(), rank, now)
                    assert not difference(fresh.contents(), before)
                else:
                    replica.read_into_state(fresh.state(), rank, now)
                    assert not difference(fresh.contents(), expected), f"{then} ranks to {now}"
        files.close()
        files.opened.clear()
