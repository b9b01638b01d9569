"""`tierd export --format flat`: 8 + 12 × n bytes with the bits of weights, m and v, or one clear refusal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tierd_client import TrainingState

from tests.support.cli import House, make_house
from tests.support.state import Training, commit, of_bfloat16, stage
from tierd.format import flat_file
from tierd.format.whole import WholeTensor


@pytest.fixture
def house(tmp_path: Path) -> House:
    return make_house(tmp_path)


def flat_arrays(training: Training) -> list[np.ndarray]:
    """weights, m and v in the order of the optimizer."""
    parameters = [one for group in training.optimizer.param_groups for one in group["params"]]
    moments = [[training.optimizer.state[one][key] for one in parameters] for key in ("exp_avg", "exp_avg_sq")]
    return [torch.cat([one.detach().reshape(-1) for one in each]).numpy() for each in (parameters, *moments)]


def test_a_flat_file_has_8_and_12_n_bytes_and_the_bits_of_weights_m_and_v(house: House) -> None:
    training = Training.fresh()
    training.train(3)
    commit(house.hot, [stage(training.state())])
    result = house.tierd("export", "--format", "flat", "--to", house.root / "step.bin")
    assert result.exit_code == 0, result.output
    assert "not in the flat file: ema.0.bias" in result.stderr

    raw = (house.root / "step.bin").read_bytes()
    arrays = flat_arrays(training)
    assert len(raw) == 8 + 12 * arrays[0].size
    assert np.frombuffer(raw, "<i4", 2).tolist() == [5, arrays[0].size]
    assert raw[8:] == b"".join(array.tobytes() for array in arrays)


def test_names_in_a_file_give_another_order(house: House) -> None:
    training = Training.fresh()
    training.train(1)
    commit(house.hot, [stage(training.state())])
    names = [name for name, _ in training.model.named_parameters()][::-1]
    (house.root / "names.json").write_text(json.dumps(names))
    target = house.root / "step.bin"
    assert (
        house.tierd("export", "--format", "flat", "--names", house.root / "names.json", "--to", target).exit_code == 0
    )
    last = dict(training.model.named_parameters())[names[0]].detach().numpy()
    assert target.read_bytes()[8 : 8 + last.nbytes] == last.tobytes()

    (house.root / "names.json").write_text(json.dumps(names[1:]))
    result = house.tierd("export", "--format", "flat", "--names", house.root / "names.json", "--to", house.root / "no")
    assert result.exit_code == 2
    assert f"the list of names lacks {names[0]}" in result.stderr


def of_sgd() -> TrainingState:
    model = torch.nn.Linear(3, 2)
    return TrainingState(model=model, optimizer=torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (of_bfloat16, "model.weight is BF16; a flat file holds float32 only"),
        (of_sgd, "it has no tensor optimizer.state.weight.exp_avg"),
        (lambda: TrainingState(model=torch.nn.Linear(3, 2)), "it has no optimizer"),
    ],
)
def test_what_a_flat_file_cannot_hold_is_refused_by_name(
    house: House, state: Callable[[], TrainingState], message: str
) -> None:
    commit(house.hot, [stage(state())])
    result = house.tierd("export", "--format", "flat", "--to", house.root / "step.bin")
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (house.root / "step.bin").exists()


def test_2_to_the_31_parameters_are_refused() -> None:
    count = 1 << 31
    names = ("weight", "m", "v")
    tensors = {name: WholeTensor(name, "F32", (count,), ()) for name in names}
    parameter = flat_file.Parameter(name="weight", weight="weight", m="m", v="v")
    with pytest.raises(flat_file.Unsupported, match="2147483648 parameters; a flat file has at most 2147483647"):
        flat_file.assemble(tensors, [parameter], 5, where="run/5")
    with pytest.raises(flat_file.Corrupt, match="its header says -2147483648 parameters"):
        flat_file.parse_header(b"\x05\0\0\0\0\0\0\x80", 8, where="step.bin")
