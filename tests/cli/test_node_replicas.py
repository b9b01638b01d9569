"""`tierd restore` of a checkpoint of which the node has only a part: the rest comes from copies and other nodes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.support.handmade_nodes import HandmadeNodes, handmade_nodes, layout_name, shard


def restore(nodes: HandmadeNodes, at: int, target: Path, *arguments: str) -> Any:
    """As node `at`."""
    done = nodes.daemons[at].tierd("restore", "--run", "run", "--to", target, "--json", *arguments)
    return done.returncode, json.loads(done.stdout) if done.returncode == 0 else {}, done.stderr


def assert_whole(target: Path, step: int, ranks: int) -> None:
    names = {f"rank-{rank:05d}-of-{ranks:05d}.safetensors" for rank in range(ranks)}
    assert {path.name for path in target.iterdir()} >= {"manifest.json", *names}
    for rank, name in enumerate(sorted(names)):
        assert (target / name).read_bytes() == shard(step, rank)


def assert_nothing(target: Path) -> None:
    assert not target.exists()


def test_parts_of_all_nodes_are_one_checkpoint_and_what_is_missing_is_named(tmp_path: Path) -> None:
    with handmade_nodes(tmp_path, 4) as nodes:
        nodes.save(1)
        nodes.save(2)
        code, restored, noted = restore(nodes, 1, tmp_path / "all", "--tier", "hot")
        assert (code, restored["step"], restored["tier"]) == (0, 2, "hot"), noted
        assert_whole(tmp_path / "all", 2, 4)
        assert "hot here (ranks 1), the copy here (ranks 3), the node of ranks 0 at" in noted
        # Rank 2's part is on node 2, its copy on node 0: of both, one may be lost.
        nodes.daemons[2].kill()
        code, restored, noted = restore(nodes, 1, tmp_path / "copy")  # auto: no tier has one whole
        assert (code, restored["step"]) == (0, 2), noted
        assert_whole(tmp_path / "copy", 2, 4)
        nodes.daemons[0].kill()
        code, _, noted = restore(nodes, 1, tmp_path / "lost", "--tier", "hot", "--step", "2")
        assert code == 3
        assert "the parts of ranks 0, 2 are missing" in noted
        assert "the node of ranks 2 at 127.0.0.1:" in noted
        assert "connection refused" in noted
        assert_nothing(tmp_path / "lost")


def test_one_node_of_two_has_all_with_its_copy_and_needs_no_daemon(tmp_path: Path) -> None:
    with handmade_nodes(tmp_path, 2) as nodes:
        nodes.save(1)
        nodes.seal(0, 2)  # the other node is behind
        nodes.daemons[1].kill()
        shutil.rmtree(nodes.daemons[1].root)
        nodes.daemons[0].kill()
        code, restored, noted = restore(nodes, 0, tmp_path / "found", "--tier", "hot", "--step", "1")
        assert (code, restored["step"]) == (0, 1), noted
        assert_whole(tmp_path / "found", 1, 2)
        shutil.rmtree(nodes.daemons[0].hot / ".peers")
        code, _, noted = restore(nodes, 0, tmp_path / "half", "--tier", "hot", "--step", "1")
        assert code == 3
        assert (
            "the parts of ranks 1 are missing: the daemon here, which may know the other nodes, was not asked" in noted
        )
        assert_nothing(tmp_path / "half")


def test_damaged_part_is_read_from_the_copy_and_damage_of_both_is_never_restored(tmp_path: Path) -> None:
    def damage(shards: Path) -> None:
        content = bytearray(shards.read_bytes())
        content[1000] ^= 1
        shards.write_bytes(content)

    with handmade_nodes(tmp_path, 2) as nodes:
        nodes.save(1)
        name = "rank-00001-of-00002.safetensors"
        damage(nodes.part(1, 1) / name)
        code, restored, noted = restore(nodes, 1, tmp_path / "found", "--tier", "hot")
        assert code == 0, noted
        assert_whole(tmp_path / "found", 1, 2)
        assert set(restored["given_bytes"]) == {"hot", "copies"}
        damage(nodes.daemons[0].hot / ".peers" / "run" / layout_name(1) / name)
        code, _, noted = restore(nodes, 1, tmp_path / "damaged", "--tier", "hot")
        assert code == 12, noted
        assert_nothing(tmp_path / "damaged")
