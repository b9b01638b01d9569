"""One thing that is wrong now, as `tierd status` names it.

It has the name of the alert, the section of the runbook, and the command to type next."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Severity(StrEnum):
    """As of the alert: critical: committed or sealed work is at risk, act now. warning: act today."""

    WARNING = "warning"
    CRITICAL = "critical"


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """`alert`: its name in grafana/alerts.yml. `runbook`: a section of docs/RUNBOOK.md. `command`: to type next."""

    alert: str
    severity: Severity
    message: str
    runbook: str
    command: str
