"""Signed manifests and markers: what is accepted, and what a writer to a tier cannot forge."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import stat
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import pytest

from tests.support.forgery import changed_with_the_same_crc
from tests.support.other_user import OTHER_UID, OtherUser, needs_root, open_folder
from tests.support.rooms import RUN, Rooms, rooms_at
from tierd.config.sections import ColdPolicy, LifecycleConfig, TierPolicy
from tierd.errors import BadConfig, Corrupt, Foreign, TierdError
from tierd.format import checksum, digest, layout, wire
from tierd.format.claim import Claim
from tierd.format.health import Diagnosis
from tierd.format.ids import CheckpointId, Generation, Rank, checkpoint_id, generation_limit
from tierd.format.manifest import FORMAT_VERSION, FileEntry, Manifest, decode, encode_marker, file_entry
from tierd.format.signature import ED25519, HMAC, Keyring, new_key, parse_keys, without_signature
from tierd.keys.key_file import keyring_of, make_key_file, read_key_file
from tierd.tiers.chunks import ChunkSums
from tierd.transfer.repair import repair_replica
from tierd.transfer.verify import verify_replica
from tierd.workers.reaper import Reaper

OTHER = parse_keys(new_key().line, where="test")


@pytest.fixture(params=[HMAC, ED25519])
def keyring(request: pytest.FixtureRequest) -> Keyring:
    return parse_keys(f"{request.param}:" + "01" * 32, where="test")


@pytest.fixture
async def rooms(tmp_path: Path, keyring: Keyring) -> AsyncIterator[Rooms]:
    async with rooms_at(tmp_path, keyring=keyring, cold=("cold", "dr")) as found:
        yield found


async def persist(rooms: Rooms, step: int, *, milestone: str | None = None) -> CheckpointId:
    """A checkpoint that this daemon has committed in hot and in every cold tier."""
    snapshot_set = rooms.seal(step, [b"weights" * 1000], milestone=milestone)
    assert await rooms.persister().run_once()
    for name in rooms.cold:
        await rooms.list_tiers(name)
        await rooms.replicator(name).run_once()
    return snapshot_set.id


def path_of(rooms: Rooms, tier: str, checkpoint: CheckpointId, name: str = layout.MANIFEST) -> Path:
    return rooms.folder(tier, checkpoint) / name


def forge(rooms: Rooms, tier: str, genuine: CheckpointId, forged: CheckpointId, *, raw: bytes | None = None) -> None:
    """What a writer to the tier can put there: the files of a genuine checkpoint under another id."""
    folder = rooms.folder(tier, forged)
    folder.mkdir(parents=True)
    for path in rooms.folder(tier, genuine).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    manifest = json.loads(path_of(rooms, tier, genuine).read_bytes())
    manifest |= {"run": forged.run, "step": forged.step, "generation": forged.generation}
    content = json.dumps(manifest, indent=1).encode() + b"\n" if raw is None else raw
    (folder / layout.MANIFEST).write_bytes(content)


def entry_of(content: bytes) -> FileEntry:
    return file_entry(layout.shard_name(Rank(0), 1), len(content), 4096, [checksum.crc64nvme(content)])


def manifest_of(checkpoint: CheckpointId, **more: object) -> Manifest:
    return Manifest(
        format_version=FORMAT_VERSION,
        run=checkpoint.run,
        step=checkpoint.step,
        generation=checkpoint.generation,
        sequence=1,
        parent=None,
        world_size=1,
        created_at="2026-01-01T00:00:00+00:00",
        kind="snapshot",
        metrics={},
        architecture_hash="",
        versions={},
        files=[entry_of(b"shard")],
        **more,  # pyright: ignore[reportArgumentType]
    )


# ── the bytes ──


def test_signature_covers_the_exact_bytes_and_the_key_of_the_file() -> None:
    secret = bytes(range(32))
    keyring = parse_keys(f"hmac-sha256:{secret.hex()}", where="test")
    manifest = manifest_of(checkpoint_id("run", 5, 3))
    raw = keyring.sign_manifest(manifest).encode()
    unsigned = manifest.encode()
    message = b"tierd signed file 1\nrun/000000000005-g0003/manifest.json\n" + unsigned
    expected = hmac.new(secret, message, hashlib.sha256).hexdigest()
    key_id = hashlib.sha256(b"tierd key id\n" + secret).hexdigest()[:16]
    tail = f',\n "signature": "hmac-sha256:{key_id}:{expected}"\n}}\n'.encode()
    assert raw == unsigned.removesuffix(b"\n}\n") + tail
    assert without_signature(raw) == unsigned
    keyring.check(layout.manifest_key(manifest.id), raw, where="test")


def test_manifest_without_a_key_has_no_further_field() -> None:
    assert b"signature" not in manifest_of(checkpoint_id("run", 5, 3)).encode()
    assert b"digest" not in manifest_of(checkpoint_id("run", 5, 3)).encode()


def test_reader_without_a_key_reads_a_signed_manifest(keyring: Keyring) -> None:
    manifest = keyring.sign_manifest(manifest_of(checkpoint_id("run", 5, 3)))
    assert decode(manifest.encode(), where="test") == manifest


@pytest.mark.parametrize("position", [0, 20, 200, -40, -2])
def test_changed_byte_is_foreign(keyring: Keyring, position: int) -> None:
    raw = bytearray(keyring.sign_manifest(manifest_of(checkpoint_id("run", 5, 3))).encode())
    raw[position] ^= 1
    with pytest.raises(Foreign):
        keyring.check("run/000000000005-g0003/manifest.json", bytes(raw), where="test")


@pytest.mark.parametrize("key", ["run/000000000006-g0003/manifest.json", "other/000000000005-g0003/manifest.json"])
def test_signed_manifest_is_foreign_at_another_step_and_in_another_run(keyring: Keyring, key: str) -> None:
    raw = keyring.sign_manifest(manifest_of(checkpoint_id("run", 5, 3))).encode()
    with pytest.raises(Foreign, match="is wrong"):
        keyring.check(key, raw, where="test")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"{}\n", "not signed"),
        (b"", "not signed"),
        (b'{"a":1,"signature":"rsa-2048:' + b"0" * 16 + b":" + b"0" * 128 + b'"}\n', "rsa-2048"),
        (b'{"a":1,"signature":"hmac-sha256:' + b"0" * 16 + b":" + b"0" * 64 + b'"}\n', "not in the key file"),
    ],
)
def test_foreign_file_says_what_is_wrong(keyring: Keyring, content: bytes, why: str) -> None:
    with pytest.raises(Foreign, match=why):
        keyring.check("run/generation-0003.json", content, where="test")


def test_first_key_signs_and_all_keys_are_accepted() -> None:
    old, new = new_key(HMAC).line, new_key(ED25519).line
    before = parse_keys(old, where="test").sign("a", b'{"a":1}\n')
    rotated = parse_keys(f"# rotated in 2026\n{new}\n{old}", where="test")
    rotated.check("a", before, where="test")
    parse_keys(new, where="test").check("a", rotated.sign("a", b'{"a":1}\n'), where="test")
    with pytest.raises(Foreign, match="not in the key file"):
        parse_keys(new, where="test").check("a", before, where="test")


def test_digest_of_a_chunk_is_the_hash_of_the_hashes_of_its_leaves() -> None:
    content = os.urandom((5 << 20) + 123)
    sums = ChunkSums(len(content), 4 << 20, "sha256")
    view = memoryview(content)
    for begin, end in ((4 << 20, len(content)), (2 << 20, 4 << 20), (0, 2 << 20)):
        sums.add(begin, view[begin:end])
    entry = sums.entry("a")
    leaves = [hashlib.sha256(content[at : at + (1 << 20)]).digest() for at in range(0, 4 << 20, 1 << 20)]
    whole = hashlib.sha256(b"".join(leaves)).digest()
    assert entry.digest == "sha256"
    assert entry.digest_of(0) == digest.of_chunk("sha256", leaves)
    assert digest.is_digest(entry.digest_of(0))
    assert entry.digest_of(0).encode() == base64.b64encode(whole)


@pytest.mark.parametrize(
    "more", [{"digest": "md5", "digests": ["x"]}, {"digest": "sha256"}, {"digest": "sha256", "digests": ["AAAA"]}]
)
def test_manifest_with_wrong_digests_is_corrupt(more: dict[str, object]) -> None:
    entry = msgspec.structs.replace(entry_of(b"shard"), **more)
    raw = msgspec.structs.replace(manifest_of(checkpoint_id("run", 5, 3)), files=[entry]).encode()
    with pytest.raises(Corrupt, match="digests"):
        decode(raw, where="test")


# ── key files ──


@pytest.mark.parametrize("algorithm", [HMAC, ED25519])
def test_new_key_file_is_private_and_is_not_overwritten(tmp_path: Path, algorithm: str) -> None:
    path = tmp_path / "key"
    before = os.umask(0)
    try:
        made = make_key_file(path, algorithm)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [key.id for key in read_key_file(path).keys] == [made.keys[0].id]
    with pytest.raises(BadConfig, match="exists"):
        make_key_file(path)
    assert [key.id for key in read_key_file(path).keys] == [made.keys[0].id]


def test_key_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    make_key_file(path)
    path.chmod(0o640)
    with pytest.raises(BadConfig, match="mode 640"):
        read_key_file(path)


@needs_root
@pytest.mark.parametrize(("mode", "is_read"), [(0o440, True), (0o640, True), (0o444, False), (0o460, False)])
def test_group_that_root_gave_a_key_file_may_read_it(mode: int, is_read: bool) -> None:
    """As Kubernetes mounts a Secret for a pod with fsGroup."""
    with open_folder() as folder, OtherUser() as other:
        make_key_file(folder / "key")
        os.chown(folder / "key", 0, OTHER_UID)
        (folder / "key").chmod(mode)
        assert other.call(_can_read, folder / "key") is is_read


def _can_read(path: Path) -> bool:
    try:
        read_key_file(path)
    except BadConfig:
        return False
    return True


def test_folder_in_place_of_a_key_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="it is not a file"):
        read_key_file(tmp_path)


def test_public_key_checks_signatures_and_cannot_sign(tmp_path: Path) -> None:
    private = make_key_file(tmp_path / "key", ED25519)
    public_file = tmp_path / "public"
    public_file.write_text(private.keys[0].public_line)
    public_file.chmod(0o644)
    public = read_key_file(public_file)
    manifest = private.sign_manifest(manifest_of(checkpoint_id("run", 5, 3)))
    public.check(layout.manifest_key(manifest.id), manifest.encode(), where="test")
    with pytest.raises(BadConfig, match="only public keys"):
        public.sign_manifest(manifest)
    with pytest.raises(BadConfig, match="only public keys"):
        keyring_of(str(public_file), to_sign=True)
    public_file.chmod(0o664)
    with pytest.raises(BadConfig, match="mode 664"):
        read_key_file(public_file)


def test_public_key_as_a_secret_of_hmac_signs_nothing_that_counts(tmp_path: Path) -> None:
    """Everybody knows the public key. The algorithm belongs to the key, so a signature cannot name another one."""
    private = make_key_file(tmp_path / "key", ED25519)
    forger = parse_keys(private.keys[0].public_line.replace("ed25519-public", HMAC), where="test")
    manifest = manifest_of(checkpoint_id("run", 5, 3))
    raw = forger.sign(layout.manifest_key(manifest.id), manifest.encode())
    forged = raw.replace(forger.keys[0].id.encode(), private.keys[0].id.encode())
    for content in (raw, forged):
        with pytest.raises(Foreign, match="not in the key file"):
            private.check(layout.manifest_key(manifest.id), content, where="test")


@pytest.mark.parametrize("text", ["", "# nothing\n", "hmac-sha256:00\n", "ed25519:" + "0" * 63, "rsa:" + "0" * 64])
def test_key_file_without_a_valid_key_is_refused_and_not_printed(text: str) -> None:
    with pytest.raises(BadConfig) as refused:
        parse_keys(text, where="key")
    assert "00" not in str(refused.value)


# ── what a writer to a tier cannot do ──


async def test_signed_checkpoint_is_the_same_in_all_tiers_and_has_digests(rooms: Rooms) -> None:
    checkpoint = await persist(rooms, 100)
    raws = {path_of(rooms, tier, checkpoint).read_bytes() for tier in rooms.tiers}
    assert len(raws) == 1
    (entry,) = decode(raws.pop(), where="test").files
    assert entry.algorithm == digest.preferred()
    assert len(entry.digest_of(0)) == 44


async def test_forged_checkpoint_of_a_high_step_is_foreign_and_pushes_out_nothing(rooms: Rooms) -> None:
    genuine = [await persist(rooms, step) for step in (100, 200, 300)]
    for step in (900_001, 900_002, 900_003):
        forge(rooms, "cold", genuine[0], checkpoint_id(RUN, step, 1))
    before = {tier: rooms.steps(tier) for tier in rooms.tiers}
    await rooms.list_tiers()
    await Reaper(rooms.context).run_once()
    assert {tier: rooms.steps(tier) for tier in rooms.tiers} == before
    assert rooms.catalog.newest(RUN, "cold").step == 300  # pyright: ignore[reportOptionalMemberAccess]
    assert [tier for tier, _ in rooms.catalog.foreign()] == ["cold"] * 3
    assert rooms.count("tierd_failures_total", stage="list", kind="foreign") == 1


async def test_manifest_moved_to_another_step_or_run_is_foreign(rooms: Rooms) -> None:
    genuine = await persist(rooms, 100)
    raw = path_of(rooms, "cold", genuine).read_bytes()
    forge(rooms, "cold", genuine, checkpoint_id(RUN, 101, 1), raw=raw.replace(b'"step": 100', b'"step": 101'))
    forge(rooms, "cold", genuine, checkpoint_id("other", 100, 1), raw=raw.replace(b'"run42"', b'"other"'))
    await rooms.list_tiers()
    assert {key for _, key in rooms.catalog.foreign()} == {
        "run42/000000000101-g0001/manifest.json",
        "other/000000000100-g0001/manifest.json",
    }


async def test_replica_with_a_forged_manifest_does_not_let_hot_evict(rooms: Rooms) -> None:
    rooms.config = msgspec.structs.replace(rooms.config, lifecycle=LifecycleConfig(hot=TierPolicy(keep_last=1)))
    genuine = [await persist(rooms, step) for step in (100, 200, 300)]
    for checkpoint in genuine:
        for tier in ("cold", "dr"):
            path = path_of(rooms, tier, checkpoint)
            path.write_bytes(path.read_bytes().replace(b'"kind": "snapshot"', b'"kind": "snapshop"'))
    await Reaper(rooms.context).run_once()  # the catalog still has the listings from before
    await rooms.list_tiers()
    await Reaper(rooms.context).run_once()
    assert rooms.steps("hot") == [300, 200, 100]
    assert rooms.steps("cold") == [300, 200, 100], "a foreign replica is never deleted"


@pytest.mark.parametrize("name", ["milestone-best.json", "unhealthy.json", "healthy.json"])
async def test_forged_marker_does_not_count_and_is_not_overwritten(rooms: Rooms, name: str) -> None:
    checkpoint = await persist(rooms, 100)
    forged = encode_marker({"healthy": False})
    path_of(rooms, "cold", checkpoint, name).write_bytes(forged)
    await rooms.list_tiers()
    entry = rooms.catalog.get(checkpoint)
    assert entry is not None
    assert (entry.all_milestones, entry.healthy) == (frozenset(), None)
    assert ("cold", f"{layout.checkpoint_prefix(checkpoint)}{name}") in rooms.catalog.foreign()
    if name.startswith("milestone"):
        with pytest.raises(Foreign):
            await rooms.cold["cold"].mark_milestone(checkpoint, "best", "now")
    assert path_of(rooms, "cold", checkpoint, name).read_bytes() == forged


async def test_a_forged_removal_ends_no_milestone(rooms: Rooms) -> None:
    checkpoint = await persist(rooms, 100, milestone="best")
    path_of(rooms, "cold", checkpoint, "removed-milestone-best.json").write_bytes(encode_marker({}))
    await rooms.list_tiers()
    entry = rooms.catalog.get(checkpoint)
    assert entry is not None
    assert entry.all_milestones == {"best"}
    assert ("cold", f"{layout.checkpoint_prefix(checkpoint)}removed-milestone-best.json") in rooms.catalog.foreign()
    await rooms.hot.unmark_milestone(checkpoint, "best", "now")
    await rooms.list_tiers()
    entry = rooms.catalog.get(checkpoint)
    assert entry is not None
    assert entry.all_milestones == frozenset(), "a signed one, in any tier, ends it"


async def test_without_a_key_a_removal_in_one_tier_ends_the_milestone_in_all(tmp_path: Path) -> None:
    """Whoever can write to one cold tier can thus have its checkpoint deleted everywhere."""
    lifecycle = LifecycleConfig(hot=TierPolicy(keep_last=1, milestones=True), cold=ColdPolicy(keep_last=1))
    async with rooms_at(tmp_path, cold=("cold", "dr"), lifecycle=lifecycle) as rooms:

        async def settle() -> list[list[int]]:
            for _ in range(3):  # a replica stays until the others have the removal
                await rooms.list_tiers()
                for name in rooms.cold:
                    await rooms.replicator(name).run_once()
                await Reaper(rooms.context).run_once()
            return [rooms.steps(tier) for tier in ("hot", "cold", "dr")]

        await rooms.hot.claim_generation(RUN, Generation(1), Claim.new("here"))
        kept = await persist(rooms, 100, milestone="best")
        for step in (200, 300):
            await persist(rooms, step)
        assert await settle() == [[300, 100]] * 3
        path_of(rooms, "cold", kept, "removed-milestone-best.json").write_bytes(b"")
        assert await settle() == [[300]] * 3


async def test_signed_marker_counts_in_every_tier(rooms: Rooms) -> None:
    checkpoint = await persist(rooms, 100, milestone="best")
    await rooms.list_tiers()
    entry = rooms.catalog.get(checkpoint)
    assert entry is not None
    assert entry.milestones.keys() == {"hot", "cold", "dr"}
    assert not rooms.catalog.foreign()


async def test_forged_claim_in_cold_fences_nobody_with_a_key(rooms: Rooms) -> None:
    assert await rooms.hot.claim_generation(RUN, Generation(1), Claim.new("here"))
    forged = encode_marker(Claim.new("elsewhere"))
    await rooms.cold["cold"].store.put_bytes(layout.generation_key(RUN, Generation(1)), forged)
    checkpoint = await persist(rooms, 100)
    assert checkpoint.step in rooms.steps("cold")
    assert not [message for message in rooms.sent if isinstance(message, wire.Fenced)]


async def test_marker_that_is_deleted_while_it_is_listed_is_not_foreign(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = await persist(rooms, 100)
    await rooms.cold["cold"].mark_milestone(checkpoint, "best", "now")
    store = rooms.cold["cold"].store
    real_get_many, key = store.get_many, layout.file_key(checkpoint, layout.milestone_file("best"))

    async def get_many(keys: Sequence[str], *, size_max: int) -> Sequence[bytes | TierdError]:
        if key in keys:
            await store.delete([key])
        return await real_get_many(keys, size_max=size_max)

    monkeypatch.setattr(store, "get_many", get_many)
    listing = await rooms.cold["cold"].listing()
    assert (listing.foreign, listing.milestones(checkpoint)) == ({}, frozenset())


async def test_forged_claim_does_not_advance_the_generation(rooms: Rooms) -> None:
    await persist(rooms, 100)
    assert await rooms.cold["cold"].claim_generation(RUN, Generation(4), Claim.new("other"))
    (rooms.folder("cold", checkpoint_id(RUN, 1, 1)).parent / "generation-0050.json").write_bytes(b'{"node":"x"}\n')
    await rooms.list_tiers()
    assert rooms.catalog.generation_max(RUN) == 4
    assert [key for _, key in rooms.catalog.foreign()] == ["run42/generation-0050.json"]


async def test_shard_changed_with_a_matching_crc_is_found_by_its_digest(rooms: Rooms) -> None:
    """CRCs are linear: for any change, eight further bytes restore the checksum."""
    checkpoint = await persist(rooms, 100)
    path = path_of(rooms, "cold", checkpoint, layout.shard_name(Rank(0), 1))
    path.write_bytes(changed_with_the_same_crc(path.read_bytes()))

    verification = await verify_replica(rooms.cold["cold"], checkpoint)
    assert verification is not None
    assert [digest.preferred() in sentence for sentence in verification.sentences] == [True]


@pytest.mark.parametrize("is_listed", [True, False])
async def test_forged_milestone_does_not_stop_a_deletion_and_is_not_signed(rooms: Rooms, is_listed: bool) -> None:
    rooms.config = msgspec.structs.replace(
        rooms.config, lifecycle=LifecycleConfig(hot=TierPolicy(keep_last=1), cold=ColdPolicy(keep_last=1))
    )
    first = await persist(rooms, 100)
    await persist(rooms, 200)
    await rooms.list_tiers()
    path_of(rooms, "cold", first, "milestone-best.json").write_bytes(encode_marker({"milestone": "best"}))
    if is_listed:
        await rooms.list_tiers()
    await Reaper(rooms.context).run_once()
    for name in rooms.cold:
        await rooms.replicator(name).run_once()
    assert {tier: rooms.steps(tier) for tier in rooms.tiers} == {tier: [200] for tier in rooms.tiers}


async def test_forged_milestone_in_cold_does_not_let_hot_evict_the_genuine_one(rooms: Rooms) -> None:
    """Cold would expire the checkpoint: there its milestone does not count."""
    rooms.config = msgspec.structs.replace(
        rooms.config, lifecycle=LifecycleConfig(hot=TierPolicy(keep_last=1, milestones=False))
    )
    first = await persist(rooms, 100)
    await persist(rooms, 200)
    for tier in ("cold", "dr"):
        path_of(rooms, tier, first, "milestone-best.json").write_bytes(encode_marker({"milestone": "best"}))
    await rooms.hot.mark_milestone(first, "best", "now")
    await rooms.list_tiers()
    await Reaper(rooms.context).run_once()
    assert rooms.steps("hot") == [200, 100]


@pytest.mark.parametrize("forged", [{"healthy": False}, {"healthy": True, "tensors": 1, "digest": "forged"}])
async def test_verdict_that_was_replaced_after_its_listing_is_not_signed(
    rooms: Rooms, forged: dict[str, object]
) -> None:
    checkpoint = await persist(rooms, 100)
    await rooms.hot.mark_diagnosis(checkpoint, Diagnosis(healthy=True))
    path = path_of(rooms, "hot", checkpoint, layout.HEALTHY)
    path.write_bytes(encode_marker(forged))
    assert await rooms.hot.diagnosis(checkpoint, is_healthy=True) == Diagnosis(healthy=True)


@pytest.mark.parametrize("is_deep", [True, False])
async def test_repair_does_not_take_a_shard_with_a_matching_crc(rooms: Rooms, is_deep: bool) -> None:
    checkpoint = await persist(rooms, 100)
    name = layout.shard_name(Rank(0), 1)
    genuine = path_of(rooms, "dr", checkpoint, name).read_bytes()
    path_of(rooms, "cold", checkpoint, name).write_bytes(changed_with_the_same_crc(genuine))
    path_of(rooms, "hot", checkpoint, name).write_bytes(genuine[:-1])
    damage = await verify_replica(rooms.hot, checkpoint, is_deep=is_deep)
    assert damage is not None
    repair = await repair_replica(rooms.hot, checkpoint, damage, list(rooms.tiers.values()))
    assert (repair.repaired, repair.refused) == ({name: "dr"}, [])
    assert path_of(rooms, "hot", checkpoint, name).read_bytes() == genuine


# ── without a key ──


@pytest.fixture
async def unsigned(tmp_path: Path) -> AsyncIterator[Rooms]:
    async with rooms_at(tmp_path, cold=("cold", "dr")) as found:
        yield found


@pytest.mark.parametrize("generation", [1, 2])
async def test_without_a_key_what_no_daemon_of_the_run_wrote_pushes_out_nothing(
    unsigned: Rooms, generation: int
) -> None:
    assert await unsigned.hot.claim_generation(RUN, Generation(1), Claim())
    unsigned.catalog.claims.saw(RUN, [1], "hot", is_here=True)
    genuine = [await persist(unsigned, step) for step in (100, 200, 300)]
    for step in (900_001, 900_002, 900_003):
        forge(unsigned, "cold", genuine[0], checkpoint_id(RUN, step, generation))
    before = {tier: unsigned.steps(tier) for tier in unsigned.tiers}
    await unsigned.list_tiers()
    await Reaper(unsigned.context).run_once()
    assert {tier: unsigned.steps(tier) for tier in unsigned.tiers} == before
    assert [tier for tier, _ in unsigned.catalog.foreign()] == ["cold"] * 3


@pytest.mark.parametrize("generation", [99_999_999, 90_000_000, 89_999_999])
async def test_forged_generation_is_foreign_and_leaves_numbers_to_claim(unsigned: Rooms, generation: int) -> None:
    checkpoint = await persist(unsigned, 100)
    forge(unsigned, "cold", checkpoint, checkpoint_id(RUN, 100, generation))
    claim = layout.generation_key(RUN, Generation(generation))
    (unsigned.folder("cold", checkpoint).parent / claim.rpartition("/")[2]).write_bytes(b"{}\n")
    await unsigned.list_tiers()
    assert unsigned.catalog.generation_max(RUN) == 1
    keys = {key for tier, key in unsigned.catalog.foreign() if tier == "cold"}
    assert keys == {layout.manifest_key(checkpoint_id(RUN, 100, generation)), claim}


def test_generation_of_a_start_without_listings_is_within_the_limit() -> None:
    now_s = 1.8e9
    assert generation_limit(3, now_s) >= now_s / 60
    assert generation_limit(3, 0.0) > 29_000_000, "a clock that was reset does not make former claims foreign"
    assert generation_limit(89_999_999, now_s) == 90_000_000
