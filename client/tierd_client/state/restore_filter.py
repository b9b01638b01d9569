"""Which entries of a checkpoint a restore takes, under which names, and which entries of the state it leaves alone.

An entry is what is restored as one: a tensor of a module (`model.head.weight`), the optimizer's state of one parameter
(`optimizer.state.head.weight`), one option of a parameter group (`optimizer.param_groups.0.lr`), or a whole section
(`scheduler`, `extra.best`, `rng`). The default filter takes all entries, under their names, or refuses.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from tierd.errors import BadConfig
from tierd_client.state.encoding import Json
from tierd_client.state.name_patterns import contains, matches

Patterns = str | Sequence[str]
"""Names of entries, of what contains them (`model.body`), or patterns with `*`, which also stands for dots."""

Rename = Mapping[str, str] | Callable[[str], str]
"""Stored prefix → prefix in the state, for whole components of a name. Or a function: stored name → name."""

_OPTIMIZER_STATE = re.compile(r"(optimizer(?:\.\d+)?\.state\.)(.+)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEntries:
    """The entries of a checkpoint. `tensors`: by entry, the stored name of its tensor, or "" if it is not one tensor.
    `objects`: by entry, the encoded value of what a module or a dict of tensors has beside tensors. `paths`: by entry
    of `objects`, the prefix of the names of the tensors in its value; of an absent entry, the prefix is the entry.
    `optional`: entries that other ranks hold, so that this rank's state may lack them. `has_optimizers`: names that
    begin with `optimizer.` are those of an optimizer."""

    tensors: dict[str, str] = field(default_factory=dict[str, str])
    objects: dict[str, Json] = field(default_factory=dict[str, Json])
    paths: dict[str, str] = field(default_factory=dict[str, str])
    optional: set[str] = field(default_factory=set[str])
    has_optimizers: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreFilter:
    """The arguments of a partial restore. `only` and `renames` are about stored names, `keep` and `cast` about names in
    the state. Not `strict`: entries that one side lacks, or that do not fit, are left as they are and reported."""

    only: tuple[str, ...] | None = None
    renames: Rename = field(default_factory=dict[str, str])
    strict: bool = True
    cast: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()

    @classmethod
    def parse(
        cls, *, only: Patterns | None, rename: Rename | None, strict: bool, cast: bool | Patterns, keep: Patterns
    ) -> RestoreFilter:
        """The filter of these arguments of `Client.restore`. Raises BadConfig, naming the argument."""
        renames: Rename = {} if rename is None else rename
        if isinstance(renames, Mapping):
            renames = {
                _text("rename", old).rstrip("."): _text("rename", new).rstrip(".") for old, new in renames.items()
            }
        elif not callable(renames):  # pyright: ignore[reportUnnecessaryComparison]
            raise _bad("rename", renames, "stored prefixes and what they are in the state, or a function of a name")
        if not isinstance(strict, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise _bad("strict", strict, "True or False")
        return cls(
            only=None if only is None else _patterns("only", only),
            renames=renames,
            strict=strict,
            cast=("*",) if cast is True else () if cast is False else _patterns("cast", cast),
            keep=_patterns("keep", keep),
        )

    @property
    def is_exact(self) -> bool:
        return self == EXACT

    def takes(self, entry: str) -> bool:
        """Whether a stored entry is asked for, or one of the state that the checkpoint might have."""
        return self.only is None or _matches_any(entry, self.only)

    def keeps(self, name: str) -> bool:
        return _matches_any(name, self.keep)

    def casts(self, name: str) -> bool:
        return _matches_any(name, self.cast)

    def destination(self, entry: str, *, has_optimizers: bool = True) -> str:
        """The name in the state of a stored entry. The state of an optimizer follows the name of its parameter.

        Raises BadConfig when a function that renames raises, or when `rename` has another name for an optimizer's
        entry.
        """
        if not has_optimizers or not entry.startswith("optimizer."):
            return self._renamed(entry)
        match = _OPTIMIZER_STATE.fullmatch(entry)
        name = match[1] + self.parameter(match[2]) if match is not None else entry
        if not callable(self.renames) and self._renamed(entry) not in (entry, name):
            raise BadConfig(
                f"restore with rename=…: {entry} cannot become {self._renamed(entry)}; nothing was changed",
                hint="an optimizer's state follows the names of its parameters: rename model.<parameter>",
            )
        return name

    def parameter(self, name: str) -> str:
        """The name in the model, without `model.`, of a parameter that the checkpoint has under `name`."""
        section, _, renamed = self._renamed(f"model.{name}").partition(".")
        return renamed if section == "model" else name

    def unused(self, entries: Iterable[str], kept: Iterable[str], names: Iterable[str]) -> list[str]:
        """A sentence for each pattern of the arguments that matches no entry, most likely because of a typing error.
        `entries`: all stored ones; `kept`: those of the state that were kept; `names`: of `entries` in the state."""
        entries, kept, names = list(entries), list(kept), list(names)  # iterated several times
        renames = () if callable(self.renames) else self.renames
        return [
            f"{argument}: {pattern!r} matches nothing in the {where}{_nearest(pattern, known)}"
            for argument, patterns, known, where in (
                ("only", self.only or (), entries, "checkpoint"),
                ("rename", renames, entries, "checkpoint"),
                ("keep", self.keep, kept, "state"),
                ("cast", self.cast, names, "state"),
            )
            for pattern in patterns
            if not any((contains(pattern, name) if patterns is renames else matches(name, pattern)) for name in known)
        ]

    def _renamed(self, entry: str) -> str:
        if callable(self.renames):
            try:
                renamed = self.renames(entry)
            except Exception as error:  # of any kind: it is the user's code
                raise BadConfig(
                    f"restore with rename=…: for {entry!r} it raised {type(error).__qualname__}: {error}",
                    hint="return a name for each name; the same name for what is not renamed",
                ) from error
            return _text("rename", renamed)
        old = max((prefix for prefix in self.renames if contains(prefix, entry)), key=len, default=None)
        return entry if old is None else self.renames[old] + entry[len(old) :]


EXACT = RestoreFilter()


def _matches_any(name: str, patterns: Iterable[str]) -> bool:
    return any(matches(name, pattern) for pattern in patterns)


def _nearest(pattern: str, names: Iterable[str]) -> str:
    parts = [name.split(".") for name in names]
    known = {".".join(path[:depth]) for path in parts for depth in range(1, len(path) + 1)}
    nearest = difflib.get_close_matches(pattern, sorted(known), n=2, cutoff=0.0)
    return f"; the nearest names are {' and '.join(nearest)}" if nearest else ""


def _patterns(argument: str, patterns: Patterns) -> tuple[str, ...]:
    if not isinstance(patterns, str | Sequence | Set):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise _bad(argument, patterns)
    return tuple(_text(argument, pattern) for pattern in ([patterns] if isinstance(patterns, str) else patterns))


def _text(argument: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise _bad(argument, value)
    return value


def _bad(
    argument: str, value: object, expected: str = "names of entries, such as 'model.head' or 'optimizer.*.lr'"
) -> BadConfig:
    hint = "docs/guides/fine-tune.md has the names of entries"
    return BadConfig(f"restore with {argument}={value!r}: expected {expected}", hint=hint)
