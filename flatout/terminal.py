"""Is there a terminal behind a stream, and what may be written to one."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO


class Notice(str):
    """A text of progress that stays to be read, where others are replaced by the next one."""


def is_terminal(stream: object) -> bool:
    """False also for a stream that is None (`>&-`, pythonw), closed, or an object of another kind."""
    try:
        return bool(getattr(stream, "isatty", bool)())
    except (OSError, ValueError):
        return False


def printable(text: str) -> str:
    """In one line, and without control characters: what a script names or says must not drive the reader's terminal."""
    return "".join(letter for letter in text if letter.isprintable())


def harmless(text: str) -> str:
    """The same of a text of several lines, where what cannot be shown is written as an escape, `\\x1b`."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else letter.encode("unicode_escape").decode("ascii")
        for letter in text
    )


def discard(stream: TextIO) -> None:
    """What the stream holds and could not write goes nowhere: Python would fail once more at its own end."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def tell(*lines: str) -> None:
    """On stderr, which may be closed, or a stream of the script's own that lacks this or raises anything."""
    with contextlib.suppress(Exception):
        sys.stderr.writelines(f"{line}\n" for line in lines)
        sys.stderr.flush()
