"""`tierd restore` of a checkpoint of which the node has only a part: the rest comes from copies and other nodes."""

from __future__ import annotations

import json
import shutil
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.cli import make_house, make_part
from tests.support.handmade_nodes import HandmadeNodes, handmade_nodes, layout_name, shard
from tests.support.waiting import wait_until
from tierd.api.operator_socket import find_nodes
from tierd.format import layout
from tierd.format.ids import checkpoint_id
from tierd.format.node_file import decode_node_file
from tierd.keys.key_file import make_key_file


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


def test_parts_are_found_when_the_ranks_have_just_been_placed_elsewhere(tmp_path: Path) -> None:
    """The daemon was told the nodes by the start before, in which its node had other ranks."""
    with handmade_nodes(tmp_path, 2) as nodes:
        nodes.save(1)
        nodes.close()
        shutil.rmtree(nodes.daemons[0].hot / ".peers")
        again = nodes.start_on(nodes.daemons[::-1], tells=False)
        code, restored, noted = restore(nodes, 0, tmp_path / "all", "--tier", "hot")
        assert (code, restored.get("step")) == (0, 1), noted
        assert_whole(tmp_path / "all", 1, 2)
        again.close()


def test_part_of_another_start_is_named_as_what_it_is(tmp_path: Path) -> None:
    """Two starts may have the same generation where no cold tier has answered."""
    house = make_house(tmp_path)
    make_part(house.hot, [0], world_size=2)
    make_part(house.hot / layout.PEERS, [1], world_size=2, claim="1" * 32)
    done = house.tierd("restore", "--run", "run42", "--to", tmp_path / "found", "--tier", "hot", "--step", "100")
    assert done.exit_code == 3
    assert "the parts of ranks 1 are missing" in done.stderr
    assert "the copy here has ranks 1 of another start of the run" in done.stderr


@pytest.mark.long
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


@contextmanager
def relay(address: str, cut_after_bytes: int, on_cut: Callable[[], None]) -> Generator[str]:
    """The address of a relay to another one. After so many bytes of answers in all it calls `on_cut`, and passes
    nothing on any more."""
    listener = socket.create_server(("127.0.0.1", 0))
    host, _, port = address.rpartition(":")
    left, lock = cut_after_bytes, threading.Lock()
    sockets: list[socket.socket] = []

    def pump(source: socket.socket, target: socket.socket, *, is_answer: bool) -> None:
        nonlocal left
        with suppress(OSError):
            while piece := source.recv(1 << 14):
                if is_answer:
                    with lock:
                        was_open, left = left > 0, left - len(piece)
                        if left <= 0 and was_open:
                            on_cut()
                    if left <= 0:
                        break
                target.sendall(piece)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                here, _ = listener.accept()
                sockets.append(here)
                if left <= 0:
                    here.close()
                    continue
                sockets.append(there := socket.create_connection((host, int(port))))
                for source, target, is_answer in ((here, there, False), (there, here, True)):
                    threading.Thread(target=pump, args=(source, target), kwargs={"is_answer": is_answer}).start()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@pytest.mark.parametrize("has_copy", [False, True])
@pytest.mark.long
def test_node_that_dies_in_the_middle_of_the_fetch_is_replaced_by_its_copy_or_named(
    tmp_path: Path, has_copy: bool
) -> None:
    with handmade_nodes(tmp_path, 4) as nodes:
        nodes.save(1)
        peer = nodes.addresses[2].peer
        assert peer is not None
        with relay(peer.address, 100_000, nodes.daemons[2].kill) as address:
            lost = msgspec.structs.replace(peer, address=address)
            nodes.addresses[2] = msgspec.structs.replace(nodes.addresses[2], peer=lost)
            nodes.tell_roster()
            if not has_copy:
                shutil.rmtree(nodes.daemons[0].hot / ".peers")
            wait_until(lambda: lost in [each.peer for each in find_nodes(Path(nodes.daemons[1].socket), "run")], "it")
            code, restored, noted = restore(nodes, 1, tmp_path / "found", "--tier", "hot")
        if has_copy:
            assert (code, restored["step"]) == (0, 1), noted
            assert_whole(tmp_path / "found", 1, 4)
        else:
            assert code == 3, noted
            assert_nothing(tmp_path / "found")
        assert nodes.daemons[2].process is None


def test_with_a_key_the_parts_of_all_nodes_are_checked_and_the_checkpoint_is_signed(tmp_path: Path) -> None:
    keyring, other_key = make_key_file(tmp_path / "key"), make_key_file(tmp_path / "other")
    with handmade_nodes(tmp_path, 2, more=f'[security]\nkey_file = "{tmp_path / "key"}"') as nodes:
        nodes.save(1)
        code, _, noted = restore(nodes, 1, tmp_path / "found", "--tier", "hot")
        assert code == 0, noted
        assert_whole(tmp_path / "found", 1, 2)
        manifest = (tmp_path / "found" / "manifest.json").read_bytes()
        assert not keyring.problem(f"run/{layout_name(1)}/manifest.json", manifest)
        # Someone who can write in hot, and has no key, changes a part and its copy.
        nodes.daemons[0].kill()
        name = "node-00001-of-00002.json"
        for part in (nodes.part(1, 1), nodes.daemons[1].hot / ".peers" / "run" / layout_name(1)):
            for path in part.glob("node-*"):
                path.chmod(0o600)
                forged = decode_node_file(
                    path.read_bytes(), name=path.name, where="hot", expect=checkpoint_id("run", 1, 1)
                )
                path.write_bytes(other_key.sign_manifest(forged).encode())
        assert (nodes.part(1, 1) / name).exists()
        code, _, noted = restore(nodes, 1, tmp_path / "forged", "--tier", "hot")
        assert code != 0
        assert "is not in the key file" in noted
        assert_nothing(tmp_path / "forged")


def test_node_without_tls_where_this_one_needs_it_is_named(tmp_path: Path) -> None:
    nodes = HandmadeNodes(tmp_path, 2)
    config = nodes.daemons[0].config
    config.write_text(config.read_text() + "\ntls = true\n")
    with ExitStack() as stack:
        for daemon in nodes.daemons:
            stack.enter_context(daemon)
        stack.callback(nodes.close)
        nodes.join()
        nodes.save(1, copied=False)
        code, _, noted = restore(nodes, 0, tmp_path / "found", "--tier", "hot")
        assert code == 3
        assert "peers.tls is set here, and not on that node" in noted
        assert_nothing(tmp_path / "found")
        (failure,) = {each["message"] for each in nodes.daemons[0].status()["failures"] if each["stage"] == "copy"}
        assert "peers.tls is set here, and not on that node" in failure
        # The other one reads from it: it was told that there is TLS.
        code, _, noted = restore(nodes, 1, tmp_path / "encrypted", "--tier", "hot")
        assert code == 0, noted
        assert_whole(tmp_path / "encrypted", 1, 2)
