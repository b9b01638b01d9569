"""A daemon and trainers of different users: trainers snapshot and restore, and cannot open hot or read credentials."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.daemon import Daemon
from tests.support.other_user import OtherUser, become, needs_root, open_folder
from tests.support.processes import run_tierd
from tests.support.trainer import Training
from tests.support.waiting import DEADLINE_S
from tests.support.wire_peer import Peer
from tierd.errors import DaemonUnreachable
from tierd.format import wire

DAEMON_UID, TRAINER_UID, OUTSIDER_UID, TRAINERS = 65521, 65522, 65523, 65524
_trainings: list[Training] = []
CREDENTIALS = "[default]\naws_access_key_id = AKIAIOSFODNN7EXAMPLE\n"

pytestmark = needs_root


def run_tierd_as_its_user(arguments: list[str], environ: Mapping[str, str], log: str) -> None:
    os.chown(log, DAEMON_UID, -1)
    become(DAEMON_UID, [TRAINERS])
    run_tierd(arguments, environ, log)


@contextmanager
def daemon_of_its_own_user(root: Path, *, cold: str = "") -> Generator[Daemon]:
    """Its folders and credentials belong to its user, and its socket is in a folder that the group may enter."""
    root.chmod(0o755)
    for folder in ("run", "data", "aws"):
        (root / folder).mkdir()
    (root / "aws" / "credentials").write_text(CREDENTIALS)
    os.chmod(root / "aws" / "credentials", 0o600)
    for path in ("run", "data", "aws", "aws/credentials"):
        os.chown(root / path, DAEMON_UID, DAEMON_UID)
    os.chmod(root / "data", 0o711)  # so that what keeps others out is the mode of hot itself
    # The examiner starts another Python, which may be in a folder of root's where the tests run.
    more = f'[health]\nexamine = false\n[security]\ntrainer_group = "{TRAINERS}"\n'
    environ = {
        "TIERD_DAEMON_SOCKET": str(root / "run" / "tierd" / "tierd.sock"),
        "TIERD_HOT_PATH": str(root / "data" / "hot"),
        "AWS_SHARED_CREDENTIALS_FILE": str(root / "aws" / "credentials"),
        "HOME": str(root / "data"),
    }
    daemon = Daemon(root, cold=cold, more=more, environ=environ)
    daemon.run_with(run_tierd_as_its_user)
    os.chmod(root / "run", 0o755)
    daemon.socket, daemon.hot = environ["TIERD_DAEMON_SOCKET"], root / "data" / "hot"
    with daemon:
        yield daemon


@pytest.fixture
def root() -> Iterator[Path]:
    with open_folder() as folder:
        yield folder


@pytest.fixture
def trainer() -> Iterator[OtherUser]:
    with OtherUser(TRAINER_UID, [TRAINERS]) as user:
        yield user


def test_a_trainer_of_another_user_snapshots_and_restores_from_every_tier(root: Path, trainer: OtherUser) -> None:
    with daemon_of_its_own_user(root, cold=f'url = "file://{root}/data/cold"') as daemon:
        digest = trainer.call(train, daemon.socket, True)
        assert trainer.call(restore, daemon.socket, "memory") == ("memory", digest)
        assert trainer.call(restore, daemon.socket, "hot") == ("hot", digest)
        assert trainer.call(restore, daemon.socket, "cold") == ("cold", digest)
        assert os.stat(daemon.hot).st_uid == DAEMON_UID
        # A process that is started again adopts the slots of the one that has died, and goes on.
        with OtherUser(TRAINER_UID, [TRAINERS]) as restarted:
            assert restarted.call(restore, daemon.socket, "auto")[1] == digest


def test_a_trainer_of_another_user_cannot_open_hot_or_the_credentials(root: Path, trainer: OtherUser) -> None:
    with daemon_of_its_own_user(root) as daemon:
        trainer.call(train, daemon.socket)
        shard = next(daemon.hot.glob("run/*/rank-*.safetensors"))
        attacks: list[tuple[Callable[..., object], Sequence[object]]] = [
            (os.listdir, [str(daemon.hot)]),
            (read, [str(shard)]),
            (write, [str(shard)]),
            (write, [str(daemon.hot / "run" / "generation-0099.json")]),
            (os.unlink, [str(shard)]),
            (read, [str(root / "aws" / "credentials")]),
            (read, [f"/proc/{daemon.pid}/environ"]),
            (os.listdir, [f"/proc/{daemon.pid}/fd"]),
            (os.kill, [daemon.pid, 15]),
        ]
        for attack, arguments in attacks:
            with pytest.raises(PermissionError):
                trainer.call(attack, *arguments)
        assert stat.S_IMODE(daemon.hot.stat().st_mode) == 0o700


def test_descriptors_of_hot_are_read_only_for_a_trainer_of_another_user(root: Path, trainer: OtherUser) -> None:
    with daemon_of_its_own_user(root) as daemon:
        trainer.call(train, daemon.socket)
        assert trainer.call(try_to_write_what_is_found, daemon.socket) == ["Bad file descriptor", "Permission denied"]


def test_a_user_outside_the_group_cannot_connect(root: Path) -> None:
    with daemon_of_its_own_user(root) as daemon, OtherUser(OUTSIDER_UID) as outsider:
        assert stat.S_IMODE(os.stat(daemon.socket).st_mode) == 0o660
        with pytest.raises(PermissionError):
            outsider.call(greet, daemon.socket)
        assert "security.trainer_group" in outsider.call(hint_of_refused_connect, daemon.socket)
        # Where an administrator has opened the socket to everyone, the daemon itself refuses.
        os.chmod(os.path.dirname(daemon.socket), 0o755)
        os.chmod(daemon.socket, 0o666)
        kind, message = outsider.call(greet, daemon.socket, True)
        assert kind == "bad_request"
        assert f"it runs as uid {OUTSIDER_UID}" in message
        with OtherUser(TRAINER_UID, [TRAINERS]) as member:
            assert member.call(greet, daemon.socket) is None


# ── in the process of the other user ──


def hint_of_refused_connect(path: str) -> str:
    with pytest.raises(DaemonUnreachable) as refused:
        Training().connect(path, daemon_uid=DAEMON_UID, rank=0, world_size=1)
    return refused.value.hint or ""


def train(path: str, has_cold: bool = False) -> str:
    training = Training()
    training.connect(path, daemon_uid=DAEMON_UID, rank=0, world_size=1)
    training.train(2)
    training.durable()
    if has_cold:
        training.wait_replicated()
    _trainings.append(training)  # it stays connected
    return training.digest()


def restore(path: str, tier: str) -> tuple[str, str]:
    training = Training(seed=2)
    training.connect(path, daemon_uid=DAEMON_UID, rank=0, world_size=1)
    found = training.restore(tier=tier)
    assert found is not None
    digest = training.digest()
    training.client.close()
    return found.tier, digest


def try_to_write_what_is_found(path: str) -> list[str]:
    """Why a shard of hot can be written neither through the descriptor nor by opening it again."""
    reasons: list[str] = []
    with Peer(path) as peer:
        peer.greet("run", rank=None)
        peer.find(tier="hot")
        shard = peer.descriptors[1]
        for attack in (lambda: os.pwrite(shard, b"x", 0), lambda: os.open(f"/proc/self/fd/{shard}", os.O_RDWR)):
            try:
                attack()
                reasons.append("written")
            except OSError as error:
                reasons.append(os.strerror(error.errno or 0))
    return reasons


def greet(path: str, is_refused_at_once: bool = False) -> tuple[str, str] | None:
    """(kind, message) of a refusal, which may come before a Hello can be sent."""
    with Peer(path) as peer:
        peer.socket.settimeout(DEADLINE_S)
        if not is_refused_at_once:
            peer.send(peer.hello("run", rank=None))
        refused = peer.answer()
        assert refused is None or isinstance(refused, wire.Refused)
        return None if refused is None else (refused.kind, refused.message)


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def write(path: str) -> None:
    with open(path, "ab") as file:
        file.write(b"forged")
