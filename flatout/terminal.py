"""Is there a terminal behind a stream?"""

from __future__ import annotations


def is_terminal(stream: object) -> bool:
    """False also for a stream that is None (`>&-`, pythonw), closed, or an object of another kind."""
    try:
        return bool(getattr(stream, "isatty", bool)())
    except (OSError, ValueError):
        return False
