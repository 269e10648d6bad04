"""A progress bar on stderr for work of many items; nothing is shown where stderr is not a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from flatout.terminal import is_terminal

Show = Callable[[int, str], None]
"""Called with the number of items done and a short description."""


@contextlib.contextmanager
def progress_bar(total: int | None, *, shown: bool = True) -> Iterator[Show]:
    """Yields a function that updates the bar, or does nothing where none is shown. total: None = unknown."""
    if not shown or not is_terminal(sys.stderr):
        yield lambda done, words: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=2) as bar:
        task = bar.add_task("", total=total)
        yield lambda done, words: bar.update(task, completed=done, description=words)
