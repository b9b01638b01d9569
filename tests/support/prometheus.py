"""A real Prometheus with the rules of grafana/alerts.yml, which fire at once instead of after their `for:`.

A test stages something on a daemon and asks which alerts fire. Skips the test where Prometheus is not installed.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.waiting import wait_until

ALERTS = Path(__file__).parents[2] / "grafana" / "alerts.yml"
INTERVAL = "250ms"


class Prometheus:
    def __init__(self, url: str) -> None:
        self._url = url

    def firing(self) -> set[str]:
        """The names of the alerts."""
        return {alert["labels"]["alertname"] for alert in self._get("alerts")["alerts"]}

    def wait_firing(self, alert: str) -> None:
        wait_until(lambda: alert in self.firing(), f"the alert {alert}")

    def is_scraping(self, count: int) -> bool:
        """Whether so many targets have been scraped. A counter that grows before it was seen does not grow at all."""
        return len(self._get("query?query=up==1")["result"]) == count

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """The labels and the value of each sample now."""
        samples = self._get(f"query?{urllib.parse.urlencode({'query': expression})}")["result"]
        return [(sample["metric"], float(sample["value"][1])) for sample in samples]

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}", timeout=30) as answer:
            return json.load(answer)["data"]


@contextmanager
def prometheus(folder: Path, targets: Sequence[str], *, interval: str = INTERVAL) -> Generator[Prometheus]:
    """`targets`: the URLs of daemons. Yields when it has scraped each. A scrape that takes longer than `interval`
    fails, and its target then has no series until the next one."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed (Debian: prometheus)")
    folder.mkdir()
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    for group in groups:
        for rule in group["rules"]:
            rule.pop("for", None)
    (folder / "alerts.yml").write_text(yaml.safe_dump({"groups": groups}))
    config = {
        "global": {"scrape_interval": interval, "evaluation_interval": interval},
        "rule_files": ["alerts.yml"],
        "scrape_configs": [
            {"job_name": "tierd", "static_configs": [{"targets": [url.removeprefix("http://") for url in targets]}]}
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    listen = "--web.listen-address=127.0.0.1:0"
    command = [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data", listen]
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        found = wait_until(
            lambda: (
                re.search(r'msg="Server is ready', said := log.read_text())
                and re.search(r'msg="?Listening on"? address=(\S+)', said)
            ),
            "Prometheus to listen",
        )
        server = Prometheus(f"http://{found[1]}")
        wait_until(lambda: server.is_scraping(len(targets)), "the first scrape")
        yield server
    finally:
        process.kill()
        process.wait()
