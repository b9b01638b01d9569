"""Writes the rules of grafana/alerts.yml for the Prometheus Operator: `python -m tests.support.prometheus_rule`.

kustomize reads no file outside of its own folders, so the rules have to be there a second time. A test compares them.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "grafana" / "alerts.yml"
FILE = ROOT / "deploy" / "kustomize" / "prometheus-operator" / "prometheusrule.yaml"
_HEAD = """\
# Written by `python -m tests.support.prometheus_rule` from grafana/alerts.yml. Change that file.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: tierd
  labels:
    app: tierd
spec:
"""


def text() -> str:
    lines = ALERTS.read_text(encoding="utf-8").splitlines()
    groups = lines[lines.index("groups:") :]
    return _HEAD + "".join(f"  {line}\n" if line else "\n" for line in groups)


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
