"""Which line of the script is running: the innermost frame of its own files."""

from __future__ import annotations

import linecache
import os
import sys
from types import FrameType

from flatout.script.behaviour_seen import SourceLine
from flatout.tracebacks import is_users_file, within

UNKNOWN: SourceLine = ("", 0, "")


def line_number(frame: FrameType) -> int:
    """Of what the frame is at, or else of what comes before it: in Python 3.11 a jump back to the head of a loop may
    have no line, and another thread gets to see little else of loops, which give way there."""
    number: int | None = frame.f_lineno
    if number is not None:
        return number
    before = [line for start, _, line in frame.f_code.co_lines() if line is not None and start <= frame.f_lasti]
    return before[-1] if before else frame.f_code.co_firstlineno


class Places:
    """folder: the script's; files in there are named relative to it."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._users: dict[str, bool] = {}

    def here(self) -> tuple[str, int]:
        """(file, line) of the innermost frame of the script; ('', 0) without one."""
        frame = self.users_frame(sys._getframe(1))
        return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("", 0)

    def callers(self) -> tuple[tuple[str, int], ...]:
        """(file, line) of all frames of the script, the innermost first."""
        found = []
        frame = self.users_frame(sys._getframe(1))
        while frame is not None:
            found.append((frame.f_code.co_filename, frame.f_lineno))
            frame = self.users_frame(frame.f_back)
        return tuple(found)

    def users_frame(self, frame: FrameType | None) -> FrameType | None:
        while frame is not None and not self.is_users(frame.f_code.co_filename):
            frame = frame.f_back
        return frame

    def is_users(self, file: str) -> bool:
        known = self._users.get(file)
        if known is None:
            known = self._users[file] = is_users_file(file)
        return known

    def passes_through(self, ending: str) -> bool:
        """Is a frame of a file with this ending among the callers?"""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename.endswith(ending):
                return True
            frame = frame.f_back
        return False

    def line(self, place: tuple[str, int]) -> SourceLine:
        """With its text; UNKNOWN for ('', 0)."""
        file, number = place
        if not number:
            return UNKNOWN
        return (within(os.path.realpath(file), self.folder), number, linecache.getline(file, number).strip()[:200])
