"""Locks on files and folders that their process holds until it closes the descriptor, or dies.

Windows has no such locks on folders: there nothing is held, and `lock_now` says that it cannot tell.
"""

from __future__ import annotations

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def lock_now(descriptor: int) -> bool:
    """Take the lock if nobody holds it; False where somebody does. OSError where the file system knows no locks."""
    if fcntl is None:
        raise OSError("this system has no flock()")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
