"""Restores a checkpoint that several nodes adopted together: all their folders merged into one, or that of one node.

The trees are fetched first, because they say which files are needed. A file that several nodes have is fetched once.
"""

from __future__ import annotations

from collections.abc import Iterable

from tierd.cli.replicas import Replicas
from tierd.errors import BadConfig, Corrupt, NotFound
from tierd.format.adopted import merged, nodes_of, tree_file
from tierd.format.manifest import Manifest
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.tier import Tier
from tierd.transfer.adopted_output import AdoptedOutput
from tierd.transfer.adoption import read_tree
from tierd.transfer.atomic_output import AtomicOutput
from tierd.transfer.fetch import Fetch


def check_node(manifest: Manifest, node: int | None) -> None:
    """Raises BadConfig or NotFound unless the node has a part of the checkpoint."""
    if node is None:
        return
    if not manifest.is_adopted or manifest.world_size == 1:
        raise BadConfig(
            f"restore node {node} of {manifest.id}: it is not of several nodes that adopt together",
            hint="leave out --node; --rank N takes the shard of one rank of a snapshot",
        )
    if node >= manifest.world_size:
        raise NotFound(f"restore node {node} of {manifest.id}: it is of nodes 0 to {manifest.world_size - 1}")


class PartsOutput:
    """`node`: the node whose folder is restored; None: merge all. `wanted_bytes`: the size of the files needed."""

    def __init__(
        self, manifest: Manifest, node: int | None, replicas: Replicas, store: DirectoryStore, output: AtomicOutput
    ) -> None:
        self._manifest, self._node = manifest, node
        self._replicas, self._store, self._output = replicas, store, output
        self.wanted_bytes = 0

    async def fetch(self) -> AdoptedOutput:
        """Raises Unsupported where the folders of the nodes do not fit together, and as `Replicas.complete`."""
        manifest, output = self._manifest, self._output
        nodes = nodes_of(manifest) if self._node is None else [self._node]
        if self._node is None and len(nodes) != manifest.world_size:
            raise Corrupt(f"restore {manifest.id}: {manifest.world_size - len(nodes)} of its nodes have no tree")
        await self._fetch(map(tree_file, nodes))
        here = Tier("restored", self._store)
        trees = {node: await read_tree(here, manifest, node) for node in nodes if node is not None}
        try:
            tree = merged(trees, manifest)
        except BaseException:
            output.is_worth_keeping = False
            raise
        await self._fetch(entry.stored_as for entry in tree.files)
        return AdoptedOutput(tree, output.folder / manifest.run / manifest.id.name, output.folder / "adopted")

    async def _fetch(self, names: Iterable[str]) -> None:
        wanted = set(names)
        entries = [entry for entry in self._manifest.files if entry.name in wanted]
        chunks = {entry.name: range(len(entry.chunks)) for entry in entries}
        self._output.check_room(sum(entry.size_bytes for entry in entries))
        fetch = Fetch(self._manifest, self._store, wanted=chunks)
        await self._replicas.complete(fetch, self._output, f"step {self._manifest.step}")
        await fetch.finish()
        self.wanted_bytes += fetch.wanted_bytes
