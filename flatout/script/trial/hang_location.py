"""Where a script is that answers nothing: on a signal its process writes its stacks, and the parent reads its own line.

    dump_on_signal(folder / STACKS)                        # in the script's process
    location(process_id, folder / STACKS, target.folder)   # in the parent: 'train.py:92 in evaluate'

The handler is faulthandler's, which needs no interpreter lock: a script that hangs in native code is located too. It
costs nothing until the signal comes, and the process is ended after that, so what its script does about interrupted
system calls does not matter.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil

from flatout.tracebacks import is_users_file, within

STACKS = "stacks"
WRITE_SECONDS, POLL_SECONDS = 2.0, 0.02
_FRAME = re.compile(r' {2}File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_open: list[IO[str]] = []
"""The handler has only the file's number, so the file must stay open."""


def dump_on_signal(path: Path) -> None:
    """From here on this process, and what it forks, writes its stacks there on the signal."""
    _open.append(path.open("w", encoding="utf-8"))
    faulthandler.register(_signal_number(), file=_open[-1], all_threads=True)


def location(process_id: int, path: Path, folder: str) -> str:
    """'train.py:92 in evaluate': the innermost line of the user's in the main thread; '' where that is unknown.

    process_id: the process that writes to `path`, or one that it descends from. folder: the script's."""
    with suppress(psutil.Error, OSError):
        for process in _with_handler(process_id):
            os.kill(process, _signal_number())
        return innermost_line(_written(path), folder)
    return ""


def innermost_line(stacks: str, folder: str) -> str:
    """stacks: as faulthandler writes them, each with its innermost frame first, and the main thread's last."""
    for line in stacks[stacks.rfind("hread 0x") :].splitlines():
        if (frame := _FRAME.match(line)) and is_users_file(frame["file"]):
            function = "" if frame["function"] == "<module>" else f" in {frame['function']}"
            return f"{within(os.path.realpath(frame['file']), os.path.realpath(folder))}:{frame['line']}{function}"
    return ""


def _signal_number() -> int:
    """A real-time signal that neither the C library nor a launcher uses."""
    return signal.SIGRTMAX - 3  # not at import: Windows has none


def _with_handler(process_id: int) -> list[int]:
    """Of this process and its descendants those that handle the signal, which would end the others. What they have
    forked shares their file, and is left out."""
    if _handles_signal(process_id):
        return [process_id]
    return [found for child in psutil.Process(process_id).children() for found in _with_handler(child.pid)]


def _handles_signal(process_id: int) -> bool:
    status = Path(f"/proc/{process_id}/status").read_text(encoding="utf-8", errors="replace")
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (_signal_number() - 1) & 1)


def _written(path: Path) -> str:
    """The file, once it no longer grows."""
    until, size = time.monotonic() + WRITE_SECONDS, -1
    while time.monotonic() < until and not 0 < path.stat().st_size == size:
        size = path.stat().st_size
        time.sleep(POLL_SECONDS)
    return path.read_text(encoding="utf-8", errors="replace")
