"""Spans of a real daemon, through the SDK of OpenTelemetry."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.daemon import Daemon
from tests.support.waiting import wait_until
from tests.support.wire_peer import Peer
from tierd.errors import BadConfig
from tierd.format import wire
from tierd.traces import make_traces

WITH_SDK = """
import os
import sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
from tierd.cli import main

out = open(os.environ["SPANS"], "a", buffering=1)
exporter = ConsoleSpanExporter(out=out, formatter=lambda span: span.to_json(indent=None) + "\\n")
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
sys.argv[0] = "tierd"
main()
"""


def test_all_spans_of_a_checkpoint_are_one_trace(tmp_path: Path) -> None:
    spans = tmp_path / "spans"
    environ = {"TIERD_DAEMON_TRACES": "true", "SPANS": str(spans)}
    with Daemon(tmp_path, command=("-c", WITH_SDK), environ=environ) as daemon, Peer(daemon.socket) as peer:
        peer.greet("run")
        peer.attach(0)
        peer.attach(1)
        for step in (1, 2):
            peer.seal(step % 2, step, b"state")
            assert peer.hear(wire.Persisted).step == step
            assert peer.hear(wire.Replicated).step == step
        wait_until(lambda: spans.read_text().count("\n") == 4, "the spans")
    found = [json.loads(line) for line in spans.read_text().splitlines()]
    of_step = {step: [span for span in found if span["attributes"]["tierd.step"] == step] for step in (1, 2)}
    for step, both in of_step.items():
        assert sorted(span["name"] for span in both) == ["tierd.persist", "tierd.replicate"], step
        assert len({span["context"]["trace_id"] for span in both}) == 1
        assert all(span["start_time"] <= span["end_time"] for span in both)
        assert {span["attributes"]["tierd.tier"] for span in both} == {"hot", "cold"}
    assert of_step[1][0]["context"]["trace_id"] != of_step[2][0]["context"]["trace_id"]


def test_traces_without_the_api_are_refused_with_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(BadConfig) as refused:
        make_traces(is_on=True)
    assert "tierd[traces]" in refused.value.hint
    assert make_traces(is_on=False) is not None
