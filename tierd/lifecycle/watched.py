"""Which checkpoints in a watched folder are complete, and of which step: a pure function of a listing.

That the files exist proves nothing. A preset names the file that its framework writes last. That file must be whole:
JSON that can be parsed, or a zip archive with its end, as torch.save writes it. Three more conditions hold:
- Nothing has changed for a while, because other ranks may still write.
- Nothing was written long after the last file. A save over an older checkpoint finds the last file of that one.
- Nothing was deleted after the last write. The framework may have been killed while it deleted an old checkpoint.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from tierd.config.sections import WatchConfig
from tierd.errors import Corrupt, Unsupported
from tierd.format import flat_file
from tierd.format.text import listed

# APPNOTE.TXT 4.3.15 and 4.3.16: the locator of the zip64 end, and the end. torch.save writes no comment after it.
ZIP_LOCATOR = struct.Struct("<4sIQI")
ZIP_END = struct.Struct("<4s4H2IH")
ZIP_TAIL_BYTES = ZIP_LOCATOR.size + ZIP_END.size
ZIP64_END_BYTES = 56
STEP_DIGITS_MAX = 12
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
    ANNOUNCED = "announced"  # it is on node 0 alone, whose daemon announces the checkpoint to the other nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """How a framework names and writes checkpoints. `pattern`: of the names, with the group `step`; where the group is
    empty, the marker has the step. `marker`: the file in the checkpoint that is written last; empty: the entry itself,
    or with NAMED the file `beside` the checkpoints. `needs`: files that a checkpoint must have, and folders, with a
    slash at the end, that must have a file. `alike`: a prefix of file names. These files are written after the marker,
    and a checkpoint must have those that other checkpoints have. `example`: a name that fits."""

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
        """The step in the name; 0 if there is none."""
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
    """The preset that the watch names, with the watch's marker if it has one; else a preset made from its pattern."""
    if watch.preset:
        preset = PRESETS[watch.preset]
        if not watch.marker:
            # DCP's coordinator, which is rank 0, renames .metadata when all ranks have written.
            is_elsewhere = watch.node > 0 and preset.marker == _DCP.marker
            return replace(preset, marker="", whole=Whole.ANNOUNCED) if is_elsewhere else preset
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
        pattern=re.compile(expression, re.DOTALL),  # a name may have a line break
        is_folder=watch.pattern.endswith("/"),
        marker=watch.marker,
        whole=Whole.JSON if watch.marker.endswith(".json") else whole,
        example=watch.pattern,
    )


def _suffix(name: str) -> str:
    return name.rpartition(".")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """An entry of the watched folder. `modified_s`: the time of the newest file in it; `folder_modified_s`: of the
    newest folder. `unchanged_s`: for how long no change was seen. `files`: paths of the files in it. `marker`: the
    content of the preset's marker if it is JSON, else empty; None if there is no marker. `marker_modified_s`: when the
    marker was written. `is_whole`: whether the marker ends as its format says; None: unknown. The marker of a single
    file is the file itself, and `head` has its first bytes. `cut`: files in a folder that are shorter than their format
    says."""

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
    """`complete`: the step of each complete entry by name, oldest first. `waiting`: why an entry is not complete, by
    name. `quiet`: those of `waiting` that only have to stay unchanged for a while. `other`: names that do not fit the
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
    """Which entries are complete. `quiet_s`: for how long an entry must be unchanged, and how much later than the last
    file another rank may write its own. `beside`: the content of the preset's file beside the checkpoints, and when it
    was written. `named_before`: the entries that this file has named and that have not changed since. `former`: the
    files of a checkpoint that was adopted."""
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
            verdicts.waiting[entry.name] = f"it must be unchanged for {quiet_s:g} s first"
            verdicts.quiet.add(entry.name)
        else:
            steps[entry.name] = step, entry.modified_s
    for name in sorted(steps, key=lambda name: (steps[name][1], steps[name][0])):
        verdicts.complete[name] = steps[name][0]
    return verdicts


def is_name(name: str, preset: Preset, *, is_folder: bool) -> bool:
    """Whether a checkpoint of the preset can have this name."""
    match = preset.pattern.fullmatch(name) if is_folder == preset.is_folder else None
    return match is not None and len(match["step"] or "") <= STEP_DIGITS_MAX


def _slack_s(preset: Preset, quiet_s: float) -> float:
    """How much later than the last write a folder may change. A rename into place follows the write and an fsync."""
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
    """Why the last file of the entry is not there or not whole; empty if it is whole."""
    if preset.whole is Whole.NAMED:
        # It is not known whether the file has named the other entries earlier.
        return "" if entry.name in named else f"{preset.beside} does not name it"
    if preset.whole is Whole.ANNOUNCED:
        return ""
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
        return f"{what} does not show whether it is whole: set a marker, or renamed = true if it is renamed into place"
    if preset.whole is Whole.FORMAT and not entry.is_whole:
        return f"{what} is not whole"
    return ""


def _lacks(entry: Listed, preset: Preset, alike: set[str]) -> str:
    """Which other file of the entry is missing or not whole; empty if none is."""
    for need in preset.needs:
        if not any(path.startswith(need) if need.endswith("/") else path == need for path in entry.files):
            return f"{need} is not there yet"
    if entry.is_folder and (missing := sorted(alike - entry.files)):
        return f"{missing[0]} is not there yet; other checkpoints have it"
    return f"{entry.cut[0]} is not whole" if entry.cut else ""


def _flat_problem(entry: Listed, preset: Preset) -> str:
    try:
        step, _ = flat_file.parse_header(entry.head, entry.size_bytes, where=entry.name)
    except Corrupt as error:
        return error.message
    return "" if step == _step(entry, preset) else f"{entry.name} is of step {step}, as its header says"


def is_zip_end(tail: bytes, size_bytes: int) -> bool:
    """Whether a file of this size with these last ZIP_TAIL_BYTES is a whole zip archive without a comment: the central
    directory ends where the end record begins."""
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
    """The presets that fit at least one of these names. The values say whether a name is that of a folder."""
    return [
        preset.name
        for preset in PRESETS.values()
        if any(is_name(name, preset, is_folder=is_folder) for name, is_folder in names.items())
    ]


def misfit(what: str, names: Mapping[str, bool], preset: Preset, *, hint: str = 'preset = "{}"') -> Unsupported | None:
    """The error for a folder where no name fits the preset: the names, and the presets that fit. None if none fits.
    `what`: is done to which folder. `hint`: how a preset is set there."""
    if not (fits := fitting(names)):
        return None
    fitting_names = sorted(name for name, is_folder in names.items() if fitting({name: is_folder}))
    return Unsupported(
        f"{what}: {nothing_fits(preset)}; there is {listed(fitting_names)}",
        hint="this would fit: " + " or ".join(hint.format(name) for name in fits),
    )


def nothing_fits(preset: Preset) -> str:
    if preset.name not in PRESETS:
        return f"no name there fits the pattern {preset.name}"
    return f"no name there fits the preset {preset.name}, as {preset.example} would"
