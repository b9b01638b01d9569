"""Which checkpoints in a watched folder are complete, and of which step: a pure function of a listing.

Existence never counts. A preset names what its framework writes last, and that must be whole: JSON that can be parsed,
or the end of a zip archive, as torch.save leaves it. Besides, nothing may have been written for a while, because other
ranks may still write, and nothing long after what is last: a save that goes over a former one finds its marker there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

ZIP_END = b"PK\x05\x06"  # APPNOTE.TXT 4.3.16; torch.save writes it last, and no comment after it
ZIP_END_BYTES = 22


class Whole(Enum):
    """How the last file of a checkpoint shows that it is whole."""

    JSON = "json"
    ZIP = "zip"
    NAMED = "named"  # the file beside the checkpoints names the checkpoint
    PRESENT = "present"  # it is renamed into place


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """`pattern`: of the names, with the group `step`. `marker`: the file in the checkpoint that is written last; empty:
    the entry itself, or with NAMED the file beside it."""

    name: str
    pattern: re.Pattern[str]
    is_folder: bool
    marker: str
    whole: Whole
    beside: str = ""


PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            name="hf-trainer",
            pattern=re.compile(r"checkpoint-(?P<step>[0-9]+)(-shutdown)?"),
            is_folder=True,
            marker="trainer_state.json",
            whole=Whole.JSON,
        ),
        Preset(
            name="lightning",
            pattern=re.compile(r"(.*[^0-9])?step=(?P<step>[0-9]+)([^0-9].*)?\.ckpt"),
            is_folder=False,
            marker="",
            whole=Whole.ZIP,
        ),
        Preset(
            name="dcp",  # torchtitan too; FileSystemWriter writes .metadata.tmp and renames it
            pattern=re.compile(r"step-(?P<step>[0-9]+)"),
            is_folder=True,
            marker=".metadata",
            whole=Whole.PRESENT,
        ),
        Preset(
            name="deepspeed",
            pattern=re.compile(r"global_step(?P<step>[0-9]+)"),
            is_folder=True,
            marker="",
            whole=Whole.NAMED,
            beside="latest",
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """An entry of the watched folder. `modified_s`: of the newest file in it. `files`: paths of the files in it.
    `marker`: the content of the preset's marker, or the last bytes of a single file; None: it is not there.
    `marker_modified_s`: when that was written."""

    name: str
    is_folder: bool
    modified_s: float
    files: frozenset[str] = frozenset()
    marker: bytes | None = None
    marker_modified_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdicts:
    """`complete`: the step by the name of the entry, oldest first. `waiting`: why the others are not, by name. `other`:
    names that are no steps of the preset."""

    complete: dict[str, int] = field(default_factory=dict[str, int])
    waiting: dict[str, str] = field(default_factory=dict[str, str])
    other: list[str] = field(default_factory=list[str])


def judge(
    listing: Sequence[Listed], preset: Preset, *, now_s: float, quiet_s: float, beside: tuple[bytes, float] = (b"", 0.0)
) -> Verdicts:
    """`beside`: the content of the preset's file beside the checkpoints, and when it was written. `quiet_s`: since the
    last write, and how much later than the last file another rank may write its own."""
    verdicts = Verdicts()
    steps: dict[str, tuple[int, float]] = {}
    named = beside[0].decode(errors="replace").strip()
    for entry in listing:
        step = _step(entry.name, preset)
        if step is None or entry.is_folder != preset.is_folder:
            verdicts.other.append(entry.name)
        elif why := _unfinished(entry, preset, named):
            verdicts.waiting[entry.name] = why
        elif entry.modified_s - (beside[1] if preset.beside else entry.marker_modified_s) > quiet_s:
            verdicts.waiting[entry.name] = f"it was written again after {preset.beside or preset.marker or entry.name}"
        elif now_s - entry.modified_s < quiet_s:
            verdicts.waiting[entry.name] = f"it was written less than {quiet_s:g} s ago"
        else:
            steps[entry.name] = step, entry.modified_s
    for name in sorted(steps, key=lambda name: (steps[name][1], steps[name][0])):
        verdicts.complete[name] = steps[name][0]
    return verdicts


def _step(name: str, preset: Preset) -> int | None:
    match = preset.pattern.fullmatch(name)
    return int(match["step"]) if match and len(match["step"]) <= 12 else None


def _unfinished(entry: Listed, preset: Preset, named: str) -> str:
    """Why it is not complete; empty if it is."""
    if preset.whole is Whole.NAMED:
        # Only this one: of an older one it is not known whether it was ever named.
        return "" if named == entry.name else f"{preset.beside} does not name it"
    what = preset.marker or entry.name
    if entry.marker is None:
        return f"{what} is not there yet"
    if preset.whole is Whole.JSON and not _is_json(entry.marker):
        return f"{what} is not whole"
    if preset.whole is Whole.ZIP and not is_zip_end(entry.marker):
        return f"{what} does not end as an archive of torch.save"
    return ""


def is_zip_end(tail: bytes) -> bool:
    """Whether these are the last bytes of a zip archive without a comment."""
    return len(tail) >= ZIP_END_BYTES and tail[-ZIP_END_BYTES:][:4] == ZIP_END and tail[-2:] == b"\0\0"


def _is_json(raw: bytes) -> bool:
    try:
        return isinstance(json.loads(raw), dict)
    except (ValueError, RecursionError):
        return False


def fitting(names: Mapping[str, bool]) -> list[str]:
    """The presets that fit these names, for one that does not. The values say whether a name is that of a folder."""
    return [
        preset.name
        for preset in PRESETS.values()
        if any(preset.is_folder == is_folder and _step(name, preset) is not None for name, is_folder in names.items())
    ]
