"""What the user's own code prints while a verb of ours runs it: to stderr, as stdout is for the verb's answer."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Also what code in C and other processes write, which know the descriptor alone."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or replaced
        sys.stdout.flush()
    kept: int | None = None
    with contextlib.suppress(OSError):  # a descriptor is closed (`>&-`)
        kept = os.dup(1)
        os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if kept is not None:
            os.dup2(kept, 1)
            os.close(kept)
