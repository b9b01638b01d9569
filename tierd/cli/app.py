"""`tierd`: the verbs, the options before them, and how an error becomes a message and an exit code.

0 ok · 1 failed · 2 usage or config · 3 partial · 10 no such checkpoint · 11 lock held · 12 verification failed ·
13 daemon unreachable · 14 cold tier unreachable · 15 target not empty · 16 no space · 17 the run is halted ·
18 unhealthy · 130 and 143 interrupted.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import keyword
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterable, Sequence
from types import FrameType
from typing import Annotated, Any, Concatenate, ParamSpec, cast

import typer

from tierd.cli.console import print_note, print_result
from tierd.cli.options import Settings, settings_of
from tierd.config.environment import unknown_names
from tierd.errors import TierdError

P = ParamSpec("P")

_TRACEBACK = "TIERD_TRACEBACK"
THREADS_END_S = 1.0  # a thread without a call ends within milliseconds of its pool


class _Terminated(KeyboardInterrupt):
    """SIGTERM, unwound as Ctrl-C is, so that temporary files are removed."""


def _guarded(
    verb: Callable[Concatenate[typer.Context, P], Coroutine[Any, Any, int] | int],
) -> Callable[Concatenate[typer.Context, P], None]:
    """The verb as a command that ends with the exit code it returns. An exception becomes one message and its exit
    code; --traceback shows where. A verb that is a coroutine runs in an event loop of its own."""

    @functools.wraps(verb)
    def run(context: typer.Context, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            returned = verb(context, *args, **kwargs)
            code = returned if isinstance(returned, int) else _run(returned)
        except KeyboardInterrupt as error:
            number = signal.SIGTERM if isinstance(error, _Terminated) else signal.SIGINT
            raise typer.Exit(128 + number) from error
        except BrokenPipeError as error:
            # The reader closed the pipe, as `head` does: nothing may be flushed into it at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(128 + signal.SIGPIPE) from error
        except Exception as error:  # also a bug: one message, and --traceback for a report
            if settings_of(context).wants_traceback:
                traceback.print_exception(error)
            raise typer.Exit(_print_error(error)) from error
        raise typer.Exit(code)

    return run


def _run(verb: Coroutine[Any, Any, int]) -> int:
    """Runs a verb in an event loop of its own. The first SIGTERM cancels it, as asyncio.run does at the first SIGINT:
    what a signal handler raises is lost if the signal arrives in a callback of a weak reference or in `__del__`."""
    is_terminated = False

    async def cancellable() -> int:
        task, loop = cast("asyncio.Task[int]", asyncio.current_task()), asyncio.get_running_loop()

        def cancel(signum: int, frame: FrameType | None) -> None:
            nonlocal is_terminated
            if is_terminated:
                raise _Terminated
            is_terminated = True
            loop.call_soon_threadsafe(task.cancel)

        if signal.getsignal(signal.SIGTERM) is _terminate:
            signal.signal(signal.SIGTERM, cancel)
        try:
            return await verb
        finally:
            if signal.getsignal(signal.SIGTERM) is cancel:  # the daemon has its own
                signal.signal(signal.SIGTERM, _terminate)

    try:
        return asyncio.run(cancellable())
    except asyncio.CancelledError as error:
        if is_terminated:
            raise _Terminated from error
        raise


def _print_error(error: Exception) -> int:
    if isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        return _print_error(error.exceptions[0])
    if isinstance(error, TierdError):
        print_note(f"tierd: {error.message}", *([f"  hint: {error.hint}"] if error.hint else []))
        return error.exit_code
    bug = f"this is a bug: {_TRACEBACK}=1 shows where, please report it"
    print_note(f"tierd: {type(error).__name__}: {error}", f"  hint: {bug}")
    return 1


VERBS = (
    *("serve", "status", "runs", "ls", "show", "diff", "restore", "export", "verify", "drill"),
    *(
        "milestone",
        "note",
        "notes",
        "sidecars",
        "pivot",
        "fork",
        "stop",
        "snapshot",
        "adopt",
        "import",
        "lifecycle",
        "cadence",
    ),
    *("reap", "doctor", "demo", "key", "log", "version"),
)
# The module of a verb, where it is not named as the verb.
_MODULES = {"notes": "note", "stop": "run_requests", "snapshot": "run_requests", "version": "serve"}


def make_app(verbs: Iterable[str] = VERBS) -> typer.Typer:
    app = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Checkpoints of PyTorch training: in memory, on local disk, in S3. "
        "JSON goes to stdout, the rest to stderr.",
    )
    app.callback()(settings)
    # Only the verb that is called is imported: a daemon holds no other verb in memory, and `tierd ls` starts faster.
    for verb in verbs:
        name = f"{verb}_" if keyword.iskeyword(verb) else verb
        module = importlib.import_module(f"tierd.cli.{_MODULES.get(verb, name)}")
        app.command(verb)(_guarded(getattr(module, name)))
    return app


def called(arguments: Sequence[str]) -> list[str]:
    """The verb in these arguments, after the options of `settings`; all verbs if there is none."""
    rest = list(arguments)
    while rest and rest[0].startswith("-"):
        del rest[: 2 if rest[0] == "--config" else 1]
    return rest[:1] if rest and rest[0] in VERBS else list(VERBS)


def _print_version(wants_version: bool) -> None:
    if wants_version:
        from tierd.cli.serve import version_line

        print_result(version_line())
        raise typer.Exit


def settings(
    context: typer.Context,
    config: Annotated[
        str | None,
        typer.Option("--config", metavar="FILE", help="The config file; default: $TIERD_CONFIG, or ./tierd.toml."),
    ] = None,
    wants_traceback: Annotated[
        bool, typer.Option("--traceback", envvar=_TRACEBACK, help="Show where an error came from.")
    ] = False,
    wants_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    context.obj = Settings(config, wants_traceback)
    if context.invoked_subcommand not in ("serve", "demo", "version"):  # serve refuses them; the others read no config
        for unknown in unknown_names():
            print_note(f"tierd: {unknown}")


def _terminate(signum: int, frame: FrameType | None) -> None:
    # A task that nobody awaits may end by it, and asyncio would log that with a traceback.
    logging.getLogger("asyncio").disabled = True
    raise _Terminated


def main() -> None:
    signal.signal(signal.SIGTERM, _terminate)
    arguments = config_first(sys.argv[1:])
    try:
        make_app(called(arguments))(arguments)
    except SystemExit as end:
        _end_despite_threads(end.code)
        raise


def _end_despite_threads(code: object) -> None:
    """Ends the process at once if a thread still runs: Python would wait for it, and a call to a tier that does not
    answer may never return."""
    threads = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    deadline_s = time.monotonic() + THREADS_END_S
    for thread in threads:
        if not thread.daemon:
            thread.join(max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive():
                with contextlib.suppress(OSError):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(code if isinstance(code, int) else 1)


def config_first(arguments: Sequence[str]) -> list[str]:
    """Moves --config before the verb: `tierd serve --config FILE` means `tierd --config FILE serve`."""
    rest = list(arguments)
    for index, argument in enumerate(rest):
        if argument == "--":
            break
        if argument == "--config" and index + 1 < len(rest):
            return [*rest[index : index + 2], *rest[:index], *rest[index + 2 :]]
        if argument.startswith("--config="):
            return [argument, *rest[:index], *rest[index + 1 :]]
    return rest
