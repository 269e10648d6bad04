"""Turn a forked copy of a process into one that Python has just started, but for the modules that it has loaded."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import functools
import gc
import importlib
import io
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn


@functools.cache
def python_path() -> list[str]:
    """What `sys.path` is after a start without pytest; its first entry is for the place of the program."""
    words = [sys.executable, "-c", "import sys; print('\\n'.join(sys.path))"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.rstrip("\n").split("\n")


def become(
    words: Sequence[str],
    streams: Sequence[int],
    pass_fds: Sequence[int],
    environment: Mapping[str, str],
    path: Sequence[str],
) -> NoReturn:
    """Run `python WORDS` here, `-m MODULE ...` or a script, and end. path: see `python_path`."""
    status = 1
    try:
        _forget_the_test()
        os.setsid()
        _take_streams(streams, pass_fds)
        os.environ.clear()
        os.environ.update(environment)
        _run(words, path)
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)


def _run(words: Sequence[str], path: Sequence[str]) -> None:
    sys.orig_argv[1:] = words
    if words[0] != "-m":
        sys.path[:] = [os.path.dirname(os.path.realpath(words[0])), *path[1:]]
        sys.argv[:] = words
        _run_script(os.path.abspath(words[0]))
        return
    sys.path[:] = [os.getcwd(), *path[1:]]
    sys.argv[:] = words[1:]
    sys.modules.pop(words[1], None)  # or runpy warns of it
    runpy.run_module(words[1], run_name="__main__", alter_sys=True)


def _run_script(path: str) -> None:
    """Shows an uncaught exception as Python does: without the lines in this file."""
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(module).update(__file__=path, __builtins__=builtins)
    try:
        exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), vars(module))
    except Exception as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def _forget_the_test() -> None:
    """What the test's process set up for itself, and a new process has not."""
    atexit._clear()
    for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    importlib.reload(warnings)  # pytest collects them
    sys.excepthook, sys.unraisablehook, threading.excepthook = (
        sys.__excepthook__,
        sys.__unraisablehook__,
        threading.__excepthook__,
    )
    gc.freeze()  # no collection walks through the test's objects, nobody finds them among what the script holds


def _take_streams(streams: Sequence[int], pass_fds: Sequence[int]) -> None:
    for number, descriptor in enumerate([os.dup(one) for one in streams]):
        os.dup2(descriptor, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in pass_fds:
            with contextlib.suppress(OSError):  # the one that listed them
                os.close(int(name))
    for descriptor in pass_fds:
        os.set_inheritable(descriptor, True)
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0)))  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w")))  # type: ignore[misc]
    error = io.BufferedWriter(io.FileIO(2, "w"))
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(error, errors="backslashreplace", line_buffering=True)  # type: ignore[misc]
