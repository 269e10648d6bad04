"""The processes that a process has started, and all that these have started."""

from __future__ import annotations

from contextlib import suppress

import psutil


def descendants(pid: int | None = None) -> list[psutil.Process]:
    """Those that run now. pid: None: of this process. Raises psutil.NoSuchProcess where that one has ended."""
    root = psutil.Process(pid)
    found: list[psutil.Process] = []
    with suppress(psutil.AccessDenied):
        found = root.children(recursive=True)
        return found
    # psutil finds none of them where /proc lists processes of other users that may not be read (hidepid=1).
    parents: dict[int, int] = {}
    for number in psutil.pids():
        with suppress(psutil.Error):
            parents[number] = psutil.Process(number).ppid()
    numbers = [root.pid]
    for parent in numbers:
        numbers += [child for child, above in parents.items() if above == parent]
    for number in numbers[1:]:
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(number))
    return found
