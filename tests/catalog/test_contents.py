"""What a catalog answers about the contents of its tiers: the newest, the sizes, and what is unhealthy."""

from __future__ import annotations

from tests.catalog.test_catalog import manifest_of
from tierd.catalog.catalog import Catalog
from tierd.catalog.contents import Contents
from tierd.format.ids import Run

RUN = Run("run42")


def test_the_newest_of_a_tier_is_not_one_that_is_unhealthy() -> None:
    catalog = Catalog(["hot", "cold"])
    assert isinstance(catalog, Contents)
    first, second, third = (manifest_of(step, sequence=step) for step in (100, 200, 300))
    for manifest in (second, first, third):
        catalog.add(manifest, "hot")
    catalog.add(first, "cold")
    catalog.diagnosed(third.id, "hot", is_healthy=False)
    assert [entry.id.step for entry in catalog.entries()] == [300, 200, 100]
    assert (catalog.newest(RUN, "hot"), catalog.newest(RUN, "cold")) == (second, first)
    assert catalog.unhealthy(RUN) == [third.id]
    newest = catalog.newest_entry(RUN)
    assert newest is not None
    assert newest.id == third.id
    assert catalog.sizes("cold") == {first.id: first.size_bytes}
    assert catalog.used_bytes("hot") == first.size_bytes + second.size_bytes + third.size_bytes
    assert catalog.sequence_max(RUN) == 300


def test_a_run_without_checkpoints_has_nothing() -> None:
    catalog = Catalog(["hot", "cold"])
    assert (catalog.newest(RUN, "hot"), catalog.newest_entry(RUN), catalog.newest_part(RUN)) == (None, None, None)
    assert (catalog.unhealthy(RUN), catalog.parts(RUN), catalog.sequence_max(RUN)) == ([], [], 0)
