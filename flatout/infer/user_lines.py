"""Which line of the user's own code an exception came from: not torch's, not another library's, not ours.

>>> try:
...     exec(compile("[][0]", "net.py", "exec"))
... except IndexError as error:
...     user_line(error)
'net.py, line 1'
"""

from __future__ import annotations

import linecache
import sysconfig
from pathlib import Path

_PACKAGE = str(Path(__file__).resolve().parents[1]) + "/"
_OURS_YET_A_MODEL = _PACKAGE + "models/"
"""To an exporter, our own models are the user's code."""
_LIBRARIES = tuple({str(Path(folder)) + "/" for folder in sysconfig.get_paths().values()})


def is_users(file: str) -> bool:
    """Whether this source file is the user's: not a library's, not Flatout's, not generated at run time."""
    if file.startswith("<") or "/site-packages/" in file or "/dist-packages/" in file:
        return False
    path = str(Path(file).absolute())
    return path.startswith(_OURS_YET_A_MODEL) or not path.startswith((_PACKAGE, *_LIBRARIES))


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
