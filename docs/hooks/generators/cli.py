"""The reference of the command line, from the typer app and the error classes."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import typer

from generators.tables import cell, code, sentence, table
from tierd.cli.app import make_app
from tierd.errors import EXIT_HALTED, TierdError

INTRODUCTION = """\
# Command line

This page is generated from the commands themselves; `tierd COMMAND --help` prints the same.

- `--config FILE` and `--traceback` may stand before or after the command's name.
- Commands that print facts take `--json`. JSON goes to stdout. Messages and progress bars go to stderr.
- All commands except `serve`, `stop`, `snapshot`, `demo` and `--tier memory` read the tiers themselves, so they work
  without a running daemon.
"""

NO_ERROR = {
    0: "The command did what was asked.",
    1: "The command failed for a reason that has no code of its own.",
    3: "Some of what was asked is done, some is not. The message says which.",
    EXIT_HALTED: "The run is halted: its trainer called `client.halt()`, and a person must decide.",
    130: "Interrupted by Ctrl-C (SIGINT).",
    143: "Terminated by SIGTERM.",
}


def undocumented() -> list[str]:
    """Commands and options without help."""
    found: list[str] = []
    for name, command in sorted(_commands().items()):
        if not command.help:
            found.append(f"tierd {name}")
        found += [
            f"tierd {name} {parameter.opts[0]}"
            for parameter in command.params
            if not getattr(parameter, "help", None) and not parameter.required
        ]
    return found


def page() -> str:
    group = typer.main.get_command(make_app())
    parts = [INTRODUCTION, "## Options of every command\n", _parameters(group), ""]
    for name, command in _commands().items():
        parts += [f"## tierd {name}\n", sentence(command.help or ""), "", "```text", _usage(name, command), "```", ""]
        if command.params:
            parts += [_parameters(command), ""]
    parts += ["## Exit codes\n", _exit_codes(), ""]
    return "\n".join(parts)


def _commands() -> dict[str, Any]:
    group: Any = typer.main.get_command(make_app())
    return group.commands


def _usage(name: str, command: Any) -> str:
    words = ["tierd", name]
    for parameter in command.params:
        metavar = parameter.metavar or parameter.name.upper()
        if parameter.param_type_name == "argument":
            words.append(metavar if parameter.required else f"[{metavar}]")
        elif parameter.required:
            words += [parameter.opts[0], metavar]
    return " ".join([*words, "[OPTIONS]"])


def _parameters(command: Any) -> str:
    rows: list[list[str]] = []
    for parameter in command.params:
        is_flag = getattr(parameter, "is_flag", False)
        if parameter.param_type_name == "argument":
            shown = parameter.metavar or parameter.name.upper()
        else:
            shown = ", ".join(parameter.opts) + ("" if is_flag else f" {parameter.metavar or _choices(parameter)}")
        default = parameter.default
        if parameter.required:
            default = "required"
        elif is_flag or default is None or callable(default):
            default = ""
        else:
            default = f"`{getattr(default, 'value', default)}`"
        rows.append([f"`{cell(shown)}`", str(default), sentence(cell(getattr(parameter, "help", "") or ""))])
    return table(["option", "default", "meaning"], rows)


def _choices(parameter: Any) -> str:
    annotation = parameter.type_descriptor.annotation
    return "|".join(annotation) if isinstance(annotation, type) and issubclass(annotation, StrEnum) else "TEXT"


def _exit_codes() -> str:
    meanings = {number: [text] for number, text in NO_ERROR.items()}
    for error in _errors(TierdError):
        if "exit_code" in vars(error) and error is not TierdError:
            text = " ".join((error.__doc__ or "").split()).removeprefix("Raised when ")
            meanings.setdefault(error.exit_code, []).append(f"{code(error.__name__)}: {cell(text)}")
    return table(["code", "meaning"], ([str(number), "<br>".join(texts)] for number, texts in sorted(meanings.items())))


def _errors(base: type[TierdError]) -> list[type[TierdError]]:
    found = [base]
    for child in base.__subclasses__():
        found += _errors(child)
    return found
