"""Checks watched folders for `tierd doctor`: whether they can be read, and whether the preset fits the names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tierd.config.sections import Config, WatchConfig
from tierd.errors import NotFound, TierdError
from tierd.lifecycle.watched import is_name, misfit, preset_of
from tierd.tiers.probe import Advice, problem_of
from tierd.transfer.watched_folder import names


def check_watches(config: Config) -> Iterator[Advice]:
    """Blocks."""
    for watch in config.watch:
        yield _check(watch)


def _check(watch: WatchConfig) -> Advice:
    preset = preset_of(watch)
    try:
        folders = names(Path(watch.path)).folders
    except NotFound:
        message = f"{watch.path} does not exist yet: the daemon waits for it"
        return Advice("watch", "watch", "note", message, "is the path right? It counts from the folder of the config")
    except TierdError as error:
        return problem_of("watch", "watch", error)
    path = Path(watch.path)
    found = sum(is_name(name, preset, is_folder=is_folder) for name, is_folder in folders.items())
    if found:
        message = f"{path} has {found} checkpoint{'' if found == 1 else 's'} by the names, as {preset.example}"
        return Advice("watch", "watch", "ok", message)
    if is_name(path.name, preset, is_folder=True):
        message = f"{path} is a checkpoint by its name, and no checkpoint is in it"
        return Advice("watch", "watch", "problem", message, f"the path of their folder is {path.parent}")
    if error := misfit(f"watch {path}", folders, preset):
        return problem_of("watch", "watch", error)
    return Advice("watch", "watch", "note", f"{path} has no checkpoint yet, such as {preset.example}")
