"""Ceph's S3 gateway as a real server for tests: one monitor, one disk, one gateway, as Debian packages them.

Loopback only, with no authentication between its parts, and gone at the end. It keeps no checksums, checks none, and
ignores conditions on a completed upload: what AWS does for us there, we have to do.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.s3 import ACCESS_KEY, BUCKET, SECRET_KEY, s3_client
from tests.support.waiting import wait_until

PROGRAMS = ["ceph", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin"]

CONFIG = """
[global]
fsid = {fsid}
mon_host = [v2:127.0.0.1:{monitor}]
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
ms_bind_ipv6 = false
ms_bind_msgr1 = false
ms_bind_port_min = {disk}
ms_bind_port_max = {disk_max}
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
keyring = /dev/null
# The default, secure, waits forever without authentication.
ms_mon_client_mode = crc secure
run_dir = {root}/run
admin_socket = {root}/run/$name.$pid.asok
crash_dir = {root}/run
log_file = {root}/log/$name.$pid.log
log_to_stderr = false
mon_cluster_log_file = {root}/log/cluster.log
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 4
osd_pool_default_pgp_num = 4
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
mon_allow_pool_size_one = true
mon_max_pg_per_osd = 1000
[mon]
mon_data = {root}/mon
# Seconds to gather changes: with the defaults the start takes 13 s instead of 5 s.
paxos_propose_interval = 0.05
paxos_min_wait = 0.02
mon_data_avail_warn = 2
mon_data_avail_crit = 1
mon_osd_full_ratio = 0.97
mon_osd_backfillfull_ratio = 0.96
mon_osd_nearfull_ratio = 0.95
mon_initial_members = a
[osd]
osd_data = {root}/osd
osd_objectstore = bluestore
osd_class_load_list = *
osd_class_default_list = *
osd_crush_initial_weight = 1
osd_memory_target = 939524096
bluestore_block_size = 8589934592
bluestore_block_db_size = 0
bluestore_block_wal_size = 0
[client.rgw]
rgw_data = {root}/rgw
rgw_frontends = beast {listen}
rgw_thread_pool_size = 64
"""


@contextmanager
def ceph_server(tls: tuple[Path, Path] | None = None) -> Iterator[str]:
    """The gateway with BUCKET in it. Yields its URL; skips where Ceph is not installed. `tls`: certificate, key."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed: Debian has radosgw, ceph-mon, ceph-osd, ceph-common")
    # Not in pytest's folder, because the paths of Unix sockets are short.
    with tempfile.TemporaryDirectory(prefix="ceph-") as folder, ExitStack() as stack:
        root = Path(folder)
        for name in ("run", "log", "mon", "osd", "rgw"):
            (root / name).mkdir()
        gateway, monitor, disk = _free_ports()
        listen = f"endpoint=127.0.0.1:{gateway}"
        if tls is not None:
            listen = f"ssl_endpoint=127.0.0.1:{gateway} ssl_certificate={tls[0]} ssl_private_key={tls[1]}"
        fsid, disk_id = uuid.uuid4(), uuid.uuid4()
        config = root / "ceph.conf"
        config.write_text(
            CONFIG.format(root=root, fsid=fsid, monitor=monitor, disk=disk, disk_max=disk + 10, listen=listen)
        )

        def run(*command: str) -> bool:
            name, *arguments = command
            done = subprocess.run(
                [name, "-c", str(config), *arguments], capture_output=True, text=True, timeout=60, check=False
            )
            (root / "log" / f"{name}.out").write_text(done.stdout + done.stderr)
            return done.returncode == 0

        def start(*command: str) -> None:
            name, *arguments = command
            stack.enter_context(_running([name, "-c", str(config), "-f", *arguments]))

        address = f"[v2:127.0.0.1:{monitor}]"
        assert run("monmaptool", "--create", "--fsid", str(fsid), "--addv", "a", address, f"{root}/monmap")
        assert run("ceph-mon", "--mkfs", "-i", "a", "--monmap", f"{root}/monmap")
        start("ceph-mon", "-i", "a")
        _wait(root, "the monitor", lambda: run("ceph", "--connect-timeout", "10", "osd", "new", str(disk_id), "0"))
        assert run("ceph-osd", "--mkfs", "-i", "0", "--osd-uuid", str(disk_id))
        start("ceph-osd", "-i", "0")
        keys = [f"--access-key={ACCESS_KEY}", f"--secret-key={SECRET_KEY}"]
        user = ["radosgw-admin", "-n", "client.rgw", "user", "create", "--uid=test", "--display-name=test", *keys]
        _wait(root, "the user", lambda: run(*user))
        start("radosgw", "-n", "client.rgw")
        _wait(root, "the gateway", lambda: _listens(gateway))
        url = f"{'https' if tls else 'http'}://127.0.0.1:{gateway}"
        client = s3_client(url, verify=str(tls[0]) if tls else None)
        client.create_bucket(Bucket=BUCKET)
        client.close()
        yield url


@contextmanager
def _running(command: list[str]) -> Iterator[None]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CEPH_")}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environ)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _wait(root: Path, what: str, condition: Callable[[], bool]) -> None:
    try:
        wait_until(condition, f"{what} of Ceph")
    except AssertionError as error:
        outputs = "\n".join(path.read_text()[-500:] for path in (root / "log").glob("*.out"))
        raise TimeoutError(f"{error}:\n{outputs}") from None


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True


def _free_ports() -> list[int]:
    """Three ports. The disk takes the next free ones after the last."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        return [one.getsockname()[1] for one in listeners]
