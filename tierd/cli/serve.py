"""`tierd serve` runs the daemon, and `tierd version` prints its version."""

from __future__ import annotations

import logging
import platform
from contextlib import suppress

import typer

from tierd import __version__, failpoints, logs
from tierd.cli import options
from tierd.cli.console import print_report
from tierd.cli.options import Settings, settings_of
from tierd.config.environment import check_names
from tierd.config.file import source_of, systemd
from tierd.config.sections import Config
from tierd.config.watches import check_nodes
from tierd.errors import BadConfig, TierdError
from tierd.format.manifest import FORMAT_VERSION
from tierd.format.wire import PROTOCOL_VERSION

log = logging.getLogger("tierd")


def serve(context: typer.Context) -> int:
    """Run the daemon in the foreground until SIGTERM. SIGHUP reads the lifecycle and the upload
    caps again, and retries at once what has failed."""
    settings = settings_of(context)
    config: Config | None = None
    try:
        check_names()
        config = settings.config()
        _serve(settings, config)
    except Exception as error:  # also a bug: what collects the log reads JSON, and no traceback
        if not _logs_json(settings, config):
            raise
        return _log_fatal(error, wants_traceback=settings.wants_traceback)
    return 0


def _serve(settings: Settings, config: Config) -> None:
    check_nodes(config)
    from tierd.daemon import serve

    failpoints.arm()
    source = source_of(settings.config_file)
    serve(config, source=source, systemd=systemd(), read_config=settings.config)


def _logs_json(settings: Settings, config: Config | None) -> bool:
    """Whether the daemon's log is JSON. `config`: None where the error came before it was read. What cannot be read
    says nothing."""
    if config is None:
        with suppress(BadConfig):
            config = settings.config()
    return config is not None and config.daemon.log_format == "json"


def _log_fatal(error: Exception, *, wants_traceback: bool) -> int:
    """The error that ends the daemon as the last event of its log: what reads JSON could not read the text that a
    command prints. Returns the exit code."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    is_expected = isinstance(error, TierdError)
    logs.configure(logging.Filter(), "json")  # where the daemon has not begun its log
    log.critical("ended: %s", error, exc_info=error if wants_traceback or not is_expected else None)
    return error.exit_code if is_expected else 1


def version(context: typer.Context, json: options.Json = False) -> int:
    """Print the version of tierd, and of the format and protocol it uses."""
    versions = {"version": __version__, "format_version": FORMAT_VERSION, "protocol_version": PROTOCOL_VERSION}
    print_report(versions | {"python": platform.python_version()}, as_json=json, text=version_line())
    return 0


def version_line() -> str:
    return f"tierd {__version__} (format {FORMAT_VERSION}, protocol {PROTOCOL_VERSION})"
