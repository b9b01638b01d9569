"""The reference of the configuration: keys, types and bounds from the structs, meanings from deploy/tierd.toml."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from generators.links import ROOT
from generators.tables import cell, sentence, table
from tierd.config.sections import Config

FILE = ROOT / "deploy/tierd.toml"

INTRODUCTION = """\
# Configuration

This page is generated: names, types and defaults come from the code, meanings from the comments of `deploy/tierd.toml`,
which lists every key at its default.

- tierd reads `--config FILE`, else the file that `$TIERD_CONFIG` names, else `./tierd.toml`. Without a file it keeps
  everything under `./.tierd`.
- An unknown key is an error. A relative path is relative to the config file.
- The environment sets any key with a single value and wins over the file: `hot.path` is `TIERD_HOT_PATH`, and
  `lifecycle.cold.keep_last` is `TIERD_LIFECYCLE_COLD_KEEP_LAST`. Keys of `[[cold]]` have no variable, because there may
  be several cold tiers. `tierd serve` refuses to start with a variable that begins with `TIERD_` and that nothing
  reads; other commands name it on stderr. What Kubernetes sets for a Service called `tierd` or `tierd-…` is ignored.
- Credentials are never in the config. boto3 takes them from the environment, from `~/.aws`, or from the role of the
  machine.
"""


@dataclass(frozen=True, slots=True)
class Key:
    """One key: `section` and `name` as in the file, `meaning` from its comment."""

    section: str
    name: str
    kind: str
    default: str
    meaning: str


def undocumented() -> list[str]:
    """Keys that no comment explains."""
    return [f"{key.section}.{key.name}" for key in every_key() if not key.meaning]


def page() -> str:
    comments = _sections()
    parts = [INTRODUCTION]
    section = None
    rows: list[list[str]] = []
    for key in [*every_key(), None]:
        if key is None or key.section != section:
            if rows:
                parts += [table(["key", "type", "default", "meaning"], rows), ""]
            if key is None:
                break
            section, rows = key.section, []
            parts += [f"## {section}\n", sentence(comments.get(section, "")), ""]
        rows.append([f"`{key.name}`", cell(key.kind), f"`{cell(key.default)}`", sentence(cell(key.meaning))])
    parts += ["## The whole file\n", "```toml", FILE.read_text(encoding="utf-8").rstrip(), "```", ""]
    return "\n".join(parts)


def every_key() -> Iterator[Key]:
    """Every key in the order of the structs."""
    comments = _comments()
    for section, struct in _structs(Config, ""):
        hints = typing.get_type_hints(struct, include_extras=True)
        for field in msgspec.structs.fields(struct):
            if _struct_in(hints[field.name]) is not None and section != "cold":
                continue
            default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
            meaning = (
                comments.get((section, field.name))
                or comments.get(("lifecycle.hot", field.name) if section.startswith("lifecycle.") else ("", ""))
                or ""
            )
            shown = "none" if default is None else msgspec.json.encode(default).decode()
            yield Key(section, field.name, _kind(hints[field.name]), shown, meaning)


def _structs(struct: type[msgspec.Struct], above: str) -> Iterator[tuple[str, type[msgspec.Struct]]]:
    hints = typing.get_type_hints(struct)
    own = [name for name in hints if _struct_in(hints[name]) is None]
    if above and own:
        yield above.removesuffix("."), struct
    for name, hint in hints.items():
        inner = _struct_in(hint)
        if inner is not None and above != "cold.":
            yield from _structs(inner, f"{above}{name}.")


def _struct_in(hint: Any) -> type[msgspec.Struct] | None:
    """The struct that a field holds, alone, in a list or or-ed with None."""
    for one in (hint, *typing.get_args(hint)):
        if isinstance(one, type) and issubclass(one, msgspec.Struct):
            return one
    return None


def _kind(hint: Any) -> str:
    """The type for a reader, with its bounds or choices."""
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        kind, *extra = typing.get_args(hint)
        bounds = [_bounds(one) for one in extra if isinstance(one, msgspec.Meta)]
        return " ".join([_kind(kind), *(bound for bound in bounds if bound)])
    if origin is typing.Literal:
        return " or ".join(f"`{msgspec.json.encode(choice).decode()}`" for choice in typing.get_args(hint))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_kind(one) for one in typing.get_args(hint) if one is not type(None))
    if _struct_in(hint) is not None:
        return "table"
    return {int: "integer", float: "number", bool: "true or false", str: "text"}.get(hint, str(hint))


def _bounds(meta: msgspec.Meta) -> str:
    words = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than", "pattern": "matching"}
    found = [(word, getattr(meta, name)) for name, word in words.items()]
    return ", ".join(f"{word} {value}" for word, value in found if value is not None)


def _comments() -> dict[tuple[str, str], str]:
    """(section, key) of each line of the file, with its comment."""
    found: dict[tuple[str, str], str] = {}
    section = ""
    for line in FILE.read_text(encoding="utf-8").splitlines():
        if header := re.match(r"(?:# )?\[+([\w.]+)\]+", line):
            section = header[1]
        elif entry := re.match(r"(?:# )?(\w+) = (?:\{.*\}|\"[^\"]*\"|\S+)\s*(?:#\s*(.+))?$", line):
            found[section, entry[1]] = entry[2] or ""
    return found


def _sections() -> dict[str, str]:
    """What the file says about each section: the comment lines above its header, or the comment beside it."""
    found: dict[str, str] = {}
    above: list[str] = []
    for line in FILE.read_text(encoding="utf-8").splitlines():
        if header := re.match(r"(?:# )?\[+([\w.]+)\]+\s*(?:#\s*(.+))?$", line):
            found[header[1]] = " ".join(above) or header[2] or ""
            above = []
        elif line.startswith("# ") and not re.match(r"# \w+ = ", line):
            above.append(line.removeprefix("# "))
        else:
            above = []
    return found
