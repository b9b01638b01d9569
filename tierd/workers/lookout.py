"""Checks one file of a cold tier every half minute, and has the tier listed when the file cannot be read.

A listing costs a request per 1000 keys, so a tier is listed every ten minutes; until then nobody would know that its
server is down or that somebody emptied it. A look is one HEAD. It decides nothing: the listing that follows finds the
tier unreachable or the checkpoints lost or damaged, as always. Only where the tier answers nothing at all, the look
itself notes it as not known: a listing finds that after several timeouts of a request.
"""

from __future__ import annotations

from tierd.context import DaemonContext
from tierd.errors import NotFound, TierdError
from tierd.format import layout
from tierd.format.manifest import Manifest
from tierd.tiers.pool import while_answered
from tierd.tiers.tier import Tier

SILENCE_SHARE = 3  # one of so many parts of a request's timeout without any answer is silence; 20 s by default


class Lookout:
    """Checks the newest checkpoint of each run in turn, because no daemon's policy deletes it: its manifest, and
    every second time one of its other files. A node that does not list the tier checks only its own runs: of others it
    knows one that was the newest and may be deleted."""

    name = "list"
    is_urgent = False

    def __init__(self, context: DaemonContext, tier: Tier) -> None:
        self.interval_s = context.config.limits.cold_look_interval_s
        self._context = context
        self._tier = tier
        self._turn = 0
        self._doubted: set[str] = set()  # keys that a look has not found, or not read; the tier was listed since
        self._silence = ""  # what the last look without an answer has noted

    async def run_once(self) -> bool:
        catalog, name = self._context.catalog, self._tier.name
        if not catalog.tiers[name].is_known:
            if catalog.tiers[name].error != self._silence:  # else no listing has ended since
                self._doubted.clear()  # the look was right
            return True  # the lister tries again by itself
        runs = catalog.runs() if self._context.lists_cold else sorted(self._context.runs_here)
        newest = [manifest for run in runs if (manifest := catalog.newest(run, name)) is not None]
        folders = tuple(layout.checkpoint_prefix(manifest.id) for manifest in newest)
        self._doubted = {key for key in self._doubted if key.startswith(folders)}
        if not newest:
            return True
        key = self._key(newest[self._turn % len(newest)], self._turn // len(newest))
        self._turn += 1
        store, silence_s = self._tier.store, self._context.config.limits.request_timeout_s / SILENCE_SHARE

        def note_silence() -> None:
            if key not in self._doubted:
                self._silence = f"look at {key} in {store.url}: no valid answer for {silence_s:.3g} s"
                catalog.listing_failed(name, self._silence)
            self._doubt(key, is_wrong=False)

        request = store.stored_checksum(key)
        try:
            await while_answered(request, lambda: store.answered_s, silence_s=silence_s, on_silence=note_silence)
        except (TierdError, TimeoutError) as error:
            # A node that is not home looks at the newest checkpoint, but not at each file of it.
            self._doubt(key, is_wrong=isinstance(error, NotFound) and not key.endswith(layout.MANIFEST))
        else:
            self._doubted.discard(key)
        return True

    def _doubt(self, key: str, *, is_wrong: bool) -> None:
        """A server that lists what it does not find, or that refuses a HEAD, is not listed each time."""
        if key not in self._doubted:
            self._doubted.add(key)
            self._context.notify.relist(self._tier.name, is_wrong=is_wrong)

    def _key(self, manifest: Manifest, turn: int) -> str:
        key = layout.manifest_key(manifest.id)
        if turn % 2 == 0 or key in self._doubted or not manifest.files:
            return key
        return layout.file_key(manifest.id, manifest.files[turn // 2 % len(manifest.files)].name)
