"""grafana/tierd-fleet.json with a real Prometheus on two daemons: every query has data and shows trouble."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import Daemon
from tests.support.prometheus import Prometheus, prometheus
from tests.support.trainer import Trainer
from tests.support.waiting import wait_until

DASHBOARD = json.loads((Path(__file__).parents[2] / "grafana" / "tierd-fleet.json").read_text(encoding="utf-8"))
LOOKS_OFTEN = "cold_look_interval_s = 1.0"  # the daemon notices sooner that its cold tier is gone
Samples = list[tuple[dict[str, str], float]]


class Fleet:
    """Two daemons, each with a trainer of its own run, that have saved, copied and restored. Then the second one loses
    its cold tier and saves once more."""

    def __init__(self, daemons: tuple[Daemon, Daemon], observer: Prometheus) -> None:
        self.well, self.ill = (daemon.url.removeprefix("http://") for daemon in daemons)
        self.observer = observer

    def ask(self, query: str) -> Samples:
        """With the variables of the dashboard at "All"."""
        for variable in DASHBOARD["templating"]["list"]:
            query = query.replace(f"${variable['name']}", variable.get("allValue", ""))
        assert "$" not in query, query
        return self.observer.query(query)

    def column(self, title: str, column: str, **labels: str) -> dict[str, float]:
        """By instance, of the samples with these labels: a column of a table as its transformation names it."""
        (panel,) = [one for one in DASHBOARD["panels"] if one["title"] == title]
        organize = next(each for each in panel["transformations"] if each["id"] == "organize")
        (field,) = [field for field, name in organize["options"]["renameByName"].items() if name == column]
        (target,) = [each for each in panel["targets"] if f"Value #{each['refId']}" == field]
        samples = self.ask(target["expr"])
        return {found["instance"]: value for found, value in samples if labels.items() <= found.items()}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Generator[Fleet]:
    root = tmp_path_factory.mktemp("fleet")
    with ExitStack() as stack:
        daemons = [stack.enter_context(Daemon(root / name, more=LOOKS_OFTEN)) for name in ("well", "ill")]
        observer = stack.enter_context(
            prometheus(root / "prometheus", [daemon.url for daemon in daemons], interval="1s")
        )
        trainers = [stack.enter_context(Trainer()) for _ in daemons]
        for daemon, trainer, run in zip(daemons, trainers, ("one", "two"), strict=True):
            trainer.connect(daemon.socket, run)
            for _ in range(2):
                trainer.train(1)
                trainer.snapshot()
                trainer.wait_replicated()
            trainer.restore()
        (root / "ill" / "cold").rename(root / "ill" / "away")
        for _ in range(3):
            trainers[1].train(1)
        trainers[1].snapshot()
        trainers[1].wait_persisted()
        found = Fleet((daemons[0], daemons[1]), observer)
        wait_until(lambda: found.column("Each daemon", "halted") == {found.well: 0, found.ill: 1}, "the halt")
        wait_until(lambda: found.column("Each run on each node", "steps at risk").get(found.ill) == 3, "the scrape")
        yield found


def targets() -> list[Any]:
    return [
        pytest.param(target["expr"], id=f"{panel['title']}-{target['refId']}")
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", [])
    ]


def wait_shown(shown: Callable[[], object], expected: object) -> None:
    """One scrape may fail on a busy machine; the next one is a second later."""
    wait_until(lambda: shown() == expected, f"the dashboard to show {expected}")


@pytest.mark.parametrize("query", targets())
def test_every_query_has_a_number_of_every_daemon(fleet: Fleet, query: str) -> None:
    def has_numbers() -> bool:
        found = [labels for labels, value in fleet.ask(query) if not math.isnan(value)]
        instances = {labels["instance"] for labels in found if "instance" in labels}
        return bool(found) and instances in (set(), {fleet.well, fleet.ill})

    wait_until(has_numbers, f"a number of every daemon: {query}")


def test_every_variable_has_values(fleet: Fleet) -> None:
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            found = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["definition"])
            assert found
            series, label = found.groups()
            wait_until(lambda s=series, name=label: any(name in labels for labels, _ in fleet.ask(s)), variable["name"])


def test_row_of_a_run_says_what_the_loss_of_its_node_would_cost(fleet: Fleet) -> None:
    runs = "Each run on each node"
    wait_shown(lambda: fleet.column(runs, "step in hot"), {fleet.well: 2, fleet.ill: 5})
    wait_shown(lambda: fleet.column(runs, "step in cold"), {fleet.well: 2, fleet.ill: 2})
    wait_shown(lambda: fleet.column(runs, "steps at risk"), {fleet.well: 0, fleet.ill: 3})
    wait_shown(lambda: fleet.column(runs, "unhealthy"), {fleet.well: 0, fleet.ill: 0})

    def is_more_at_risk() -> bool:
        at_risk, in_hot = fleet.column(runs, "time at risk"), fleet.column(runs, "age in hot")
        return at_risk.get(fleet.ill, 0) > in_hot.get(fleet.ill, math.inf) > 0

    wait_until(is_more_at_risk, "the time at risk")


def test_row_of_a_daemon_says_that_it_is_halted_and_that_a_copy_waits(fleet: Fleet) -> None:
    wait_shown(lambda: fleet.column("Each daemon", "up"), {fleet.well: 1, fleet.ill: 1})
    wait_shown(lambda: fleet.column("Each daemon", "halted"), {fleet.well: 0, fleet.ill: 1})
    tiers = "Each tier of each daemon"
    waiting = {fleet.well: False, fleet.ill: True}

    def columns(name: str, tier: str) -> dict[str, bool]:
        return {instance: value > 0 for instance, value in fleet.column(tiers, name, tier=tier).items()}

    wait_shown(lambda: columns("copies waiting", "cold"), waiting)
    wait_shown(lambda: columns("free", "hot"), dict.fromkeys(waiting, True))
    wait_shown(lambda: columns("restore, mean of a day", "memory"), dict.fromkeys(waiting, True))


def test_numbers_at_the_top_are_of_the_whole_fleet(fleet: Fleet) -> None:
    stats = {panel["title"]: panel["targets"][0]["expr"] for panel in DASHBOARD["panels"] if panel["type"] == "stat"}
    expected = {
        "Daemons that answer": [2],
        "Daemons that do not answer": [0],
        "Runs that train, on all nodes": [2],
        "Daemons that delete nothing": [1],
        "Runs with unhealthy checkpoints": [0],
        "Copies given up in a day": [0],
    }
    wait_shown(lambda: {title: [value for _, value in fleet.ask(query)] for title, query in stats.items()}, expected)
