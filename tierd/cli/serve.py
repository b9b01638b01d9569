"""`tierd serve` and `tierd demo`: what they run is imported only when they are called."""

from __future__ import annotations

from typing import Annotated

import typer

from tierd.cli.opened_tiers import settings_of
from tierd.config_file import notify_socket


def serve(context: typer.Context) -> None:
    """Run the daemon in the foreground until SIGTERM. SIGHUP reads max_upload_mib_s anew."""
    settings = settings_of(context)
    config = settings.config()
    from tierd.daemon import serve

    serve(config, notify_socket=notify_socket(), read_config=settings.config)


def demo(
    context: typer.Context,
    directory: Annotated[
        str | None, typer.Option("--dir", metavar="DIR", help="Work there and keep it; else a temporary one.")
    ] = None,
    fast: Annotated[bool, typer.Option("--fast", help="A smaller model and fewer steps.")] = False,
) -> None:
    """Watch a real training run lose its trainer, its daemon and its disk, and go on."""
    from tierd.cli.demo import run_demo

    raise typer.Exit(run_demo(directory=directory, is_fast=fast))
