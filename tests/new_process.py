"""Turn a forked copy of a process into one that Python has just started, but for the modules that it has loaded."""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import functools
import io
import os
import runpy
import signal
import subprocess
import sys
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

ABOVE_ALL = 512
"""No descriptor that a test passes on has so high a number."""


@functools.cache
def python_path() -> list[str]:
    """What `sys.path` is after a start; its first entry is for the place of the program."""
    words = [sys.executable, "-c", "import sys; print('\\n'.join(sys.path))"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.rstrip("\n").split("\n")


def become(
    words: Sequence[str],
    folder: str,
    environment: Mapping[str, str],
    descriptors: Mapping[int, int],
) -> None:
    """Run `python WORDS` in `folder`: [-W ACTION] and `-m MODULE`, `-c CODE` or a script, each with its arguments.

    Returns, or raises, as that ends. descriptors: number there -> number here; it has no others.
    """
    for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    _take(descriptors)
    path = python_path()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.orig_argv[1:] = words
    if words[0] == "-W":
        warnings.simplefilter(words[1])  # type: ignore[arg-type]
        words = words[2:]
    if words[0] == "-m":
        sys.path[:] = [os.getcwd(), *path[1:]]
        sys.argv[:] = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.path[:] = ["", *path[1:]]
        sys.argv[:] = ["-c", *words[2:]]
        _run("<string>", words[1], {})
    else:
        sys.path[:] = [os.path.dirname(os.path.realpath(words[0])), *path[1:]]
        sys.argv[:] = words
        script = os.path.abspath(words[0])
        _run(script, Path(script).read_bytes(), {"__file__": script})


def _run(name: str, source: str | bytes, more: dict[str, str]) -> None:
    """Shows an uncaught exception as Python does: without the lines in this file."""
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(module).update(more, __builtins__=builtins)
    try:
        exec(compile(source, name, "exec", dont_inherit=True), vars(module))
    except Exception as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def _take(descriptors: Mapping[int, int]) -> None:
    """By way of high numbers: one that is wanted may be one that was given."""
    high = {wanted: fcntl.fcntl(given, fcntl.F_DUPFD, ABOVE_ALL) for wanted, given in descriptors.items()}
    for wanted, copy in high.items():
        os.dup2(copy, wanted)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in descriptors:
            with contextlib.suppress(OSError):  # the one that listed them
                os.close(int(name))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)))  # type: ignore[misc]
    error = io.BufferedWriter(io.FileIO(2, "w", closefd=False))
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(error, errors="backslashreplace", line_buffering=True)  # type: ignore[misc]
