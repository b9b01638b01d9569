"""`tierd cadence`: how often to save, from what a save and a restart cost and how often the job fails.

A number that is not given as an option is taken from the running daemon's measurements. The output says where each
number came from. A simulation checks the formulas. Changes nothing.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from tierd.cli import daemon_http, options
from tierd.cli.cadence_plot import plot
from tierd.cli.console import duration, print_json, print_result, table
from tierd.cli.options import settings_of
from tierd.errors import BadConfig
from tierd.format.ids import HOT, MEMORY
from tierd.lifecycle.cadence import Costs, Outcome, check_count, daly_s, gpus_mtbf_s, outcome, young_s
from tierd.status.report import CostReport, CostsReport

LADDER_S = (60.0, 300.0, 900.0, 3600.0, 4 * 3600.0)  # what people choose, beside fractions of the best interval
FRACTIONS = (0.25, 0.5, 2.0, 4.0)
INTERVALS_MAX = 100  # each is simulated
DAY_S, HOUR_S = 86400.0, 3600.0


def cadence(
    context: typer.Context,
    gpus: Annotated[
        int | None, typer.Option("--gpus", metavar="N", help="GPUs of the job; with --gpu-mtbf-days.")
    ] = None,
    gpu_mtbf_days: Annotated[
        float | None,
        typer.Option("--gpu-mtbf-days", metavar="DAYS", help="Mean time between failures of one GPU and its share."),
    ] = None,
    mtbf_hours: Annotated[
        float | None, typer.Option("--mtbf-hours", metavar="HOURS", help="Mean time between failures of the job.")
    ] = None,
    failures: Annotated[
        int | None, typer.Option("--failures", metavar="N", help="Failures seen of this job; with --in-hours.")
    ] = None,
    in_hours: Annotated[
        float | None, typer.Option("--in-hours", metavar="HOURS", help="The time in which --failures were seen.")
    ] = None,
    save_s: Annotated[
        float | None,
        typer.Option("--save-s", metavar="SECONDS", help="What a snapshot delays training; default: as measured."),
    ] = None,
    restart_s: Annotated[
        float | None,
        typer.Option(
            "--restart-s",
            metavar="SECONDS",
            help="From a process crash until training goes on; default: the measured restore from memory.",
        ),
    ] = None,
    node_loss_share: Annotated[
        float,
        typer.Option("--node-loss-share", metavar="SHARE", help="The share of failures that lose a node, 0 to 1."),
    ] = 0.0,
    node_restart_s: Annotated[
        float | None,
        typer.Option(
            "--node-restart-s",
            metavar="SECONDS",
            help="From the loss of a node until training goes on; default: the measured restore from a cold tier, at "
            "least --restart-s.",
        ),
    ] = None,
    lag_s: Annotated[
        float | None,
        typer.Option(
            "--lag-s",
            metavar="SECONDS",
            help="From a snapshot until it has left the node, to a peer or a cold tier; default: as measured.",
        ),
    ] = None,
    interval_s: Annotated[
        list[float] | None,
        typer.Option("--interval-s", metavar="SECONDS", help="An interval to compute; may be repeated."),
    ] = None,
    svg: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Also write a plot to this file.")] = None,
    json: options.Json = False,
) -> int:
    """Compute how often to save, and what each interval costs. Changes nothing."""
    sources: dict[str, str] = {}
    mtbf_s = _mtbf_s(sources, gpus, gpu_mtbf_days, mtbf_hours, failures, in_hours)
    is_complete = None not in (save_s, restart_s) and (not node_loss_share or None not in (node_restart_s, lag_s))
    measured = CostsReport() if is_complete else _measured(context)
    memory, cold = measured.restore.get(MEMORY), {
        tier: cost for tier, cost in measured.restore.items() if tier not in (MEMORY, HOT)
    }  # fmt: skip
    save_s = _number(sources, "save_s", "--save-s", save_s, measured.stall, "snapshot() of a rank")
    if save_s is None:
        raise BadConfig(
            "compute a cadence: no daemon here has measured a snapshot, and the cost of a save is not given",
            hint="give --save-s SECONDS, or --config FILE of a daemon that takes snapshots",
        )
    restart_s = _number(sources, "restart_s", "--restart-s", restart_s, memory, "a restore from memory")
    costs = Costs(save_s=save_s, mtbf_s=mtbf_s, restart_s=restart_s or 0.0, node_loss_share=node_loss_share)
    if node_loss_share:
        away = _fastest(cold)
        node_restart_s = _number(
            sources, "node_restart_s", "--node-restart-s", node_restart_s, away, "a restore from a cold tier"
        )
        is_measured = sources["node_restart_s"] != "--node-restart-s"
        if node_restart_s is None or (is_measured and node_restart_s < costs.restart_s):
            node_restart_s, sources["node_restart_s"] = costs.restart_s, "as restart_s"
        lag = _fastest(measured.replicate)
        lag_s = _number(sources, "lag_s", "--lag-s", lag_s, lag, "a copy to the fastest cold tier")
        costs = Costs(
            save_s=save_s,
            mtbf_s=mtbf_s,
            restart_s=costs.restart_s,
            node_loss_share=node_loss_share,
            node_restart_s=node_restart_s,
            lag_s=lag_s or 0.0,
        )
    best_s = young_s(costs.save_s, costs.mtbf_s)
    outcomes = [outcome(costs, interval) for interval in _intervals(costs, best_s, interval_s)]
    if svg is not None:
        try:
            svg.write_text(plot(costs, outcomes, best_s), encoding="utf-8")
        except OSError as error:
            raise BadConfig(
                f"write {svg}: {error.strerror}", hint="--svg names a file in a folder that exists"
            ) from error
    if json:
        print_json(_report(costs, sources, best_s, outcomes))
    else:
        _print(costs, sources, best_s, outcomes)
    return 0


def _mtbf_s(
    sources: dict[str, str],
    gpus: int | None,
    gpu_mtbf_days: float | None,
    mtbf_hours: float | None,
    failures: int | None,
    in_hours: float | None,
) -> float:
    ways = (gpus, gpu_mtbf_days), (mtbf_hours,), (failures, in_hours)
    given = [way for way in ways if any(value is not None for value in way)]
    if len(given) != 1 or None in given[0]:
        raise BadConfig(
            "compute a cadence: how often the job fails must be given in one way",
            hint="--gpus N --gpu-mtbf-days D, or --mtbf-hours H, or --failures N --in-hours H",
        )
    if gpus is not None and gpu_mtbf_days is not None:
        sources["mtbf_s"] = f"{gpus} GPUs with {gpu_mtbf_days:g} days each"
        return gpus_mtbf_s(gpus, gpu_mtbf_days * DAY_S)
    if failures is not None and in_hours is not None:
        check_count("--failures", failures)
        sources["mtbf_s"] = f"{failures} failures in {in_hours:g} hours"
        return in_hours * HOUR_S / failures
    sources["mtbf_s"] = "--mtbf-hours"
    return (mtbf_hours or 0.0) * HOUR_S


def _measured(context: typer.Context) -> CostsReport:
    daemon = daemon_http.find_or_none(settings_of(context).config())
    return CostsReport() if daemon is None else daemon.status.costs


def _number(
    sources: dict[str, str], name: str, option: str, given: float | None, measured: CostReport | None, what: str
) -> float | None:
    """The value, and in `sources` where it came from."""
    if given is not None:
        sources[name] = option
        return given
    if measured is None:
        sources[name] = f"not measured; give {option}"
        return None
    sources[name] = f"measured by the daemon: {what}, mean of {measured.count}"
    return measured.mean_s


def _fastest(costs: dict[str, CostReport]) -> CostReport | None:
    return min(costs.values(), key=lambda cost: cost.mean_s, default=None)


def _intervals(costs: Costs, best_s: float, given: list[float] | None) -> list[float]:
    if given:
        if len(given) > INTERVALS_MAX:
            raise BadConfig(f"compute a cadence: {len(given)} intervals, at most {INTERVALS_MAX}")
        return sorted({*given, best_s})
    around = {best_s, *(fraction * best_s for fraction in FRACTIONS)}
    near = [each for each in LADDER_S if best_s / 30 <= each <= 30 * best_s]
    # Only an interval that is longer than a save leaves time for work.
    return sorted(each for each in {*around, *near} if each > costs.save_s) or [2 * costs.save_s]


def _report(costs: Costs, sources: dict[str, str], best_s: float, outcomes: list[Outcome]) -> dict[str, Any]:
    values = {name: getattr(costs, name) for name in ("mtbf_s", "save_s", "restart_s", "node_restart_s", "lag_s")}
    return {
        "costs": {name: {"value": values[name], "source": source} for name, source in sources.items()},
        "node_loss_share": costs.node_loss_share,
        "best": {"young_s": best_s, "daly_s": daly_s(costs.save_s, costs.mtbf_s)},
        "intervals": [
            {
                name: getattr(each, name)
                for name in (*Outcome.__dataclass_fields__, "first_order_holds")
            }
            for each in outcomes
        ],
    }  # fmt: skip


_NAMES = {
    "mtbf_s": "mean time between failures",
    "save_s": "a save",
    "restart_s": "a restart",
    "node_restart_s": "a restart after the loss of a node",
    "lag_s": "until a snapshot has left the node",
}


def _seconds(seconds: float) -> str:
    """Exact enough to type it again, and readable."""
    exact = f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"
    return exact if seconds < 120 else f"{exact} ({duration(seconds)})"


def _print(costs: Costs, sources: dict[str, str], best_s: float, outcomes: list[Outcome]) -> None:
    width = max(len(_NAMES[name]) for name in sources) + 2
    for name, source in sources.items():
        print_result(f"{_NAMES[name]:<{width}}{_seconds(getattr(costs, name))}: {source}")
    if costs.node_loss_share:
        print_result(f"{'failures that lose a node':<{width}}{_percent(costs.node_loss_share)}: --node-loss-share")
    best = next(each for each in outcomes if each.interval_s == best_s) if best_s > costs.save_s else None
    print_result("")
    if best is None:
        print_result("NO INTERVAL HELPS: a save takes longer than twice the mean time between failures", "")
    else:
        print_result(
            f"{'save every':<{width}}{_seconds(best_s)}: Young 1974, efficiency {_percent(best.first_order)}",
            f"{'':<{width}}{_seconds(daly_s(costs.save_s, costs.mtbf_s))}: Daly 2006",
            "",
        )
    heads = ["INTERVAL", "SAVING", "LOST", "RESTARTING", "FIRST ORDER", "DALY", "SIMULATED", ""]
    rows = [
        [
            _seconds(each.interval_s),
            *map(_percent, (each.saving, each.lost, each.restarting, each.first_order, each.daly, each.simulated)),
            "best" if each is best else "",
        ]
        for each in outcomes
    ]
    table(heads, rows, right=heads[:-1])
    print_result(
        "",
        "efficiency is the share of useful work: FIRST ORDER is 1 - save/interval - interval/(2 MTBF) - restart/MTBF,",
        "DALY is for exponentially distributed failures, SIMULATED draws them",
    )
    if rough := [each for each in outcomes if not each.first_order_holds]:
        worst = rough[-1]
        print_result(
            f"FIRST ORDER is for intervals far below the MTBF. At {duration(worst.interval_s)} it assumes a chance of "
            f"{_percent(worst.failures_per_interval)} for a failure per interval"
            + (", which is no probability" if worst.failures_per_interval > 1 else "")
            + f", and gives {_percent(worst.first_order)}; the simulation gives {_percent(worst.simulated)}."
            + (" It is worse than useless there: use DALY." if worst.failures_per_interval > 1 else " Use DALY there."),
        )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if math.isfinite(share) else "?"
