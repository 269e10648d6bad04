"""A trial runs a stranger's script and must change none of the user's files.

Two ways to keep that promise, the better one first:

    overlay   a private mount namespace in which every writable place is copy-on-write: the script writes, appends,
              deletes and renames as it likes, sees its own changes, and nothing of them reaches the real files
    guard     where the kernel refuses that: the script may only read, and is stopped before its first write

>>> isolation = enter(scratch, on_first_write=report_and_exit)      # in the trial's process, before anything else
>>> isolation.mode, isolation.reason
('overlay', 'a private mount namespace, made as root')
>>> cleanup(scratch)                                                # in the parent, after that process has ended
"""

from __future__ import annotations

from .explain import explain_failure
from .guard import guard_torch
from .modes import Isolation, enter, probe
from .scratch import cleanup

__all__ = ["Isolation", "cleanup", "enter", "explain_failure", "guard_torch", "probe"]
