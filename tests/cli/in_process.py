"""The verbs that run scripts in processes of their own, called in this one: torch need not be loaded once more."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from flatout.__main__ import main


@dataclass(frozen=True)
class Said:
    """What a verb left: its exit code and its words."""

    returncode: int
    stdout: str
    stderr: str


def said_by(folder: Path, *words: str, stdin: str | None = None) -> Said:
    """`flatout WORDS` in `folder`, with a file of `stdin` as its input, or nothing to read; not for a `run`
    that is not only checked: its script runs in the same process."""
    assert words[0] != "run" or "--check-deterministic" in words
    out, err = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        given = stack.enter_context(_input(stdin))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.chdir(folder)
        patch.setattr("sys.stdin", given)
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        code = main(words)
    return Said(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())


@contextlib.contextmanager
def _input(text: str | None) -> Iterator[IO[str]]:
    if text is None:
        with open(os.devnull) as nothing:
            yield nothing
        return
    with tempfile.TemporaryFile("w+") as given:
        given.write(text)
        given.seek(0)
        yield given
