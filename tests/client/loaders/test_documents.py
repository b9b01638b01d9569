"""A resumed DocumentLoader gives the same batches, and on any ranks and workers each document once."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tierd_client import BadConfig, Corrupt, DocumentLoader, Mismatch
from tierd_client.state.training_state import TrainingState

from tests.support.datasets import noisy, write_documents
from tests.support.state import Files, Loader, restore, small_net, stage
from tests.support.trainer import Trainer, Training

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),  # torch's workers, from Python 3.12 on
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # more workers than cores
]

COUNTS = [13, 0, 30, 7, 22, 1, 41, 16]


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    return write_documents(tmp_path, COUNTS)


def ids(batches: Iterable[list[Any]]) -> list[int]:
    return [document["id"] for batch in batches for document in batch]


def some(loader: DocumentLoader, batches: int) -> list[Any]:
    """(pass, batch) of the next batches, over as many passes as needed."""
    read: list[Any] = []
    while True:
        for batch in loader:
            read.append((loader.epoch, batch))
            if len(read) == batches:
                return read


def rank_of(paths: list[str], rank: int, world_size: int, **options: Any) -> DocumentLoader:
    return DocumentLoader(paths, batch_size=4, rank=rank, world_size=world_size, **options)


# ── one rank ──


@pytest.mark.parametrize(
    ("before", "workers"),
    [
        *((before, 0) for before in [1, 20, 30, 45]),
        *(pytest.param(before, 3, marks=() if before == 30 else pytest.mark.long) for before in [1, 20, 30, 45]),
    ],
)
def test_batches_after_a_resume_at_any_batch_are_identical(paths: list[str], workers: int, before: int) -> None:
    def loader(seed: int) -> DocumentLoader:
        return DocumentLoader(paths, batch_size=4, num_workers=workers, collate=noisy, seed=seed)

    undisturbed = loader(seed=1)
    some(undisturbed, before)
    state = json.loads(json.dumps(undisturbed.state_dict()))
    expected = some(undisturbed, 40)
    resumed = loader(seed=2)
    resumed.load_state_dict(state)
    assert some(resumed, 40) == expected


def test_each_pass_has_all_documents_with_the_files_in_another_order(paths: list[str]) -> None:
    loader = DocumentLoader(paths, batch_size=4)
    first, second = ids(loader), ids(loader)
    assert sorted(first) == sorted(second) == list(range(sum(COUNTS)))
    assert first != second
    in_order = DocumentLoader(paths, batch_size=4, shuffle=False)
    assert [ids(in_order), ids(in_order)] == [list(range(sum(COUNTS)))] * 2


def test_global_generators_are_not_changed(paths: list[str]) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3).tolist()
    torch.manual_seed(5)
    for workers in (0, 1):
        list(DocumentLoader(paths, batch_size=4, num_workers=workers, collate=noisy))
    assert torch.rand(3).tolist() == expected


def test_pass_resumed_after_its_last_batch_ends_first(paths: list[str]) -> None:
    loader = DocumentLoader(paths, batch_size=4)
    for _ in loader:
        last = loader.state_dict()
    resumed = DocumentLoader(paths, batch_size=4)
    resumed.load_state_dict(last)
    assert (resumed.epoch, list(resumed), resumed.epoch) == (0, [], 1)
    assert sorted(ids(resumed)) == list(range(sum(COUNTS)))


def test_state_restored_within_a_loop_takes_effect_at_the_next_batch(paths: list[str]) -> None:
    loader = DocumentLoader(paths, batch_size=4)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    expected = [next(iterator) for _ in range(3)]
    loader.load_state_dict(state)
    assert [next(iterator) for _ in range(3)] == expected


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 0), (0, 2)])
def test_rest_of_a_pass_is_read_by_another_number_of_workers(paths: list[str], before: int, after: int) -> None:
    loader = rank_of(paths, 1, 2, num_workers=before)
    seen = [batch for _, batch in some(loader, 6)]
    resumed = rank_of(paths, 1, 2, num_workers=after)
    resumed.load_state_dict(loader.state_dict())
    assert Counter(ids(seen) + ids(resumed)) == Counter(ids(rank_of(paths, 1, 2)))


# ── files ──


def test_non_blank_lines_of_text_are_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("first\r\n\n  second ü\nlast, with no newline".encode())
    loader = DocumentLoader([tmp_path / "a.txt"], batch_size=1)
    iterator = iter(loader)
    assert next(iterator) == ["first"]
    resumed = DocumentLoader([tmp_path / "a.txt"], batch_size=9)
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == [["  second ü", "last, with no newline"]]


def test_resume_seeks_past_consumed_documents_without_reading_them(tmp_path: Path) -> None:
    (path,) = write_documents(tmp_path, [10])
    loader = DocumentLoader([path], batch_size=6)
    next(iter(loader))
    raw = Path(path).read_bytes()
    behind = sum(len(line) for line in raw.splitlines(keepends=True)[:6])
    Path(path).write_bytes(b"!" * behind + raw[behind:])  # as long, and no JSON up to there
    resumed = DocumentLoader([path], batch_size=6)
    resumed.load_state_dict(loader.state_dict())
    assert ids(resumed) == [6, 7, 8, 9]


def _characters(path: str) -> Iterator[str]:
    yield from Path(path).read_text()


def test_custom_reader_is_called_again_and_consumed_documents_are_skipped(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text(f"{name}123456789")
    paths = [tmp_path / "a", tmp_path / "b"]
    loader = DocumentLoader(paths, batch_size=4, read=_characters, shuffle=False)
    assert some(loader, 3) == [(0, list("a123")), (0, list("4567")), (0, list("89b1"))]
    resumed = DocumentLoader(paths, batch_size=4, read=_characters, shuffle=False)
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == [list("2345"), list("6789")]


def test_line_that_is_not_json_is_reported_with_its_number_and_file(tmp_path: Path) -> None:
    (path,) = write_documents(tmp_path, [2])
    with open(path, "a") as file:
        file.write("{oops\n")
    with pytest.raises(Corrupt, match=r"read document 3 of .*000\.jsonl"):
        list(DocumentLoader([path], batch_size=1))


def test_files_that_differ_from_those_of_the_checkpoint_are_refused_by_name(paths: list[str]) -> None:
    loader = DocumentLoader(paths, batch_size=4)
    some(loader, 3)
    state = loader.state_dict()
    with pytest.raises(Mismatch, match=r"002\.jsonl is not among the files now"):
        DocumentLoader([path for path in paths if "002" not in path], batch_size=4).load_state_dict(state)
    one_less = DocumentLoader(paths[:-1], batch_size=4).state_dict()
    with pytest.raises(Mismatch, match="7 files then, 8 now"):
        DocumentLoader(paths, batch_size=4).load_state_dict(one_less)
    with pytest.raises(Mismatch, match="the state is not a DocumentLoader"):
        loader.load_state_dict({"position": 3})
    size_bytes = Path(paths[4]).stat().st_size
    with open(paths[4], "a") as file:
        file.write("{}\n")
    with pytest.raises(Mismatch, match=rf"004\.jsonl had {size_bytes} bytes, now {size_bytes + 3}"):
        DocumentLoader(paths, batch_size=4).load_state_dict(state)
    Path(paths[4]).unlink()
    with pytest.raises(BadConfig, match=r"004\.jsonl: No such file"):
        DocumentLoader(paths, batch_size=4)


def test_invalid_arguments_are_refused(paths: list[str]) -> None:
    for files, options in [([], {}), ([paths[0]] * 2, {}), (paths, {"batch_size": 0}), (paths, {"num_workers": -1})]:
        with pytest.raises(BadConfig):
            DocumentLoader(files, **{"batch_size": 4, **options})


# ── several ranks ──


def test_idle_readers_are_logged_when_there_are_fewer_files_than_readers(
    paths: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    ranks = [rank_of(paths[2:4], rank, 3, num_workers=2) for rank in range(3)]
    assert "2 files for 3 ranks" in caplog.text
    assert "1 files for 2 workers" in caplog.text
    assert sorted(len(ids(rank)) for rank in ranks) == [0, 7, 30]


def test_resharding_ranks_in_different_passes_loses_and_repeats_no_document(paths: list[str], caplog: Any) -> None:
    caplog.set_level(logging.ERROR)
    ranks = [rank_of(paths, rank, 2) for rank in range(2)]
    seen = ids(ranks[0]) + ids([batch for _, batch in some(ranks[0], 3)])
    seen += ids([batch for _, batch in some(ranks[1], 2)])
    assert [rank.epoch for rank in ranks] == [1, 0]
    states = [rank.state_dict() for rank in ranks]
    after = [rank_of(paths, rank, 3) for rank in range(3)]
    for loader in after:
        loader.load_state_dicts(states)
    for loader in after * 2:  # the rest of the first pass, the rest of the second
        seen += ids(loader)
    assert Counter(seen) == Counter([*range(sum(COUNTS))] * 2)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1)])
def test_one_rank_is_resharded_to_several_and_back(paths: list[str], before: int, after: int) -> None:
    ranks = [rank_of(paths, rank, before) for rank in range(before)]
    seen = [batch for rank in ranks for _, batch in some(rank, 2)]
    states = [rank.state_dict() for rank in ranks]
    for rank in range(after):
        loader = rank_of(paths, rank, after)
        loader.load_state_dicts(states)
        seen += list(loader)
    assert Counter(ids(seen)) == Counter(range(sum(COUNTS)))


# Functions that run in the process of a rank. The loader has its own workers.


def _read_some(_: Training, paths: list[str], rank: int, batches: int) -> tuple[bytes, list[int]]:
    loader = rank_of(paths, rank, 4, num_workers=2)
    seen = ids(batch for _, batch in some(loader, batches))
    return stage(TrainingState(model=small_net(), dataloader=loader), rank=rank, world_size=4), seen


def _read_rest(_: Training, paths: list[str], rank: int, folder: Path, raws: list[bytes]) -> tuple[list[int], int]:
    files = Files(folder)
    shards = [files.on_disk(raw, f"rank-{number:05d}-of-00004.safetensors") for number, raw in enumerate(raws)]
    saved = [Loader() for _ in raws]
    for number, saved_loader in enumerate(saved):
        restore(TrainingState(model=small_net(), dataloader=saved_loader), shards, rank=number)
    files.close()
    loader = rank_of(paths, rank, 2, num_workers=3, seed=99)
    loader.load_state_dicts([saved_loader.state for saved_loader in saved])
    return ids(loader), len(ids(loader))


def test_1000_documents_resharded_from_4_ranks_to_2_are_each_read_once(tmp_path: Path) -> None:
    paths = write_documents(tmp_path, [100, 40, 60, 25, 75, 110, 90, 50, 30, 70, 80, 65, 55, 45, 85, 20])
    before = [Trainer() for _ in range(4)]
    for rank, trainer in enumerate(before):
        trainer.begin("apply", _read_some, paths, rank, 17 + rank)  # the workers have read ahead by then
    raws, seen = zip(*[trainer.end() for trainer in before], strict=True)
    for trainer in before:
        trainer.kill()

    after = [Trainer() for _ in range(2)]
    for rank, trainer in enumerate(after):
        (folder := tmp_path / f"rank{rank}").mkdir()
        trainer.begin("apply", _read_rest, paths, rank, folder, list(raws))
    rest, whole = zip(*[trainer.end() for trainer in after], strict=True)
    for trainer in after:
        trainer.leave()

    times = Counter(Counter(number for part in (*seen, *rest) for number in part).values())
    print(f"\n4 ranks x 2 workers read {[len(part) for part in seen]} documents, then died")
    print(f"2 ranks x 3 workers read {[len(part) for part in rest]} documents")
    print(
        f"1000 documents: {times[1]} seen once, {1000 - times.total()} never, {times.total() - times[1]} more than once"
    )
    assert times == {1: 1000}
    assert sum(whole) == 1000, "the next pass is whole"
