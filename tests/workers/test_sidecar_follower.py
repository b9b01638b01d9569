"""Files beside the checkpoints reach every tier while they grow, and keep their past."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from tests.support.rooms import RUN, Rooms, rooms_at
from tierd.access import PRIVATE
from tierd.errors import Corrupt, Foreign, TierUnreachable
from tierd.format.sidecar import SEGMENT_BYTES_MAX, Segment, chain, parse_segment, segment_prefix
from tierd.format.signature import Keyring, new_key
from tierd.status.folder_reports import SidecarReport
from tierd.tiers.tier import Tier
from tierd.transfer.sidecar_output import write_sidecar
from tierd.workers.sidecar_follower import REWRITTEN_S, SidecarFollower

NAME = ".loss.json"


class Followed:
    """A folder with sidecar files, and the daemon's worker, whose clock a test sets."""

    def __init__(self, rooms: Rooms, root: Path, now_s: list[float]) -> None:
        self.rooms, self.folder, self._now_s = rooms, root / "out", now_s
        self.folder.mkdir()
        sidecars = msgspec.structs.replace(
            rooms.config.sidecars, path=str(self.folder), run=RUN, keep=[NAME, "*.jsonl"]
        )
        rooms.config = msgspec.structs.replace(rooms.config, sidecars=sidecars)
        self.worker = SidecarFollower(rooms.context)
        self.root = root

    @property
    def file(self) -> Path:
        return self.folder / NAME

    def restart(self) -> None:
        self.worker = SidecarFollower(self.rooms.context)

    async def settle(self, passes: int = 2) -> SidecarReport:
        for _ in range(passes):
            self._now_s[0] += 2 * REWRITTEN_S
            assert await self.worker.run_once()
        return self.worker.report()

    async def segments(self, tier: str, name: str = NAME, version: int = 1) -> list[Segment]:
        stored = await self.rooms.context.tiers[tier].store.list(segment_prefix(RUN))
        parsed = [parse_segment(each.key) for each in stored]
        assert None not in parsed
        return [each for each in parsed if each is not None and (each.file, each.version) == (name, version)]

    async def content(self, tier: str, name: str = NAME, version: int = 1) -> bytes:
        path = chain(await self.segments(tier, name, version))
        if not path:
            return b""
        target = self.root / f"{tier}-{name}-{version}"
        target.unlink(missing_ok=True)
        assert await write_sidecar(self.rooms.context.tiers[tier], path, target, PRIVATE)
        return target.read_bytes()


@pytest.fixture
async def followed(tmp_path: Path, now_s: list[float]) -> AsyncIterator[Followed]:
    async with rooms_at(tmp_path, clocks={"monotonic_s": lambda: now_s[0]}) as rooms:
        followed = Followed(rooms, tmp_path, now_s)
        yield followed
        await followed.worker.close()


@pytest.fixture
def now_s() -> list[float]:
    return [1000.0]


async def test_a_file_that_grows_is_in_every_tier_in_few_segments(followed: Followed) -> None:
    lines = b""
    for step in range(100):
        lines += b"step %d loss %.4f\n" % (step, 1 / (1 + step))
        followed.file.write_bytes(lines)
        await followed.settle(1)
        if step % 30 == 7:
            followed.restart()
    report = await followed.settle()
    for tier in ("hot", "cold"):
        assert await followed.content(tier) == lines
        assert len(await followed.segments(tier)) <= 12
    assert (report.files, report.size_bytes, report.behind_s, report.problems) == (1, len(lines), 0.0, [])
    assert followed.rooms.count("tierd_sidecar_lag_seconds", run=RUN) == 0
    assert followed.rooms.count("tierd_sidecar_rewritten_total", run=RUN) == 0


async def test_a_document_that_is_written_anew_with_more_in_it_keeps_its_version(followed: Followed) -> None:
    losses: list[float] = []
    for step in range(30):
        losses.append(1 / (1 + step))
        new = followed.folder / "new"
        new.write_text(json.dumps({"losses": losses}, indent=1) + "\n")
        new.rename(followed.file)
        await followed.settle(1)
    assert json.loads(await followed.content("cold")) == {"losses": losses}
    assert followed.rooms.count("tierd_sidecar_rewritten_total", run=RUN) == 0
    assert len([each for each in await followed.segments("cold") if each.is_tail]) == 1


@pytest.mark.parametrize("other", [b"", b"step 1\n", b"step 1\nstep 2 CHANGED\nstep 3\nstep 4\n"])
async def test_a_past_that_changed_stays_as_a_version_and_is_reported(followed: Followed, other: bytes) -> None:
    before = b"step 1\nstep 2\nstep 3\n"
    followed.file.write_bytes(before)
    await followed.settle()
    followed.file.write_bytes(other)
    report = await followed.settle(3)
    assert await followed.content("cold") == before
    assert await followed.content("cold", version=2) == other
    assert report.rewritten == {NAME: 1}
    assert followed.rooms.count("tierd_sidecar_rewritten_total", run=RUN) == 1
    followed.file.write_bytes(other + b"step 5\n")
    followed.restart()
    await followed.settle()
    assert await followed.content("cold", version=2) == other + b"step 5\n"
    assert await followed.segments("cold", version=3) == []


async def test_a_program_may_take_a_moment_to_write_a_file_anew(followed: Followed, now_s: list[float]) -> None:
    followed.file.write_bytes(b"1\n2\n3\n")
    await followed.settle()
    followed.file.write_bytes(b"1\n")
    now_s[0] += 600
    await followed.worker.run_once()
    followed.file.write_bytes(b"1\n2\n3\n4\n")
    report = await followed.settle()
    assert await followed.content("cold") == b"1\n2\n3\n4\n"
    assert report.rewritten == {}


async def test_what_was_deleted_stays_in_the_tiers(followed: Followed) -> None:
    followed.file.write_bytes(b"1\n2\n")
    await followed.settle()
    followed.file.unlink()
    report = await followed.settle()
    assert await followed.content("cold") == b"1\n2\n"
    assert (report.behind_s, report.problems) == (0.0, [])


@pytest.mark.parametrize("new", [b"4\n", None])
async def test_lines_that_were_written_just_before_a_rotation_stay_with_the_former_version(
    followed: Followed, new: bytes | None
) -> None:
    followed.file.write_bytes(b"1\n2\n")
    await followed.settle()
    with followed.file.open("ab") as file:
        file.write(b"3\n")
    followed.file.rename(followed.folder / "loss.old")
    if new is not None:
        followed.file.write_bytes(new)
    report = await followed.settle(3)
    for tier in ("hot", "cold"):
        assert await followed.content(tier) == b"1\n2\n3\n"
        assert await followed.content(tier, version=2) == (new or b"")
    assert (report.rewritten, report.behind_s) == ({} if new is None else {NAME: 1}, 0.0)


async def test_a_file_that_is_deleted_before_it_is_copied_is_not_behind_for_ever(
    followed: Followed, now_s: list[float]
) -> None:
    followed.file.write_bytes(b"1\n")
    await followed.settle()
    followed.file.write_bytes(b"1\n2\n")
    now_s[0] += 1
    await followed.worker.run_once()
    followed.file.unlink()
    report = await followed.settle()
    assert report.behind_s == 0.0
    assert await followed.content("cold") == b"1\n2\n", "the daemon had it open"


@contextmanager
def silent_cold(followed: Followed, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The cold tier does not answer."""

    async def no_list(*_: object, **__: object) -> list[object]:
        raise TierUnreachable("list: no answer")

    with monkeypatch.context() as patch:
        patch.setattr(followed.rooms.context.cold["cold"].store, "list", no_list)
        yield


async def test_a_former_version_reaches_a_tier_that_did_not_answer_when_the_file_changed(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed.file.write_bytes(b"1\n2\n")
    await followed.settle()

    with silent_cold(followed, monkeypatch):
        followed.file.write_bytes(b"1\n2\n3\n")
        await followed.settle()
        followed.file.write_bytes(b"a\n")
        await followed.settle(3)
    assert await followed.content("cold") == b"1\n2\n"
    await followed.settle(40)  # the tier is asked less often after a failure
    for tier in ("hot", "cold"):
        assert await followed.content(tier) == b"1\n2\n3\n"
        assert await followed.content(tier, version=2) == b"a\n"
    hot = followed.rooms.context.hot
    await hot.store.delete([each.key for each in await followed.segments("hot")])
    followed.restart()
    await followed.settle()
    assert await followed.segments("hot") == [], "hot fetches nothing"


async def test_a_file_that_was_deleted_reaches_a_tier_that_did_not_answer_before(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    with silent_cold(followed, monkeypatch):
        followed.file.write_bytes(b"1\n2\n")
        await followed.settle()
        followed.file.unlink()
        await followed.settle()
    assert await followed.content("hot") == b"1\n2\n"
    await followed.settle(120)  # the tier is asked less often after a failure
    assert await followed.content("cold") == b"1\n2\n"


async def test_a_file_that_does_not_change_is_not_held_open(followed: Followed) -> None:
    def count() -> int:
        return [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")].count(str(followed.file))

    followed.file.write_bytes(b"1\n")
    await followed.settle()
    assert count() == 1
    await followed.settle(11)
    assert count() == 0


async def test_a_tier_that_fails_gets_the_file_later_and_delays_no_other(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold = followed.rooms.context.cold["cold"]

    async def put_bytes(*_: object, **__: object) -> bool:
        raise TierUnreachable("put: no answer")

    followed.file.write_bytes(b"1\n2\n")
    with monkeypatch.context() as patch:
        patch.setattr(cold.store, "put_bytes", put_bytes)
        report = await followed.settle(3)
    assert await followed.content("hot") == b"1\n2\n"
    assert report.behind_s > 0
    assert len(report.problems) <= 1
    report = await followed.settle(200 // 6)
    assert await followed.content("cold") == b"1\n2\n"
    assert (report.behind_s, report.problems) == (0.0, [])


async def test_a_slow_tier_does_not_make_the_file_be_read_seldom(
    followed: Followed, now_s: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only reading is bounded to a share of the time. An upload of a minute would delay the next copy by 20 minutes."""
    store = followed.rooms.context.tiers["cold"].store
    real_put = store.put_bytes

    async def put_bytes(key: str, content: bytes, *, if_absent: bool = False) -> bool:
        now_s[0] += 60.0
        return await real_put(key, content, if_absent=if_absent)

    monkeypatch.setattr(store, "put_bytes", put_bytes)
    followed.file.write_bytes(b"first\n")
    await followed.settle(1)
    followed.file.write_bytes(b"first\nsecond\n")
    await followed.settle(1)
    for tier in ("hot", "cold"):
        assert await followed.content(tier) == b"first\nsecond\n"


@pytest.mark.parametrize("grown", [b"", b"c\nd\ne\nf\n"])
async def test_a_tier_that_answers_late_and_has_another_past_keeps_it(
    followed: Followed, monkeypatch: pytest.MonkeyPatch, grown: bytes
) -> None:
    """As on a new node whose training begins its file anew while cold does not answer."""
    followed.file.write_bytes(b"1\n2\n3\n")
    await followed.settle()
    hot, cold = followed.rooms.context.hot, followed.rooms.context.cold["cold"]
    await hot.store.delete([each.key for each in await followed.segments("hot")])
    followed.file.write_bytes(b"a\nb\n")
    followed.restart()

    async def no_list(*_: object, **__: object) -> list[object]:
        raise TierUnreachable("list: no answer")

    with monkeypatch.context() as patch:
        patch.setattr(cold.store, "list", no_list)
        await followed.settle(3)
    with followed.file.open("ab") as file:
        file.write(grown)
    report = await followed.settle(200 // 6)
    assert report.rewritten == {NAME: 1}
    assert await followed.content("cold", version=1) == b"1\n2\n3\n"
    assert await followed.content("cold", version=2) == b"a\nb\n" + grown
    assert await followed.content("hot", version=2) == b"a\nb\n" + grown


async def test_segments_that_disappear_are_written_again(followed: Followed, now_s: list[float]) -> None:
    followed.file.write_bytes(b"1\n2\n")
    await followed.settle()
    cold = followed.rooms.context.cold["cold"]
    await cold.store.delete([each.key for each in await followed.segments("cold")])
    now_s[0] += 600
    await followed.settle()
    assert await followed.content("cold") == b"1\n2\n"


async def test_two_daemons_with_one_file_complete_each_other(followed: Followed, tmp_path: Path) -> None:
    first, second = followed.worker, SidecarFollower(followed.rooms.context)
    lines = b""
    for step in range(40):
        lines += b"step %d\n" % step
        followed.file.write_bytes(lines)
        followed.worker = first if step % 3 else second
        await followed.settle(1)
    followed.worker = first
    await followed.settle()
    await second.close()
    assert await followed.content("cold") == lines
    assert followed.rooms.count("tierd_sidecar_rewritten_total", run=RUN) == 0


@pytest.mark.parametrize("name", ["a b.jsonl", "ä.jsonl"])
async def test_a_name_that_cannot_be_a_key_is_reported(followed: Followed, name: str) -> None:
    (followed.folder / name).write_text("1\n")
    followed.file.write_bytes(b"1\n")
    report = await followed.settle()
    assert len(report.problems) == 1
    assert "the name cannot be part of a key" in report.problems[0]
    assert await followed.content("cold") == b"1\n", "the others are copied"


async def test_any_number_of_names_that_cannot_be_keys_is_a_few_problems(followed: Followed) -> None:
    for number in range(300):
        (followed.folder / f"{number} of 300.jsonl").write_text("1\n")
    followed.file.write_bytes(b"1\n")
    report = await followed.settle()
    assert len(report.problems) == 10
    assert sum(each.count for each in followed.rooms.incidents.recent()) == 10
    assert await followed.content("cold") == b"1\n", "the others are copied"


@pytest.mark.parametrize("kind", ["folder", "link", "fifo"])
async def test_what_is_no_file_is_reported_and_not_followed(followed: Followed, kind: str) -> None:
    if kind == "folder":
        followed.file.mkdir()
    elif kind == "link":
        (followed.root / "secret").write_text("secret")
        followed.file.symlink_to(followed.root / "secret")
    else:
        os.mkfifo(followed.file)
    (followed.folder / "b.jsonl").write_bytes(b"1\n")
    report = await followed.settle()
    assert len(report.problems) == 1, report.problems
    assert await followed.segments("cold") == []
    assert await followed.content("cold", "b.jsonl") == b"1\n"


async def test_a_folder_that_does_not_exist_yet_is_no_problem(followed: Followed) -> None:
    followed.folder.rmdir()
    assert (await followed.settle()).problems == []
    followed.folder.mkdir()
    followed.file.write_bytes(b"1\n")
    await followed.settle()
    assert await followed.content("cold") == b"1\n"


async def test_a_large_file_is_cut(followed: Followed) -> None:
    content = os.urandom(1 << 20) * 20 + b"\n"
    followed.file.write_bytes(content)
    await followed.settle()
    assert await followed.content("cold") == content
    assert max(each.end - each.begin for each in await followed.segments("cold")) == SEGMENT_BYTES_MAX


async def test_a_segment_that_was_changed_in_a_tier_is_not_given_back(followed: Followed) -> None:
    followed.file.write_bytes(b"1\n2\n")
    await followed.settle()
    (segment,) = await followed.segments("cold")
    path = Path(followed.rooms.context.cold["cold"].store.url.removeprefix("file://")) / segment.key
    path.write_bytes(path.read_bytes()[:-2] + b"9\n")
    with pytest.raises(Corrupt, match="the digest of its bytes"):
        await followed.content("cold")


async def test_a_keyring_signs_segments(tmp_path: Path, now_s: list[float]) -> None:
    async with rooms_at(tmp_path, keyring=Keyring([new_key()]), clocks={"monotonic_s": lambda: now_s[0]}) as rooms:
        followed = Followed(rooms, tmp_path, now_s)
        followed.file.write_bytes(b"1\n")
        await followed.settle()
        assert await followed.content("cold") == b"1\n"
        path = chain(await followed.segments("cold"))
        cold = rooms.context.cold["cold"]
        stranger = Tier("cold", cold.store, limits=rooms.config.limits, keyring=Keyring([new_key()]))
        with pytest.raises(Foreign):
            await write_sidecar(stranger, path, tmp_path / "forged", PRIVATE)
        assert not (tmp_path / "forged").exists()
        await followed.worker.close()
