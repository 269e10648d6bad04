"""The command that starts a process of ours from a folder of the user's.

`python -m` would look for Flatout's own imports there first: a user's json.py would be imported instead of Python's.
The console script looks in its own folder first, and so does this.
"""

from __future__ import annotations

import sys

START = """
import os, runpy, sys
if not sys.flags.safe_path:
    sys.path[0] = os.path.dirname(sys.executable)
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def child_command(module: str, *arguments: str) -> list[str]:
    """Run `module` as `__main__` with these arguments, in this Python."""
    return [sys.executable, "-c", START, module, *arguments]
