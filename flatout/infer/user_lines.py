"""Which line of the user's own code an exception came from: not torch's, not another library's, not ours.

>>> try:
...     exec(compile("[][0]", "net.py", "exec"))
... except IndexError as error:
...     user_line(error)
'net.py, line 1'
"""

from __future__ import annotations

import linecache
from pathlib import Path

from flatout.tracebacks import is_users_file

_MODELS = str(Path(__file__).parents[1] / "models") + "/"
"""To an exporter, our own models are like a user's."""


def is_users(file: str) -> bool:
    """Is this source file the user's, or that of one of our models?"""
    path = file if file.startswith("<") else str(Path(file).absolute())
    return path.startswith(_MODELS) or is_users_file(path)


def user_line(error: BaseException) -> str | None:
    """'net.py, line 12: y = x[0]' for the innermost frame that is the user's; None if none is.

    If it has none, its causes are searched: an exporter often raises a new exception.
    """
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        if found := _innermost(one):
            return found
        one = one.__cause__ or one.__context__
    return None


def _innermost(error: BaseException) -> str | None:
    found = None
    traceback = error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if is_users(file):
            found = place(file, traceback.tb_lineno)
        traceback = traceback.tb_next
    return found


def place(file: str, line: int) -> str:
    """A line of a file as text, with its code if readable; the path is relative to the current folder if inside it."""
    path = Path(file)
    shown = path.relative_to(Path.cwd()) if path.is_absolute() and path.is_relative_to(Path.cwd()) else path
    code = linecache.getline(file, line).strip()
    return f"{shown}, line {line}" + (f": {code}" if code else "")
