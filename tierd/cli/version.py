"""`tierd version`: what this tierd is, and which formats it reads."""

from __future__ import annotations

import platform

import typer

from tierd import __version__
from tierd.cli import options
from tierd.cli.console import answer, answer_json
from tierd.format.manifest import FORMAT_VERSION
from tierd.format.wire import PROTOCOL_VERSION


def version(context: typer.Context, json: options.Json = False) -> None:
    """Say which tierd this is, and which format and protocol it speaks."""
    if json:
        answer_json(
            {
                "version": __version__,
                "format_version": FORMAT_VERSION,
                "protocol_version": PROTOCOL_VERSION,
                "python": platform.python_version(),
            }
        )
    else:
        answer(summary())


def summary() -> str:
    return f"tierd {__version__} (format {FORMAT_VERSION}, protocol {PROTOCOL_VERSION})"
