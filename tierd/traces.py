"""Spans of a checkpoint's way through the tiers, for OpenTelemetry: off unless `daemon.traces` is set.

The id of a trace follows from the checkpoint, so that the spans of all daemons that handle it are one trace. Only the
API is used: where spans go is decided by the SDK that starts the daemon, https://opentelemetry.io/docs/languages/python/.
"""

from __future__ import annotations

import hashlib
from datetime import datetime
from typing import TYPE_CHECKING

from tierd.errors import BadConfig
from tierd.format.ids import CheckpointId

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


class Traces:
    """`tracer`: None records nothing."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = tracer

    def record(
        self, name: str, checkpoint: CheckpointId, seconds: float, *, ended: datetime, tier: str, size_bytes: int
    ) -> None:
        """A span that has lasted `seconds`. `name`: what was done."""
        if self._tracer is None:
            return
        from opentelemetry import trace

        digest = hashlib.sha256(str(checkpoint).encode()).digest()
        parent = trace.SpanContext(
            trace_id=int.from_bytes(digest[:16]),
            span_id=int.from_bytes(digest[16:24]),
            is_remote=True,
            trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
        )
        end_ns = int(ended.timestamp() * 1e9)
        span = self._tracer.start_span(
            f"tierd.{name}",
            context=trace.set_span_in_context(trace.NonRecordingSpan(parent)),
            start_time=end_ns - int(seconds * 1e9),
            attributes={
                "tierd.run": checkpoint.run,
                "tierd.step": checkpoint.step,
                "tierd.generation": checkpoint.generation,
                "tierd.tier": tier,
                "tierd.size_bytes": size_bytes,
            },
        )
        span.end(end_ns)


def make_traces(*, is_on: bool) -> Traces:
    """Raises BadConfig where the API is not installed."""
    if not is_on:
        return Traces()
    try:
        from opentelemetry import trace
    except ImportError as error:
        raise BadConfig("daemon.traces: opentelemetry-api is missing", hint="pip install 'tierd[traces]'") from error
    return Traces(trace.get_tracer("tierd"))
