"""`tierd serve` runs the daemon, and `tierd version` prints its version."""

from __future__ import annotations

import platform

import typer

from tierd import __version__, failpoints
from tierd.cli import options
from tierd.cli.console import print_report
from tierd.cli.options import settings_of
from tierd.config.environment import check_names
from tierd.config.file import source_of, systemd
from tierd.config.watches import check_nodes
from tierd.format.manifest import FORMAT_VERSION
from tierd.format.wire import PROTOCOL_VERSION


def serve(context: typer.Context) -> int:
    """Run the daemon in the foreground until SIGTERM. SIGHUP reads the lifecycle and the upload
    caps again, and retries at once what has failed."""
    check_names()
    settings = settings_of(context)
    config = settings.config()
    check_nodes(config)
    from tierd.daemon import serve

    failpoints.arm()
    source = source_of(settings.config_file)
    serve(config, source=source, systemd=systemd(), read_config=settings.config)
    return 0


def version(context: typer.Context, json: options.Json = False) -> int:
    """Print the version of tierd, and of the format and protocol it uses."""
    versions = {"version": __version__, "format_version": FORMAT_VERSION, "protocol_version": PROTOCOL_VERSION}
    print_report(versions | {"python": platform.python_version()}, as_json=json, text=version_line())
    return 0


def version_line() -> str:
    return f"tierd {__version__} (format {FORMAT_VERSION}, protocol {PROTOCOL_VERSION})"
