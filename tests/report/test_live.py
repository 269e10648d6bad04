"""The status line on a real pseudo-terminal: it takes one line, and gives it back however the process ends."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time

import pytest

GIVEN_BACK = b"\x1b[r"
PROGRAM = """
import os, sys, time, signal
from flatout.report import live
live.REFRESH_SECONDS, drawn = 0.01, []
line = live.StatusLine(2, lambda: drawn.append(1) or "one moment")
line.start()
while len(drawn) < 2:  # then the first stands on the terminal
    time.sleep(0.01)
live.REFRESH_SECONDS = 30  # how long stop() waits for the thread
{ending}
"""


def on_terminal(ending: str) -> tuple[bytes, int]:
    """What a terminal gets from a program with a status line, and the program's end."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    program = subprocess.Popen([sys.executable, "-c", PROGRAM.format(ending=ending)], stdout=slave, stderr=slave)
    os.close(slave)
    seen, deadline = b"", time.monotonic() + 200
    while time.monotonic() < deadline:
        if not select.select([master], [], [], 0.1)[0]:
            if program.poll() is not None and GIVEN_BACK in seen:
                break
            continue
        try:
            seen += os.read(master, 4096)
        except OSError:  # nobody holds the other end any more
            break
    os.close(master)
    return seen, program.wait(timeout=200)


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("line.stop()", 0),
        ("os._exit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("os.kill(os.getpid(), signal.SIGTERM)", -15),
    ],
)
def test_the_line_is_given_back(ending: str, status: int) -> None:
    seen, ended = on_terminal(ending)
    assert ended == status
    assert b"one moment" in seen
    assert seen.count(GIVEN_BACK) == 1


def test_a_program_that_waits_for_its_children_meets_none() -> None:
    _, ended = on_terminal("try:\n    os.wait()\nexcept ChildProcessError:\n    line.stop(); sys.exit(5)")
    assert ended == 5
