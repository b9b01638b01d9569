"""A program in the place of `sys.executable`, whose processes are forked from one that has imported torch and tierd.

For `sys.executable -m MODULE`: a new Python needs half a second of CPU to import tierd, and two seconds for torch. What
runs is a process with the arguments, directory, umask, environment and descriptors that the command gave it. The
program only passes these to a server and ends as that process does; if the program is killed, so is the process.
"""

from __future__ import annotations

import fcntl
import marshal
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.processes import ForkedProcess

MESSAGE_BYTES_MAX = 200_000
DESCRIPTORS_MAX = 64
PROGRAM = """#!{python} -IS
import _socket, array, marshal, os, sys
numbers = [int(name) for name in os.listdir("/proc/self/fd")]
numbers = [number for number in numbers if os.path.exists(f"/proc/self/fd/{{number}}")]  # not that of the listing
server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
server.connect({address!r})
message = marshal.dumps((numbers, sys.argv[1:], os.getcwd(), os.umask(0o77), dict(os.environ)))
server.sendmsg([message], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", numbers))])
for number in numbers:
    os.close(number)  # who reads the other end of a pipe waits for the process only
code = marshal.loads(server.recv(100))
if code < 0:
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@contextmanager
def warm_python() -> Generator[str]:
    """The path of the program. The server ends with the block."""
    # Not in pytest's folder, because the paths of Unix sockets are short.
    with tempfile.TemporaryDirectory(prefix="warm-") as folder:
        address, program = f"{folder}/socket", Path(folder, "python")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(address)
            listener.listen()
            server = ForkedProcess(_serve, listener)
        program.write_text(PROGRAM.format(python=sys.executable, address=address))
        program.chmod(0o700)
        try:
            yield str(program)
        finally:
            server.kill()
            server.wait()


def _serve(listener: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a connection ended
    os.nice = lambda increment: 0  # the test waits for the process; beside other tests, a lower priority takes seconds
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            try:
                _answer(connection)
            finally:
                os._exit(1)
        connection.close()


def _answer(connection: socket.socket) -> None:
    """Forks the process, and sends its exit code; kills it if the program that asked for it has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES_MAX, DESCRIPTORS_MAX)
    numbers, arguments, folder, umask, environ = marshal.loads(message)
    pid = os.fork()
    if pid == 0:
        connection.close()
        os.chdir(folder)
        os.umask(umask)
        _place(descriptors, numbers)
        os._exit(_run(arguments, environ))
    for descriptor in descriptors:
        os.close(descriptor)
    ended = os.pidfd_open(pid)
    readable, _, _ = select.select([ended, connection], [], [])
    if ended not in readable:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if ended in readable:
        connection.send(marshal.dumps(code))


def _place(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Gives the descriptors their numbers, which others of them may have now."""
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 1 + max(numbers)) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _run(arguments: Sequence[str], environ: dict[str, str]) -> int:
    """Becomes `python [-P] -m MODULE ARGUMENTS…`; the exit code."""
    os.environ.clear()
    os.environ.update(environ)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode, closefd=False) for number, mode in enumerate("rww"))
    by_name, module, *more = arguments[1:] if arguments[0] == "-P" else arguments
    assert by_name == "-m", arguments
    sys.argv = [module, *more]
    code: Any = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()
    return code or 0
