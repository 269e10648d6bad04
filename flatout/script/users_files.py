"""Which source files are the user's: not Python's, not an installed package's, not Flatout's."""

from __future__ import annotations

import os
from pathlib import Path

_OTHERS = ("<", str(Path(__file__).parents[1]) + os.sep, os.path.dirname(os.__file__) + os.sep)


def is_users_file(file: str) -> bool:
    """file: as in a code object; '<string>' is no file."""
    return bool(file) and not file.startswith(_OTHERS) and "-packages" + os.sep not in file
