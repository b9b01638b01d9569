"""`tierd import --like` of a file of torch.save: the optimizer's state gets names of parameters, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tierd_client
import torch
from tierd_client import TrainingState

from tests.support.cli import House, make_checkpoint, make_house
from tests.support.daemon import Daemon
from tests.support.state import Training, assert_same, commit, stage
from tierd.format.shard import read_header


@pytest.fixture
def house(tmp_path: Path, forked_python: None) -> House:
    return make_house(tmp_path)


def in_groups(
    *, width: int = 3, dtype: torch.dtype = torch.float32, is_named: bool = False, sgd: bool = False, steps: int = 1
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model whose weights and biases are in two groups of its optimizer, in another order than in the model."""
    model = torch.nn.Sequential(torch.nn.Linear(width, width, dtype=dtype), torch.nn.Linear(width, 2, dtype=dtype))
    named = list(model.named_parameters())
    groups: list[dict[str, Any]] = []
    for ending, decay in ((".bias", 0.0), (".weight", 0.1)):
        chosen = [(name, each) for name, each in reversed(named) if name.endswith(ending)]
        groups.append({"params": chosen if is_named else [each for _, each in chosen], "weight_decay": decay})
    optimizer = torch.optim.SGD(groups, momentum=0.9) if sgd else torch.optim.AdamW(groups)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, width, dtype=dtype)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def saved(path: Path, model: torch.nn.Module, *optimizers: torch.optim.Optimizer, **more: Any) -> Path:
    entries = {f"optimizer{index or ''}": each.state_dict() for index, each in enumerate(optimizers)}
    torch.save({"net": model.state_dict(), **entries, **more}, path)
    return path


def like(house: House, model: torch.nn.Module, optimizer: Any) -> None:
    commit(house.hot, [stage(TrainingState(model=model, optimizer=optimizer))], step=1)


def imported(house: House, path: Path, *more: str) -> Any:
    arguments = ("import", path, "--run", "new", "--step", "8", "--like", "run/1", "--model", "net", *more)
    return house.tierd(*arguments)


def assert_refused(house: House, path: Path, message: str, *more: str, code: int = 2) -> None:
    result = imported(house, path, *more)
    assert result.exit_code == code, result.output
    assert message in result.stderr
    assert not (house.hot / "new").exists()


@pytest.mark.usefixtures("forked_python")
def test_a_training_goes_on_from_a_file_of_torch_save_as_it_would_have_gone_on(tmp_path: Path) -> None:
    training = Training.fresh()
    training.train(5)
    entries = {"optimizer": training.optimizer.state_dict(), "scheduler": training.scheduler.state_dict()}
    entries |= {"ema": training.ema.state_dict(), "seen": training.extra["seen"], "notes": ("a", 1)}
    torch.save({"net": training.model.state_dict(), **entries}, tmp_path / "step5.pt")
    with Daemon(tmp_path / "house") as daemon:
        pattern = Training.fresh(seed=3)
        pattern.train(1)
        commit(daemon.root / "hot", [stage(pattern.state())], step=1)
        more = ("--run", "new", "--step", "5", "--like", "run/1", "--model", "net")
        house = House(daemon.root)
        done = house.tierd("import", tmp_path / "step5.pt", *more)
        assert done.exit_code == 0, done.output
        assert "only the names of the optimizer's parameters come from run/000000000001-g0001" in done.stderr
        assert "not in the file, so left out: rng" in done.stderr
        assert house.json("import", tmp_path / "step5.pt", *more)["is_new"] is False

        second = Training.fresh(seed=9)
        with tierd_client.connect("new", socket=daemon.socket) as client:
            found = client.restore(second.state())
        assert found is not None
        assert (found.step, found.tier) == (5, "hot")
    for name in ("model", "optimizer", "scheduler", "ema"):
        assert_same(getattr(second, name).state_dict(), getattr(training, name).state_dict())
    assert second.extra == {"seen": training.extra["seen"], "notes": ("a", 1)}
    torch.manual_seed(1)
    losses = training.train(4)
    torch.manual_seed(1)
    assert second.train(4) == losses


@pytest.mark.parametrize("is_named", [False, True])
def test_groups_keep_their_order_options_and_parameters(house: House, *, is_named: bool) -> None:
    like(house, *in_groups())
    model, optimizer = in_groups(is_named=is_named, steps=3)
    result = imported(house, saved(house.root / "step.pt", model, optimizer))
    assert result.exit_code == 0, result.output
    (path,) = (house.hot / "new").rglob("*.safetensors")
    raw = path.read_bytes()
    shard = read_header(lambda length, at: raw[at : at + length], len(raw), where="shard")
    (tree,) = shard.tierd["state"]["optimizer"]["value"]
    assert [group["params"] for group in tree["groups"]] == [["1.bias", "0.bias"], ["1.weight", "0.weight"]]
    assert [group["options"]["weight_decay"] for group in tree["groups"]] == [0.0, 0.1]
    assert not {"params", "param_names"} & tree["groups"][0]["options"].keys()
    exported = house.root / "new.pt"
    assert house.tierd("export", "--run", "new", "--format", "torch", "--to", exported).exit_code == 0
    moments = torch.load(exported, weights_only=True)["optimizer"]["state"]
    for name, parameter in model.named_parameters():
        assert torch.equal(moments[name]["exp_avg"], optimizer.state[parameter]["exp_avg"])


def test_a_file_of_an_older_torch_may_lack_options_and_one_of_lightning_has_a_list(house: House) -> None:
    like(house, *in_groups())
    model, optimizer = in_groups()
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        del group["decoupled_weight_decay"]
    torch.save({"net": model.state_dict(), "optimizer_states": [state], "ema": 3}, house.root / "step.pt")
    assert imported(house, house.root / "step.pt").exit_code == 0


def test_names_in_the_file_decide_and_must_be_those_of_the_checkpoint(house: House) -> None:
    like(house, *in_groups())
    model, optimizer = in_groups(is_named=True)
    state = optimizer.state_dict()
    state["param_groups"][0]["param_names"] = ["0.bias", "1.bias"]  # 0 and 1 have other shapes, so it matters
    path = house.root / "step.pt"
    torch.save({"net": model.state_dict(), "optimizer": state}, path)
    assert_refused(house, path, "optimizer.state.0.bias.exp_avg is F32 [2]")
    state["param_groups"][0]["param_names"] = ["0.bias", "body.bias"]
    torch.save({"net": model.state_dict(), "optimizer": state}, path)
    assert_refused(house, path, "group 0 has the parameter body.bias, and the checkpoint's has not")


def one_group() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model, _ = in_groups()
    return model, torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: in_groups(width=4), "model.0.bias is F32 [4] in the file, and F32 [3]"),
        (lambda: in_groups(dtype=torch.float64), "model.0.bias is F64 [3] in the file, and F32 [3]"),
        (lambda: in_groups(sgd=True), "it is another kind of optimizer"),
        (lambda: in_groups(steps=0), "optimizer.state.0.bias.exp_avg is absent in the file, and F32 [3]"),
        (one_group, "its optimizer has 1 groups, and the checkpoint's has 2"),
    ],
)
def test_another_model_or_optimizer_is_refused_by_name(
    house: House, made: Callable[[], tuple[torch.nn.Module, torch.optim.Optimizer]], message: str
) -> None:
    like(house, *in_groups())
    assert_refused(house, saved(house.root / "step.pt", *made()), message)


def test_a_file_with_another_number_of_parameters_or_of_optimizers_is_refused(house: House) -> None:
    model, optimizer = in_groups()
    like(house, model, optimizer)
    path = house.root / "step.pt"
    state = optimizer.state_dict()
    state["param_groups"][1]["params"] = [2]
    torch.save({"net": model.state_dict(), "optimizer": state}, path)
    assert_refused(house, path, "group 1 of its optimizer has 1 parameters, and the checkpoint's has 2")
    assert_refused(house, saved(path, model), "no entry of it is the state dict of an optimizer")
    assert_refused(
        house, saved(path, model, optimizer, optimizer), "it has the state dicts of 2 optimizers: optimizer, optimizer1"
    )


def test_an_optimizer_that_is_not_as_torch_writes_it_is_refused_by_name(house: House) -> None:
    model, optimizer = in_groups()
    like(house, model, optimizer)
    states, groups = optimizer.state_dict()["state"], optimizer.state_dict()["param_groups"]
    path = house.root / "step.pt"
    for strange, message in (
        ({"state": states, "param_groups": 3}, "groups of parameters that are not as torch writes them"),
        ({"state": states, "param_groups": [torch.ones(1), {}]}, "groups of parameters that are not as torch"),
        ({"state": 5, "param_groups": groups}, "state of None, which is no parameter in its groups"),
        ({"state": states | {9: {}}, "param_groups": groups}, "state of 9, which is no parameter in its groups"),
        ({"state": {0: {1: 2}}, "param_groups": groups}, "state of 0, which"),
        ({"state": states, "param_groups": [groups[0], {**groups[1], "params": [0, 3]}]}, "a parameter twice, or one"),
        ({"state": states, "param_groups": [{**groups[0], "param_names": "ab"}, groups[1]]}, "no list of names"),
        (
            {"state": states, "param_groups": [{**groups[0], "param_names": ["0.bias"]}, groups[1]]},
            "does not name each of its parameters once",
        ),
    ):
        torch.save({"net": model.state_dict(), "optimizer": strange}, path)
        assert_refused(house, path, message)


def test_a_checkpoint_without_what_is_needed_is_no_pattern(house: House) -> None:
    model, optimizer = in_groups()
    path = saved(house.root / "step.pt", model, optimizer)
    make_checkpoint(house.hot, run="hf", step=1, kind="adopted")
    assert_refused(house, path, "another program wrote that", "--like", "hf/1")
    like(house, *in_groups(steps=0))
    assert_refused(house, path, "is F32 [3] in the file, and absent")
    other = torch.nn.Linear(2, 2)
    commit(house.hot, [stage(TrainingState(model=other))], step=2)
    assert_refused(house, path, "it has no optimizer whose parameters are named", "--like", "run/2")
    two = [torch.optim.SGD([each]) for each in other.parameters()]
    commit(house.hot, [stage(TrainingState(model=other, optimizer=two))], step=3)
    assert_refused(house, path, "it has 2 optimizers", "--like", "run/3")
    apart = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    commit(house.hot, [stage(TrainingState(model=other, optimizer=apart))], step=4)
    assert_refused(house, path, "its optimizer has parameters that are not the model's", "--like", "run/4")


def test_without_the_key_of_the_model_a_torch_file_is_not_taken_for_a_flat_one(house: House) -> None:
    model, optimizer = in_groups()
    like(house, model, optimizer)
    path = saved(house.root / "step.pt", model, optimizer)
    result = house.tierd("import", path, "--run", "new", "--step", "8", "--like", "run/1")
    assert (result.exit_code, "--model KEY" in result.stderr) == (2, True), result.output
    result = house.tierd("import", path, "--run", "new", "--like", "run/1", "--model", "net")
    assert (result.exit_code, "does not say its step" in result.stderr) == (2, True), result.output
