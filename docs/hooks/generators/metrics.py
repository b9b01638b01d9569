"""The reference of the metrics, from their declarations, and of the alerts, from grafana/alerts.yml."""

from __future__ import annotations

import re
from typing import Any

import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from generators.links import ROOT
from generators.tables import cell, code, sentence, table
from tierd.metrics import Metrics

INTRODUCTION = """\
# Metrics and alerts

This page is generated from the code and from `grafana/alerts.yml`. The daemon serves the metrics as Prometheus text at
`http://ADDRESS/metrics`, where ADDRESS is `daemon.listen`. `grafana/` has dashboards, the alert rules and their tests.
A step number is never a label, so the number of series does not grow with a training.
"""


def undocumented() -> list[str]:
    """Metrics without help."""
    return [metric._name for metric in _metrics() if not metric._documentation]


def page() -> str:
    rows = [
        [
            code(metric._name + ("_total" if metric._type == "counter" else "")),
            metric._type,
            " ".join(code(label) for label in metric._labelnames),
            sentence(cell(metric._documentation)),
        ]
        for metric in _metrics()
    ]
    parts = [INTRODUCTION, "## Metrics\n", table(["name", "type", "labels", "meaning"], rows), ""]
    parts += ["## Alerts\n", table(["alert", "severity", "after", "meaning", "what to do"], _alerts()), ""]
    return "\n".join(parts)


def _metrics() -> list[Any]:
    metrics = Metrics(CollectorRegistry())
    return [value for value in vars(metrics).values() if isinstance(value, MetricWrapperBase)]


def _alerts() -> list[list[str]]:
    rows: list[list[str]] = []
    for group in yaml.safe_load((ROOT / "grafana/alerts.yml").read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            if "alert" not in rule:
                continue
            notes = rule.get("annotations", {})
            section = re.search(r"RUNBOOK\.md#([\w-]+)", str(notes))
            advice = f"[{section[1].replace('-', ' ')}](../RUNBOOK.md#{section[1]})" if section else ""
            meaning = re.sub(r"\{\{.*?\}\}", "…", notes.get("description", notes.get("summary", "")))
            labels = rule.get("labels", {})
            rows.append([code(rule["alert"]), labels.get("severity", ""), rule.get("for", "0s"), cell(meaning), advice])
    return rows
