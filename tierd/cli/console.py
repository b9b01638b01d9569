"""Output: results on stdout, everything else on stderr, a progress bar if stderr is a terminal.

A line never controls the terminal, whatever text of a manifest or a bucket is in it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec
import typer

from tierd.format.text import duration as duration
from tierd.format.text import printable, printable_json
from tierd.format.text import size as size
from tierd.status.node_reports import age_s
from tierd.tiers.store import Progress

T = TypeVar("T")


def print_result(*lines: str) -> None:
    typer.echo("\n".join(map(printable, lines)))


def print_json(result: Any) -> None:
    try:
        encoded = msgspec.json.encode(result)
    except UnicodeEncodeError:  # the path of a file may be no UTF-8
        encoded = msgspec.json.encode(_as_text(msgspec.to_builtins(result)))
    typer.echo(printable_json(msgspec.json.format(encoded, indent=2)))


def _as_text(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_as_text(key): _as_text(each) for key, each in value.items()}  # pyright: ignore[reportUnknownVariableType]
    return [_as_text(each) for each in value] if isinstance(value, list) else value  # pyright: ignore[reportUnknownVariableType]


def print_report(report: T, *, as_json: bool, text: str | Callable[[T], None]) -> None:
    """The result of a verb: as JSON, or as this text, or by the function that prints it as text."""
    if as_json:
        print_json(report)
    elif isinstance(text, str):
        print_result(text)
    else:
        text(report)


def print_note(*lines: str) -> None:
    """Print warnings, errors and hints on stderr."""
    typer.echo("\n".join(map(printable, lines)), err=True)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """Print plain columns, for people and for awk. `right`: the columns that are right-aligned."""
    shown = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headings, *shown, strict=True)]
    aligns = [str.rjust if heading in right else str.ljust for heading in headings]

    def line(cells: Sequence[str]) -> str:
        padded = (align(cell, width) for align, cell, width in zip(aligns, cells, widths, strict=True))
        return "  ".join(padded).rstrip()

    typer.secho(line(headings), bold=True)  # echo drops the escape codes where there is no terminal
    if shown:
        typer.echo("\n".join(line(row) for row in shown))


@contextmanager
def progress_bar(title: str, total_bytes: int, *, done_bytes: int = 0) -> Generator[Progress, Any]:
    """Yields a function that takes the number of bytes just done. Draws the rate and the time left, on a terminal only.
    `done_bytes`: done before, so they do not count for the rate."""
    if not sys.stderr.isatty():
        yield lambda size_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(printable(title), total=total_bytes, completed=done_bytes)
        yield lambda size_bytes: bar.advance(task, size_bytes)


def now() -> datetime:
    return datetime.now(UTC)


def timestamp() -> str:
    """Now, as ISO 8601 in UTC, to the millisecond."""
    return now().isoformat(timespec="milliseconds")


def age(created_at: str) -> str:
    seconds = age_s(created_at, now())
    return "?" if seconds is None else duration(seconds)


def metrics_line(metrics: dict[str, float | str]) -> str:
    return " ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in metrics.items()
    )
