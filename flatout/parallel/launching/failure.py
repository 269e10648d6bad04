"""What a rank wrote to its stderr before it failed, and which of several failures led to the others.

When a rank fails, those that wait for it fail too, within milliseconds and often before it has ended itself. These say
so: their tracebacks end in a collective, or in the backward pass that runs one.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from flatout.tracebacks import is_users_file

HEADER = b"Traceback (most recent call last)"
_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+)', re.MULTILINE)
_DUMPED = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$", re.MULTILINE)
_LONGEST = 300
"""Characters of an exception's line that are shown."""
_OF_TORCH = re.compile(r"^\[rank\d+\]: ?")
"""What torch writes before each line of a rank's traceback."""
_WAITS_FOR_OTHERS = tuple(
    os.sep + os.path.join("torch", *place)
    for place in (("distributed", ""), ("autograd", "graph.py"), ("nn", "parallel", "distributed.py"))
)
TOGETHER_SECONDS = 2.0
"""Failures that are further apart than that are told by their time alone."""


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How a rank ended."""

    rank: int
    machine: int
    status: int | None
    """None: it was killed by the signal."""
    signal: int | None
    seconds_ago: float
    """Since its last traceback, or else since its end."""
    exception: str | None = None
    where: str | None = None
    in_collective: bool = False
    """Does its traceback end where ranks wait for one another?"""

    @property
    def may_follow_from_another(self) -> bool:
        """A rank that is killed, or ends without a traceback, does so for a reason of its own; NCCL's watchdog aborts
        those that wait."""
        return self.in_collective or self.signal == signal.SIGABRT

    @property
    def failed(self) -> bool:
        return self.status != 0

    @property
    def exit_code(self) -> int:
        """As a shell has it."""
        return 128 + self.signal if self.signal is not None else self.status or 0


def first_failure(ends: Sequence[tuple[RankEnd, float]]) -> RankEnd:
    """Of failures with the moments at which they happened, in seconds: the one that led to the others."""
    earliest = min(moment for _, moment in ends)
    together = [one for one in ends if one[1] - earliest < TOGETHER_SECONDS]
    return min(together, key=lambda one: (one[0].may_follow_from_another, one[1], one[0].rank))[0]


def last_exception(stderr: bytes) -> tuple[str | None, str | None, bool]:
    """Of the last traceback: the line with the exception; the line of the user's code; does it end in a collective?"""
    _, header, after = stderr.rpartition(HEADER)
    if not header:
        return None, None, False
    lines = [_OF_TORCH.sub("", line) for line in after.decode(errors="replace").splitlines()[1:]]
    ending = next((place for place, line in enumerate(lines) if line and not line[0].isspace()), None)
    if ending is None:
        return None, None, False
    frames = _FRAME.findall("\n".join(lines[:ending]))
    waited = bool(frames) and any(part in frames[-1][0] for part in _WAITS_FOR_OTHERS)
    return lines[ending].strip()[:_LONGEST], _last_place(frames), waited


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Where a rank's main thread was."""

    where: str | None
    """The line of the user's code that runs, or that has called what runs."""
    in_users_code: bool
    """Is it in that code itself, or in something other than torch that it called: not waiting for another rank?"""


def dumped_stack(stderr: bytes) -> Stack | None:
    """What faulthandler printed last; None: nothing."""
    text = stderr.decode(errors="replace")
    threads = list(_DUMPED.finditer(text))
    if not threads:
        return None
    frames = _FRAME.findall(text[threads[-1].end() :])  # the main thread stands last, the innermost call first
    if not frames:
        return None
    in_torch = any(f"{os.sep}torch{os.sep}" in file for file, _ in _above_users(frames))
    return Stack(where=_last_place(frames[::-1]), in_users_code=not in_torch)


def _above_users(frames: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The calls that the user's innermost frame made."""
    users = [place for place, (file, _) in enumerate(frames) if is_users_file(file)]
    return frames[: users[0]] if users else frames


def _last_place(frames: list[tuple[str, str]]) -> str | None:
    mine = [frame for frame in frames if is_users_file(frame[0])] or frames
    return (
        f"{os.path.relpath(mine[-1][0]) if _is_below(mine[-1][0]) else mine[-1][0]}, line {mine[-1][1]}"
        if mine
        else None
    )


def _is_below(path: str) -> bool:
    return os.path.isabs(path) and os.path.realpath(path).startswith(os.path.realpath(os.getcwd()) + os.sep)
