"""The replicas of the selected checkpoint: each in turn gives a fetch what the ones before could not.

lifecycle/selection gives their order. All must have the same manifest. A replica that is damaged or out of reach is
reported; the chunks that came from it and verified stay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from types import MappingProxyType

from tierd.access import PRIVATE
from tierd.catalog.listing import check_sizes
from tierd.cli.console import print_note, progress_bar, size
from tierd.cli.memory_store import ask_memory
from tierd.config.sections import Config
from tierd.errors import Corrupt, TierdError
from tierd.format import layout
from tierd.format.ids import AUTO, MEMORY
from tierd.format.manifest import Manifest
from tierd.lifecycle.selection import CheckpointQuery, SelectableReplicas, select
from tierd.tiers.readable_tier import ReadableTier
from tierd.tiers.tier import Tier
from tierd.transfer.atomic_output import AtomicOutput
from tierd.transfer.fetch import Fetch


class Replicas(AsyncExitStack):
    """`passed_over`: the tiers that could not give all that was asked of them, and why. `given_bytes`: by tier.
    `access`: of what is restored. `manifest` and its bytes `raw`: once one replica was opened."""

    manifest: Manifest

    def __init__(
        self,
        query: CheckpointQuery,
        inventory: SelectableReplicas,
        tiers: Mapping[str, ReadableTier],
        config: Config | None,
    ) -> None:
        super().__init__()
        selected = select(query, inventory)
        for reason in selected.passed_over:
            print_note(f"tierd: passed over: {reason}")
        self.chosen = selected.candidate
        self.passed_over: dict[str, TierdError] = {}
        self.given_bytes: dict[str, int] = {}
        self.raw = b""
        self._query = query
        self._inventory = inventory
        self._tiers = tiers
        self._config = config
        self.access = config.access if config else PRIVATE
        self._opened: dict[str, ReadableTier] = {}
        self._unusable: dict[str, TierdError] = {}

    async def complete(self, fetch: Fetch, output: AtomicOutput, title: str) -> None:
        """Fetch until nothing is missing. Raises the gravest error when all replicas together cannot give it."""
        failed: dict[str, TierdError] = {}
        try:
            with progress_bar("checking what is there", output.taken_bytes) as progress:
                await fetch.begin(progress)
            while missing_bytes := fetch.missing_bytes:
                tier = await self.nearest(failed, fetch)
                wanted_bytes = fetch.wanted_bytes
                done_bytes = wanted_bytes - missing_bytes
                with progress_bar(f"{title} from {tier.name}", wanted_bytes, done_bytes=done_bytes) as progress:
                    error = await fetch.take(tier, progress)
                if given_bytes := missing_bytes - fetch.missing_bytes:
                    self.given_bytes[tier.name] = self.given_bytes.get(tier.name, 0) + given_bytes
                if error is not None:
                    failed[tier.name] = error
                    if not isinstance(error, Corrupt):  # a damaged replica may give the chunks of the next fetch
                        self._unusable[tier.name] = error
                    self._report(tier.name, error)
        finally:
            output.is_worth_keeping = output.is_worth_keeping or fetch.missing_bytes < fetch.wanted_bytes

    async def nearest(
        self, failed: Mapping[str, TierdError] = MappingProxyType({}), fetch: Fetch | None = None
    ) -> ReadableTier:
        """The nearest replica that has not failed, opened. Raises the gravest error when all have."""
        while True:
            errors = {(self.chosen.id, name): error for name, error in {**failed, **self._unusable}.items()}
            try:
                name = select(self._query, self._inventory, errors).tier
            except TierdError as error:
                raise self._refusal(error, fetch) from error
            if name in self._opened:
                return self._opened[name]
            try:
                self._opened[name] = await self._open(name)
            except TierdError as error:
                self._unusable[name] = error
                self._report(name, error)

    async def _open(self, name: str) -> ReadableTier:
        if name == MEMORY and self._config is not None:
            store = await asyncio.to_thread(ask_memory, self._config, self.chosen.id)
            self.push_async_callback(store.close)
            tier: ReadableTier = ReadableTier(MEMORY, store)
        else:
            tier = self._tiers[name]
        manifest, raw = await tier.read_manifest(layout.manifest_key(self.chosen.id))
        if isinstance(tier, Tier):
            await check_sizes(manifest, tier)
            if tier.keyring is None and manifest.signature:
                print_note(f"tierd: the signature of {self.chosen.id} in {name} is not checked: there is no key file")
        if raw != (self.raw or raw):
            raise Corrupt(f"read {self.chosen.id} in {name}: its manifest differs from that of the nearer replicas")
        self.raw, self.manifest = raw, manifest
        return tier

    async def marker(self, key: str) -> bytes | None:
        """The bytes of a marker in the nearest tier that has it; with a key, of one that it has signed. None where no
        tier has one."""
        for name in self.chosen.tiers:
            if name in self._tiers:
                with suppress(TierdError):
                    return await self._tiers[name].marker_bytes(key)
        return None

    @property
    def has_key(self) -> bool:
        return any(tier.keyring is not None for tier in self._tiers.values())

    def _report(self, name: str, error: TierdError) -> None:
        if name not in self.passed_over:
            self.passed_over[name] = error
            if self._query.tier == AUTO and len(self.chosen.tiers) > 1:  # else the refusal says it
                print_note(f"tierd: {name} cannot give all of {self.chosen.id}: {error.message}")

    def _refusal(self, error: TierdError, fetch: Fetch | None) -> TierdError:
        missing = f"{size(fetch.missing_bytes)} of {size(fetch.wanted_bytes)}" if fetch else "its manifest"
        hint = "`tierd ls` shows older steps; --step takes one; docs/RUNBOOK.md#corrupt-chunk"
        if isinstance(error, Corrupt) and self._query.tier != AUTO:
            hint = "--tier auto goes on with the next tier that has it; " + hint
        return type(error)(f"restore {self.chosen.id}: no replica gives {missing}: {error.message}", hint=hint)
