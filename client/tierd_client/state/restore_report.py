"""What a restore did with each entry of the checkpoint and of the state."""

from __future__ import annotations

from dataclasses import dataclass, field

from tierd.format import text


def _names() -> list[str]:
    return []


def _texts() -> dict[str, str]:
    return {}


@dataclass(slots=True, kw_only=True)
class RestoreReport:
    """What one rank loaded and what it did not. Names are those of entries: `model.head.weight`, `scheduler`.

    `loaded`: in the state, from the checkpoint; `size_bytes`: of their whole tensors. `renamed`: by stored name, the
    name in the state. `cast`: the dtypes, as "F32 -> BF16". `kept`: left as they were because of `keep`. `cleared`:
    optimizer state that was deleted, because the checkpoint's optimizer had none for the parameter. `missing`: left as
    they were because the checkpoint lacks them. `mismatched`: left as they were because they do not fit, with the
    reason, such as both shapes. `left_over`: in the checkpoint, with no place in the state. `not_asked`: in the
    checkpoint, excluded by `only`.
    """

    loaded: list[str] = field(default_factory=_names)
    size_bytes: int = 0
    renamed: dict[str, str] = field(default_factory=_texts)
    cast: dict[str, str] = field(default_factory=_texts)
    kept: list[str] = field(default_factory=_names)
    cleared: list[str] = field(default_factory=_names)
    missing: list[str] = field(default_factory=_names)
    mismatched: dict[str, str] = field(default_factory=_texts)
    left_over: list[str] = field(default_factory=_names)
    not_asked: list[str] = field(default_factory=_names)

    def __str__(self) -> str:
        counts = {
            "renamed": self.renamed,
            "cast": self.cast,
            "kept": self.kept,
            "cleared": self.cleared,
            "not in the checkpoint": self.missing,
            "that did not fit": self.mismatched,
            "left over": self.left_over,
            "not asked for": self.not_asked,
        }
        rest = "".join(f", {len(entries)} {words}" for words, entries in counts.items() if entries)
        return f"{len(self.loaded)} entries loaded ({text.size(self.size_bytes)}){rest}"
