"""A trial runs a user's script and must leave nothing behind: no file, no process, nothing sent elsewhere.

Two ways to keep the user's files as they are, the better one first:

    overlay   a private mount namespace in which every writable place is copy-on-write: the script writes, appends,
              deletes and renames as it likes, sees its own changes, and nothing of them reaches the real files
    guard     where the kernel refuses that: the script may only read, and is stopped before its first write

In both the script has its own loopback interface and no other network, unless that is allowed, and what it starts ends
with it: in a PID namespace, or killed by a supervising process (processes.py).

>>> isolation = enter(scratch, on_first_write=report_and_exit)      # in the trial's process, before anything else
>>> isolation.mode, isolation.reason
('overlay', 'a private mount namespace, made as root')
>>> cleanup(scratch)                                                # in the parent, after that process has ended
"""

from __future__ import annotations

from .explain import explain_failure
from .guard import guard_torch, note_writes, redirect_temporary_files
from .modes import Isolation, enter
from .scratch import cleanup

__all__ = ["Isolation", "cleanup", "enter", "explain_failure", "guard_torch", "note_writes", "redirect_temporary_files"]
