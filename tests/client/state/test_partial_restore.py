"""A restore of a part: what is asked for is restored exactly, the rest is left alone, and the report names both."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tierd_client.restore.load import SourceFile
from tierd_client.restore.resume import open_directory
from tierd_client.state.restore_filter import RestoreFilter
from tierd_client.state.restore_report import RestoreReport
from tierd_client.state.training_state import State, TrainingState
from torch import nn

from tests.support.state import Files, Loader, Training, assert_same, commit, one_step, restore, stage
from tierd.errors import Mismatch
from tierd.format import text


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    opened = Files(tmp_path)
    yield opened
    opened.close()


def filter_of(**arguments: Any) -> RestoreFilter:
    defaults: dict[str, Any] = {"only": None, "rename": None, "strict": True, "cast": False, "keep": ()}
    return RestoreFilter.parse(**{**defaults, **arguments})


def restored(state: State, files: Files, raw: bytes, **arguments: Any) -> RestoreReport:
    return restore(state, [files.on_disk(raw)], filter=filter_of(**arguments))


def net(classes: int = 10, *, body: str = "body", seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.ModuleDict:
    torch.manual_seed(seed)
    return nn.ModuleDict({body: nn.Linear(3, 8), "head": nn.Linear(8, classes)}).to(dtype)


def trained(module: nn.ModuleDict, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    body, head = module.children()
    weight = next(module.parameters())
    for _ in range(steps):
        one_step(module, optimizer, lambda: head(body(torch.randn(4, 3, dtype=weight.dtype))))


@pytest.fixture
def pretrained() -> tuple[nn.ModuleDict, torch.optim.AdamW, bytes]:
    """A model after two steps, its optimizer, and the shard of both with a scheduler and generators."""
    module = net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.5, weight_decay=0.25)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    trained(module, optimizer)
    scheduler.step()
    return module, optimizer, stage(TrainingState(model=module, optimizer=optimizer, scheduler=scheduler))


Pretrained = tuple[nn.ModuleDict, torch.optim.AdamW, bytes]


def moments(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
    return dict(optimizer.state[parameter])


# ── only ──


@pytest.mark.parametrize("only", ["model", ["model"], ["model.*"], ["model.body", "model.head.*"]])
def test_weights_alone_are_restored_beside_another_optimizer(files: Files, pretrained: Pretrained, only: Any) -> None:
    source, _, raw = pretrained
    module = net(seed=1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(7)
    generator = torch.get_rng_state()
    report = restored(TrainingState(model=module, optimizer=optimizer), files, raw, only=only)
    assert_same(module.state_dict(), source.state_dict())
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert torch.equal(torch.get_rng_state(), generator)
    assert sorted(report.loaded) == ["model.body.bias", "model.body.weight", "model.head.bias", "model.head.weight"]
    assert report.size_bytes == sum(tensor.nbytes for tensor in source.state_dict().values())
    assert {"rng", "scheduler", "optimizer.state.body.weight", "optimizer.param_groups.0.lr"} <= set(report.not_asked)
    assert not [*report.missing, *report.mismatched, *report.left_over]


def test_what_is_asked_for_must_fit_unless_strict_is_false(files: Files, pretrained: Pretrained) -> None:
    module = net(12, seed=1)
    module["new"] = nn.Linear(1, 1)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(Mismatch) as caught:
        restored(TrainingState(model=module), files, pretrained[2], only="model")
    assert "model.head.weight: checkpoint F32 [10, 8], model F32 [12, 8]" in caught.value.message
    assert "model.head.bias: checkpoint F32 [10], model F32 [12]" in caught.value.message
    assert_same(module.state_dict(), before)


def test_data_cursor_and_extra_values_are_restored_only_if_asked_for(files: Files) -> None:
    loader = Loader()
    loader.state = {"position": 7}
    raw = stage(TrainingState(model=net(), dataloader=loader, extra={"best": 0.5, "seen": 3}))
    other, extra = Loader(), {"best": 1.0, "seen": 0}
    state = TrainingState(model=net(seed=1), dataloader=other, extra=extra)
    report = restored(state, files, raw, only=["model", "extra.best"])
    assert other.state == {}
    assert extra == {"best": 0.5, "seen": 0}
    assert sorted(report.not_asked) == ["dataloader", "extra.seen", "rng"]
    assert "extra.best" in report.loaded


def test_restore_that_would_load_nothing_is_refused(files: Files, pretrained: Pretrained) -> None:
    state = TrainingState(model=nn.Linear(5, 5), rng=False)
    with pytest.raises(Mismatch, match="nothing of the checkpoint would be loaded"):
        restored(state, files, pretrained[2], strict=False)


# ── a new head ──


def test_new_head_starts_fresh_and_the_body_keeps_its_moments(files: Files, pretrained: Pretrained) -> None:
    source, source_optimizer, raw = pretrained
    module = net(12, seed=1)
    head = copy.deepcopy(module["head"].state_dict())
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    report = restored(
        TrainingState(model=module, optimizer=optimizer), files, raw, only=["model", "optimizer"], strict=False
    )
    assert_same(module["body"].state_dict(), source["body"].state_dict())
    assert_same(module["head"].state_dict(), head)
    for name in ("weight", "bias"):
        live, stored = getattr(module["body"], name), getattr(source["body"], name)
        assert_same(moments(optimizer, live), moments(source_optimizer, stored))
    assert set(optimizer.state) == set(module["body"].parameters())
    assert optimizer.param_groups[0]["weight_decay"] == 0.25
    assert report.mismatched == {
        "model.head.weight": "checkpoint F32 [10, 8], model F32 [12, 8]",
        "model.head.bias": "checkpoint F32 [10], model F32 [12]",
        "optimizer.state.head.weight": "checkpoint [10, 8], now [12, 8]",
        "optimizer.state.head.bias": "checkpoint [10], now [12]",
    }
    trained(module, optimizer)
    assert set(optimizer.state) == set(module.parameters())
    stage(TrainingState(model=module, optimizer=optimizer))


def test_head_of_another_name_is_missing_and_the_old_one_is_left_over(files: Files, pretrained: Pretrained) -> None:
    module = nn.ModuleDict({"body": nn.Linear(3, 8), "classifier": nn.Linear(8, 2)})
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    state = TrainingState(model=module, optimizer=optimizer, rng=False)
    report = restored(state, files, pretrained[2], strict=False)
    names = ("classifier.weight", "classifier.bias")
    assert set(report.missing) == {f"{place}.{name}" for place in ("model", "optimizer.state") for name in names}
    assert {"model.head.weight", "optimizer.state.head.bias", "rng", "scheduler"} <= set(report.left_over)
    assert not report.mismatched


# ── rename ──


@pytest.mark.parametrize(
    "rename",
    [
        {"model.body": "model.encoder"},
        {"model.body.": "model.encoder."},
        lambda name: name.replace("model.body", "model.encoder"),
    ],
)
def test_optimizer_state_follows_the_renamed_parameters(files: Files, pretrained: Pretrained, rename: Any) -> None:
    source, source_optimizer, raw = pretrained
    module = net(body="encoder", seed=1)
    optimizer = torch.optim.AdamW(module.parameters())
    report = restored(TrainingState(model=module, optimizer=optimizer), files, raw, rename=rename)
    assert_same(list(module.state_dict().values()), list(source.state_dict().values()))
    for live, stored in zip(module.parameters(), source.parameters(), strict=True):
        assert_same(moments(optimizer, live), moments(source_optimizer, stored))
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert report.renamed["model.body.weight"] == "model.encoder.weight"
    assert report.renamed["optimizer.state.body.bias"] == "optimizer.state.encoder.bias"
    assert len(report.renamed) == 4


def test_averaged_weights_are_restored_into_the_model(files: Files) -> None:
    training = Training.fresh()
    training.train(3)
    raw = stage(training.state())
    other = Training.fresh(1)
    report = restored(TrainingState(model=other.model), files, raw, only=["ema"], rename={"ema": "model"}, strict=False)
    assert_same(other.model.state_dict(), training.ema.module.state_dict())
    assert report.left_over == ["ema.n_averaged"]


def test_average_kept_as_a_dict_is_restored_into_a_model_and_back(files: Files) -> None:
    source = net()
    raw = stage(TrainingState(model=net(seed=3), ema={**source.state_dict(), "updates": 5}, rng=False))
    module = net(seed=1)
    restored(TrainingState(model=module, rng=False), files, raw, only="ema", rename={"ema": "model"}, strict=False)
    assert_same(module.state_dict(), source.state_dict())
    average: dict[str, Any] = {**{name: torch.zeros_like(t) for name, t in source.state_dict().items()}, "updates": 0}
    tensor = average["head.weight"]
    state = TrainingState(model=module, ema=average, rng=False)
    report = restored(state, files, raw, keep=["ema.body", "model"])
    assert average["head.weight"] is tensor
    assert_same(tensor, source.state_dict()["head.weight"])
    assert average["updates"] == 5
    assert not average["body.weight"].any()
    assert {"ema.body.weight", "ema.body.bias"} <= set(report.kept)


# ── keep ──


def test_new_learning_rate_is_kept_and_the_rest_is_exact(
    files: Files, pretrained: Pretrained, caplog: pytest.LogCaptureFixture
) -> None:
    source, source_optimizer, raw = pretrained
    module = net(seed=1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (2 + step))
    state = TrainingState(model=module, optimizer=optimizer, scheduler=scheduler)
    report = restored(state, files, raw, keep=["optimizer.*lr", "scheduler"])
    assert_same(module.state_dict(), source.state_dict())
    assert_same([*optimizer.state.values()], [*source_optimizer.state.values()])
    group = optimizer.param_groups[0]
    assert (group["lr"], group["initial_lr"], group["weight_decay"]) == (0.005, 0.01, 0.25)
    assert scheduler.last_epoch == 0
    assert set(report.kept) == {"optimizer.param_groups.0.lr", "optimizer.param_groups.0.initial_lr", "scheduler"}
    assert not caplog.records
    restored(state, files, raw, keep=["optimizer.*.lr"])
    assert "lr is kept and the scheduler is not" in caplog.text


def test_added_group_keeps_its_options_and_starts_fresh(files: Files, pretrained: Pretrained) -> None:
    raw = pretrained[2]
    module = net(seed=1)
    module["adapter"] = nn.Linear(8, 8)
    pretrained_parameters = [*module["body"].parameters(), *module["head"].parameters()]
    optimizer = torch.optim.AdamW(
        [{"params": pretrained_parameters}, {"params": module["adapter"].parameters(), "lr": 0.9}]
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    state = TrainingState(model=module, optimizer=optimizer, scheduler=scheduler)
    with pytest.raises(Mismatch, match=r"optimizer\.param_groups: checkpoint 1, now 2"):
        restored(state, files, raw)
    report = restored(state, files, raw, strict=False)
    first, added = optimizer.param_groups
    assert (first["lr"], first["weight_decay"]) == (0.25, 0.25)
    assert (added["lr"], added["weight_decay"]) == (0.9, 0.01)
    assert set(optimizer.state) == set(pretrained_parameters)
    assert report.mismatched == {"scheduler": "checkpoint 1 parameter groups, now 2"}
    assert "optimizer.param_groups.1" in report.missing
    assert "optimizer.state.adapter.weight" in report.missing
    optimizer.step()
    scheduler.step()


def test_group_of_parameters_that_had_different_options_keeps_its_own(files: Files) -> None:
    def build(seed: int, *, split: bool) -> tuple[nn.ModuleDict, torch.optim.SGD]:
        module = net(seed=seed)
        groups = [
            {"params": module["body"].parameters(), "lr": 0.1},
            {"params": module["head"].parameters(), "lr": 0.2},
        ]
        return module, torch.optim.SGD(groups if split else module.parameters(), lr=0.3, momentum=0.5)

    module, optimizer = build(0, split=True)
    trained(module, optimizer)
    raw = stage(TrainingState(model=module, optimizer=optimizer))
    other, joined = build(1, split=False)
    report = restored(TrainingState(model=other, optimizer=joined), files, raw, strict=False)
    assert joined.param_groups[0]["lr"] == 0.3
    assert "groups 0, 1" in report.mismatched["optimizer.param_groups.0"]
    assert_same([*joined.state.values()], [*optimizer.state.values()])


def test_another_kind_of_optimizer_is_left_alone_and_reported(files: Files, pretrained: Pretrained) -> None:
    module = net(seed=1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    report = restored(TrainingState(model=module, optimizer=optimizer), files, pretrained[2], strict=False)
    assert "the checkpoint's has" in report.mismatched["optimizer"]
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_kept_optimizer_state_stays_in_place(files: Files, pretrained: Pretrained) -> None:
    _, source_optimizer, raw = pretrained
    module = net(seed=1)
    optimizer = torch.optim.AdamW(module.parameters())
    trained(module, optimizer, steps=3)
    weight = module.get_parameter("head.weight")
    before = copy.deepcopy(moments(optimizer, weight))
    restored(TrainingState(model=module, optimizer=optimizer), files, raw, keep=["optimizer.state.head.weight"])
    assert_same(moments(optimizer, weight), before)
    steps = [state["step"].item() for state in optimizer.state.values()]
    assert sorted(steps) == [2, 2, 2, 3]
    assert len(source_optimizer.state) == 4


@pytest.mark.parametrize("keep", ["optimizer", "optimizer.*"])
def test_optimizer_of_another_kind_may_be_kept_whole(files: Files, pretrained: Pretrained, keep: str) -> None:
    source, _, raw = pretrained
    module = net(seed=1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    report = restored(TrainingState(model=module, optimizer=optimizer), files, raw, keep=keep)
    assert_same(module.state_dict(), source.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert not optimizer.state
    assert report.left_over == ["scheduler"]


def test_optimizer_that_differs_by_rank_may_be_kept_on_another_number_of_ranks(tmp_path: Path) -> None:
    source, live = net(seed=0), net(seed=1)
    raws: list[bytes] = []
    for rank in range(2):
        state = TrainingState(model=source, optimizer=torch.optim.SGD(source.parameters(), lr=1.0 + rank), rng=False)
        raws.append(stage(state, rank=rank, world_size=2, owned=set() if rank else None))
    optimizer = torch.optim.SGD(live.parameters(), lr=0.5)
    state = TrainingState(model=live, optimizer=optimizer, rng=False)
    with open_directory(str(commit(tmp_path, raws))) as replica:
        with pytest.raises(Mismatch, match="optimizer: it differs between the 2 ranks"):
            replica.read_into_state(state, 0, 1)
        replica.read_into_state(state, 0, 1, filter_of(keep=["optimizer"]))
    assert_same(live.state_dict(), source.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_part_of_a_pipeline_stage_is_restored_by_the_rank_that_holds_it(files: Files) -> None:
    def stages(seed: int) -> list[nn.ModuleDict]:
        torch.manual_seed(seed)
        return [nn.ModuleDict({"body": nn.Linear(3, 8)}), nn.ModuleDict({"head": nn.Linear(8, 2)})]

    sources, live = stages(0), stages(1)
    shards: list[SourceFile] = []
    for rank, module in enumerate(sources):
        captured = TrainingState(model=module, rng=False).capture(rank, 2)
        captured.tree["model"]["is_part"] = True
        shards.append(files.on_disk(stage(captured, rank=rank, world_size=2), f"rank-{rank:05d}-of-00002.safetensors"))
    before = copy.deepcopy(live[0].state_dict())
    loaded: list[list[str]] = []
    for rank, module in enumerate(live):
        filter = filter_of(only=["model.head.weight"], strict=False)
        loaded.append(restore(TrainingState(model=module, rng=False), shards, rank=rank, filter=filter).loaded)
    assert loaded == [[], ["model.head.weight"]]
    assert_same(live[0].state_dict(), before)
    assert_same(live[1].get_parameter("head.weight"), sources[1].get_parameter("head.weight"))
    assert not torch.equal(live[1].get_parameter("head.bias"), sources[1].get_parameter("head.bias"))


# ── cast ──


def test_dtype_changes_only_on_request_and_the_report_says_so(files: Files, pretrained: Pretrained) -> None:
    source, source_optimizer, raw = pretrained
    module = net(seed=1, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(module.parameters())
    state = TrainingState(model=module, optimizer=optimizer)
    with pytest.raises(Mismatch, match=r"checkpoint F32 \[8, 3\], model BF16 \[8, 3\]"):
        restored(state, files, raw, cast=["optimizer"])
    report = restored(state, files, raw, cast=True)
    for live, stored in zip(module.parameters(), source.parameters(), strict=True):
        assert torch.equal(live, stored.to(torch.bfloat16))
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[live][key], source_optimizer.state[stored][key].to(torch.bfloat16))
        assert optimizer.state[live]["step"].dtype == torch.float32
    assert report.cast["model.body.weight"] == report.cast["optimizer.state.head.bias"] == "F32 -> BF16"
    assert len(report.cast) == 8
    assert set(report.cast) <= set(report.loaded)
    trained(module, optimizer)


def test_integers_are_never_cast(files: Files) -> None:
    source, live = nn.Linear(2, 2), nn.Linear(2, 2)
    source.register_buffer("count", torch.tensor(3))
    live.register_buffer("count", torch.tensor(1.0))
    raw = stage(TrainingState(model=source))
    with pytest.raises(Mismatch, match=r"model\.count: checkpoint I64 \[\], model F32 \[\]"):
        restored(TrainingState(model=live), files, raw, cast=True)


def test_tied_weights_that_differ_in_the_checkpoint_are_refused_before_a_cast(files: Files) -> None:
    def build(*, tied: bool, dtype: torch.dtype) -> nn.ModuleDict:
        module = nn.ModuleDict({"first": nn.Linear(4, 4, bias=False), "last": nn.Linear(4, 4, bias=False)}).to(dtype)
        if tied:
            module["last"].weight = module["first"].weight
        return module

    tied = stage(TrainingState(model=build(tied=True, dtype=torch.float32)))
    different = stage(TrainingState(model=build(tied=False, dtype=torch.float32)))
    live = build(tied=True, dtype=torch.bfloat16)
    before = copy.deepcopy(live.state_dict())
    with pytest.raises(Mismatch, match="share memory"):
        restored(TrainingState(model=live), files, different, cast=True)
    assert_same(live.state_dict(), before)
    restored(TrainingState(model=live), files, tied, cast=True)


def test_overlapping_tensors_of_other_shapes_are_not_cast(files: Files) -> None:
    def build(dtype: torch.dtype) -> nn.ModuleDict:
        module = nn.ModuleDict({"whole": nn.Linear(4, 4, bias=False), "row": nn.Linear(4, 1, bias=False)}).to(dtype)
        module["row"].weight = nn.Parameter(module.get_parameter("whole.weight").detach()[:1])
        return module

    raw = stage(TrainingState(model=build(torch.float32)))
    restored(TrainingState(model=build(torch.float32)), files, raw, only="model")
    with pytest.raises(Mismatch, match=r"shares memory with the tensor that gets .* must have the same shape"):
        restored(TrainingState(model=build(torch.bfloat16)), files, raw, cast=True)


# ── the report, other states ──


def test_whole_restore_reports_every_entry_as_loaded(files: Files) -> None:
    training, other = Training.fresh(), Training.fresh(1)
    training.train(2)
    report = restore(other.state(), [files.on_disk(stage(training.state()))])
    assert {"model.0.weight", "optimizer.state.0.weight", "optimizer.param_groups.0.lr", "scheduler", "rng"} <= set(
        report.loaded
    )
    assert {"extra.seen", "ema.n_averaged", "model.1.running_mean"} <= set(report.loaded)
    assert report == RestoreReport(loaded=report.loaded, size_bytes=report.size_bytes)
    assert str(report) == f"{len(report.loaded)} entries loaded ({text.size(report.size_bytes)})"


def test_report_counts_what_was_loaded_and_what_was_not() -> None:
    report = RestoreReport(loaded=["a", "b"], size_bytes=3 << 20, missing=["c"], mismatched={"d": ""}, not_asked=["e"])
    expected = "2 entries loaded (3.15 MB), 1 not in the checkpoint, 1 that did not fit, 1 not asked for"
    assert str(report) == expected


def test_module_with_extra_state_is_restored_in_part(files: Files) -> None:
    class Counting(nn.Linear):
        count = 0

        def get_extra_state(self) -> Any:
            return {"count": self.count, "tensor": torch.full((2,), float(self.count))}

        def set_extra_state(self, state: Any) -> None:
            self.count = state["count"]

    def build(count: int) -> nn.ModuleDict:
        module = nn.ModuleDict({"old": Counting(2, 2), "head": nn.Linear(2, 2)})
        module["old"].set_extra_state({"count": count})  # pyright: ignore[reportCallIssue]
        return module

    raw = stage(TrainingState(model=build(5), rng=False))
    module = nn.ModuleDict({"new": Counting(2, 2), "head": nn.Linear(2, 3)})
    report = restored(TrainingState(model=module), files, raw, rename={"model.old": "model.new"}, strict=False)
    assert module["new"].count == 5
    assert "model.new._extra_state" in report.loaded
    assert not report.left_over
