"""The status lines on a real pseudo-terminal: they are given back however the process ends."""

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

from flatout.report import live

GIVEN_BACK = b"\x1b[r"
PROGRAM = """
import os, sys, time, signal
from flatout.report import live
live.REFRESH_SECONDS, drawn = 0.01, []
def lines(columns, most):
    drawn.append(1)
    return ["one moment", "\x1b]0;owned\x07second\x9b2J \u202e line", "third"][: min(most, {lines})]
line = live.Panel(2, lines)
line.start()
while len(drawn) < 2:  # then the first stands on the terminal
    time.sleep(0.01)
live.REFRESH_SECONDS = 30  # how long stop() waits for the thread
{ending}
"""


def on_terminal(ending: str, lines: int = 3, rows: int = 24) -> tuple[bytes, int]:
    """What a terminal gets from a program with status lines, and the program's end."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, 80, 0, 0))
    code = PROGRAM.format(ending=ending, lines=lines)
    program = subprocess.Popen([sys.executable, "-c", code], stdout=slave, stderr=slave)
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
def test_the_lines_are_given_back(ending: str, status: int) -> None:
    seen, ended = on_terminal(ending)
    assert ended == status
    assert b"one moment" in seen
    assert seen.count(GIVEN_BACK) == 1
    assert seen[seen.index(GIVEN_BACK) :].count(b"\x1b[2K") == 3
    assert b"\x1b[1;21r" in seen


@pytest.mark.parametrize("rows", [4, 15])
def test_a_low_terminal_gives_one_line(rows: int) -> None:
    seen, _ = on_terminal("os._exit(0)", rows=rows)
    assert f"\x1b[1;{rows - 1}r".encode() in seen
    assert b"second" not in seen
    assert seen[seen.index(GIVEN_BACK) :].count(b"\x1b[2K") == 1


def test_control_codes_in_a_text_never_reach_the_terminal() -> None:
    seen, _ = on_terminal("line.stop()")
    assert b"]0;ownedsecond2J  line" in seen
    assert b"\x07" not in seen
    assert "\u202e".encode() not in seen
    assert "\x9b".encode() not in seen


def test_a_defect_of_ours_prints_no_traceback_into_the_scripts_output() -> None:
    seen, ended = on_terminal("line._lines = None\nlive.REFRESH_SECONDS = 0.01\ntime.sleep(0.2)\nline.stop()")
    assert ended == 0
    assert b"Traceback" not in seen
    assert seen.count(GIVEN_BACK) == 1


def test_lines_grow_upwards_and_stay_while_the_terminal_keeps_its_size() -> None:
    panel, heights = live.Panel(-1, lambda columns, most: [""]), []
    panel._lifeline = -1, -1
    for lines in (1, 2, 1, 3):
        heights.append((panel._take(24, 80, lines), panel._height))
    assert [height for _, height in heights] == [1, 2, 2, 3]
    assert heights[0][0] == "\x1bD\x1b[1A\x1b7\x1b[1;23r\x1b8"
    assert heights[1][0] == "\x1b7\x1b[24;1H\x1b[2K\x1b8\x1bD\x1b[1A\x1b7\x1b[1;22r\x1b8"
    assert heights[2][0] == ""
    assert panel._take(30, 80, 1).endswith("\x1b[1;29r\x1b8")


def test_a_program_that_waits_for_its_children_meets_none() -> None:
    _, ended = on_terminal("try:\n    os.wait()\nexcept ChildProcessError:\n    line.stop(); sys.exit(5)")
    assert ended == 5
