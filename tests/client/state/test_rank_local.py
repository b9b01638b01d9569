"""State that differs per rank, on another number of ranks: shared out, restored if equal on all ranks, or refused."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tierd_client.restore.replica import Replica
from tierd_client.state.dict_state import DictState
from tierd_client.state.ownership import assign_owners
from tierd_client.state.restore_filter import RestoreFilter
from tierd_client.state.training_state import TrainingState

from tests.support.cli import make_manifest
from tests.support.state import Files, Loader, assert_same, small_net, stage
from tierd.errors import Mismatch, Unsupported
from tierd.format import layout
from tierd.format.ids import Rank, checkpoint_id


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    opened = Files(tmp_path)
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def _own_generators() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


class ReshardableLoader(Loader):
    """A loader with load_state_dicts: it takes the states of any number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[Any] = []

    def load_state_dicts(self, states: Sequence[Any]) -> None:
        self.states = list(states)


def loader_at(state: Any) -> Loader:
    loader = Loader()
    loader.state = state
    return loader


def save(files: Files, states: Sequence[TrainingState | DictState]) -> Replica:
    """The checkpoint that ranks with these states write, as a replica."""
    entries = []
    for rank, state in enumerate(states):
        name = layout.shard_name(Rank(rank), len(states))
        entries.append(files.on_disk(stage(state, rank=rank, world_size=len(states)), name).entry)
    return Replica(
        "hot", make_manifest(checkpoint_id("run", 5, 1), entries), [os.dup(descriptor) for descriptor in files.opened]
    )


def state_of(rng: bool = False, **more: Any) -> TrainingState:
    torch.manual_seed(0)
    return TrainingState(model=small_net(), rng=rng, **more)


# ── data loaders ──


@pytest.mark.parametrize(("then", "world_size"), [(2, 3), (3, 2), (1, 4), (4, 1)])
def test_reshardable_loader_gets_the_states_of_all_ranks_in_order_on_every_rank(
    files: Files, then: int, world_size: int
) -> None:
    saved = [{"rank": rank, "order": torch.arange(rank, rank + 3)} for rank in range(then)]
    replica = save(files, [state_of(dataloader=loader_at(state)) for state in saved])
    with replica:
        for rank in range(world_size):
            loader = ReshardableLoader()
            replica.read_into_state(state_of(dataloader=loader), rank, world_size)
            assert_same(loader.states, saved)
            assert loader.state == {}


def test_with_the_same_number_of_ranks_each_loader_gets_its_own_state(files: Files) -> None:
    with save(files, [state_of(dataloader=loader_at({"rank": rank})) for rank in range(2)]) as replica:
        loader = ReshardableLoader()
        replica.read_into_state(state_of(dataloader=loader), 1, 2)
        assert (loader.state, loader.states) == ({"rank": 1}, [])


def test_loader_with_equal_state_on_all_ranks_is_restored(files: Files) -> None:
    saved = {"epoch": 3, "order": torch.tensor([2.0, float("nan")])}
    with save(files, [state_of(dataloader=loader_at(saved)) for _ in range(3)]) as replica:
        loader = Loader()
        replica.read_into_state(state_of(dataloader=loader), 1, 2)
        assert_same(loader.state["order"].view(torch.int32), saved["order"].view(torch.int32))
        assert loader.state["epoch"] == 3


@pytest.mark.parametrize(
    "states",
    [
        [{"at": 3}, {"at": 4}],
        [{"at": torch.tensor([1, 2])}, {"at": torch.tensor([1, 3])}],
        [{"at": torch.tensor([1, 2])}, {"at": torch.tensor([1, 2, 3])}],
        [{"at": torch.tensor([1, 2])}, {"at": 1}],
        [{"at": torch.tensor([1, 2])}, {"at": torch.tensor([1, 2], dtype=torch.int32)}],
        [{"at": np.array(["a"])}, {"at": np.array(["b"])}],
    ],
)
def test_loaders_with_different_states_are_refused_by_name_and_nothing_is_changed(
    files: Files, states: list[Any]
) -> None:
    with save(files, [state_of(dataloader=loader_at(state)) for state in states]) as replica:
        model, loader = small_net(), Loader()
        before = [parameter.clone() for parameter in model.parameters()]
        with pytest.raises(Mismatch, match=r"dataloader: it differs between the 2 ranks .*: give it load_state_dicts"):
            replica.read_into_state(TrainingState(model=model, dataloader=loader), 0, 1)
        assert all(map(torch.equal, model.parameters(), before))
        assert loader.state == {}
        replica.read_into_state(TrainingState(model=model), 0, 1)  # as the message suggests


# ── extra ──


def test_values_equal_on_all_ranks_are_restored_and_their_tensors_in_place(files: Files) -> None:
    saved = {"best": 0.5, "t": torch.arange(4.0), "table": torch.ones(2), "words": np.array(["a", "bc"])}
    with save(files, [state_of(extra={**saved}) for _ in range(2)]) as replica:
        live: dict[str, Any] = {"best": 0.0, "t": torch.zeros(4)}
        kept = live["t"]
        replica.read_into_state(state_of(extra=live), 2, 3)
        assert live["t"] is kept
        assert_same({**live, "words": live["words"].tolist()}, {**saved, "words": ["a", "bc"]})


def test_value_that_differs_is_refused_by_name_or_skipped_if_the_state_lacks_it(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    tables = [torch.zeros(2), torch.ones(2)]
    saved = [{"rank": rank, "t": torch.zeros(2), "table": tables[rank], "epoch": 3} for rank in range(2)]
    with save(files, [state_of(extra=extra) for extra in saved]) as replica:
        with pytest.raises(Mismatch, match=r"(?s)in 2 places.*extra\.rank: .*extra\.table: ") as caught:
            replica.read_into_state(state_of(extra={"rank": 0, "t": torch.ones(2), "table": torch.ones(2)}), 0, 1)
        assert "extra.t:" not in caught.value.message
        live: dict[str, Any] = {"t": torch.ones(2)}
        replica.read_into_state(state_of(extra=live), 0, 1)
        assert live.keys() == {"t", "epoch"}
        assert live["t"].tolist() == [0, 0]
        assert "extra.rank" in caplog.text


def test_value_missing_on_one_rank_is_refused(files: Files) -> None:
    with save(files, [state_of(extra={"a": 1}), state_of(extra={})]) as replica, pytest.raises(Mismatch, match="extra"):
        replica.read_into_state(state_of(extra={"a": 0}), 0, 1)


def test_module_equal_on_all_ranks_is_restored_and_one_that_differs_is_refused(files: Files) -> None:
    critic = torch.nn.Linear(3, 3)
    with save(files, [state_of(extra={"critic": critic}) for _ in range(2)]) as replica:
        live = torch.nn.Linear(3, 3)
        replica.read_into_state(state_of(extra={"critic": live}), 0, 1)
        assert torch.equal(live.weight, critic.weight)
    files.close()
    files.opened.clear()
    other = [state_of(extra={"critic": torch.nn.Linear(3, 3)}) for _ in range(2)]
    torch.nn.init.zeros_(critic.weight)
    with (
        save(files, [state_of(extra={"critic": critic}), *other[:1]]) as replica,
        pytest.raises(Mismatch, match="critic"),
    ):
        replica.read_into_state(state_of(extra={"critic": torch.nn.Linear(3, 3)}), 0, 1)


def test_value_of_another_type_on_another_rank_is_refused(files: Files) -> None:
    """For Python, 1 equals True and 1.0, and 0.0 equals -0.0."""
    for values in ([1, True], [1, 1.0], [0.0, -0.0]):
        with (
            save(files, [state_of(extra={"a": value}) for value in values]) as replica,
            pytest.raises(Mismatch, match=r"extra\.a: it differs between the 2 ranks"),
        ):
            replica.read_into_state(state_of(extra={"a": None}), 0, 1)
        files.close()
        files.opened.clear()


def test_scheduler_or_group_that_differs_between_ranks_is_refused(files: Files) -> None:
    """Rank 0's would be restored, and the other's lost."""

    def build(rank: int, lr: float) -> TrainingState:
        model = small_net()
        return state_of(scheduler=loader_at({"best": rank}), optimizer=torch.optim.SGD(model.parameters(), lr=lr))

    with (
        save(files, [build(rank, 0.1 + rank) for rank in range(2)]) as replica,
        pytest.raises(Mismatch, match=r"(?s)optimizer: it differs between.*scheduler: it differs between"),
    ):
        replica.read_into_state(build(0, 0.5), 0, 1)


def test_dict_whose_values_differ_between_ranks_is_refused(files: Files) -> None:
    def build(count: int) -> DictState:
        return DictState({"counts": {"own": torch.ones(2), "seen": [count, torch.ones(1)][: 1 + count]}})

    with (
        save(files, [build(rank) for rank in range(2)]) as replica,
        pytest.raises(Mismatch, match="counts: it differs between the 2 ranks that saved"),
    ):
        replica.read_into_state(build(9), 0, 1)


def test_tensors_outside_of_the_model_are_compared_between_ranks() -> None:
    """One rank writes them for all, so different values would be lost."""
    for build in (
        lambda rank: TrainingState(model=torch.nn.Linear(1, 1, bias=False), ema={"w": torch.full((2,), float(rank))}),
        lambda rank: DictState({"w": torch.full((2,), float(rank))}),
    ):
        torch.manual_seed(0)
        captured = [build(rank).capture(rank, 2) for rank in range(2)]
        with pytest.raises(Unsupported, match=r"assign (ema\.)?w to a rank: ranks 0 and 1 hold different tensors"):
            assign_owners([each.held_tensors()[-1:] for each in captured])


# ── parts of a state ──


def part(**arguments: Any) -> RestoreFilter:
    defaults: dict[str, Any] = {"only": None, "rename": None, "strict": True, "cast": False, "keep": ()}
    return RestoreFilter.parse(**{**defaults, **arguments})


def state_with_moments(rank: int, per_rank: list[str]) -> TrainingState:
    """The moments of the weight, the learning rate of a group and an average differ by rank, the rest does not."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    groups = [{"params": [model.weight], "lr": torch.tensor(float(rank))}, {"params": [model.bias]}]
    optimizer = torch.optim.AdamW(groups, foreach=False, capturable=False)
    model.weight.grad = torch.full((2, 2), 1.0 + rank)
    model.bias.grad = torch.ones(2)
    optimizer.step()
    torch.nn.init.ones_(model.weight)
    ema = {"deep": {"mean": torch.full((2,), float(rank))}, "same": torch.ones(2)}
    return TrainingState(model=model, optimizer=optimizer, ema=ema, rng=False, per_rank=per_rank)


PARTS = ["optimizer.state.weight", "optimizer.param_groups.0.lr", "ema.deep"]


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        ({"only": ["*.weight"]}, r"optimizer\.state\.weight\."),
        ({"only": ["optimizer.*.weight", "model"], "keep": ["model"]}, r"optimizer\.state\.weight\."),
        ({"only": ["*.lr"]}, r"optimizer\.param_groups\.0\.lr: "),
        ({"only": ["*.deep"]}, r"ema\.deep\.mean: "),
    ],
)
def test_pattern_that_names_the_entry_of_a_tensor_that_differs_is_refused(
    files: Files, arguments: dict[str, Any], refused: str
) -> None:
    """The filter selects entries. The names of the tensors in an entry are longer, and match other patterns."""
    with (
        save(files, [state_with_moments(rank, PARTS) for rank in range(2)]) as replica,
        pytest.raises(Mismatch, match=rf"{refused}.*it differs between the 2 ranks"),
    ):
        replica.read_into_state(state_with_moments(5, PARTS), 0, 1, part(**arguments))


def test_entries_that_differ_and_are_kept_or_not_asked_for_stay_as_they_are(files: Files) -> None:
    with save(files, [state_with_moments(rank, PARTS) for rank in range(2)]) as replica:
        for arguments in ({"keep": [*PARTS, "model.bias"]}, {"only": ["model", "*.bias", "ema.same"]}):
            live = state_with_moments(5, PARTS)
            before = live.capture(0, 1)
            expected = {tensor.name: tensor.tensor.clone() for tensor in before.tensors}
            replica.read_into_state(live, 0, 1, part(**arguments))
            for tensor in live.capture(0, 1).tensors:
                if tensor.name.startswith(tuple(PARTS)):
                    assert torch.equal(tensor.tensor, expected[tensor.name]), tensor.name


def test_module_in_extra_that_differs_is_left_alone_if_it_is_kept(files: Files) -> None:
    def module(value: int) -> torch.nn.Module:
        return torch.nn.BatchNorm1d(value + 1)

    with save(files, [state_of(extra={"m": module(rank), "n": 3}) for rank in range(2)]) as replica:
        extra = {"m": module(5), "n": 0}
        replica.read_into_state(state_of(extra=extra), 0, 1, part(keep=["extra.m"]))
        assert extra["n"] == 3
        assert replica.report is not None
        assert "extra.m.weight" in replica.report.kept
        with pytest.raises(Mismatch, match=r"extra\.m: it differs"):
            replica.read_into_state(state_of(extra=extra), 0, 1, part(keep=["extra.n"]))


# ── random numbers ──


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), torch.rand(1).item()]


def begin_at(seed: int) -> list[float]:
    """Seeds the generators. Returns the numbers that they will draw."""

    def seed_all() -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)

    seed_all()
    drawn = draw()
    seed_all()
    return drawn


def saved_with_rng(files: Files, seeds: Sequence[int]) -> tuple[Replica, list[list[float]]]:
    drawn: list[list[float]] = []
    opened = []
    model = small_net()
    for rank, seed in enumerate(seeds):
        drawn.append(begin_at(seed))
        name = layout.shard_name(Rank(rank), len(seeds))
        raw = stage(TrainingState(model=model), rank=rank, world_size=len(seeds))
        opened.append(files.on_disk(raw, name).entry)
    manifest = make_manifest(checkpoint_id("run", 5, 1), opened)
    return Replica("hot", manifest, [os.dup(descriptor) for descriptor in files.opened]), drawn


def drawn_after(replica: Replica, rank: int, world_size: int) -> list[float]:
    replica.read_into_state(TrainingState(model=small_net()), rank, world_size)
    return draw()


def test_ranks_keep_their_generators_and_new_ranks_get_reproducible_generators(files: Files) -> None:
    replica, drawn = saved_with_rng(files, [11, 12])
    with replica:
        draws = [drawn_after(replica, rank, 4) for rank in range(4)]
        assert draws[:2] == drawn
        numbers = [number for drawn_by_rank in draws for number in drawn_by_rank]
        assert len(set(numbers)) == len(numbers), "no stream twice"
        assert draws == [drawn_after(replica, rank, 4) for rank in range(4)]
        assert drawn_after(replica, 2, 3) == draws[2], "whatever the number of ranks"
        assert drawn_after(replica, 0, 1) == drawn[0]


def test_new_ranks_draw_the_same_numbers_where_all_saved_ranks_did(files: Files) -> None:
    replica, drawn = saved_with_rng(files, [11, 11])
    with replica:
        assert [drawn_after(replica, rank, 3) for rank in range(3)] == [drawn[0]] * 3


def test_ranks_added_to_a_single_rank_draw_different_numbers(files: Files) -> None:
    replica, drawn = saved_with_rng(files, [11])
    with replica:
        draws = [drawn_after(replica, rank, 3) for rank in range(3)]
        assert draws[0] == drawn[0]
        assert len({drawn_by_rank[0] for drawn_by_rank in draws}) == 3
