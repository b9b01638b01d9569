"""The audit trail of a real daemon: every action with the process that asked, and the command that prints it."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.daemon import Daemon
from tests.support.waiting import wait_until
from tests.support.wire_peer import Peer
from tierd.format import layout, wire
from tierd.format.ids import Generation, Run
from tierd.keys.key_file import make_key_file

KEEP_ONE = "\n[lifecycle.hot]\nkeep_last = 1"
CONTENT = b"x" * 64


def test_every_action_is_in_the_trail_with_the_peer_that_asked(tmp_path: Path) -> None:
    make_key_file(tmp_path / "keys")
    more = f'{KEEP_ONE}\n[security]\nkey_file = "{tmp_path / "keys"}"'
    with Daemon(tmp_path / "node", more=more) as daemon:
        with Peer(daemon.socket) as peer, Peer(daemon.socket) as operator:
            peer.greet("run")
            for step in (1, 2):
                peer.attach(step)
                peer.seal(step, step, CONTENT, milestone="best" if step == 2 else None)
                assert peer.hear(wire.Persisted).step == step
                wait_until(lambda step=step: step in daemon.steps("cold"), "the copy in cold")  # type: ignore[misc]
            wait_until(lambda: daemon.steps("hot") == [2], "the eviction")
            peer.send(wire.Report(outcome="restored", step=1, tier="cold", seconds=0.1, detail=""))
            operator.greet("run", rank=None)
            operator.send(wire.Request(request=1, kind="stop", milestone=None))
            assert peer.hear(wire.Requested).kind == "stop"
        assert daemon.tierd("milestone", "kept", "--run", "run", "--step", "1").returncode == 0
        wait_until(lambda: "restored run" in daemon.log, "the report")
        assert daemon.stop() == 0
        trail = daemon.json("log", "--audit")
        events = {(event["action"], event.get("step"), event.get("tier", "")): event for event in trail["events"]}
        assert {
            ("started", None, ""),
            ("claimed", None, ""),
            ("joined", None, ""),
            *(("committed", step, "hot") for step in (1, 2)),
            *(("replicated", step, "cold") for step in (1, 2)),
            ("marked", 2, "hot"),
            ("marked", 1, "cold"),
            ("evicted", 1, "hot"),
            ("restored", None, "cold"),
            ("requested", None, ""),
            ("ended", None, ""),
        } <= events.keys()
        peers = {action: events[action, None, tier] for action, tier in [("claimed", ""), ("restored", "cold")]}
        peers["requested"] = events["requested", None, ""]
        assert {name: event["by"] for name, event in peers.items()} == {
            "claimed": "trainer",
            "restored": "trainer",
            "requested": "operator",
        }
        assert {(event["uid"], event["pid"]) for event in peers.values()} == {(os.geteuid(), os.getpid())}
        assert events["evicted", 1, "hot"]["by"] == "daemon"
        assert events["marked", 1, "cold"]["by"] == "command"
        assert (trail["problem"], trail["notes"]) == ("", [])
        assert "stop" in daemon.log
        assert f"requested run generation 1: stop (operator, uid {os.geteuid()}, pid {os.getpid()})" in daemon.log

        # What a reader without a daemon sees, whole and after a change.
        assert "chain whole" in daemon.tierd("log", "--audit", "--run", "run", "--since", "1h").stderr
        assert daemon.tierd("log", "--audit", "--run", "other").stdout.strip() == ""
        assert daemon.tierd("log", "--audit", "--since", "yesterday").returncode == 2
        assert daemon.tierd("log").returncode == 2
        path = daemon.hot / layout.AUDIT / layout.audit_file(1)
        path.write_bytes(path.read_bytes().replace(b'"evicted"', b'"expired"'))
        broken = daemon.tierd("log", "--audit")
        assert broken.returncode == 12
        assert "the chain is broken: the file of event 1, line" in broken.stderr


def test_the_trail_is_no_checkpoint_and_survives_a_kill(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        assert daemon.tierd("log", "--audit").returncode in (0, 10)
        with Peer(daemon.socket) as peer:
            peer.greet("run")
            wait_until(lambda: (daemon.hot / layout.AUDIT).exists(), "the trail")
        wait_until(lambda: any(e["action"] == "joined" for e in daemon.json("log", "--audit")["events"]), "the event")
        daemon.kill()
        path = daemon.hot / layout.AUDIT / layout.audit_file(1)
        path.write_bytes(path.read_bytes() + b'{"sequence":')
        daemon.start()
        assert daemon.stop() == 0
        trail = daemon.json("log", "--audit")
        assert trail["problem"] == ""
        assert [event["action"] for event in trail["events"]].count("started") == 2
        assert [event["action"] for event in trail["events"]].count("trail_cut") == 1
        assert daemon.json("ls") == []


def test_a_generation_that_another_daemon_began_is_in_the_trail_and_the_metric(tmp_path: Path) -> None:
    with Daemon(tmp_path, more="cold_list_interval_s = 0.2") as daemon, Peer(daemon.socket) as peer:
        peer.greet("run")
        assert daemon.metric("tierd_newer_generations") == 0
        claim = daemon.cold / layout.generation_key(Run("run"), Generation(2))
        claim.parent.mkdir(parents=True, exist_ok=True)
        claim.write_text("{}")
        wait_until(lambda: daemon.metric("tierd_newer_generations") == 1, "the newer generation")
        daemon.wait_log("generation_unknown run generation 2")
        assert daemon.log.count("generation_unknown") == 1
