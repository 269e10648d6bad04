"""Which line of the user's own code an exception came from: not torch's, not another library's, not ours.

>>> try:
...     exec(compile("[][0]", "net.py", "exec"))
... except IndexError as error:
...     user_line(error)
'net.py, line 1'
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from pathlib import Path
from traceback import walk_tb

from flatout.tracebacks import is_users_file

_MODELS = str(Path(__file__).parents[1] / "models") + "/"
"""To an exporter, our own models are like a user's."""


def is_users(file: str) -> bool:
    """Is this source file the user's, or that of one of our models?"""
    path = file if file.startswith("<") else str(Path(file).absolute())
    return path.startswith(_MODELS) or is_users_file(path)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, what it came of, what that came of, and so on."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def user_line(error: BaseException) -> str | None:
    """'net.py, line 12: y = x[0]' for the innermost frame that is the user's; None if none is.

    If it has none, its causes are searched: an exporter often raises a new exception.
    """
    return next((found for one in causes(error) if (found := _innermost(one))), None)


def _innermost(error: BaseException) -> str | None:
    found = None
    for frame, line in walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if is_users(file):
            found = place(file, line)
    return found


def place(file: str, line: int) -> str:
    """A line of a file as text, with its code if readable; the path is relative to the current folder if inside it."""
    path = Path(file)
    shown = path.relative_to(Path.cwd()) if path.is_absolute() and path.is_relative_to(Path.cwd()) else path
    code = linecache.getline(file, line).strip()
    return f"{shown}, line {line}" + (f": {code}" if code else "")
