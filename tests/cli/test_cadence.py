"""`tierd cadence`: the table, where each number comes from, the plot, and what it refuses."""

from __future__ import annotations

import json
import xml.etree.ElementTree
from pathlib import Path

import pytest

from tests.support.cli import make_house
from tests.support.daemon import Daemon
from tests.support.trainer import Trainer
from tests.support.waiting import wait_until

NODE_LOSS = ("--mtbf-hours", "24", "--save-s", "1", "--restart-s", "60", "--node-loss-share", "0.5", "--json")
HUGE = "1" + 400 * "0"
REFERENCE = ["--gpus", "2048", "--gpu-mtbf-days", "180", "--save-s", "120"]


def test_reference_job(tmp_path: Path) -> None:
    result = make_house(tmp_path).tierd("cadence", *REFERENCE)
    assert result.exit_code == 0, result.output
    assert "7,594 s (2 h 6 min): 2048 GPUs with 180 days each" in result.stdout
    assert "1,350 s (22 min 30 s): Young 1974, efficiency 82.2 %" in result.stdout
    rows = {line.split(" s ")[0].strip(): line.split() for line in result.stdout.splitlines() if " %" in line}
    shown = {interval: next(at for at in rows if at == interval) for interval in ("300", "900", "1,350", "3,600")}
    first_order = {interval: rows[at][rows[at].index("%") + 5] for interval, at in shown.items()}
    assert first_order == {"300": "58.0", "900": "80.7", "1,350": "82.2", "3,600": "73.0"}
    assert "At 4 h 0 min it assumes a chance of 189.6 % for a failure per interval, which is no prob" in result.stdout
    assert "worse than useless there: use DALY" in result.stdout


def test_json_has_every_number_and_its_source(tmp_path: Path) -> None:
    found = make_house(tmp_path).json(
        *("cadence", "--failures", "4", "--in-hours", "40", "--save-s", "3", "--restart-s", "60"),
        *("--node-loss-share", "0.25", "--node-restart-s", "300", "--lag-s", "20", "--interval-s", "600"),
    )
    sources = {name: (cost["value"], cost["source"]) for name, cost in found["costs"].items()}
    assert sources == {
        "mtbf_s": (36000, "4 failures in 40 hours"),
        "save_s": (3, "--save-s"),
        "restart_s": (60, "--restart-s"),
        "node_restart_s": (300, "--node-restart-s"),
        "lag_s": (20, "--lag-s"),
    }
    best, other = found["intervals"]
    assert (best["interval_s"], other["interval_s"]) == (found["best"]["young_s"], 600)
    assert other["first_order"] == pytest.approx(1 - 3 / 600 - (300 + 0.25 * 20 + 120) / 36000)
    assert other["simulated"] == pytest.approx(other["daly"], abs=0.003)


@pytest.mark.long
def test_numbers_that_are_not_given_come_from_the_daemon(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        refused = daemon.tierd("cadence", "--mtbf-hours", "24")
        assert refused.returncode == 2
        assert "no daemon here has measured a snapshot" in refused.stderr
        with Trainer() as trainer:
            trainer.connect(daemon.socket)
            trainer.train(1)
            trainer.durable()
        with Trainer() as trainer:
            trainer.connect(daemon.socket)
            assert trainer.restore().tier == "memory"
            wait_until(lambda: daemon.newest("cold"), "for the copy")
            assert trainer.restore(tier="cold").tier == "cold"
        measured = json.loads(daemon.tierd("status", "--json").stdout)["costs"]
        costs = json.loads(daemon.tierd("cadence", "--mtbf-hours", "24", "--json").stdout)["costs"]
        after_node_loss = {
            given: json.loads(daemon.tierd("cadence", *NODE_LOSS, *given).stdout)["costs"]["node_restart_s"]
            for given in ((), ("--node-restart-s", "10"))
        }
    assert after_node_loss == {
        (): {"value": 60, "source": "as restart_s"},  # the measured restore lacks the time until a new node is there
        ("--node-restart-s", "10"): {"value": 10, "source": "--node-restart-s"},
    }
    assert costs["save_s"] == {
        "value": measured["stall"]["mean_s"],
        "source": "measured by the daemon: snapshot() of a rank, mean of 1",
    }
    assert costs["restart_s"]["value"] == measured["restore"]["memory"]["mean_s"]
    assert "a restore from memory" in costs["restart_s"]["source"]
    assert measured["persist"]["count"] == 1


def test_plot_is_written(tmp_path: Path) -> None:
    target = tmp_path / "cadence.svg"
    result = make_house(tmp_path).tierd("cadence", *REFERENCE, "--svg", target)
    assert result.exit_code == 0, result.output
    root = xml.etree.ElementTree.parse(target).getroot()
    assert [element.tag.rpartition("}")[2] for element in root.iter()].count("circle") == 9
    assert "save every 1,350 s" in target.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "how often the job fails must be given in one way"),
        (["--gpus", "8"], "must be given in one way"),
        ([*REFERENCE, "--mtbf-hours", "3"], "must be given in one way"),
        (["--mtbf-hours", "3"], "no daemon here has measured a snapshot"),
        (["--mtbf-hours", "nan", "--save-s", "1"], "the MTBF is nan s"),
        (["--gpus", "0", "--gpu-mtbf-days", "1", "--save-s", "1"], "the number of GPUs is 0"),
        (["--gpus", HUGE, "--gpu-mtbf-days", "1", "--save-s", "1"], "the number of GPUs is out of range"),
        (["--failures", HUGE, "--in-hours", "1", "--save-s", "1"], "--failures is out of range"),
        (["--mtbf-hours", "1e-320", "--save-s", "1"], "e-317 s, expected 1e-09 s to"),
        (["--mtbf-hours", "1", "--save-s", "1e-300"], "the save cost is 1e-300 s"),
        (["--failures", "0", "--in-hours", "1", "--save-s", "1"], "--failures is 0"),
        ([*REFERENCE, "--node-loss-share", "2"], "lose a node is 2, expected 0 to 1"),
        ([*REFERENCE, "--interval-s", "-5"], "the interval is -5 s"),
        ([*REFERENCE, "--interval-s", "1e300"], "expected 1e-09 s to 1e+10 s"),
        ([*REFERENCE, "--svg", "no/such/folder/x.svg"], "write no/such/folder/x.svg"),
    ],
)
def test_bad_input_ends_with_2_and_says_why(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = make_house(tmp_path).tierd("cadence", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert "this is a bug" not in result.stderr


@pytest.mark.parametrize("save_s", ["30000", "10000000"])
def test_a_save_longer_than_twice_the_mtbf_is_reported_as_hopeless(tmp_path: Path, save_s: str) -> None:
    """With the second one, no interval of the table is longer than a save."""
    arguments = ("--mtbf-hours", "3", "--save-s", save_s, "--svg", tmp_path / "x.svg")
    result = make_house(tmp_path).tierd("cadence", *arguments)
    assert result.exit_code == 0, result.output
    assert "NO INTERVAL HELPS" in result.stdout
