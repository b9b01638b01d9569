"""Names the sidecar files of a run after `tierd restore`, or restores them too.

Without them, the resumed run would begin these files anew, and the user may not know that the tiers have them.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path

from tierd.access import Access
from tierd.cli.console import print_note
from tierd.cli.opened_tiers import OpenedTiers
from tierd.cli.sidecars import SidecarVersion, Stored, stored_sidecars, write_newest, written_lines
from tierd.errors import TierdError
from tierd.format.ids import Run
from tierd.format.text import listed


@dataclass(slots=True, kw_only=True)
class SidecarRestore:
    """`into`: where to write the files; None: only name them. `tier`, `place`: what the restore was limited to."""

    into: Path | None
    tier: str | None
    place: str | None
    written: list[SidecarVersion] = field(default_factory=list[SidecarVersion])
    names: list[str] = field(default_factory=list[str])
    error: TierdError | None = None
    """Why they were not written, while the checkpoint was restored."""

    async def run(self, tiers: OpenedTiers, run: Run, access: Access) -> list[str]:
        """The names of the files, without those that belong to a phase of the run."""
        try:
            stored: Stored = {key: each for key, each in (await stored_sidecars(tiers, [run])).items() if not key[1]}
            self.names = sorted({key[2] for key in stored})
            if self.into is not None:
                self.written = await write_newest(tiers, stored, self.into, access)
        except TierdError as error:
            self.error = error
        return self.names

    def report(self, run: str) -> None:
        """Print one line, or the written files, on stderr. Raises the error of `run` if the files were asked for."""
        if self.error is not None and self.into is not None:
            raise self.error
        if self.error is not None:
            print_note(f"tierd: whether {run} has files beside its checkpoints is not known: {self.error.message}")
        elif self.into is not None:
            lines = written_lines(self.written, self.into) or [f"no sidecar file of {run} is in these tiers"]
            print_note(*(f"tierd: {line}" for line in lines))
        elif self.names:
            where = f" --tier {self.tier}" if self.tier else f" --from {shlex.quote(self.place)}" if self.place else ""
            print_note(
                f"tierd: {run} has files beside its checkpoints: {listed(self.names)}; "
                f"`tierd sidecars --run {run}{where} --into FOLDER` gives them back, and replaces none"
            )
