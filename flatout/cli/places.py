"""Where results are to be written."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from flatout.errors import UsageError


def check_place(out: Path) -> None:
    """UsageError for a file that cannot be written there: minutes of work must not end in that."""
    if out.is_dir() or not out.absolute().parent.is_dir():
        what = f"{out} is a folder" if out.is_dir() else f"there is no folder {out.absolute().parent}"
        raise UsageError(what, limit="results are written to a file", remedy="name another with --out")


def check_no_input(out: Path, inputs: Iterable[Path], what: str) -> None:
    """UsageError if what is written would replace a file that is only read. what: to be written, such as 'the page'."""
    for one in inputs:
        if out.exists() and one.exists() and out.samefile(one):
            raise UsageError(
                f"--out is {out}", limit=f"{what} would replace a file that is only read", remedy="name another file"
            )
