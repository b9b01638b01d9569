"""Text of messages, manifests and markers controls no terminal and begins no line, wherever tierd shows it."""

from __future__ import annotations

import json
import logging
import os
import socket
from pathlib import Path
from typing import Any, get_args

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cli import folder_of, make_checkpoint
from tests.support.daemon import Daemon
from tests.support.slots import make_sealed
from tests.support.wire_peer import Peer
from tierd.descriptors import sealed_memory
from tierd.format import wire
from tierd.format.ids import CheckpointId, Generation, Run, Step
from tierd.format.peers import NodeAddress, PeerAddress
from tierd.format.text import TEXT_CHARS_MAX, printable, printable_json
from tierd.logs import EventFormatter

EVIL = (
    "\nFORGED 1970 ERROR\r\x1b[2J\x1b]0;owned\x07\x00\x7f\x9b31m"
    "\u202eesrever\u2066\u200b\u2028\ufeff<script>alert(1)</script>"
)


def assert_harmless(text: str, where: str) -> None:
    bad = {char for char in text if not char.isprintable() and char != "\n"}
    assert bad == set(), where
    assert [line for line in text.split("\n") if line.lstrip(" '\"|").startswith("FORGED")] == [], where


def forge_manifest(root: Path, step: int, **fields: Any) -> None:
    """A committed checkpoint whose manifest is valid and has evil text in these fields."""
    manifest = make_checkpoint(root, run="run", step=step, sequence=step)
    path = folder_of(root, manifest) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | fields))


def plant(root: Path) -> None:
    parent = {"run": EVIL, "step": 1, "generation": 1}
    forge_manifest(root, 100, created_at=EVIL, kind=EVIL, architecture_hash=EVIL, metrics={EVIL: 1.0}, parent=parent)
    forge_manifest(root, 101, versions={EVIL: EVIL}, metrics={"loss" + EVIL: "nan"})
    forge_manifest(root, 102, format_version=EVIL)  # from here on, none can be read
    forge_manifest(root, 103, metrics={"loss": EVIL})
    forge_manifest(root, 104, run=EVIL)
    forge_manifest(root, 105, **{EVIL: EVIL}, sequence=EVIL)
    entry = {"name": "x", "size_bytes": 0, "crc64nvme": "", "chunk_bytes": 4096, "chunks": []}
    forge_manifest(root, 106, files=[entry | {"name": EVIL}])
    forge_manifest(root, 107, files=[entry | {"crc64nvme": EVIL}])
    folder = root / "run" / "000000000101-g0001"
    bad = {"tensor": EVIL, "nan": 1, "inf": 0}
    (folder / "unhealthy.json").write_text(
        json.dumps({"healthy": False, "examined_at": EVIL, "tensors": 1, "digest": EVIL, "not_finite": [bad]})
    )
    (folder / "milestone-best.json").write_text(json.dumps({"milestone": EVIL, "created_at": EVIL}))
    (root / "run" / "generation-0001.json").write_text(json.dumps({"node": EVIL, "claimed_by": EVIL}))
    (root / "run" / EVIL.replace("/", "_").replace("\x00", "")).write_text(EVIL)
    (root / EVIL.replace("/", "_").replace("\x00", "")).mkdir()


EVIL_PEER = PeerAddress(address=EVIL, token=EVIL, fingerprint=EVIL)
CLOSED_PEER = PeerAddress(address="127.0.0.1:1", token="ab" * 32, fingerprint="ab" * 32)
SEALED: dict[str, Any] = msgspec.structs.asdict(make_sealed(1))
MESSAGES: list[wire.ToDaemon] = [
    wire.Report(outcome="skipped", step=1, tier=EVIL, seconds=0.1, detail=EVIL),
    wire.Report(outcome="failed", step=1, tier=EVIL, seconds=0.1, detail=EVIL),
    wire.Report(outcome="unpinned", step=1, tier=EVIL, seconds=0.1, detail=EVIL),
    wire.Report(outcome="corrupt", step=1, tier=EVIL, seconds=0.1, detail=EVIL),
    wire.Report(outcome="restored", step=1, tier=EVIL, seconds=0.1, detail=EVIL),
    wire.Report(outcome=EVIL, step=1, tier="", seconds=0.1, detail=""),
    wire.Report(outcome="skipped", step=1, tier="", seconds=0.1, detail="", run=EVIL),
    wire.SnapshotLost(step=3, kind=EVIL, message=EVIL, hint=EVIL),
    wire.Find(request=1, step=None, generation=None, milestone=EVIL, tier="auto", exclude=[EVIL]),
    wire.Find(request=2, step=None, generation=None, milestone=None, tier=EVIL, exclude=[]),
    wire.Request(request=3, kind=EVIL, milestone=EVIL),
    wire.Request(request=4, kind="stop", milestone=EVIL),
    wire.Goodbye(state=EVIL, reason=EVIL),
    wire.Goodbye(state="failed", reason=EVIL),
    wire.Answer(request=1, step=1, kind=EVIL, message=EVIL, hint=EVIL),
    wire.Inventory(request=5, step=None, generation=None, milestone=EVIL, lists_cold=False),
    wire.Partner(peer=EVIL_PEER, node_file=EVIL, lifecycle=EVIL),
    wire.Partner(peer=CLOSED_PEER, node_file="node-00000-of-00002.json", lifecycle=EVIL),
    wire.FindElsewhere(request=6, step=1, generation=1, peer=EVIL_PEER, node_file=EVIL, files=[EVIL], chunks=[b"x"]),
    wire.FindElsewhere(request=7, step=1, generation=1, peer=CLOSED_PEER, node_file=EVIL, files=[EVIL], chunks=[b"x"]),
]
EVIL_SEALED: dict[str, Any] = {"metrics": {EVIL: 1.0}, "versions": {EVIL: EVIL}, "architecture_hash": EVIL}
REFUSED_SEALED: list[dict[str, Any]] = [
    {"created_at": EVIL},
    {"milestone": EVIL},
    {"parent": CheckpointId(run=Run(EVIL), step=Step(1), generation=Generation(1))},
    {"metrics": {"loss": EVIL}},
]
NODE = wire.NodeRanks(ranks=[0], lowest=[0, 1], claim=EVIL)
HELLOS = [
    wire.Hello(protocol=99, version=EVIL, run="run", rank=0, world_size=1, generation=None),
    wire.Hello(protocol=wire.PROTOCOL_VERSION, version=EVIL, run=EVIL, rank=0, world_size=1, generation=None),
    wire.Hello(
        protocol=wire.PROTOCOL_VERSION,
        version="0",
        run="run",
        rank=0,
        world_size=2,
        generation=1,
        node=NODE,
        proof=EVIL,
    ),
    wire.Hello(protocol=wire.PROTOCOL_VERSION, version="0", run="run", rank=0, world_size=2, generation=1, node=NODE),
]


def test_every_text_of_every_message_is_fed() -> None:
    """Also of messages that will be added."""
    sealed = [wire.Sealed(**SEALED | fields) for fields in (EVIL_SEALED, *REFUSED_SEALED)]
    fed = {
        (type(message), field.name)
        for message in (*MESSAGES, *HELLOS, *sealed)
        for field in msgspec.structs.fields(message)
        if json.dumps(EVIL) in json.dumps(msgspec.to_builtins(getattr(message, field.name)))
    }
    texts = {
        (message, field.name)
        for message in get_args(wire.ToDaemon)
        for field in msgspec.structs.fields(message)
        if any(kind in str(field.type) for kind in ("str", "PeerAddress", "NodeRanks", "CheckpointId"))
    }
    assert texts - fed == set()


def end(peer: Peer) -> None:
    """Waits until the daemon has read all."""
    peer.socket.shutdown(socket.SHUT_WR)
    assert peer.is_dropped()


def speak(daemon: Daemon) -> None:
    for message in MESSAGES:
        with Peer(daemon.socket) as peer:
            peer.greet("run", generation=None)
            peer.send(message)
            end(peer)
    for hello in HELLOS:
        with Peer(daemon.socket) as peer:
            peer.send(hello)
            end(peer)
    with Peer(daemon.socket) as peer:
        peer.greet("sealed")
        peer.attach(0)
        peer.seal(0, 7, b"x" * 100, **EVIL_SEALED)
        peer.hear(wire.Persisted)
    for fields in REFUSED_SEALED:
        with Peer(daemon.socket) as peer:
            peer.greet("refused")
            peer.attach(0)
            peer.fill(0, 7, b"x" * 100)
            peer.send(wire.Sealed(**SEALED | {"slot": 0, "step": 7, "size_bytes": 100} | fields))
            end(peer)
    nodes = [NodeAddress(ranks=[0]), NodeAddress(ranks=[1], peer=EVIL_PEER)]
    with Peer(daemon.socket) as peer:
        peer.greet("run", world_size=2)
        descriptor = sealed_memory("nodes", msgspec.json.encode(nodes))
        peer.send(wire.Roster(), descriptor)
        os.close(descriptor)
        end(peer)


def test_no_text_from_outside_reaches_a_log_a_terminal_or_a_page_as_it_is(tmp_path: Path) -> None:
    started = Daemon(tmp_path)
    plant(started.hot)
    plant(started.cold)
    with started as daemon:
        speak(daemon)
        status = daemon.get("/api/v1/status?fresh=1")
        assert status["failures"], "the evil text must have reached the status"
        pages = ("/", "/runs/run", "/runs/run/000000000100-g0001", "/runs/run/000000000101-g0001")
        for path in (*pages, "/api/v1/status", "/api/v1/checkpoints", "/api/v1/lifecycle", "/metrics", "/readyz"):
            text = daemon.request(path)[1].decode()
            assert_harmless(text, path)
            assert "<script>" not in text or path.startswith("/api"), path
        show = "/api/v1/checkpoints/run/000000000100-g0001"
        assert_harmless(daemon.request(show)[1].decode(), show)
        assert daemon.get(show)["manifest"]["kind"] == EVIL, "JSON keeps the text"
        shown = ""
        for step in ("100", "101", "102", "7"):
            run = "sealed" if step == "7" else "run"
            shown += check_commands(daemon, [["show", run, step], ["show", run, step, "--json"]])
        verbs = [["status"], ["ls"], ["verify"], ["verify", "--deep"], ["lifecycle", "--explain"]]
        shown += check_commands(daemon, [*verbs, *([*verb, "--json"] for verb in verbs)])
        assert r"\x1b[2J" in shown, "the evil text must have been shown"
        assert r"\x1b[2J" in daemon.log
        assert_harmless(daemon.log, "the log")
        daemon.kill()
        check_commands(daemon, [["status"], ["ls"], ["status", "--json"], ["ls", "--json"]])


def check_commands(daemon: Daemon, commands: list[list[str]]) -> str:
    shown = ""
    for command in commands:
        done = daemon.tierd(*command)
        assert done.returncode != 2, f"{command}: {done.stderr}"
        assert_harmless(done.stdout, f"stdout of {command}")
        assert_harmless(done.stderr, f"stderr of {command}")
        shown += done.stdout + done.stderr
    return shown


# ── the functions ──


@given(st.text())
def test_any_text_becomes_one_printable_line_of_bounded_length(text: str) -> None:
    assert printable(text).isprintable()
    assert len(printable(text, 20)) <= 20
    if text.isprintable() and len(text) <= 20:
        assert printable(text, 20) == text


def test_long_text_is_cut_with_a_sign() -> None:
    assert len(printable("x" * 10**6)) == TEXT_CHARS_MAX
    assert printable("x" * 10**6).endswith("…")
    assert len(printable("\x1b" * 4000)) == TEXT_CHARS_MAX


@given(st.recursive(st.none() | st.text(), lambda values: st.lists(values) | st.dictionaries(st.text(), values)))
def test_json_has_the_same_content_and_no_character_that_is_not_printable(content: Any) -> None:
    for encoded in (json.dumps(content, indent=1), json.dumps(content, ensure_ascii=False)):
        try:
            raw = encoded.encode()
        except UnicodeEncodeError:
            continue  # a lone surrogate is no JSON in UTF-8
        shown = printable_json(raw)
        assert all(char.isprintable() or char == "\n" for char in shown)
        assert json.loads(shown) == content


def test_an_event_is_one_line_and_a_traceback_is_indented() -> None:
    try:
        raise ValueError(EVIL)
    except ValueError as error:
        found = (ValueError, error, error.__traceback__)
    record = logging.LogRecord("tierd", logging.WARNING, __file__, 1, "read %s", (EVIL,), found)
    event, *traceback = EventFormatter().format(record).split("\n")
    assert event.endswith("</script>")
    assert len(traceback) > 2
    assert all(line.startswith("    | ") and line.isprintable() for line in traceback)
