"""What a preset, or a pattern and a marker, of other programs' checkpoints must be: of [[watch]] and `tierd adopt`.

Commands also run where the number of the node is not known, as on the login node of a cluster; the daemon needs it.
"""

from __future__ import annotations

from collections.abc import Iterator

from tierd.config.sections import Config, WatchConfig
from tierd.errors import BadConfig


def watch_mistakes(watch: WatchConfig) -> Iterator[tuple[str, object, str]]:
    """What is wrong with its preset, or with its pattern and marker: (key, value, what is expected)."""
    if bool(watch.preset) == bool(watch.pattern):
        yield "preset", watch.preset, "a preset or a pattern, one of the two"
    if watch.pattern and (expected := _pattern_problem(watch.pattern)):
        yield "pattern", watch.pattern, expected
    is_folder = watch.pattern.endswith("/") if watch.pattern else watch.preset not in ("lightning", "step-bin")
    if watch.pattern and is_folder and not watch.marker and not watch.renamed:
        expected = "the file that is written last, or renamed = true if the folder is renamed into place"
        yield "marker", watch.marker, expected
    if watch.marker and (not is_folder or watch.marker.startswith("/")):
        yield "marker", watch.marker, "a path in a checkpoint that is a folder"
    if watch.renamed and (watch.preset or watch.marker):
        yield "renamed", watch.renamed, "false with a preset or a marker"
    if watch.nodes > 1 and not is_folder:
        yield "nodes", watch.nodes, "1 where a checkpoint is a single file"
    if watch.nodes > 1 and watch.node >= watch.nodes:
        yield "node", watch.node, f"0 to {watch.nodes - 1}"
    if watch.nodes == 1 and watch.node > 0:
        yield "node", watch.node, "left out without nodes"


def _pattern_problem(pattern: str) -> str:
    """What is expected of a pattern instead; empty if nothing is."""
    name = pattern.removesuffix("/")
    if pattern.count("{step}") != 1:
        return "{step} once, where the number is"
    if "/" in name or "\0" in name:
        return "the name of a file, or of a folder with one slash at the end"
    return ""


def check_nodes(config: Config) -> None:
    """Raises BadConfig if this process cannot be the daemon of this config: it is not said which node this is."""
    for watch in config.watch:
        if watch.nodes > 1 and watch.node < 0:
            raise BadConfig(
                f"watch {watch.path}: it is not said which of the {watch.nodes} nodes this is",
                hint=f"set node = 0 to {watch.nodes - 1} in [[watch]], or start it under Slurm: it sets SLURM_NODEID",
            )
