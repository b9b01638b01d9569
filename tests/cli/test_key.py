"""`tierd key sign`: what it shows, what it signs, and what is left after an interruption."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.support.cli import House, folder_of, make_checkpoint, make_house
from tests.support.damage import flip
from tierd.format import digest, layout
from tierd.format.ids import Run, checkpoint_id
from tierd.format.manifest import Manifest, decode, encode_marker
from tierd.format.signature import ED25519, Keyring, new_key, parse_keys
from tierd.keys.key_file import make_key_file
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.tier import Tier
from tierd.transfer.signing import Signing

RUN = Run("run42")
TIERS = ("hot", "cold", "dr")
CONFIG = '[[cold]]\nname = "dr"\nurl = "file://dr"\n[security]\nkey_file = "key"'


@pytest.fixture
def house(tmp_path: Path) -> House:
    house = make_house(tmp_path, more=CONFIG)
    (tmp_path / "dr").mkdir(mode=0o700)
    make_key_file(tmp_path / "key")
    return house


def keyring_of(house: House) -> Keyring:
    return parse_keys((house.root / "key").read_text(), where="test")


def roots(house: House) -> list[Path]:
    return [house.root / name for name in TIERS]


def raws(house: House, made: Manifest, name: str = layout.MANIFEST) -> list[bytes]:
    return [(folder_of(root, made) / name).read_bytes() for root in roots(house)]


def unsigned_files(house: House, run: str = RUN) -> list[str]:
    """The manifests and markers in all tiers that the key has not signed."""
    keyring, unsigned = keyring_of(house), []
    for root in roots(house):
        for path in sorted((root / run).rglob("*.json")):
            key = str(path.relative_to(root))
            try:
                keyring.check(key, path.read_bytes(), where=root.name)
            except Exception:
                unsigned.append(f"{key} in {root.name}")
    return unsigned


# ── what it shows is what it signs ──


def test_every_file_is_shown_before_the_question_and_signed_after_yes(house: House) -> None:
    made = make_checkpoint(*roots(house), milestones=("best",))
    (house.cold / RUN / "generation-0001.json").write_bytes(b'{"node":"a"}\n')
    unsigned = unsigned_files(house)
    assert len(unsigned) == 7
    dry = house.tierd("key", "sign", RUN, "--dry-run")
    assert dry.exit_code == 0
    shown = [line.removeprefix("would sign ") for line in dry.stdout.splitlines()[:-1] if line]
    assert shown == [f"{file}: it is not signed" for file in _shown(unsigned)]
    no = house.tierd("key", "sign", RUN)
    assert (no.exit_code, "nobody has confirmed" in no.stderr) == (2, True)
    assert unsigned_files(house) == unsigned
    yes = house.tierd("key", "sign", RUN, "--yes")
    assert yes.exit_code == 0, yes.stderr
    assert [line.removeprefix("signed ") for line in yes.stdout.splitlines() if line.startswith("signed ")] == _shown(
        unsigned
    )
    assert unsigned_files(house) == []
    assert len(set(raws(house, made))) == 1
    again = house.tierd("key", "sign", RUN)
    assert (again.exit_code, "0 files signed" in again.stdout) == (0, True)


def _shown(unsigned: list[str]) -> list[str]:
    """Claims, markers, manifests; the tiers from the nearest."""
    tiers = {name: number for number, name in enumerate(TIERS)}

    def order(file: str) -> tuple[bool, bool, int]:
        return "generation-" not in file, "manifest" in file, tiers[file.rpartition(" ")[2]]

    return sorted(unsigned, key=order)


@pytest.mark.parametrize("what", ["checkpoint", "marker", "changed manifest"])
def test_what_arrives_after_the_question_is_not_signed(
    house: House, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    made = make_checkpoint(*roots(house))
    later = folder_of(house.root / "elsewhere", make_checkpoint(house.root / "elsewhere", step=900))

    def confirm(*_: Any, **__: Any) -> bool:
        folder = folder_of(house.cold, made)
        if what == "checkpoint":
            shutil.copytree(later, house.cold / RUN / later.name)
        elif what == "marker":
            (folder / "milestone-forged.json").write_bytes(encode_marker({"milestone": "forged"}))
        else:
            path = folder / layout.MANIFEST
            path.write_bytes(path.read_bytes().replace(b'"loss": 2.5', b'"loss": 0.1'))
        return True

    monkeypatch.setattr(typer, "confirm", confirm)
    result = house.tierd("key", "sign", RUN)
    left = unsigned_files(house)
    prefix = layout.checkpoint_prefix(made.id)
    if what == "changed manifest":
        assert (result.exit_code, left) == (3, [f"{prefix}manifest.json in cold"])
        assert "has changed since it was shown" in result.stderr
    else:
        name = f"{layout.checkpoint_prefix(checkpoint_id(RUN, 900, 1))}manifest.json"
        expected = name if what == "checkpoint" else f"{prefix}milestone-forged.json"
        assert (result.exit_code, left) == (0, [f"{expected} in cold"])


def test_only_the_files_of_one_step_are_signed(house: House) -> None:
    make_checkpoint(*roots(house), step=100)
    make_checkpoint(*roots(house), step=200)
    (house.cold / RUN / "generation-0001.json").write_bytes(b"{}\n")
    assert house.tierd("key", "sign", RUN, "--step", "200", "--yes").exit_code == 0
    assert all("000000000100" in file or "generation-0001" in file for file in unsigned_files(house))
    assert len(unsigned_files(house)) == 4


def test_claim_of_an_impossible_generation_is_named_and_not_signed(house: House) -> None:
    make_checkpoint(*roots(house))
    (house.cold / RUN / "generation-89999999.json").write_bytes(b"{}\n")
    result = house.tierd("key", "sign", RUN, "--yes")
    assert (result.exit_code, "generation-89999999" in result.stderr) == (3, True)
    assert unsigned_files(house) == [f"{RUN}/generation-89999999.json in cold"]


def test_run_that_does_not_exist_is_named(house: House) -> None:
    assert house.tierd("key", "sign", "other", "--yes").exit_code == 10


# ── tiers that differ ──


def test_damaged_replica_is_named_and_the_others_are_signed(house: House) -> None:
    made = make_checkpoint(*roots(house))
    flip(house.hot, made, made.files[0].name)
    result = house.tierd("key", "sign", RUN, "--yes")
    assert (result.exit_code, "in hot" in result.stderr) == (12, True)
    assert unsigned_files(house) == [f"{layout.manifest_key(made.id)} in hot"]
    assert house.tierd("key", "sign", RUN, "--yes").exit_code == 12, "it is named every time"


def test_replica_gets_the_manifest_that_another_node_has_signed(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other node has another digest and another key: both nodes accept both keys."""
    made = make_checkpoint(house.cold, house.root / "dr")
    own = (house.root / "key").read_text()
    (house.root / "key").write_text(new_key().line + own)
    monkeypatch.setattr("tierd.transfer.signing.preferred", lambda: "sha256")
    assert house.tierd("key", "sign", RUN, "--yes").exit_code == 0
    theirs = (folder_of(house.cold, made) / layout.MANIFEST).read_bytes()
    monkeypatch.undo()
    (house.root / "key").write_text("".join(reversed((house.root / "key").read_text().splitlines(keepends=True))))
    make_checkpoint(house.hot)
    assert house.tierd("key", "sign", RUN, "--yes").exit_code == 0
    assert raws(house, made) == [theirs] * 3
    assert decode(theirs, where="test").files[0].algorithm == "sha256"
    assert house.tierd("verify", "--deep").exit_code == 0


def test_two_nodes_that_signed_differently_agree_on_what_is_in_cold(house: House) -> None:
    made = make_checkpoint(*roots(house))
    keyring = keyring_of(house)
    assert house.tierd("key", "sign", RUN, "--yes").exit_code == 0
    agreed = raws(house, made)[1]
    other = json.loads(agreed)
    assert other.pop("signature")
    path = folder_of(house.hot, made) / layout.MANIFEST
    path.write_bytes(keyring.sign(layout.manifest_key(made.id), made.encode()))  # signed, without digests
    assert house.tierd("key", "sign", RUN, "--yes").exit_code == 0
    assert raws(house, made) == [agreed] * 3


def test_manifest_of_another_checkpoint_under_the_same_name_is_not_signed(house: House) -> None:
    made = make_checkpoint(house.cold, house.root / "dr")
    assert house.tierd("key", "sign", RUN, "--yes").exit_code == 0
    make_checkpoint(house.hot, sequence=7)
    result = house.tierd("key", "sign", RUN, "--yes")
    assert (result.exit_code, "differs from the signed one in cold" in result.stderr) == (12, True)
    assert unsigned_files(house) == [f"{layout.manifest_key(made.id)} in hot"]


def test_manifest_that_was_changed_after_it_was_signed_is_not_signed_again(house: House) -> None:
    made = make_checkpoint(house.hot, milestones=("best",))
    assert house.tierd("key", "sign", RUN, "--yes").exit_code == 0
    path = folder_of(house.hot, made) / layout.MANIFEST
    altered = path.read_bytes().replace(b'"loss": 2.5', b'"loss": 0.5')
    path.write_bytes(altered)
    result = house.tierd("key", "sign", RUN, "--yes")
    assert (result.exit_code, "changed after it was signed" in result.stderr) == (12, True)
    assert "0 files signed" in result.stdout
    assert path.read_bytes() == altered


def test_marker_that_was_changed_after_it_was_signed_is_not_signed_again(house: House) -> None:
    made = make_checkpoint(house.hot, milestones=("best",))
    assert house.tierd("key", "sign", RUN, "--yes").exit_code == 0
    path = folder_of(house.hot, made) / "milestone-best.json"
    path.write_bytes(path.read_bytes().replace(b"best", b"last"))
    result = house.tierd("key", "sign", RUN, "--yes")
    assert (result.exit_code, "changed after it was signed" in result.stderr) == (12, True)
    assert "0 files signed" in result.stdout


def test_file_that_another_key_signed_is_shown_so_and_signed(house: House) -> None:
    make_checkpoint(house.hot)
    assert house.tierd("key", "sign", RUN, "--yes").exit_code == 0
    former = keyring_of(house).keys[0].id
    (house.root / "key").unlink()
    make_key_file(house.root / "key")
    result = house.tierd("key", "sign", RUN, "--yes")
    assert result.exit_code == 0
    assert f"it is signed by the key {former}, which is not in the key file" in " ".join(result.stdout.split())
    assert unsigned_files(house) == []


@pytest.mark.parametrize(
    "arguments", [("new", "--dry-run"), ("new", "--step", "1"), ("show", "--yes"), ("show", "--ed25519")]
)
def test_option_that_an_action_does_not_have_is_refused(house: House, arguments: tuple[str, ...]) -> None:
    action, *options = arguments
    result = house.tierd("key", action, house.root / "other", *options)
    assert (result.exit_code, "option" in result.stderr) == (2, True)
    assert not (house.root / "other").exists()


def test_foreign_replica_is_verified_once(house: House) -> None:
    make_checkpoint(house.hot, milestones=("best",))
    result = house.tierd("verify")
    assert result.exit_code == 12
    assert "0 of 1 replicas are whole" in result.stdout


# ── interrupted ──


class Killed(BaseException):
    """Ends the command like a signal."""


class KilledStore(DirectoryStore):
    """Ends the command at a write."""

    writes_left = 0

    async def put_bytes(self, key: str, content: bytes, *, if_absent: bool = False) -> bool:
        if KilledStore.writes_left == 0:
            raise Killed
        KilledStore.writes_left -= 1
        return await super().put_bytes(key, content, if_absent=if_absent)


@pytest.mark.parametrize("writes", range(10))
def test_killed_before_any_write_and_repeated_everything_is_signed(house: House, writes: int) -> None:
    made = make_checkpoint(*roots(house), milestones=("best",))
    for root in roots(house):
        (folder_of(root, made) / layout.HEALTHY).write_bytes(encode_marker({"healthy": True}))
    (house.hot / RUN / "generation-0001.json").write_bytes(b"{}\n")
    assert len(unsigned_files(house)) == 10
    keyring = keyring_of(house)

    async def sign(store_type: type[DirectoryStore]) -> None:
        stores = {name: store_type(house.root / name) for name in TIERS}
        signing = Signing({name: Tier(name, store) for name, store in stores.items()}, keyring)
        try:
            for file in await signing.plan(RUN):
                assert await signing.sign(file)
        finally:
            for store in stores.values():
                await store.close()

    KilledStore.writes_left = writes
    with pytest.raises(Killed):
        asyncio.run(sign(KilledStore))
    left = unsigned_files(house)
    assert len(left) == 10 - writes
    is_marker_left = any("milestone" in file or "healthy" in file for file in left)
    assert not is_marker_left or sum("manifest" in file for file in left) == 3, "markers are signed before manifests"
    asyncio.run(sign(DirectoryStore))
    assert unsigned_files(house) == []
    assert len(set(raws(house, made))) == 1


# ── nodes that only restore ──


@pytest.fixture
def public(tmp_path: Path) -> House:
    """A node with public keys only; a checkpoint with markers is in cold."""
    pytest.importorskip("cryptography")
    house = make_house(tmp_path, more=CONFIG)
    private = make_key_file(tmp_path / "key", ED25519)
    made = make_checkpoint(*roots(house), milestones=("best",))
    for root in roots(house):
        (folder_of(root, made) / layout.HEALTHY).write_bytes(encode_marker({"healthy": True}))
    assert house.tierd("key", "sign", RUN, "--yes").exit_code == 0
    (tmp_path / "key").write_text(private.keys[0].public_line)
    return house


@pytest.mark.parametrize("tier", ["cold", "auto"])
def test_checkpoint_with_markers_is_restored_with_public_keys(public: House, tier: str) -> None:
    target = public.root / "restored"
    result = public.tierd("restore", "--tier", tier, "--to", target)
    assert result.exit_code == 0, result.stderr
    source = public.cold / RUN / "000000000100-g0001"
    for name in ("milestone-best.json", "healthy.json", "manifest.json"):
        assert (target / name).read_bytes() == (source / name).read_bytes()


def test_marker_that_no_key_signed_is_not_restored(public: House) -> None:
    for root in roots(public):
        (root / RUN / "000000000100-g0001" / "milestone-best.json").write_bytes(b'{"milestone":"best"}\n')
    result = public.tierd("restore", "--to", public.root / "restored")
    assert result.exit_code == 0, result.stderr
    assert not (public.root / "restored" / "milestone-best.json").exists()


def test_digest_of_the_signed_manifest_is_the_preferred_one(house: House) -> None:
    made = make_checkpoint(*roots(house))
    assert house.tierd("key", "sign", RUN, "--yes").exit_code == 0
    assert {entry.algorithm for entry in decode(raws(house, made)[0], where="test").files} == {digest.preferred()}
