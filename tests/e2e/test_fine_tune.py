"""The examples of the guide on fine-tuning, run as written against a real daemon."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tierd_client
import torch
from torch import nn

from tests.support.daemon import Daemon
from tests.support.state import assert_same
from tests.support.waiting import DEADLINE_S

GUIDE = (Path(__file__).parents[2] / "docs/guides/fine-tune.md").read_text(encoding="utf-8")
SOURCE = "gpt-124m"


def example(heading: str) -> str:
    """The Python block of a section."""
    section = re.split(rf"^##+ {re.escape(heading)}$", GUIDE, flags=re.MULTILINE)[1]
    match = re.search(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    assert match is not None
    return match[1]


def network(classes: int, *, body: str = "body", dtype: torch.dtype = torch.float32) -> nn.ModuleDict:
    return nn.ModuleDict({body: nn.Linear(4, 8), "head": nn.Linear(8, classes)}).to(dtype)


def learn(model: nn.ModuleDict, optimizer: torch.optim.Optimizer) -> float:
    body, head = model.children()
    loss = head(body(torch.randn(4, 4, dtype=next(model.parameters()).dtype))).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


class Pretrained:
    """The run that the examples begin at: two steps of AdamW."""

    def __init__(self, daemon: Daemon) -> None:
        torch.manual_seed(1)
        self.daemon = daemon
        self.model = network(10)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.5)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.ema = torch.optim.swa_utils.AveragedModel(self.model)
        state = tierd_client.TrainingState(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, ema=self.ema
        )
        client = tierd_client.connect(SOURCE, socket=daemon.socket)
        for _ in range(2):
            learn(self.model, self.optimizer)
            self.scheduler.step()
            self.ema.update_parameters(self.model)
        client.snapshot(1000, state).wait_persisted(DEADLINE_S)
        client.close()

    def moments(self, name: str) -> Any:
        return self.optimizer.state[self.model.get_parameter(name)]


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pretrained]:
    with Daemon(tmp_path_factory.mktemp("daemon")) as daemon:
        yield Pretrained(daemon)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, pretrained: Pretrained) -> None:
    monkeypatch.delenv("TIERD_RESUME", raising=False)
    monkeypatch.setenv("TIERD_SOCKET", pretrained.daemon.socket)


@contextmanager
def recipe(
    heading: str, model: nn.ModuleDict, optimizer: torch.optim.Optimizer, **more: Any
) -> Generator[tierd_client.RestoreReport]:
    """Runs the section's example, then trains a step. The next start by the same example has that step, whole."""
    run = re.sub(r"\W", "-", heading)
    state = tierd_client.TrainingState(model=model, optimizer=optimizer, **more)
    found, client = _start(run, heading, state)
    try:
        assert (found.run, found.step) == (SOURCE, 1000)
        yield found.report
        learn(model, optimizer)
        client.snapshot(1, state).wait_persisted(DEADLINE_S)
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        learn(model, optimizer)
    finally:
        client.close()
    found, client = _start(run, heading, state)
    client.close()
    assert (found.run, found.step) == (run, 1)
    assert found.report == tierd_client.RestoreReport(loaded=found.report.loaded, size_bytes=found.report.size_bytes)
    assert_same(model.state_dict(), expected)


def _start(run: str, heading: str, state: tierd_client.TrainingState) -> tuple[tierd_client.Found, tierd_client.Client]:
    client = tierd_client.connect(run)
    namespace: dict[str, Any] = {"client": client, "state": state}
    exec(example(heading), namespace)
    return namespace["found"], client


def test_new_run_begins_at_another_and_its_second_start_goes_on(pretrained: Pretrained) -> None:
    steps: list[int] = []
    for start in (1, 2):
        torch.manual_seed(7)
        model = network(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def train_step(model: nn.ModuleDict = model, optimizer: torch.optim.Optimizer = optimizer) -> float:
            return learn(model, optimizer)

        namespace = {"model": model, "optimizer": optimizer, "total": 2 * start, "train_step": train_step}
        script = example("A new run from an old one").replace("client.due(step)", "step % 2 == 0")
        exec(script, namespace)
        found: Any = namespace["found"]
        steps.append(found.step)
        assert namespace["step"] == 2 * start
        exec(example("What was loaded"), namespace)
    assert steps == [1000, 2]
    rows = pretrained.daemon.get("/api/v1/checkpoints?run=classify")
    assert [(row["step"], row["generation"]) for row in rows] == [(4, 2), (2, 1)]


def test_weights_alone(pretrained: Pretrained) -> None:
    model = network(10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with recipe("Weights alone, into another optimizer", model, optimizer) as report:
        assert_same(model.state_dict(), pretrained.model.state_dict())
        assert not optimizer.state
        assert {"rng", "scheduler"} <= set(report.not_asked)


def test_new_head(pretrained: Pretrained) -> None:
    model = network(3)
    optimizer = torch.optim.AdamW(model.parameters())
    with recipe("A new head, with the moments of the body", model, optimizer) as report:
        body = model.get_parameter("body.weight")
        assert_same(body, pretrained.model.get_parameter("body.weight"))
        assert_same(dict(optimizer.state[body]), dict(pretrained.moments("body.weight")))
        assert model.get_parameter("head.weight") not in optimizer.state
        shown = re.search(r"report\.mismatched\)  # \{(.+?), \.\.\.\}", GUIDE)
        assert shown is not None
        assert shown[1].replace('"', "'") in str(report.mismatched)


def test_other_names(pretrained: Pretrained) -> None:
    model = network(10, body="encoder")
    optimizer = torch.optim.AdamW(model.parameters())
    with recipe("Other names", model, optimizer) as report:
        encoder = model.get_parameter("encoder.weight")
        assert_same(encoder, pretrained.model.get_parameter("body.weight"))
        assert_same(dict(optimizer.state[encoder]), dict(pretrained.moments("body.weight")))
        assert report.renamed["model.body.weight"] == "model.encoder.weight"


def test_averaged_weights(pretrained: Pretrained) -> None:
    model = network(10)
    with recipe("The averaged weights as the model", model, torch.optim.AdamW(model.parameters())) as report:
        assert_same(model.state_dict(), pretrained.ema.module.state_dict())
        assert report.left_over == ["ema.n_averaged"]


def test_new_learning_rate(pretrained: Pretrained, caplog: pytest.LogCaptureFixture) -> None:
    model = network(10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    ema = torch.optim.swa_utils.AveragedModel(model)
    with recipe("A new learning rate", model, optimizer, scheduler=scheduler, ema=ema):
        assert optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["initial_lr"] == 0.01
        assert_same(dict(optimizer.state[model.get_parameter("head.bias")]), dict(pretrained.moments("head.bias")))
        optimizer.step()
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.01
        assert "lr is kept" not in caplog.text


def test_added_group(pretrained: Pretrained) -> None:
    model = network(10)
    adapter = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW([{"params": model.parameters()}, {"params": adapter.parameters(), "lr": 0.9}])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    extra = {"adapter": adapter}
    with recipe("An added parameter group", model, optimizer, scheduler=scheduler, extra=extra) as report:
        assert [group["lr"] for group in optimizer.param_groups] == [pretrained.optimizer.param_groups[0]["lr"], 0.9]
        assert adapter.weight not in optimizer.state
        assert "optimizer.param_groups.1" in report.missing
        assert report.kept == ["scheduler"]
        adapter(torch.ones(1, 8)).sum().backward()


def test_another_dtype(pretrained: Pretrained) -> None:
    model = network(10, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    with recipe("Another dtype", model, optimizer) as report:
        weight, stored = model.get_parameter("body.weight"), pretrained.model.get_parameter("body.weight")
        assert torch.equal(weight, stored.to(torch.bfloat16))
        moment = pretrained.moments("body.weight")["exp_avg"].to(torch.bfloat16)
        assert torch.equal(optimizer.state[weight]["exp_avg"], moment)
        assert report.cast["model.body.weight"] == "F32 -> BF16"
