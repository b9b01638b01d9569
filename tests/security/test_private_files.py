"""What tierd writes can be read by its own user alone, or by the members of one group, whatever the umask."""

from __future__ import annotations

import asyncio
import errno
import grp
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.other_user import OtherUser, needs_root, open_folder
from tierd.access import PRIVATE, Access, access_of
from tierd.api.packets import open_listener
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.lock import Lock
from tierd.transfer.atomic_output import atomic_output, make_durable

OWN_GROUP = grp.getgrgid(os.getegid()).gr_name
KEY = "run/000000000001-g0001/rank-00000-of-00001.safetensors"


@pytest.fixture(params=[0, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    former = os.umask(request.param)
    yield request.param
    os.umask(former)


def write_everything(root: Path, access: Access) -> None:
    """A tier with a shard, a marker and an unfinished download, its lock, the daemon's socket, and a restore."""
    asyncio.run(put_shard(root / "hot", access))
    with Lock(root / "hot", access=access), open_listener(str(root / "run" / "tierd.sock"), access):
        pass
    with atomic_output(root / "new" / "restored", size_bytes=1, access=access) as output:
        asyncio.run(put_shard(output.folder, access))
        output.publish(output.folder / "run")
    with atomic_output(root / "exported", size_bytes=1, access=access) as output:
        made = output.folder / "made"
        made.mkdir(mode=0o777 & ~access.umask)  # as torch's process does, with this umask
        (made / "checkpoint.pt").write_bytes(b"weights")
        make_durable(made, access)
        output.publish(made)


async def put_shard(root: Path, access: Access) -> None:
    async with DirectoryStore(root, access=access) as store:
        await store.put(KEY, memoryview(b"weights"), size_bytes=7, chunk_bytes=4096)
        await store.put_bytes("run/generation-0001.json", b"{}")


def modes_below(root: Path) -> dict[str, str]:
    return {
        path.relative_to(root).as_posix(): f"{stat.S_IMODE(path.stat().st_mode):04o}"
        for path in root.rglob("*")
        if path.name != "checkpoint.pt"  # torch's process writes it with its own umask
    }


def expected(path: Path, *, folder: str, file: str, socket: str) -> str:
    mode = path.stat().st_mode
    return folder if stat.S_ISDIR(mode) else socket if stat.S_ISSOCK(mode) else file


def test_everything_is_private_to_the_user_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    write_everything(tmp_path, PRIVATE)
    modes = modes_below(tmp_path)
    assert len(modes) == 14
    assert modes == {name: expected(tmp_path / name, folder="0700", file="0600", socket="0600") for name in modes}


def test_a_group_may_read_everything_but_the_lock(tmp_path: Path, umask: int) -> None:
    write_everything(tmp_path, access_of(OWN_GROUP))
    modes = modes_below(tmp_path)
    assert modes.pop("hot/.tierd.lock") == "0600", "who can open the lock for reading can hold it"
    assert modes == {name: expected(tmp_path / name, folder="0750", file="0640", socket="0660") for name in modes}
    assert stat.S_IMODE((tmp_path / "exported/checkpoint.pt").stat().st_mode) == 0o640
    assert {(tmp_path / name).stat().st_gid for name in modes} == {os.getegid()}


@needs_root
def test_another_user_can_neither_read_a_checkpoint_nor_hold_the_lock() -> None:
    with open_folder() as root, OtherUser() as other:
        write_everything(root, PRIVATE)
        for path in (root / "hot" / KEY, root / "hot/.tierd.lock", root / "new/restored", root / "exported"):
            with pytest.raises(PermissionError):
                other.call(read, str(path))
        # Where an earlier version, or the administrator, has opened the directory, the lock is still closed.
        (root / "hot").chmod(0o755)
        (root / "hot/.tierd.lock").chmod(0o644)
        with Lock(root / "hot"), pytest.raises(OSError, match=os.strerror(errno.EACCES)):
            other.call(read, str(root / "hot/.tierd.lock"))


@needs_root
def test_a_lock_file_of_another_user_is_refused_by_name() -> None:
    with open_folder() as root, OtherUser() as other:
        other.call(write, str(root / ".tierd.lock"))
        with pytest.raises(Exception, match=r"lock .*\.tierd\.lock: the file belongs to uid 65534"), Lock(root):
            pass


@pytest.mark.parametrize(("mode", "problem"), [(0o700, ""), (0o755, "its mode is 0755"), (0o701, "its mode is 0701")])
def test_an_open_directory_is_named_with_its_mode_and_not_changed(tmp_path: Path, mode: int, problem: str) -> None:
    tmp_path.chmod(mode)
    assert PRIVATE.exposure(tmp_path) == problem
    assert stat.S_IMODE(tmp_path.stat().st_mode) == mode


def test_only_the_configured_group_may_reach_a_directory(tmp_path: Path) -> None:
    os.chown(tmp_path, -1, os.getegid())
    tmp_path.chmod(0o750)
    assert access_of(OWN_GROUP).exposure(tmp_path) == ""
    assert Access(group=54321).exposure(tmp_path) == "its mode is 0750"


def read(path: str) -> None:
    os.close(os.open(path, os.O_RDONLY))


def write(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666))
