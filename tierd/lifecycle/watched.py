"""Which checkpoints in a watched folder are complete, and of which step: a pure function of a listing.

Existence never counts. A preset names what its framework writes last, and that must be whole: JSON that can be parsed,
or the end of a zip archive, as torch.save leaves it. Besides, nothing may have changed for a while, because other
ranks may still write; nothing may have been written long after what is last, since a save that goes over a former one
finds its marker there; and nothing may have been deleted after the last write, since a rotation may have been killed.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from tierd.config import WatchConfig
from tierd.errors import Unsupported

# APPNOTE.TXT 4.3.15 and 4.3.16: the locator of the zip64 end, and the end. torch.save writes no comment after it.
ZIP_LOCATOR = struct.Struct("<4sIQI")
ZIP_END = struct.Struct("<4s4H2IH")
ZIP_TAIL_BYTES = ZIP_LOCATOR.size + ZIP_END.size
ZIP64_END_BYTES = 56
STEP_DIGITS_MAX = 12
NAMED_MAX = 5  # names in a message
FLAT_HEADER = struct.Struct("<ii")  # step and number of parameters; then weights, m and v of each, in float32
# The times of a folder and of a file come from one clock, with ticks of 10 ms at most.
FOLDER_SLACK_S = 0.1


class Whole(Enum):
    """How the last file of a checkpoint shows that it is whole."""

    JSON = "json"
    ZIP = "zip"
    FLAT = "flat"  # its header says how long it is
    FORMAT = "format"  # as its own format says, where that is known
    NAMED = "named"  # the file beside the checkpoints names the checkpoint
    PRESENT = "present"  # it is renamed into place


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """`pattern`: of the names, with the group `step`; a name without it has its step in the marker. `marker`: the file
    in the checkpoint that is written last; empty: the entry itself, or with NAMED the file beside it. `needs`: files
    that a checkpoint has, and folders, with a slash at the end, in which a file is. `alike`: how the names of files
    begin that a checkpoint has if others have them: they are written after the marker. `example`: of a name."""

    name: str
    pattern: re.Pattern[str]
    is_folder: bool
    marker: str
    whole: Whole
    example: str
    beside: str = ""
    needs: tuple[str, ...] = ()
    alike: str = ""

    def step_of(self, name: str) -> int:
        """0 where the name has none."""
        match = self.pattern.fullmatch(name)
        return int(match["step"] or 0) if match else 0


_DCP = Preset(
    name="dcp",  # FileSystemWriter writes .metadata.tmp and renames it
    pattern=re.compile(r"step-(?P<step>[0-9]+)"),
    is_folder=True,
    marker=".metadata",
    whole=Whole.PRESENT,
    example="step-500/",
)
PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            name="hf-trainer",
            pattern=re.compile(r"checkpoint-(?P<step>[0-9]+)"),
            is_folder=True,
            marker="trainer_state.json",
            whole=Whole.JSON,
            example="checkpoint-500/",
        ),
        Preset(
            name="lightning",
            pattern=re.compile(r"(.*[^0-9])?step=(?P<step>[0-9]+)([^0-9].*)?\.ckpt"),
            is_folder=False,
            marker="",
            whole=Whole.ZIP,
            example="epoch=3-step=500.ckpt",
        ),
        Preset(
            name="accelerate",
            pattern=re.compile(r"(checkpoint|step)_(?P<step>[0-9]+)"),
            is_folder=True,
            marker="random_states_0.pkl",
            whole=Whole.ZIP,
            example="checkpoint_5/",
            alike="custom_checkpoint_",  # of objects that were registered
        ),
        _DCP,
        Preset(
            name="torchtitan",
            pattern=_DCP.pattern,
            is_folder=True,
            marker=_DCP.marker,
            whole=_DCP.whole,
            example=_DCP.example,
        ),
        Preset(
            name="deepspeed",
            pattern=re.compile(r"global_step(?P<step>[0-9]+)"),
            is_folder=True,
            marker="",
            whole=Whole.NAMED,
            example="global_step500/",
            beside="latest",
        ),
        Preset(
            name="gpt-simple",
            pattern=re.compile(r"checkpoint-(?P<step>[0-9]+)(-shutdown)?|final"),
            is_folder=True,
            marker="trainer_state.json",
            whole=Whole.JSON,
            example="checkpoint-500-shutdown/",
            needs=("model/", "optimizer.bin", "scheduler.bin", "rng/"),
        ),
        Preset(
            name="step-bin",
            pattern=re.compile(r"step_(?P<step>[0-9]+)\.bin"),
            is_folder=False,
            marker="",
            whole=Whole.FLAT,
            example="step_000500.bin",
        ),
    )
}


def preset_of(watch: WatchConfig) -> Preset:
    """The preset that a watch names, with its own marker where it has one, or one made of its pattern."""
    if watch.preset:
        preset = PRESETS[watch.preset]
        if not watch.marker:
            return preset
        whole = preset.whole if preset.marker and _suffix(preset.marker) == _suffix(watch.marker) else Whole.PRESENT
        return replace(preset, marker=watch.marker, whole=whole, beside="")
    glob = watch.pattern.removesuffix("/")
    parts = re.split(r"(\{step\}|\*|\?)", glob)
    known = {"{step}": "(?P<step>[0-9]+)", "*": ".*", "?": "."}
    # After `*`, {step} takes the whole number: a digit before it belongs to the number.
    expression = "".join(known.get(part, re.escape(part)) for part in parts).replace(".*(?P", ".*(?<![0-9])(?P")
    whole = Whole.PRESENT if watch.renamed or watch.marker else Whole.FORMAT
    return Preset(
        name=watch.pattern,
        pattern=re.compile(expression),
        is_folder=watch.pattern.endswith("/"),
        marker=watch.marker,
        whole=Whole.JSON if watch.marker.endswith(".json") else whole,
        example=watch.pattern,
    )


def _suffix(name: str) -> str:
    return name.rpartition(".")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """An entry of the watched folder. `modified_s`: of the newest file in it; `folder_modified_s` of the newest folder.
    `unchanged_s`: for how long it was seen without a change. `files`: paths of the files in it. `marker`: the content
    of the preset's marker where it is JSON, else empty; None: it is not there. `marker_modified_s`: when it was
    written. `is_whole`: as its format says; None: that is not known. Of a single file, the marker is itself, and
    `head` its first bytes. `cut`: files in a folder that end too early by their format."""

    name: str
    is_folder: bool
    modified_s: float
    unchanged_s: float
    folder_modified_s: float = 0.0
    files: frozenset[str] = frozenset()
    marker: bytes | None = None
    marker_modified_s: float = 0.0
    head: bytes = b""
    size_bytes: int = 0
    is_whole: bool | None = None
    cut: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdicts:
    """`complete`: the step by the name of the entry, oldest first. `waiting`: why the others are not, by name. `quiet`:
    those of `waiting` that only wait until nothing was written for a while. `other`: names that are no steps of the
    preset."""

    complete: dict[str, int] = field(default_factory=dict[str, int])
    waiting: dict[str, str] = field(default_factory=dict[str, str])
    quiet: set[str] = field(default_factory=set[str])
    other: list[str] = field(default_factory=list[str])


def judge(
    listing: Sequence[Listed],
    preset: Preset,
    *,
    quiet_s: float,
    beside: tuple[bytes, float] = (b"", 0.0),
    named_before: Collection[str] = (),
    former: Collection[str] = (),
) -> Verdicts:
    """`beside`: the content of the preset's file beside the checkpoints, and when it was written; `named_before`: what
    it has named since that was last changed. `quiet_s`: since the last write, and how much later than the last file
    another rank may write its own. `former`: the files of one that was adopted."""
    verdicts = Verdicts()
    steps: dict[str, tuple[int, float]] = {}
    named = {beside_name(beside[0]), *named_before}
    paths = {*former, *(path for entry in listing for path in entry.files)} if preset.alike else set[str]()
    alike = {path for path in paths if path.startswith(preset.alike)}
    for entry in listing:
        last = preset.beside or preset.marker or entry.name
        if not is_name(entry.name, preset, is_folder=entry.is_folder):
            verdicts.other.append(entry.name)
        elif why := _unfinished(entry, preset, named) or _lacks(entry, preset, alike):
            verdicts.waiting[entry.name] = why
        elif (step := _step(entry, preset)) is None:
            verdicts.waiting[entry.name] = f"{last} names no step"
        elif entry.modified_s - (beside[1] if preset.beside else entry.marker_modified_s) > quiet_s:
            verdicts.waiting[entry.name] = f"it was written again after {last}"
        elif entry.folder_modified_s - entry.modified_s > _slack_s(preset, quiet_s):
            verdicts.waiting[entry.name] = "files in it were deleted or moved after the last one was written"
        elif entry.unchanged_s < quiet_s:
            verdicts.waiting[entry.name] = f"it has not been unchanged for {quiet_s:g} s yet"
            verdicts.quiet.add(entry.name)
        else:
            steps[entry.name] = step, entry.modified_s
    for name in sorted(steps, key=lambda name: (steps[name][1], steps[name][0])):
        verdicts.complete[name] = steps[name][0]
    return verdicts


def is_name(name: str, preset: Preset, *, is_folder: bool) -> bool:
    """Whether a checkpoint of the preset may be called so."""
    match = preset.pattern.fullmatch(name) if is_folder == preset.is_folder else None
    return match is not None and len(match["step"] or "") <= STEP_DIGITS_MAX


def _slack_s(preset: Preset, quiet_s: float) -> float:
    """How much later than the last write a folder may change: to rename a file into place takes an fsync before."""
    return quiet_s if preset.whole is Whole.PRESENT else FOLDER_SLACK_S


def _step(entry: Listed, preset: Preset) -> int | None:
    match = preset.pattern.fullmatch(entry.name)
    if match is None or match["step"]:
        return int(match["step"]) if match else None
    state = _json(entry.marker or b"") or {}
    step = state.get("global_step", state.get("step"))
    return step if isinstance(step, int) and 0 <= step < 10**STEP_DIGITS_MAX else None


def beside_name(content: bytes) -> str:
    """The checkpoint that the file beside the checkpoints names."""
    return content.decode(errors="replace").strip()


def _unfinished(entry: Listed, preset: Preset, named: Collection[str]) -> str:
    """Why its last file is not written; empty if it is."""
    if preset.whole is Whole.NAMED:
        # Of others it is not known whether they were ever named.
        return "" if entry.name in named else f"{preset.beside} does not name it"
    what = preset.marker or entry.name
    if entry.marker is None:
        return f"{what} is not there yet"
    if preset.whole is Whole.JSON and _json(entry.marker) is None:
        return f"{what} is not whole"
    if preset.whole is Whole.ZIP and not entry.is_whole:
        return f"{what} does not end as an archive of torch.save"
    if preset.whole is Whole.FLAT and (problem := _flat_problem(entry, preset)):
        return problem
    if preset.whole is Whole.FORMAT and entry.is_whole is None:
        return f"whether {what} is whole cannot be seen: set renamed = true if it is renamed into place, or a marker"
    if preset.whole is Whole.FORMAT and not entry.is_whole:
        return f"{what} is not whole"
    return ""


def _lacks(entry: Listed, preset: Preset, alike: set[str]) -> str:
    """Which of its other files is missing or not whole; empty if none is."""
    for need in preset.needs:
        if not any(path.startswith(need) if need.endswith("/") else path == need for path in entry.files):
            return f"{need} is not there yet"
    if entry.is_folder and (missing := sorted(alike - entry.files)):
        return f"{missing[0]}, which others have, is not there yet"
    return f"{entry.cut[0]} is not whole" if entry.cut else ""


def _flat_problem(entry: Listed, preset: Preset) -> str:
    if len(entry.head) < FLAT_HEADER.size:
        return f"{entry.name} has no header yet"
    step, parameters = FLAT_HEADER.unpack_from(entry.head)
    expected = FLAT_HEADER.size + 12 * parameters
    if parameters < 0 or expected != entry.size_bytes:
        return f"{entry.name} has {entry.size_bytes} bytes, its header says {expected}"
    return "" if step == _step(entry, preset) else f"{entry.name} is of step {step}, as its header says"


def is_zip_end(tail: bytes, size_bytes: int) -> bool:
    """Whether a file of this size with these last ZIP_TAIL_BYTES is a whole zip archive without a comment: its
    directory ends where the end begins."""
    if len(tail) < ZIP_TAIL_BYTES:
        return False
    signature, _, _, _, _, directory_bytes, offset, comment_bytes = ZIP_END.unpack(tail[-ZIP_END.size :])
    if signature != b"PK\x05\x06" or comment_bytes:
        return False
    end = size_bytes - ZIP_END.size
    signature, _, zip64_end, _ = ZIP_LOCATOR.unpack(tail[-ZIP_TAIL_BYTES : -ZIP_END.size])
    if signature == b"PK\x06\x07" and zip64_end == end - ZIP_LOCATOR.size - ZIP64_END_BYTES:
        return offset in (0xFFFFFFFF, zip64_end - directory_bytes)
    return offset + directory_bytes == end


def _json(raw: bytes) -> dict[str, object] | None:
    try:
        state = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return state if isinstance(state, dict) else None  # pyright: ignore[reportUnknownVariableType]


def fitting(names: Mapping[str, bool]) -> list[str]:
    """The presets that fit these names, for one that does not. The values say whether a name is that of a folder."""
    return [
        preset.name
        for preset in PRESETS.values()
        if any(is_name(name, preset, is_folder=is_folder) for name, is_folder in names.items())
    ]


def misfit(path: str, names: Mapping[str, bool], preset: Preset) -> Unsupported | None:
    """For a folder without a name of the preset: what was seen and which preset would fit. None where none would."""
    if not (fits := fitting(names)):
        return None
    seen = sorted(name for name, is_folder in names.items() if fitting({name: is_folder}))
    return Unsupported(
        f"watch {path}: nothing there is called as {preset.name} calls checkpoints, such as {preset.example}; "
        f"there is {', '.join(seen[:NAMED_MAX])}",
        hint="this would fit: " + " or ".join(f'preset = "{name}"' for name in fits),
    )
