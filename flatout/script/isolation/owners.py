"""Which directories need a layer of their own because of who owns them, for a layer made in a user namespace.

There only this user and one group have a number. Before a file can change, the kernel copies it and every directory
above it, up to the top of its layer, and refuses (EOVERFLOW) what belongs to anybody else. So the user's own directory
below two of root's (/data/projects/me), or one shared by a group, must itself be the top of a layer.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator

from . import mounts

SEARCH_LIMIT = 1000  # directories looked into; a search of the whole disk is not worth a rare EOVERFLOW
SEARCH_DEPTH = 3
NEIGHBOURS_LIMIT = 256


def places(working_directory: str) -> dict[str, bool]:
    """Directories that this user may write in -> is the owner or the group another's? To be called before the user
    namespace is entered, which shows every other owner as nobody."""
    found = {path: _is_foreign(path) for path in sorted({*_around(working_directory), *_search()})}
    return {path: foreign for path, foreign in found.items() if foreign is not None}


def _is_foreign(path: str) -> bool | None:
    """None: this user may not write in it."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    ours = status.st_uid == os.getuid() and status.st_gid == os.getgid()
    if not ours and not os.access(path, os.W_OK | os.X_OK):
        return None
    return not ours


def _around(working_directory: str) -> Iterator[str]:
    """The topmost of the user's own directories on the way here, this directory, and what is foreign directly in it."""
    topmost = path = working_directory
    while (foreign := _is_foreign(path)) is not None and path != "/":
        topmost = path
        if foreign:
            break
        path = os.path.dirname(path)
    yield from {topmost, working_directory}
    for child in mounts.child_directories(working_directory)[:NEIGHBOURS_LIMIT]:
        if _is_foreign(child):
            yield child


def _search() -> Iterator[str]:
    """Breadth first through directories that are not the user's, down to the first that are, or are open to all."""
    skipped = (*mounts.KERNEL_TREES, *mounts.SYSTEM_TREES)
    queue = deque((child, 1) for child in mounts.child_directories("/") if child not in skipped)
    for _ in range(SEARCH_LIMIT):
        if not queue:
            return
        directory, depth = queue.popleft()
        if _is_foreign(directory) is not None:
            yield directory
        elif depth < SEARCH_DEPTH:
            queue.extend((child, depth + 1) for child in mounts.child_directories(directory))
