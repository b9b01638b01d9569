"""The commands of docs/guides/import.md, run in their order."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from tests.support.cli import House, make_house
from tests.support.state import Training, commit, stage
from tierd.cli.app import called, make_app

GUIDE = Path(__file__).parents[2] / "docs/guides/import.md"


def commands() -> list[list[str]]:
    blocks = re.findall(r"^```sh\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]


@pytest.mark.usefixtures("forked_python")
def test_the_commands_of_the_guide_succeed_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house: House = make_house(tmp_path)
    training = Training.fresh()
    training.train(4)
    commit(house.hot, [stage(training.state())], run="old", step=4)
    (tmp_path / "checkpoint-500/model").mkdir(parents=True)
    for path in ("model.safetensors", "checkpoint-500/model/model.safetensors"):
        save_file(training.model.state_dict(), tmp_path / path)
    optimizer = training.optimizer.state_dict()
    torch.save({"net": training.model.state_dict(), "optimizer": optimizer, "epoch": 3}, tmp_path / "step_500.pt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIERD_CONFIG", str(house.config))
    assert len(commands()) > 3
    for program, *arguments in commands():
        assert program == "tierd"
        result = CliRunner().invoke(make_app(called(arguments)), arguments)
        assert result.exit_code == 0, f"{arguments}: {result.output}"
