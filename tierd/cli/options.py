"""The options that several verbs share, each defined once."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else there.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]
RunName = Annotated[str | None, typer.Option("--run", metavar="RUN", help="The run; needed when there are several.")]
TierName = Annotated[
    str | None, typer.Option("--tier", metavar="TIER", help="Only this tier: hot, or a cold tier's name.")
]
GenerationNumber = Annotated[
    int | None, typer.Option("--generation", metavar="G", min=1, help="That generation; the newest otherwise.")
]
From = Annotated[
    str | None,
    typer.Option("--from", metavar="PLACE", help="Look in this directory or s3:// URL only; no config, no daemon."),
]
