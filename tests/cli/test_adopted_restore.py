"""`tierd restore` of what several nodes have adopted together: as one folder, or the folder of one node."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from tests.support.cli import House, flip_a_bit, make_checkpoint, make_house
from tests.support.foreign import contents, make_folder, write
from tierd.format.announced import Announced
from tierd.format.ids import checkpoint_id
from tierd.format.manifest import Manifest
from tierd.format.node_file import NodeFile, assemble
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.pool import ThreadPool
from tierd.tiers.tier import Tier
from tierd.transfer.adoption import FolderAdoption, new_head
from tierd.transfer.source_tree import scan

CHECKPOINT = checkpoint_id("ds", 500, 1)


@pytest.fixture
def house(tmp_path: Path) -> House:
    return make_house(tmp_path)


def adopt_together(root: Path, folders: list[Path], *, lost: int | None = None) -> Manifest | None:
    """Commits the folders of the nodes as one checkpoint. Without the part of the node `lost`, it is not committed."""

    async def adopt() -> Manifest | None:
        pool = ThreadPool(2, "adopt", timeout_s=30)
        parts: list[NodeFile] = []
        async with DirectoryStore(root) as store:
            for node, folder in [(node, folder) for node, folder in enumerate(folders) if node != lost]:
                attempt = FolderAdoption(scan(folder), pool=pool, node=node)
                await attempt.copy(CHECKPOINT, store)
                head = new_head(CHECKPOINT, scan(folders[0]), sequence=1, world_size=len(folders))
                fields = {name: getattr(head, name) for name in head.__struct_fields__}
                parts.append(attempt.part(Announced(**fields, claim="0" * 32)))
                await store.put_bytes(parts[-1].key, parts[-1].encode())
            manifest = assemble(parts) if lost is None else None
            if manifest is not None:
                await Tier("cold", store).commit(manifest)
        pool.close()
        return manifest

    return asyncio.run(adopt())


def make_folders(root: Path) -> list[Path]:
    """Of two nodes: everything that a checkpoint can hold on the first one, and most of it on the second."""
    folders = [make_folder(root / "a/global_step500")]
    shutil.copytree(folders[0], root / "b/global_step500", symlinks=True)
    folders.append(root / "b/global_step500")
    write(folders[1] / "zero_1.pt", 70_000, mode=0o600)
    (folders[1] / "only-here").mkdir(mode=0o700)
    (folders[1] / "script.sh").unlink()
    os.utime(folders[1] / "__0_0.distcp")
    return folders


def test_the_whole_and_each_node_come_back_byte_for_byte(house: House, tmp_path: Path) -> None:
    folders = make_folders(tmp_path)
    adopt_together(house.cold, folders)
    for node, folder in enumerate(folders):
        restored = house.json("restore", "--node", str(node), "--to", tmp_path / f"back-{node}")
        assert (restored["kind"], restored["node"], restored["is_whole"]) == ("adopted", node, False)
        assert contents(tmp_path / f"back-{node}") == contents(folder)
    result = house.tierd("restore", "--to", tmp_path / "back")
    assert result.exit_code == 0, result.output
    assert "restored ds step 500 (generation 1) from cold" in result.stdout
    assert contents(tmp_path / "back") == contents(folders[0]) | contents(folders[1])
    result = house.tierd("restore", "--node", "1", "--to", tmp_path / "again")
    assert "restored the folder of node 1 of ds step 500" in result.stdout


def test_what_several_nodes_have_is_read_once(house: House, tmp_path: Path) -> None:
    folders = make_folders(tmp_path)
    write(folders[0] / "model.pt", 900_000)
    shutil.copy2(folders[0] / "model.pt", folders[1] / "model.pt")
    whole = adopt_together(house.cold, folders)
    assert whole is not None
    restored = house.json("restore", "--to", tmp_path / "back")
    assert restored["size_bytes"] < whole.size_bytes - 900_000
    assert restored["given_bytes"] == {"cold": restored["size_bytes"]}


def test_a_path_with_different_bytes_is_refused_by_name_and_leaves_nothing(house: House, tmp_path: Path) -> None:
    folders = make_folders(tmp_path)
    for node, folder in enumerate(folders):
        (folder / "rng.pt").write_bytes(bytes([node]) * 9)
    adopt_together(house.cold, folders)
    result = house.tierd("restore", "--to", tmp_path / "back")
    assert result.exit_code != 0
    assert "they differ in rng.pt (nodes 0 and 1)" in result.stderr
    assert "--node N restores the folder of one node as it was" in result.stderr
    assert not list(tmp_path.glob("back*"))
    assert house.tierd("restore", "--node", "1", "--to", tmp_path / "back").exit_code == 0
    assert contents(tmp_path / "back") == contents(folders[1])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--run", "ds", "--node", "2"), "it is of nodes 0 to 1"),
        (("--run", "run42", "--node", "0"), "it is not of several nodes that adopt together"),
        (("--run", "hf", "--node", "0"), "it is not of several nodes that adopt together"),
        (("--run", "ds", "--node", "0", "--rank", "0"), "tierd does not read its files"),
        (("--run", "ds", "--node", "-1"), "Invalid value for '--node'"),
    ],
)
def test_a_node_that_has_no_folder_is_refused(house: House, tmp_path: Path, options: tuple[str], named: str) -> None:
    adopt_together(house.cold, make_folders(tmp_path))
    make_checkpoint(house.hot)
    house.json("adopt", make_folder(tmp_path / "out/checkpoint-5"), "--run", "hf", "--step", "5")
    result = house.tierd("restore", *options, "--to", tmp_path / "back")
    assert result.exit_code != 0
    assert named in result.stderr
    assert not (tmp_path / "back").exists()


def test_a_damaged_file_is_never_restored(house: House, tmp_path: Path) -> None:
    adopt_together(house.cold, make_folders(tmp_path))
    (damaged,) = (house.cold / "ds/000000000500-g0001").glob("part-00001-*-zero_1.pt")
    flip_a_bit(damaged)
    assert house.tierd("verify", "--deep").exit_code != 0
    for options in ((), ("--node", "1")):
        assert house.tierd("restore", *options, "--to", tmp_path / "back").exit_code == 12
        assert not (tmp_path / "back").exists()
    assert house.tierd("restore", "--node", "0", "--to", tmp_path / "zero").exit_code == 0


def test_the_whole_is_restored_into_its_place_in_hot(house: House, tmp_path: Path) -> None:
    whole = adopt_together(house.cold, make_folders(tmp_path))
    assert whole is not None
    place = house.hot / "ds/000000000500-g0001"
    assert house.tierd("restore", "--to", place).exit_code == 0
    assert {entry.name for entry in whole.files} < {path.name for path in place.iterdir()}
    assert house.tierd("verify", "--deep").exit_code == 0
    assert house.tierd("restore", "--tier", "hot", "--to", tmp_path / "back").exit_code == 0


def test_ls_show_diff_and_fork_say_what_it_is(house: House, tmp_path: Path) -> None:
    adopt_together(house.cold, make_folders(tmp_path))
    (row,) = house.json("ls")
    assert (row["step"], row["tiers"]) == (500, ["cold"])
    assert house.json("show", "ds")["manifest"]["world_size"] == 2
    assert "nodes         2\n" in house.tierd("show", "ds").stdout
    for command in (("diff", "ds/500", "ds/500"), ("fork", "--run", "ds", "--step", "500", "--as", "b")):
        result = house.tierd(*command)
        assert result.exit_code == 2
        assert "another program wrote it" in result.stderr


def test_what_lacks_the_part_of_a_node_is_no_checkpoint_and_commands_say_which(house: House, tmp_path: Path) -> None:
    folders = make_folders(tmp_path)
    adopt_together(house.cold, folders, lost=1)
    adopt_together(house.hot, folders, lost=1)
    (row,) = house.json("ls")
    assert row["tiers"] == []
    part = {"ranks": [0], "world_size": 2, "is_adopted": True}
    assert row["parts"] == {"hot": part, "cold": part}
    assert "hot(part 1/2 nodes)" in house.tierd("ls").stdout
    assert "only node 0 of 2: the other nodes adopt the rest" in house.tierd("show", "ds").stdout
    for options in ((), ("--node", "0"), ("--tier", "hot"), ("--tier", "cold"), ("--step", "500")):
        result = house.tierd("restore", "--run", "ds", *options, "--to", tmp_path / "back")
        assert result.exit_code != 0
        assert "Traceback" not in result.output
        assert "the part of node 0 of 2 nodes" in result.stderr or "the parts of 1 of 2 nodes" in result.stderr
        assert not (tmp_path / "back").exists()
    status = house.tierd("status").stdout
    assert "this node  node 0 of 2" in status
    assert "nothing restorable" in status
    assert house.tierd("verify", "--deep").exit_code == 0


@pytest.mark.parametrize("options", [("--step", "501"), ("--preset", "deepspeed")])
def test_the_folder_of_one_node_is_not_adopted_into_their_run(
    house: House, tmp_path: Path, options: tuple[str, str]
) -> None:
    folders = make_folders(tmp_path)
    adopt_together(house.cold, folders)
    result = house.tierd("adopt", folders[1].parent, "--run", "ds", *options)
    assert result.exit_code == 2
    assert "its checkpoints are of several nodes, such as ds/000000000500-g0001 of 2" in result.stderr
    assert "choose another run name" in result.stderr
