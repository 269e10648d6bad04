"""Locks on files and folders, held until the process closes the descriptor or dies.

Windows has no such locks on folders: there `lock_now` raises OSError.
"""

from __future__ import annotations

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def lock_now(descriptor: int) -> bool:
    """Take the lock if it is free; False if it is held. Raises OSError if the file system has no locks."""
    if fcntl is None:
        raise OSError("this system has no flock()")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
