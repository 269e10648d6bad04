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


def dumped_stack(stderr: bytes) -> tuple[str | None, bool] | None:
    """Of what faulthandler printed last (None: nothing): the line of the user's code that the main thread runs, or that
    has called what it runs; is it in that code, or in something other than torch: not waiting for another rank?"""
    text = stderr.decode(errors="replace")
    threads = list(_DUMPED.finditer(text))
    if not threads:
        return None
    frames = _FRAME.findall(text[threads[-1].end() :])  # the main thread stands last, the innermost call first
    if not frames:
        return None
    in_torch = any(f"{os.sep}torch{os.sep}" in file for file, _ in _above_users(frames))
    return _last_place(frames[::-1]), not in_torch


def _above_users(frames: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The calls that the user's innermost frame made."""
    users = [place for place, (file, _) in enumerate(frames) if is_users_file(file)]
    return frames[: users[0]] if users else frames


def _last_place(frames: list[tuple[str, str]]) -> str | None:
    mine = [frame for frame in frames if is_users_file(frame[0])] or frames
    if not mine:
        return None
    file, line = mine[-1]
    below = os.path.isabs(file) and os.path.realpath(file).startswith(os.path.realpath(os.getcwd()) + os.sep)
    return f"{os.path.relpath(file) if below else file}, line {line}"
