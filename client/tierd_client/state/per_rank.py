"""Entries of a state that differ between ranks on purpose: experts, FP8 amax histories, statistics of each rank.

`TrainingState(per_rank=[…])` names them. Each rank then stores its own tensor, under a name that ends in @<rank>.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import msgspec

from tierd.errors import BadConfig
from tierd_client.log import log
from tierd_client.state.name_patterns import compile_pattern


class PerRankTree(msgspec.Struct):
    """The tensors of a section that one rank stored under names of its own: the state tree has `names`, the shard has
    them with the `suffix`."""

    suffix: str
    names: list[str]

    def stored_names(self) -> dict[str, str]:
        return {name: name + self.suffix for name in self.names}


class PerRankEntries:
    """`patterns`: names of entries, or patterns of them with `*`. A name stands for all below it; that of a
    parameter, `model.<name>`, for its optimizer state too.

    Raises BadConfig unless they are strings.
    """

    def __init__(self, patterns: Collection[str]) -> None:
        if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BadConfig("TrainingState(per_rank=…): it must be a list of strings: the names of entries")
        self._forms = {pattern: _forms(pattern) for pattern in patterns}
        self._known: dict[str, bool] = {}
        self._unmatched = set(patterns)

    def __len__(self) -> int:
        return len(self._forms)

    def matches(self, path: str) -> bool:
        known = self._known.get(path)
        if known is None:
            matching = {pattern for pattern, forms in self._forms.items() if any(form.match(path) for form in forms)}
            self._unmatched -= matching
            known = self._known[path] = bool(matching)
        return known

    def warn_unmatched(self) -> None:
        """Logs the patterns that have matched no tensor yet, once."""
        if self._unmatched:
            names = ", ".join(sorted(self._unmatched))
            log.warning("tierd: per_rank=[…]: %s: no tensor of the state has such a name", names)
            self._unmatched = set()


def _forms(pattern: str) -> list[re.Pattern[str]]:
    forms = [compile_pattern(pattern + below) for below in ("", ".*", "[*")]
    if pattern.startswith("model."):
        state = r"optimizer(?:\.\d+)?\.state\."
        forms.append(compile_pattern(pattern.removeprefix("model.") + ".*", prefix=state))
    return forms
