"""Where results are to be written."""

from __future__ import annotations

from pathlib import Path

from flatout.errors import UsageError


def check_place(out: Path) -> None:
    """UsageError for a file that cannot be written there: minutes of work must not end in that."""
    if out.is_dir() or not out.absolute().parent.is_dir():
        what = f"{out} is a folder" if out.is_dir() else f"there is no folder {out.absolute().parent}"
        raise UsageError(what, limit="results are written to a file", remedy="name another with --out")
