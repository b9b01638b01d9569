"""The dashboard and the alerts: every metric exists, and every alert has a runbook section and two scenarios."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from tierd.metrics import Metrics

ROOT = Path(__file__).parents[1]
GRAFANA = ROOT / "grafana"
PROMTOOL = shutil.which("promtool")
SHORT_ALERTS_MIN = 15
"""How many of the alerts fire in scenarios that `make test` plays, too."""
SUFFIXES = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"], "gauge": [""]}

needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")


DASHBOARDS = ("tierd", "tierd-fleet")


def dashboard(name: str = "tierd") -> dict[str, Any]:
    return json.loads((GRAFANA / f"{name}.json").read_text(encoding="utf-8"))


def panels(*names: str) -> list[dict[str, Any]]:
    return [one for name in names or ("tierd",) for one in dashboard(name)["panels"] if one["type"] != "row"]


@functools.cache
def read_yaml(name: str) -> dict[str, Any]:
    return yaml.safe_load((GRAFANA / name).read_text(encoding="utf-8"))


def rules() -> list[dict[str, Any]]:
    return [rule for group in read_yaml("alerts.yml")["groups"] for rule in group["rules"]]


def scenarios() -> list[dict[str, Any]]:
    return read_yaml("alerts_test.yml")["tests"]


@functools.cache
def series_names() -> set[str]:
    """Every series name that a query can select, with or without samples."""
    names = {"up"}
    for family in Metrics(CollectorRegistry()).registry.collect():
        names |= {family.name + suffix for suffix in SUFFIXES[family.type]}
    return names


@functools.cache
def names_in(query: str) -> set[str]:
    without_labels = re.sub(r"\{[^}]*\}|\"[^\"]*\"|\b(?:by|on|ignoring)\s*\([^)]*\)", "", query)
    return set(re.findall(r"\b(?:tierd|process|up)(?:_\w+)?\b", without_labels))


def labels_in(query: str) -> Iterator[tuple[str, set[str]]]:
    for name, inside in re.findall(r"\b(tierd_\w+)\{([^}]*)\}", query):
        yield name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", inside))


def promtool(*arguments: str) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], cwd=GRAFANA, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# ── names ──


def test_every_metric_that_a_panel_names_exists() -> None:
    exist = series_names()
    for panel in panels(*DASHBOARDS):
        for target in panel["targets"]:
            named = names_in(target["expr"])
            assert named, f"{panel['title']} selects no metric"
            assert named <= exist, f"{panel['title']}: {named - exist}"


def test_every_metric_that_an_alert_names_exists() -> None:
    exist = series_names()
    for rule in rules():
        named = names_in(rule["expr"])
        assert named, f"{rule['alert']} selects no metric"
        assert named <= exist, f"{rule['alert']}: {named - exist}"


def test_every_metric_in_the_alerts_tests_exists() -> None:
    for scenario in scenarios():
        named = {name for one in scenario["input_series"] for name in names_in(one["series"])}
        assert named <= series_names(), scenario["name"]


def test_every_label_that_a_query_selects_by_is_one_that_the_metric_has() -> None:
    """A selector on an unknown label matches nothing and reports no error."""
    metrics = Metrics(CollectorRegistry())
    queries = [target["expr"] for panel in panels(*DASHBOARDS) for target in panel["targets"]]
    queries += [one["expr"] for one in rules()]
    for query in queries:
        for name, labels in labels_in(query):
            attribute = re.sub(r"_(bucket|count|sum)$", "", name).removeprefix("tierd_")
            has = {*getattr(metrics, attribute)._labelnames, "job", "instance", "le"}
            assert labels <= has, f"{query}: {name} has no {labels - has}"


def test_every_metric_of_tierd_is_on_the_dashboard() -> None:
    shown = " ".join(target["expr"] for panel in panels() for target in panel["targets"])
    for family in Metrics(CollectorRegistry()).registry.collect():
        if family.name.startswith("tierd_"):
            assert family.name in shown, f"{family.name} is on no panel"


# ── the dashboard ──


def test_every_json_file_is_a_dashboard_that_these_tests_check() -> None:
    assert {path.stem for path in GRAFANA.glob("*.json")} == set(DASHBOARDS)


@pytest.mark.parametrize("name", DASHBOARDS)
def test_dashboard_has_the_schema_and_the_variables_of_current_grafana(name: str) -> None:
    found = dashboard(name)
    assert found["schemaVersion"] >= 39
    assert found["uid"] == name
    variables = {one["name"]: one for one in found["templating"]["list"]}
    assert list(variables) == ["datasource", "job", "instance", "run"]
    assert variables["datasource"]["type"] == "datasource"


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_panel_uses_the_chosen_data_source_and_overlaps_no_other(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels(name):
        assert panel["datasource"]["uid"] == "${datasource}", panel["title"]
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"{panel['title']} overlaps another panel"
        taken |= cells
    ids = [one["id"] for one in dashboard(name)["panels"]]
    assert len(ids) == len(set(ids))


def test_sizes_are_in_the_decimal_units_of_the_commands() -> None:
    units = [panel.get("fieldConfig", {}).get("defaults", {}).get("unit", "") for panel in panels(*DASHBOARDS)]
    assert {unit for unit in units if "byte" in unit or "Bps" in unit} == {"decbytes", "Bps"}
    assert "humanize1024" not in (GRAFANA / "alerts.yml").read_text(encoding="utf-8")


def test_rows_follow_the_data_from_snapshot_to_restore() -> None:
    rows = [one["title"] for one in dashboard()["panels"] if one["type"] == "row"]
    assert rows == [
        "Safe now",
        "Snapshots and stall",
        "Persist: memory to hot",
        "Replicate: hot to cold",
        "Tiers",
        "Restores",
        "Failures",
    ]


# ── the alerts ──


def test_every_alert_has_a_severity_a_description_and_a_runbook_section() -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning"), rule["alert"]
        notes = rule["annotations"]
        assert set(notes) == {"summary", "description", "runbook_url"}, rule["alert"]
        assert "RUNBOOK.md#" in notes["runbook_url"], rule["alert"]  # test_docs checks that the section exists


def test_every_alert_has_a_scenario_in_which_it_fires_and_one_in_which_it_is_silent() -> None:
    """In the silent scenario the series exist, so that it is the condition that does not hold."""
    for rule in rules():
        about = names_in(rule["expr"])
        fires = silent = False
        for scenario in scenarios():
            has_series = about <= {name for one in scenario["input_series"] for name in names_in(one["series"])}
            for check in scenario["promql_expr_test"]:
                fired = any(f'"{rule["alert"]}"' in one["labels"] for one in check["exp_samples"])
                fires |= fired
                silent |= has_series and not fired
        assert fires, f"{rule['alert']} fires in no test"
        assert silent, f"{rule['alert']} is silent in no test"


@needs_promtool
def test_promtool_accepts_the_rules_and_the_example_configuration() -> None:
    promtool("check", "rules", "alerts.yml")
    promtool("check", "config", "prometheus.yml")


@needs_promtool
def test_promtool_confirms_when_alerts_fire_and_when_not_in_short_scenarios(tmp_path: Path) -> None:
    """promtool evaluates all rules for each minute of a scenario. Series have more labels than those of tierd: a rule
    that joins two of them must not need the same."""
    short = [with_more_labels(scenario) for scenario in scenarios() if minutes(scenario) <= 40]
    fired = {label for scenario in short for label in alerts_of(scenario)}
    assert len(fired) >= SHORT_ALERTS_MIN
    promtool_plays(short, tmp_path / "short_test.yml")


@pytest.mark.long
@needs_promtool
def test_promtool_confirms_when_every_alert_fires_and_when_not(tmp_path: Path) -> None:
    promtool("test", "rules", "alerts_test.yml")
    promtool_plays(map(with_more_labels, scenarios()), tmp_path / "labels_test.yml")


def promtool_plays(played: Iterable[Mapping[str, Any]], file: Path) -> None:
    tests = {**read_yaml("alerts_test.yml"), "rule_files": [str(GRAFANA / "alerts.yml")], "tests": [*played]}
    file.write_text(json.dumps(tests))
    promtool("test", "rules", str(file))


def with_more_labels(scenario: Mapping[str, Any]) -> dict[str, Any]:
    """As Kubernetes and Prometheus add them to each series."""
    more = 'namespace="training", pod="train-0", cluster="c1"}'
    series = [{**one, "series": one["series"].removesuffix("}") + ", " + more} for one in scenario["input_series"]]
    return {**scenario, "input_series": series}


def minutes(scenario: Mapping[str, Any]) -> int:
    """How long it lasts."""
    return max(
        sum(int(count) * {"h": 60, "m": 1}[unit] for count, unit in re.findall(r"(\d+)([hm])", check["eval_time"]))
        for check in scenario["promql_expr_test"]
    )


def alerts_of(scenario: Mapping[str, Any]) -> set[str]:
    """The alerts that fire in it."""
    labels = [one["labels"] for check in scenario["promql_expr_test"] for one in check["exp_samples"]]
    return {name for each in labels for name in re.findall(r'alertname="(\w+)"', each)}
