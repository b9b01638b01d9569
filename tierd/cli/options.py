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
SourceTier = Annotated[str, typer.Option("--tier", metavar="TIER", help="auto, memory, hot, or a cold tier's name.")]
StepName = Annotated[str, typer.Option("--step", metavar="STEP", help="A number, latest, or milestone:NAME.")]
AllowUnhealthy = Annotated[bool, typer.Option("--allow-unhealthy", help="Also one whose numbers are not all finite.")]
From = Annotated[
    str | None,
    typer.Option("--from", metavar="PLACE", help="Look in this directory or s3:// URL only; no config, no daemon."),
]
Wait = Annotated[float, typer.Option("--wait", metavar="SECONDS", min=0.0, help="Wait for it at most so long.")]
