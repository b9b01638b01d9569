"""Which node keeps the copy of which node's part: its partner. Pure: all ranks come to the same answer.

Nodes are sorted by (domain, lowest rank) and divided into two halves; the i-th of one is the partner of the i-th of the
other. So partners are in different domains, such as racks, unless one domain has more than half of the nodes. Of an odd
number the last three form a ring. Pairs lose fewer parts than a ring over all: a part is lost only with both of a pair.
"""

from __future__ import annotations

from collections.abc import Mapping


def partners(domains: Mapping[int, str]) -> dict[int, int]:
    """For each node the one that keeps its copy. `domains`: of each node, which is known by its lowest rank; empty
    where none is configured. Without a second node nobody keeps a copy."""
    nodes = sorted(domains, key=lambda lowest: (domains[lowest], lowest))
    ring = nodes[-3:] if len(nodes) % 2 else []
    paired = nodes[: len(nodes) - len(ring)]
    half = len(paired) // 2
    keeps = dict(zip(paired, paired[half:] + paired[:half], strict=True))
    if len(ring) == 3:
        keeps |= dict(zip(ring, ring[1:] + ring[:1], strict=True))
    return keeps
