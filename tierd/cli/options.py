"""The options that several verbs share, each defined once, and the settings that precede the verb."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tierd.config import file as config_file
from tierd.config.sections import Config
from tierd.errors import BadConfig
from tierd.format.ids import AUTO, HOT, check_run
from tierd.lifecycle.selection import CheckpointQuery

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else there.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and do nothing.")]
TrailFolder = Annotated[
    Path | None,
    typer.Option("--trail", metavar="FOLDER", help="The folder of the audit trail; default: the hot directory."),
]
RunName = Annotated[
    str | None, typer.Option("--run", metavar="RUN", help="The run; required if there are several runs.")
]
OnlyRun = Annotated[str | None, typer.Option("--run", metavar="RUN", help="Only this run; default: all runs.")]
TierName = Annotated[
    str | None, typer.Option("--tier", metavar="TIER", help="Only this tier: hot, or a cold tier's name.")
]
GenerationNumber = Annotated[
    int | None, typer.Option("--generation", metavar="G", min=1, help="Only this generation; default: the newest.")
]
SourceTier = Annotated[str, typer.Option("--tier", metavar="TIER", help="auto, memory, hot, or a cold tier's name.")]
StepName = Annotated[str, typer.Option("--step", metavar="STEP", help="A number, latest, or milestone:NAME.")]
AllowUnhealthy = Annotated[
    bool, typer.Option("--allow-unhealthy", help="Also accept a checkpoint with numbers that are not finite.")
]
AllowUnsigned = Annotated[
    bool, typer.Option("--allow-unsigned", help="Also accept a checkpoint that no key signed; --step must name it.")
]
From = Annotated[
    str | None,
    typer.Option("--from", metavar="PLACE", help="Use only this directory or s3:// URL; no config, no daemon."),
]
Wait = Annotated[float, typer.Option("--wait", metavar="SECONDS", min=0.0, help="Wait at most this long.")]
AttachedRun = Annotated[
    str, typer.Option("--run", metavar="RUN", help="The run; its trainers are attached to this daemon.")
]


@dataclass(frozen=True, slots=True)
class Settings:
    """The options that precede the verb."""

    config_file: str | None
    wants_traceback: bool = False

    def config(self) -> Config:
        return config_file.load(self.config_file)


def settings_of(context: typer.Context) -> Settings:
    return context.find_object(Settings) or Settings(None)


def parse_query(
    run: str | None, step: str, generation: int | None, *, tier: str = AUTO, allow_unhealthy: bool = True
) -> CheckpointQuery:
    """`step` is a number, `latest`, or `milestone:NAME`. Raises BadConfig for anything else."""
    number, milestone = None, None
    if step.startswith("milestone:"):
        milestone = step.removeprefix("milestone:")
    elif step.isascii() and step.isdigit():
        number = int(step)
    elif step != "latest":
        raise BadConfig(f"--step {step!r} is not a step", hint="give a number, latest, or milestone:NAME")
    return CheckpointQuery(
        run=None if run is None else check_run(run),
        step=number,
        milestone=milestone,
        generation=generation,
        tier=tier,
        allow_unhealthy=allow_unhealthy,
    )


def check_tier(tier: str | None, config: Config, *others: str) -> None:
    """Raises BadConfig unless the config has this tier, or it is one of `others`, or None."""
    names = [*others, HOT, *(cold.name for cold in config.cold)]
    if tier not in (None, *names):
        raise BadConfig(f"no tier is called {tier!r}", hint=f"the tiers of this config are {', '.join(names)}")


def check_one_place(place: str | None, tier: str | None) -> None:
    """Raises BadConfig if both --from and --tier are given."""
    if place is not None and tier is not None:
        raise BadConfig("--from names the one place to use, --tier a tier of the config", hint="give one of them")
