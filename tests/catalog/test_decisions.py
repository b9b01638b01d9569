"""Where deletion is halted. What the lifecycle decides is tested through the workers that carry it out."""

from __future__ import annotations

from tests.support.cli import make_manifest
from tierd.catalog.catalog import Catalog
from tierd.catalog.decisions import Halt, HaltReason, halted
from tierd.format.ids import checkpoint_id
from tierd.format.manifest import file_entry
from tierd.metrics import HALT_REASONS


def test_metric_has_a_label_for_each_reason() -> None:
    assert tuple(HaltReason) == HALT_REASONS


def test_halt_names_reason_tier_and_run() -> None:
    catalog = Catalog(["hot", "cold"])
    checkpoint = checkpoint_id("run42", 100, 1)
    files = [file_entry("rank-00000-of-00001.safetensors", 10, 4096, [1])]
    catalog.enter_listing("hot", {}, {checkpoint: "torn"}, since=catalog.changes)
    catalog.add(make_manifest(checkpoint, files), "cold")
    catalog.damaged(checkpoint, "cold", "chunk 1")
    catalog.listing_failed("cold", "503")
    halts = halted(catalog)
    assert halts == [
        Halt(HaltReason.UNREADABLE_MANIFEST, "hot", checkpoint.run, "torn"),
        Halt(HaltReason.DAMAGED_REPLICA, "cold", checkpoint.run, "chunk 1"),
        Halt(HaltReason.TIER_UNREACHABLE, "cold", None, "503"),
    ]
    assert [str(halt) for halt in halts][1:] == ["damaged_replica: chunk 1", "tier_unreachable: 503"]
