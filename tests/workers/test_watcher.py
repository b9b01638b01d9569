"""The watcher: what a framework writes becomes checkpoints, once and whole, and whatever is wrong is told."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.support.foreign import contents, write
from tests.support.framework_saves import (
    SAVES,
    Killed,
    Writer,
    archive,
    save_deepspeed,
    save_hf,
    save_lightning,
    save_step_bin,
)
from tests.support.other_user import OtherUser, needs_root, open_folder
from tests.support.rooms import Rooms, rooms_at
from tests.support.small_disk import small_disk
from tierd.config.sections import ColdConfig, DaemonConfig, LifecycleConfig, TierPolicy, WatchConfig
from tierd.format import layout
from tierd.format.ids import HOT, Run, checkpoint_id
from tierd.format.signature import new_key, parse_keys
from tierd.tiers.watch import FolderEvents
from tierd.transfer import watched_folder
from tierd.transfer.adopted_output import AdoptedOutput
from tierd.transfer.adoption import read_tree
from tierd.workers import folder_events, watch_claim, watch_state
from tierd.workers.hot_space import no_room
from tierd.workers.watcher import Watcher

RUN = Run("hf")


class Clock:
    """The monotonic clock stands still; the wall clock is ahead, so that nothing was written just now. `acts`: called
    once, when the wall clock is next asked: after a folder was listed, and before it is copied."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.acts: Callable[[], object] | None = None

    def monotonic_s(self) -> float:
        return self.now_s

    def now(self) -> datetime:
        act, self.acts = self.acts, None
        if act is not None:
            act()
        return datetime.now(UTC) + timedelta(seconds=10)


class Watched:
    """A folder, and the watcher of a daemon over it."""

    def __init__(self, rooms: Rooms, clock: Clock, config: WatchConfig) -> None:
        self.rooms, self.clock, self.config = rooms, clock, config
        self.out = Path(config.path)
        self.watcher = self._new()

    def _new(self) -> Watcher:
        return Watcher(self.rooms.context, self.config, no_room, on_change=lambda: None)

    async def look(self, *, after_s: float = 11.0) -> None:
        """A pass that sees what is new, and one when nothing has changed for so long."""
        await self.watcher.run_once()
        self.clock.now_s += after_s
        await self.watcher.run_once()

    async def restart(self, **keys: object) -> None:
        await self.watcher.close()
        self.watcher = self._new()

    @property
    def adopted(self) -> list[tuple[int, int, int]]:
        """(step, generation, sequence) of what the run has, oldest first."""
        entries = self.rooms.catalog.entries(RUN)
        return sorted((entry.id.step, entry.id.generation, entry.manifest.sequence) for entry in entries)

    @property
    def steps(self) -> list[int]:
        return [step for step, _, _ in self.adopted]

    @property
    def problems(self) -> list[str]:
        return self.watcher.report().problems

    def count(self, outcome: str) -> float | None:
        return self.rooms.count("tierd_watched_total", run=RUN, outcome=outcome)

    async def given_back(self, step: int, root: Path) -> Path:
        """What `tierd restore` makes of the files in hot."""
        entry = next(entry for entry in self.rooms.catalog.entries(RUN) if entry.id.step == step)
        tree = await read_tree(self.rooms.hot, entry.manifest)
        shutil.copytree(self.rooms.folder(HOT, entry.id), root / "stored")
        return await asyncio.to_thread(AdoptedOutput(tree, root / "stored", root / "built").build)


@asynccontextmanager
async def watched(root: Path, *, preset: str = "hf-trainer", **keys: object) -> AsyncIterator[Watched]:
    sections = {name: keys.pop(name) for name in ("cold", "lifecycle", "daemon", "hot", "keyring") if name in keys}
    path = keys.pop("path", root / "out")
    config = WatchConfig(path=str(path), run=RUN, preset=preset, **keys)  # pyright: ignore[reportArgumentType]
    clock = Clock()
    async with rooms_at(root, clocks={"now": clock.now, "monotonic_s": clock.monotonic_s}, **sections) as rooms:
        await rooms.list_tiers()
        found = Watched(rooms, clock, config)
        found.out.mkdir(exist_ok=True)
        yield found
        await found.watcher.close()


def made_old(path: Path) -> Path:
    """As if it had been written long ago."""
    for each in [*path.rglob("*"), path]:
        os.utime(each, (1e9, 1e9))
    return path


@pytest.mark.parametrize("name", SAVES)
async def test_a_complete_checkpoint_of_every_preset_is_adopted_once_and_comes_back_byte_for_byte(
    tmp_path: Path, name: str
) -> None:
    async with watched(tmp_path, preset=name) as folder:
        path = SAVES[name](folder.out, 100, Writer())
        before = contents(folder.out)
        await folder.look(after_s=9.0)
        assert folder.adopted == []
        assert "unchanged" in folder.watcher.report().waiting[0]
        await folder.look()
        assert folder.adopted == [(100, 1, 1)]
        await folder.look()
        await folder.restart()
        await folder.look()
        assert folder.adopted == [(100, 1, 1)]
        assert folder.problems == []
        assert contents(folder.out) == before, "nothing of the framework's is touched"
        built = await folder.given_back(100, tmp_path)
        if path.is_file():
            assert (built / path.name).read_bytes() == path.read_bytes()
        else:
            assert contents(built) == contents(path)
        assert folder.count("adopted") == 1


async def test_a_save_before_inotify_begins_is_seen_by_the_same_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no event, so the next pass would be a minute later."""
    async with watched(tmp_path) as folder:

        def begin(path: Path, on_change: Callable[[], None]) -> FolderEvents:
            save_hf(path, 100, Writer())
            return FolderEvents(path, on_change)

        monkeypatch.setattr(folder_events, "FolderEvents", begin)
        await folder.watcher.run_once()
        assert "unchanged" in folder.watcher.report().waiting[0]


@pytest.mark.parametrize(
    "name", ["hf-trainer", *(pytest.param(name, marks=pytest.mark.long) for name in SAVES if name != "hf-trainer")]
)
async def test_a_writer_killed_at_every_point_of_its_save_is_never_adopted_torn(tmp_path: Path, name: str) -> None:
    (tmp_path / "whole").mkdir()
    writer = Writer()
    SAVES[name](tmp_path / "whole", 5000, writer)
    async with watched(tmp_path, preset=name, cold=()) as folder:
        SAVES[name](folder.out, 4000, Writer())  # others have what it has
        await folder.look()
        for step in range(1, writer.done + 1):
            with pytest.raises(Killed):
                SAVES[name](folder.out, step, Writer(step - 1))
            await folder.look()
            if step in folder.steps:  # its last bytes may be beyond what a checkpoint needs, as of `latest`
                whole = SAVES[name](tmp_path / "whole", step, Writer())
                stored = folder.rooms.folder(HOT, checkpoint_id(RUN, step, 1)).glob("0*")
                files = [path for path in [*whole.rglob("*"), whole] if path.is_file()]
                assert sorted(path.read_bytes() for path in stored) == sorted(path.read_bytes() for path in files)
            for path in folder.out.iterdir():
                if path.name != "latest" and "4000" not in path.name:
                    Writer().delete(path)
        assert len(folder.steps) <= 2, "nearly every kill leaves a torn checkpoint"
        SAVES[name](folder.out, 5000, Writer())
        await folder.look()
        assert 5000 in folder.steps
    print(f"{name}: killed {writer.done} times")


async def test_what_the_framework_and_the_policy_have_deleted_is_not_adopted_again_after_a_restart(
    tmp_path: Path,
) -> None:
    policy = LifecycleConfig(hot=TierPolicy(keep_last=2))
    async with watched(tmp_path, cold=(), lifecycle=policy) as folder:
        for step in (1, 2, 3, 4):
            save_hf(folder.out, step, Writer())
            await folder.look()
        assert folder.adopted == [(1, 1, 1), (2, 1, 2), (3, 1, 3), (4, 1, 4)]
        await folder.rooms.hot.delete(checkpoint_id(RUN, 1, 1))
        await folder.rooms.list_tiers()
        assert folder.steps == [2, 3, 4]
        await folder.restart()
        await folder.look()
        assert folder.steps == [2, 3, 4], "the first one is still in the folder"
        assert "checkpoint-1 is not adopted: newer ones were adopted before" in folder.watcher.report().notes
        save_hf(folder.out, 5, Writer())
        await folder.look()
        assert folder.adopted[-1] == (5, 1, 5)


async def test_a_folder_that_is_made_later_deleted_and_made_again_is_followed(tmp_path: Path) -> None:
    async with watched(tmp_path) as folder:
        folder.out.rmdir()
        await folder.look()
        assert "it does not exist" in folder.watcher.report().notes[0]
        assert folder.problems == []
        assert not folder.watcher.report().is_there
        assert folder.rooms.count("tierd_watch_problems", run=RUN) == 0, "a training may not have begun yet"
        for step in (1, 2):
            folder.out.mkdir()
            save_hf(folder.out, step, Writer())
            await folder.look()
            assert folder.problems == []
            assert folder.watcher.report().polled_because == ""
            shutil.rmtree(folder.out)
            await folder.look()
        assert folder.steps == [1, 2]


async def test_a_preset_that_does_not_fit_is_a_problem_that_names_one_that_would(tmp_path: Path) -> None:
    async with watched(tmp_path, preset="dcp") as folder:
        save_hf(folder.out, 5, Writer())
        await folder.look()
        assert 'there is checkpoint-5 (hint: this would fit: preset = "hf-trainer"' in folder.problems[0]
        await folder.look()
        assert len(folder.rooms.incidents.recent()) == 1, "the log has it once"
        assert folder.rooms.count("tierd_watch_problems", run=RUN) == 1
        assert folder.rooms.count("tierd_failures_total", stage="watch", kind="unsupported") == 1


async def test_names_that_are_no_steps_and_links_are_named_and_left_alone(tmp_path: Path) -> None:
    async with watched(tmp_path) as folder:
        elsewhere = save_hf(tmp_path, 9, Writer())
        (folder.out / "checkpoint-9").symlink_to(elsewhere)
        (folder.out / "runs").mkdir()
        save_hf(folder.out, 5, Writer())
        await folder.look()
        assert folder.steps == [5]
        assert folder.watcher.report().notes == [
            "not adopted, because they are links: checkpoint-9",
            "not checkpoints: runs",
        ]
        link = save_hf(folder.out, 6, Writer()) / "weights"
        link.symlink_to("/etc/hostname")
        await folder.look()
        assert "the link weights leads out of it" in folder.problems[0]
        link.unlink()
        write(link)  # also a file that appears after the marker, soon enough
        await folder.look()
        assert folder.steps == [5, 6]
        assert folder.problems == []


async def test_what_the_framework_deletes_before_it_is_adopted_counts_as_missed(tmp_path: Path) -> None:
    async with watched(tmp_path) as folder:
        path = save_hf(folder.out, 5, Writer())
        await folder.watcher.run_once()
        folder.clock.now_s += 11
        folder.clock.acts = lambda: shutil.rmtree(path)
        await folder.watcher.run_once()
        assert folder.steps == []
        assert folder.count("missed") == 1
        assert "checkpoint-5 was deleted before it was adopted" in folder.watcher.report().notes[0]
        assert not list((tmp_path / "hot" / RUN).glob("*-g*"))


async def test_a_rotation_that_has_begun_when_the_copy_does_is_not_adopted(tmp_path: Path) -> None:
    async with watched(tmp_path) as folder:
        path = made_old(save_hf(folder.out, 5, Writer()))
        await folder.watcher.run_once()
        folder.clock.now_s += 11
        folder.clock.acts = (path / "optimizer.pt").unlink
        await folder.watcher.run_once()
        assert "optimizer.pt" in folder.problems[0]
        await folder.look()
        assert folder.steps == []
        assert "were deleted or moved after the last one was written" in folder.watcher.report().waiting[0]


async def test_a_file_rewritten_in_place_after_adoption_is_a_problem_and_a_new_save_a_new_generation(
    tmp_path: Path,
) -> None:
    async with watched(tmp_path) as folder:
        path = made_old(save_hf(folder.out, 5, Writer()))
        await folder.look()
        with (path / "optimizer.pt").open("r+b") as file:
            file.seek(60)
            file.write(b"!")
        os.utime(path / "optimizer.pt", (1e9 + 1, 1e9 + 1))
        await folder.look()
        assert "something in it was written after it was adopted" in folder.problems[0]
        assert folder.adopted == [(5, 1, 1)]
        save_hf(folder.out, 5, Writer())  # the training has gone back
        await folder.look()
        assert folder.problems == []
        assert folder.adopted == [(5, 1, 1), (5, 2, 2)]
        save_hf(folder.out, 6, Writer())
        await folder.look()
        assert folder.adopted[-1] == (6, 2, 3)


async def test_what_was_adopted_again_after_a_deletion_is_compared_with_its_own_files(tmp_path: Path) -> None:
    async with watched(tmp_path, cold=()) as folder:
        for first_s in (1e9, 1.1e9):  # the second save is of a training that has begun again
            path = made_old(save_hf(folder.out, 5, Writer()))
            for each in [*path.rglob("*"), path]:
                os.utime(each, (first_s, first_s))
            await folder.look()
            assert folder.steps == [5]
            generation = folder.adopted[0][1]
            with (path / "optimizer.pt").open("r+b") as file:
                file.seek(60)
                file.write(b"!")
            os.utime(path / "optimizer.pt", (first_s + 1, first_s + 1))
            await folder.look()
            assert "something in it was written after it was adopted" in folder.problems[0], folder.adopted
            assert folder.steps == [5]
            await folder.rooms.hot.delete(checkpoint_id(RUN, 5, generation))
            await folder.rooms.list_tiers()
            shutil.rmtree(path)
            await folder.look()


async def test_what_latest_has_named_is_adopted_although_it_names_a_later_one_now(tmp_path: Path) -> None:
    async with watched(tmp_path, preset="deepspeed") as folder:
        save_deepspeed(folder.out, 1, Writer())
        await folder.watcher.run_once()
        save_deepspeed(folder.out, 2, Writer())
        await folder.look()
        assert folder.adopted == [(1, 1, 1), (2, 1, 2)]
        (folder.out / "global_step1/mp_rank_00_model_states.pt").write_bytes(archive())  # saved over, and killed
        await folder.look()
        assert "latest does not name it" in folder.watcher.report().waiting[0]


async def test_another_name_of_the_same_step_is_not_adopted(tmp_path: Path) -> None:
    async with watched(tmp_path, preset="lightning") as folder:
        save_lightning(folder.out, 5, Writer())
        await folder.look()
        (folder.out / "epoch=3-step=5-v1.ckpt").write_bytes(archive(90))
        await folder.look()
        assert folder.adopted == [(5, 1, 1)]
        assert any("epoch=3-step=5-v1.ckpt is not adopted" in note for note in folder.watcher.report().notes)
        assert folder.problems == []


async def test_a_training_that_has_gone_back_saves_under_other_names_and_two_of_each_step(tmp_path: Path) -> None:
    """As Lightning while the former files are there. The highest step may be the end of the training."""
    async with watched(tmp_path, preset="lightning") as folder:
        for name in ("step={}.ckpt", "step={}-v1.ckpt"):
            for step in (5, 6, 7):
                for callback in ("a", "b"):
                    (folder.out / f"{callback}-{name.format(step)}").write_bytes(archive(90))
                await folder.look()
        assert folder.adopted == [(5, 1, 1), (5, 2, 4), (6, 1, 2), (6, 2, 5), (7, 1, 3), (7, 2, 6)]
        notes = folder.watcher.report().notes
        assert "b-step=7-v1.ckpt is not adopted: a-step=7-v1.ckpt of the same step was" in notes


async def test_another_name_of_an_older_step_begins_no_generation_after_a_restart(tmp_path: Path) -> None:
    """Otherwise the older step would be the newest checkpoint of the run."""
    async with watched(tmp_path, preset="lightning") as folder:
        save_lightning(folder.out, 5, Writer())
        await folder.look()
        (folder.out / "epoch=3-step=5-v1.ckpt").write_bytes(archive(90))
        await folder.look()
        save_lightning(folder.out, 6, Writer())
        await folder.look()
        await folder.restart()
        await folder.look()
        assert folder.adopted == [(5, 1, 1), (6, 1, 2)]
        assert "epoch=3-step=5-v1.ckpt is not adopted: newer ones were adopted before" in folder.watcher.report().notes


async def test_an_older_step_that_is_saved_again_is_noticed_however_many_are_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_state, "RECHECKED", 2)
    monkeypatch.setattr(watch_state, "OTHERS_RECHECKED", 3)
    async with watched(tmp_path, preset="step-bin", cold=()) as folder:
        for step in range(1, 11):
            save_step_bin(folder.out, step, Writer())
        await folder.look()
        save_step_bin(folder.out, 2, Writer())  # the training has gone back
        for _ in range(3):
            await folder.look()
        assert folder.adopted[1:3] == [(2, 1, 2), (2, 2, 11)]


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_lower_step_written_after_higher_ones_begins_a_generation_although_no_tier_has_it(
    tmp_path: Path, restarts: bool
) -> None:
    """Otherwise keep_last would delete the steps of the training that goes on, and keep those it has given up."""
    async with watched(tmp_path, preset="step-bin") as folder:
        for step in (5, 6, 7):
            save_step_bin(folder.out, step, Writer())
        await folder.look()
        await folder.rooms.hot.delete(checkpoint_id(RUN, 5, 1))  # the policy
        await folder.rooms.list_tiers()
        if restarts:
            await folder.restart()
            await folder.look()
        for step in (5, 6, 8):  # the training has gone back; 6 is stored, 5 is not
            save_step_bin(folder.out, step, Writer())
            await folder.look()
        assert folder.adopted == [(5, 2, 4), (6, 1, 2), (6, 2, 5), (7, 1, 3), (8, 2, 6)]


async def test_that_a_generation_begins_is_logged_once_it_has_begun(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "hot", size_mib=4) as disk:
        async with watched(tmp_path, cold=()) as folder:
            for step in (6, 7):
                save_hf(folder.out, step, Writer())
            await folder.look()
            filler = write(disk / "filler", 3 << 20)
            for step in (4, 5):  # the training has gone back
                write(save_hf(folder.out, step, Writer()) / "big.bin", 1 << 20)
                await folder.look(after_s=100)
            assert "No space left on device" in folder.problems[0]
            assert "gone back" not in caplog.text
            filler.unlink()
            await folder.look(after_s=100)
            await folder.look()
            assert [(step, generation) for step, generation, _ in folder.adopted] == [(4, 2), (5, 2), (6, 1), (7, 1)]
            assert caplog.text.count("gone back") == 1


async def test_a_step_of_an_older_timeline_that_is_saved_again_comes_after_those_of_the_newest(tmp_path: Path) -> None:
    async with watched(tmp_path, preset="step-bin") as folder:
        for steps in ((5, 6), (4, 8, 9), (6,)):  # it goes back before 5, and then before 6
            for step in steps:
                save_step_bin(folder.out, step, Writer())
                await folder.look()
        assert folder.adopted == [(4, 2, 3), (5, 1, 1), (6, 1, 2), (6, 3, 6), (8, 2, 4), (9, 2, 5)]


async def test_a_folder_that_was_copied_without_its_times_is_one_generation(tmp_path: Path) -> None:
    async with watched(tmp_path, preset="step-bin") as folder:
        for nth, step in enumerate((10, 11, 8, 9)):  # a copy by name copies step 10 before step 8
            os.utime(save_step_bin(folder.out, step, Writer()), (1e9 + nth, 1e9 + nth))
        await folder.look()
        save_step_bin(folder.out, 12, Writer())
        await folder.look()
        assert folder.adopted == [(8, 1, 3), (9, 1, 4), (10, 1, 1), (11, 1, 2), (12, 1, 5)]


@pytest.mark.parametrize("then", ["goes on", "restarts", "cannot be read meanwhile"])
async def test_a_folder_that_was_copied_without_its_times_is_one_generation_although_hot_was_full(
    tmp_path: Path, then: str
) -> None:
    with small_disk(tmp_path / "hot", size_mib=8) as disk:
        async with watched(tmp_path, cold=()) as folder:
            filler = write(disk / "filler", 4600 << 10)
            for nth, step in enumerate((10, 11, 8, 9)):
                path = save_hf(folder.out, step, Writer())
                write(path / "big.bin", 1500 << 10)
                for each in [*path.rglob("*"), path]:
                    os.utime(each, (1e9 + nth, 1e9 + nth))
            await folder.look()
            assert folder.steps == [10, 11]
            assert "No space left on device" in folder.problems[0]
            filler.unlink()
            if then == "restarts":
                await folder.restart()
            elif then == "cannot be read meanwhile":
                folder.out.rename(tmp_path / "away")
                await folder.look()
                (tmp_path / "away").rename(folder.out)
            await folder.look(after_s=100)
            await folder.look()
            assert [(step, generation) for step, generation, _ in folder.adopted] == [(8, 1), (9, 1), (10, 1), (11, 1)]


async def test_a_folder_that_is_copied_without_its_times_while_it_is_watched_is_one_generation(tmp_path: Path) -> None:
    steps = (100, 1000, 200, 300, 900)
    async with watched(tmp_path, preset="step-bin") as folder:
        await folder.look()
        for step in steps:
            save_step_bin(folder.out, step, Writer())
            await folder.watcher.run_once()
            folder.clock.now_s += 6
        await folder.look()
        assert [(step, generation) for step, generation, _ in folder.adopted] == [(step, 1) for step in sorted(steps)]
        save_step_bin(folder.out, 150, Writer())  # the training goes on from step 100
        await folder.look()
        assert folder.adopted[1][:2] == (150, 2)


async def test_what_is_written_after_the_clock_was_set_back_is_adopted(tmp_path: Path) -> None:
    async with watched(tmp_path, preset="step-bin") as folder:
        ahead_s = time.time() + 1800
        os.utime(save_step_bin(folder.out, 5, Writer()), (ahead_s, ahead_s))
        await folder.look()
        folder.clock.now_s += 20
        save_step_bin(folder.out, 6, Writer())
        os.utime(save_step_bin(folder.out, 4, Writer()), (1e9, 1e9))  # copied there with its old time
        await folder.look()
        assert folder.steps == [5, 6]


async def test_a_folder_with_more_than_can_be_looked_at_is_a_problem_and_all_are_adopted_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_folder, "NAMES_MAX", 30)
    monkeypatch.setattr(watch_state, "SCANNED_MAX", 4)
    async with watched(tmp_path, preset="step-bin") as folder:
        for step in range(1, 11):
            save_step_bin(folder.out, step, Writer())
        await folder.look()
        assert folder.steps == [1, 2, 3, 4]
        assert "the 6 with the highest steps" in folder.watcher.report().notes[0]
        assert folder.watcher.interval_s <= folder.rooms.config.limits.reconcile_interval_s
        await folder.look()
        await folder.look()
        assert folder.adopted == [(step, 1, step) for step in range(1, 11)]
        for number in range(30):
            (folder.out / f"x{number}").touch()
        await folder.look()
        assert "more than 30 entries" in folder.problems[0]


def _look_at_what_is_not_readable(root: Path) -> list[str]:
    async def look() -> list[str]:
        async with watched(root) as folder:
            save_hf(folder.out, 5, Writer())
            (folder.out / "checkpoint-5/optimizer.pt").chmod(0)
            save_hf(folder.out, 6, Writer())
            await folder.look()
            assert folder.steps == [6], "one that cannot be read stops no other"
            return folder.problems

    return asyncio.run(look())


@needs_root
def test_a_file_that_the_daemon_may_not_read_is_a_problem_with_its_path() -> None:
    with OtherUser() as other, open_folder() as root:
        problems = other.call(_look_at_what_is_not_readable, root)
    assert "optimizer.pt: Permission denied" in problems[0]
    assert "must be able to read it" in problems[0]


async def test_a_run_of_tierds_client_adopts_nothing(tmp_path: Path) -> None:
    async with watched(tmp_path) as folder:
        await folder.rooms.commit("hot", step=3, run=RUN)
        await folder.rooms.list_tiers()
        save_hf(folder.out, 5, Writer())
        await folder.look()
        assert f"adopt into {RUN}: tierd's client writes that run" in folder.problems[0]
        assert folder.steps == [3]


async def test_nothing_is_adopted_while_it_is_not_known_what_the_run_has(tmp_path: Path) -> None:
    async with watched(tmp_path) as folder:
        shutil.rmtree(tmp_path / "cold")
        await folder.rooms.list_tiers("hot")
        folder.rooms.catalog.listing_failed("cold", "no answer")
        save_hf(folder.out, 5, Writer())
        await folder.look()
        assert "the checkpoints of the run are not all known" in folder.problems[0]
        assert folder.rooms.count("tierd_watch_lag_seconds", run=RUN) == 0
        folder.clock.now_s += 7
        await folder.watcher.run_once()
        assert folder.rooms.count("tierd_watch_lag_seconds", run=RUN) == 7


async def test_a_full_disk_is_a_problem_and_the_checkpoint_is_adopted_when_there_is_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "hot", size_mib=4) as disk:
        async with watched(tmp_path, cold=()) as folder:
            filler = write(disk / "filler", 3 << 20)
            write(save_hf(folder.out, 5, Writer()) / "big.bin", 2 << 20)
            await folder.look()
            assert "No space left on device" in folder.problems[0]
            assert not [path for path in (disk / RUN).rglob("*") if path.is_file()], "nothing of it is left"
            filler.unlink()
            await folder.look()
            assert (folder.steps, folder.problems) == ([5], [])


async def test_sources_are_removed_once_every_tier_that_keeps_them_has_them_but_the_newest(tmp_path: Path) -> None:
    async with watched(tmp_path, source="remove") as folder:
        for step in (1, 2, 3):
            save_hf(folder.out, step, Writer())
            await folder.look()
        assert sorted(os.listdir(folder.out)) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
        await folder.rooms.replicator().run_once()
        (folder.out / ".tierd-removes-checkpoint-0").mkdir()
        await folder.restart()
        await folder.look()
        assert os.listdir(folder.out) == ["checkpoint-3"], "the framework resumes from the newest"
        save_hf(folder.out, 4, Writer())
        await folder.look()
        await folder.look()
        assert sorted(os.listdir(folder.out)) == ["checkpoint-4"], "3 is in cold"
        assert folder.steps == [1, 2, 3, 4]


async def test_sources_are_removed_before_a_training_that_has_gone_back_has_passed_its_former_highest_step(
    tmp_path: Path,
) -> None:
    async with watched(tmp_path, source="remove", cold=()) as folder:
        for step in (8, 9):
            save_hf(folder.out, step, Writer())
            await folder.look()
        for step in (2, 3):
            save_hf(folder.out, step, Writer())
            await folder.look()
        await folder.rooms.hot.delete(checkpoint_id(RUN, 9, 1))  # the policy, with keep_generations = 0
        await folder.rooms.list_tiers()
        save_hf(folder.out, 4, Writer())
        await folder.look()
        await folder.look()
        assert folder.adopted[:3] == [(2, 2, 3), (3, 2, 4), (4, 2, 5)]
        assert sorted(os.listdir(folder.out)) == ["checkpoint-4", "checkpoint-9"]


async def test_a_source_whose_step_is_not_in_its_name_is_removed_once_its_own_step_is_in_cold(tmp_path: Path) -> None:
    async with watched(tmp_path, preset="gpt-simple", source="remove") as folder:
        SAVES["gpt-simple"](folder.out, 5, Writer()).rename(folder.out / "final")
        await folder.look()
        SAVES["gpt-simple"](folder.out, 6, Writer())  # the training was extended
        await folder.look()
        await folder.look()
        assert sorted(os.listdir(folder.out)) == ["checkpoint-6-shutdown", "final"], "cold does not have step 5 yet"
        await folder.rooms.replicator().run_once()
        await folder.look()
        assert os.listdir(folder.out) == ["checkpoint-6-shutdown"]


@pytest.mark.parametrize("how", ["damaged", "lost", "foreign"])
async def test_a_source_stays_while_the_only_replica_is_damaged_lost_or_foreign(tmp_path: Path, how: str) -> None:
    keyring = parse_keys(new_key().line, where="test") if how == "foreign" else None
    async with watched(tmp_path, source="remove", keyring=keyring) as folder:
        for step in (1, 2):
            save_hf(folder.out, step, Writer())
            await folder.look()
        manifest = folder.rooms.folder(HOT, checkpoint_id(RUN, 1, 1)) / layout.MANIFEST
        if how == "lost":
            shutil.rmtree(manifest.parent)
        elif how == "damaged":
            manifest.write_bytes(b"{")
        else:
            manifest.write_bytes(manifest.read_bytes() + b" ")
        await folder.rooms.list_tiers(HOT)
        assert folder.steps == [2]
        await folder.look()
        assert sorted(os.listdir(folder.out)) == ["checkpoint-1", "checkpoint-2"]


async def test_of_two_daemons_over_one_folder_and_one_cold_tier_one_adopts_and_the_other_takes_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold = (ColdConfig(name="cold", url=f"file://{tmp_path / 'cold'}"),)
    (tmp_path / "out").mkdir()
    async with (
        watched(tmp_path / "a", path=tmp_path / "out", cold=cold) as first,
        watched(tmp_path / "b", path=tmp_path / "out", cold=cold, daemon=DaemonConfig(node="there")) as second,
    ):
        save_hf(first.out, 1, Writer())
        await first.look()
        await second.look()
        assert (first.steps, second.steps) == ([1], [])
        assert second.watcher.report().holder == "here"
        save_hf(first.out, 2, Writer())
        for _ in range(4):  # the holder lives
            await second.look(after_s=watch_claim.TAKEOVER_S / 2)
            first.clock.now_s += watch_claim.BEAT_S
            claim = tmp_path / "cold" / RUN
            await first.watcher.claim.run_once()
            for path in claim.rglob("*"):
                if path.is_file():
                    os.utime(path, (second.clock.now_s, second.clock.now_s))
        assert second.steps == []
        await second.look(after_s=watch_claim.TAKEOVER_S + watch_claim.BEAT_S)
        await second.look(after_s=watch_claim.TAKEOVER_S + watch_claim.BEAT_S)
        assert [(step, generation) for step, generation, _ in second.adopted][-1] == (2, 2)
        first.clock.now_s += watch_claim.BEAT_S
        save_hf(first.out, 3, Writer())
        await first.look()
        assert first.watcher.report().holder == "there"
        assert first.steps == [1]


async def test_a_training_that_goes_back_gives_the_run_to_no_other_daemon(tmp_path: Path) -> None:
    """The other one has a second folder with the same run, by mistake, or sees a shared folder first."""
    cold = (ColdConfig(name="cold", url=f"file://{tmp_path / 'cold'}"),)
    async with (
        watched(tmp_path / "a", preset="step-bin", cold=cold) as first,
        watched(tmp_path / "b", preset="step-bin", cold=cold, daemon=DaemonConfig(node="there")) as second,
    ):
        for step in (5, 6):
            save_step_bin(first.out, step, Writer())
            await first.look()
        await first.rooms.replicator().run_once()
        await second.rooms.list_tiers()
        await second.look()
        for step in (4, 5):  # 5 is stored, 4 is not
            save_step_bin(second.out, step, Writer())
        await second.look()
        assert second.watcher.report().holder == "here"
        save_step_bin(first.out, 4, Writer())
        await first.look(after_s=watch_claim.BEAT_S)
        assert first.adopted == [(4, 2, 3), (5, 1, 1), (6, 1, 2)]
