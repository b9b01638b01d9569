"""Chooses for each node its partner: the node whose part it copies. Pure, so that all ranks compute the same.

Nodes are sorted by (domain, lowest rank) and divided into two halves; the i-th node of one half and the i-th of the
other are partners. So partners are in different domains, such as racks, unless one domain has more than half of the
nodes. If the number of nodes is odd, the middle node forms a ring with one of the pairs, if possible a pair of two
other domains. Pairs are better than one ring of all nodes: two lost nodes lose parts only if they are partners.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from tierd.descriptors import close_all, sealed_memory
from tierd.format import layout, wire
from tierd.format.peers import NodeAddress, PeerAddress
from tierd.format.text import listed
from tierd_client.log import log
from tierd_client.ranks import Ranks
from tierd_client.session import DaemonSession

NODES_SHOWN = 8  # in a warning


def partners(domains: Mapping[int, str]) -> dict[int, int]:
    """For each node, the node that keeps the copy of its part. A node is named by its lowest rank. `domains`: the
    domain of each node; empty if none is configured. With one node there are no copies."""
    nodes = sorted(domains, key=lambda lowest: (domains[lowest], lowest))
    half = len(nodes) // 2
    first, middle, second = nodes[:half], nodes[half : len(nodes) - half], nodes[len(nodes) - half :]
    keeps = dict(zip([*first, *second], [*second, *first], strict=True))
    if middle and first:
        (odd,) = middle
        # Such a pair exists unless a domain has more than half: the middle one's domain ends before one of the pairs.
        pairs = list(zip(first, second, strict=True))
        left, right = next((pair for pair in pairs if domains[odd] not in map(domains.__getitem__, pair)), pairs[-1])
        keeps |= {left: odd, odd: right, right: left}
    return keeps


class _Node(msgspec.Struct, frozen=True, kw_only=True):
    ranks: list[int]
    peer: PeerAddress | None
    domain: str
    lifecycle: str


def find_partner(
    ranks: Ranks, node: wire.NodeRanks, welcome: wire.Welcome
) -> tuple[wire.Partner | None, list[NodeAddress]]:
    """All ranks call this. Returns what the lowest rank of this node tells its daemon: the node whose parts it copies,
    None if it copies none, and the roster of all nodes. `welcome`: of this rank's daemon."""
    own = b""
    if ranks.rank == node.ranks[0]:
        own = msgspec.msgpack.encode(
            _Node(ranks=node.ranks, peer=welcome.peer, domain=welcome.domain, lifecycle=welcome.lifecycle)
        )
    nodes = {rank: msgspec.msgpack.decode(raw, type=_Node) for rank, raw in enumerate(ranks.gather(own)) if raw}
    peers = {lowest: each.peer for lowest, each in nodes.items() if each.peer is not None}
    domains = {lowest: nodes[lowest].domain for lowest in peers}
    if ranks.rank == 0:
        _warn_of_domains(domains, nodes=len(node.lowest))
        _warn_of_lifecycles({lowest: each.lifecycle for lowest, each in nodes.items()})
        _warn_of_tls(peers)
    roster = [NodeAddress(ranks=each.ranks, peer=each.peer) for each in nodes.values()]
    kept_by = partners(domains)
    for owner, keeper in kept_by.items():
        if keeper == node.ranks[0]:
            name = layout.node_file_name(owner, ranks.world_size)
            return wire.Partner(peer=peers[owner], node_file=name, lifecycle=nodes[owner].lifecycle), roster
    return None, roster


def send_roster(session: DaemonSession, nodes: Sequence[NodeAddress]) -> None:
    """Send the nodes in a memfd: the addresses of 2,048 nodes do not fit into a message."""
    descriptor = sealed_memory("tierd-nodes", msgspec.json.encode(nodes))
    try:
        session.send(wire.Roster(), [descriptor])
    finally:
        close_all([descriptor])


def _warn_of_lifecycles(lifecycles: Mapping[int, str]) -> None:
    """`lifecycles`: the digest of each node's lifecycle, by its lowest rank."""
    others = [lowest for lowest, each in lifecycles.items() if each and each != lifecycles[0]]
    if others:
        log.warning(
            "tierd: the lifecycle in the config of %d of %d nodes differs from that of rank 0's node, which counts in "
            "cold tiers: the nodes of ranks %s",
            len(others), len(lifecycles), listed(others, NODES_SHOWN),
        )  # fmt: skip


def _warn_of_tls(peers: Mapping[int, PeerAddress]) -> None:
    """Warn if only some nodes have TLS: they read nothing from the others."""
    plain = [lowest for lowest, peer in peers.items() if not peer.fingerprint]
    if 0 < len(plain) < len(peers):
        log.warning(
            "tierd: %d of %d nodes have no peers.tls in their config, and the others read nothing from them: the nodes "
            "of ranks %s",
            len(plain), len(peers), listed(plain, NODES_SHOWN),
        )  # fmt: skip


def _warn_of_domains(domains: Mapping[int, str], *, nodes: int) -> None:
    """Warn if the loss of one domain, or of one node, loses parts."""
    largest, count = max(Counter(domains.values()).items(), key=lambda each: each[1], default=("", 0))
    if largest and 2 * count > len(domains):
        log.warning(
            "tierd: %d of %d nodes are in domain %s: some have their partner there, and both may be lost with it",
            count, len(domains), largest,
        )  # fmt: skip
    if 0 < len(domains) < nodes:
        log.warning(
            "tierd: %d of %d nodes have no peers.listen in their config: no other node copies their parts",
            nodes - len(domains), nodes,
        )  # fmt: skip
