"""Which stored entry each entry of the state gets, and the report of what was loaded, left over or missing."""

from __future__ import annotations

from collections.abc import Collection

from tierd.errors import BadConfig
from tierd_client.state.restore_filter import RestoreFilter, StoredEntries
from tierd_client.state.restore_report import RestoreReport


class EntrySelection:
    """`sources`: the stored entries that are asked for, by their names in the state. `differences` has one sentence for
    each reason to refuse."""

    def __init__(self, entries: StoredEntries, filter: RestoreFilter) -> None:
        self.differences: list[str] = []
        self.filter = filter
        self.report = RestoreReport()
        self._entries = entries
        self.sources = self._select()
        self._taken: set[str] = set()
        self._kept: set[str] = set()

    def _select(self) -> dict[str, str]:
        """The stored entries that are asked for, by their names in the state."""
        entries = self._entries.tensors
        if self.filter.is_exact:
            return dict(zip(entries, entries, strict=True))
        sources: dict[str, str] = {}
        for entry in entries:
            if not self.filter.takes(entry):
                self.report.not_asked.append(entry)
                continue
            name = self.filter.destination(entry, has_optimizers=self._entries.has_optimizers)
            other = sources.setdefault(name, entry)
            if other != entry:
                self.differences.append(f"rename: {other} and {entry} both become {name}")
        return sources

    def take(self, name: str) -> str | None:
        """The stored entry to restore into the entry `name` of the state, which counts as restored from now on. None
        when the filter keeps `name` or does not ask for it, or the checkpoint lacks it; the report says which."""
        if self.keep(name, name):
            return None
        if name in self.sources:
            self._taken.add(name)
            return self.sources[name]
        if self.filter.takes(name):
            self.miss(name)
        return None

    def keep(self, name: str, entry: str) -> bool:
        """Whether the filter keeps the entry `name` of the state. `entry`: the name of the stored one in `sources`,
        which then counts as used."""
        if not self.filter.keeps(name):
            return False
        self.report.kept.append(name)
        self._kept.add(entry)
        return True

    def keep_section(self, section: str) -> bool:
        """Whether all entries of a section stay as they are by request."""
        names = [name for name in self.sources if name.startswith(f"{section}.")]
        if not names or not all(map(self.filter.keeps, names)):
            return False
        return all(self.keep(name, name) for name in names)

    def use(self, name: str) -> None:
        """Records that the entry was restored without `take`."""
        self._taken.add(name)

    def take_section(self, section: str) -> None:
        """Records that a section was restored as a whole, so that none of its entries is left over."""
        self._taken.update(name for name in self.sources if name == section or name.startswith(f"{section}."))

    def has_source(self, section: str) -> bool:
        """Whether an entry of this section of the state is asked for and stored."""
        return section in self.sources or any(name.startswith(f"{section}.") for name in self.sources)

    def miss(self, name: str) -> None:
        """Records that the checkpoint has no entry `name`: a difference if the filter is strict."""
        if self.filter.strict:
            self.differences.append(f"{name}: not in the checkpoint")
        else:
            self.report.missing.append(name)

    def mismatch(self, name: str, why: str) -> None:
        """Records that the stored entry does not fit, and why: a difference if the filter is strict."""
        if self.filter.strict:
            self.differences.append(f"{name}: {why}")
        else:
            self.report.mismatched[name] = why

    def complete_report(self, strict_sections: Collection[str]) -> None:
        """Adds the differences of entries without a place in `strict_sections`, and reports the others."""
        report, optional = self.report, self._entries.optional
        for name, entry in self.sources.items():
            if name in self._taken and name not in report.mismatched:
                report.loaded.append(name)
                if name != entry:
                    report.renamed[entry] = name
            elif name not in self._taken and name not in self._kept and entry not in optional:
                section = next((section for section in strict_sections if name.startswith(f"{section}.")), "")
                if self.filter.strict and section:
                    self.differences.append(f"{name}: in the checkpoint, not in the {section.split('.')[0]}")
                else:
                    report.left_over.append(entry)
        if not self.filter.is_exact:
            kept = self.filter.keep if optional else report.kept  # a pipeline stage may be on another rank
            if wrong := self.filter.unused(self._entries.tensors, kept, self.sources):
                raise BadConfig(
                    f"restore: {'; '.join(wrong)}; nothing was changed",
                    hint="docs/guides/fine-tune.md has the names of entries",
                )
            if not report.loaded and not self.differences and not optional:
                self.differences.append("nothing of the checkpoint would be loaded")
