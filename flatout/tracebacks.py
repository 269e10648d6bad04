"""Tracebacks that show the script's frames and torch's, and none of ours.

Our wrappers are between the script and torch, so exceptions pass through them; a reader should not look for the cause
there.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import TracebackType

_PACKAGE = str(Path(__file__).parent) + "/"
"""As frames name it: links in the path are not resolved there either."""
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + "/"
_INSTALLED = re.compile(r".*/(?:site|dist)-packages/([^/]+)")
_IMPORT_MACHINERY = "<frozen importlib."
_DISPATCH = "__torch_dispatch__"
_AROUND_DISPATCH = ("/torch/_compile.py", "/torch/_dynamo/eval_frame.py")
_OPERATION = "/torch/_ops.py"
"""torch's own frames that are there only because we follow its operations."""


def is_users_file(file: str) -> bool:
    """Is this source file the user's: not Flatout's, no library's, and no code made at run time?"""
    own = bool(file) and not file.startswith(("<", _PACKAGE, _STANDARD_LIBRARY))
    return own and installed_package(file) is None


def installed_package(file: str) -> str | None:
    """'click', for a file below a folder site-packages or dist-packages."""
    found = _INSTALLED.match(file)
    return None if found is None else found[1]


def leave_no_frame(error: BaseException) -> None:
    """For a wrapper that catches and re-raises: a script that prints the traceback sees no wrapper."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        trace = trace.tb_next
    error.__traceback__ = trace


def own_frames_removed(error: BaseException) -> BaseException:
    """Drop the frames of this package from `error` and from the exceptions that led to it; returns `error`."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = _filtered(one.__traceback__)
        todo += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            todo += one.exceptions
    return error


def _filtered(traceback: TracebackType | None) -> TracebackType | None:
    frames: list[TracebackType] = []
    after_ours = after_dispatch = False
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if file.startswith(_PACKAGE):
            after_ours = True
            while frames and _of_import(frames[-1]):  # Python hides these too, but for our frame between them
                frames.pop()
            if traceback.tb_frame.f_code.co_name == _DISPATCH:
                after_dispatch = True
                while frames and frames[-1].tb_frame.f_code.co_filename.endswith(_AROUND_DISPATCH):
                    frames.pop()
        elif after_dispatch and file.endswith(_OPERATION):
            pass
        elif not (after_ours and _of_import(traceback)):
            after_ours = after_dispatch = False
            frames.append(traceback)
        traceback = traceback.tb_next
    rebuilt: TracebackType | None = None
    for entry in reversed(frames):
        rebuilt = TracebackType(rebuilt, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return rebuilt


def _of_import(traceback: TracebackType) -> bool:
    return traceback.tb_frame.f_code.co_filename.startswith(_IMPORT_MACHINERY)


def within(place: str, folder: str) -> str:
    """A file, or a line of one, relative to the folder where it is in there."""
    start = folder.rstrip(os.sep) + os.sep
    return place.removeprefix(start) if folder and place.startswith(start) else place
